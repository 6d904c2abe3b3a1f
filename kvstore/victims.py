"""Which blocks should go from a tier to make room for some of a given size: decisions, no evictions.

Theory of operation. The rows of the size's lanes are walked from their cold ends, all victims of one request in one
walk. Rows in use that stand there are moved to the recent end once they are many, so that the next walk meets others.
In a tier where those that are spared move as well, each victim pays for a few rows more to be looked at, and what is
not needed is saved up: long runs of spared rows are passed now and then, and where all are spared no walk is long.

Invariants
1. A victim is ready in the tier and neither held nor pinned, and is named once.
2. As many blocks are named as are asked for, at most. A whole region of another size class is named only where that
   class has grown clearly colder, or where the own class has nothing to give.
3. One call looks at a bounded number of rows, in proportion to the victims it is asked for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvstore.catalog import Catalog
from kvstore.regions import RegionSearch, Space
from kvstore.table import Tier

_LOOK_AHEAD = 64  # spared rows at the cold end of a lane that are passed over for one that isn't
_LOOK_AHEAD_A_VICTIM = 32  # where those that are spared are moved away
_LOOK_AHEAD_SAVED_MAX = 4096
_IN_THE_WAY = 16  # that many held or pinned rows at the cold end are moved to the recent one
_IN_USE_MAX = 1024  # and no more than that are met in one walk of a lane
_WALKS_MAX = 16  # one after the other, as long as nothing but rows in use was met
_COLDER_BY = 1.25  # another class's region is taken only if it is idle this much longer


class Choice(NamedTuple):
    """Rows to evict. Each makes room for one block, unless they are a region: that is of use only if all of it goes."""

    rows: Sequence[int]
    is_region: bool = False


class Victims:
    """Decides for one tier. `spared` says which rows to pass over while others near the cold end will do.

    `spared_are_in_use`: those are no colder than others for standing there, and are moved out of the way as well.
    """

    def __init__(
        self,
        catalog: Catalog,
        tier: Tier,
        space: Space,
        spared: Callable[[int], bool],
        *,
        spared_are_in_use: bool = False,
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._spared = spared
        self._spared_are_in_use = spared_are_in_use
        self._saved = _LOOK_AHEAD_SAVED_MAX
        self._policy = catalog.policies[tier]
        self._regions = RegionSearch(catalog, tier, space)

    def for_slots(self, slot_bytes: int, count: int) -> Choice:
        """Return rows to evict so that up to `count` slots of this size, or a region, become free; none if none may go.

        The walk knows nothing of what goes along with a row (a block's other slices): look again before each.
        """
        own = self._coldest(self._lanes(slot_bytes=slot_bytes), count)
        now, last_use = self._catalog.tick(), self._policy.last_use  # one now for all that is compared
        if not own:
            found = self._regions.any(slot_bytes, now)
            return Choice(()) if found is None else Choice(found.rows, is_region=True)
        # A region may be clearly colder than the warmest of them only: then those before it go first.
        found = self._regions.colder(slot_bytes, (now - max(map(last_use, own))) * _COLDER_BY, now)
        if found is None:
            return Choice(own)
        idle_ticks = found.idle_ticks
        own = list(takewhile(lambda row: (now - last_use(row)) * _COLDER_BY >= idle_ticks, own))
        return Choice(own) if own else Choice(found.rows, is_region=True)

    def for_tenant(self, tenant: str, count: int = 1) -> Sequence[int]:
        """Return up to `count` rows that a tenant should give up first, of whatever size."""
        return self._coldest(self._lanes(tenant=tenant), count)

    def _lanes(self, slot_bytes: int | None = None, tenant: str | None = None) -> list[int]:
        return [
            lane
            for lane, (size, owner, tier) in enumerate(self._catalog.lanes)
            if tier is self._tier and slot_bytes in (None, size) and tenant in (None, owner)
        ]

    def _coldest(self, lanes: Sequence[int], count: int) -> list[int]:
        """Return up to `count` rows, the best victims of all these lanes first."""
        rows: list[int] = []
        for _ in range(_WALKS_MAX):
            walks = [_Walk(self._policy.coldest(lane), self._look_ahead(len(lanes))) for lane in lanes]
            rows = self._merged(walks, count)
            self._move_aside(walks)
            if rows or not any(walk.is_cut_off for walk in walks):
                break
        return rows

    def _merged(self, walks: Sequence[_Walk], count: int) -> list[int]:
        rows: list[int] = []
        heads = [(*head, at) for at, walk in enumerate(walks) if (head := self._next(walk)) is not None]
        heapq.heapify(heads)
        while heads and len(rows) < count:
            is_spared, _, row, at = heapq.heappop(heads)
            rows.append(row)
            if len(rows) < count:
                walk = walks[at]
                walk.look_ahead += _LOOK_AHEAD_A_VICTIM if self._spared_are_in_use else is_spared
                if (head := self._next(walk)) is not None:
                    heapq.heappush(heads, (*head, at))
        for is_spared, _, row, at in heads:
            if is_spared:
                walks[at].passed_over.appendleft(row)
        return rows

    def _next(self, walk: _Walk) -> tuple[bool, float, int] | None:
        """Return what a lane should give next: whether it is spared, its rank, and the row."""
        spared, is_evictable, tier = self._spared, self._catalog.is_evictable, self._tier
        while walk.look_ahead > 0 and not walk.is_cut_off:
            row = next(walk.rows, None)
            if row is None:
                break
            if not is_evictable(row, tier):
                walk.in_use.append(row)
                walk.is_cut_off = len(walk.in_use) >= _IN_USE_MAX
            elif spared(row):
                walk.passed_over.append(row)
                walk.look_ahead -= 1
            else:
                return False, self._policy.rank(row), row
        if not walk.passed_over:
            return None
        row = walk.passed_over.popleft()
        return True, self._policy.rank(row), row

    def _look_ahead(self, lanes: int) -> int:
        return self._saved // lanes + _LOOK_AHEAD_A_VICTIM if self._spared_are_in_use else _LOOK_AHEAD

    def _move_aside(self, walks: Sequence[_Walk]) -> None:
        # Else thousands of pins and leases would gather at the cold end, to be looked at for every victim.
        now = self._catalog.tick()
        for walk in walks:
            aside = [*walk.in_use, *walk.passed_over] if self._spared_are_in_use else walk.in_use
            if len(aside) >= _IN_THE_WAY:
                for row in aside:
                    self._policy.renew(row, now, 0)
        if self._spared_are_in_use and walks:
            self._saved = min(sum(walk.look_ahead for walk in walks), _LOOK_AHEAD_SAVED_MAX)


class _Walk:
    """One lane, from its cold end on."""

    __slots__ = ("in_use", "is_cut_off", "look_ahead", "passed_over", "rows")

    def __init__(self, rows: Iterator[int], look_ahead: int) -> None:
        self.rows = rows
        self.look_ahead = look_ahead  # spared rows that may still be passed over
        self.passed_over: deque[int] = deque()
        self.in_use: list[int] = []
        self.is_cut_off = False
