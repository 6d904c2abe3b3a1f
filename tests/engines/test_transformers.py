"""KV of real (tiny) transformers models through a real daemon: the tokens stay the same, or the model is refused."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvclient.transformers
from kvclient import Client
from kvclient.transformers import LoadedPrefix, PrefixCache
from kvstore.errors import UsageError
from tests.daemon_fixture import Daemon, running
from tests.engines import models

SIZE = 16  # tokens in a block


@pytest.fixture(scope="module")
def daemon(private_temp_dir: Path) -> Iterator[Daemon]:
    directory = Path(tempfile.mkdtemp(prefix="d-", dir=private_temp_dir))
    with running(directory, cpu="64MiB", ssd=None) as daemon:
        yield daemon
    shutil.rmtree(directory)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket, strict=True) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> Any:
    return models.qwen2()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return as_list(torch.randint(3, models.VOCAB, (tokens,), generator=drawn))


def salted(client: Client, model: Any, salt: str, **settings: Any) -> PrefixCache:
    """Return the prefixes of a test of its own: what others stored is not seen."""
    return PrefixCache(client, model, salt=salt.encode(), block_tokens=SIZE, **settings)


def alone(model: Any, tokens: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([tokens])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return as_list(output[0, len(tokens) :])


def with_store(prefixes: PrefixCache, tokens: list[int], new_tokens: int) -> list[int]:
    return as_list(prefixes.generate(tokens, max_new_tokens=new_tokens, do_sample=False)[0, len(tokens) :])


def as_list(tokens: Any) -> list[int]:
    return list(map(int, tokens))


def layers_of(loaded: LoadedPrefix) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers: Any = loaded.cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def computed(model: Any, tokens: list[int]) -> Any:
    """Return the cache that a model fills from a prompt."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=True).cache


KINDS = (models.qwen2, models.llama, models.gpt2, models.deepseek)


@pytest.mark.parametrize("make", KINDS)
def test_the_tokens_are_those_of_the_model_alone(client: Client, make: Callable[[], Any], daemon: Daemon) -> None:
    model, tokens = make(), prompt(6 * SIZE + 5)
    expected = alone(model, tokens, 12)
    prefill = salted(client, model, "same tokens")
    assert prefill.load(tokens).tokens == 0
    assert with_store(prefill, tokens, 12) == expected
    with Client(daemon.socket, strict=True) as other:
        decode = salted(other, model, "same tokens")
        assert decode.load(tokens).tokens == 6 * SIZE
        assert with_store(decode, tokens, 12) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loaded_kv_is_the_saved_one_bit_by_bit(client: Client, dtype: torch.dtype) -> None:
    model, tokens = models.qwen2(dtype=dtype), prompt(5 * SIZE + 1)
    prefixes = salted(client, model, "bits")
    cache = computed(model, tokens)
    assert prefixes.save(tokens, cache).stored == 5
    loaded = prefixes.load(tokens)
    assert loaded.tokens == loaded.cache.get_seq_length() == 5 * SIZE
    for layer, (keys, values) in zip(cache.layers, layers_of(loaded), strict=True):
        assert torch.equal(layer.keys[:, :, : 5 * SIZE].view(torch.uint8), keys.view(torch.uint8))
        assert torch.equal(layer.values[:, :, : 5 * SIZE].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize(
    ("tokens", "stored", "loaded"),
    [(0, 0, 0), (1, 0, 0), (SIZE - 1, 0, 0), (SIZE, 1, 0), (SIZE + 1, 1, 1), (3 * SIZE, 3, 2)],
)
def test_only_full_blocks_are_stored_and_a_token_is_left_to_compute(
    client: Client, model: Any, tokens: int, stored: int, loaded: int
) -> None:
    prefixes, ids = salted(client, model, f"full blocks {tokens}"), prompt(tokens)
    saved = prefixes.save(ids, computed(model, ids or [3]))
    assert (len(saved), saved.stored) == (stored, stored)
    assert prefixes.load(ids).tokens == loaded * SIZE


def test_a_prompt_shares_what_it_has_in_common_with_another(client: Client, model: Any) -> None:
    prefixes, first = salted(client, model, "common"), prompt(6 * SIZE)
    prefixes.save(first, computed(model, first))
    second = first[: 3 * SIZE + 7] + prompt(40, seed=1)
    assert prefixes.load(second).tokens == 3 * SIZE
    assert with_store(prefixes, second, 8) == alone(model, second, 8)


def test_blocks_behind_a_missing_one_are_of_no_use(client: Client, model: Any) -> None:
    prefixes, tokens = salted(client, model, "gap"), prompt(6 * SIZE + 1)
    prefixes.save(tokens, computed(model, tokens))
    blocks = client.namespace(prefixes.namespace)
    assert blocks.drop(prefixes.hashes(tokens)[2:3]).done == 1
    assert prefixes.load(tokens).tokens == 2 * SIZE
    assert with_store(prefixes, tokens, 8) == alone(model, tokens, 8)


def test_what_was_generated_is_stored_for_the_next_turn(client: Client, model: Any) -> None:
    prefixes, tokens = salted(client, model, "turns"), prompt(2 * SIZE)
    answer = with_store(prefixes, tokens, 2 * SIZE)
    # The last token generated is in no cache: its KV is computed with the token after it.
    assert prefixes.load([*tokens, *answer, 5]).tokens == 3 * SIZE


def test_what_is_stored_already_is_not_cut_out_again(
    client: Client, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes, tokens = salted(client, model, "again"), prompt(40 * SIZE)
    cache = computed(model, tokens)
    assert prefixes.save(tokens[: 38 * SIZE], cache).stored == 38
    gathered: list[range] = []
    gather = kvclient.transformers.Staging.gather

    def noting(staging: Any, tensors: Any, first: int, at: range) -> None:
        gathered.append(at)
        gather(staging, tensors, first, at)

    monkeypatch.setattr(kvclient.transformers.Staging, "gather", noting)
    saved = prefixes.save(tokens, cache)
    assert (saved.stored, saved.present) == (2, 38)
    assert gathered == [range(32, 40)]


def test_a_long_prompt_goes_in_windows(client: Client, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = salted(client, model, "windows").namespace.block_bytes
    monkeypatch.setattr(kvclient.transformers, "STAGING_BYTES", 4 * block_bytes)
    prefixes, tokens = salted(client, model, "windows"), prompt(10 * SIZE + 3)
    cache = computed(model, tokens)
    saved = prefixes.save(tokens, cache)
    assert (len(saved), saved.stored) == (10, 10)
    for dropped, expected in ((9, 9), (6, 6), (4, 4), (3, 3), (0, 0)):
        client.namespace(prefixes.namespace).drop(prefixes.hashes(tokens)[dropped : dropped + 1])
        loaded = prefixes.load(tokens)
        assert loaded.tokens == expected * SIZE
        for layer, (keys, values) in zip(cache.layers, layers_of(loaded), strict=True):
            if expected:
                assert torch.equal(layer.keys[:, :, : loaded.tokens], keys)
                assert torch.equal(layer.values[:, :, : loaded.tokens], values)


def test_other_weights_types_settings_and_salts_share_nothing(client: Client, model: Any) -> None:
    def digest(model: Any, **settings: Any) -> bytes:
        return PrefixCache(client, model, **settings).namespace.digest

    edited = models.qwen2()
    with torch.no_grad():
        edited.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    others = [
        digest(model),
        digest(models.qwen2(seed=1)),
        digest(edited),
        digest(models.qwen2(dtype=torch.bfloat16)),
        digest(models.qwen2(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})),
        digest(model, block_tokens=32),
        digest(model, adapter="legal-v2"),
        digest(model, salt=b"tenant"),
        digest(model, revision="a commit"),
    ]
    assert len(set(others)) == len(others)
    assert digest(models.qwen2()) == digest(model)


def test_a_waiting_load_gets_the_blocks_as_they_are_saved(client: Client, model: Any, daemon: Daemon) -> None:
    tokens = prompt(4 * SIZE + 2)
    expected = alone(model, tokens, 8)
    cache = computed(model, tokens)
    found: list[LoadedPrefix] = []
    with Client(daemon.socket, strict=True) as other:
        decode = salted(other, model, "waiting")
        waiting = threading.Thread(target=lambda: found.append(decode.load(tokens, wait_s=60.0)))
        waiting.start()
        salted(client, model, "waiting").save(tokens, cache)
        waiting.join()
        assert found[0].tokens == 4 * SIZE
        assert with_store(decode, tokens, 8) == expected


def test_threads_get_the_kv_of_their_own_prompts(client: Client, model: Any) -> None:
    prefixes = salted(client, model, "threads")
    prompts = [prompt(8 * SIZE + 1, seed) for seed in range(4)]
    caches = [computed(model, tokens) for tokens in prompts]
    wrong: list[str] = []

    def exchange(number: int) -> None:
        for _ in range(5):
            prefixes.save(prompts[number], caches[number])
            loaded = prefixes.load(prompts[number])
            for layer, (keys, values) in zip(caches[number].layers, layers_of(loaded), strict=True):
                same = torch.equal(layer.keys[:, :, : 8 * SIZE], keys) and torch.equal(
                    layer.values[:, :, : 8 * SIZE], values
                )
                if not same:
                    wrong.append(f"thread {number}")

    threads = [threading.Thread(target=exchange, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_daemon_the_model_computes_everything_itself(short_dir: Path, model: Any) -> None:
    tokens = prompt(3 * SIZE + 1)
    with Client(short_dir / "nobody") as client:
        prefixes = PrefixCache(client, model)
        loaded = prefixes.load(tokens)
        assert loaded.tokens == 0
        assert loaded.failure is not None
        saved = prefixes.save(tokens, computed(model, tokens))
        assert (saved.failed, saved.stored) == (3, 0)
        assert with_store(prefixes, tokens, 8) == alone(model, tokens, 8)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (models.mistral_with_a_window, "SlidingWindow"),
        (models.gemma3, "SlidingWindow"),
        (models.gemma3_bidirectional, "later tokens"),
        (models.mamba, "LinearAttention"),
        (models.t5, "encoder"),
        (lambda: models.with_rope("dynamic"), "prompt's length"),
        (lambda: models.with_rope("longrope"), "prompt's length"),
        (models.in_training, "eval"),
    ],
)
def test_a_model_whose_blocks_would_be_wrong_for_others_is_refused(
    client: Client, make: Callable[[], Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        PrefixCache(client, make())


def test_an_adapter_that_is_loaded_must_be_named(client: Client) -> None:
    model = models.qwen2()
    model.peft_config = {"default": "what a library of adapters leaves here"}
    with pytest.raises(UsageError, match="adapter"):
        PrefixCache(client, model)
    assert PrefixCache(client, model, adapter="legal-v2").namespace.adapter == "legal-v2"


def test_weights_that_are_not_in_memory_must_be_named(client: Client) -> None:
    model = models.qwen2()
    model.lm_head.register_parameter("offloaded", torch.nn.Parameter(torch.empty(4, 4, device="meta")))
    with pytest.raises(UsageError, match="revision"):
        PrefixCache(client, model)
    assert PrefixCache(client, model, revision="a commit").namespace.revision.startswith("a commit/")


def test_more_than_one_prompt_padding_and_images_are_refused(client: Client) -> None:
    model = models.qwen2()
    model.config.image_token_id = 200
    prefixes = salted(client, model, "refused")
    with pytest.raises(UsageError, match="one prompt"):
        prefixes.load(torch.tensor([[3, 4], [5, 6]]))
    with pytest.raises(UsageError, match="images"):
        prefixes.load([3, 200, 200, 4])
    with pytest.raises(UsageError, match="padding"):
        prefixes.generate([0, 3, 4], attention_mask=torch.tensor([[0, 1, 1]]), max_new_tokens=1)
    with pytest.raises(UsageError, match="num_beams"):
        prefixes.generate([3, 4], num_beams=2, max_new_tokens=1)
    with pytest.raises(UsageError, match="cache"):
        prefixes.generate([3, 4], cache=None, max_new_tokens=1)


def test_a_cache_of_another_model_or_of_several_prompts_is_refused(client: Client, model: Any) -> None:
    prefixes, tokens = salted(client, model, "another's"), prompt(SIZE)
    with pytest.raises(UsageError, match="layer"):
        prefixes.save(tokens, computed(models.qwen2(num_hidden_layers=2), tokens))
    with pytest.raises(UsageError, match="bfloat16"):
        prefixes.save(tokens, computed(models.qwen2(dtype=torch.bfloat16), tokens))
    with torch.inference_mode():
        both = model(torch.tensor([tokens, tokens]), use_cache=True).cache
    with pytest.raises(UsageError, match="one prompt"):
        prefixes.save(tokens, both)


def test_rounding_in_two_steps_is_far_from_changing_a_token(client: Client, model: Any) -> None:
    tokens = prompt(30 * SIZE + 9)
    prefixes = salted(client, model, "rounding")
    with torch.inference_mode():
        whole = model(torch.tensor([tokens]), use_cache=True)
        prefixes.save(tokens, whole.cache)
        loaded = prefixes.load(tokens)
        rest = model(torch.tensor([tokens[loaded.tokens :]]), cache=loaded.cache, use_cache=True)
    best, second = whole.logits[0, -1].topk(2).values
    assert (rest.logits[0, -1] - whole.logits[0, -1]).abs().max() < (best - second) / 20
