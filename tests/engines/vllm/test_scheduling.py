"""What vLLM's scheduler does with requests: chunks, preemption, aborts, a connector among others."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_engine import Engine
from demo.vllm_server import connector
from tests.daemon_fixture import eventually
from tests.engines.vllm.node import BLOCK_BYTES, BLOCK_TOKENS, Baseline, Node, agree, prompt

LOADS = ("sync", "async")
CHUNKED = {"max_num_batched_tokens": 96}
_LONGEST_WAIT_S = 30.0  # what demo.vllm_server allows a load, and so a wait
# Room for 40 blocks: two of the requests below fit, four do not.
TIGHT = {"kv_cache_memory_bytes": 40 * BLOCK_BYTES, "max_model_len": 1024}


@dataclass(frozen=True, slots=True)
class Engines:
    """All on one daemon; a D for each way of loading."""

    p: Engine
    chunked_p: Engine
    d: dict[str, Engine]
    chunked_d: dict[str, Engine]
    tight: dict[str, Engine]
    multi: Engine
    misfit: Engine


@pytest.fixture(scope="module")
def folder(scratch: Path) -> Path:
    """Return the directory of vLLM's ExampleConnector."""
    return Path(tempfile.mkdtemp(prefix="example-", dir=scratch))


@pytest.fixture(scope="module")
def engines(node: Node, folder: Path) -> Engines:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    multi: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [connector(node.daemon.socket, "kv_both"), example]},
    }
    misfit = connector(node.daemon.socket, "kv_both") | {
        "kv_connector": "MisfitConnector",
        "kv_connector_module_path": "tests.engines.vllm.misfit",
    }
    return Engines(
        p=node.engine("P", "kv_producer"),
        chunked_p=node.engine("P-chunked", "kv_producer", settings=CHUNKED),
        d={load: node.engine(f"D-{load}", load=load) for load in LOADS},
        chunked_d={
            load: node.engine(f"D-chunked-{load}", "kv_consumer", settings=CHUNKED, load=load) for load in LOADS
        },
        tight={load: node.engine(f"tight-{load}", settings=TIGHT, load=load) for load in LOADS},
        multi=node.engine("multi", settings={"transfer": multi}),
        misfit=node.engine("misfit", settings={**TIGHT, "transfer": misfit}),
    )


@pytest.mark.parametrize("load", LOADS)
def test_a_prompt_prefilled_in_chunks_is_stored_and_loaded_whole(
    node: Node, engines: Engines, baseline: Baseline, load: str
) -> None:
    tokens = prompt(f"chunks {load}", 1000)
    node.stored(engines.chunked_p, tokens)
    (output,) = engines.chunked_d[load].generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == 999 // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("load", LOADS)
def test_preempted_requests_say_the_same(engines: Engines, baseline: Baseline, load: str) -> None:
    engine = engines.tight[load]
    prompts = [prompt(f"preempted {load} {number}", 280) for number in range(4)]
    before = engine.call("metrics").get("vllm:num_preemptions", 0)
    for _ in range(2):  # the second time much of it is in the store
        outputs = engine.generate(*prompts, max_tokens=150)
        for tokens, output in zip(prompts, outputs, strict=True):
            agree(output, baseline(tokens, 150))
        engine.call("forget")
    assert engine.call("metrics")["vllm:num_preemptions"] > before
    assert engine.external_hits() > 0


@pytest.mark.parametrize("load", LOADS)
def test_aborted_requests_leave_nothing_behind(node: Node, engines: Engines, baseline: Baseline, load: str) -> None:
    d = engines.d[load]
    tokens = prompt(f"aborted {load}", 800)
    node.stored(engines.p, tokens)
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
    agree(output, baseline(tokens))
    assert output.cached == 799 // BLOCK_TOKENS * BLOCK_TOKENS
    assert d.call("free_blocks") == d.call("total_blocks")
    sessions = node.stats()["sessions"]
    assert (sessions["leases"], sessions["reservations"]) == (0, 0)


def test_it_works_among_other_connectors(node: Node, engines: Engines, baseline: Baseline, folder: Path) -> None:
    tokens = prompt("multi", 700)
    node.stored(engines.multi, tokens)
    engines.multi.call("forget")
    (output,) = engines.multi.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == 699 // BLOCK_TOKENS * BLOCK_TOKENS
    assert any(folder.iterdir()), "the other connector stored nothing"


@pytest.mark.parametrize("load", LOADS)
def test_many_requests_at_once_end_with_the_right_tokens(engines: Engines, baseline: Baseline, load: str) -> None:
    shared = prompt(f"crowd {load}", 200)
    prompts = [shared + prompt(f"crowd {load} {number}", 5 + 37 * number) for number in range(12)]
    engine = engines.d[load]
    for _ in range(2):
        for tokens, output in zip(prompts, engine.generate(*prompts), strict=True):
            agree(output, baseline(tokens))
        engine.call("forget")


def told_to_wait() -> dict[str, Any]:
    return {"kv_transfer_params": {"kvstored": {"wait_ms": 600_000}}}


@pytest.mark.parametrize("load", LOADS)
def test_d_waits_for_a_p_that_is_at_work_and_goes_on_with_others(
    node: Node, engines: Engines, baseline: Baseline, load: str
) -> None:
    p, d = engines.chunked_p, engines.d[load]
    tokens, other = prompt(f"waits {load}", 900), prompt(f"does not wait {load}", 100)
    p.add(tokens, 1)
    p.call("step", count=3)
    waiting, running = d.add(tokens, **told_to_wait()), d.add(other, 4)
    eventually(lambda: d.call("step") == 1, "the other one has ended")
    assert node.stats()["sessions"]["leases"] == 0
    p.finish()
    outputs = d.finish()
    agree(outputs[waiting], baseline(tokens))
    agree(outputs[running], baseline(other, 4))
    assert outputs[waiting].cached == 899 // BLOCK_TOKENS * BLOCK_TOKENS


def test_d_does_not_wait_for_a_p_that_has_given_up(engines: Engines, baseline: Baseline) -> None:
    p, d = engines.chunked_p, engines.d["async"]
    numbers = itertools.count()

    def ends_early() -> bool:
        tokens = prompt(f"given up {next(numbers)}", 900)
        waited_s = d.counter("wait_seconds")
        prefilling = p.add(tokens, 1)
        p.call("step", count=3)
        waiting = d.add(tokens, **told_to_wait())
        d.call("step", count=50)
        p.call("abort", names=[prefilling])
        output = d.finish()[waiting]
        p.finish()
        agree(output, baseline(tokens))
        assert output.cached < 899 // BLOCK_TOKENS * BLOCK_TOKENS
        return d.counter("wait_seconds") - waited_s < _LONGEST_WAIT_S / 2

    # What P gives up before D's wait has reached the daemon is waited for to the end of the time.
    eventually(ends_early, "D goes on as soon as P has given up", within_s=120)


@pytest.mark.parametrize("load", LOADS)
def test_a_request_aborted_while_it_waits_leaves_nothing_behind(
    engines: Engines, baseline: Baseline, load: str
) -> None:
    d = engines.d[load]
    for steps in (0, 1, 10):
        waiting = d.add(prompt(f"aborted while it waits {load} {steps}", 500), **told_to_wait())
        d.call("step", count=steps)
        d.call("abort", names=[waiting])
        assert d.call("step") == 0
    d.finish()
    tokens = prompt(f"after those that waited {load}", 100)
    (output,) = d.generate(tokens)
    agree(output, baseline(tokens))
    d.call("forget")
    assert d.call("free_blocks") == d.call("total_blocks")


@pytest.mark.parametrize("params", [{"kvstored": {"wait_ms": "long"}}, {"kvstored": 7}, {"kvstored": {"wait_ms": [1]}}])
def test_whatever_a_request_says_of_its_transfer_the_engine_lives(
    engines: Engines, baseline: Baseline, params: dict[str, Any]
) -> None:
    d = engines.d["async"]
    tokens = prompt(f"says {params}", 100)
    (output,) = d.generate(tokens, kv_transfer_params=params)
    agree(output, baseline(tokens))


def test_an_engine_whose_worker_can_not_share_its_kv_goes_on_without(
    node: Node, engines: Engines, baseline: Baseline
) -> None:
    stored = node.totals()["stored_blocks"]
    for number in range(4):  # of each half the cache: all pages come back
        tokens = prompt(f"misfit {number}", 600)
        (output,) = engines.misfit.generate(tokens)
        agree(output, baseline(tokens))
        assert output.cached == 0
    assert node.totals()["stored_blocks"] == stored
