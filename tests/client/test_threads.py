"""One client in many threads, and beside threads that keep the interpreter busy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvclient import Client, Outcome, errors
from kvstore import wire
from tests.client.blocks import empty_buffers, flat_namespace, new_hashes, payload, payloads
from tests.daemon_fixture import Daemon, eventually


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` in so many threads; the first failure is raised here."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as exc:  # noqa: BLE001
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_share_a_client_and_get_exact_blocks(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(60)

    def work(number: int) -> None:
        for turn in range(6):
            start = (number * 13 + turn * 7) % 40
            some = hashes[start : start + 20]
            assert blocks.store(some, payloads(some)).failed == 0
            into = empty_buffers(20)
            found = blocks.fetch(some, into, run=False, wait_s=5)
            assert found.hit_count == 20
            assert into == payloads(some)
            assert blocks.lookup(some).hits == 20

    in_threads(8, work)
    assert client.admin(wire.Stats(0))["sessions"]["reservations"] == 0


def test_many_threads_wait_for_few_connections(shared_daemon: Daemon) -> None:
    hashes = new_hashes(4)
    with Client(shared_daemon.socket, strict=True, connections_max=2) as client:
        blocks = client.namespace(flat_namespace())

        def work(number: int) -> None:
            for _ in range(20):
                assert blocks.store(hashes, payloads(hashes)).failed == 0

        in_threads(10, work)
        assert client.stats.snapshot()["connections_opened"] <= 2


def test_a_caller_who_gets_no_connection_by_the_deadline_is_told(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.socket, connections_max=1) as client:
        blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
        waiting = threading.Thread(target=lambda: blocks.wait(hashes, 60))
        waiting.start()
        eventually(lambda: client._connections._open and not client._connections._idle)  # pyright: ignore[reportPrivateUsage]
        found = blocks.lookup(hashes, deadline_s=0.05)
        assert found.outcomes == (Outcome.DEADLINE,)
        assert "connections_max" in str(found.failure)
        with Client(shared_daemon.socket, strict=True) as other:
            eventually(lambda: other.namespace(blocks.namespace).abort(hashes), "the waiter is told")
        waiting.join()


def test_leases_may_be_released_by_other_threads_during_calls(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(30)
    blocks.store(hashes, payloads(hashes))

    def work(number: int) -> None:
        for _ in range(10):
            lease = blocks.acquire(hashes[number * 3 : number * 3 + 3])
            assert lease.hits == 3
            releasing = threading.Thread(target=lease.release)
            releasing.start()
            assert blocks.lookup(hashes).hits == 30
            releasing.join()

    in_threads(6, work)
    eventually(lambda: client.admin(wire.Stats(0))["sessions"]["leases"] == 0, "all leases are released")


def test_closing_while_others_call_ends_their_calls(shared_daemon: Daemon) -> None:
    client = Client(shared_daemon.socket)
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(10)
    begun = threading.Barrier(5)

    def work(number: int) -> None:
        begun.wait()
        while not isinstance(blocks.store(hashes, payloads(hashes)).failure, errors.Closing):
            continue

    def close() -> None:
        begun.wait()
        client.close()

    closing = threading.Thread(target=close)
    closing.start()
    in_threads(4, work)
    closing.join()


def test_busy_python_threads_beside_it_do_no_harm(client: Client) -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(200))

    size = 300_000
    blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(16)
    spinning = [threading.Thread(target=spin) for _ in range(2)]
    for thread in spinning:
        thread.start()
    try:
        assert blocks.store(hashes, payloads(hashes, size)).stored == 16
        into = empty_buffers(16, size)
        assert blocks.fetch(hashes, into).hits == 16
        assert into == payloads(hashes, size)
    finally:
        stop.set()
        for thread in spinning:
            thread.join()


def test_a_signal_handler_that_raises_leaves_the_client_usable(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(20)

    class Interrupted(Exception):
        pass

    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        raise Interrupted

    for _ in range(3):
        with pytest.raises(Interrupted):
            blocks.store(hashes, payloads(hashes), progress=interrupt)
        with pytest.raises(Interrupted):
            blocks.fetch(hashes, empty_buffers(20), progress=interrupt)
    assert calls == 6
    into = empty_buffers(20)
    blocks.store(hashes, payloads(hashes))
    assert blocks.fetch(hashes, into, wait_s=5).hits == 20
    assert into == [payload(block_hash) for block_hash in hashes]
    assert client.admin(wire.Stats(0))["sessions"]["leases"] == 0
