"""Torch tensors as sources, destinations and paged KV; the client itself never imports torch."""

from __future__ import annotations

import pytest
import torch

from kvclient import Client, PagedKV, errors
from tests.client.blocks import flat_namespace, new_hashes


def test_tensors_of_any_dtype_go_in_and_come_out(client: Client) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8):
        shape = (2, 8, 16, 64)
        sources = [torch.randn(shape).to(dtype) for _ in range(4)]
        blocks = client.namespace(flat_namespace(sources[0].nbytes))
        hashes = new_hashes(4)
        assert blocks.store(hashes, sources).stored == 4
        into = [torch.empty(shape, dtype=dtype) for _ in range(4)]
        assert blocks.fetch(hashes, into).hits == 4
        for source, found in zip(sources, into, strict=True):
            assert torch.equal(source.view(torch.uint8), found.view(torch.uint8))


def test_one_tensor_holds_a_whole_batch(client: Client) -> None:
    source = torch.randn(10, 4, 16, 64)
    blocks, hashes = client.namespace(flat_namespace(source[0].nbytes)), new_hashes(10)
    assert blocks.store(hashes, source).stored == 10
    into = torch.zeros_like(source)
    assert blocks.fetch(hashes, into).hits == 10
    assert torch.equal(into, source)


def test_tensors_that_are_not_contiguous_or_not_on_the_host_are_refused(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace(4096)), new_hashes(1)
    with pytest.raises(errors.NamespaceMismatch, match="contiguous"):
        blocks.store(hashes, [torch.zeros(64, 128, dtype=torch.uint8)[:, ::2]])
    with pytest.raises(errors.UsageError, match="host memory"):
        blocks.fetch(hashes, [torch.zeros(4096, dtype=torch.uint8, device="meta")])


@pytest.mark.parametrize("layout", ["pages first", "kv first", "kv in the page", "heads outside tokens"])
def test_paged_tensors_go_from_one_engine_to_another(client: Client, layout: str) -> None:
    layers, pages, tokens, heads, dim = 3, 12, 16, 2, 32

    def make(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = {
            "pages first": (pages, tokens, heads, dim),
            "kv first": (2, pages, tokens, heads, dim),
            "kv in the page": (pages, 2, tokens, heads, dim),
            "heads outside tokens": (pages, heads, tokens, dim),
        }[layout]
        tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(layers)]
        # As vLLM shows its HND layout: tokens before heads by a permuted view.
        return [t.permute(0, 2, 1, 3) for t in tensors] if layout == "heads outside tokens" else tensors

    page_axis = 1 if layout == "kv first" else 0
    source, into = make(1), make(2)
    where, to = [7, 0, 11], [3, 4, 9]
    hashes = new_hashes(3)
    page_bytes = source[0].select(page_axis, 0).numel() * 2
    blocks = client.namespace(flat_namespace(layers * page_bytes))
    assert blocks.store(hashes, PagedKV(source, where, page_axis=page_axis)).stored == 3
    before = [tensor.clone() for tensor in into]
    assert blocks.fetch(hashes, PagedKV(into, to, page_axis=page_axis)).hits == 3
    for layer in range(layers):
        for first, second in zip(where, to, strict=True):
            assert torch.equal(
                into[layer].select(page_axis, second), source[layer].select(page_axis, first)
            )
        for page in set(range(pages)) - set(to):
            assert torch.equal(into[layer].select(page_axis, page), before[layer].select(page_axis, page))
