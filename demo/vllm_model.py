"""A model for vLLM: small, random, made here; with a tokenizer of one token a byte, and LoRA adapters if asked for.

No download. Weights are drawn wide (see demo.model), so that wrong KV changes the tokens, and rounding does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import tokenizers
import torch
import transformers

from demo.model import SMALL, write_model

_SPECIAL = ("<pad>", "<s>", "</s>")
_VOCAB = len(_SPECIAL) + 256  # no token that the tokenizer can't name
# vLLM's attention on CPUs wants heads of 32 or more.
TINY: dict[str, int] = {"layers": 4, "hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "vocab": _VOCAB}
# 100 M parameters: long prompts take seconds on two cores, and 32 tokens' KV a MiB.
LARGER: dict[str, int] = {**SMALL, "vocab": _VOCAB}
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
_RANK = 8


def quieten() -> None:
    """Have transformers draw no progress bars in this process."""
    cast("Callable[[], None]", transformers.logging.disable_progress_bar)()


def write_vllm_model(directory: Path, sizes: dict[str, int] = TINY, seed: int = 0) -> None:
    """Write model and tokenizer: the same for the same sizes and seed."""
    write_model(directory, sizes, seed)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    make = cast("Callable[..., Any]", transformers.PreTrainedTokenizerFast)
    special = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    fast = make(tokenizer_object=tokenizer, model_max_length=8192, **special)
    fast.chat_template = _CHAT
    fast.save_pretrained(directory)


def write_adapter(directory: Path, sizes: dict[str, int] = TINY, seed: int = 1) -> None:
    """Write a LoRA adapter for the attention of a model of these sizes."""
    directory.mkdir(parents=True)
    head_size = sizes["hidden"] // sizes["heads"]
    outputs = {
        "q_proj": sizes["hidden"],
        "k_proj": sizes["kv_heads"] * head_size,
        "v_proj": sizes["kv_heads"] * head_size,
    }
    drawn = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(sizes["layers"]):
        for name, output in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(_RANK, sizes["hidden"], generator=drawn) * 0.3
            tensors[f"{at}.lora_B.weight"] = torch.randn(output, _RANK, generator=drawn) * 0.3
    save = cast("Callable[..., None]", safetensors.torch.save_file)  # pyright: ignore[reportUnknownMemberType]
    save(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
