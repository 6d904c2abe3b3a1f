"""Tiny transformers models with random weights, made in memory: one for each way of keeping KV that matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import transformers as hf

VOCAB = 256
_PLAIN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MLA: dict[str, Any] = {
    **_PLAIN,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_T5: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def built(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, make: str = "AutoModelForCausalLM") -> Any:
    """Return a model in eval mode, its weights drawn so wide that rounding does not change its greedy tokens."""
    drawn = torch.Generator().manual_seed(seed)
    from_config = cast("Callable[..., Any]", getattr(hf, make).from_config)
    model = from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3 if "embed" in name or "lm_head" in name else 0.15, generator=drawn)
    return model


def qwen2(*, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return built(hf.Qwen2Config(**{**_PLAIN, **changes}), seed=seed, dtype=dtype)


def llama(**changes: Any) -> Any:
    return built(hf.LlamaConfig(**{**_PLAIN, **changes}))


def gpt2() -> Any:
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": None}
    return built(hf.GPT2Config(vocab_size=VOCAB, **sizes))


def deepseek() -> Any:
    return built(hf.DeepseekV3Config(**_MLA))


def mistral_with_a_window() -> Any:
    return built(hf.MistralConfig(**_PLAIN, sliding_window=16))


def gemma3() -> Any:
    return built(hf.Gemma3TextConfig(**_PLAIN, head_dim=16))


def gemma3_bidirectional() -> Any:
    layers = ["full_attention"] * 3
    return built(hf.Gemma3TextConfig(**_PLAIN, head_dim=16, layer_types=layers, use_bidirectional_attention=True))


def mamba() -> Any:
    return built(hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, eos_token_id=None))


def t5() -> Any:
    return built(hf.T5Config(**_T5), make="AutoModelForSeq2SeqLM")


def with_rope(kind: str) -> Any:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return llama(rope_parameters=rope, max_position_embeddings=1024)


def in_training() -> Any:
    return qwen2().train()
