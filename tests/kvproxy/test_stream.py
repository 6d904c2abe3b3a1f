"""Events leave whole, however their bytes arrive; and what is cut is said to be."""

from __future__ import annotations

import asyncio
import itertools
import json

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy import stream
from kvproxy.stream import EventCutter
from kvproxy.types import Role
from tests.kvproxy.running import ASK, client, on_loop, proxy, until
from tests.kvproxy.stub_worker import Behaviour, Ending, StubWorker

EVENTS = [b"data: {}\n\n", b": ping\n\n", b"event: x\r\ndata: 1\r\n\r\n", b"data: a\rdata: b\r\r", b"data: [DONE]\n\n"]
STREAMED = {**ASK, "stream": True}


@given(
    st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 200), max_size=12), st.binary(max_size=20)
)
def test_events_come_out_whole_and_in_order_however_they_are_cut(
    events: list[bytes], cuts: list[int], rest: bytes
) -> None:
    rest = rest.replace(b"\n", b"").replace(b"\r", b"")
    whole = b"".join(events)
    sent = whole + rest
    at = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    cutter = EventCutter()
    out = b""
    for start, end in itertools.pairwise(at):
        out += cutter.feed(sent[start:end])
        assert whole.startswith(out)
        assert out == b"" or out.endswith((b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"))
    assert out == whole
    assert cutter.is_done is (b"data: [DONE]\n\n" in events)


@pytest.mark.parametrize("text", [b'data: {"text": "[DONE]"}\n\n', b"data: x [DONE]\n\n", b": data: [DONE]\n\n"])
def test_done_inside_an_answer_is_not_the_end(text: bytes) -> None:
    cutter = EventCutter()
    assert cutter.feed(text) == text
    assert not cutter.is_done


@given(st.integers(1, 700), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]))
def test_an_event_too_long_to_keep_goes_on_in_parts_and_the_next_ones_are_whole(step: int, end: bytes) -> None:
    sent = b"data: first" + end + b"data: " + b"x" * 5000 + end + b"data: last" + end + b"data: [DONE]" + end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "EVENT_BYTES_MAX", 1000)
        cutter = EventCutter()
        out = b""
        for start in range(0, len(sent), step):
            out += cutter.feed(sent[start : start + step])
            assert sent.startswith(out)
            assert start + step - len(out) <= 1000 + step, "what is kept is bounded"
            assert cutter.is_within is (out != b"" and not out.endswith(end)), "whether an event is open is known"
    assert out == sent
    assert cutter.is_done


@on_loop
async def test_a_huge_event_passes_and_no_worker_is_blamed_for_it() -> None:
    tokens = ["x" * (stream.EVENT_BYTES_MAX + 1000), "y"]
    async with StubWorker(Role.DECODE, Behaviour(tokens=tokens)) as d, proxy(d) as served, client(served) as http:
        for _ in range(3):
            async with http.post("/v1/completions", json=STREAMED) as answer:
                assert answer.status == 200
                text = await answer.text()
            assert tokens[0] in text
            assert text.endswith("data: [DONE]\n\n")
        assert served.fleet.report()[0]["state"] == "closed"


@on_loop
async def test_a_huge_event_that_breaks_off_breaks_the_client_s_connection_too() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    part = b"data: " + b"x" * (stream.EVENT_BYTES_MAX + 1000)
    raw = head + b"%x\r\n%s\r\n" % (len(part), part)
    async with (
        StubWorker(Role.DECODE, Behaviour(raw=raw)) as d,
        proxy(d) as served,
        client(served) as http,
        http.post("/v1/completions", json=STREAMED) as answer,
    ):
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


@on_loop
async def test_a_stream_that_has_said_done_is_whole_however_its_connection_ends() -> None:
    events = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw = head + b"%x\r\n%s\r\n" % (len(events), events)
    async with (
        StubWorker(Role.DECODE, Behaviour(raw=raw)) as d,
        proxy(d) as served,
        client(served) as http,
        http.post("/v1/completions", json=STREAMED) as answer,
    ):
        assert await answer.read() == events


@pytest.mark.parametrize(
    "ending", [Ending.WITHOUT_DONE, Ending.WITHOUT_LAST_CHUNK, Ending.CUT_INSIDE_AN_EVENT, Ending.RESET]
)
@on_loop
async def test_a_stream_that_breaks_off_ends_with_an_error_event_behind_whole_ones(ending: Ending) -> None:
    behaviour = Behaviour(ending=ending, whole_tokens=2)
    async with (
        StubWorker(Role.DECODE, behaviour) as d,
        StubWorker(Role.DECODE) as other,
        proxy(d, other) as served,
        client(served) as http,
    ):
        served.fleet.drain(Role.DECODE, other.url)
        async with http.post("/v1/completions", json=STREAMED) as answer:
            assert answer.status == 200
            text = await answer.text()
    *events, error, rest = text.split("\n\n")
    assert rest == ""
    assert len(events) == (4 if ending is Ending.WITHOUT_DONE else 2)
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
    name, data = error.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == 502
    assert "[DONE]" not in text
    assert not other.seen  # what has begun is not begun again elsewhere


@pytest.mark.parametrize("ending", [Ending.WITHOUT_LAST_CHUNK, Ending.CUT_INSIDE_AN_EVENT, Ending.RESET])
@on_loop
async def test_a_stream_that_breaks_off_before_its_first_event_is_begun_elsewhere(ending: Ending) -> None:
    async with (
        StubWorker(Role.DECODE, Behaviour(ending=ending, whole_tokens=0)) as d,
        StubWorker(Role.DECODE) as other,
        proxy(d, other) as served,
        client(served) as http,
    ):
        other_worker = served.fleet.worker(Role.DECODE, other.url)
        other_worker.active_blocks = 1000  # d is taken first
        async with http.post("/v1/completions", json=STREAMED) as answer:
            assert answer.status == 200
            assert (await answer.text()).count("[DONE]") == 1
        assert len(d.seen) == len(other.seen) == 1
        other_worker.active_blocks = 0


@pytest.mark.parametrize("ending", [Ending.CUT_INSIDE_AN_EVENT, Ending.RESET])
@on_loop
async def test_an_answer_that_is_no_stream_is_whole_or_from_another_d(ending: Ending) -> None:
    async with (
        StubWorker(Role.DECODE, Behaviour(ending=ending)) as d,
        StubWorker(Role.DECODE) as other,
        proxy(d, other) as served,
        client(served) as http,
    ):
        served.fleet.worker(Role.DECODE, other.url).active_blocks = 1000
        async with http.post("/v1/completions", json=ASK) as answer:
            assert answer.status == 200
            assert (await answer.json())["choices"][0]["text"] == "Once upon a time"
        assert len(d.seen) == len(other.seen) == 1


@on_loop
async def test_an_answer_too_long_to_be_kept_that_breaks_off_breaks_the_client_s_connection_too() -> None:
    behaviour = Behaviour(ending=Ending.CUT_INSIDE_AN_EVENT, padding_bytes=300_000)
    async with (
        StubWorker(Role.DECODE, behaviour) as d,
        proxy(d, answer_size="64KiB") as served,
        client(served) as http,
        http.post("/v1/completions", json=ASK) as answer,
    ):
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


@on_loop
async def test_the_client_s_headers_wait_for_d_s_first_event() -> None:
    gate = asyncio.Event()
    async with (
        StubWorker(Role.DECODE, Behaviour(before_headers=gate)) as d,
        proxy(d) as served,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        body = json.dumps(STREAMED).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        await d.arrived(1)
        first = asyncio.ensure_future(reader.read(1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        gate.set()
        assert await first == b"H"
        writer.close()
        await writer.wait_closed()


@on_loop
async def test_what_a_client_does_not_take_is_not_read_from_d_and_it_is_cut_off_in_the_end() -> None:
    tokens = ["x" * 100_000] * 600  # 60 MB
    async with (
        StubWorker(Role.DECODE, Behaviour(tokens=tokens)) as d,
        proxy(d, client_timeout="300ms") as served,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]), limit=1024)
        body = json.dumps(STREAMED).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        (seen,) = await d.arrived(1)
        assert await reader.read(1) == b"H"
        await seen.cancelled.wait()
        assert not seen.done.is_set()
        writer.transport.abort()
        await until(lambda: served.queue.running == 0, "the place is given back")
