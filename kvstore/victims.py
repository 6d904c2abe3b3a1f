"""Which blocks should go from a tier to make room for one of a given size: decisions, no evictions.

Invariants
1. A victim is ready in the tier and neither held nor pinned.
2. One block is named where one is enough. A whole region of another size class is named only where that class has
   grown clearly colder, or where the own class has nothing to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.catalog import Catalog
from kvstore.table import Tier
from kvstore.tiers.slab import NOBODY

_LOOK_AHEAD = 64  # rows at the cold end that are looked at for one victim, those in use not counted
_IN_THE_WAY = 16  # that many held or pinned rows at the cold end are moved to the recent one
_IN_USE_MAX = 4096  # and no more than that are met in one search
_REGIONS_TRIED = 16
_ROWS_TRIED = 512
_COLDER_BY = 1.25  # another class's region is taken only if it is idle this much longer


class Space(Protocol):
    """What is asked of a tier's slots."""

    def clearing(self, slot: int, slot_bytes: int, /) -> tuple[int, ...]:
        """Return the regions to empty so that one of another class fits where `slot` lies; none: it can't."""
        ...

    def owners(self, region: int, /) -> Sequence[int]:
        """Return the rows in a region, NOBODY for one being written."""
        ...


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
        self._space = space
        self._spared = spared
        self._spared_are_in_use = spared_are_in_use
        self._policy = catalog.policies[tier]

    def for_slot(self, slot_bytes: int) -> Sequence[int]:
        """Return the rows to evict so that a slot of this size, or a region, becomes free; none if none may go."""
        own = self._coldest(self._lanes(slot_bytes=slot_bytes))
        region = self._colder_region(slot_bytes, own)
        if region is not None:
            return region
        return () if own is None else (own,)

    def for_tenant(self, tenant: str) -> int | None:
        """Return the row a tenant should give up first."""
        return self._coldest(self._lanes(tenant=tenant))

    def _lanes(self, slot_bytes: int | None = None, tenant: str | None = None) -> list[int]:
        return [
            lane
            for lane, (size, owner, tier) in enumerate(self._catalog.lanes)
            if tier is self._tier and slot_bytes in (None, size) and tenant in (None, owner)
        ]

    def _coldest(self, lanes: list[int]) -> int | None:
        best: int | None = None
        best_rank: tuple[bool, float] | None = None
        for lane in lanes:
            looked_at = 0
            in_use: list[int] = []
            for row in self._policy.coldest(lane):
                if len(in_use) >= _IN_USE_MAX:
                    break
                if not self._catalog.is_evictable(row, self._tier):
                    in_use.append(row)
                    continue
                rank = (self._spared(row), self._policy.rank(row))
                if best_rank is None or rank < best_rank:
                    best, best_rank = row, rank
                if rank[0] and self._spared_are_in_use:
                    in_use.append(row)
                    continue
                looked_at += 1
                if not rank[0] or looked_at >= _LOOK_AHEAD:
                    break
            if len(in_use) >= _IN_THE_WAY:
                # Else thousands of pins and leases would gather there, to be looked at for every victim.
                for row in in_use:
                    self._policy.renew(row, self._catalog.tick(), 0)
        return best

    def _colder_region(self, slot_bytes: int, own: int | None) -> Sequence[int] | None:
        slots, policy = self._catalog.table.slot[self._tier], self._policy
        own_idle_s = None if own is None else self._catalog.idle_s(own, self._tier) * _COLDER_BY
        for lane, (size, _, tier) in enumerate(self._catalog.lanes):
            if tier is not self._tier or size == slot_bytes:
                continue
            tried: set[tuple[int, ...]] = {()}
            for looked_at, row in enumerate(policy.coldest(lane)):
                too_warm = own_idle_s is not None and self._catalog.idle_s(row, self._tier) <= own_idle_s
                if too_warm or looked_at >= _ROWS_TRIED or len(tried) > _REGIONS_TRIED:
                    break
                regions = self._space.clearing(slots[row], slot_bytes)
                if regions in tried:
                    continue
                tried.add(regions)
                rows = [owner for region in regions for owner in self._space.owners(region)]
                if rows and all(r != NOBODY and self._catalog.is_evictable(r, self._tier) for r in rows):
                    return rows
        return None
