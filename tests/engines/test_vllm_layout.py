"""What is read of the KV tensors that vLLM registers: components, slices, and the same bytes on every way."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvclient._vllm_errors import Unsupported
from kvclient._vllm_layout import Layout, Rank, layout_of
from kvclient._vllm_pages import Pages
from kvclient.paged import PagedKV
from kvstore.block import Component, Namespace, Slice

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 10, 16, 4, 8, 3
ALONE = Rank(0, 1, 0, 1, layers=LAYERS, kv_heads=HEADS)


def permuted(shape: Sequence[int], memory: Sequence[int]) -> torch.Tensor:
    """Return a tensor of a logical shape whose axes lie in memory in another order."""
    inverse = [memory.index(axis) for axis in range(len(shape))]
    content = torch.arange(math.prod(shape), dtype=torch.float32) * torch.rand(1)
    return content.reshape([shape[axis] for axis in memory]).permute(inverse)


def registered(shape: Sequence[int], memory: Sequence[int], layers: int = LAYERS) -> dict[str, torch.Tensor]:
    return {f"model.layers.{number}.self_attn.attn": permuted(shape, memory) for number in range(layers)}


def read(tensors: dict[str, torch.Tensor], rank: Rank = ALONE, heads: int = HEADS) -> Layout:
    return layout_of(tensors, rank, block_count=BLOCKS, block_tokens=TOKENS, local_heads=heads)


def gathered(tensors: dict[str, torch.Tensor], layout: Layout, block: int) -> bytes:
    """Return a block's bytes as PagedKV takes them."""
    pages = list(range(block * layout.pages_per_block, (block + 1) * layout.pages_per_block))
    paged = PagedKV([tensors[name] for name in layout.layers], [pages], page_axis=layout.page_axis)
    return b"".join(ctypes.string_at(address, size) for address, size in paged.segments(0))


# Name: the logical shape, its order in memory, the axes that a block has behind "layer".
NAMED = {
    "cpu, and from 0.28 on everywhere": ((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3), ("head", "token", "dim")),
    "tokens outside heads": ((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 2, 1, 3), ("token", "head", "dim")),
    "heads outside blocks": ((BLOCKS, HEADS, TOKENS, 2 * DIM), (1, 0, 2, 3), ("head", "token", "dim")),
    "flash attention of 0.24": ((BLOCKS, 2, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4), ("kv", "token", "head", "dim")),
    "the same, heads outside tokens": (
        (BLOCKS, 2, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4), ("kv", "head", "token", "dim"),
    ),
    "keys and values apart": ((2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 2, 3, 4), ("kv", "token", "head", "dim")),
    "keys and values apart, heads outside tokens": (
        (2, BLOCKS, TOKENS, HEADS, DIM), (0, 1, 3, 2, 4), ("kv", "head", "token", "dim"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_block_holds_the_axes_that_its_components_name(name: str) -> None:
    shape, memory, axes = NAMED[name]
    tensors = registered(shape, memory)
    layout = read(tensors)
    (component,) = layout.components
    assert component.axes == ("layer", *axes)
    assert layout.slice == Slice((0, LAYERS), (0, HEADS))
    named = Namespace("m", "r", "d", layout.components, TOKENS, layout.slice)
    # What each axis of the tensor is, told by the shape alone.
    kinds = {BLOCKS: "page", TOKENS: "token", HEADS: "head", 2: "kv"}
    logical = [kinds[extent] for extent in shape[:-1]] + ["dim"]
    order = [logical.index(axis) for axis in axes]
    for block in (0, 3, BLOCKS - 1):
        content = gathered(tensors, layout, block)
        assert len(content) == named.block_bytes
        whole = torch.frombuffer(bytearray(content), dtype=torch.float32).view(component.shape)
        for layer, tensor in enumerate(tensors.values()):
            page = tensor.select(logical.index("page"), block)
            expected = page.permute([axis - (axis > logical.index("page")) for axis in order])
            assert torch.equal(whole[layer], expected)


@pytest.mark.parametrize("name", [*NAMED, "pages smaller than blocks"])
def test_every_way_out_of_the_pages_gives_the_same_bytes(name: str) -> None:
    shape, memory = NAMED[name][:2] if name in NAMED else ((2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM), (0, 1, 2, 3))
    tensors = registered(shape, memory)
    layout = read(tensors)
    pages = Pages(tensors, layout)
    blocks = [7, 2, 3]
    source = pages.layerwise(blocks)
    assert source is not None
    source.take("model.layers.1.self_attn.attn")
    source.take("a layer that shares another's cache")
    source.finish()
    for place, block in enumerate(blocks):
        assert source.memory[place].numpy().tobytes() == gathered(tensors, layout, block)


def test_layers_are_in_their_natural_order_and_those_that_share_a_cache_count_once() -> None:
    tensors = {f"layers.{number}.attn": permuted((BLOCKS, HEADS, TOKENS, DIM), (0, 1, 2, 3)) for number in (10, 9, 2)}
    tensors["layers.11.attn"] = tensors["layers.2.attn"]
    assert read(tensors).layers == ("layers.2.attn", "layers.9.attn", "layers.10.attn")


def test_two_orders_of_the_same_bytes_are_two_layouts() -> None:
    shape = (BLOCKS, 3, TOKENS, DIM)  # three heads, says the tensor; four, says the configuration
    components = {read(registered(shape, memory)).components for memory in ((0, 1, 2, 3), (0, 2, 1, 3))}
    assert len(components) == 2


def test_what_can_not_be_told_is_opaque_and_each_rank_s_own() -> None:
    rank = Rank(1, 2, 0, 1, layers=LAYERS, kv_heads=2 * TOKENS)
    layout = read(registered((BLOCKS, TOKENS, TOKENS, DIM), (0, 1, 2, 3)), rank, heads=TOKENS)
    (component,) = layout.components
    assert component.axes == ("layer", "head", "dim")
    assert component.shape == (LAYERS, 2, TOKENS * TOKENS * DIM)
    assert layout.slice == Slice((0, LAYERS), (1, 2))


def test_ranks_hold_slices_of_one_group() -> None:
    tensors = registered((BLOCKS, HEADS // 2, TOKENS, 2 * DIM), (0, 1, 2, 3))
    ranks = [Rank(number, 2, 0, 1, layers=LAYERS, kv_heads=HEADS) for number in range(2)]
    layouts = [read(tensors, rank, heads=2) for rank in ranks]
    assert [layout.slice.heads for layout in layouts] == [(0, 2), (2, 4)]
    assert layouts[0].components == layouts[1].components == read(
        registered((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3))
    ).components
    assert all(layout.is_first for layout in layouts)


def test_of_ranks_that_hold_the_same_head_one_stores() -> None:
    tensors = registered((BLOCKS, 1, TOKENS, 2 * DIM), (0, 1, 2, 3))
    layouts = [read(tensors, Rank(number, 4, 0, 1, layers=LAYERS, kv_heads=2), heads=1) for number in range(4)]
    assert [layout.slice.heads for layout in layouts] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [layout.is_first for layout in layouts] == [True, False, True, False]


def test_a_latent_is_the_same_on_every_rank_and_stored_by_one() -> None:
    tensors = registered((BLOCKS, TOKENS, 5 * DIM), (0, 1, 2))
    ranks = [Rank(number, 2, 0, 1, layers=LAYERS, kv_heads=1, has_latents=True) for number in range(2)]
    layouts = [read(tensors, rank, heads=1) for rank in ranks]
    assert layouts[0].components == (Component("kv", "float32", ("layer", "token", "dim"), (LAYERS, TOKENS, 5 * DIM)),)
    assert layouts[0].slice == layouts[1].slice
    assert [layout.is_first for layout in layouts] == [True, False]


def test_a_pipeline_stage_holds_the_layers_that_it_names() -> None:
    stage = replace(ALONE, pp_rank=1, pp_size=2, layers=7)
    shape, memory = (BLOCKS, HEADS, TOKENS, DIM), (0, 1, 2, 3)
    tensors = {f"model.layers.{number}.attn": permuted(shape, memory) for number in (4, 5, 6)}
    layout = read(tensors, stage)
    assert layout.slice.layers == (4, 7)
    assert layout.components[0].extent("layer") == 7
    tensors["model.layers.9.attn"] = permuted((BLOCKS, HEADS, TOKENS, DIM), (0, 1, 2, 3))
    with pytest.raises(Unsupported, match="one after the other"):
        read(tensors, stage)


def test_layers_of_several_shapes_are_several_components() -> None:
    tensors = registered((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3), layers=2)
    tensors["model.layers.2.self_attn.attn"] = permuted((BLOCKS, HEADS, TOKENS, DIM), (0, 1, 2, 3))
    layout = read(tensors)
    named = Namespace("m", "r", "d", layout.components, TOKENS, layout.slice)
    assert len(layout.components) == 2
    assert named.block_bytes == len(gathered(tensors, layout, 1)) == Pages(tensors, layout).block_bytes
    with pytest.raises(Unsupported, match="pipeline"):
        read(tensors, replace(ALONE, pp_size=2, layers=6))


@pytest.mark.parametrize("shape", [(7, HEADS, TOKENS, DIM), (3, BLOCKS, TOKENS), (BLOCKS,), (2, 7, TOKENS, HEADS, DIM)])
def test_tensors_without_an_axis_of_pages_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(Unsupported, match="no axis"):
        read({"layers.0": torch.zeros(shape)})


def test_an_engine_without_tensors_is_refused() -> None:
    with pytest.raises(Unsupported, match="no KV tensors"):
        read({})


def test_tensors_that_show_less_than_a_whole_page_are_refused() -> None:
    tensors = registered((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3))
    size = HEADS * TOKENS * 2 * DIM * 4
    whole = partial(layout_of, tensors, ALONE, block_count=BLOCKS, block_tokens=TOKENS, local_heads=HEADS)
    assert whole(page_bytes=dict.fromkeys(tensors, size)) == read(tensors)
    with pytest.raises(Unsupported, match="its tensor shows"):
        whole(page_bytes=dict.fromkeys(tensors, size + TOKENS))  # scales beside it
