"""How many bytes KV takes: per token, per block, per prompt. Pure functions over a model's layers.

Sources of the formulas
- Multi-head, grouped-query and multi-query attention keep a key and a value of `head_dim` values for each kv
  head: 2 * layers * kv_heads * head_dim * bytes (Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You
  Need"; Ainslie et al. 2023, "GQA", section 2).
- Multi-head latent attention keeps one latent of `kv_lora_rank` and one rotary key of `qk_rope_head_dim` values
  for all heads, without the factor 2 (DeepSeek-V2, 2024, sections 2.1.2 to 2.1.4 and table 1).
- A sliding-window layer needs the last `window` tokens only (Beltagy et al. 2020, "Longformer"; Jiang et al.
  2023, "Mistral 7B", section 2), a chunked one at most its chunk: what it holds stops growing there.

Invariants
1. Nothing is rounded: a layout that does not fill whole bytes, or heads that can't be dealt out, are refused.
2. A rank's bytes times the ranks are never less than the whole: latents, and kv heads fewer than ranks, are held
   more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps of a token: `heads` times a vector of `first_dim` and one of `second_dim` values.

    `heads` 0 means one pair for all heads, on every rank (a latent and its rotary key). `window_tokens` is how
    many tokens the layer ever needs, None for all of them.
    """

    heads: int
    first_dim: int
    second_dim: int
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """How the values of a vector are stored.

    `scale_bits` are kept for every `scale_values` values (0: for the whole vector) beside `bits` a value.
    `rotary_bits` differs where the rotary key of a latent is stored otherwise than the latent.
    """

    name: str
    bits: int
    scale_bits: int = 0
    scale_values: int = 0
    rotary_bits: int | None = None

    def vector_bytes(self, dim: int) -> int:
        """Return the bytes of a vector of `dim` values with its scales."""
        scales = -(-dim // self.scale_values) if self.scale_values else 1
        return _whole_bytes(dim * self.bits + scales * self.scale_bits, f"{dim} values of {self.name}")

    def pair_bytes(self, layer: Layer) -> int:
        """Return the bytes of one pair of vectors of `layer`."""
        if not layer.heads and self.rotary_bits is not None:
            rotary_bytes = _whole_bytes(layer.second_dim * self.rotary_bits, f"{layer.second_dim} rotary values")
            return self.vector_bytes(layer.first_dim) + rotary_bytes
        return self.vector_bytes(layer.first_dim) + self.vector_bytes(layer.second_dim)


STORAGES = {
    storage.name: storage
    for storage in (
        Storage("bfloat16", 16),
        Storage("float16", 16),
        Storage("float32", 32),
        Storage("fp8_e4m3", 8),
        Storage("fp8_e5m2", 8),
        Storage("int8", 8),
        Storage("int4", 4),
        # OCP "Microscaling Formats (MX)" 1.0: an 8-bit scale for 32 values; NVFP4: one for 16.
        Storage("mxfp8", 8, scale_bits=8, scale_values=32),
        Storage("mxfp4", 4, scale_bits=8, scale_values=32),
        Storage("nvfp4", 4, scale_bits=8, scale_values=16),
        # FlashMLA's fp8 cache: the latent with a float32 scale for 128 values, the rotary key in bfloat16.
        Storage("fp8_ds_mla", 8, scale_bits=32, scale_values=128, rotary_bits=16),
    )
}
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
           "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}  # fmt: skip


def storage_named(name: str, *, scale_bytes: int = 0) -> Storage:
    """Return the storage called `name`, with `scale_bytes` of scales and zero points a vector if given.

    Kernels that quantise each head's key and value of each token keep 2 to 8 bytes beside each of them.
    """
    storage = STORAGES.get(ALIASES.get(name, name))
    if storage is None:
        raise UsageError(f"unknown dtype {name!r}: use one of {', '.join([*STORAGES, *ALIASES])}")
    if not scale_bytes:
        return storage
    if storage.scale_bits:
        raise UsageError(f"{storage.name} defines its own scales: leave --scale-bytes out")
    return Storage(storage.name, storage.bits, scale_bits=8 * scale_bytes)


def heads_per_rank(heads: int, tp_size: int) -> int:
    """Return the kv heads of a tensor-parallel rank; with fewer heads than ranks each holds a copy of one."""
    if heads >= tp_size and heads % tp_size == 0:
        return heads // tp_size
    if heads < tp_size and tp_size % heads == 0:
        return 1
    raise UsageError(f"{heads} kv heads can't be dealt out over --tp {tp_size}: use a divisor or a multiple")


def layer_bytes_per_token(layer: Layer, storage: Storage, tp_size: int = 1) -> int:
    """Return what one token takes in one layer on one rank."""
    copies = heads_per_rank(layer.heads, tp_size) if layer.heads else 1
    return copies * storage.pair_bytes(layer)


def bytes_per_token(layers: Sequence[Layer], storage: Storage, tp_size: int = 1) -> int:
    """Return what one token takes in all layers on one rank: what a stored block holds of it."""
    return sum(layer_bytes_per_token(layer, storage, tp_size) for layer in layers)


def growth_bytes_per_token(layers: Sequence[Layer], storage: Storage, tp_size: int = 1) -> int:
    """Return what one more token adds to a long sequence: the layers without a window only."""
    return bytes_per_token([layer for layer in layers if layer.window_tokens is None], storage, tp_size)


def window_bytes(layers: Sequence[Layer], storage: Storage, tp_size: int = 1) -> int:
    """Return the constant that the layers with a window hold of a long sequence."""
    return sum(
        layer.window_tokens * layer_bytes_per_token(layer, storage, tp_size)
        for layer in layers
        if layer.window_tokens is not None
    )


def held_bytes(layers: Sequence[Layer], storage: Storage, tokens: int, tp_size: int = 1) -> int:
    """Return what an engine that frees tokens behind the windows holds of a sequence of `tokens`."""
    return sum(
        min(tokens, tokens if layer.window_tokens is None else layer.window_tokens)
        * layer_bytes_per_token(layer, storage, tp_size)
        for layer in layers
    )


def _whole_bytes(bits: int, what: str) -> int:
    if bits % 8:
        raise UsageError(f"{what} take {bits} bits, not a whole number of bytes: choose another --dtype")
    return bits // 8
