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

from collections.abc import Callable, Mapping

from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.memory import MemoryTier
from kvstore.victims import Victims

_ROUNDS_MAX = 64  # without a slot gained: a bound on what one request may cost
_QUOTA_STEP = 32  # slots


class Room:
    """Finds slots. `quotas` maps a tenant to its bytes in the cpu tier; no entry: no quota.

    `settle_uses` is called before a victim is chosen: the policies must know of all uses then.
    """

    def __init__(
        self,
        catalog: Catalog,
        memory: MemoryTier,
        quotas: Mapping[str, int],
        settle_uses: Callable[[], None] = lambda: None,
    ) -> None:
        self._settle_uses = settle_uses
        self._catalog = catalog
        self._memory = memory
        self._quotas = quotas
        self._victims = Victims(catalog, Tier.CPU, memory, self._would_be_lost)

    def take_many(self, tenancy: Tenancy, count: int) -> list[int]:
        """Return the offsets of up to `count` slots for blocks of `tenancy`, evicting for those that aren't free."""
        if tenancy.tenant not in self._quotas:
            return self._make_room(tenancy.slot_bytes, count)
        offsets: list[int] = []
        while len(offsets) < count:
            # In small steps: what a quota makes a tenant give up may be of another size, and of no use.
            step = min(_QUOTA_STEP, count - len(offsets))
            taken = self._make_room(tenancy.slot_bytes, self._meet_quota(tenancy, len(offsets), step))
            offsets += taken
            if len(taken) < step:
                break
        return offsets

    def take(self, tenancy: Tenancy, *, for_load: bool = False) -> int | None:
        """Return the offset of a slot for a block of `tenancy`, or None."""
        for offset in self._make_room(tenancy.slot_bytes, self._meet_quota(tenancy, 0, 1)):
            return offset
        return self._memory.allocate_transit(tenancy.slot_bytes) if for_load else None

    def _make_room(self, slot_bytes: int, count: int) -> list[int]:
        """Return the offsets of up to `count` ordinary slots, evicting for those that aren't free."""
        offsets = self._memory.allocate_many(slot_bytes, count)
        fruitless = 0
        if len(offsets) < count:
            self._settle_uses()
        while len(offsets) < count and fruitless < _ROUNDS_MAX:
            victims, before = self._victims.for_slots(slot_bytes, count - len(offsets)), len(offsets)
            if not victims.rows:
                break
            for row in victims.rows:
                # One that was evicted a moment ago as another's slice is no victim any more.
                if not self._catalog.is_evictable(row, Tier.CPU):
                    continue
                self.evict(row, Cause.PRESSURE)
                if not victims.is_region:
                    offsets += self._memory.allocate_many(slot_bytes, count - len(offsets))
                    if len(offsets) == count:
                        break  # what went along with others as their slices was enough
            if victims.is_region:
                offsets += self._memory.allocate_many(slot_bytes, count - len(offsets))
            fruitless += len(offsets) == before
        return offsets

    def evict(self, row: int, cause: Cause) -> int:
        """Evict a block's copy, with its other slices, from the cpu tier and return how many copies went."""
        if self._would_be_lost(row):
            self._catalog.counters[Tier.CPU].demotions_dropped += 1
        return self._catalog.evict_with_slices(row, Tier.CPU, cause)

    def _would_be_lost(self, row: int) -> bool:
        return Tier.SSD in self._catalog.tiers and self._catalog.table.residency[row] == Tier.CPU.bit

    def _meet_quota(self, tenancy: Tenancy, taken: int, count: int) -> int:
        """Evict among the tenant's own blocks; return how many of `count` slots more its quota has room for then.

        `taken` slots are not charged to it yet.
        """
        quota = self._quotas.get(tenancy.tenant)
        if quota is None:
            return count
        wanted_bytes = (taken + count) * tenancy.slot_bytes
        self._settle_uses()
        while (over_bytes := self._catalog.charged_bytes(tenancy, Tier.CPU) + wanted_bytes - quota) > 0:
            over = -(-over_bytes // tenancy.slot_bytes)
            victims = self._victims.for_tenant(tenancy.tenant, over)
            if not victims:
                return max(0, count - over)
            for row in victims:
                if self._catalog.charged_bytes(tenancy, Tier.CPU) + wanted_bytes <= quota:
                    break
                if self._catalog.is_evictable(row, Tier.CPU):
                    self.evict(row, Cause.QUOTA)
        return count
