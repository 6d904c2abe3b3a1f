"""Whatever becomes of the daemon, SGLang gets misses by the deadline, no error; and hits again without a restart."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_fixture import Daemon, eventually
from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach
from tests.engines.sglang.pools import Shape

SHAPE = Shape("page_first", pages=64)


def everything_misses(backend: Any, pool: Any) -> None:
    keys = pools.keys(range(3))
    at = pools.slots(pool, range(3))
    assert backend.batch_exists(keys) == 0
    assert not backend.exists(keys[0])
    assert backend.batch_get_v1(keys, at) == [False] * 3
    assert backend.batch_set_v1(keys, at) == [False] * 3
    assert backend.get(keys[0], pool.get_dummy_flat_data_page()) is None
    assert backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys]) == [None] * 3
    assert not backend.set(keys[0], pool.get_data_page(0))
    assert not backend.batch_set(keys, [pool.get_data_page(0) for _ in keys])
    assert not backend.clear()


def test_without_a_daemon_everything_is_a_miss(attach: Attach, short_dir: Path) -> None:
    pool = pools.make(SHAPE)
    everything_misses(attach(pool, socket=short_dir / "nobody"), pool)


def test_an_engine_that_starts_first_finds_the_daemon_later(attach: Attach, short_dir: Path) -> None:
    pool = pools.make(SHAPE)
    daemon = Daemon(short_dir, ssd=None)
    backend = attach(pool, socket=daemon.socket)
    everything_misses(backend, pool)
    daemon.start()
    try:
        keys, at = pools.keys(["later"]), pools.slots(pool, [0])
        pools.fill(pool, [0], keys)
        eventually(lambda: backend.batch_set_v1(keys, at) == [True], "it is found")
        assert backend.batch_get_v1(keys, pools.slots(pool, [9])) == [True]
    finally:
        daemon.stop()


def test_a_daemon_killed_in_the_middle_costs_misses_and_is_found_again(attach: Attach, daemon: Daemon) -> None:
    pool = pools.make(SHAPE)
    backend = attach(pool, socket=daemon.socket)
    begun, ended = threading.Event(), threading.Event()
    wrong: list[str] = []
    hits = [0]

    def serve() -> None:
        """As SGLang's threads do: store and load, without end."""
        number = 0
        while not ended.is_set():
            number += 1
            keys = pools.keys([("middle", number, page) for page in range(8)])
            pools.fill(pool, range(8), keys)
            backend.batch_set_v1(keys, pools.slots(pool, range(8)))
            found = backend.batch_get_v1(keys, pools.slots(pool, range(20, 28)))
            hits[0] += sum(found)
            wrong.extend(key for at, key in enumerate(keys) if found[at] and not pools.holds(pool, 20 + at, key))
            begun.set()

    def more_than(seen: int) -> bool:
        return hits[0] > seen

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert begun.wait(60)
        for _ in range(3):
            daemon.kill()
            daemon.start()
            eventually(partial(more_than, hits[0]), "hits again")
    finally:
        ended.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not wrong


def test_pages_on_ssd_hit_after_a_restart_without_one_of_the_engine(attach: Attach, daemon: Daemon) -> None:
    pool = pools.make(SHAPE)
    backend = attach(pool, socket=daemon.socket)
    keys = pools.keys(range(20))
    pools.fill(pool, range(20), keys)
    assert all(backend.batch_set_v1(keys, pools.slots(pool, range(20))))
    assert daemon.stop() == 0
    everything_misses(backend, pool)
    daemon.start()
    pools.wipe(pool)
    eventually(lambda: backend.batch_exists(keys) == 20, "all pages are found again")
    assert backend.batch_get_v1(keys, pools.slots(pool, range(40, 60))) == [True] * 20
    assert all(pools.holds(pool, 40 + page, key) for page, key in enumerate(keys))


def test_a_daemon_that_hangs_costs_no_more_than_the_deadlines(attach: Attach, daemon: Daemon) -> None:
    pool = pools.make(SHAPE)
    backend = attach(pool, socket=daemon.socket, lookup_timeout_ms=100, load_timeout_ms=300, store_timeout_ms=300)
    assert not backend.exists(pools.keys(["x"])[0])
    daemon.signal(signal.SIGSTOP)
    try:
        began_at = time.monotonic()
        everything_misses(backend, pool)
        assert time.monotonic() - began_at < 30
    finally:
        daemon.signal(signal.SIGCONT)
    keys, at = pools.keys(["back"]), pools.slots(pool, [0])
    eventually(lambda: backend.batch_set_v1(keys, at) == [True], "it is found again")


def test_calls_that_can_not_be_are_misses_too(attach: Attach) -> None:
    pool = pools.make(SHAPE)
    backend = attach(pool, salt="calls")
    keys = pools.keys(range(2))
    for slots in (pools.slots(pool, [0]), pools.slots(pool, [0, 64]), pools.slots(pool, [0, 1]) - 4):
        assert backend.batch_set_v1(keys, slots) == [False, False]
        assert backend.batch_get_v1(keys, slots) == [False, False]
    assert not backend.set(keys[0])
    assert not backend.set(keys[0], pool.get_data_page(0)[:8])
    assert backend.get(keys[0], pool.get_data_page(0)[:8].clone()) is None
    assert not backend.exists(keys[0])


def test_clear_forgets_the_pages_of_this_rank_alone(attach: Attach) -> None:
    pool = pools.make(SHAPE)
    one, other = (attach(pool, salt="clear", tp_rank=rank, tp_size=2) for rank in range(2))
    keys, at = pools.keys(["clear"]), pools.slots(pool, [0])
    assert one.batch_set_v1(keys, at) == [True]
    assert other.batch_set_v1(keys, at) == [True]
    assert one.clear()
    assert not one.exists(keys[0])
    assert other.exists(keys[0])
    assert one.batch_set_v1(keys, at) == [True], "and goes on"
    assert one.exists(keys[0])


def test_stats_tell_each_call_once(attach: Attach, sglang: str) -> None:
    pool = pools.make(SHAPE)
    if sglang == "0.5.9":
        pytest.skip("this version does not tell a backend whether metrics are on")
    backend = attach(pool, salt="stats", enable_storage_metrics=True)
    keys, at = pools.keys(range(4)), pools.slots(pool, range(4))
    backend.batch_set_v1(keys, at)
    backend.batch_get_v1(keys, at)
    stats = backend.get_stats()
    kind = importlib.import_module("sglang.srt.observability.metrics_collector").StorageMetrics
    assert isinstance(stats, kind)
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([4], [4])
    assert all(speed > 0 for speed in [*stats.prefetch_bandwidth, *stats.backup_bandwidth])
    assert backend.get_stats().prefetch_pgs == []
    assert attach(pool, salt="stats").get_stats() is None
