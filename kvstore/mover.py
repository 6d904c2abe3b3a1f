"""Moves bytes to the ssd tier: demotions in batches, and deletes ahead of need. Loads are in loads.py.

Theory of operation. Rows to be written stand in a queue without being held, so they may still be evicted; a batch
holds its rows from the moment it is cut until its writes are durable. Victims on ssd are deleted before their slots
are needed; a slot is free again when its delete is durable.

Invariants
1. A row is held while its bytes are written, and at most one demotion of it is in flight.
2. A record's epoch is that of a namespace in which its block was visible when the write began.
3. What can't be written now is dropped from the queue and counted; nothing here makes an engine wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence

from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.errors import KVStoreError, TierUnavailable
from kvstore.lifecycle import Copy
from kvstore.loads import Loads, disk_record
from kvstore.progress import Progress
from kvstore.room import Room
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_records import DiskWrite
from kvstore.tiers.memory import MemoryTier
from kvstore.victims import Victims
from kvstore.wire import Outcome

log = logging.getLogger("kvstore.mover")

_BATCH_BYTES = 16 << 20
_BATCH_BLOCKS = 128  # a bound on how long the loop is held for one batch
_BATCHES_IN_FLIGHT = 8
_FREE_AHEAD_SHARE = 64  # one part in 64 of the ssd tier is kept free ahead of need
_ROOM_ROUNDS = 20
_ROOM_ROUND_S = 0.25
_DELETE_PAUSE_S = 0.05
_DELETES_MAX = 4096


class Mover:
    """See the module's docstring. `run` must be running for anything to be written or deleted."""

    def __init__(
        self,
        catalog: Catalog,
        memory: MemoryTier,
        room: Room,
        disk: DiskTier,
        *,
        capacity_bytes: int,
        queue_bytes_max: int,
        quotas: Mapping[str, int],
    ) -> None:
        self.queued_bytes = 0
        self.left_out = 0  # blocks that the queue could not take, since this was last looked at
        self._catalog = catalog
        self._memory = memory
        self._room = room
        self._disk = disk
        self._capacity_bytes = capacity_bytes
        self._quotas = quotas
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[tuple[int, int]] = deque()  # row and generation: a row may get another block meanwhile
        self._queued: dict[int, int] = {}  # generation -> its size in `queued_bytes`
        self._victims = Victims(catalog, Tier.SSD, disk, self._in_memory, spared_are_in_use=True)
        self._full: set[int] | None = None  # during a drain: lanes on ssd in which everything is kept
        self._durable: dict[int, list[asyncio.Future[bool]]] = {}  # generation -> who wait for its write
        self._deleting_now = asyncio.Lock()
        self._writes = asyncio.Semaphore(_BATCHES_IN_FLIGHT)
        self._writing = 0  # batches
        self._deleting = 0  # index entries
        self._work_deletes = asyncio.Event()
        self._work = asyncio.Event()
        self.progress = Progress()  # something was written, deleted or loaded
        self.loads = Loads(catalog, memory, room, disk, self.progress)
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Write and delete until cancelled; cancellation waits for I/O that has begun."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.loads.start(tasks)
            writing = tasks.create_task(self._write_forever(), name="mover-writes")
            tasks.create_task(self._delete_forever(), name="mover-deletes")
            try:
                await writing
            finally:
                self.loads.stop()  # before the group takes no more tasks

    # ---- demotion

    def demote(self, rows: Iterable[int], *, urgent: bool = False) -> None:
        """Queue blocks for the ssd tier. What the queue can't take is dropped and counted, unless it is `urgent`."""
        table = self._catalog.table
        for row in rows:
            generation = table.generation[row]
            if generation in self._queued or table.state[Tier.SSD][row] != Copy.ABSENT or table.hash[row] is None:
                continue
            size = self._size(row)
            if not urgent and self.queued_bytes + size > self._queue_bytes_max:
                self.left_out += 1
                self._catalog.counters[Tier.SSD].demotions_dropped += 1
                continue
            self._queued[generation] = size
            self.queued_bytes += size
            self._queue.append((row, generation))
        self._work.set()

    async def make_durable(self, rows: Sequence[int]) -> list[bool]:
        """Return, for each block, whether it is durable on ssd; returns when each is settled.

        The rows are held meanwhile. Cancellation lets go of them; their writes may still come.
        """
        table, loop = self._catalog.table, asyncio.get_running_loop()
        ready: list[asyncio.Future[bool]] = []
        for row in rows:
            self._catalog.hold(row)
            future: asyncio.Future[bool] = loop.create_future()
            ready.append(future)
            if table.state[Tier.SSD][row] == Copy.READY:
                future.set_result(True)
            else:
                self._durable.setdefault(table.generation[row], []).append(future)
        try:
            self.demote(rows, urgent=True)
            for row in rows:
                generation = table.generation[row]
                if generation not in self._queued and table.state[Tier.SSD][row] != Copy.FILLING:
                    self._tell_durable(generation, table.state[Tier.SSD][row] == Copy.READY)
            return [await future for future in ready]
        finally:
            for row in rows:
                self._catalog.unhold(row)

    def unwritten(self) -> list[int]:
        """Return the rows that only memory holds."""
        return [row for row in self._catalog.table.rows() if self._catalog.table.residency[row] == Tier.CPU.bit]

    @property
    def is_draining(self) -> bool:
        return self._full is not None

    @contextlib.contextmanager
    def draining(self) -> Generator[Collection[int], None, None]:
        """Leave it to a drain what is written next; gives the lanes on ssd that turn out to have no room for more.

        What is queued and nobody waits for is the drain's to write.
        """
        self._drop_queued()
        self._full = set()
        try:
            yield self._full
        finally:
            self._full = None
            self._catalog.kept.clear()

    def _drop_queued(self) -> None:
        if self._queue:
            first = self._queue.popleft()  # a batch that is being cut may be waiting for its address
            left = [entry for entry in self._queue if entry[1] in self._durable]
            self._queue.clear()
            self._queue.extend([first, *left])
            self._queued = {generation: self._queued[generation] for _, generation in self._queue}
            self.queued_bytes = sum(self._queued.values())

    async def _write_forever(self) -> None:
        assert self._tasks is not None
        while True:
            while not self._queue:
                self._work.clear()
                await self._work.wait()
            await self._writes.acquire()
            await asyncio.sleep(0)  # others first: the line before gives nothing back while batches are few
            batch = await self._next_batch()
            if batch:
                self._writing += 1
                self._tasks.create_task(self._write(batch), name="mover-write")
            else:
                self._writes.release()
                self.progress.signal()

    async def _next_batch(self) -> list[tuple[int, int]]:
        """Return rows and the ssd addresses they go to; each is held and its copy there is FILLING."""
        batch: list[tuple[int, int]] = []
        size_bytes = 0
        while self._queue and size_bytes < _BATCH_BYTES and len(batch) < _BATCH_BLOCKS:
            row, generation = self._queue[0]
            if self._needs_write(row, generation):
                tenancy = self._tenancy(row)
                address = self._disk.allocate(tenancy.block_bytes) if self._meet_quota(tenancy) else None
                if address is None and batch:
                    break  # write what there is; room is made meanwhile
                if address is None:
                    address = await self._wait_for_address(tenancy)
                # That wait took time: the row may have gone.
                if address is None or not self._needs_write(row, generation):
                    self._give_up(generation, address)
                else:
                    self._catalog.hold(row)
                    self._catalog.fill(row, Tier.SSD, address)
                    batch.append((row, address))
                    size_bytes += tenancy.slot_bytes
            else:
                self._tell_durable(generation, self._is_durable(row, generation))
            self._queue.popleft()
            self.queued_bytes -= self._queued.pop(generation)
        return batch

    async def _write(self, batch: list[tuple[int, int]]) -> None:
        writes: list[DiskWrite] = []
        outcomes: Sequence[Outcome] = ()
        try:
            for tenancy in {self._tenancy(row).number: self._tenancy(row) for row, _ in batch}.values():
                await self.register(tenancy)
            # No await from here to the write: a record's epoch is that of a namespace the block is visible in.
            batch = [(row, address) for row, address in batch if self._still_wanted(row, address)]
            writes = [DiskWrite(address, disk_record(self._catalog, row), self._payload(row)) for row, address in batch]
            outcomes = await self._disk.write(writes)
            await self._correct_lives(batch, writes, outcomes)
        except KVStoreError:
            if not writes:
                for _, address in batch:
                    self._disk.release(address)
        except Exception:  # a bug met by one batch must not end the daemon
            log.exception("a write to ssd met a bug")
        finally:
            self._writing -= 1
            self._writes.release()
        for at, (row, address) in enumerate(batch):
            durable = bool(outcomes) and outcomes[at] is Outcome.DURABLE
            if durable:
                self._catalog.table.checksum[row] = writes[at].record.checksum
                self._disk.set_owner(address, row)
            self._settle_write(row, durable=durable)
        for tenancy in {self._tenancy(row).number: self._tenancy(row) for row, _ in batch}.values():
            self.free_ahead(tenancy)
        self.progress.signal()

    async def _correct_lives(
        self, batch: list[tuple[int, int]], writes: list[DiskWrite], outcomes: Sequence[Outcome]
    ) -> None:
        """Write the ends of those lives that were changed while their block was being written."""
        # The others have lost their slots, which may be another block's by now.
        durable = [at for at, outcome in enumerate(outcomes) if outcome is Outcome.DURABLE]
        told = {batch[at][1]: writes[at].record.expires_s for at in durable}
        noted_end_s = self._catalog.table.noted_end_s
        written = [batch[at] for at in durable]
        # One that slides moves again and again; that is written down at checkpoints.
        while late := {
            address: noted_end_s(row)
            for row, address in written
            if noted_end_s(row) != told[address] and not (noted_end_s(row) < 0 and told[address] < 0)
        }:
            told.update(late)
            await self._disk.set_expiry(late)

    def _still_wanted(self, row: int, address: int) -> bool:
        """Return whether a block of a batch is still visible; if not, its write is called off."""
        if self._catalog.is_visible(row):
            return True
        self._disk.release(address)
        self._settle_write(row, durable=False)
        return False

    def _settle_write(self, row: int, *, durable: bool) -> None:
        generation, counters = self._catalog.table.generation[row], self._catalog.counters[Tier.SSD]
        if durable:
            counters.demotions += 1
            counters.bytes_in += self._tenancy(row).block_bytes
            self._catalog.filled(row, Tier.SSD)
        else:
            counters.demotions_dropped += 1
            self._catalog.fail(row, Tier.SSD)
        self._tell_durable(generation, durable)
        self._catalog.unhold(row)

    async def writes_of(self, rows: Iterable[int]) -> None:
        """Return when no write of these blocks is in flight any more; what they have written may have to be deleted."""
        table, loop = self._catalog.table, asyncio.get_running_loop()
        for row in rows:
            if table.state[Tier.SSD][row] == Copy.FILLING:
                written: asyncio.Future[bool] = loop.create_future()
                self._durable.setdefault(table.generation[row], []).append(written)
                await written

    def _give_up(self, generation: int, address: int | None) -> None:
        if address is not None:
            self._disk.release(address)
        self._catalog.counters[Tier.SSD].demotions_dropped += 1
        self._tell_durable(generation, False)

    def _needs_write(self, row: int, generation: int) -> bool:
        table = self._catalog.table
        return (
            table.hash[row] is not None
            and table.generation[row] == generation
            and table.residency[row] == Tier.CPU.bit
            and table.state[Tier.SSD][row] == Copy.ABSENT
            and self._catalog.is_visible(row)
        )

    def _is_durable(self, row: int, generation: int) -> bool:
        table = self._catalog.table
        return table.generation[row] == generation and table.state[Tier.SSD][row] == Copy.READY

    def _tell_durable(self, generation: int, durable: bool) -> None:
        for future in self._durable.pop(generation, ()):
            if not future.done():
                future.set_result(durable)

    # ---- room on ssd

    async def _wait_for_address(self, tenancy: Tenancy) -> int | None:
        """Return an address as soon as deletes have made room, or None if the tier can't give one."""
        lane = tenancy.lanes[Tier.SSD]
        for _ in range(_ROOM_ROUNDS):
            if self._full is not None and lane in self._full:
                return None
            if not self._meet_quota(tenancy):
                break
            self.free_ahead(tenancy)
            address = self._disk.allocate(tenancy.block_bytes)
            if address is not None:
                return address
            if not self._catalog.departed and not self._deleting and not self._writing:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_ROUND_S):
                    await self.progress.wait()
        else:
            return None  # too slow now, but not full
        if self._full is not None:
            self._full.add(lane)
        return None

    def _meet_quota(self, tenancy: Tenancy) -> bool:
        quota = self._quotas.get(tenancy.tenant)
        while quota is not None and self._catalog.charged_bytes(tenancy, Tier.SSD) + tenancy.slots[Tier.SSD] > quota:
            victims = self._victims.for_tenant(tenancy.tenant)
            if not victims:
                return False
            self._catalog.evict_with_slices(victims[0], Tier.SSD, Cause.QUOTA)
        return True

    def free_ahead(self, tenancy: Tenancy) -> None:
        """Evict on ssd so that some slots for such blocks will be free when they are needed."""
        if self._full is not None and tenancy.lanes[Tier.SSD] in self._full:
            return
        slot_bytes = tenancy.slots[Tier.SSD]
        free = self._disk.free_slots(tenancy.block_bytes)
        wanted = self._free_ahead_slots(slot_bytes) - free - self._leaving_slots
        while wanted > 0:
            victims = self._victims.for_slots(slot_bytes, wanted)
            if not victims.rows:
                return
            for row in victims.rows:
                if wanted <= 0 and not victims.is_region:
                    break
                if self._catalog.is_evictable(row, Tier.SSD):
                    wanted -= self._catalog.evict_with_slices(row, Tier.SSD, Cause.PRESSURE)
        self._work_deletes.set()

    def _free_ahead_slots(self, slot_bytes: int) -> int:
        total = self._capacity_bytes // slot_bytes
        return max(1, min(total // _FREE_AHEAD_SHARE, 2 * _BATCH_BYTES // slot_bytes))

    async def _delete_forever(self) -> None:
        while True:
            if not self._catalog.departed:
                self._work_deletes.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DELETE_PAUSE_S):
                        await self._work_deletes.wait()
                continue
            try:
                await self.delete_departed()
            except KVStoreError:
                pass  # the tier keeps the slots and tries again; its state says so

    async def delete_departed(self) -> int:
        """Delete the index entries of what has left the ssd tier, durably; return how many.

        What another call is deleting is deleted, too, when this returns. Raises TierUnavailable if the index can't be
        written now: the tier then tries again by itself.
        """
        async with self._deleting_now:  # held across I/O for that promise
            departed = self._catalog.departed
            rows = [departed.popleft() for _ in range(min(len(departed), _DELETES_MAX))]
            if not rows:
                return 0
            self._deleting += len(rows)
            deleted = False
            try:
                deleted = await self._disk.forget([self._catalog.table.slot[Tier.SSD][row] for row in rows])
            finally:
                self._deleting -= len(rows)
                for row in rows:
                    self._catalog.gone(row)
                self.progress.signal()
            if not deleted:
                raise TierUnavailable(
                    "what was dropped is invisible, but the ssd index can't be written now: after a crash it could be "
                    "back; look at the tier's state (kvctl tiers), then drop it again"
                )
            return len(rows)

    async def delete_all_departed(self) -> None:
        """Delete what has left the ssd tier by now, and what others are deleting."""
        left = len(self._catalog.departed)
        while deleted := await self.delete_departed():
            left -= deleted
            if left <= 0:
                break

    @property
    def _leaving_slots(self) -> int:
        return len(self._catalog.departed) + self._deleting

    def _in_memory(self, row: int) -> bool:
        return bool(self._catalog.table.residency[row] & Tier.CPU.bit)

    # ---- small things

    async def register(self, tenancy: Tenancy) -> int:
        """Return the number the ssd tier knows a namespace by; durable there before this returns."""
        if tenancy.disk_number is None:
            tenancy.disk_number = await self._disk.add_namespace(
                tenancy.tenant, tenancy.namespace.encode(), tenancy.ttl_s, tenancy.epoch
            )
        # Whatever failed before: no record may be durable under an epoch that would be unknown after a crash.
        while self._disk.epoch_of(tenancy.disk_number) < tenancy.epoch:
            await self._disk.set_epoch(tenancy.disk_number, tenancy.epoch)
        return tenancy.disk_number

    def _payload(self, row: int) -> memoryview:
        return self._memory.view(self._catalog.table.slot[Tier.CPU][row], self._tenancy(row).block_bytes)

    def _tenancy(self, row: int) -> Tenancy:
        return self._catalog.tenancies[self._catalog.table.namespace[row]]

    def _size(self, row: int) -> int:
        return self._tenancy(row).slot_bytes
