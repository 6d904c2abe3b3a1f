"""Eviction policies against plain models of themselves, and on an excerpt of a recorded trace."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.policy import EXCERPT, FirstInFirstOut, Request, belady, read_trace, replay
from kvstore.policy import POLICIES, LeastRecentlyUsed, Policy, ReuseClasses
from kvstore.policy.ghosts import COUNT_MAX, Ghosts
from kvstore.policy.queues import RowQueues
from kvstore.policy.returns import FOLLOWED_MAX, Returns, age_bin, best_ratios, bin_start, chances_of_return
from kvstore.policy.reuse import SAME_USE_TICKS
from tests.core.scale import examples

LANES = 3
ROWS = 24
KEYS = 40


def hash_of(key: int) -> bytes:
    return hashlib.sha256(key.to_bytes(4, "little")).digest()


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    """Return a new policy, each kind in turn."""
    return POLICIES[request.param]()


def admit(policy: Policy, row: int, lane: int = 0, now: int = 0, uses: int = 0) -> None:
    policy.admit(row, lane, now, 0, hash_of(row), uses)


# ---- what every policy keeps


def test_rows_are_named_once_each_in_their_own_lane_until_they_are_removed(policy: Policy) -> None:
    for row in range(9):
        admit(policy, row, lane=row % 3, now=row)
    policy.remove(4)
    assert sorted(policy.coldest(0)) == [0, 3, 6]
    assert sorted(policy.coldest(1)) == [1, 7]
    assert list(policy.coldest(17)) == []
    assert 3 in policy
    assert 4 not in policy
    assert 1_000_000 not in policy
    policy.check_integrity()


def test_with_nothing_learnt_the_block_unused_longest_goes_first(policy: Policy) -> None:
    for row in range(6):
        admit(policy, row, now=row * 10)
    assert list(policy.coldest(0)) == [0, 1, 2, 3, 4, 5]
    ranks = [policy.rank(row) for row in range(6)]
    assert ranks == sorted(ranks)


def test_of_rows_given_coldest_first_the_first_goes_first(policy: Policy) -> None:
    policy.admit_many([5, 2, 9], 0, 100, 0, [hash_of(key) for key in (5, 2, 9)])
    assert list(policy.coldest(0)) == [5, 2, 9]


def test_what_a_restart_found_keeps_its_order_and_can_be_used_and_removed(policy: Policy) -> None:
    policy.restore(range(100, 1100), 1, 7, 0, [hash_of(key) for key in range(1000)])
    policy.restore([], 1, 7, 0, [])
    assert list(policy.coldest(1)) == list(range(100, 1100))
    policy.use(100, 5000)
    assert list(policy.coldest(1)) == [*range(101, 1100), 100]
    policy.remove(101)
    assert policy.last_use(100) == 5000
    assert policy.last_use(102) == 7
    policy.check_integrity()


def test_a_renewed_row_is_as_recent_as_a_used_one(policy: Policy) -> None:
    for row in range(4):
        admit(policy, row, now=row)
    policy.renew(1, 50, 0)
    assert policy.last_use(1) == 50
    assert list(policy.coldest(0)) == [0, 2, 3, 1]


def test_rows_used_again_at_once_in_the_same_order_change_nothing(policy: Policy) -> None:
    for row in range(6):
        admit(policy, row, now=1)
    policy.use_many([3, 4, 5], 2)
    policy.use_many([3, 4, 5], 2)
    assert list(policy.coldest(0)) == [0, 1, 2, 3, 4, 5]
    policy.use_many([1, 0], 3)
    assert list(policy.coldest(0)) == [2, 3, 4, 5, 1, 0]
    policy.use_many([], 3)


def test_a_prefix_used_tail_first_loses_its_tail_first(policy: Policy) -> None:
    prefix = [3, 0, 7, 5]
    for row in prefix:
        admit(policy, row, now=1)
    policy.use_many(prefix[::-1], 2)
    assert list(policy.coldest(0)) == prefix[::-1]


def test_a_prefix_in_several_requests_loses_its_tail_first(policy: Policy) -> None:
    prefix = list(range(12))
    for part in (prefix[:4], prefix[4:8], prefix[8:]):
        policy.admit_many(part[::-1], 0, 5, 0, [hash_of(row) for row in part[::-1]])
        if part[0]:
            policy.put_behind(part[::-1], part[0] - 1)
    assert list(policy.coldest(0)) == prefix[::-1]
    admit(policy, 50, now=70)  # another request comes between its windows
    for part in (prefix[:4], prefix[4:8], prefix[8:]):
        now = 700 + part[0]
        policy.use_many(part[::-1], now)
        if part[0]:
            policy.put_behind(part[::-1], part[0] - 1)
        if not part[0]:
            admit(policy, 51, now=now)
    order = list(policy.coldest(0))
    assert order.index(50) < order.index(11), "the prompt was used since, all of it"
    assert [row for row in order if row in prefix] == prefix[::-1]
    assert {policy.last_use(row) for row in prefix} == {700}, "all of it when its head was"
    policy.check_integrity()


def test_what_is_of_no_use_goes_first(policy: Policy) -> None:
    for row in range(4):
        admit(policy, row, now=row)
    policy.admit_many([8, 7], 0, 9, 0, [hash_of(8), hash_of(7)])
    policy.put_behind([8, 7], None)
    assert list(policy.coldest(0)) == [8, 7, 0, 1, 2, 3]
    ranks = [policy.rank(row) for row in policy.coldest(0)]
    assert ranks == sorted(ranks)
    policy.put_behind([8, 7, 0, 1, 2, 3], None)  # there are no others
    policy.put_behind([2], 2)
    assert list(policy.coldest(0)) == [8, 7, 0, 1, 2, 3]
    policy.check_integrity()


# ---- models


class PolicyMachine(RuleBasedStateMachine):
    """Calls in any legal order; a subclass says in which order rows should be named."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.now = 0
        self.lane_of: dict[int, int] = {}

    def admitted(self, row: int, lane: int, key: int, uses: int) -> None:
        raise NotImplementedError

    def used(self, row: int, *, counted: bool, uses: int) -> None:
        raise NotImplementedError

    def put(self, rows: list[int], anchor: int | None) -> None:
        raise NotImplementedError

    def removed(self, row: int) -> None:
        raise NotImplementedError

    def expected(self, lane: int) -> Iterator[int]:
        raise NotImplementedError

    @rule(ticks=st.sampled_from([1, 7, SAME_USE_TICKS - 1, SAME_USE_TICKS, 5000]))
    def time_passes(self, ticks: int) -> None:
        self.now += ticks

    @rule(
        row=st.integers(0, ROWS - 1),
        lane=st.integers(0, LANES - 1),
        key=st.integers(0, KEYS),
        uses=st.integers(0, 9),
    )
    def admit(self, row: int, lane: int, key: int, uses: int) -> None:
        if row not in self.lane_of:
            self.policy.admit(row, lane, self.now, 1, hash_of(key), uses)
            self.lane_of[row] = lane
            self.admitted(row, lane, key, uses)

    @rule(
        rows=st.lists(st.integers(0, ROWS - 1), max_size=5, unique=True),
        lane=st.integers(0, LANES - 1),
        first_key=st.integers(0, KEYS),
    )
    def admit_many(self, rows: list[int], lane: int, first_key: int) -> None:
        new = [row for row in rows if row not in self.lane_of]
        keys = range(first_key, first_key + len(new))
        self.policy.admit_many(new, lane, self.now, 1, [hash_of(key) for key in keys])
        for row, key in zip(new, keys, strict=True):
            self.lane_of[row] = lane
            self.admitted(row, lane, key, 0)

    @rule(rows=st.lists(st.integers(0, ROWS - 1), max_size=6), together=st.booleans())
    def use(self, rows: list[int], together: bool) -> None:
        there = [row for row in rows if row in self.lane_of]
        if together:
            self.policy.use_many(there, self.now)
        else:
            for row in there:
                self.policy.use(row, self.now)
        for row in there:
            self.used(row, counted=True, uses=0)

    @precondition(lambda self: self.lane_of)
    @rule(pick=st.integers(0, ROWS), uses=st.integers(0, 9))
    def renew(self, pick: int, uses: int) -> None:
        row = sorted(self.lane_of)[pick % len(self.lane_of)]
        self.policy.renew(row, self.now, uses)
        self.used(row, counted=False, uses=uses)

    @precondition(lambda self: self.lane_of)
    @rule(picks=st.lists(st.integers(0, ROWS), min_size=1, max_size=5), pick=st.none() | st.integers(0, ROWS))
    def put_behind(self, picks: list[int], pick: int | None) -> None:
        there = sorted(self.lane_of)
        anchor = None if pick is None else there[pick % len(there)]
        lane = self.lane_of[there[picks[0] % len(there)] if anchor is None else anchor]
        rows = [row for row in dict.fromkeys(there[each % len(there)] for each in picks) if self.lane_of[row] == lane]
        self.policy.use_many(rows, self.now)
        for row in rows:
            self.used(row, counted=True, uses=0)
        if rows:
            self.policy.put_behind(rows, anchor)
            self.put(rows, anchor)

    @precondition(lambda self: self.lane_of)
    @rule(pick=st.integers(0, ROWS), coldest=st.booleans())
    def remove(self, pick: int, coldest: bool) -> None:
        row = sorted(self.lane_of)[pick % len(self.lane_of)]
        if coldest:
            row = next(self.policy.coldest(self.lane_of[row]))
        self.policy.remove(row)
        del self.lane_of[row]
        self.removed(row)

    @invariant()
    def rows_are_named_in_the_order_of_the_model(self) -> None:
        self.policy.check_integrity()
        for lane in range(LANES):
            assert list(self.policy.coldest(lane)) == list(self.expected(lane))
        for row in range(ROWS):
            assert (row in self.policy) == (row in self.lane_of)


def moved(last_use: dict[int, int], lane: list[int], rows: list[int], anchor: int | None) -> dict[int, int]:
    """Return the order of use after `rows` of a `lane`, given in order, were put before `anchor`, or first of all."""
    if anchor is None:
        anchor = lane[0]
    if anchor in rows or anchor not in lane:
        return last_use
    order: dict[int, int] = {}
    for row, used in last_use.items():
        if row == anchor:
            order.update(dict.fromkeys(rows, used))
        if row not in rows:
            order[row] = used
    return order


class LruMachine(PolicyMachine):
    """One dict in the order of use."""

    def __init__(self) -> None:
        super().__init__(LeastRecentlyUsed())
        self.last_use: dict[int, int] = {}

    def admitted(self, row: int, lane: int, key: int, uses: int) -> None:
        self.last_use[row] = self.now

    def used(self, row: int, *, counted: bool, uses: int) -> None:
        del self.last_use[row]
        self.last_use[row] = self.now

    def put(self, rows: list[int], anchor: int | None) -> None:
        self.last_use = moved(self.last_use, list(self.expected(self.lane_of[rows[0]])), rows, anchor)

    def removed(self, row: int) -> None:
        del self.last_use[row]

    def expected(self, lane: int) -> Iterator[int]:
        return (row for row in self.last_use if self.lane_of[row] == lane)

    @invariant()
    def last_uses_are_known(self) -> None:
        assert all(self.policy.last_use(row) == used == self.policy.rank(row) for row, used in self.last_use.items())


class ReuseMachine(PolicyMachine):
    """Rows by class in the order of use; the front row that is worth least goes first."""

    def __init__(self) -> None:
        self.reuse = ReuseClasses()
        super().__init__(self.reuse)
        self.last_use: dict[int, int] = {}
        self.counted_at: dict[int, int] = {}
        self.reuses: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.remembered: dict[int, int] = {}
        self.told_at = 0  # the time as the policy knows it

    def admitted(self, row: int, lane: int, key: int, uses: int) -> None:
        self.key_of[row] = key
        self.reuses[row] = min(4, max(uses, self.remembered.get(key, 0)))
        self.last_use[row] = self.counted_at[row] = self.told_at = self.now

    def used(self, row: int, *, counted: bool, uses: int) -> None:
        del self.last_use[row]
        self.last_use[row] = self.told_at = self.now
        if not counted:
            self.reuses[row] = min(4, max(uses, self.reuses[row]))
            self.counted_at[row] = self.now
        elif self.now - self.counted_at[row] >= SAME_USE_TICKS:
            self.reuses[row] = min(4, self.reuses[row] + 1)
            self.counted_at[row] = self.now

    def put(self, rows: list[int], anchor: int | None) -> None:
        for number in range(4):
            own = [row for row in rows if self.class_of(row) == number]
            lane = [r for r in self.last_use if self.lane_of[r] == self.lane_of[rows[0]] and self.class_of(r) == number]
            if own:
                self.last_use = moved(self.last_use, lane, own, anchor)

    def removed(self, row: int) -> None:
        self.remembered[self.key_of.pop(row)] = self.reuses.pop(row) + 1
        del self.last_use[row], self.counted_at[row]

    def expected(self, lane: int) -> Iterator[int]:
        fronts = [
            [row for row in self.last_use if self.lane_of[row] == lane and self.class_of(row) == number]
            for number in range(4)
        ]
        while any(fronts):
            front = min((rows for rows in fronts if rows), key=lambda rows: self.worth(rows[0]))
            yield front.pop(0)

    def class_of(self, row: int) -> int:
        return (0, 1, 2, 2, 3)[self.reuses[row]]

    def worth(self, row: int) -> tuple[float, int, int]:
        age = self.told_at - self.last_use[row]
        return self.reuse.returns.worth[self.class_of(row)][age_bin(age)], self.last_use[row], self.class_of(row)

    @invariant()
    def ranks_are_what_rows_are_worth(self) -> None:
        assert all(self.policy.rank(row) == self.worth(row)[0] for row in self.last_use)


TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestReuseMachine = ReuseMachine.TestCase
TestReuseMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


class QueuesMachine(RuleBasedStateMachine):
    """Row queues against lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = RowQueues()
        self.lists: list[list[int]] = [[] for _ in range(3)]
        for _ in self.lists:
            self.queues.new_queue()

    def queue_of(self, row: int) -> int | None:
        return next((number for number, rows in enumerate(self.lists) if row in rows), None)

    @rule(first=st.integers(0, 30), count=st.integers(1, 6), queue=st.integers(0, 2), adjacent=st.booleans())
    def append(self, first: int, count: int, queue: int, adjacent: bool) -> None:
        rows: Sequence[int] = range(first, first + count)
        if any(self.queue_of(row) is not None for row in rows):
            return
        if not adjacent:
            rows = list(rows)[::-1]
        if count == 1:
            self.queues.append(rows[0], queue)
        else:
            self.queues.append_many(rows, queue)
        self.lists[queue] += rows

    @rule(row=st.integers(0, 40))
    def remove(self, row: int) -> None:
        queue = self.queue_of(row)
        if queue is not None:
            assert self.queues.remove(row) == queue
            self.lists[queue].remove(row)

    @rule(row=st.integers(0, 40))
    def refresh(self, row: int) -> None:
        queue = self.queue_of(row)
        if queue is not None:
            self.queues.refresh(row)
            self.lists[queue].remove(row)
            self.lists[queue].append(row)

    @rule(queue=st.integers(0, 2), picks=st.lists(st.integers(0, 9), min_size=1), anchor=st.integers(-1, 30))
    def move_before(self, queue: int, picks: list[int], anchor: int) -> None:
        own = self.lists[queue]
        rows = list(dict.fromkeys(own[pick % len(own)] for pick in picks)) if own else []
        if not rows or (anchor >= 0 and self.queue_of(anchor) is None):
            return
        target = anchor if anchor >= 0 else own[0]
        moved_to = self.queues.move_before(rows, None if anchor < 0 else anchor)
        if target in rows or target not in own:
            assert moved_to is None
            return
        assert moved_to == target
        left = [row for row in own if row not in rows]
        at = left.index(target)
        self.lists[queue] = [*left[:at], *rows, *left[at:]]

    @rule(queue=st.integers(0, 2), count=st.integers(1, 5), shuffled=st.booleans())
    def look_at_the_end(self, queue: int, count: int, shuffled: bool) -> None:
        rows = self.lists[queue][-count:]
        asked = rows[::-1] if shuffled else rows
        assert self.queues.ends_with(asked) == (asked == rows)

    @invariant()
    def holds_the_same_rows(self) -> None:
        self.queues.check_integrity()
        assert [list(self.queues.from_oldest(queue)) for queue in range(3)] == self.lists
        assert all((row in self.queues) == (self.queue_of(row) is not None) for row in range(45))


TestQueuesMachine = QueuesMachine.TestCase
TestQueuesMachine.settings = settings(max_examples=examples(40), stateful_step_count=40)


# ---- reuse: what it learns


def test_uses_of_one_request_count_once() -> None:
    policy = ReuseClasses()
    for row in (0, 1):
        admit(policy, row)
    for now in range(1, SAME_USE_TICKS):
        policy.use(0, now)  # a fetch, a store that finds it present, ...
    policy.use(1, SAME_USE_TICKS)
    policy.remove(0)
    policy.remove(1)
    admit(policy, 0, now=1000)
    admit(policy, 1, now=1000)
    for _ in range(2):  # each came back once: 0 is in class 1 now, and 1 in class 2, which takes one more
        policy.returns.worth[1][:] = [5.0] * len(policy.returns.worth[1])
        policy.returns.worth[2][:] = [1.0] * len(policy.returns.worth[2])
        assert list(policy.coldest(0)) == [1, 0]
        assert (policy.rank(0), policy.rank(1)) == (5.0, 1.0)


def test_a_block_that_comes_back_is_known_again_and_one_of_another_namespace_is_not() -> None:
    policy = ReuseClasses()
    policy.admit(0, 0, 0, 7, hash_of(1), 0)
    policy.remove(0)
    policy.admit(0, 0, 1000, 7, hash_of(1), 0)
    policy.admit(1, 0, 1000, 8, hash_of(1), 0)
    policy.returns.worth[0][:] = [1.0] * len(policy.returns.worth[0])
    policy.returns.worth[1][:] = [2.0] * len(policy.returns.worth[1])
    assert (policy.rank(0), policy.rank(1)) == (2.0, 1.0)


def scan_with_hot_set(make: type[Policy], capacity: int) -> float:
    """Return the hit rate where ten blocks come back every 50 requests among blocks that never do."""
    hot = itertools.cycle(range(10))
    requests: list[Request] = []
    for number in range(6000):
        block = next(hot) if number % 5 == 0 else 100 + number
        requests.append(Request(number * 100, [block]))
    return replay(requests, capacity, make())


def test_a_scan_does_not_push_out_what_comes_back() -> None:
    assert scan_with_hot_set(LeastRecentlyUsed, 30) < 0.01
    assert scan_with_hot_set(ReuseClasses, 30) > 0.15  # of 0.2


def test_what_stops_coming_back_is_let_go() -> None:
    requests = [Request(number * 50, [number % 20]) for number in range(2000)]
    requests += [Request((2000 + number) * 50, [1000 + number % 20]) for number in range(2000)]
    assert replay(requests, 20, ReuseClasses()) > 0.97


@pytest.mark.parametrize("age", [*range(40), 1000, 2**20, 2**31, 2**32 - 1])
def test_an_age_lies_in_its_bin(age: int) -> None:
    number = age_bin(age)
    assert bin_start(number) <= age
    assert age < bin_start(number + 1) or number == age_bin(2**32 - 1)
    assert age_bin(-1) == 0


def test_bins_are_ascending_and_adjacent() -> None:
    starts = [bin_start(number) for number in range(64)]
    assert starts == sorted(set(starts))
    assert [age_bin(start) for start in starts] == list(range(64))


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0, 1), min_size=64, max_size=64))
def test_the_index_is_the_best_ratio_over_all_spans(chances: list[float]) -> None:
    widths = [bin_start(number + 1) - bin_start(number) for number in range(64)]
    indices = best_ratios(chances)
    for start in range(0, 64, 9):
        surviving, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for chance, width in zip(chances[start:], widths[start:], strict=True):
            hits += surviving * chance
            time += surviving * (1 - chance / 2) * width
            surviving *= 1 - chance
            best = max(best, hits / time)
        assert indices[start] == pytest.approx(best, rel=1e-9)


def test_intervals_still_running_count_for_the_ages_they_have_reached() -> None:
    returned, unfinished = [0.0] * 64, [0.0] * 64
    returned[20] = 100.0
    unfinished[10] = 900.0  # these have not reached bin 20 yet: they say nothing against a return there
    assert chances_of_return(returned, unfinished)[20] == pytest.approx(0.99, abs=0.02)
    unfinished[10], unfinished[30] = 0.0, 900.0
    assert chances_of_return(returned, unfinished)[20] == pytest.approx(0.1, abs=0.01)


def test_a_class_of_which_little_is_known_is_taken_for_an_average_one() -> None:
    average = [0.25] * 64
    nothing = [0.0] * 64
    assert chances_of_return(nothing, nothing, average) == pytest.approx(average)


def test_ages_at_which_blocks_come_back_are_worth_more_than_those_behind() -> None:
    returns = Returns(2)
    for number in range(4000):
        returns.note_use(number, 0, number)
        if number >= 100:
            returns.note_use(number - 100, 0, number)  # each comes back after 100 ticks
        returns.note_use(10_000_000 + number, 1, number)  # these never do
    before, behind = returns.worth[0][age_bin(60)], returns.worth[0][age_bin(200)]
    assert before > 4 * behind
    assert before > 4 * returns.worth[1][age_bin(60)]


def test_a_change_of_load_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.policy.returns._HALF_LIFE", 2000)
    returns = Returns(2)
    for number in range(40_000):
        comes_back, does_not = (0, 1) if number < 20_000 else (1, 0)
        returns.note_use(1, comes_back, number * 10)  # one key, again and again
        returns.note_use(100 + number, does_not, number * 10)
        if number in (19_999, 39_999):
            assert returns.worth[comes_back][0] > 2 * returns.worth[does_not][0]


def test_the_sample_stays_small_and_keeps_its_keys_as_it_thins_out() -> None:
    returns = Returns(1)
    for blocks in range(1, 200_000, 37):
        returns.fit(blocks)
        identity = blocks * 0x9E3779B1 & 0xFFFFFFFF
        if returns.follows(identity):
            returns.note_use(identity, 0, blocks)
        assert len(returns) <= FOLLOWED_MAX + 512
    assert len(returns) > 10
    assert sum(returns.follows(identity) for identity in range(1 << 16)) <= (1 << 16) // 64


def test_no_more_keys_are_followed_than_the_limit() -> None:
    returns = Returns(1)
    for identity in range(4 * FOLLOWED_MAX):
        returns.note_use(identity, 0, identity)
    assert FOLLOWED_MAX <= len(returns) <= FOLLOWED_MAX + 512


# ---- reuse: what it remembers


def identities(count: int, salt: int = 0) -> list[int]:
    """Return well-mixed 32-bit numbers."""
    return [int.from_bytes(hash_of(number)[salt : salt + 4], "little") for number in range(count)]


def test_blocks_are_remembered_in_the_order_in_which_they_left() -> None:
    ghosts = Ghosts()
    left = identities(100_000)
    for identity in left:
        ghosts.note(identity, 3, rows=10_000)
    remembered = [ghosts.recall(identity) == 3 for identity in left]
    assert all(remembered[-20_000:])
    assert sum(remembered[:20_000]) < 50  # forgotten, but for chance


def test_the_last_count_is_the_one_that_is_known() -> None:
    ghosts = Ghosts()
    ghosts.note(5, 1, rows=1)
    for identity in identities(20_000):
        ghosts.note(identity, 2, rows=1)
    ghosts.note(5, 4, rows=1)
    assert ghosts.recall(5) == 4
    ghosts.note(5, 100, rows=1)
    assert ghosts.recall(5) == COUNT_MAX


def test_few_blocks_are_taken_for_others() -> None:
    ghosts = Ghosts()
    for identity in identities(30_000):
        ghosts.note(identity, 1, rows=10)
    mistaken = sum(ghosts.recall(identity) > 0 for identity in identities(20_000, salt=8))
    assert mistaken < 40


def test_what_is_remembered_takes_at_most_32_bytes_a_row() -> None:
    ghosts = Ghosts()
    rows = 100_000
    for identity in range(0, 6 * rows * 7919, 7919):
        ghosts.note(identity & 0xFFFFFFFF, 1, rows)
    assert ghosts.size_bytes <= 32 * rows


# ---- a recorded trace


@pytest.fixture(scope="module")
def trace() -> list[Request]:
    """Return the excerpt of a recorded trace."""
    return read_trace(EXCERPT)


@pytest.mark.parametrize(
    ("capacity", "fifo", "lru", "bound"), [(1305, 0.0426, 0.0426, 0.1646), (5220, 0.0946, 0.0990, 0.1741)]
)
def test_the_excerpt_gives_the_same_rates_everywhere(
    trace: list[Request], capacity: int, fifo: float, lru: float, bound: float
) -> None:
    assert replay(trace, capacity, FirstInFirstOut()) == pytest.approx(fifo, abs=5e-5)
    assert replay(trace, capacity, LeastRecentlyUsed()) == pytest.approx(lru, abs=5e-5)
    assert belady(trace, capacity) == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize("capacity", [326, 1305, 2610])
def test_reuse_classes_serve_more_of_the_excerpt_than_lru_where_room_is_scarce(
    trace: list[Request], capacity: int
) -> None:
    by_class, by_use = replay(trace, capacity, ReuseClasses()), replay(trace, capacity, LeastRecentlyUsed())
    assert by_use * 1.1 < by_class < belady(trace, capacity)


def test_nothing_is_evicted_where_all_of_the_trace_fits(trace: list[Request]) -> None:
    unique = len({block for request in trace for block in request.blocks})
    rates = {replay(trace, unique, make()) for make in POLICIES.values()}
    assert rates == {belady(trace, unique)}
