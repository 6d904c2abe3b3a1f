"""Slices: a block of one slice made from others is byte by byte the one its own rank would have stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import AsyncClient, Client, Component, Namespace, Outcome, PagedKV, Slice
from kvclient._slices import plan
from tests.client.blocks import new_hashes
from tests.daemon_fixture import Daemon

LAYERS, TOKENS, HEADS, DIM = 4, 16, 8, 64
HEADS_OUTSIDE = ("layer", "kv", "head", "token", "dim")
HEADS_INSIDE = ("layer", "kv", "token", "head", "dim")
EXTENTS = {"layer": LAYERS, "kv": 2, "token": TOKENS, "head": HEADS, "dim": DIM}


def component(name: str, axes: tuple[str, ...], dtype: str = "bfloat16") -> Component:
    return Component(name, dtype, axes, tuple(EXTENTS[axis] for axis in axes))


def namespace(components: Sequence[Component], salt: bytes = b"") -> Namespace:
    return Namespace("m", "1", "bf16", tuple(components), TOKENS, Slice((0, LAYERS), (0, HEADS)), salt=salt)


def rank(whole: Namespace, tp: int, size: int, pp: int = 0, stages: int = 1) -> Namespace:
    part = Slice.of_rank(layers=LAYERS, heads=HEADS, tp_size=size, tp_rank=tp, pp_size=stages, pp_rank=pp)
    return whole.with_slice(part)


class Model:
    """KV of whole blocks, of which each rank stores its part."""

    def __init__(self, whole: Namespace, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.whole = whole
        self.arrays = [
            random.integers(0, 256, (*part.shape, part.size_bytes // int(np.prod(part.shape))), dtype=np.uint8)
            for part in whole.components
        ]

    def block(self, of: Namespace) -> bytes:
        """Return the bytes of this block's slice."""
        parts: list[bytes] = []
        for part, array in zip(self.whole.components, self.arrays, strict=True):
            cut = {"layer": slice(*of.slice.layers), "head": slice(*of.slice.heads)}
            parts.append(array[tuple(cut.get(axis, slice(None)) for axis in part.axes)].tobytes())
        return b"".join(parts)


def assembled(target: Namespace, sources: Sequence[Namespace], model: Model) -> bytes | None:
    """Return a block of `target` as the plan makes it; checks that every byte is written once."""
    made = plan(target, sources)
    if made is None:
        return None
    block, written = bytearray(target.block_bytes), bytearray(target.block_bytes)
    for place, moves in made.moves.items():
        content = model.block(sources[place])
        for source, start, length in moves:
            block[start : start + length] = content[source : source + length]
            assert not any(written[start : start + length])
            written[start : start + length] = b"\1" * length
    assert all(written)
    return bytes(block)


WHOLE = namespace([component("kv", HEADS_OUTSIDE)])


def test_four_ranks_halves_make_two_ranks_blocks() -> None:
    model = Model(WHOLE, 1)
    fours = [rank(WHOLE, tp, 4) for tp in range(4)]
    for tp in range(2):
        two = rank(WHOLE, tp, 2)
        assert assembled(two, fours, model) == model.block(two)
        made = plan(two, fours)
        assert made is not None
        assert sorted(made.moves) == [2 * tp, 2 * tp + 1]


def test_a_part_is_taken_from_a_larger_slice() -> None:
    model = Model(WHOLE, 2)
    four = rank(WHOLE, 3, 4)
    assert assembled(four, [rank(WHOLE, 1, 2)], model) == model.block(four)
    assert assembled(four, [WHOLE], model) == model.block(four)


def test_stages_and_ranks_are_put_together_at_once() -> None:
    model = Model(WHOLE, 3)
    parts = [rank(WHOLE, tp, 2, pp, 2) for pp in range(2) for tp in range(2)]
    assert assembled(WHOLE, parts, model) == model.block(WHOLE)


def test_a_missing_part_means_no_plan() -> None:
    model = Model(WHOLE, 4)
    assert assembled(WHOLE, [rank(WHOLE, 0, 2)], model) is None
    assert assembled(WHOLE, [rank(WHOLE, tp, 4) for tp in (0, 1, 3)], model) is None
    assert assembled(WHOLE, [], model) is None


def test_a_latent_without_heads_comes_whole_from_any_rank() -> None:
    whole = namespace([component("latent", ("layer", "token", "dim")), component("kv", HEADS_OUTSIDE)])
    model = Model(whole, 5)
    two = rank(whole, 1, 2)
    assert assembled(two, [rank(whole, 2, 4), rank(whole, 3, 4)], model) == model.block(two)


def test_heads_inside_tokens_are_not_worth_it_but_layers_are() -> None:
    whole = namespace([component("kv", HEADS_INSIDE)])
    model = Model(whole, 6)
    assert assembled(rank(whole, 0, 2), [rank(whole, 0, 4), rank(whole, 1, 4)], model) is None
    stages = [rank(whole, 0, 1, pp, 2) for pp in range(2)]
    assert assembled(whole, stages, model) == model.block(whole)


def test_half_bytes_are_never_torn() -> None:
    axes = ("layer", "token", "head")
    whole = Namespace("m", "1", "i4", (Component("s", "int4", axes, (LAYERS, TOKENS, HEADS)),), TOKENS,
                      Slice((0, LAYERS), (0, HEADS)))  # fmt: skip
    odd = whole.with_slice(Slice((0, LAYERS), (1, 3)))
    assert plan(odd, [whole]) is None


@given(
    st.permutations(HEADS_OUTSIDE),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 7), st.integers(1, 8)), max_size=6),
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 7), st.integers(1, 8)),
)
def test_whatever_is_planned_is_exact(
    axes: list[str], held: list[tuple[int, int, int, int]], wanted: tuple[int, int, int, int]
) -> None:
    whole = namespace([component("kv", tuple(axes)), component("scale", ("head", "layer"), "float32")])
    model = Model(whole, 7)

    def sliced(first_layer: int, layers: int, first_head: int, heads: int) -> Namespace:
        ends = min(LAYERS, first_layer + layers), min(HEADS, first_head + heads)
        return whole.with_slice(Slice((first_layer, ends[0]), (first_head, ends[1])))

    target = sliced(*wanted)
    made = assembled(target, [sliced(*part) for part in held], model)
    assert made is None or made == model.block(target)


# ---- against the real daemon


@pytest.fixture
def whole() -> Namespace:
    return namespace([component("kv", HEADS_OUTSIDE)], salt=new_hashes(1)[0])


def test_decode_at_two_ranks_reads_what_prefill_stored_at_four(client: Client, whole: Namespace) -> None:
    hashes = new_hashes(12)
    models = [Model(whole, seed) for seed in range(12)]
    fours = [rank(whole, tp, 4) for tp in range(4)]
    for four in fours:
        client.namespace(four).store(hashes, [model.block(four) for model in models])
    for tp in range(2):
        two = rank(whole, tp, 2)
        blocks = client.namespace(two)
        assert blocks.lookup(hashes).hits == 0
        assert blocks.group_lookup(hashes).hits == 12
        into = [bytearray(two.block_bytes) for _ in hashes]
        assert blocks.fetch(hashes, into, slices=False).hits == 0
        assert blocks.fetch(hashes, into).hits == 12
        assert into == [model.block(two) for model in models]


def test_a_fetch_takes_each_block_from_where_it_is(client: Client, whole: Namespace) -> None:
    """Of eight blocks the own slice has some, the others' slices some, and one is nowhere whole."""
    hashes = new_hashes(8)
    models = [Model(whole, seed) for seed in range(8)]
    two = rank(whole, 0, 2)
    client.namespace(two).store(hashes[0:6:2], [models[at].block(two) for at in (0, 2, 4)])
    for tp, stored in ((0, (1, 3, 5, 6, 7)), (1, (1, 3, 5, 7))):
        four = rank(whole, tp, 4)
        client.namespace(four).store([hashes[at] for at in stored], [models[at].block(four) for at in stored])
    blocks = client.namespace(two)
    expected = [model.block(two) for model in models]
    for run in (True, False):
        into = [bytearray(two.block_bytes) for _ in hashes]
        found = blocks.fetch(hashes, into, run=run)
        assert found.hits == 6
        assert found.outcomes[6] == Outcome.LAYOUT
        assert into[:6] == expected[:6]
        assert (found.outcomes[7] == Outcome.HIT) is (not run)
    assert blocks.group_lookup(hashes).outcomes == (*(Outcome.HIT,) * 6, Outcome.LAYOUT, Outcome.HIT)


def test_a_waiting_fetch_does_not_wait_for_what_other_slices_hold(client: Client, whole: Namespace) -> None:
    hashes = new_hashes(3)
    models = [Model(whole, seed) for seed in range(3)]
    client.namespace(whole).store(hashes, [model.block(whole) for model in models])
    four = rank(whole, 1, 4)
    into = [bytearray(four.block_bytes) for _ in hashes]
    # Were it to wait, it would outlast the test.
    assert client.namespace(four).fetch(hashes, into, wait_s=1000).hits == 3
    assert into == [model.block(four) for model in models]


def test_assembled_blocks_go_to_paged_tensors(client: Client, whole: Namespace) -> None:
    hashes, pages = new_hashes(2), 5
    models = [Model(whole, seed) for seed in range(2)]
    for tp in range(2):
        part = rank(whole, tp, 2)
        client.namespace(part).store(hashes, [model.block(part) for model in models])
    layers = [np.zeros((2, pages, HEADS, TOKENS, DIM), np.uint16) for _ in range(LAYERS)]
    assert client.namespace(whole).fetch(hashes, PagedKV(layers, [4, 1], page_axis=1)).hits == 2
    for model, page in zip(models, (4, 1), strict=True):
        found = b"".join(layer[kv, page].tobytes() for layer in layers for kv in (0, 1))
        assert found == model.block(whole)


def test_the_asyncio_client_assembles_too(shared_daemon: Daemon, whole: Namespace) -> None:
    hashes, model = new_hashes(1), Model(whole, 1)

    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            await client.namespace(whole).store(hashes, model.block(whole))
            four = rank(whole, 2, 4)
            into = bytearray(four.block_bytes)
            assert (await client.namespace(four).group_lookup(hashes)).hits == 1
            assert (await client.namespace(four).fetch(hashes, into)).hits == 1
            assert into == model.block(four)

    asyncio.run(main())
