"""A proxy in front of stub workers, on the loop of the test."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvloop

from kvproxy import hashes
from kvproxy.app import Served, running
from kvproxy.settings import Settings, resolve
from tests.kvproxy.stub_worker import StubWorker

PROMPT = "It was the best of times, it was the worst of times. " * 8  # long enough for P to be worth it
ASK = {"model": "stub-model", "prompt": PROMPT, "max_tokens": 4}
CHAT_ASK = {"model": "stub-model", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
WITHIN_S = 30.0


def chain(tokens: Sequence[int], block_tokens: int, **more: str) -> list[bytes]:
    """Return the hashes of all full blocks."""
    return list(hashes.chain(tokens, block_tokens, **more))


def settings_of(*stubs: StubWorker, **flags: Any) -> Settings:
    """Return settings with these workers, a port of its own and `flags` (keys with underscores)."""
    given: dict[str, Any] = {"listen": "127.0.0.1:0", "drain-timeout": "0s", "probe-interval": "50ms"}
    for role in ("prefill", "decode"):
        if urls := [f"{stub.url}#{stub.endpoint.node}" for stub in stubs if stub.role == role]:
            given[role] = urls
    given |= {key.replace("_", "-"): value for key, value in flags.items()}
    resolution = resolve(given, {})
    assert resolution.settings is not None, resolution.faults
    return resolution.settings


@asynccontextmanager
async def proxy(*stubs: StubWorker, **flags: Any) -> AsyncGenerator[Served, None]:
    """Run a proxy in front of these workers."""
    async with running(settings_of(*stubs, **flags)) as served:
        yield served


@asynccontextmanager
async def client(served: Served) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """Give an HTTP client whose paths are the proxy's."""
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    async with aiohttp.ClientSession(served.url, timeout=timeout) as session:
        yield session


async def until(condition: Callable[[], object], what: str) -> None:
    """Return once `condition` is true; for what no event tells."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


def on_loop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Turn a coroutine into a test that runs it on a loop of its own, the product's kind, within bounds."""

    @functools.wraps(scenario)
    def run(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(2 * WITHIN_S):
                await scenario(*arguments, **named)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    return run
