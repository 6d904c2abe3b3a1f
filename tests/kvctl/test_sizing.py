"""KV sizes: every row of kv_sizes.csv, and the cases that a formula by model name gets wrong."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from kvctl import families, hfconfig, sizing
from kvctl.sizing import Layer, storage_named
from kvstore.errors import UsageError

CSV = Path(__file__).parent.parent / "fixtures" / "kv_sizes.csv"
MODEL_TYPES = {
    "Qwen2.5": "qwen2", "Qwen3": "qwen3", "Llama": "llama", "Mistral": "mistral", "Qwen-7B": "qwen",
    "GLM": "glm4_moe", "MiniMax": "minimax_m2", "DeepSeek": "deepseek_v3", "gpt-oss": "gpt_oss",
}  # fmt: skip
BF16 = storage_named("bfloat16")


def rows() -> list[dict[str, str]]:
    with CSV.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def config_of(row: dict[str, str]) -> dict[str, Any]:
    """The geometry of one row, as its model's config.json writes it."""
    model_type = next(kind for prefix, kind in MODEL_TYPES.items() if row["model"].startswith(prefix))
    config: dict[str, Any] = {
        "model_type": model_type, "num_hidden_layers": int(row["layers"]), "torch_dtype": "bfloat16",
    }  # fmt: skip
    if row["kind"] == "mla":
        # num_key_value_heads stands in these configs and must not be used
        latent = {name: int(row[name]) for name in ("kv_lora_rank", "qk_rope_head_dim")}
        return {**config, **latent, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168}
    heads, head_dim = int(row["kv_heads"]), int(row["head_dim"])
    if row["kind"] == "mha":
        return {**config, "num_attention_heads": heads, "hidden_size": heads * head_dim}
    config |= {"num_attention_heads": 4 * heads, "num_key_value_heads": heads, "head_dim": head_dim}
    config |= {"hidden_size": 4096 + head_dim}  # head_dim does not follow from it
    if model_type == "mistral":
        config["sliding_window"] = None
    if model_type == "gpt_oss":
        config["sliding_window"] = 128
    return config


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["model"])
def test_bytes_per_token_equal_the_table(row: dict[str, str]) -> None:
    model = hfconfig.interpret(config_of(row))
    assert model.kind == row["kind"]
    assert not model.unjudged
    assert sizing.bytes_per_token(model.layers, storage_named(model.dtype)) == int(row["bytes_per_token"])


def test_the_table_has_all_its_rows() -> None:
    assert len(rows()) == 21


@pytest.mark.parametrize(("layers", "growth_bytes"), [(36, 36864), (24, 24576)])
def test_half_of_gpt_oss_grows_and_half_is_constant(layers: int, growth_bytes: int) -> None:
    row = {"model": "gpt-oss", "kind": "gqa", "layers": str(layers), "kv_heads": "8", "head_dim": "64"}
    model = hfconfig.interpret(config_of(row))
    assert sizing.growth_bytes_per_token(model.layers, BF16) == growth_bytes
    assert sizing.window_bytes(model.layers, BF16) == 128 * growth_bytes
    assert sizing.held_bytes(model.layers, BF16, 1000) == 1000 * growth_bytes + 128 * growth_bytes
    assert sizing.held_bytes(model.layers, BF16, 100) == 100 * 2 * growth_bytes


def kinds(model: hfconfig.Model) -> str:
    return "".join("F" if layer.window_tokens is None else "S" for layer in model.layers)


BASE: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {**BASE, "sliding_window": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**WINDOW, "model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 2}, "FFFFFF"),
        ({**WINDOW, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, "FFFFSS"),
        ({**WINDOW, "model_type": "qwen2", "max_window_layers": 2}, "FFFFFF"),
        ({**WINDOW, "model_type": "mistral"}, "SSSSSS"),
        ({**WINDOW, "model_type": "mistral", "sliding_window": None}, "FFFFFF"),
        ({**WINDOW, "model_type": "gemma2"}, "SFSFSF"),
        ({**WINDOW, "model_type": "gemma3_text"}, "SSSSSF"),
        ({**WINDOW, "model_type": "gemma3_text", "sliding_window_pattern": 3}, "SSFSSF"),
        ({**WINDOW, "model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "SSSFSS"),
        ({**WINDOW, "model_type": "unheard-of", "layer_types": ["sliding_attention", "full_attention"] * 3}, "SFSFSF"),
        ({**BASE, "model_type": "llama4_text", "attention_chunk_size": 512}, "SSSFSS"),
        ({**BASE, "model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 0, 1, 0]}, "SFSFSF"),
    ],
)
def test_windows_follow_the_rule_of_the_class(config: dict[str, Any], expected: str) -> None:
    model = hfconfig.interpret(config)
    assert model.windows_known
    assert kinds(model) == expected


def test_a_window_without_a_rule_gives_no_growth() -> None:
    model = hfconfig.interpret({**WINDOW, "model_type": "unheard-of"})
    assert not model.windows_known
    assert "does not say which layers" in " ".join(model.notes)
    assert sizing.bytes_per_token(model.layers, BF16) == 6 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": ["linear_attention"] * 5 + ["full_attention"]},
        {"layer_types": ["mamba"] * 5 + ["attention"]},
        {"attn_layer_period": 8},
        {"hybrid_override_pattern": "M-M*M-"},
        {"index_head_dim": 128, "layer_types": ["full_attention"] * 6},
        {"full_attention_interval": 4},
    ],
)
def test_layers_that_keep_something_else_are_named_and_not_sized(extra: dict[str, Any]) -> None:
    model = hfconfig.interpret({**BASE, "model_type": "unheard-of", **extra})
    assert model.unjudged
    assert len(model.layers) <= 1


def test_a_missing_field_of_an_unknown_class_is_asked_for() -> None:
    config = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    with pytest.raises(UsageError, match="--set num_key_value_heads=N"):
        hfconfig.interpret({**config, "model_type": "unheard-of"})
    model = hfconfig.interpret({**config, "model_type": "unheard-of"}, {"num_key_value_heads": 4})
    assert model.layers[0].heads == 4


def test_a_list_of_heads_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match="num_key_value_heads"):
        hfconfig.interpret({**BASE, "num_key_value_heads": [1, 2, 2, 2, 2, 2]})


@pytest.mark.parametrize("inner", ["text_config", "llm_config", "language_config"])
def test_the_language_model_inside_a_larger_config_is_sized(inner: str) -> None:
    outer = {"model_type": "vision-thing", "hidden_size": 1, "torch_dtype": "float16", inner: BASE}
    model = hfconfig.interpret(outer)
    assert model.dtype == "float16"
    assert len(model.layers) == 6
    assert inner in " ".join(model.notes)


def test_defaults_of_the_class_fill_a_sparse_config() -> None:
    sparse = {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560,
                              "sliding_window": 1024}}  # fmt: skip
    model = hfconfig.interpret(sparse)
    assert model.layers[0] == Layer(4, 256, 256, 1024)
    assert kinds(model).count("F") == 5


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"model_type": "falcon", "multi_query": True}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
        ({"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 8}}, 8),
        ({"model_type": "gpt2"}, 16),
    ],
)
def test_older_words_for_kv_heads_are_known(config: dict[str, Any], heads: int) -> None:
    model = hfconfig.interpret({"n_layer": 2, "n_head": 16, "n_embd": 1024, **config})
    assert model.layers == (Layer(heads, 64, 64),) * 2


def test_layers_that_share_kv_keep_none() -> None:
    assert len(hfconfig.interpret({**BASE, "num_kv_shared_layers": 2, "model_type": "gemma3n_text"}).layers) == 4


@pytest.mark.parametrize(
    ("dtype", "scale_bytes", "expected"),
    [
        ("bf16", 0, 2 * 64 * 2),
        ("fp8", 0, 2 * 64),
        ("int8", 4, 2 * (64 + 4)),
        ("int4", 4, 2 * (32 + 4)),
        ("nvfp4", 0, 2 * (32 + 4)),
        ("mxfp8", 0, 2 * (64 + 2)),
        ("float32", 0, 2 * 64 * 4),
    ],
)
def test_quantised_vectors_bring_their_scales(dtype: str, scale_bytes: int, expected: int) -> None:
    storage = storage_named(dtype, scale_bytes=scale_bytes)
    assert sizing.bytes_per_token([Layer(1, 64, 64)], storage) == expected


def test_quantised_latents_keep_their_rotary_key() -> None:
    assert sizing.bytes_per_token([Layer(0, 512, 64)], storage_named("fp8_ds_mla")) == 656


def test_a_vector_that_fills_no_whole_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="--dtype"):
        sizing.bytes_per_token([Layer(1, 63, 63)], storage_named("int4"))


@pytest.mark.parametrize(("tp_size", "expected"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_dealt_out_or_copied(tp_size: int, expected: int) -> None:
    assert sizing.heads_per_rank(8, tp_size) == expected


@pytest.mark.parametrize("tp_size", [3, 12])
def test_heads_that_cannot_be_dealt_out_are_refused(tp_size: int) -> None:
    with pytest.raises(UsageError, match="--tp"):
        sizing.heads_per_rank(8, tp_size)


def test_a_latent_is_whole_on_every_rank() -> None:
    assert sizing.bytes_per_token([Layer(0, 512, 64)], BF16, tp_size=8) == 1152


def test_the_checkpoints_own_scheme_for_kv_wins_over_its_dtype() -> None:
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert hfconfig.interpret({**BASE, **scheme, "torch_dtype": "bfloat16"}).dtype == "fp8_e4m3"


def test_defaults_repeat_the_classes_of_transformers() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    differing: dict[str, Any] = {}
    for model_type in sorted({*families.DEFAULTS, *families.MHA_UNLESS_TOLD} & set(auto.CONFIG_MAPPING)):
        theirs = auto.CONFIG_MAPPING[model_type]()
        ours = hfconfig.interpret({"model_type": model_type, **geometry(theirs)})
        if {(layer.heads, layer.first_dim) for layer in ours.layers} != {first_vector(theirs)}:
            differing[model_type] = ours.layers[0]
        if kinds(ours) != their_kinds(theirs):
            differing[f"{model_type} windows"] = kinds(ours)
    assert not differing


def geometry(theirs: Any) -> dict[str, Any]:
    """What every published config gives: no default of ours stands for it."""
    given = {name: getattr(theirs, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")}
    return given | ({"head_dim": 128} if theirs.hidden_size % theirs.num_attention_heads else {})


def first_vector(theirs: Any) -> tuple[int, int]:
    if latent := getattr(theirs, "kv_lora_rank", None):
        return 0, int(latent)
    heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    size = getattr(theirs, "head_dim", None) or geometry(theirs).get("head_dim")
    return int(heads), int(size or theirs.hidden_size // theirs.num_attention_heads)


def their_kinds(theirs: Any) -> str:
    if listed := getattr(theirs, "layer_types", None):
        return "".join("F" if kind == "full_attention" else "S" for kind in listed if kind != "linear_attention")
    return ("S" if getattr(theirs, "sliding_window", None) else "F") * int(theirs.num_hidden_layers)
