import enum
from abc import ABC
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

class SupportsHMA(ABC):
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...

class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1

class KVConnectorMetadata(ABC): ...

class KVConnectorWorkerMetadata(ABC):
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata: ...

class KVConnectorBase_V1(ABC):
    _connector_metadata: KVConnectorMetadata | None
    _kv_transfer_config: KVTransferConfig
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None: ...
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None: ...
