"""Segment files: one preallocated file a segment, opened as they are needed, O_DIRECT where the file system can.

A segment is a region of the slab: slots of one size, `slots * slot_bytes` bytes, at offset 0. Its file is
named by its first chunk. Methods do blocking I/O and are called from the tier's threads; several may use a
segment at the same time.

Invariants
1. A descriptor is never closed while a thread uses it, so no write can reach a file that reused its number.
2. A file that `create` returned from is fully allocated and its name is durable.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_layout import SECTOR_BYTES
from kvstore.tiers.disk_recency import sync_directory

_NAME = re.compile(r"^([0-9]{8,})\.seg$")
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_MEM_ALIGN_AT = 152  # struct statx: stx_dio_mem_align, then stx_dio_offset_align, u32 each


class SegmentLost(OSError):
    """The file of a segment has vanished or was cut off."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.ENODATA, what, str(path))


@dataclass(slots=True)
class _Open:
    fd: int
    users: int = 0
    doomed: bool = False


class SegmentFiles:
    """The directory of segment files.

    Parameters
    ----------
    directory : Path
        Exists and is writable.
    direct_io : str
        "auto" takes O_DIRECT where a trial write and read succeed, "off" never, "require" fails without.
    open_files_max : int
        Descriptors kept open; more are opened only while more segments are in use at the same moment.
    """

    def __init__(self, directory: Path, *, direct_io: str = "auto", open_files_max: int = 256) -> None:
        self.directory = directory
        self.open_files_max = open_files_max
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # least recently used first
        self.memory_alignment = 1
        self.direct, self.io_mode = (False, "buffered (by setting)") if direct_io == "off" else self._probe()
        if direct_io == "require" and not self.direct:
            raise TierUnavailable(
                f"{directory} gives no direct I/O: {self.io_mode}; choose another file system or --direct-io auto"
            )
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if self.direct else 0)

    def path(self, segment: int) -> Path:
        return self.directory / f"{segment:08d}.seg"

    def sizes(self) -> dict[int, int]:
        """Return the size of each segment file that exists, by segment."""
        found: dict[int, int] = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if match := _NAME.match(entry.name):
                    with suppress(FileNotFoundError):  # removed since it was listed
                        found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def create(self, segment: int, size_bytes: int) -> None:
        """Make a segment's file; on failure nothing is left of it."""
        self._forget(segment)
        path = self.path(segment)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            os.fsync(fd)
            sync_directory(self.directory)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def extend(self, segment: int, size_bytes: int) -> None:
        """Give a segment's file, if it was cut off, its size back."""
        with self.opened(segment) as fd:
            os.posix_fallocate(fd, 0, size_bytes)
            os.fsync(fd)

    def remove(self, segment: int) -> None:
        """Remove a segment's file, durably."""
        self._forget(segment)
        self.path(segment).unlink(missing_ok=True)
        sync_directory(self.directory)

    def sync(self, segment: int, size_bytes: int) -> None:
        """Make everything written to a segment durable; raises SegmentLost if its file isn't there any more, whole."""
        with self.opened(segment) as fd:
            os.fdatasync(fd)
            state = os.fstat(fd)
            if state.st_nlink == 0 or state.st_size < size_bytes:
                raise SegmentLost(self.path(segment), "the segment's file was removed or cut off under the daemon")
            if not self.direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def opened(self, segment: int) -> Generator[int]:
        """Lend the segment's descriptor."""
        with self._lock:
            entry = self._open.pop(segment, None)
            if entry is None:
                entry = self._open_file(segment)
            self._open[segment] = entry
            entry.users += 1
        try:
            yield entry.fd
        finally:
            with self._lock:
                entry.users -= 1
                if entry.doomed and not entry.users:
                    os.close(entry.fd)

    def close(self) -> None:
        with self._lock:
            for entry in self._open.values():
                assert not entry.users, "a segment is still in use"
                os.close(entry.fd)
            self._open.clear()

    def _open_file(self, segment: int) -> _Open:
        if len(self._open) >= self.open_files_max:
            idle = next((number for number, entry in self._open.items() if not entry.users), None)
            if idle is not None:
                os.close(self._open.pop(idle).fd)
        path = self.path(segment)
        try:
            return _Open(os.open(path, self._flags))
        except FileNotFoundError as exc:
            raise SegmentLost(path, "the segment's file has vanished") from exc

    def _forget(self, segment: int) -> None:
        with self._lock:
            entry = self._open.pop(segment, None)
            if entry is None:
                return
            if entry.users:
                entry.doomed = True
            else:
                os.close(entry.fd)

    def _probe(self) -> tuple[bool, str]:
        """Return whether O_DIRECT works here on 4096-byte sectors, and a word on it for the operator."""
        path = self.directory / "probe.tmp"
        sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
        try:
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            return False, f"buffered (the file system refuses O_DIRECT: {exc.strerror})"
        try:
            memory_alignment, offset_alignment = _direct_alignment(path)
            if offset_alignment > SECTOR_BYTES or memory_alignment > SECTOR_BYTES:
                return False, f"buffered (direct I/O needs an alignment of {max(offset_alignment, memory_alignment)})"
            os.posix_fallocate(fd, 0, SECTOR_BYTES)
            if os.pwritev(fd, [sector], 0) != SECTOR_BYTES or os.preadv(fd, [sector], 0) != SECTOR_BYTES:
                return False, "buffered (a trial of direct I/O came back short)"
        except OSError as exc:
            return False, f"buffered (a trial of direct I/O failed: {exc.strerror})"
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)
        self.memory_alignment = memory_alignment
        return True, "direct"


def _direct_alignment(path: Path) -> tuple[int, int]:
    """Return the alignment direct I/O wants of memory and of file offsets; 4096 each where the kernel can't say."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, ctypes.c_uint(_STATX_DIOALIGN), buffer) != 0:
        return SECTOR_BYTES, SECTOR_BYTES
    mask = int.from_bytes(buffer.raw[:4], "little")
    at = _STATX_DIO_MEM_ALIGN_AT
    memory, offset = (int.from_bytes(buffer.raw[i : i + 4], "little") for i in (at, at + 4))
    if not mask & _STATX_DIOALIGN or not memory or not offset:
        return SECTOR_BYTES, SECTOR_BYTES
    return memory, offset
