"""The circuit of a worker: its table, and what holds whatever happens in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvproxy.breaker import (
    BREAKER_TABLE,
    WINDOW,
    WINDOW_FAILED_MAX,
    Breaker,
    BreakerEvent,
    BreakerState,
    IllegalTransition,
    Trial,
    counts_as_failure,
)
from kvstore.clock import ManualClock
from kvstore.errors import BadSetting

OPEN_S, OPEN_S_MAX, PROBE_S = 1.0, 8.0, 20.0
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def breaker(clock: ManualClock) -> Breaker:
    return Breaker(
        clock.monotonic_s, failures_max=3, open_s=OPEN_S, open_s_max=OPEN_S_MAX, probe_s=PROBE_S
    )


def settle(circuit: Breaker, trial: Trial, outcome: str) -> None:
    {"s": circuit.succeeded, "f": circuit.failed, "n": circuit.neutral}[outcome](trial)


def tried(circuit: Breaker, outcomes: str) -> None:
    for outcome in outcomes:
        settle(circuit, circuit.begin(), outcome)


def rest_s(circuit: Breaker, clock: ManualClock) -> float:
    due_s = circuit.due_s
    assert due_s is not None
    return due_s - clock.now_s


def test_the_table_leads_from_every_state_to_every_other() -> None:
    for start in BreakerState:
        reached = {start}
        for _ in BreakerState:
            reached |= {after for (before, _), after in BREAKER_TABLE.items() if before in reached}
        assert reached == set(BreakerState)
    assert {event for _, event in BREAKER_TABLE} == set(BreakerEvent)


def test_failures_in_a_row_open_it_and_a_success_between_them_keeps_it_closed() -> None:
    circuit = breaker(ManualClock())
    tried(circuit, "ffsff")
    assert circuit.state is CLOSED
    tried(circuit, "f")
    assert circuit.state is OPEN
    assert not circuit.allows()
    with pytest.raises(IllegalTransition):
        circuit.begin()


def test_a_worker_that_fails_every_other_request_is_left_alone() -> None:
    circuit = breaker(ManualClock())
    tried(circuit, ("sf" * WINDOW_FAILED_MAX)[:-1])
    assert circuit.state is CLOSED
    tried(circuit, "f")
    assert circuit.state is OPEN


def test_a_worker_that_fails_now_and_then_is_used_for_ever() -> None:
    circuit = breaker(ManualClock())
    tried(circuit, "sssf" * 10 * WINDOW)
    assert circuit.state is CLOSED


def test_a_worker_known_to_be_gone_is_left_alone_at_once_and_told_again_not_longer() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.down()
    assert circuit.state is OPEN
    clock.advance(OPEN_S / 2)
    circuit.down()
    assert rest_s(circuit, clock) == OPEN_S / 2
    clock.advance(OPEN_S / 2)
    assert circuit.state is HALF_OPEN
    assert circuit.due_s is None
    circuit.down()
    assert rest_s(circuit, clock) == 2 * OPEN_S


@given(st.text(alphabet="ns", max_size=100))
def test_no_number_of_neutral_outcomes_opens_it(outcomes: str) -> None:
    circuit = breaker(ManualClock())
    tried(circuit, outcomes)
    assert circuit.state is CLOSED
    assert circuit.opened_count == 0


def test_the_rest_doubles_to_its_limit_and_begins_short_again_after_a_recovery() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.down()
    rests: list[float] = []
    for _ in range(5):
        rests.append(rest_s(circuit, clock))
        clock.advance(rests[-1])
        tried(circuit, "f")
    assert rests == [1.0, 2.0, 4.0, 8.0, 8.0]
    clock.advance(8.0)
    tried(circuit, "s")
    assert circuit.state is CLOSED
    circuit.down()
    assert rest_s(circuit, clock) == 1.0


@pytest.mark.parametrize("first", ["slow", "other"])
@pytest.mark.parametrize(("outcome", "becomes"), [("s", CLOSED), ("f", OPEN)])
def test_one_probe_at_a_time_and_a_slow_one_keeps_the_next_out_for_a_moment_only(
    outcome: str, becomes: BreakerState, first: str
) -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.down()
    clock.advance(OPEN_S)
    slow = circuit.begin()
    assert slow.is_probe
    assert not circuit.allows()
    clock.advance(PROBE_S)
    assert circuit.state is HALF_OPEN
    other = circuit.begin()
    assert other.is_probe
    assert not circuit.allows()
    settle(circuit, slow if first == "slow" else other, outcome)
    assert circuit.state is becomes
    settle(circuit, other if first == "slow" else slow, "f")  # of an earlier state now
    assert circuit.state is becomes


def test_a_probe_that_ends_without_saying_anything_takes_no_other_s_place() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.down()
    clock.advance(OPEN_S)
    slow = circuit.begin()
    clock.advance(PROBE_S)
    circuit.begin()
    circuit.neutral(slow)
    assert not circuit.allows()


def test_a_probe_that_says_nothing_makes_room_for_the_next_at_once() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    circuit.down()
    clock.advance(OPEN_S)
    tried(circuit, "n")
    assert circuit.state is HALF_OPEN
    tried(circuit, "s")
    assert circuit.state is CLOSED


def test_requests_that_fail_together_open_it_once_and_prolong_nothing() -> None:
    clock = ManualClock()
    circuit = breaker(clock)
    trials = [circuit.begin() for _ in range(100)]
    for trial in trials[:50]:
        circuit.failed(trial)
    clock.advance(OPEN_S)
    probe = circuit.begin()
    for trial in trials[50:75]:
        circuit.failed(trial)
    for trial in trials[75:]:
        circuit.succeeded(trial)
    assert circuit.opened_count == 1
    assert circuit.state is HALF_OPEN, "what began before it opened says nothing of the worker now"
    circuit.succeeded(probe)
    assert circuit.state is CLOSED


def test_a_trial_counts_once_however_often_it_is_settled() -> None:
    circuit = breaker(ManualClock())
    trial = circuit.begin()
    for _ in range(10):
        circuit.failed(trial)
    assert circuit.state is CLOSED


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        *((200, False), (204, False), (400, None), (404, None), (429, None), (499, None)),
        *((500, True), (501, None), (502, True), (503, True), (504, True)),
    ],
)
def test_a_fault_of_the_request_is_no_fault_of_the_worker(status: int, failure: bool | None) -> None:
    assert counts_as_failure(status) is failure


@pytest.mark.parametrize(
    "limits",
    [{"failures_max": 0}, {"open_s": 3.0, "open_s_max": 2.0}, {"open_s": 0.0}, {"probe_s": 0.0}],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match="make no breaker"):
        Breaker(ManualClock().monotonic_s, **limits)


class AnyOrder(RuleBasedStateMachine):
    """Trials, outcomes, health checks and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.circuit = breaker(self.clock)
        self.trials: list[Trial] = []
        self.probes: dict[int, int] = {}  # by identity, each with how often the circuit had opened then

    @rule()
    def begin(self) -> None:
        state = self.circuit.state
        if not self.circuit.allows():
            return
        trial = self.circuit.begin()
        assert trial.is_probe == (state is HALF_OPEN)
        assert not (trial.is_probe and self.circuit.allows()), "a second probe may go"
        self.trials.append(trial)
        if trial.is_probe:
            self.probes[id(trial)] = self.circuit.opened_count

    @rule(draw=st.data(), outcome=st.sampled_from("sfn"))
    def settle(self, draw: st.DataObject, outcome: str) -> None:
        if not self.trials:
            return
        trial = draw.draw(st.sampled_from(self.trials))
        before, allowed = self.circuit.state, self.circuit.allows()
        is_of_now = self.probes.get(id(trial)) == self.circuit.opened_count
        settle(self.circuit, trial, outcome)
        after = self.circuit.state
        if before is OPEN or (before is HALF_OPEN and not is_of_now) or outcome == "n":
            assert after is before
        if before is HALF_OPEN and not is_of_now:
            assert self.circuit.allows() == allowed
        if after is CLOSED and before is not CLOSED:
            assert outcome == "s"

    @rule()
    def is_found_dead(self) -> None:
        self.circuit.down()
        assert self.circuit.state is OPEN

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def nobody_is_kept_out_for_longer_than_the_limits(self) -> None:
        due_s = self.circuit.due_s
        assert (due_s is None) == (self.circuit.state is not OPEN)
        assert due_s is None or 0 < due_s - self.clock.now_s <= OPEN_S_MAX + 1e-6


TestAnyOrder = AnyOrder.TestCase
