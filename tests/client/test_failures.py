"""A daemon that is absent, killed, restarted, stopped or slow costs misses by the deadline, and is found again."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from kvclient import Client, Outcome, errors
from kvclient._buffers import address_of
from kvstore import wire
from tests.client.blocks import BLOCK_BYTES, empty_buffers, flat_namespace, new_hashes, payload, payloads
from tests.daemon_fixture import Daemon, eventually, running


def pause(daemon: Daemon) -> None:
    """Stop the daemon's process; returns when it stands still."""
    daemon.signal(signal.SIGSTOP)
    stat = Path(f"/proc/{daemon.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the daemon stands still")


def resume(daemon: Daemon) -> None:
    daemon.signal(signal.SIGCONT)


def test_without_a_daemon_every_block_is_unavailable(short_dir: Path) -> None:
    hashes = new_hashes(3)
    with Client(short_dir / "nobody") as client:
        blocks = client.namespace(flat_namespace())
        for _ in range(2):
            assert blocks.lookup(hashes).outcomes == (Outcome.UNAVAILABLE,) * 3
            assert blocks.fetch(hashes, empty_buffers(3)).hits == 0
            stored = blocks.store(hashes, payloads(hashes))
            assert (stored.stored, stored.failed) == (0, 3)
            assert isinstance(stored.failure, errors.PeerUnreachable)
            with blocks.acquire(hashes) as lease:
                assert lease.hits == 0
        assert not client.ping()
        counts = client.stats.snapshot()
        assert counts["misses"]["unavailable"] == 12
        assert counts["not_stored"] == {"unavailable": 6}
        assert counts["failures"]["PeerUnreachable"] == 9
        with pytest.raises(errors.PeerUnreachable):
            client.admin(wire.Stats(0))


def test_a_strict_client_raises_and_says_what_to_do(short_dir: Path) -> None:
    with Client(short_dir / "nobody", strict=True) as client:
        for _ in range(2):
            with pytest.raises(errors.PeerUnreachable, match="start kvstored"):
                client.namespace(flat_namespace()).lookup(new_hashes(1))


def test_an_absent_daemon_is_asked_for_rarely(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def refuse(path: Path, *_: object) -> None:
        tried.append(path)
        raise errors.PeerUnreachable("nobody is there")

    monkeypatch.setattr("kvclient._greeting.greet", refuse)
    now = [100.0]
    with Client(short_dir / "nobody") as client:
        monkeypatch.setattr(client._connections.breaker, "_now", lambda: now[0])  # pyright: ignore[reportPrivateUsage]
        blocks = client.namespace(flat_namespace())
        for _ in range(1000):
            blocks.lookup(new_hashes(1))
            now[0] += 0.01
    assert 5 <= len(tried) <= 20


def test_a_daemon_that_starts_later_is_found(short_dir: Path) -> None:
    hashes = new_hashes(2)
    daemon = Daemon(short_dir, ssd=None)
    with Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace())
        assert blocks.store(hashes, payloads(hashes)).failed == 2
        daemon.start()
        try:
            eventually(lambda: blocks.store(hashes, payloads(hashes)).failed == 0, "the daemon is found")
        finally:
            assert daemon.stop() == 0


@pytest.mark.parametrize("crash", [True, False])
def test_a_restarted_daemon_is_used_without_a_new_client(daemon: Daemon, crash: bool) -> None:
    hashes = new_hashes(4)
    with Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace())
        assert blocks.store(hashes, payloads(hashes)).stored == 4
        daemon.kill() if crash else daemon.stop()
        assert blocks.fetch(hashes, empty_buffers(4)).outcomes == (Outcome.UNAVAILABLE,) * 4
        daemon.start()
        eventually(client.ping, "the new daemon is found")
        assert blocks.lookup(hashes).outcomes == (Outcome.ABSENT,) * 4
        assert blocks.store(hashes, payloads(hashes)).stored == 4
        into = empty_buffers(4)
        assert blocks.fetch(hashes, into).hits == 4
        assert into == payloads(hashes)
        # One pool is mapped, the new daemon's.
        maps = Path("/proc/self/maps").read_text()
        assert len({line.split()[4] for line in maps.splitlines() if "/memfd:kv" in line}) <= 1


def test_views_outlive_the_daemon_that_gave_them(daemon: Daemon) -> None:
    hashes = new_hashes(2)
    with Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace())
        blocks.store(hashes, payloads(hashes))
        with blocks.acquire(hashes) as lease:
            daemon.kill()
            daemon.start()
            eventually(client.ping, "the new daemon is found")
            others = new_hashes(100)
            assert blocks.store(others, payloads(others)).stored == 100
            assert [bytes(view) for view in lease.views if view is not None] == payloads(hashes)


def test_a_stopped_daemon_costs_the_deadline_once_and_then_next_to_nothing(daemon: Daemon) -> None:
    hashes = new_hashes(3)
    with Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace())
        assert blocks.store(hashes, payloads(hashes)).stored == 3
        pause(daemon)
        found = blocks.fetch(hashes, empty_buffers(3), deadline_s=0.2)
        assert found.outcomes == (Outcome.DEADLINE,) * 3
        assert isinstance(found.failure, errors.DeadlineExceeded)
        # The breaker is open: this deadline would fail the test's own.
        assert blocks.lookup(hashes, deadline_s=1000).outcomes == (Outcome.UNAVAILABLE,) * 3
        resume(daemon)
        into = empty_buffers(3)
        eventually(lambda: blocks.fetch(hashes, into).hits == 3, "the daemon is found again")
        assert into == payloads(hashes)


def test_a_stopped_daemon_is_probed_shortly_whatever_the_calls_deadline(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace())
        assert client.ping()
        pause(daemon)
        assert blocks.lookup(new_hashes(1), deadline_s=0.2).outcomes == (Outcome.DEADLINE,)
        began_at = time.monotonic()
        while time.monotonic() < began_at + 1.5:
            blocks.lookup(new_hashes(1), deadline_s=1000)
        resume(daemon)
        eventually(client.ping, "the daemon is found again")


def test_a_client_that_never_met_the_stopped_daemon_returns_by_its_deadline(daemon: Daemon) -> None:
    pause(daemon)
    with Client(daemon.socket) as client:
        found = client.namespace(flat_namespace()).lookup(new_hashes(1), deadline_s=0.1)
        assert found.outcomes == (Outcome.DEADLINE,)
        resume(daemon)
        eventually(client.ping, "the daemon is found")


def test_what_late_replies_grant_is_given_back(daemon: Daemon) -> None:
    hashes = new_hashes(3)
    with Client(daemon.socket) as client, Client(daemon.socket, strict=True) as observer:
        blocks = client.namespace(flat_namespace())
        assert blocks.store(hashes[:1], payloads(hashes[:1])).stored == 1
        pause(daemon)
        assert blocks.acquire(hashes[:1], deadline_s=0.05).outcomes == (Outcome.DEADLINE,)
        assert blocks.store(hashes[1:], payloads(hashes[1:]), deadline_s=0.05).failed == 2
        resume(daemon)
        eventually(client.ping, "the daemon is found again")

        def all_given_back() -> bool:
            client.ping()
            sessions = observer.admin(wire.Stats(0))["sessions"]
            return bool(sessions["leases"] == sessions["reservations"] == 0)

        eventually(all_given_back, "lease and reservation are given back")
        assert client.stats.snapshot()["late_replies_undone"] == 2
        others = observer.namespace(blocks.namespace)
        assert others.store(hashes[1:], payloads(hashes[1:])).stored == 2


def test_a_daemon_killed_in_the_middle_of_calls_gives_misses_or_exact_blocks(daemon: Daemon) -> None:
    hashes = new_hashes(200)
    stop = threading.Event()
    wrong: list[bytes] = []
    with Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace())

        def use(seed: int) -> None:
            at = seed
            while not stop.is_set():
                at = (at + 7) % 180
                some = hashes[at : at + 20]
                blocks.store(some, payloads(some), deadline_s=2)
                into = empty_buffers(20)
                found = blocks.fetch(some, into, run=False, deadline_s=2)
                wrong.extend(
                    block_hash
                    for block_hash, outcome, content in zip(some, found.outcomes, into, strict=True)
                    if outcome == Outcome.HIT and bytes(content) != payload(block_hash)
                )

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            eventually(client.ping, "the daemon answers")
            daemon.kill()
            daemon.start()
        eventually(client.ping, "the daemon answers")
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_seal_that_comes_too_late_is_no_store(short_dir: Path) -> None:
    """A writer that stands still between its reservation and its copy for longer than a reservation lives."""
    hashes = new_hashes(1)
    with (
        running(short_dir, "--reservation", "1s", ssd=None) as daemon,
        Client(daemon.socket) as client,
        Client(daemon.socket, strict=True) as other,
    ):
        blocks = client.namespace(flat_namespace())
        theirs = other.namespace(blocks.namespace)
        wrong = bytes(BLOCK_BYTES)

        class SlowSource:
            count = 1

            def segments(self, position: int) -> list[tuple[int, int]]:
                eventually(lambda: theirs.store(hashes, payloads(hashes)).stored == 1, "the other writer is granted")
                return [(address_of(wrong), BLOCK_BYTES)]

        assert blocks.store(hashes, SlowSource()).outcomes == (Outcome.REFUSED,)
        into = empty_buffers(1)
        assert blocks.fetch(hashes, into).hits == 1
        assert into == payloads(hashes)
        assert other.admin(wire.Stats(0))["sessions"]["quarantined_slots"] == 0


@pytest.mark.parametrize("deadline_s", [-1, float("nan"), 1e12])
def test_a_deadline_that_is_none_is_refused(short_dir: Path, deadline_s: float) -> None:
    with pytest.raises(errors.UsageError):
        Client(short_dir / "nobody", deadline_s=deadline_s)
    with Client(short_dir / "nobody") as client, pytest.raises(errors.UsageError):
        client.namespace(flat_namespace()).lookup(new_hashes(1), deadline_s=deadline_s)


def test_a_closed_client_refuses_calls(daemon: Daemon) -> None:
    with Client(daemon.socket, strict=True) as client:
        blocks = client.namespace(flat_namespace())
        blocks.lookup(new_hashes(1))
    with pytest.raises(errors.Closing):
        blocks.lookup(new_hashes(1))
    client.close()


def test_a_path_too_long_for_a_socket_is_still_reached(short_dir: Path) -> None:
    directory = short_dir / ("d" * 100)
    directory.mkdir()
    with running(directory, ssd=None) as daemon, Client(daemon.socket, strict=True) as client:
        assert len(os.fsencode(daemon.socket)) > 107
        assert client.ping()
