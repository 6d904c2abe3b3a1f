"""The order of use: long prompts in several requests stand where their head does, whatever comes between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.counters import Cause
from kvstore.puts import Ticket
from kvstore.recency import Behind
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.slab import Slab
from kvstore.wire import Outcome
from tests.core.parts import MIB, Core, core, flat_namespace, hash_of, hashes_of

BLOCK_BYTES = 64 << 10
WINDOW = 4


@pytest.fixture(params=["lru", "reuse"])
def eviction(request: pytest.FixtureRequest) -> str:
    """Return the name of a policy, each in turn."""
    found: str = request.param
    return found


def order(parts: Core, tenancy: Tenancy, tier: Tier = Tier.CPU) -> list[int]:
    """Return the keys 0 to 999 in the order in which pressure would take them."""
    known = {hash_of(key): key for key in range(1000)}
    lane = tenancy.lanes[tier]
    hashes = [parts.catalog.table.hash[row] for row in parts.catalog.policies[tier].coldest(lane)]
    return [known[block_hash] for block_hash in hashes if block_hash is not None]


def store(parts: Core, tenancy: Tenancy, keys: Sequence[int]) -> list[Outcome]:
    """Store a prompt as a client does, in windows, the next reserved before the one at hand is sealed."""
    session = parts.session()
    ahead: list[tuple[Ticket, bytes | None]] = []
    outcomes: list[Outcome] = []
    for at in range(0, len(keys), WINDOW):
        after = hash_of(keys[at - 1]) if at else None
        window = hashes_of(keys[at : at + WINDOW])
        ticket, found = parts.puts.reserve(session, tenancy, window, parts.now_s(), after=after)
        outcomes += map(Outcome, found)
        ahead.append((ticket, after if not at or outcomes[at - 1] != Outcome.BUSY else None))
        if len(ahead) > 1:
            seal(parts, *ahead.pop(0))
    seal(parts, *ahead.pop(0))
    return outcomes


def seal(parts: Core, ticket: Ticket, after: bytes | None) -> None:
    parts.puts.seal(ticket, None, (), None, after=after)


def use(parts: Core, tenancy: Tenancy, keys: Sequence[int]) -> None:
    """Use what is there of a prompt, in windows."""
    for at in range(0, len(keys), WINDOW):
        rows = [row for key in keys[at : at + WINDOW] if (row := tenancy.rows.get(hash_of(key))) is not None]
        after = Behind(tenancy, hash_of(keys[at - 1]), or_last=True) if at else None
        parts.catalog.use(rows[::-1], after)


def test_a_prompt_stored_in_windows_is_evicted_from_its_tail_on(eviction: str) -> None:
    with core(eviction=eviction) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        store(parts, tenancy, range(10))
        store(parts, tenancy, range(100, 110))
        assert order(parts, tenancy) == [*range(9, -1, -1), *range(109, 99, -1)]


def test_a_prompt_that_grows_keeps_its_head_longest(eviction: str) -> None:
    """The next turn of a conversation: what was there is touched at the reserve, what is new is sealed later."""
    with core(eviction=eviction) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        store(parts, tenancy, range(6))
        store(parts, tenancy, range(100, 103))
        parts.clock.advance(0.1)  # the same use still, as `reuse` counts
        assert store(parts, tenancy, range(11)) == [Outcome.PRESENT] * 6 + [Outcome.GRANTED] * 5
        assert order(parts, tenancy) == [102, 101, 100, *range(10, -1, -1)]


def test_a_prompt_used_in_windows_stands_where_its_head_does(eviction: str) -> None:
    with core(eviction=eviction) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        for first in (0, 100, 200):
            store(parts, tenancy, range(first, first + 10))
        parts.clock.advance(10)
        use(parts, tenancy, range(10))
        assert order(parts, tenancy)[-10:] == list(range(9, -1, -1))
        use(parts, tenancy, range(100, 110))
        assert order(parts, tenancy)[-20:] == [*range(9, -1, -1), *range(109, 99, -1)]


def test_a_prompt_that_others_write_too_is_no_reason_to_let_the_rest_go(eviction: str) -> None:
    """Its first window is being written by another client: what is sealed behind it is as recent as any."""
    with core(eviction=eviction) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        store(parts, tenancy, range(100, 104))
        other, _ = parts.reserve(parts.session(), tenancy, range(WINDOW))
        outcomes = store(parts, tenancy, range(8))
        assert outcomes == [Outcome.BUSY] * 4 + [Outcome.GRANTED] * 4
        assert order(parts, tenancy) == [*range(103, 99, -1), *range(7, 3, -1)]
        parts.seal(other)
        assert order(parts, tenancy)[-8:] == list(range(7, -1, -1))


def test_a_prompt_larger_than_the_tier_keeps_its_head(eviction: str) -> None:
    with core(2 * MIB, eviction=eviction) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        room = parts.memory.slab.free_slots(Slab.slot_bytes_for(BLOCK_BYTES))
        prompt = range(3 * room)
        store(parts, tenancy, prompt)
        kept = parts.keys_of(tenancy, prompt)
        assert kept[: room - 2 * WINDOW] == list(range(room - 2 * WINDOW))
        use(parts, tenancy, prompt)
        assert order(parts, tenancy)[-(room - 2 * WINDOW) :] == list(range(room - 2 * WINDOW))[::-1]


def test_what_continues_a_block_that_is_on_ssd_only_is_as_recent_as_any(eviction: str) -> None:
    """Its head was evicted from memory long ago; the new tail is no less of use for that."""
    with core(eviction=eviction, with_ssd=True) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        head = parts.store(tenancy, range(4))
        for slot, row in enumerate(head):
            parts.copy_to_ssd(row, slot)
            parts.room.evict(row, cause=Cause.PRESSURE)
        parts.store(tenancy, range(100, 104))
        store(parts, tenancy, range(8))
        assert order(parts, tenancy) == [*range(103, 99, -1), *range(7, 3, -1)]


def test_a_use_of_a_copy_in_transit_counts_on_ssd() -> None:
    with core(with_ssd=True) as parts:
        tenancy = parts.tenancy(flat_namespace(BLOCK_BYTES))
        rows = parts.store(tenancy, range(6))
        for slot, row in enumerate(rows):
            parts.copy_to_ssd(row, slot)
            parts.room.evict(row, cause=Cause.PRESSURE)
        before = order(parts, tenancy, Tier.SSD)
        assert before == list(range(6))
        for row in rows[:4]:
            offset = parts.memory.allocate_transit(tenancy.slot_bytes)
            assert offset is not None
            parts.catalog.hold(row)
            parts.catalog.fill(row, Tier.CPU, offset)
            parts.catalog.filled(row, Tier.CPU)
        parts.catalog.use(rows[1::-1])
        parts.catalog.use(rows[3:1:-1], Behind(tenancy, hash_of(1), or_last=True))
        for row in rows[:4]:
            parts.catalog.unhold(row)
        assert order(parts, tenancy, Tier.SSD) == [4, 5, 3, 2, 1, 0]
