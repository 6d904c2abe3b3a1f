"""Which whole region of another size class should be emptied, where one block would make room for nobody.

Theory of operation. The coldest rows of the other classes lead to regions. One of them can be emptied unless a row in
it is held or pinned, or a slot in it is being written. The row that was met in the way is remembered: as long as it is
there, the next search knows without looking at the thousands of rows beside it.

Invariants
1. Every row of a region that is named is ready in the tier and neither held nor pinned.
2. One search looks at a bounded number of rows, however large the tier and however many rows are in the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

from kvstore.catalog import Catalog
from kvstore.lifecycle import Copy
from kvstore.table import Tier
from kvstore.tiers.slab import NOBODY

_REGIONS_TRIED = 64  # in one search
_ROWS_TRIED = 512  # at the cold end of one class
_ROWS_TRIED_IN_ALL = 2048
_OWNERS_TRIED = 4096  # rows inside regions; the region at which this is reached is still looked through
# For so long a slot seen being written is taken to be so still, and a vain search is not repeated; not where the own
# class has nothing to give.
_TRUSTED_TICKS = 10


class Space(Protocol):
    """What is asked of a tier's slots."""

    def region_at(self, slot: int, /) -> int:
        """Return the region that a slot lies in; NOBODY if in none that could be emptied."""
        ...

    def clearing(self, slot: int, slot_bytes: int, /) -> tuple[int, ...]:
        """Return the regions to empty so that one of another class fits where `slot` lies; none: it can't."""
        ...

    def owners(self, region: int, /) -> Iterable[int]:
        """Return the rows in a region, NOBODY for one being written."""
        ...

    def region_starts(self) -> Sequence[int]:
        """Return the first slot of every region that could be emptied."""
        ...


class Found(NamedTuple):
    """A region to empty: its rows, and how long the row that led there has been idle."""

    rows: Sequence[int]
    idle_ticks: int


class RegionSearch:
    """Searches one tier."""

    def __init__(self, catalog: Catalog, tier: Tier, space: Space) -> None:
        self._catalog = catalog
        self._tier = tier
        self._space = space
        self._policy = catalog.policies[tier]
        self._in_the_way: dict[int, tuple[int, int]] = {}  # region -> the row met there, and when
        self._vain_until: dict[int, int] = {}  # slot size -> tick
        self._hand = 0  # where the last search over all regions ended

    def colder(self, slot_bytes: int, idle_ticks: float, now: int) -> Found | None:
        """Return a region of another class that was idle longer than this, the coldest that a short search finds."""
        if now < self._vain_until.get(slot_bytes, 0):
            return None
        attempt = _Attempt(now - _TRUSTED_TICKS)
        found = self._coldest(slot_bytes, idle_ticks, now, attempt)
        if found is None and attempt.regions:
            self._vain_until[slot_bytes] = now + _TRUSTED_TICKS
        return found

    def any(self, slot_bytes: int, now: int) -> Found | None:
        """Return a region of another class that can be emptied, one of the coldest if possible."""
        attempt = _Attempt(now)
        found = self._coldest(slot_bytes, -1, now, attempt)
        if found is not None or not attempt.regions:
            return found
        # What is coldest is in use here and there: go on where the last such search ended, whatever lies there.
        attempt = _Attempt(now)
        starts = self._space.region_starts()
        hand = self._hand % max(1, len(starts))
        for start in islice(chain(starts[hand:], starts[:hand]), _REGIONS_TRIED):
            if attempt.is_spent():
                break
            self._hand += 1
            rows = self._clearable(self._space.clearing(start, slot_bytes), attempt)
            if rows:
                return Found(rows, 0)
        return None

    def _coldest(self, slot_bytes: int, idle_ticks: float, now: int, attempt: _Attempt) -> Found | None:
        slots, space, last_use = self._catalog.table.slot[self._tier], self._space, self._policy.last_use
        for lane in self._lanes(slot_bytes, idle_ticks, now):
            for row in islice(self._policy.coldest(lane), _ROWS_TRIED):
                idle = now - last_use(row)
                if idle <= idle_ticks or attempt.is_spent():
                    break
                attempt.rows += 1
                region = space.region_at(slots[row])
                if region == NOBODY or region in attempt.regions:
                    continue
                attempt.regions.add(region)
                rows = self._clearable(space.clearing(slots[row], slot_bytes), attempt)
                if rows:
                    return Found(rows, idle)
        return None

    def _lanes(self, slot_bytes: int, idle_ticks: float, now: int) -> Iterator[int]:
        """Yield the lanes of other classes whose first row has been idle for longer, the coldest first."""
        lanes: list[tuple[int, int]] = []
        for lane, (size, _, tier) in enumerate(self._catalog.lanes):
            row = next(self._policy.coldest(lane), None) if tier is self._tier and size != slot_bytes else None
            if row is not None and (idle := now - self._policy.last_use(row)) > idle_ticks:
                lanes.append((idle, lane))
        return (lane for _, lane in sorted(lanes, reverse=True))

    def _clearable(self, regions: tuple[int, ...], attempt: _Attempt) -> list[int]:
        """Return all rows of some regions, none if one of them is in the way."""
        if any(self._is_known_blocked(region, attempt.trusted_from) for region in regions):
            return []
        for region in regions:
            row = self._first_in_the_way(region, attempt)
            if row is not None:
                self._in_the_way[region] = row, self._catalog.tick()
                return []
        return [row for region in regions for row in self._space.owners(region)]

    def _is_known_blocked(self, region: int, trusted_from: int) -> bool:
        row, seen = self._in_the_way.get(region, (NOBODY, -1))
        if row == NOBODY:
            return seen > trusted_from
        slot = self._catalog.table.slot[self._tier][row]
        is_there = slot >= 0 and self._space.region_at(slot) == region
        if is_there and not self._catalog.is_evictable(row, self._tier):
            return True
        del self._in_the_way[region]
        return False

    def _first_in_the_way(self, region: int, attempt: _Attempt) -> int | None:
        # What Catalog.is_evictable asks of a row: a call for each of thousands would take three times as long.
        table = self._catalog.table
        state, holds, pinned, ready = table.state[self._tier], table.holds, self._catalog.pinned, Copy.READY
        kept: Collection[int] = self._catalog.kept if self._tier is Tier.SSD else ()
        for row in self._space.owners(region):
            attempt.owners += 1
            if row < 0 or holds[row] or state[row] != ready or row in pinned or row in kept:
                return row
        return None


class _Attempt:
    """What one search has looked at."""

    __slots__ = ("owners", "regions", "rows", "trusted_from")

    def __init__(self, trusted_from: int) -> None:
        self.trusted_from = trusted_from  # a slot seen being written later than that is taken to be so still
        self.rows = 0
        self.owners = 0
        self.regions: set[int] = set()

    def is_spent(self) -> bool:
        return self.rows >= _ROWS_TRIED_IN_ALL or self.owners >= _OWNERS_TRIED or len(self.regions) >= _REGIONS_TRIED
