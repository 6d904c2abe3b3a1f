"""The same with vLLM 0.28, which calls a connector in another order: `start_load_kv` always before the forward pass."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.vllm_engine import Engine, Host
from tests.engines.vllm.conftest import environment
from tests.engines.vllm.node import BLOCK_BYTES, BLOCK_TOKENS, Baseline, Models, Node, agree, prompt

COUNT = 600
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
TIGHT = {"kv_cache_memory_bytes": 40 * BLOCK_BYTES, "max_model_len": 1024, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def older_host(scratch: Path) -> Iterator[Host]:
    with Host(environment("0.28"), scratch) as host:
        host.await_ready()
        assert host.version.startswith("0.28")
        yield host


@pytest.fixture(scope="module")
def older_baseline(older_host: Host, models: Models) -> Iterator[Baseline]:
    with Baseline(older_host, models.one) as baseline:
        yield baseline


@pytest.fixture(scope="module")
def place(older_host: Host, models: Models, place_dir: Path) -> Iterator[Node]:
    """Return engines, and where daemons will be."""
    with Node(older_host, models.one, place_dir).engines() as node:
        node.engine("P", "kv_producer")
        for load in ("sync", "async"):
            node.engine(f"D-{load}", load=load)
            node.engine(f"tight-{load}", settings=TIGHT, load=load)
        yield node


@pytest.fixture
def node(place: Node) -> Iterator[Node]:
    """Return the engines with a daemon."""
    with place.serving():
        yield place


@pytest.fixture
def p(node: Node, request: pytest.FixtureRequest) -> Engine:
    p = node.engine("P")
    node.await_stores(p, f"{request.node.name}: older P begins")
    return p


@pytest.fixture(params=["sync", "async"])
def d(node: Node, request: pytest.FixtureRequest) -> Engine:
    d = node.engine(f"D-{request.param}")
    node.await_stores(d, f"{request.node.name}: older D begins")
    return d


def test_d_says_with_p_s_blocks_what_it_would_have_said(
    node: Node, p: Engine, d: Engine, older_baseline: Baseline
) -> None:
    tokens = prompt(f"older {d.name}", COUNT)
    node.stored(p, tokens)
    (output,) = d.generate(tokens)
    agree(output, older_baseline(tokens))
    assert output.logprobs == older_baseline.with_own_cache(tokens).logprobs
    assert output.cached == HITS


def test_a_killed_daemon_costs_a_recompute_and_the_next_one_gives_hits(
    node: Node, p: Engine, d: Engine, older_baseline: Baseline
) -> None:
    tokens = prompt(f"older, killed {d.name}", COUNT)
    node.stored(p, tokens)
    d.call("before_next_load", pid=node.daemon.pid, number=int(signal.SIGKILL))
    (output,) = d.generate(tokens)
    agree(output, older_baseline(tokens))
    assert d.call("loads_met") == 1
    node.daemon.kill()
    d.call("forget")
    node.daemon.start()
    node.await_stores(d, "older D, again")
    (output,) = d.generate(tokens)
    agree(output, older_baseline(tokens))
    assert output.cached == HITS


def test_blocks_lost_between_lookup_and_load_cost_a_recompute(
    node: Node, p: Engine, d: Engine, older_baseline: Baseline
) -> None:
    tokens = prompt(f"older, lost {d.name}", COUNT)
    node.stored(p, tokens)
    d.call("before_next_load", socket=str(node.daemon.socket))
    (output,) = d.generate(tokens)
    agree(output, older_baseline(tokens))
    assert d.call("loads_met") == 1


@pytest.mark.parametrize("load", ["sync", "async"])
def test_preempted_requests_in_chunks_say_the_same(node: Node, older_baseline: Baseline, load: str) -> None:
    engine = node.engine(f"tight-{load}")
    prompts = [prompt(f"older, preempted {load} {number}", 280) for number in range(4)]
    for _ in range(2):  # the second time much of it is in the store
        for tokens, output in zip(prompts, engine.generate(*prompts, max_tokens=150), strict=True):
            agree(output, older_baseline(tokens, 150))
        engine.call("forget")
    assert engine.call("metrics")["vllm:num_preemptions"] > 0
