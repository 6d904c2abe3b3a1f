"""Chained hashes: equal hashes mean equal prefixes, and only full blocks have one."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import BadKey, UsageError
from kvstore.prefix import chain, leading_run
from tests.core.scale import examples

ROOT = hashlib.sha256(b"root").digest()
tokens_strategy = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def test_a_hash_is_sha256_over_the_parent_and_the_packed_tokens() -> None:
    first = hashlib.sha256(ROOT + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert chain(ROOT, [1, 2, 3, 2**32 - 1, 5, 6, 7, 8], 4) == [first, second]


@pytest.mark.parametrize("count", range(9))
def test_tokens_behind_the_last_full_block_have_no_hash(count: int) -> None:
    assert len(chain(ROOT, range(count), 4)) == count // 4


def test_a_prefix_of_no_tokens_has_neither_a_key_nor_a_hit() -> None:
    assert chain(ROOT, [], 16) == []
    assert leading_run([]) == 0


@settings(max_examples=examples(60))
@given(tokens=tokens_strategy, block_tokens=st.integers(1, 7), split=st.integers(0, 8))
def test_a_prompt_hashed_in_two_parts_has_the_same_hashes(tokens: list[int], block_tokens: int, split: int) -> None:
    whole = chain(ROOT, tokens, block_tokens)
    blocks = min(split, len(whole))
    head = chain(ROOT, tokens[: blocks * block_tokens], block_tokens)
    tail = chain(head[-1] if head else ROOT, tokens[blocks * block_tokens :], block_tokens)
    assert head + tail == whole


@settings(max_examples=examples(60))
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=60),
    where=st.integers(0, 59),
    block=st.integers(1, 5),
)
def test_a_changed_token_changes_its_block_and_all_behind_it(tokens: list[int], where: int, block: int) -> None:
    where %= len(tokens)
    changed = [*tokens]
    changed[where] ^= 1
    before, after = chain(ROOT, tokens, block), chain(ROOT, changed, block)
    same = where // block
    assert before[:same] == after[:same]
    assert all(old != new for old, new in zip(before[same:], after[same:], strict=True))


def test_prompts_of_two_namespaces_share_no_hash() -> None:
    other = hashlib.sha256(b"other").digest()
    assert not set(chain(ROOT, range(64), 4)) & set(chain(other, range(64), 4))


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["7"], [None], [1.5], [2**64]])
def test_what_is_no_token_id_is_refused(tokens: list[Any]) -> None:
    with pytest.raises(BadKey):
        chain(ROOT, tokens, 1)


@pytest.mark.parametrize("root", [b"", b"model", bytes(31), bytes(33)])
def test_a_chain_starts_from_a_digest_or_a_block_hash_only(root: bytes) -> None:
    with pytest.raises(BadKey, match=str(len(root))):
        chain(root, range(16), 16)


@pytest.mark.parametrize("block_tokens", [0, -16])
def test_a_block_has_at_least_one_token(block_tokens: int) -> None:
    with pytest.raises(UsageError, match=str(block_tokens)):
        chain(ROOT, range(16), block_tokens)


def test_tokens_may_come_from_any_iterable() -> None:
    assert chain(ROOT, iter([1, 2]), 1) == chain(ROOT, (1, 2), 1)


@given(st.lists(st.booleans(), max_size=20))
@settings(max_examples=examples(50))
def test_the_leading_run_ends_before_the_first_miss(found: list[bool]) -> None:
    run = leading_run(found)
    assert all(found[:run])
    assert run == len(found) or not found[run]
