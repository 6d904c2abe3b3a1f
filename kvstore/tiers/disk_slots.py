"""Who has each slot of the ssd tier: the state between the slab, which knows used and free, and the index.

    free -> allocated -> writing -> live -> deleting -> free

A write that fails makes its slot free, or sets it aside while its segment is not trusted, or, when nobody
knows whether its record was committed, leaves it to the commit's next delete. A slot that becomes free while
it is being read becomes so when the read ends. Used on the event loop only.

Invariants
1. A used slot is in exactly one state; live is the one that needs no entry here.
2. A slot is free in the slab only when no read of it is under way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvstore.tiers.disk_health import Health
from kvstore.tiers.disk_space import Space


class Slots:
    """The slots of one tier. `live_blocks` of them are live at first."""

    def __init__(self, space: Space, health: Health, live_blocks: int) -> None:
        self.live_blocks = live_blocks
        self._space = space
        self._health = health
        self._allocated: set[int] = set()  # until it is live; what is being written is here, too
        self._writing: set[int] = set()
        self._deleting: set[int] = set()
        self._reads: dict[int, int] = {}
        self._free_after_read: set[int] = set()
        self._aside: dict[str, list[int]] = {}  # cause -> slots to be tried again once it backs off no more

    def allocate(self, slot_bytes: int) -> int | None:
        """Return the address of a slot that is now allocated, or None."""
        self.end_aside()
        address = self._space.allocate(slot_bytes, may_create=not self._health.backs_off("space"))
        if address is not None:
            self._allocated.add(address)
        return address

    def release(self, address: int) -> None:
        """Make an allocated slot free that is not being written."""
        assert address not in self._writing, f"slot {address} is being written"
        self._allocated.remove(address)
        self._space.free(address)

    def begin_write(self, address: int) -> None:
        assert address in self._allocated, f"slot {address} was not allocated"
        assert address not in self._writing, f"slot {address} is being written already"
        self._writing.add(address)

    def written(self, address: int) -> None:
        """Note that a slot's block is durable."""
        self._writing.remove(address)
        self._allocated.remove(address)
        self.live_blocks += 1

    def give_up(self, address: int) -> None:
        """Make a slot free whose write failed."""
        self._writing.remove(address)
        self.release(address)

    def set_aside(self, address: int, cause: str) -> None:
        """Keep a slot whose write failed from being used while `cause` backs off."""
        self._aside.setdefault(cause, []).append(address)

    def end_aside(self) -> None:
        """Make those slots free whose cause doesn't back off any more."""
        for cause in [cause for cause in self._aside if not self._health.backs_off(cause)]:
            for address in self._aside.pop(cause):
                self.give_up(address)

    def begin_delete(self, address: int) -> None:
        assert address not in self._allocated, f"slot {address} holds no durable block"
        assert address not in self._deleting, f"the block at {address} is being forgotten already"
        self._deleting.add(address)

    def deleted(self, address: int) -> None:
        """Note that no record names the slot any more."""
        if address in self._allocated:
            self.give_up(address)
            return
        self._deleting.remove(address)
        self.live_blocks -= 1
        if address in self._reads:
            self._free_after_read.add(address)
        else:
            self._space.free(address)

    def begin_reads(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._reads[address] = self._reads.get(address, 0) + 1

    def end_reads(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._reads[address] -= 1
            if not self._reads[address]:
                del self._reads[address]
                if address in self._free_after_read:
                    self._free_after_read.remove(address)
                    self._space.free(address)

    def live(self, segment: int) -> array[int]:
        """Return the addresses of a segment's live slots, ascending."""
        moving = self.moving()
        return array("Q", (a for a in self._space.region(segment).used_offsets() if a not in moving))

    def used(self) -> set[int]:
        """Return the addresses of all used slots."""
        return {address for region in self._space.slab.regions() for address in region.used_offsets()}

    def moving(self) -> set[int]:
        """Return the addresses of all used slots that are not live."""
        return self._allocated | self._deleting | self._free_after_read

    @property
    def aside_bytes(self) -> int:
        return sum(self._space.region_of(address).slot_bytes for slots in self._aside.values() for address in slots)
