"""The fair queue: who comes next, who is refused, and what cancellation leaves behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvproxy.fairness import CLOSING, QUEUE_FULL, SHARE_FULL, WAITED, FairQueue, Refused, caller_of
from kvstore.errors import BadSetting

FOREVER_S = 1e6


class Request:
    """A request that stays in its place until it is told to end."""

    def __init__(self, queue: FairQueue, key: str, cost: float = 1.0, deadline_s: float = float("inf")) -> None:
        self.key = key
        self.cost = cost
        self.end = asyncio.Event()
        self.is_running = False
        self._queue = queue
        self._deadline_s = deadline_s
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async with self._queue.admit(self.key, self.cost, self._deadline_s):
            self.is_running = True
            try:
                await self.end.wait()
            finally:
                self.is_running = False

    async def refused(self) -> Refused:
        with pytest.raises(Refused) as caught:
            await self.task
        return caught.value


async def settled() -> None:
    """Let everything that is due on the loop happen."""
    for _ in range(5):
        await asyncio.sleep(0)


def queue_of(
    running_max: int = 1, waiting_max: int = 16, share_max: int | None = 16, waiting_s_max: float = FOREVER_S
) -> FairQueue:
    now_s = asyncio.get_running_loop().time
    return FairQueue(
        now_s, running_max=running_max, waiting_max=waiting_max, waiting_s_max=waiting_s_max, share_max=share_max
    )


async def ended(queue: FairQueue, *requests: Request) -> None:
    """End all requests, and see that the queue is as empty as at first."""
    for request in requests:
        request.end.set()
    await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
    assert (queue.running, queue.waiting) == (0, 0)
    assert queue.check_integrity() == []


def run(steps: Coroutine[Any, Any, None]) -> None:
    async def within_limits() -> None:
        async with asyncio.timeout(60):
            await steps

    asyncio.run(within_limits())


def test_whoever_finds_a_place_free_goes_at_once_and_the_others_wait() -> None:
    async def steps() -> None:
        queue = queue_of(running_max=2)
        requests = [Request(queue, "a") for _ in range(3)]
        await settled()
        assert [request.is_running for request in requests] == [True, True, False]
        requests[0].end.set()
        await settled()
        assert requests[2].is_running
        await ended(queue, *requests)

    run(steps())


def test_a_single_request_is_not_behind_the_hundred_of_another_caller() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=200, share_max=200)
        first, *crowd = [Request(queue, "crowd") for _ in range(100)]
        await settled()
        single = Request(queue, "single")
        await settled()
        while not single.is_running:
            (running,) = [request for request in (first, *crowd) if request.is_running]
            running.end.set()
            await settled()
        assert sum(request.task.done() for request in (first, *crowd)) <= 2
        await ended(queue, first, *crowd, single)

    run(steps())


@given(
    costs=st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.floats(1, 1000), min_size=3, max_size=12), min_size=2, max_size=4
    )
)
def test_callers_that_all_wait_are_served_alike_by_cost(costs: Mapping[str, list[float]]) -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=1000, share_max=1000)
        blocker = Request(queue, "blocker")
        await settled()
        requests = [Request(queue, key, cost) for key, many in costs.items() for cost in many]
        await settled()
        blocker.end.set()
        served = dict.fromkeys(costs, 0.0)
        left = {key: len(many) for key, many in costs.items()}
        largest = max(itertools.chain(*costs.values()))
        while min(left.values()):  # as long as all of them have something waiting or running
            await settled()
            (running,) = [request for request in requests if request.is_running]
            served[running.key] += running.cost
            left[running.key] -= 1
            running.end.set()
            assert max(served.values()) - min(served.values()) <= 2 * largest
        await ended(queue, blocker, *requests)

    run(steps())


def test_who_was_idle_saves_up_nothing() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=100, share_max=100)
        first, *busy = [Request(queue, "busy", 10) for _ in range(20)]
        await settled()
        first.end.set()
        for request in busy[:9]:
            await settled()
            request.end.set()
        await settled()
        late = [Request(queue, "late", 10) for _ in range(9)]
        await settled()
        order: list[str] = []
        for _ in range(8):
            (running,) = [request for request in (*busy, *late) if request.is_running]
            order.append(running.key)
            running.end.set()
            await settled()
        assert abs(order.count("late") - order.count("busy")) <= 2, order
        await ended(queue, first, *busy, *late)

    run(steps())


def test_a_caller_whose_share_is_full_is_told_429_and_others_get_in() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=8, share_max=2)
        requests = [Request(queue, "greedy") for _ in range(3)]
        await settled()
        refusal = await Request(queue, "greedy").refused()
        assert (refusal.status, refusal.reason) == (429, SHARE_FULL)
        assert refusal.retry_after_s >= 1
        assert refusal.retry_after_s.is_integer()
        modest = Request(queue, "modest")
        await settled()
        assert queue.waiting == 3
        await ended(queue, *requests, modest)

    run(steps())


def test_a_full_queue_refuses_the_one_with_most_waiting_for_one_with_less() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=4, share_max=4)
        first, *greedy = [Request(queue, "greedy") for _ in range(5)]
        await settled()
        modest = [Request(queue, "modest") for _ in range(2)]
        await settled()
        for pushed_out in (greedy[3], greedy[2]):
            refusal = await pushed_out.refused()
            assert (refusal.status, refusal.reason) == (429, SHARE_FULL)
        refusal = await Request(queue, "modest").refused()  # two each: nobody has more than a third would be
        assert (refusal.status, refusal.reason) == (503, QUEUE_FULL)
        third = Request(queue, "third")
        await settled()
        assert not third.task.done()
        assert queue.waiting == 4
        assert queue.check_integrity() == []
        await ended(queue, first, *greedy, *modest, third)

    run(steps())


def test_nobody_waits_in_a_queue_without_room_for_waiting() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=0, share_max=None)
        running = Request(queue, "a")
        await settled()
        refusal = await Request(queue, "b").refused()
        assert (refusal.status, refusal.reason) == (503, QUEUE_FULL)
        await ended(queue, running)

    run(steps())


def test_a_wait_ends_at_its_deadline_and_at_the_longest_wait() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_s_max=0.05)
        running = Request(queue, "a")
        await settled()
        now_s = asyncio.get_running_loop().time()
        over = await Request(queue, "b", deadline_s=now_s - 1).refused()
        soon = await Request(queue, "b", deadline_s=now_s + 0.01).refused()
        late = await Request(queue, "b").refused()
        assert [(one.status, one.reason) for one in (over, soon, late)] == [(503, WAITED)] * 3
        assert queue.waiting == 0
        await ended(queue, running)

    run(steps())


def test_who_would_not_come_up_in_time_is_told_at_once() -> None:
    async def steps() -> None:
        now_s = [0.0]
        queue = FairQueue(lambda: now_s[0], running_max=1, waiting_max=100, waiting_s_max=FOREVER_S)
        for _ in range(10):  # places are held for 100 s
            async with queue.admit("a", 1):
                now_s[0] += 100
        running = Request(queue, "a")
        await settled()
        refusal = await Request(queue, "b", deadline_s=now_s[0] + 50).refused()
        assert refusal.reason == WAITED
        assert refusal.retry_after_s == 60, "a hundred seconds, told as the most that is ever told"
        patient = Request(queue, "b", deadline_s=now_s[0] + 150)
        await settled()
        assert queue.waiting == 1
        await ended(queue, running, patient)

    run(steps())


def test_a_closed_queue_lets_those_inside_finish_and_refuses_all_others() -> None:
    async def steps() -> None:
        queue = queue_of()
        running, waiting = Request(queue, "a"), Request(queue, "b")
        await settled()
        queue.close()
        for refusal in (await waiting.refused(), await Request(queue, "c").refused()):
            assert (refusal.status, refusal.reason) == (503, CLOSING)
        assert running.is_running
        await ended(queue, running)

    run(steps())


def test_a_waiter_cancelled_in_the_moment_of_its_turn_passes_the_place_on() -> None:
    async def steps() -> None:
        queue = queue_of()
        async with queue.admit("a", 1):
            unlucky, next_one = Request(queue, "b"), Request(queue, "c")
            await settled()
        assert (queue.running, queue.waiting) == (1, 1), "the place is given out, and who has it does not know yet"
        unlucky.task.cancel()
        await settled()
        assert unlucky.task.cancelled()
        assert next_one.is_running
        assert queue.check_integrity() == []
        await ended(queue, next_one)

    run(steps())


def test_callers_that_hold_nothing_are_forgotten_beyond_a_number_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvproxy.fairness._IDLE_CALLERS_MAX", 50)

    async def steps() -> None:
        queue = queue_of()
        async with queue.admit("indebted", 1e9):
            running = Request(queue, "caller")
            await settled()
            indebted = Request(queue, "indebted")  # it waits for all whose debts are smaller
            await settled()
        for number in range(200):
            newcomer = Request(queue, f"caller {number}")
            await settled()
            running.end.set()
            await settled()
            assert newcomer.is_running
            assert not indebted.is_running
            assert queue.check_integrity() == []
            running = newcomer
        await ended(queue, running, indebted)

    run(steps())


def test_a_crowd_that_comes_and_leaves_the_queue_does_not_make_it_grow() -> None:
    async def steps() -> None:
        queue = queue_of(waiting_max=8)
        running = Request(queue, "a")
        await settled()
        for number in range(500):
            waiting = Request(queue, f"caller {number}")
            await settled()
            waiting.task.cancel()
            await settled()
            assert queue.check_integrity() == []
        await ended(queue, running)

    run(steps())


def test_limits_that_let_nothing_in_are_refused() -> None:
    for limits in ({"running_max": 0}, {"waiting_max": -1}, {"waiting_s_max": 0.0}, {"share_max": -1}):
        given_limits: dict[str, Any] = {"running_max": 1, "waiting_max": 1, "waiting_s_max": 1.0, **limits}
        with pytest.raises(BadSetting):
            FairQueue(lambda: 0.0, **given_limits)


# ---- who is who


def test_callers_are_told_apart_by_key_and_the_key_is_not_kept() -> None:
    one = caller_of({"Authorization": "Bearer sk-secret"}, None, "10.0.0.1")
    two = caller_of({"Authorization": "Bearer sk-other"}, None, "10.0.0.1")
    assert one != two
    assert "secret" not in one
    assert one == caller_of({"Authorization": "Bearer sk-secret"}, None, "10.0.0.9")
    assert caller_of({}, None, "10.0.0.1") != caller_of({}, None, "10.0.0.2")


def test_a_header_counts_only_where_the_operator_names_it() -> None:
    headers = {"X-Tenant": "team-a", "Authorization": "Bearer sk"}
    assert caller_of(headers, "X-Tenant", "p") == "name:team-a"
    assert caller_of(headers, None, "p").startswith("key:")
    assert caller_of({"Authorization": "Bearer sk"}, "X-Tenant", "p").startswith("key:")


@given(st.text(max_size=2000), st.text(max_size=2000))
def test_the_name_of_a_caller_is_short_whatever_is_sent(header: str, key: str) -> None:
    for name in (
        caller_of({"X-Tenant": header, "Authorization": key}, "X-Tenant", "p"),
        caller_of({"Authorization": key}, None, header),
    ):
        assert len(name) <= 70


# ---- any order


class AnyOrder(RuleBasedStateMachine):
    """Requests that come, end, are cancelled and run out of time in any order, against the plain rules."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.requests: list[Request] = []
        self.queue = FairQueue(self.loop.time, running_max=1, waiting_max=1, waiting_s_max=FOREVER_S)

    def do(self, steps: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(steps)

    @initialize(running_max=st.integers(1, 3), waiting_max=st.integers(0, 6), share_max=st.integers(0, 4))
    def begin(self, running_max: int, waiting_max: int, share_max: int) -> None:
        async def steps() -> None:
            self.queue = queue_of(running_max, waiting_max, share_max)

        self.do(steps())

    @rule(key=st.sampled_from("abc"), cost=st.floats(0, 100))
    def come(self, key: str, cost: float) -> None:
        async def steps() -> None:
            self.requests.append(Request(self.queue, key, cost))
            await settled()

        self.do(steps())

    @rule(draw=st.data(), are_cancelled=st.booleans(), count=st.integers(1, 3))
    def go(self, draw: st.DataObject, are_cancelled: bool, count: int) -> None:
        async def steps() -> None:
            for _ in range(min(count, len(self.requests))):  # in one turn of the loop
                request = draw.draw(st.sampled_from(self.requests))
                if are_cancelled:
                    request.task.cancel()
                else:
                    request.end.set()
            await settled()

        self.do(steps())

    @rule(draw=st.data())
    def one_ends_while_the_next_is_cancelled(self, draw: st.DataObject) -> None:
        async def steps() -> None:
            running = [request for request in self.requests if request.is_running]
            waiting = [request for request in self.requests if not request.is_running and not request.task.done()]
            if running and waiting:
                draw.draw(st.sampled_from(running)).end.set()
                for _ in range(draw.draw(st.integers(0, 3))):
                    await asyncio.sleep(0)
                draw.draw(st.sampled_from(waiting)).task.cancel()
            await settled()

        self.do(steps())

    @invariant()
    def what_the_module_promises(self) -> None:
        assert self.queue.check_integrity() == []
        running = [request for request in self.requests if request.is_running]
        waiting = [request for request in self.requests if not request.is_running and not request.task.done()]
        assert (len(running), len(waiting)) == (self.queue.running, self.queue.waiting)

    def teardown(self) -> None:
        async def steps() -> None:
            for request in self.requests:
                request.end.set()
            await asyncio.gather(*(request.task for request in self.requests), return_exceptions=True)
            await settled()

        try:
            self.do(steps())
            assert (self.queue.running, self.queue.waiting) == (0, 0)
        finally:
            self.loop.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30)
