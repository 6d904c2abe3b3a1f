"""Reads: what is there, and leases on it, loaded from ssd first where needed.

Theory of operation. What lies in memory is granted at once, without an await. Else a request goes in rounds: it waits
for blocks that others are writing, starts loads for what is on ssd as far as there is room, waits for those loads,
and grants what is ready then. A copying request never waits for room while it holds any: what found none is answered
LATER, and the client asks again after it has copied the rest. A lease for zero-copy views is all or nothing.

Invariants
1. Each key of a request gets one outcome, and is counted once (when the request says that it is to be counted).
2. Whatever a request holds while it waits is let go when it ends, is cancelled, or fails.
3. No wait is longer than the request's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from kvstore.catalog import Catalog
from kvstore.clock import Clock
from kvstore.errors import TooManyLeases
from kvstore.lease import Leases, Session
from kvstore.loads import Load, Loads
from kvstore.puts import Arrival, Puts
from kvstore.recency import Behind
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.wire import MISS_FIRST, Acquire, Acquired, Found, Lookup, Outcome

_ROOM_ROUND_S = 0.1
_IN_MEMORY = frozenset(residency for residency in range(16) if residency & Tier.CPU.bit)


@dataclass(slots=True)
class ReadLimits:
    """Longest lease, bytes one copying lease may cover, and whether readers are told the checksums."""

    lease_s_max: float
    window_bytes: int
    verify_reads: bool = False


class Reads:
    """Answers lookups and acquires.

    `loads` is None on a node without an ssd tier. `note_use` is told of the rows that were granted, tail of the
    prefix first, and of the block that they continue; it may take its time, the answer doesn't wait for it.
    """

    def __init__(
        self,
        catalog: Catalog,
        leases: Leases,
        puts: Puts,
        loads: Loads | None,
        clock: Clock,
        limits: ReadLimits,
        note_use: Callable[[Sequence[int], Behind | None], None],
    ) -> None:
        self._note_use = note_use
        self.limits = limits
        self._catalog = catalog
        self._leases = leases
        self._puts = puts
        self._loads = loads
        self._clock = clock

    # ---- lookup

    def lookup(self, tenancy: Tenancy, request: Lookup) -> Found:
        """Return what is there; counts every key as queried, and as a hit or a miss."""
        catalog, hashes = self._catalog, request.hashes
        over = self._over(tenancy, hashes)
        if request.run:
            rows: Sequence[int | None] = catalog.leading_rows(tenancy, hashes)
        else:
            rows = [catalog.find(tenancy, block_hash) for block_hash in hashes]
        found = [row for row in rows if row is not None]
        residency = bytes(map(catalog.table.residency.__getitem__, found))
        within = self._within_budget(found, residency, request.max_ms)
        outcomes = bytearray([Outcome.ABSENT]) * len(hashes)
        tiers = bytearray(len(hashes))
        for position in over:
            outcomes[position] = Outcome.EXPIRED
        if request.run:
            hits = within
            outcomes[:hits] = bytes([Outcome.HIT]) * hits
            tiers[:hits] = residency[:hits]
            if within < len(found):
                outcomes[within : len(found)] = bytes([Outcome.BUDGET]) * (len(found) - within)
        else:
            seen = 0
            for position, row in enumerate(rows):
                if row is not None:
                    outcomes[position] = Outcome.HIT if seen < within else Outcome.BUDGET
                    tiers[position] = residency[seen] if seen < within else 0
                    seen += 1
            hits = next((at for at, row in enumerate(outcomes) if row != Outcome.HIT), len(outcomes))
        self.count(tenancy, outcomes, tiers)
        return Found(request.id, hits, bytes(outcomes), bytes(tiers))

    def _over(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> list[int]:
        """Return the positions of blocks whose life is over; they are dropped."""
        if not tenancy.any_expire:
            return []
        over = [at for at, block_hash in enumerate(hashes) if self._catalog.is_over(tenancy, block_hash)]
        for position in over:
            self._catalog.find(tenancy, hashes[position])
        return over

    def _within_budget(self, rows: Sequence[int], residency: bytes, max_ms: float | None) -> int:
        """Return how many leading rows are in memory or can be loaded within `max_ms`."""
        if max_ms is None or self._loads is None:
            return len(rows)
        size_bytes = 0
        for position, row in enumerate(rows):
            if not residency[position] & Tier.CPU.bit:
                size_bytes += self._catalog.slot_bytes(row)
                if self._loads.expected_s(size_bytes) * 1000 > max_ms:
                    return position
        return len(rows)

    def count(self, tenancy: Tenancy, outcomes: bytes | bytearray, tiers: bytes | bytearray) -> None:
        """Count blocks that were asked for, each as a hit in its fastest tier or as a miss with its reason."""
        counters = tenancy.counters
        counters.queried_blocks += len(outcomes)
        for residency in set(tiers):
            if residency:
                tier = fastest(residency)
                hits = tiers.count(residency)
                counters.hit_blocks[tier] += hits
                self._catalog.counters[tier].hits += hits
        for outcome in set(outcomes):
            if outcome >= MISS_FIRST:
                counters.misses[Outcome(outcome).name.lower()] += outcomes.count(outcome)

    # ---- acquire

    def acquire_now(self, session: Session, tenancy: Tenancy, request: Acquire) -> Acquired | None:
        """Return the answer if all blocks are in memory and may be pinned, else None: `acquire` is needed."""
        rows = self._catalog.leading_rows(tenancy, request.hashes)
        if len(rows) != len(request.hashes) or not rows:
            return None
        residency = self._catalog.table.residency
        if not all(map(_IN_MEMORY.__contains__, set(map(residency.__getitem__, rows)))):
            return None
        if request.copying and len(rows) * tenancy.slot_bytes > self.limits.window_bytes:
            return None
        if not request.copying and any(map(self._catalog.is_in_transit, rows)):
            return None
        try:
            outcomes = bytes([Outcome.HIT]) * len(rows)
            return self._grant(session, tenancy, request, rows, outcomes, bytes([Tier.CPU.bit]) * len(rows))
        except TooManyLeases:
            return None

    async def acquire(
        self,
        session: Session,
        tenancy: Tenancy,
        request: Acquire,
        brought: Mapping[bytes, Outcome] = MappingProxyType({}),
    ) -> Acquired:
        """Return a lease on what is there by the deadline, loading it first.

        `brought`: what became of blocks that another tier was asked for; HIT: they are in memory now, and counted as
        found in remote. Cancellation lets go of everything; loads that others wait for go on.
        """
        deadline_s = self._clock.monotonic_s() + request.deadline_s
        reasons = dict.fromkeys(request.hashes, Outcome.ABSENT)
        reasons.update((request.hashes[at], Outcome.EXPIRED) for at in self._over(tenancy, request.hashes))
        if request.wait_s:
            wait_s = min(request.wait_s, request.deadline_s)
            reasons.update(await self.wait(tenancy, [h for h in request.hashes if h not in brought], wait_s))
        reasons.update((h, outcome) for h, outcome in brought.items() if outcome != Outcome.HIT)
        while True:
            answer = await self._round(session, tenancy, request, reasons, deadline_s, brought)
            if answer is not None:
                return answer
            if self._clock.monotonic_s() >= deadline_s or session.over:
                return self._refused(tenancy, request, reasons)
            await self.room_may_have_changed(deadline_s)

    async def _round(
        self,
        session: Session,
        tenancy: Tenancy,
        request: Acquire,
        reasons: dict[bytes, Outcome],
        deadline_s: float,
        brought: Mapping[bytes, Outcome],
    ) -> Acquired | None:
        """Return an answer, or None if there is no room now for anything of it."""
        rows, outcomes = self._candidates(tenancy, request, reasons)
        if not request.copying:
            self._leases.check_ever([row for row in rows if row is not None], copying=False)
        sources = bytearray(0 if row is None else self._catalog.table.residency[row] for row in rows)
        for position, block_hash in enumerate(request.hashes) if brought else ():
            if brought.get(block_hash) == Outcome.HIT and sources[position]:
                sources[position] = Tier.REMOTE.bit
        if not request.copying and any(outcome >= MISS_FIRST for outcome in outcomes):
            return self._incomplete(tenancy, request, outcomes, sources)
        held: list[int] = []
        try:
            loads = self._hold(rows, outcomes, held, in_transit=request.copying)
            if not request.copying and Outcome.LATER in outcomes:
                return None
            if loads:
                await self._finish_loads(rows, outcomes, loads, deadline_s)
                self._leave_out_dropped(tenancy, request.hashes, rows, outcomes)
            ready = [row if outcome == Outcome.HIT else None for row, outcome in zip(rows, outcomes, strict=True)]
            if request.run:
                _cut_run(ready, outcomes)
            if not any(row is not None for row in ready) and Outcome.LATER in outcomes:
                return None
            if not request.copying and any(outcome != Outcome.HIT for outcome in outcomes):
                return self._incomplete(tenancy, request, outcomes, sources)
            try:
                return self._grant(session, tenancy, request, ready, bytes(outcomes), sources)
            except TooManyLeases:
                return None
        finally:
            for row in held:
                self._catalog.unhold(row)

    def _leave_out_dropped(
        self, tenancy: Tenancy, hashes: Sequence[bytes], rows: Sequence[int | None], outcomes: bytearray
    ) -> None:
        """Make misses of blocks that were dropped, or whose life ended, while the request waited for others."""
        for position, row in enumerate(rows):
            if outcomes[position] == Outcome.HIT and self._catalog.find(tenancy, hashes[position]) != row:
                outcomes[position] = Outcome.ABSENT

    def _candidates(
        self, tenancy: Tenancy, request: Acquire, reasons: dict[bytes, Outcome]
    ) -> tuple[list[int | None], bytearray]:
        """Return the row of each key that could be read, and an outcome each: HIT, LATER for all beyond a window."""
        catalog = self._catalog
        rows: list[int | None] = [catalog.find(tenancy, block_hash) for block_hash in request.hashes]
        outcomes = bytearray(len(rows))
        size_bytes, missed = 0, False
        room_bytes = min(self.limits.window_bytes, max(self._leases.room_bytes(), tenancy.slot_bytes))
        for position, row in enumerate(rows):
            if row is None or (missed and request.run):
                outcomes[position] = reasons[request.hashes[position]]
                if outcomes[position] == Outcome.LATER and not missed:
                    rows[position] = None
                    continue
                if outcomes[position] < MISS_FIRST:
                    outcomes[position] = Outcome.ABSENT
                rows[position] = None
                missed = True
                continue
            size_bytes += tenancy.slot_bytes
            fits = not request.copying or size_bytes <= room_bytes
            outcomes[position] = Outcome.HIT if fits else Outcome.LATER
        if request.max_ms is not None:
            self._apply_budget(rows, outcomes, request.max_ms)
        return rows, outcomes

    def _apply_budget(self, rows: list[int | None], outcomes: bytearray, max_ms: float) -> None:
        present = [row for row in rows if row is not None]
        residency = bytes(map(self._catalog.table.residency.__getitem__, present))
        left = self._within_budget(present, residency, max_ms)
        for position, row in enumerate(rows):
            if row is not None:
                if left <= 0:
                    rows[position], outcomes[position] = None, Outcome.BUDGET
                left -= 1

    def _hold(
        self, rows: list[int | None], outcomes: bytearray, held: list[int], *, in_transit: bool
    ) -> dict[int, Load]:
        """Hold what is in memory and start or join the loads of the rest; what finds no room becomes LATER.

        Unless a slot `in_transit` will do, what lies in one is LATER, too: it leaves when its reader is done.
        """
        residency = self._catalog.table.residency
        cold: dict[int, None] = {}  # in order, each once
        for position, row in enumerate(rows):
            if row is None or outcomes[position] != Outcome.HIT:
                continue
            if not in_transit and self._catalog.is_in_transit(row):
                outcomes[position] = Outcome.LATER
            elif residency[row] & Tier.CPU.bit:
                self._catalog.hold(row)
                held.append(row)
            else:
                cold[row] = None
        loads: dict[int, Load] = {}
        if self._loads is not None:
            for row, load in zip(cold, self._loads.load(list(cold), in_transit=in_transit), strict=True):
                if load is not None:
                    loads[row] = load
                    held.append(row)
        for position, row in enumerate(rows):
            if row in cold and row not in loads and outcomes[position] == Outcome.HIT:
                outcomes[position] = Outcome.LATER
        return loads

    async def _finish_loads(
        self, rows: list[int | None], outcomes: bytearray, loads: dict[int, Load], deadline_s: float
    ) -> None:
        waiting = [load.outcome for load in loads.values()]
        await asyncio.wait(waiting, timeout=max(0.0, deadline_s - self._clock.monotonic_s()))
        for position, row in enumerate(rows):
            if row in loads and outcomes[position] == Outcome.HIT:
                future = loads[row].outcome
                outcomes[position] = future.result() if future.done() else Outcome.DEADLINE

    def _grant(
        self,
        session: Session,
        tenancy: Tenancy,
        request: Acquire,
        rows: Sequence[int | None],
        outcomes: bytes,
        sources: bytes | bytearray,
    ) -> Acquired:
        """Return a lease on the rows that are not None, all in memory; `sources`: where they were before."""
        slots = self._catalog.table.slot[Tier.CPU]
        granted = [row for row in rows if row is not None] if None in rows else cast("list[int]", rows)
        lease_s = min(request.lease_s or self.limits.lease_s_max, self.limits.lease_s_max)
        token = 0
        if granted:
            ends_s = self._clock.monotonic_s() + lease_s
            token = self._leases.grant(session, granted, ends_s, copying=request.copying).token
            tenancy.counters.delivered_blocks += len(granted)
            self._catalog.counters[Tier.CPU].bytes_out += len(granted) * tenancy.block_bytes
            after = request.after
            self._note_use(granted[::-1], None if after is None else Behind(tenancy, after, or_last=request.run))
        if request.count:
            # LATER keys come again in the next request: they are counted there.
            if len(granted) == len(rows):
                self.count(tenancy, outcomes, sources)
            else:
                final = [at for at, outcome in enumerate(outcomes) if outcome != Outcome.LATER]
                tiers = bytes(sources[at] if outcomes[at] == Outcome.HIT else 0 for at in final)
                self.count(tenancy, bytes(outcomes[at] for at in final), tiers)
        if len(granted) == len(rows):
            offsets = list(map(slots.__getitem__, granted))
        else:
            offsets = [0 if row is None else slots[row] for row in rows]
        checksums: list[int] = []
        if self.limits.verify_reads:
            checksums = [0 if row is None else self._catalog.table.checksum[row] for row in rows]
        return Acquired(request.id, token, lease_s, outcomes, offsets, checksums)

    def _refused(self, tenancy: Tenancy, request: Acquire, reasons: dict[bytes, Outcome]) -> Acquired:
        """Return an answer that grants nothing: a reason for each miss, NO_ROOM for what is there."""
        outcomes = self._candidates(tenancy, request, reasons)[1]
        final = bytes(outcome if outcome >= MISS_FIRST else Outcome.NO_ROOM for outcome in outcomes)
        return self._nothing(tenancy, request, final, bytes(len(final)))

    def _incomplete(
        self, tenancy: Tenancy, request: Acquire, outcomes: bytearray, sources: bytes | bytearray
    ) -> Acquired:
        """Return the answer to an all-or-nothing request of which something is missing; the rest are hits, unheld."""
        found = bytes(tier if outcome == Outcome.HIT else 0 for tier, outcome in zip(sources, outcomes, strict=True))
        return self._nothing(tenancy, request, bytes(outcomes), found)

    def _nothing(self, tenancy: Tenancy, request: Acquire, outcomes: bytes, tiers: bytes) -> Acquired:
        if request.count:
            self.count(tenancy, outcomes, tiers)
        return Acquired(request.id, 0, 0.0, outcomes, [0] * len(outcomes))

    async def room_may_have_changed(self, deadline_s: float) -> None:
        """Return soon: leases end and slots free by events of many kinds, so look again at short intervals."""
        left_s = max(0.0, deadline_s - self._clock.monotonic_s())
        await self._leases.released(min(left_s, _ROOM_ROUND_S))

    # ---- waiting and prefetching

    async def wait(self, tenancy: Tenancy, hashes: Sequence[bytes], wait_s: float) -> dict[bytes, Outcome]:
        """Return an outcome for each block that is not there: ABORTED or DEADLINE; woken by the seal or the abort."""
        missing = [h for h in hashes if self._catalog.find(tenancy, h) is None]
        if not missing:
            return {}
        told: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def tell(outcome: Outcome) -> None:
            if not told.done():
                told.set_result(outcome)

        arrival: Arrival = self._puts.wait(tenancy, missing, tell)
        try:
            async with asyncio.timeout(wait_s):
                outcome = await told
        except TimeoutError:
            outcome = Outcome.DEADLINE
        finally:
            self._puts.stop_waiting(arrival)
        return {h: outcome for h in missing if self._catalog.find(tenancy, h) is None}

    async def hold_in_memory(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> list[int]:
        """Return the rows of these blocks that are in memory now, loaded if need be, each held for the caller."""
        rows = [row for h in hashes if (row := self._catalog.find(tenancy, h)) is not None]
        outcomes = bytearray([Outcome.HIT]) * len(rows)
        held: list[int] = []
        wanted: list[int | None] = list(rows)
        try:
            loads = self._hold(wanted, outcomes, held, in_transit=True)
            if loads:
                await self._finish_loads(wanted, outcomes, loads, self._clock.monotonic_s() + self.limits.lease_s_max)
        except BaseException:
            for row in held:
                self._catalog.unhold(row)
            raise
        kept = [row for row, outcome in zip(rows, outcomes, strict=True) if outcome == Outcome.HIT]
        for row in held:
            if row not in kept:
                self._catalog.unhold(row)
        return kept

    def prefetch(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> bytes:
        """Start loading blocks; HIT: in memory or on its way, NO_ROOM, or ABSENT.

        One call loads a window's bytes at most: it must not turn the whole tier over.
        """
        outcomes = bytearray([Outcome.HIT]) * len(hashes)
        cold: dict[int, int] = {}  # row -> position
        for position, block_hash in enumerate(hashes):
            row = self._catalog.find(tenancy, block_hash)
            if row is None:
                outcomes[position] = Outcome.ABSENT
            elif not self._catalog.table.residency[row] & Tier.CPU.bit:
                cold[row] = position
        if self._loads is None:
            return bytes(outcomes)
        wanted = list(cold)[: max(1, self.limits.window_bytes // tenancy.slot_bytes)]
        loads = dict(zip(wanted, self._loads.load(wanted, in_transit=False), strict=True))
        for row, position in cold.items():
            if loads.get(row) is None:
                outcomes[position] = Outcome.NO_ROOM
            else:
                self._catalog.unhold(row)
        return bytes(outcomes)


def fastest(residency: int) -> Tier:
    """Return the fastest tier in a residency."""
    return Tier((residency & -residency).bit_length() - 1)


def _cut_run(rows: list[int | None], outcomes: bytearray) -> None:
    """Let go of everything behind the first key that is not ready."""
    for position, row in enumerate(rows):
        if row is None:
            for behind in range(position + 1, len(rows)):
                if rows[behind] is not None:
                    rows[behind] = None
                    outcomes[behind] = Outcome.LATER if outcomes[position] == Outcome.LATER else Outcome.ABSENT
            return
