from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

class KVConnectorOutput:
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None
    invalid_block_ids: set[int]
