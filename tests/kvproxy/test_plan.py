"""The way of a request: each rule by an example, then what holds for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.plan import decide, fetch_s
from kvproxy.types import Cached, Decision, Policy, Reason, Route, Shape, View

POLICY = Policy(
    on_prefill_loss="plain",
    min_prefill_tokens=256,
    decode_tokens_per_s=5_000,
    fetch_tokens_per_s={"cpu": 100_000, "ssd": 20_000},
    retry_after_s=2.0,
)
LONG = Shape(readable=True, prompt_tokens=8_000, longest_tokens=8_000, max_tokens=100)


def worker(key: str = "w", pending_tokens: int = 0, tokens_per_s: float = 10_000) -> View:
    return View(key, 0, pending_tokens, 0, {}, tokens_per_s)


def held(tokens: int, tier: str = "cpu", block_tokens: int = 16) -> Cached:
    return Cached({tier: tokens}, tokens, block_tokens)


def decided(
    shape: Shape = LONG,
    cached: Cached | None = None,
    *,
    pending_tokens: int = 0,
    prefill: bool = True,
    decode: bool = True,
    configured: bool = True,
    policy: Policy = POLICY,
) -> Decision:
    return decide(
        shape,
        cached,
        [worker("p", pending_tokens)] if prefill else [],
        [worker("d")] if decode else [],
        policy,
        prefill_configured=configured,
    )


def test_a_long_prompt_that_nobody_knows_goes_over_p() -> None:
    assert decided() == Decision(Route.PREFILL_THEN_DECODE, Reason.PREFILL)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Shape(readable=False), Reason.UNREADABLE),
        (replace(LONG, beams=True, n=4), Reason.BEAMS),
        (replace(LONG, needs_whole_prompt=True), Reason.ECHO),
        (replace(LONG, max_tokens=1), Reason.ONE_TOKEN),
        (replace(LONG, max_tokens=0), Reason.ONE_TOKEN),
        (replace(LONG, prompt_tokens=255, longest_tokens=255), Reason.SHORT_PROMPT),
    ],
)
def test_what_p_could_not_help_with_goes_to_d_alone(shape: Shape, reason: Reason) -> None:
    assert decided(shape) == Decision(Route.DECODE_ONLY, reason)


def test_several_answers_of_one_prompt_go_over_p() -> None:
    assert decided(replace(LONG, n=8, max_tokens=None)).route is Route.PREFILL_THEN_DECODE


def test_p_is_skipped_where_the_store_holds_all_full_blocks() -> None:
    assert decided(LONG, held(7_984)).reason is Reason.CACHED
    many = replace(LONG, prompt_tokens=8_000, longest_tokens=2_000)  # four prompts, each with an end of its own
    assert decided(many, held(8_000 - 4 * 16)).reason is Reason.CACHED
    assert decided(many, held(8_000 - 4 * 16 - 256)).reason is Reason.PREFILL


def test_a_prefix_that_leaves_little_to_compute_goes_to_d() -> None:
    assert decided(LONG, held(7_760)).reason is Reason.SHORT_PROMPT
    assert decided(LONG, held(7_744)).reason is Reason.PREFILL


def test_p_is_skipped_where_fetching_and_a_short_prefill_beat_its_queue() -> None:
    # 6,000 tokens from cpu take 0.06 s and 2,000 here 0.4 s.
    assert decided(LONG, held(6_000), pending_tokens=4_500).reason is Reason.PREFILL
    assert decided(LONG, held(6_000), pending_tokens=4_700).reason is Reason.CHEAPER_HERE
    # From ssd they take 0.3 s.
    assert decided(LONG, held(6_000, "ssd"), pending_tokens=4_700).reason is Reason.PREFILL
    assert decided(LONG, held(6_000, "ssd"), pending_tokens=7_100).reason is Reason.CHEAPER_HERE


def test_the_shortest_queue_of_any_p_is_what_counts() -> None:
    views = [worker("busy", 1_000_000), worker("idle", 0)]
    assert decide(LONG, held(6_000), views, [worker("d")], POLICY, prefill_configured=True).reason is Reason.PREFILL


def test_a_long_prefill_is_never_put_on_d_because_p_is_busy() -> None:
    assert decided(LONG, held(3_984), pending_tokens=10**9).reason is Reason.PREFILL
    assert decided(LONG, None, pending_tokens=10**9).reason is Reason.PREFILL


def test_without_p_the_policy_says_plain_or_refuse() -> None:
    assert decided(prefill=False) == Decision(Route.DECODE_ONLY, Reason.PREFILL_LOST)
    strict = replace(POLICY, on_prefill_loss="503")
    assert decided(prefill=False, policy=strict) == Decision(Route.REFUSE, Reason.PREFILL_LOST, 2.0)
    # What would not have gone to P is not refused for want of one.
    assert decided(LONG, held(7_984), prefill=False, policy=strict).reason is Reason.CACHED
    assert decided(replace(LONG, beams=True), prefill=False, policy=strict).reason is Reason.BEAMS


def test_without_p_by_configuration_d_does_it_all() -> None:
    strict = replace(POLICY, on_prefill_loss="503")
    decision = decided(prefill=False, configured=False, policy=strict)
    assert decision == Decision(Route.DECODE_ONLY, Reason.NO_PREFILL_WORKERS)


def test_without_d_nothing_is_sent_anywhere() -> None:
    assert decided(decode=False) == Decision(Route.REFUSE, Reason.NO_DECODE_WORKERS, 2.0)


def test_each_token_is_fetched_from_the_fastest_tier_that_has_it() -> None:
    speeds = {"cpu": 100.0, "ssd": 10.0}
    assert fetch_s({"cpu": 100, "ssd": 150}, speeds) == pytest.approx(1.0 + 5.0)
    assert fetch_s({"cpu": 150, "ssd": 100}, speeds) == pytest.approx(1.5)
    assert fetch_s({"remote": 10}, speeds) == pytest.approx(1.0), "a tier of unknown speed is as fast as the slowest"
    assert fetch_s({"cpu": 10}, {}) == 0


# ---- what holds for all


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    longest = draw(st.integers(0, 20_000))
    return Shape(
        readable=draw(st.sampled_from([True, True, True, False])),
        prompt_tokens=longest * draw(st.integers(1, 4)),
        longest_tokens=longest,
        n=draw(st.integers(1, 4)),
        beams=draw(st.sampled_from([False, False, True])),
        max_tokens=draw(st.sampled_from([None, 0, 1, 2, 100])),
        needs_whole_prompt=draw(st.sampled_from([False, False, True])),
    )


views = st.lists(
    st.builds(worker, st.text(min_size=1, max_size=3), st.integers(0, 100_000), st.floats(1, 100_000)), max_size=4
)
speeds = st.fixed_dictionaries({"cpu": st.floats(1, 1e6), "ssd": st.floats(1, 1e6)})
policies = st.builds(
    Policy, st.sampled_from(["plain", "503"]), st.integers(0, 2_000), st.floats(1, 1e5), speeds, st.floats(0.1, 60)
)


def held_in_both(cpu: int, ssd: int) -> Cached:
    return Cached({"cpu": cpu, "ssd": ssd}, max(cpu, ssd), 16)


cacheds = st.one_of(st.none(), st.builds(held_in_both, st.integers(0, 80_000), st.integers(0, 80_000)))


@given(shapes(), cacheds, views, views, policies, st.booleans())
def test_pair_or_nothing(
    shape: Shape, cached: Cached | None, prefill: list[View], decode: list[View], policy: Policy, configured: bool
) -> None:
    decision = decide(shape, cached, prefill, decode, policy, prefill_configured=configured)
    if decision.route is Route.PREFILL_THEN_DECODE:
        assert prefill
        assert decode
        assert shape.readable
        assert not shape.beams
        assert not shape.needs_whole_prompt
    if decision.route is Route.REFUSE:
        assert decision.retry_after_s > 0
        assert not decode or (not prefill and policy.on_prefill_loss == "503")
    else:
        assert decode
    assert (decision.reason is Reason.PREFILL) == (decision.route is Route.PREFILL_THEN_DECODE)


@given(shapes(), st.integers(0, 80_000), st.integers(0, 80_000), views, views, policies)
def test_more_in_the_store_sends_nothing_to_p(
    shape: Shape, tokens: int, more: int, prefill: list[View], decode: list[View], policy: Policy
) -> None:
    faster = {tier: max(speed, policy.decode_tokens_per_s) for tier, speed in policy.fetch_tokens_per_s.items()}
    policy = replace(policy, fetch_tokens_per_s=faster)
    tokens, total = sorted((min(tokens, shape.prompt_tokens), min(more, shape.prompt_tokens)))
    before = decide(shape, held(tokens), prefill, decode, policy, prefill_configured=True)
    after = decide(shape, held(total), prefill, decode, policy, prefill_configured=True)
    if before.route is Route.DECODE_ONLY:
        assert after.route is Route.DECODE_ONLY


@given(shapes(), cacheds, views, views, policies, st.integers(1, 100_000))
def test_a_longer_queue_of_p_sends_nothing_to_p(
    shape: Shape, cached: Cached | None, prefill: list[View], decode: list[View], policy: Policy, more: int
) -> None:
    longer = [replace(view, pending_tokens=view.pending_tokens + more) for view in prefill]
    before = decide(shape, cached, prefill, decode, policy, prefill_configured=True)
    after = decide(shape, cached, longer, decode, policy, prefill_configured=True)
    if before.route is Route.DECODE_ONLY:
        assert after.route is Route.DECODE_ONLY
