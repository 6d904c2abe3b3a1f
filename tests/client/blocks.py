"""Self-checking blocks: a payload is computed from its hash, so that any wrong byte shows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from kvclient import Client, Component, Namespace, Slice
from kvstore import wire
from tests.daemon_fixture import eventually

BLOCK_BYTES = 24 << 10


def flat_namespace(block_bytes: int = BLOCK_BYTES, salt: bytes | None = None) -> Namespace:
    """Return a namespace of plain bytes, new unless a salt is given."""
    return Namespace(
        model="test",
        revision="1",
        dtype="uint8",
        components=(Component("kv", "uint8", ("dim",), (block_bytes,)),),
        block_tokens=16,
        slice=Slice((0, 1), (0, 1)),
        salt=os.urandom(16) if salt is None else salt,
    )


def new_hashes(count: int) -> list[bytes]:
    """Return hashes that nobody has used."""
    return [os.urandom(32) for _ in range(count)]


def payload(block_hash: bytes, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the bytes of a block."""
    return hashlib.shake_128(block_hash).digest(block_bytes)


def payloads(hashes: Sequence[bytes], block_bytes: int = BLOCK_BYTES) -> list[bytes]:
    """Return the bytes of blocks."""
    return [payload(block_hash, block_bytes) for block_hash in hashes]


def empty_buffers(count: int, block_bytes: int = BLOCK_BYTES) -> list[bytearray]:
    """Return room for blocks."""
    return [bytearray(block_bytes) for _ in range(count)]


def await_all_memory(client: Client) -> None:
    """Return when the daemon has populated its whole cpu tier: it serves before, with less room."""

    def is_complete() -> bool:
        cpu = client.admin(wire.Stats(0))["tiers"]["cpu"]
        return bool(cpu["capacity_bytes"] == cpu["capacity_target_bytes"])

    eventually(is_complete, "the cpu tier is populated")
