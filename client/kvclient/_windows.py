"""How a batch is cut into windows, and the checks that a window's reply must pass before its places are used.

Theory of operation. The request for the next window is on its way before a window's bytes are copied, so the daemon's
work and the way there and back hide behind the copies; of one window alone, a part is asked for by itself to the same
end. At most two windows are held at a time.

Invariants
1. An offset is used only after it was checked to lie in the memory that it points into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvclient._pool import Mapping
from kvstore import wire
from kvstore.errors import RemoteProtocolError

SLOT_BYTES = 4096  # slots are multiples of it
WINDOW_BLOCKS_MAX = 1024  # the daemon answers others between two windows
# A single window of so many blocks and bytes is worth a first request of its own, for a part of it.
_SPLIT_BLOCKS_MIN = 128
_SPLIT_BYTES_MIN = 4 << 20


@dataclass(slots=True)
class Window:
    """A request on its way. `alone`: nothing else of this operation was on its way or held when it was sent."""

    positions: Sequence[int]
    request: int
    sent_at: float
    alone: bool


def windows_of(positions: Sequence[int], block_bytes: int, welcome: wire.Welcome) -> list[Sequence[int]]:
    """Return `positions` cut into windows that the daemon allows."""
    window_bytes = min(welcome.window_bytes, welcome.arena_bytes // 4 or welcome.window_bytes)
    slot_bytes = -(-block_bytes // SLOT_BYTES) * SLOT_BYTES
    step = max(1, min(welcome.keys_max, WINDOW_BLOCKS_MAX, window_bytes // slot_bytes))
    count = len(positions)
    if _SPLIT_BLOCKS_MIN <= count <= step and count * block_bytes >= _SPLIT_BYTES_MIN:
        return [positions[: count // 4], positions[count // 4 :]]
    return [positions[start : start + step] for start in range(0, count, step)]


def runs_of(positions: Sequence[int]) -> list[Sequence[int]]:
    """Return `positions` cut where one is left out: a window that continues a chain has no gap."""
    if positions[-1] - positions[0] == len(positions) - 1:
        return [positions]
    cuts = [at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1]
    return [positions[start:end] for start, end in pairwise([0, *cuts, len(positions)])]


def places_of(mapping: Mapping | None, offsets: Sequence[int], at: Sequence[int], block_bytes: int) -> list[int]:
    """Return the addresses of the blocks at places `at` of a reply that gives `offsets` into `mapping`."""
    if mapping is None:
        raise RemoteProtocolError("the daemon named places in shared memory that it did not send")
    chosen = offsets if len(at) == len(offsets) else [offsets[place] for place in at]
    mapping.check(chosen, block_bytes)
    mapping.touch(chosen, block_bytes)
    base = mapping.address
    return [base + offset for offset in chosen]
