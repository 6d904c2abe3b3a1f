"""What is read of vLLM's configuration: whether its KV can be shared, and what names it.

Invariants
1. All that changes a block's bytes and is not in vLLM's own block hash is in the namespace.
2. What this module does not know of (kinds of caches, ways to split tokens over ranks) is not shared.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core import kv_cache_utils

from kvclient._vllm_errors import Unsupported
from kvclient._vllm_identity import Facts, media_settings, name_of, revision_of
from kvclient._vllm_layout import Layout, Rank, layout_of
from kvclient._vllm_settings import Settings
from kvclient._vllm_stats import LOGGER
from kvstore.block import Namespace
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_HASHES = frozenset({"sha256", "sha256_cbor"})
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")

logger = logging.getLogger(LOGGER)


class Engine:
    """One engine's configuration."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> None:
        self._config = config
        self._cache = cache
        self._settings = settings
        parallel = config.parallel_config
        self.rank_count: int = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self.page_count: int = cache.num_blocks
        self.depth: int = config.max_concurrent_batches
        groups = cache.kv_cache_groups
        self._spec: Any = groups[0].kv_cache_spec if groups else None
        self.block_tokens: int = groups[0].kv_cache_spec.block_size if groups else 0

    def check(self) -> None:
        """Raise Unsupported if this engine's blocks can't be shared, UsageError if that would not be safe."""
        config, parallel = self._config, self._config.parallel_config
        if len(self._cache.kv_cache_groups) != 1:
            raise Unsupported(f"its KV cache has {len(self._cache.kv_cache_groups)} groups of layers, not one")
        for spec in self._specs():
            if type(spec).__name__ not in _SPECS or getattr(spec, "non_causal", False):
                raise Unsupported(f"its layers keep {type(spec).__name__}, not the KV of every token seen from before")
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise Unsupported(f"{name} is over 1: the tokens of a block lie on several ranks")
        if getattr(config.cache_config, "calculate_kv_scales", False):
            raise Unsupported("calculate_kv_scales is on: each engine scales its KV by its own first prompts")
        hashed = getattr(self._cache, "hash_block_size", None) or getattr(config.cache_config, "hash_block_size", None)
        if hashed not in (None, self.block_tokens):
            raise Unsupported(f"blocks have {self.block_tokens} tokens, those that are hashed {hashed}")
        algorithm = config.cache_config.prefix_caching_hash_algo
        if algorithm not in _HASHES:
            raise UsageError(
                f"prefix_caching_hash_algo is {algorithm}, whose hashes can be made to collide: two prompts could "
                f"share a block. Use one of {', '.join(sorted(_HASHES))}"
            )

    @property
    def is_ubatched(self) -> bool:
        """Whether a step may run as microbatches: then a layer's hook comes before all of its KV is written."""
        parallel = self._config.parallel_config
        return bool(getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False))

    def warn_of_hash_seed(self) -> None:
        """Warn if this engine's hashes are random, so that it finds only its own blocks, and only until it ends."""
        if not hasattr(kv_cache_utils, "resolve_none_hash_seed") and os.environ.get("PYTHONHASHSEED") is None:
            logger.warning(
                "PYTHONHASHSEED is not set, so this version of vLLM begins its block hashes with random bytes: no "
                "other engine, nor this one after a restart, finds what it stores. Set PYTHONHASHSEED=0 for all."
            )

    def rank(self) -> Rank:
        """Return this process's place; in a worker only."""
        model = self._config.model_config
        tp, pp = get_tp_group(), get_pp_group()
        return Rank(
            tp.rank_in_group,
            tp.world_size,
            pp.rank_in_group,
            pp.world_size,
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            has_latents=any(type(spec).__name__ == "MLAAttentionSpec" for spec in self._specs()),
        )

    def layout(self, tensors: Mapping[str, torch.Tensor], rank: Rank) -> Layout:
        """Return how the KV lies in the tensors."""
        spec = next(iter(self._specs()))
        by_layer: Mapping[str, Any] = getattr(self._spec, "kv_cache_specs", None) or dict.fromkeys(tensors, spec)
        return layout_of(
            tensors,
            rank,
            block_count=self.page_count,
            block_tokens=self.block_tokens,
            local_heads=spec.num_kv_heads,
            page_bytes={name: getattr(one, "real_page_size_bytes", 0) for name, one in by_layer.items()},
        )

    def namespace(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Namespace:
        """Return this rank's namespace."""
        model, cache = self._config.model_config, self._config.cache_config
        dtype = ":".join(
            map(str, (cache.cache_dtype, model.dtype, model.quantization or "", self._backend(layout, tensors)))
        )
        algorithm = cache.prefix_caching_hash_algo
        return Namespace(
            model=name_of(model.model),
            revision=self._revision(),
            dtype=dtype,
            components=layout.components,
            block_tokens=self.block_tokens,
            slice=layout.slice,
            salt=f"vllm/{algorithm}/{self._settings.salt}".encode(),
        )

    def _specs(self) -> list[Any]:
        """Return the layers' specs; they may be in one that stands for several."""
        inner = getattr(self._spec, "kv_cache_specs", None)
        return list(inner.values()) if inner else [self._spec]

    def _revision(self) -> str:
        model = self._config.model_config
        speculative, loading = self._config.speculative_config, self._config.load_config
        tensors: object = getattr(loading, "model_loader_extra_config", None)
        config = {
            **model.hf_config.to_dict(),
            "vllm": {
                "text": model.hf_text_config.to_dict(),
                "max_model_len": model.max_model_len if self._rope_depends_on_length() else None,
                "attention_dtype": str(getattr(model, "override_attention_dtype", None)),
                "drafts": None if speculative is None else str(speculative.method),
                "media": media_settings(getattr(model, "multimodal_config", None)),
                # Its weights are not those of the model's directory.
                "tensorizer": tensors if str(loading.load_format) == "tensorizer" else None,
            },
        }
        revision = revision_of(self._facts(model, config))
        draft = getattr(speculative, "draft_model_config", None)
        if draft is not None and draft.model != model.model:
            revision += "+draft:" + revision_of(self._facts(draft, draft.hf_config.to_dict()))
        return revision

    def _facts(self, model: Any, config: Mapping[str, Any]) -> Facts:
        return Facts(
            model.model,
            self._settings.revision,
            str(getattr(model.hf_config, "_commit_hash", None) or ""),
            config,
            is_random=str(self._config.load_config.load_format) == "dummy",
        )

    def _rope_depends_on_length(self) -> bool:
        return any(kind in str(self._config.model_config.hf_text_config.to_dict()) for kind in _LENGTH_DEPENDENT_ROPE)

    def _backend(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return what names the attention kernels, which order a page's bytes by rules of their own."""
        layers = self._config.compilation_config.static_forward_context
        names: set[str] = set()
        for name in layout.layers:
            backend = getattr(layers.get(name), "attn_backend", None)
            names.add(backend.get_name() if backend is not None else "unknown")
        on_host = all(tensors[name].device.type == "cpu" for name in layout.layers)
        return ",".join(sorted(names)) + (f"@{_cpu()}" if on_host else "")


def _cpu() -> str:
    """Return what stands for this processor's instruction sets, by which kernels on a CPU choose their layout."""
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            flags = next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = ""
    chosen = " ".join(sorted(set(flags.partition(":")[2].split())))
    return hashlib.sha256(f"{os.uname().machine} {chosen}".encode()).hexdigest()[:8]
