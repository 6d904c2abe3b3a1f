"""Group commit: one fdatasync a touched segment and one index transaction for all that is ready.

Theory of operation. Writers hand over blocks whose bytes the system has taken; whoever deletes or changes something hands over
that. A group opens with the first of them and closes after GROUP_S, at GROUP_BYTES, or when no write is under way that could
still join. Then, in this order: fdatasync of each segment that the group wrote to, the transaction, and everyone who
waits is told. The next group gathers meanwhile.

Invariants
1. No record is committed before its bytes are durable: a segment whose fdatasync failed takes its blocks out of the group.
2. `settled` is called exactly once for everything handed over, on the event loop.
3. When a transaction fails with its effect unknown, its blocks count as failed, and their records are deleted by a later
   transaction before anybody may reuse their slots (`doubtful`).
4. A delete once handed over is retried until it is durable, whatever happens in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError, TierUnavailable
from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_records import DiskNamespace
from kvstore.tiers.disk_time import DirectoryTime
from kvstore.tiers.index import Changes, Index, IndexFull, SegmentShape
from kvstore.tiers.segments import SegmentFiles, SegmentLost

GROUP_S = 0.008
GROUP_BYTES = 64 << 20
_SYNC_THREADS = 4

Settled = Callable[[KVStoreError | None], None]


@dataclass(slots=True)
class Put:
    """A record whose bytes are written but not synced. `settled` is told None once it is durable."""

    segment: int
    address: int
    record: bytes
    length: int
    settled: Settled


@dataclass(slots=True)
class _Group:
    puts: list[Put] = field(default_factory=list[Put])
    deletes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    deleted: list[Settled] = field(default_factory=list[Settled])
    changes: Changes = field(default_factory=Changes)
    changed: list[Settled] = field(default_factory=list[Settled])
    size_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes or self.deleted or self.changed)


class GroupCommit:
    """The one writer of the index. Its methods are called on the event loop.

    Parameters
    ----------
    index, files, health, time
        What it works with.
    shape_of : callable
        A segment's shape and the size of its file.
    map_bytes_max : callable
        How large the index may be now.
    on_lost : callable
        Told of a segment whose file has vanished or was cut off.
    on_durable : callable
        Told of the segments and deletes that a transaction made durable, before those who wait are.
    """

    def __init__(
        self,
        index: Index,
        files: SegmentFiles,
        health: Health,
        time: DirectoryTime,
        *,
        shape_of: Callable[[int], tuple[SegmentShape, int]],
        map_bytes_max: Callable[[], int],
        on_lost: Callable[[int], None],
        on_deleted: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        self._index = index
        self._files = files
        self._health = health
        self._time = time
        self._shape_of = shape_of
        self._map_bytes_max = map_bytes_max
        self._on_lost = on_lost
        self._on_deleted = on_deleted
        self._group = _Group()
        self._stirred = asyncio.Event()
        self._closing = False
        self._index_broken = False
        self._recorded_segments: set[int] = set()
        self._sync_threads = ThreadPoolExecutor(_SYNC_THREADS, "kvstored-ssd-sync")
        self._index_thread = ThreadPoolExecutor(1, "kvstored-ssd-index")
        self._runner: asyncio.Task[None] | None = None
        self.writes_under_way = 0
