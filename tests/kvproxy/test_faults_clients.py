"""The client goes, at any point: both legs end, nothing is tried again for nobody, nothing stays held."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kvproxy.proxy_fixture import PROMPT, Answer, Proxy, eventually, inside, proxied, run
from tests.kvproxy.stub_worker import CHAT, COMPLETIONS, MODEL, Behaviour, Ending, Seen, StubWorker

# A second on a machine that does nothing else.
SOON_S = 20.0
HELD = asyncio.Event  # never set by anybody: what waits for it waits for ever


async def cancelled_soon(seen: Seen, left_s: float) -> None:
    """Fail unless the worker has seen that nobody waits, soon after the client left."""
    async with asyncio.timeout(SOON_S):
        await seen.cancelled.wait()
    assert seen.cancelled_s is not None
    assert seen.cancelled_s - left_s < SOON_S


async def leave(asking: asyncio.Task[Answer]) -> float:
    """Close the client's connection and return when."""
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    return asyncio.get_running_loop().time()


async def nothing_is_left(proxy: Proxy, *, gone: int = 1) -> None:
    """Fail unless nothing is held for the client, no worker was blamed, and nothing was tried again."""
    await proxy.settled()
    assert {worker["state"] for worker in (await proxy.workers()).values()} == {"closed"}
    assert await proxy.metric("clients_gone_total") == gone
    assert await proxy.metric("retries_total") == 0
    for stub in (*proxy.prefill, *proxy.decode):
        identities = [seen.headers["x-request-id"] for seen in stub.seen]
        assert len(identities) == len(set(identities)), "a request was sent twice"


PHASES: dict[str, Callable[[Proxy], StubWorker]] = {}


def phase(name: str) -> Callable[[Callable[[Proxy], StubWorker]], Callable[[Proxy], StubWorker]]:
    def register(prepare: Callable[[Proxy], StubWorker]) -> Callable[[Proxy], StubWorker]:
        PHASES[name] = prepare
        return prepare

    return register


@phase("while P computes")
def _p_computes(proxy: Proxy) -> StubWorker:
    proxy.prefill[0].behaviour = Behaviour(hangs=True)
    return proxy.prefill[0]


@phase("in the middle of P's answer")
def _p_answers(proxy: Proxy) -> StubWorker:
    proxy.prefill[0].behaviour = Behaviour(ending=Ending.SILENT)
    return proxy.prefill[0]


@phase("before D's first byte")
def _d_computes(proxy: Proxy) -> StubWorker:
    proxy.decode[0].behaviour = Behaviour(hangs=True)
    return proxy.decode[0]


@phase("in the middle of D's answer")
def _d_answers(proxy: Proxy) -> StubWorker:
    proxy.decode[0].behaviour = Behaviour(ending=Ending.SILENT)
    return proxy.decode[0]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("when", PHASES)
def test_a_client_that_leaves_ends_the_leg_that_runs(short_dir: Path, when: str, stream: bool, path: str) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            stub = PHASES[when](proxy)
            more: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {}
            asking = asyncio.create_task(proxy.ask(stream=stream, path=path, **more))
            (seen,) = await stub.arrived(1)
            await cancelled_soon(seen, await leave(asking))
            await nothing_is_left(proxy)
            if stub is proxy.prefill[0]:
                assert not proxy.decode[0].seen, "D was asked for a client that had left"

    run(steps())


def test_a_client_that_leaves_in_mid_stream_is_noticed_between_tokens(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            proxy.decode[0].behaviour = Behaviour(between_tokens=HELD())
            began = asyncio.Event()
            asking = asyncio.create_task(proxy.ask(stream=True, on_first=began.set))
            await began.wait()
            (seen,) = await proxy.decode[0].arrived(1)
            await cancelled_soon(seen, await leave(asking))
            await nothing_is_left(proxy)

    run(steps())


def test_with_d_as_the_entrance_both_legs_end(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--entrance=decode") as proxy:
            for stub in (*proxy.prefill, *proxy.decode):
                stub.behaviour = Behaviour(hangs=True)
            asking = asyncio.create_task(proxy.ask())
            (at_p,), (at_d,) = await proxy.prefill[0].arrived(1), await proxy.decode[0].arrived(1)
            left_s = await leave(asking)
            await cancelled_soon(at_p, left_s)
            await cancelled_soon(at_d, left_s)
            await nothing_is_left(proxy)

    run(steps())


def test_a_client_that_leaves_the_queue_never_reaches_a_worker(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--running-max=1") as proxy:
            (d,) = proxy.decode
            release = asyncio.Event()
            d.behaviour = Behaviour(before_headers=release)
            first = asyncio.create_task(proxy.ask())
            await d.arrived(1)
            waiting = [asyncio.create_task(proxy.ask()) for _ in range(5)]

            async def all_wait() -> bool:
                return await proxy.metric("queue_waiting") == 5

            await eventually(all_wait, "five wait")
            for asking in waiting[:4]:
                await leave(asking)

            async def one_waits() -> bool:
                return await proxy.metric("queue_waiting") == 1

            await eventually(one_waits, "four have left")
            release.set()
            assert (await first).status == (await waiting[4]).status == 200
            assert len(d.seen) == len(proxy.prefill[0].seen) == 2
            await nothing_is_left(proxy, gone=4)

    run(steps())


def test_many_clients_that_leave_at_once_leave_nothing(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir, "--entrance=decode", p_count=2, d_count=2) as proxy:
            for stub in (*proxy.prefill, *proxy.decode):
                stub.behaviour = Behaviour(hangs=True)
            asking = [asyncio.create_task(proxy.ask(stream=number % 2 == 0)) for number in range(40)]

            async def all_arrived() -> bool:
                return sum(len(stub.seen) for stub in (*proxy.prefill, *proxy.decode)) == 80

            await eventually(all_arrived, "every leg has arrived")
            left_s = [await leave(one) for one in asking][-1]
            for stub in (*proxy.prefill, *proxy.decode):
                for seen in stub.seen:
                    await cancelled_soon(seen, left_s)
            await nothing_is_left(proxy, gone=40)

    run(steps())


def test_workers_that_do_not_hear_of_it_cost_the_proxy_neither_time_nor_descriptors(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir) as proxy:
            assert (await proxy.ask()).status == 200
            before = proxy.fd_count()
            for stub in (*proxy.prefill, *proxy.decode):
                stub.behaviour = Behaviour(hangs=True, is_deaf=True)
            for number in range(20):
                asking = asyncio.create_task(proxy.ask())
                await proxy.prefill[0].arrived(number + 2)
                await leave(asking)
            await nothing_is_left(proxy, gone=20)

            async def are_closed() -> bool:
                return proxy.fd_count() <= before + 4  # a kept connection or two, and this question's own

            await eventually(are_closed, "its descriptors are back")

    run(steps())


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_however_its_connection_ends(short_dir: Path, how: str) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            proxy.prefill[0].behaviour = Behaviour(hangs=True)
            host, _, port = proxy.url.removeprefix("http://").rpartition(":")
            body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=30) as client:
                client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                (seen,) = await proxy.prefill[0].arrived(1)
                if how == "resets":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await cancelled_soon(seen, asyncio.get_running_loop().time())
            await nothing_is_left(proxy)

    run(steps())


@pytest.mark.parametrize("sent", ["half a head", "half a body", "nothing"])
def test_a_client_that_stops_sending_holds_nothing_and_is_cut_off(short_dir: Path, sent: str) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--client-timeout=1s") as proxy:
            host, _, port = proxy.url.removeprefix("http://").rpartition(":")
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            half = f"{head}Content-Length: 1000\r\n\r\n" + '{"model"'
            start = {"half a head": head, "half a body": half, "nothing": ""}[sent]
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(start.encode())
            try:
                if sent == "half a body":
                    async with asyncio.timeout(60):
                        assert b" 408 " in await reader.readline()
                assert (await proxy.ask()).status == 200, "others are served meanwhile"
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
            await proxy.settled()
            assert len(proxy.decode[0].seen) == 1

    run(steps())


def test_a_client_that_takes_nothing_is_cut_off_and_d_is_let_go(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--client-timeout=1s") as proxy:
            (d,) = proxy.decode
            d.behaviour = Behaviour(padding_bytes=1 << 20, tokens=["x"] * 200)
            host, _, port = proxy.url.removeprefix("http://").rpartition(":")
            body = json.dumps({"model": MODEL, "prompt": PROMPT, "stream": True}).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.settimeout(30)
                client.connect((host, int(port)))
                client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                (seen,) = await d.arrived(1)
                async with asyncio.timeout(60):
                    await seen.cancelled.wait()
            await proxy.settled()

    run(steps())
