"""Clients that are killed, stopped or forked: no block is spoilt, and all they held comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.puppet import puppet
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)
STATES = ("leases", "reservations", "quarantined_slots")


def nothing_left(client: RawClient) -> bool:
    sessions = client.stats()["sessions"]
    cpu = client.tier("cpu")
    return all(sessions[state] == 0 for state in STATES) and cpu["pinned_bytes"] == cpu["reserved_bytes"] == 0


@pytest.mark.parametrize("mode", ["trusted", "strict"])
def test_clients_killed_with_leases_and_half_written_blocks_leave_nothing(short_dir: Path, mode: str) -> None:
    with running(short_dir, "--mode", mode, cpu="32MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(64, "kept"))
        baseline = client.tier("cpu")["used_bytes"]
        for turn in range(3):
            with puppet(daemon.socket) as writer, puppet(daemon.socket) as reader:
                writer.call("open", 64 * KIB)
                reader.call("open", 64 * KIB)
                assert writer.call("reserve", 16, f"half {turn}") == [Outcome.GRANTED] * 16
                writer.begin("write_for", 60)
                assert reader.call("acquire", 16, "kept", {"copying": turn == 1}) == [Outcome.HIT] * 16
                reader.begin("read_for", 60)
                assert not nothing_left(client)
                writer.kill()
                reader.kill()
                eventually(lambda: nothing_left(client), "everything is back", within_s=5)
            assert client.tier("cpu")["used_bytes"] == baseline
            client.check(verify=True)
        assert client.get(ns, keys(64, "kept")) == [Outcome.HIT] * 64


@pytest.mark.parametrize("mode", ["trusted", "strict"])
def test_client_stopped_while_it_writes_spoils_no_block(short_dir: Path, mode: str) -> None:
    """Its time runs out, others take its keys and all of memory, it goes on writing: only its own slots change."""
    with (
        running(short_dir, "--reservation", "500ms", "--mode", mode, cpu="16MiB") as daemon,
        daemon.client() as client,
        puppet(daemon.socket) as writer,
    ):
        ns = client.open(SPACE)
        writer.call("open", 64 * KIB)
        assert writer.call("reserve", 8, "contested") == [Outcome.GRANTED] * 8
        writer.begin("write_for", 2.0)
        writer.signal(signal.SIGSTOP)
        eventually(lambda: client.stats()["sessions"]["quarantined_slots"] == 8, "its time is over")
        assert set(client.put(ns, keys(8, "contested"))) == {Outcome.SEALED}
        pressure(client, ns, "while it is stopped")
        writer.signal(signal.SIGCONT)
        for turn in range(3):
            pressure(client, ns, f"while it writes {turn}")
            assert set(client.get(ns, keys(8, "contested"))) <= {Outcome.HIT, Outcome.ABSENT}
        assert set(writer.end()) <= {Outcome.REFUSED, 0}, "its seal is refused"
        client.check(verify=True)


def pressure(client: RawClient, ns: int, label: str) -> None:
    """Fill memory anew and see that every block is exact."""
    hashes = keys(230, label)
    assert set(client.put(ns, hashes)) == {Outcome.SEALED}
    assert set(client.get(ns, hashes)) <= {Outcome.HIT, Outcome.ABSENT}


def test_client_stopped_while_it_copies_notices_that_its_lease_is_over(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, puppet(daemon.socket) as reader:
        ns = client.open(SPACE)
        client.put(ns, keys(16, "read"))
        reader.call("open", 64 * KIB)
        assert reader.call("acquire", 16, "read", {"lease_s": 1.0}) == [Outcome.HIT] * 16
        reader.begin("read_for", 10.0)
        reader.signal(signal.SIGSTOP)
        pressure(client, ns, "within the lease")
        eventually(lambda: client.stats()["sessions"]["leases"] == 0, "its lease ends")
        for turn in range(3):
            pressure(client, ns, f"after the lease {turn}")
        reader.signal(signal.SIGCONT)
        assert reader.end() == "over", "what it copied after the end counts for nothing"
        client.check(verify=True)


def test_client_stopped_with_zero_copy_views_keeps_them_exact(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, puppet(daemon.socket) as reader:
        ns = client.open(SPACE)
        client.put(ns, keys(16, "viewed"))
        reader.call("open", 64 * KIB)
        options = {"lease_s": 0.2, "copying": False}
        assert reader.call("acquire", 16, "viewed", options) == [Outcome.HIT] * 16
        reader.signal(signal.SIGSTOP)
        for turn in range(3):
            pressure(client, ns, f"views {turn}")
        client.ask(wire.Drop(client.next_id(), ns, keys(16, "viewed")))
        pressure(client, ns, "views and a drop")
        reader.signal(signal.SIGCONT)
        assert reader.call("exact")
        reader.call("release")
        eventually(lambda: client.tier("cpu")["pinned_bytes"] == 0)
        client.check(verify=True)


def test_child_that_keeps_the_connection_open_does_not_keep_its_parents_rights(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, puppet(daemon.socket) as parent:
        ns = client.open(SPACE)
        parent.call("open", 64 * KIB)
        parent.call("put", 8, "before")
        parent.call("reserve", 8, "half")
        parent.call("acquire", 8, "before", {"copying": False})
        child = parent.call("fork")
        try:
            parent.kill()
            os.kill(child, 0)  # it lives, with the socket and the pool
            eventually(lambda: nothing_left(client), "the parent's end is seen", within_s=5)
            assert set(client.put(ns, keys(8, "half"))) == {Outcome.SEALED}
            client.check()
        finally:
            os.kill(child, signal.SIGKILL)


def test_parent_that_lives_keeps_its_rights_when_its_child_ends(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, puppet(daemon.socket) as parent:
        client.open(SPACE)
        parent.call("open", 64 * KIB)
        assert parent.call("reserve", 8, "half") == [Outcome.GRANTED] * 8
        child = parent.call("fork")
        os.kill(child, signal.SIGKILL)
        parent.call("write")
        assert parent.call("seal") == [Outcome.SEALED] * 8
        assert parent.call("get", 8, "half") == [Outcome.HIT] * 8
        client.check()
