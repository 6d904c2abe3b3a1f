"""A connector whose worker meets KV of a shape that can't be shared, as the scheduler's side does not know."""

from __future__ import annotations

import torch

from kvclient.vllm import KVStoredConnector


class MisfitConnector(KVStoredConnector):
    """Is shown less than all blocks."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches({name: tensor[:-1] for name, tensor in kv_caches.items()})
