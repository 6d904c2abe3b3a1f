"""Lookups and acquires on a node with a remote tier: what this node does not have is asked for there.

Theory of operation. The remote tier has no rows, so each question about blocks that are not here goes to it, within a
bound of time; the answers about what is here come from `Reads` as ever. An acquire first loads what is missing here and
there is room for, holds it, and then is what it always was: a lease on blocks in memory.

Invariants
1. A request whose blocks are all here never waits for the remote tier.
2. Each key is counted once, under the tier it was found in: what was loaded for a request counts as found in remote.
3. Whatever a request holds while it waits is let go when it ends, is cancelled, or fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec

from kvstore.catalog import Catalog
from kvstore.clock import Clock
from kvstore.lease import Session
from kvstore.loads import Loads
from kvstore.reads import Reads
from kvstore.remote_loads import RemoteLoad, RemoteLoads
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.remote import RemoteScope, RemoteStore
from kvstore.wire import Acquire, Acquired, Found, Lookup, Outcome

FIND_S_MAX = 0.25  # for a lookup, which a scheduler waits for
FIND_FOR_ACQUIRE_S_MAX = 2.0


class RemoteReads:
    """See the module's docstring. `loads` are those from ssd, None on a node without that tier."""

    def __init__(
        self,
        catalog: Catalog,
        reads: Reads,
        loads: Loads | None,
        remote_loads: RemoteLoads,
        store: RemoteStore,
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._reads = reads
        self._loads = loads
        self._remote_loads = remote_loads
        self._store = store
        self._clock = clock

    def are_all_here(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> bool:
        """Whether a question about these blocks can be answered without the remote tier."""
        return len(self._catalog.leading_rows(tenancy, hashes)) == len(hashes)

    # ---- lookup

    async def lookup(self, tenancy: Tenancy, request: Lookup) -> Found:
        """Return what is here and there; what the store does not tell in time is a miss."""
        within_s = FIND_S_MAX if request.max_ms is None else min(FIND_S_MAX, request.max_ms / 1000)
        there = await self._find(tenancy, request.hashes, within_s)
        if not there:
            return self._reads.lookup(tenancy, request)
        outcomes, tiers = self._sort_out(tenancy, request.hashes, there)
        if request.max_ms is not None:
            self._apply_budget(tenancy, outcomes, tiers, request.max_ms)
        hits = next((at for at, outcome in enumerate(outcomes) if outcome != Outcome.HIT), len(outcomes))
        if request.run:
            for at in range(hits, len(outcomes)):
                if outcomes[at] == Outcome.HIT:
                    outcomes[at], tiers[at] = Outcome.ABSENT, 0
        self._reads.count(tenancy, outcomes, tiers)
        return Found(request.id, hits, bytes(outcomes), bytes(tiers))

    def _sort_out(
        self, tenancy: Tenancy, hashes: Sequence[bytes], there: Collection[bytes]
    ) -> tuple[bytearray, bytearray]:
        """Return an outcome and the tiers of each block; what is here comes first."""
        outcomes, tiers = bytearray([Outcome.ABSENT]) * len(hashes), bytearray(len(hashes))
        for at, block_hash in enumerate(hashes):
            is_over = tenancy.any_expire and self._catalog.is_over(tenancy, block_hash)
            row = self._catalog.find(tenancy, block_hash)
            if row is not None:
                outcomes[at], tiers[at] = Outcome.HIT, self._catalog.table.residency[row]
            elif is_over:
                outcomes[at] = Outcome.EXPIRED
            elif block_hash in there:
                outcomes[at], tiers[at] = Outcome.HIT, Tier.REMOTE.bit
        return outcomes, tiers

    def _apply_budget(self, tenancy: Tenancy, outcomes: bytearray, tiers: bytearray, max_ms: float) -> None:
        """Make BUDGET of what could not be loaded in time behind what comes before it."""
        ssd_bytes = remote_bytes = 0
        is_over = False
        for at, residency in enumerate(tiers):
            if outcomes[at] != Outcome.HIT or residency & Tier.CPU.bit:
                continue
            expected_s = 0.0
            if residency & Tier.SSD.bit and self._loads is not None:
                ssd_bytes += tenancy.slot_bytes
                expected_s = self._loads.expected_s(ssd_bytes)
            elif residency & Tier.REMOTE.bit:
                remote_bytes += tenancy.slot_bytes
                expected_s = self._remote_loads.expected_s(remote_bytes)
            is_over = is_over or expected_s * 1000 > max_ms
            if is_over:
                outcomes[at], tiers[at] = Outcome.BUDGET, 0

    async def _find(self, tenancy: Tenancy, hashes: Sequence[bytes], within_s: float) -> set[bytes]:
        """Return those of these blocks that are not here and that the store has."""
        missing = [block_hash for block_hash in hashes if block_hash not in tenancy.rows]
        if not missing:
            return set()
        found = await self._store.find(_scope(tenancy), missing, within_s)
        return {block_hash for block_hash, is_there in zip(missing, found, strict=True) if is_there}

    # ---- acquire

    async def acquire(self, session: Session, tenancy: Tenancy, request: Acquire) -> Acquired:
        """Return a lease on what is here, or could be loaded, by the deadline.

        Cancellation lets go of everything; loads that others wait for go on.
        """
        began_s = self._clock.monotonic_s()
        within_s = request.deadline_s if request.max_ms is None else min(request.deadline_s, request.max_ms / 1000)
        loads: list[RemoteLoad | None] = []
        held: list[int] = []
        try:
            brought = await self._bring(tenancy, request, within_s, loads, held)
            left_s = max(0.0, request.deadline_s - (self._clock.monotonic_s() - began_s))
            rest = msgspec.structs.replace(request, deadline_s=left_s)
            return await self._reads.acquire(session, tenancy, rest, brought)
        finally:
            self._remote_loads.done_with(loads)
            for row in held:
                self._catalog.unhold(row)

    async def _bring(
        self,
        tenancy: Tenancy,
        request: Acquire,
        within_s: float,
        loads: list[RemoteLoad | None],
        held: list[int],
    ) -> dict[bytes, Outcome]:
        """Load what a request misses and the store has; return what became of those blocks.

        LATER: there was no room beside the others, or it is beyond what one answer grants. `loads` are the caller's to
        be done with, `held` to let go of: what is here must not make room for the rest.
        """
        ends_s = self._clock.monotonic_s() + within_s
        window = len(request.hashes)
        if request.copying:
            window = max(1, self._reads.limits.window_bytes // tenancy.slot_bytes)
        now = list(dict.fromkeys(request.hashes[:window]))
        held += [row for block_hash in now if (row := self._catalog.find(tenancy, block_hash)) is not None]
        for row in held:
            self._catalog.hold(row)
        # What is here beyond the window may have to make room for what is in it, and be brought again.
        later = request.hashes[window:]
        here = {block_hash for block_hash in later if block_hash in tenancy.rows}
        there = await self._find(tenancy, request.hashes, min(within_s, FIND_FOR_ACQUIRE_S_MAX))
        if not there:
            return {}
        brought = {block_hash: Outcome.LATER for block_hash in later if block_hash in there or block_hash in here}
        wanted: list[bytes] = []
        for block_hash in now:
            if block_hash in tenancy.rows:
                continue
            if block_hash in there:
                wanted.append(block_hash)
            elif request.run:
                break
        loads += self._remote_loads.load(tenancy, wanted)
        while wanted and not held and not any(loads) and self._clock.monotonic_s() < ends_s:
            await self._reads.room_may_have_changed(ends_s)  # a request that holds nothing may wait for room
            loads[:] = self._remote_loads.load(tenancy, wanted)
        waiting = [load.outcome for load in loads if load is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, ends_s - self._clock.monotonic_s()))
        no_room = Outcome.LATER if request.copying and (waiting or held) else Outcome.NO_ROOM
        for block_hash, load in zip(wanted, loads, strict=True):
            if load is None:
                brought[block_hash] = no_room
            else:
                brought[block_hash] = load.outcome.result() if load.outcome.done() else Outcome.DEADLINE
        return brought

    # ---- prefetch

    async def prefetch(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> bytes:
        """Start loading blocks from ssd and from remote; the outcomes, and how much is loaded, are as in `Reads`."""
        there = await self._find(tenancy, hashes, FIND_FOR_ACQUIRE_S_MAX)
        outcomes = bytearray(self._reads.prefetch(tenancy, hashes))
        wanted = [block_hash for block_hash in hashes if block_hash in there and block_hash not in tenancy.rows]
        del wanted[max(1, self._reads.limits.window_bytes // tenancy.slot_bytes) :]
        loads = dict(zip(wanted, self._remote_loads.load(tenancy, wanted), strict=True))
        for at, block_hash in enumerate(hashes):
            if block_hash in there and outcomes[at] == Outcome.ABSENT:
                outcomes[at] = Outcome.NO_ROOM if loads.get(block_hash) is None else Outcome.HIT
        self._remote_loads.done_with(list(loads.values()))
        return bytes(outcomes)


def _scope(tenancy: Tenancy) -> RemoteScope:
    return RemoteScope(tenancy.tenant, tenancy.namespace.digest)
