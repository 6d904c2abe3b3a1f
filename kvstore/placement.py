"""Which members of the pool are a run's homes: rendezvous hashing, weighted by capacity.

Every member has, for every run, a distance -ln(u) / weight, where u in (0, 1] is drawn from a hash of its name and the
run's key; the nearest are the homes. (The logarithmic method: the least of exponential draws with rates w_i is the
i-th with probability w_i / sum of w.) Whoever has the same view of the members finds the same homes, without a table
that would have to be agreed on.

Invariants
1. Homes depend on the members' names and weights and the run's key alone: not on the order in which members came, not
   on the process, not on the machine. (Distances are doubles. Two libraries whose logarithms differ in the last bit
   could disagree about two members in one of 2**50 runs, and such a run is a miss.)
2. A member that joins takes runs for itself and moves none between others; one that leaves gives its own to others,
   each to the one that was next.
3. With n copies, the first n - 1 homes are those of n - 1 copies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from itertools import repeat

from xxhash import xxh3_64_intdigest

from kvstore.errors import UsageError
from kvstore.runs import RunKey

COPIES_MAX = 8
_CACHED_MAX = 16_384
_MANTISSA_BITS = 5


def weight_of(capacity_bytes: int) -> int:
    """Return the weight of a capacity: itself to five binary digits.

    So a capacity that changes by a little moves nothing, and members that are alike are compared without a logarithm.
    The share of a member is off by 3 % at most.
    """
    if capacity_bytes <= 0:
        raise UsageError(f"a member's capacity is a positive number of bytes, not {capacity_bytes}")
    spare = max(0, capacity_bytes.bit_length() - _MANTISSA_BITS)
    half = (1 << spare) >> 1
    return (capacity_bytes + half) >> spare << spare


class Placement:
    """The homes of runs among fixed members; a changed membership is a new Placement.

    Parameters
    ----------
    capacities : mapping of str to int
        Each member's name and the bytes it gives to the pool.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self.weights = {name: weight_of(capacities[name]) for name in sorted(capacities)}
        by_weight: dict[int, list[str]] = {}
        for name, weight in self.weights.items():
            by_weight.setdefault(weight, []).append(name)
        self._classes = [(weight, names, [name.encode() for name in names]) for weight, names in by_weight.items()]
        self._cached: dict[tuple[RunKey, int], tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self.weights)

    def homes(self, run: RunKey, copies: int = 1) -> tuple[str, ...]:
        """Return the names of a run's homes, the first first; fewer than `copies` only if there are fewer members."""
        found = self._cached.get((run, copies))
        if found is None:
            if len(self._cached) >= _CACHED_MAX:
                self._cached.clear()
            found = self._cached[run, copies] = self._nearest(run, copies)
        return found

    def share_of(self, name: str) -> float:
        """Return the part of all runs whose first home a member is."""
        return self.weights[name] / sum(self.weights.values())

    def _nearest(self, run: RunKey, copies: int) -> tuple[str, ...]:
        if not 1 <= copies <= COPIES_MAX:
            raise UsageError(f"a block has 1 to {COPIES_MAX} homes, not {copies}")
        nearest: list[tuple[float, str]] = []
        for weight, names, encoded in self._classes:
            draws = zip(map(xxh3_64_intdigest, encoded, repeat(run)), names, strict=True)
            best: Iterable[tuple[int, str]] = (max(draws),) if copies == 1 else heapq.nlargest(copies, draws)
            nearest += [(-math.log((draw + 1) / 2**64) / weight, name) for draw, name in best]
        nearest.sort()
        return tuple(name for _, name in nearest[:copies])
