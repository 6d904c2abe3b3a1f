"""Workers come and go, callers crowd, the proxy itself is stopped: nobody who is served notices more than must be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kvproxy.proxy_fixture import PROMPT, Answer, Proxy, eventually, inside, proxied, run
from tests.kvproxy.stub_worker import Behaviour

TOLD = "kv_transfer_params"


def is_right(answer: Answer) -> bool:
    return answer.status == 200 and answer.text == "Once upon a time" and not answer.cut


def of(proxy: Proxy, number: int = 0) -> dict[str, str]:
    return {"role": "decode", "url": proxy.decode[number].url}


# ---- workers at run time


def test_a_worker_is_added_drained_and_removed_under_load(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir, d_count=2) as proxy:
            old, new = proxy.decode
            assert (await proxy.admin("DELETE", "/workers", of(proxy, 1)))[0] == 200  # begin with one
            rest = asyncio.Event()
            old.behaviour = Behaviour(between_tokens=rest)
            began = asyncio.Event()
            streaming = asyncio.create_task(proxy.ask(stream=True, on_first=began.set))
            await began.wait()
            assert (await proxy.admin("POST", "/workers", of(proxy, 1)))[0] == 201
            assert (await proxy.admin("POST", "/workers/drain", of(proxy)))[0] == 200
            for _ in range(5):
                assert is_right(await proxy.ask())
            assert (len(old.seen), len(new.seen)) == (1, 5), "who drains gets nothing new"
            status, told = await proxy.admin("DELETE", "/workers", of(proxy))
            assert (status, told) == (202, {"requests": 1})
            rest.set()
            assert is_right(await streaming), "what it had begun it ends"

            async def is_gone() -> bool:
                return old.url not in await proxy.workers()

            await eventually(is_gone, "it is forgotten after its last request")
            assert is_right(await proxy.ask())

    run(steps())


def test_a_deployment_without_p_becomes_one_with_p_and_back(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--on-prefill-loss=503") as proxy:
            (p,) = proxy.prefill
            worker = {"role": "prefill", "url": p.url}
            for plain in (True, False):
                method, status = ("DELETE", 200) if plain else ("POST", 201)
                assert (await proxy.admin(method, "/workers", worker))[0] == status
                asked = len(p.seen)
                assert is_right(await proxy.ask()), "none by configuration is no loss"
                assert len(p.seen) == asked + (not plain)

    run(steps())


def test_the_admin_port_s_paths_are_not_at_the_clients_door(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            for path in ("/workers", "/workers/drain", "/admin"):
                status, text = await proxy.get(path)
                assert status == 404
                assert proxy.decode[0].url not in text

    run(steps())


# ---- which way


@pytest.mark.parametrize(
    ("members", "uses_p"),
    [
        ({}, True), ({"n": 4}, True), ({"max_tokens": 1}, False), ({"use_beam_search": True, "n": 2}, False),
        ({"echo": True, "logprobs": 1}, False), ({"prompt_logprobs": 1}, False), ({"prompt": "short"}, False),
        ({"prompt": [PROMPT, PROMPT]}, True), ({"prompt": list(range(500))}, True), ({"logprobs": 5}, True),
    ],
    ids=str,
)  # fmt: skip
def test_p_is_asked_only_where_it_can_help(short_dir: Path, members: dict[str, Any], uses_p: bool) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            assert (await proxy.ask(**members)).status == 200
            assert bool(proxy.prefill[0].seen) == uses_p
            assert (TOLD in proxy.decode[0].seen[0].json) == uses_p, "pair or nothing"

    run(steps())


@pytest.mark.parametrize("told_by", ["header", "body"])
def test_turns_of_one_session_meet_at_one_p_and_one_d_and_sessions_are_spread(short_dir: Path, told_by: str) -> None:
    async def steps() -> None:
        async with inside(short_dir, p_count=3, d_count=3) as proxy:

            async def turn(session: str) -> None:
                if told_by == "header":
                    assert is_right(await proxy.ask(headers={"X-Session-Id": session}))
                else:
                    assert is_right(await proxy.ask(prompt_cache_key=session))

            for _ in range(5):
                await turn("one")
            for stubs in (proxy.prefill, proxy.decode):
                assert sorted(len(stub.seen) for stub in stubs) == [0, 0, 5]
            for number in range(40):
                await turn(f"session {number}")
            for stubs in (proxy.prefill, proxy.decode):
                assert all(stub.seen for stub in stubs)

    run(steps())


def test_requests_at_once_are_spread_by_what_each_worker_has_to_do(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, p_count=2, d_count=2) as proxy:
            gates = [asyncio.Event() for _ in range(4)]
            for stub, gate in zip((*proxy.prefill, *proxy.decode), gates, strict=True):
                stub.behaviour = Behaviour(before_headers=gate)
            asking = [asyncio.create_task(proxy.ask()) for _ in range(20)]
            for stubs, held in ((proxy.prefill, gates[:2]), (proxy.decode, gates[2:])):
                for stub in stubs:
                    await stub.arrived(10)
                for gate in held:
                    gate.set()
            assert all([is_right(await one) for one in asking])

    run(steps())


# ---- callers crowd


def test_one_caller_s_crowd_is_told_429_and_another_gets_its_place(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--running-max=1", "--caller-waiting-max=3", "--waiting-max=8") as proxy:
            (d,) = proxy.decode
            gate = asyncio.Event()
            d.behaviour = Behaviour(before_headers=gate)
            greedy, modest = {"Authorization": "Bearer greedy"}, {"Authorization": "Bearer modest"}
            first = asyncio.create_task(proxy.ask(headers=greedy))
            await d.arrived(1)
            crowd = [asyncio.create_task(proxy.ask(headers=greedy)) for _ in range(10)]

            async def seven_are_refused() -> bool:
                return sum(one.done() for one in crowd) == 7

            await eventually(seven_are_refused, "one caller has three waiting at most")
            for one in crowd:
                if one.done():
                    answer = one.result()
                    assert answer.status == 429
                    assert int(answer.headers["Retry-After"]) >= 1
                    assert answer.error["type"] == "rate_limit_error"
            other = asyncio.create_task(proxy.ask(headers=modest))

            async def four_wait() -> bool:
                return await proxy.metric("queue_waiting") == 4

            await eventually(four_wait, "another caller has room")
            gate.set()
            assert is_right(await first)
            assert is_right(await other)
            served = [seen.headers["authorization"].removeprefix("Bearer ") for seen in d.seen]
            assert served.index("modest") <= 2, "it does not wait for all of the crowd"
            answers = await asyncio.gather(*crowd)
            assert [is_right(answer) for answer in answers].count(True) == 3
            assert await proxy.metric("refused_total", why="share-full") == 7
            await proxy.settled()

    run(steps())


def test_when_the_whole_queue_is_full_everybody_is_told_503(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--running-max=1", "--waiting-max=2") as proxy:
            (d,) = proxy.decode
            gate = asyncio.Event()
            d.behaviour = Behaviour(before_headers=gate)
            asking = [asyncio.create_task(proxy.ask(headers={"Authorization": f"k{number}"})) for number in range(3)]

            async def two_wait() -> bool:
                return await proxy.metric("queue_waiting") == 2

            await eventually(two_wait, "two wait")
            answer = await proxy.ask(headers={"Authorization": "k9"})
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            gate.set()
            assert all([is_right(await one) for one in asking])

    run(steps())


def test_who_waits_too_long_is_told_503_and_no_worker_hears_of_it(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--running-max=1", "--waiting-timeout=200ms") as proxy:
            (d,) = proxy.decode
            gate = asyncio.Event()
            d.behaviour = Behaviour(before_headers=gate)
            first = asyncio.create_task(proxy.ask())
            await d.arrived(1)
            assert (await proxy.ask()).status == 503
            assert await proxy.metric("refused_total", why="waited") == 1
            gate.set()
            assert is_right(await first)
            assert len(d.seen) == 1

    run(steps())


def test_a_gateway_s_header_tells_callers_apart_where_the_operator_says_so(short_dir: Path) -> None:
    async def steps() -> None:
        flags = ("--running-max=1", "--caller-waiting-max=1", "--waiting-max=8", "--caller-header=X-Tenant")
        async with inside(short_dir, *flags) as proxy:
            (d,) = proxy.decode
            gate = asyncio.Event()
            d.behaviour = Behaviour(before_headers=gate)
            same_key = {"Authorization": "Bearer gateway"}
            asking = [
                asyncio.create_task(proxy.ask(headers={**same_key, "X-Tenant": tenant})) for tenant in "aabc"
            ]

            async def three_wait() -> bool:
                return await proxy.metric("queue_waiting") == 3

            await eventually(three_wait, "one of each tenant waits")
            assert (await proxy.ask(headers={**same_key, "X-Tenant": "b"})).status == 429
            gate.set()
            assert all([is_right(await one) for one in asking])

    run(steps())


# ---- the proxy is stopped


def test_at_sigterm_streams_go_on_to_their_end_and_nothing_new_begins(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir) as proxy:
            (d,) = proxy.decode
            rest, began = asyncio.Event(), asyncio.Event()
            d.behaviour = Behaviour(between_tokens=rest)
            streaming = asyncio.create_task(proxy.ask(stream=True, on_first=began.set))
            await began.wait()
            proxy.terminate()

            async def refuses() -> bool:
                try:
                    return (await proxy.ask()).status == 503
                except OSError:
                    return True

            await eventually(refuses, "nothing new is let in")
            assert not streaming.done()
            rest.set()
            assert is_right(await streaming)
            assert await proxy.stop() == 0

    run(steps())


def test_past_the_drain_s_deadline_a_stream_is_told_so_and_the_process_ends(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir, "--drain-timeout=500ms") as proxy:
            (d,) = proxy.decode
            began = asyncio.Event()
            d.behaviour = Behaviour(between_tokens=asyncio.Event())
            streaming = asyncio.create_task(proxy.ask(stream=True, on_first=began.set))
            await began.wait()
            assert await proxy.stop() == 0
            answer = await streaming
            assert answer.text == "Once"
            assert "shutting down" in answer.error["message"]
            (seen,) = d.seen
            assert seen.cancelled.is_set()

    run(steps())
