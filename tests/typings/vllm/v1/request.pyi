import enum

class RequestStatus(enum.IntEnum):
    FINISHED_STOPPED = ...

class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str

class Request:
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: list[bytes]
    lora_request: LoRARequest | None
    skip_reading_prefix_cache: bool | None
    kv_transfer_params: dict[str, object] | None
    status: RequestStatus
    @property
    def num_tokens(self) -> int: ...
