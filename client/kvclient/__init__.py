"""The thin client that engines import: it moves blocks to and from the kvstored of this node, and needs little else.

    from kvclient import Client, Namespace, prefix

    client = Client()
    blocks = client.namespace(Namespace(...))
    hashes = prefix.chain(blocks.namespace.digest, tokens, block_tokens)
    blocks.store(hashes, buffers)
    hits = blocks.fetch(hashes, buffers).hits
"""

from __future__ import annotations

from kvclient._buffers import aligned_buffer
from kvclient.aio import AsyncClient, AsyncNamespaceHandle
from kvclient.client import Client, NamespaceHandle
from kvclient.paged import PagedKV
from kvclient.results import Changed, FetchResult, Lease, Lookup, StoreResult
from kvstore import errors, prefix
from kvstore.block import BlockHash, Component, Namespace, Slice, block_hash
from kvstore.wire import Outcome

__all__ = [
    "Client",
    "AsyncClient",
    "NamespaceHandle",
    "AsyncNamespaceHandle",
    "Namespace",
    "Component",
    "Slice",
    "BlockHash",
    "Outcome",
    "Lookup",
    "StoreResult",
    "FetchResult",
    "Changed",
    "Lease",
    "PagedKV",
    "aligned_buffer",
    "block_hash",
    "errors",
    "prefix",
]
