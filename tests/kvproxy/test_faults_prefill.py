"""P fails, in every way there is: another P does it, else D alone, else a clear 503; and D never waits for nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.kvproxy.proxy_fixture import Answer, Proxy, eventually, inside, run
from tests.kvproxy.stub_worker import Behaviour, Ending, StubWorker

TRANSFER = "kv_transfer_params"
GONE = None  # nobody listens
FAULTS: dict[str, Behaviour | None] = {
    "nobody listens": GONE,
    "resets": Behaviour(resets_before_headers=True),
    "closes": Behaviour(closes_before_headers=True),
    "500": Behaviour(status=500),
    "503": Behaviour(status=503),
    "429": Behaviour(status=429),
    "never answers": Behaviour(hangs=True),
    "stops in its answer": Behaviour(ending=Ending.SILENT),
    "breaks off its answer": Behaviour(ending=Ending.CUT_INSIDE_AN_EVENT),
    "resets in its answer": Behaviour(ending=Ending.RESET),
    "answers no JSON": Behaviour(body=b"<html>oops</html>", content_type="text/html"),
    "answers a list": Behaviour(body=b"[]"),
    "answers nothing": Behaviour(body=b""),
    "has a huge header": Behaviour(headers=[("x-huge", "x" * 100_000)]),
    "has a huge answer": Behaviour(padding_bytes=3 << 20),
}
# A process that was stopped: a P that answers /health may only be slow, and has its time.
STOPPED = Behaviour(hangs=True, health=None)
SHORT = ("--prefill-wait=2s", "--stall-timeout=4s")
PATIENT = ("--stall-timeout=4s", "--probe-interval=100ms", "--probe-timeout=100ms")


async def fail(stub: StubWorker, behaviour: Behaviour | None) -> None:
    if behaviour is None:
        await stub.refuse()
    else:
        stub.behaviour = behaviour


def is_right(answer: Answer) -> bool:
    return answer.status == 200 and answer.text == "Once upon a time" and not answer.cut


def transfers(proxy: Proxy) -> list[object]:
    return [seen.json.get(TRANSFER) for stub in proxy.decode for seen in stub.seen]


@pytest.mark.parametrize("fault", FAULTS)
def test_without_any_p_that_works_d_does_it_alone_and_is_told_of_none(short_dir: Path, fault: str) -> None:
    async def steps() -> None:
        async with inside(short_dir, *SHORT) as proxy:
            await fail(proxy.prefill[0], FAULTS[fault])
            for stream in (False, True):
                assert is_right(await proxy.ask(stream=stream))
            assert transfers(proxy) == [None, None]
            await proxy.settled()
            assert await proxy.metric("decisions_total", reason="prefill-lost", route="decode-only") == 2

    run(steps())


@pytest.mark.parametrize("fault", FAULTS)
def test_another_p_takes_over_and_d_is_told_of_that_one(short_dir: Path, fault: str) -> None:
    async def steps() -> None:
        async with inside(short_dir, *PATIENT, p_count=2) as proxy:
            broken, healthy = proxy.prefill
            await fail(broken, {**FAULTS, "never answers": STOPPED}[fault])
            for _ in range(4):
                assert is_right(await proxy.ask())
            for _ in range(60):  # until chance has sent one to the broken one
                if broken.seen or await proxy.metric("legs_total", role="prefill", outcome="failed"):
                    break
                assert is_right(await proxy.ask())
            else:
                pytest.fail("the broken one was never tried")
            answered = await proxy.metric("requests_total", status="200")
            assert transfers(proxy) == [{"kvstored": {"source_node": "prefill-1"}}] * int(answered)
            assert len(healthy.seen) == answered
            await proxy.settled()

    run(steps())


@pytest.mark.parametrize("fault", ["nobody listens", "500", "never answers"])
def test_by_policy_it_is_503_at_once_and_d_is_not_asked(short_dir: Path, fault: str) -> None:
    async def steps() -> None:
        async with inside(short_dir, *SHORT, "--on-prefill-loss=503") as proxy:
            await fail(proxy.prefill[0], FAULTS[fault])
            answer = await proxy.ask(stream=True)
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.error["message"]
            assert not proxy.decode[0].seen
            await proxy.settled()

    run(steps())


@pytest.mark.parametrize("fault", FAULTS)
def test_with_d_as_the_entrance_d_is_let_go_and_asked_anew_when_p_is_lost(short_dir: Path, fault: str) -> None:
    async def steps() -> None:
        async with inside(short_dir, *SHORT, "--entrance=decode") as proxy:
            (d,) = proxy.decode
            d.behaviour = Behaviour(waits_for_prefill=True)
            await fail(proxy.prefill[0], FAULTS[fault])
            assert is_right(await proxy.ask(stream=True))
            waited, anew = [seen for seen in d.seen if TRANSFER in seen.json], d.seen[-1]
            assert TRANSFER not in anew.json
            assert len(waited) <= 1
            for seen in waited:
                async with asyncio.timeout(30):
                    await seen.cancelled.wait()
            await proxy.settled()
            assert (await proxy.workers())[d.url]["state"] == "closed", "it was not D's fault"

    run(steps())


def test_what_p_refuses_as_a_bad_request_d_answers_itself_and_p_stays_in_use(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            proxy.prefill[0].behaviour = proxy.decode[0].behaviour = Behaviour(status=400)
            for _ in range(10):
                answer = await proxy.ask()
                assert (answer.status, answer.error["message"]) == (400, "stub says 400")
            assert len(proxy.prefill[0].seen) == 10, "4xx opened a circuit"
            states = {worker["state"] for worker in (await proxy.workers()).values()}
            assert states == {"closed"}
            proxy.prefill[0].behaviour = proxy.decode[0].behaviour = Behaviour()
            assert is_right(await proxy.ask())

    run(steps())


def test_a_p_that_accepts_and_does_nothing_is_found_out_long_before_the_deadline(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--probe-interval=100ms", "--probe-timeout=100ms") as proxy:
            proxy.prefill[0].behaviour = STOPPED
            assert is_right(await proxy.ask())  # within the client's patience, and not in ten minutes
            assert transfers(proxy) == [None]
            (seen,) = proxy.prefill[0].seen
            async with asyncio.timeout(30):
                await seen.cancelled.wait()

    run(steps())


def test_a_p_that_computes_for_long_and_answers_health_is_waited_for(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--probe-interval=50ms") as proxy:
            (p,) = proxy.prefill
            ready = asyncio.Event()
            p.behaviour = Behaviour(before_headers=ready)
            asking = asyncio.create_task(proxy.ask())

            async def was_looked_at() -> bool:
                return len([seen for seen in p.asides if seen.path == "/health"]) >= 5

            await eventually(was_looked_at, "/health is asked")
            assert not asking.done()
            ready.set()
            assert is_right(await asking)
            assert transfers(proxy) == [{"kvstored": {"source_node": "prefill-0"}}]

    run(steps())


@pytest.mark.parametrize("when", ["after its answer", "as the next request is on its way"])
def test_a_kept_connection_that_p_has_closed_costs_one_safe_retry_and_no_fault(short_dir: Path, when: str) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            (p,) = proxy.prefill
            p.behaviour = Behaviour(closes_idle=when == "after its answer", closes_reused=when != "after its answer")
            for _ in range(20):
                assert is_right(await proxy.ask())
            assert (await proxy.workers())[p.url]["state"] == "closed"
            assert await proxy.metric("legs_total", role="prefill", outcome="ok") == 20
            retries = await proxy.metric("retries_total", role="prefill", why="stale-connection")
            assert retries or when == "after its answer"
            asked = Counter(seen.headers["x-request-id"] for seen in p.seen)
            assert len(asked) == 20
            assert max(asked.values()) <= 2

    run(steps())


def test_a_fleet_of_p_that_fails_is_not_asked_as_often_as_it_has_workers(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, p_count=4) as proxy:
            for stub in proxy.prefill:
                stub.behaviour = Behaviour(status=500)
            for _ in range(5):
                assert is_right(await proxy.ask())
            asked = [seen.headers["x-request-id"] for stub in proxy.prefill for seen in stub.seen]
            assert all(asked.count(identity) <= 2 for identity in asked), "one request, one more P"

    run(steps())
