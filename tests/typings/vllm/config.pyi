from typing import Any

import torch

class KVTransferConfig:
    kv_role: str | None
    kv_load_failure_policy: str
    kv_connector_extra_config: dict[str, Any]
    @property
    def is_kv_producer(self) -> bool: ...
    @property
    def is_kv_consumer(self) -> bool: ...

class _PretrainedConfig:
    def to_dict(self) -> dict[str, Any]: ...

class ModelConfig:
    model: str
    dtype: torch.dtype
    quantization: str | None
    max_model_len: int
    hf_config: _PretrainedConfig
    hf_text_config: _PretrainedConfig
    def get_total_num_hidden_layers(self) -> int: ...
    def get_total_num_kv_heads(self) -> int: ...

class CacheConfig:
    cache_dtype: str
    prefix_caching_hash_algo: str

class ParallelConfig:
    tensor_parallel_size: int
    pipeline_parallel_size: int

class LoadConfig:
    load_format: str

class SpeculativeConfig:
    method: str | None
    draft_model_config: ModelConfig | None

class CompilationConfig:
    static_forward_context: dict[str, Any]

class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    load_config: LoadConfig
    speculative_config: SpeculativeConfig | None
    compilation_config: CompilationConfig
    kv_transfer_config: KVTransferConfig | None
    @property
    def max_concurrent_batches(self) -> int: ...
