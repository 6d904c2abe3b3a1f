"""Which transformers model it is, and what it caches: measured and digested, not guessed from its name.

Invariants
1. A model whose cache is not the KV of every token in every layer, and of nothing but the tokens up to it, is refused.
2. Two weights have the same digest only if all their names, types, shapes and bits are equal.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvstore.block import Component, Namespace, Slice
from kvstore.errors import UsageError

_DIGESTS_AT_ONCE = 8
# In the configuration, but nothing that KV depends on.
_NOT_IDENTITY = frozenset({"_name_or_path", "transformers_version", "architectures", "use_cache", "id2label"})
_MODALITIES = ("image", "video", "audio")

Tensors = tuple[torch.Tensor, torch.Tensor]  # a layer's keys and values, (1, kv_heads, tokens, head_dim)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model caches: per layer keys and values of these shapes."""

    devices: tuple[torch.device, ...]
    heads: int
    dims: tuple[int, int]  # of keys and of values
    dtype: torch.dtype

    def namespace(self, name: str, revision: str, block_tokens: int, adapter: str, salt: bytes) -> Namespace:
        """Return the namespace of a model's blocks."""
        dtype = str(self.dtype).removeprefix("torch.")
        axes = ("layer", "head", "token", "dim")
        components = tuple(
            Component(part, dtype, axes, (len(self.devices), self.heads, block_tokens, dim))
            for part, dim in zip(("keys", "values"), self.dims, strict=True)
        )
        whole = Slice((0, len(self.devices)), (0, self.heads))
        return Namespace(name, revision, dtype, components, block_tokens, whole, adapter, salt)

    def empty(self, tokens: int) -> list[Tensors]:
        """Return tensors for so many tokens; what they hold is arbitrary."""

        def make(dim: int, device: torch.device) -> torch.Tensor:
            return torch.empty((1, self.heads, tokens, dim), dtype=self.dtype, device=device)

        return [(make(self.dims[0], device), make(self.dims[1], device)) for device in self.devices]

    def tensors_of(self, cache: DynamicCache) -> list[Tensors]:
        """Return the tensors of a cache of this shape; an empty list if it holds no tokens."""
        layers = cast("list[Any]", cache.layers)
        if not layers or any(not layer.is_initialized for layer in layers):
            return []
        tensors = tensors_in(cache)
        tokens: int = tensors[0][0].shape[2]
        wanted = [(1, self.heads, tokens, dim) for dim in self.dims]
        for number, layer in enumerate(tensors):
            found = [tuple(part.shape) for part in layer]
            if found != wanted or len(tensors) != len(self.devices) or layer[0].dtype != self.dtype:
                raise UsageError(
                    f"layer {number} of {len(tensors)} of the cache holds {found} in {layer[0].dtype}; this model's "
                    f"{len(self.devices)} layers hold {wanted} in {self.dtype}: give one prompt's cache of this model"
                )
        return tensors


def weights_digest(model: Any) -> str:
    """Return a digest of a model's weights as they are in memory: equal exactly if their names, types and bits are.

    Raises
    ------
    UsageError
        Some weights are not in memory as plain tensors (offloaded, or quantised by a library of their own).
    """
    weights = sorted(cast("dict[str, torch.Tensor]", model.state_dict()).items())
    with ThreadPoolExecutor(min(_DIGESTS_AT_ONCE, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_digest_of_tensor, *zip(*weights, strict=True)))
    lines = [
        [name, str(tensor.dtype), list(tensor.shape), digest]
        for (name, tensor), digest in zip(weights, digests, strict=True)
    ]
    return "sha256:" + hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _digest_of_tensor(name: str, tensor: torch.Tensor) -> str:
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UsageError(f"weights {name} are not in memory as a plain tensor: name the weights by `revision`")
    tensor = tensor.detach().cpu().contiguous()
    return hashlib.sha256((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).hexdigest()


def config_digest(config: dict[str, Any]) -> str:
    fields = {name: value for name, value in config.items() if name not in _NOT_IDENTITY}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def name_of(model: Any) -> str:
    """Return what people call the model: the last part of a path, the whole name on a hub, or its type."""
    name = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return os.path.basename(name.rstrip("/")) if os.path.isdir(name) else name


def placeholders(config: dict[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, int) and name.startswith(_MODALITIES) and name.endswith(("_token_id", "_token_index")):
            yield value


def cache_argument(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def fill(cache: DynamicCache, tensors: list[Tensors]) -> None:
    """Make `tensors` what an empty cache holds, without a copy."""
    filled = cast("Any", cache)
    for number, (keys, values) in enumerate(tensors):
        filled.update(keys[:, :, :0], values[:, :, :0], number)  # initialises the layer, whatever that takes
        filled.layers[number].keys, filled.layers[number].values = keys, values


def tensors_in(cache: DynamicCache) -> list[Tensors]:
    """Return each layer's keys and values."""
    return [(layer.keys, layer.values) for layer in cast("list[Any]", cache.layers)]


def measured(model: Any, adapter: str) -> KVShape:
    """Return the shape of what `model` caches, or refuse it."""
    config = model.config.get_text_config(decoder=True)
    _check_model(model, config.to_dict(), adapter)
    cache = DynamicCache(config=config)
    _check_layers(cache)
    # Two prompts that differ in their last token: what is cached for the first one must not.
    prompts = torch.tensor([[1, 2], [1, 3]], device=model.device)
    with torch.inference_mode():
        model(prompts, attention_mask=torch.ones_like(prompts), use_cache=True, **{cache_argument(model): cache})
    _check_layers(cache)
    tensors = tensors_in(cache)
    for number, layer in enumerate(tensors):
        if [part.shape for part in layer] != [part.shape for part in tensors[0]] or layer[0].dtype != layer[1].dtype:
            raise UsageError(f"layer {number} caches other shapes than layer 0: a model like this can't be stored")
        for part in layer:
            if not torch.allclose(part[0, :, 0].float(), part[1, :, 0].float(), rtol=1e-2, atol=1e-3):
                raise UsageError(
                    f"in layer {number} a token's KV depends on later tokens: a prompt's blocks are of no use to others"
                )
    keys, values = tensors[0]
    devices = tuple(layer[0].device for layer in tensors)
    return KVShape(devices, keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)


def _check_layers(cache: DynamicCache) -> None:
    for number, layer in enumerate(cast("list[Any]", cache.layers)):
        if type(layer) is not DynamicLayer:
            raise UsageError(
                f"layer {number} of the model keeps a {type(layer).__name__} (a sliding window, a recurrent state), "
                "not the KV of every token and nothing else: its blocks can't be stored"
            )


def _check_model(model: Any, config: dict[str, Any], adapter: str) -> None:
    if model.training:
        raise UsageError("the model is in training mode, where dropout may change its KV: call model.eval() first")
    if config.get("is_encoder_decoder"):
        raise UsageError("an encoder-decoder model's KV depends on its encoder's input: it can't be stored")
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UsageError("the model is split over processes, each with a part of the heads: that can't be stored yet")
    if not adapter and (hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)):
        raise UsageError("an adapter is loaded: give its name and version as `adapter`, or KV with and without it mix")
    for kind in _rope_types({name: config.get(name) for name in ("rope_parameters", "rope_scaling")}):
        if "dynamic" in kind or kind == "longrope":
            raise UsageError(f"RoPE of type {kind} rotates keys by the prompt's length: its blocks fit no other prompt")


def _rope_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, content in cast("dict[str, Any]", value).items():
            if name in ("rope_type", "type") and isinstance(content, str):
                yield content
            else:
                yield from _rope_types(content)
