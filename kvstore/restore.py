"""Warm start: what the ssd tier holds becomes visible at once; what needs no hurry is caught up in the background.

At once, with as little work a block as possible (a million of them are a matter of a second): rows, and the dict that
makes them visible. In the background, some thousands a tick: who owns which slot on ssd, and the order of use as of the
last checkpoint, until which the coldest blocks are those that were written first.

Invariants
1. A record of an older epoch than its namespace's, or of a key that another record names too, is never visible, and is
   deleted.
2. Each namespace keeps its epoch, its default life and the number that the directory knows it by.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from kvstore.block import Namespace
from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.errors import BadRecord, KVStoreError
from kvstore.lifecycle import Copy
from kvstore.table import Columns, Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_records import Columns as DiskColumns
from kvstore.tiers.slab import Slab


class WarmStart:
    """What a store found on ssd. `stale` are addresses to forget."""

    def __init__(self, catalog: Catalog, disk: DiskTier) -> None:
        self.stale: list[int] = []
        self._catalog = catalog
        self._disk = disk
        self._unowned = 0  # rows below this are not known to the tier as owners yet
        self._recency = disk.take_recency()
        self._placed = 0  # so many of these addresses are in order
        self._since = catalog.tick()
        tenancies = self._namespaces()
        catalog.namespaces.epoch_floor = disk.epoch_floor
        records = self._disk.take_records()
        if not _are_current(records, tenancies):
            records, self.stale = _current(records, tenancies)
        numbers = _renumbered(records.namespaces, {n: tenancy.number for n, tenancy in tenancies.items()})
        slots = array("q")
        slots.frombytes(records.addresses.tobytes())
        columns = Columns(records.checksums, records.generations, records.expiries_s, slots)
        for row in catalog.restore(records.hashes, numbers, columns):
            catalog.drop(row, Cause.DROP)
        self._unowned = len(records)
        for pin in disk.pins():
            pinned = tenancies[pin.namespace].rows.get(pin.hash) if pin.namespace in tenancies else None
            if pinned is not None:
                catalog.pins.pin(pinned, pin.ends_s)

    def catch_up(self, limit: int) -> int:
        """Do a little of what is left: look at `limit` rows. Return how many were looked at."""
        if self._unowned:
            self._note_owners(limit)
        elif self._placed < len(self._recency):
            self._restore_order(limit)
        else:
            self._recency = array("Q")
            return 0
        return limit

    def _note_owners(self, limit: int) -> None:
        first = max(0, self._unowned - limit)
        slots, states = self._catalog.table.slot[Tier.SSD], self._catalog.table.state[Tier.SSD]
        for row in range(first, self._unowned):
            if states[row] == Copy.READY:
                self._disk.set_owner(slots[row], row)
        self._unowned = first

    def _restore_order(self, limit: int) -> None:
        """Move the next addresses' blocks to the recent end, coldest first, but for those that were used since."""
        policy, since, now = self._catalog.policies[Tier.SSD], self._since, self._catalog.tick()
        for address in self._recency[self._placed : self._placed + limit]:
            row = self._disk.owner(address)
            if self._catalog.is_at(row, Tier.SSD, address) and policy.last_use(row) <= since:
                policy.renew(row, now, 0)
        self._placed += limit

    def _namespaces(self) -> dict[int, Tenancy]:
        """Return the namespaces that the directory knows, by its own numbers."""
        found: dict[int, Tenancy] = {}
        for known in self._disk.namespaces():
            try:
                namespace = Namespace.decode(known.encoded)
            except KVStoreError as exc:
                raise BadRecord(f"namespace {known.number} in the ssd directory can't be read: {exc}") from exc
            tenancy = self._catalog.tenancy(known.tenant, namespace, slots_for(namespace))
            tenancy.disk_number, tenancy.epoch, tenancy.ttl_s = known.number, known.epoch, known.ttl_s
            found[known.number] = tenancy
        return found


def slots_for(namespace: Namespace) -> dict[Tier, int]:
    """Return what a block of this namespace takes in each tier."""
    length = namespace.block_bytes
    return {Tier.CPU: Slab.slot_bytes_for(length), Tier.SSD: DiskTier.slot_bytes(length)}


def _are_current(records: DiskColumns, tenancies: Mapping[int, Tenancy]) -> bool:
    epochs = {number: tenancy.epoch for number, tenancy in tenancies.items()}
    if len(epochs) == 1:
        ((number, epoch),) = epochs.items()
        count = len(records)
        return records.namespaces.count(number) == count and records.epochs.count(epoch) == count
    return set(zip(records.namespaces, records.epochs, strict=True)) <= epochs.items()


def _current(records: DiskColumns, tenancies: Mapping[int, Tenancy]) -> tuple[DiskColumns, list[int]]:
    """Return the records of current epochs, and the addresses of the others."""
    valid = {(number, tenancy.epoch) for number, tenancy in tenancies.items()}
    is_valid = [pair in valid for pair in zip(records.namespaces, records.epochs, strict=True)]
    kept = [at for at, current in enumerate(is_valid) if current]
    stale = [address for address, current in zip(records.addresses, is_valid, strict=True) if not current]
    return records.select(kept), stale


def _renumbered(numbers: array[int], mapping: Mapping[int, int]) -> array[int]:
    if len(mapping) == 1:
        return array("I", mapping.values()) * len(numbers)
    return array("I", map(mapping.__getitem__, numbers))
