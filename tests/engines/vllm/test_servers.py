"""P and D as two API servers, each with its engine in a process of its own, as they are deployed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.vllm_server import BLOCK_TOKENS, MODEL, Server, connector
from tests.daemon_fixture import Daemon, eventually, running
from tests.engines.vllm.conftest import environment
from tests.engines.vllm.node import ROUNDING, Baseline, Models, prompt

COUNT = 1000
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
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


def test_d_says_with_p_s_blocks_what_it_would_have_said(servers: tuple[Server, Server], baseline: Baseline) -> None:
    p, d = servers
    for number in range(5):
        tokens = prompt(f"servers {number}", COUNT)
        said = baseline(tokens)
        hits = d.metric(EXTERNAL_HITS)
        assert ask(p, tokens, 1)["choices"][0]["token_ids"] == list(said.tokens[:1])
        # At once: whoever has P's answer may rely on what P computed.
        answer = ask(d, tokens)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == list(said.tokens)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(said.logprobs, abs=ROUNDING)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == HITS
        assert d.metric(EXTERNAL_HITS) - hits == HITS


def test_servers_outlive_their_daemon_and_find_the_next_one(
    servers: tuple[Server, Server], daemon: Daemon, baseline: Baseline
) -> None:
    p, d = servers
    daemon.kill()
    tokens = prompt("without a daemon", COUNT)
    for server in servers:
        (choice,) = ask(server, tokens)["choices"]
        assert choice["token_ids"] == list(baseline(tokens).tokens)
    daemon.start()

    def is_handed_over(numbers: Iterator[int] = itertools.count()) -> bool:  # noqa: B008  # one count for all calls
        tokens = prompt(f"the next daemon {next(numbers)}", COUNT)
        ask(p, tokens, 1)
        (choice,) = (answer := ask(d, tokens))["choices"]
        assert choice["token_ids"] == list(baseline(tokens).tokens)
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == HITS)

    eventually(is_handed_over, "P's blocks get to D again", within_s=60)
