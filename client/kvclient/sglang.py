r"""SGLang's HiCache with its third level in the store: a storage backend that is loaded by name.

    python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-mem-layout page_first \
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstored",
            "module_path": "kvclient.sglang", "class_name": "KVStoredHiCache", "interface_v1": 1}'

This module and those of its name that begin with an underscore alone import SGLang and torch. SGLang's page keys are
chained SHA-256 digests; they are the block hashes. docs/sglang.md says what is called when.

Invariants
1. A page's bytes go between the host pool and the store in one copy (with interface_v1), and come back bit for bit.
2. Once the backend is attached nothing raises: whatever the daemon does, a page is a miss or is not stored, by the
   deadline. What the configuration or the pools make impossible raises before.
3. Ranks that hold the same KV share their pages and one of them writes; all others have their own.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingModuleSource]
    HiCacheStorage,
    HiCacheStorageConfig,
)

from kvclient._sglang_pages import KV, Pages
from kvclient._sglang_settings import Identity, Rank, Settings
from kvclient.client import Client, NamespaceHandle
from kvclient.results import FetchResult, StoreResult
from kvstore import wire
from kvstore.errors import KVStoreError, UsageError
from kvstore.wire import Outcome

logger = logging.getLogger(__name__)
T = TypeVar("T")

_KEY_DOMAIN = b"kvstored/sglang-key/1"
_CALLS_KEPT = 10_000  # between two looks at the metrics
_SAID_EVERY_S = 30.0
_METRICS_MODULES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")


class KVStoredHiCache(HiCacheStorage):
    """SGLang's storage backend. SGLang makes it, with its own configuration.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        Model, ranks, and the extra config of the command line.
    kwargs : dict, optional
        What SGLang's factory was given besides; nothing of it is needed.

    Raises
    ------
    UsageError
        The configuration can't be; the text names what is wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        settings = Settings.of(storage_config.extra_config)
        self._settings = settings
        self._rank = Rank.of(storage_config)
        self._identity = Identity.of(settings, storage_config.model_name)
        self._has_metrics = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._client = Client(settings.socket, name=f"sglang tp {self._rank.tp_rank} pp {self._rank.pp_rank}")
        self._pools: dict[str, tuple[Pages, NamespaceHandle]] = {}
        self._read = deque[tuple[int, float]](maxlen=_CALLS_KEPT)
        self._written = deque[tuple[int, float]](maxlen=_CALLS_KEPT)
        self._complaints = _Complaints()
        if not settings.is_zero_copy:
            logger.warning(
                'kvstored: without "interface_v1": 1 in the extra config SGLang copies each page once more on its way'
            )

    # ---- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages the keys belong to."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take a further pool, whose pages go along with those of the first."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in self._pools or self._pools[name][0].pool is not host_pool:
            self._register(name, host_pool)

    def _register(self, name: str, pool: Any) -> None:
        pages = Pages(pool, name, self._identity, self._rank, is_zero_copy=self._settings.is_zero_copy)
        self._pools[name] = pages, self._client.namespace(pages.namespace, ttl_s=self._settings.ttl_s or None)
        logger.info(
            "kvstored: pages of %s, %d bytes for %d tokens, as namespace %s at %s",
            name, pages.page_bytes, pages.page_tokens, pages.namespace.digest.hex()[:16], self._client.socket,
        )  # fmt: skip

    # ---- pages in place

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool, to the first one that is not there; returns which are read."""
        return self._guarded([False] * len(keys), lambda: self._read_in_place(KV, keys, host_indices, run=True))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages out of the host pool; returns which are there now."""
        return self._guarded([False] * len(keys), lambda: self._write_in_place(KV, keys, host_indices))

    def _read_in_place(self, name: str, keys: Sequence[str], host_indices: Any, *, run: bool) -> list[bool]:
        pages, blocks = self._pool(name)
        result = self._fetch(blocks, keys, pages.places(host_indices, len(keys)), run=run)
        return [outcome == Outcome.HIT for outcome in result.raw]

    def _write_in_place(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pages, blocks = self._pool(name)
        if not pages.is_written_here:
            return [True] * len(keys)
        return _there(self._store(blocks, keys, pages.places(host_indices, len(keys))))

    # ---- pages as tensors

    def get(self, key: str, target_location: Any | None = None, target_sizes: Any | None = None) -> Any | None:
        """Return a page's bytes, in `target_location` if one is given; None if it is not there."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[Any | None]:
        """Return pages' bytes, each in its target if there are any; None for those that are not there."""

        def read() -> list[Any | None]:
            pages, blocks = self._pool(KV)
            targets = target_locations or [pages.pool.get_dummy_flat_data_page() for _ in keys]
            result = self._fetch(blocks, keys, list(targets), run=False)
            hits = [outcome == Outcome.HIT for outcome in result.raw]
            return [target if hit else None for target, hit in zip(targets, hits, strict=True)]

        nothing: list[Any | None] = [None] * len(keys)
        return self._guarded(nothing, read)

    def set(
        self, key: str, value: Any | None = None, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> bool:
        """Store a page; returns whether it is there now."""
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store pages; returns whether all are there now."""

        def write() -> bool:
            pages, blocks = self._pool(KV)
            if not pages.is_written_here:
                return True
            if values is None:
                raise UsageError("SGLang gives no values to store: a version that this backend does not know")
            return all(_there(self._store(blocks, keys, [value.contiguous() for value in values])))

        return self._guarded(False, write)

    # ---- what is there

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are there."""

        def look() -> int:
            _, blocks = self._pool(KV)
            found = blocks.lookup(_hashes(keys), deadline_s=self._settings.lookup_timeout_s)
            self._complaints.note(found.failure)
            return found.hits

        return self._guarded(0, look)

    def clear(self) -> bool:
        """Forget all pages of this model and rank, in every tier; returns whether the daemon allowed it."""

        def forget() -> bool:
            for pages, _ in self._pools.values():
                self._client.admin(wire.DropNamespace(0, pages.namespace.digest))
            return True

        return self._guarded(False, forget)

    def get_stats(self) -> Any | None:
        """Return pages and GB/s of each call since the last look, as SGLang's StorageMetrics; None without metrics."""
        metrics = _metrics_class() if self._has_metrics else None
        if metrics is None:
            return None
        found = metrics()
        for calls, pages, bandwidths in (
            (self._read, found.prefetch_pgs, found.prefetch_bandwidth),
            (self._written, found.backup_pgs, found.backup_bandwidth),
        ):
            for _ in range(len(calls)):
                count, speed = calls.popleft()
                pages.append(count)
                bandwidths.append(speed)
        return found

    def close(self) -> None:
        """End the connections: SGLang detaches the backend."""
        self._client.close()

    # ---- further pools

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how many leading pages can be used, with what the further pools need for them."""
        types = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        count = self.batch_exists(keys, extra_info)
        pools = {KV: count} if count else {}
        usable = set(range(1, count + 1))
        for transfer in pool_transfers or ():
            policy = str(transfer.hit_policy.value)
            if not usable or policy not in ("all_pages", "trailing_pages"):
                continue  # block groups are no condition of a hit
            there = self._guarded([False] * count, partial(self._which, str(transfer.name), keys[:count]))
            window = count if policy == "all_pages" else max(1, len(transfer.keys or ()))
            ends = {end for end in range(1, count + 1) if all(there[max(0, end - window) : end])}
            if ends:
                pools[str(transfer.name)] = max(ends)
            usable &= ends
        ordered = sorted(usable)
        result = types.PoolTransferResult(ordered[-1] if ordered else 0, pools)
        result.restorable_prefix_pages = ordered
        return result

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools in place; returns which are read."""
        return self._each(transfers, lambda name, keys, at: self._read_in_place(name, keys, at, run=False))

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; returns which are there now."""
        return self._each(transfers, self._write_in_place)

    def _each(
        self, transfers: Sequence[Any], call: Callable[[str, Sequence[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        found: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys: list[str] = list(transfer.keys or ())
            found[transfer.name] = self._guarded(
                [False] * len(keys), partial(call, str(transfer.name), keys, transfer.host_indices)
            )
        return found

    def _which(self, name: str, keys: Sequence[str]) -> list[bool]:
        _, blocks = self._pool(name)
        found = blocks.lookup(_hashes(keys), run=False, deadline_s=self._settings.lookup_timeout_s)
        self._complaints.note(found.failure)
        return [outcome == Outcome.HIT for outcome in found.raw]

    # ---- the store

    def _pool(self, name: str) -> tuple[Pages, NamespaceHandle]:
        found = self._pools.get(name)
        if found is None:
            raise UsageError(f"SGLang asks for pages of {name}, a pool that it has not registered")
        return found

    def _fetch(self, blocks: NamespaceHandle, keys: Sequence[str], into: Any, *, run: bool) -> FetchResult:
        began_s = time.monotonic()
        # SGLang has asked what is there before, so the daemon has counted these pages.
        result = blocks.fetch(
            _hashes(keys), into, run=run, count=False, slices=False, deadline_s=self._settings.load_timeout_s
        )
        self._note(self._read, blocks, result.hit_count, began_s, result.failure)
        return result

    def _store(self, blocks: NamespaceHandle, keys: Sequence[str], sources: Any) -> StoreResult:
        began_s = time.monotonic()
        result = blocks.store(_hashes(keys), sources, deadline_s=self._settings.store_timeout_s)
        self._note(self._written, blocks, result.stored, began_s, result.failure)
        return result

    def _note(
        self,
        calls: deque[tuple[int, float]],
        blocks: NamespaceHandle,
        count: int,
        began_s: float,
        failure: KVStoreError | None,
    ) -> None:
        self._complaints.note(failure)
        if self._has_metrics and count:
            gib = count * blocks.namespace.block_bytes / (1 << 30)
            calls.append((count, gib / max(1e-9, time.monotonic() - began_s)))

    def _guarded(self, otherwise: T, call: Callable[[], T]) -> T:
        """Return what `call` returns; `otherwise` whatever goes wrong, since SGLang's threads end by what is raised."""
        try:
            return call()
        except KVStoreError as exc:
            self._complaints.note(exc)
        except Exception:
            logger.exception("kvstored: a fault of this backend; the pages count as misses")
        return otherwise


class _Complaints:
    """Says what failed, once in a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said_at: dict[str, float] = {}

    def note(self, failure: KVStoreError | None) -> None:
        if failure is None:
            return
        kind = type(failure).__name__
        with self._lock:
            now = time.monotonic()
            if now - self._said_at.get(kind, -_SAID_EVERY_S) < _SAID_EVERY_S:
                return
            self._said_at[kind] = now
        # The text alone: whoever keeps log records would keep the frames of the call, and with them its connection.
        logger.warning("kvstored: %s: %s; pages count as misses meanwhile", kind, str(failure))


def _hashes(keys: Sequence[str]) -> list[bytes]:
    """Return SGLang's page keys as block hashes: the digests that they spell, or a digest of one that spells none."""
    found: list[bytes] = []
    for key in keys:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        found.append(raw if len(raw) == 32 else hashlib.sha256(_KEY_DOMAIN + key.encode()).digest())
    return found


def _there(result: StoreResult) -> list[bool]:
    """Return which pages of a store are there, or on their way by another's hand."""
    fine = (Outcome.SEALED, Outcome.DURABLE, Outcome.NOT_DURABLE, Outcome.PRESENT, Outcome.BUSY)
    return [outcome in fine for outcome in result.raw]


def _metrics_class() -> Callable[[], Any] | None:
    for module in _METRICS_MODULES:
        try:
            found: Callable[[], Any] = importlib.import_module(module).StorageMetrics
        except (ImportError, AttributeError):
            continue
        return found
    return None
