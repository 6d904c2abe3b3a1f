"""Forked children: they reconnect by themselves, and nothing of the parent's is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from kvclient import AsyncClient, Client, errors
from kvstore import wire
from tests.client.blocks import empty_buffers, flat_namespace, new_hashes, payloads
from tests.daemon_fixture import Daemon, eventually


def in_child(work: Callable[[], None], log: Path) -> None:
    """Run `work` in a forked child; the test fails if it raises there, or does not end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            work()
            code = 0
        except BaseException:  # noqa: BLE001
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, log.read_text() if log.exists() else f"status {status}"


def test_a_child_reconnects_at_first_use_and_the_parent_goes_on(client: Client, tmp_path: Path) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(10)
    blocks.store(hashes[:5], payloads(hashes[:5]))
    sessions = client.admin(wire.Stats(0))["sessions"]["open"]

    def child() -> None:
        into = empty_buffers(5)
        assert blocks.fetch(hashes[:5], into).hits == 5
        assert into == payloads(hashes[:5])
        assert blocks.store(hashes[5:], payloads(hashes[5:])).stored == 5
        assert client.admin(wire.Stats(0))["sessions"]["open"] == sessions + 1
        client.close()

    in_child(child, tmp_path / "log")
    into = empty_buffers(10)
    assert blocks.fetch(hashes, into).hits == 10
    assert into == payloads(hashes)
    assert client.stats.snapshot()["connections_opened"] == 1


def test_a_child_that_never_uses_it_says_nothing_to_the_daemon(client: Client, tmp_path: Path) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
    blocks.store(hashes, payloads(hashes))
    with blocks.acquire(hashes) as lease:
        in_child(client.close, tmp_path / "log")
        in_child(lambda: None, tmp_path / "log")
        assert client.admin(wire.Stats(0))["sessions"]["leases"] == 1
        assert [bytes(view) for view in lease.views if view is not None] == payloads(hashes)
    assert client.stats.snapshot()["connections_opened"] == 1


def test_leases_stay_the_parents(client: Client, tmp_path: Path) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
    blocks.store(hashes, payloads(hashes))
    lease = blocks.acquire(hashes)
    views = [view for view in lease.views if view is not None]

    def child() -> None:
        with pytest.raises(errors.LeaseExpired, match="forked"):
            _ = lease.views
        with pytest.raises(ValueError, match="released"):
            bytes(views[0])
        lease.release()
        assert blocks.lookup(hashes).hits == 2

    in_child(child, tmp_path / "log")
    assert client.admin(wire.Stats(0))["sessions"]["leases"] == 1
    assert list(map(bytes, views)) == payloads(hashes)
    lease.release()


def test_forks_in_the_middle_of_other_threads_fetches_harm_neither_side(client: Client, tmp_path: Path) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(40)
    blocks.store(hashes, payloads(hashes))
    expected = payloads(hashes)
    stop = threading.Event()
    failures: list[str] = []

    def fetch() -> None:
        while not stop.is_set():
            into = empty_buffers(40)
            if blocks.fetch(hashes, into).hits != 40 or into != expected:
                failures.append("the parent got wrong blocks")

    def child() -> None:
        for _ in range(3):
            into = empty_buffers(40)
            assert blocks.fetch(hashes, into).hits == 40
            assert into == expected

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            in_child(child, tmp_path / "log")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_child_lives_on_when_its_parent_dies_first(shared_daemon: Daemon, tmp_path: Path) -> None:
    """The parent holds a lease and a connection, forks, and is killed; the daemon takes back what was the parent's."""
    namespace, hashes = flat_namespace(), new_hashes(3)
    told, tell = os.pipe()
    log = tmp_path / "log"

    def grandchild(client: Client, parent: int) -> None:
        eventually(lambda: os.getppid() != parent, "the parent is gone")
        into = empty_buffers(3)
        assert client.namespace(namespace).fetch(hashes, into).hits == 3
        assert into == payloads(hashes)
        eventually(
            lambda: client.admin(wire.Stats(0))["sessions"]["leases"] == 0, "the dead parent's lease is over"
        )
        client.close()

    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        client = Client(shared_daemon.socket, strict=True)
        blocks = client.namespace(namespace)
        blocks.store(hashes, payloads(hashes))
        lease = blocks.acquire(hashes)
        assert lease.hits == 3
        parent = os.getpid()
        if os.fork() == 0:
            code = 1
            try:
                signal.alarm(60)
                grandchild(client, parent)
                code = 0
            except BaseException:  # noqa: BLE001
                log.write_text(traceback.format_exc())
            finally:
                os.write(tell, bytes([code]))
                os._exit(code)
        os.kill(parent, signal.SIGKILL)
    os.waitpid(pid, 0)
    ended = os.read(told, 1)
    os.close(told)
    os.close(tell)
    os.waitpid(-1, 0)  # the orphan, which is ours now
    assert ended == b"\0", log.read_text() if log.exists() else ""


def test_an_asyncio_client_can_be_used_by_a_forked_childs_own_loop(shared_daemon: Daemon, tmp_path: Path) -> None:
    namespace, hashes = flat_namespace(), new_hashes(3)

    async def check(client: AsyncClient) -> None:
        into = empty_buffers(3)
        assert (await client.namespace(namespace).fetch(hashes, into)).hits == 3
        assert into == payloads(hashes)

    async def parent() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            await client.namespace(namespace).store(hashes, payloads(hashes))

            def child() -> None:
                # The running loop is the parent's; a child makes one of its own.
                asyncio._set_running_loop(None)
                asyncio.run(check(client))

            in_child(child, tmp_path / "log")
            await check(client)
            assert client.stats.snapshot()["connections_opened"] == 1

    asyncio.run(parent())
