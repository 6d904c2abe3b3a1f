"""Verbs of readers over the raw socket: lookups, leases, waits, groups of slices, corrupt bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.block import Component, Namespace, Slice
from kvstore.errors import TooLarge
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, Daemon, eventually, running
from tests.rawclient import keys, namespace, payload

SPACE = namespace(64 * KIB)


def sliced(tp_size: int, tp_rank: int) -> Namespace:
    """Return what one rank holds of a model with four kv heads."""
    return Namespace(
        "sliced",
        "r",
        "bfloat16",
        (Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (4, 2, 16, 4, 64)),),
        16,
        Slice.of_rank(layers=4, heads=4, tp_size=tp_size, tp_rank=tp_rank),
    )


# ---- lookup


def test_a_lookup_tells_each_key_its_tiers_and_stops_at_the_first_miss_if_asked(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(2, "both"), durable=True)
        client.put(ns, keys(2, "ssd"), durable=True)
        client.report(wire.Evict(client.next_id(), "cpu"))
        client.get(ns, keys(2, "both"))
        asked = [*keys(2, "both"), *keys(2, "ssd"), *keys(1, "absent"), *keys(2, "both")]
        run = client.lookup(ns, asked)
        assert run.hits == 4
        assert list(run.outcomes) == [Outcome.HIT] * 4 + [Outcome.ABSENT] * 3
        assert list(run.tiers) == [6, 6, 4, 4, 0, 0, 0], "bits: cpu 2, ssd 4"
        each = client.lookup(ns, asked, run=False)
        assert each.hits == 4
        assert list(each.outcomes) == [Outcome.HIT] * 4 + [Outcome.ABSENT] + [Outcome.HIT] * 2
        assert client.lookup(ns, []).hits == 0, "an empty prefix is no hit"
        assert client.lookup(ns, keys(wire.KEYS_MAX, "many")).hits == 0


# ---- leases


def test_a_zero_copy_lease_is_all_or_nothing(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(10), durable=True)
        client.report(wire.Evict(client.next_id(), "cpu", 5 * SPACE.block_bytes))
        got = client.acquire(ns, keys(10), copying=False)
        assert list(got.outcomes) == [Outcome.HIT] * 10, "loaded first where needed"
        assert client.tier("cpu")["pinned_bytes"] == 10 * SPACE.block_bytes
        client.release(got.lease)
        got = client.acquire(ns, [*keys(10), *keys(1, "absent")], copying=False)
        assert got.lease == 0
        assert got.outcomes[-1] == Outcome.ABSENT
        assert set(got.offsets) == {0}
        client.put(ns, keys(200, "more"))
        present = [h for h in keys(200, "more") if client.lookup(ns, [h]).hits]
        with pytest.raises(TooLarge):
            client.acquire(ns, present, copying=False)
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.check()


def test_a_run_ends_at_the_first_block_that_is_not_there(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        chain = keys(10)
        client.put(ns, chain[:4] + chain[5:])
        found = client.get(ns, chain, run=True)
        assert found == [Outcome.HIT] * 4 + [Outcome.ABSENT] * 6
        assert client.get(ns, chain) == [Outcome.HIT] * 4 + [Outcome.ABSENT] + [Outcome.HIT] * 5
        assert client.count(ns)["delivered_blocks"] == 4 + 9


def test_leases_end_when_they_say_and_not_before(short_dir: Path) -> None:
    with running(short_dir, "--lease-max", "2s", cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(4))
        got = client.acquire(ns, keys(4), lease_s=1000.0)
        assert got.lease_s == 2.0, "no longer than the daemon allows"
        client.ask(wire.Drop(client.next_id(), ns, keys(4)))
        client.put(ns, keys(300, "pressure"), batch=20)
        content = [client.peek(offset, SPACE.block_bytes) for offset in got.offsets]
        if client.stats()["sessions"]["leases"]:
            assert content == [payload(SPACE.digest, h, SPACE.block_bytes) for h in keys(4)], "held while it lasts"
        eventually(lambda: client.stats()["sessions"]["leases"] == 0, "then it is over")
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.check()


def test_one_block_may_be_leased_seventy_thousand_times(short_dir: Path) -> None:
    """A system prompt's first block is in every request."""
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(1))
        readers = [daemon.client() for _ in range(5)]
        for reader in readers:
            reader.open(SPACE)
            for _ in range(70):
                ids = [reader.next_id() for _ in range(200)]
                requests = [wire.encode(wire.Acquire(n, ns, keys(1), lease_s=60.0)) for n in ids]
                reader.socket.sendall(b"".join(requests))
                assert all(reader.answer(n, wire.Acquired).lease for n in ids)
        assert client.stats()["sessions"]["leases"] == 70_000
        assert client.tier("cpu")["pinned_bytes"] == SPACE.block_bytes
        client.check()
        for reader in readers:
            reader.close()
        eventually(lambda: client.stats()["sessions"]["leases"] == 0, "all are over")
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.check()


def test_a_block_dropped_while_it_is_loaded_is_a_miss_and_its_slot_comes_back(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        other.open(SPACE)
        for turn in range(20):
            hashes = keys(16, f"dropped {turn}")
            client.put(ns, hashes, durable=True)
            client.report(wire.Evict(client.next_id(), "cpu"))
            request = wire.Acquire(client.next_id(), ns, hashes)
            client.send(request)
            if turn % 2:
                other.ask(wire.Drop(other.next_id(), ns, hashes), wire.Found)
            else:
                other.report(wire.DropNamespace(other.next_id(), SPACE.digest))
            got = client.answer(request.id, wire.Acquired)
            assert set(got.outcomes) <= {Outcome.HIT, Outcome.ABSENT}
            if got.lease:
                client.release(got.lease)
            assert client.get(ns, hashes) == [Outcome.ABSENT] * 16
        client.report(wire.Gc(client.next_id()))
        eventually(lambda: client.tier("cpu")["used_bytes"] == 0)
        eventually(lambda: client.tier("ssd")["used_bytes"] == 0)
        assert client.tier("ssd")["checksum_failures"] == 0
        client.check()


# ---- groups


def test_a_group_lookup_tells_which_slices_hold_which_blocks(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        first, second, whole = sliced(2, 0), sliced(2, 1), sliced(1, 0)
        numbers = {space.digest: client.open(space) for space in (first, second, whole)}
        hashes = keys(6)
        client.put(numbers[first.digest], hashes[:4])
        client.put(numbers[second.digest], hashes[2:])
        client.open(dataclasses.replace(first, model="another"))
        group = client.ask(wire.GroupLookup(client.next_id(), numbers[whole.digest], hashes), wire.Group)
        told = dict(zip(map(_digest, group.namespaces), group.outcomes, strict=True))
        assert told == {
            first.digest: bytes([Outcome.HIT] * 4 + [Outcome.ABSENT] * 2),
            second.digest: bytes([Outcome.ABSENT] * 2 + [Outcome.HIT] * 4),
        }


def _digest(encoded: bytes) -> bytes:
    return Namespace.decode(encoded).digest


def test_slices_of_a_block_are_evicted_together(short_dir: Path) -> None:
    """A block without one of its slices is of no use to anybody."""
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        spaces = [sliced(2, 0), sliced(2, 1)]
        numbers = [client.open(space) for space in spaces]
        hashes = keys(60)
        for ns in numbers:
            client.put(ns, hashes)
        client.put(client.open(namespace(64 * KIB)), keys(40, "pressure"))
        held = [client.lookup(ns, hashes, run=False).outcomes for ns in numbers]
        assert held[0] == held[1]
        client.check()


# ---- waits


def test_a_wait_for_what_is_there_is_answered_at_once(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client(timeout_s=20) as client:
        ns = client.open(SPACE)
        client.put(ns, keys(2))
        assert client.ask(wire.Wait(client.next_id(), ns, keys(2), 300.0), wire.Found).hits == 2
        assert client.ask(wire.Wait(client.next_id(), ns, [], 300.0), wire.Found).hits == 0


def test_a_cancelled_wait_is_never_answered_and_leaves_nothing(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client(timeout_s=20) as client:
        ns = client.open(SPACE)
        waits = [wire.Wait(client.next_id(), ns, keys(1), 300.0) for _ in range(100)]
        for wait in waits:
            client.send(wait)
            client.send(wire.Cancel(client.next_id(), wait.id))
        client.ask(wire.Ping(client.next_id()))
        client.put(ns, keys(1))
        client.ask(wire.Ping(client.next_id()))
        assert client.take_replies() == []


# ---- corrupt bytes


def segment_files(daemon: Daemon) -> list[Path]:
    return sorted((daemon.ssd_dir / "segments").glob("*.seg"))


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


def corrupt_on_disk(daemon: Daemon, hashes: list[bytes]) -> None:
    """Flip a bit in the middle of every block's payload on ssd."""
    contents = {payload(SPACE.digest, h, SPACE.block_bytes)[:64]: h for h in hashes}
    found = 0
    for path in segment_files(daemon):
        whole = path.read_bytes()
        for start in contents:
            at = whole.find(start)
            if at >= 0:
                flip(path, at + SPACE.block_bytes // 2)
                found += 1
    assert found == len(hashes)


def test_a_bit_that_flips_on_disk_is_a_miss_a_counter_and_a_log_line(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        good, bad = keys(8, "good"), keys(4, "bad")
        client.put(ns, [*good, *bad], durable=True)
        client.report(wire.Evict(client.next_id(), "cpu"))
        corrupt_on_disk(daemon, bad)
        assert client.get(ns, [*good, *bad]) == [Outcome.HIT] * 8 + [Outcome.CORRUPT] * 4
        assert client.tier("ssd")["checksum_failures"] == 4
        eventually(lambda: "corrupt" in daemon.log_text(), "the log tells")
        assert client.get(ns, bad) == [Outcome.ABSENT] * 4, "they are dropped"
        assert set(client.put(ns, bad, durable=True)) == {Outcome.DURABLE}
        assert client.get(ns, bad) == [Outcome.HIT] * 4
        client.check(verify=True)


@pytest.mark.parametrize("where", ["memory", "ssd"])
def test_check_verify_finds_a_flipped_bit_and_drops_that_block_alone(short_dir: Path, where: str) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(10)
        client.put(ns, hashes, durable=True)
        client.check(verify=True)
        if where == "memory":
            got = client.acquire(ns, hashes[3:4])
            content = client.peek(got.offsets[0], SPACE.block_bytes)
            client.write(got.offsets[0], content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
            client.release(got.lease)
        else:
            client.report(wire.Evict(client.next_id(), "cpu"))
            corrupt_on_disk(daemon, hashes[3:4])
        body = client.report(wire.Check(client.next_id(), verify=True))
        assert not body["ok"]
        assert body["blocks_corrupt"] == 1
        assert any(hashes[3].hex() in problem for problem in body["problems"])
        assert client.tier("cpu" if where == "memory" else "ssd")["checksum_failures"] == 1
        left = hashes[:3] + hashes[4:]
        assert client.get(ns, [*left, hashes[3]]) == [Outcome.HIT] * 9 + [Outcome.ABSENT]
        client.check(verify=True)


# ---- a disk that fails under the daemon


@pytest.mark.parametrize("how", ["vanished", "cut off"])
def test_a_segment_lost_under_the_daemon_costs_its_blocks_and_nothing_else(short_dir: Path, how: str) -> None:
    with running(short_dir, ssd="64MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(60)
        client.put(ns, hashes, durable=True)
        client.report(wire.Evict(client.next_id(), "cpu"))
        victim = segment_files(daemon)[1]
        if how == "vanished":
            victim.unlink()
        else:
            with victim.open("r+b") as file:
                file.truncate(100_000)
        found = client.get(ns, hashes)
        assert set(found) <= {Outcome.HIT, Outcome.CORRUPT, Outcome.UNAVAILABLE, Outcome.ABSENT}
        assert found.count(Outcome.HIT) >= 40
        lost = [h for h, outcome in zip(hashes, found, strict=True) if outcome != Outcome.HIT]
        eventually(lambda: set(client.put(ns, keys(60, "after"), durable=True)) <= {Outcome.DURABLE, Outcome.PRESENT})
        again = client.get(ns, hashes)
        assert again.count(Outcome.HIT) >= 60 - len(lost)
        assert client.tier("cpu")["pinned_bytes"] == 0
        assert daemon.is_running
        client.report(wire.Drain(client.next_id()))  # which looks at the files, as each checkpoint does
        eventually(lambda: client.report(wire.Check(client.next_id()))["ok"], "it has healed")
        daemon.kill()
        daemon.start()
        with daemon.client() as after:
            assert set(after.get(after.open(SPACE), keys(60, "after"))) == {Outcome.HIT}
            after.check(verify=True)
