"""SGLang's own host pools, made without a model: the real classes, in ordinary memory, with pages of known content."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_POOLS = "sglang.srt.mem_cache.memory_pool_host"
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@dataclass(frozen=True)
class Shape:
    """What a pool holds: `heads` of this rank, or a latent where it is 0."""

    layout: str
    heads: int = 2
    dim: int = 8
    layers: int = 3
    first_layer: int = 0
    page_tokens: int = 4
    pages: int = 8
    dtype: torch.dtype = torch.bfloat16


def make(shape: Shape) -> Any:
    """Return a host pool of this version of SGLang."""
    with _little_memory():
        return _newer(shape) if _has_buffer_infos() else _older(shape)


def _has_buffer_infos() -> bool:
    try:
        return hasattr(importlib.import_module("sglang.srt.mem_cache.device_pool_info"), "MHABufferInfo")
    except ImportError:
        return False


def _newer(shape: Shape) -> Any:
    info = importlib.import_module("sglang.srt.mem_cache.device_pool_info")
    tokens = shape.page_tokens * (shape.pages - 1)
    size = max(1, shape.heads), shape.dim
    tensors = [torch.zeros(shape.page_tokens, *size, dtype=shape.dtype) for _ in range(2 * shape.layers)]
    pointers = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
    common: dict[str, Any] = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": shape.page_tokens,
        "layout": shape.layout,
        "pin_memory": False,
        "device_capacity_tokens": tokens,
        "start_layer": shape.first_layer,
        "end_layer": shape.first_layer + shape.layers,
    }
    ours: dict[str, Any] = {"page_size": shape.page_tokens, "dtype": shape.dtype, "device": torch.device("cpu")}
    half = shape.layers
    if shape.heads:
        buffers = info.KVBuffers(
            k=tuple(tensors[:half]),
            v=tuple(tensors[half:]),
            k_data_ptrs=pointers[:half],
            v_data_ptrs=pointers[half:],
            layout=info.KVBufferLayout.NHD,
        )
        described = info.MHABufferInfo(
            buffers=buffers, head_num=shape.heads, head_dim=shape.dim, v_head_dim=shape.dim, **ours
        )
        return importlib.import_module("sglang.srt.mem_cache.pool_host.mha").MHATokenToKVPoolHost(described, **common)
    described = info.MLABufferInfo(
        buffers=tuple(tensors[:half]),
        data_ptrs=pointers[:half],
        layer_indices=tuple(range(half)),
        device_layer_num=half,
        kv_lora_rank=shape.dim - 2,
        qk_rope_head_dim=2,
        kv_cache_dim=shape.dim,
        **ours,
    )
    pool = importlib.import_module("sglang.srt.mem_cache.pool_host.mla").MLATokenToKVPoolHost
    return pool(described, target_layer_num=half, **common)


def _older(shape: Shape) -> Any:
    device = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    host = importlib.import_module(_POOLS)
    common: dict[str, Any] = {
        "size": shape.page_tokens * (shape.pages - 1),
        "page_size": shape.page_tokens,
        "dtype": shape.dtype,
        "layer_num": shape.layers,
        "device": "cpu",
        "enable_memory_saver": False,
        "start_layer": shape.first_layer,
        "end_layer": shape.first_layer + shape.layers - 1,
    }
    if shape.heads:
        pool = device.MHATokenToKVPool(head_num=shape.heads, head_dim=shape.dim, **common)
        kind = host.MHATokenToKVPoolHost
    else:
        pool = device.MLATokenToKVPool(kv_lora_rank=shape.dim - 2, qk_rope_head_dim=2, **common)
        kind = host.MLATokenToKVPoolHost
    return kind(pool, 1.0, 0, shape.page_tokens, shape.layout, pin_memory=False, device="cpu")


@contextlib.contextmanager
def _little_memory() -> Generator[None]:
    """Let pools be made on a machine that has not the 10 GB to spare that SGLang wants."""
    with contextlib.ExitStack() as stack:
        try:
            base = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
            stack.enter_context(base.host_memory_budget_scope(1 << 30))
        except ImportError:
            host = importlib.import_module(_POOLS)

            class Roomy:
                @staticmethod
                def virtual_memory() -> Any:
                    class Room:
                        available = 1 << 40

                    return Room

            stack.callback(setattr, host, "psutil", host.psutil)
            setattr(host, "psutil", Roomy)  # noqa: B010
        yield


def slots(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Return the slots of some pages' tokens, as SGLang gives them."""
    size = pool.page_size
    return torch.tensor([slot for page in pages for slot in range(page * size, (page + 1) * size)], dtype=torch.int64)


def keys(names: Sequence[object]) -> list[str]:
    """Return page keys as SGLang spells them: hex digests."""
    return [hashlib.sha256(repr(name).encode()).hexdigest() for name in names]


def content(pool: Any, key: str) -> torch.Tensor:
    """Return the bytes that a page of this key has, as many as the pool's flat page."""
    flat = pool.get_dummy_flat_data_page()
    raw = hashlib.shake_128(key.encode()).digest(flat.numel() * flat.element_size())
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(flat.dtype)


def fill(pool: Any, pages: Sequence[int], names: Sequence[str]) -> None:
    """Write the content of keys to pages, by SGLang's own hand."""
    for page, key in zip(pages, names, strict=True):
        pool.set_from_flat_data_page(page * pool.page_size, content(pool, key))


def wipe(pool: Any) -> None:
    pool.kv_buffer.view(torch.uint8).fill_(0xA5)


def holds(pool: Any, page: int, key: str) -> bool:
    """Return whether a page has the content of a key, to the bit, by SGLang's own hand."""
    found = pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8)
    return bool(torch.equal(found, content(pool, key).view(torch.uint8)))
