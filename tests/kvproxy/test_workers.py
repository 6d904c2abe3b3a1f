"""What a worker has to do, and whether it is used, counted exactly through whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from kvproxy.types import Endpoint, Role
from kvproxy.workers import Fleet
from kvstore.clock import ManualClock
from kvstore.errors import UsageError
from tests.kvproxy.running import ASK, client, on_loop, proxy, until
from tests.kvproxy.stub_worker import Behaviour, StubWorker

P = Endpoint("http://p:1", Role.PREFILL, "p")


class Leg:
    """A leg that notes how it was lost."""

    def __init__(self, quiet_since_s: float | None) -> None:
        self.quiet_since_s = quiet_since_s
        self.lost: list[str] = []

    def lose(self, why: str) -> None:
        self.lost.append(why)


def fleet_of(clock: ManualClock, *endpoints: Endpoint) -> Fleet:
    fleet = Fleet(clock.monotonic_s, dict.fromkeys(Role, 1000.0))
    for endpoint in endpoints:
        fleet.add(endpoint)
    return fleet


def test_tokens_are_pending_until_the_answer_and_blocks_until_the_end() -> None:
    worker = fleet_of(ManualClock(), P).worker(Role.PREFILL, P.url)
    leg, other = Leg(None), Leg(None)
    with worker.busy(other, 7, 1):
        with worker.busy(leg, 100, 10):
            assert (worker.requests, worker.pending_tokens, worker.active_blocks) == (2, 107, 11)
            worker.answered(leg)
            assert (worker.requests, worker.pending_tokens, worker.active_blocks) == (2, 7, 11)
            worker.answered(leg)
        assert (worker.requests, worker.pending_tokens, worker.active_blocks) == (1, 7, 1)
    assert (worker.requests, worker.pending_tokens, worker.active_blocks) == (0, 0, 0)


def test_a_dead_worker_s_silent_legs_are_lost_and_the_others_go_on() -> None:
    clock = ManualClock()
    fleet = fleet_of(clock, P)
    worker = fleet.worker(Role.PREFILL, P.url)
    silent, speaking = Leg(1.0), Leg(None)
    with worker.busy(silent, 1, 1), worker.busy(speaking, 1, 1):
        worker.died()
    assert len(silent.lost) == 1
    assert not speaking.lost
    assert not worker.is_usable
    clock.advance(10)
    assert not worker.is_usable, "a rest alone does not bring it back"
    worker.probed(True)
    assert worker.is_usable


def test_a_worker_that_is_removed_is_gone_with_its_last_leg_and_can_be_taken_back() -> None:
    fleet = fleet_of(ManualClock(), P)
    worker = fleet.worker(Role.PREFILL, P.url)
    with worker.busy(Leg(None), 1, 1):
        assert fleet.remove(Role.PREFILL, P.url) == 1
        assert not fleet.usable(Role.PREFILL, {})
        fleet.forget_removed()
        assert fleet.workers(Role.PREFILL)
        fleet.add(P)
        assert fleet.usable(Role.PREFILL, {})
        fleet.remove(Role.PREFILL, P.url)
    fleet.forget_removed()
    assert not fleet.workers(Role.PREFILL)
    with pytest.raises(UsageError, match="there is no prefill worker"):
        fleet.drain(Role.PREFILL, P.url)


def test_a_closed_fleet_ends_all_legs_and_has_nobody_for_new_ones() -> None:
    fleet = fleet_of(ManualClock(), P)
    leg = Leg(None)
    with fleet.worker(Role.PREFILL, P.url).busy(leg, 1, 1):
        fleet.close("the end")
    assert leg.lost == ["the end"]
    assert not fleet.usable(Role.PREFILL, {})


def test_speed_follows_long_prefills_only() -> None:
    worker = fleet_of(ManualClock(), P).worker(Role.PREFILL, P.url)
    worker.prefilled(10, 1.0)
    assert worker.tokens_per_s == 1000
    for _ in range(100):
        worker.prefilled(4000, 1.0)
    assert worker.tokens_per_s == pytest.approx(4000, rel=0.01)


@on_loop
async def test_a_d_that_streams_has_no_tokens_pending_and_all_ends_at_zero() -> None:
    gate = asyncio.Event()
    async with (
        StubWorker(Role.DECODE, Behaviour(before_headers=gate, between_tokens=asyncio.Event())) as d,
        proxy(d) as served,
        client(served) as http,
    ):
        worker = served.fleet.worker(Role.DECODE, d.url)
        asking = asyncio.create_task(http.post("/v1/completions", json={**ASK, "stream": True}))
        await d.arrived(1)
        assert worker.pending_tokens > 50
        gate.set()
        answer = await asking
        assert (worker.requests, worker.pending_tokens) == (1, 0)
        assert worker.active_blocks > 0
        answer.close()
        await until(lambda: worker.requests == 0, "the leg has ended")
        assert (worker.pending_tokens, worker.active_blocks) == (0, 0)
