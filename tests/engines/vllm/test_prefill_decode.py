"""P computes, D loads: hits as expected, tokens and logprobs identical to an engine without a connector."""

from __future__ import annotations

import pytest

from bench.vllm_engine import Engine
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Node, agree, prompt

LENGTHS = (BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 500, 1900)
LOADS = ("sync", "async")


@pytest.fixture(scope="module")
def p(node: Node) -> Engine:
    return node.engine("P", "kv_producer")


@pytest.fixture(scope="module", params=LOADS)
def d(node: Node, request: pytest.FixtureRequest) -> Engine:
    """Return D, which loads within a step or between steps."""
    return node.engine(f"D-{request.param}", "kv_consumer", load=request.param)


@pytest.fixture(scope="module")
def both(node: Node) -> Engine:
    return node.engine("both")


def hit_tokens(count: int) -> int:
    """Return how many tokens of a prompt can be given: full blocks, and one token is left to compute."""
    return (count - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("count", LENGTHS)
def test_d_says_with_p_s_blocks_what_it_would_have_said(
    node: Node, p: Engine, d: Engine, baseline: Baseline, count: int
) -> None:
    tokens = prompt(f"{d.name} {count}", count)
    said = baseline(tokens)
    assert node.stored(p, tokens).tokens == said.tokens[:1]
    before, hits_before = d.external_hits(), sum(node.totals()["hit_blocks"].values())
    (output,) = d.generate(tokens)
    agree(output, said)
    if count % BLOCK_TOKENS:
        # The very steps that an engine takes with its own cache: not even rounding differs.
        assert output.logprobs == baseline.with_own_cache(tokens).logprobs
        assert output.cached == hit_tokens(count)
    assert d.external_hits() - before == output.cached
    assert sum(node.totals()["hit_blocks"].values()) - hits_before >= hit_tokens(count) // BLOCK_TOKENS


def test_a_prompt_of_exactly_one_block_leaves_a_token_to_compute(
    node: Node, p: Engine, d: Engine, baseline: Baseline
) -> None:
    tokens = prompt(f"one {d.name}", BLOCK_TOKENS)
    node.stored(p, tokens)
    (output,) = d.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached <= BLOCK_TOKENS


def test_blocks_come_from_ssd_once_memory_has_none(node: Node, p: Engine, d: Engine, baseline: Baseline) -> None:
    tokens = prompt(f"ssd {d.name}", 700)
    node.stored(p, tokens)
    node.leave_memory()
    before = node.totals()["hit_blocks"]["ssd"]
    (output,) = d.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == hit_tokens(700)
    assert node.totals()["hit_blocks"]["ssd"] - before >= hit_tokens(700) // BLOCK_TOKENS


def test_several_prompts_of_one_batch_share_a_prefix(node: Node, p: Engine, d: Engine, baseline: Baseline) -> None:
    shared = prompt(f"shared {d.name}", 320)
    prompts = [shared + prompt(f"{d.name} {tail}", 40 + tail) for tail in range(4)]
    for tokens in prompts:
        p.generate(tokens, max_tokens=1)
    node.settle()
    outputs = d.generate(*prompts)
    for tokens, output in zip(prompts, outputs, strict=True):
        agree(output, baseline(tokens))
        assert output.cached >= hit_tokens(len(tokens))


def test_d_loads_what_its_own_cache_lacks(node: Node, p: Engine, d: Engine, baseline: Baseline) -> None:
    tokens = prompt(f"grown {d.name}", 900)
    d.generate(tokens[:450], max_tokens=1)  # nobody stored it: computed, and now in D's own cache
    own = 450 // BLOCK_TOKENS * BLOCK_TOKENS
    node.stored(p, tokens)
    before = d.external_hits()
    (output,) = d.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == hit_tokens(900)
    assert d.external_hits() - before == hit_tokens(900) - own


def test_what_nobody_stored_is_computed(d: Engine, baseline: Baseline) -> None:
    tokens = prompt(f"unknown {d.name}", 300)
    (output,) = d.generate(tokens)
    said = baseline(tokens)
    assert (output.tokens, output.logprobs, output.cached) == (said.tokens, said.logprobs, 0)


def test_the_store_is_asked_once_for_a_request(node: Node, d: Engine) -> None:
    before = node.totals()
    d.generate(prompt(f"asked {d.name}", 500), max_tokens=40)
    after = node.totals()
    assert after["queried_blocks"] - before["queried_blocks"] == 499 // BLOCK_TOKENS


def test_nothing_is_stored_twice(node: Node, p: Engine) -> None:
    tokens = prompt("twice", 400)
    node.stored(p, tokens)
    before = node.totals()
    p.call("forget")
    p.generate(tokens, max_tokens=1)
    p.generate(prompt("next of twice", 20), max_tokens=1)
    after = node.totals()
    assert after["stored_blocks"] == before["stored_blocks"]
    assert after["bytes_in"] == before["bytes_in"]


def test_a_consumer_stores_nothing(node: Node, d: Engine) -> None:
    before = node.totals()["stored_blocks"]
    d.generate(prompt(f"consumed {d.name}", 200), max_tokens=40)
    d.generate(prompt(f"next {d.name}", 40), max_tokens=1)  # whatever the first left to be sent would be sent by now
    assert node.totals()["stored_blocks"] == before


def test_a_producer_loads_nothing(node: Node, p: Engine, baseline: Baseline) -> None:
    tokens = prompt("produced", 200)
    node.stored(p, tokens)
    p.call("forget")
    (output,) = p.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == 0


def test_an_engine_that_is_both_finds_its_own_blocks_again(node: Node, both: Engine, baseline: Baseline) -> None:
    tokens = prompt("own", 500)
    node.stored(both, tokens)
    both.call("forget")
    (output,) = both.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == hit_tokens(500)


def test_an_answer_is_part_of_the_next_question(node: Node, both: Engine, d: Engine, baseline: Baseline) -> None:
    tokens = prompt(f"dialogue {d.name}", 100)
    (answer,) = both.generate(tokens, max_tokens=100)
    node.settle()
    question = [*tokens, *answer.tokens, *prompt(f"question {d.name}", 20)]
    (output,) = d.generate(question)
    agree(output, baseline(question))
    assert output.cached >= 160  # 199 tokens have KV: the last one said was not fed back


def test_prompts_shorter_than_a_block_share_nothing(node: Node, p: Engine, d: Engine, baseline: Baseline) -> None:
    before = node.totals()
    prompts = [prompt(f"short {d.name} {count}", count) for count in (1, 5, BLOCK_TOKENS - 1)]
    for tokens in prompts:
        p.generate(tokens, max_tokens=1)
    for tokens in prompts:
        (output,) = d.generate(tokens)
        agree(output, baseline(tokens))
        assert output.cached == 0
    after = node.totals()
    assert after["stored_blocks"] == before["stored_blocks"]
    assert after["queried_blocks"] == before["queried_blocks"]  # an empty prefix is not even asked for


@pytest.mark.parametrize("store", ["sync", "layerwise"])
def test_blocks_stored_another_way_are_the_same(
    node: Node, stores: dict[str, Engine], d: Engine, baseline: Baseline, store: str
) -> None:
    tokens = prompt(f"{store} {d.name}", 700)
    node.stored(stores[store], tokens)
    (output,) = d.generate(tokens)
    agree(output, baseline(tokens))
    assert output.logprobs == baseline.with_own_cache(tokens).logprobs
    assert output.cached == hit_tokens(700)


@pytest.fixture(scope="module")
def stores(node: Node) -> dict[str, Engine]:
    return {store: node.engine(f"P-{store}", "kv_producer", store=store) for store in ("sync", "layerwise")}
