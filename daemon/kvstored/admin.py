"""The operators' verbs. What changes something needs the admin role; looking needs none.

Invariants
1. A verb that makes something invisible has made it durably so when it is answered.
2. Work over many blocks gives the loop back between portions.
3. Operators' pins keep at most a quarter of each tier; they have an end, and survive restarts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore import wire
from kvstore.counters import Cause
from kvstore.errors import BadNamespace, NotPermitted, TooManyLeases, UsageError
from kvstore.lifecycle import Copy
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk_records import DiskPin
from kvstore.wire import Outcome
from kvstored import dump, reports
from kvstored.connection import Answer, Connection
from kvstored.node import Node

_PORTION = 1000
_PIN_SHARE = 4


class Admin:
    """Answers operators."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._store = node.store
        self._looking: dict[type[wire.Message], Callable[[Connection, Any], Answer]] = {
            wire.Stats: self._stats,
            wire.Status: self._status,
            wire.Keys: self._keys,
        }
        self._changing: dict[type[wire.Message], Callable[[Connection, Any], Answer]] = {
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Ttl: self._ttl,
            wire.DropNamespace: self._drop_namespace,
            wire.DropBlocks: self._drop_blocks,
            wire.Evict: self._evict,
            wire.Check: self._check,
            wire.Gc: self._gc,
            wire.Drain: self._drain,
            wire.Dump: self._dump,
            wire.Load: self._load,
        }

    def answer(self, connection: Connection, request: wire.Request) -> Answer:
        """Return the reply to an operator's request."""
        verb = self._looking.get(type(request))
        if verb is not None:
            return verb(connection, request)
        verb = self._changing.get(type(request))
        if verb is None:
            raise UsageError(f"{type(request).__name__} comes once, at the beginning of a connection")
        if not connection.peer.admin:
            raise NotPermitted(
                f"{type(request).__name__} needs the admin role, and uid {connection.peer.uid} has none: run it as a "
                "user that the setting `admin` names"
            )
        return verb(connection, request)

    # ---- looking

    def _status(self, connection: Connection, request: wire.Status) -> Answer:
        body = reports.status(self._node, role=connection.peer.role)
        return wire.Report(request.id, body)

    def _stats(self, connection: Connection, request: wire.Stats) -> Answer:
        return self._counted(request, None if connection.peer.admin else connection.peer.tenant)

    async def _counted(self, request: wire.Stats, tenant: str | None) -> wire.Message:
        return wire.Report(request.id, await reports.stats_for(self._node, tenant, request.name))

    def _keys(self, connection: Connection, request: wire.Keys) -> Answer:
        tenancies = self._visible_to(connection, request.namespace)
        total = sum(len(tenancy.rows) for tenancy in tenancies)
        if request.hashes:
            found = (tenancy.rows.get(block_hash) for tenancy in tenancies for block_hash in request.hashes)
            rows = [row for row in found if row is not None]
        else:
            all_rows = itertools.chain.from_iterable(tenancy.rows.values() for tenancy in tenancies)
            end = request.offset + min(request.limit, wire.KEYS_MAX)
            rows = list(itertools.islice(all_rows, min(request.offset, total), min(end, total)))
        return wire.Report(request.id, {"total": total, "blocks": [reports.block(self._store, row) for row in rows]})

    # ---- blocks

    def _pin(self, connection: Connection, request: wire.Pin) -> Answer:
        return self._pinned(request)

    async def _pinned(self, request: wire.Pin) -> wire.Message:
        catalog, store, table = self._store.catalog, self._store, self._store.catalog.table
        found = self._rows(request.namespace, request.hashes)
        rows = {row for _, row in found if row is not None}
        for tier, limit in self._pin_limits().items():
            size_bytes = catalog.pins.would_take(rows, tier)
            if size_bytes > limit:
                raise TooManyLeases(
                    f"pins would keep {size_bytes} bytes of the {tier.label} tier and may keep {limit}: unpin others, "
                    "or pin less"
                )
        ends_s = store.clock.boottime_s() + request.for_s
        pins = [(tenancy, row, table.hash[row]) for tenancy, row in found if row is not None]
        for _, row, _ in pins:
            catalog.pins.pin(row, ends_s)
        if store.disk is not None and store.mover is not None and pins:
            # From here on a row may get another block: only what was noted of it counts.
            store.mover.demote([row for _, row, _ in pins], urgent=True)
            numbers = {tenancy.number: await store.mover.register(tenancy) for tenancy, _, _ in pins}
            await store.disk.put_pins(
                [DiskPin(numbers[t.number], block_hash, ends_s) for t, _, block_hash in pins if block_hash is not None]
            )
        return self._done(request, found)

    def _unpin(self, connection: Connection, request: wire.Unpin) -> Answer:
        return self._unpinned(request)

    async def _unpinned(self, request: wire.Unpin) -> wire.Message:
        catalog, disk = self._store.catalog, self._store.disk
        found = self._rows(request.namespace, request.hashes)
        keys: list[tuple[int, bytes]] = []
        for tenancy, row in found:
            block_hash = None if row is None else catalog.table.hash[row]
            if row is not None and block_hash is not None:
                catalog.pins.unpin(row)
                if tenancy.disk_number is not None:
                    keys.append((tenancy.disk_number, block_hash))
        if disk is not None and keys:
            await disk.delete_pins(keys)
        return self._done(request, found)

    def _ttl(self, connection: Connection, request: wire.Ttl) -> Answer:
        if not request.hashes:
            return self._default_life(request)
        return self._lived(request)

    async def _default_life(self, request: wire.Ttl) -> wire.Message:
        tenancies = self._named(request.namespace)
        for tenancy in tenancies:
            tenancy.ttl_s = request.ttl_s
            tenancy.begin_use()
            try:
                if self._store.disk is not None and tenancy.disk_number is not None:
                    await self._store.disk.set_ttl(tenancy.disk_number, request.ttl_s)
            finally:
                tenancy.end_use()
        return wire.Done(request.id, len(tenancies))

    async def _lived(self, request: wire.Ttl) -> wire.Message:
        catalog, disk = self._store.catalog, self._store.disk
        found = self._rows(request.namespace, request.hashes)
        addresses: list[tuple[int, float]] = []
        for _, row in found:
            if row is not None:
                catalog.set_ttl(row, request.ttl_s)
                if catalog.table.residency[row] & Tier.SSD.bit:
                    addresses.append((catalog.table.slot[Tier.SSD][row], catalog.table.expires_s[row]))
        if disk is not None and addresses:
            await disk.set_expiry(dict(addresses))
        if self._store.remote is not None:  # its copies keep the life they were written with
            for tenancy in {tenancy.number: tenancy for tenancy, _ in found}.values():
                await self._store.remote.drop_blocks(tenancy, request.hashes)
        return self._done(request, found)

    def _drop_blocks(self, connection: Connection, request: wire.DropBlocks) -> Answer:
        return self._dropped(request)

    async def _dropped(self, request: wire.DropBlocks) -> wire.Message:
        outcomes = bytearray([Outcome.ABSENT]) * len(request.hashes)
        for tenancy in self._named(request.namespace):
            for at, outcome in enumerate(await self._store.drop_blocks(tenancy, request.hashes)):
                if outcome == Outcome.DONE:
                    outcomes[at] = Outcome.DONE
        return wire.Found(request.id, outcomes.count(Outcome.DONE), bytes(outcomes))

    # ---- whole tiers and namespaces

    def _drop_namespace(self, connection: Connection, request: wire.DropNamespace) -> Answer:
        return self._namespaces_dropped(request)

    async def _namespaces_dropped(self, request: wire.DropNamespace) -> wire.Message:
        catalog = self._store.catalog
        tenancies = catalog.namespaces.known() if request.namespace is None else self._named(request.namespace)
        blocks = await self._store.drop_namespaces(tenancies)
        if request.namespace is None and self._store.remote is not None:
            await self._store.remote.drop_all()
        return wire.Report(request.id, {"namespaces": len(tenancies), "blocks": blocks})

    def _evict(self, connection: Connection, request: wire.Evict) -> Answer:
        tier = next((t for t in self._store.catalog.tiers if t.label == request.tier), None)
        if tier is None:
            names = ", ".join(t.label for t in self._store.catalog.tiers)
            raise UsageError(f"this daemon has no tier {request.tier!r}; it has {names}")
        return self._evicted(tier, request)

    async def _evicted(self, tier: Tier, request: wire.Evict) -> wire.Message:
        catalog = self._store.catalog
        blocks = size_bytes = 0
        looks_left = len(catalog.table)  # or blocks that come in meanwhile would keep this going
        for lane, (slot_bytes, _, lane_tier) in enumerate(catalog.lanes):
            if lane_tier is not tier:
                continue
            kept = 0  # at the cold end: held or pinned, met in a portion before
            while looks_left > 0 and (request.size_bytes is None or size_bytes < request.size_bytes):
                portion = list(itertools.islice(catalog.policies[tier].coldest(lane), kept, kept + _PORTION))
                before = blocks
                looks_left -= len(portion)
                for row in portion:
                    if request.size_bytes is not None and size_bytes >= request.size_bytes:
                        break
                    # It may have gone with another slice of the same block.
                    if not catalog.is_evictable(row, tier):
                        continue
                    if catalog.idle_s(row, tier) < request.older_than_s:
                        portion = []
                        break
                    evicted = catalog.evict_with_slices(row, tier, Cause.DROP)
                    blocks += evicted
                    size_bytes += evicted * slot_bytes
                kept += sum(catalog.table.state[tier][row] == Copy.READY for row in portion)
                if len(portion) < _PORTION and before == blocks:
                    break
                await asyncio.sleep(0)
        await self._delete_departed()
        return wire.Report(request.id, {"evicted_blocks": blocks, "evicted_bytes": size_bytes})

    def _check(self, connection: Connection, request: wire.Check) -> Answer:
        return self._checked(connection, request)

    async def _checked(self, connection: Connection, request: wire.Check) -> wire.Message:
        """Report whether the invariants hold.

        They are looked at in one moment, so this holds the loop: nothing else is served for some seconds a million
        blocks (docs/operations.md). The bytes are then read portion by portion.
        """
        problems: list[str] = []
        try:
            self._store.check_integrity()
        except AssertionError as exc:
            problems.append(str(exc) or "an invariant does not hold")
        if self._store.disk is not None:
            problems += await self._store.disk.check_integrity()
        checked = corrupt = 0
        if request.verify:
            rows = self._store.catalog.table.rows()
            for at in range(0, len(rows), 64):
                bad = await self._store.verify(rows[at : at + 64], self._store.catalog.tiers)
                checked += len(rows[at : at + 64])
                corrupt += len(bad)
                problems += [f"block {block_hash.hex()} is corrupt and was dropped" for block_hash in bad]
                connection.reply(wire.Progress(request.id, checked, len(rows), "verifying"))
        else:
            checked = len(self._store.catalog.table)
        body = {"ok": not problems, "problems": problems, "blocks_checked": checked, "blocks_corrupt": corrupt}
        return wire.Report(request.id, body)

    def _gc(self, connection: Connection, request: wire.Gc) -> Answer:
        return self._collected(request)

    async def _collected(self, request: wire.Gc) -> wire.Message:
        catalog = self._store.catalog
        before, before_bytes = len(catalog.table), self._used_bytes()
        self._store.tick()
        while catalog.reclaiming:
            catalog.reclaim(_PORTION)
            await asyncio.sleep(0)
        while catalog.expire(_PORTION):
            await asyncio.sleep(0)
        await self._delete_departed()
        reclaimed = max(0, before - len(catalog.table))
        freed = max(0, before_bytes - self._used_bytes())
        return wire.Report(request.id, {"reclaimed_blocks": reclaimed, "reclaimed_bytes": freed})

    def _drain(self, connection: Connection, request: wire.Drain) -> Answer:
        return self._drained(request)

    async def _drained(self, request: wire.Drain) -> wire.Message:
        drained = await self._store.drain(request.wait_s)
        body = {
            "written_blocks": drained.written, "left_out_blocks": drained.left_out,
            "remaining_blocks": drained.remaining,
        }  # fmt: skip
        return wire.Report(request.id, body)

    def _dump(self, connection: Connection, request: wire.Dump) -> Answer:
        return self._dumped(connection, request)

    async def _dumped(self, connection: Connection, request: wire.Dump) -> wire.Message:
        tenancies = self._named(request.namespace)
        if len(tenancies) > 1:
            raise UsageError("several tenants have this namespace: dump as one of them is not possible yet")
        body = await dump.write(self._store, tenancies[0], Path(request.path), _progress(connection, request.id))
        return wire.Report(request.id, body)

    def _load(self, connection: Connection, request: wire.Load) -> Answer:
        return self._loaded(connection, request)

    async def _loaded(self, connection: Connection, request: wire.Load) -> wire.Message:
        progress = _progress(connection, request.id)
        body = await dump.read(self._store, connection.session, Path(request.path), progress)
        return wire.Report(request.id, body)

    # ---- small things

    def _named(self, digest: bytes) -> list[Tenancy]:
        found = self._store.catalog.named(digest)
        if not found:
            raise BadNamespace(f"this daemon has no namespace {digest.hex()}: kvctl namespaces lists them")
        return found

    def _visible_to(self, connection: Connection, digest: bytes) -> list[Tenancy]:
        found = self._named(digest)
        return found if connection.peer.admin else [t for t in found if t.tenant == connection.peer.tenant]

    def _rows(self, digest: bytes, hashes: list[bytes]) -> list[tuple[Tenancy, int | None]]:
        find = self._store.catalog.find
        tenancies = self._named(digest)
        found: list[tuple[Tenancy, int | None]] = []
        for block_hash in hashes:
            hit = next((t for t in tenancies if find(t, block_hash) is not None), tenancies[0])
            found.append((hit, find(hit, block_hash)))
        return found

    @staticmethod
    def _done(request: wire.Message, found: list[tuple[Tenancy, int | None]]) -> wire.Found:
        outcomes = bytes(Outcome.ABSENT if row is None else Outcome.DONE for _, row in found)
        return wire.Found(request.id, outcomes.count(Outcome.DONE), outcomes)

    def _pin_limits(self) -> dict[Tier, int]:
        limits = {Tier.CPU: self._store.memory.grantable_bytes() // _PIN_SHARE}
        if self._store.disk is not None:
            limits[Tier.SSD] = self._store.disk.usage().data_capacity_bytes // _PIN_SHARE
        return limits

    def _used_bytes(self) -> int:
        return sum(self._store.catalog.used_bytes.values())

    async def _delete_departed(self) -> None:
        mover = self._store.mover
        while mover is not None and await mover.delete_departed():
            pass


def _progress(connection: Connection, request_id: int) -> Callable[[int, int], None]:
    return lambda done, total: connection.reply(wire.Progress(request_id, done, total, "blocks"))
