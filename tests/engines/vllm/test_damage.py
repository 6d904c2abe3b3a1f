"""Blocks damaged on ssd or in memory are never used, and engines that were there before the daemon find it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.vllm_engine import Engine, Host
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Models, Node, agree, prompt

COUNT = 600
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture
def verifying(host: Host, models: Models, short_dir: Path) -> Iterator[Node]:
    """Return a node whose daemon checks what it reads from memory, too."""
    with Node(host, models.one, short_dir, "--verify-reads") as node:
        yield node


def decoders(node: Node) -> list[Engine]:
    return [node.engine(f"D-{load}", "kv_consumer", load=load) for load in ("sync", "async")]


def test_a_corrupted_block_on_ssd_is_computed_again(verifying: Node, baseline: Baseline) -> None:
    tokens = prompt("damaged on ssd", COUNT)
    p, both = verifying.engine("P", "kv_producer"), decoders(verifying)
    verifying.stored(p, tokens)
    for count, d in enumerate(both, start=1):
        verifying.leave_memory()
        verifying.corrupt_ssd()
        (output,) = d.generate(tokens)
        agree(output, baseline(tokens))
        assert d.counter("load_failed_blocks") >= 1
        assert verifying.stats()["tiers"]["ssd"]["checksum_failures"] == count
        p.call("forget")
        verifying.stored(p, tokens, new_blocks=1)  # the damaged one alone is missing


def test_a_corrupted_block_in_memory_is_computed_again_where_reads_are_verified(
    verifying: Node, baseline: Baseline
) -> None:
    tokens = prompt("damaged in memory", COUNT)
    p, both = verifying.engine("P", "kv_producer"), decoders(verifying)
    verifying.stored(p, tokens)
    verifying.corrupt_memory()
    for d in both:
        (output,) = d.generate(tokens)
        agree(output, baseline(tokens))
    assert both[0].counter("load_failed_blocks") >= 1
    assert verifying.stats()["tiers"]["cpu"]["checksum_failures"] >= 1


def test_engines_started_before_the_daemon_find_it_later(
    host: Host, models: Models, baseline: Baseline, short_dir: Path
) -> None:
    tokens = prompt("early", COUNT)
    with Node(host, models.one, short_dir).engines() as node:
        p, d = node.engine("P", "kv_producer"), node.engine("D")
        for engine in (p, d):
            (output,) = engine.generate(tokens)
            agree(output, baseline(tokens))
            assert output.cached == 0
            engine.call("forget")
        with node.serving():
            node.await_stores(p, "P found it")
            node.await_stores(d, "D found it")
            node.stored(p, tokens)
            (output,) = d.generate(tokens)
            agree(output, baseline(tokens))
            assert output.cached == HITS
