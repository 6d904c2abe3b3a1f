"""Runs: stretches of a chain of blocks that belong together, told apart by looking at hashes and depth alone.

Theory of operation. What is placed on a node of the pool is a run, not a block, so that a sequence stays together and
a lookup of a long prefix asks a few nodes. Every node must cut a chain at the same places, whoever stores a part of it
and whoever asks for the whole. So the hash decides: a block whose mixed hash is under a bound begins a run, and that
mixed hash is the run's key. A chain's first block begins one too.

How long runs are on average depends on how deep in the chain they lie: a quarter of the tokens before them, within
limits. Prompts fork near their heads: thousands go on differently behind one system prompt, and what follows a fork is
in the run of what comes before it until the next cut. With runs of one length, half of all blocks of a recorded trace
came to lie on the node that was home to its system prompt (docs/cluster.md). So a prompt of n tokens has about
4 ln n runs, and what its node bears for a fork is a quarter of the depth at which it forks.

A request that begins in the middle of a chain must say where: `before` is the run of the block ahead, and how many
blocks there are up to it. `RunMemory` knows it from the request that had that block. Where nobody knows, the request is
cut as if its chain began there: others who come with the whole chain do not find these blocks, until the next long run
begins that both see; this node, which has them, does. It heals when the whole chain is next stored or used here.

The slices of one block (ranks of a parallel model) have one hash, hence one run: they lie on one node.

Invariants
1. The same hashes with the same `before` give the same runs, on every machine and in every version: the mixing and the
   bounds are part of the protocol.
2. A part of a chain, with its `before`, is cut as it is in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

from xxhash import xxh3_64_intdigest

RunKey = NewType("RunKey", int)

RUN_TOKENS_MIN = 128
RUN_TOKENS_MAX = 8192
RUN_SHARE = 4  # a run is one in so many of the tokens before it
REMEMBERED_MAX = 65_536
_DEPTH_MAX = RUN_TOKENS_MAX * RUN_SHARE  # in tokens; behind it runs grow no more


class Run(NamedTuple):
    """The blocks at positions `start` to `stop` of a request."""

    key: RunKey
    start: int
    stop: int


class Point(NamedTuple):
    """A place in a chain: the run of the block there, and how many blocks the chain has up to it, itself included."""

    run: RunKey
    blocks: int


def run_tokens(depth_tokens: int) -> int:
    """Return how many tokens a run has on average that begins behind so many."""
    return min(max(depth_tokens // RUN_SHARE, RUN_TOKENS_MIN), RUN_TOKENS_MAX)


def runs(hashes: Sequence[bytes], block_tokens: int, before: Point | None = None) -> list[Run]:
    """Return the runs of consecutive blocks of one chain, in order; together they are all of `hashes`.

    Parameters
    ----------
    hashes : sequence of bytes
        Block hashes in the order of their chain.
    block_tokens : int
        Tokens in a block.
    before : Point, optional
        The block before the first of these. None: the chain begins here, or nobody knows.
    """
    if not hashes:
        return []
    first = 0 if before is None else before.blocks
    bounds = _bounds(block_tokens)
    last_bound = bounds[-1]
    own = bounds[first : first + len(hashes)]
    own += [last_bound] * (len(hashes) - len(own))
    keys = list(map(xxh3_64_intdigest, hashes))
    starts = [at for at, (key, bound) in enumerate(zip(keys, own, strict=True)) if key < bound]
    found: list[Run] = []
    if not starts or starts[0]:
        key = keys[0] if before is None else before.run
        found.append(Run(RunKey(key), 0, starts[0] if starts else len(hashes)))
    stops = [*starts[1:], len(hashes)]
    found += [Run(RunKey(keys[start]), start, stop) for start, stop in zip(starts, stops[: len(starts)], strict=True)]
    return found


class RunMemory:
    """Where in its chain a block is, for requests that begin in the middle: two generations, bounded.

    What is worth noting of a request: its last block, which the next window names as the one ahead, and the last that
    is there, behind which a store begins.

    Invariants
    1. It holds at most `remembered_max` blocks, and forgets none of the half that was noted last.
    """

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._half = max(1, remembered_max // 2)
        self._young: dict[bytes, Point] = {}
        self._old: dict[bytes, Point] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, block_hash: bytes, point: Point) -> None:
        """Remember where a block is."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._old.pop(block_hash, None)
        self._young[block_hash] = point

    def recall(self, block_hash: bytes) -> Point | None:
        """Return where a block was noted to be, None if it is not remembered."""
        point = self._young.get(block_hash)
        return self._old.get(block_hash) if point is None else point


_bounds_of: dict[int, list[int]] = {}


def _bounds(block_tokens: int) -> list[int]:
    """Return, for a block at each position of a chain, the bound under which its mixed hash begins a run."""
    found = _bounds_of.get(block_tokens)
    if found is None:
        if len(_bounds_of) > 64:
            _bounds_of.clear()
        depths = range(0, _DEPTH_MAX + block_tokens, block_tokens)
        found = [min((block_tokens << 64) // run_tokens(depth), 1 << 64) for depth in depths]
        _bounds_of[block_tokens] = found
    return found
