"""Reads a Hugging Face config.json: which layers keep what of a token.

Invariants
1. Nothing is guessed: a field that is needed, missing and not known from the model's class is an error that names
   it; layers whose state is not keys and values are listed in `unjudged`, and then no total is given.
2. A layer's window is known, or the model says `windows_known` False and no growth is given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvctl import families
from kvctl.sizing import Layer
from kvstore.errors import UsageError

Config = Mapping[str, Any]
_FILE_BYTES_MAX = 16 << 20
_NUMBER_MAX = 1 << 40
_LAYERS_MAX = 1 << 16
_NESTED_MAX = 8


@dataclass(frozen=True, slots=True)
class Model:
    """What a config.json says about KV.

    `layers` are the layers whose size is known; `unjudged` says in words what else is kept.
    """

    model_type: str
    kind: str
    layers: tuple[Layer, ...]
    dtype: str
    dtype_source: str
    max_tokens: int | None
    windows_known: bool
    notes: tuple[str, ...]
    unjudged: tuple[str, ...]


def read(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json, or of the one in the directory `path`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            raw = stream.read(_FILE_BYTES_MAX + 1)
        if len(raw) > _FILE_BYTES_MAX:
            raise ValueError(f"it is over {_FILE_BYTES_MAX} bytes")
        content = json.loads(raw)
    except OSError as exc:
        raise UsageError(
            f"can't read {file}: {exc.strerror}; --config takes a model's config.json or its directory"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{file} is not JSON ({exc}): --config takes a Hugging Face config.json") from exc
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no JSON object: --config takes a Hugging Face config.json")
    return cast("dict[str, Any]", content)


def interpret(config: Config, overrides: Config | None = None) -> Model:
    """Return the layers of `config`; `overrides` replace fields of its language model.

    Raises
    ------
    UsageError
        A field is needed and missing, or has no sensible value. The text names it.
    """
    notes: list[str] = []
    text = _language_model(config, notes)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    fields: dict[str, Any] = {**families.DEFAULTS.get(model_type, {}), **text, **(overrides or {})}
    if fields.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise UsageError(
            "an encoder-decoder keeps the KV of its cross-attention as well, which kvctl size does not know: "
            "use the figures of the engine's own log"
        )
    count = _number(fields, "num_hidden_layers")
    if count > _LAYERS_MAX:
        raise UsageError(f"num_hidden_layers is {count}: kvctl size takes {_LAYERS_MAX} at most")
    kinds = _layer_kinds(fields, model_type, count, notes)
    kind, shape = _attention(fields, model_type, notes)
    layers = _with_windows(shape, kinds or ["full_attention"] * count, fields)
    if shared := _optional(fields, "num_kv_shared_layers"):
        layers = layers[: max(0, len(layers) - shared)]
        notes.append(f"the last {shared} layers reuse the KV of earlier ones and keep none")
    odd_kinds, odd_shapes = _odd_kinds(kinds or []), _odd_shapes(fields, model_type)
    dtype, dtype_source = _dtype(config, text)
    return Model(
        model_type=model_type or "(none)",
        kind=kind,
        layers=() if odd_shapes else tuple(layers),
        dtype=dtype,
        dtype_source=dtype_source,
        max_tokens=_optional(fields, "max_position_embeddings") or None,
        windows_known=kinds is not None,
        notes=tuple(notes),
        unjudged=(*odd_kinds, *odd_shapes),
    )


def _language_model(config: Config, notes: list[str]) -> Config:
    for _ in range(_NESTED_MAX):
        name, inner = next(((n, found) for n in families.NESTED if (found := _mapping(config.get(n)))), ("", config))
        if not name:
            return config
        notes.append(f"these are the sizes of {name}, the language model")
        config = inner
    raise UsageError(f"the config has over {_NESTED_MAX} configs one inside the other: name the innermost one's file")


# ---- fields


def _find(fields: Config, name: str) -> Any:
    """Return a field under any of its names, from the top or from `attn_config`; None if there is none."""
    for source in (fields, _mapping(fields.get("attn_config"))):
        for alias in families.NAMES.get(name, (name,)):
            if source.get(alias) is not None:
                return source[alias]
    return None


def _mapping(value: object) -> Config:
    return cast("Config", value) if isinstance(value, dict) else {}


def _number(fields: Config, name: str) -> int:
    value = _find(fields, name)
    if value is None:
        raise UsageError(
            f"the config has no {name}, and kvctl does not know what its class takes for it "
            f"(model_type {fields.get('model_type')!r}): look it up there and add --set {name}=N"
        )
    return _checked(name, value)


def _optional(fields: Config, name: str) -> int:
    """Return a number that may be missing or null, which is 0."""
    value = _find(fields, name)
    return _checked(name, value) if value else 0


def _checked(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UsageError(
            f"{name} is {value!r}, not one positive integer: kvctl size can't judge a model whose layers "
            f"differ in it; --set {name}=N sizes it as if they didn't"
        )
    if value > _NUMBER_MAX:
        raise UsageError(f"{name} is beyond {_NUMBER_MAX}: is this the right config?")
    return value


# ---- what a layer keeps


def _attention(fields: Config, model_type: str, notes: list[str]) -> tuple[str, Layer]:
    if _find(fields, "kv_lora_rank"):
        notes.append("sized as the latent, which engines keep that absorb its projections; others keep whole heads")
        return "mla", Layer(0, _number(fields, "kv_lora_rank"), _number(fields, "qk_rope_head_dim"))
    attention_heads = _number(fields, "num_attention_heads")
    key_dim = _optional(fields, "head_dim") or _derived_head_dim(fields, attention_heads)
    value_dim = _optional(fields, "v_head_dim") or key_dim
    heads = _kv_heads(fields, model_type, attention_heads)
    kind = "mha" if heads == attention_heads else "mqa" if heads == 1 else "gqa"
    return kind, Layer(heads, key_dim, value_dim)


def _derived_head_dim(fields: Config, attention_heads: int) -> int:
    hidden = _number(fields, "hidden_size")
    if hidden % attention_heads:
        raise UsageError(
            f"hidden_size {hidden} is no multiple of {attention_heads} heads and the config has no head_dim: "
            "look it up in the model's configuration class and add --set head_dim=N"
        )
    return hidden // attention_heads


def _kv_heads(fields: Config, model_type: str, attention_heads: int) -> int:
    """Return the kv heads, with the older ways of saying that there is one for all."""
    if model_type in ("falcon", "RefinedWeb", "RefinedWebModel") and not fields.get("new_decoder_architecture"):
        return 1 if fields.get("multi_query", True) else attention_heads
    if model_type == "gpt_bigcode":
        return 1 if fields.get("multi_query", True) else attention_heads
    if model_type == "chatglm" and not fields.get("multi_query_attention"):
        return attention_heads
    if _find(fields, "num_key_value_heads") is None and model_type in families.MHA_UNLESS_TOLD:
        return attention_heads
    return _number(fields, "num_key_value_heads")


# ---- which layer is of which kind


def _layer_kinds(fields: Config, model_type: str, count: int, notes: list[str]) -> list[str] | None:
    """Return the kind of each layer, or None where the config does not tell which layers have the window."""
    listed = fields.get("layer_types")
    if isinstance(listed, list):
        return _listed_kinds(cast("list[object]", listed), fields, count, notes)
    if interval := _optional(fields, "full_attention_interval"):
        return ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(count)]
    if model_type == "llama4_text":
        interval = _number(fields, "no_rope_layer_interval")
        listed = fields.get("no_rope_layers") or [(at + 1) % interval for at in range(count)]
        if not isinstance(listed, list):
            raise UsageError("no_rope_layers is no list: repair the config")
        chunked = cast("list[object]", listed)
        return ["chunked_attention" if has_rope else "full_attention" for has_rope in chunked]
    window = fields.get("sliding_window")
    if not window or fields.get("use_sliding_window") is False:
        return ["full_attention"] * count
    windowed = _windowed(fields, model_type, count)
    if windowed is None:
        notes.append(
            f"sliding_window is {window}, but the config does not say which layers have it: all are sized in "
            "full, and the growth of a long sequence is not known"
        )
        return None
    return ["sliding_attention" if yes else "full_attention" for yes in windowed]


def _listed_kinds(listed: list[object], fields: Config, count: int, notes: list[str]) -> list[str]:
    kinds = [families.RENAMED.get(str(kind), str(kind)) for kind in listed]
    if len(kinds) != count:
        raise UsageError(
            f"layer_types names {len(kinds)} layers and num_hidden_layers is {count}: repair the config"
        )
    if "sliding_attention" in kinds and fields.get("use_sliding_window") is False:
        notes.append("use_sliding_window is false: every layer attends to all tokens")
        kinds = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    return kinds


def _windowed(fields: Config, model_type: str, count: int) -> list[bool] | None:
    """Return for each layer whether it has the window, by the config's pattern or else the rule of its class."""
    every = families.FULL_EVERY.get(model_type)
    pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or every
    if isinstance(pattern, str) and set(pattern) <= {"L", "G"}:
        return [pattern[at % len(pattern)] == "L" for at in range(count)]
    if isinstance(pattern, int):
        return [(at + 1) % pattern != 0 for at in range(count)]
    if model_type in families.TAIL_WINDOWED:
        return [at >= _number(fields, "max_window_layers") for at in range(count)]
    return [True] * count if model_type in families.ALL_WINDOWED else None


def _with_windows(shape: Layer, kinds: list[str], fields: Config) -> list[Layer]:
    """Return the layers that keep keys and values."""
    windows: dict[str, int | None] = {"full_attention": None}
    for kind, field in families.WINDOW_FIELD.items():
        if kind in kinds:
            windows[kind] = _number(fields, field)
    return [
        Layer(shape.heads, shape.first_dim, shape.second_dim, windows[kind]) for kind in kinds if kind in windows
    ]


def _odd_kinds(kinds: list[str]) -> list[str]:
    """Return what is said of layers that keep something else than keys and values."""
    known = {"full_attention", *families.WINDOW_FIELD, *families.WITHOUT_STATE}
    odd = Counter(kind for kind in kinds if kind not in known)
    return [f"{count} layers of kind {kind}: what they keep is not sized" for kind, count in odd.items()]


def _odd_shapes(fields: Config, model_type: str) -> list[str]:
    """Return what is said of a model of which no layer's size is certain."""
    reason = families.UNKNOWN_TYPES.get(model_type)
    planned = isinstance(fields.get("layer_types"), list)
    telltale = [*families.UNKNOWN_SHAPE, *(() if planned else families.UNKNOWN_PLAN)]
    found = [f"the config has {key}, whose effect is not known here" for key in telltale if fields.get(key)]
    return [f"model type {model_type}: {reason}", *found] if reason else found


# ---- dtype


def _dtype(config: Config, text: Config) -> tuple[str, str]:
    """Return what KV is stored as unless told otherwise, and which field says so.

    A checkpoint may bring a scheme for its KV (compressed-tensors' `kv_cache_scheme`); else KV has the model's dtype.
    """
    for fields in (config, text):
        scheme = _mapping(_mapping(fields.get("quantization_config")).get("kv_cache_scheme"))
        named = {"float8": "fp8_e4m3", "int8": "int8", "int4": "int4"}
        if name := named.get(f"{scheme.get('type')}{scheme.get('num_bits')}"):
            return name, "quantization_config.kv_cache_scheme"
    for fields in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(fields.get(key), str):
                return str(fields[key]).removeprefix("torch."), key
    return "bfloat16", "assumed: the config names no dtype"
