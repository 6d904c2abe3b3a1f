"""Drains into an ssd tier that is smaller than memory: what is hottest is written, once, and the drain ends."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, Daemon, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)
LARGE = namespace(256 * KIB, "large")
COUNT = 640  # 40 MiB: about twice what the ssd tier takes
FREE_MAX = 16  # slots that a full tier of this size may have free
PATIENT_S = 300.0  # far beyond what writing takes: a drain that goes in circles would use all of it


def test_a_drain_into_a_small_tier_writes_the_hottest_blocks_once_and_ends(short_dir: Path) -> None:
    with small_ssd(short_dir) as daemon:
        with daemon.client(timeout_s=PATIENT_S) as client:
            fill(client)
            report = client.report(wire.Drain(client.next_id(), PATIENT_S / 2))
            ssd = client.tier("ssd")
            assert ssd["demotions"] == report["written_blocks"] == ssd["blocks"]
            assert ssd["evictions"]["pressure"] == 0
            assert ssd["used_bytes"] > 0.8 * ssd["capacity_bytes"]
            assert report["left_out_blocks"] == report["remaining_blocks"] == COUNT - report["written_blocks"] > 0
            again = client.report(wire.Drain(client.next_id(), PATIENT_S / 2))
            assert again["written_blocks"] == 0
            assert again["left_out_blocks"] == report["left_out_blocks"]
            client.check(verify=True)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            assert hits(client) == hottest(report["written_blocks"])


def test_what_was_on_ssd_and_is_colder_makes_room_at_the_end(short_dir: Path) -> None:
    """The tier is full of blocks that memory has long let go; the end of the daemon takes in what is hotter."""
    with small_ssd(short_dir) as daemon:
        with daemon.client(timeout_s=PATIENT_S) as client:
            ns = client.open(SPACE)
            client.put(ns, keys(300, "old"), durable=True)
            client.report(wire.Evict(client.next_id(), "cpu"))
            assert client.tier("ssd")["blocks"] > 250
            fill(client)
        assert daemon.stop() == 0
        log = daemon.log_text()
        assert "left_out_blocks" in log
        daemon.start()
        with daemon.client() as client:
            found = hits(client)
            assert found == hottest(sum(found))
            assert sum(found) * SPACE.block_bytes > 0.7 * client.tier("ssd")["capacity_bytes"]
            client.check(verify=True)


def test_the_order_of_use_in_memory_is_that_on_ssd_after_a_drain(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "back", cpu="64MiB", ssd="24MiB") as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(100, "first"), durable=True)
            client.put(ns, keys(100, "second"))
            client.get(ns, keys(100, "first"))  # a hit in memory leaves the order on ssd alone
        daemon.stop()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(200, "pressure"), durable=True)
            there = client.tiers_of(ns, [*keys(100, "first"), *keys(100, "second")])
            assert sum(map(bool, there[100:])) < sum(map(bool, there[:100])), "what was read last is evicted last"


def test_blocks_of_two_sizes_share_a_small_tier_and_the_drain_ends(short_dir: Path) -> None:
    with small_ssd(short_dir) as daemon, daemon.client(timeout_s=PATIENT_S) as client:
        small, large = client.open(SPACE), client.open(LARGE)
        for number in range(10):
            client.put(small, keys(32, f"s{number}"))
            client.put(large, keys(8, f"l{number}"))
        report = client.report(wire.Drain(client.next_id(), PATIENT_S / 2))
        ssd = client.tier("ssd")
        assert ssd["demotions"] == report["written_blocks"] == ssd["blocks"]
        assert report["written_blocks"] + report["left_out_blocks"] == 400
        assert report["remaining_blocks"] == report["left_out_blocks"] > 0
        assert all(client.tiers_of(small, keys(32, "s9")))
        assert all("ssd" in tiers for tiers in client.tiers_of(large, keys(8, "l9")))
        client.check(verify=True)


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_daemon_that_was_drained_goes_on_as_before(short_dir: Path, policy: str) -> None:
    with small_ssd(short_dir, policy) as daemon, daemon.client(timeout_s=PATIENT_S) as client:
        fill(client)
        client.report(wire.Drain(client.next_id(), PATIENT_S / 2))
        assert set(client.put(client.open(SPACE), keys(50, "new"), durable=True)) == {Outcome.DURABLE}
        assert client.tier("ssd")["evictions"]["pressure"] >= 50 - FREE_MAX
        client.check(verify=True)


def small_ssd(directory: Path, policy: str = "back") -> contextlib.AbstractContextManager[Daemon]:
    return running(directory, "--write-policy", policy, cpu="64MiB", ssd="24MiB")


def fill(client: RawClient) -> None:
    """Store COUNT blocks, the last of them the hottest."""
    ns = client.open(SPACE)
    for number in range(COUNT // 16):
        assert set(client.put(ns, batch(number))) == {Outcome.SEALED}


def batch(number: int) -> list[bytes]:
    return keys(16, f"batch {number}")


def hits(client: RawClient) -> list[bool]:
    """Return for each block whether it is there, the hottest first: later batches, and the heads of each."""
    ns = client.open(SPACE)
    ordered = [h for number in reversed(range(COUNT // 16)) for h in batch(number)]
    return [bool(tiers) for tiers in client.tiers_of(ns, ordered)]


def hottest(count: int) -> list[bool]:
    return [place < count for place in range(COUNT)]
