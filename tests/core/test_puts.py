"""Puts: from reserve to seal or forfeit, what is late, who wins, and who is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.counters import Cause
from kvstore.errors import LeaseExpired
from kvstore.lease import Session
from kvstore.lifecycle import Put
from kvstore.puts import PutLimits, Ticket
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.wire import Outcome
from tests.core.parts import BLOCK_BYTES, RESERVATION_S, Core, core, flat_namespace, hash_of, hashes_of
from tests.core.scale import examples

GRANTED, PRESENT, BUSY = Outcome.GRANTED, Outcome.PRESENT, Outcome.BUSY
SEALED, REFUSED, NO_ROOM = Outcome.SEALED, Outcome.REFUSED, Outcome.NO_ROOM
BLOCKS = 24  # what fits into the pool beside its transit chunk


@pytest.fixture
def parts() -> Iterator[Core]:
    with core() as made:
        yield made


@pytest.fixture
def tenancy(parts: Core) -> Tenancy:
    return parts.tenancy()


@pytest.fixture
def session(parts: Core) -> Session:
    return parts.session()


def quarantined(parts: Core) -> tuple[int, int]:
    return parts.puts.quarantined_slots, parts.puts.quarantined_bytes


# ---- reserve


def test_blocks_that_nobody_has_are_granted_a_slot_each(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, outcomes = parts.reserve(session, tenancy, range(4))
    assert outcomes == [GRANTED] * 4
    assert len(set(ticket.offsets)) == 4
    assert parts.puts.reserved_bytes == 4 * BLOCK_BYTES
    assert parts.keys_of(tenancy, range(4)) == []
    parts.check_integrity([ticket])


def test_blocks_that_are_there_are_present_and_those_being_written_busy(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    rows = parts.store(tenancy, [0, 1])
    writing, _ = parts.reserve(parts.session(), tenancy, [2])
    ticket, outcomes = parts.reserve(session, tenancy, [0, 1, 2, 3])
    assert outcomes == [PRESENT, PRESENT, BUSY, GRANTED]
    assert parts.used == [rows[::-1]], "a use of the prefix is noted, its tail first"
    counters = tenancy.counters
    assert (counters.present_blocks, counters.busy_blocks, counters.stored_blocks) == (2, 1, 2)
    parts.check_integrity([writing, ticket])


def test_a_hash_named_twice_is_granted_once(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, outcomes = parts.reserve(session, tenancy, [5, 6, 5])
    assert outcomes == [GRANTED, GRANTED, BUSY]
    assert parts.seal(ticket) == [SEALED, SEALED]
    parts.check_integrity()


def test_a_reserve_that_grants_nothing_leaves_no_ticket(parts: Core, tenancy: Tenancy, session: Session) -> None:
    parts.store(tenancy, [0])
    ticket, outcomes = parts.reserve(session, tenancy, [0])
    assert outcomes == [PRESENT]
    assert len(parts.puts) == 0
    with pytest.raises(LeaseExpired):
        parts.puts.ticket(session, ticket.token)


def test_a_put_into_a_full_pool_evicts_what_it_needs_and_no_more(parts: Core, tenancy: Tenancy) -> None:
    parts.store(tenancy, range(BLOCKS))
    parts.store(tenancy, [100])
    # Blocks of one put are a prefix: its tail goes first.
    assert parts.keys_of(tenancy, range(BLOCKS)) == list(range(BLOCKS - 1))
    assert parts.catalog.counters[Tier.CPU].evictions[Cause.PRESSURE] == 1


def test_what_finds_no_room_is_told_so_and_the_rest_is_granted(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, outcomes = parts.reserve(session, tenancy, range(BLOCKS + 3))
    assert outcomes == [GRANTED] * BLOCKS + [NO_ROOM] * 3
    assert parts.seal(ticket) == [SEALED] * BLOCKS
    parts.check_integrity()


def test_what_is_open_or_in_quarantine_is_limited_in_all_and_for_each_process() -> None:
    limits = PutLimits(8 * BLOCK_BYTES, 3 * BLOCK_BYTES, RESERVATION_S)
    with core(limits=limits) as parts:
        tenancy, session, other = parts.tenancy(), parts.session(), parts.session()
        first, outcomes = parts.reserve(session, tenancy, range(4))
        assert outcomes.count(GRANTED) == 3, "no process may come to have more than that in quarantine"
        second, outcomes = parts.reserve(other, tenancy, range(10, 20))
        assert outcomes.count(GRANTED) == 3
        assert parts.reserve(other, tenancy, [30])[1] == [NO_ROOM], "three are open"
        parts.clock.advance(RESERVATION_S)
        parts.puts.expire(parts.now_s())
        assert quarantined(parts) == (6, 6 * BLOCK_BYTES)
        assert parts.reserve(session, tenancy, [40])[1] == [NO_ROOM], "this session has three in quarantine"
        third, outcomes = parts.reserve(parts.session(), tenancy, range(50, 60))
        assert outcomes.count(GRANTED) == 2, "eight are open or in quarantine"
        parts.check_integrity([first, second, third])
        for ticket in (first, second, third):
            parts.puts.forfeit(ticket, None)


def test_a_tenant_over_its_quota_makes_room_among_its_own_blocks() -> None:
    with core(quotas={"small": 4 * BLOCK_BYTES}) as parts:
        large, small = parts.tenancy(tenant="large"), parts.tenancy(tenant="small")
        parts.store(large, range(10))
        parts.store(small, range(4))
        parts.store(small, range(10, 13))
        assert len(parts.keys_of(small, range(20))) == 4
        assert parts.keys_of(small, range(10, 13)) == [10, 11, 12]
        assert parts.keys_of(large, range(10)) == list(range(10))
        assert parts.catalog.counters[Tier.CPU].evictions[Cause.QUOTA] == 3
        ticket, outcomes = parts.reserve(parts.session(), small, range(30, 40))
        assert outcomes.count(GRANTED) == 4, "open puts count against the quota, too"
        parts.puts.forfeit(ticket, None)
        parts.check_integrity()


# ---- seal and forfeit


def test_a_sealed_block_is_visible_with_its_bytes_where_they_were_written(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0, 1])
    for key, offset in enumerate(ticket.offsets):
        view = parts.memory.view(offset, 2)
        view[:] = b"%02d" % key
        view.release()
    result = parts.puts.seal(ticket, None, [11, 12], None)
    for key, row in enumerate(result.rows):
        assert parts.catalog.find(tenancy, hash_of(key)) == row
        assert parts.catalog.table.slot[Tier.CPU][row] == ticket.offsets[key]
        assert parts.catalog.table.checksum[row] == 11 + key
    assert len(parts.puts) == len(session.tickets) == parts.puts.reserved_bytes == 0
    parts.check_integrity()


def test_positions_are_sealed_one_by_one_and_the_rest_stays_open(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    ticket, _ = parts.reserve(session, tenancy, range(4))
    assert parts.seal(ticket, [2, 0]) == [SEALED, SEALED]
    assert parts.keys_of(tenancy, range(4)) == [0, 2]
    assert parts.puts.ticket(session, ticket.token) is ticket
    assert parts.puts.forfeit(ticket, [1]) == 1
    assert parts.seal(ticket) == [SEALED]
    assert parts.keys_of(tenancy, range(4)) == [0, 2, 3]
    with pytest.raises(LeaseExpired):
        parts.puts.ticket(session, ticket.token)
    parts.check_integrity()


@pytest.mark.parametrize("position", [0, 1, 4, 10**9])
def test_a_position_that_is_not_open_is_refused(
    parts: Core, tenancy: Tenancy, session: Session, position: int
) -> None:
    parts.store(tenancy, [1])
    ticket, _ = parts.reserve(session, tenancy, range(3))
    parts.seal(ticket, [0])
    assert parts.seal(ticket, [position]) == [REFUSED]
    assert parts.puts.forfeit(ticket, [position]) == 0
    parts.check_integrity([ticket])
    assert parts.seal(ticket) == [SEALED]


def test_forfeited_slots_come_back_at_once_and_leave_nothing(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, range(4))
    assert parts.puts.forfeit(ticket, None) == 4
    assert parts.puts.forfeit(ticket, None) == 0
    assert parts.memory.used_bytes == parts.puts.reserved_bytes == 0
    assert parts.keys_of(tenancy, range(4)) == []
    assert parts.reserve(session, tenancy, [0])[1] == [GRANTED]


def test_a_ticket_is_its_own_sessions(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0])
    for other, token in ((parts.session(), ticket.token), (session, ticket.token + 1)):
        with pytest.raises(LeaseExpired, match="reserve again"):
            parts.puts.ticket(other, token)


def test_a_life_given_at_the_seal_comes_before_the_namespaces(parts: Core, session: Session) -> None:
    tenancy = parts.tenancy(ttl_s=60.0)
    for key, ttl_s in ((0, None), (1, 5.0), (2, 0.0)):
        ticket, _ = parts.reserve(session, tenancy, [key])
        parts.puts.seal(ticket, None, (), ttl_s)
    parts.clock.advance(5.0)
    assert parts.keys_of(tenancy, range(3)) == [0, 2]
    parts.clock.advance(55.0)
    assert parts.keys_of(tenancy, range(3)) == [2]


# ---- what is late


def test_past_its_deadline_a_put_is_in_quarantine_and_its_key_free_for_another(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    late, _ = parts.reserve(session, tenancy, [0, 1])
    parts.clock.advance(RESERVATION_S - 0.01)
    parts.puts.expire(parts.now_s())
    assert quarantined(parts) == (0, 0)
    parts.clock.advance(0.01)
    parts.puts.expire(parts.now_s())
    assert quarantined(parts) == (2, 2 * BLOCK_BYTES)
    assert parts.puts.reserved_bytes == 0
    other, outcomes = parts.reserve(parts.session(), tenancy, [0, 1])
    assert outcomes == [GRANTED, GRANTED]
    assert not set(other.offsets) & set(late.offsets)
    parts.check_integrity([late, other])


def test_a_late_seal_is_refused_and_gives_its_slots_back(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0, 1])
    parts.clock.advance(RESERVATION_S)
    parts.puts.expire(parts.now_s())
    assert parts.seal(parts.puts.ticket(session, ticket.token), [0, 1]) == [REFUSED, REFUSED]
    assert quarantined(parts) == (0, 0)
    assert parts.memory.used_bytes == len(parts.puts) == 0
    assert parts.keys_of(tenancy, range(2)) == []
    parts.check_integrity()


def test_a_late_forfeit_acknowledges_as_well(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0, 1])
    parts.clock.advance(RESERVATION_S)
    parts.puts.expire(parts.now_s())
    assert parts.puts.forfeit(ticket, [0]) == 1
    assert quarantined(parts) == (1, BLOCK_BYTES)
    assert parts.puts.forfeit(ticket, None) == 1
    assert parts.memory.used_bytes == 0


def test_a_slot_in_quarantine_is_never_given_to_another(parts: Core, tenancy: Tenancy, session: Session) -> None:
    late, _ = parts.reserve(session, tenancy, range(4))
    parts.clock.advance(RESERVATION_S)
    parts.puts.expire(parts.now_s())
    for start in range(100, 400, 10):
        rows = parts.store(tenancy, range(start, start + 10))
        assert not {parts.catalog.table.slot[Tier.CPU][row] for row in rows} & set(late.offsets)
    parts.check_integrity([late])
    parts.puts.end_session(session, gone=True)
    parts.check_integrity()


def test_the_first_valid_seal_wins(parts: Core, tenancy: Tenancy, session: Session) -> None:
    late, _ = parts.reserve(session, tenancy, [0])
    parts.clock.advance(RESERVATION_S)
    parts.puts.expire(parts.now_s())
    other, _ = parts.reserve(parts.session(), tenancy, [0])
    assert parts.seal(other) == [SEALED]
    assert parts.seal(late, [0]) == [REFUSED]
    row = parts.catalog.find(tenancy, hash_of(0))
    assert row is not None
    assert parts.catalog.table.slot[Tier.CPU][row] == other.offsets[0]
    parts.check_integrity()


def test_a_seal_of_what_came_another_way_meanwhile_is_present_and_gives_its_slot_back(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0, 1])
    slot = parts.memory.allocate(BLOCK_BYTES)
    assert slot is not None
    (row,) = parts.catalog.adopt(tenancy, [hash_of(0)], [slot], [1], 0.0)
    assert parts.seal(ticket) == [PRESENT, SEALED]
    assert parts.catalog.find(tenancy, hash_of(0)) == row
    assert parts.memory.used_bytes == 2 * BLOCK_BYTES
    parts.check_integrity()


def test_a_late_seal_does_not_take_the_key_from_who_writes_it_now(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    late, _ = parts.reserve(session, tenancy, [0])
    parts.clock.advance(RESERVATION_S)
    parts.puts.expire(parts.now_s())
    other, _ = parts.reserve(parts.session(), tenancy, [0])
    told: list[Outcome] = []
    parts.puts.wait(tenancy, [hash_of(0)], told.append)
    assert parts.seal(late, [0]) == [REFUSED]
    assert told == []
    assert parts.reserve(parts.session(), tenancy, [0])[1] == [BUSY]
    assert parts.seal(other) == [SEALED]
    assert told == [Outcome.HIT]


# ---- sessions


def test_a_session_that_hung_up_may_still_be_writing_so_its_slots_wait(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    ticket, _ = parts.reserve(session, tenancy, range(3))
    parts.puts.end_session(session, gone=False)
    assert quarantined(parts) == (3, 3 * BLOCK_BYTES)
    assert parts.reserve(parts.session(), tenancy, [0])[1] == [GRANTED]
    parts.puts.end_session(session, gone=False)
    assert quarantined(parts) == (3, 3 * BLOCK_BYTES)
    parts.puts.end_session(session, gone=True)
    assert quarantined(parts) == (0, 0)
    assert not ticket.has_slots
    assert session.tickets == set()


def test_a_session_whose_process_is_gone_gives_everything_back(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    parts.reserve(session, tenancy, range(3))
    parts.reserve(session, tenancy, range(10, 13))
    parts.puts.end_session(session, gone=True)
    assert parts.memory.used_bytes == len(parts.puts) == 0
    assert parts.reserve(parts.session(), tenancy, [0, 10])[1] == [GRANTED, GRANTED]


def test_what_a_session_has_sealed_stays_when_it_is_gone(parts: Core, tenancy: Tenancy, session: Session) -> None:
    parts.store(tenancy, range(3), session)
    parts.puts.end_session(session, gone=True)
    assert parts.keys_of(tenancy, range(3)) == [0, 1, 2]


# ---- dropping a namespace


def test_puts_begun_before_a_drop_can_not_be_sealed_after_it(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, range(3))
    told: list[Outcome] = []
    parts.puts.wait(tenancy, [hash_of(1)], told.append)
    parts.catalog.drop_all(tenancy)
    parts.puts.drop_all(tenancy)
    assert told == [Outcome.ABORTED]
    assert quarantined(parts) == (3, 3 * BLOCK_BYTES)
    new, outcomes = parts.reserve(parts.session(), tenancy, [0])
    assert outcomes == [GRANTED], "the key is free for what is stored after the drop"
    parts.check_integrity([ticket, new])
    assert parts.seal(ticket, [0, 1, 2]) == [REFUSED] * 3
    assert parts.keys_of(tenancy, range(3)) == []
    assert parts.seal(new) == [SEALED]
    parts.check_integrity()


def test_dropping_one_namespace_leaves_the_puts_of_another(parts: Core, tenancy: Tenancy, session: Session) -> None:
    other = parts.tenancy(flat_namespace(salt=b"other"))
    ticket, _ = parts.reserve(session, other, [0])
    parts.catalog.drop_all(tenancy)
    parts.puts.drop_all(tenancy)
    assert parts.seal(ticket) == [SEALED]


# ---- waiting


def test_who_waits_is_told_at_the_seal_of_the_last_block(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, range(3))
    told: list[Outcome] = []
    arrival = parts.puts.wait(tenancy, hashes_of([0, 2]), told.append)
    parts.seal(ticket, [0])
    parts.seal(ticket, [1])
    assert told == []
    parts.seal(ticket, [2])
    assert told == [Outcome.HIT]
    parts.puts.stop_waiting(arrival)
    parts.puts.stop_waiting(arrival)
    assert told == [Outcome.HIT]


@pytest.mark.parametrize("how", ["forfeit", "deadline", "hang up", "process ends", "abort"])
def test_who_waits_is_told_at_once_that_a_put_will_not_come(
    parts: Core, tenancy: Tenancy, session: Session, how: str
) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0, 1])
    told: list[Outcome] = []
    parts.puts.wait(tenancy, hashes_of([0, 1, 2]), told.append)
    match how:
        case "forfeit":
            parts.puts.forfeit(ticket, [1])
        case "deadline":
            parts.clock.advance(RESERVATION_S)
            parts.puts.expire(parts.now_s())
        case "abort":
            assert parts.puts.abort(tenancy, [hash_of(1)]) == 1
        case _:
            parts.puts.end_session(session, gone=how == "process ends")
    assert told == [Outcome.ABORTED]
    parts.store(tenancy, [0, 1, 2])
    assert told == [Outcome.ABORTED], "told once"
    parts.puts.forfeit(ticket, None)


def test_those_who_wait_are_told_in_the_order_they_came(parts: Core, tenancy: Tenancy, session: Session) -> None:
    ticket, _ = parts.reserve(session, tenancy, [0])
    told: list[int] = []
    for number in range(5):
        parts.puts.wait(tenancy, [hash_of(0)], lambda _, number=number: told.append(number))  # type: ignore[misc]
    parts.seal(ticket)
    assert told == [0, 1, 2, 3, 4]


def test_an_abort_ends_the_wait_for_a_block_that_nobody_writes(parts: Core, tenancy: Tenancy) -> None:
    told: list[Outcome] = []
    parts.puts.wait(tenancy, hashes_of([0, 1]), told.append)
    other = parts.tenancy(flat_namespace(salt=b"other"))
    assert parts.puts.abort(other, hashes_of([0, 1])) == 0
    assert parts.puts.abort(tenancy, hashes_of([0, 1])) == 1
    assert told == [Outcome.ABORTED]


def test_who_stopped_waiting_is_not_told(parts: Core, tenancy: Tenancy) -> None:
    told: list[Outcome] = []
    gone = parts.puts.wait(tenancy, hashes_of([0, 1]), told.append)
    stays: list[Outcome] = []
    parts.puts.wait(tenancy, hashes_of([1]), stays.append)
    parts.puts.stop_waiting(gone)
    parts.store(tenancy, [0, 1])
    assert told == []
    assert stays == [Outcome.HIT]


# ---- a window of its own for each writer (strict mode)


class Arena:
    """A write window without memory: what was handed out and not given back."""

    address = 0

    def __init__(self, slots: int) -> None:
        self.free_offsets = [at * BLOCK_BYTES for at in range(slots)]

    def allocate_many(self, slot_bytes: int, count: int) -> list[int]:
        taken, self.free_offsets = self.free_offsets[:count], self.free_offsets[count:]
        return taken

    def free(self, offset: int) -> None:
        assert offset not in self.free_offsets
        self.free_offsets.append(offset)


def test_a_writer_with_a_window_takes_no_slot_of_the_pool_before_the_seal(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    session.arena = arena = Arena(3)
    ticket, outcomes = parts.reserve(session, tenancy, range(4))
    assert outcomes == [GRANTED] * 3 + [NO_ROOM]
    assert parts.memory.used_bytes == parts.puts.reserved_bytes == 0
    copies = [parts.puts.take_for_copy(tenancy) for _ in range(2)]
    slots = [slot for slot in copies if slot is not None]
    result = parts.puts.seal(ticket, [0, 2], (), None, slots=slots)
    assert bytes(result.outcomes) == bytes([SEALED, SEALED])
    assert [parts.catalog.table.slot[Tier.CPU][row] for row in result.rows] == slots
    assert len(arena.free_offsets) == 2
    parts.puts.forfeit(ticket, None)
    assert len(arena.free_offsets) == 3
    assert parts.puts.reserved_bytes == parts.puts.copying_bytes == 0
    parts.check_integrity()


def test_copies_made_for_a_seal_that_comes_too_late_are_freed(
    parts: Core, tenancy: Tenancy, session: Session
) -> None:
    session.arena = arena = Arena(2)
    ticket, _ = parts.reserve(session, tenancy, range(2))
    slots = [parts.puts.take_for_copy(tenancy) or 0 for _ in range(2)]
    parts.clock.advance(RESERVATION_S)
    parts.puts.expire(parts.now_s())
    assert quarantined(parts)[1] == 0, "it writes to its own window, not to the pool"
    result = parts.puts.seal(ticket, [0, 1], (), None, slots=slots)
    assert bytes(result.outcomes) == bytes([REFUSED, REFUSED])
    assert parts.memory.used_bytes == parts.puts.reserved_bytes == parts.puts.copying_bytes == 0
    assert len(arena.free_offsets) == 2


# ---- any order of events


class PutMachine(RuleBasedStateMachine):
    """Two writers of few keys in a pool that holds fewer, against a dict of what each key's state should be."""

    KEYS = 9

    def __init__(self) -> None:
        super().__init__()
        self.context = core(2 << 20)
        self.parts = self.context.__enter__()
        self.tenancy = self.parts.tenancy()
        self.sessions = [self.parts.session() for _ in range(2)]
        self.tickets: list[Ticket] = []
        self.open: dict[int, Ticket] = {}  # key -> who may seal it
        self.told: list[tuple[int, Outcome]] = []
        self.waiting: dict[int, set[int]] = {}  # waiter -> what it has not seen yet
        self.waiters = 0

    def teardown(self) -> None:
        for session in self.sessions:
            self.parts.puts.end_session(session, gone=True)
        assert len(self.parts.puts) == self.parts.puts.reserved_bytes == self.parts.puts.quarantined_bytes == 0
        self.parts.check_integrity()
        self.context.__exit__(None, None, None)

    def end_open(self, ticket: Ticket, keys: set[int]) -> None:
        """The keys will not be sealed by this ticket: whoever waits for one of them is told."""
        for key in sorted(keys):
            if self.open.get(key) is ticket:
                del self.open[key]
                self.expect_told({key}, Outcome.ABORTED)

    def expect_told(self, keys: set[int], outcome: Outcome) -> None:
        for waiter, missing in list(self.waiting.items()):
            if outcome is Outcome.ABORTED and missing & keys:
                del self.waiting[waiter]
                assert (waiter, outcome) in self.told
            elif outcome is Outcome.HIT:
                missing -= keys
                if not missing:
                    del self.waiting[waiter]
                    assert (waiter, outcome) in self.told

    @staticmethod
    def key_of(ticket: Ticket, position: int) -> int:
        return next(key for key in range(PutMachine.KEYS) if hash_of(key) == ticket.hashes[position])

    @rule(session=st.integers(0, 1), keys=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5))
    def reserve(self, session: int, keys: list[int]) -> None:
        before = set(self.parts.keys_of(self.tenancy, range(self.KEYS)))
        ticket, outcomes = self.parts.reserve(self.sessions[session], self.tenancy, keys)
        self.tickets.append(ticket)
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            if key in before:
                assert outcome is PRESENT
            elif key in self.open or key in keys[:at]:
                assert outcome in (BUSY, NO_ROOM)
            else:
                assert outcome in (GRANTED, NO_ROOM)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is GRANTED:
                self.open[key] = ticket

    @precondition(lambda self: self.tickets)
    @rule(pick=st.integers(0, 100), which=st.none() | st.lists(st.integers(0, 5), max_size=4, unique=True))
    def seal(self, pick: int, which: list[int] | None) -> None:
        ticket = self.tickets[pick % len(self.tickets)]
        positions = ticket.positions(Put.OPEN) if which is None else which
        states = [ticket.states[at] if at < len(ticket.states) else Put.FREE for at in positions]
        outcomes = self.parts.seal(ticket, which)
        for position, state, outcome in zip(positions, states, outcomes, strict=True):
            if state == Put.OPEN:
                assert outcome is SEALED
                key = self.key_of(ticket, position)
                assert self.open.pop(key) is ticket
                self.expect_told({key}, Outcome.HIT)
            else:
                assert outcome is REFUSED

    @precondition(lambda self: self.tickets)
    @rule(pick=st.integers(0, 100), which=st.none() | st.lists(st.integers(0, 5), max_size=4, unique=True))
    def forfeit(self, pick: int, which: list[int] | None) -> None:
        ticket = self.tickets[pick % len(self.tickets)]
        positions = range(len(ticket.states)) if which is None else which
        still_open = set(positions) & set(ticket.positions(Put.OPEN))
        keys = {self.key_of(ticket, position) for position in still_open}
        self.parts.puts.forfeit(ticket, which)
        self.end_open(ticket, keys)

    @rule(seconds=st.sampled_from([1.0, RESERVATION_S / 2, RESERVATION_S]))
    def time_passes(self, seconds: float) -> None:
        self.parts.clock.advance(seconds)
        self.parts.puts.expire(self.parts.now_s())
        for key, ticket in list(self.open.items()):
            if ticket.ends_s <= self.parts.now_s():
                self.end_open(ticket, {key})

    @rule(session=st.integers(0, 1), gone=st.booleans())
    def end_session(self, session: int, gone: bool) -> None:
        ended = self.sessions[session]
        self.parts.puts.end_session(ended, gone=gone)
        for key, ticket in list(self.open.items()):
            if ticket.session is ended:
                self.end_open(ticket, {key})
        self.sessions[session] = self.parts.session()
        if not gone:
            self.parts.puts.end_session(ended, gone=True)

    @rule(keys=st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=3))
    def wait(self, keys: set[int]) -> None:
        missing = keys - set(self.parts.keys_of(self.tenancy, range(self.KEYS)))
        if missing:
            number = self.waiters = self.waiters + 1
            self.parts.puts.wait(self.tenancy, hashes_of(sorted(missing)), lambda out: self.told.append((number, out)))
            self.waiting[number] = missing

    @rule()
    def drop_everything(self) -> None:
        self.parts.catalog.drop_all(self.tenancy)
        self.parts.puts.drop_all(self.tenancy)
        self.parts.catalog.reclaim(100)
        for key, ticket in list(self.open.items()):
            self.end_open(ticket, {key})
        assert self.parts.keys_of(self.tenancy, range(self.KEYS)) == []

    @invariant()
    def is_whole(self) -> None:
        self.parts.check_integrity([ticket for ticket in self.tickets if ticket.has_slots])
        if self.open:
            _, outcomes = self.parts.reserve(self.sessions[0], self.tenancy, sorted(self.open))
            assert set(outcomes) == {BUSY}
        told = [number for number, _ in self.told]
        assert len(told) == len(set(told)), "somebody was told twice"
        assert set(told) == set(range(1, self.waiters + 1)) - set(self.waiting)


TestPutMachine = PutMachine.TestCase
TestPutMachine.settings = settings(max_examples=examples(100), stateful_step_count=30)
