"""Namespaces that nobody uses are forgotten, in memory and on ssd, so that a salt a user does not fill either for good.

Invariants
1. One that a block (visible or not), a ticket, a waiter or a connection knows is never forgotten.
2. From the moment that memory has forgotten one, the ssd tier doesn't know it either: it would come back under a number
   whose row is about to go. How no older epoch comes back is in tiers/disk_namespaces.py.
"""

from __future__ import annotations

import asyncio

from kvstore.catalog import Catalog
from kvstore.puts import Puts
from kvstore.tenancy import IDLE_KEPT
from kvstore.tiers.disk import DiskTier

_ROWS_AT_ONCE = 20_000
_NAMESPACES_AT_ONCE = 500


async def forget_idle(catalog: Catalog, puts: Puts, usual_ttl_s: float, disk: DiskTier | None = None) -> int:
    """Forget idle namespaces, the oldest first, until `IDLE_KEPT` are left, or none where they take up scarce lanes.

    Returns how many that were. Gives the loop back between portions; cancellation leaves the others known. Raises
    TierUnavailable if their rows on ssd can't be deleted now; the next checkpoint tries again.
    """
    idle = [(tenancy, tenancy.used_times) for tenancy in catalog.namespaces.known() if tenancy.is_idle]
    if not catalog.namespaces.lanes_are_scarce:
        del idle[max(0, len(idle) - IDLE_KEPT) :]
    if not idle:
        return 0
    hashes, namespaces = catalog.table.hash, catalog.table.namespace
    named: set[int] = set()
    for start in range(0, len(hashes), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        pairs = zip(namespaces[start:end], hashes[start:end], strict=True)
        named.update(number for number, block_hash in pairs if block_hash is not None)
        await asyncio.sleep(0)
    count = 0
    for start in range(0, len(idle), _NAMESPACES_AT_ONCE):
        # Who was used in the meantime may have a row in a part that was looked at before.
        part = idle[start : start + _NAMESPACES_AT_ONCE]
        unused = [tenancy for tenancy, used_times in part if tenancy.used_times == used_times]
        forgotten, disk_numbers = catalog.namespaces.forget(unused, named | puts.namespaces(), usual_ttl_s)
        count += forgotten
        if disk is not None:
            disk.forget_namespaces(disk_numbers)
        await asyncio.sleep(0)
    if disk is not None:
        await disk.tidy_namespaces()
    return count
