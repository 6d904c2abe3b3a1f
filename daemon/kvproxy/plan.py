"""Which way a request goes: over a P worker and then D, to D straight away, or back to its sender. Pure.

P is worth its place where there is much to compute: it keeps long prefills away from the workers that generate. What
it costs is its queue, and a second fetch of everything it computed. The questions are asked in this order, and the
first that is answered decides:

    no D worker can be used                              REFUSE         no-decode-workers
    the body can't be read                               DECODE_ONLY    unreadable
    no P worker is configured                            DECODE_ONLY    no-prefill-workers
    beam search                                          DECODE_ONLY    beams
    the answer needs every token of the prompt           DECODE_ONLY    echo
    one token is wanted: P would do all of D's work      DECODE_ONLY    one-token
    less than a block a prompt is not in the store       DECODE_ONLY    cached
    less than `min_prefill_tokens` to compute            DECODE_ONLY    short-prompt
    no P worker can be used                              DECODE_ONLY or REFUSE, by policy    prefill-lost
    D would be done before any P had begun, and most     DECODE_ONLY    cheaper-here
      of the prompt is in the store
    else                                                 PREFILL_THEN_DECODE    prefill

Invariants
1. PREFILL_THEN_DECODE is decided only while there are both a P and a D that can be used: pair or nothing.
2. A request that goes to D alone would do so with a longer queue of P's as well, and with more in the store, as long as
   fetching is faster than computing.
3. A refusal says when to come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproxy.types import Cached, Decision, Policy, Reason, Route, Shape, View

# A local prefill is short if it is at most this part of the prompt; a longer one would hold up what D generates.
LOCAL_PART_MAX = 0.5
_NOTHING_CACHED = Cached({}, 0, 1)


def decide(
    shape: Shape,
    cached: Cached | None,
    prefill: Sequence[View],
    decode: Sequence[View],
    policy: Policy,
    *,
    prefill_configured: bool,
) -> Decision:
    """Return the way a request goes, and why.

    Parameters
    ----------
    shape : Shape
        What the request asks for.
    cached : Cached, optional
        What the store holds of its prompts; None where it was not asked or did not answer.
    prefill, decode : Sequence[View]
        The workers that may be used now.
    policy : Policy
        The settings.
    prefill_configured : bool
        Whether there are P workers at all, usable or not.
    """
    if not decode:
        return Decision(Route.REFUSE, Reason.NO_DECODE_WORKERS, policy.retry_after_s)
    reason = _needs_no_prefill_worker(shape, prefill_configured=prefill_configured)
    if reason is None:
        reason = _has_little_to_compute(shape, cached or _NOTHING_CACHED, policy)
    if reason is not None:
        return Decision(Route.DECODE_ONLY, reason)
    if not prefill:
        if policy.on_prefill_loss == "plain":
            return Decision(Route.DECODE_ONLY, Reason.PREFILL_LOST)
        return Decision(Route.REFUSE, Reason.PREFILL_LOST, policy.retry_after_s)
    if _is_cheaper_here(shape, cached or _NOTHING_CACHED, prefill, decode, policy):
        return Decision(Route.DECODE_ONLY, Reason.CHEAPER_HERE)
    return Decision(Route.PREFILL_THEN_DECODE, Reason.PREFILL)


def fetch_s(tokens_by_tier: Mapping[str, int], tokens_per_s: Mapping[str, float]) -> float:
    """Return how long an engine takes to fetch what the tiers hold, each token from the fastest that has it.

    A tier that isn't listed is as fast as the slowest one; if none is listed, fetching costs nothing.
    """
    slowest = min(tokens_per_s.values(), default=float("inf"))
    speeds = {tier: tokens_per_s.get(tier, slowest) for tier in tokens_by_tier}
    fetched, total_s = 0, 0.0
    for tier in sorted(tokens_by_tier, key=lambda tier: -speeds[tier]):
        beyond = max(0, tokens_by_tier[tier] - fetched)
        total_s += beyond / speeds[tier]
        fetched += beyond
    return total_s


def _needs_no_prefill_worker(shape: Shape, *, prefill_configured: bool) -> Reason | None:
    if not shape.readable:
        return Reason.UNREADABLE
    if not prefill_configured:
        return Reason.NO_PREFILL_WORKERS
    if shape.beams:
        return Reason.BEAMS
    if shape.needs_whole_prompt:
        return Reason.ECHO
    if shape.max_tokens is not None and shape.max_tokens <= 1:
        return Reason.ONE_TOKEN
    return None


def _has_little_to_compute(shape: Shape, cached: Cached, policy: Policy) -> Reason | None:
    to_compute = _to_compute(shape, cached)
    # An engine computes the last tokens in any case: a block that isn't full is not stored. Of several prompts each has
    # such an end; how many there are is at least what it takes to come to the sum.
    prompts = -(-shape.prompt_tokens // max(1, shape.longest_tokens))
    if cached.tokens and to_compute <= cached.block_tokens * max(1, prompts):
        return Reason.CACHED
    if to_compute < policy.min_prefill_tokens:
        return Reason.SHORT_PROMPT
    return None


def _is_cheaper_here(
    shape: Shape, cached: Cached, prefill: Sequence[View], decode: Sequence[View], policy: Policy
) -> bool:
    to_compute = _to_compute(shape, cached)
    if to_compute > LOCAL_PART_MAX * shape.prompt_tokens:
        return False
    ahead = min(view.pending_tokens for view in decode)
    local_s = (ahead + to_compute) / policy.decode_tokens_per_s
    queue_s = min(view.pending_tokens / view.tokens_per_s for view in prefill)
    return fetch_s(cached.tokens_by_tier, policy.fetch_tokens_per_s) + local_s < queue_s


def _to_compute(shape: Shape, cached: Cached) -> int:
    return max(0, shape.prompt_tokens - cached.tokens)
