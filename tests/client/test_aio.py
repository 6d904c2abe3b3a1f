"""The asyncio client against the real daemon, under asyncio's own loop and uvloop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from kvclient import AsyncClient, Client, Outcome, errors
from kvclient._copy import Copier, Piece
from kvstore import wire
from tests.client.blocks import BLOCK_BYTES, empty_buffers, flat_namespace, new_hashes, payload, payloads
from tests.client.hostile import BadDaemon, good_greeting
from tests.client.test_failures import pause, resume
from tests.daemon_fixture import Daemon

T = TypeVar("T")
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[T]], T]:
    """Return a function that runs a coroutine to its end in a new loop."""

    async def whole(awaitable: Awaitable[T]) -> T:
        return await awaitable

    def in_new_loop(awaitable: Awaitable[T]) -> T:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(whole(awaitable))

    return in_new_loop


Run = Callable[[Awaitable[None]], None]


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.005)


def test_every_verb_does_what_the_blocking_one_does(shared_daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace()), new_hashes(30)
            assert await client.ping()
            assert (await blocks.store(hashes, payloads(hashes))).stored == 30
            assert (await blocks.store(hashes, payloads(hashes))).present == 30
            into = empty_buffers(30)
            assert (await blocks.fetch(hashes, into)).hits == 30
            assert into == payloads(hashes)
            assert (await blocks.lookup(hashes)).hits == 30
            assert (await blocks.prefetch(hashes)).hits == 30
            assert (await blocks.wait(hashes, 1)).hits == 30
            with await blocks.acquire(hashes[:4]) as lease:
                assert [bytes(view) for view in lease.views if view is not None] == payloads(hashes[:4])
            assert (await client.admin(wire.Stats(0)))["sessions"]["leases"] == 0
            assert (await blocks.pin(hashes[:1], 60)).done == 1
            assert (await blocks.unpin(hashes[:1])).done == 1
            assert (await blocks.set_ttl(hashes[:1], 60)).done == 1
            assert (await blocks.drop(hashes[:1])).done == 1
            assert await blocks.abort(new_hashes(1)) == 0
            assert (await blocks.lookup([])).hits == 0
            assert client.stats.snapshot()["stored_blocks"] == 30

    run(main())


def test_tasks_share_one_connection(shared_daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace()), new_hashes(60)

            async def work(number: int) -> None:
                for turn in range(4):
                    start = (number * 13 + turn * 7) % 40
                    some = hashes[start : start + 20]
                    assert (await blocks.store(some, payloads(some))).failed == 0
                    into = empty_buffers(20)
                    assert (await blocks.fetch(some, into, run=False, wait_s=5)).hit_count == 20
                    assert into == payloads(some)

            async with asyncio.TaskGroup() as group:
                for number in range(10):
                    group.create_task(work(number))
            assert client.stats.snapshot()["connections_opened"] == 1

    run(main())


def test_long_copies_leave_the_loop_free(shared_daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        size = 2 << 20
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(8)
            expected = payloads(hashes, size)
            assert (await blocks.store(hashes, expected)).stored == 8
            into = empty_buffers(8, size)
            assert (await blocks.fetch(hashes, into)).hits == 8
            assert into == expected

    run(main())


def test_a_slow_request_does_not_hold_up_the_others(shared_daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
            into = empty_buffers(2)
            waiting = asyncio.create_task(blocks.fetch(hashes, into, wait_s=60))
            for at in (0, 1):
                assert (await blocks.lookup(hashes)).hits == at
                await blocks.store(hashes[at : at + 1], payloads(hashes[at : at + 1]))
            assert (await waiting).hits == 2
            assert into == payloads(hashes)

    run(main())


def test_a_cancelled_wait_leaves_nothing_behind(shared_daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
            waiting = asyncio.create_task(blocks.fetch(hashes, empty_buffers(1), wait_s=60))
            await blocks.lookup(hashes)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await blocks.store(hashes, payloads(hashes))).stored == 1
            stats = await client.admin(wire.Stats(0))
            assert stats["sessions"]["leases"] == stats["sessions"]["reservations"] == 0

    run(main())


def test_a_call_cancelled_in_its_copy_returns_only_after_the_copy(
    shared_daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release, ended = threading.Event(), threading.Event(), threading.Event()
    real = Copier.run

    def held(self: Copier, pieces: list[Piece]) -> None:
        entered.set()
        assert release.wait(30)
        real(self, pieces)
        ended.set()

    async def main() -> None:
        size = 1 << 20
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(1)
            monkeypatch.setattr(Copier, "run", held)
            storing = asyncio.create_task(blocks.store(hashes, [bytes(size)]))
            await asyncio.to_thread(entered.wait)
            for _ in range(3):
                storing.cancel()
                await asyncio.sleep(0)
                assert not storing.done()
            release.set()
            with pytest.raises(asyncio.CancelledError):
                await storing
            assert ended.is_set()
            monkeypatch.undo()
            # What was reserved has been forfeited.
            assert (await blocks.store(hashes, payloads(hashes, size))).stored == 1

    run(main())


def test_another_loop_is_refused(shared_daemon: Daemon) -> None:
    async def use(client: AsyncClient) -> bool:
        return await client.ping()

    async def first(client: AsyncClient) -> None:
        assert await use(client)
        result: list[BaseException] = []

        def in_another_loop() -> None:
            try:
                asyncio.run(use(client))
            except errors.UsageError as exc:
                result.append(exc)

        await asyncio.to_thread(in_another_loop)
        assert "one client for each loop" in str(result[0])
        await client.close()

    asyncio.run(first(AsyncClient(shared_daemon.socket, strict=True)))


def test_two_loops_have_a_client_each(shared_daemon: Daemon) -> None:
    namespace, hashes = flat_namespace(), new_hashes(20)

    async def work() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks = client.namespace(namespace)
            for _ in range(10):
                assert (await blocks.store(hashes, payloads(hashes))).failed == 0
                into = empty_buffers(20)
                assert (await blocks.fetch(hashes, into, wait_s=5)).hits == 20
                assert into == payloads(hashes)

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_without_a_daemon_blocks_are_unavailable_and_strict_raises(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(short_dir / "nobody") as client:
            found = await client.namespace(flat_namespace()).fetch(new_hashes(2), empty_buffers(2))
            assert found.outcomes == (Outcome.UNAVAILABLE,) * 2
            assert not await client.ping()
        async with AsyncClient(short_dir / "nobody", strict=True) as client:
            with pytest.raises(errors.PeerUnreachable):
                await client.namespace(flat_namespace()).lookup(new_hashes(2))
        with pytest.raises(errors.Closing):
            await client.namespace(flat_namespace()).lookup(new_hashes(2))

    run(main())


def test_a_stopped_and_a_restarted_daemon_are_found_again(daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        hashes = new_hashes(2)
        async with AsyncClient(daemon.socket) as client:
            blocks = client.namespace(flat_namespace())
            assert (await blocks.store(hashes, payloads(hashes))).stored == 2
            pause(daemon)
            found = await blocks.acquire(hashes, deadline_s=0.2)
            assert found.outcomes == (Outcome.DEADLINE,) * 2
            assert (await blocks.lookup(hashes, deadline_s=1000)).outcomes == (Outcome.UNAVAILABLE,) * 2
            resume(daemon)
            await eventually(client.ping)
            # The late reply's lease is given back.
            stats = await client.admin(wire.Stats(0))
            assert stats["sessions"]["leases"] == 0
            into = empty_buffers(2)
            assert (await blocks.fetch(hashes, into)).hits == 2
            assert into == payloads(hashes)
            daemon.kill()
            assert (await blocks.lookup(hashes)).hits == 0
            daemon.start()
            await eventually(client.ping)
            assert (await blocks.store(hashes, payloads(hashes))).stored == 2

    run(main())


def test_a_client_of_a_stopped_daemon_returns_by_its_deadline(daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        pause(daemon)
        async with AsyncClient(daemon.socket) as client:
            found = await client.namespace(flat_namespace()).lookup(new_hashes(1), deadline_s=0.05)
            assert found.outcomes == (Outcome.DEADLINE,)
        resume(daemon)

    run(main())


def test_garbage_ends_all_calls_on_the_connection(short_dir: Path, run: Run) -> None:
    def answer(sock: object, request: wire.Request) -> None:
        if isinstance(request, wire.Lookup):
            sock.sendall(b"\xff\xff\xff\xff")  # type: ignore[attr-defined]
        elif isinstance(request, wire.Open):
            sock.sendall(wire.encode(wire.Opened(request.id, 1, 0, BLOCK_BYTES)))  # type: ignore[attr-defined]

    async def main(socket: Path) -> None:
        async with AsyncClient(socket) as client:
            blocks = client.namespace(flat_namespace())
            results = await asyncio.gather(*(blocks.lookup(new_hashes(1)) for _ in range(4)))
            assert {result.outcomes for result in results} == {(Outcome.UNAVAILABLE,)}

    with BadDaemon(short_dir, good_greeting(), answer) as bad:
        run(main(bad.socket))


def test_a_lease_may_be_released_from_another_thread(shared_daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
            await blocks.store(hashes, payloads(hashes))
            lease = await blocks.acquire(hashes)
            view = lease.views[0]
            assert view is not None
            assert bytes(view) == payload(hashes[0])
            del view
            await asyncio.to_thread(lease.release)

            async def is_released() -> bool:
                return bool((await client.admin(wire.Stats(0)))["sessions"]["leases"] == 0)

            await eventually(is_released)

    run(main())


def test_blocking_and_asyncio_clients_read_each_others_blocks(shared_daemon: Daemon, run: Run) -> None:
    namespace, hashes = flat_namespace(), new_hashes(5)

    async def main() -> None:
        async with AsyncClient(shared_daemon.socket, strict=True) as client:
            into = empty_buffers(5)
            assert (await client.namespace(namespace).fetch(hashes, into)).hits == 5
            assert into == payloads(hashes)

    with Client(shared_daemon.socket, strict=True) as client:
        client.namespace(namespace).store(hashes, payloads(hashes))
    run(main())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
