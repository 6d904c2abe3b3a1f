"""The ssd tier: blocks in preallocated segment files, an LMDB index that says which of them are durable.

Theory of operation. `allocate` takes a slot, `write` fills it and answers when the block is durable or has
failed, `forget` deletes a block durably and only then gives its slot back. Which block goes where, and which
goes away, is decided above. The parts: disk_space (slots and budget), disk_io (bytes, in threads),
disk_commit (group commit), index, segments, disk_open and disk_reconcile (restart), disk_health.
docs/disk-format.md describes the files.

All state belongs to the event loop's thread; only I/O runs in threads, and these release the GIL while they
wait.

Invariants
1. The index names a block only after its bytes are durable.
2. A slot whose record was once committed, or may have been, is reused only after the record's delete is
   durable.
3. No slot is reused while a read of it is under way.
4. All files together never exceed the capacity.
5. Each used slot has a record, or is allocated, being written, being deleted, or set aside after an error.
6. Errors of disk and index are answers (outcomes, `usage().state`) or errors of kvstore.errors, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from kvstore.clock import Clock
from kvstore.errors import Closing, TierFull, TierUnavailable
from kvstore.tiers import disk_layout as layout
from kvstore.tiers import disk_recency
from kvstore.tiers.disk_check import DiskCheck
from kvstore.tiers.disk_commit import GroupCommit, Place
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_io import BlockCorrupt, BlockIO
from kvstore.tiers.disk_namespaces import Namespaces
from kvstore.tiers.disk_open import Found, open_directory
from kvstore.tiers.disk_records import Columns, DiskNamespace, DiskPin, DiskRead, DiskUsage, DiskWrite, SegmentUsage
from kvstore.tiers.disk_slots import Slots
from kvstore.tiers.disk_waiting import all_finished, finished
from kvstore.tiers.disk_write import Writer, cut_jobs
from kvstore.tiers.index import Changes
from kvstore.tiers.segments import SegmentLost
from kvstore.wire import Outcome

WRITE_QUEUE_BYTES = 256 << 20
_CORRUPT_LOG_INTERVAL_S = 60.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class DiskTier:
    """The ssd tier of one directory. Made by `open`, ended by `close`; used on one event loop."""

    # ---- opening and closing

    @classmethod
    async def open(
        cls,
        directory: Path,
        capacity_bytes: int,
        *,
        clock: Clock,
        segment_bytes: int | None = None,
        io_threads: int = 4,
        direct_io: Literal["auto", "off", "require"] = "auto",
        write_queue_bytes: int = WRITE_QUEUE_BYTES,
        index_map_bytes: int = 1 << 20,
        boot_id: str | None = None,
    ) -> DiskTier:
        """Return the tier, ready; everything durable before is in `take_records`.

        Parameters
        ----------
        directory : Path
            Exists and belongs to this tier alone.
        capacity_bytes : int
            Hard cap on all its files together.
        clock : Clock
            Counts lives and back-offs.
        segment_bytes : int, optional
            Least size of a segment of a new directory, a multiple of 4096; by default a 128th of the capacity.
        io_threads : int
            Threads for reads, and as many for writes.
        direct_io : str
            "auto" takes O_DIRECT where it works, "off" never, "require" fails without.
        write_queue_bytes : int
            Writes beyond this are refused with NO_ROOM.
        index_map_bytes : int
            First size of the index.
        boot_id : str, optional
            The kernel's, for tests.

        Raises
        ------
        TierLocked, TierUnavailable, BadSetting, BadRecord
            Each says what to do. Cancellation leaves the directory unlocked.
        """
        opening = asyncio.get_running_loop().run_in_executor(
            None,
            partial(
                open_directory, directory, capacity_bytes, clock=clock, segment_bytes=segment_bytes,
                direct_io=direct_io, index_map_bytes=index_map_bytes, boot_id=boot_id,
            ),
        )  # fmt: skip
        try:
            found = await finished(opening)
        except asyncio.CancelledError:
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            raise
        _log.info(
            "ssd tier open: directory=%s capacity_bytes=%d used_bytes=%d blocks=%d segment_bytes=%d io=%s",
            directory, capacity_bytes, found.space.used_bytes, len(found.columns), found.space.slab.chunk_bytes,
            found.files.io_mode,
        )  # fmt: skip
        return cls(found, clock=clock, io_threads=io_threads, write_queue_bytes=write_queue_bytes)

    def __init__(self, found: Found, *, clock: Clock, io_threads: int, write_queue_bytes: int) -> None:
        self._found = found
        self._clock = clock
        self._space = found.space
        self._files = found.files
        self._columns: Columns | None = found.columns
        self._pins = found.pins
        self._checksum_failures = 0
        self._corrupt_logged_at_s = float("-inf")
        self._closing = False
        self._writes: set[asyncio.Task[list[Outcome]]] = set()
        self._io_threads = io_threads
        self._read_threads = ThreadPoolExecutor(io_threads, "kvstored-ssd-read")
        self._health = Health(clock, str(found.directory))
        self._slots = Slots(found.space, self._health, len(found.columns))
        self._blocks = BlockIO(found.files, found.index.directory_id)
        self._commit = GroupCommit(
            found.index,
            found.files,
            self._health,
            found.time,
            recorded_segments=found.recorded_segments,
            shape_of=found.space.shape,
            claim_map=found.space.claim_map,
            note_map=found.space.note_map,
            on_sync_failed=self._segment_failed,
            on_deleted=self._deleted,
        )
        self._namespaces = Namespaces(found.namespaces, found.index.epoch_floor, self._change)
        self._writer = Writer(
            found.space,
            self._slots,
            found.files,
            self._blocks,
            self._commit,
            self._health,
            found.time,
            threads=io_threads,
            queue_bytes_max=write_queue_bytes,
        )

    async def close(self) -> None:
        """Finish what was begun, then let the directory go. Cancellation is delivered when that is done."""
        if not self._closing:
            self._closing = True
            await finished(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        while self._writes:
            await asyncio.wait(self._writes)
        await self._commit.close()
        self._writer.close()
        self._read_threads.shutdown()
        self._found.close()

    # ---- what is there

    def take_recency(self) -> array[int]:
        """Return the addresses in use at the last checkpoint, coldest first; like `take_records`, it works once."""
        order, self._found.recency = self._found.recency, array("Q")
        return order

    def take_records(self) -> Columns:
        """Return what was durable at open, in no order; the tier keeps no copy, so this works once.

        Two rows may have one key, if a kill came between writing a block anew and forgetting the old one: keep the row
        of the higher generation and forget the other.
        """
        columns, self._columns = self._columns, None
        assert columns is not None, "records can be taken once"
        return columns

    def namespaces(self) -> list[DiskNamespace]:
        """Return every namespace the directory knows."""
        return self._namespaces.known()

    def pins(self) -> list[DiskPin]:
        """Return every operator's pin, ended ones too."""
        return [DiskPin(namespace, hash_, ends_s) for (namespace, hash_), ends_s in self._pins.items()]

    # ---- slots

    @staticmethod
    def slot_bytes(length: int) -> int:
        """Return what a block of this length takes."""
        return layout.slot_bytes(length)

    def allocate(self, length: int) -> int | None:
        """Return the address of a slot for `length` bytes, or None: forget some blocks first.

        The slot is the caller's until `write` or `release`.
        """
        return self._slots.allocate(layout.slot_bytes(length))

    def release(self, address: int) -> None:
        """Give back an allocated slot that will not be written."""
        self._slots.release(address)

    def free_slots(self, length: int) -> int:
        """Return how many blocks of this length could be allocated now."""
        return self._space.free_slots(layout.slot_bytes(length))

    def segment_of(self, address: int) -> int:
        """Return the segment of an address."""
        return self._space.region_of(address).first_chunk

    def segments(self) -> list[SegmentUsage]:
        """Return all segments. One that is emptied by `forget` is given to whichever size needs room next."""
        return [SegmentUsage(r.first_chunk, r.slot_bytes, r.slots, r.used_slots) for r in self._space.slab.regions()]

    def addresses(self, segment: int) -> array[int]:
        """Return the addresses of the durable blocks in a segment."""
        return self._slots.live(segment)

    def set_owner(self, address: int, row: int) -> None:
        """Note whose a slot is, for `owners`; forgotten when the slot is free again."""
        self._space.slab.set_owner(address, row)

    def owner(self, address: int) -> int:
        """Return what `set_owner` noted for the slot at an address; NOBODY if it is none that is used."""
        return self._space.slab.owner_at(address)

    def clearing(self, address: int, slot_bytes: int) -> tuple[int, ...]:
        """Return the segments to empty so that one of another class fits where `address` lies; there may be none."""
        return self._space.slab.clearing(address, slot_bytes)

    def owners(self, segment: int) -> Iterator[int]:
        """Yield what `set_owner` noted for each used slot of a segment; NOBODY where nothing was."""
        return self._space.slab.owners(segment)

    def region_at(self, address: int) -> int:
        """Return the segment that an address lies in; NOBODY if in none."""
        return self._space.slab.region_at(address)

    def region_starts(self) -> list[int]:
        """Return the first address of each segment."""
        return [region.start for region in self._space.slab.regions()]

    def take_lost(self) -> array[int]:
        """Return the addresses of blocks whose segment has vanished or was cut off: forget them.

        A read of them says CORRUPT anyway; this spares the attempts. Blocks before a cut are among them.
        """
        return array("Q", (address for segment in sorted(self._space.lost) for address in self._slots.live(segment)))

    # ---- writing and reading

    async def write(self, batch: Sequence[DiskWrite]) -> list[Outcome]:
        """Write blocks to allocated slots; return for each DURABLE, NOT_DURABLE (it failed) or NO_ROOM (queue full).

        Whatever isn't durable has lost its slot again. Cancellation does not stop a write: the payloads must stay as
        they are until it has ended, so whoever may be cancelled calls this from a task that isn't.
        """
        self._check_open()
        for write in batch:
            self._slots.begin_write(write.address)
        task = asyncio.create_task(self._writer.write(batch))  # owned here: close() waits for it
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return await asyncio.shield(task)

    async def read(self, batch: Sequence[DiskRead]) -> list[Outcome]:
        """Read blocks into their destinations; return for each HIT, CORRUPT (forget it) or UNAVAILABLE (for now).

        Header and checksum are verified. Where it isn't a HIT the destination may hold anything. Cancellation is
        delivered only when no thread touches a destination any more.
        """
        self._check_open()
        jobs = cut_jobs(self._space, batch, range(len(batch)), self._io_threads)
        self._slots.begin_reads(read.address for read in batch)
        calls = [
            self._read_threads.submit(self._blocks.read, job.segment, job.start, [batch[i] for i in job.positions])
            for job in jobs
        ]
        try:
            await all_finished(calls)
        finally:
            self._slots.end_reads(read.address for read in batch)
        outcomes = [Outcome.UNAVAILABLE] * len(batch)
        for job, call in zip(jobs, calls, strict=True):
            for position, error in zip(job.positions, call.result(), strict=True):
                outcomes[position] = self._read_outcome(job.segment, error)
        return outcomes

    def _read_outcome(self, segment: int, error: OSError | None) -> Outcome:
        if error is None:
            self._health.succeeded(f"segment {segment}")
            return Outcome.HIT
        if isinstance(error, BlockCorrupt):
            self._checksum_failures += 1
            now_s = self._clock.monotonic_s()
            if now_s - self._corrupt_logged_at_s >= _CORRUPT_LOG_INTERVAL_S:
                self._corrupt_logged_at_s = now_s
                _log.warning(
                    "ssd block is corrupt: %s file=%s failures=%d: it counts as a miss; check the disk",
                    error.strerror, self._files.path(segment), self._checksum_failures,
                )  # fmt: skip
            return Outcome.CORRUPT
        self._writer.segment_failed(segment, error)
        return Outcome.CORRUPT if isinstance(error, SegmentLost) else Outcome.UNAVAILABLE

    # ---- deleting and changing

    async def forget(self, addresses: Iterable[int]) -> bool:
        """Delete blocks; return whether that is durable and their slots free, or waits until the index works again.

        Cancellation doesn't stop the deletes.
        """
        self._check_open()
        places = [(self.segment_of(address), address) for address in addresses]
        for _, address in places:
            self._slots.begin_delete(address)
        if places:
            try:
                await self._commit.delete(places)
            except (TierFull, TierUnavailable):
                return False  # the commit keeps them, and has noted what is wrong
        return True

    async def set_expiry(self, expiries_s: Mapping[int, float]) -> None:
        """Set, durably, when the blocks at these addresses expire, on the boottime clock."""
        time = self._found.time
        places = {(self.segment_of(address), address): at for address, at in expiries_s.items()}
        await self._change(Changes(expiries_s={place: time.to_directory_s(at) for place, at in places.items()}))

    async def add_namespace(self, tenant: str, encoded: bytes, ttl_s: float = 0.0, epoch: int = 0) -> int:
        """Return the number of a namespace, durably registered; until it is forgotten it keeps number and epoch."""
        return await self._namespaces.add(tenant, encoded, ttl_s, epoch)

    async def set_epochs(self, epochs: Mapping[int, int]) -> None:
        """Set, durably and all in one, the epochs of namespaces; an epoch never goes back."""
        await self._namespaces.set_epochs(epochs)

    def epoch_of(self, number: int) -> int:
        """Return the epoch of a namespace that is durable."""
        return self._namespaces.epoch_of(number)

    async def set_epoch(self, number: int, epoch: int) -> None:
        """Set, durably, the epoch of a namespace. Records of older epochs stay until they are forgotten."""
        await self.set_epochs({number: epoch})

    async def set_ttl(self, number: int, ttl_s: float) -> None:
        """Set, durably, the default life of a namespace's blocks; 0: the daemon's default."""
        await self._namespaces.set_ttl(number, ttl_s)

    def forget_namespaces(self, numbers: Iterable[int]) -> None:
        """Know these namespaces, of which nothing is left, no more from now on; `tidy_namespaces` follows."""
        self._namespaces.forget(numbers)

    async def tidy_namespaces(self) -> None:
        """Delete the rows of forgotten namespaces; raises TierUnavailable if that has to be tried again."""
        await self._namespaces.tidy()

    @property
    def epoch_floor(self) -> int:
        """No namespace that begins now may have an epoch below this one."""
        return self._namespaces.epoch_floor

    async def put_pins(self, pins: Iterable[DiskPin]) -> None:
        """Keep operators' pins, durably."""
        new = {(pin.namespace, pin.hash): pin.ends_s for pin in pins}
        time = self._found.time
        await self._change(Changes(pins={key: time.to_directory_s(ends_s) for key, ends_s in new.items()}))
        self._pins.update(new)

    async def delete_pins(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Drop operators' pins, given by namespace number and block hash, durably."""
        gone = list(keys)
        await self._change(Changes(pins=dict.fromkeys(gone)))
        for key in gone:
            self._pins.pop(key, None)

    def _change(self, changes: Changes) -> asyncio.Future[None]:
        self._check_open()
        return self._commit.change(changes)

    async def checkpoint(self, addresses_coldest_first: array[int]) -> None:
        """Keep the order of recency for a restart, and look whether the segments are still there.

        A failure degrades the tier and costs the order only.
        """
        self._check_open()
        live = self._slots.live_blocks
        order = addresses_coldest_first[-live:] if live else array("Q")
        made = {region.first_chunk for region in self._space.slab.regions()} - self._space.unmade
        loop = asyncio.get_running_loop()
        try:
            sizes = await loop.run_in_executor(self._read_threads, self._checkpoint_files, order)
            await self._writer.tidy()
            await self._commit.change(Changes())  # the clock's anchor, and deletes that have to be tried again
        except OSError as exc:
            self._health.failed("checkpoint", exc)
            return
        except (TierFull, TierUnavailable):
            return  # the index has noted it
        self._health.succeeded("checkpoint")
        for region in [region for region in self._space.slab.regions() if region.first_chunk in made]:
            segment = region.first_chunk
            if sizes.get(segment, 0) < self._space.shape(segment)[1]:
                what = "the segment's file has vanished or was cut off"
                self._writer.segment_failed(segment, SegmentLost(self._files.path(segment), what))

    def _checkpoint_files(self, order: array[int]) -> dict[int, int]:
        disk_recency.write(self._found.directory, order)
        return self._files.sizes()

    # ---- figures

    def usage(self) -> DiskUsage:
        """Return all figures."""
        self._slots.end_aside()
        space, health = self._space, self._health
        return DiskUsage(
            capacity_bytes=space.capacity_bytes,
            data_capacity_bytes=space.data_capacity_bytes,
            used_bytes=space.used_bytes,
            live_blocks=self._slots.live_blocks,
            quarantined_bytes=self._slots.aside_bytes,
            free_slots=space.free_slots_by_size(),
            segments=sum(1 for _ in space.slab.regions()),
            segment_bytes=space.slab.chunk_bytes,
            index_bytes=space.map_bytes,
            file_bytes=space.file_bytes,
            write_queue_bytes=self._writer.queue_bytes,
            io_errors=health.io_errors,
            checksum_failures=self._checksum_failures,
            records_lost=self._found.records_lost,
            state=health.state,
            state_text=health.text,
            direct_io=self._files.direct,
            io_mode=self._files.io_mode,
        )

    async def check_integrity(self) -> list[str]:
        """Return what is wrong between slab, index and segment files: nothing, unless there is a bug or a fault.

        Blocks that are being written or deleted meanwhile are not judged.
        """
        self._check_open()
        return await DiskCheck(self._space, self._slots, self._commit, self._found.index, self._files).problems()

    # ---- helpers

    def _segment_failed(self, segment: int, error: OSError) -> None:
        self._writer.segment_failed(segment, error)

    def _deleted(self, places: list[Place]) -> None:
        for _, address in places:
            self._slots.deleted(address)

    def _check_open(self) -> None:
        if self._closing:
            raise Closing("the ssd tier is closing: nothing more is read or written")
