"""Blocks on their way to the remote tier: a queue, and batches as large as the store likes them.

Theory of operation. Rows stand in the queue without being held, so they may still be evicted; a batch holds its rows
until it is written or refused. The queue waits a moment for more: a store that keeps many blocks in one object should
not get an object for each. What lies on ssd only is read into memory of the batch's own.

Invariants
1. A row is held while its bytes are sent, and at most one write of it is in flight.
2. A block is sent only while it is visible, and under the epoch that its namespace has then: what is dropped while it
   is on its way is invisible in the store, too.
3. What the queue can't take, or the store refuses, is dropped and counted; nothing here makes an engine wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections import deque
from collections.abc import Iterable, Sequence

from kvstore.catalog import Catalog
from kvstore.clock import Clock
from kvstore.loads import disk_record
from kvstore.progress import Progress
from kvstore.table import NEVER_S, Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_records import DiskRead
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.remote import RemoteScope, RemoteStore, RemoteWrite
from kvstore.wire import Outcome

log = logging.getLogger("kvstore.remote")

WRITE_S_MAX = 30.0
_LINGER_S = 0.5
_BATCHES_IN_FLIGHT = 4
_BATCH_BLOCKS = 1024
_KEPT = frozenset({Outcome.DURABLE, Outcome.PRESENT})


class RemoteWrites:
    """See the module's docstring. `run` must be running for anything to be written."""

    def __init__(
        self,
        catalog: Catalog,
        memory: MemoryTier,
        disk: DiskTier | None,
        store: RemoteStore,
        clock: Clock,
        queue_bytes_max: int,
    ) -> None:
        self.queued_bytes = 0
        self.settled = Progress()  # a batch is written, or will never be
        self._catalog = catalog
        self._memory = memory
        self._disk = disk
        self._store = store
        self._clock = clock
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[tuple[int, int]] = deque()  # row and generation: a row may get another block meanwhile
        self._queued: set[int] = set()  # generations
        self._writing: set[int] = set()  # rows
        self._work = asyncio.Event()
        self._enough = asyncio.Event()
        self._hurried = False
        self._batches = asyncio.Semaphore(_BATCHES_IN_FLIGHT)

    def offer(self, rows: Iterable[int]) -> None:
        """Queue those of these blocks that the store is not known to have; what the queue can't take is counted."""
        table = self._catalog.table
        for row in rows:
            generation = table.generation[row]
            if table.hash[row] is None or table.is_remote[row] or row in self._writing or generation in self._queued:
                continue
            size_bytes = self._tenancy(row).block_bytes
            if self.queued_bytes + size_bytes > self._queue_bytes_max:
                self._catalog.counters[Tier.REMOTE].demotions_dropped += 1
                continue
            self._queued.add(generation)
            self._queue.append((row, generation))
            self.queued_bytes += size_bytes
        if self._queue:
            self._work.set()
        if self.queued_bytes >= self._store.batch_bytes:
            self._enough.set()

    async def run(self) -> None:
        """Write what is queued until cancelled; cancellation waits for nothing but ends writes under way."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._work.wait()
                if not self._hurried:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LINGER_S):
                            await self._enough.wait()
                await self._batches.acquire()
                batch = self._next_batch()
                if batch:
                    tasks.create_task(self._write(batch), name="remote-write")
                else:
                    self._batches.release()
                    self.settled.signal()

    async def flush(self, timeout_s: float) -> int:
        """Write what is queued without waiting for more; return how many blocks are left after `timeout_s`."""
        self._hurried = True
        self._enough.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._queue or self._writing:
                    await self.settled.wait()
        self._hurried = False
        return len(self._queue) + len(self._writing)

    async def writes_of(self, rows: Iterable[int]) -> None:
        """Return when no write of these blocks is in flight any more."""
        wanted = set(rows)
        while not wanted.isdisjoint(self._writing):
            await self.settled.wait()

    def _next_batch(self) -> list[int]:
        """Return rows of one namespace, each held, for one write."""
        batch: list[int] = []
        size_bytes, skipped = 0, list[tuple[int, int]]()
        table = self._catalog.table
        while self._queue and len(batch) < _BATCH_BLOCKS and size_bytes < self._store.batch_bytes:
            row, generation = self._queue.popleft()
            is_wanted = table.hash[row] is not None and table.generation[row] == generation
            if is_wanted and batch and table.namespace[row] != table.namespace[batch[0]]:
                skipped.append((row, generation))
                continue
            self._queued.discard(generation)
            self.queued_bytes -= self._tenancy(row).block_bytes
            if is_wanted and self._catalog.is_visible(row) and not table.is_remote[row]:
                self._catalog.hold(row)
                self._writing.add(row)
                batch.append(row)
                size_bytes += self._tenancy(row).block_bytes
        self._queue.extendleft(reversed(skipped))
        if not self._queue:
            self._work.clear()
            self.queued_bytes = 0
        if self.queued_bytes < self._store.batch_bytes:
            self._enough.clear()
        return batch

    async def _write(self, rows: Sequence[int]) -> None:
        table = self._catalog.table
        outcomes: dict[int, Outcome] = {}
        try:
            payloads = await self._payloads(rows)
            # No await from here to the write: what is sent is visible, and of the epoch of this moment.
            sent = [row for row in payloads if self._catalog.is_visible(row)]
            if sent:
                tenancy = self._tenancy(sent[0])
                scope = RemoteScope(tenancy.tenant, tenancy.namespace.digest)
                writes = [self._record(row, payloads[row]) for row in sent]
                outcomes.update(zip(sent, await self._store.write(scope, writes, WRITE_S_MAX), strict=True))
        except Exception:  # a bug met by one batch must not end the daemon
            log.exception("a write to the remote tier met a bug")
        finally:
            counters = self._catalog.counters[Tier.REMOTE]
            for row in rows:
                self._writing.discard(row)
                outcome = outcomes.get(row)
                if outcome in _KEPT:
                    table.is_remote[row] = 1
                    if outcome is Outcome.DURABLE:
                        counters.demotions += 1
                        counters.bytes_in += self._tenancy(row).block_bytes
                else:
                    counters.demotions_dropped += 1
                self._catalog.unhold(row)
            self._batches.release()
            self.settled.signal()

    async def _payloads(self, rows: Sequence[int]) -> dict[int, memoryview]:
        """Return the bytes of blocks, in the pool or read from ssd; those that can't be had are left out."""
        table = self._catalog.table
        payloads: dict[int, memoryview] = {}
        reads: dict[int, DiskRead] = {}
        for row in rows:
            length = self._tenancy(row).block_bytes
            if table.residency[row] & Tier.CPU.bit:
                payloads[row] = self._memory.view(table.slot[Tier.CPU][row], length)
            elif self._disk is not None and table.residency[row] & Tier.SSD.bit:
                scratch = memoryview(mmap.mmap(-1, self._catalog.slot_bytes(row)))  # page-aligned, as O_DIRECT wants
                reads[row] = DiskRead(table.slot[Tier.SSD][row], disk_record(self._catalog, row), scratch[:length])
        if reads and self._disk is not None:
            outcomes = await self._disk.read(list(reads.values()))
            for (row, read), outcome in zip(reads.items(), outcomes, strict=True):
                if outcome is Outcome.HIT:
                    payloads[row] = read.destination
        return payloads

    def _record(self, row: int, payload: memoryview) -> RemoteWrite:
        table = self._catalog.table
        block_hash, expires_s = table.hash[row], table.expires_s[row]
        assert block_hash is not None
        life_s = NEVER_S if expires_s == NEVER_S else max(0.001, expires_s - self._clock.boottime_s())
        return RemoteWrite(block_hash, payload, table.generation[row], table.checksum[row], life_s)

    def _tenancy(self, row: int) -> Tenancy:
        return self._catalog.tenancies[self._catalog.table.namespace[row]]
