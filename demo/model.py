"""The demo's model and prompts: a small Qwen2 with fixed random weights, or a real one from a local directory.

No download: the weights are drawn here, the same ones each time. They are drawn wide, so that logits lie far apart:
computing a prompt in two steps rounds differently from computing it at once, by some 1e-4 of a logit, and must not
change which token is the most likely one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import transformers

# 105 M parameters: 2,000 tokens of prefill take seconds on two cores, and their KV 63 MB.
SMALL: dict[str, int] = {
    "layers": 16,
    "hidden": 768,
    "intermediate": 2048,
    "heads": 12,
    "kv_heads": 4,
    "vocab": 2048,
}
TINY: dict[str, int] = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "vocab": 512}
_SCALE = 0.3
_FIRST_PLAIN_TOKEN = 3  # behind padding, begin and end


def write_model(directory: Path, sizes: dict[str, int] = SMALL, seed: int = 0) -> None:
    """Write a model of these sizes to `directory`: the same weights for the same sizes and seed."""
    config = transformers.Qwen2Config(
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,  # random weights know no end
    )
    make = cast("Callable[..., Any]", cast("Any", transformers.AutoModelForCausalLM).from_config)
    with torch.device("meta"):  # spares drawing weights that are not kept
        model = make(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = _SCALE if "embed" in name or "lm_head" in name else _SCALE / 2
                weight.copy_(torch.randn(weight.shape, generator=drawn).mul_(scale))
            else:
                weight.fill_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(directory)


def load_model(directory: Path) -> Any:
    """Return the model of a local directory, on the CPU, computing in float32."""
    load = cast("Callable[..., Any]", transformers.AutoModelForCausalLM.from_pretrained)
    return load(directory, dtype=torch.float32, local_files_only=True).eval()


def prompt_tokens(directory: Path, model: Any, count: int, seed: int) -> list[int]:
    """Return a prompt of `count` tokens: text where the model has a tokenizer, else random tokens."""
    drawn = random.Random(seed)  # noqa: S311  # the same prompt each time is the point
    if not any(directory.glob("tokenizer*")):
        return [drawn.randrange(_FIRST_PLAIN_TOKEN, model.config.vocab_size) for _ in range(count)]
    load = cast("Callable[..., Any]", transformers.AutoTokenizer.from_pretrained)
    tokenizer = load(directory, local_files_only=True)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += tokenizer.encode(_sentence(drawn), add_special_tokens=not tokens)
    return tokens[:count]


def _sentence(drawn: random.Random) -> str:
    ware = drawn.choice(["oranges", "nails", "paper", "lamp oil", "wheat", "blue cloth"])
    town = drawn.choice(["the harbour", "the old mill", "the station", "the northern gate"])
    return f"On day {drawn.randrange(1, 366)} {drawn.randrange(2, 90)} crates of {ware} went to {town}. "
