"""The reports that operators and metrics are given; docs/operations.md explains their fields.

Invariants
1. Every field is always present, so that a series at zero is a zero and not a hole.
2. However many namespaces there are, a report fits a frame; totals count those left out and those forgotten, too.
"""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import Generator
from typing import Any

from kvstore import __version__
from kvstore.counters import Cause, NamespaceCounters
from kvstore.remote_tier import RemoteTier
from kvstore.store import Store
from kvstore.table import NEVER_S, Tier
from kvstore.tenancy import Tenancy
from kvstored.config import Settings
from kvstored.node import Node

Body = dict[str, Any]

LISTED_MAX = 256  # namespaces in one report: tens of thousands would not fit a frame
_PORTION = 500  # namespaces that are summed, about 1 ms
_ROWS_PORTION = 64  # namespaces that are listed
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
        "tiers": [tier.label for tier in store.catalog.counters],
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


async def stats(node: Node) -> Body:
    """Return everything countable, of all tenants: for metrics. The namespaces listed are the oldest."""
    return await _in_portions(_stats(node, None, "", by_size=False))


async def stats_for(node: Node, tenant: str | None, name: str) -> Body:
    """Return everything countable; of one tenant's namespaces and use only, if `tenant` is one.

    Lists the namespaces with most blocks, of those that `name` may stand for if it is given. Lets the loop serve others
    between portions of namespaces.
    """
    return await _in_portions(_stats(node, tenant, name, by_size=True))


async def _in_portions(work: Generator[None, None, Body]) -> Body:
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


def _stats(node: Node, tenant: str | None, name: str, *, by_size: bool) -> Generator[None, None, Body]:
    """Return the report; yields where others may be served in between.

    Each namespace is looked at in one moment, so what is summed of it adds up; the next may have changed since.
    """
    settings, store = node.settings, node.store
    catalog = store.catalog
    sums = NamespaceCounters()
    blocks = dict.fromkeys(catalog.tiers, 0)
    forgotten = catalog.namespaces.forgotten
    for counters in forgotten.values() if tenant is None else filter(None, [forgotten.get(tenant)]):
        sums.add(counters)
    known = catalog.namespaces.known()
    listed: list[Tenancy] = []
    tenants: set[str] = set()
    count = 0
    for start in range(0, len(known), _PORTION):
        own: list[Tenancy] = []
        for tenancy in known[start : start + _PORTION]:
            for tier, held in tenancy.blocks.items():
                blocks[tier] += held
            if tenant in (None, tenancy.tenant):
                own.append(tenancy)
                if not tenancy.counters.is_zero:
                    sums.add(tenancy.counters)
        count += len(own)
        tenants.update(one.tenant for one in own)
        listed += [one for one in own if _may_be(one, name)] if name else own
        listed = _largest(listed) if by_size else listed[:LISTED_MAX]
        yield
    rows: list[Body] = []
    for tenancy in listed:
        rows.append(_namespace(store, tenancy, catalog.pins.blocks_of.get(tenancy.number, 0)))
        if len(rows) % _ROWS_PORTION == 0:
            yield
    tiers = {Tier.CPU.label: _cpu(store, blocks[Tier.CPU])}
    if store.disk is not None:
        tiers[Tier.SSD.label] = _ssd(store, blocks[Tier.SSD])
    if store.remote is not None:
        tiers[Tier.REMOTE.label] = _remote(store, store.remote)
    pinned_blocks = pinned_bytes = 0
    for number, pinned in catalog.pins.blocks_of.items():
        if tenant in (None, catalog.tenancies[number].tenant):
            pinned_blocks += pinned
            pinned_bytes += pinned * catalog.tenancies[number].slot_bytes
    now_s = store.clock.monotonic_s()
    return {
        "tiers": tiers,
        "namespaces": rows,
        "namespaces_left_out": count - len(listed),
        "totals": _totals(store, sums),
        "sessions": {
            "open": len(node.sessions),
            "leases": len(store.leases),
            "leases_overdue": len(store.leases.overdue(now_s)),
            "reservations": len(store.puts),
            "quarantined_slots": store.puts.quarantined_slots,
        },
        "tenants": _tenants(settings, store, tenants, tenant),
        "pins": {"blocks": pinned_blocks, "bytes": pinned_bytes},
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


def _remote(store: Store, remote: RemoteTier) -> Body:
    usage = remote.store.usage()
    counters = store.catalog.counters[Tier.REMOTE].report()
    counters["evictions"] = {
        **dict.fromkeys((cause.value for cause in Cause), 0),
        Cause.PRESSURE.value: usage.swept_blocks,
        Cause.TTL.value: usage.swept_expired_blocks,
    }
    return {
        "capacity_bytes": usage.capacity_bytes,
        "capacity_target_bytes": usage.capacity_bytes,
        "used_bytes": usage.used_bytes,
        "reserved_bytes": 0,
        "quarantined_bytes": 0,
        "free_bytes": max(0, usage.capacity_bytes - usage.used_bytes),
        "pinned_bytes": 0,
        "blocks": usage.blocks,
        "durable_blocks": usage.blocks,
        "write_queue_bytes": remote.writes.queued_bytes,
        "place": usage.place,
        "objects": usage.objects,
        "file_bytes": usage.known_bytes,
        "loads_in_flight": len(remote.loads),
        "timeouts": usage.timeouts,
        "throttled": usage.throttled,
        "refused_full": usage.refused_full,
        "state": usage.state,
        "state_text": usage.state_text,
        **counters,
        "io_errors": usage.errors,
        "checksum_failures": usage.checksum_failures,
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
        **tenancy.counters.report(tuple(store.catalog.counters)),
    }


def _totals(store: Store, sums: NamespaceCounters) -> Body:
    cpu = store.catalog.counters[Tier.CPU]
    counted = sums.report(tuple(store.catalog.counters))
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
