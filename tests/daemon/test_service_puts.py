"""Verbs of writers over the raw socket: write policies, lives of blocks, quotas, strict mode, limits."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.block import Namespace
from kvstore.checksum import checksum
from kvstore.errors import BadNamespace, Closing, LeaseExpired, NotPermitted, TooLarge, UsageError
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, eventually, running
from tests.rawclient import RawClient, keys, namespace, payload

SPACE = namespace(64 * KIB)
STRICT = ("--mode", "strict", "--arena-size", "4MiB")


# ---- write policies


def test_write_through_writes_every_block_soon(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "through") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        assert set(client.put(ns, keys(50))) == {Outcome.SEALED}
        eventually(lambda: set(client.tiers_of(ns, keys(50))) == {"cpu,ssd"}, "all are on ssd")
        client.check(verify=True)


def test_second_touch_writes_what_is_used_again(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "second-touch", cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(50))
        client.get(ns, keys(50)[:20])
        eventually(lambda: client.tiers_of(ns, keys(50)[:20]).count("cpu,ssd") == 20, "those read are on ssd")
        assert set(client.tiers_of(ns, keys(50)[20:])) == {"cpu"}
        # A store that finds a block present is a second touch as well.
        assert set(client.put(ns, keys(50)[20:30])) == {Outcome.PRESENT}
        eventually(lambda: client.tiers_of(ns, keys(50)[20:30]).count("cpu,ssd") == 10, "and those found present")
        assert set(client.tiers_of(ns, keys(50)[30:])) == {"cpu"}
        # What was seen once is not written when its place is needed either.
        client.put(ns, keys(300, "once"))
        eventually(lambda: client.tier("cpu")["evictions"]["pressure"] > 100, "it is needed")
        assert client.tier("ssd")["blocks"] == 30
        client.check(verify=True)


def test_write_back_writes_what_memory_is_about_to_lose(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "back", cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(100))
        assert set(client.tiers_of(ns, keys(100))) == {"cpu"}
        assert client.tier("ssd")["blocks"] == 0
        written = keys(600, "more")
        for at in range(0, 600, 10):
            client.put(ns, written[at : at + 10])
            eventually(lambda: client.tier("ssd")["write_queue_bytes"] == 0)
        found = client.get(ns, [*keys(100), *written])
        # Memory alone holds 240; how much of the rest is saved depends on how fast the disk is.
        assert found.count(Outcome.HIT) > 350, "much was written before its place was needed"
        client.check(verify=True)


@pytest.mark.parametrize("policy", ["through", "second-touch", "back"])
def test_durable_seals_are_durable_under_every_policy(short_dir: Path, policy: str) -> None:
    with running(short_dir, "--write-policy", policy) as daemon:
        with daemon.client() as client:
            assert set(client.put(client.open(SPACE), keys(20), durable=True)) == {Outcome.DURABLE}
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            assert client.get(client.open(SPACE), keys(20)) == [Outcome.HIT] * 20


def test_without_an_ssd_tier_a_durable_seal_is_sealed_and_says_so(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        assert set(client.put(ns, keys(5), durable=True)) == {Outcome.NOT_DURABLE}
        assert client.get(ns, keys(5)) == [Outcome.HIT] * 5


def test_a_block_stored_right_after_a_drop_is_written_as_any_other(short_dir: Path) -> None:
    """It may take the place of the dropped one in every table while that still waits to be written."""
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        for turn in range(50):
            client.put(ns, keys(4, f"dropped {turn}"))
            client.ask(wire.Drop(client.next_id(), ns, keys(4, f"dropped {turn}")))
            client.put(ns, keys(4, f"kept {turn}"))
        kept = [block_hash for turn in range(50) for block_hash in keys(4, f"kept {turn}")]
        eventually(lambda: set(client.tiers_of(ns, kept)) == {"cpu,ssd"}, "all are on ssd")
        client.check(verify=True)


# ---- lives


def test_a_life_given_at_the_seal_ends_in_every_tier(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(5, "short"), ttl_s=0.5, durable=True)
        client.put(ns, keys(5, "long"), ttl_s=600.0)
        client.put(ns, keys(5, "for ever"), ttl_s=0.0)
        assert client.lookup(ns, keys(5, "short")).hits == 5
        eventually(lambda: client.lookup(ns, keys(5, "short"), run=False).hits == 0, "its life is over")
        assert set(client.get(ns, keys(5, "short"))) <= {Outcome.ABSENT, Outcome.EXPIRED}
        eventually(lambda: client.tier("ssd")["blocks"] == 10, "it is gone from ssd, too")
        assert client.count(ns)["evictions"]["ttl"] == 10
        assert client.get(ns, [*keys(5, "long"), *keys(5, "for ever")]) == [Outcome.HIT] * 10
        client.check()


def test_a_namespaces_life_is_that_of_its_blocks_unless_a_seal_names_another(short_dir: Path) -> None:
    with running(short_dir, "--ttl", "600s", ssd=None) as daemon, daemon.client() as client:
        plain, short = client.open(SPACE), client.open(namespace(64 * KIB, "short"), ttl_s=100.0)
        client.put(plain, keys(1))
        client.put(short, keys(1))
        client.put(short, keys(1, "own"), ttl_s=50.0)
        client.put(short, keys(1, "for ever"), ttl_s=0.0)

        def life(space: Namespace, label: object) -> float | None:
            body = client.report(wire.Keys(client.next_id(), space.digest, hashes=keys(1, label)))
            told: float | None = body["blocks"][0]["ttl_s"]
            return told

        assert 590 < (life(SPACE, 0) or 0) <= 600
        assert 90 < (life(namespace(64 * KIB, "short"), 0) or 0) <= 100
        assert 40 < (life(namespace(64 * KIB, "short"), "own") or 0) <= 50
        assert life(namespace(64 * KIB, "short"), "for ever") is None


def test_a_life_goes_on_over_a_restart_and_an_expired_block_never_hits(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(5, "short"), ttl_s=1.0, durable=True)
            client.put(ns, keys(5, "long"), ttl_s=600.0, durable=True)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            eventually(lambda: client.lookup(ns, keys(5, "short"), run=False).hits == 0, "its life is over")
            assert client.get(ns, keys(5, "long")) == [Outcome.HIT] * 5
            body = client.report(wire.Keys(client.next_id(), SPACE.digest, hashes=keys(5, "long")))
            assert all(500 < block["ttl_s"] <= 600 for block in body["blocks"])
            client.check()


def test_many_short_lives_leave_no_trace(short_dir: Path) -> None:
    """What is noted of an end goes when the block goes, not when that end comes."""
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        space = namespace(4 * KIB)
        ns = client.open(space)
        for turn in range(20):
            client.put(ns, keys(1000, f"warm {turn}"), ttl_s=3600.0, batch=200)
        before = daemon.rss_bytes()
        for turn in range(60):
            client.put(ns, keys(1000, f"lives {turn}"), ttl_s=3600.0 + turn, batch=200)
        assert daemon.rss_bytes() - before < 2 * MIB
        client.check()


# ---- quotas and tenants


def test_a_tenant_over_its_quota_makes_room_among_its_own(short_dir: Path) -> None:
    uid = os.getuid()
    flags = ("--tenant", f"us=uid:{uid}", "--quota", "us:cpu=4MiB", "--quota", "us:ssd=8MiB")
    with running(short_dir, *flags, cpu="32MiB", ssd="64MiB") as daemon, daemon.client() as client:
        assert client.welcome.tenant == "us"
        ns = client.open(SPACE)
        highest = 0
        for turn in range(20):
            client.put(ns, keys(30, f"quota {turn}"), batch=30, durable=True)
            (tenant,) = [told for told in client.stats()["tenants"] if told["tenant"] == "us"]
            highest = max(highest, tenant["used_bytes"]["cpu"])
            assert tenant["used_bytes"]["cpu"] <= 4 * MIB
            assert tenant["used_bytes"]["ssd"] <= 8 * MIB
            assert tenant["quota_bytes"] == {"cpu": 4 * MIB, "ssd": 8 * MIB}
        assert highest > 3 * MIB
        assert client.tier("cpu")["evictions"]["quota"] > 0
        assert client.tier("cpu")["evictions"]["pressure"] == 0
        assert client.get(ns, keys(30, "quota 19")) == [Outcome.HIT] * 30
        client.check(verify=True)


def test_users_that_belong_to_no_tenant_are_refused(short_dir: Path) -> None:
    daemon = Daemon(short_dir, "--tenant", "them=uid:54321", "--admin", "uid:54322", cpu="8MiB", ssd=None)
    daemon.launch()
    try:
        eventually(lambda: "ready" in daemon.log_text(), "it serves")
        with pytest.raises(NotPermitted, match="belongs to no tenant"):
            daemon.client()
        assert daemon.stop() == 0
    finally:
        daemon.kill()


# ---- strict mode


def test_strict_clients_can_not_write_the_pool_by_any_way(short_dir: Path) -> None:
    with running(short_dir, *STRICT, cpu="16MiB") as daemon:
        with daemon.client() as client:
            assert client.welcome.mode == "strict"
            assert client.arena is not None
            ns = client.open(SPACE)
            assert set(client.put(ns, keys(200))) == {Outcome.SEALED}
            assert set(client.get(ns, keys(200))) == {Outcome.HIT}
            client.check(verify=True)
        _tries_to_write(daemon.socket)
        with daemon.client() as client:
            assert set(client.get(client.open(SPACE), keys(200))) == {Outcome.HIT}


def _tries_to_write(path: Path) -> None:
    """Map the pool for writing, grow or shrink it, and open it again through /proc: the kernel refuses each."""
    descriptors: list[int] = []

    class Keeping(RawClient):
        def _map(self, received: list[int], reply: wire.Welcome) -> None:
            descriptors.extend(os.dup(descriptor) for descriptor in received)
            super()._map(received, reply)

    with Keeping(path) as client:
        pool, size_bytes = descriptors[0], client.welcome.pool_bytes
        with pytest.raises(PermissionError):
            mmap.mmap(pool, size_bytes)
        with pytest.raises(PermissionError):
            os.ftruncate(pool, size_bytes // 2)
        with pytest.raises(PermissionError):
            os.pwrite(pool, b"x", 0)
        again = os.open(f"/proc/self/fd/{pool}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, size_bytes)
        finally:
            os.close(again)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptors[1], 0)
    for descriptor in descriptors:
        os.close(descriptor)


def test_strict_blocks_do_not_change_with_the_arena_after_their_seal(short_dir: Path) -> None:
    with running(short_dir, *STRICT, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        reserved = client.reserve(ns, keys(8))
        for offset, block_hash in zip(reserved.offsets, keys(8), strict=True):
            client.write(offset, payload(SPACE.digest, block_hash, SPACE.block_bytes))
        sealed = client.ask(wire.Seal(client.next_id(), reserved.ticket, durable=True), wire.Sealed)
        assert list(sealed.outcomes) == [Outcome.DURABLE] * 8
        for offset in reserved.offsets:
            client.write(offset, b"\xff" * SPACE.block_bytes)
        assert client.get(ns, keys(8)) == [Outcome.HIT] * 8
        client.check(verify=True)


def test_strict_arenas_are_windows_that_are_used_over_and_over(short_dir: Path) -> None:
    with running(short_dir, *STRICT, cpu="32MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        got = client.reserve(ns, keys(100))
        assert got.outcomes.count(Outcome.GRANTED) == 64, "what the arena holds"
        assert got.outcomes.count(Outcome.NO_ROOM) == 36
        client.ask(wire.Forfeit(client.next_id(), got.ticket), wire.Done)
        for turn in range(10):
            assert set(client.put(ns, keys(60, f"turn {turn}"), batch=60)) <= {Outcome.SEALED}
        assert client.tier("cpu")["reserved_bytes"] == 0
        client.check(verify=True)


def test_strict_clients_without_an_arena_can_not_put_but_may_look(short_dir: Path) -> None:
    with running(short_dir, "--mode", "strict", cpu="16MiB", ssd=None) as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(2))
        with daemon.client(want_pool=False) as client:
            ns = client.open(SPACE)
            with pytest.raises(UsageError, match="arena"):
                client.reserve(ns, keys(3))
            assert client.lookup(ns, keys(2)).hits == 2


# ---- limits and faults of callers


def test_a_block_that_could_never_fit_is_refused_when_its_namespace_is_opened(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        with pytest.raises(TooLarge, match="cpu-size"):
            client.open(namespace(16 * MIB))
        ns = client.open(namespace(2 * MIB))
        assert client.put(ns, keys(1)) == [Outcome.SEALED]
        assert client.get(ns, keys(1)) == [Outcome.HIT]


def test_seals_that_say_nonsense_are_refused_and_change_nothing(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        reserved = client.reserve(ns, keys(3))
        nonsense = [
            wire.Seal(client.next_id(), reserved.ticket, [0, 0]),
            wire.Seal(client.next_id(), reserved.ticket, [0, 1], [1]),
            wire.Seal(client.next_id(), reserved.ticket, None, [1]),
        ]
        for message in nonsense:
            with pytest.raises(UsageError):
                client.ask(message)
        with pytest.raises(LeaseExpired):
            client.ask(wire.Seal(client.next_id(), reserved.ticket + 1))
        with pytest.raises(BadNamespace):
            client.reserve(ns + 1, keys(1))
        assert client.lookup(ns, keys(3)).hits == 0
        for offset, block_hash in zip(reserved.offsets, keys(3), strict=True):
            client.write(offset, payload(SPACE.digest, block_hash, SPACE.block_bytes))
        assert list(client.ask(wire.Seal(client.next_id(), reserved.ticket), wire.Sealed).outcomes) == [
            Outcome.SEALED
        ] * 3  # fmt: skip
        assert client.get(ns, keys(3)) == [Outcome.HIT] * 3


def test_one_key_twice_in_a_batch_is_written_once(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        (one,) = keys(1)
        got = client.reserve(ns, [one, one, one])
        assert sorted(got.outcomes) == sorted([Outcome.GRANTED, Outcome.BUSY, Outcome.BUSY])
        client.ask(wire.Forfeit(client.next_id(), got.ticket))
        assert client.put(ns, [one]) == [Outcome.SEALED]
        found = client.read(ns, [one, one])
        assert [outcome for outcome, _ in found] == [Outcome.HIT, Outcome.HIT]
        client.check()


def test_blocks_found_present_are_not_evicted_by_the_same_put(short_dir: Path) -> None:
    """The head of a chain that is stored already must not make room for its own tail."""
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        head = keys(20, "head")
        client.put(ns, head)
        client.put(ns, keys(76, "fills the rest"))
        assert client.lookup(ns, head).hits == 20
        got = client.reserve(ns, [*head, *keys(20, "tail")])
        assert got.outcomes.count(Outcome.PRESENT) == 20
        client.ask(wire.Seal(client.next_id(), got.ticket))
        assert client.lookup(ns, head).hits == 20


def test_the_tail_of_a_chain_goes_before_its_head(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        chain = keys(30, "chain")
        client.put(ns, chain, batch=20)
        client.get(ns, chain)  # in one window
        client.put(ns, keys(80, "pressure"))
        found = client.lookup(ns, chain, run=False).outcomes
        kept = found.count(Outcome.HIT)
        assert 10 <= kept < 30
        assert client.lookup(ns, chain).hits == kept, "what is kept is a prefix"


def test_while_the_daemon_drains_nothing_new_is_taken_in(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "back") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(400))
        daemon.signal(signal.SIGTERM)
        with pytest.raises((Closing, OSError)):  # noqa: PT012
            while True:
                client.reserve(ns, keys(1, "late"))
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        daemon.process = None
        daemon.start()
        with daemon.client() as again:
            assert again.get(again.open(SPACE), keys(400)) == [Outcome.HIT] * 400


def test_checksums_given_at_the_seal_are_kept_and_told_with_reads(short_dir: Path) -> None:
    with running(short_dir, "--verify-reads", cpu="8MiB") as daemon, daemon.client() as client:
        assert client.welcome.verify_reads
        ns = client.open(SPACE)
        reserved = client.reserve(ns, keys(2))
        sums: list[int] = []
        for offset, block_hash in zip(reserved.offsets, keys(2), strict=True):
            content = payload(SPACE.digest, block_hash, SPACE.block_bytes)
            client.write(offset, content)
            sums.append(checksum(content))
        client.ask(wire.Seal(client.next_id(), reserved.ticket, [0, 1], sums), wire.Sealed)
        got = client.acquire(ns, keys(2))
        assert got.checksums == sums
        client.release(got.lease)
