"""Blocks of one model, adapter or salt are never given to another: right tokens, and no hits."""

from __future__ import annotations

import pytest

from bench.vllm_engine import Engine, Host
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Models, Node, prompt

COUNT = 400
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_two_models_never_cross(node: Node, host: Host, models: Models, baseline: Baseline) -> None:
    tokens = prompt("models", COUNT)
    node.stored(node.engine("P", "kv_producer"), tokens)
    other = node.engine("other", settings={"model": models.other})
    with Baseline(host, models.other) as other_baseline:
        said = other_baseline(tokens)
    assert said.tokens != baseline(tokens).tokens
    (output,) = other.generate(tokens)
    assert (output.tokens, output.cached) == (said.tokens, 0)
    (output,) = node.engine("D", "kv_consumer").generate(tokens)
    assert (output.tokens, output.cached) == (baseline(tokens).tokens, HITS)


def test_another_dtype_is_another_model(node: Node) -> None:
    tokens = prompt("dtype", COUNT)
    node.stored(node.engine("P", "kv_producer"), tokens)
    (output,) = node.engine("half", settings={"dtype": "bfloat16"}).generate(tokens)
    assert output.cached == 0


def test_another_block_size_shares_nothing(node: Node, baseline: Baseline) -> None:
    tokens = prompt("block size", COUNT)
    node.stored(node.engine("P", "kv_producer"), tokens)
    (output,) = node.engine("wide", settings={"block_size": 64}).generate(tokens)
    assert (output.tokens, output.cached) == (baseline(tokens).tokens, 0)


@pytest.fixture(scope="module")
def lora_engines(node: Node) -> tuple[Engine, Engine]:
    return node.engine("P-lora", settings=LORA), node.engine("D-lora", settings=LORA)


def test_two_adapters_and_the_model_itself_never_cross(
    node: Node, lora_engines: tuple[Engine, Engine], host: Host, models: Models
) -> None:
    tokens = prompt("adapters", COUNT)
    p, d = lora_engines
    users = [None, str(models.adapter), str(models.other_adapter)]
    with Baseline(host, models.one, **LORA) as baseline:
        said = [baseline(tokens, adapter=adapter).tokens for adapter in users]
    assert len(set(said)) == 3
    for adapter in users:
        assert p.generate(tokens, adapter=adapter)[0].cached == 0
        node.settle()
    # In another order, so that the numbers that each engine gives to its adapters differ.
    for adapter, expected in reversed(list(zip(users, said, strict=True))):
        (output,) = d.generate(tokens, adapter=adapter)
        assert output.tokens == expected
        assert output.cached == HITS


def test_an_adapter_of_the_same_name_with_other_weights_is_another(
    node: Node, lora_engines: tuple[Engine, Engine], models: Models
) -> None:
    tokens = prompt("names", COUNT)
    p, d = lora_engines
    (first,) = p.generate(tokens, adapter=str(models.adapter), adapter_name="same")
    node.settle()
    (output,) = d.generate(tokens, adapter=str(models.other_adapter), adapter_name="same")
    assert output.cached == 0
    assert output.tokens != first.tokens


def test_salts_are_kept_apart(node: Node, baseline: Baseline) -> None:
    tokens = prompt("salts", COUNT)
    d = node.engine("D", "kv_consumer")
    node.stored(node.engine("P", "kv_producer"), tokens, salt="tenant one")
    for salt, hits in ((None, 0), ("tenant two", 0), ("tenant one", HITS)):
        (output,) = d.generate(tokens, salt=salt)
        assert (output.tokens, output.cached) == (baseline(tokens).tokens, hits)
