"""An engine's paged KV as the source or destination of blocks: many small places in tensors, one extent in the store.

Theory of operation. An engine keeps the KV of a page (its own run of tokens) in pieces: one for each layer, and perhaps
one each for K and V. A block of the store is these pieces one behind the other, in the order in which the tensors are
given and, within a tensor, of its axes. What lies densely in memory is one piece, in the order of memory: where an
engine shows a permuted view (heads outside tokens), a block has the order of the memory; its namespace should say so.

Invariants
1. All pieces lie inside the tensors that were given: page numbers are checked against their shapes.
2. The tensors are kept alive as long as the PagedKV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvclient._buffers import Segment, Strided, strided
from kvstore.errors import NamespaceMismatch, UsageError

_PIECES_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Plane:
    """One piece of every page: that of page i is `piece_bytes` at `address + i * step_bytes`."""

    address: int
    step_bytes: int
    piece_bytes: int


class PagedKV:
    """The places of some blocks in an engine's per-layer KV tensors.

    Parameters
    ----------
    tensors : sequence of tensors or arrays
        In host memory, in the order of a block's bytes: e.g. one a layer, or K and V of each layer in turn.
    pages : sequence of int, or of sequences of int
        For each block the number of its page; or of its pages, where a block has several.
    page_axis : int
        The axis of pages: 0 for `[pages, ...]`, also with K and V inside the page; 1 for `[2, pages, ...]`.

    Examples
    --------
    vLLM's `[2, pages, tokens, heads, dim]` a layer: `PagedKV(kv_caches, block_ids, page_axis=1)`.
    Separate K and V with a page a token: `PagedKV.by_slots([k0, v0, k1, v1], slots, block_tokens)`.
    """

    def __init__(
        self, tensors: Sequence[Any], pages: Sequence[int] | Sequence[Sequence[int]], *, page_axis: int = 0
    ) -> None:
        found = [strided(tensor) for tensor in tensors]
        if not found:
            raise UsageError("PagedKV needs at least one tensor")
        self._tensors = list(tensors)
        self._planes = [plane for tensor in found for plane in _planes_of(tensor, page_axis)]
        self._runs = [_runs_of(page) for page in pages]
        self.is_writable = all(tensor.writable for tensor in found)
        page_count = min(tensor.shape[page_axis] for tensor in found)
        for block, runs in enumerate(self._runs):
            for first, count in runs:
                if first < 0 or first + count > page_count:
                    raise UsageError(
                        f"block {block} lies in page {first if first < 0 else first + count - 1}; "
                        f"the tensors have {page_count} pages"
                    )

    @staticmethod
    def by_slots(
        tensors: Sequence[Any], slots: Sequence[int], block_tokens: int, *, page_axis: int = 0
    ) -> PagedKV:
        """Return the places of blocks in tensors whose page is a slot for one token.

        Block i has the tokens in `slots[i * block_tokens : (i + 1) * block_tokens]`.
        """
        if block_tokens <= 0 or len(slots) % block_tokens:
            raise NamespaceMismatch(f"{len(slots)} slots are not whole blocks of {block_tokens} tokens")
        numbers = [int(slot) for slot in slots]
        blocks = [numbers[start : start + block_tokens] for start in range(0, len(numbers), block_tokens)]
        return PagedKV(tensors, blocks, page_axis=page_axis)

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self._runs)

    def segments(self, position: int) -> Sequence[Segment]:
        """Return the places of one block's bytes, in their order within the block."""
        runs = self._runs[position]
        found: list[Segment] = []
        for plane in self._planes:
            address, step, size = plane.address, plane.step_bytes, plane.piece_bytes
            if step == size:
                found += [(address + first * step, count * size) for first, count in runs]
            else:
                pages = [page for first, count in runs for page in range(first, first + count)]
                found += [(address + page * step, size) for page in pages]
        return found


def _runs_of(pages: int | Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) for each run of consecutive numbers."""
    if not isinstance(pages, Sequence):
        return [(int(pages), 1)]
    runs: list[tuple[int, int]] = []
    for page in map(int, pages):
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def _planes_of(tensor: Strided, page_axis: int) -> list[_Plane]:
    if not -len(tensor.shape) <= page_axis < len(tensor.shape):
        raise UsageError(f"a tensor of shape {tensor.shape} has no axis {page_axis} of pages")
    step = tensor.strides[page_axis]
    within = [axis for axis in range(len(tensor.shape)) if axis != page_axis % len(tensor.shape)]
    axes = [(tensor.shape[axis], tensor.strides[axis]) for axis in within if tensor.shape[axis] != 1]
    if any(stride <= 0 for _, stride in axes) or step <= 0:
        raise NamespaceMismatch(f"a tensor of shape {tensor.shape} has strides {tensor.strides}: copy it first")
    pieces = _pieces_of(axes, tensor.item_bytes)
    return [_Plane(tensor.address + offset, step, size) for offset, size in pieces]


def _pieces_of(axes: list[tuple[int, int]], item_bytes: int) -> list[tuple[int, int]]:
    """Return offset and bytes of each dense piece of an array with these (extent, stride in bytes)."""
    dense = item_bytes
    for extent, stride in sorted(axes, key=lambda axis: axis[1]):
        if stride != dense:
            break
        dense *= extent
    else:
        return [(0, dense)]
    (extent, stride), inner = axes[0], _pieces_of(axes[1:], item_bytes)
    if extent * len(inner) > _PIECES_MAX:
        raise NamespaceMismatch(f"a page lies in more than {_PIECES_MAX} pieces in memory: copy it first")
    return [(place * stride + offset, size) for place in range(extent) for offset, size in inner]
