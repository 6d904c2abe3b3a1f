"""The pages of one of SGLang's host pools: their namespace, and where their bytes are.

Theory of operation. A pool names the pieces of its pages by addresses (`get_page_buffer_meta`): one a layer for K and
for V with the layout layer_first, one for K and one for V where pages come first. A block is these pieces, all of K
before all of V, which is the order of SGLang's flat pages as well: blocks stored by one interface are read by the
other, and layer_first and page_first_direct have the same blocks. Pools whose order is not known here are stored as
SGLang has them, under their own name and layout.

Invariants
1. The pieces of a page are all of a page's bytes, in host memory and inside the pool; or the pool is refused.
2. Pools share blocks only if model, dtype, order, page size, layers and heads are equal. Ranks share them only where
   SGLang says that they hold the same KV.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from kvclient._buffers import Segment
from kvclient._sglang_settings import Identity, Rank
from kvstore.block import Component, Namespace, Slice
from kvstore.errors import BadSetting, UsageError

KV = "kv"
_DTYPES = {
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
    "torch.float8_e4m3fn": "float8_e4m3",
    "torch.float8_e5m2": "float8_e5m2",
    "torch.uint8": "uint8",
    "torch.int8": "int8",
}
_MHA_AXES: dict[str, tuple[str, ...]] = {
    "layer_first": ("kv", "layer", "token", "head", "dim"),
    "page_first_direct": ("kv", "layer", "token", "head", "dim"),
    "page_first": ("kv", "token", "layer", "head", "dim"),
    "page_head": ("kv", "head", "token", "layer", "dim"),
}
_MLA_AXES: dict[str, tuple[str, ...]] = {
    "layer_first": ("layer", "token", "dim"),
    "page_first_direct": ("layer", "token", "dim"),
    "page_first": ("token", "layer", "dim"),
}
# Of this state every tensor-parallel rank has its own part, also where all ranks hold the same KV.
_NEVER_REPLICATED = "mamba"


class Places:
    """Where the pieces of some pages are: the source or the destination of blocks."""

    is_writable = True

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> None:
        self.count = len(addresses) // len(order)
        self._addresses = addresses
        self._sizes = sizes
        self._order = order

    def segments(self, position: int) -> Sequence[Segment]:
        """Return the places of one page's bytes, in their order within the block."""
        first = position * len(self._order)
        return [(self._addresses[first + piece], self._sizes[first + piece]) for piece in self._order]


class Pages:
    """One host pool as the store sees it.

    Parameters
    ----------
    pool : HostKVCache
        The pool; it is kept alive.
    name : str
        SGLang's name of it; "kv" is the one that page keys belong to.
    is_zero_copy : bool
        Whether pages are read and written in place, or as flat copies that SGLang makes.

    Raises
    ------
    UsageError
        The pages of this pool can't be stored so that they come back whole.
    """

    def __init__(self, pool: Any, name: str, identity: Identity, rank: Rank, *, is_zero_copy: bool) -> None:
        self.pool = pool
        self.name = name
        self.page_tokens: int = pool.page_size
        kind = type(pool).__name__
        self.is_replicated = rank.is_replicated and name != _NEVER_REPLICATED and "MHA" not in kind
        self.is_written_here = rank.is_writer or not self.is_replicated
        _, sizes = self._meta(range(self.page_tokens))
        self.page_bytes = sum(sizes)
        if name == KV and self.page_bytes != pool.size_per_token * self.page_tokens:
            raise UsageError(
                f"{kind} keeps {pool.size_per_token * self.page_tokens} bytes a page, and names the places of "
                f"{self.page_bytes}: its pages would not come back whole. Run this model without L3, or update SGLang"
            )
        part = _slice(pool, 0 if self.is_replicated else rank.tp_rank)
        component = _component(pool, kind, part, rank.tp_size, self.page_bytes)
        self._order = _order(kind, pool.layout, len(sizes))
        self.namespace = Namespace(
            model=identity.model,
            revision=identity.revision,
            dtype=_dtype(pool, name, identity),
            components=(component or Component("page", "uint8", ("dim",), (self.page_bytes,)),),
            block_tokens=self.page_tokens,
            slice=part,
            salt=self._salt(identity, rank, component, is_zero_copy=is_zero_copy),
        )

    def places(self, host_indices: Any, count: int) -> Places:
        """Return where `count` pages are, whose tokens' slots SGLang gives.

        Raises
        ------
        UsageError
            These are not the slots of so many pages of this pool.
        """
        slots: list[int] = host_indices.tolist()
        if len(slots) != count * self.page_tokens:
            raise UsageError(f"{len(slots)} slots are not {count} pages of {self.page_tokens} tokens")
        firsts = slots[:: self.page_tokens]
        if firsts and not 0 <= min(firsts) <= max(firsts) <= self.pool.size - self.page_tokens:
            raise UsageError(f"slots {min(firsts)} to {max(firsts)} are outside a pool of {self.pool.size}")
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        return Places(addresses, sizes, self._order)

    def _meta(self, slots: range) -> tuple[list[int], list[int]]:
        pool = self.pool
        buffer = getattr(pool, "kv_buffer", None)
        if buffer is None and self.name == KV:
            raise BadSetting(
                f"{type(pool).__name__} has no memory of its own (compressed or allocator-only KV): run without L3"
            )
        if getattr(pool, "device", "cpu") != "cpu":
            raise BadSetting(f"{type(pool).__name__} is in the memory of {pool.device}: host pools are needed")
        try:
            addresses, sizes = pool.get_page_buffer_meta(torch.tensor(list(slots), dtype=torch.int64))
        except (ValueError, TypeError, AttributeError, NotImplementedError) as exc:
            raise BadSetting(
                f"{type(pool).__name__} with the layout {pool.layout} does not name the places of its pages ({exc}): "
                "choose --hicache-mem-layout page_first or layer_first"
            ) from exc
        return list(addresses), list(sizes)

    def _salt(self, identity: Identity, rank: Rank, component: Component | None, *, is_zero_copy: bool) -> bytes:
        """Return all that keeps blocks apart and has no field of its own."""
        pool = self.pool
        layers = getattr(pool, "layer_num", None)
        target_layers = getattr(pool, "target_layer_num", layers)
        facets: dict[str, Any] = {
            "engine": "sglang/1",
            "pool": self.name,
            "salt": identity.salt,
            "arguments": dict(identity.arguments),
            "layers": [layers, target_layers],
            "context": [rank.cp_rank, rank.cp_size],
            "format": getattr(pool, "storage_format_tag", None),
        }
        if self.name != KV or layers != target_layers:
            facets["draft"] = dict(identity.draft)
        if not self.is_replicated and (component is None or "head" not in component.axes):
            facets["rank"] = [rank.tp_rank, rank.tp_size]
        if component is None:
            facets |= {
                "class": type(pool).__name__,
                "layout": pool.layout,
                "flat": not is_zero_copy,
                "stage": [rank.pp_rank, rank.pp_size],
            }
        return json.dumps(facets, sort_keys=True).encode()


def _order(kind: str, layout: str, pieces: int) -> Sequence[int]:
    """Return the order of a page's pieces in a block: SGLang names K and V of a layer in turn."""
    if kind == "MHATokenToKVPoolHost" and layout == "layer_first":
        return (*range(0, pieces, 2), *range(1, pieces, 2))
    return range(pieces)


def _slice(pool: Any, tp_rank: int) -> Slice:
    """Return the layers and heads of a rank."""
    first: int = getattr(pool, "start_layer", 0) or 0
    heads: int = getattr(pool, "head_num", 1)
    return Slice((first, first + max(1, getattr(pool, "layer_num", 1))), (tp_rank * heads, (tp_rank + 1) * heads))


def _component(pool: Any, kind: str, part: Slice, tp_size: int, page_bytes: int) -> Component | None:
    """Return the tensor inside a page in the order of its block's bytes; None for a pool that is not known here."""
    dtype = str(pool.dtype)
    size = 1 if dtype in _DTYPES else pool.dtype.itemsize
    extents = {"kv": 2, "layer": part.layers[1], "token": pool.page_size}
    if kind == "MHATokenToKVPoolHost" and pool.layout in _MHA_AXES:
        axes = _MHA_AXES[pool.layout]
        extents |= {"head": pool.head_num * tp_size, "dim": pool.head_dim * size}
    elif kind == "MLATokenToKVPoolHost" and pool.layout in _MLA_AXES:
        axes = _MLA_AXES[pool.layout]
        extents |= {"dim": pool.kv_cache_dim * size}
    else:
        return None
    found = Component("kv", _DTYPES.get(dtype, "uint8"), axes, tuple(extents[axis] for axis in axes))
    held = found.narrowed(range(*part.layers), range(*part.heads))
    return found if held.size_bytes == page_bytes else None


def _dtype(pool: Any, name: str, identity: Identity) -> str:
    """Return what KV is stored in. SGLang keeps both kinds of fp8 as bytes: then it must be told which."""
    dtype = str(getattr(pool, "dtype", "bytes")).removeprefix("torch.")
    if dtype in ("uint8", "int8") and name == KV:
        device_dtype = str(getattr(getattr(pool, "device_pool", None), "dtype", dtype)).removeprefix("torch.")
        told = identity.kv_cache_dtype if device_dtype == dtype else device_dtype
        if not told:
            raise BadSetting(
                f"this pool keeps KV as {dtype}, and nothing says what is in it: give --kv-cache-dtype, "
                'or "kv_cache_dtype" of "kvstored" in the extra config'
            )
        return f"{told} as {dtype}"
    return dtype
