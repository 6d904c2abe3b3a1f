"""The daemon is killed or stopped at any moment: durable blocks are exact, nothing unsealed or dropped comes back."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, disk_bytes, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)



class Load:
    """Clients that store, read, drop and pin, and remember what the daemon told them was durable."""

    def __init__(self, daemon: Daemon, steps: int) -> None:
        self.daemon = daemon
        self.steps = steps  # of one client in one round; so few that none of their blocks is evicted
        self.spaces = [namespace(64 * KIB), namespace(4 * KIB, "small"), namespace(256 * KIB, "large")]
        self.durable: dict[tuple[int, bytes], None] = {}  # all that must hit
        self.maybe: set[tuple[int, bytes]] = set()  # may hit or miss
        self.dropped: set[tuple[int, bytes]] = set()  # must miss
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def begin(self, round_number: int) -> None:
        self._over.clear()
        self._threads = [
            threading.Thread(target=self._run, args=(f"{round_number}/{number}",)) for number in range(3)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, name: str) -> None:
        chance = random.Random(name)
        try:
            with self.daemon.client() as client:
                numbers = [client.open(space) for space in self.spaces]
                for turn in range(self.steps):
                    if self._over.is_set():
                        break
                    self._step(client, numbers, chance, f"{name}/{turn}")
        except (OSError, KVStoreError):
            pass  # the daemon was killed

    def _step(self, client: RawClient, numbers: list[int], chance: random.Random, label: str) -> None:
        at = chance.randrange(len(numbers))
        ns = numbers[at]
        with self._lock:
            mine = [key for key in self.durable if key[0] == at]
        if chance.random() < 0.7 or not mine:
            hashes = keys(chance.randrange(1, 16), label)
            with self._lock:
                self.maybe.update((at, h) for h in hashes)
            outcomes = client.put(ns, hashes, durable=chance.random() < 0.7)
            with self._lock:
                for block_hash, outcome in zip(hashes, outcomes, strict=True):
                    if outcome == Outcome.DURABLE:
                        self.maybe.discard((at, block_hash))
                        self.durable[at, block_hash] = None
        elif chance.random() < 0.5:
            found = client.get(ns, [key[1] for key in chance.sample(mine, min(16, len(mine)))])
            assert set(found) <= {Outcome.HIT, Outcome.ABSENT}
        else:
            victims = chance.sample(mine, min(4, len(mine)))
            with self._lock:
                for key in victims:
                    self.durable.pop(key, None)
                    self.maybe.add(key)
            client.ask(wire.Drop(client.next_id(), ns, [key[1] for key in victims]), wire.Found)
            with self._lock:
                self.maybe.difference_update(victims)
                self.dropped.update(victims)

    def verify(self, *, everything: bool) -> None:
        """Fail unless every block is there as it must be, and the bytes of all, or of some hundred, are right."""
        with self.daemon.client() as client:
            numbers = [client.open(space) for space in self.spaces]
            for at, ns in enumerate(numbers):
                must = [h for a, h in self.durable if a == at]
                may = [h for a, h in self.maybe if a == at]
                gone = [h for a, h in self.dropped if a == at]
                found = client.lookup(ns, must, run=False).outcomes
                lost = [h.hex() for h, outcome in zip(must, found, strict=True) if outcome != Outcome.HIT]
                assert not lost, f"{len(lost)} of {len(must)} durable blocks are not there: {lost[:3]}"
                assert set(client.lookup(ns, gone, run=False).outcomes) <= {Outcome.ABSENT}, "a dropped block is back"
                if not everything:
                    must, may = (random.Random(at).sample(some, min(100, len(some))) for some in (must, may))
                assert set(client.get(ns, must)) <= {Outcome.HIT}
                assert set(client.get(ns, may)) <= {Outcome.HIT, Outcome.ABSENT}
            client.check(verify=everything)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("steps", "longest_s"), [(12, 0.3), pytest.param(60, 1.5, marks=pytest.mark.stress)], ids=["short", "long"]
)
def test_daemon_killed_twenty_times_at_random_moments_keeps_all_that_was_durable(
    short_dir: Path, steps: int, longest_s: float
) -> None:
    chance = random.Random(steps)
    with running(short_dir, cpu="32MiB", ssd="3GiB") as daemon:
        load = Load(daemon, steps)
        for number in range(20):
            load.begin(number)
            ends_s = time.monotonic() + chance.uniform(0.05, longest_s)
            eventually(lambda ends_s=ends_s: time.monotonic() >= ends_s)  # type: ignore[misc]
            daemon.kill()
            load.end()
            daemon.start(within_s=15)
            load.verify(everything=number in (9, 19))
        assert len(load.durable) > 200
        assert disk_bytes(daemon.ssd_dir) <= 3072 * MIB


def test_daemon_killed_while_it_starts_starts_again(short_dir: Path) -> None:
    chance = random.Random(7)
    with running(short_dir, cpu="16MiB") as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(100), durable=True)
        for _ in range(3):
            daemon.kill()
            daemon.launch()
            ends_s = time.monotonic() + chance.uniform(0.2, 0.6)
            eventually(lambda ends_s=ends_s: time.monotonic() >= ends_s)  # type: ignore[misc]
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            assert client.get(client.open(SPACE), keys(100)) == [Outcome.HIT] * 100
            client.check(verify=True)


def test_namespace_dropped_before_a_kill_stays_dropped(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon:
        for turn in range(2):
            hashes = keys(60, f"turn {turn}")
            with daemon.client() as client:
                ns = client.open(SPACE)
                client.put(ns, hashes, durable=turn % 2 == 0)
                body = client.report(wire.DropNamespace(client.next_id(), SPACE.digest if turn else None))
                assert body["blocks"] >= 60
                assert client.get(ns, hashes) == [Outcome.ABSENT] * 60
                after = keys(20, f"after {turn}")
                client.put(ns, after, durable=True)
            daemon.kill()
            daemon.start()
            with daemon.client() as client:
                ns = client.open(SPACE)
                assert client.get(ns, hashes) == [Outcome.ABSENT] * 60
                assert client.get(ns, after) == [Outcome.HIT] * 20
                client.check(verify=True)


def test_stopped_daemon_goes_on_where_it_was(short_dir: Path) -> None:
    """Clients without an answer in time see a timeout, and the same connection works when the daemon goes on."""
    with running(short_dir, "--reservation", "1s") as daemon, daemon.client(timeout_s=0.5) as client:
        ns = client.open(SPACE)
        client.put(ns, keys(50), durable=True)
        got = client.acquire(ns, keys(4), lease_s=0.2)
        daemon.signal(signal.SIGSTOP)
        ping = wire.Ping(client.next_id())
        client.send(ping)
        with pytest.raises(TimeoutError):
            client.answer(ping.id)
        daemon.signal(signal.SIGCONT)
        client.socket.settimeout(30)
        assert client.answer(ping.id, wire.Done)
        client.release(got.lease)
        assert client.get(ns, keys(50)) == [Outcome.HIT] * 50
        eventually(lambda: client.stats()["sessions"]["leases"] == 0)
        client.check()
