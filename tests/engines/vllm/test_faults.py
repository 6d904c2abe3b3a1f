"""What goes wrong costs a recompute: identical tokens, never an error, never a hang; and hits again afterwards.

The engines are never restarted. Between a lookup and its load there is no time to act from outside, so an engine is
told beforehand what to do just before its next load.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bench.vllm_engine import Engine, Host
from tests.daemon_fixture import eventually
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Models, Node, prompt

LOADS = ("sync", "async")
COUNT = 600
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def p(node: Node) -> Engine:
    return node.engine("P", "kv_producer")


@pytest.fixture(scope="module", params=LOADS)
def d(node: Node, request: pytest.FixtureRequest) -> Engine:
    return node.engine(f"D-{request.param}", "kv_both", load=request.param)


@pytest.fixture(autouse=True)
def _served(node: Node, p: Engine, d: Engine, request: pytest.FixtureRequest) -> None:
    """Begin each test with a daemon that both engines use."""
    if not node.daemon.is_running:
        node.daemon.start()
    for engine in (p, d):
        returns(node, engine, f"{request.node.name} {engine.name} begins")


def returns(node: Node, engine: Engine, seed: str) -> None:
    """Wait until an engine's blocks get to the daemon again."""
    tried = 0

    def stored() -> bool:
        nonlocal tried
        tried += 1
        before = node.totals()["stored_blocks"]
        engine.generate(prompt(f"{seed} {tried}", BLOCK_TOKENS + 1), max_tokens=2)
        return bool(node.totals()["stored_blocks"] > before)

    eventually(stored, f"what {engine.name} computes is stored again", every_s=0.1)


def says(engine: Engine, baseline: Baseline, tokens: list[int]) -> int:
    """Check that an engine says what is said without a connector; returns the tokens it did not compute."""
    (output,) = engine.generate(tokens)
    said = baseline(tokens)
    assert (output.tokens, output.logprobs) == (said.tokens, said.logprobs)
    assert output.finish == "length"
    return output.cached


def test_a_killed_daemon_costs_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(request.node.name, COUNT)
    node.stored(p, tokens)
    node.daemon.kill()
    assert says(d, baseline, tokens) == 0
    assert says(p, baseline, prompt(f"{request.node.name} of P", COUNT)) == 0


def test_a_restarted_daemon_gives_hits_without_restarting_engines(
    node: Node, p: Engine, d: Engine, baseline: Baseline, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(request.node.name, COUNT)
    node.stored(p, tokens)
    node.daemon.kill()
    says(d, baseline, prompt(f"{request.node.name} meanwhile", 100))
    node.daemon.start()
    returns(node, d, request.node.name)
    assert says(d, baseline, tokens) == HITS  # durable: it outlives kill -9
    returns(node, p, f"{request.node.name} of P")


def test_a_stopped_daemon_costs_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(request.node.name, COUNT)
    node.stored(p, tokens)
    with node.stopped_daemon():
        assert says(d, baseline, tokens) == 0
        assert says(p, baseline, prompt(f"{request.node.name} of P", COUNT)) == 0
    returns(node, d, request.node.name)
    d.call("forget")
    assert says(d, baseline, tokens) == HITS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_daemon_that_goes_between_lookup_and_load_costs_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(request.node.name, COUNT)
    node.stored(p, tokens)
    d.call("before_next_load", pid=node.daemon.pid, number=int(number))
    try:
        says(d, baseline, tokens)
        assert d.call("loads_met") == 1
    finally:
        if number == signal.SIGKILL:
            node.daemon.kill()
        else:
            node.daemon.signal(signal.SIGCONT)


def test_blocks_lost_between_lookup_and_load_cost_a_recompute(
    node: Node, p: Engine, d: Engine, baseline: Baseline, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(request.node.name, COUNT)
    node.stored(p, tokens)
    d.call("before_next_load", socket=str(node.daemon.socket))
    says(d, baseline, tokens)
    assert d.call("loads_met") == 1
    d.call("forget")
    assert says(d, baseline, tokens) in (0, HITS)  # it is gone, unless D has stored it anew


@pytest.mark.parametrize("load", LOADS)
def test_a_corrupted_block_on_ssd_costs_its_recompute(own_node: Node, baseline: Baseline, load: str) -> None:
    tokens = prompt(f"ssd {load}", COUNT)
    p = own_node.engine("P", "kv_producer")
    d = own_node.engine("D", "kv_consumer", load=load)
    own_node.stored(p, tokens)
    own_node.leave_memory()
    own_node.corrupt_ssd()
    cached = says(d, baseline, tokens)
    assert cached < HITS
    stats = own_node.stats()
    assert stats["tiers"]["ssd"]["checksum_failures"] == 1
    assert stats["totals"]["misses"]["corrupt"] >= 1


@pytest.mark.parametrize("load", LOADS)
def test_a_corrupted_block_in_memory_costs_its_recompute_where_reads_are_verified(
    host: Host, models: Models, baseline: Baseline, short_dir: Path, load: str
) -> None:
    tokens = prompt(f"memory {load}", COUNT)
    with Node(host, models.one, short_dir, "--verify-reads") as node:
        p = node.engine("P", "kv_producer")
        d = node.engine("D", "kv_consumer", load=load)
        node.stored(p, tokens)
        node.corrupt_memory()
        says(d, baseline, tokens)
        assert node.stats()["tiers"]["cpu"]["checksum_failures"] >= 1


def test_engines_started_before_the_daemon_find_it_later(
    host: Host, models: Models, baseline: Baseline, short_dir: Path
) -> None:
    tokens = prompt("early", COUNT)
    node = Node(host, models.one, short_dir)
    p, d = node.engine("P", "kv_producer"), node.engine("D", "kv_both")
    try:
        assert says(p, baseline, tokens) == 0
        assert says(d, baseline, prompt("early too", COUNT)) == 0
    except BaseException:
        p.kill()
        d.kill()
        raise
    with node:
        returns(node, p, "P early")
        returns(node, d, "D early")
        p.call("forget")
        node.stored(p, tokens)
        assert says(d, baseline, tokens) == HITS
