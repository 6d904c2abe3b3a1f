"""Cases E: E01 a size is a hard cap, E03 one small need evicts little; and the kind of both: sizes that change."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, disk_bytes, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)


# ---- E01


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block_kib", [256, pytest.param(4, marks=pytest.mark.stress)])
def test_e01_four_times_the_cap_never_takes_more_than_the_cap_on_disk(short_dir: Path, block_kib: int) -> None:
    """Segments, index and temporary files together, sampled while 256 MiB are put into a tier of 64 MiB."""
    cap = 64 * MIB
    space = namespace(block_kib * KIB)
    with running(short_dir, cpu="32MiB", ssd="64MiB") as daemon, daemon.client() as client:
        ns = client.open(space)
        over, highest = threading.Event(), 0

        def sample() -> None:
            nonlocal highest
            while not over.wait(0.02):
                highest = max(highest, disk_bytes(daemon.ssd_dir))

        sampling = threading.Thread(target=sample)
        sampling.start()
        try:
            hashes = keys(4 * cap // space.block_bytes, "e01")
            for at in range(0, len(hashes), 256):
                assert set(client.put(ns, hashes[at : at + 256], durable=True)) <= {
                    Outcome.DURABLE, Outcome.NOT_DURABLE
                }  # fmt: skip
        finally:
            over.set()
            sampling.join()
        assert cap // 2 < highest <= cap
        assert client.tier("ssd")["used_bytes"] > 0.8 * cap, "the cap is used, too"
        assert client.tier("cpu")["used_bytes"] <= client.tier("cpu")["capacity_bytes"] <= 32 * MIB
        recent = hashes[-16 * MIB // space.block_bytes :]
        assert client.get(ns, recent) == [Outcome.HIT] * len(recent)
        client.check()
        assert disk_bytes(daemon.ssd_dir) <= cap


def test_e01_a_smaller_cap_at_the_next_start_is_kept_as_well(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd="64MiB") as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(800), durable=True)
        assert disk_bytes(daemon.ssd_dir) > 40 * MIB
        daemon.stop()
        daemon.arguments[daemon.arguments.index("--ssd-size") + 1] = "24MiB"
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert disk_bytes(daemon.ssd_dir) <= 24 * MIB
            hits = client.lookup(ns, keys(800), run=False).outcomes.count(Outcome.HIT)
            assert 100 < hits < 24 * MIB // SPACE.block_bytes
            assert set(client.get(ns, keys(800))) <= {Outcome.HIT, Outcome.ABSENT}
            client.check()


# ---- E03


def test_e03_a_put_into_a_full_memory_evicts_one(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        capacity = 14 * MIB // SPACE.block_bytes  # two of sixteen are set aside for transit
        client.put(ns, keys(capacity))
        assert client.tier("cpu")["blocks"] == capacity
        for number in range(20):
            before = client.tier("cpu")
            client.put(ns, keys(1, f"one more {number}"))
            after = client.tier("cpu")
            assert after["evictions"]["pressure"] - before["evictions"]["pressure"] == 1
            assert after["blocks"] == capacity
        client.check()


def test_e03_a_put_into_a_full_ssd_tier_evicts_a_few(short_dir: Path) -> None:
    """The ssd tier deletes ahead of need: what it keeps free is a small part of it, and no put adds to that."""
    with running(short_dir, cpu="16MiB", ssd="24MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(600), durable=True)
        eventually(lambda: client.tier("ssd")["write_queue_bytes"] == 0)
        full = client.tier("ssd")
        assert full["evictions"]["pressure"] > 0
        assert full["blocks"] > 0.8 * 24 * MIB / SPACE.block_bytes
        for number in range(20):
            assert client.put(ns, keys(1, f"one more {number}"), durable=True) == [Outcome.DURABLE]
        before = client.tier("ssd")
        for number in range(20):
            assert client.put(ns, keys(1, f"yet another {number}"), durable=True) == [Outcome.DURABLE]
        after = client.tier("ssd")
        assert after["evictions"]["pressure"] - before["evictions"]["pressure"] <= 20 + 5
        assert after["blocks"] >= before["blocks"] - 5
        client.check()


def test_e03_a_put_beyond_a_quota_evicts_one_of_that_tenant(short_dir: Path) -> None:
    with running(short_dir, "--quota", "default:cpu=4MiB", cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        count = 4 * MIB // SPACE.block_bytes
        client.put(ns, keys(count))
        for number in range(20):
            before = client.tier("cpu")
            assert client.put(ns, keys(1, f"one more {number}")) == [Outcome.SEALED]
            after = client.tier("cpu")
            assert after["evictions"]["quota"] - before["evictions"]["quota"] == 1
            assert after["evictions"]["pressure"] == 0, "there is room for others"
            assert after["blocks"] == count
        client.check()


def test_e03_the_end_of_a_conversation_that_grows_costs_no_head_of_another(short_dir: Path) -> None:
    """What is left of a prompt after any pressure is its head: of a tail without its head nobody has any use."""
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        prompts = [keys(50, f"prompt {number}") for number in range(4)]
        for prompt in prompts:
            client.put(ns, prompt, batch=50)
        for turn in range(10):
            client.put(ns, keys(60 + 4 * turn, "conversation"), batch=100)
            for prompt in prompts:
                found = client.lookup(ns, prompt, run=False)
                assert found.hits == found.outcomes.count(Outcome.HIT)
        client.check()


def test_e03_evict_by_request_takes_what_was_asked_for(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(100))
        body = client.report(wire.Evict(client.next_id(), "cpu", 10 * SPACE.block_bytes))
        assert body == {"evicted_blocks": 10, "evicted_bytes": 10 * SPACE.block_bytes}
        assert client.tier("cpu")["blocks"] == 90
        body = client.report(wire.Evict(client.next_id(), "cpu", 1))
        assert body["evicted_blocks"] == 1
        body = client.report(wire.Evict(client.next_id(), "cpu", None, 3600.0))
        assert body["evicted_blocks"] == 0, "nothing is that old"
        client.check()


# ---- a size that changes


def used_share(client: RawClient, ns: int, tier: str) -> float:
    """Return how much of a tier a namespace takes."""
    used_bytes: int = client.count(ns)["bytes"][tier]
    capacity_bytes: int = client.tier(tier)["capacity_bytes"]
    return used_bytes / capacity_bytes


LONGER = pytest.mark.stress


@pytest.mark.parametrize(
    ("first_kib", "second_kib", "touched"),
    [
        (64, 1024, "at random"),
        (1024, 64, "in order"),
        (64, 1536, "at random"),
        (1536, 64, "at random"),
        pytest.param(64, 96, "at random", marks=LONGER),
        pytest.param(256, 4, "at random", marks=LONGER),
        pytest.param(64, 1536, "in order", marks=LONGER),
    ],
)
def test_e03_a_second_size_takes_over_a_memory_full_of_the_first(
    short_dir: Path, first_kib: int, second_kib: int, touched: str
) -> None:
    """And none of its puts evicts much more than it needs."""
    first, second = namespace(first_kib * KIB, "first"), namespace(second_kib * KIB, "second")
    with running(short_dir, cpu="64MiB", ssd=None) as daemon, daemon.client() as client:
        old, new = client.open(first), client.open(second)
        ordinary = client.tier("cpu")["capacity_bytes"] - 4 * MIB
        hashes = keys(ordinary // first.block_bytes)
        client.put(old, hashes)
        if touched == "at random":
            random.Random(5).shuffle(hashes)
            for at in range(0, len(hashes), 32):
                client.get(old, hashes[at : at + 32])
        most = 0
        for number in range(2 * ordinary // second.block_bytes // 8):
            before = client.tier("cpu")["used_bytes"]
            outcomes = client.put(new, keys(8, f"second {number}"), batch=8)
            assert set(outcomes) == {Outcome.SEALED}
            most = max(most, before - client.tier("cpu")["used_bytes"])
        for number in range(400):  # ages count in ticks of 10 ms: a fast machine needs more puts until they tell
            if client.count(new)["bytes"]["cpu"] >= 0.9 * ordinary:
                break
            client.put(new, keys(8, f"more {number}"), batch=8)
        assert client.count(new)["bytes"]["cpu"] >= 0.9 * ordinary
        assert most <= 16 * MIB, "room for eight blocks never costs a quarter of the memory"
        client.check()


@pytest.mark.parametrize(
    ("first_kib", "second_kib"), [(1024, 64), (64, 1536), pytest.param(64, 1024, marks=LONGER)]
)
def test_e03_a_second_size_takes_over_an_ssd_tier_full_of_the_first(
    short_dir: Path, first_kib: int, second_kib: int
) -> None:
    first, second = namespace(first_kib * KIB, "first"), namespace(second_kib * KIB, "second")
    with running(short_dir, cpu="32MiB", ssd="64MiB") as daemon, daemon.client() as client:
        old, new = client.open(first), client.open(second)
        client.put(old, keys(60 * MIB // first.block_bytes), durable=True)
        assert used_share(client, old, "ssd") > 0.8
        highest = 0
        for number in range(2 * 60 * MIB // second.block_bytes // 8):
            client.put(new, keys(8, f"second {number}"), durable=True, batch=8)
            highest = max(highest, disk_bytes(daemon.ssd_dir))
        assert used_share(client, new, "ssd") >= 0.85
        assert highest <= 64 * MIB
        client.check(verify=True)


@pytest.mark.parametrize("pinned", [False, True])
def test_e03_sizes_that_come_mixed_all_find_room(short_dir: Path, pinned: bool) -> None:
    spaces = [namespace(kib * KIB, f"mixed {kib}") for kib in (4, 64, 96, 256, 1024)]
    chance = random.Random(6)
    with running(short_dir, cpu="32MiB", ssd="64MiB") as daemon, daemon.client() as client:
        numbers = [client.open(space) for space in spaces]
        for turn in range(300):
            at = chance.randrange(len(spaces))
            hashes = keys(8, f"mixed {turn}")
            assert set(client.put(numbers[at], hashes)) == {Outcome.SEALED}, (turn, spaces[at].block_bytes)
            if pinned and turn % 60 == 0:
                client.ask(wire.Pin(client.next_id(), spaces[at].digest, hashes[:1], 600.0), wire.Found)
            if turn % 100 == 0:
                client.check()
        client.check(verify=True)
