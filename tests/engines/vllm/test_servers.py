"""P and D as two API servers, each with its engine in a process of its own, as they are deployed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.vllm_server import BLOCK_TOKENS, MODEL, Server, connector
from tests.daemon_fixture import Daemon, eventually, running
from tests.engines.vllm.conftest import environment
from tests.engines.vllm.node import Baseline, Models, prompt

COUNT = 1000
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def daemon(scratch: Path) -> Iterator[Daemon]:
    directory = scratch / "servers"
    directory.mkdir()
    with running(directory) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def servers(daemon: Daemon, models: Models, scratch: Path) -> Iterator[tuple[Server, Server]]:
    started: list[Server] = []
    try:
        for name, role in (("P", "kv_producer"), ("D", "kv_consumer")):
            transfer = connector(daemon.socket, role)
            started.append(
                Server(name, environment("0.32"), models.one, scratch / "servers", transfer=transfer)
            )
        for server in started:
            server.await_ready()
        yield started[0], started[1]
    finally:
        for server in started:
            server.stop()


def ask(server: Server, tokens: list[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": tokens, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return server.post("/v1/completions", {**body, "return_token_ids": True, "logprobs": 1, **more})


def test_d_says_with_p_s_blocks_what_it_would_have_said(
    servers: tuple[Server, Server], daemon: Daemon, baseline: Baseline
) -> None:
    p, d = servers
    tokens = prompt("servers", COUNT)
    said = baseline(tokens)
    ask(p, tokens, 1)
    eventually(lambda: p.metric("vllm:request_success_total") >= 1, "P has answered")
    answer = ask(d, tokens)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(said.tokens)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(said.logprobs, abs=0)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= HITS
    assert d.metric("vllm:external_prefix_cache_hits_total") >= HITS
