"""The daemon put together: store, service, socket, HTTP; their start, and their end in order.

Order of the end, under the one deadline that the command line keeps: accept no more, refuse new puts, write what only
memory holds to ssd, end the sessions, stop the moves, close the tiers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
from collections.abc import AsyncGenerator, Callable

from kvstore.clock import SystemClock
from kvstore.errors import UnavailableError
from kvstore.store import Store, StoreSettings
from kvstored import reports
from kvstored.config import Settings
from kvstored.http import listening
from kvstored.logs import fields
from kvstored.node import Node
from kvstored.remote.opening import open_store
from kvstored.server import Server
from kvstored.service import Service

log = logging.getLogger("kvstored.app")

_DRAIN_SHARE = 0.8  # of the deadline; the rest is for closing
_OVERDUE_LOOK_S = 5.0


async def serve(settings: Settings, *, ready: Callable[[], None]) -> None:
    """Serve until cancelled, then drain and close; `ready` is called when clients are served.

    Raises
    ------
    KVStoreError
        Something can't be opened; the text names the fix. In an ExceptionGroup when it came later.
    """
    clock, remote = SystemClock(), None
    if settings.remote is not None:
        assert settings.remote_size_bytes is not None
        assert settings.remote_writer is not None
        remote = open_store(
            settings.remote, settings.remote_size_bytes, settings.remote_writer, clock, settings.remote_refresh_s
        )
    store = await Store.open(store_settings(settings), clock)
    if remote is not None:
        store.attach(remote)
    try:
        async with asyncio.TaskGroup() as tasks:
            node = Node(settings, store, secrets.token_bytes(16), tasks)
            server = Server(node, Service(node))
            server.bind()
            try:
                await _serve(node, server, ready)
            finally:
                server.close_listener()
                server.close_connections()
                server.close()
    finally:
        await asyncio.shield(store.close())


async def _serve(node: Node, server: Server, ready: Callable[[], None]) -> None:
    async with _http(node):
        keeping = asyncio.ensure_future(node.store.run(lambda: _begin(server, ready)))
        watching = asyncio.ensure_future(_tell_overdue(node.store))
        try:
            await asyncio.wait([keeping])
            keeping.result()  # it runs for ever, so it has failed
        finally:
            if not keeping.done():
                server.close_listener()
                await _drain(node)
            for task in (watching, keeping):
                task.cancel()
            await asyncio.wait([watching, keeping])


def _begin(server: Server, ready: Callable[[], None]) -> None:
    server.listen()
    # What exists now lives as long as the daemon: a full collection need not look at it again.
    gc.collect()
    gc.freeze()
    ready()


async def _drain(node: Node) -> None:
    node.closing = True
    drained = await node.store.drain(node.settings.drain_s * _DRAIN_SHARE)
    log.info(
        "drained",
        extra=fields(
            written_blocks=drained.written, left_out_blocks=drained.left_out, remaining_blocks=drained.remaining
        ),
    )


@contextlib.asynccontextmanager
async def _http(node: Node) -> AsyncGenerator[None, None]:
    if node.settings.http is None:
        yield
        return
    async with contextlib.AsyncExitStack() as stack:
        listener = listening(node.settings.http, lambda: reports.stats(node), lambda: _unready(node))
        try:
            node.http = await stack.enter_async_context(listener)
            log.info("http", extra=fields(address=node.http))
        except UnavailableError as exc:
            if not node.settings.http_by_default:
                raise
            log.warning("no metrics", extra=fields(why=str(exc)))
        yield


def _unready(node: Node) -> str | None:
    if node.closing:
        return "draining"
    return None if node.store.memory.populated_bytes else "the cpu tier is being reserved"


async def _tell_overdue(store: Store) -> None:
    """Report zero-copy leases that should have ended; their slots stay theirs."""
    told: set[int] = set()
    while True:
        await asyncio.sleep(_OVERDUE_LOOK_S)
        for lease in store.leases.overdue(store.clock.monotonic_s()):
            if lease.token not in told:
                told.add(lease.token)
                log.warning(
                    "a lease is overdue",
                    extra=fields(client=lease.session.client, blocks=len(lease.rows), fix="release it in the client"),
                )


def store_settings(settings: Settings) -> StoreSettings:
    """Return the store's part of the daemon's settings."""
    return StoreSettings(
        cpu_size_bytes=settings.cpu_size_bytes,
        ssd_size_bytes=settings.ssd_size_bytes or 0 if "ssd" in settings.tiers else 0,
        ssd_dir=settings.ssd_dir,
        eviction=settings.eviction,
        write_policy=settings.write_policy,
        remote_write_policy=settings.remote_write_policy,
        read_only_clients=settings.mode == "strict",
        verify_reads=settings.verify_reads,
        huge_pages=settings.huge_pages,
        ttl_s=settings.ttl_s,
        ttl_mode=settings.ttl_mode,
        high_watermark=settings.high_watermark,
        low_watermark=settings.low_watermark,
        lease_s_max=settings.lease_s_max,
        reservation_s=settings.reservation_s,
        io_threads=settings.io_threads,
        write_queue_bytes=settings.write_queue_bytes,
        quotas=settings.quotas,
    )


