"""What the daemon says over HTTP: /metrics, /healthz, /readyz. Read-only; nothing can be changed from here.

Invariants
1. /healthz answers 200 whenever the loop runs; /readyz answers 200 only when clients are served, else 503 and why.
2. At most `CONNECTIONS_MAX` connections are held: a scraper gone wild must not take the daemon's descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from kvstore.errors import BadSetting, UnavailableError
from kvstored.metrics import CONTENT_TYPE, Exposition
from kvstored.readers import read_address

CONNECTIONS_MAX = 64
_IDLE_S = 15.0
_CLOSE_S = 1.0


@asynccontextmanager
async def listening(
    address: str, stats: Callable[[], Awaitable[Mapping[str, Any]]], unready: Callable[[], str | None]
) -> AsyncGenerator[str, None]:
    """Serve HTTP at `address` inside the block; gives the address bound, which names the port chosen for port 0.

    `stats` makes the stats report; `unready` is why clients are not served, or None if they are. Leaving the block,
    by cancellation too, closes the listener and every connection.

    Raises
    ------
    BadSetting
        The address is not one of this machine, or may not be bound.
    UnavailableError
        Something else listens there.
    """
    application = _application(stats, unready)
    runner = web.AppRunner(
        application, access_log=None, keepalive_timeout=_IDLE_S, shutdown_timeout=_CLOSE_S
    )
    await runner.setup()
    try:
        bound = await _bind(address)
        with bound:
            server = await asyncio.get_running_loop().create_server(_bounded(runner), sock=bound)
            try:
                yield _shown(bound)
            finally:
                server.close()
    finally:
        await runner.cleanup()


def _application(
    stats: Callable[[], Awaitable[Mapping[str, Any]]], unready: Callable[[], str | None]
) -> web.Application:
    exposition = Exposition(stats, unready)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await exposition.text(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        reason = unready()
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    async def index(request: web.Request) -> web.Response:
        return web.Response(text="kvstored: /metrics /healthz /readyz\n")

    application = web.Application(client_max_size=4096)
    application.router.add_get("/", index)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    return application


def _bounded(runner: web.AppRunner) -> Callable[[], asyncio.BaseProtocol]:
    server = runner.server
    assert server is not None  # set up just before

    def accept() -> asyncio.BaseProtocol:
        return _Refuse() if len(server.connections) >= CONNECTIONS_MAX else server()

    return accept


class _Refuse(asyncio.Protocol):
    """Closes the connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _bind(address: str) -> socket.socket:
    parsed = read_address(address)
    assert parsed is not None  # "off" is not an address to listen at
    host, port = parsed
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as exc:
        raise BadSetting(
            f"http = {address!r}: {host} can't be resolved ({exc}): write an address of this machine"
        ) from exc
    family, kind, protocol, _, target = found[0]
    bound = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(target)
        bound.listen(CONNECTIONS_MAX)
        bound.setblocking(False)
    except OSError as exc:
        bound.close()
        if exc.errno == errno.EADDRINUSE:
            raise UnavailableError(
                f"http = {address!r}: port {port} is taken: stop what listens there (ss -ltnp), or choose "
                "another --http HOST:PORT"
            ) from exc
        raise BadSetting(
            f"http = {address!r} can't be bound ({os.strerror(exc.errno or 0)}): write an address of this machine "
            "and a port above 1023"
        ) from exc
    return bound


def _shown(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if bound.family == socket.AF_INET6 else f"{host}:{port}"
