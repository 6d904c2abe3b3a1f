"""Room in the cpu tier: a free slot for a block, by evicting what is coldest where there is none.

Eviction here never waits: a block whose only copy is in memory is passed over for one that is also on ssd, if such a
one is near the cold end; else it is lost and counted as a demotion dropped, because an engine is never stalled by a
slower tier.

Invariants
1. What is evicted is the shortfall: one block (and its other slices) a slot, or one region of another size class.
2. A tenant over its quota makes room among its own blocks only.
3. Slots in transit are taken only by loads, and only when ordinary ones can't be had.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.memory import MemoryTier
from kvstore.victims import Victims

_ROUNDS_MAX = 64  # for one slot: a bound on what one request may cost


class Room:
    """Finds slots. `quotas` maps a tenant to its bytes in the cpu tier; no entry: no quota."""

    def __init__(self, catalog: Catalog, memory: MemoryTier, quotas: Mapping[str, int]) -> None:
        self._catalog = catalog
        self._memory = memory
        self._quotas = quotas
        self._victims = Victims(catalog, Tier.CPU, memory, self._would_be_lost)

    def take_many(self, tenancy: Tenancy, count: int) -> list[int]:
        """Return the offsets of up to `count` slots for blocks of `tenancy`, evicting for those that aren't free."""
        if tenancy.tenant in self._quotas:
            offsets: list[int] = []
        else:
            offsets = self._memory.allocate_many(tenancy.slot_bytes, count)
        while len(offsets) < count:
            offset = self.take(tenancy, taken=len(offsets))
            if offset is None:
                break
            offsets.append(offset)
        return offsets

    def take(self, tenancy: Tenancy, *, for_load: bool = False, taken: int = 0) -> int | None:
        """Return the offset of a slot for a block of `tenancy`, or None; `taken` slots are not charged to it yet."""
        offset: int | None = None
        if self._meet_quota(tenancy, taken):
            offset = self._memory.allocate(tenancy.slot_bytes)
            rounds = 0
            while offset is None and rounds < _ROUNDS_MAX:
                victims = self._victims.for_slot(tenancy.slot_bytes)
                if not victims:
                    break
                for row in victims:
                    # One that was evicted a moment ago as another's slice is no victim any more.
                    if self._catalog.is_evictable(row, Tier.CPU):
                        self.evict(row, Cause.PRESSURE)
                offset = self._memory.allocate(tenancy.slot_bytes)
                rounds += 1
        if offset is None and for_load:
            offset = self._memory.allocate_transit(tenancy.slot_bytes)
        return offset

    def evict(self, row: int, cause: Cause) -> int:
        """Evict a block's copy, with its other slices, from the cpu tier and return how many copies went."""
        if self._would_be_lost(row):
            self._catalog.counters[Tier.CPU].demotions_dropped += 1
        return self._catalog.evict_with_slices(row, Tier.CPU, cause)

    def _would_be_lost(self, row: int) -> bool:
        return Tier.SSD in self._catalog.tiers and self._catalog.table.residency[row] == Tier.CPU.bit

    def _meet_quota(self, tenancy: Tenancy, taken: int) -> bool:
        quota = self._quotas.get(tenancy.tenant)
        if quota is None:
            return True
        while self._catalog.charged_bytes(tenancy, Tier.CPU) + (taken + 1) * tenancy.slot_bytes > quota:
            victim = self._victims.for_tenant(tenancy.tenant)
            if victim is None:
                return False
            self.evict(victim, Cause.QUOTA)
        return True
