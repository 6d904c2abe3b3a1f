"""SGLang's own cache controller drives the backend: what it backs up it finds again and loads, in batches of its own.

The controller's transfers are run by hand, on the test's thread: its threads and its constructor want a GPU's streams.
Its page hash, compiled where it runs, is computed in Python: the same chained SHA-256 over tokens of four bytes.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from queue import Queue
from typing import Any

import pytest

from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach
from tests.engines.sglang.pools import Shape

_MODULE = "sglang.srt.managers.cache_controller"
SHAPE = Shape("page_first", pages=300, layers=2, dim=4)
BATCH = 128  # SGLang's own; 270 pages are three


def page_hash(tokens: Sequence[int], before: str | None = None) -> str:
    digest = hashlib.sha256(bytes.fromhex(before) if before else b"")
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
    return digest.hexdigest()


def chain(tokens: Sequence[int], before: str | None = None, page_size: int = SHAPE.page_tokens) -> list[str]:
    hashes: list[str] = []
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        before = page_hash(tokens[start : start + page_size], before)
        hashes.append(before)
    return hashes


def controller(backend: Any, pool: Any, monkeypatch: pytest.MonkeyPatch, *, zero_copy: bool) -> Any:
    """Return SGLang's controller with what its transfers use."""
    module = importlib.import_module(_MODULE)
    monkeypatch.setattr(module, "get_storage_hash_str", chain, raising=False)
    made = object.__new__(module.HiCacheController)
    made.storage_backend = backend
    made.mem_pool_host = made.storage_host_pool = pool
    made.page_size = pool.page_size
    made.storage_batch_size = BATCH
    made.get_hash_str = page_hash
    made.prefetch_sync_queue = Queue()
    made.page_get_func = made._page_get_zero_copy if zero_copy else made._generic_page_get
    made.page_set_func = made._page_set_zero_copy if zero_copy else made._generic_page_set
    return made


def backup(made: Any, tokens: Sequence[int], pages: Sequence[int]) -> int:
    """Return how many tokens SGLang counts as backed up."""
    operation = importlib.import_module(_MODULE).StorageOperation(
        pools.slots(made.mem_pool_host, pages), list(tokens), hash_value=chain(tokens)
    )
    made._page_backup(operation)
    return int(operation.completed_tokens)


def _host_indices(kind: Any) -> list[str]:
    """Return the name of the argument that only older versions have."""
    return [name for name in inspect.signature(kind).parameters if name == "host_indices"]


def prefetch(made: Any, tokens: Sequence[int], pages: Sequence[int]) -> tuple[int, int]:
    """Return the tokens that SGLang finds in the storage, and those that it has loaded."""
    kind = importlib.import_module(_MODULE).PrefetchOperation
    operation = kind(request_id="request", token_ids=list(tokens), **dict.fromkeys(_host_indices(kind)))
    operation.host_indices = pools.slots(made.mem_pool_host, pages)
    hashes, found = made._storage_hit_query(operation)
    operation.hash_value = hashes
    loaded = made._page_transfer(operation)
    return found, operation.completed_tokens if loaded is None else loaded * made.page_size


@pytest.mark.parametrize("zero_copy", [True, False])
def test_what_the_controller_backs_up_it_finds_and_loads(
    zero_copy: bool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.make(SHAPE)
    backend = attach(pool, salt=f"controller {zero_copy}", interface_v1=int(zero_copy))
    made = controller(backend, pool, monkeypatch, zero_copy=zero_copy)
    tokens = list(range(270 * SHAPE.page_tokens))
    hashes = chain(tokens)
    pools.fill(pool, range(270), hashes)
    assert backup(made, tokens, range(270)) == len(tokens)
    pools.wipe(pool)
    longer = [*tokens, 7, 7, 7, 7]
    places = [*range(20, 290), 5]
    assert prefetch(made, longer, places) == (len(tokens), len(tokens))
    assert all(pools.holds(pool, place, key) for place, key in zip(places, hashes, strict=False))


def test_another_prompt_finds_the_pages_of_its_own_prefix(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.make(SHAPE)
    made = controller(attach(pool, salt="prefix"), pool, monkeypatch, zero_copy=True)
    tokens = list(range(5 * SHAPE.page_tokens))
    pools.fill(pool, range(5), chain(tokens))
    backup(made, tokens, range(5))
    other = [*tokens[: 3 * SHAPE.page_tokens], *(token + 1000 for token in tokens[3 * SHAPE.page_tokens :])]
    assert prefetch(made, other, range(100, 105)) == (3 * SHAPE.page_tokens, 3 * SHAPE.page_tokens)


def test_a_store_that_is_gone_ends_no_transfer_of_the_controller(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, short_dir: Any
) -> None:
    pool = pools.make(SHAPE)
    made = controller(attach(pool, socket=short_dir / "nobody"), pool, monkeypatch, zero_copy=True)
    tokens = list(range(5 * SHAPE.page_tokens))
    assert backup(made, tokens, range(5)) == 0
    assert prefetch(made, tokens, range(5)) == (0, 0)
