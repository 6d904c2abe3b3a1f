"""The reports that operators and metrics are given; docs/operations.md explains their fields.

Invariants
1. Every field is always present, so that a series at zero is a zero and not a hole.
2. However many namespaces there are, a report fits a frame; totals count those left out and those forgotten, too.
"""

from __future__ import annotations

import asyncio
import heapq
import os
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

from kvstore import __version__
from kvstore.counters import NamespaceCounters
from kvstore.store import Store
from kvstore.table import NEVER_S, Tier
from kvstore.tenancy import Tenancy
from kvstored.config import Settings
from kvstored.node import Node

Body = dict[str, Any]

LISTED_MAX = 256  # namespaces in one report: tens of thousands would not fit a frame
_PORTION = 500
_TEXT_CHARS_MAX = 512  # of what a namespace says of itself: it may hold tens of thousands


def status(node: Node, *, role: str) -> Body:
    """Return what the daemon is and how it was started."""
    settings, store = node.settings, node.store
    usage = store.disk.usage() if store.disk is not None else None
    ready = store.memory.populated_bytes / store.memory.size_bytes
    return {
        "version": __version__,
        "boot_id": node.boot_id.hex(),
        "pid": os.getpid(),
        "uptime_s": round(store.clock.monotonic_s() - store.started_s, 3),
        "state": "draining" if node.closing else "ready" if ready > 0 else "starting",
        "mode": settings.mode,
        "role": role,
        "tiers": [tier.label for tier in store.catalog.tiers],
        "socket": str(settings.socket),
        "http": node.http,
        "eviction": settings.eviction,
        "write_policy": settings.write_policy,
        "ttl_s": settings.ttl_s,
        "ready_fraction": round(ready, 4),
        "huge_pages": store.memory.huge_pages,
        "ssd": None
        if usage is None
        else {"directory": str(settings.ssd_dir), "direct_io": usage.direct_io, "io_mode": usage.io_mode},
    }


def stats(node: Node) -> Body:
    """Return everything countable, of all tenants, in one go: for metrics. The namespaces listed are the oldest."""
    work = _stats(node, None, "", lambda tenancies: tenancies[:LISTED_MAX])
    while True:
        try:
            next(work)
        except StopIteration as stop:
            body: Body = stop.value
            return body


async def stats_for(node: Node, tenant: str | None, name: str) -> Body:
    """Return everything countable; of one tenant's namespaces and use only, if `tenant` is one.

    Lists the namespaces with most blocks, of those that `name` may stand for if it is given. Lets the loop serve others
    between portions of namespaces.
    """
    work = _stats(node, tenant, name, _largest)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            body: Body = stop.value
            return body
        await asyncio.sleep(0)


def _may_be(tenancy: Tenancy, name: str) -> bool:
    namespace = tenancy.namespace
    return name.startswith(namespace.model) or namespace.digest.hex().startswith(name.lower())


def _largest(tenancies: list[Tenancy]) -> list[Tenancy]:
    def rank(tenancy: Tenancy) -> tuple[int, int, int]:
        return sum(tenancy.blocks.values()), tenancy.counters.queried_blocks, -tenancy.number

    return heapq.nlargest(LISTED_MAX, tenancies, rank)


def _stats(
    node: Node, tenant: str | None, name: str, choose: Callable[[list[Tenancy]], list[Tenancy]]
) -> Generator[None, None, Body]:
    """Return the report; yields where others may be served in between."""
    settings, store = node.settings, node.store
    catalog = store.catalog
    sums = NamespaceCounters()
    blocks = dict.fromkeys(catalog.tiers, 0)
    forgotten = catalog.namespaces.forgotten
    for counters in forgotten.values() if tenant is None else filter(None, [forgotten.get(tenant)]):
        sums.add(counters)
    known = catalog.namespaces.known()
    for at, tenancy in enumerate(known):
        for tier, count in tenancy.blocks.items():
            blocks[tier] += count
        if tenant in (None, tenancy.tenant) and not tenancy.counters.is_zero:
            sums.add(tenancy.counters)
        if at % _PORTION == _PORTION - 1:
            yield
    own = known if tenant is None else [tenancy for tenancy in known if tenancy.tenant == tenant]
    listed = choose([tenancy for tenancy in own if _may_be(tenancy, name)] if name else own)
    tiers = {Tier.CPU.label: _cpu(store, blocks[Tier.CPU])}
    if store.disk is not None:
        tiers[Tier.SSD.label] = _ssd(store, blocks[Tier.SSD])
    table = catalog.table
    pinned = [row for row in catalog.pinned if table.hash[row] is not None]
    if tenant is not None:
        pinned = [row for row in pinned if catalog.tenancies[table.namespace[row]].tenant == tenant]
    pins = Counter(table.namespace[row] for row in pinned)
    now_s = store.clock.monotonic_s()
    return {
        "tiers": tiers,
        "namespaces": [_namespace(store, tenancy, pins[tenancy.number]) for tenancy in listed],
        "namespaces_left_out": len(own) - len(listed),
        "totals": _totals(store, sums),
        "sessions": {
            "open": len(node.sessions),
            "leases": len(store.leases),
            "leases_overdue": len(store.leases.overdue(now_s)),
            "reservations": len(store.puts),
            "quarantined_slots": store.puts.quarantined_slots,
        },
        "tenants": _tenants(settings, store, {one.tenant for one in own}, tenant),
        "pins": {"blocks": len(pinned), "bytes": sum(map(catalog.slot_bytes, pinned))},
        "uptime_s": round(now_s - store.started_s, 3),
    }


def block(store: Store, row: int) -> Body:
    """Return one block, as `keys` lists it."""
    table = store.catalog.table
    tiers = [tier for tier in store.catalog.tiers if table.residency[row] & tier.bit]
    block_hash, expires_s = table.hash[row], table.expires_s[row]
    assert block_hash is not None
    return {
        "hash": block_hash.hex(),
        "tiers": [tier.label for tier in tiers],
        "size_bytes": store.catalog.tenancies[table.namespace[row]].block_bytes,
        "age_s": round(store.catalog.idle_s(row, tiers[0]), 2) if tiers else 0.0,
        "ttl_s": None if expires_s == NEVER_S else round(max(0.0, expires_s - store.clock.boottime_s()), 2),
        "pinned": row in store.catalog.pinned,
        "generation": table.generation[row],
    }


def _cpu(store: Store, blocks: int) -> Body:
    memory, puts = store.memory, store.puts
    filling = memory.populated_bytes < memory.size_bytes
    return {
        "capacity_bytes": memory.capacity_bytes,
        "capacity_target_bytes": memory.size_bytes,
        "used_bytes": memory.used_bytes - puts.reserved_bytes - puts.quarantined_bytes,
        "reserved_bytes": puts.reserved_bytes,
        "quarantined_bytes": puts.quarantined_bytes,
        "free_bytes": memory.capacity_bytes - memory.used_bytes,
        "pinned_bytes": store.leases.pinned_bytes,
        "blocks": blocks,
        "loads_in_flight": len(store.mover.loads) if store.mover is not None else 0,
        "state": "filling" if filling else "ready",
        "state_text": f"{memory.populated_bytes} of {memory.size_bytes} bytes are reserved" if filling else "",
        **store.catalog.counters[Tier.CPU].report(),
    }


def _ssd(store: Store, blocks: int) -> Body:
    assert store.disk is not None
    assert store.mover is not None
    usage = store.disk.usage()
    counters = store.catalog.counters[Tier.SSD].report()
    counters["io_errors"] = usage.io_errors
    counters["checksum_failures"] = max(usage.checksum_failures, store.catalog.counters[Tier.SSD].checksum_failures)
    return {
        "capacity_bytes": usage.capacity_bytes,
        "capacity_target_bytes": usage.capacity_bytes,
        "used_bytes": usage.used_bytes,
        "reserved_bytes": 0,
        "quarantined_bytes": usage.quarantined_bytes,
        "free_bytes": max(0, usage.data_capacity_bytes - usage.used_bytes),
        "pinned_bytes": 0,
        "blocks": blocks,
        "durable_blocks": usage.live_blocks,
        "write_queue_bytes": store.mover.queued_bytes + usage.write_queue_bytes,
        "index_bytes": usage.index_bytes,
        "file_bytes": usage.file_bytes,
        "segments": usage.segments,
        "loads_in_flight": 0,
        "state": usage.state,
        "state_text": usage.state_text,
        **counters,
    }


def _namespace(store: Store, tenancy: Tenancy, pinned_blocks: int) -> Body:
    namespace = tenancy.namespace
    return {
        "digest": namespace.digest.hex(),
        "group": namespace.group_digest.hex(),
        "model": namespace.model[:_TEXT_CHARS_MAX],
        "revision": namespace.revision[:_TEXT_CHARS_MAX],
        "adapter": namespace.adapter[:_TEXT_CHARS_MAX],
        "dtype": namespace.dtype[:_TEXT_CHARS_MAX],
        "layers": list(namespace.slice.layers),
        "heads": list(namespace.slice.heads),
        "tenant": tenancy.tenant,
        "epoch": tenancy.epoch,
        "block_bytes": namespace.block_bytes,
        "block_tokens": namespace.block_tokens,
        "ttl_s": tenancy.ttl_s,
        "blocks": {tier.label: count for tier, count in tenancy.blocks.items()},
        "bytes": {tier.label: count * tenancy.slots[tier] for tier, count in tenancy.blocks.items()},
        "pinned_blocks": pinned_blocks,
        **tenancy.counters.report(store.catalog.tiers),
    }


def _totals(store: Store, sums: NamespaceCounters) -> Body:
    cpu = store.catalog.counters[Tier.CPU]
    counted = sums.report(store.catalog.tiers)
    del counted["evictions"]
    return {**counted, "bytes_in": cpu.bytes_in, "bytes_out": cpu.bytes_out}


def _tenants(settings: Settings, store: Store, found: set[str], tenant: str | None) -> list[Body]:
    catalog = store.catalog
    names = {tenant} if tenant is not None else found | set(settings.tenants) | set(settings.quotas)
    return [
        {
            "tenant": name,
            "used_bytes": {tier.label: catalog.used_bytes.get((name, tier), 0) for tier in catalog.tiers},
            "quota_bytes": {tier.label: settings.quotas.get(name, {}).get(tier.label) for tier in catalog.tiers},
        }
        for name in sorted(names)
    ]
