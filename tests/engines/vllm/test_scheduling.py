"""What vLLM's scheduler does with requests: chunks, preemption, aborts, a connector among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.vllm_engine import Engine
from demo.vllm_server import connector
from tests.engines.vllm.node import BLOCK_BYTES, BLOCK_TOKENS, Baseline, Node, prompt

LOADS = ("sync", "async")
CHUNKED = {"max_num_batched_tokens": 96}
# Room for 40 blocks: two of the requests below fit, four do not.
TIGHT = {"kv_cache_memory_bytes": 40 * BLOCK_BYTES, "max_model_len": 1024}


@pytest.mark.parametrize("load", LOADS)
def test_a_prompt_prefilled_in_chunks_is_stored_and_loaded_whole(node: Node, baseline: Baseline, load: str) -> None:
    tokens = prompt(f"chunks {load}", 1000)
    p = node.engine("P-chunked", settings=CHUNKED)
    d = node.engine(f"D-chunked-{load}", "kv_consumer", settings=CHUNKED, load=load)
    assert node.stored(p, tokens).tokens == baseline(tokens).tokens[:1]
    (output,) = d.generate(tokens)
    assert output.tokens == baseline(tokens).tokens
    assert output.cached >= 999 // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("load", LOADS)
def test_preempted_requests_say_the_same(node: Node, baseline: Baseline, load: str) -> None:
    engine = node.engine(f"tight-{load}", settings=TIGHT, load=load)
    prompts = [prompt(f"preempted {load} {number}", 280) for number in range(4)]
    before = engine.call("metrics").get("vllm:num_preemptions", 0)
    for _ in range(2):  # the second time much of it is in the store
        outputs = engine.generate(*prompts, max_tokens=150)
        for tokens, output in zip(prompts, outputs, strict=True):
            assert output.tokens == baseline(tokens, 150).tokens
        engine.call("forget")
    assert engine.call("metrics")["vllm:num_preemptions"] > before
    assert engine.external_hits() > 0


@pytest.mark.parametrize("load", LOADS)
def test_aborted_requests_leave_nothing_behind(node: Node, baseline: Baseline, load: str) -> None:
    p = node.engine("P", "kv_producer")
    d = node.engine(f"D-{load}", load=load)
    tokens = prompt(f"aborted {load}", 800)
    node.stored(p, tokens)
    for steps in (0, 1, 2, 5):
        name = d.add(tokens, 64)
        d.call("step", count=steps)
        d.call("abort", names=[name])
        d.finish()
        d.call("forget")
    unfinished = d.add(prompt(f"aborted while it is computed {load}", 900), 4)
    d.call("step")
    d.call("abort", names=[unfinished])
    (output,) = d.generate(tokens)
    assert output.tokens == baseline(tokens).tokens
    assert output.cached >= 799 // BLOCK_TOKENS * BLOCK_TOKENS
    assert d.call("free_blocks") == d.call("total_blocks")
    sessions = node.stats()["sessions"]
    assert (sessions["leases"], sessions["reservations"]) == (0, 0)


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def test_it_works_among_other_connectors(node: Node, baseline: Baseline, short_dir: Path) -> None:
    tokens = prompt("multi", 700)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(short_dir)},
    }
    ours = connector(node.daemon.socket, "kv_both")
    both = node.host.engine("multi", node.model, transfer=multi(ours, example))
    with both:
        assert node.stored(both, tokens).tokens == baseline(tokens).tokens[:1]
        both.call("forget")
        (output,) = both.generate(tokens)
        assert output.tokens == baseline(tokens).tokens
        assert output.cached == 699 // BLOCK_TOKENS * BLOCK_TOKENS
    assert any(short_dir.iterdir()), "the other connector stored nothing"


def test_many_requests_at_once_end_with_the_right_tokens(node: Node, baseline: Baseline) -> None:
    shared = prompt("crowd", 200)
    prompts = [shared + prompt(f"crowd {number}", 5 + 37 * number) for number in range(12)]
    engine: Engine = node.engine("D-async", load="async")
    for _ in range(2):
        outputs = engine.generate(*prompts)
        assert [output.tokens for output in outputs] == [baseline(tokens).tokens for tokens in prompts]
        engine.call("forget")
