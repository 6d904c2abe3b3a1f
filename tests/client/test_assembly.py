"""Leases on several slices: nobody holds some while waiting long for the rest, so two who want the same both get it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvclient import Client, Namespace
from kvclient._assembly import Assembly, Siblings
from kvclient._buffers import OneBuffer
from kvclient._pool import Mapping
from kvclient._session import Session
from kvclient._steps import Await, Copy, Pause, Send
from kvstore import wire
from kvstore.wire import Outcome
from tests.client.blocks import await_all_memory, new_hashes
from tests.client.test_slices import HEADS_OUTSIDE, Model, component, namespace, rank
from tests.daemon_fixture import running

WHOLE = namespace([component("kv", HEADS_OUTSIDE)])
HALVES = [rank(WHOLE, tp, 2) for tp in range(2)]
COUNT = 4
DEADLINE_S = 100.0
HIT, NO_ROOM = [Outcome.HIT] * COUNT, [Outcome.NO_ROOM] * COUNT


class AnyMemory:
    """Stands for the pool: every place in it is good, and nothing is read."""

    address = 0

    def check(self, offsets: Sequence[int], size: int) -> None:
        pass

    def touch(self, offsets: Sequence[int], size: int) -> None:
        pass


class Conversation:
    """An assembly of COUNT blocks from two slices, driven by hand; `answers`: the outcomes of each request to come."""

    def __init__(self, answers: Sequence[Sequence[Outcome]]) -> None:
        self.now_s = 0.0
        self.held: dict[int, wire.Message] = {}
        self.settled: dict[int, int] = {}
        self.asked: list[wire.Acquire] = []
        self.leases: set[int] = set()
        self.released: list[int] = []
        self.held_in_pauses: list[int] = []
        self.pauses_s: list[float] = []
        self._answers = list(answers)
        self._replies: dict[int, wire.Message] = {}
        welcome = wire.Welcome(
            1, 1, b"b" * 16, 1, "engine", "t", "trusted", 1 << 20, 0, False, False, 8192, 4 << 20, 60.0, 10.0, 2 << 20,
            "0",
        )  # fmt: skip
        self.session = Session(welcome, cast("Mapping", AnyMemory()), now=lambda: self.now_s)
        into = OneBuffer(bytearray(COUNT * WHOLE.block_bytes), COUNT, WHOLE.block_bytes, writable=True)
        assembly = Assembly(
            self.session, DEADLINE_S, Siblings(WHOLE), into, self.held, 10.0, jitter=lambda: 0.5
        )
        holders = tuple(half.encode() for half in HALVES)
        wanted = [(at, block_hash, holders) for at, block_hash in enumerate(new_hashes(COUNT))]
        self.steps = assembly.copy(wanted, self.settled.__setitem__)

    def run(self) -> None:
        """Perform the steps to the end; time passes only in pauses and where a request is answered in vain."""
        given: Any = None
        while True:
            try:
                step = self.steps.send(given)
            except StopIteration:
                self.released += [each.lease for each in self.session.unsent() if isinstance(each, wire.Release)]
                return
            given = None
            match step:
                case Send(messages):
                    for message in (*self.session.unsent(), *messages):
                        self._sent(message)
                case Await(request):
                    given = self._replies.pop(request)
                case Pause(seconds):
                    self.pauses_s.append(seconds)
                    self.held_in_pauses.append(len(self.leases - set(self.released)))
                    self.now_s += seconds
                case Copy():
                    given = []

    def _sent(self, message: wire.Message) -> None:
        if isinstance(message, wire.Open):
            number, size = len(self.session.namespaces) + 1, Namespace.decode(message.namespace).block_bytes
            self._replies[message.id] = wire.Opened(message.id, number, 0, size)
        elif isinstance(message, wire.Release):
            self.released.append(message.lease)
        else:
            assert isinstance(message, wire.Acquire), message
            self.asked.append(message)
            outcomes = self._answers.pop(0)[: len(message.hashes)] if self._answers else HIT[: len(message.hashes)]
            lease = message.id if Outcome.HIT in outcomes else 0
            if lease:
                self.leases.add(lease)
            else:
                self.now_s += message.deadline_s
            self._replies[message.id] = wire.Acquired(
                message.id, lease, 10.0 if lease else 0.0, bytes(outcomes), [0] * len(outcomes)
            )


def test_what_is_held_is_given_back_before_the_rest_is_asked_for_again() -> None:
    talk = Conversation([HIT, NO_ROOM])
    talk.run()
    assert talk.settled == dict.fromkeys(range(COUNT), Outcome.HIT)
    assert talk.held_in_pauses == [0]
    assert talk.released[0] == talk.asked[0].id
    assert all(request.deadline_s < 1 for request in talk.asked[:2]), "nobody else waits long for what is held here"
    assert [len(request.hashes) for request in talk.asked] == [4, 4, 2, 2, 2, 2], "and then less is wanted at once"
    assert talk.asked[2].deadline_s > talk.asked[0].deadline_s, "but a slow load gets more time"
    assert set(talk.released) == talk.leases


def test_a_call_without_any_luck_ends_at_its_deadline_with_what_it_has() -> None:
    some = [Outcome.HIT, *NO_ROOM[1:]]
    talk = Conversation([some, some, *[HIT, NO_ROOM] * 1000])
    talk.run()
    assert talk.settled == {0: Outcome.HIT, 1: Outcome.NO_ROOM, 2: Outcome.NO_ROOM, 3: Outcome.NO_ROOM}
    assert max(request.deadline_s for request in talk.asked) <= DEADLINE_S / 4
    assert DEADLINE_S / 2 < talk.now_s <= DEADLINE_S
    assert set(talk.held_in_pauses) == {0}
    assert set(talk.released) == talk.leases


def test_what_is_gone_is_a_miss_at_once() -> None:
    talk = Conversation([HIT, [Outcome.ABSENT, Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]])
    talk.run()
    assert talk.settled == {0: Outcome.ABSENT, 1: Outcome.HIT, 2: Outcome.CORRUPT, 3: Outcome.HIT}
    assert talk.pauses_s == []


def test_a_single_slice_is_waited_for_as_long_as_the_call_may_take() -> None:
    """Nothing is held meanwhile, so there is no hurry."""
    talk = Conversation([])
    whole = (WHOLE.encode(),)
    four = rank(WHOLE, 0, 4)
    into = OneBuffer(bytearray(four.block_bytes), 1, four.block_bytes, writable=True)
    assembly = Assembly(talk.session, DEADLINE_S, Siblings(four), into, talk.held, 10.0)
    talk.steps = assembly.copy([(0, new_hashes(1)[0], whole)], talk.settled.__setitem__)
    talk.run()
    assert [request.deadline_s > 0.9 * DEADLINE_S for request in talk.asked] == [True]


@pytest.mark.timeout(300)
def test_two_clients_that_assemble_the_same_from_ssd_in_a_tiny_memory_both_finish(short_dir: Path) -> None:
    hashes, whole = new_hashes(60), namespace([component("kv", HEADS_OUTSIDE)], salt=new_hashes(1)[0])
    models = [Model(whole, seed) for seed in range(len(hashes))]
    expected = [model.block(whole) for model in models]
    with running(short_dir, cpu="8MiB", ssd="64MiB") as daemon:
        with Client(daemon.socket, strict=True) as client:
            await_all_memory(client)
            for half in (rank(whole, tp, 2) for tp in range(2)):
                contents = [model.block(half) for model in models]
                stored = client.namespace(half).store(hashes, contents, durable=True, wait_s=60, deadline_s=100)
                assert stored.stored == len(hashes)
        failures: list[object] = []

        def fetch() -> None:
            with Client(daemon.socket, strict=True) as client:
                for _ in range(3):
                    into = [bytearray(whole.block_bytes) for _ in hashes]
                    found = client.namespace(whole).fetch(hashes, into, deadline_s=120)
                    if found.hits != len(hashes) or into != expected:
                        failures.append(found)

        threads = [threading.Thread(target=fetch) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
