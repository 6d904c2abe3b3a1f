"""Group commit: one fdatasync a touched segment and one index transaction for all that is ready.

Theory of operation. Writers hand over blocks whose bytes the system has taken; whoever deletes or changes
something hands over that. A group opens with the first of them and closes after GROUP_S, at GROUP_BYTES, or
as soon as no write is under way that could still join. Then, in this order: fdatasync of each segment that
the group wrote to, the transaction, and everyone who waits is told. The next group gathers meanwhile.

Invariants
1. No record is committed before its bytes are durable: a segment whose fdatasync failed takes its blocks out
   of the group.
2. What is handed over is settled exactly once, on the event loop.
3. When nobody knows whether a failed transaction took effect, its blocks count as failed, and a later
   transaction deletes their records before anybody may reuse their slots.
4. A delete once handed over is tried again with every later group until it is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvstore.errors import KVStoreError, TierFull, TierUnavailable
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_time import DirectoryTime
from kvstore.tiers.index import Changes, Index, IndexFull, SegmentShape
from kvstore.tiers.segments import SegmentFiles

GROUP_S = 0.008
GROUP_BYTES = 64 << 20
_SYNC_THREADS = 4

Place = tuple[int, int]  # segment, address
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True)
class Put:
    """A record whose bytes are written but not yet synced.

    `settled(error, slot_free)`: durable if there is no error; with one, `slot_free` says whether the slot is free again
    now or only when `on_deleted` names it.
    """

    segment: int
    address: int
    record: bytes
    length: int
    settled: Callable[[KVStoreError | None, bool], None]


@dataclass(slots=True)
class _Group:
    puts: list[Put] = field(default_factory=list[Put])
    deletes: list[Place] = field(default_factory=list[Place])
    changes: Changes = field(default_factory=Changes)
    waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    size_bytes: int = 0


class _Doubtful(TierUnavailable):
    """A transaction failed, and whether it took effect is unknown."""


class GroupCommit:
    """The one writer of the index. Its methods are called on the event loop.

    Parameters
    ----------
    index, files, health, time
        What it works with.
    recorded_segments : iterable of int
        Those that the index knows.
    shape_of : callable
        Returns a segment's shape and the size of its file.
    claim_map, note_map : callable
        Returns to what size the index's map may grow beyond plan, or None; is told how large it is.
    on_sync_failed : callable
        Told of a segment and what its fdatasync said.
    on_deleted : callable
        Told of the places whose records are durably gone.
    """

    def __init__(
        self,
        index: Index,
        files: SegmentFiles,
        health: Health,
        time: DirectoryTime,
        *,
        recorded_segments: Iterable[int],
        shape_of: Callable[[int], tuple[SegmentShape, int]],
        claim_map: Callable[[], int | None],
        note_map: Callable[[int], None],
        on_sync_failed: Callable[[int, OSError], None],
        on_deleted: Callable[[list[Place]], None],
    ) -> None:
        self._index = index
        self._files = files
        self._health = health
        self._time = time
        self._recorded_segments = set(recorded_segments)
        self._shape_of = shape_of
        self._claim_map = claim_map
        self._note_map = note_map
        self._on_sync_failed = on_sync_failed
        self._on_deleted = on_deleted
        self._group = _Group()
        self._deletes: list[Place] = []
        self._stirred = asyncio.Event()
        self._writes_under_way = 0
        self._closing = False
        self._index_needs_reopen = False
        self._sync_threads = ThreadPoolExecutor(_SYNC_THREADS, "kvstored-ssd-sync")
        self._index_thread = ThreadPoolExecutor(1, "kvstored-ssd-index")
        self._runner = asyncio.create_task(self._run(), name="kvstored-ssd-commit")  # owned here; ends in close()

    # ---- handing over

    def write_began(self) -> None:
        """Note that a write was started which may join the open group."""
        self._writes_under_way += 1

    def write_ended(self, puts: Iterable[Put]) -> None:
        """Take over what a write has left."""
        self._writes_under_way -= 1
        for put in puts:
            self._group.puts.append(put)
            self._group.size_bytes += put.length
        self._stirred.set()

    def delete(self, places: Iterable[Place]) -> asyncio.Future[None]:
        """Delete records. The future fails if the first attempt does; `on_deleted` is told whenever it has worked."""
        self._deletes.extend(places)
        return self._waiter()

    def change(self, changes: Changes) -> asyncio.Future[None]:
        """Make changes other than puts and deletes; if the future fails they were not made."""
        group = self._group.changes
        group.segments.update(changes.segments)
        group.expiries_s.update(changes.expiries_s)
        group.namespaces.update(changes.namespaces)
        group.epoch_floor = max(group.epoch_floor, changes.epoch_floor)
        group.pins.update(changes.pins)
        return self._waiter()

    def is_recorded(self, segment: int) -> bool:
        """Return whether the index knows the segment."""
        return segment in self._recorded_segments

    async def on_index_thread(self, call: Callable[[], _T]) -> _T:
        """Return what `call` returns, between two transactions."""
        return await asyncio.get_running_loop().run_in_executor(self._index_thread, call)

    async def grow_index(self, map_bytes: int) -> None:
        """Give the index room ahead of need; raises TierUnavailable if the disk has none."""
        try:
            await self.on_index_thread(lambda: self._index.grow(map_bytes))
        finally:
            self._note_map(self._index.map_bytes)

    async def close(self) -> None:
        """Commit what was handed over and end the threads. The index stays open."""
        self._closing = True
        self._stirred.set()
        await self._runner
        self._sync_threads.shutdown()
        self._index_thread.shutdown()

    def _waiter(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group.waiting.append(future)
        self._stirred.set()
        return future

    # ---- one group after the other

    async def _run(self) -> None:
        while True:
            while not (self._group.puts or self._group.waiting):
                if self._closing:
                    return
                self._stirred.clear()
                await self._stirred.wait()
            await self._gather()
            group, self._group = self._group, _Group()
            group.deletes, self._deletes = self._deletes, []
            try:
                await self._commit(group)
            except Exception as exc:  # noqa: BLE001, it must not end unseen
                # Whatever it is: who waits must be told, and what may have been committed must be deleted.
                _log.exception("a commit of the ssd index met a bug")
                self._undone(group, _Doubtful(f"the ssd index met a bug: {exc!r}; see the log"))

    async def _gather(self) -> None:
        try:
            async with asyncio.timeout(GROUP_S):
                while self._writes_under_way and self._group.size_bytes < GROUP_BYTES:
                    self._stirred.clear()
                    await self._stirred.wait()
        except TimeoutError:
            pass

    async def _commit(self, group: _Group) -> None:
        await self._sync(group)
        if self._health.backs_off("index"):
            self._undone(group, TierUnavailable(f"the ssd index is not tried again yet: {self._health.text}"))
            return
        if group.puts and self._health.backs_off("index full"):
            self._fail_puts(group, TierFull(f"the ssd index is not tried again yet: {self._health.text}"))
        try:
            try:
                await self._apply(self._changes(group, group.deletes))
            except IndexFull as exc:
                # Deletes are what makes room: they are tried without the puts, and a few at a time.
                self._health.failed("index full", exc)
                self._fail_puts(group, exc)
                await self._apply_in_portions(group)
        except KVStoreError as exc:
            self._undone(group, exc)
        else:
            if group.puts or group.deletes:
                self._health.succeeded("index full")
            self._done(group)

    async def _apply_in_portions(self, group: _Group) -> None:
        portion = len(group.deletes)
        at = 0
        while at < len(group.deletes):
            try:
                await self._apply(self._changes(_Group(), group.deletes[at : at + portion]))
                at += portion
            except IndexFull:
                if portion == 1:
                    raise
                portion = max(1, portion // 4)
        await self._apply(self._changes(group, []))

    def _changes(self, group: _Group, deletes: list[Place]) -> Changes:
        new = {put.segment for put in group.puts} - self._recorded_segments
        return replace(
            group.changes,
            deletes=deletes,
            segments=group.changes.segments | {segment: self._shape_of(segment)[0] for segment in new},
            puts=[(put.segment, put.address, put.record) for put in group.puts],
        )

    async def _sync(self, group: _Group) -> None:
        """Make the bytes of a group durable; blocks of a segment where that fails leave the group."""
        loop = asyncio.get_running_loop()
        segments = sorted({put.segment for put in group.puts})
        calls = [
            loop.run_in_executor(self._sync_threads, self._files.sync, segment, self._shape_of(segment)[1])
            for segment in segments
        ]
        for segment, result in zip(segments, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, OSError):
                self._on_sync_failed(segment, result)
                error = TierUnavailable(f"segment {segment} could not be synced: {result}")
                error.__cause__ = result
                for put in group.puts:
                    if put.segment == segment:
                        put.settled(error, True)
                group.puts = [put for put in group.puts if put.segment != segment]
            elif result is not None:
                raise result

    async def _apply(self, changes: Changes) -> None:
        while True:
            try:
                await self._commit_here(changes)
                break
            except IndexFull:
                wanted = self._claim_map()
                if wanted is None:
                    raise
                try:
                    await self.grow_index(wanted)
                except TierUnavailable as exc:
                    raise IndexFull(f"the ssd index is full and its disk has no room for more: {exc}") from exc
        self._health.succeeded("index")
        for segment, shape in changes.segments.items():
            if shape is None:
                self._recorded_segments.discard(segment)
            else:
                self._recorded_segments.add(segment)

    async def _commit_here(self, changes: Changes) -> None:
        anchor = self._time.anchor()
        reopen, self._index_needs_reopen = self._index_needs_reopen, True  # until it is known to be well

        def commit() -> None:
            if reopen:
                self._index.reopen()
            try:
                self._index.commit(changes, anchor)
            except IndexFull:
                raise
            except KVStoreError as exc:
                raise _Doubtful(str(exc)) from exc

        try:
            await self.on_index_thread(commit)
        except IndexFull:
            self._index_needs_reopen = False
            raise
        except KVStoreError as exc:
            self._health.failed("index", exc)
            raise
        self._index_needs_reopen = False

    def _done(self, group: _Group) -> None:
        self._on_deleted(group.deletes)
        for put in group.puts:
            put.settled(None, False)
        for future in group.waiting:
            if not future.done():
                future.set_result(None)

    def _undone(self, group: _Group, exc: KVStoreError) -> None:
        self._deletes += group.deletes
        if isinstance(exc, _Doubtful):
            self._deletes += [(put.segment, put.address) for put in group.puts]
        self._fail_puts(group, exc)
        for future in group.waiting:
            if not future.done():
                future.set_exception(exc)

    def _fail_puts(self, group: _Group, exc: KVStoreError) -> None:
        for put in group.puts:
            put.settled(exc, not isinstance(exc, _Doubtful))
        group.puts = []
