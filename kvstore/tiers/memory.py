"""The cpu tier's bytes: one memfd, mapped whole, reserved for real, handed to clients as a descriptor.

Theory of operation. The descriptor has its full size from the start, so clients map it once; pages become real chunk
by chunk (`populate`, in threads), and only populated chunks are given to the slab. Sealing it against future writable
mappings (strict mode) happens after our own mapping was made. The first chunks are set aside for transit: loads for
copying reads go there when everything else is pinned, so that a tier full of pins still serves reads.

Invariants
1. No slot is handed out whose pages are not populated: a client can't meet SIGBUS, nor the daemon an OOM later.
2. Transit slots and ordinary slots never overlap; `capacity_bytes` counts both.
3. The mapping outlives every thread that copies from or to it: `close` is called last.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.errors import BadSetting, TierUnavailable
from kvstore.tiers.slab import NOBODY, Slab

HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES_MAX = 64 << 20
_CHUNKS_WANTED = 32
_TRANSIT_SHARE = 16  # one chunk in sixteen
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MFD_HUGETLB = 4
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def chunk_bytes_for(size_bytes: int) -> int:
    """Return the chunk size for a pool of `size_bytes`: a power of two times 2 MiB, so that there are 32 or more."""
    chunk_bytes = HUGE_PAGE_BYTES
    while chunk_bytes < _CHUNK_BYTES_MAX and size_bytes // (chunk_bytes * 2) >= _CHUNKS_WANTED:
        chunk_bytes *= 2
    return chunk_bytes


class MemoryTier:
    """A pool of slots in shared memory.

    Parameters
    ----------
    size_bytes : int
        Rounded down to whole chunks; at least one chunk (2 MiB).
    read_only_clients : bool
        Seal the descriptor so that clients can map it for reading only (strict mode).
    huge_pages : str
        "auto" takes transparent or hugetlb pages where the kernel gives them, "off" doesn't ask, "require" fails
        without.

    Raises
    ------
    BadSetting
        Too small a size, or huge pages required and not to be had.
    TierUnavailable
        The kernel refuses the memory.
    """

    def __init__(self, size_bytes: int, *, read_only_clients: bool = False, huge_pages: str = "auto") -> None:
        self.chunk_bytes = chunk_bytes_for(size_bytes)
        chunks = size_bytes // self.chunk_bytes
        if chunks < 1:
            raise BadSetting(f"the cpu tier needs at least {HUGE_PAGE_BYTES} bytes, not {size_bytes}: raise --cpu-size")
        self.size_bytes = chunks * self.chunk_bytes
        self.huge_pages = "none"
        self.fd = self._create(huge_pages)
        try:
            self._map = mmap.mmap(self.fd, self.size_bytes)
            self._whole = memoryview(self._map)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            self._advise(huge_pages)
            if read_only_clients:
                seals = _F_SEAL_FUTURE_WRITE | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
                fcntl.fcntl(self.fd, _F_ADD_SEALS, seals)
        except BadSetting:
            os.close(self.fd)
            raise
        except OSError as exc:
            os.close(self.fd)
            raise TierUnavailable(
                f"the kernel refuses a pool of {self.size_bytes} bytes: {exc}; lower --cpu-size"
            ) from exc
        transit_chunks = chunks // _TRANSIT_SHARE if chunks >= 4 else 0
        transit_chunks = max(transit_chunks, 1) if chunks >= 4 else 0
        self._transit_bytes = transit_chunks * self.chunk_bytes
        self._transit = Slab(self.chunk_bytes, 0, transit_chunks)
        self.slab = Slab(self.chunk_bytes, 0, chunks - transit_chunks)
        self._populated = 0

    # ---- becoming real

    @property
    def populated_bytes(self) -> int:
        return self._populated

    def populate_blocking(self, start: int, length: int) -> None:
        """Make pages real; run it in a thread (the GIL is released). Raises TierUnavailable if they can't be had."""
        if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            raise TierUnavailable(
                f"only {self._populated} of {self.size_bytes} bytes of the cpu tier could be reserved "
                f"({os.strerror(code)}): lower --cpu-size or raise the memory limit"
            )

    def add_populated(self, length: int) -> None:
        """Hand the next `length` populated bytes to the slabs; whole chunks, in order."""
        chunks = length // self.chunk_bytes
        to_transit = min(chunks, self._transit.chunks_max - self._transit.chunks)
        self._transit.add_chunks(to_transit)
        self.slab.add_chunks(chunks - to_transit)
        self._populated += length

    # ---- slots

    def allocate(self, slot_bytes: int) -> int | None:
        """Return the offset of an ordinary slot, or None."""
        offset = self.slab.allocate(slot_bytes)
        return None if offset is None else offset + self._transit_bytes

    def allocate_many(self, slot_bytes: int, count: int) -> list[int]:
        """Return the offsets of up to `count` ordinary slots."""
        start = self._transit_bytes
        return [offset + start for offset in self.slab.allocate_many(slot_bytes, count)]

    def allocate_transit(self, slot_bytes: int) -> int | None:
        """Return the offset of a slot in transit, or None."""
        return self._transit.allocate(slot_bytes)

    def free(self, offset: int) -> None:
        if self.is_transit(offset):
            self._transit.free(offset)
        else:
            self.slab.free(offset - self._transit_bytes)

    def is_transit(self, offset: int) -> bool:
        return offset < self._transit_bytes

    def set_owners(self, offsets: Sequence[int], rows: Sequence[int]) -> None:
        """Note which rows ordinary slots belong to, for `owners`."""
        start, slab = self._transit_bytes, self.slab
        for offset, row in zip(offsets, rows, strict=True):
            if offset >= start:
                slab.set_owner(offset - start, row)

    def clearing(self, offset: int, slot_bytes: int) -> tuple[int, ...]:
        """Return the regions to empty for one of another class where `offset` lies; none for a slot in transit."""
        return () if self.is_transit(offset) else self.slab.clearing(offset - self._transit_bytes, slot_bytes)

    def owners(self, region: int) -> Iterator[int]:
        """Yield the rows of all used slots in a region, NOBODY for one being written."""
        return self.slab.owners(region)

    def region_at(self, offset: int) -> int:
        """Return the region that holds `offset`; NOBODY for a slot in transit."""
        return NOBODY if self.is_transit(offset) else self.slab.region_at(offset - self._transit_bytes)

    def region_starts(self) -> list[int]:
        """Return the first offset of each region of ordinary slots."""
        return [region.start + self._transit_bytes for region in self.slab.regions()]

    def view(self, offset: int, length: int) -> memoryview:
        """Return the bytes of a slot, writable. The view must be let go before `close`."""
        return self._whole[offset : offset + length]

    @property
    def capacity_bytes(self) -> int:
        return self.slab.capacity_bytes + self._transit.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.slab.used_bytes + self._transit.used_bytes

    @property
    def transit_bytes(self) -> int:
        """What is set aside for transit once everything is populated."""
        return self._transit_bytes

    def grantable_bytes(self) -> int:
        """Return what ordinary slots will have in all once everything is populated."""
        return self.slab.chunks_max * self.chunk_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless both slabs are whole."""
        self.slab.check_integrity()
        self._transit.check_integrity()

    def close(self) -> None:
        """Unmap the pool; clients keep their own mappings."""
        self._whole.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still out; the mapping goes with the process
        os.close(self.fd)

    # ---- the inside

    def _create(self, huge_pages: str) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages != "off" and _free_hugetlb_bytes() >= self.size_bytes:
            try:
                fd = os.memfd_create("kvstored-pool", flags | _MFD_HUGETLB)
                os.ftruncate(fd, self.size_bytes)
            except OSError:
                pass  # no hugetlb for us after all: ordinary pages
            else:
                self.huge_pages = "hugetlb"
                return fd
        fd = os.memfd_create("kvstored-pool", flags)
        try:
            os.ftruncate(fd, self.size_bytes)
        except OSError as exc:
            os.close(fd)
            raise TierUnavailable(
                f"a pool of {self.size_bytes} bytes can't be made ({exc}): lower --cpu-size, or raise the limit on "
                "file sizes (ulimit -f)"
            ) from exc
        return fd

    def _advise(self, huge_pages: str) -> None:
        _libc.madvise(self.address, self.size_bytes, _MADV_DONTDUMP)
        if huge_pages == "off" or self.huge_pages == "hugetlb":
            return
        # madvise succeeds and does nothing where shmem_enabled forbids huge pages, so ask the kernel's own switch.
        if _shmem_huge_pages_allowed() and not _libc.madvise(self.address, self.size_bytes, _MADV_HUGEPAGE):
            self.huge_pages = "thp"
        elif huge_pages == "require":
            raise BadSetting(
                "huge pages are required but neither reserved (vm.nr_hugepages) nor allowed for shared memory "
                "(/sys/kernel/mm/transparent_hugepage/shmem_enabled): allow them or set --huge-pages auto"
            )


def _shmem_huge_pages_allowed() -> bool:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return any(f"[{mode}]" in text for mode in ("always", "within_size", "advise", "force"))


def _free_hugetlb_bytes() -> int:
    try:
        pool = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
        free = int((pool / "free_hugepages").read_text()) - int((pool / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0
    return free * HUGE_PAGE_BYTES
