"""Cases P: nothing waits for something that need not be. P01 one batch call with a budget, P04 one load for all.

How fast it is, bench/ measures; here is what makes it so: one message a batch, budgets that are kept, and one read a
block however many want it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)


def cold(client: RawClient, ns: int, count: int, label: str = "cold") -> list[bytes]:
    hashes = keys(count, label)
    assert set(client.put(ns, hashes, durable=True)) == {Outcome.DURABLE}
    client.report(wire.Evict(client.next_id(), "cpu"))
    assert set(client.tiers_of(ns, hashes)) == {"ssd"}
    return hashes


def test_p01_a_thousand_keys_are_one_question_while_the_ssd_tier_writes(short_dir: Path) -> None:
    space = namespace(4 * KIB)
    with running(short_dir, cpu="64MiB") as daemon, daemon.client() as client:
        ns = client.open(space)
        hashes = keys(1000, "p01")
        client.put(ns, hashes, batch=500)
        over = threading.Event()

        def write() -> None:
            with daemon.client() as writer:
                number = writer.open(SPACE)
                turn = 0
                while not over.is_set():
                    writer.put(number, keys(64, f"writes {turn}"))
                    turn += 1

        writing = threading.Thread(target=write)
        writing.start()
        try:
            for _ in range(200):
                assert client.lookup(ns, hashes).hits == 1000
        finally:
            over.set()
            writing.join()


def test_p01_what_can_not_be_loaded_within_the_budget_is_a_miss_that_says_so(short_dir: Path) -> None:
    with running(short_dir, cpu="32MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = cold(client, ns, 128)
        assert client.lookup(ns, hashes).hits == 128, "without a budget all count"
        found = client.lookup(ns, hashes, max_ms=0.0)
        assert found.hits == 0
        assert set(found.outcomes) == {Outcome.BUDGET}
        generous = client.lookup(ns, hashes, max_ms=600_000.0)
        assert generous.hits == 128
        # What is in memory costs nothing.
        client.get(ns, hashes[:10])
        found = client.lookup(ns, hashes, max_ms=0.0)
        assert found.hits == 10
        assert list(found.outcomes) == [Outcome.HIT] * 10 + [Outcome.BUDGET] * 118
        got = client.acquire(ns, hashes, max_ms=0.0, count=False)
        assert list(got.outcomes) == [Outcome.HIT] * 10 + [Outcome.BUDGET] * 118
        client.release(got.lease)
        assert client.count(ns)["misses"]["budget"] == 128 + 118
        client.check()


def test_p04_fifty_who_want_the_same_blocks_cause_one_read_each(short_dir: Path) -> None:
    with running(short_dir, cpu="64MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = cold(client, ns, 64)
        before = client.stats()
        at_once(daemon, 50, hashes)
        after = client.stats()
        ssd_before, ssd = before["tiers"]["ssd"], after["tiers"]["ssd"]
        assert ssd["bytes_out"] - ssd_before["bytes_out"] == 64 * SPACE.block_bytes, "each block is read once"
        assert after["tiers"]["cpu"]["promotions"] - before["tiers"]["cpu"]["promotions"] == 64
        assert after["totals"]["delivered_blocks"] - before["totals"]["delivered_blocks"] == 50 * 64
        assert after["tiers"]["cpu"]["pinned_bytes"] == 0
        client.check(verify=True)


def at_once(daemon: Daemon, count: int, hashes: list[bytes]) -> None:
    """Let many clients fetch the same blocks at the same moment; each must get all of them."""
    clients = [daemon.client() for _ in range(count)]
    try:
        numbers = [client.open(SPACE) for client in clients]
        requests = [(c, wire.Acquire(c.next_id(), ns, hashes)) for c, ns in zip(clients, numbers, strict=True)]
        for client, request in requests:
            client.send(request)
        for client, request in requests:
            got = client.answer(request.id, wire.Acquired)
            assert set(got.outcomes) <= {Outcome.HIT, Outcome.LATER}
            client.release(got.lease)
            later = [h for h, outcome in zip(hashes, got.outcomes, strict=True) if outcome == Outcome.LATER]
            if later:
                assert set(client.get(0, later)) == {Outcome.HIT}
    finally:
        for client in clients:
            client.close()


def test_p04_one_who_gives_up_does_not_take_the_load_from_the_others(short_dir: Path) -> None:
    with running(short_dir, cpu="64MiB") as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        other.open(SPACE)
        for turn in range(20):
            hashes = cold(client, ns, 32, f"given up {turn}")
            first = wire.Acquire(client.next_id(), ns, hashes)
            second = wire.Acquire(other.next_id(), ns, hashes)
            client.send(first)
            other.send(second)
            client.send(wire.Cancel(client.next_id(), first.id))
            got = other.answer(second.id, wire.Acquired)
            assert list(got.outcomes) == [Outcome.HIT] * 32
            other.release(got.lease)
            client.ask(wire.Ping(client.next_id()))
            for reply in client.take_replies():
                assert isinstance(reply, wire.Acquired), "it was granted before the Cancel came"
                client.release(reply.lease)
        client.ask(wire.Ping(client.next_id()))
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.check(verify=True)


def test_p04_prefetch_brings_blocks_to_memory_and_pins_nothing(short_dir: Path) -> None:
    with running(short_dir, cpu="32MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        window = client.welcome.window_bytes // SPACE.block_bytes
        hashes = cold(client, ns, 2 * window)
        found = client.ask(wire.Prefetch(client.next_id(), ns, [*hashes, *keys(1, "absent")]), wire.Found)
        assert list(found.outcomes) == [Outcome.HIT] * window + [Outcome.NO_ROOM] * window + [Outcome.ABSENT]
        eventually(lambda: client.tier("cpu")["promotions"] == window, "a window of them is loaded")
        assert set(client.tiers_of(ns, hashes[:window])) == {"cpu,ssd"}
        assert client.get(ns, hashes) == [Outcome.HIT] * 2 * window
        assert client.tier("cpu")["promotions"] == 2 * window
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.check()


@pytest.mark.parametrize("copying", [True, False], ids=["copying", "zero-copy"])
def test_p04_a_batch_larger_than_memory_is_served_in_windows(short_dir: Path, copying: bool) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = cold(client, ns, 64 * MIB // SPACE.block_bytes)
        if copying:
            assert client.get(ns, hashes) == [Outcome.HIT] * len(hashes)
        else:
            with pytest.raises(KVStoreError):
                client.acquire(ns, hashes, copying=False)
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.check()
