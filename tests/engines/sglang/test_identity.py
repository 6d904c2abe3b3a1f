"""A page is found only by who has the same model, dtype, layout, page size and rank, and was told the same of them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.errors import UsageError
from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach
from tests.engines.sglang.pools import Shape

MHA = Shape("page_first")
MLA = Shape("page_first", heads=0, dim=16)
_salts = (f"identity-{number}" for number in itertools.count())


def serve(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Make SGLang's arguments of the server those."""
    found = SimpleNamespace(**arguments)
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        try:
            monkeypatch.setattr(importlib.import_module(module), name, lambda: found, raising=False)
        except ImportError:
            continue


def finds(attach: Attach, writer: Shape, reader: Shape, written: dict[str, Any], read: dict[str, Any]) -> bool:
    """Return whether a page of one backend is found by another; asked both ways, by both interfaces."""
    salt = next(_salts)
    source, target = pools.make(writer), pools.make(reader)
    one = attach(source, **{"salt": salt} | written)
    other = attach(target, **{"salt": salt} | read)
    (key,) = pools.keys([salt])
    pools.fill(source, [0], [key])
    assert one.batch_set_v1([key], pools.slots(source, [0])) == [True]
    assert one.exists(key)
    found: bool = other.exists(key)
    assert other.batch_get_v1([key], pools.slots(target, [0])) == [found]
    assert (other.get(key, target.get_dummy_flat_data_page()) is not None) == found
    return found


def test_two_servers_of_one_model_share_their_pages(attach: Attach) -> None:
    assert finds(attach, MHA, MHA, {}, {})
    assert finds(attach, MLA, MLA, {}, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "test/another"},
        {"model": "named otherwise"},
        {"revision": "2"},
        {"salt": "another"},
        {"tp_size": 2, "tp_rank": 1},
        {"tp_size": 2, "tp_rank": 0},
        {"attn_cp_size": 2, "attn_cp_rank": 1},
    ],
)
def test_another_identity_never_hits(changes: dict[str, Any], attach: Attach, sglang: str) -> None:
    if "attn_cp_size" in changes and sglang == "0.5.9":
        pytest.skip("this version has no context-parallel ranks")
    assert not finds(attach, MHA, MHA, {}, changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"layout": "layer_first"},
        {"layout": "page_head"},
        {"page_tokens": 8, "dim": 4},
        {"layers": 6, "dim": 4},
        {"first_layer": 3},
        {"heads": 4, "dim": 4},
        {"heads": 0, "dim": 32},
    ],
)
def test_another_geometry_of_the_same_size_never_hits(changes: dict[str, Any], attach: Attach) -> None:
    assert not finds(attach, MHA, dataclasses.replace(MHA, **changes), {}, {})


def test_ranks_of_a_model_with_heads_never_cross(attach: Attach) -> None:
    size = 4
    pool = [pools.make(MHA) for _ in range(size)]
    salt = next(_salts)
    ranks = [attach(pool[rank], salt=salt, tp_rank=rank, tp_size=size) for rank in range(size)]
    (key,) = pools.keys([salt])
    for rank in range(size):
        pools.fill(pool[rank], [0], pools.keys([(salt, rank)]))
        assert not ranks[rank].exists(key)
        assert ranks[rank].batch_set_v1([key], pools.slots(pool[rank], [0])) == [True]
    for rank in range(size):
        pools.wipe(pool[rank])
        assert ranks[rank].batch_get_v1([key], pools.slots(pool[rank], [3])) == [True]
        assert pools.holds(pool[rank], 3, pools.keys([(salt, rank)])[0])


def test_ranks_with_a_latent_share_what_the_first_writes(attach: Attach) -> None:
    pool = pools.make(MLA)
    salt = next(_salts)
    first, second = (attach(pool, salt=salt, tp_rank=rank, tp_size=2) for rank in range(2))
    mine, theirs = pools.keys([(salt, 0), (salt, 1)])
    pools.fill(pool, [0, 1], [mine, theirs])
    assert second.batch_set_v1([theirs], pools.slots(pool, [1])) == [True], "nothing is left for it to write"
    assert second.set(theirs, pools.content(pool, theirs))
    assert not first.exists(theirs)
    assert first.batch_set_v1([mine], pools.slots(pool, [0])) == [True]
    assert second.batch_get_v1([mine], pools.slots(pool, [5])) == [True]
    assert pools.holds(pool, 5, mine)


@pytest.mark.parametrize("name", ["quantization", "json_model_override_args", "quantization_param_path", "dtype"])
def test_what_the_server_was_told_of_the_weights_keeps_pages_apart(
    name: str, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.make(MHA)
    salt = next(_salts)
    (key,) = pools.keys([salt])
    serve(monkeypatch, **{name: "one"})
    assert attach(pool, salt=salt).set(key, pools.content(pool, key))
    assert attach(pool, salt=salt).exists(key)
    serve(monkeypatch, **{name: "another"})
    assert not attach(pool, salt=salt).exists(key)


def test_scales_of_other_content_at_the_same_path_keep_pages_apart(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = pools.make(MHA)
    salt = next(_salts)
    (key,) = pools.keys([salt])
    scales = tmp_path / "scales.json"
    scales.write_text("1.0")
    serve(monkeypatch, quantization_param_path=str(scales))
    assert attach(pool, salt=salt).set(key, pools.content(pool, key))
    assert attach(pool, salt=salt).exists(key)
    scales.write_text("2.0")
    assert not attach(pool, salt=salt).exists(key)


@pytest.mark.parametrize("form", ["reference", "named", "path", "object", "mapping"])
def test_an_adapter_that_is_trained_anew_in_its_directory_keeps_pages_apart(
    form: str, attach: Attach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sglang: str
) -> None:
    if sglang == "0.5.9":
        pytest.skip("this version is refused with adapters")
    pool = pools.make(MHA)
    salt = next(_salts)
    (key,) = pools.keys([salt])
    weights, path = tmp_path / "adapter_model.safetensors", str(tmp_path)
    weights.write_bytes(b"one")
    given: dict[str, Any] = {
        "reference": [SimpleNamespace(lora_name="a", lora_path=path)],
        "named": [f"a={path}"],
        "path": [path],
        "object": [{"lora_name": "a", "lora_path": path}],
        "mapping": {"a": path},
    }
    serve(monkeypatch, enable_lora=True, lora_paths=given[form])
    assert attach(pool, salt=salt).set(key, pools.content(pool, key))
    assert attach(pool, salt=salt).exists(key)
    weights.write_bytes(b"another")
    assert not attach(pool, salt=salt).exists(key)


def test_an_adapter_whose_weights_nothing_names_is_refused(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, sglang: str
) -> None:
    if sglang == "0.5.9":
        pytest.skip("this version is refused with adapters")
    serve(monkeypatch, enable_lora=True, lora_paths=["nobody/has-this-adapter"])
    with pytest.raises(UsageError, match="nothing says which weights the adapter"):
        attach(pools.make(MHA))


def test_both_kinds_of_fp8_are_kept_apart_where_sglang_stores_bytes(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.make(dataclasses.replace(MHA, dtype=torch.uint8))
    salt = next(_salts)
    (key,) = pools.keys([salt])
    serve(monkeypatch, kv_cache_dtype="fp8_e4m3")
    assert attach(pool, salt=salt).set(key, pools.content(pool, key))
    assert attach(pool, salt=salt).exists(key)
    serve(monkeypatch, kv_cache_dtype="fp8_e5m2")
    assert not attach(pool, salt=salt).exists(key)


def test_weights_that_are_replaced_in_their_directory_are_others(
    attach: Attach, short_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (short_dir / "config.json").write_text("{}")
    weights = short_dir / "model.safetensors"
    weights.write_bytes(b"1" * 100)
    pool = pools.make(MHA)
    salt = next(_salts)
    (key,) = pools.keys([salt])
    told: dict[str, Any] = {"salt": salt, "model_name": str(short_dir), "revision": None}
    assert attach(pool, **told).set(key, pools.content(pool, key))
    assert attach(pool, **told).exists(key)
    weights.write_bytes(b"2" * 101)
    assert not attach(pool, **told).exists(key)
