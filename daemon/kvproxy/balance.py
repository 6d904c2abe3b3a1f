"""Which worker takes a leg: the better of two choices, as load and cached prefix say. Pure; randomness is injected.

Two choices. Always taking the least loaded worker sends every request of the moment to one worker, since loads are
known only as of the last answer, and several proxies see the same one. Taking the better of two drawn at random has
nearly the same balance and no such herd (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE
TPDS 12(10), 2001). With a session, one of the two is the session's own worker (rendezvous hashing), so that its turns
meet there as long as loads are alike; a D that holds more of the prompt than the two drawn is a third.

Load. Of P: seconds until its queue is empty, pending tokens over its speed. Of D: the blocks it will hold less what
its cached prefix is worth, each token weighed by the tier it lies in.

Invariants
1. Only what was handed in is chosen: drained and broken workers are left out before.
2. Of those compared the one with the least load is chosen; a session's own worker is, if its load is alike.
3. A session's own worker changes only when that worker goes, or a new one is preferred to it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence

from kvproxy.types import View

# A session stays where it is for loads that differ by at most this part of the larger one.
TIE_PART = 0.1
# What a token held in a tier saves of its prefill, the rest being the fetch.
TIER_WORTH = {"gpu": 1.0, "cpu": 0.9, "ssd": 0.6, "remote": 0.4}
_LEAST_WORTH = min(TIER_WORTH.values())


def choose_prefill(views: Sequence[View], draw: random.Random, *, session: str = "") -> View:
    """Return the P for a leg: of two, the one whose queue is sooner empty.

    Parameters
    ----------
    views : Sequence[View]
        The workers that may be used now, at least one.
    draw : random.Random
        Where the two come from.
    session : str
        What turns of one conversation share, or "".
    """
    return _better(_drawn(views, draw, session), lambda view: view.pending_tokens / view.tokens_per_s, session)


def choose_decode(
    views: Sequence[View], draw: random.Random, *, session: str = "", block_tokens: int = 16
) -> View:
    """Return the D for a leg: of two, and the one with most of the prompt, the one with the least load.

    Parameters
    ----------
    views : Sequence[View]
        The workers that may be used now, at least one.
    draw : random.Random
        Where the two come from.
    session : str
        What turns of one conversation share, or "".
    block_tokens : int
        Tokens of a block.
    """
    drawn = _drawn(views, draw, session)
    worth = max(cached_worth(view.cached_tokens) for view in views)
    if worth > max(cached_worth(view.cached_tokens) for view in drawn):
        holders = [view for view in views if cached_worth(view.cached_tokens) == worth]
        drawn.append(min(holders, key=lambda view: view.active_blocks))
    return _better(drawn, lambda view: view.active_blocks - cached_worth(view.cached_tokens) / block_tokens, session)


def cached_worth(cached_tokens: Mapping[str, int]) -> float:
    """Return how many tokens of prefill a cached prefix saves, each counted in the best tier that has it."""
    counted, worth = 0, 0.0
    for tier in sorted(cached_tokens, key=lambda tier: -TIER_WORTH.get(tier, _LEAST_WORTH)):
        beyond = max(0, cached_tokens[tier] - counted)
        worth += beyond * TIER_WORTH.get(tier, _LEAST_WORTH)
        counted += beyond
    return worth


def home_of(views: Sequence[View], session: str) -> View:
    """Return a session's own worker: the same as long as that worker is among `views`, whatever the others do."""
    def drawn(view: View) -> bytes:
        # A session may come in a header, and so be no UTF-8.
        return hashlib.sha256(f"{len(session)}:{session}{view.key}".encode(errors="surrogateescape")).digest()

    return max(views, key=drawn)


def _drawn(views: Sequence[View], draw: random.Random, session: str) -> list[View]:
    """Return up to two workers, the session's own first."""
    if not session:
        return draw.sample(views, min(2, len(views)))
    home = home_of(views, session)
    others = [view for view in views if view.key != home.key]
    return [home, draw.choice(others)] if others else [home]


def _better(views: Sequence[View], load: Callable[[View], float], session: str) -> View:
    best = min(views, key=load)
    margin = TIE_PART * max(abs(load(best)), abs(load(views[0]))) if session else 0.0
    return views[0] if load(views[0]) - load(best) <= margin else best
