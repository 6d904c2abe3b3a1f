"""Namespaces and block hashes: what changes a block's bytes changes its name, and names never change by themselves."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block import BLOCK_BYTES_MAX, BlockHash, BlockKey, Component, Namespace, Slice, block_hash
from kvstore.errors import BadKey, BadNamespace
from kvstore.prefix import chain
from tests.core.scale import examples

LLAMA = Namespace(
    model="meta-llama/Llama-3.1-8B",
    revision="d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
    dtype="bfloat16",
    components=(Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (32, 2, 16, 8, 128)),),
    block_tokens=16,
    slice=Slice.of_rank(layers=32, heads=8, tp_size=4, tp_rank=1),
)
MLA = Namespace(
    model="deepseek-ai/DeepSeek-V3",
    revision="1",
    dtype="fp8:per-tensor",
    components=(Component("latent", "uint8", ("layer", "token", "dim"), (61, 64, 576)),),
    block_tokens=64,
    slice=Slice((0, 61), (0, 1)),
    adapter="lora-7@3",
    salt=b"\x00\xff",
)
# Written down once. Should one of these ever differ, every block stored before is lost to those who look for it.
LLAMA_DIGEST = "a3bf271deb5836b472c87bd90a467ca20f646d641f97aa43983c08dc018f42c4"
LLAMA_GROUP = "569fe7af37848f3d2e11b12694ba728de6d97bd9317043e9fafcebb674ce3ead"
MLA_DIGEST = "6fa3f451a88d0c5504e008a7a3df2df6c3473a89d0bd06ce6c14c380ff866a74"
LLAMA_CHAIN = (
    "49948846560c1b2e99c714d6af59211169b8728535edc10a617ecb5d3e715dc9",
    "4bb9e91272b84dbe54a815c0b28e483d33bc7c81d3b666f4ebd46eeb13b2e9ed",
    "05ed09e097ac58216257438a4a9ed668a94995b206ef737cf1c49b54d667f1ea",
)
FOREIGN_8 = "a6c3f85d90fa95ba522fa2b8e664f581b98945515c5ed89446c473f27ec83e81"
FOREIGN_64 = "bb5ee400197ed131f1dfd5d8967e677dcc52d6c5f262fa54893ac662e6f6ba77"
PRINT_NAMES = """
from kvstore.block import block_hash
from kvstore.prefix import chain
from tests.core.test_block import LLAMA, MLA
print(LLAMA.digest.hex(), LLAMA.group_digest.hex(), MLA.digest.hex())
print(*(h.hex() for h in chain(LLAMA.digest, range(1, 50), 16)))
print(block_hash(bytes(range(8))).hex(), block_hash(bytes(range(64))).hex())
"""


def fields_of(namespace: Namespace) -> dict[str, Any]:
    """Return the fields of a namespace as plain values."""
    return {
        "model": namespace.model,
        "revision": namespace.revision,
        "dtype": namespace.dtype,
        "components": [[c.name, c.dtype, list(c.axes), list(c.shape)] for c in namespace.components],
        "block_tokens": namespace.block_tokens,
        "slice": [list(namespace.slice.layers), list(namespace.slice.heads)],
        "adapter": namespace.adapter,
        "salt": namespace.salt,
    }


def encoded(value: Any) -> bytes:
    """Return the canonical encoding, written a second time from its description alone."""
    match value:
        case int():
            return b"i" + struct.pack("<q", value)
        case str():
            return b"s" + struct.pack("<I", len(value.encode())) + value.encode()
        case bytes():
            return b"b" + struct.pack("<I", len(value)) + value
        case _:
            return b"l" + struct.pack("<I", len(value)) + b"".join(encoded(item) for item in value)


@pytest.mark.parametrize("seed", ["0", "1", None])
def test_names_are_the_same_in_every_process_whatever_its_hash_seed(seed: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    printed = subprocess.run(
        [sys.executable, "-c", PRINT_NAMES], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == [LLAMA_DIGEST, LLAMA_GROUP, MLA_DIGEST, *LLAMA_CHAIN, FOREIGN_8, FOREIGN_64]


def test_a_digest_is_sha256_over_the_canonical_encoding() -> None:
    content = b"kvstored/namespace/1" + encoded([[name, value] for name, value in fields_of(LLAMA).items()])
    assert LLAMA.encode() == content
    assert LLAMA.digest == hashlib.sha256(content).digest() == bytes.fromhex(LLAMA_DIGEST)


def test_the_same_fields_make_the_same_digest() -> None:
    assert Namespace.from_mapping(fields_of(LLAMA)).digest == LLAMA.digest
    assert Namespace.decode(LLAMA.encode()) == LLAMA


@pytest.mark.parametrize(
    "other",
    [
        replace(LLAMA, model="meta-llama/Llama-3.1-8B-Instruct"),
        replace(LLAMA, revision="0e9e39f249a16976918f6564b8830bc894c89659"),
        replace(LLAMA, dtype="fp8:per-tensor"),
        replace(LLAMA, components=(replace(LLAMA.components[0], dtype="float16"),)),
        replace(LLAMA, components=(replace(LLAMA.components[0], name="KV"),)),
        replace(
            LLAMA,
            components=(
                Component("kv", "bfloat16", ("layer", "kv", "head", "token", "dim"), (32, 2, 8, 16, 128)),
            ),
        ),
        replace(
            LLAMA,
            components=(
                Component("k", "bfloat16", ("layer", "token", "head", "dim"), (32, 16, 8, 128)),
                Component("v", "bfloat16", ("layer", "token", "head", "dim"), (32, 16, 8, 128)),
            ),
        ),
        LLAMA.with_slice(Slice.of_rank(layers=32, heads=8, tp_size=4, tp_rank=2)),
        LLAMA.with_slice(Slice.of_rank(layers=32, heads=8, tp_size=2, tp_rank=0)),
        LLAMA.with_slice(Slice.of_rank(layers=32, heads=8, tp_size=4, tp_rank=1, pp_size=2, pp_rank=1)),
        replace(LLAMA, adapter="lora-7@3"),
        replace(LLAMA, adapter="lora-7@4"),
        replace(LLAMA, salt=b"tenant"),
        replace(LLAMA, salt=b"\x00"),
    ],
    ids=[
        "model", "revision", "dtype", "component dtype", "component name", "order", "components", "tp rank", "tp size",
        "pp", "adapter", "adapter version", "salt", "zero salt",
    ],
)
def test_whatever_changes_a_blocks_bytes_changes_the_digest(other: Namespace) -> None:
    assert other.digest != LLAMA.digest
    assert chain(other.digest, range(16), 16) != chain(LLAMA.digest, range(16), 16)


def test_slices_of_one_model_share_a_group_and_nothing_else_does() -> None:
    rank_2 = LLAMA.with_slice(Slice.of_rank(layers=32, heads=8, tp_size=4, tp_rank=2))
    assert rank_2.group_digest == LLAMA.group_digest == bytes.fromhex(LLAMA_GROUP)
    assert replace(LLAMA, revision="2").group_digest != LLAMA.group_digest
    assert LLAMA.group_digest != LLAMA.digest


def test_text_and_bytes_and_the_borders_between_fields_are_told_apart() -> None:
    assert replace(LLAMA, model="ab", revision="c").digest != replace(LLAMA, model="a", revision="bc").digest
    assert replace(LLAMA, adapter="x", salt=b"").digest != replace(LLAMA, adapter="", salt=b"x").digest


@pytest.mark.parametrize("name", list(fields_of(LLAMA)))
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    fields = fields_of(LLAMA)
    del fields[name]
    with pytest.raises(BadNamespace, match=name):
        Namespace.from_mapping(fields)
    content = encoded([[key, value] for key, value in fields.items()])
    with pytest.raises(BadNamespace, match=name):
        Namespace.decode(b"kvstored/namespace/1" + content)


def test_an_unknown_field_is_refused_by_name() -> None:
    fields = {**fields_of(LLAMA), "rope_theta": 500000}
    with pytest.raises(BadNamespace, match="rope_theta"):
        Namespace.from_mapping(fields)
    with pytest.raises(BadNamespace, match="rope_theta"):
        Namespace.decode(b"kvstored/namespace/1" + encoded([[key, value] for key, value in fields.items()]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"kvstored/namespace/1",
        b"kvstored/namespace/2" + LLAMA.encode()[20:],
        LLAMA.encode()[:-1],
        LLAMA.encode() + b"\x00",
        b"kvstored/namespace/1" + encoded([[key, value] for key, value in reversed(fields_of(LLAMA).items())]),
        b"kvstored/namespace/1" + encoded([["model", "a"], ["model", "b"]]),
        b"kvstored/namespace/1" + encoded(["model", "a"]),
        b"kvstored/namespace/1" + encoded(7),
        b"kvstored/namespace/1" + b"l\x01\x00\x00\x00" * 2000,
        b"kvstored/namespace/1" + b"l\xff\xff\xff\xff",
    ],
    ids=["empty", "no value", "version", "cut", "longer", "order", "twice", "flat", "number", "deep", "wide"],
)
def test_an_encoding_that_is_not_the_canonical_one_is_refused(content: bytes) -> None:
    with pytest.raises(BadNamespace):
        Namespace.decode(content)


def test_an_encoding_that_is_cut_anywhere_is_refused() -> None:
    for length in range(len(LLAMA.encode())):
        with pytest.raises(BadNamespace):
            Namespace.decode(LLAMA.encode()[:length])


@settings(max_examples=examples(150))
@given(position=st.integers(0, len(LLAMA.encode()) - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_makes_another_namespace(position: int, byte: int) -> None:
    content = bytearray(LLAMA.encode())
    changed = content[position] != byte
    content[position] = byte
    try:
        found = Namespace.decode(bytes(content))
    except BadNamespace:
        return
    assert (found.digest != LLAMA.digest) == changed


@settings(max_examples=examples(150))
@given(st.binary(max_size=200))
def test_random_bytes_are_no_namespace(content: bytes) -> None:
    with pytest.raises(BadNamespace):
        Namespace.decode(content)
    with pytest.raises(BadNamespace):
        Namespace.decode(b"kvstored/namespace/1" + content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 7),
        ("model", ""),
        ("revision", ""),
        ("dtype", b"bfloat16"),
        ("components", []),
        ("components", 3),
        ("components", [["kv", "bfloat16", ["layer"], ["32"]]]),
        ("components", [["kv", "bfloat7", ["layer"], [32]]]),
        ("components", [["kv", "bfloat16", ["layer", "layer"], [32, 32]]]),
        ("components", [["kv", "bfloat16", ["row"], [32]]]),
        ("components", [["kv", "bfloat16", ["layer"], [0]]]),
        ("components", [["kv", "int4", ["dim"], [33]]]),
        ("components", [["kv", "uint8", ["dim"], [BLOCK_BYTES_MAX + 1]]]),
        ("block_tokens", True),
        ("block_tokens", 0),
        ("block_tokens", 32),
        ("slice", [[0, 33], [0, 1]]),
        ("slice", [[3, 3], [0, 1]]),
        ("slice", [[0, 1]]),
        ("salt", "text"),
    ],
)
def test_a_field_of_the_wrong_type_or_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(BadNamespace):
        Namespace.from_mapping({**fields_of(LLAMA), name: value})


@pytest.mark.parametrize(
    "change", [{"block_tokens": 1 << 70}, {"slice": Slice((0, 1 << 64), (0, 1))}, {"model": "\udc80"}]
)
def test_numbers_and_texts_that_have_no_encoding_are_refused(change: dict[str, Any]) -> None:
    flat = replace(LLAMA, components=(Component("kv", "uint8", ("dim",), (4096,)),), slice=Slice((0, 1), (0, 1)))
    with pytest.raises(BadNamespace):
        replace(flat, **change).encode()


def test_a_block_is_as_large_as_what_its_slice_holds() -> None:
    assert LLAMA.block_bytes == 32 * 2 * 16 * 2 * 128 * 2
    assert MLA.block_bytes == 61 * 64 * 576
    half = LLAMA.with_slice(Slice.of_rank(layers=32, heads=8, tp_size=4, tp_rank=1, pp_size=2, pp_rank=0))
    assert half.block_bytes == LLAMA.block_bytes // 2


def test_ranks_hold_every_head_and_layer_once() -> None:
    held = [
        Slice.of_rank(layers=32, heads=8, tp_size=4, tp_rank=tp, pp_size=2, pp_rank=pp)
        for tp in range(4)
        for pp in range(2)
    ]
    pairs = [(layer, head) for s in held for layer in range(*s.layers) for head in range(*s.heads)]
    assert sorted(pairs) == [(layer, head) for layer in range(32) for head in range(8)]


def test_more_ranks_than_heads_share_a_head_as_neighbours() -> None:
    heads = [Slice.of_rank(layers=2, heads=2, tp_size=8, tp_rank=rank).heads for rank in range(8)]
    assert heads == [(0, 1)] * 4 + [(1, 2)] * 4


@pytest.mark.parametrize(
    "rank",
    [
        {"layers": 32, "heads": 8, "tp_size": 4, "tp_rank": 4},
        {"layers": 32, "heads": 8, "tp_size": 3, "tp_rank": 0},
        {"layers": 32, "heads": 8, "tp_size": 12, "tp_rank": 0},
        {"layers": 31, "heads": 8, "pp_size": 2, "pp_rank": 0},
        {"layers": 32, "heads": 8, "tp_rank": -1},
    ],
)
def test_a_rank_that_does_not_exist_or_does_not_divide_is_refused(rank: dict[str, int]) -> None:
    with pytest.raises(BadNamespace):
        Slice.of_rank(**rank)


def test_an_engines_hash_of_32_bytes_is_the_block_hash_and_others_are_mapped() -> None:
    own = bytes(range(32))
    assert block_hash(own) == own
    assert block_hash(bytes(range(8))).hex() == FOREIGN_8
    assert block_hash(bytes(range(64))).hex() == FOREIGN_64
    assert block_hash(bytes(8)) != block_hash(bytes(9))


@pytest.mark.parametrize("length", [0, 1, 7, 65, 1000])
def test_a_hash_of_another_length_is_no_key(length: int) -> None:
    with pytest.raises(BadKey, match=str(length)):
        block_hash(bytes(length))


def test_a_block_key_has_two_parts_of_32_bytes() -> None:
    assert BlockKey(LLAMA.digest, block_hash(bytes(32))).namespace == LLAMA.digest
    for namespace, hash_ in ((b"", bytes(32)), (LLAMA.digest, b""), (LLAMA.digest, bytes(31))):
        with pytest.raises(BadKey):
            BlockKey(namespace, BlockHash(hash_))
