"""What the parts of the proxy tell each other: values only, no behaviour.

The pure parts (plan, balance) import nothing of this package but this module, and everything they decide on is in here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Role(enum.StrEnum):
    """What a worker is for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker is. `url` has no slash at its end; with `role` it is the worker's identity."""

    url: str
    role: Role
    node: str


@dataclass(frozen=True, slots=True)
class View:
    """One worker at one moment, as decisions see it.

    Attributes
    ----------
    key : str
        The worker's URL.
    requests : int
        Legs in flight.
    pending_tokens : int
        Prompt tokens sent and not answered yet.
    active_blocks : int
        Blocks that the legs in flight may come to hold.
    cached_tokens : mapping
        Per tier, how many leading tokens of this prompt the worker could fetch from there.
    tokens_per_s : float
        How fast it prefills: measured, or the settings' until there is a measurement.
    """

    key: str
    requests: int
    pending_tokens: int
    active_blocks: int
    cached_tokens: Mapping[str, int]
    tokens_per_s: float


class Route(enum.Enum):
    """Which way a request goes."""

    PREFILL_THEN_DECODE = "prefill-then-decode"
    DECODE_ONLY = "decode-only"
    REFUSE = "refuse"


class Reason(enum.StrEnum):
    """Why it goes that way: a closed set, so that it can be a label of a metric."""

    PREFILL = "prefill"  # the ordinary way
    CACHED = "cached"  # the store holds the prefix
    CHEAPER_HERE = "cheaper-here"  # fetching and a short prefill on D end before P's queue does
    SHORT_PROMPT = "short-prompt"  # too little to compute to be worth a second worker
    ONE_TOKEN = "one-token"  # noqa: S105  # P would do all of D's work
    BEAMS = "beams"  # beam search
    ECHO = "echo"  # prompt logprobs: D has to compute the whole prompt itself
    UNREADABLE = "unreadable"  # the body is no JSON object: D answers it
    NO_PREFILL_WORKERS = "no-prefill-workers"  # there are none by configuration
    PREFILL_REFUSED = "prefill-refused"  # P said 4xx: D answers it
    PREFILL_LOST = "prefill-lost"  # there are some, and none can be used
    NO_DECODE_WORKERS = "no-decode-workers"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the plan needs to know of a request.

    Attributes
    ----------
    readable : bool
        Whether the body is a JSON object. If not, the other fields say nothing.
    prompt_tokens : int
        Tokens of all prompts together; an estimate where they were not tokenised.
    longest_tokens : int
        Tokens of the longest prompt.
    n : int
        Answers wanted for each prompt.
    beams : bool
        Beam search is asked for.
    max_tokens : int, optional
        The most tokens to generate, if the request says so.
    needs_whole_prompt : bool
        The answer holds something about every token of the prompt (echo with logprobs), which no cache has.
    """

    readable: bool
    prompt_tokens: int = 0
    longest_tokens: int = 0
    n: int = 1
    beams: bool = False
    max_tokens: int | None = None
    needs_whole_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Cached:
    """What the store holds of a request's prompts.

    `tokens_by_tier` is exact per tier: the tokens of the leading run of blocks that are in that tier. `tokens` is that
    of the run where each block is in any of them. With several prompts they are sums.
    """

    tokens_by_tier: Mapping[str, int]
    tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that the plan follows.

    Attributes
    ----------
    on_prefill_loss : str
        "plain": without P's, D does all by itself; "503": the request is refused.
    min_prefill_tokens : int
        Prompts with fewer tokens to compute go to D straight away.
    decode_tokens_per_s : float
        How fast D prefills.
    fetch_tokens_per_s : mapping
        Per tier, how fast an engine fetches cached tokens. A tier that isn't listed is as fast as the slowest one.
    retry_after_s : float
        What a refused client is told to wait.
    """

    on_prefill_loss: str
    min_prefill_tokens: int
    decode_tokens_per_s: float
    fetch_tokens_per_s: Mapping[str, float]
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The way a request goes, and why."""

    route: Route
    reason: Reason
    retry_after_s: float = 0.0
