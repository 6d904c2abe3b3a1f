"""The proxy put together: its workers, its queue, its listeners; their start, and their end in order.

Order of the end, under one deadline: /readyz says no, the queue refuses, running requests go on; at the deadline the
legs that are left are ended, so that streams close with an error event; then the listeners and connections close.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import socket
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvclient import AsyncClient
from kvproxy import admin
from kvproxy.exchange import Parts
from kvproxy.fairness import FairQueue
from kvproxy.front import Front
from kvproxy.hangups import Hangups
from kvproxy.health import Watch
from kvproxy.legs import Wires
from kvproxy.metrics import Metrics
from kvproxy.models import Models
from kvproxy.retries import RetryBudget
from kvproxy.settings import Settings
from kvproxy.store import StoreView
from kvproxy.tokens import tokenizer_for
from kvproxy.types import Policy, Role
from kvproxy.workers import Fleet
from kvstore.errors import BadSetting, UnavailableError
from kvstored.logs import fields

log = logging.getLogger("kvproxy.app")
http_log = logging.getLogger("kvproxy.http")

RETRY_AFTER_S = 2.0
_CLOSE_S = 2.0
_IDLE_S = 75.0
_ADMIN_CONNECTIONS_MAX = 16


@dataclass(frozen=True, slots=True)
class Served:
    """A running proxy, for who started it in this process."""

    url: str
    admin_url: str | None
    fleet: Fleet
    queue: FairQueue
    metrics: Metrics
    watching: asyncio.Future[None]  # done only if it has failed


async def serve(settings: Settings, *, ready: Callable[[Served], None]) -> None:
    """Serve until cancelled, then drain and close; `ready` is called when clients are served.

    Raises
    ------
    KVStoreError
        Something can't be started; the text names the fix.
    """
    async with running(settings) as served:
        ready(served)
        await asyncio.wait((served.watching,))
        served.watching.result()


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncGenerator[Served, None]:
    """Run a proxy inside the block; leaving it drains, by `drain_s` at most."""
    loop = asyncio.get_running_loop()
    fleet = Fleet(
        loop.time, {Role.PREFILL: settings.prefill_tokens_per_s, Role.DECODE: settings.decode_tokens_per_s}
    )
    for endpoint in (*settings.prefill, *settings.decode):
        fleet.add(endpoint)
    queue = FairQueue(
        loop.time,
        running_max=settings.running_max,
        waiting_max=settings.waiting_max,
        waiting_s_max=settings.waiting_s,
        share_max=settings.caller_waiting_max,
    )
    metrics = Metrics()
    async with contextlib.AsyncExitStack() as stack:
        wires = await stack.enter_async_context(Wires(settings))
        parts = await _parts(settings, fleet, wires, metrics, stack)
        front = Front(parts, queue, stack.enter_context(Hangups(loop)))
        watching = asyncio.ensure_future(Watch(fleet, wires, settings).run())
        stack.push_async_callback(_ended, watching)
        admin_url = await _admin(settings, fleet, stack)
        url = await stack.enter_async_context(
            listening(front.application(), settings.listen, settings.connections_max, "listen")
        )
        try:
            yield Served(url, admin_url, fleet, queue, metrics, watching)
        finally:
            await front.drain(settings.drain_s)


async def _parts(
    settings: Settings, fleet: Fleet, wires: Wires, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> Parts:
    store = None
    if settings.store is not None:
        client = AsyncClient(settings.store, deadline_s=settings.store_s, strict=True, pretouch=False, name="kvproxy")
        store = StoreView(await stack.enter_async_context(client), settings, metrics)
    policy = Policy(
        settings.on_prefill_loss,
        settings.min_prefill_tokens,
        settings.decode_tokens_per_s,
        settings.fetch_tokens_per_s,
        RETRY_AFTER_S,
    )
    return Parts(
        settings,
        policy,
        fleet,
        wires,
        tokenizer_for(settings, fleet, wires, metrics),
        store,
        Models(fleet, wires),
        metrics,
        RetryBudget(),
        random.SystemRandom(),
    )


async def _admin(settings: Settings, fleet: Fleet, stack: contextlib.AsyncExitStack) -> str | None:
    if settings.admin is None:
        return None
    token = admin.read_token(settings.admin_token_file, os.environ)
    if token is None:
        raise BadSetting("admin: the port needs a token: give --admin-token-file FILE")
    application = admin.application(fleet, token)
    return await stack.enter_async_context(listening(application, settings.admin, _ADMIN_CONNECTIONS_MAX, "admin"))


@contextlib.asynccontextmanager
async def listening(
    application: web.Application, address: tuple[str, int], connections_max: int, key: str
) -> AsyncGenerator[str, None]:
    """Serve an application inside the block; gives the URL bound, which names the port chosen for port 0."""
    runner = web.AppRunner(
        application,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=_CLOSE_S,
        auto_decompress=False,
        logger=http_log,
    )
    await runner.setup()
    try:
        with await _bound(address, key) as listener:
            server = await asyncio.get_running_loop().create_server(_bounded(runner, connections_max), sock=listener)
            try:
                host, port = listener.getsockname()[:2]
                yield f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
            finally:
                server.close()
    finally:
        await runner.cleanup()


def _bounded(runner: web.AppRunner, connections_max: int) -> Callable[[], asyncio.BaseProtocol]:
    server = runner.server
    assert server is not None  # set up just before

    def accept() -> asyncio.BaseProtocol:
        return _Refuse() if len(server.connections) >= connections_max else server()

    return accept


class _NoBytes(logging.Filter):
    """Keeps what clients send out of the log: aiohttp tells each malformed request as an error, with its bytes."""

    def filter(self, record: logging.LogRecord) -> bool:
        raised = record.exc_info[1] if record.exc_info else None
        if not isinstance(raised, HttpProcessingError):
            return True
        log.debug("a request is malformed", extra=fields(kind=type(raised).__name__))
        return False


http_log.addFilter(_NoBytes())


class _Refuse(asyncio.Protocol):
    """Closes the connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _bound(address: tuple[str, int], key: str) -> socket.socket:
    host, port = address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, target = found[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    except OSError as exc:
        raise BadSetting(f"{key}: {host} is no address of this machine ({exc.strerror}): choose another") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        text = f"{key}: {host}:{port} can't be bound ({os.strerror(exc.errno or 0)})"
        if exc.errno == errno.EADDRINUSE:
            raise UnavailableError(f"{text}: stop what listens there (ss -ltnp), or choose another --{key}") from exc
        raise BadSetting(f"{text}: write an address of this machine and a port above 1023") from exc
    return listener


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
