"""Blocks of one model, adapter or salt are never given to another: right tokens, and no hits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.vllm_engine import Engine, Host
from tests.engines.vllm.node import BLOCK_TOKENS, Baseline, Models, Node, agree, prompt

COUNT = 400
HITS = (COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@dataclass(frozen=True, slots=True)
class Engines:
    """All on one daemon."""

    p: Engine
    d: Engine
    other: Engine
    half: Engine
    wide: Engine
    lora_p: Engine
    lora_d: Engine


@pytest.fixture(scope="module")
def engines(node: Node, models: Models) -> Engines:
    return Engines(
        p=node.engine("P", "kv_producer"),
        d=node.engine("D", "kv_consumer"),
        other=node.engine("other", settings={"model": models.other}),
        half=node.engine("half", settings={"dtype": "bfloat16"}),
        wide=node.engine("wide", settings={"block_size": 64}),
        lora_p=node.engine("P-lora", settings=LORA),
        lora_d=node.engine("D-lora", settings=LORA),
    )


@pytest.fixture(scope="module")
def other_baseline(host: Host, models: Models) -> Iterator[Baseline]:
    with Baseline(host, models.other) as other_baseline:
        yield other_baseline


@pytest.fixture(scope="module")
def lora_baseline(host: Host, models: Models) -> Iterator[Baseline]:
    with Baseline(host, models.one, **LORA) as lora_baseline:
        yield lora_baseline


def test_two_models_never_cross(node: Node, engines: Engines, baseline: Baseline, other_baseline: Baseline) -> None:
    tokens = prompt("models", COUNT)
    node.stored(engines.p, tokens)
    said = other_baseline(tokens)
    assert said.tokens != baseline(tokens).tokens
    (output,) = engines.other.generate(tokens)
    agree(output, said)
    assert output.cached == 0
    (output,) = engines.d.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == HITS


def test_another_dtype_is_another_model(node: Node, engines: Engines) -> None:
    tokens = prompt("dtype", COUNT)
    node.stored(engines.p, tokens)
    (output,) = engines.half.generate(tokens)
    assert output.cached == 0


def test_another_block_size_shares_nothing(node: Node, engines: Engines, baseline: Baseline) -> None:
    tokens = prompt("block size", COUNT)
    node.stored(engines.p, tokens)
    (output,) = engines.wide.generate(tokens)
    agree(output, baseline(tokens))
    assert output.cached == 0


def test_two_adapters_and_the_model_itself_never_cross(
    node: Node, engines: Engines, models: Models, lora_baseline: Baseline
) -> None:
    tokens = prompt("adapters", COUNT)
    users = [None, str(models.adapter), str(models.other_adapter)]
    said = [lora_baseline(tokens, adapter=adapter) for adapter in users]
    assert len({output.tokens for output in said}) == 3
    for adapter in users:
        assert engines.lora_p.generate(tokens, adapter=adapter)[0].cached == 0
        node.settle()
    # In another order, so that the numbers that each engine gives to its adapters differ.
    for adapter, expected in reversed(list(zip(users, said, strict=True))):
        (output,) = engines.lora_d.generate(tokens, adapter=adapter)
        agree(output, expected)
        assert output.cached == HITS


def test_an_adapter_of_the_same_name_with_other_weights_is_another(
    node: Node, engines: Engines, models: Models, lora_baseline: Baseline
) -> None:
    tokens = prompt("names", COUNT)
    engines.lora_p.generate(tokens, adapter=str(models.adapter), adapter_name="same")
    node.settle()
    (output,) = engines.lora_d.generate(tokens, adapter=str(models.other_adapter), adapter_name="same")
    agree(output, lora_baseline(tokens, adapter=str(models.other_adapter)))
    assert output.cached == 0


def test_salts_are_kept_apart(node: Node, engines: Engines, baseline: Baseline) -> None:
    tokens = prompt("salts", COUNT)
    node.stored(engines.p, tokens, salt="tenant one")
    for salt, hits in ((None, 0), ("tenant two", 0), ("tenant one", HITS)):
        (output,) = engines.d.generate(tokens, salt=salt)
        agree(output, baseline(tokens))
        assert output.cached == hits
