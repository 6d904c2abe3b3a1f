"""Blocks between segment files and memory: what the ssd tier's threads do.

Adjacent slots of a segment are one run: one `pwritev` or `preadv` whatever the size of its blocks, so small
blocks are packed many to an I/O. Bodies move straight between the file and the caller's memory; memory that
direct I/O can't use (not aligned, or read-only) goes through a bounce buffer. A run that fails is tried again
block by block, so that one bad block spoils no other.

The functions block, release the GIL in every call that takes long, and return each block's fate instead of
raising.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvstore.checksum import NOT_COMPUTED, checksum
from kvstore.tiers import disk_layout as layout
from kvstore.tiers.disk_records import DiskRead, DiskWrite
from kvstore.tiers.segments import SegmentFiles, SegmentLost

RUN_BLOCKS_MAX = 256  # two iovecs a block; IOV_MAX is 1024
RUN_BYTES_MAX = 8 << 20
_ZEROS = bytes(layout.TAIL_BYTES_MAX)


class BlockCorrupt(OSError):
    """What lies in a slot is not the block that was expected there."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EBADMSG, what)


class _Buffers(threading.local):
    """A thread's own tails, page-aligned."""

    def __init__(self) -> None:
        self.tails = _pages(RUN_BLOCKS_MAX * layout.TAIL_BYTES_MAX)


def _pages(size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size_bytes))


_buffers = _Buffers()


class BlockIO:
    """Writes and reads blocks of segments.

    Parameters
    ----------
    files : SegmentFiles
        Where the segments are.
    directory_id : bytes
        Goes into every header, 16 bytes.
    """

    def __init__(self, files: SegmentFiles, directory_id: bytes) -> None:
        self._files = files
        self._directory_id = directory_id

    def write(self, segment: int, start: int, writes: Sequence[DiskWrite]) -> list[OSError | None]:
        """Write blocks of one segment, by ascending address; return for each what went wrong.

        `start` is the segment's first address. Nothing is durable yet. A record without a checksum gets one.
        """
        for write in writes:
            assert len(write.payload) == write.record.length, "a payload is not as long as its record says"
            if write.record.checksum == NOT_COMPUTED:
                write.record = replace(write.record, checksum=checksum(write.payload))
        errors: list[OSError | None] = [None] * len(writes)
        try:
            with self._files.opened(segment) as fd:
                for run in _runs(writes):
                    try:
                        self._write_run(fd, start, [writes[i] for i in run])
                    except OSError as exc:
                        for i in run:
                            errors[i] = exc if len(run) == 1 else self._write_one(fd, start, writes[i])
        except OSError as exc:
            return [exc] * len(writes)
        return errors

    def read(self, segment: int, start: int, reads: Sequence[DiskRead]) -> list[OSError | None]:
        """Read and verify blocks of one segment, by ascending address; return for each what went wrong.

        BlockCorrupt and SegmentLost say that the block is gone for good. After an error the destination holds anything.
        """
        errors: list[OSError | None] = [None] * len(reads)
        try:
            with self._files.opened(segment) as fd:
                for run in _runs(reads):
                    try:
                        found = self._read_run(fd, start, [reads[i] for i in run])
                        for i, error in zip(run, found, strict=True):
                            errors[i] = error
                    except OSError as exc:
                        for i in run:
                            errors[i] = exc if len(run) == 1 else self._read_one(fd, start, reads[i])
        except OSError as exc:
            return [exc] * len(reads)
        return errors

    def _write_one(self, fd: int, start: int, write: DiskWrite) -> OSError | None:
        try:
            self._write_run(fd, start, [write])
        except OSError as exc:
            return exc
        return None

    def _read_one(self, fd: int, start: int, read: DiskRead) -> OSError | None:
        try:
            return self._read_run(fd, start, [read])[0]
        except OSError as exc:
            return exc

    def _write_run(self, fd: int, start: int, run: Sequence[DiskWrite]) -> None:
        iovecs: list[memoryview] = []
        at = 0
        for write in run:
            length = write.record.length
            body, tail = self._cut(length, at)
            at += len(tail)
            padding_at, header_at = length - body, len(tail) - layout.HEADER_BYTES
            tail[:padding_at] = write.payload[body:]
            tail[padding_at:header_at] = _ZEROS[: header_at - padding_at]
            tail[header_at:] = layout.header(self._directory_id, write.address, write.record)
            if body:
                source = write.payload[:body]
                if not self._usable(write.payload):
                    source = _pages(body)
                    source[:] = write.payload[:body]
                iovecs.append(source)
            iovecs.append(tail)
        total = sum(map(len, iovecs))
        written = os.pwritev(fd, iovecs, run[0].address - start)
        if written != total:
            raise OSError(errno.EIO, f"a write of {total} bytes ended after {written}")

    def _read_run(self, fd: int, start: int, run: Sequence[DiskRead]) -> list[OSError | None]:
        iovecs: list[memoryview] = []
        parts: list[tuple[int, memoryview, memoryview | None]] = []
        at = 0
        for read in run:
            length = read.record.length
            assert len(read.destination) == length, "a destination is not as long as its record says"
            body, tail = self._cut(length, at)
            at += len(tail)
            bounce = None
            if body:
                if not self._usable(read.destination):
                    bounce = _pages(body)
                iovecs.append(read.destination[:body] if bounce is None else bounce)
            iovecs.append(tail)
            parts.append((body, tail, bounce))
        total = sum(map(len, iovecs))
        received = os.preadv(fd, iovecs, run[0].address - start)
        if received != total:
            raise SegmentLost(self._files.directory, f"a read of {total} bytes ended after {received}")
        return [self._checked(read, *part) for read, part in zip(run, parts, strict=True)]

    def _checked(self, read: DiskRead, body: int, tail: memoryview, bounce: memoryview | None) -> OSError | None:
        if bytes(tail[-layout.HEADER_BYTES :]) != layout.header(self._directory_id, read.address, read.record):
            return BlockCorrupt(f"the header at {read.address} is not the one of the block expected there")
        if bounce is not None:
            read.destination[:body] = bounce
        read.destination[body:] = tail[: read.record.length - body]
        if checksum(read.destination) != read.record.checksum:
            return BlockCorrupt(f"the checksum of the block at {read.address} does not match its bytes")
        return None

    def _cut(self, length: int, at: int) -> tuple[int, memoryview]:
        body = layout.body_bytes(length)
        return body, _buffers.tails[at : at + layout.slot_bytes(length) - body]

    def _usable(self, memory: memoryview) -> bool:
        """Return whether the system can move these bytes without a bounce buffer."""
        if not self._files.direct:
            return True
        if memory.readonly:
            return False
        return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % self._files.memory_alignment == 0


def _runs(blocks: Sequence[DiskWrite | DiskRead]) -> Iterator[range]:
    """Yield the index ranges of adjacent slots, each short enough for one call."""
    first, first_address, next_address = 0, blocks[0].address, blocks[0].address
    for i, block in enumerate(blocks):
        end = block.address + layout.slot_bytes(block.record.length)
        if block.address != next_address or i - first == RUN_BLOCKS_MAX or end - first_address > RUN_BYTES_MAX:
            if i > first:
                yield range(first, i)
            first, first_address = i, block.address
        next_address = end
    yield range(first, len(blocks))
