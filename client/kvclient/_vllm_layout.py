"""How an engine's KV lies in memory, read from the tensors it registers: the namespace's components, and the pages.

Theory of operation. vLLM registers one tensor a layer with an axis of pages; behind it lie heads, tokens and content
in an order that depends on the version, the attention backend and the platform. A block holds, layer by layer, the
bytes of a page as `PagedKV` takes them: in the order of memory where they are dense. Where the axes can be told
without doubt they are named, so that ranks of different sizes can share (see kvclient._slices). Otherwise a rank's
page is opaque: its content is one "head" of as many as there are ranks, and nobody but the same rank of the same size
reads it.

Invariants
1. Axes are named only if their extents leave no doubt.
2. A page's bytes are all that the engine's own description of its cache says, but for padding.
3. Two layouts whose bytes differ in order have different components.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvclient._vllm_errors import Unsupported
from kvstore.block import Component, Slice

_DTYPES = {"float8_e4m3fn": "float8_e4m3", "float8_e4m3fnuz": "float8_e4m3"}
_NUMBER = re.compile(r"\d+")


class Tensor(Protocol):
    """What is read of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    def stride(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of an engine, and how its model is dealt out.

    Parameters
    ----------
    tp_rank, tp_size, pp_rank, pp_size : int
        Its place among tensor- and pipeline-parallel ranks.
    layers, kv_heads : int
        Of the whole model.
    has_latents : bool
        The cache holds one latent for all heads, the same on each tensor-parallel rank.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    layers: int
    kv_heads: int
    has_latents: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV of one rank.

    Attributes
    ----------
    layers : tuple of str
        The layers that have tensors of their own, in the order of a block's bytes.
    page_axis, pages_per_block : int
        The tensors' axis of pages, and how many of these, one behind the other, are one block.
    components, slice
        The namespace's.
    orders : tuple of tuple of int
        For each layer the axes of a page, in the order of a block's bytes.
    is_first : bool
        Whether this is the first of the ranks that hold the same bytes: the one that stores them.
    """

    layers: tuple[str, ...]
    page_axis: int
    pages_per_block: int
    components: tuple[Component, ...]
    slice: Slice
    orders: tuple[tuple[int, ...], ...]
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Page:
    """One layer's page: extents in the order of a block's bytes, and what is known of them."""

    dtype: str
    extents: tuple[int, ...]
    names: tuple[str, ...]  # of extents; empty if there is doubt
    order: tuple[int, ...]


def layout_of(
    tensors: Mapping[str, Tensor],
    rank: Rank,
    *,
    block_count: int,
    block_tokens: int,
    local_heads: int,
    page_bytes: Mapping[str, int] | None = None,
) -> Layout:
    """Return the layout of registered tensors; `page_bytes` are, by layer, those that a block must have at least.

    Raises
    ------
    Unsupported
        Blocks can't be cut out of these tensors, or their place in the whole model is not known.
    """
    layers = _own(tensors)
    for name, needed in (page_bytes or {}).items():
        if name in layers and (shown := _size_bytes(layers[name]) // block_count) < needed:
            raise Unsupported(f"a block of {name} has {needed} bytes, and its tensor shows {shown} of them")
    axes = {_page_axis(tensor, block_count) for tensor in layers.values()}
    if len(axes) != 1:
        raise Unsupported("layers keep their pages in different axes, or in none that can be told")
    ((page_axis, per_block),) = axes
    pages = [_page(tensor, page_axis, per_block, block_tokens, local_heads, rank) for tensor in layers.values()]
    if rank.pp_size > 1:
        first = _first_layer(list(layers), rank)
        whole_layers, held = rank.layers, (first, first + len(layers))
    else:
        whole_layers, held = len(layers), (0, len(layers))
    if len(set(pages)) > 1:
        return _of_unequal(layers, pages, page_axis, per_block, rank)
    part = _named(pages[0], whole_layers, held, rank) or _opaque(pages[0], whole_layers, held, rank)
    component, slice_, is_first = part
    return Layout(tuple(layers), page_axis, per_block, (component,), slice_, _orders(pages), is_first)


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the layers with memory of their own, in their natural order."""
    found: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name in sorted(tensors, key=_natural):
        if tensors[name].data_ptr() not in addresses:  # others share the cache of an earlier layer
            addresses.add(tensors[name].data_ptr())
            found[name] = tensors[name]
    if not found:
        raise Unsupported("the engine registered no KV tensors")
    return found


def _size_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    parts = re.split(r"(\d+)", name)
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts)


def _page_axis(tensor: Tensor, block_count: int) -> tuple[int, int]:
    """Return the axis of pages and how many pages a block has."""
    shape = tensor.shape
    if len(shape) >= 2 and shape[0] % block_count == 0 and (shape[0] != 2 or shape[1] % block_count):
        return 0, shape[0] // block_count
    if len(shape) >= 3 and shape[0] == 2 and shape[1] % block_count == 0:
        return 1, shape[1] // block_count
    raise Unsupported(f"no axis of a tensor of shape {tuple(shape)} can be that of {block_count} blocks")


def _page(
    tensor: Tensor, page_axis: int, per_block: int, block_tokens: int, local_heads: int, rank: Rank
) -> _Page:
    shape, strides = tensor.shape, tensor.stride()
    within = [axis for axis in range(len(shape)) if axis != page_axis]
    order = [axis for axis in within if shape[axis] == 1]
    order += _order([axis for axis in within if shape[axis] != 1], shape, strides)
    extents = tuple(shape[axis] for axis in order)
    kinds = {} if per_block != 1 else _kinds(shape, page_axis, block_tokens, local_heads, has_latents=rank.has_latents)
    names = tuple(kinds[axis] for axis in order) if kinds else ()
    if per_block != 1:
        if not _is_dense(order, shape, strides):
            raise Unsupported("a block has several pages, each in several pieces")
        extents = (per_block, *extents)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Page(_DTYPES.get(dtype, dtype), extents, names, tuple(order))


def _order(axes: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the axes of a page in the order in which PagedKV takes its bytes."""
    by_memory = sorted(axes, key=lambda axis: -strides[axis])
    if _is_dense(by_memory, shape, strides):
        return by_memory
    return [axes[0], *_order(axes[1:], shape, strides)]


def _is_dense(axes: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> bool:
    dense = 1
    for axis in reversed(axes):
        if shape[axis] != 1 and strides[axis] != dense:
            return False
        dense *= shape[axis]
    return True


def _kinds(
    shape: Sequence[int], page_axis: int, block_tokens: int, local_heads: int, *, has_latents: bool
) -> dict[int, str]:
    """Return what each axis of a page is; nothing if there is doubt."""
    if has_latents:
        return {1: "token", 2: "dim"} if len(shape) == 3 and page_axis == 0 and shape[1] == block_tokens else {}
    if block_tokens == local_heads:
        return {}
    axes = [axis for axis in range(len(shape)) if axis != page_axis]
    kinds: dict[int, str] = {axes.pop(): "dim"}
    for axis in axes:
        extent = shape[axis]
        if extent == block_tokens:
            kind = "token"
        elif extent == local_heads and not (extent == 2 and len(axes) == 3):
            kind = "head"
        elif extent == 2 and len(axes) == 3:
            kind = "kv"
        else:
            return {}
        if kind in kinds.values():
            return {}
        kinds[axis] = kind
    return kinds if {"token", "head"} <= set(kinds.values()) else {}


def _first_layer(layers: Sequence[str], rank: Rank) -> int:
    """Return the number, in the whole model, of a pipeline stage's first layer."""
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in layers]
    firsts = [number[0] for number in numbers if number]
    if firsts != list(range(firsts[0], firsts[0] + len(layers))) if firsts else True:
        raise Unsupported(f"a pipeline stage's layers are not numbered one after the other: {', '.join(layers[:4])}")
    if firsts[-1] >= rank.layers:
        raise Unsupported(f"a pipeline stage has layer {firsts[-1]}, the model {rank.layers} layers")
    return firsts[0]


Part = tuple[Component, Slice, bool]


def _named(page: _Page, layers: int, held: tuple[int, int], rank: Rank) -> Part | None:
    """Return component and slice with the axes' names; None if they can't be told."""
    if not page.names:
        return None
    axes = ("layer", *page.names)
    if "head" not in page.names:
        component = Component("kv", page.dtype, axes, (layers, *page.extents))
        return component, Slice(held, (0, 1)), rank.tp_rank == 0
    local = page.extents[page.names.index("head")]
    total = rank.kv_heads
    if total % rank.tp_size and rank.tp_size % total:
        return None
    per_rank = max(1, total // rank.tp_size)
    first = rank.tp_rank * total // rank.tp_size
    if per_rank != local:
        return None
    extents = tuple(
        total if name == "head" else extent for name, extent in zip(page.names, page.extents, strict=True)
    )
    component = Component("kv", page.dtype, axes, (layers, *extents))
    is_first = rank.tp_rank == 0 or (rank.tp_rank - 1) * total // rank.tp_size != first
    return component, Slice(held, (first, first + per_rank)), is_first


def _opaque(page: _Page, layers: int, held: tuple[int, int], rank: Rank) -> Part:
    component = Component(
        _label(page), page.dtype, ("layer", "head", "dim"), (layers, rank.tp_size, math.prod(page.extents))
    )
    return component, Slice(held, (rank.tp_rank, rank.tp_rank + 1)), True


def _label(page: _Page) -> str:
    """Return a name that differs where the order of a page's bytes does."""
    return f"page{list(page.extents)}{list(page.order)}"


def _of_unequal(
    layers: Mapping[str, Tensor], pages: Sequence[_Page], page_axis: int, per_block: int, rank: Rank
) -> Layout:
    """Return the layout of layers that differ in shape: each run of equal ones is a component."""
    if rank.pp_size > 1:
        raise Unsupported("layers differ in shape and are dealt out to pipeline stages")
    components: list[Component] = []
    start = 0
    while start < len(pages):
        end = start
        while end < len(pages) and pages[end] == pages[start]:
            end += 1
        page = pages[start]
        shape = (end - start, rank.tp_size, math.prod(page.extents))
        components.append(Component(f"{start}:{_label(page)}", page.dtype, ("kv", "head", "dim"), shape))
        start = end
    part = Slice((0, 1), (rank.tp_rank, rank.tp_rank + 1))
    return Layout(tuple(layers), page_axis, per_block, tuple(components), part, _orders(pages), is_first=True)


def _orders(pages: Sequence[_Page]) -> tuple[tuple[int, ...], ...]:
    return tuple(page.order for page in pages)
