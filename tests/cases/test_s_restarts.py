"""Cases S: what was durable is there after a restart. S01 the index is rebuilt, S04 it never gets too small."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)


def test_s01_every_block_hits_exactly_after_a_clean_restart(short_dir: Path) -> None:
    """Even what was sealed a moment before the end: the drain writes it."""
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert set(client.put(ns, keys(100))) == {Outcome.SEALED}
        assert daemon.stop() == 0
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert set(client.tiers_of(ns, keys(100))) == {"ssd"}
            assert client.tier("ssd")["durable_blocks"] == 100
            assert client.get(ns, keys(100)) == [Outcome.HIT] * 100
            client.check(verify=True)


@pytest.mark.parametrize("policy", ["through", "second-touch", "back"])
def test_s01_a_clean_end_writes_what_only_memory_held_under_every_policy(short_dir: Path, policy: str) -> None:
    with running(short_dir, "--write-policy", policy) as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(50))
        daemon.stop()
        daemon.start()
        with daemon.client() as client:
            assert client.get(client.open(SPACE), keys(50)) == [Outcome.HIT] * 50


def test_s01_kill_in_the_middle_of_puts_keeps_all_that_was_told_durable(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        told: list[bytes] = []
        begun: list[bytes] = []

        def store() -> None:
            try:
                with daemon.client() as client:
                    ns = client.open(SPACE)
                    for number in range(10_000):
                        hashes = keys(16, f"s01 {number}")
                        begun.extend(hashes)
                        outcomes = client.put(ns, hashes, durable=True)
                        told.extend(h for h, o in zip(hashes, outcomes, strict=True) if o == Outcome.DURABLE)
            except (OSError, KVStoreError):
                pass

        for _ in range(3):
            thread = threading.Thread(target=store)
            known = len(told)
            thread.start()
            eventually(lambda known=known: len(told) > known + 100, "some are durable")  # type: ignore[misc]
            daemon.kill()
            thread.join()
            daemon.start()
            with daemon.client() as client:
                ns = client.open(SPACE)
                assert client.get(ns, told) == [Outcome.HIT] * len(told)
                assert set(client.get(ns, begun)) <= {Outcome.HIT, Outcome.ABSENT}
                assert client.get(ns, keys(16, "never")) == [Outcome.ABSENT] * 16
                client.check(verify=True)
            told.clear()
            begun.clear()
            with daemon.client() as client:
                client.report(wire.DropNamespace(client.next_id(), SPACE.digest))


def test_s01_what_was_reserved_and_not_sealed_is_not_there_after_a_restart(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(8, "sealed"), durable=True)
            reserved = client.reserve(ns, keys(8, "open"))
            for offset in reserved.offsets:
                client.write(offset, b"\x55" * SPACE.block_bytes)
            daemon.kill()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert client.get(ns, keys(8, "open")) == [Outcome.ABSENT] * 8
            assert client.get(ns, keys(8, "sealed")) == [Outcome.HIT] * 8


def test_s01_usage_is_exact_after_a_kill(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(200), durable=True)
            client.ask(wire.Drop(client.next_id(), ns, keys(200)[:50]))
            before = client.tier("ssd")
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            after = client.tier("ssd")
            assert after["durable_blocks"] == after["blocks"] == 150
            assert after["used_bytes"] == before["used_bytes"]
            assert client.count(ns)["blocks"]["ssd"] == 150
            assert client.lookup(ns, keys(200)[:50], run=False).outcomes.count(Outcome.HIT) == 0
            client.check(verify=True)


def test_s01_order_of_use_survives_a_clean_restart(short_dir: Path) -> None:
    """The blocks that were read last are evicted last, after the restart too."""
    with running(short_dir, cpu="8MiB", ssd="24MiB") as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            hashes = keys(240)
            client.put(ns, hashes, durable=True)
            warm = hashes[:40]
            client.report(wire.Evict(client.next_id(), "cpu"))
            assert client.get(ns, warm) == [Outcome.HIT] * 40
            client.report(wire.Evict(client.next_id(), "cpu"))
        daemon.stop()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(200, "others"), durable=True)
            assert client.lookup(ns, warm, run=False).outcomes.count(Outcome.HIT) == 40
            assert client.lookup(ns, hashes[40:], run=False).outcomes.count(Outcome.HIT) < 100


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.stress)])
def test_s04_an_index_that_starts_small_grows_and_puts_go_on(short_dir: Path, count: int) -> None:
    """The map starts at 1 MiB, which is less than what these keys need."""
    space = namespace(4 * KIB)
    with running(short_dir, cpu="64MiB", ssd="1GiB") as daemon, daemon.client() as client:
        ns = client.open(space)
        small = client.tier("ssd")["index_bytes"]
        hashes = keys(count, "s04")
        for at in range(0, count, 1000):
            store_durably(client, ns, hashes[at : at + 1000])
        assert client.tier("ssd")["index_bytes"] > small
        assert client.tier("ssd")["durable_blocks"] == count
        assert client.tier("ssd")["state"] == "ready"
        assert daemon.log_text().count("WARNING") <= 1
        client.check()
        daemon.kill()
        daemon.start()
        with daemon.client() as again:
            ns = again.open(space)
            assert again.tier("ssd")["durable_blocks"] == count
            assert again.lookup(ns, hashes[:8000]).hits == 8000
            sample = hashes[:: count // 500]
            assert again.get(ns, sample) == [Outcome.HIT] * len(sample)


def store_durably(client: RawClient, ns: int, hashes: list[bytes]) -> None:
    assert set(client.put(ns, hashes, durable=True, batch=500)) == {Outcome.DURABLE}
