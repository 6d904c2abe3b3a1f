class KVCacheSpec:
    block_size: int

class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec

class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
