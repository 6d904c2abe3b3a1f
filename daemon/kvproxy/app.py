"""The proxy put together: its workers, its queue, its listeners; their start, and their end in order.

Order of the end, under one deadline: /readyz says no, the queue refuses, running requests go on; at the deadline the
legs that are left are ended, so that streams close with an error event; then the listeners and connections close.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from aiohttp import web

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
from kvstore.errors import BadSetting
from kvstored.listening import quiet_logger, serving

http_log = quiet_logger("kvproxy.http")

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
            _served(front.application(), settings.listen, settings.connections_max, "listen")
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
    return await stack.enter_async_context(_served(application, settings.admin, _ADMIN_CONNECTIONS_MAX, "admin"))


@contextlib.asynccontextmanager
async def _served(
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
    async with serving(runner, address, key, connections_max) as bound:
        yield f"http://{bound}"


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
