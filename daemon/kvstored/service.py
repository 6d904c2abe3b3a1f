"""What the daemon answers: one method a verb of engines. Operators' verbs are in admin.py.

What can be answered from memory is answered at once, in the call; the rest is a coroutine that the connection runs as
a task.

Invariants
1. A verb acts for the session and the tenant of its connection, never for one that the request names.
2. A coroutine that is cancelled leaves nothing granted.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstore import __version__, wire
from kvstore.block import Namespace
from kvstore.checksum import checksum
from kvstore.errors import Closing, KVStoreError, UsageError
from kvstore.forgetting import forget_idle
from kvstore.lease import Session
from kvstore.lifecycle import Put
from kvstore.puts import Ticket
from kvstore.table import Tier
from kvstore.tenancy import IDLE_KEPT, Tenancy
from kvstore.threads import in_thread
from kvstore.tiers.arena import Arena
from kvstore.wire import Outcome
from kvstored.admin import Admin
from kvstored.connection import Answer, Connection, Opening
from kvstored.logs import fields
from kvstored.node import Node
from kvstored.peer import Peer

log = logging.getLogger("kvstored.service")

_RETRY_S = 0.005

_libc = ctypes.CDLL(None)
_memmove = _libc.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p

FORGET_EVERY_S = 60.0
_ABSENT_OR_HIT = (Outcome.ABSENT, Outcome.HIT)


class Service:
    """Answers requests."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._settings = node.settings
        self._store = node.store
        self._admin = Admin(node)
        self._forget_at_s = 0.0
        self._looking: set[Connection] = set()  # whose word on corrupt blocks is being looked into
        self._verbs: dict[type[wire.Message], Callable[[Connection, Any], Answer]] = {
            wire.Ping: lambda connection, request: wire.Done(request.id),
            wire.Open: self._open,
            wire.Lookup: self._lookup,
            wire.Reserve: self._reserve,
            wire.Seal: self._seal,
            wire.Forfeit: self._forfeit,
            wire.Acquire: self._acquire,
            wire.Release: self._release,
            wire.Prefetch: self._prefetch,
            wire.Wait: self._wait,
            wire.Cancel: self._cancel,
            wire.Abort: self._abort,
            wire.Drop: self._drop,
            wire.GroupLookup: self._group_lookup,
            wire.Bye: self._bye,
            wire.Corrupt: self._corrupt,
        }

    def answer(self, connection: Connection, request: wire.Request) -> Answer:
        """Return the reply to a request, a coroutine for it, or None where none is due."""
        verb = self._verbs.get(type(request))
        if verb is not None:
            return verb(connection, request)
        return self._admin.answer(connection, request)

    def welcome(self, hello: wire.Hello, session: Session, peer: Peer, arena: Arena | None) -> wire.Welcome:
        """Return the answer to a Hello that was accepted."""
        settings, store = self._settings, self._store
        # A checksum costs least while the block is warm in its writer's cache: take it there if it will be needed.
        needed = settings.verify_reads or (store.disk is not None and settings.write_policy == "through")
        needed = needed or (store.remote is not None and settings.remote_write_policy == "through")
        at_seal = {"always": True, "never": False}.get(settings.checksum_at_seal, needed)
        return wire.Welcome(
            id=hello.id,
            protocol=min(hello.protocol_max, wire.PROTOCOL_MAX),
            boot_id=self._node.boot_id,
            session=session.token,
            role=peer.role,
            tenant=peer.tenant,
            mode=settings.mode,
            pool_bytes=store.memory.size_bytes if hello.want_pool else 0,
            arena_bytes=arena.size_bytes if arena is not None else 0,
            checksum_at_seal=at_seal and settings.mode == "trusted",
            verify_reads=settings.verify_reads,
            keys_max=wire.KEYS_MAX,
            frame_bytes_max=wire.FRAME_BYTES_MAX,
            lease_s_max=settings.lease_s_max,
            reservation_s=settings.reservation_s,
            window_bytes=self._window_bytes(arena),
            version=__version__,
        )

    def _window_bytes(self, arena: Arena | None) -> int:
        # Two of them fit in what one process may have open: who puts alone finds room for all of a window.
        window_bytes = min(self._store.reads.limits.window_bytes, self._store.puts.limits.process_bytes // 2)
        return window_bytes if arena is None else min(window_bytes, arena.size_bytes // 4)

    # ---- namespaces

    def _open(self, connection: Connection, request: wire.Open) -> Answer:
        namespace = Namespace.decode(request.namespace)
        store = self._store
        store.check_fits(namespace)
        self._forget_in_time()
        tenancy = store.tenancy(connection.session.tenant, namespace)
        ns = connection.open(Opening(tenancy, request.ttl_s or None))
        return wire.Opened(request.id, ns, tenancy.epoch, namespace.block_bytes)

    def _forget_in_time(self) -> None:
        """Where many namespaces or sizes are known, look for those to forget: now and then, not at every Open."""
        now_s, namespaces = self._store.clock.monotonic_s(), self._store.catalog.namespaces
        if (len(namespaces) > IDLE_KEPT or namespaces.lanes_are_scarce) and now_s >= self._forget_at_s:
            self._forget_at_s = now_s + FORGET_EVERY_S
            self._node.spawn(self._forget())

    async def _forget(self) -> None:
        store = self._store
        await asyncio.sleep(FORGET_EVERY_S / 2)  # those that were just used are about to be closed
        try:
            forgotten = await forget_idle(store.catalog, store.puts, store.settings.ttl_s, store.disk)
        except KVStoreError as exc:
            log.warning("forgotten namespaces are on ssd still", extra=fields(why=str(exc)))
            return
        if forgotten:
            log.info("namespaces forgotten", extra=fields(count=forgotten, left=len(store.catalog.namespaces)))

    @staticmethod
    def _tenancy(connection: Connection, ns: int) -> Tenancy:
        return connection.opening(ns).tenancy

    # ---- reading

    def _lookup(self, connection: Connection, request: wire.Lookup) -> Answer:
        tenancy, remote = self._tenancy(connection, request.ns), self._store.remote
        if remote is not None and not remote.reads.are_all_here(tenancy, request.hashes):
            return remote.reads.lookup(tenancy, request)
        return self._store.reads.lookup(tenancy, request)

    def _acquire(self, connection: Connection, request: wire.Acquire) -> Answer:
        tenancy = self._tenancy(connection, request.ns)
        reads = self._store.reads
        at_once = reads.acquire_now(connection.session, tenancy, request)
        return at_once if at_once is not None else self._acquired(connection, tenancy, request)

    async def _acquired(self, connection: Connection, tenancy: Tenancy, request: wire.Acquire) -> wire.Message:
        remote = self._store.remote
        if remote is not None and not remote.reads.are_all_here(tenancy, request.hashes):
            reply = await remote.reads.acquire(connection.session, tenancy, request)
        else:
            reply = await self._store.reads.acquire(connection.session, tenancy, request)
        if connection.session.over and reply.lease:
            self._store.leases.release(connection.session, reply.lease)
            raise Closing("the connection is over")
        return reply

    def _release(self, connection: Connection, request: wire.Release) -> Answer:
        self._store.leases.release(connection.session, request.lease)
        return None

    def _prefetch(self, connection: Connection, request: wire.Prefetch) -> Answer:
        tenancy, remote = self._tenancy(connection, request.ns), self._store.remote
        if remote is not None and not remote.reads.are_all_here(tenancy, request.hashes):
            return self._prefetched(remote.reads.prefetch(tenancy, request.hashes), request)
        outcomes = self._store.reads.prefetch(tenancy, request.hashes)
        return wire.Found(request.id, outcomes.count(Outcome.HIT), outcomes)

    @staticmethod
    async def _prefetched(work: Awaitable[bytes], request: wire.Prefetch) -> wire.Message:
        outcomes = await work
        return wire.Found(request.id, outcomes.count(Outcome.HIT), outcomes)

    def _wait(self, connection: Connection, request: wire.Wait) -> Answer:
        return self._waited(self._tenancy(connection, request.ns), request)

    async def _waited(self, tenancy: Tenancy, request: wire.Wait) -> wire.Message:
        missing = await self._store.reads.wait(tenancy, request.hashes, request.wait_s)
        outcomes = bytes(missing.get(block_hash, Outcome.HIT) for block_hash in request.hashes)
        return wire.Found(request.id, _leading_hits(outcomes), outcomes)

    def _group_lookup(self, connection: Connection, request: wire.GroupLookup) -> Answer:
        return self._group_found(self._tenancy(connection, request.ns), request)

    async def _group_found(self, tenancy: Tenancy, request: wire.GroupLookup) -> wire.Message:
        """Answer slice by slice; another request's answer may come between two of them."""
        find = self._store.catalog.find
        reply = wire.Group(request.id, [], [])
        for sibling in list(tenancy.siblings):
            if not sibling.rows.keys().isdisjoint(request.hashes):
                there: set[bytes] = sibling.rows.keys() & request.hashes
                if sibling.any_expire:
                    there = {block_hash for block_hash in there if find(sibling, block_hash) is not None}
                found = bytes([_ABSENT_OR_HIT[block_hash in there] for block_hash in request.hashes])
                if there:
                    reply.namespaces.append(sibling.namespace.encode())
                    reply.outcomes.append(found)
                await asyncio.sleep(0)
        return reply

    # ---- writing

    def _reserve(self, connection: Connection, request: wire.Reserve) -> Answer:
        if self._node.closing:
            raise Closing("the daemon is draining: store to the next one")
        if self._settings.mode == "strict" and connection.session.arena is None:
            raise UsageError("in strict mode blocks are written through an arena: connect with want_pool to get one")
        opening = connection.opening(request.ns)
        ticket, outcomes = self._store.puts.reserve(
            connection.session, opening.tenancy, request.hashes, self._store.clock.monotonic_s(), after=request.after
        )
        ticket.ttl_s = opening.ttl_s
        reply = wire.Reserved(request.id, ticket.token, outcomes, ticket.offsets, self._settings.reservation_s)
        if request.wait_s and Outcome.NO_ROOM in outcomes and Outcome.GRANTED not in outcomes:
            return self._reserved_later(connection, opening, request)
        return reply

    async def _reserved_later(
        self, connection: Connection, opening: Opening, request: wire.Reserve
    ) -> wire.Message:
        """Try again as room appears, until something is granted or the wait is over."""
        store = self._store
        ends_s = store.clock.monotonic_s() + request.wait_s
        while True:
            left_s = ends_s - store.clock.monotonic_s()
            await store.room_changed(max(0.0, left_s))
            # Many may wait for the same room: not all of them need look at each of its changes.
            await asyncio.sleep(min(_RETRY_S, max(0.0, left_s)))
            if connection.session.over:
                raise Closing("the connection is over")
            ticket, outcomes = store.puts.reserve(
                connection.session, opening.tenancy, request.hashes, store.clock.monotonic_s(),
                after=request.after, again=True,
            )  # fmt: skip
            ticket.ttl_s = opening.ttl_s
            if Outcome.GRANTED in outcomes or Outcome.NO_ROOM not in outcomes or left_s <= 0:
                return wire.Reserved(request.id, ticket.token, outcomes, ticket.offsets, self._settings.reservation_s)

    def _seal(self, connection: Connection, request: wire.Seal) -> Answer:
        ticket = self._store.puts.ticket(connection.session, request.ticket)
        if request.checksums and request.which is not None and len(request.checksums) != len(request.which):
            raise UsageError(f"{len(request.checksums)} checksums for {len(request.which)} positions: give one each")
        which = ticket.positions(Put.OPEN) if request.which is None else request.which
        if len(set(which)) != len(which):
            raise UsageError("a seal names a position twice")
        if request.checksums and len(request.checksums) != len(which):
            raise UsageError(f"{len(request.checksums)} checksums for {len(which)} open positions: give one each")
        if ticket.arena is not None:
            return self._seal_copies(ticket, which, request)
        life_s = _life_s(ticket, request)
        result = self._store.puts.seal(ticket, which, request.checksums, life_s, after=request.after)
        self._store.stored(result.rows)
        if request.durable:
            return self._durable(ticket, which, result.outcomes, request)
        return wire.Sealed(request.id, bytes(result.outcomes))

    async def _durable(
        self, ticket: Ticket, which: Sequence[int], outcomes: bytearray, request: wire.Seal
    ) -> wire.Message:
        """Answer a seal when what it sealed, or found present, is on disk or can't be."""
        rows = [
            (at, row)
            for at, position in enumerate(which)
            if outcomes[at] in (Outcome.SEALED, Outcome.PRESENT)
            and (row := self._store.catalog.find(ticket.tenancy, ticket.hashes[position])) is not None
        ]
        durable = await self._store.make_durable([row for _, row in rows], request.wait_s)
        for (at, _), done in zip(rows, durable, strict=True):
            outcomes[at] = Outcome.DURABLE if done else Outcome.NOT_DURABLE
        return wire.Sealed(request.id, bytes(outcomes))

    async def _seal_copies(self, ticket: Ticket, which: Sequence[int], request: wire.Seal) -> wire.Message:
        """Strict mode: copy from the client's arena to slots of ours, checksum the copies, then seal those."""
        store, tenancy, arena = self._store, ticket.tenancy, ticket.arena
        assert isinstance(arena, Arena)
        outcomes = bytearray([Outcome.REFUSED]) * len(which)
        copied: list[tuple[int, int, int]] = []  # index in `which`, position, slot of ours
        for at, position in enumerate(which):
            if position < len(ticket.states) and ticket.states[position] == Put.OPEN:
                slot = store.puts.take_for_copy(tenancy)
                if slot is None:
                    outcomes[at] = Outcome.NO_ROOM
                    store.puts.forfeit(ticket, [position])
                else:
                    copied.append((at, position, slot))
            else:
                store.puts.forfeit(ticket, [position])  # too late, but its writer says that it is done
        jobs = [(arena.address + ticket.offsets[position], slot) for _, position, slot in copied]
        sums: list[int] = []
        arena.copies += 1
        try:
            sums = await in_thread(lambda: self._copy_in(jobs, tenancy.block_bytes))
        finally:
            arena.copied()
            if len(sums) != len(copied):
                for _, _, slot in copied:
                    store.puts.free_copy(tenancy, slot)
        positions = [position for _, position, _ in copied]
        life_s = _life_s(ticket, request)
        slots = [slot for _, _, slot in copied]
        result = store.puts.seal(ticket, positions, sums, life_s, after=request.after, slots=slots)
        for (at, _, _), outcome in zip(copied, result.outcomes, strict=True):
            outcomes[at] = outcome
        store.stored(result.rows)
        if request.durable:
            return await self._durable(ticket, which, outcomes, request)
        return wire.Sealed(request.id, bytes(outcomes))

    def _copy_in(self, jobs: list[tuple[int, int]], block_bytes: int) -> list[int]:
        sums: list[int] = []
        for source, slot in jobs:
            _memmove(self._store.memory.address + slot, source, block_bytes)
            sums.append(checksum(self._store.memory.view(slot, block_bytes)))
        return sums

    def _forfeit(self, connection: Connection, request: wire.Forfeit) -> Answer:
        ticket = self._store.puts.ticket(connection.session, request.ticket)
        return wire.Done(request.id, self._store.puts.forfeit(ticket, request.which))

    # ---- the rest

    def _abort(self, connection: Connection, request: wire.Abort) -> Answer:
        told = self._store.puts.abort(self._tenancy(connection, request.ns), request.hashes)
        return wire.Done(request.id, told)

    def _drop(self, connection: Connection, request: wire.Drop) -> Answer:
        return self._dropped(self._tenancy(connection, request.ns), request)

    async def _dropped(self, tenancy: Tenancy, request: wire.Drop) -> wire.Message:
        outcomes = await self._store.drop_blocks(tenancy, request.hashes)
        return wire.Found(request.id, outcomes.count(Outcome.DONE), outcomes)

    def _corrupt(self, connection: Connection, request: wire.Corrupt) -> Answer:
        tenancy = self._tenancy(connection, request.ns)
        if connection not in self._looking:  # one at a time: reading blocks costs more than asking for it
            self._looking.add(connection)
            self._node.spawn(self._looked_at(connection, tenancy, request.hashes))
        return None

    async def _looked_at(self, connection: Connection, tenancy: Tenancy, hashes: Sequence[bytes]) -> None:
        try:
            rows = {self._store.catalog.find(tenancy, block_hash) for block_hash in hashes} - {None}
            corrupt = await self._store.verify([row for row in rows if row is not None], {Tier.CPU})
        finally:
            self._looking.discard(connection)
        if corrupt:
            log.warning(
                "blocks in memory are corrupt and were dropped",
                extra=fields(blocks=len(corrupt), model=tenancy.namespace.model, fix="look for failing memory"),
            )

    def _cancel(self, connection: Connection, request: wire.Cancel) -> Answer:
        connection.cancel(request.request)
        return None

    def _bye(self, connection: Connection, request: wire.Bye) -> Answer:
        connection.said_goodbye = True
        connection.close()
        return None


def _life_s(ticket: Ticket, request: wire.Seal) -> float | None:
    return ticket.ttl_s if request.ttl_s is None else request.ttl_s


def _leading_hits(outcomes: bytes) -> int:
    return next((at for at, outcome in enumerate(outcomes) if outcome != Outcome.HIT), len(outcomes))
