"""Tensor-parallel ranks as processes of their own: each stores its slice, and engines of other sizes load them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.vllm_engine import Engine
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Node, prompt

COUNT = 700
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
BLOCKS = COUNT // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Engines:
    """P and D, by how many ranks they have."""

    p: dict[int, Engine]
    d: dict[int, Engine]


@pytest.fixture(scope="module")
def engines(node: Node) -> Iterator[Engines]:
    def started(name: str, role: str) -> dict[int, Engine]:
        return {
            ranks: node.engine(f"{name}-{ranks}", role, settings={"tensor_parallel_size": ranks}) for ranks in (1, 2)
        }

    engines = Engines(started("P", "kv_producer"), started("D", "kv_consumer"))
    every = (*engines.p.values(), *engines.d.values())
    try:
        for engine in every:
            engine.await_ready()
        yield engines
        for engine in every:
            engine.stop()
    finally:
        for engine in (engines.p[2], engines.d[2]):
            engine.kill()
            remove_shared_memory(engine.log.read_text(errors="replace"))


def remove_shared_memory(log: str) -> None:
    """Remove what ranks on a CPU share, by the name that is in their log: this vLLM forgets to, at times."""
    for name in set(re.findall(r"vllm_dist_[0-9a-f]{32}", log)):
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 2), (2, 1), (1, 2)])
def test_d_loads_what_the_ranks_of_p_have_stored(
    node: Node, engines: Engines, baseline: Baseline, p_ranks: int, d_ranks: int
) -> None:
    p, d = engines.p[p_ranks], engines.d[d_ranks]
    tokens = prompt(f"ranks {p_ranks} {d_ranks}", COUNT)
    node.stored(p, tokens, new_blocks=BLOCKS * p_ranks)
    before = d.external_hits()
    (output,) = d.generate(tokens)
    # Ranks add up their parts in another order than one rank does: the logprobs differ by rounding.
    assert output.tokens == baseline(tokens).tokens
    assert output.finish == "length"
    assert (output.cached, d.external_hits() - before) == (HITS, HITS)
    assert d.counter("load_failed_blocks") == 0


def test_blocks_that_ranks_lost_are_computed(node: Node, engines: Engines, baseline: Baseline) -> None:
    tokens = prompt("ranks lost", COUNT)
    node.stored(engines.p[2], tokens, new_blocks=BLOCKS * 2)
    node.drop_all()
    for d in engines.d.values():
        (output,) = d.generate(tokens)
        assert (output.tokens, output.cached) == (baseline(tokens).tokens, 0)
