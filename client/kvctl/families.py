"""What a config.json leaves unsaid: how model classes name, default and arrange what decides the size of KV.

Invariant: DEFAULTS and the window rules repeat the configuration classes of `transformers`; tests/kvctl compares each
with the installed class.
"""

from __future__ import annotations

from typing import Any

# Where models of several modalities keep their language model.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads",
    ),
    "head_dim": ("head_dim", "kv_channels"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
}  # fmt: skip

# Without `num_key_value_heads` these have a key and a value for each attention head.
MHA_UNLESS_TOLD = frozenset({
    "llama", "qwen", "phi", "phi3", "gpt2", "gptj", "gpt_neox", "opt", "bloom", "mpt", "codegen", "baichuan",
    "internlm", "stablelm", "persimmon", "cohere", "olmo", "olmo2", "olmo3", "granite", "granitemoe", "exaone4",
})  # fmt: skip

# What a class fills in where the file is silent, as far as other fields don't decide it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"num_key_value_heads": 16, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    },
    "cohere2": {"num_key_value_heads": 64, "sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "glm": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_key_value_heads": 8},
    "starcoder2": {"num_key_value_heads": 2},
    "phimoe": {"num_key_value_heads": 8},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128},
    "ernie4_5_moe": {"num_key_value_heads": 4},
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False},
    "helium": {"num_key_value_heads": 20, "head_dim": 128},
    "llama4_text": {
        "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4,
    },
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "glm4_moe_lite": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "minicpm3": {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
}  # fmt: skip

# Which layers have the window, where neither `layer_types` nor a pattern says so: all but every n-th, all of them,
# or those from `max_window_layers` on.
FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4}
ALL_WINDOWED = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral"})
TAIL_WINDOWED = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text"})

# Kinds of `layer_types`: the field with their window; those that keep nothing; and older words for a kind.
WINDOW_FIELD = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WITHOUT_STATE = frozenset({"moe", "mlp"})
RENAMED = {"attention": "full_attention", "mamba": "linear_attention"}

# Fields that say that layers differ in a way that only the model's code tells. `layer_types` tells it for the first
# group; the second changes what an attention layer keeps.
UNKNOWN_PLAN = (
    "attn_layer_indices", "layers_block_type", "block_types", "_block_types", "hybrid_override_pattern",
    "attn_type_list", "linear_attn_config", "attn_layer_period", "full_attn_idxs", "hybrid_layer_pattern",
    "block_configs", "ssm_cfg", "state_size", "mamba_d_state", "ssm_state_size", "attention_types",
)  # fmt: skip
UNKNOWN_SHAPE = (
    "index_head_dim", "compress_ratios", "swa_head_dim", "swa_num_key_value_heads", "global_head_dim",
    "num_global_key_value_heads", "num_key_value_heads_per_layer", "cla_share_factor", "per_layer_config",
)  # fmt: skip
UNKNOWN_TYPES = {
    "gemma4_text": "its full-attention layers have heads of another size",
    "deepseek_v32": "it keeps the keys of an indexer as well",
    "glm_moe_dsa": "it keeps the keys of an indexer as well",
    "deepseek_v4": "it keeps compressed tokens",
    "longcat_flash": "each of its layers holds two attentions",
}
