"""P and D as two API servers, each with its engine in a process of its own, as they are deployed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Group
from demo.vllm_server import BLOCK_TOKENS, MODEL, Server, connector
from tests.daemon_fixture import Daemon, eventually, running
from tests.engines.vllm.conftest import environment
from tests.engines.vllm.node import ROUNDING, Baseline, Models, prompt

COUNT = 1000
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS


_seeds = itertools.count()


@pytest.fixture(scope="module")
def servers(place_dir: Path, models: Models) -> Iterator[tuple[Server, Server]]:
    """Return P and D, which run all the time; the tests' daemons come and go."""
    with Group() as group:
        socket = Daemon(place_dir).socket
        p, d = (
            group.start(Server, name, environment("0.32"), models.one, place_dir, transfer=connector(socket, role))
            for name, role in (("P", "kv_producer"), ("D", "kv_consumer"))
        )
        p.await_ready()
        d.await_ready()
        yield p, d


@pytest.fixture
def daemon(place_dir: Path, servers: tuple[Server, Server]) -> Iterator[Daemon]:
    """Return a daemon that both servers have found."""
    with running(place_dir) as daemon:
        await_hand_over(*servers)
        yield daemon


def await_hand_over(p: Server, d: Server) -> None:
    """Return when what P computes is given to D."""

    def is_handed_over() -> bool:
        tokens = prompt(f"hand over {next(_seeds)}", BLOCK_TOKENS + 1)
        ask(p, tokens, 1)
        return given(ask(d, tokens)) == BLOCK_TOKENS

    eventually(is_handed_over, "P's blocks get to D", within_s=60)


def given(answer: dict[str, Any]) -> int:
    """Return how many tokens of its prompt an answer did not need to compute."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ask(server: Server, tokens: list[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": tokens, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return server.post("/v1/completions", {**body, "return_token_ids": True, "logprobs": 1, **more})


@pytest.mark.usefixtures("daemon")
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
        assert given(answer) == HITS
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
    await_hand_over(p, d)
