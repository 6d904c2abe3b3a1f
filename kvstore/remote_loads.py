"""Loads from the remote tier to memory, shared by all who want the same block.

Theory of operation. A load takes a slot as a copy of the daemon's own, has the store read into it, and makes it a block
like any other if the bytes were right: from then on it is in memory, and whoever waited holds its row. What a writer
stores meanwhile comes first; the copy is then given up.

Invariants
1. At most one load of a block is in flight in an epoch of its namespace; all who want the block wait for that one.
2. What was read is a block only if the store said HIT and it was not dropped since the load began.
3. A slot is written to by nobody any more when it is given back: the store's `read` promises that at its return.
4. A block's life in memory ends no later than its life in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.catalog import Catalog
from kvstore.errors import Closing
from kvstore.progress import Progress
from kvstore.puts import Puts
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.remote import RemoteFound, RemoteRead, RemoteScope, RemoteStore
from kvstore.wire import Outcome

log = logging.getLogger("kvstore.remote")

_JOB_BYTES = 8 << 20
_BYTES_PER_S_AT_FIRST = 200e6
READ_S_MAX = 5.0  # for one job: a store that takes longer is of no use to an engine
_LoadKey = tuple[int, int, bytes]


@dataclass(eq=False, slots=True)
class RemoteLoad:
    """A block on its way. `outcome` is set once; with HIT `row` is held once for each of `waiters`."""

    tenancy: Tenancy
    epoch: int
    hash: bytes
    offset: int
    outcome: asyncio.Future[Outcome]
    is_dropped: bool = False
    waiters: int = 0
    row: int | None = None


class RemoteLoads:
    """All loads of a store from its remote tier. `start` must have been called."""

    def __init__(self, catalog: Catalog, memory: MemoryTier, puts: Puts, store: RemoteStore) -> None:
        self.progress = Progress()  # something was loaded, or failed to be
        self._catalog = catalog
        self._memory = memory
        self._puts = puts
        self._store = store
        self._loads: dict[_LoadKey, RemoteLoad] = {}
        self._bytes_in_flight = 0
        self._bytes_per_s = _BYTES_PER_S_AT_FIRST  # a moving average, for load budgets
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Let loads run as tasks of this group, until `stop`."""
        self._tasks = tasks

    def stop(self) -> None:
        """Begin no more loads."""
        self._tasks = None

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> list[RemoteLoad | None]:
        """Return a load for each block: the one in flight or a new one; None: no slot is free.

        The caller must call `done_with` for each, once, in the end.
        """
        if self._tasks is None:
            raise Closing("the daemon is stopping: nothing more is loaded from the remote tier")
        loads: list[RemoteLoad | None] = []
        fresh: list[RemoteLoad] = []
        for block_hash in hashes:
            key = (tenancy.number, tenancy.epoch, block_hash)
            load = self._loads.get(key)
            if load is None:
                offset = self._puts.take_for_copy(tenancy)
                if offset is None:
                    loads.append(None)
                    continue
                arrives = asyncio.get_running_loop().create_future()
                load = self._loads[key] = RemoteLoad(tenancy, tenancy.epoch, block_hash, offset, arrives)
                tenancy.begin_use()
                fresh.append(load)
            load.waiters += 1
            loads.append(load)
        step = max(1, _JOB_BYTES // tenancy.block_bytes)
        for start in range(0, len(fresh), step):
            self._bytes_in_flight += len(fresh[start : start + step]) * tenancy.block_bytes
            self._tasks.create_task(self._load(tenancy, fresh[start : start + step]), name="remote-load")
        return loads

    def forget(self, tenancy: Tenancy, hashes: Iterable[bytes]) -> None:
        """Let nothing come of loads of these blocks that are in flight: they were dropped."""
        for block_hash in hashes:
            load = self._loads.get((tenancy.number, tenancy.epoch, block_hash))
            if load is not None:
                load.is_dropped = True

    def done_with(self, loads: Sequence[RemoteLoad | None]) -> None:
        """Let go of loads, come or not."""
        for load in loads:
            if load is not None:
                load.waiters -= 1
                if load.row is not None:
                    self._catalog.unhold(load.row)

    def expected_s(self, size_bytes: int) -> float:
        """Return how long loading this many bytes would take, behind what is in flight already."""
        return (self._bytes_in_flight + size_bytes) / self._bytes_per_s

    async def _load(self, tenancy: Tenancy, loads: list[RemoteLoad]) -> None:
        loop = asyncio.get_running_loop()
        begun_s, ahead_bytes = loop.time(), self._bytes_in_flight
        scope = RemoteScope(tenancy.tenant, tenancy.namespace.digest)
        reads = [RemoteRead(load.hash, self._memory.view(load.offset, tenancy.block_bytes)) for load in loads]
        found = [RemoteFound(Outcome.UNAVAILABLE)] * len(loads)
        try:
            found = await self._store.read(scope, reads, READ_S_MAX)
        except Exception:  # a bug met by one load must not end the daemon
            log.exception("a load from the remote tier met a bug")
        finally:
            self._bytes_in_flight -= len(loads) * tenancy.block_bytes
            for load, result in zip(loads, found, strict=True):
                self._arrived(load, result)
            self.progress.signal()
        if found[0].outcome is Outcome.HIT:
            rate = ahead_bytes / max(loop.time() - begun_s, 1e-4)
            self._bytes_per_s += (rate - self._bytes_per_s) * 0.1

    def _arrived(self, load: RemoteLoad, found: RemoteFound) -> None:
        tenancy, counters = load.tenancy, self._catalog.counters[Tier.REMOTE]
        del self._loads[tenancy.number, load.epoch, load.hash]
        outcome = found.outcome
        if outcome is Outcome.HIT and load.epoch == tenancy.epoch and not load.is_dropped:
            load.row = self._puts.keep_copy(tenancy, load.hash, load.offset, found.checksum, found.life_s)
            for _ in range(load.waiters):
                self._catalog.hold(load.row)
            self._catalog.table.is_remote[load.row] = 1
            self._catalog.counters[Tier.CPU].promotions += 1
            counters.bytes_out += tenancy.block_bytes
        else:
            self._puts.free_copy(tenancy, load.offset)
            if outcome is Outcome.HIT:
                outcome = Outcome.ABSENT  # dropped meanwhile
            elif outcome is Outcome.CORRUPT:
                counters.checksum_failures += 1
            elif outcome in (Outcome.UNAVAILABLE, Outcome.DEADLINE):
                counters.io_errors += 1
        tenancy.end_use()
        if not load.outcome.done():
            load.outcome.set_result(outcome)
