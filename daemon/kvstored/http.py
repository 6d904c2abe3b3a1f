"""What the daemon says over HTTP: /metrics, /healthz, /readyz. Read-only; nothing can be changed from here.

Invariants
1. /healthz answers 200 whenever the loop runs; /readyz answers 200 only when clients are served, else 503 and why.
2. At most `CONNECTIONS_MAX` connections are held: a scraper gone wild must not take the daemon's descriptors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from kvstored.listening import quiet_logger, serving
from kvstored.metrics import CONTENT_TYPE, Exposition
from kvstored.readers import read_address

CONNECTIONS_MAX = 64
_IDLE_S = 15.0
_CLOSE_S = 1.0

http_log = quiet_logger("kvstored.http")


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
    parsed = read_address(address)
    assert parsed is not None  # "off" is not an address to listen at
    runner = web.AppRunner(
        _application(stats, unready),
        access_log=None,
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=_CLOSE_S,
        logger=http_log,
    )
    async with serving(runner, parsed, "http", CONNECTIONS_MAX) as bound:
        yield bound


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
