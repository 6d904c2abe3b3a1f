"""What the configuration or the pools make impossible ends the start, by SGLang's own way, with a text that helps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kvstore.errors import UsageError
from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach
from tests.engines.sglang.pools import Shape
from tests.engines.sglang.test_identity import serve

MHA = Shape("page_first")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sokcet": "/run/x"}, r"unknown settings \['sokcet'\]; known are socket, model"),
        ({"load_timeout_ms": 0}, "at least 1 ms"),
        ({"load_timeout_ms": "5s"}, "must be a number from 0 to 3.6e"),
        ({"store_timeout_ms": True}, "must be a number"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"model": 7}, '"model" of "kvstored" must be text'),
        ({"model_name": None}, 'set "model"'),
        ({"revision": None}, "the revision of 'test/model' can't be found out.*give --revision"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], text: str, attach: Attach) -> None:
    with pytest.raises(UsageError, match=text):
        attach(pools.make(MHA), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dcp_size": 2, "dcp_rank": 0, "logical_page_size": 8, "tp_size": 2, "is_mla_model": True}, "decode context"),
        ({"should_split_heads": True, "tp_lcm_size": 4}, "tp_lcm_size"),
    ],
)
def test_pages_that_are_cut_otherwise_are_refused(
    changes: dict[str, Any], text: str, attach: Attach, sglang: str
) -> None:
    if sglang == "0.5.9":
        pytest.skip("this version does not cut pages so")
    with pytest.raises(UsageError, match=text):
        attach(pools.make(MHA), **changes)


def test_bytes_of_an_unknown_kind_are_refused(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, kv_cache_dtype="auto")
    pool = pools.make(dataclasses.replace(MHA, dtype=torch.uint8))
    if hasattr(pool, "device_pool"):
        del pool.device_pool
    with pytest.raises(UsageError, match="keeps KV as uint8, and nothing says what is in it"):
        attach(pool)
    attach(pool, kv_cache_dtype="fp8_e4m3")


def test_adapters_that_the_keys_do_not_tell_apart_are_refused(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, sglang: str
) -> None:
    serve(monkeypatch, enable_lora=True)
    if sglang == "0.5.9":
        with pytest.raises(UsageError, match="same page keys for all LoRA adapters"):
            attach(pools.make(MHA))
    else:
        attach(pools.make(MHA))


def test_a_pool_that_names_only_a_part_of_its_pages_is_refused(attach: Attach) -> None:
    pool = pools.make(MHA)
    pool.size_per_token += 128  # as a pool with an index beside its KV
    with pytest.raises(UsageError, match="would not come back whole"):
        attach(pool)


def test_a_pool_without_memory_of_its_own_is_refused(attach: Attach) -> None:
    pool = pools.make(MHA)
    pool.kv_buffer = None
    with pytest.raises(UsageError, match="no memory of its own"):
        attach(pool)


def test_a_layout_that_does_not_name_its_places_is_refused(attach: Attach) -> None:
    pool = pools.make(MHA)
    pool.layout = "page_unified"
    with pytest.raises(UsageError, match="choose --hicache-mem-layout page_first"):
        attach(pool)


def test_no_daemon_is_needed_to_start(attach: Attach, short_dir: Any) -> None:
    attach(pools.make(MHA), socket=short_dir / "nobody")
