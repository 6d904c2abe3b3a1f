"""Runs: stretches of a chain of blocks that belong together, told apart by looking at the hashes alone.

Theory of operation. What is placed on a node of the pool is a run, not a block, so that a sequence stays together and
a lookup of a long prefix asks a few nodes. Every node must cut a chain at the same places, and most requests are no
whole chain: an engine stores what it has computed behind its hits, and a long prompt comes in windows. Cutting at each
n-th position would need the position of every request's first block, and one that lacks it would place all of its
blocks elsewhere. So the hash decides: a block whose mixed hash is under a bound begins a run, one in `run_blocks` on
average. The run's key is that mixed hash. A chain's first block begins a run too.

Of a request that begins in the middle, only the blocks before its first such beginning depend on what came before.
`before` says it: the run of the block ahead, which `RunMemory` knows from the request that had it. Where nobody
knows, these blocks get a run of their own, which those who come with the whole chain do not look for: they are missed
by other nodes (never by this one, which has them), and a chain that is missed in the middle is worth its head alone.
It heals when the whole chain is next looked up and announced. Lengths are geometric: one run in fifty is four times as
long as the average, which costs balance and nothing else.

The slices of one block (ranks of a parallel model) have one hash, hence one run: they lie on one node.

Invariants
1. The same hashes with the same `before` give the same runs, on every machine and in every version: the mixing is part
   of the protocol.
2. Two requests over one chain agree on every block behind the first beginning that both contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

from xxhash import xxh3_64_intdigest

RunKey = NewType("RunKey", int)

RUN_TOKENS = 4096
REMEMBERED_MAX = 65_536


class Run(NamedTuple):
    """The blocks at positions `start` to `stop` of a request."""

    key: RunKey
    start: int
    stop: int


def run_blocks(block_tokens: int) -> int:
    """Return how many blocks a run has on average."""
    return max(1, RUN_TOKENS // block_tokens)


def runs(hashes: Sequence[bytes], blocks_mean: int, before: RunKey | None = None) -> list[Run]:
    """Return the runs of consecutive blocks of one chain, in order; together they are all of `hashes`.

    Parameters
    ----------
    hashes : sequence of bytes
        Block hashes in the order of their chain.
    blocks_mean : int
        What `run_blocks` says for the namespace.
    before : RunKey, optional
        The run of the block before the first of these. None: the chain begins here, or nobody knows.
    """
    if not hashes:
        return []
    bound = (1 << 64) // blocks_mean
    keys = list(map(xxh3_64_intdigest, hashes))
    starts = [at for at, key in enumerate(keys) if key < bound]
    found: list[Run] = []
    if not starts or starts[0]:
        first = keys[0] if before is None else before
        found.append(Run(RunKey(first), 0, starts[0] if starts else len(hashes)))
    for at, start in enumerate(starts):
        found.append(Run(RunKey(keys[start]), start, starts[at + 1] if at + 1 < len(starts) else len(hashes)))
    return found


class RunMemory:
    """Which run a block is in, for requests that begin in the middle of a chain: two generations, bounded.

    What is worth noting of a request: its last block, which the next window names as the one ahead, and the first that
    is missing, with which a store begins.

    Invariants
    1. It holds at most `remembered_max` blocks, and forgets none of the half that was noted last.
    """

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._half = max(1, remembered_max // 2)
        self._young: dict[bytes, RunKey] = {}
        self._old: dict[bytes, RunKey] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, block_hash: bytes, run: RunKey) -> None:
        """Remember that a block is in a run."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._old.pop(block_hash, None)
        self._young[block_hash] = run

    def recall(self, block_hash: bytes) -> RunKey | None:
        """Return the run that a block was noted in, None if it is not remembered."""
        run = self._young.get(block_hash)
        return self._old.get(block_hash) if run is None else run
