"""Copies between the pool and the caller's memory: who holds the GIL meanwhile, and how page aliasing is avoided.

Theory of operation. libc's memmove, called through ctypes, releases the GIL and must win it back after each call: with
busy Python threads in the process that takes 5 ms and more: with two, 32 MiB took 160 ms instead of 3. So a copy so
short that nobody could use the GIL meanwhile keeps it; and when a released GIL has come back late, the following copies
keep it too, for about 25 ms, until one tries again. (The interpreter still takes the GIL away every 5 ms for those who
wait, so a kept GIL delays them by one copy at most.) Without busy threads every long copy releases it, and threads copy
at once.

A copy of 2 KiB to 0.9 MiB whose (destination - source) mod 4096 lies in 1..31 runs at 5 to 45 % of the speed on many
processors (numpy's large arrays start 16 bytes into a page and meet it). Where that is so, it goes in two steps over a
buffer elsewhere in the page, which reaches 60 %.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import xxhash

from kvclient._buffers import Blocks, Segment, address_of
from kvstore.checksum import checksum
from kvstore.errors import NamespaceMismatch

Piece = tuple[int, int, int]  # destination address, source address, bytes

KEEP_BYTES_MAX = 64 << 10
_JOINED_BYTES_MAX = 8 << 20
_CONTENDED_BYTES = 256 << 20
_LATE_S = 0.001
_SLOWEST_BYTES_PER_S = 0.5e9

_ALIAS_BYTES_MIN = 2 << 10
_ALIAS_BYTES_MAX = 1 << 20
_BOUNCE_BYTES = 128 << 10

_arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_releasing = ctypes.CDLL(None).memmove
_move_releasing.argtypes = _arguments
_move_releasing.restype = None
_move_keeping = ctypes.PyDLL(None).memmove
_move_keeping.argtypes = _arguments
_move_keeping.restype = None


class Copier:
    """Performs copies for any number of threads."""

    def __init__(self) -> None:
        # How many more bytes are copied with the GIL kept. Threads may overwrite each other's judgement.
        self._keep_bytes = 0

    def run(self, pieces: Iterable[Piece]) -> None:
        """Copy each piece; returns when all bytes are where they belong."""
        for destination, source, size in pieces:
            move: Callable[[int, int, int], object] = _move_keeping
            if size > KEEP_BYTES_MAX:
                if self._keep_bytes > 0:
                    self._keep_bytes -= size
                else:
                    move = self._move_and_judge
            shift = (destination - source) & 4095
            if 0 < shift < 32 and _ALIAS_BYTES_MIN <= size <= _ALIAS_BYTES_MAX and aliasing_is_slow():
                _move_in_two_steps(destination, source, size)
            else:
                move(destination, source, size)

    def _move_and_judge(self, destination: int, source: int, size: int) -> None:
        before = time.monotonic()
        _move_releasing(destination, source, size)
        took_s = time.monotonic() - before
        late = took_s > _LATE_S + size / _SLOWEST_BYTES_PER_S
        self._keep_bytes = _CONTENDED_BYTES if late else 0


def pairs(
    blocks: Blocks, positions: Sequence[int], slots: Sequence[int], block_bytes: int
) -> list[tuple[int, int, int]]:
    """Return what corresponds between the caller's blocks and slots of the pool: address there, address here, bytes.

    Pairs that continue each other on both sides are joined.
    """
    addresses = blocks.addresses(positions)
    joined: list[tuple[int, int, int]] = []
    outer = inner = length = 0
    if addresses is not None:
        for address, slot in zip(addresses, slots, strict=True):
            if address == outer + length and slot == inner + length and length < _JOINED_BYTES_MAX:
                length += block_bytes
            else:
                joined.append((outer, inner, length))
                outer, inner, length = address, slot, block_bytes
    else:
        for position, slot in zip(positions, slots, strict=True):
            end = slot + block_bytes
            for address, size in blocks.segments(position):
                if address == outer + length and slot == inner + length and length < _JOINED_BYTES_MAX:
                    length += size
                else:
                    joined.append((outer, inner, length))
                    outer, inner, length = address, slot, size
                slot += size
            if slot != end:
                raise NamespaceMismatch(
                    f"the pieces of block {position} have {slot - end + block_bytes} bytes in all; "
                    f"a block of this namespace has {block_bytes}"
                )
    joined.append((outer, inner, length))
    del joined[0]  # the empty one that the first did not continue
    return joined


def checksum_of(segments: Sequence[Segment]) -> int:
    """Return the checksum of the bytes of `segments`, taken one behind the other."""
    if len(segments) == 1:
        return checksum(_bytes_at(*segments[0]))
    digest = xxhash.xxh3_64()
    for address, size in segments:
        digest.update(_bytes_at(address, size))
    return digest.intdigest() or 1


def _bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address))


class _Bounce(threading.local):
    """A thread's own buffer for copies in two steps, with a page of room to place it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _BOUNCE_BYTES + mmap.PAGESIZE)
        self.address = address_of(self.memory)


_bounce = _Bounce()


def _move_in_two_steps(destination: int, source: int, size: int) -> None:
    # Half a page from the source's place, hence about as far from the destination's.
    bounce = _bounce.address + (source + 2048) % 4096
    for start in range(0, size, _BOUNCE_BYTES):
        length = min(_BOUNCE_BYTES, size - start)
        _move_keeping(bounce, source + start, length)
        _move_keeping(destination + start, bounce, length)


@cache
def aliasing_is_slow() -> bool:
    """Return whether this machine copies slowly to a place 16 bytes further in the page; takes 0.3 ms, once."""
    size = 64 << 10
    memory = mmap.mmap(-1, 2 * size + 2 * mmap.PAGESIZE)
    source = address_of(memory)
    apart = source + size + mmap.PAGESIZE
    return _fastest(lambda: _move_keeping(apart + 16, source, size)) > 1.5 * _fastest(
        lambda: _move_keeping(apart + 64, source, size)
    )


def _fastest(action: Callable[[], None]) -> int:
    taken: list[int] = []
    for _ in range(6):
        before = time.perf_counter_ns()
        action()
        taken.append(time.perf_counter_ns() - before)
    return min(taken)
