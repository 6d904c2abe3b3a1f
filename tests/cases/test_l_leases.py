"""Cases L: rights end. L01 leases that nobody uses, L03 keys whose writer died."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import KVStoreError, LeaseExpired, TooLarge
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.puppet import puppet
from tests.rawclient import keys, namespace

SPACE = namespace(64 * KIB)


# ---- L01: pins are leases: they expire, and they go with their session


@pytest.mark.parametrize("leaving", ["its end", "disconnect"])
def test_l01_a_thousand_leases_that_nobody_releases_end_and_everything_is_evictable(
    short_dir: Path, leaving: str
) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(64)
        client.put(ns, hashes)
        idle = daemon.client()
        idle.open(SPACE)
        for number in range(1000):
            got = idle.acquire(ns, hashes[number % 64 : number % 64 + 1], lease_s=0.5 if leaving == "its end" else 60)
            assert got.lease
        assert client.stats()["sessions"]["leases"] > 0 or leaving == "its end"
        if leaving == "disconnect":
            idle.close()
        eventually(lambda: client.stats()["sessions"]["leases"] == 0, "all leases are over")
        assert client.tier("cpu")["pinned_bytes"] == 0
        # Fill the tier with others: every one of the first blocks can go.
        capacity = client.tier("cpu")["capacity_bytes"] // SPACE.block_bytes
        assert set(client.put(ns, keys(2 * capacity, "others"))) == {Outcome.SEALED}
        assert client.lookup(ns, hashes, run=False).outcomes.count(Outcome.HIT) == 0
        client.check()
        idle.close()


def test_l01_lookup_pins_nothing(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(64))
        for _ in range(1000):
            assert client.lookup(ns, keys(64)).hits == 64
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.report(wire.Evict(client.next_id(), "cpu"))
        assert client.tier("cpu")["used_bytes"] == 0


def test_l01_a_lease_is_a_right_of_its_own_session_alone(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        client.put(ns, keys(1))
        got = client.acquire(ns, keys(1))
        other.release(got.lease)
        other.ask(wire.Ping(other.next_id()))
        assert client.stats()["sessions"]["leases"] == 1, "another session's release does nothing"
        client.release(got.lease)
        client.release(got.lease)
        client.release(got.lease + 1000)
        client.ask(wire.Ping(client.next_id()))
        assert client.stats()["sessions"]["leases"] == 0
        client.check()


def test_l01_leases_pin_half_of_the_tier_at_most(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        capacity = client.tier("cpu")["capacity_bytes"]
        hashes = keys(capacity // SPACE.block_bytes)
        client.put(ns, hashes)
        present = [h for h, tiers in zip(hashes, client.tiers_of(ns, hashes), strict=True) if tiers]
        with pytest.raises(TooLarge):
            client.acquire(ns, present, copying=False)
        assert client.tier("cpu")["pinned_bytes"] == 0
        granted = 0
        for block_hash in present:
            got = client.acquire(ns, [block_hash], copying=False, deadline_s=0.0)
            granted += got.lease != 0
        assert 0 < granted * SPACE.block_bytes <= capacity // 2
        # The others can still be replaced.
        assert set(client.put(ns, keys(200, "others"))) == {Outcome.SEALED}
        client.check()


def test_l01_a_zero_copy_lease_outlives_its_time_and_is_reported(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        with puppet(daemon.socket) as reader:
            reader.call("open", 64 * KIB)
            reader.call("put", 8, "viewed")
            options = {"copying": False, "lease_s": 0.2}
            assert reader.call("acquire", 8, "viewed", options) == [Outcome.HIT] * 8
            eventually(lambda: client.stats()["sessions"]["leases_overdue"] == 1, "it is overdue")
            ns = client.open(SPACE)
            client.ask(wire.Drop(client.next_id(), ns, keys(8, "viewed")))
            client.put(ns, keys(400, "pressure"))
            assert reader.call("exact"), "its slots are never reused under it"
            reader.call("hang_up")
            client.put(ns, keys(400, "more pressure"))
            assert reader.call("exact"), "nor when the connection is gone and the process is not"
            assert client.tier("cpu")["pinned_bytes"] > 0
        eventually(lambda: client.tier("cpu")["pinned_bytes"] == 0, "with its process they end")
        client.check()


# ---- L03: an open put belongs to its connection


def test_l03_a_key_whose_writer_was_killed_is_granted_to_the_next(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        baseline = client.tier("cpu")["used_bytes"]
        with puppet(daemon.socket) as writer:
            writer.call("open", 64 * KIB)
            writer.call("reserve", 8, "l03")
            writer.call("write", 0.5)
            assert set(client.reserve(ns, keys(8, "l03")).outcomes) == {Outcome.BUSY}
            writer.kill()
        eventually(lambda: client.tier("cpu")["reserved_bytes"] == 0, "the dead writer's slots are back", within_s=5)
        assert client.tier("cpu")["used_bytes"] == baseline
        assert client.tier("cpu")["quarantined_bytes"] == 0
        assert set(client.put(ns, keys(8, "l03"))) == {Outcome.SEALED}
        assert client.get(ns, keys(8, "l03")) == [Outcome.HIT] * 8
        client.check(verify=True)


def test_l03_a_writer_that_only_hung_up_may_still_write_so_its_slots_wait_for_its_end(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        with puppet(daemon.socket) as writer:
            writer.call("open", 64 * KIB)
            writer.call("reserve", 8, "l03")
            writer.call("hang_up")
            eventually(lambda: client.tier("cpu")["quarantined_bytes"] == 8 * 64 * KIB, "they are in quarantine")
            assert set(client.put(ns, keys(8, "l03"))) == {Outcome.SEALED}, "another writer is not kept waiting"
            client.put(ns, keys(400, "pressure"))
            writer.call("write")
            assert set(client.get(ns, keys(400, "pressure"))) <= {Outcome.HIT, Outcome.ABSENT}
            client.check()
        eventually(lambda: client.tier("cpu")["quarantined_bytes"] == 0, "its process is gone")
        client.check()


def test_l03_a_reservation_ends_at_its_deadline_and_the_late_seal_is_refused(short_dir: Path) -> None:
    with (
        running(short_dir, "--reservation", "300ms", cpu="16MiB", ssd=None) as daemon,
        daemon.client() as slow,
        daemon.client() as client,
    ):
        ns = slow.open(SPACE)
        client.open(SPACE)
        late = slow.reserve(ns, keys(4))
        assert list(late.outcomes) == [Outcome.GRANTED] * 4
        eventually(lambda: client.tier("cpu")["quarantined_bytes"] == 4 * 64 * KIB, "its time is over")
        assert set(client.put(ns, keys(4))) == {Outcome.SEALED}, "another writer is granted fresh slots"
        for offset in late.offsets:
            slow.write(offset, b"\xee" * SPACE.block_bytes)
        sealed = slow.ask(wire.Seal(slow.next_id(), late.ticket), wire.Sealed)
        assert list(sealed.outcomes) == []
        sealed = slow.ask(wire.Seal(slow.next_id(), late.ticket, [0, 1]), wire.Sealed)
        assert list(sealed.outcomes) == [Outcome.REFUSED] * 2
        assert client.tier("cpu")["quarantined_bytes"] == 2 * 64 * KIB, "a late seal acknowledges its slots"
        slow.ask(wire.Forfeit(slow.next_id(), late.ticket), wire.Done)
        assert client.tier("cpu")["quarantined_bytes"] == 0
        with pytest.raises(LeaseExpired):
            slow.ask(wire.Seal(slow.next_id(), late.ticket, [2]))
        assert client.get(ns, keys(4)) == [Outcome.HIT] * 4
        client.check(verify=True)


def test_l03_the_first_valid_seal_wins(short_dir: Path) -> None:
    with (
        running(short_dir, "--reservation", "300ms", cpu="16MiB", ssd=None) as daemon,
        daemon.client() as first,
        daemon.client() as second,
    ):
        ns = first.open(SPACE)
        second.open(SPACE)
        late = first.reserve(ns, keys(1))
        eventually(lambda: second.tier("cpu")["quarantined_bytes"] > 0, "its time is over")
        fresh = second.reserve(ns, keys(1))
        assert list(fresh.outcomes) == [Outcome.GRANTED]
        assert fresh.offsets != late.offsets
        assert list(first.ask(wire.Seal(first.next_id(), late.ticket, [0]), wire.Sealed).outcomes) == [Outcome.REFUSED]
        second.ask(wire.Forfeit(second.next_id(), fresh.ticket), wire.Done)
        second.check()


def test_l03_quarantine_of_one_process_is_bounded_and_stops_nobody_else(short_dir: Path) -> None:
    """A client that reserves, lets its time run out and never acknowledges takes a quarter of the tier at most."""
    with (
        running(short_dir, "--reservation", "200ms", cpu="16MiB", ssd=None) as daemon,
        daemon.client() as client,
        puppet(daemon.socket) as bad,
    ):
        ns = client.open(SPACE)
        bad.call("open", 64 * KIB)
        capacity = client.tier("cpu")["capacity_bytes"]

        def reserve_more() -> bool:
            number = client.tier("cpu")["quarantined_bytes"]
            return number > 0 and set(bad.call("reserve", 4, f"bad-{number}")) == {Outcome.NO_ROOM}

        bad.call("reserve", 4, "bad")
        eventually(reserve_more, "it gets no more", every_s=0.05)
        eventually(lambda: client.tier("cpu")["reserved_bytes"] == 0, "its time is over")
        assert client.tier("cpu")["quarantined_bytes"] <= capacity // 4
        assert set(client.put(ns, keys(300, "good"))) == {Outcome.SEALED}
        client.check()
        bad.call("say_goodbye")
        eventually(lambda: client.tier("cpu")["quarantined_bytes"] == 0, "it said goodbye")
        client.check()


def test_l03_a_ticket_is_a_right_of_its_own_session_alone(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        reserved = client.reserve(ns, keys(1))
        for message in (
            wire.Seal(other.next_id(), reserved.ticket),
            wire.Forfeit(other.next_id(), reserved.ticket),
        ):
            with pytest.raises(LeaseExpired):
                other.ask(message)
        with pytest.raises(KVStoreError):
            other.ask(wire.Seal(other.next_id(), 2**63, [2**64 - 1]))
        client.ask(wire.Seal(client.next_id(), reserved.ticket), wire.Sealed)
        client.check()
