"""Everything at once: puts, reads, drops, evictions, expiry and operators' verbs race, and every block is exact."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import CapacityError, LeaseExpired
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACES = [namespace(64 * KIB), namespace(4 * KIB, "small"), namespace(256 * KIB, "large")]


class Chaos:
    """One client that does anything at random to a few hundred keys that all share."""

    def __init__(self, client: RawClient, seed: int) -> None:
        self.client = client
        self.chance = random.Random(seed)
        self.numbers = [client.open(space) for space in SPACES]
        self.verbs: list[tuple[Callable[[], None], int]] = [
            (self.put, 30), (self.get, 30), (self.lookup, 10), (self.acquire_views, 5), (self.cancel, 10),
            (self.abandon, 5), (self.drop, 8), (self.evict, 4), (self.wait, 5), (self.prefetch, 5), (self.live, 3),
            (self.pin, 2), (self.drop_namespace, 1), (self.collect, 1),
        ]  # fmt: skip

    def step(self) -> None:
        verbs, weights = zip(*self.verbs, strict=True)
        try:
            self.chance.choices(verbs, weights)[0]()
        except (CapacityError, LeaseExpired):
            pass  # too many pins, too large a lease, or a namespace dropped under a ticket

    def some(self) -> tuple[int, int, list[bytes]]:
        """Return a namespace's place and number, and a run of keys in it."""
        at = self.chance.randrange(len(SPACES))
        start = self.chance.randrange(200)
        return at, self.numbers[at], keys(220, "chaos")[start : start + self.chance.randrange(1, 20)]

    def put(self) -> None:
        _, ns, hashes = self.some()
        ttl_s = self.chance.choice([None, None, 0.0, 0.2, 1.0])
        durable = self.chance.random() < 0.2
        self.client.put(ns, hashes, ttl_s=ttl_s, durable=durable, wait_s=0.2)

    def get(self) -> None:
        _, ns, hashes = self.some()
        self.client.get(ns, hashes, run=self.chance.random() < 0.3, deadline_s=5.0)

    def lookup(self) -> None:
        _, ns, hashes = self.some()
        self.client.lookup(ns, hashes, run=self.chance.random() < 0.5, max_ms=self.chance.choice([None, 0.0, 5.0]))

    def acquire_views(self) -> None:
        _, ns, hashes = self.some()
        self.client.get(ns, hashes[:4], copying=False, deadline_s=1.0)

    def cancel(self) -> None:
        """Ask for blocks and give up at once; what was granted all the same is let go."""
        _, ns, hashes = self.some()
        request = wire.Acquire(self.client.next_id(), ns, hashes, wait_s=self.chance.choice([0.0, 1.0]), deadline_s=1.0)
        self.client.send(request)
        self.client.send(wire.Cancel(self.client.next_id(), request.id))
        self.client.ask(wire.Ping(self.client.next_id()))
        for reply in self.client.take_replies():
            if isinstance(reply, wire.Acquired) and reply.lease:
                self.client.release(reply.lease)

    def abandon(self) -> None:
        """Reserve, write half of it, and forfeit or seal only some."""
        _, ns, hashes = self.some()
        reserved = self.client.reserve(ns, hashes)
        granted = [i for i, outcome in enumerate(reserved.outcomes) if outcome == Outcome.GRANTED]
        for position in granted:
            self.client.write(reserved.offsets[position], b"\xdd" * 1000)
        if granted:
            self.client.ask(wire.Forfeit(self.client.next_id(), reserved.ticket, granted))

    def drop(self) -> None:
        _, ns, hashes = self.some()
        self.client.ask(wire.Drop(self.client.next_id(), ns, hashes), wire.Found)

    def evict(self) -> None:
        tier = self.chance.choice(["cpu", "ssd"])
        self.client.report(wire.Evict(self.client.next_id(), tier, self.chance.randrange(1 << 20)))

    def wait(self) -> None:
        _, ns, hashes = self.some()
        self.client.ask(wire.Wait(self.client.next_id(), ns, hashes, 0.01), wire.Found)

    def prefetch(self) -> None:
        _, ns, hashes = self.some()
        self.client.ask(wire.Prefetch(self.client.next_id(), ns, hashes), wire.Found)

    def live(self) -> None:
        at, _, hashes = self.some()
        ttl_s = self.chance.choice([0.0, 0.05, 1.0])
        self.client.ask(wire.Ttl(self.client.next_id(), SPACES[at].digest, hashes, ttl_s), wire.Found)

    def pin(self) -> None:
        at, _, hashes = self.some()
        message = wire.Pin(self.client.next_id(), SPACES[at].digest, hashes[:2], self.chance.choice([0.1, 1.0]))
        self.client.ask(message, wire.Found)

    def drop_namespace(self) -> None:
        at, _, _ = self.some()
        self.client.report(wire.DropNamespace(self.client.next_id(), SPACES[at].digest))

    def collect(self) -> None:
        self.client.report(wire.Gc(self.client.next_id()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [3.0, pytest.param(90.0, marks=pytest.mark.stress)])
@pytest.mark.parametrize("policy", ["through", "back"])
def test_everything_at_once_leaves_every_block_exact(short_dir: Path, policy: str, seconds: float) -> None:
    flags = ("--reservation", "1s", "--write-policy", policy)
    with running(short_dir, *flags, cpu="16MiB", ssd="32MiB") as daemon:
        ends_s = time.monotonic() + seconds
        problems: list[str] = []

        def work(seed: int) -> None:
            try:
                with daemon.client() as client:
                    chaos = Chaos(client, seed)
                    while time.monotonic() < ends_s and not problems:
                        chaos.step()
            except Exception as exc:
                problems.append(repr(exc))
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        try:
            with daemon.client() as client:
                while any(thread.is_alive() for thread in threads) and not problems:
                    client.check(verify=random.Random(seconds).random() < 0.2)
        finally:
            for thread in threads:
                thread.join()
        assert not problems, problems
        with daemon.client() as client:
            for state in ("leases", "reservations", "quarantined_slots"):
                eventually(lambda state=state: client.stats()["sessions"][state] == 0, state)  # type: ignore[misc]
            client.check(verify=True)
            for space in SPACES:
                client.report(wire.DropNamespace(client.next_id(), space.digest))
            client.report(wire.Gc(client.next_id()))
            for tier in ("ssd", "cpu"):
                eventually(lambda tier=tier: client.tier(tier)["used_bytes"] == 0, f"{tier} is empty")  # type: ignore[misc]
            client.check()
