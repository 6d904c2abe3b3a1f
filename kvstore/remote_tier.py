"""The remote tier of a node put together: what goes out by the write policy, what comes in, and what is dropped there.

Invariants
1. A block that was dropped here is invisible in the store before the drop is answered, or the answer is an error.
2. What is written out was visible when its write began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Literal

from kvstore.catalog import Catalog
from kvstore.clock import Clock
from kvstore.counters import TierCounters
from kvstore.errors import KVStoreError
from kvstore.loads import Loads
from kvstore.puts import Puts
from kvstore.reads import Reads
from kvstore.remote_loads import RemoteLoads
from kvstore.remote_reads import RemoteReads
from kvstore.remote_writes import RemoteWrites
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.remote import RemoteScope, RemoteStore

log = logging.getLogger("kvstore.remote")

RemotePolicy = Literal["through", "second-touch", "back"]
_TELL_S = 5.0  # for a drop: an operator waits for its answer
_LOOK = 256  # rows at the cold end of each size of slots that a tick looks at
_NEAR_FULL = 0.8  # of what a tier may hold: it evicts somewhat earlier than at all of that


class RemoteTier:
    """See the module's docstring. `run` must be running for anything to move.

    `policy` says which blocks go out: all at their seal, those that are used again, or those that are about to leave
    the last tier of this node.
    """

    def __init__(
        self,
        catalog: Catalog,
        memory: MemoryTier,
        puts: Puts,
        reads: Reads,
        ssd: tuple[DiskTier, Loads] | None,
        store: RemoteStore,
        clock: Clock,
        *,
        policy: str,
        queue_bytes_max: int,
    ) -> None:
        catalog.counters[Tier.REMOTE] = TierCounters()
        self.store = store
        self.loads = RemoteLoads(catalog, memory, puts, store)
        self.writes = RemoteWrites(catalog, memory, ssd[0] if ssd else None, store, clock, queue_bytes_max)
        self.reads = RemoteReads(catalog, reads, ssd[1] if ssd else None, self.loads, store, clock)
        self._catalog = catalog
        self._policy = policy
        self._memory = memory
        self._disk = ssd[0] if ssd else None

    async def run(self) -> None:
        """Learn, load, write and sweep until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self.loads.start(tasks)
            tasks.create_task(self.store.run(), name="remote-store")
            writing = tasks.create_task(self.writes.run(), name="remote-writes")
            try:
                await writing
            finally:
                self.loads.stop()  # before the group takes no more tasks

    # ---- what goes out

    def sealed(self, rows: Sequence[int]) -> None:
        """New blocks are in memory."""
        if self._policy == "through":
            self.writes.offer(rows)
        elif rows:
            self.tick()  # a burst would push out more between two ticks than what has been sent ahead

    def used(self, rows: Iterable[int]) -> None:
        """Blocks were used again."""
        if self._policy == "second-touch":
            self.writes.offer(rows)

    def tick(self) -> None:
        """Send out what is about to be evicted from the last tier of this node; called every 50 ms."""
        if self._policy != "back":
            return
        catalog, tier = self._catalog, Tier.CPU if self._disk is None else Tier.SSD
        capacity_bytes = self._memory.grantable_bytes()
        if self._disk is not None:
            capacity_bytes = self._disk.usage().data_capacity_bytes
        used_bytes = sum(size_bytes for (_, of), size_bytes in catalog.used_bytes.items() if of is tier)
        if used_bytes < capacity_bytes * _NEAR_FULL:
            return
        is_remote = catalog.table.is_remote
        for lane, (_, _, of) in enumerate(catalog.lanes):
            if of is tier:
                coldest = zip(range(_LOOK), catalog.policies[tier].coldest(lane), strict=False)
                self.writes.offer([row for _, row in coldest if not is_remote[row]])

    async def drain(self, timeout_s: float) -> int:
        """Write what is queued, and with the policy `back` all that only memory holds; return how many are left."""
        if self._policy == "back" and self._disk is None:
            table = self._catalog.table
            self.writes.offer(row for row in table.rows() if table.residency[row] == Tier.CPU.bit)
        return await self.writes.flush(timeout_s)

    # ---- dropping

    def forget_blocks(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> None:
        """Find these blocks no more from this moment on; `drop_blocks` must follow."""
        self.store.forget(_scope(tenancy), hashes)
        self.loads.forget(tenancy, hashes)

    def forget(self, tenancy: Tenancy) -> None:
        """Find nothing of a namespace any more from this moment on, that of its new epoch; a drop must follow."""
        self.store.forget(_scope(tenancy))

    async def drop_blocks(self, tenancy: Tenancy, hashes: Sequence[bytes], rows: Iterable[int] = ()) -> None:
        """Make blocks invisible in the store; raises TierUnavailable if it can't be told.

        `rows` are those of them that were here, and are invisible by now.
        """
        await self.writes.writes_of(rows)  # or a write that is under way would come after
        await self.store.delete(_scope(tenancy), hashes, _TELL_S)

    async def drop_all(self) -> None:
        """Make all there is in the store invisible, also what this daemon never heard of."""
        await self.store.drop_all(_TELL_S)

    async def drop_namespaces(self, tenancies: Sequence[Tenancy]) -> None:
        """Make all that was stored of namespaces invisible in the store; tries each, and raises the first failure."""
        failures: list[KVStoreError] = []
        for tenancy in tenancies:
            try:
                await self.store.drop(_scope(tenancy), _TELL_S)
            except KVStoreError as exc:
                failures.append(exc)
        if failures:
            raise failures[0]


def _scope(tenancy: Tenancy) -> RemoteScope:
    return RemoteScope(tenancy.tenant, tenancy.namespace.digest)
