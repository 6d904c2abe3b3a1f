"""A daemon that dies, hangs, returns, or loses blocks costs a recompute: never an error, a hang or another token.

The engines run all the time; each test has a daemon of its own on the socket and the directory that they know. Between
a lookup and its load there is no time to act from outside, so an engine is told beforehand what to do just before its
next load.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_engine import Engine, Host
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Models, Node, agree, prompt

COUNT = 600
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS

# Enough for a busy machine, little enough to wait for in vain.
PATIENCE: dict[str, Any] = {"lookup_budget_ms": 2_000, "load_timeout_ms": 5_000, "store_timeout_ms": 5_000}


@pytest.fixture(scope="module")
def place(host: Host, models: Models, place_dir: Path) -> Iterator[Node]:
    """Return engines, and where daemons will be."""
    with Node(host, models.one, place_dir).engines() as node:
        node.engine("P", "kv_producer", **PATIENCE)
        for load in ("sync", "async"):
            node.engine(f"D-{load}", load=load, **PATIENCE)
        yield node


@pytest.fixture
def node(place: Node) -> Iterator[Node]:
    """Return the engines with a daemon."""
    with place.serving():
        yield place


@pytest.fixture
def p(node: Node, request: pytest.FixtureRequest) -> Engine:
    """Return P, which has found the daemon."""
    p = node.engine("P")
    node.await_stores(p, f"{request.node.name}: P begins")
    return p


@pytest.fixture(params=["sync", "async"])
def d(node: Node, request: pytest.FixtureRequest) -> Engine:
    """Return D, which has found the daemon too."""
    d = node.engine(f"D-{request.param}")
    node.await_stores(d, f"{request.node.name}: D begins")
    return d


@pytest.fixture
def tokens(request: pytest.FixtureRequest) -> list[int]:
    """Return a prompt of this test's own."""
    return prompt(request.node.name, COUNT)


def says(engine: Engine, baseline: Baseline, tokens: list[int]) -> int:
    """Check that an engine says what is said without a connector; returns the tokens that it was given."""
    (output,) = engine.generate(tokens)
    agree(output, baseline(tokens))
    return output.cached


def test_a_killed_daemon_costs_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int]
) -> None:
    node.stored(p, tokens)
    node.daemon.kill()
    assert says(d, baseline, tokens) == 0
    assert says(p, baseline, tokens[1:]) == 0


def test_a_daemon_killed_and_restarted_gives_hits_again(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int]
) -> None:
    node.stored(p, tokens)
    node.daemon.kill()
    says(d, baseline, tokens[:100])
    d.call("forget")
    node.daemon.start()
    node.await_stores(d, "D, again")
    assert says(d, baseline, tokens) == HITS  # they were durable, and outlive kill -9
    node.await_stores(p, "P, again")


def test_a_daemon_that_ended_in_order_gives_hits_again(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int]
) -> None:
    node.stored(p, tokens)
    assert node.daemon.stop() == 0
    node.daemon.start()
    node.await_stores(d, "D, again, in order")
    assert says(d, baseline, tokens) == HITS


def test_a_stopped_daemon_costs_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int]
) -> None:
    node.stored(p, tokens)
    with node.stopped_daemon():
        assert says(d, baseline, tokens) == 0
        assert says(p, baseline, tokens[1:]) == 0
    node.await_stores(d, "D, continued")
    d.call("forget")
    assert says(d, baseline, tokens) == HITS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_daemon_that_goes_between_lookup_and_load_costs_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int], number: signal.Signals
) -> None:
    node.stored(p, tokens)
    d.call("before_next_load", pid=node.daemon.pid, number=int(number))
    try:
        says(d, baseline, tokens)
    finally:
        node.daemon.signal(signal.SIGCONT)
    assert d.call("loads_met") == 1
    assert d.counter("load_failed_blocks") > 0
    if number == signal.SIGKILL:
        node.daemon.kill()


def test_blocks_lost_between_lookup_and_load_cost_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int]
) -> None:
    failed = d.counter("load_failed_blocks")
    node.stored(p, tokens)
    d.call("before_next_load", socket=str(node.daemon.socket))
    says(d, baseline, tokens)
    assert d.call("loads_met") == 1
    assert d.counter("load_failed_blocks") - failed > 0


def test_a_batch_whose_daemon_goes_is_recomputed_whole(
    node: Node, p: Engine, d: Engine, baseline: Baseline, tokens: list[int]
) -> None:
    shared = 3 * BLOCK_TOKENS
    prompts = [tokens[:shared] + prompt(f"{d.name} goes {tail}", 400) for tail in range(4)]
    for at, each in enumerate(prompts):
        node.stored(p, each, new_blocks=(len(each) - (shared if at else 0)) // BLOCK_TOKENS)
    d.call("before_next_load", pid=node.daemon.pid, number=int(signal.SIGKILL))
    for each, output in zip(prompts, d.generate(*prompts), strict=True):
        agree(output, baseline(each))
    node.daemon.kill()
