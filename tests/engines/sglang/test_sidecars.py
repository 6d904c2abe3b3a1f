"""Pools that go along with KV (an index, a draft model's KV, a sliding window, a state): the interface v2."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach
from tests.engines.sglang.pools import Shape

KV = Shape("page_first", pages=16)
INDEX = Shape("page_first", heads=0, dim=16, pages=16)
_salts = (f"sidecars-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def types(sglang: str) -> Any:
    module = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    if not hasattr(module, "PoolTransfer"):
        pytest.skip(f"SGLang {sglang} has no pools beside KV")
    return module


class Side:
    """A backend with KV and one pool beside it."""

    def __init__(self, attach: Attach, types: Any, name: str, **changes: Any) -> None:
        self.types = types
        self.name = types.PoolName(name)
        self.kv, self.side = pools.make(KV), pools.make(INDEX)
        self.backend = attach(self.kv, **changes)
        self.backend.register_mem_host_pool_v2(self.kv, types.PoolName.KV)
        self.backend.register_mem_host_pool_v2(self.side, self.name)
        self.backend.on_host_pools_registered()

    def transfer(self, keys: list[str], pages: list[int], policy: str = "all_pages") -> Any:
        return self.types.PoolTransfer(
            name=self.name,
            host_indices=pools.slots(self.side, pages),
            keys=keys,
            hit_policy=self.types.PoolHitPolicy(policy),
        )

    def store(self, keys: list[str], kv: range, side: range) -> None:
        """Store KV and the pool beside it, each for some of the keys."""
        pools.fill(self.kv, kv, [keys[at] for at in kv])
        pools.fill(self.side, side, [keys[at] for at in side])
        assert all(self.backend.batch_set_v1([keys[at] for at in kv], pools.slots(self.kv, kv)))
        wrote = self.backend.batch_set_v2([self.transfer([keys[at] for at in side], list(side))])
        assert wrote == {self.name: [True] * len(side)}


def test_pages_of_a_further_pool_come_back(attach: Attach, types: Any) -> None:
    side = Side(attach, types, "indexer", salt=next(_salts))
    keys = pools.keys(range(6))
    side.store(keys, range(6), range(6))
    pools.wipe(side.side)
    read = side.backend.batch_get_v2([side.transfer(keys, [8, 9, 10, 11, 12, 13])])
    assert read == {side.name: [True] * 6}
    assert all(pools.holds(side.side, 8 + at, key) for at, key in enumerate(keys))


def test_a_page_of_one_pool_is_none_of_another(attach: Attach, types: Any) -> None:
    salt = next(_salts)
    one, other = Side(attach, types, "indexer", salt=salt), Side(attach, types, "draft_indexer", salt=salt)
    keys = pools.keys(range(2))
    one.store(keys, range(2), range(2))
    assert other.backend.batch_exists(keys) == 2, "KV is shared"
    assert other.backend.batch_get_v2([other.transfer(keys, [0, 1])]) == {other.name: [False, False]}


def test_with_all_pages_a_hit_ends_where_the_further_pool_does(attach: Attach, types: Any) -> None:
    side = Side(attach, types, "indexer", salt=next(_salts))
    keys = pools.keys(range(8))
    side.store(keys, range(6), range(4))
    found = side.backend.batch_exists_v2(keys, [side.transfer([], [])])
    assert found.kv_hit_pages == 4
    assert found.extra_pool_hit_pages == {"kv": 6, "indexer": 4}
    assert found.restorable_prefix_pages == [1, 2, 3, 4]


def test_with_trailing_pages_a_hit_ends_where_its_window_is_there(attach: Attach, types: Any) -> None:
    side = Side(attach, types, "swa", salt=next(_salts))
    keys = pools.keys(range(8))
    side.store(keys, range(8), range(3, 6))
    found = side.backend.batch_exists_v2(keys, [side.transfer(keys[:2], [0, 1], "trailing_pages")])
    assert found.restorable_prefix_pages == [5, 6]
    assert found.kv_hit_pages == 6
    assert found.extra_pool_hit_pages == {"kv": 8, "swa": 6}


def test_without_further_pools_a_hit_is_that_of_kv(attach: Attach, types: Any) -> None:
    side = Side(attach, types, "swa", salt=next(_salts))
    keys = pools.keys(range(8))
    side.store(keys, range(5), range(0))
    assert side.backend.batch_exists_v2(keys, None).kv_hit_pages == 5
    assert side.backend.batch_exists_v2(keys, [side.transfer(keys[:1], [0], "trailing_pages")]).kv_hit_pages == 0


@pytest.mark.parametrize("policy", ["all_pages", "trailing_pages"])
def test_hits_are_those_of_sglang_s_own_backend(
    policy: str, attach: Attach, types: Any, short_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(short_dir))
    side = Side(attach, types, "swa", salt=next(_salts))
    config = types.HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="m",
    )  # fmt: skip
    theirs = types.HiCacheFile(config, str(short_dir))
    for pool, name in ((side.kv, types.PoolName.KV), (side.side, side.name)):
        theirs.register_mem_host_pool_v2(pool, name)
    keys = pools.keys(range(10))
    there = {types.PoolName.KV: range(9), side.name: [0, 1, 2, 4, 5, 7, 8, 9]}
    for name, pages in there.items():
        pool = side.kv if name == types.PoolName.KV else side.side
        for page in pages:
            at, key = pools.slots(pool, [page]), [keys[page]]
            transfer = types.PoolTransfer(name=name, host_indices=at, keys=key)
            assert theirs.batch_set_v2([transfer])[name] == [True]
            if name == types.PoolName.KV:
                assert side.backend.batch_set_v1(key, at) == [True]
            else:
                assert side.backend.batch_set_v2([transfer])[name] == [True]
    for window in range(1, 4):
        asked = [side.transfer(keys[:window], list(range(window)), policy)]
        assert side.backend.batch_exists_v2(keys, asked) == theirs.batch_exists_v2(keys, asked)


def test_state_is_each_rank_s_own_where_kv_is_shared(attach: Attach, types: Any) -> None:
    salt = next(_salts)
    keys = pools.keys(range(1))
    for name, shared in (("mamba", False), ("indexer", True)):
        ranks = [
            Side(attach, types, name, salt=salt, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)
        ]
        pools.fill(ranks[0].side, [0], keys)
        assert ranks[0].backend.batch_set_v2([ranks[0].transfer(keys, [0])]) == {ranks[0].name: [True]}
        assert ranks[1].backend.batch_get_v2([ranks[1].transfer(keys, [0])]) == {ranks[1].name: [shared]}


def test_a_pool_that_was_not_registered_has_no_pages(attach: Attach, types: Any) -> None:
    backend = attach(pools.make(KV), salt=next(_salts))
    keys = pools.keys(range(2))
    transfer = types.PoolTransfer(name=types.PoolName.SWA, host_indices=pools.slots(pools.make(KV), [0, 1]), keys=keys)
    assert backend.batch_get_v2([transfer]) == {types.PoolName.SWA: [False, False]}
    assert backend.batch_set_v2([transfer]) == {types.PoolName.SWA: [False, False]}
    assert backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
