"""Runs and their homes: every node cuts and places alike, shares follow capacity, and no more moves than must."""

from __future__ import annotations

import hashlib
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvstore import prefix
from kvstore.errors import UsageError
from kvstore.placement import COPIES_MAX, Placement, weight_of
from kvstore.runs import Point, RunKey, RunMemory, run_tokens, runs
from tests.core.parts import hash_of, hashes_of
from tests.core.scale import examples
from tests.product import ROOT

GIB = 1 << 30
names = st.text("abcdefghij-0123456789", min_size=1, max_size=12)
memberships = st.dictionaries(names, st.integers(1, 1 << 50), min_size=1, max_size=12)
run_keys = st.integers(0, 2**64 - 1).map(RunKey)


def keys_of(count: int, salt: int = 0) -> list[RunKey]:
    """Return well-mixed run keys."""
    return [RunKey(int.from_bytes(hash_of(number + (salt << 32))[:8], "little")) for number in range(count)]


def cut(hashes: Sequence[bytes], block_tokens: int, before: Point | None = None) -> dict[bytes, RunKey]:
    """Return the run of each block."""
    return {block: run.key for run in runs(hashes, block_tokens, before) for block in hashes[run.start : run.stop]}


# ---- runs


@settings(max_examples=examples(50))
@given(st.integers(0, 400), st.integers(1, 600), st.integers(0, 2**32))
def test_runs_are_all_of_a_request_in_order(count: int, block_tokens: int, salt: int) -> None:
    hashes = [hash_of(salt + number) for number in range(count)]
    found = runs(hashes, block_tokens)
    assert [at for run in found for at in range(run.start, run.stop)] == list(range(count))
    assert all(run.start < run.stop for run in found)
    assert len({run.key for run in found}) == len(found)


@settings(max_examples=examples(80))
@given(st.integers(2, 600), st.integers(1, 600), st.data())
def test_a_part_of_a_chain_is_cut_as_in_the_whole_where_the_block_ahead_is_known(
    count: int, block_tokens: int, data: st.DataObject
) -> None:
    hashes = hashes_of(range(count))
    whole = cut(hashes, block_tokens)
    start = data.draw(st.integers(1, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    part = cut(hashes[start:stop], block_tokens, Point(whole[hashes[start - 1]], start))
    assert part == {block: whole[block] for block in hashes[start:stop]}


def test_where_it_is_not_known_the_runs_meet_again_further_on() -> None:
    hashes = hashes_of(range(20_000))
    whole, part = cut(hashes, 16), cut(hashes[3000:], 16)
    assert [part[block] for block in hashes[19_000:]] == [whole[block] for block in hashes[19_000:]]
    assert part[hashes[3000]] == xxh3_64_intdigest(hashes[3000]) != whole[hashes[3000]]


def test_two_prompts_share_the_runs_of_their_common_prefix() -> None:
    one = prefix.chain(bytes(32), range(40_000), 16)
    other = prefix.chain(bytes(32), [*range(30_000), *range(90_000, 99_984)], 16)
    ours, theirs = cut(one, 16), cut(other, 16)
    assert [ours[block] for block in one[:1875]] == [theirs[block] for block in other[:1875]]
    assert ours[one[-1]] != theirs[other[-1]]


def test_runs_grow_with_depth_and_count_tokens_not_blocks() -> None:
    assert [run_tokens(depth) for depth in (0, 512, 4096, 32_768, 1_000_000)] == [128, 128, 1024, 8192, 8192]
    chains = [[hash_of(chain << 32 | at) for at in range(2048)] for chain in range(20)]
    by_block_tokens = {each: [runs(chain[: 32_768 // each], each) for chain in chains] for each in (16, 64)}
    for found in by_block_tokens.values():
        # 4 of 128 tokens, then 4 for each time that the depth grows e-fold: 20.6 in 32k tokens.
        assert sum(map(len, found)) / 20 == pytest.approx(20.6, rel=0.15)


def test_blocks_as_long_as_a_run_begin_one_each() -> None:
    hashes = hashes_of(range(4))
    assert [(run.start, run.stop) for run in runs(hashes, 512)] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_prompts_that_fork_behind_one_head_are_spread_over_homes() -> None:
    placement = Placement({f"n{number}": GIB for number in range(20)})
    head = hashes_of(range(32))  # 512 tokens
    load: Counter[str] = Counter()
    for prompt in range(400):
        tail = [hash_of((prompt + 1) << 32 | at) for at in range(600)]
        for block, key in cut([*head, *tail], 16).items():
            if block not in head:
                load[placement.homes(key)[0]] += 1
    assert max(load.values()) < 1.5 * sum(load.values()) / 20


def test_hashes_that_are_small_numbers_are_cut_as_evenly_as_others() -> None:
    engine_hashes = [number.to_bytes(8, "big") for number in range(20_000)]
    expected = 4 + 4 * math.log(64) + (20_000 - 2048) / 512
    assert len(runs(engine_hashes, 16)) == pytest.approx(expected, rel=0.3)


def test_the_cut_of_a_chain_is_what_it_has_always_been() -> None:
    # Nodes of two versions form one pool: whoever changes this changes the protocol.
    hashes = hashes_of(range(128))
    assert [run.stop for run in runs(hashes, 16)] == [6, 7, 18, 21, 22, 53, 57, 84, 96, 128]


def test_memory_of_runs_forgets_the_oldest_half() -> None:
    memory = RunMemory(100)
    for number in range(1000):
        memory.note(hash_of(number), Point(RunKey(number), 1))
        assert len(memory) <= 100
    assert all(memory.recall(hash_of(number)) == (number, 1) for number in range(950, 1000))
    assert memory.recall(hash_of(0)) is None


def test_memory_of_runs_keeps_what_was_noted_last() -> None:
    memory = RunMemory(10)
    memory.note(b"a", Point(RunKey(1), 1))
    memory.note(b"a", Point(RunKey(0), 2))
    assert memory.recall(b"a") == (0, 2)
    for number in range(5):
        memory.note(hash_of(number), Point(RunKey(number), 1))
    memory.note(b"a", Point(RunKey(7), 3))
    assert memory.recall(b"a") == (7, 3)
    assert len(memory) == 6


# ---- homes


@settings(max_examples=examples(100))
@given(memberships, st.lists(run_keys, min_size=1, max_size=20), st.integers(1, COPIES_MAX))
def test_homes_are_different_members_and_fewer_copies_are_the_first_of_more(
    members: dict[str, int], keys: list[RunKey], copies: int
) -> None:
    placement = Placement(members)
    for key in keys:
        homes = placement.homes(key, copies)
        assert len(homes) == len(set(homes)) == min(copies, len(members))
        assert homes[:1] == placement.homes(key)
        assert homes == Placement(members).homes(key, COPIES_MAX)[:copies]


@settings(max_examples=examples(100))
@given(memberships, st.lists(run_keys, min_size=1, max_size=20), st.randoms())
def test_nodes_with_the_same_view_agree_in_whatever_order_they_learnt_it(
    members: dict[str, int], keys: list[RunKey], order: random.Random
) -> None:
    shuffled = [*members]
    order.shuffle(shuffled)
    other = Placement({name: members[name] for name in shuffled})
    assert [Placement(members).homes(key, 3) for key in keys] == [other.homes(key, 3) for key in keys]


@settings(max_examples=examples(100))
@given(memberships, names, st.integers(1, 1 << 50), st.lists(run_keys, min_size=1, max_size=30))
def test_a_member_that_joins_takes_runs_and_moves_none_between_others(
    members: dict[str, int], joining: str, capacity: int, keys: list[RunKey]
) -> None:
    members.pop(joining, None)
    before, after = Placement(members), Placement({**members, joining: capacity})
    for key in keys:
        old, new = before.homes(key, 3), after.homes(key, 3)
        kept = [name for name in new if name != joining]
        assert list(old[: len(kept)]) == kept, "and so, read backwards, one that leaves gives its own to the next"


def test_a_member_that_leaves_moves_its_own_share_alone() -> None:
    members = {f"n{number}": 64 * GIB for number in range(20)}
    before = Placement(members)
    del members["n7"]
    after = Placement(members)
    keys = keys_of(20_000)
    moved = [key for key in keys if before.homes(key) != after.homes(key)]
    assert all(before.homes(key) == ("n7",) for key in moved)
    assert len(moved) / len(keys) == pytest.approx(1 / 20, rel=0.15)
    heirs = Counter(after.homes(key)[0] for key in moved)
    assert max(heirs.values()) < 2.2 * len(moved) / 19, "its share is spread over all others"


def test_shares_follow_capacity() -> None:
    members = {"small": 16 * GIB, "middle": 64 * GIB, "large": 256 * GIB, "other": 100 * GIB}
    placement = Placement(members)
    count = Counter(placement.homes(key)[0] for key in keys_of(40_000))
    for name, capacity in members.items():
        assert count[name] / 40_000 == pytest.approx(capacity / sum(members.values()), rel=0.08)
        assert placement.share_of(name) == pytest.approx(capacity / sum(members.values()), rel=0.06)


def test_more_capacity_takes_runs_and_gives_none() -> None:
    members = {f"n{number}": 64 * GIB for number in range(8)}
    before, after = Placement(members), Placement({**members, "n3": 128 * GIB})
    for key in keys_of(5000):
        if before.homes(key) != after.homes(key):
            assert after.homes(key) == ("n3",)


def test_second_homes_are_balanced_too() -> None:
    placement = Placement({f"n{number}": GIB for number in range(10)})
    second = Counter(placement.homes(key, 2)[1] for key in keys_of(20_000))
    assert max(second.values()) < 1.12 * 2000
    assert min(second.values()) > 0.88 * 2000


def test_a_capacity_that_changes_a_little_moves_nothing() -> None:
    # 100 GiB lie amid the capacities of one weight.
    assert weight_of(100 * GIB) == weight_of(100 * GIB + 4097) == weight_of(101 * GIB)
    assert weight_of(100 * GIB) != weight_of(110 * GIB)


@given(st.integers(1, 1 << 60))
def test_a_weight_is_the_capacity_within_3_percent(capacity_bytes: int) -> None:
    assert weight_of(capacity_bytes) == pytest.approx(capacity_bytes, rel=0.0323)


def test_homes_are_what_they_have_always_been_in_every_process() -> None:
    # Nodes of two versions form one pool: whoever changes this changes the protocol.
    script = (
        "from kvstore.placement import Placement\n"
        "placement = Placement({f'n{number}': (1 + number) << 30 for number in range(6)})\n"
        "print(*(name for key in range(12) for name in placement.homes(key * 2**59, 2)))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    (homes,) = printed
    assert hashlib.sha256(homes.encode()).hexdigest()[:16] == "336cb626b62c0ecb"


def test_nobody_is_home_in_an_empty_pool() -> None:
    assert Placement({}).homes(RunKey(1), 2) == ()
    assert len(Placement({})) == 0


@pytest.mark.parametrize("copies", [0, -1, COPIES_MAX + 1])
def test_a_number_of_copies_out_of_range_is_refused(copies: int) -> None:
    with pytest.raises(UsageError, match="1 to 8"):
        Placement({"a": 1}).homes(RunKey(1), copies)


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_member_without_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(UsageError, match="positive"):
        Placement({"a": capacity})
