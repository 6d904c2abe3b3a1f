"""Leases: how much they may pin, when they end, and whose they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.errors import TooLarge, TooManyLeases
from kvstore.lease import LEASES_MAX, Lease, Leases, Session
from kvstore.policy import LeastRecentlyUsed
from kvstore.table import Tier
from tests.core.parts import BLOCK_BYTES, Core, core, flat_namespace, hash_of, hashes_of
from tests.core.scale import examples

BLOCKS = 24  # what fits into the pool of 8 MiB beside its transit chunk


@pytest.fixture
def parts() -> Iterator[Core]:
    """Return a pool whose leases may pin half of it: 12 blocks."""
    with core() as made:
        assert made.leases.pinned_bytes_max == 12 * BLOCK_BYTES
        yield made


@pytest.fixture
def session(parts: Core) -> Session:
    return parts.session()


@pytest.fixture
def rows(parts: Core) -> list[int]:
    """Return the rows of a full pool."""
    return parts.store(parts.tenancy(), range(BLOCKS))


def test_leases_pin_half_of_the_tier_and_no_more(parts: Core, session: Session, rows: list[int]) -> None:
    parts.leases.grant(session, rows[:8], 10.0, copying=True)
    with pytest.raises(TooManyLeases, match=str(12 * BLOCK_BYTES)):
        parts.leases.grant(session, rows[8:13], 10.0, copying=True)
    assert parts.leases.room_bytes() == 4 * BLOCK_BYTES
    parts.leases.grant(parts.session(), rows[8:12], 10.0, copying=False)
    assert parts.leases.room_bytes() == 0
    parts.check_integrity()


def test_a_lease_is_granted_whole_or_not_at_all(parts: Core, session: Session, rows: list[int]) -> None:
    parts.leases.grant(session, rows[:8], 10.0, copying=True)
    for refused in (rows[8:13], rows[:13]):
        with pytest.raises((TooManyLeases, TooLarge)):
            parts.leases.grant(session, refused, 10.0, copying=True)
    assert [parts.catalog.leases_on(row) for row in rows] == [1] * 8 + [0] * 16
    assert len(parts.leases) == len(session.leases) == 1
    parts.check_integrity()


def test_a_lease_that_could_never_be_granted_says_so_at_once(parts: Core, session: Session, rows: list[int]) -> None:
    with pytest.raises(TooLarge, match=r"never.*--cpu-size"):
        parts.leases.grant(session, rows[:13], 10.0, copying=True)
    assert not TooLarge.retryable
    assert TooManyLeases.retryable


def test_what_is_pinned_already_costs_nothing_more(parts: Core, session: Session, rows: list[int]) -> None:
    first = parts.leases.grant(session, rows[:12], 10.0, copying=True)
    second = parts.leases.grant(parts.session(), rows[4:12], 10.0, copying=True)
    assert parts.leases.pinned_bytes == 12 * BLOCK_BYTES
    parts.leases.release(session, first.token)
    assert parts.leases.pinned_bytes == 8 * BLOCK_BYTES
    parts.leases.release(second.session, second.token)
    assert parts.leases.pinned_bytes == 0
    parts.check_integrity()


def test_a_row_that_is_named_twice_counts_once(parts: Core, session: Session, rows: list[int]) -> None:
    lease = parts.leases.grant(session, rows[:3] * 5, 10.0, copying=True)
    assert parts.leases.pinned_bytes == 3 * BLOCK_BYTES
    parts.check_integrity()
    parts.leases.release(session, lease.token)
    assert parts.leases.pinned_bytes == 0
    assert not any(parts.catalog.table.holds)


def test_zero_copy_leases_leave_room_for_copying_ones(parts: Core, session: Session, rows: list[int]) -> None:
    leases = Leases(parts.catalog, 12 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    with pytest.raises(TooLarge, match=str(10 * BLOCK_BYTES)):
        leases.grant(session, rows[:11], 10.0, copying=False)
    leases.grant(session, rows[:10], 10.0, copying=False)
    with pytest.raises(TooManyLeases):
        leases.grant(session, rows[10:11], 10.0, copying=False)
    copying = leases.grant(session, rows[10:12], 10.0, copying=True)
    leases.release(session, copying.token)
    leases.end_session(session, gone=True)


def test_releasing_twice_is_harmless(parts: Core, session: Session, rows: list[int]) -> None:
    lease = parts.leases.grant(session, rows[:2], 10.0, copying=False)
    other = parts.leases.grant(session, rows[:2], 10.0, copying=False)
    assert parts.leases.release(session, lease.token) == rows[:2]
    assert parts.leases.release(session, lease.token) == ()
    assert parts.leases.release(session, 12345) == ()
    assert parts.catalog.leases_on(rows[0]) == 1
    parts.leases.release(session, other.token)
    parts.check_integrity()


def test_a_block_may_have_any_number_of_leases_and_a_session_a_limited_one(
    parts: Core, session: Session, rows: list[int]
) -> None:
    for _ in range(8):
        parts.leases.grant(session, rows[:1] * 8192, 10.0, copying=False)
    assert parts.catalog.leases_on(rows[0]) == 1 << 16
    while len(session.leases) < LEASES_MAX:
        parts.leases.grant(session, rows[:1], 10.0, copying=False)
    with pytest.raises(TooManyLeases, match=str(LEASES_MAX)):
        parts.leases.grant(session, rows[:1], 10.0, copying=False)
    parts.leases.end_session(session, gone=True)
    assert parts.catalog.leases_on(rows[0]) == parts.leases.pinned_bytes == 0


def test_another_sessions_lease_can_not_be_released(parts: Core, session: Session, rows: list[int]) -> None:
    lease = parts.leases.grant(session, rows[:2], 10.0, copying=False)
    assert parts.leases.release(parts.session(), lease.token) == ()
    assert parts.catalog.leases_on(rows[0]) == 1


def test_tokens_are_never_used_again(parts: Core, session: Session, rows: list[int]) -> None:
    tokens: list[int] = []
    for _ in range(5):
        lease = parts.leases.grant(session, rows[:1], 10.0, copying=True)
        tokens.append(lease.token)
        parts.leases.release(session, lease.token)
    assert len(set(tokens)) == 5
    assert 0 not in tokens


def test_a_copying_lease_ends_at_its_end_and_not_before(parts: Core, session: Session, rows: list[int]) -> None:
    parts.leases.grant(session, rows[:2], 10.0, copying=True)
    parts.leases.expire(9.99)
    assert parts.catalog.leases_on(rows[0]) == 1
    parts.leases.expire(10.0)
    assert len(parts.leases) == parts.leases.pinned_bytes == len(session.leases) == 0
    parts.check_integrity()


def test_a_zero_copy_lease_outlives_its_end_and_is_reported(parts: Core, session: Session, rows: list[int]) -> None:
    lease = parts.leases.grant(session, rows[:2], 10.0, copying=False)
    assert parts.leases.overdue(9.0) == []
    parts.leases.expire(1e9)
    assert parts.leases.overdue(10.0) == [lease]
    assert parts.catalog.leases_on(rows[0]) == 1
    parts.leases.release(session, lease.token)
    assert parts.leases.overdue(1e9) == []


def test_a_session_that_hung_up_keeps_its_leases_until_no_copy_can_be_reading(
    parts: Core, session: Session, rows: list[int]
) -> None:
    parts.leases.grant(session, rows[:2], 10.0, copying=True)
    parts.leases.grant(session, rows[2:4], 10.0, copying=False)
    parts.leases.end_session(session, gone=False)
    assert len(parts.leases) == 2
    parts.leases.expire(10.0)
    assert [parts.catalog.leases_on(row) for row in rows[:4]] == [0, 0, 1, 1]
    parts.leases.end_session(session, gone=True)
    assert len(parts.leases) == 0
    parts.check_integrity()


def test_a_session_whose_process_is_gone_holds_nothing(parts: Core, session: Session, rows: list[int]) -> None:
    other = parts.session()
    parts.leases.grant(session, rows[:2], 10.0, copying=True)
    parts.leases.grant(session, rows[1:4], 10.0, copying=False)
    parts.leases.grant(other, rows[3:5], 10.0, copying=False)
    parts.leases.end_session(session, gone=True)
    assert [parts.catalog.leases_on(row) for row in rows[:5]] == [0, 0, 0, 1, 1]
    assert session.leases == set()
    parts.check_integrity()


def test_a_leased_block_is_no_victim_and_its_slot_is_not_used_again(
    parts: Core, session: Session, rows: list[int]
) -> None:
    tenancy = parts.tenancy()
    lease = parts.leases.grant(session, rows[:12], 10.0, copying=True)
    slots = {parts.catalog.table.slot[Tier.CPU][row] for row in rows[:12]}
    ticket, _ = parts.reserve(session, tenancy, range(100, 120))
    assert not slots & {offset for offset in ticket.offsets if offset}
    assert parts.keys_of(tenancy, range(BLOCKS)) == list(range(12))
    parts.puts.forfeit(ticket, None)
    parts.leases.release(session, lease.token)
    parts.check_integrity()


def test_a_dropped_block_stays_readable_until_its_lease_ends(parts: Core, session: Session, rows: list[int]) -> None:
    tenancy = parts.tenancy()
    lease = parts.leases.grant(session, rows[:1], 10.0, copying=False)
    slot = parts.catalog.table.slot[Tier.CPU][rows[0]]
    view = parts.memory.view(slot, 4)
    view[:] = b"kept"
    parts.catalog.drop(rows[0], Cause.DROP)
    assert parts.catalog.find(tenancy, hash_of(0)) is None
    parts.store(tenancy, [0])  # the same block again: another row and another slot
    assert parts.catalog.table.slot[Tier.CPU][rows[0]] == slot
    assert bytes(view) == b"kept"
    view.release()
    used = parts.memory.used_bytes
    parts.leases.release(session, lease.token)
    assert parts.memory.used_bytes == used - BLOCK_BYTES
    parts.check_integrity()


def test_who_waits_for_room_is_woken_by_the_end_of_a_lease() -> None:
    async def wait() -> None:
        with core() as parts:
            session = parts.session()
            rows = parts.store(parts.tenancy(), range(2))
            lease = parts.leases.grant(session, rows, 10.0, copying=True)
            async with asyncio.timeout(10):
                waiting = asyncio.create_task(parts.leases.released(60.0))
                await asyncio.sleep(0)
                parts.leases.release(session, lease.token)
                await waiting
            await parts.leases.released(0.0)

    asyncio.run(wait())


class LeaseMachine(RuleBasedStateMachine):
    """Leases of two sessions over eight blocks, against lists."""

    LIMIT = 5

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.catalog = Catalog({Tier.CPU: LeastRecentlyUsed()}, lambda tier, slot: self.freed.append(slot), lambda: 0.0)
        tenancy = self.catalog.tenancy("", flat_namespace(4096), {Tier.CPU: 4096})
        self.rows = self.catalog.adopt(tenancy, hashes_of(range(8)), range(0, 8 * 4096, 4096), [1] * 8, 0.0)
        self.leases = Leases(self.catalog, self.LIMIT * 4096, 4096)
        self.sessions = [Session(number, "", admin=False) for number in range(2)]
        self.now = 0.0
        self.held: list[Lease] = []

    def pinned(self) -> set[int]:
        return {row for lease in self.held for row in lease.rows}

    @rule(
        session=st.integers(0, 1),
        picks=st.lists(st.integers(0, 7), min_size=1, max_size=7),
        lasts_s=st.integers(0, 5),
        copying=st.booleans(),
    )
    def grant(self, session: int, picks: list[int], lasts_s: int, copying: bool) -> None:
        rows = [self.rows[pick] for pick in picks]
        limit = self.LIMIT - (0 if copying else 1)
        try:
            lease = self.leases.grant(self.sessions[session], rows, self.now + lasts_s, copying=copying)
        except TooLarge:
            assert len(set(rows)) > limit
        except TooManyLeases:
            assert len(set(rows)) <= limit < len(self.pinned() | set(rows))
        else:
            assert len(self.pinned() | set(rows)) <= limit
            self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 100), own=st.booleans())
    def release(self, pick: int, own: bool) -> None:
        lease = self.held[pick % len(self.held)]
        session = lease.session if own else self.sessions[1 - lease.session.token]
        assert self.leases.release(session, lease.token) == (lease.rows if own else ())
        if own:
            self.held.remove(lease)
            assert self.leases.release(session, lease.token) == ()

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.leases.expire(self.now)
        self.held = [lease for lease in self.held if not lease.copying or lease.ends_s > self.now]

    @rule(session=st.integers(0, 1), gone=st.booleans())
    def end_session(self, session: int, gone: bool) -> None:
        self.leases.end_session(self.sessions[session], gone=gone)
        if gone:
            self.held = [lease for lease in self.held if lease.session is not self.sessions[session]]

    @invariant()
    def pins_what_the_lists_say(self) -> None:
        self.leases.check_integrity()
        assert self.leases.pinned_bytes == len(self.pinned()) * 4096
        assert len(self.leases) == len(self.held)
        for row in self.rows:
            assert self.catalog.leases_on(row) == sum(lease.rows.count(row) for lease in self.held)
            assert self.catalog.is_evictable(row, Tier.CPU) == (row not in self.pinned())
        assert self.freed == []
        overdue = {lease.token for lease in self.held if not lease.copying and lease.ends_s <= self.now}
        assert {lease.token for lease in self.leases.overdue(self.now)} == overdue


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=examples(50), stateful_step_count=40)
