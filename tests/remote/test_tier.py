"""The remote tier of real daemons, on real servers: what one keeps there the next one reads, exact or not at all."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import TierUnavailable
from kvstore.wire import MISS_FIRST, Outcome
from tests.daemon_fixture import Daemon, eventually, running
from tests.rawclient import RawClient, keys, namespace
from tests.remote.places import KIB, Place, place
from tests.remote.servers import Server

BLOCK_BYTES = 64 * KIB
SPACE = namespace(BLOCK_BYTES)
HITS = [Outcome.HIT]
MISSES = frozenset(outcome for outcome in Outcome if outcome >= MISS_FIRST)
on_file_and_redis = pytest.mark.parametrize("any_server", ["file", "redis"], indirect=True, scope="module")
on_file = pytest.mark.parametrize("any_server", ["file"], indirect=True, scope="module")
on_redis = pytest.mark.parametrize("any_server", ["redis"], indirect=True, scope="module")


@pytest.fixture
def start(short_dir: Path) -> Callable[..., AbstractContextManager[Daemon]]:
    """Return a function that gives a daemon with a remote tier: `with start(place, "node-1") as daemon`."""

    @contextmanager
    def started(
        found: Place, node: str, *arguments: str, policy: str = "through", cpu: str = "64MiB", ssd: str | None = None
    ) -> Generator[Daemon, None, None]:
        directory = short_dir / node
        directory.mkdir(exist_ok=True)
        remote = [
            "--tiers", "cpu,ssd,remote" if ssd else "cpu,remote", "--remote", found.url, "--remote-size",
            str(found.capacity_bytes), "--remote-write-policy", policy, "--remote-refresh", "50ms",
        ]  # fmt: skip
        with running(directory, *remote, *arguments, cpu=cpu, ssd=ssd) as daemon:
            yield daemon

    return started


@pytest.fixture(scope="module")
def node(any_server: tuple[str, Server | None], servers_dir: Path) -> Iterator[Daemon]:
    """Return a daemon that tests of one kind of store share, with a small memory: each has a namespace of its own."""
    kind, server = any_server
    directory = Path(tempfile.mkdtemp(prefix="n-", dir=servers_dir))
    with pytest.MonkeyPatch.context() as patch, place(kind, directory, patch, server) as found:
        remote = ["--tiers", "cpu,remote", "--remote", found.url, "--remote-size", "256MiB"]
        with running(directory, *remote, "--remote-write-policy", "through", cpu="8MiB", ssd=None) as daemon:
            yield daemon


def cold(client: RawClient, model: str, count: int, ttl_s: float | None = None) -> tuple[int, list[bytes]]:
    """Store blocks and return their namespace's number and their hashes once they are in the store alone."""
    ns, hashes = client.open(namespace(BLOCK_BYTES, model=model)), keys(count, model)
    for at in range(0, count, 20):
        part = hashes[at : at + 20]
        wanted = client.tier("remote")["demotions"] + len(part)
        client.put(ns, part, ttl_s=ttl_s)
        eventually(partial(remote_has, client, wanted))
    client.report(wire.Evict(client.next_id(), "cpu", None))
    return ns, hashes


Start = Callable[..., AbstractContextManager[Daemon]]


def remote_has(client: RawClient, blocks: int) -> bool:
    """Whether this daemon has found so many blocks in its store, or has written them there."""
    told = client.tier("remote")
    return bool(told["demotions"] >= blocks and not told["write_queue_bytes"])


def all_found(client: RawClient, ns: int, hashes: list[bytes]) -> bool:
    return client.lookup(ns, hashes).hits == len(hashes)


def test_blocks_of_one_node_are_read_by_another(any_place: Place, start: Start) -> None:
    hashes = keys(40)
    with start(any_place, "node-1") as one:
        with one.client() as client:
            ns = client.open(SPACE)
            client.put(ns, hashes)
            eventually(lambda: remote_has(client, 40))
            client.check()
        with start(any_place, "node-2") as two, two.client() as client:
            ns = client.open(SPACE)
            eventually(lambda: all_found(client, ns, hashes))
            assert set(client.lookup(ns, hashes).tiers) == {8}
            assert client.get(ns, hashes) == HITS * 40
            assert set(client.lookup(ns, hashes).tiers) == {2}
            before = client.count(ns)
            assert client.get(ns, hashes) == HITS * 40
            told = client.count(ns)
            assert told["hit_blocks"]["cpu"] - before["hit_blocks"]["cpu"] == 40
            assert told["stored_blocks"] == 0
            assert told["queried_blocks"] == sum(told["hit_blocks"].values()) + sum(told["misses"].values())
            client.check(verify=True)


@on_file_and_redis
def test_a_batch_larger_than_memory_is_read_window_by_window(node: Daemon) -> None:
    with node.client() as client:
        ns, hashes = cold(client, "large", 200)  # 12.5 MiB
        assert client.get(ns, hashes) == HITS * 200
        assert client.get(ns, hashes, run=True, deadline_s=30.0) == HITS * 200
        client.check(verify=True)


@on_file
def test_write_policies_send_out_what_they_say(any_place: Place, start: Start) -> None:
    hashes = keys(12)
    with start(any_place, "node-1", policy="second-touch") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, hashes)
        client.get(ns, hashes[:5])
        eventually(lambda: remote_has(client, 5))
        client.get(ns, hashes[:5])
        assert client.tier("remote")["demotions"] == 5
    with start(any_place, "node-2", policy="back", cpu="8MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        more = keys(240, "more")
        for at in range(0, 240, 24):
            client.put(ns, more[at : at + 24])
            eventually(lambda: client.tier("remote")["write_queue_bytes"] == 0)
        eventually(lambda: client.tier("remote")["demotions"] >= 100)
        kept = [Outcome(outcome) for outcome in client.lookup(ns, more, run=False).outcomes]
        assert kept.count(Outcome.HIT) > 150  # what is pushed out in a burst may go before it is sent
        assert set(client.get(ns, more)) <= MISSES | {Outcome.HIT}
    with start(any_place, "node-3", policy="back", cpu="16MiB") as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(30, "drained"))
            assert client.tier("remote")["demotions"] == 0
        daemon.stop()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            eventually(lambda: all_found(client, ns, keys(30, "drained")))


@on_file
def test_blocks_that_ssd_lets_go_of_go_out_with_policy_back(any_place: Place, start: Start) -> None:
    hashes = keys(360)  # 22 MiB, of which ssd holds two thirds
    with start(any_place, "node-1", policy="back", cpu="8MiB", ssd="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        for at in range(0, 360, 15):
            client.put(ns, hashes[at : at + 15], durable=True)
            eventually(lambda: client.tier("remote")["write_queue_bytes"] == 0)
        eventually(lambda: client.tier("remote")["demotions"] > 50)
        found = client.get(ns, hashes)
        assert found.count(Outcome.HIT) > 250  # what is pushed out in a burst may go before it is sent
        assert client.count(ns)["hit_blocks"]["remote"] > 20
        client.check(verify=True)


@on_file_and_redis
def test_what_is_dropped_never_comes_back_from_the_store(any_place: Place, start: Start) -> None:
    hashes, other = keys(20), namespace(BLOCK_BYTES, model="other")
    with start(any_place, "node-1") as one:
        with one.client() as client:
            ns, others = client.open(SPACE), client.open(other)
            client.put(ns, hashes)
            client.put(others, hashes)
            eventually(lambda: remote_has(client, 40))
            assert client.ask(wire.DropBlocks(client.next_id(), SPACE.digest, hashes[:1]), wire.Found).hits == 1
            assert client.lookup(ns, hashes[:1]).hits == 0
            client.report(wire.DropNamespace(client.next_id(), SPACE.digest))
            assert client.lookup(ns, hashes).hits == 0
            assert client.get(ns, hashes) == [Outcome.ABSENT] * 20
            client.put(ns, hashes[:3])
            assert client.get(ns, hashes[:4]) == HITS * 3 + [Outcome.ABSENT]
            client.check()
        one.stop()
        one.start()
        with one.client() as client:
            ns, others = client.open(SPACE), client.open(other)
            eventually(lambda: all_found(client, others, hashes))
            assert client.get(ns, hashes[3:]) == [Outcome.ABSENT] * 17
            client.report(wire.DropNamespace(client.next_id(), None))
            assert client.get(others, hashes) == [Outcome.ABSENT] * 20
        with start(any_place, "node-2") as two, two.client() as client:
            eventually(lambda: client.tier("remote")["state"] == "ready")
            assert client.get(client.open(other), hashes) == [Outcome.ABSENT] * 20


@on_redis
def test_a_store_that_is_away_costs_misses_and_no_more(any_place: Place, start: Start) -> None:
    assert any_place.server is not None
    hashes = keys(20)
    with start(any_place, "node-1", cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, hashes)
        eventually(lambda: remote_has(client, 20))
        client.report(wire.Evict(client.next_id(), "cpu", None))
        with any_place.server.stopped():
            outcomes = client.get(ns, hashes, deadline_s=5.0)
            assert set(outcomes) <= MISSES
            eventually(lambda: client.lookup(ns, hashes).hits == 0 and client.tier("remote")["state"] == "degraded")
            client.put(ns, keys(20, "meanwhile"))
            assert client.get(ns, keys(20, "meanwhile")) == HITS * 20
            with pytest.raises(TierUnavailable, match="could not be told"):
                client.report(wire.DropNamespace(client.next_id(), SPACE.digest))
            assert client.lookup(ns, keys(20, "meanwhile")).hits == 0
        eventually(lambda: client.tier("remote")["state"] == "ready")
        assert client.get(ns, hashes) == [Outcome.ABSENT] * 20
        client.put(ns, hashes)
        assert client.get(ns, hashes) == HITS * 20
        client.check(verify=True)


@on_file
def test_wrong_bytes_at_rest_are_a_miss_that_is_counted(any_place: Place, start: Start) -> None:
    hashes = keys(8)
    with start(any_place, "node-1") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, hashes)
        eventually(lambda: remote_has(client, 8))
        for path in Path(any_place.url.removeprefix("file://")).rglob("*.pack"):
            with path.open("r+b") as file:
                for at in range(0, os.fstat(file.fileno()).st_size - 2 * KIB, 32 * KIB):
                    file.seek(at)
                    file.write(b"\xee")
        client.report(wire.Evict(client.next_id(), "cpu", None))
        assert set(client.get(ns, hashes)) == {Outcome.CORRUPT}
        assert client.tier("remote")["checksum_failures"] == 8
        eventually(lambda: "damaged" in daemon.log_text())
        client.put(ns, hashes)
        assert client.get(ns, hashes) == HITS * 8
        client.check(verify=True)


@on_file_and_redis
def test_a_life_goes_along_to_the_store_and_back(node: Daemon) -> None:
    with node.client() as client:
        ns, hashes = cold(client, "lives", 4, ttl_s=3600.0)
        digest = namespace(BLOCK_BYTES, model="lives").digest
        assert client.get(ns, hashes) == HITS * 4
        body = client.report(wire.Keys(client.next_id(), digest, hashes=hashes))
        assert all(3000 < block["ttl_s"] <= 3600 for block in body["blocks"])
        client.ask(wire.Ttl(client.next_id(), digest, hashes, 0.2), wire.Found)
        eventually(lambda: client.lookup(ns, hashes).hits == 0)
        short, hashes = cold(client, "short lives", 2, ttl_s=1.5)
        eventually(lambda: client.lookup(short, hashes).hits == 0)
        assert set(client.get(short, hashes)) <= {Outcome.ABSENT, Outcome.EXPIRED}


@on_file_and_redis
def test_readers_of_the_same_cold_blocks_share_one_load(node: Daemon) -> None:
    with node.client() as client:
        _, hashes = cold(client, "shared", 24)
        before = client.tier("remote")["bytes_out"]
        outcomes: list[list[Outcome]] = []

        def read() -> None:
            with node.client() as own:
                outcomes.append(own.get(own.open(namespace(BLOCK_BYTES, model="shared")), hashes))

        readers = [threading.Thread(target=read) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert outcomes == [HITS * 24] * 8
        assert client.tier("remote")["bytes_out"] - before == 24 * BLOCK_BYTES
        client.check(verify=True)


@on_file_and_redis
def test_prefetch_and_budgets_reach_the_store(node: Daemon) -> None:
    with node.client() as client:
        ns, hashes = cold(client, "ahead", 6)
        assert client.lookup(ns, hashes, max_ms=10_000.0).hits == 6
        told = client.lookup(ns, hashes, max_ms=0.0001)
        assert told.hits == 0
        assert set(told.outcomes) <= {Outcome.BUDGET, Outcome.ABSENT}
        found = client.ask(wire.Prefetch(client.next_id(), ns, [*hashes, *keys(1, "none")]), wire.Found)
        assert list(found.outcomes) == HITS * 6 + [Outcome.ABSENT]
        eventually(lambda: set(client.lookup(ns, hashes).tiers) == {2})
        ns, hashes = cold(client, "more than a window", 100)
        found = client.ask(wire.Prefetch(client.next_id(), ns, hashes), wire.Found)
        assert set(found.outcomes) == {Outcome.HIT, Outcome.NO_ROOM}
        client.check(verify=True)
