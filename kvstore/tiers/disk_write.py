"""The way of a block to the disk: segment file, bytes, group commit. Part of the ssd tier; runs on the event loop.

Theory of operation. A batch is cut into jobs, each some blocks of one segment. A job first sees that the
segment's file exists, then a thread writes its bytes, then its blocks join the open group of the commit, and
the job ends when they are durable. A segment whose file has vanished is made anew by the next job that needs
it, one that was cut off gets its size back, and blocks that were in it are read as corrupt.

Invariants
1. Each block of a batch ends with one outcome, and its slot as live, free, set aside, or left to the commit
   to delete.
2. No file is made while a doomed one still takes its room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvstore.errors import KVStoreError, TierUnavailable
from kvstore.tiers.disk_commit import GroupCommit, Put
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_io import BlockIO
from kvstore.tiers.disk_records import DiskRead, DiskWrite
from kvstore.tiers.disk_slots import Slots
from kvstore.tiers.disk_space import Space
from kvstore.tiers.disk_time import DirectoryTime
from kvstore.tiers.index import Changes, pack_record
from kvstore.tiers.segments import SegmentFiles, SegmentLost
from kvstore.wire import Outcome

_JOB_BYTES_MIN, _JOB_BYTES_MAX = 1 << 20, 8 << 20
_T = TypeVar("_T")
_Block = TypeVar("_Block", DiskWrite, DiskRead)


@dataclass(slots=True)
class Job:
    """Some blocks of one segment, by ascending address, given as positions in the caller's batch."""

    segment: int
    start: int
    positions: list[int] = field(default_factory=list[int])
    size_bytes: int = 0


def cut_jobs(space: Space, batch: Sequence[_Block], positions: Iterable[int], threads: int) -> list[Job]:
    """Return the blocks at `positions` as jobs, small enough for all threads to have some."""
    order = sorted(positions, key=lambda position: batch[position].address)
    total_bytes = sum(batch[position].record.length for position in order)
    job_bytes = min(max(total_bytes // threads, _JOB_BYTES_MIN), _JOB_BYTES_MAX)
    jobs: list[Job] = []
    for position in order:
        block = batch[position]
        region = space.region_of(block.address)
        if not jobs or jobs[-1].segment != region.first_chunk or jobs[-1].size_bytes >= job_bytes:
            jobs.append(Job(region.first_chunk, region.start))
        jobs[-1].positions.append(position)
        jobs[-1].size_bytes += block.record.length
    return jobs


class Writer:
    """Writes batches.

    Parameters
    ----------
    space, slots, files, blocks, commit, health, time
        The tier's parts.
    threads : int
        How many write at the same time.
    queue_bytes_max : int
        Blocks beyond this are refused with NO_ROOM; a single one is always taken.
    """

    def __init__(
        self,
        space: Space,
        slots: Slots,
        files: SegmentFiles,
        blocks: BlockIO,
        commit: GroupCommit,
        health: Health,
        time: DirectoryTime,
        *,
        threads: int,
        queue_bytes_max: int,
    ) -> None:
        self.queue_bytes = 0
        self._space = space
        self._slots = slots
        self._files = files
        self._blocks = blocks
        self._commit = commit
        self._health = health
        self._time = time
        self._threads = threads
        self._queue_bytes_max = queue_bytes_max
        self._pool = ThreadPoolExecutor(threads, "kvstored-ssd-write")
        self._making = asyncio.Lock()

    def close(self) -> None:
        """End the threads; nothing may be under way."""
        self._pool.shutdown()

    async def write(self, batch: Sequence[DiskWrite]) -> list[Outcome]:
        """Return for each block DURABLE, NOT_DURABLE or NO_ROOM. Must not be cancelled."""
        outcomes = [Outcome.NOT_DURABLE] * len(batch)
        admitted: list[int] = []
        for position, write in enumerate(batch):
            if self.queue_bytes and self.queue_bytes + write.record.length > self._queue_bytes_max:
                outcomes[position] = Outcome.NO_ROOM
                self._slots.give_up(write.address)
            else:
                self.queue_bytes += write.record.length
                admitted.append(position)
        jobs = cut_jobs(self._space, batch, admitted, self._threads)
        await asyncio.gather(*(self._run(job, batch, outcomes) for job in jobs))
        return outcomes

    async def _run(self, job: Job, batch: Sequence[DiskWrite], outcomes: list[Outcome]) -> None:
        self._commit.write_began()
        puts: list[Put] = []
        unsettled = len(job.positions)
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle(position: int, error: KVStoreError | None, slot_free: bool) -> None:
            nonlocal unsettled
            unsettled -= 1
            self.queue_bytes -= batch[position].record.length
            if error is None:
                outcomes[position] = Outcome.DURABLE
                self._slots.written(batch[position].address)
            elif slot_free:
                self._slots.give_up(batch[position].address)
            if not unsettled:
                settled.set_result(None)

        try:
            errors = await self._write_bytes(job, [batch[position] for position in job.positions])
            for position, error in zip(job.positions, errors, strict=True):
                write = batch[position]
                if error is None:
                    record = pack_record(write.address, write.record, self._time.to_directory_s(write.record.expires_s))
                    puts.append(Put(job.segment, write.address, record, write.record.length, partial(settle, position)))
                    continue
                nothing_there = isinstance(error, (SegmentLost, _NoFile))
                if not nothing_there:
                    self._slots.set_aside(write.address, f"segment {job.segment}")
                settle(position, TierUnavailable(str(error)), nothing_there)
        finally:
            self._commit.write_ended(puts)
        await settled

    async def _write_bytes(self, job: Job, writes: list[DiskWrite]) -> Sequence[OSError | None]:
        if job.segment in self._space.unmade:
            try:
                await self._make(job.segment)
            except _NoFile as exc:
                return [exc] * len(writes)
        errors = await self._in_thread(partial(self._blocks.write, job.segment, job.start, writes))
        if worst := next(filter(None, errors), None):
            self.segment_failed(job.segment, worst)
        else:
            self._health.succeeded(f"segment {job.segment}")
        return errors

    def segment_failed(self, segment: int, error: OSError) -> None:
        """Note what the system said about a segment."""
        self._health.failed(f"segment {segment}", error)
        if isinstance(error, SegmentLost):
            self._space.note_lost(segment)

    # ---- segment files

    async def tidy(self) -> None:
        """Remove the files of segments that were given back."""
        if self._space.doomed and not self._health.backs_off("space"):
            async with self._making:  # across I/O, as in _make
                try:
                    await self._remove_doomed()
                except (OSError, KVStoreError) as exc:
                    self._health.failed("space", exc)

    async def _make(self, segment: int) -> None:
        """Make the file of an unmade segment; raises _NoFile if that can't be done now."""
        async with self._making:  # across I/O: no file is made before the room for it is there
            if segment not in self._space.unmade:
                return
            if self._health.backs_off("space"):
                raise _NoFile(self._health.text)
            try:
                await self._remove_doomed()
                await self._make_file(segment)
            except (OSError, KVStoreError) as exc:
                self._health.failed("space", exc)
                raise _NoFile(str(exc)) from exc
            self._space.note_made(segment)
            self._health.succeeded("space")

    async def _remove_doomed(self) -> None:
        for segment in list(self._space.doomed):
            if self._commit.is_recorded(segment):
                await self._commit.change(Changes(segments={segment: None}))
            await self._in_thread(partial(self._files.remove, segment))
            self._space.note_removed(segment)
            self._health.succeeded(f"segment {segment}")

    async def _make_file(self, segment: int) -> None:
        _, size_bytes = self._space.shape(segment)
        if not self._space.may_make(segment):
            raise TierUnavailable(f"a segment of {size_bytes} bytes does not fit beside the files that exist")
        if segment in self._space.lost and await self._in_thread(self._files.path(segment).exists):
            await self._in_thread(partial(self._files.extend, segment, size_bytes))  # what lies before the cut is good
            return
        await self._commit.grow_index(self._space.index_bytes_planned())
        if self._commit.is_recorded(segment):
            await self._commit.change(Changes(segments={segment: None}))  # vanished, and its records with it
        await self._in_thread(partial(self._files.create, segment, size_bytes))

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class _NoFile(OSError):
    """A segment has no file, and can't have one now."""
