"""The breaker: when callers are turned away, who may probe, and when a daemon is found again."""

from __future__ import annotations

import itertools

from kvclient._breaker import PROBE_S_MAX, RETRY_S_MAX, RETRY_S_MIN, SILENCE_S, Admission, Breaker
from kvstore.clock import ManualClock


def new_breaker() -> tuple[Breaker, ManualClock]:
    clock = ManualClock()
    return Breaker(clock.monotonic_s), clock


def test_a_breaker_that_heard_of_no_failure_lets_all_pass() -> None:
    breaker, _ = new_breaker()
    assert [breaker.admit() for _ in range(3)] == [Admission.PASS] * 3


def test_after_a_failure_callers_are_refused_and_then_one_may_probe() -> None:
    breaker, clock = new_breaker()
    breaker.failed("gone")
    assert breaker.reason == "gone"
    assert breaker.admit() is Admission.REFUSED
    assert 0 < breaker.retry_in_s <= RETRY_S_MIN
    clock.advance(RETRY_S_MIN)
    assert breaker.admit() is Admission.PROBE
    assert breaker.admit() is Admission.REFUSED


def test_a_probe_that_is_answered_closes_it() -> None:
    breaker, clock = new_breaker()
    breaker.failed("gone")
    clock.advance(RETRY_S_MIN)
    breaker.admit()
    breaker.answered()
    assert breaker.admit() is Admission.PASS


def test_the_time_between_probes_doubles_up_to_a_second() -> None:
    breaker, clock = new_breaker()
    times: list[float] = []
    breaker.failed("gone")
    for _ in range(8):
        times.append(breaker.retry_in_s)
        clock.advance(times[-1])
        assert breaker.admit() is Admission.PROBE
        breaker.failed("still gone")
    assert abs(times[0] - RETRY_S_MIN) < 1e-6
    assert all(later >= earlier for earlier, later in itertools.pairwise(times))
    assert abs(times[-1] - RETRY_S_MAX) < 1e-6


def test_a_prober_that_never_reports_does_not_block_the_others_for_ever() -> None:
    breaker, clock = new_breaker()
    breaker.failed("gone")
    clock.advance(RETRY_S_MIN)
    assert breaker.admit() is Admission.PROBE
    clock.advance(PROBE_S_MAX)
    assert breaker.admit() is Admission.PROBE


def test_failures_of_callers_who_were_on_their_way_do_not_lengthen_the_time() -> None:
    breaker, _ = new_breaker()
    for _ in range(10):
        breaker.failed("gone")
    assert breaker.opened_count == 1
    assert breaker.retry_in_s <= RETRY_S_MIN


def test_short_silence_is_no_failure_but_adds_up() -> None:
    breaker, clock = new_breaker()
    start = clock.now_s
    clock.advance(SILENCE_S / 2)
    breaker.silent(start, "slow")
    assert breaker.admit() is Admission.PASS
    clock.advance(SILENCE_S)
    breaker.silent(clock.now_s - SILENCE_S / 4, "slow")
    assert breaker.admit() is Admission.REFUSED


def test_an_answer_ends_silence() -> None:
    breaker, clock = new_breaker()
    breaker.silent(clock.now_s, "slow")
    clock.advance(SILENCE_S)
    breaker.answered()
    breaker.silent(clock.now_s, "slow")
    assert breaker.admit() is Admission.PASS
