"""Verbs of operators over the raw socket: pins, lives, drops, evictions, drains, dumps, and who may use them."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import (
    BadNamespace,
    BadRecord,
    NotPermitted,
    TooManyLeases,
    UnavailableError,
    UsageError,
)
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)


def pin(client: RawClient, hashes: list[bytes], for_s: float) -> list[int]:
    return list(client.ask(wire.Pin(client.next_id(), SPACE.digest, hashes, for_s), wire.Found).outcomes)


def listed(client: RawClient, hashes: list[bytes]) -> dict[str, dict[str, Any]]:
    body = client.report(wire.Keys(client.next_id(), SPACE.digest, hashes=hashes))
    blocks: list[dict[str, Any]] = body["blocks"]
    return {block["hash"]: block for block in blocks}


# ---- who may


@pytest.mark.parametrize(
    "message",
    [
        wire.Pin(1, SPACE.digest, keys(1), 1.0),
        wire.Unpin(1, SPACE.digest, keys(1)),
        wire.Ttl(1, SPACE.digest, keys(1), 1.0),
        wire.DropNamespace(1, None),
        wire.DropBlocks(1, SPACE.digest, keys(1)),
        wire.Evict(1, "cpu"),
        wire.Check(1),
        wire.Gc(1),
        wire.Drain(1),
        wire.Dump(1, SPACE.digest, "/nowhere/x"),
        wire.Load(1, "/nowhere/x"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_changes_something_needs_the_admin_role(engine: RawClient, message: wire.Message) -> None:
    with pytest.raises(NotPermitted, match="admin"):
        engine.ask(message)


def test_looking_needs_no_role(engine: RawClient) -> None:
    assert engine.welcome.role == "engine"
    ns = engine.open(SPACE)
    engine.put(ns, keys(2))
    assert engine.report(wire.Status(engine.next_id()))["role"] == "engine"
    assert engine.stats()["totals"]["stored_blocks"] >= 2
    assert engine.report(wire.Keys(engine.next_id(), SPACE.digest))["total"] == 2
    assert engine.ask(wire.Drop(engine.next_id(), ns, keys(2)), wire.Found).hits == 2, "its own blocks it may drop"


@pytest.fixture(name="engine", scope="module")
def engine_of_a_daemon_whose_admin_is_another(private_temp_dir: Path) -> Any:
    directory = private_temp_dir / "engine"
    directory.mkdir()
    with running(directory, "--admin", "uid:54321", cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        yield client
    for left in directory.iterdir():
        left.unlink()
    directory.rmdir()


# ---- pins


def test_pinned_blocks_survive_pressure_expiry_and_eviction_until_their_end(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(10, "pinned"), ttl_s=0.3)
        assert pin(client, [*keys(10, "pinned"), *keys(1, "absent")], 600.0) == [Outcome.DONE] * 10 + [Outcome.ABSENT]
        client.put(ns, keys(300, "pressure"))
        client.report(wire.Evict(client.next_id(), "cpu"))
        eventually(lambda: {b["ttl_s"] for b in listed(client, keys(10, "pinned")).values()} == {0}, "they are over")
        assert client.get(ns, keys(10, "pinned")) == [Outcome.HIT] * 10
        assert client.stats()["pins"] == {"blocks": 10, "bytes": 10 * SPACE.block_bytes}
        assert client.count(ns)["pinned_blocks"] == 10
        client.ask(wire.Unpin(client.next_id(), SPACE.digest, keys(10, "pinned")), wire.Found)
        eventually(lambda: client.lookup(ns, keys(10, "pinned"), run=False).hits == 0, "then they end")
        assert client.count(ns)["misses"]["expired"] == 10
        client.put(ns, keys(10, "again"))
        pin(client, keys(10, "again"), 0.3)
        eventually(lambda: client.stats()["pins"]["blocks"] == 0, "pins have an end")
        client.put(ns, keys(300, "more"))
        assert client.lookup(ns, keys(10, "again"), run=False).outcomes.count(Outcome.HIT) == 0
        client.check()


def test_more_pins_than_the_look_ahead_leave_the_rest_evictable(short_dir: Path) -> None:
    with running(short_dir, cpu="64MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        pinned = keys(230, "pinned")
        client.put(ns, pinned)
        assert set(pin(client, pinned, 600.0)) == {Outcome.DONE}
        for turn in range(10):
            assert set(client.put(ns, keys(500, f"others {turn}"), wait_s=2.0)) == {Outcome.SEALED}
        assert client.lookup(ns, pinned).hits == 230
        client.check()


def test_pins_keep_a_quarter_of_a_tier_at_most(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(90))
        with pytest.raises(TooManyLeases, match="unpin"):
            pin(client, keys(90), 600.0)
        assert client.stats()["pins"]["blocks"] == 0, "all or nothing"
        assert set(pin(client, keys(90)[:24], 600.0)) == {Outcome.DONE}
        with pytest.raises(TooManyLeases):
            pin(client, keys(90)[24:26], 600.0)
        assert set(pin(client, keys(90)[:24], 700.0)) == {Outcome.DONE}, "again is not more"


def test_pins_are_durable_over_a_kill_and_over_with_their_block(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "back", cpu="8MiB", ssd="24MiB") as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(10, "pinned"))
            pin(client, keys(10, "pinned"), 600.0)
            eventually(lambda: client.tier("ssd")["blocks"] == 10, "what is pinned is written")
            client.put(ns, keys(5, "dropped"), durable=True)
            pin(client, keys(5, "dropped"), 600.0)
            client.ask(wire.Drop(client.next_id(), ns, keys(5, "dropped")))
            assert client.stats()["pins"]["blocks"] == 10
            client.report(wire.Drain(client.next_id()))
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert client.stats()["pins"]["blocks"] == 10
            for turn in range(4):
                client.put(ns, keys(300, f"pressure {turn}"), durable=True)
            assert client.get(ns, keys(10, "pinned")) == [Outcome.HIT] * 10
            client.put(ns, keys(5, "dropped"))
            assert client.stats()["pins"]["blocks"] == 10, "a block stored anew is not pinned by an old pin"
            client.check(verify=True)


# ---- lives


def test_lives_are_set_for_blocks_and_namespaces_and_survive_a_kill(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(6), durable=True)
            assert listed(client, keys(1))[keys(1)[0].hex()]["ttl_s"] is None
            client.ask(wire.Ttl(client.next_id(), SPACE.digest, keys(6)[:3], 600.0), wire.Found)
            client.ask(wire.Ttl(client.next_id(), SPACE.digest, [], 300.0), wire.Done)
            client.put(ns, keys(1, "new"), durable=True)
            assert 290 < listed(client, keys(1, "new"))[keys(1, "new")[0].hex()]["ttl_s"] <= 300
            client.ask(wire.Ttl(client.next_id(), SPACE.digest, keys(6)[2:3], 0.0), wire.Found)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            lives = [listed(client, keys(6))[h.hex()]["ttl_s"] for h in keys(6)]
            assert all(550 < life <= 600 for life in lives[:2])
            assert lives[2:] == [None] * 4
            client.put(ns, keys(1, "newer"))
            assert 290 < listed(client, keys(1, "newer"))[keys(1, "newer")[0].hex()]["ttl_s"] <= 300
            client.ask(wire.Ttl(client.next_id(), SPACE.digest, keys(6), 0.05), wire.Found)
            eventually(lambda: client.lookup(ns, keys(6), run=False).hits == 0, "their lives are over")
            client.check()


def test_a_life_shortened_while_a_block_is_written_is_short_after_a_restart(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            for turn in range(10):
                hashes = keys(30, f"turn {turn}")
                client.put(ns, hashes, batch=30)
                client.ask(wire.Ttl(client.next_id(), SPACE.digest, hashes, 600.0), wire.Found)
            eventually(lambda: client.tier("ssd")["blocks"] == 300)
            client.report(wire.Drain(client.next_id()))
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            client.open(SPACE)
            for turn in range(10):
                told = listed(client, keys(30, f"turn {turn}"))
                assert len(told) == 30
                assert all(block["ttl_s"] is not None for block in told.values()), turn


# ---- drops


def test_dropped_blocks_are_gone_from_every_tier_for_good(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(20), durable=True)
            held = client.acquire(ns, keys(20)[:2], copying=False)
            found = client.ask(wire.Drop(client.next_id(), ns, [*keys(20)[:10], *keys(1, "absent")]), wire.Found)
            assert list(found.outcomes) == [Outcome.DONE] * 10 + [Outcome.ABSENT]
            told = client.ask(wire.DropBlocks(client.next_id(), SPACE.digest, keys(20)[10:12]), wire.Found)
            assert told.hits == 2
            # What is just being written is dropped for good as well.
            client.put(ns, keys(30, "fresh"), batch=30)
            client.ask(wire.Drop(client.next_id(), ns, keys(30, "fresh")), wire.Found)
            assert client.get(ns, keys(20)) == [Outcome.ABSENT] * 12 + [Outcome.HIT] * 8
            assert held.lease
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert client.get(ns, keys(20)) == [Outcome.ABSENT] * 12 + [Outcome.HIT] * 8
            assert client.get(ns, keys(30, "fresh")) == [Outcome.ABSENT] * 30
            client.check(verify=True)


def test_a_put_begun_before_a_namespace_was_dropped_can_not_bring_it_back(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        client.put(ns, keys(5), durable=True)
        reserved = client.reserve(ns, keys(3, "begun"))
        epoch = client.ask(wire.Open(client.next_id(), SPACE.encode()), wire.Opened).epoch
        body = other.report(wire.DropNamespace(other.next_id(), SPACE.digest))
        assert body == {"namespaces": 1, "blocks": 5}
        assert client.ask(wire.Open(client.next_id(), SPACE.encode()), wire.Opened).epoch == epoch + 1
        sealed = client.ask(wire.Seal(client.next_id(), reserved.ticket, [0, 1, 2]), wire.Sealed)
        assert list(sealed.outcomes) == [Outcome.REFUSED] * 3
        assert client.get(ns, [*keys(5), *keys(3, "begun")]) == [Outcome.ABSENT] * 8
        assert set(client.put(ns, [*keys(5), *keys(3, "begun")])) == {Outcome.SEALED}
        client.report(wire.Gc(client.next_id()))
        assert client.tier("cpu")["blocks"] == 8
        client.check(verify=True)


def test_dropping_all_leaves_no_block_of_any_namespace(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        numbers = [client.open(namespace(64 * KIB, f"model {n}")) for n in range(5)]
        for ns in numbers:
            client.put(ns, keys(10), durable=ns % 2 == 0)
        body = client.report(wire.DropNamespace(client.next_id(), None))
        assert body == {"namespaces": 5, "blocks": 50}
        assert all(client.lookup(ns, keys(10)).hits == 0 for ns in numbers)
        client.report(wire.Gc(client.next_id()))
        for tier in ("cpu", "ssd"):
            eventually(lambda tier=tier: client.tier(tier)["used_bytes"] == 0, tier)  # type: ignore[misc]
        with pytest.raises(BadNamespace):
            client.report(wire.DropNamespace(client.next_id(), bytes(32)))
        client.check()


# ---- keys, evictions, drains


def test_keys_are_listed_in_pages(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(250))
        seen: list[str] = []
        while True:
            body = client.report(wire.Keys(client.next_id(), SPACE.digest, len(seen), 100))
            assert body["total"] == 250
            if not body["blocks"]:
                break
            seen += [block["hash"] for block in body["blocks"]]
        assert sorted(seen) == sorted(h.hex() for h in keys(250))
        assert client.report(wire.Keys(client.next_id(), SPACE.digest, 2**64 - 1, 2**64 - 1))["blocks"] == []
        (block,) = listed(client, keys(1)).values()
        assert block["size_bytes"] == SPACE.block_bytes
        assert block["tiers"] == ["cpu"]
        assert not block["pinned"]


def test_a_tier_that_is_not_there_can_not_be_evicted_from(short_dir: Path) -> None:
    with (
        running(short_dir, cpu="8MiB", ssd=None) as daemon,
        daemon.client() as client,
        pytest.raises(UsageError, match="it has cpu"),
    ):
        client.report(wire.Evict(client.next_id(), "ssd"))


def test_leased_and_pinned_blocks_are_not_evicted_by_request(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(20), durable=True)
        got = client.acquire(ns, keys(20)[:5], copying=False)
        pin(client, keys(20)[5:10], 600.0)
        for tier in ("cpu", "ssd"):
            assert client.report(wire.Evict(client.next_id(), tier))["evicted_blocks"] == 10
        assert client.lookup(ns, keys(20), run=False).outcomes.count(Outcome.HIT) == 10
        client.release(got.lease)
        client.check()


def test_a_drain_makes_everything_durable(short_dir: Path) -> None:
    with running(short_dir, "--write-policy", "back") as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(100))
            left = {"left_out_blocks": 0, "remaining_blocks": 0}
            assert client.report(wire.Drain(client.next_id())) == {"written_blocks": 100, **left}
            assert client.report(wire.Drain(client.next_id())) == {"written_blocks": 0, **left}
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            assert client.get(client.open(SPACE), keys(100)) == [Outcome.HIT] * 100


def test_gc_reclaims_what_is_over(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(50, "over"), ttl_s=0.01)
        client.put(ns, keys(50, "dropped"))
        client.report(wire.DropNamespace(client.next_id(), SPACE.digest))
        client.put(ns, keys(5, "kept"))
        client.report(wire.Gc(client.next_id()))
        assert client.tier("cpu")["blocks"] == 5
        eventually(lambda: client.tier("ssd")["blocks"] == 5)
        client.check()


# ---- dump and load


def test_a_dump_of_blocks_in_every_tier_is_loaded_exactly_elsewhere(short_dir: Path) -> None:
    dump, other = short_dir / "dump", short_dir / "other"
    other.mkdir()
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(200, "cold"), durable=True)
        client.report(wire.Evict(client.next_id(), "cpu"))
        client.put(ns, keys(50, "warm"))
        client.put(ns, keys(5, "short"), ttl_s=500.0)
        body = client.report(wire.Dump(client.next_id(), SPACE.digest, str(dump)))
        assert body == {"blocks": 255, "bytes": dump.stat().st_size, "path": str(dump), "skipped": 0}
        assert not dump.with_name("dump.part").exists()
        client.check()
    with running(other, cpu="16MiB", ssd="64MiB") as daemon, daemon.client() as client:
        body = client.report(wire.Load(client.next_id(), str(dump)))
        assert (body["blocks"], body["skipped"]) == (255, 0)
        ns = client.open(SPACE)
        eventually(lambda: client.tier("ssd")["write_queue_bytes"] == 0)
        everything = [*keys(200, "cold"), *keys(50, "warm"), *keys(5, "short")]
        assert client.get(ns, everything) == [Outcome.HIT] * 255
        assert all(400 < block["ttl_s"] <= 500 for block in listed(client, keys(5, "short")).values())
        body = client.report(wire.Load(client.next_id(), str(dump)))
        assert (body["blocks"], body["skipped"]) == (0, 255), "what is there is skipped"
        client.check(verify=True)


def test_a_damaged_dump_gives_the_blocks_before_the_damage_and_says_so(short_dir: Path) -> None:
    dump, broken = short_dir / "dump", short_dir / "broken"
    chance = random.Random(4)
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(30))
        client.report(wire.Dump(client.next_id(), SPACE.digest, str(dump)))
        whole = dump.read_bytes()
        for _ in range(25):
            at = chance.randrange(len(whole))
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            broken.write_bytes(damaged if chance.random() < 0.6 else whole[:at])
            client.report(wire.DropNamespace(client.next_id(), SPACE.digest))
            with pytest.raises((BadRecord, BadNamespace)) as told:
                client.report(wire.Load(client.next_id(), str(broken)))
            assert str(broken) in str(told.value) or isinstance(told.value, BadNamespace)
            found = client.get(ns, keys(30))
            assert set(found) <= {Outcome.HIT, Outcome.ABSENT}
        client.check(verify=True)


def test_dumps_that_can_not_be_written_leave_nothing_and_say_why(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        client.put(client.open(SPACE), keys(5))
        (short_dir / "there").write_text("kept")
        (short_dir / "busy.part").write_text("kept")
        faults: list[tuple[str, type[Exception]]] = [
            (str(short_dir / "there"), UsageError),
            (str(short_dir / "busy"), UsageError),
            (str(short_dir / "no" / "directory"), UnavailableError),
            ("relative", UsageError),
            (str(short_dir), UsageError),
            ("/", UsageError),
            ("", UsageError),
            (str(short_dir / ("n" * 300)), UnavailableError),
        ]
        for path, error in faults:
            with pytest.raises(error):
                client.report(wire.Dump(client.next_id(), SPACE.digest, path))
        with pytest.raises(UnavailableError):
            client.report(wire.Load(client.next_id(), str(short_dir / "absent")))
        assert (short_dir / "there").read_text() == (short_dir / "busy.part").read_text() == "kept"
        assert sorted(p.name for p in short_dir.iterdir()) == ["busy.part", "log", "s", "s.lock", "there"]


def test_a_dump_goes_on_while_memory_is_under_pressure(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd="1GiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(600, "dumped"), durable=True)
        over = threading.Event()

        def press() -> None:
            with daemon.client() as own:
                number, turn = own.open(namespace(64 * KIB, "others")), 0
                while not over.is_set() and turn < 200:
                    own.put(number, keys(50, f"pressure {turn}"))
                    turn += 1

        pressing = threading.Thread(target=press)
        pressing.start()
        try:
            body = client.report(wire.Dump(client.next_id(), SPACE.digest, str(short_dir / "dump")))
        finally:
            over.set()
            pressing.join()
        assert body["blocks"] == 600
        assert body["skipped"] == 0
        client.check()


def test_a_dump_that_is_cancelled_leaves_no_file(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(600, "dumped"), durable=True)
        request = wire.Dump(client.next_id(), SPACE.digest, str(short_dir / "dump"))
        client.send(request)
        assert isinstance(client.receive(request.id), wire.Progress)
        client.send(wire.Cancel(client.next_id(), request.id))
        eventually(lambda: not (short_dir / "dump.part").exists(), "nothing half-written stays")
        assert not (short_dir / "dump").exists()
        eventually(lambda: client.tier("cpu")["loads_in_flight"] == 0)
        client.check()
