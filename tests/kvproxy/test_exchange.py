"""A request's way in time: deadlines, dead and silent workers, kept connections, D as the entrance, the drain."""

from __future__ import annotations

import asyncio
import io
import json
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from kvproxy.app import Served, running
from kvproxy.breaker import BreakerState
from kvproxy.retries import RetryBudget
from kvproxy.types import Role
from tests.kvproxy.running import ASK, client, on_loop, proxy, settings_of, until
from tests.kvproxy.stub_worker import Behaviour, Ending, StubWorker

STREAMED = {**ASK, "stream": True}
QUIET = {"probe_interval": "50ms", "probe_timeout": "50ms"}


def first(served: Served, stub: StubWorker, *others: StubWorker) -> None:
    """Have `stub` chosen before the others, which look busy."""
    for other in others:
        worker = served.fleet.worker(other.role, other.url)
        worker.active_blocks = worker.pending_tokens = 1_000_000
    assert served.fleet.worker(stub.role, stub.url).active_blocks == 0


def status_of(answer: aiohttp.ClientResponse, body: dict[str, Any]) -> tuple[int, int]:
    return answer.status, int(body["error"]["code"])


# ---- deadlines


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("header", ["X-Request-Timeout-Ms", "X-Request-Deadline-Ms"])
@on_loop
async def test_a_request_s_own_deadline_ends_the_leg_that_runs_then(at: str, header: str) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        stub = p if at == "prefill" else d
        stub.behaviour = Behaviour(hangs=True)
        async with client(served) as http:
            value = 300 if header.startswith("X-Request-Timeout") else (time.time() + 0.3) * 1000
            async with http.post("/v1/completions", json=ASK, headers={header: str(value)}) as answer:
                assert status_of(answer, await answer.json()) == (504, 504)
        (seen,) = await stub.arrived(1)
        await seen.cancelled.wait()
        assert len(p.seen) + len(d.seen) == (1 if at == "prefill" else 2), "nothing is tried again past it"
        assert served.fleet.worker(stub.role, stub.url).is_usable, "it is no fault of the worker"


@on_loop
async def test_a_deadline_in_mid_stream_ends_it_by_an_error_event() -> None:
    gate = asyncio.Event()
    async with StubWorker(Role.DECODE, Behaviour(between_tokens=gate)) as d, proxy(d) as served, client(served) as http:
        async with http.post("/v1/completions", json=STREAMED, headers={"X-Request-Timeout-Ms": "300"}) as answer:
            assert answer.status == 200
            text = await answer.text()
        await d.seen[0].cancelled.wait()
    assert text.split("\n\n")[1].startswith("event: error\ndata: ")
    assert "deadline" in text


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e99", ""])
@on_loop
async def test_a_deadline_that_is_over_or_no_number_reaches_no_worker(value: str) -> None:
    async with StubWorker(Role.DECODE) as d, proxy(d) as served, client(served) as http:
        async with http.post("/v1/completions", json=ASK, headers={"X-Request-Timeout-Ms": value}) as answer:
            assert answer.status == (504 if value == "0" else 400)
        assert not d.seen


@on_loop
async def test_the_proxy_s_own_deadline_holds_where_the_request_s_is_later() -> None:
    async with StubWorker(Role.DECODE, Behaviour(hangs=True)) as d, proxy(d, deadline="300ms") as served:
        async with (
            client(served) as http,
            http.post("/v1/completions", json=ASK, headers={"X-Request-Timeout-Ms": "60000"}) as answer,
        ):
            assert answer.status == 504
        await d.seen[0].cancelled.wait()


# ---- workers that fail


FAILURES = {
    "reset": Behaviour(resets_before_headers=True),
    "closed": Behaviour(closes_before_headers=True),
    "500": Behaviour(status=500),
    "503": Behaviour(status=503),
    "no JSON": Behaviour(content_type="text/html"),
    "nobody listens": None,
}


@pytest.mark.parametrize(
    ("role", "failure"),
    # What P answers is read, whatever type it has; of D's answer the type is all that is looked at.
    [(role, name) for role in Role for name in FAILURES if (role, name) != (Role.PREFILL, "no JSON")],
)
@on_loop
async def test_what_fails_before_the_first_byte_is_done_by_another_once(role: Role, failure: str) -> None:
    behaviour = FAILURES[failure]
    async with (
        StubWorker(role) as bad,
        StubWorker(role) as good,
        StubWorker(Role.DECODE if role is Role.PREFILL else Role.PREFILL) as partner,
        proxy(bad, good, partner) as served,
        client(served) as http,
    ):
        first(served, bad, good)
        if behaviour is None:
            await bad.refuse()
        else:
            bad.behaviour = behaviour
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
            assert (await answer.json())["choices"][0]["text"] == "Once upon a time"
        assert len(good.seen) == 1
        assert len(partner.seen) == 1
        assert len(bad.seen) == (0 if behaviour is None else 1)


@on_loop
async def test_a_d_that_is_back_is_used_though_the_first_request_it_gets_takes_long() -> None:
    gate = asyncio.Event()
    async with StubWorker(Role.DECODE) as d, proxy(d) as served, client(served) as http:

        async def status() -> int:
            async with http.post("/v1/completions", json=ASK) as answer:
                return answer.status

        await d.refuse()
        assert await status() == 503
        d.behaviour = Behaviour(before_headers=gate)
        await d.listen()
        worker = served.fleet.worker(Role.DECODE, d.url)
        await until(lambda: worker.is_usable, "its /health has answered")
        slow = asyncio.create_task(status())
        await d.arrived(1)
        d.behaviour = Behaviour()
        await until(lambda: worker.is_usable, "another may try it")
        assert await status() == 200
        assert worker.breaker.state is BreakerState.CLOSED
        gate.set()
        assert await slow == 200


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("hanging", [Behaviour(hangs=True), Behaviour(ending=Ending.SILENT)])
@on_loop
async def test_a_p_that_hangs_and_answers_health_leaves_the_next_one_its_part_of_the_time(
    hanging: Behaviour, others: int
) -> None:
    async with (
        StubWorker(Role.PREFILL, hanging) as p,
        StubWorker(Role.PREFILL) as other,
        StubWorker(Role.DECODE) as d,
        proxy(*(p, d, other)[: 2 + others], prefill_wait="2s") as served,
        client(served) as http,
    ):
        if others:
            served.fleet.worker(Role.PREFILL, other.url).pending_tokens = 1_000_000
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
        assert len(p.seen) == 1
        assert len(other.seen) == others
        assert len(d.seen) == 1
        if others:
            served.fleet.worker(Role.PREFILL, other.url).pending_tokens -= 1_000_000


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_d_that_is_silent_and_whose_health_is_too_is_given_up_for_another(stream: bool) -> None:
    async with (
        StubWorker(Role.DECODE, Behaviour(hangs=True, health=None)) as dead,
        StubWorker(Role.DECODE) as good,
        proxy(dead, good, **QUIET) as served,
        client(served) as http,
    ):
        first(served, dead, good)
        async with http.post("/v1/completions", json={**ASK, "stream": stream}) as answer:
            assert answer.status == 200
        assert len(dead.seen) == len(good.seen) == 1
        await dead.seen[0].cancelled.wait()
        assert not served.fleet.worker(Role.DECODE, dead.url).is_usable
        dead.behaviour = Behaviour()
        await until(lambda: served.fleet.worker(Role.DECODE, dead.url).is_usable, "it comes back by itself")


@on_loop
async def test_a_d_that_dies_in_mid_stream_without_closing_ends_it_by_an_error_event() -> None:
    behaviour = Behaviour(ending=Ending.SILENT, health=None)
    async with (
        StubWorker(Role.DECODE, behaviour) as d,
        proxy(d, **QUIET) as served,
        client(served) as http,
        http.post("/v1/completions", json=STREAMED) as answer,
    ):
        assert answer.status == 200
        assert "event: error" in await answer.text()


@on_loop
async def test_a_d_that_stops_in_mid_stream_is_given_the_stall_timeout() -> None:
    behaviour = Behaviour(ending=Ending.SILENT)  # its /health answers
    async with StubWorker(Role.DECODE, behaviour) as d, proxy(d, stall_timeout="300ms") as served:
        async with client(served) as http, http.post("/v1/completions", json=STREAMED) as answer:
            assert answer.status == 200
            assert "event: error" in await answer.text()
        await d.seen[0].cancelled.wait()


@pytest.mark.parametrize("closes", ["behind the answer", "when the next request comes"])
@on_loop
async def test_a_kept_connection_that_was_closed_costs_one_try_on_a_new_one(closes: str) -> None:
    async with StubWorker(Role.DECODE) as d, proxy(d) as served, client(served) as http:
        d.behaviour = Behaviour(closes_idle=closes == "behind the answer")
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
        d.behaviour = replace(d.behaviour, closes_before_headers=closes != "behind the answer")
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == (200 if closes == "behind the answer" else 502)
        assert len(d.seen) <= 3


def test_a_budget_of_retries_is_a_reserve_and_a_part_of_the_requests() -> None:
    budget = RetryBudget(part=0.5, reserve=2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.take()
    budget.earn()
    assert budget.take()
    for _ in range(100):
        budget.earn()
    assert [budget.take() for _ in range(3)] == [True, True, False]


# ---- D as the entrance


@on_loop
async def test_with_d_as_entrance_both_are_asked_at_once_and_d_is_told_how_long_to_wait() -> None:
    gate = asyncio.Event()
    async with (
        StubWorker(Role.PREFILL, Behaviour(before_headers=gate)) as p,
        StubWorker(Role.DECODE, Behaviour(before_headers=gate)) as d,
        proxy(p, d, entrance="decode", prefill_wait="20s") as served,
        client(served) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json=ASK))
        await asyncio.gather(p.arrived(1), d.arrived(1))
        gate.set()
        async with await asking as answer:
            assert answer.status == 200
        told = d.seen[0].json.pop("kv_transfer_params")
        assert 0 < told["kvstored"]["wait_ms"] <= 20_000
        assert "kv_transfer_params" not in p.seen[0].json


@pytest.mark.parametrize(("policy", "status"), [("plain", 200), ("503", 503)])
@on_loop
async def test_with_d_as_entrance_a_lost_p_takes_d_s_wait_back(policy: str, status: int) -> None:
    hangs = asyncio.Event()
    async with (
        StubWorker(Role.PREFILL, Behaviour(before_headers=hangs, resets_before_headers=True)) as p,
        StubWorker(Role.DECODE, Behaviour(before_headers=asyncio.Event())) as d,
        proxy(p, d, entrance="decode", on_prefill_loss=policy) as served,
        client(served) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json=ASK))
        await asyncio.gather(p.arrived(1), d.arrived(1))
        d.behaviour = Behaviour()
        hangs.set()
        async with await asking as answer:
            assert answer.status == status
        await d.seen[0].cancelled.wait()
        assert [seen.json for seen in d.seen[1:]] == ([ASK] if status == 200 else [])


@on_loop
async def test_with_d_as_entrance_p_is_let_go_once_d_has_begun() -> None:
    async with (
        StubWorker(Role.PREFILL, Behaviour(hangs=True)) as p,
        StubWorker(Role.DECODE) as d,
        proxy(p, d, entrance="decode") as served,
        client(served) as http,
    ):
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
        await p.seen[0].cancelled.wait()
        assert len(d.seen) == 1


# ---- the client's connection


def sent(path: str, ask: dict[str, Any]) -> bytes:
    body = json.dumps(ask).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("requests", [1, 2, 40])
@pytest.mark.parametrize("how", ["close", "reset"])
@on_loop
async def test_a_client_that_goes_is_noticed_behind_pipelined_requests_too(requests: int, how: str) -> None:
    async with StubWorker(Role.DECODE, Behaviour(hangs=True)) as d, proxy(d) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(sent("/v1/completions", ASK) * requests)
        (seen,) = await d.arrived(1)
        if how == "reset":
            writer.transport.abort()
        else:
            writer.close()
        await seen.cancelled.wait()
        await until(lambda: served.queue.running == 0, "its place is free")
        assert len(d.seen) == 1


@on_loop
async def test_a_refusal_that_comes_before_the_body_was_read_reaches_the_client() -> None:
    body = b'{"error": {"message": "too long"}}'
    held: list[asyncio.StreamWriter] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 413 Large\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    async with StubWorker(Role.DECODE) as d:
        await d.refuse()
        worker = await asyncio.start_server(refuse, "127.0.0.1", d.port)
        async with worker, proxy(d) as served, client(served) as http:
            large = io.BytesIO(json.dumps({**ASK, "prompt": "x" * (20 << 20)}).encode())
            headers = {"Content-Type": "application/json"}
            async with http.post("/v1/completions", data=large, headers=headers) as answer:
                assert answer.status == 413
                assert await answer.read() == body
            assert served.fleet.worker(Role.DECODE, d.url).requests == 0
        for writer in held:
            writer.transport.abort()


# ---- the end


@on_loop
async def test_a_drain_lets_running_requests_end_and_takes_no_new_ones() -> None:
    gate = asyncio.Event()
    async with StubWorker(Role.DECODE, Behaviour(between_tokens=gate)) as d:
        settings = settings_of(d, drain_timeout="30s")
        closing = asyncio.Event()
        ready: asyncio.Future[Served] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            async with running(settings) as served:
                ready.set_result(served)
                await closing.wait()

        serving = asyncio.create_task(run())
        served = await ready
        async with (
            client(served) as http,
            http.post("/v1/completions", json=STREAMED) as answer,
        ):
            assert answer.status == 200
            closing.set()
            await asyncio.sleep(0)
            async with http.get("/readyz") as probe:
                assert probe.status == 503
            async with http.post("/v1/completions", json=ASK) as refused:
                assert refused.status == 503
                assert int(refused.headers["Retry-After"]) >= 1
                assert refused.headers["Connection"] == "close", "the next one goes elsewhere"
            gate.set()
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        await serving
        assert len(d.seen) == 1


@on_loop
async def test_what_runs_past_the_drain_s_deadline_ends_by_an_error_event() -> None:
    async with StubWorker(Role.DECODE, Behaviour(ending=Ending.SILENT)) as d:
        async with aiohttp.ClientSession() as http:
            async with running(settings_of(d, drain_timeout="100ms")) as served:
                answer = await http.post(f"{served.url}/v1/completions", json=STREAMED)
                assert answer.status == 200
            text = await answer.text()
        assert text.split("\n\n")[1].startswith("event: error\ndata: ")
        assert "shutting down" in text
        await d.seen[0].cancelled.wait()


@on_loop
async def test_what_the_drain_s_deadline_ends_is_not_begun_elsewhere() -> None:
    async with (
        StubWorker(Role.PREFILL, Behaviour(hangs=True)) as p,
        StubWorker(Role.PREFILL) as other,
        StubWorker(Role.DECODE) as d,
        aiohttp.ClientSession() as http,
    ):
        async with running(settings_of(p, other, d, drain_timeout="50ms")) as served:
            first(served, p, other)
            asking = asyncio.create_task(http.post(f"{served.url}/v1/completions", json=ASK))
            await p.arrived(1)
        async with await asking as answer:
            assert answer.status == 503
        await p.seen[0].cancelled.wait()
        assert not other.seen
        assert not d.seen
