"""Which worker takes a leg: less load, more of the prompt, the session's own among equals."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.balance import TIE_PART, cached_worth, choose_decode, choose_prefill, home_of
from kvproxy.types import View


def worker(
    key: str, *, pending: int = 0, blocks: int = 0, cached: Mapping[str, int] | None = None, speed: float = 1000.0
) -> View:
    return View(key, 0, pending, blocks, cached or {}, speed)


keys = st.text("abcdefgh", min_size=1, max_size=4)
fleets = st.lists(keys, min_size=1, max_size=8, unique=True).flatmap(
    lambda names: st.tuples(
        *(
            st.builds(
                worker,
                st.just(name),
                pending=st.integers(0, 10_000),
                blocks=st.integers(0, 10_000),
                cached=st.dictionaries(st.sampled_from(["cpu", "ssd", "remote", "other"]), st.integers(0, 50_000)),
                speed=st.floats(1, 1e5),
            )
            for name in names
        )
    )
)
sessions = st.sampled_from(["", "one", "two"])


@given(fleets, sessions, st.integers(0, 1000))
def test_only_what_was_handed_in_is_chosen_and_the_same_draw_gives_the_same(
    fleet: tuple[View, ...], session: str, seed: int
) -> None:
    for choose in (choose_prefill, choose_decode):
        chosen = choose(fleet, random.Random(seed), session=session)
        assert chosen in fleet
        assert choose(fleet, random.Random(seed), session=session) is chosen


@given(fleets, sessions, st.integers(0, 1000))
def test_the_busiest_of_several_is_never_chosen(fleet: tuple[View, ...], session: str, seed: int) -> None:
    busiest = worker("busiest", pending=10**9, blocks=10**9, speed=1.0)
    for choose in (choose_prefill, choose_decode):
        assert choose((*fleet, busiest), random.Random(seed), session=session) is not busiest


@pytest.mark.parametrize("seed", range(20))
def test_of_two_the_sooner_empty_p_is_chosen_not_the_one_with_fewer_tokens(seed: int) -> None:
    slow, fast = worker("slow", pending=1000, speed=100), worker("fast", pending=5000, speed=1000)
    assert choose_prefill([slow, fast], random.Random(seed)) is fast


def test_two_choices_keep_loads_close_where_one_choice_does_not() -> None:
    draw = random.Random(7)

    def spread(choices: int) -> int:
        loads = Counter({str(number): 0 for number in range(20)})
        for _ in range(4000):
            views = [worker(key, pending=load) for key, load in loads.items()]
            chosen = draw.choice(views) if choices == 1 else choose_prefill(views, draw)
            loads[chosen.key] += 1
        return max(loads.values()) - min(loads.values())

    assert spread(2) * 2 < spread(1)


def test_a_herd_of_choices_on_the_same_loads_goes_to_several_workers() -> None:
    views = [worker(str(number), pending=number) for number in range(10)]
    draw = random.Random(3)
    chosen = Counter(choose_prefill(views, draw).key for _ in range(100))
    assert len(chosen) > 5


def test_the_d_that_holds_the_prompt_is_found_among_many() -> None:
    views = [worker(str(number), blocks=50) for number in range(50)]
    views[33] = replace(views[33], cached_tokens={"cpu": 4000})
    for seed in range(20):
        assert choose_decode(views, random.Random(seed)) is views[33]
        assert choose_decode(views, random.Random(seed), session="s") is views[33]


def test_a_cached_prefix_is_worth_its_tokens_and_no_more() -> None:
    holder, idle = worker("holder", blocks=1000, cached={"cpu": 1600}), worker("idle")  # 100 blocks of 16 tokens
    assert choose_decode([holder, idle], random.Random(0)) is idle
    assert choose_decode([replace(holder, active_blocks=50), idle], random.Random(0)).key == "holder"


def test_a_faster_tier_is_worth_more() -> None:
    for seed in range(10):
        in_memory, on_disk = worker("m", cached={"cpu": 3200}), worker("d", cached={"ssd": 3200})
        assert choose_decode([on_disk, in_memory], random.Random(seed)) is in_memory
    assert cached_worth({"cpu": 100, "ssd": 100}) == cached_worth({"cpu": 100})
    assert cached_worth({"cpu": 100}) < cached_worth({"cpu": 100, "ssd": 200}) < cached_worth({"cpu": 200})
    assert cached_worth({}) == 0


@given(st.lists(keys, min_size=2, max_size=8, unique=True), st.integers(0, 100))
def test_among_equals_a_session_stays_where_it_is(names: list[str], seed: int) -> None:
    views = [worker(name, pending=100, blocks=100) for name in names]
    for choose in (choose_prefill, choose_decode):
        chosen = {choose(views, random.Random(seed + number), session="s").key for number in range(10)}
        assert chosen == {home_of(views, "s").key}


@given(st.lists(keys, min_size=3, max_size=8, unique=True))
def test_a_session_moves_only_when_its_own_worker_goes(names: list[str]) -> None:
    views = [worker(name) for name in names]
    home = home_of(views, "s")
    for gone in views:
        left = [view for view in views if view is not gone]
        assert (home_of(left, "s") is home) == (gone is not home)


@given(fleets, st.integers(0, 1000))
def test_a_session_never_pays_more_than_a_tie_for_its_own_worker(fleet: tuple[View, ...], seed: int) -> None:
    pair = fleet[:2]
    chosen = choose_prefill(pair, random.Random(seed), session="s")
    loads = [view.pending_tokens / view.tokens_per_s for view in pair]
    assert chosen.pending_tokens / chosen.tokens_per_s - min(loads) <= TIE_PART * max(loads)


def test_sessions_are_spread_over_all_workers() -> None:
    views = [worker(str(number)) for number in range(8)]
    homes = Counter(home_of(views, f"session {number}").key for number in range(800))
    assert set(homes) == {view.key for view in views}
    assert max(homes.values()) < 3 * min(homes.values())
