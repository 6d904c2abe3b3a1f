"""Paged KV: the bytes of a block are the pieces of its pages in the order promised, whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest

from kvclient import Client, PagedKV, errors
from tests.client.blocks import flat_namespace, new_hashes

LAYERS, PAGES, TOKENS, HEADS, DIM = 3, 10, 4, 2, 8
Array = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def arrays(seed: int, *shape: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(LAYERS)]


def stored_bytes(client: Client, paged: PagedKV, block_bytes: int) -> list[bytes]:
    """Store what `paged` describes and return the blocks as others get them."""
    blocks, hashes = client.namespace(flat_namespace(block_bytes)), new_hashes(paged.count)
    assert blocks.store(hashes, paged).stored == paged.count
    into = [bytearray(block_bytes) for _ in hashes]
    assert blocks.fetch(hashes, into).hits == paged.count
    return [bytes(buffer) for buffer in into]


def test_a_block_is_its_pages_of_all_layers_in_turn(client: Client) -> None:
    tensors = arrays(1, PAGES, TOKENS, HEADS, DIM)
    found = stored_bytes(client, PagedKV(tensors, [5, 2]), LAYERS * tensors[0][0].nbytes)
    assert found == [b"".join(tensor[page].tobytes() for tensor in tensors) for page in (5, 2)]


def test_with_kv_outside_the_pages_a_layers_k_comes_before_its_v(client: Client) -> None:
    tensors = arrays(2, 2, PAGES, TOKENS, HEADS, DIM)
    found = stored_bytes(client, PagedKV(tensors, [0, 9, 4], page_axis=1), LAYERS * 2 * tensors[0][0, 0].nbytes)
    assert found == [
        b"".join(tensor[kv, page].tobytes() for tensor in tensors for kv in (0, 1)) for page in (0, 9, 4)
    ]


def test_tensors_may_be_given_in_another_order(client: Client) -> None:
    keys, values = arrays(3, PAGES, TOKENS, HEADS, DIM), arrays(4, PAGES, TOKENS, HEADS, DIM)
    found = stored_bytes(client, PagedKV([*keys, *values], [6]), 2 * LAYERS * keys[0][0].nbytes)
    assert found == [b"".join(tensor[6].tobytes() for tensor in (*keys, *values))]


def test_a_block_of_several_pages_has_each_layers_pages_together(client: Client) -> None:
    tensors = arrays(5, PAGES, TOKENS, HEADS, DIM)
    found = stored_bytes(client, PagedKV(tensors, [[3, 4, 8], [0, 7, 1]]), LAYERS * 3 * tensors[0][0].nbytes)
    assert found == [b"".join(tensor[group].tobytes() for tensor in tensors) for group in ([3, 4, 8], [0, 7, 1])]


def test_slots_for_single_tokens_are_gathered_token_by_token(client: Client) -> None:
    keys, values = arrays(6, 40, HEADS, DIM), arrays(7, 40, HEADS, DIM)
    tensors = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
    slots = [17, 3, 4, 5, 39, 0, 20, 21]
    paged = PagedKV.by_slots(tensors, np.array(slots).tolist(), 4)
    found = stored_bytes(client, paged, 2 * LAYERS * 4 * keys[0][0].nbytes)
    assert found == [b"".join(tensor[part].tobytes() for tensor in tensors) for part in (slots[:4], slots[4:])]


def test_a_layer_that_is_a_view_of_a_tensor_of_all_layers_is_found(client: Client) -> None:
    (whole, *_) = arrays(8, PAGES, LAYERS, TOKENS, HEADS, DIM)
    tensors = [whole[:, layer] for layer in range(LAYERS)]
    found = stored_bytes(client, PagedKV(tensors, [1, 6]), whole[0].nbytes)
    assert found == [whole[page].tobytes() for page in (1, 6)]


def test_a_page_in_pieces_is_taken_in_the_order_of_its_axes(client: Client) -> None:
    (wide, *_) = arrays(9, PAGES, TOKENS, HEADS, 2 * DIM)
    found = stored_bytes(client, PagedKV([wide[..., :DIM]], [2, 3]), TOKENS * HEADS * DIM * 2)
    assert found == [wide[page, ..., :DIM].tobytes() for page in (2, 3)]


def test_other_pages_are_left_alone(client: Client) -> None:
    source, into = arrays(10, PAGES, TOKENS, HEADS, DIM), arrays(11, PAGES, TOKENS, HEADS, DIM)
    before = [tensor.copy() for tensor in into]
    blocks, hashes = client.namespace(flat_namespace(LAYERS * source[0][0].nbytes)), new_hashes(2)
    blocks.store(hashes, PagedKV(source, [8, 1]))
    assert blocks.fetch(hashes, PagedKV(into, [0, 5])).hits == 2
    for tensor, old, given in zip(into, before, source, strict=True):
        old[[0, 5]] = given[[8, 1]]
        assert np.array_equal(tensor, old)


@pytest.mark.parametrize("pages", [[PAGES], [-1], [[0, PAGES]], [0, 1, 99]])
def test_pages_outside_the_tensors_are_refused(pages: list[int]) -> None:
    with pytest.raises(errors.UsageError, match="page"):
        PagedKV(arrays(12, PAGES, TOKENS, HEADS, DIM), pages)


def test_what_can_not_be_addressed_is_refused(client: Client) -> None:
    tensors = arrays(13, PAGES, TOKENS, HEADS, DIM)
    with pytest.raises(errors.UsageError):
        PagedKV([], [0])
    with pytest.raises(errors.UsageError, match="axis"):
        PagedKV(tensors, [0], page_axis=4)
    with pytest.raises(errors.NamespaceMismatch, match="strides"):
        PagedKV([tensors[0][::-1]], [0])
    with pytest.raises(errors.NamespaceMismatch, match="whole blocks"):
        PagedKV.by_slots(tensors, [1, 2, 3], 2)
    blocks = client.namespace(flat_namespace(LAYERS * tensors[0][0].nbytes))
    with pytest.raises(errors.NamespaceMismatch):
        blocks.store(new_hashes(1), PagedKV(tensors, [0, 1]))
    with pytest.raises(errors.NamespaceMismatch):
        blocks.store(new_hashes(1), PagedKV(tensors[:2], [0]))
    for tensor in tensors:
        tensor.flags.writeable = False
    with pytest.raises(errors.UsageError, match="read-only"):
        blocks.fetch(new_hashes(1), PagedKV(tensors, [0]))
