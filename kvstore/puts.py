"""Puts: tickets from reserve to seal or forfeit, and those who wait for a block to arrive.

A ticket covers one reserve: a list of hashes, of which some were granted a slot each. It belongs to a session. Its
rights end at its deadline or with its session; its slots come back only when their writer says so or its process is
gone, because until then somebody may still be writing there.

Invariants
1. A hash has at most one OPEN put in a namespace; `_writing` names it.
2. A slot in state OPEN or OVERDUE belongs to its ticket, in state SEALED to a row of the catalog.
3. What is open or in quarantine is bounded: in all, and for each process.
4. The first valid seal wins; a seal of a position that is not OPEN, or of a namespace dropped since, is REFUSED.
5. Everybody who waits is told of a seal, a forfeit or an abort at once, in the order they came.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.catalog import Catalog
from kvstore.checksum import NOT_COMPUTED
from kvstore.errors import LeaseExpired
from kvstore.lease import Session, WriteWindow
from kvstore.lifecycle import Put, PutEvent, next_put
from kvstore.recency import Behind
from kvstore.room import Room
from kvstore.table import NEVER_S, Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import Outcome


@dataclass(eq=False, slots=True)
class Ticket:
    """One reserve. `states`, `offsets` and `hashes` are parallel."""

    token: int
    session: Session
    tenancy: Tenancy
    epoch: int
    hashes: Sequence[bytes]
    states: bytearray
    offsets: list[int]
    ends_s: float
    arena: WriteWindow | None  # strict mode: `offsets` lie there, not in the pool
    ttl_s: float | None = None  # life of what is sealed without one of its own; None: the namespace's

    @property
    def slot_charge(self) -> int:
        """Bytes of the pool that one of its slots takes."""
        return self.tenancy.slot_bytes if self.arena is None else 0

    def positions(self, *states: Put) -> list[int]:
        if len(states) == 1 and self.states.count(states[0]) == len(self.states):
            return list(range(len(self.states)))
        return [position for position, state in enumerate(self.states) if state in states]

    @property
    def has_slots(self) -> bool:
        """Whether its writer may still write to any slot of it."""
        return Put.OPEN in self.states or Put.OVERDUE in self.states


@dataclass(eq=False, slots=True)
class Arrival:
    """Somebody waits for `missing` blocks; `tell` is called once, with HIT when all are there or with ABORTED."""

    tenancy: Tenancy
    missing: set[bytes]
    tell: Callable[[Outcome], None]


@dataclass(slots=True)
class PutLimits:
    """Bytes that may be open or in quarantine, in all and for one process; how long a put may take."""

    total_bytes: int
    process_bytes: int
    reservation_s: float


@dataclass(slots=True)
class SealResult:
    """What a seal did: an outcome a position, and the rows that are new."""

    outcomes: bytearray
    rows: list[int] = field(default_factory=list[int])


class Puts:
    """All tickets of a store. Times are CLOCK_MONOTONIC seconds. `note_use` is told of blocks that were present."""

    def __init__(
        self,
        catalog: Catalog,
        memory: MemoryTier,
        room: Room,
        limits: PutLimits,
        note_use: Callable[[Sequence[int], Behind | None], None],
    ) -> None:
        self._note_use = note_use
        self.reserved_bytes = 0  # of the pool: open puts, and copies being made in strict mode
        self.copying_bytes = 0
        self.quarantined_bytes = 0
        self.quarantined_slots = 0
        self.limits = limits
        self._catalog = catalog
        self._memory = memory
        self._room = room
        self._process_bytes: Counter[int] = Counter()  # open and in quarantine, by process
        self._tickets: dict[int, Ticket] = {}
        self._writing: dict[int, dict[bytes, Ticket]] = {}  # by namespace and hash
        self._arrivals: dict[tuple[int, bytes], list[Arrival]] = {}
        self._ends: list[tuple[float, int]] = []
        self._next_token = 1

    def __len__(self) -> int:
        return len(self._tickets)

    def namespaces(self) -> set[int]:
        """Return the numbers of the namespaces of tickets and of those who wait."""
        return {ticket.tenancy.number for ticket in self._tickets.values()} | {number for number, _ in self._arrivals}

    def reserve(
        self,
        session: Session,
        tenancy: Tenancy,
        hashes: Sequence[bytes],
        now_s: float,
        *,
        after: bytes | None = None,
        pool: bool = False,
        again: bool = False,
    ) -> tuple[Ticket, bytes]:
        """Return a ticket and an outcome a hash: GRANTED, PRESENT, BUSY or NO_ROOM. A repeated hash is BUSY.

        `after`: the block that the first of these continues, if an earlier request had it.
        `pool`: take slots of the pool even if the session has a write window; the daemon itself writes them.
        `again`: it was asked for in vain before, so what is there or busy has been counted.
        """
        count = len(hashes)
        ticket = Ticket(
            self._next_token, session, tenancy, tenancy.epoch, hashes, bytearray(count), [0] * count,
            now_s + self.limits.reservation_s, None if pool else session.arena,
        )  # fmt: skip
        self._next_token += 1
        writing = self._writing.setdefault(tenancy.number, {})
        outcomes = bytearray([Outcome.GRANTED]) * count
        wanted: Sequence[int] = range(count)
        present: list[int] = []
        new = tenancy.rows.keys().isdisjoint(hashes) and writing.keys().isdisjoint(hashes)
        if not new or len(set(hashes)) != count:
            wanted, present = self._sorted_out(tenancy, hashes, outcomes)
        for row in present:  # or the head of a prefix would make room for its own tail
            self._catalog.hold(row)
        try:
            taken = self._take(ticket, len(wanted))
        finally:
            for row in present:
                self._catalog.unhold(row)
        if not again:
            tenancy.counters.present_blocks += outcomes.count(Outcome.PRESENT)
            tenancy.counters.busy_blocks += outcomes.count(Outcome.BUSY)
            self._note_use(present[::-1], None if after is None else Behind(tenancy, after, or_last=False))
        for position in wanted[len(taken) :]:
            outcomes[position] = Outcome.NO_ROOM
        if taken:
            opened = next_put(Put.FREE, PutEvent.GRANT)
            for position, offset in zip(wanted, taken, strict=False):
                ticket.states[position] = opened
                ticket.offsets[position] = offset
                writing[hashes[position]] = ticket
            self.reserved_bytes += ticket.slot_charge * len(taken)
            self._charge(ticket, len(taken))
            if ticket.arena is None:
                self._catalog.promise(tenancy, Tier.CPU, len(taken))
            self._tickets[ticket.token] = ticket
            session.tickets.add(ticket.token)
            heapq.heappush(self._ends, (ticket.ends_s, ticket.token))
        return ticket, bytes(outcomes)

    def _sorted_out(
        self, tenancy: Tenancy, hashes: Sequence[bytes], outcomes: bytearray
    ) -> tuple[list[int], list[int]]:
        """Return the positions of blocks that nobody has or writes, and the rows of those that are there.

        Those outcomes become PRESENT, and BUSY what somebody writes.
        """
        writing = self._writing[tenancy.number]
        wanted: list[int] = []
        present: list[int] = []
        seen: set[bytes] = set()
        for position, block_hash in enumerate(hashes):
            row = self._catalog.find(tenancy, block_hash)
            if row is not None:
                outcomes[position] = Outcome.PRESENT
                present.append(row)
            elif block_hash in writing or block_hash in seen:
                outcomes[position] = Outcome.BUSY
            else:
                seen.add(block_hash)
                wanted.append(position)
        return wanted, present

    def ticket(self, session: Session, token: int) -> Ticket:
        """Return a live ticket of this session; LeaseExpired if there is none."""
        ticket = self._tickets.get(token)
        if ticket is None or ticket.session is not session:
            raise LeaseExpired(f"ticket {token} is over or not this connection's: reserve again")
        return ticket

    def seal(
        self,
        ticket: Ticket,
        which: Sequence[int] | None,
        checksums: Sequence[int],
        ttl_s: float | None,
        *,
        after: bytes | None = None,
        slots: Sequence[int] | None = None,
    ) -> SealResult:
        """Make the positions `which` (None: all open ones; each at most once) visible.

        `after` is the block that they continue, if nothing before them in the ticket is there.
        `slots` are slots in the pool that hold copies of them, parallel to `which`, in strict mode; whatever is not
        sealed of them is freed.
        """
        tenancy = ticket.tenancy
        positions = ticket.positions(Put.OPEN) if which is None else which
        result = SealResult(bytearray([Outcome.SEALED]) * len(positions))
        sealed = self._admitted(ticket, positions, slots, result.outcomes)
        if sealed:
            hashes = [ticket.hashes[positions[at]] for at in sealed]
            offsets = [ticket.offsets[positions[at]] for at in sealed]
            state = next_put(Put.OPEN, PutEvent.SEAL)
            for at in sealed:
                ticket.states[positions[at]] = state
            writing = self._writing[tenancy.number]
            for block_hash in hashes:
                del writing[block_hash]
            self._charge(ticket, -len(sealed))
            if slots is not None and ticket.arena is not None:
                for offset in offsets:
                    ticket.arena.free(offset)
                offsets = [slots[at] for at in sealed]
                self.copying_bytes -= tenancy.slot_bytes * len(sealed)
            self.reserved_bytes -= tenancy.slot_bytes * len(sealed)
            self._catalog.promise(tenancy, Tier.CPU, -len(sealed))
            sums = [checksums[at] for at in sealed] if checksums else [NOT_COMPUTED] * len(sealed)
            result.rows = self._catalog.adopt(
                tenancy, hashes, offsets, sums, ttl_s,
                self._continued(ticket, positions[sealed[0]], after),
            )  # fmt: skip
            self._memory.set_owners(offsets, result.rows)
            tenancy.counters.stored_blocks += len(sealed)
            self._catalog.counters[Tier.CPU].bytes_in += len(sealed) * tenancy.block_bytes
            self._arrived(tenancy, hashes)
        self._finish(ticket)
        return result

    def _admitted(
        self, ticket: Ticket, positions: Sequence[int], slots: Sequence[int] | None, outcomes: bytearray
    ) -> list[int]:
        """Return the indices of `positions` that become blocks; the others' outcomes are set and their slots freed."""
        tenancy, states = ticket.tenancy, ticket.states
        dropped = ticket.epoch != tenancy.epoch
        admitted: list[int] = []
        for at, position in enumerate(positions):
            if dropped or position >= len(states) or states[position] != Put.OPEN:
                outcomes[at] = Outcome.REFUSED
            elif ticket.hashes[position] in tenancy.rows and self._is_there(ticket, position):
                outcomes[at] = Outcome.PRESENT
            else:
                admitted.append(at)
                continue
            if position < len(states) and states[position] in (Put.OPEN, Put.OVERDUE):
                self._give_back(ticket, position)
            if slots is not None:
                self.free_copy(tenancy, slots[at])
        return admitted

    def _continued(self, ticket: Ticket, position: int, after: bytes | None) -> Behind | None:
        """Return the block before a position in its chain, the nearest one that is there."""
        tenancy = ticket.tenancy
        for earlier in range(position - 1, -1, -1):
            if ticket.hashes[earlier] in tenancy.rows:
                return Behind(tenancy, ticket.hashes[earlier], or_last=False)
        return None if after is None else Behind(tenancy, after, or_last=after not in tenancy.rows)

    def _is_there(self, ticket: Ticket, position: int) -> bool:
        return self._catalog.find(ticket.tenancy, ticket.hashes[position]) is not None

    def forfeit(self, ticket: Ticket, which: Sequence[int] | None) -> int:
        """Give up positions (None: all that are left), which are not written any more; return how many."""
        positions = ticket.positions(Put.OPEN, Put.OVERDUE) if which is None else which
        count = 0
        for position in positions:
            if position < len(ticket.states) and ticket.states[position] in (Put.OPEN, Put.OVERDUE):
                self._give_back(ticket, position)
                count += 1
        self._finish(ticket)
        return count

    def end_session(self, session: Session, *, gone: bool) -> None:
        """End the rights of a session's tickets; if its process is `gone` their slots come back, too."""
        for token in list(session.tickets):
            ticket = self._tickets[token]
            if gone:
                self.forfeit(ticket, None)
            else:
                self._expire(ticket)

    def expire(self, now_s: float) -> None:
        """End the rights of tickets whose time is over; their slots are in quarantine from now on."""
        while self._ends and self._ends[0][0] <= now_s:
            _, token = heapq.heappop(self._ends)
            if token in self._tickets:
                self._expire(self._tickets[token])

    # ---- waiting

    def wait(self, tenancy: Tenancy, missing: Iterable[bytes], tell: Callable[[Outcome], None]) -> Arrival:
        """Register somebody who waits for blocks that are not there; `stop_waiting` must be called in the end."""
        arrival = Arrival(tenancy, set(missing), tell)
        for block_hash in arrival.missing:
            self._arrivals.setdefault((tenancy.number, block_hash), []).append(arrival)
        return arrival

    def stop_waiting(self, arrival: Arrival) -> None:
        """Undo `wait`; harmless after it was told."""
        for block_hash in arrival.missing:
            waiting = self._arrivals.get((arrival.tenancy.number, block_hash))
            if waiting is not None and arrival in waiting:
                waiting.remove(arrival)
                if not waiting:
                    del self._arrivals[arrival.tenancy.number, block_hash]
        arrival.missing = set()

    def abort(self, tenancy: Tenancy, hashes: Iterable[bytes]) -> int:
        """Tell everybody who waits for these blocks that they will not come; return how many were told."""
        told = 0
        for block_hash in hashes:
            for arrival in list(self._arrivals.get((tenancy.number, block_hash), ())):
                self.stop_waiting(arrival)
                arrival.tell(Outcome.ABORTED)
                told += 1
        return told

    def drop_all(self, tenancy: Tenancy) -> None:
        """The namespace was dropped: its open puts can't be sealed any more, and nobody need wait for them."""
        self._writing.pop(tenancy.number, None)
        for ticket in [ticket for ticket in self._tickets.values() if ticket.tenancy is tenancy]:
            for position in ticket.positions(Put.OPEN):
                self._to_quarantine(ticket, position)
                self.abort(tenancy, (ticket.hashes[position],))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        reserved = quarantined = 0
        for ticket in self._tickets.values():
            assert ticket.token in ticket.session.tickets
            for position in ticket.positions(Put.OPEN):
                assert self._writing[ticket.tenancy.number][ticket.hashes[position]] is ticket
            reserved += len(ticket.positions(Put.OPEN)) * ticket.slot_charge
            quarantined += len(ticket.positions(Put.OVERDUE)) * ticket.slot_charge
        assert reserved + self.copying_bytes == self.reserved_bytes
        assert quarantined == self.quarantined_bytes
        assert sum(self._process_bytes.values()) == reserved + quarantined
        written = sum(map(len, self._writing.values()))
        assert written == sum(len(ticket.positions(Put.OPEN)) for ticket in self._tickets.values())

    # ---- the inside

    def _take(self, ticket: Ticket, count: int) -> list[int]:
        """Return the offsets of up to `count` slots, as far as the limits allow."""
        slot_bytes = ticket.tenancy.slot_bytes
        if ticket.arena is not None:
            return ticket.arena.allocate_many(slot_bytes, count)
        left_bytes = min(
            self.limits.total_bytes - self.reserved_bytes - self.quarantined_bytes,
            self.limits.process_bytes - self._process_bytes[ticket.session.holder],
        )
        fits = max(0, left_bytes // slot_bytes)
        if not fits and not self.reserved_bytes and not self.quarantined_bytes:
            fits = 1  # however small the tier: else nothing could ever be stored
        return self._room.take_many(ticket.tenancy, min(count, fits))

    def take_for_copy(self, tenancy: Tenancy) -> int | None:
        """Return a slot of the pool for the daemon's own copy in strict mode; `seal` or `free_copy` must follow."""
        offset = self._room.take(tenancy)
        if offset is not None:
            self.reserved_bytes += tenancy.slot_bytes
            self.copying_bytes += tenancy.slot_bytes
            self._catalog.promise(tenancy, Tier.CPU, 1)
        return offset

    def free_copy(self, tenancy: Tenancy, offset: int) -> None:
        """Undo `take_for_copy`."""
        self.reserved_bytes -= tenancy.slot_bytes
        self.copying_bytes -= tenancy.slot_bytes
        self._catalog.promise(tenancy, Tier.CPU, -1)
        self._memory.free(offset)

    def keep_copy(self, tenancy: Tenancy, block_hash: bytes, offset: int, sum_: int, life_s: float) -> int:
        """Make a copy of the daemon's own a block, and return its row; if it is there already the copy is given up."""
        row = self._catalog.find(tenancy, block_hash)
        if row is not None:
            self.free_copy(tenancy, offset)
            return row
        self.reserved_bytes -= tenancy.slot_bytes
        self.copying_bytes -= tenancy.slot_bytes
        self._catalog.promise(tenancy, Tier.CPU, -1)
        (row,) = self._catalog.adopt(tenancy, (block_hash,), (offset,), (sum_,), 0.0 if life_s == NEVER_S else life_s)
        self._memory.set_owners((offset,), (row,))
        self._arrived(tenancy, (block_hash,))
        return row

    def _give_back(self, ticket: Ticket, position: int) -> None:
        """The writer is done with this slot and it holds nothing: free it."""
        charged = ticket.slot_charge
        if ticket.states[position] == Put.OPEN:
            ticket.states[position] = next_put(Put.OPEN, PutEvent.FORFEIT)
            del self._writing[ticket.tenancy.number][ticket.hashes[position]]
            self.reserved_bytes -= charged
            if ticket.hashes[position] not in ticket.tenancy.rows:
                self.abort(ticket.tenancy, (ticket.hashes[position],))
        else:
            ticket.states[position] = next_put(ticket.states[position], PutEvent.ACKNOWLEDGE)
            self.quarantined_bytes -= charged
            self.quarantined_slots -= 1
        self._charge(ticket, -1)
        if ticket.arena is None:
            self._catalog.promise(ticket.tenancy, Tier.CPU, -1)
            self._memory.free(ticket.offsets[position])
        else:
            ticket.arena.free(ticket.offsets[position])

    def _expire(self, ticket: Ticket) -> None:
        for position in ticket.positions(Put.OPEN):
            del self._writing[ticket.tenancy.number][ticket.hashes[position]]
            self._to_quarantine(ticket, position)
            self.abort(ticket.tenancy, (ticket.hashes[position],))

    def _to_quarantine(self, ticket: Ticket, position: int) -> None:
        charged = ticket.slot_charge
        ticket.states[position] = next_put(ticket.states[position], PutEvent.EXPIRE)
        self.reserved_bytes -= charged
        self.quarantined_bytes += charged
        self.quarantined_slots += 1

    def _charge(self, ticket: Ticket, slots: int) -> None:
        process = ticket.session.holder
        self._process_bytes[process] += slots * ticket.slot_charge
        if not self._process_bytes[process]:
            del self._process_bytes[process]

    def _finish(self, ticket: Ticket) -> None:
        if not ticket.has_slots:
            self._tickets.pop(ticket.token, None)
            ticket.session.tickets.discard(ticket.token)

    def _arrived(self, tenancy: Tenancy, hashes: Iterable[bytes]) -> None:
        if not self._arrivals:
            return
        for block_hash in hashes:
            if block_hash in tenancy.rows:
                for arrival in self._arrivals.pop((tenancy.number, block_hash), ()):
                    arrival.missing.discard(block_hash)
                    if not arrival.missing:
                        arrival.tell(Outcome.HIT)
