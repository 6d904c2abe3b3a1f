"""P computes, D loads: hits as expected, tokens and logprobs identical to an engine without a connector."""

from __future__ import annotations

import pytest

from bench.vllm_engine import Engine
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Node, prompt

LENGTHS = (BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 500, 1900)
LOADS = ("sync", "async")


@pytest.fixture(scope="module")
def p(node: Node) -> Engine:
    return node.engine("P", "kv_producer")


def decoder(node: Node, load: str) -> Engine:
    return node.engine(f"D-{load}", "kv_consumer", load=load)


def hit_tokens(count: int) -> int:
    """Return how many tokens of a prompt can be given: full blocks, and one token is left to compute."""
    return (count - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("count", LENGTHS)
def test_d_says_with_p_s_blocks_what_it_would_have_said(
    node: Node, p: Engine, baseline: Baseline, load: str, count: int
) -> None:
    tokens = prompt(f"{load} {count}", count)
    said = baseline(tokens)
    assert node.stored(p, tokens).tokens == said.tokens[:1]
    d = decoder(node, load)
    before, hits_before = d.external_hits(), sum(node.totals()["hit_blocks"].values())
    (output,) = d.generate(tokens)
    assert (output.tokens, output.logprobs) == (said.tokens, said.logprobs)
    full = count // BLOCK_TOKENS * BLOCK_TOKENS
    # An asynchronous load may cover the whole prompt; the last token is then computed again all the same.
    assert hit_tokens(count) <= output.cached <= (full if load == "async" else hit_tokens(count))
    assert d.external_hits() - before >= hit_tokens(count)
    assert sum(node.totals()["hit_blocks"].values()) - hits_before >= hit_tokens(count) // BLOCK_TOKENS


@pytest.mark.parametrize("load", LOADS)
def test_blocks_come_from_ssd_once_memory_has_none(node: Node, p: Engine, baseline: Baseline, load: str) -> None:
    tokens = prompt(f"ssd {load}", 700)
    node.stored(p, tokens)
    node.leave_memory()
    before = node.totals()["hit_blocks"]["ssd"]
    (output,) = decoder(node, load).generate(tokens)
    said = baseline(tokens)
    assert (output.tokens, output.logprobs) == (said.tokens, said.logprobs)
    assert output.cached == hit_tokens(700)
    assert node.totals()["hit_blocks"]["ssd"] - before >= hit_tokens(700) // BLOCK_TOKENS


@pytest.mark.parametrize("load", LOADS)
def test_several_prompts_of_one_batch_share_a_prefix(node: Node, p: Engine, baseline: Baseline, load: str) -> None:
    shared = prompt(f"shared {load}", 320)
    prompts = [shared + prompt(f"{load} {tail}", 40 + tail) for tail in range(4)]
    for tokens in prompts:
        p.generate(tokens, max_tokens=1)
    node.settle()
    outputs = decoder(node, load).generate(*prompts)
    for tokens, output in zip(prompts, outputs, strict=True):
        assert output.tokens == baseline(tokens).tokens
        assert output.cached >= hit_tokens(len(tokens))


def test_d_loads_what_its_own_cache_lacks(node: Node, p: Engine, baseline: Baseline) -> None:
    tokens = prompt("grown", 900)
    d = decoder(node, "sync")
    d.generate(tokens[:450], max_tokens=1)  # nobody stored it: computed, and now in D's own cache
    own = 450 // BLOCK_TOKENS * BLOCK_TOKENS
    node.stored(p, tokens)
    before = d.external_hits()
    (output,) = d.generate(tokens)
    assert output.tokens == baseline(tokens).tokens
    assert output.cached == hit_tokens(900)
    assert d.external_hits() - before == hit_tokens(900) - own


def test_what_nobody_stored_is_computed(node: Node, baseline: Baseline) -> None:
    tokens = prompt("unknown", 300)
    (output,) = decoder(node, "sync").generate(tokens)
    said = baseline(tokens)
    assert (output.tokens, output.logprobs, output.cached) == (said.tokens, said.logprobs, 0)


def test_nothing_is_stored_twice(node: Node, p: Engine) -> None:
    tokens = prompt("twice", 400)
    node.stored(p, tokens)
    before = node.totals()
    p.call("forget")
    p.generate(tokens, max_tokens=1)
    after = node.totals()
    assert after["stored_blocks"] == before["stored_blocks"]
    assert after["bytes_in"] == before["bytes_in"]


def test_a_consumer_stores_nothing(node: Node) -> None:
    before = node.totals()["stored_blocks"]
    d = decoder(node, "sync")
    d.generate(prompt("consumed", 200), max_tokens=40)
    d.generate(prompt("next", 40), max_tokens=1)  # whatever the first left to be sent would be sent by now
    assert node.totals()["stored_blocks"] == before


def test_a_producer_loads_nothing(node: Node, p: Engine, baseline: Baseline) -> None:
    tokens = prompt("produced", 200)
    node.stored(p, tokens)
    p.call("forget")
    (output,) = p.generate(tokens)
    assert output.cached == 0
    assert output.tokens == baseline(tokens).tokens


def test_an_engine_that_is_both_finds_its_own_blocks_again(node: Node, baseline: Baseline) -> None:
    both = node.engine("both")
    tokens = prompt("own", 500)
    node.stored(both, tokens)
    both.call("forget")
    (output,) = both.generate(tokens)
    said = baseline(tokens)
    assert (output.tokens, output.logprobs) == (said.tokens, said.logprobs)
    assert output.cached == hit_tokens(500)


def test_prompts_shorter_than_a_block_share_nothing(node: Node, p: Engine, baseline: Baseline) -> None:
    before = node.totals()
    d = decoder(node, "sync")
    prompts = [prompt(f"short {count}", count) for count in (1, 5, BLOCK_TOKENS - 1)]
    for tokens in prompts:
        p.generate(tokens, max_tokens=1)
    for tokens in prompts:
        (output,) = d.generate(tokens, max_tokens=8)
        assert output.cached == 0
        assert output.tokens == baseline(tokens, 8).tokens
    after = node.totals()
    assert after["stored_blocks"] == before["stored_blocks"]
    assert after["queried_blocks"] == before["queried_blocks"]  # an empty prefix is not even asked for


def test_a_prompt_of_exactly_one_block_leaves_a_token_to_compute(node: Node, p: Engine, baseline: Baseline) -> None:
    tokens = prompt("one", BLOCK_TOKENS)
    node.stored(p, tokens)
    for load in LOADS:
        (output,) = decoder(node, load).generate(tokens)
        assert output.tokens == baseline(tokens).tokens
