"""D fails, in every way there is: before its first byte another D answers, after it the stream ends with an error."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.kvproxy.proxy_fixture import Answer, Proxy, eventually, inside, proxied, run
from tests.kvproxy.stub_worker import CHAT, Behaviour, Ending, StubWorker

TOLD = {"kvstored": {"source_node": "prefill-0"}}

# Before the first byte; what a client is told if there is no other D.
EARLY: dict[str, tuple[Behaviour | None, int]] = {
    "nobody listens": (None, 503),
    "resets": (Behaviour(resets_before_headers=True), 502),
    "closes": (Behaviour(closes_before_headers=True), 502),
    "500": (Behaviour(status=500), 500),
    "503": (Behaviour(status=503), 503),
    "never answers": (Behaviour(hangs=True), 504),
    "answers of another type": (Behaviour(content_type="text/html"), 502),
    "has a huge header": (Behaviour(headers=[("x-huge", "x" * 100_000)]), 502),
    "answers nothing": (Behaviour(tokens=(), body=b"", ending=Ending.WITHOUT_DONE), 502),
    "breaks off before the first event": (Behaviour(ending=Ending.CUT_INSIDE_AN_EVENT, whole_tokens=0), 502),
    "resets before the first event": (Behaviour(ending=Ending.RESET, whole_tokens=0), 502),
    "stops before the first event": (Behaviour(ending=Ending.SILENT, whole_tokens=0), 504),
}
# After the first event of a stream.
LATE = {
    Ending.WITHOUT_DONE: "broken",
    Ending.WITHOUT_LAST_CHUNK: "broken",
    Ending.CUT_INSIDE_AN_EVENT: "broken",
    Ending.RESET: "broken",
    Ending.SILENT: "timeout",
}
SHORT = ("--first-byte-timeout=2s", "--stall-timeout=2s")
PATIENT = ("--first-byte-timeout=4s", "--stall-timeout=4s")


async def fail(stub: StubWorker, behaviour: Behaviour | None) -> None:
    if behaviour is None:
        await stub.refuse()
    else:
        stub.behaviour = behaviour


def is_right(answer: Answer) -> bool:
    return answer.status == 200 and answer.text == "Once upon a time" and not answer.cut


async def until_tried(proxy: Proxy, broken: StubWorker, *, stream: bool) -> None:
    """Ask until chance has sent a request to the broken D; each answer must be right."""
    for _ in range(60):
        assert is_right(await proxy.ask(stream=stream))
        if broken.seen or await proxy.metric("legs_total", role="decode", outcome="failed"):
            return
    pytest.fail("the broken one was never tried")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", EARLY)
def test_before_its_first_byte_another_d_answers_and_the_client_sees_nothing_of_it(
    short_dir: Path, fault: str, stream: bool
) -> None:
    async def steps() -> None:
        async with inside(short_dir, *PATIENT, d_count=2) as proxy:
            broken, healthy = proxy.decode
            await fail(broken, EARLY[fault][0])
            await until_tried(proxy, broken, stream=stream)
            assert {json.dumps(seen.json["kv_transfer_params"]) for seen in healthy.seen} == {json.dumps(TOLD)}
            answered = await proxy.metric("requests_total", status="200")
            assert len(healthy.seen) == answered == len(proxy.prefill[0].seen), "P was asked once a request"
            await proxy.settled()

    run(steps())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", EARLY)
def test_without_another_d_the_client_is_told_what_happened_and_no_half_answer(
    short_dir: Path, fault: str, stream: bool
) -> None:
    async def steps() -> None:
        async with inside(short_dir, *SHORT) as proxy:
            behaviour, status = EARLY[fault]
            await fail(proxy.decode[0], behaviour)
            answer = await proxy.ask(stream=stream)
            assert answer.status == status
            assert answer.headers["Content-Type"].startswith("application/json")
            assert answer.error["message"]
            assert not answer.cut
            if behaviour is None:
                assert int(answer.headers["Retry-After"]) >= 1
            assert len(proxy.decode[0].seen) <= 1
            await proxy.settled()

    run(steps())


@pytest.mark.parametrize("ending", LATE)
def test_after_its_first_event_a_stream_ends_with_an_error_event_and_nothing_is_said_twice(
    short_dir: Path, ending: Ending
) -> None:
    async def steps() -> None:
        async with inside(short_dir, *SHORT, d_count=2) as proxy:
            for stub in proxy.decode:
                stub.behaviour = Behaviour(ending=ending, whole_tokens=1 if ending is not Ending.WITHOUT_DONE else 4)
            answer = await proxy.ask(stream=True)
            assert answer.status == 200
            assert not answer.cut, "the stream itself ends in order"
            assert answer.text == ("Once upon a time" if ending is Ending.WITHOUT_DONE else "Once")
            assert answer.events[-1] != "[DONE]"
            assert answer.error["code"] == 502
            assert answer.body.endswith(b"\n\n")
            assert sum(len(stub.seen) for stub in proxy.decode) == 1, "another D would begin anew"
            assert await proxy.metric("cut_total", why=LATE[ending]) == 1
            await proxy.settled()

    run(steps())


def test_an_event_is_passed_on_whole_or_not_at_all(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            cut = Ending.CUT_INSIDE_AN_EVENT
            proxy.decode[0].behaviour = Behaviour(ending=cut, whole_tokens=3, padding_bytes=200_000)
            answer = await proxy.ask(stream=True)
            assert answer.text == "Once upon a"
            assert all(json.loads(event) for event in answer.events)

    run(steps())


@pytest.mark.parametrize("ending", [Ending.CUT_INSIDE_AN_EVENT, Ending.RESET, Ending.SILENT])
def test_an_answer_that_is_no_stream_is_whole_or_another_d_s(short_dir: Path, ending: Ending) -> None:
    async def steps() -> None:
        async with inside(short_dir, *PATIENT, d_count=2) as proxy:
            broken, _ = proxy.decode
            broken.behaviour = Behaviour(ending=ending, padding_bytes=100_000)
            await until_tried(proxy, broken, stream=False)

    run(steps())


def test_an_answer_too_large_to_keep_is_cut_off_so_that_nobody_takes_a_part_for_the_whole(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--answer-size=64KiB") as proxy:
            (d,) = proxy.decode
            d.behaviour = Behaviour(ending=Ending.CUT_INSIDE_AN_EVENT, padding_bytes=1 << 20)
            answer = await proxy.ask()
            assert answer.cut
            d.behaviour = Behaviour(padding_bytes=1 << 20)
            assert is_right(await proxy.ask())

    run(steps())


def test_status_and_headers_go_out_with_d_s_first_bytes_and_not_before(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, d_count=2) as proxy:
            gate = asyncio.Event()
            reset = Ending.RESET
            for number, stub in enumerate(proxy.decode):
                headers = [("x-from", f"d{number}")]
                stub.behaviour = Behaviour(headers=headers, before_body=gate, ending=reset, whole_tokens=0)
            asking = asyncio.create_task(proxy.ask(stream=True))

            async def is_there() -> bool:
                return any(stub.seen for stub in proxy.decode)

            await eventually(is_there, "a D has the request")
            (first,) = [stub for stub in proxy.decode if stub.seen]
            (second,) = [stub for stub in proxy.decode if not stub.seen]
            second.behaviour = Behaviour(headers=[("x-from", "the second")])
            assert first.seen[0].done.is_set() is False
            gate.set()  # the first one has sent its headers, and now resets
            answer = await asking
            assert is_right(answer)
            assert answer.headers["x-from"] == "the second"

    run(steps())


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_d_says_of_a_bad_request_passes_as_it_is_and_nobody_is_blamed(
    short_dir: Path, status: int, stream: bool
) -> None:
    async def steps() -> None:
        async with inside(short_dir, d_count=2) as proxy:
            for stub in proxy.decode:
                stub.behaviour = Behaviour(status=status, headers=[("retry-after", "7"), ("x-of-d", "yes")])
            for _ in range(10):
                answer = await proxy.ask(stream=stream)
                assert answer.status == status
                assert answer.error == {
                    "message": f"stub says {status}", "type": "StubError", "param": None, "code": status
                }  # fmt: skip
                assert (answer.headers["retry-after"], answer.headers["x-of-d"]) == ("7", "yes")
            assert sum(len(stub.seen) for stub in proxy.decode) == 10, "a bad request was sent twice"
            assert {worker["state"] for worker in (await proxy.workers()).values()} == {"closed"}
            assert await proxy.metric("retries_total") == 0

    run(steps())


@pytest.mark.parametrize("when", ["after its answer", "as the next request is on its way"])
def test_a_kept_connection_that_d_has_closed_costs_one_safe_retry_and_no_fault(short_dir: Path, when: str) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            (d,) = proxy.decode
            d.behaviour = Behaviour(closes_idle=when == "after its answer", closes_reused=when != "after its answer")
            for number in range(20):
                assert is_right(await proxy.ask(stream=number % 2 == 0))
            assert (await proxy.workers())[d.url]["state"] == "closed"
            assert await proxy.metric("legs_total", role="decode", outcome="ok") == 20
            retries = await proxy.metric("retries_total", role="decode", why="stale-connection")
            assert retries or when == "after its answer"
            asked = Counter(seen.headers["x-request-id"] for seen in d.seen)
            assert len(asked) == 20
            assert max(asked.values()) <= 2

    run(steps())


# ---- deadlines


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_the_client_s_deadline_ends_both_legs_and_blames_nobody(short_dir: Path, stage: str) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            stub = proxy.prefill[0] if stage == "prefill" else proxy.decode[0]
            stub.behaviour = Behaviour(hangs=True)
            answer = await proxy.ask(headers={"X-Request-Timeout-Ms": "1500"})
            assert answer.status == 504
            (seen,) = stub.seen
            async with asyncio.timeout(20):
                await seen.cancelled.wait()
            assert {worker["state"] for worker in (await proxy.workers()).values()} == {"closed"}
            assert len(proxy.decode[0].seen) == (0 if stage == "prefill" else 1), "nobody waits for D's answer"
            await proxy.settled()

    run(steps())


def test_an_absolute_deadline_in_the_past_is_refused_before_any_worker_is_asked(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            past_ms, future_ms = (str(int((time.time() + seconds) * 1000)) for seconds in (-1, 3600))
            assert (await proxy.ask(headers={"X-Request-Deadline-Ms": past_ms})).status == 504
            for wrong in ("soon", "-1", "nan", "1e400"):
                assert (await proxy.ask(headers={"X-Request-Deadline-Ms": wrong})).status == 400
            assert not proxy.prefill[0].seen
            assert is_right(await proxy.ask(headers={"X-Request-Deadline-Ms": future_ms}))

    run(steps())


def test_a_deadline_in_mid_stream_ends_it_with_an_error_event(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir) as proxy:
            (d,) = proxy.decode
            d.behaviour = Behaviour(between_tokens=asyncio.Event())
            answer = await proxy.ask(stream=True, headers={"X-Request-Timeout-Ms": "3000"})
            assert (answer.status, answer.text) == (200, "Once")
            assert answer.error["message"]
            assert (await proxy.workers())[d.url]["state"] == "closed"
            assert await proxy.metric("cut_total", why="deadline") == 1

    run(steps())


# ---- going and coming back


def test_d_goes_and_comes_back_and_all_is_as_before_without_a_restart(short_dir: Path) -> None:
    async def steps() -> None:
        async with proxied(short_dir) as proxy:
            (d,) = proxy.decode
            assert is_right(await proxy.ask(stream=True))
            await d.refuse()
            for _ in range(10):
                answer = await proxy.ask(stream=True)
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) >= 1
            assert (await proxy.get("/readyz"))[0] == 503
            assert (await proxy.get("/healthz"))[0] == 200
            computed = len(proxy.prefill[0].seen)
            assert (await proxy.ask()).status == 503
            assert len(proxy.prefill[0].seen) == computed, "P computes for a D that is not there"
            await d.listen()

            async def is_normal() -> bool:
                return is_right(await proxy.ask(stream=True))

            await eventually(is_normal, "D is used again", within_s=30)
            assert (await proxy.get("/readyz"))[0] == 200

    run(steps())


def test_a_d_that_stops_in_mid_stream_is_found_dead_and_the_stream_ends(short_dir: Path) -> None:
    async def steps() -> None:
        async with inside(short_dir, "--probe-interval=100ms", "--probe-timeout=100ms") as proxy:
            (d,) = proxy.decode
            d.behaviour = Behaviour(ending=Ending.SILENT, health=None)
            answer = await proxy.ask(stream=True, path=CHAT, messages=[{"role": "user", "content": "hello " * 100}])
            assert answer.status == 200
            assert answer.error["code"] == 502
            assert await proxy.metric("cut_total", why="lost") == 1

    run(steps())
