"""The hashes are vLLM's: vectors that a real vLLM 0.32 computed, and what can't be told is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kvproxy.running import chain

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "vllm_hashes.json").read_text())


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_hashes_are_those_of_vllm(algorithm: str) -> None:
    vectors = [vector for vector in RECORDED["vectors"] if vector["algorithm"] == algorithm]
    assert len(vectors) >= 20
    for vector in vectors:
        tokens = RECORDED["tokens"][vector["tokens"]]
        found = chain(
            tokens, vector["block_tokens"], algorithm=algorithm, seed=vector["seed"], cache_salt=vector["cache_salt"]
        )
        assert len(found) == vector["count"]
        if found:
            assert (found[0].hex(), found[-1].hex()) == (vector["first"], vector["last"])


def test_a_part_of_a_block_has_no_hash() -> None:
    tokens = list(range(40))
    assert chain(tokens[:15], 16) == []
    assert chain(tokens, 16) == chain(tokens[:32], 16)
    assert len(chain(tokens, 16)) == 2


def test_equal_blocks_behind_other_prefixes_have_other_hashes() -> None:
    one, other = chain([1] * 16 + [7] * 16, 16), chain([2] * 16 + [7] * 16, 16)
    assert one[1] != other[1]
    assert chain([7] * 16, 16, cache_salt="a") != chain([7] * 16, 16, cache_salt="b")
    assert chain([7] * 16, 16, seed="0") != chain([7] * 16, 16, seed="1")


@pytest.mark.parametrize("tokens", [[-1] * 16, [1 << 31] * 16])
def test_ids_that_no_engine_has_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token id"):
        chain(tokens, 16)


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="sha256, sha256_cbor"):
        chain([1] * 16, 16, algorithm="xxhash")
