"""Strict mode's write window: a small memfd that one client may write, from which the daemon copies at seal.

Invariants
1. Its size is sealed, so a client that truncates the file can't make the daemon's copy fault.
2. What the client writes there after its seal changes nothing: the block is the daemon's own copy, checksummed there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvstore.tiers.slab import Slab

_CHUNK_BYTES = 2 << 20
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


class Arena:
    """Slots that one client may write; `size_bytes` is rounded up to 2 MiB."""

    def __init__(self, size_bytes: int) -> None:
        chunks = max(1, -(-size_bytes // _CHUNK_BYTES))
        self.size_bytes = chunks * _CHUNK_BYTES
        self.slab = Slab(_CHUNK_BYTES, chunks)
        self.fd = os.memfd_create("kvstored-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size_bytes)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
        self._map = mmap.mmap(self.fd, self.size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.copies = 0  # threads that copy from it now
        self._closing = False

    def allocate_many(self, slot_bytes: int, count: int) -> list[int]:
        """Return the offsets of up to `count` slots for the client to write."""
        return self.slab.allocate_many(slot_bytes, count)

    def free(self, offset: int) -> None:
        self.slab.free(offset)

    def close(self) -> None:
        """Let the memory go, once no thread copies from it."""
        self._closing = True
        if self.copies == 0 and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            try:
                self._map.close()
            except BufferError:
                pass  # the address taken above counts as a view; the mapping goes with the object

    def copied(self) -> None:
        """A thread is done copying."""
        self.copies -= 1
        if self._closing:
            self.close()
