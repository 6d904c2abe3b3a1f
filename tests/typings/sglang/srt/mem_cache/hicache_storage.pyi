# What kvclient.sglang takes from SGLang.
from typing import Any

class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    is_mla_model: bool
    model_name: str | None
    extra_config: dict[str, Any] | None

class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...
