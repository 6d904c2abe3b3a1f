"""Workers that fail in every way at any moment, clients that leave at any: all is bounded, and all is given back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import aiohttp
import pytest

from kvproxy.app import Served
from kvproxy.types import Role
from tests.kvproxy.running import ASK, client, on_loop, proxy, until
from tests.kvproxy.stub_worker import Behaviour, Ending, StubWorker

REQUESTS = 150
BEHAVIOURS = (
    *(Behaviour() for _ in range(8)),
    *(Behaviour(status=status) for status in (400, 429, 500, 503)),
    *(Behaviour(ending=ending) for ending in Ending),
    Behaviour(resets_before_headers=True),
    Behaviour(closes_before_headers=True),
    Behaviour(closes_idle=True),
    Behaviour(hangs=True),
    Behaviour(hangs=True, health=None),
    Behaviour(content_type="text/html"),
    Behaviour(padding_bytes=100_000, tokens=["x"] * 20),
)
STATUSES = {200, 400, 429, 500, 502, 503, 504}


@pytest.mark.parametrize("entrance", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["plain", "503"])
@on_loop
async def test_whatever_fails_every_request_ends_and_nothing_is_left(entrance: str, policy: str) -> None:
    draw = random.Random(f"{entrance} {policy}")
    stubs = [StubWorker(role) for role in Role for _ in range(3)]
    async with stubs[0], stubs[1], stubs[2], stubs[3], stubs[4], stubs[5]:
        flags = {"deadline": "5s", "stall_timeout": "1s", "probe_timeout": "500ms", "running_max": 20}
        async with proxy(*stubs, entrance=entrance, on_prefill_loss=policy, **flags) as served, client(served) as http:
            ends: Counter[str] = Counter()
            async with asyncio.TaskGroup() as group:
                for number in range(REQUESTS):
                    if number % 3 == 0:
                        draw.choice(stubs).behaviour = draw.choice(BEHAVIOURS)
                    patience_s = draw.choice([0.01, 0.1, 60.0])
                    group.create_task(ask(http, patience_s, ends, stream=draw.random() < 0.5))
                    await asyncio.sleep(draw.random() / 100)
            assert ends.total() == REQUESTS
            assert ends["answered"] > 0
            for stub in stubs:
                stub.behaviour = Behaviour()
            await until(lambda: all(one["usable"] for one in served.fleet.report()), "all workers are used again")
            async with http.post("/v1/completions", json=ASK) as answer:
                assert answer.status == 200
            await until(lambda: is_at_rest(served), "nothing runs")


async def ask(http: aiohttp.ClientSession, patience_s: float, ends: Counter[str], *, stream: bool) -> None:
    try:
        async with asyncio.timeout(patience_s), http.post("/v1/completions", json={**ASK, "stream": stream}) as answer:
            body = await answer.read()
            assert answer.status in STATUSES
            if answer.status == 200 and stream:
                assert body.endswith(b"data: [DONE]\n\n") or b"event: error\ndata: " in body
            ends["answered" if answer.status == 200 else "refused"] += 1
    except TimeoutError:
        ends["left"] += 1


def is_at_rest(served: Served) -> bool:
    report = served.fleet.report()
    weights = {one[key] for one in report for key in ("requests", "pending_tokens", "active_blocks")}
    return weights == {0} and served.queue.running == served.queue.waiting == 0
