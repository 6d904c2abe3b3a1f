"""Whatever workers send and whenever they fail: an answer is right or it is an error, and nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kvproxy.proxy_fixture import Answer, Proxy, inside, proxied, run
from tests.kvproxy.stub_worker import Behaviour, Ending, StubWorker

TEXT = "Once upon a time"
FAULTS = [
    Behaviour(status=500), Behaviour(status=503), Behaviour(status=429), Behaviour(resets_before_headers=True),
    Behaviour(closes_before_headers=True), Behaviour(closes_idle=True),
    Behaviour(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"), Behaviour(content_type="text/plain"),
    *(Behaviour(ending=ending, whole_tokens=whole) for whole in (0, 1, 3)
      for ending in (Ending.WITHOUT_DONE, Ending.WITHOUT_LAST_CHUNK, Ending.CUT_INSIDE_AN_EVENT, Ending.RESET)),
]  # fmt: skip


def is_honest(answer: Answer, *, stream: bool) -> bool:
    """Return whether an answer is all of the right one, or says that it is not."""
    if answer.status != 200:
        return bool(answer.error["message"])
    if not stream:
        return answer.cut or answer.text == TEXT
    if answer.cut:
        return False  # a stream can say what happened, so it must
    is_whole = answer.events[-1] == "[DONE]"
    return answer.text == TEXT if is_whole else TEXT.startswith(answer.text) and bool(answer.error["message"])


async def disturb(draw: random.Random, stubs: list[StubWorker], done: asyncio.Event) -> None:
    """Break and mend workers until `done`; in the end all are well."""
    while not done.is_set():
        stub = draw.choice(stubs)
        if draw.random() < 0.2 and stub.url:
            await stub.refuse()
            await asyncio.sleep(0.01 * draw.random())
            await stub.listen()
        stub.behaviour = draw.choice([*FAULTS, Behaviour(), Behaviour()])
        await asyncio.sleep(0.005 * draw.random())
    for stub in stubs:
        stub.behaviour = Behaviour()


async def one(draw: random.Random, proxy: Proxy) -> None:
    """Ask, and believe nothing that isn't honest; some clients leave before the end."""
    stream = draw.random() < 0.6
    asking = asyncio.ensure_future(proxy.ask(stream=stream))
    if draw.random() < 0.2:
        await asyncio.sleep(0.02 * draw.random())
        asking.cancel()
    try:
        answer = await asking
    except asyncio.CancelledError:
        return
    assert is_honest(answer, stream=stream), answer


@pytest.mark.parametrize("entrance", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(3))
def test_in_any_disorder_answers_are_right_or_say_so_and_nothing_stays_held(
    short_dir: Path, seed: int, entrance: str
) -> None:
    async def steps() -> None:
        draw = random.Random(seed)
        flags = (f"--entrance={entrance}", "--running-max=16", "--probe-interval=50ms", "--prefill-wait=20s")
        async with inside(short_dir, *flags, p_count=2, d_count=3) as proxy:
            done = asyncio.Event()
            disturbing = asyncio.create_task(disturb(draw, [*proxy.prefill, *proxy.decode], done))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(150):
                        group.create_task(one(draw, proxy))
                        await asyncio.sleep(0.01 * draw.random())
            finally:
                done.set()
                await disturbing
            await proxy.settled()
            async with asyncio.timeout(30):  # and when all are well, all is well
                while (answer := await proxy.ask(stream=True)).status != 200 or answer.text != TEXT:
                    await asyncio.sleep(0.05)

    run(steps())


# What begins like a response, so that chance gets beyond the first line.
heads = st.sampled_from([
    b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n", b"HTTP/1.0 200\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n5\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n", b"HTTP/1.1 999 \r\n\r\n",
])  # fmt: skip


@given(sent=st.lists(st.tuples(heads, st.binary(max_size=200)), min_size=1, max_size=12))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_a_worker_sends_the_client_gets_an_answer_and_the_proxy_logs_no_bug(
    short_dir: Path, sent: list[tuple[bytes, bytes]]
) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--stall-timeout=5s", "--first-byte-timeout=5s") as proxy:
            for at, (head, rest) in enumerate(sent):
                stub = proxy.prefill[0] if at % 2 else proxy.decode[0]
                other = proxy.decode[0] if at % 2 else proxy.prefill[0]
                stub.behaviour, other.behaviour = Behaviour(raw=head + rest), Behaviour()
                stream = at % 3 == 0
                answer = await proxy.ask(stream=stream)
                assert answer.status >= 200
                if stub in proxy.prefill:  # D is well: whatever P says, its answer is right, or D is at rest
                    assert answer.status == 503 or answer.text == TEXT
            await proxy.settled()

    run(steps())


starts = st.sampled_from([
    b"", b"POST /v1/completions HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n", b"GET http://10.0.0.1/ HTTP/1.1\r\nhost: h\r\n\r\n",
    b"CONNECT 10.0.0.1:80 HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
])  # fmt: skip


@given(sent=st.lists(st.tuples(starts, st.binary(max_size=300)), min_size=1, max_size=20))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_a_client_sends_others_are_served_and_the_proxy_logs_no_bug(
    short_dir: Path, sent: list[tuple[bytes, bytes]]
) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--client-timeout=5s") as proxy:
            for url in (proxy.url, proxy.admin_url):
                host, _, port = url.removeprefix("http://").rpartition(":")
                for start, rest in sent:
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.write(start + rest)
                    writer.close()
                    with contextlib.suppress(ConnectionError):
                        await writer.wait_closed()
            assert (await proxy.ask()).text == TEXT
            assert len(await proxy.workers()) == 2
            await proxy.settled()

    run(steps())


def test_what_a_malformed_request_holds_is_never_logged(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir, "--log-level=debug") as proxy:
            host, _, port = proxy.url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nAuthorization\x01: Bearer sk-secret\r\n\r\n")
            async with asyncio.timeout(30):
                assert b" 400 " in await reader.readline()
            writer.close()
            assert (await proxy.ask()).text == TEXT
            assert "a request is malformed" in proxy.log_text()
            assert "secret" not in proxy.log_text()

    run(steps())
