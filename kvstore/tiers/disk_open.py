"""Opening the ssd tier's directory: lock it, look whether it can work, and make index and segment files agree.

    DIRECTORY/lock            held by flock while a daemon owns the directory; contains its process id
    DIRECTORY/index/          the LMDB environment (index.py)
    DIRECTORY/segments/N.seg  the segment files (segments.py)
    DIRECTORY/recency         the last checkpoint's order (disk_recency.py)

Blocking; runs in a thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from array import array
from dataclasses import dataclass
from pathlib import Path

from kvstore.clock import Clock, kernel_boot_id
from kvstore.errors import BadSetting, TierLocked, TierUnavailable
from kvstore.tiers import disk_recency, disk_reconcile, disk_space, index_trial
from kvstore.tiers.disk_records import NEVER_S, Columns, DiskNamespace
from kvstore.tiers.disk_time import DirectoryTime
from kvstore.tiers.index import Index
from kvstore.tiers.segments import SegmentFiles

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Found:
    """An opened directory, index and files in agreement. `recency` are addresses, coldest first, as hints."""

    directory: Path
    lock: int
    index: Index
    files: SegmentFiles
    time: DirectoryTime
    space: disk_space.Space
    columns: Columns
    recency: array[int]
    namespaces: dict[int, DiskNamespace]
    pins: dict[tuple[int, bytes], float]
    recorded_segments: list[int]
    records_lost: int

    def close(self) -> None:
        self.files.close()
        self.index.close()
        os.close(self.lock)


def open_directory(
    directory: Path,
    capacity_bytes: int,
    *,
    clock: Clock,
    segment_bytes: int | None,
    direct_io: str,
    index_map_bytes: int,
    boot_id: str | None,
) -> Found:
    """Return the directory, ready for use; it is locked, and unlocked again if anything fails."""
    _look(directory, capacity_bytes)
    lock = _lock(directory)
    try:
        for name in ("index", "segments"):
            _make_own(directory / name)
        chunk_bytes = segment_bytes or disk_space.chunk_bytes_for(capacity_bytes)
        files = SegmentFiles(directory / "segments", direct_io=direct_io)
        index_trial.check(directory / "index")
        map_bytes_max = capacity_bytes // 4
        index = Index(
            directory / "index", map_bytes=index_map_bytes, chunk_bytes=chunk_bytes, map_bytes_max=map_bytes_max
        )
        try:
            if index.chunk_bytes > 4 * chunk_bytes or index.map_bytes > map_bytes_max:
                index = _started_over(directory, index, index_map_bytes, chunk_bytes, capacity_bytes)
            return _open_locked(directory, lock, capacity_bytes, index, files, clock, boot_id or kernel_boot_id())
        except BaseException:
            index.close()
            files.close()
            raise
    except OSError as exc:
        os.close(lock)
        raise TierUnavailable(f"the ssd directory {directory} can't be used: {exc}") from exc
    except BaseException:
        os.close(lock)
        raise


def _look(directory: Path, capacity_bytes: int) -> None:
    if capacity_bytes < disk_space.CAPACITY_BYTES_MIN:
        raise BadSetting(
            f"an ssd tier of {capacity_bytes} bytes is too small: give at least {disk_space.CAPACITY_BYTES_MIN} bytes"
        )
    if not directory.is_dir():
        raise TierUnavailable(
            f"the ssd directory {directory} does not exist: is its disk mounted? Make it, or give another"
        )
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise TierUnavailable(f"the ssd directory {directory} is not writable for uid {os.geteuid()}: change its owner")
    if _file_system(directory) in ("tmpfs", "ramfs"):
        _log.warning("ssd directory is in memory: directory=%s: its blocks do not survive a reboot", directory)
    held = sum(f.stat().st_blocks * 512 for f in directory.rglob("*") if f.is_file())
    free = os.statvfs(directory)
    room = held + free.f_bavail * free.f_frsize
    if room < capacity_bytes:
        _log.warning(
            "ssd capacity is larger than its disk has room: capacity_bytes=%d room_bytes=%d directory=%s: "
            "it will work degraded once the disk is full; lower the size", capacity_bytes, room, directory,
        )  # fmt: skip


def _make_own(path: Path) -> None:
    """Make a directory of ours; what lies behind a link is somebody else's, on a disk whose room nobody looked at."""
    if path.is_symlink():
        raise TierUnavailable(f"{path} is a symbolic link: remove it, or name the directory it leads to as ssd-dir")
    path.mkdir(exist_ok=True)


def _lock(directory: Path) -> int:
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError as exc:
        raise TierUnavailable(f"the ssd directory {directory} is not writable: {exc}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise TierLocked(
            f"the ssd directory {directory} belongs to the running process {owner}: stop it, or give another directory"
        ) from exc
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _file_system(directory: Path) -> str:
    """Return the type of the file system that holds `directory`, "" if the kernel doesn't tell."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            return right.split()[0]
    return ""


def _started_over(directory: Path, index: Index, map_bytes: int, chunk_bytes: int, capacity_bytes: int) -> Index:
    """Return a new index, everything else removed: the capacity is far below the one the directory was made for."""
    _log.warning(
        "ssd directory started over: directory=%s capacity_bytes=%d segment_bytes=%d index_bytes=%d: "
        "it was made for a much larger capacity", directory, capacity_bytes, index.chunk_bytes, index.map_bytes,
    )  # fmt: skip
    index.close()
    for name in ("index", "segments"):
        shutil.rmtree(directory / name)
        (directory / name).mkdir()
    (directory / disk_recency.NAME).unlink(missing_ok=True)
    return Index(directory / "index", map_bytes=map_bytes, chunk_bytes=chunk_bytes)


def _open_locked(
    directory: Path, lock: int, capacity_bytes: int, index: Index, files: SegmentFiles, clock: Clock, boot_id: str
) -> Found:
    time = DirectoryTime(clock, boot_id, index.anchor)
    namespaces = index.load_namespaces()
    agreed = disk_reconcile.reconcile(index, files, set(namespaces))
    recency, columns = disk_recency.read(directory), agreed.columns
    if disk_reconcile.is_too_large(agreed, index, capacity_bytes):
        columns = disk_reconcile.trim(agreed, disk_recency.in_order(columns, recency), index, capacity_bytes)
    disk_reconcile.apply(agreed, index, files, time.anchor())
    disk_recency.remove_leftover(directory)

    chunks_min = max((segment + shape.span for segment, shape in agreed.shapes.items()), default=0)
    space = disk_space.Space(capacity_bytes, index.chunk_bytes, map_bytes=index.map_bytes, chunks_min=chunks_min)
    for segment, shape in agreed.shapes.items():
        space.restore(segment, shape, agreed.slots.get(segment, array("I")))
    if any(map(NEVER_S.__ne__, columns.expiries_s)):
        columns.expiries_s = array("d", map(time.to_boottime_s, columns.expiries_s))
    return Found(
        directory=directory,
        lock=lock,
        index=index,
        files=files,
        time=time,
        space=space,
        columns=columns,
        recency=recency,
        namespaces=namespaces,
        pins={key: time.to_boottime_s(end_s) for key, end_s in index.load_pins().items()},
        recorded_segments=list(agreed.shapes),
        records_lost=agreed.lost,
    )
