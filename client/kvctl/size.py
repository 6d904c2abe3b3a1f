"""`kvctl size`: what a model's KV takes, from its config.json, with the arithmetic shown."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl import hfconfig, sizing
from kvctl.exits import Exit
from kvctl.hfconfig import Model
from kvctl.printing import Output, count, plain, size
from kvctl.sizing import Layer, Storage
from kvstore.errors import UsageError
from kvstore.units import parse_whole

_SLOT_ALIGNMENT_BYTES = 4096
_USUAL_TOKENS = (1024, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class _Question:
    """What to compute, for which model."""

    model: Model
    storage: Storage
    tp_size: int
    block_tokens: int
    tokens: Sequence[int]
    fit_bytes: int | None


def run(options: argparse.Namespace, output: Output) -> Exit:
    """Print the sizes; ends with 1 where the model keeps something that has no known size."""
    model = hfconfig.interpret(hfconfig.read(Path(options.config)), _overrides(options.overrides))
    asked = _Question(
        model=model,
        storage=sizing.storage_named(options.dtype or model.dtype, scale_bytes=options.scale_bytes),
        tp_size=options.tp,
        block_tokens=options.block_tokens,
        tokens=options.tokens or _USUAL_TOKENS,
        fit_bytes=options.fit_bytes,
    )
    body = _body(asked, "--dtype" if options.dtype else model.dtype_source)
    output.either(body, _text(output, asked, body))
    for note in model.notes:
        output.say(f"note: {plain(note)}")
    for reason in model.unjudged:
        output.say(f"not sized: {plain(reason)}")
    if model.unjudged:
        output.say("so no total is given: take it from the engine's own log")
    return Exit.FAILED if model.unjudged else Exit.DONE


def _overrides(words: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        name, equals, value = word.partition("=")
        number = parse_whole(value)
        if not name or not equals or number is None:
            raise UsageError(f"--set {word} is not a field and a number: write for example --set head_dim=128")
        found[name] = number
    return found


def _body(asked: _Question, dtype_source: str) -> dict[str, Any]:
    """Return the figures; those that would need a guess are null."""
    model, storage, tp_size = asked.model, asked.storage, asked.tp_size
    is_whole = not model.unjudged
    whole = sizing.bytes_per_token(model.layers, storage)
    rank = sizing.bytes_per_token(model.layers, storage, tp_size)
    grows = is_whole and model.windows_known
    block_bytes = rank * asked.block_tokens
    slot_bytes = -(-block_bytes // _SLOT_ALIGNMENT_BYTES) * _SLOT_ALIGNMENT_BYTES
    body: dict[str, Any] = {
        "model_type": model.model_type,
        "kind": model.kind,
        "layers": len(model.layers),
        "dtype": storage.name,
        "dtype_source": dtype_source,
        "tp": tp_size,
        "bytes_per_token": whole if is_whole else None,
        "sized_layers_bytes_per_token": whole or None,
        "rank_bytes_per_token": rank if is_whole else None,
        "growth_bytes_per_token": sizing.growth_bytes_per_token(model.layers, storage) if grows else None,
        "window_bytes": sizing.window_bytes(model.layers, storage) if grows else None,
        "block": {
            "tokens": asked.block_tokens,
            "rank_bytes": block_bytes if is_whole else None,
            "rank_slot_bytes": slot_bytes if is_whole else None,
        },
        "prompts": [_prompt(asked, tokens, is_whole, grows) for tokens in asked.tokens],
        "notes": list(model.notes),
        "unjudged": list(model.unjudged),
    }
    if asked.fit_bytes is not None:
        blocks = asked.fit_bytes // slot_bytes if is_whole and slot_bytes else None
        body["fit"] = {
            "bytes": asked.fit_bytes,
            "blocks": blocks,
            "tokens": None if blocks is None else blocks * asked.block_tokens,
        }
    return body


def _prompt(asked: _Question, tokens: int, is_whole: bool, grows: bool) -> dict[str, Any]:
    blocks = tokens // asked.block_tokens
    whole = sizing.bytes_per_token(asked.model.layers, asked.storage)
    return {
        "tokens": tokens,
        "bytes": whole * tokens if is_whole else None,
        "engine_bytes": sizing.held_bytes(asked.model.layers, asked.storage, tokens) if grows else None,
        "full_blocks": blocks,
        "stored_bytes": whole * asked.block_tokens * blocks if is_whole else None,
    }


def _text(output: Output, asked: _Question, body: dict[str, Any]) -> str:
    model = asked.model
    pairs = [
        ("model", f"{plain(model.model_type)}, {model.kind}, {len(model.layers)} layers of known size"),
        ("dtype", f"{asked.storage.name} ({plain(body['dtype_source'])})"),
    ]
    if model.layers:
        name, a_token = ("in those", " a token") if model.unjudged else ("a token", "")
        whole = body["sized_layers_bytes_per_token"]
        pairs.append((name, f"{_bytes(whole)}{a_token} = {_arithmetic(model.layers, asked.storage)}"))
    if not model.unjudged:
        pairs += [*_rank_and_windows(asked, body), *_blocks(asked, body)]
    width = max(len(name) for name, _ in pairs)
    lines = [f"{output.heading(name.ljust(width))}  {value}" for name, value in pairs]
    return "\n".join(lines if model.unjudged else [*lines, "", _prompts(output, body["prompts"])])


def _rank_and_windows(asked: _Question, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if asked.tp_size > 1:
        rank = body["rank_bytes_per_token"]
        times = rank * asked.tp_size / body["bytes_per_token"]
        copies = f", {times:.3g} times the whole over all ranks" if times > 1 else ""
        yield "  a rank", f"{_bytes(rank)} of tp {asked.tp_size}{copies}"
    windows = Counter(layer.window_tokens for layer in asked.model.layers if layer.window_tokens)
    if windows:
        which = ", ".join(f"{layers} layers of {tokens} tokens" for tokens, layers in windows.items())
        yield "  growth", f"{_bytes(body['growth_bytes_per_token'])} a token once the windows are full"
        yield "  windows", f"{_bytes(body['window_bytes'])} at most: {which}"


def _blocks(asked: _Question, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    block, a_rank = body["block"], " a rank" if asked.tp_size > 1 else ""
    slot = f"in a slot of {_bytes(block['rank_slot_bytes'])}"
    yield "a block", f"{_bytes(block['rank_bytes'])}{a_rank} for {block['tokens']} tokens, {slot}"
    if fit := body.get("fit"):
        yield size(fit["bytes"]), f"hold {count(fit['blocks'])} blocks{a_rank}, {count(fit['tokens'])} tokens"


def _prompts(output: Output, prompts: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            count(prompt["tokens"]),
            *("unknown" if prompt[name] is None else size(prompt[name]) for name in ("bytes", "engine_bytes")),
            count(prompt["full_blocks"]),
            "unknown" if prompt["stored_bytes"] is None else size(prompt["stored_bytes"]),
        ]
        for prompt in prompts
    ]
    return output.table(["PROMPT", "ALL LAYERS", "WINDOWS CUT", "FULL BLOCKS", "STORED"], rows, left=0)


def _arithmetic(layers: Sequence[Layer], storage: Storage) -> str:
    """Return the product that a token's bytes are, one term for each sort of layer."""
    terms: list[str] = []
    for shape, number in Counter((one.heads, one.first_dim, one.second_dim) for one in layers).items():
        layer = Layer(*shape)
        if not layer.heads:
            vectors = f"{layer.first_dim} + {layer.second_dim} = {storage.pair_bytes(layer)} B"
            terms.append(f"{number} layers x ({vectors})")
        elif layer.first_dim == layer.second_dim:
            vector = f"{layer.first_dim} = {storage.vector_bytes(layer.first_dim)} B"
            terms.append(f"2 x {number} layers x {layer.heads} heads x ({vector})")
        else:
            vectors = f"{layer.first_dim} + {layer.second_dim} = {storage.pair_bytes(layer)} B"
            terms.append(f"{number} layers x {layer.heads} heads x ({vectors})")
    return " + ".join(terms) or "no layers"


def _bytes(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes:,} B"
