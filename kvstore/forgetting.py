"""Namespaces that nobody uses are forgotten, so that a salt a user does not fill the daemon for good.

Invariant: one that a block (visible or not), a ticket, a waiter or a connection knows is never forgotten.
"""

from __future__ import annotations

import asyncio

from kvstore.catalog import Catalog
from kvstore.puts import Puts
from kvstore.tenancy import IDLE_KEPT

_ROWS_AT_ONCE = 20_000
_NAMESPACES_AT_ONCE = 500


async def forget_idle(catalog: Catalog, puts: Puts, usual_ttl_s: float) -> int:
    """Forget idle namespaces, the oldest first, until `IDLE_KEPT` are left; return how many that were.

    Gives the loop back between portions; cancellation leaves the others known.
    """
    idle = [(tenancy, tenancy.used_times) for tenancy in catalog.namespaces.known() if tenancy.is_idle]
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
        count += catalog.namespaces.forget(unused, named | puts.namespaces(), usual_ttl_s)
        await asyncio.sleep(0)
    return count
