"""Loads from ssd to memory, shared by all who want the same block.

Theory of operation. A load belongs to the catalog: one in flight a block, joined by whoever wants it. Each waiter
holds the row, so what was loaded stays until the waiter is done with it.

Invariants
1. At most one load of a block is in flight, and its row is held meanwhile.
2. Cancelling a waiter never cancels a load that others wait for; I/O that has begun is always waited for.
3. What was read is READY only if its header and checksum were right; corrupt bytes cost the copy on ssd.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.errors import Closing, KVStoreError
from kvstore.lifecycle import Copy
from kvstore.progress import Progress
from kvstore.room import Room
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_records import DiskRead, DiskRecord
from kvstore.tiers.memory import MemoryTier
from kvstore.wire import Outcome

log = logging.getLogger("kvstore.loads")

_JOB_BYTES = 4 << 20
_BYTES_PER_S_AT_FIRST = 400e6  # a modest ssd's


@dataclass(eq=False, slots=True)
class Load:
    """A block on its way from ssd to memory. `outcome` is set once; HIT: it is READY in the cpu tier."""

    row: int
    offset: int
    outcome: asyncio.Future[Outcome]


class Loads:
    """All loads of a store. `start` must have been called."""

    def __init__(
        self, catalog: Catalog, memory: MemoryTier, room: Room, disk: DiskTier, progress: Progress
    ) -> None:
        self._catalog = catalog
        self._memory = memory
        self._room = room
        self._disk = disk
        self._progress = progress
        self._loads: dict[int, Load] = {}
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

    def load(self, rows: Sequence[int], *, in_transit: bool = True) -> list[Load | None]:
        """Return a load for each block that is on ssd only: the one in flight or a new one; None: no slot is free.

        Each row with a load is held once for the caller, who must call `Catalog.unhold` when done with it.
        `in_transit`: a slot in transit will do, for a reader that copies at once.
        """
        if rows and self._tasks is None:
            raise Closing("the daemon is stopping: nothing more is loaded from ssd")
        loads: list[Load | None] = []
        fresh: list[Load] = []
        for row in rows:
            load = self._loads.get(row)
            if load is None:
                offset = self._room.take(self._tenancy(row), for_load=in_transit)
                if offset is None:
                    loads.append(None)
                    continue
                load = Load(row, offset, asyncio.get_running_loop().create_future())
                self._catalog.hold(row)
                self._catalog.fill(row, Tier.CPU, offset)
                self._loads[row] = load
                fresh.append(load)
            self._catalog.hold(row)
            loads.append(load)
        self._start(fresh)
        return loads

    def expected_s(self, size_bytes: int) -> float:
        """Return how long loading this many bytes would take, behind what is in flight already."""
        return (self._bytes_in_flight + size_bytes) / self._bytes_per_s

    def _start(self, loads: list[Load]) -> None:
        at = 0
        while self._tasks is not None and at < len(loads):
            end, size_bytes = at, 0
            while end < len(loads) and (end == at or size_bytes + self._size(loads[end].row) <= _JOB_BYTES):
                size_bytes += self._size(loads[end].row)
                end += 1
            self._bytes_in_flight += size_bytes
            self._tasks.create_task(self._load(loads[at:end], size_bytes), name="mover-load")
            at = end

    async def _load(self, loads: list[Load], size_bytes: int) -> None:
        table = self._catalog.table
        loop = asyncio.get_running_loop()
        begun_s, ahead_bytes = loop.time(), self._bytes_in_flight
        # A block that was dropped since would be looked for under the epoch of today: it is not read.
        outcomes = {
            load: Outcome.UNAVAILABLE if self._catalog.is_visible(load.row) else Outcome.ABSENT for load in loads
        }
        wanted = [load for load, outcome in outcomes.items() if outcome is not Outcome.ABSENT]
        try:
            reads: list[DiskRead] = []
            for load in wanted:
                destination = self._memory.view(load.offset, self._tenancy(load.row).block_bytes)
                address = table.slot[Tier.SSD][load.row]
                reads.append(DiskRead(address, disk_record(self._catalog, load.row), destination))
            outcomes.update(zip(wanted, await self._disk.read(reads), strict=True))
        except KVStoreError:
            pass  # the outcomes say UNAVAILABLE
        except Exception:  # a bug met by one load must not end the daemon
            log.exception("a load from ssd met a bug")
        finally:
            self._bytes_in_flight -= size_bytes
            for load, outcome in outcomes.items():
                self._loaded(load, outcome)
            self._progress.signal()
        rate = ahead_bytes / max(loop.time() - begun_s, 1e-4)
        self._bytes_per_s += (rate - self._bytes_per_s) * 0.1

    def _loaded(self, load: Load, outcome: Outcome) -> None:
        row, table, counters = load.row, self._catalog.table, self._catalog.counters
        del self._loads[row]
        if outcome is Outcome.HIT:
            self._memory.set_owners((load.offset,), (row,))
            self._catalog.filled(row, Tier.CPU)
            counters[Tier.CPU].promotions += 1
            counters[Tier.SSD].bytes_out += self._tenancy(row).block_bytes
            if not self._catalog.is_visible(row):
                outcome = Outcome.ABSENT  # dropped meanwhile
        else:
            self._memory.free(self._catalog.fail(row, Tier.CPU))
            if outcome is Outcome.CORRUPT:
                counters[Tier.SSD].checksum_failures += 1
                if table.state[Tier.SSD][row] == Copy.READY:
                    self._catalog.leave(row, Tier.SSD, Cause.DROP)
            elif outcome is Outcome.UNAVAILABLE:
                counters[Tier.SSD].io_errors += 1
        if not load.outcome.done():
            load.outcome.set_result(outcome)
        self._catalog.unhold(row)

    async def verify(self, rows: Sequence[int]) -> set[int]:
        """Return those of these blocks, which the caller holds, whose bytes on ssd are not what was written."""
        bad: set[int] = set()
        for row in rows:
            if not self._catalog.is_visible(row) or not self._catalog.table.residency[row] & Tier.SSD.bit:
                continue  # dropped while others were read
            scratch = memoryview(mmap.mmap(-1, self._size(row)))  # page-aligned, as O_DIRECT wants it
            destination = scratch[: self._tenancy(row).block_bytes]
            address = self._catalog.table.slot[Tier.SSD][row]
            outcomes = await self._disk.read([DiskRead(address, disk_record(self._catalog, row), destination)])
            if outcomes[0] is Outcome.CORRUPT:
                bad.add(row)
        return bad

    def _tenancy(self, row: int) -> Tenancy:
        return self._catalog.tenancies[self._catalog.table.namespace[row]]

    def _size(self, row: int) -> int:
        return self._catalog.slot_bytes(row)


def disk_record(catalog: Catalog, row: int) -> DiskRecord:
    """Return what the ssd tier keeps, or is to keep, of a block."""
    table, tenancy = catalog.table, catalog.tenancies[catalog.table.namespace[row]]
    block_hash = table.hash[row]
    assert block_hash is not None
    assert tenancy.disk_number is not None
    return DiskRecord(
        namespace=tenancy.disk_number,
        hash=block_hash,
        length=tenancy.block_bytes,
        generation=table.generation[row],
        checksum=table.checksum[row],
        epoch=tenancy.epoch,
        expires_s=table.noted_end_s(row),
    )
