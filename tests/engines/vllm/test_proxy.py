"""kvproxy in front of two real vLLM servers and a real kvstored: the classic deployment, asked as clients ask."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo import vllm_environment
from demo.vllm_server import BLOCK_TOKENS, MODEL, Server, call, connector, stream
from kvclient import Client
from kvstore import wire
from tests.daemon_fixture import Daemon, eventually, running
from tests.engines.vllm.conftest import environment
from tests.engines.vllm.node import ROUNDING, Baseline, Models, prompt

COUNT = 1000
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
ANSWERED = "vllm:request_success_total"
PREFILLED = "vllm:prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs, and the proxy's port."""

    daemon: Daemon
    p: Server
    d: Server
    port: int

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(call(self.port, "POST", path, json.dumps(body).encode()))
        return answer

    @contextlib.contextmanager
    def asks_p(self, times: int) -> Generator[None, None, None]:
        """Check that P answers so many requests inside the block."""
        before = self.p.metric(ANSWERED)
        yield
        assert self.p.metric(ANSWERED) - before == times


@pytest.fixture(scope="module")
def deployment(models: Models, scratch: Path) -> Iterator[Deployment]:
    directory = scratch / "proxy"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running(directory))

        def started(name: str, role: str) -> Server:
            transfer = connector(daemon.socket, role)
            server = Server(name, environment("0.32"), models.one, directory, transfer=transfer)
            stack.callback(server.stop)
            return server

        p, d = started("P", "kv_producer"), started("D", "kv_consumer")
        p.await_ready()
        d.await_ready()
        yield Deployment(daemon, p, d, stack.enter_context(proxying(directory / "kvproxy.log", daemon, p, d)))


@contextlib.contextmanager
def proxying(log: Path, daemon: Daemon, p: Server, d: Server, **more: str) -> Generator[int, None, None]:
    flags = {
        "listen": "127.0.0.1:0", "prefill": p.url, "decode": d.url, "store": str(daemon.socket), "store-timeout": "5s",
        "tokenize-timeout": "30s", "hash-seed": vllm_environment.HASH_SEED, **more,
    }  # fmt: skip
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvproxy", *(f"--{key}={value}" for key, value in flags.items())],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        found = eventually(lambda: re.search(r"listen=http://127\.0\.0\.1:(\d+)", log.read_text()), "kvproxy is ready")
        assert found is not None
        yield int(found[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


def test_tokens_and_logprobs_through_the_proxy_are_those_of_one_vllm(
    deployment: Deployment, baseline: Baseline
) -> None:
    def is_handed_over(numbers: Iterator[int] = itertools.count()) -> bool:  # noqa: B008  # one count for all calls
        tokens = prompt(f"through the proxy {next(numbers)}", COUNT)
        said = baseline(tokens)
        body = {"model": MODEL, "prompt": tokens, "temperature": 0, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
        with deployment.asks_p(1):
            answer = deployment.post("/v1/completions", {**body, "return_token_ids": True})
        (choice,) = answer["choices"]
        assert choice["token_ids"] == list(said.tokens)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(said.logprobs, abs=ROUNDING)
        assert answer["usage"]["prompt_tokens"] == COUNT
        assert answer["usage"]["completion_tokens"] == 16
        with deployment.asks_p(0):
            streamed = stream(deployment.port, "/v1/completions", body)
        assert streamed.tokens == said.tokens
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == HITS)

    # An engine's first questions to the store may come before its connection stands: those are misses.
    eventually(is_handed_over, "D is given what P has computed")


def test_with_d_as_the_entrance_d_waits_for_p_and_loads_what_it_has_computed(
    deployment: Deployment, baseline: Baseline, scratch: Path
) -> None:
    numbers = itertools.count()
    daemon, p, d = deployment.daemon, deployment.p, deployment.d
    with proxying(scratch / "decode-first.log", daemon, p, d, entrance="decode") as port:

        def is_waited_for() -> bool:
            tokens = prompt(f"decode first {next(numbers)}", COUNT)
            said = baseline(tokens)
            names = ("vllm:kvstored_waits_total", "vllm:external_prefix_cache_hits_total", PREFILLED)
            waits, hits, prefilled = d.metric(names[0]), d.metric(names[1]), p.metric(names[2])
            body = {"model": MODEL, "prompt": tokens, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
            streamed = stream(port, "/v1/completions", body)
            assert streamed.tokens == said.tokens
            if not streamed.cached_tokens == d.metric(names[1]) - hits == HITS or d.metric(names[0]) - waits != 1:
                return False  # D's question came too late on this machine; with its answer P was let go
            eventually(lambda: p.metric(PREFILLED) - prefilled == COUNT, "P has computed the prompt")
            return True

        eventually(is_waited_for, "D is given what P computes while D waits")
        with contextlib.closing(Client(daemon.socket, strict=True)) as client:
            assert client.admin(wire.Stats(0))["tiers"]["cpu"]["pinned_bytes"] == 0


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_proxy_hashes_what_the_engines_hash(deployment: Deployment, kind: str) -> None:
    text = " ".join(str(number) for number in prompt(f"hashed as {kind}", 300))
    if kind == "text":
        path, body = "/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 4}
    else:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        path, body = "/v1/chat/completions", {"model": MODEL, "messages": messages, "max_completion_tokens": 4}
    with deployment.asks_p(1):
        first = deployment.post(path, body)
    with deployment.asks_p(0):
        again = deployment.post(path, body)
    assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    with deployment.asks_p(1):
        deployment.post(path, {**body, "cache_salt": "another tenant"})
    with deployment.asks_p(0):
        deployment.post(path, {**body, "cache_salt": "another tenant"})


def test_a_client_that_leaves_aborts_the_request_in_the_engine_and_nothing_stays_pinned(deployment: Deployment) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt("left alone", COUNT),
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.read(6) == b"data: "
    answer.close()
    connection.close()
    eventually(lambda: deployment.d.metric("vllm:num_requests_running") == 0, "D has let it go")
    with Client(deployment.daemon.socket, strict=True) as client:
        eventually(
            lambda: client.admin(wire.Stats(0))["tiers"]["cpu"]["pinned_bytes"] == 0, "no lease is left in the store"
        )


@pytest.mark.parametrize(
    "more",
    [{"n": 3, "temperature": 1.0}, {"n": 2, "use_beam_search": True}, {"echo": True, "logprobs": 1}, {"max_tokens": 1},
     {"prompt_logprobs": 1}, {"stop": ["7"], "min_tokens": 2}, {"response_format": {"type": "json_object"}}],
)  # fmt: skip
def test_what_an_engine_takes_the_proxy_passes(deployment: Deployment, more: dict[str, Any]) -> None:
    tokens = prompt(f"passes {sorted(more)}", 200)
    answer = deployment.post("/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 4, **more})
    assert len(answer["choices"]) == more.get("n", 1)
    assert answer["usage"]["prompt_tokens"] == 200


def test_what_an_engine_refuses_is_refused_in_its_own_words(deployment: Deployment) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=120)
    with contextlib.closing(connection):
        body = json.dumps({"model": MODEL, "prompt": prompt("too hot", 200), "temperature": -3})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
    assert answer.status == 400
    assert "temperature" in told["error"]["message"]
