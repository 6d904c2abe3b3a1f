"""Lives that slide: a use gives a block its namespace's life anew, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.clock import ManualClock
from kvstore.store import Store, StoreSettings
from kvstore.table import NEVER_S
from kvstore.tiers.disk_time import DirectoryTime
from tests.core.parts import MIB, Core, core, flat_namespace, hash_of, hashes_of
from tests.core.scale import examples
from tests.stores import kept_going, stored_durably

TTL_S = 64.0


@pytest.fixture
def parts() -> Iterator[Core]:
    with core(sliding=True) as parts:
        yield parts


def seal(parts: Core, keys: list[int], ttl_s: float | None) -> list[int]:
    ticket, _ = parts.reserve(parts.session(), parts.tenancy(ttl_s=TTL_S), keys)
    return parts.puts.seal(ticket, None, (), ttl_s).rows


def is_there(parts: Core, key: int) -> bool:
    return parts.catalog.find(parts.tenancy(ttl_s=TTL_S), hash_of(key)) is not None


def test_a_block_in_use_stays_and_one_that_is_not_goes(parts: Core) -> None:
    used, unused = seal(parts, [1, 2], None)
    for _ in range(10):
        parts.clock.advance(TTL_S - 1)
        parts.catalog.use([used])
    assert is_there(parts, 1)
    assert not is_there(parts, 2)
    assert parts.catalog.table.hash[unused] is None
    parts.clock.advance(TTL_S)
    assert not is_there(parts, 1)


@pytest.mark.parametrize("ttl_s", [TTL_S, 0.0])
def test_a_life_that_its_writer_gave_is_not_moved(parts: Core, ttl_s: float) -> None:
    (row,) = seal(parts, [1], ttl_s)
    end_s = parts.catalog.table.expires_s[row]
    parts.clock.advance(TTL_S / 2)
    parts.catalog.use([row])
    assert parts.catalog.table.expires_s[row] == end_s


def test_a_life_that_an_operator_gave_is_not_moved(parts: Core) -> None:
    (row,) = seal(parts, [1], None)
    parts.catalog.set_ttl(row, 10.0)
    parts.catalog.use([row])
    parts.clock.advance(10.0)
    assert not is_there(parts, 1)


def test_a_use_that_comes_too_late_wakes_nothing(parts: Core) -> None:
    (row,) = seal(parts, [1], None)
    parts.clock.advance(TTL_S)
    parts.catalog.use([row])
    assert not is_there(parts, 1)


def test_without_the_mode_a_life_counts_from_the_write() -> None:
    with core() as parts:
        (row,) = seal(parts, [1], None)
        parts.clock.advance(TTL_S - 1)
        parts.catalog.use([row])
        parts.clock.advance(1)
        assert not is_there(parts, 1)


def test_the_namespaces_life_of_today_counts(parts: Core) -> None:
    (row,) = seal(parts, [1], None)
    parts.clock.advance(1)
    parts.tenancy(ttl_s=5.0)
    parts.catalog.use([row])
    assert parts.catalog.table.expires_s[row] == parts.now_s() - 1 + TTL_S, "an end is never brought forward"
    parts.tenancy(ttl_s=0.0)
    parts.catalog.use([row])
    assert parts.catalog.table.expires_s[row] == NEVER_S


def test_a_row_that_another_block_has_now_slides_as_that_one_does(parts: Core) -> None:
    (row,) = seal(parts, [1], None)
    parts.clock.advance(TTL_S)
    assert not is_there(parts, 1)
    (again,) = seal(parts, [2], TTL_S)
    assert again == row
    parts.clock.advance(1)
    parts.catalog.use([again])
    parts.clock.advance(TTL_S - 1)
    assert not is_there(parts, 2)


steps = st.lists(
    st.tuples(st.sampled_from(["seal", "seal_fixed", "use", "set", "time"]), st.integers(0, 3), st.integers(1, 40)),
    max_size=40,
)


@settings(max_examples=examples(80), deadline=None)
@given(steps=steps, sliding=st.booleans())
def test_every_block_ends_when_a_model_says(steps: list[tuple[str, int, int]], sliding: bool) -> None:
    with core(sliding=sliding) as parts:
        ends: dict[int, tuple[float, bool]] = {}  # key -> end, whether it slides
        for verb, key, seconds in steps:
            now_s = parts.now_s()
            ends = {k: (end_s, slides) for k, (end_s, slides) in ends.items() if end_s > now_s}
            row = parts.tenancy(ttl_s=TTL_S).rows.get(hash_of(key))
            if verb == "time":
                parts.clock.advance(seconds)
                parts.catalog.expire(100)
            elif verb in ("seal", "seal_fixed") and key not in ends:
                seal(parts, [key], float(seconds) if verb == "seal_fixed" else None)
                ends[key] = now_s + (seconds if verb == "seal_fixed" else TTL_S), sliding and verb == "seal"
            elif row is not None and key in ends and verb == "use":
                parts.catalog.use([row])
                if ends[key][1]:
                    ends[key] = now_s + TTL_S, True
            elif row is not None and key in ends and verb == "set":
                parts.catalog.set_ttl(row, seconds)
                ends[key] = now_s + seconds, False
            there = {k for k, (end_s, _) in ends.items() if end_s > parts.now_s()}
            assert {k for k in range(4) if is_there(parts, k)} == there
        parts.clock.advance(1000)
        parts.catalog.expire(10_000)
        parts.clock.advance(1000)
        parts.catalog.expire(10_000)
        assert not parts.tenancy().rows, "whoever asks for nothing finds them gone, too"


def test_what_was_over_before_the_kernel_began_is_over_and_slides_no_more() -> None:
    clock = ManualClock(5000.0)
    before = DirectoryTime(clock, "one", None)
    anchor, fixed, sliding = before.anchor(), before.to_directory_s(5010.0), before.to_directory_s(-5010.0)
    assert (fixed, sliding) == (5010.0, -5010.0)
    assert (before.to_boottime_s(fixed), before.to_boottime_s(sliding)) == (5010.0, -5010.0)
    clock.advance(-4990.0)  # a new kernel, ten seconds old; wall time has gone on by an hour
    clock.wall_offset_s += 4990.0 + 3600.0
    after = DirectoryTime(clock, "two", anchor)
    assert after.to_boottime_s(fixed) == after.to_boottime_s(sliding) == 0.0
    assert after.to_boottime_s(-NEVER_S) == -NEVER_S


def test_lives_slide_on_over_a_restart(tmp_path: Path) -> None:
    """Ends that uses have moved are written at a checkpoint; what its writer ended still ends then."""
    clock = ManualClock()

    def opened(mode: str) -> StoreSettings:
        return StoreSettings(
            cpu_size_bytes=8 * MIB, ssd_size_bytes=32 * MIB, ssd_dir=tmp_path, ttl_s=TTL_S, ttl_mode=mode
        )

    async def run() -> None:
        space, blocks = flat_namespace(4096), hashes_of(range(4))
        async with kept_going(opened("access"), clock) as store:
            tenancy = store.tenancy("t", space)
            assert await stored_durably(store, tenancy, blocks[:3])
            ticket, _ = store.puts.reserve(store.open_session("t", admin=True), tenancy, blocks[3:], 0.0)
            rows = store.puts.seal(ticket, None, (), TTL_S).rows
            assert await store.make_durable(rows, 30.0) == [True]
            clock.advance(TTL_S / 2)
            store.catalog.use([tenancy.rows[blocks[0]], tenancy.rows[blocks[3]]])
            await store.checkpoint()
            assert not store.catalog.lives.moved
        clock.advance(TTL_S / 2)
        async with kept_going(opened("access"), clock) as store:
            assert there(store, blocks) == [True, False, False, False]
            clock.advance(TTL_S / 4)
            store.catalog.use([store.tenancy("t", space).rows[blocks[0]]])
            await store.checkpoint()
        clock.advance(TTL_S / 2)
        async with kept_going(opened("write"), clock) as store:
            assert there(store, blocks) == [True, False, False, False]
            store.catalog.use([store.tenancy("t", space).rows[blocks[0]]])
            clock.advance(TTL_S / 2)
            assert there(store, blocks) == [False] * 4, "this daemon moves no end"

    def there(store: Store, blocks: list[bytes]) -> list[bool]:
        tenancy = store.tenancy("t", flat_namespace(4096))
        return [store.catalog.find(tenancy, block_hash) is not None for block_hash in blocks]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_block_in_use_is_written_down_a_bounded_number_of_times(parts: Core) -> None:
    with core(with_ssd=True, sliding=True) as tiered:
        tenancy = tiered.tenancy(ttl_s=TTL_S)
        (row,) = tiered.store(tenancy, [1])
        tiered.copy_to_ssd(row, 0)
        noted = 0
        for _ in range(640):
            tiered.clock.advance(0.1)
            tiered.catalog.use([row])
            noted += len(tiered.catalog.lives.moved)
            tiered.catalog.lives.moved.clear()
        assert 15 <= noted <= 17, "16 in a life"
