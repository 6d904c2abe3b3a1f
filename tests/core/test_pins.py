"""Operators' pins: their sums are right whatever comes and goes, and their ends are kept."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.counters import Cause
from kvstore.table import Tier
from tests.core.parts import Core, core, flat_namespace
from tests.core.scale import examples

VERBS = ("store", "pin", "pin", "unpin", "to_ssd", "evict", "leave_ssd", "drop", "drop_all", "time", "delete")

steps = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5), st.integers(1, 20)), max_size=60)


def take(parts: Core, verb: str, key: int, seconds: int) -> None:
    """Do one step to the block of a key: even ones are of one namespace, odd ones of another."""
    catalog = parts.catalog
    tenancy = parts.tenancy(flat_namespace(4096 * (1 + key % 2)), tenant="us")
    row = next(iter([r for r in tenancy.rows.values() if r % 3 == key % 3]), None)
    match verb:
        case "store":
            parts.store(tenancy, [key])
        case "drop_all":
            catalog.drop_all(tenancy)
            catalog.reclaim(100)
        case "time":
            parts.clock.advance(seconds)
            catalog.end_pins()
        case "delete":
            parts.delete_departed()
        case _ if row is None:
            return
        case "pin":
            catalog.pins.pin(row, parts.now_s() + seconds)
        case "unpin":
            catalog.pins.unpin(row)
        case "to_ssd" if not catalog.table.state[Tier.SSD][row]:
            parts.copy_to_ssd(row, catalog.table.generation[row])
        case "evict" | "leave_ssd":
            tier = Tier.CPU if verb == "evict" else Tier.SSD
            if catalog.is_evictable(row, tier):
                catalog.leave(row, tier, Cause.PRESSURE)
        case "drop":
            catalog.drop(row, Cause.DROP)
        case _:
            pass


@settings(max_examples=examples(60), deadline=None)
@given(steps=steps)
def test_the_sums_of_pins_are_those_of_the_blocks(steps: Sequence[tuple[str, int, int]]) -> None:
    with core(with_ssd=True) as parts:
        for verb, key, seconds in steps:
            take(parts, verb, key, seconds)
            parts.catalog.check_integrity()
            assert all(ends_s > parts.now_s() for ends_s in parts.catalog.pinned.values()) or verb != "time"


def test_a_pin_that_was_renewed_ends_at_its_new_end_only() -> None:
    with core() as parts:
        (row,) = parts.store(parts.tenancy(), [1])
        pins = parts.catalog.pins
        pins.pin(row, parts.now_s() + 10)
        pins.pin(row, parts.now_s() + 100)
        pins.end(parts.now_s() + 50)
        assert row in parts.catalog.pinned
        pins.pin(row, parts.now_s() + 60)
        pins.end(parts.now_s() + 60)
        assert row not in parts.catalog.pinned
        assert pins.size_bytes[Tier.CPU] == 0


def test_what_is_pinned_already_is_not_counted_twice() -> None:
    with core() as parts:
        tenancy = parts.tenancy()
        rows = parts.store(tenancy, [1, 2, 3])
        parts.catalog.pins.pin(rows[0], parts.now_s() + 10)
        assert parts.catalog.pins.would_take({rows[0], rows[1]}, Tier.CPU) == 2 * tenancy.slot_bytes
