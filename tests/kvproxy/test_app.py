"""What passes the proxy and what does not: bodies, headers, statuses, bounds, the proxy's own paths."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from kvproxy import breaker
from kvproxy.types import Endpoint, Role
from tests.kvproxy.running import ASK, CHAT_ASK, PROMPT, client, on_loop, proxy
from tests.kvproxy.stub_worker import Behaviour, StubWorker

RAW = b' {"prompt": "' + PROMPT.encode() + b'", "model":"m",\n "max_tokens" : 4, "temperature":0.70 }\n'
JSON = {"Content-Type": "application/json"}


def error_of(body: bytes | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


# ---- bodies


@on_loop
async def test_p_gets_a_clean_copy_and_d_the_client_s_bytes() -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        async with client(served) as http, http.post("/v1/completions", data=RAW, headers=JSON) as answer:
            assert answer.status == 200
            told = await answer.json()
        assert [choice["text"] for choice in told["choices"]] == ["Once upon a time"]
        assert d.seen[0].body == RAW
        assert p.seen[0].json == {**json.loads(RAW), "max_tokens": 1, "stream": False}
        assert len(p.seen) == len(d.seen) == 1
        assert p.seen[0].at_s <= d.seen[0].at_s


@pytest.mark.parametrize(("path", "ask"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT_ASK)])
@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_the_answer_is_d_s_byte_for_byte(path: str, ask: dict[str, Any], stream: bool) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        async with client(served) as http:
            headers = {"X-Request-Id": "the-same-for-both"}
            async with http.post(path, json={**ask, "stream": stream}, headers=headers) as answer:
                through = await answer.read()
                assert answer.content_type == ("text/event-stream" if stream else "application/json")
            async with http.post(d.url + path, json={**ask, "stream": stream}, headers=headers) as answer:
                assert through == await answer.read()
        assert p.seen[0].json["stream"] is False


@on_loop
async def test_what_p_wants_d_to_know_reaches_d_and_nothing_else_is_added() -> None:
    transfer = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "10.0.0.1"}
    async with StubWorker(Role.PREFILL, Behaviour(transfer=transfer)) as p, StubWorker(Role.DECODE) as d:
        async with (
            proxy(p, d) as served,
            client(served) as http,
            http.post("/v1/completions", data=RAW, headers=JSON) as answer,
        ):
            assert answer.status == 200
        assert (
            d.seen[0].body
            == RAW.rstrip()[:-1]
            + b',"kv_transfer_params":'
            + json.dumps(transfer, separators=(",", ":")).encode()
            + b"}"
        )


@on_loop
async def test_d_of_another_node_is_told_where_p_is() -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(d, p) as served:
        served.fleet.worker(Role.DECODE, d.url).endpoint = Endpoint(d.url, Role.DECODE, "another")
        async with client(served) as http, http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
        assert d.seen[0].json == {**ASK, "kv_transfer_params": {"kvstored": {"source_node": "127.0.0.1"}}}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"prompt": "cut', JSON),
        (b"[]", JSON),
        (b"", JSON),
        (RAW, {"Content-Type": "text/plain"}),
        (gzip.compress(RAW), {**JSON, "Content-Encoding": "gzip"}),
    ],
)
@on_loop
async def test_a_body_that_is_not_ours_to_read_is_d_s_alone(body: bytes, headers: dict[str, str]) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE, Behaviour(status=415)) as d:
        async with (
            proxy(p, d) as served,
            client(served) as http,
            http.post("/v1/completions", data=body, headers=headers) as answer,
        ):
            assert answer.status == 415
            assert error_of(await answer.read())["message"] == "stub says 415"
        assert d.seen[0].body == body
        assert d.seen[0].headers.get("content-encoding") == headers.get("Content-Encoding")
        assert not p.seen


@pytest.mark.parametrize(
    "more", [{"n": 4, "use_beam_search": True}, {"max_tokens": 1}, {"echo": True, "logprobs": 1}, {"prompt": "short"}]
)
@on_loop
async def test_what_p_can_t_help_with_goes_to_d_straight_away(more: dict[str, Any]) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        async with client(served) as http, http.post("/v1/completions", json={**ASK, **more}) as answer:
            assert answer.status == 200
        assert not p.seen
        assert d.seen[0].json == {**ASK, **more}


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt": [PROMPT, PROMPT]}, {"prompt": [list(range(500))]}, {"logprobs": 3}, {"echo": True}]
)
@on_loop
async def test_lists_of_prompts_many_answers_and_logprobs_go_over_p(more: dict[str, Any]) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        async with client(served) as http, http.post("/v1/completions", json={**ASK, **more}) as answer:
            assert answer.status == 200
        assert p.seen[0].json["prompt"] == {**ASK, **more}["prompt"]
        assert d.seen[0].json == {**ASK, **more}


# ---- bounds


@pytest.mark.parametrize("chunked", [False, True])
@on_loop
async def test_a_body_over_the_limit_is_refused_before_any_worker_sees_it(chunked: bool) -> None:
    body = b"x" * 70_000

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(70):
            yield b"x" * 1000

    async with StubWorker(Role.DECODE) as d, proxy(d, body_size="64KiB") as served, client(served) as http:
        async with http.post("/v1/completions", data=pieces() if chunked else body, headers=JSON) as answer:
            assert answer.status == 413
            assert "65536" in error_of(await answer.read())["message"]
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
    assert len(d.seen) == 1


@on_loop
async def test_bodies_together_are_bounded_and_their_room_comes_back() -> None:
    gate = asyncio.Event()
    ask = {**ASK, "prompt": "x" * 3000}
    async with (
        StubWorker(Role.DECODE, Behaviour(before_headers=gate)) as d,
        proxy(d, body_size="4KiB", bodies_size="4KiB") as served,
        client(served) as http,
    ):
        first = asyncio.create_task(http.post("/v1/completions", json=ask))
        await d.arrived(1)
        async with http.post("/v1/completions", json=ask) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
        gate.set()
        async with await first as answer:
            assert answer.status == 200
        async with http.post("/v1/completions", json=ask) as answer:
            assert answer.status == 200


@on_loop
async def test_a_huge_body_and_a_huge_answer_pass_whole() -> None:
    ask = {**ASK, "prompt": "y" * (9 << 20)}
    behaviour = Behaviour(padding_bytes=5 << 20)
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE, behaviour) as d, proxy(p, d) as served:
        data = io.BytesIO(json.dumps(ask).encode())
        async with client(served) as http, http.post("/v1/completions", data=data, headers=JSON) as answer:
            assert answer.status == 200
            assert len(await answer.read()) > 5 << 20
        assert d.seen[0].json == ask
        assert p.seen[0].json["prompt"] == ask["prompt"]


@on_loop
async def test_more_requests_than_may_wait_are_refused_with_when_to_come_back() -> None:
    gate = asyncio.Event()
    async with (
        StubWorker(Role.DECODE, Behaviour(before_headers=gate)) as d,
        proxy(d, running_max=1, waiting_max=1, caller_waiting_max=1) as served,
        client(served) as http,
    ):
        first = asyncio.create_task(http.post("/v1/completions", json=ASK))
        await d.arrived(1)
        second = asyncio.create_task(http.post("/v1/completions", json=ASK))
        while served.queue.waiting < 1:
            await asyncio.sleep(0)
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status in (429, 503)
            assert int(answer.headers["Retry-After"]) >= 1
            error_of(await answer.read())
        gate.set()
        for task in (first, second):
            async with await task as answer:
                assert answer.status == 200


# ---- headers


@on_loop
async def test_headers_of_one_hop_end_here_and_the_others_pass() -> None:
    sent = {
        "Authorization": "Bearer secret", "X-Custom": "kept", "Connection": "keep-alive, X-Hop", "X-Hop": "1",
        "Keep-Alive": "timeout=5", "Proxy-Authorization": "Basic eA==", "TE": "trailers", "Accept-Encoding": "gzip, br",
    }  # fmt: skip
    back = [
        ("Connection", "X-Back"),
        ("X-Back", "1"),
        ("Keep-Alive", "timeout=9"),
        ("X-Model", "m"),
        ("Trailer", "X-T"),
    ]
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE, Behaviour(headers=back)) as d:
        async with (
            proxy(p, d) as served,
            client(served) as http,
            http.post("/v1/completions", json=ASK, headers=sent) as answer,
        ):
            assert answer.status == 200
            assert answer.headers["X-Model"] == "m"
            assert not {"X-Back", "Keep-Alive", "Trailer"} & set(answer.headers)
        for stub in (p, d):
            got = stub.seen[0].headers
            assert got["authorization"] == "Bearer secret"
            assert got["x-custom"] == "kept"
            assert got["accept-encoding"] == "identity"
            assert not {"x-hop", "keep-alive", "proxy-authorization", "te"} & set(got)
            assert got["host"] == stub.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("given", "passes"), [("req-1.a:b", True), ("x" * 200, False), ("a b", False), ("<i>", False), ("", False)]
)
@on_loop
async def test_one_identity_goes_to_both_workers_and_back(given: str, passes: bool) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        async with (
            client(served) as http,
            http.post("/v1/completions", json=ASK, headers={"X-Request-Id": given}) as answer,
        ):
            identity = answer.headers["X-Request-Id"]
        assert (identity == given) is passes
        assert p.seen[0].headers["x-request-id"] == d.seen[0].headers["x-request-id"] == identity


@on_loop
async def test_a_header_with_a_line_break_splits_nothing() -> None:
    async with StubWorker(Role.DECODE) as d, proxy(d) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        body = json.dumps(ASK).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-A: b\nX-Evil: 1\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert b" 400 " in status
        assert not d.seen


@pytest.mark.parametrize("name", ["Authorization", "X-Session-Id", "X-Request-Id", "X-Any"])
@on_loop
async def test_a_header_that_is_no_text_stops_nothing(name: str) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d, proxy(p, d) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{name}: ".encode()
        writer.write(head + b"a\xff\xfe\r\nContent-Length: %d\r\n\r\n%s" % (len(RAW), RAW))
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await writer.wait_closed()
        assert len(p.seen) == len(d.seen) == 1


@on_loop
async def test_two_framings_at_once_are_refused() -> None:
    async with StubWorker(Role.DECODE) as d, proxy(d) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert not d.seen


# ---- statuses


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 501])
@on_loop
async def test_4xx_passes_untouched_and_is_no_fault_of_the_worker(status: int) -> None:
    behaviour = Behaviour(status=status, headers=[("Retry-After", "7"), ("X-Why", "stub")])
    async with StubWorker(Role.DECODE, behaviour) as d, StubWorker(Role.DECODE) as other:
        async with proxy(d, other) as served, client(served) as http:
            served.fleet.drain(Role.DECODE, other.url)
            for _ in range(10):
                async with http.post("/v1/completions", json=ASK) as answer:
                    assert answer.status == status
                    assert (answer.headers["Retry-After"], answer.headers["X-Why"]) == ("7", "stub")
                    assert error_of(await answer.read())["message"] == f"stub says {status}"
            assert served.fleet.worker(Role.DECODE, d.url).is_usable
        assert len(d.seen) == 10
        assert not other.seen


@on_loop
async def test_when_p_refuses_a_request_d_answers_it_alone() -> None:
    async with StubWorker(Role.PREFILL, Behaviour(status=400)) as p, StubWorker(Role.DECODE) as d:
        async with proxy(p, d, on_prefill_loss="503") as served, client(served) as http:
            for _ in range(5):
                async with http.post("/v1/completions", json=ASK) as answer:
                    assert answer.status == 200
            assert served.fleet.worker(Role.PREFILL, p.url).is_usable
        assert all(seen.json == ASK for seen in d.seen)


@pytest.mark.parametrize(("policy", "status"), [("plain", 200), ("503", 503)])
@on_loop
async def test_without_any_p_it_is_plain_d_or_503_by_policy(policy: str, status: int) -> None:
    async with StubWorker(Role.PREFILL) as p, StubWorker(Role.DECODE) as d:
        async with proxy(p, d, on_prefill_loss=policy) as served, client(served) as http:
            await p.refuse()
            async with http.post("/v1/completions", json=ASK) as answer:
                assert answer.status == status
                if status == 503:
                    assert int(answer.headers["Retry-After"]) >= 1
                    assert "prefill" in error_of(await answer.read())["message"]
        assert [seen.json for seen in d.seen] == ([ASK] if status == 200 else [])


@on_loop
async def test_the_last_d_s_own_words_reach_the_client_when_all_fail() -> None:
    async with (
        StubWorker(Role.DECODE, Behaviour(status=500)) as one,
        StubWorker(Role.DECODE, Behaviour(status=500)) as two,
    ):
        async with (
            proxy(one, two) as served,
            client(served) as http,
            http.post("/v1/completions", json=ASK) as answer,
        ):
            assert answer.status == 500
            assert error_of(await answer.read())["message"] == "stub says 500"
        assert len(one.seen) == len(two.seen) == 1


@on_loop
async def test_tries_are_bounded_however_many_workers_fail() -> None:
    stubs = [StubWorker(role, Behaviour(resets_before_headers=True)) for role in Role for _ in range(4)]
    async with stubs[0], stubs[1], stubs[2], stubs[3], stubs[4], stubs[5], stubs[6], stubs[7]:
        async with (
            proxy(*stubs, prefill_retries=1, decode_retries=2) as served,
            client(served) as http,
            http.post("/v1/completions", json=ASK) as answer,
        ):
            assert answer.status == 502
        assert sum(len(stub.seen) for stub in stubs if stub.role is Role.PREFILL) == 2
        assert sum(len(stub.seen) for stub in stubs if stub.role is Role.DECODE) == 3


@on_loop
async def test_a_fleet_that_fails_is_not_asked_twice_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each request may be tried on all three; together they may be tried again 10 times, and once more per 5 requests.
    monkeypatch.setattr(breaker, "WINDOW_FAILED_MAX", 1000)
    stubs = [StubWorker(Role.DECODE, Behaviour(status=500)) for _ in range(3)]
    async with stubs[0], stubs[1], stubs[2], proxy(*stubs, decode_retries=100) as served, client(served) as http:
        for stub in stubs:  # never opens
            served.fleet.worker(Role.DECODE, stub.url).breaker = breaker.Breaker(lambda: 0.0, failures_max=1000)
        for _ in range(50):
            async with http.post("/v1/completions", json=ASK) as answer:
                assert answer.status == 500
        assert sum(len(stub.seen) for stub in stubs) <= 50 + 10 + 50 / 5


# ---- the proxy's own


@on_loop
async def test_paths_of_the_proxy_s_own() -> None:
    async with (
        StubWorker(Role.PREFILL) as p,
        StubWorker(Role.DECODE) as d,
        proxy(p, d) as served,
        client(served) as http,
    ):
        for method, path, status in [
            ("GET", "/healthz", 200), ("GET", "/readyz", 200), ("GET", "/metrics", 200), ("GET", "/v1/models", 200),
            ("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404),
            ("GET", "/workers", 404), ("OPTIONS", "/v1/completions", 405),
        ]:  # fmt: skip
            async with http.request(method, path) as answer:
                assert answer.status == status, path
                text = await answer.text()
                assert answer.headers.get("Allow") == ("POST" if status == 405 else None)
                if status >= 400:
                    error_of(text)
                elif path == "/v1/models":
                    assert json.loads(text)["data"][0]["id"] == "stub-model"
        served.fleet.drain(Role.DECODE, d.url)
        async with http.get("/readyz") as answer:
            assert answer.status == 503
            assert "decode" in await answer.text()
        async with http.get("/healthz") as answer:
            assert answer.status == 200
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 503
        assert not p.seen


@on_loop
async def test_models_come_from_whoever_answers() -> None:
    async with (
        StubWorker(Role.PREFILL) as p,
        StubWorker(Role.DECODE) as d,
        proxy(p, d) as served,
        client(served) as http,
    ):
        d.behaviour = Behaviour(status=500)
        async with http.get("/v1/models") as answer:
            assert answer.status == 200
        await d.refuse()
        async with http.get("/v1/models") as answer:
            assert answer.status == 200
        await p.refuse()
        async with http.get("/v1/models") as answer:
            assert answer.status == 503


@on_loop
async def test_counts_are_exact_to_the_unit() -> None:
    async with (
        StubWorker(Role.PREFILL) as p,
        StubWorker(Role.DECODE) as d,
        proxy(p, d) as served,
        client(served) as http,
    ):
        for _ in range(3):
            async with http.post("/v1/completions", json=ASK) as answer:
                await answer.read()
        d.behaviour = replace(d.behaviour, status=404)
        async with http.post("/v1/chat/completions", json=CHAT_ASK) as answer:
            await answer.read()
        async with http.get("/metrics") as answer:
            text = await answer.text()
    for line in (
        'kvproxy_requests_total{endpoint="completions",status="200"} 3.0',
        'kvproxy_requests_total{endpoint="chat",status="404"} 1.0',
        'kvproxy_decisions_total{reason="prefill",route="prefill-then-decode"} 4.0',
        'kvproxy_legs_total{outcome="ok",role="prefill"} 4.0',
        'kvproxy_legs_total{outcome="ok",role="decode"} 3.0',
        'kvproxy_legs_total{outcome="refused",role="decode"} 1.0',
        "kvproxy_queue_running 0.0",
    ):
        assert line in text.splitlines(), line
