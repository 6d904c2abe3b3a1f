"""What callers may give as sources and destinations, and what is refused."""

from __future__ import annotations

import array
import mmap
from typing import Any

import numpy as np
import pytest

from kvclient import Client, aligned_buffer, errors
from tests.client.blocks import BLOCK_BYTES, flat_namespace, new_hashes, payload, payloads


def _kinds() -> dict[str, Any]:
    unaligned = bytearray(BLOCK_BYTES + 8)
    return {
        "bytearray": bytearray(BLOCK_BYTES),
        "memoryview": memoryview(bytearray(BLOCK_BYTES)),
        "unaligned memoryview": memoryview(unaligned)[3 : 3 + BLOCK_BYTES],
        "uint8 array": np.zeros(BLOCK_BYTES, np.uint8),
        "float16 array of three axes": np.zeros((4, 8, BLOCK_BYTES // 64), np.float16),
        "rows of a larger array": np.zeros((9, BLOCK_BYTES), np.uint8)[4],
        "structured array": np.zeros(BLOCK_BYTES // 4, np.dtype([("a", "<u2"), ("b", "<u2")])),
        "array without a buffer format": np.zeros(BLOCK_BYTES // 8, "datetime64[s]"),
        "array.array": array.array("d", bytes(BLOCK_BYTES)),
        "mmap": mmap.mmap(-1, BLOCK_BYTES),
        "aligned buffer": aligned_buffer(BLOCK_BYTES),
    }


@pytest.mark.parametrize("kind", _kinds())
def test_blocks_go_to_and_come_from_any_buffer(client: Client, kind: str) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
    buffer = _kinds()[kind]
    blocks.store(hashes[:1], payloads(hashes[:1]))
    assert blocks.fetch(hashes[:1], [buffer]).hits == 1
    content = buffer.tobytes() if hasattr(buffer, "tobytes") else bytes(buffer)
    assert content == payload(hashes[0])
    assert blocks.store(hashes[1:], [buffer]).stored == 1
    into = bytearray(BLOCK_BYTES)
    assert blocks.fetch(hashes[1:], into).hits == 1
    assert into == payload(hashes[0])


def test_read_only_sources_are_read(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    frozen = np.frombuffer(payload(hashes[1]), np.uint8)
    sources = [payload(hashes[0]), frozen, memoryview(payload(hashes[2]))]
    assert blocks.store(hashes, sources).stored == 3
    into = bytearray(3 * BLOCK_BYTES)
    assert blocks.fetch(hashes, into).hits == 3
    assert into == b"".join(payloads(hashes))


@pytest.mark.parametrize(
    ("destination", "error"),
    [
        (bytes(BLOCK_BYTES), errors.UsageError),
        (np.frombuffer(bytes(BLOCK_BYTES), np.uint8), errors.UsageError),
        (bytearray(BLOCK_BYTES - 1), errors.NamespaceMismatch),
        (np.zeros((BLOCK_BYTES, 2), np.uint8)[:, 0], errors.NamespaceMismatch),
        ("text", errors.UsageError),
        (42, errors.UsageError),
        (None, errors.UsageError),
    ],
)
def test_destinations_that_do_not_fit_are_refused(client: Client, destination: Any, error: type[Exception]) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
    blocks.store(hashes, payloads(hashes))
    with pytest.raises(error):
        blocks.fetch(hashes, [destination])
    with pytest.raises(error):
        blocks.fetch(hashes, destination)


def test_a_bad_buffer_among_good_ones_leaves_no_reservation(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    sources: list[Any] = [*payloads(hashes[:2]), b"too short"]
    with pytest.raises(errors.NamespaceMismatch, match="buffer 2"):
        blocks.store(hashes, sources)
    # Nobody else is kept waiting by what was reserved.
    assert blocks.store(hashes, payloads(hashes)).stored == 3


@pytest.mark.parametrize("count", [0, 2, 4])
def test_there_is_one_buffer_for_each_hash(client: Client, count: int) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    with pytest.raises(errors.NamespaceMismatch):
        blocks.store(hashes, [bytes(BLOCK_BYTES)] * count)
    with pytest.raises(errors.NamespaceMismatch):
        blocks.fetch(hashes, bytearray(BLOCK_BYTES * count))


def test_a_source_can_not_be_resized_while_it_is_read(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
    source = bytearray(payload(hashes[0]))
    refused: list[bool] = []

    def progress(done: int, total: int) -> None:
        try:
            source.append(0)
        except BufferError:
            refused.append(True)

    blocks.store(hashes, [source], progress=progress)
    assert refused
    source.append(0)


def test_numpys_large_arrays_meet_page_aliasing_and_are_copied_whole(client: Client) -> None:
    size = 256 << 10
    blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(8)
    memory = np.zeros(8 * size + 4096, np.uint8)
    start = (16 - memory.ctypes.data) % 4096
    into = memory[start : start + 8 * size].reshape(8, size)
    assert into.ctypes.data % 4096 == 16
    assert blocks.store(hashes, payloads(hashes, size)).stored == 8
    assert blocks.fetch(hashes, list(into)).hits == 8
    assert [row.tobytes() for row in into] == payloads(hashes, size)
