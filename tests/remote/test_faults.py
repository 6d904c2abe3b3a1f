"""Servers that die, hang, lose, lie or say no: each is a miss by the deadline, and afterwards all is well again."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.wire import MISS_FIRST, Outcome
from kvstored.remote.packing import PackName
from kvstored.remote.records import scope_id
from tests.remote import servers
from tests.remote.front import front
from tests.remote.places import (
    BLOCK_BYTES,
    KIB,
    MIB,
    SCOPE,
    WITHIN_S,
    Opened,
    Place,
    eventually,
    eventually_found,
    hash_of,
    place,
    run,
)
from tests.remote.servers import Server

MISSES = frozenset(outcome for outcome in Outcome if outcome >= MISS_FIRST)
LATE_S = 10.0  # how much longer than its deadline a call may take on a loaded machine


# Each kind's server is shared by these tests.
on_servers = pytest.mark.parametrize("any_server", ["s3", "redis"], indirect=True, scope="module")


async def misses(opened: Opened, keys: range, within_s: float) -> float:
    """Check that every block is a miss, and return how long that took."""
    began_s = time.monotonic()
    assert set(await opened.outcomes(keys, within_s=within_s)) <= MISSES
    return time.monotonic() - began_s


async def eventually_writes(opened: Opened, key: int) -> None:
    """Return when a block can be written again."""
    async with asyncio.timeout(WITHIN_S):
        while await opened.write([key]) not in ([Outcome.DURABLE], [Outcome.PRESENT]):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("kind", "serve"), [("s3", servers.s3), ("redis", servers.redis)])
def test_a_server_that_is_killed_and_comes_back_empty_costs_misses_only(
    kind: str,
    serve: Callable[[Path], AbstractContextManager[Server]],
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(server: Server, own_place: Place) -> None:
        async with own_place.opened() as opened:
            await opened.write(range(20))
            server.kill()
            await misses(opened, range(20), 5.0)
            assert opened.store.usage().state == "degraded"
            assert opened.store.usage().state_text
            assert await opened.found(range(20)) == [False] * 20
            assert set(await opened.write([30])) <= MISSES
            server.start()
            if not own_place.is_redis:
                servers.make_bucket(server.port)
            await eventually_writes(opened, 40)
            await eventually_found(opened, [0, 1, 40], [False, False, True])
            assert await opened.outcomes([0, 40]) == [Outcome.ABSENT, Outcome.HIT]
            assert opened.store.usage().state == "ready"
            await eventually(lambda: opened.store.usage().used_bytes < 10 * BLOCK_BYTES)

    with serve(short_dir) as server, place(kind, short_dir, monkeypatch, server) as own_place:
        run(scenario(server, own_place))


@on_servers
def test_a_server_that_stands_still_costs_a_deadline_once_and_nothing_after(any_place: Place) -> None:
    async def scenario() -> None:
        assert any_place.server is not None
        async with any_place.opened() as opened:
            await opened.write(range(8))
            with any_place.server.stopped():
                took_s = await misses(opened, range(8), 1.0)
                assert took_s < 1.0 + LATE_S
                began_s = time.monotonic()
                for _ in range(100):  # turned away at once; one now and then finds out
                    assert await opened.found([1, 99]) == [False, False]
                    assert set(await opened.outcomes([1, 99], within_s=1.0)) <= MISSES
                assert time.monotonic() - began_s < 100 * 0.2 + LATE_S
            await eventually_found(opened, range(8), [True] * 8)
            assert await opened.outcomes(range(8)) == [Outcome.HIT] * 8

    run(scenario())


@on_servers
def test_a_transfer_that_is_cut_gives_what_had_come_and_harms_nothing(any_place: Place) -> None:
    async def scenario() -> None:
        assert any_place.server is not None
        async with any_place.opened() as opened:
            await opened.write(range(64), length=256 * KIB)
        async with front(any_place.server.port) as door:
            through = Place(any_place.kind, any_place.url, any_place.server, clock=any_place.clock)
            with pytest.MonkeyPatch.context() as patch:
                if any_place.is_redis:
                    through.url = any_place.url.replace(str(any_place.server.port), str(door.port))
                else:
                    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{door.port}")
                async with through.opened() as opened:
                    await eventually_found(opened, range(64), [True] * 64)
                    door.cut_after = 10 * MIB
                    outcomes = await opened.outcomes(range(64), length=256 * KIB, within_s=5.0)
                    assert set(outcomes) <= MISSES | {Outcome.HIT}
                    assert set(outcomes) & MISSES
                    assert door.is_cut.is_set()
        async with any_place.opened() as opened:
            await eventually_found(opened, range(64), [True] * 64)
            assert await opened.outcomes(range(64), length=256 * KIB) == [Outcome.HIT] * 64

    run(scenario())


@on_servers
def test_a_call_that_is_cancelled_leaves_its_callers_memory_alone(any_place: Place) -> None:
    async def scenario() -> None:
        assert any_place.server is not None
        async with any_place.opened() as opened:
            await opened.write(range(4))
            with any_place.server.stopped():
                reading = asyncio.create_task(opened.read(range(4)))
                writing = asyncio.create_task(opened.write([9]))
                await asyncio.sleep(0.05)
                reading.cancel()
                writing.cancel()
                done, _ = await asyncio.wait([reading, writing], timeout=LATE_S)
                assert {reading, writing} == done
            await eventually_found(opened, range(4), [True] * 4)
            for _ in range(3):  # no answer of the cancelled one is taken for another's
                assert await opened.outcomes([3, 2]) == [Outcome.HIT] * 2

    run(scenario())


@on_servers
def test_a_drop_that_the_server_is_not_told_says_so_and_holds_here_until_it_is(any_place: Place) -> None:
    async def scenario() -> None:
        assert any_place.server is not None
        async with any_place.opened() as opened:
            await opened.write(range(4))
            with any_place.server.stopped():
                with pytest.raises(TierUnavailable, match="could not be told"):
                    await opened.store.drop(SCOPE, 0.5)
                with pytest.raises(TierUnavailable, match="could not be told"):
                    await opened.store.delete(SCOPE, [hash_of(0)], 0.5)
                assert await opened.found(range(4)) == [False] * 4
            assert await opened.found(range(4)) == [False] * 4
            await eventually_writes(opened, 50)  # it has been told by then
        async with any_place.opened() as again:
            await eventually_found(again, [*range(4), 50], [False] * 4 + [True])

    run(scenario())


@pytest.mark.parametrize("any_server", ["s3"], indirect=True, scope="module")
def test_requests_that_are_throttled_are_tried_again(any_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        assert any_place.server is not None
        async with front(any_place.server.port) as door:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{door.port}")
            async with any_place.opened() as opened:
                door.throttle = 2
                await eventually(lambda: door.throttled == 2)
                await eventually_writes(opened, 1)
                await eventually_found(opened, [1], [True])
                door.throttle = 10_000  # more than it is patient for
                await eventually(lambda: opened.store.usage().throttled > 0)
                assert "fewer requests" in opened.store.usage().state_text
                assert set(await opened.outcomes([1])) <= MISSES
                door.throttle = 0
                await eventually_writes(opened, 2)
                assert await opened.outcomes([1, 2]) == [Outcome.HIT] * 2

    run(scenario())


def test_a_redis_without_memory_refuses_writes_and_keeps_reads(short_dir: Path) -> None:
    async def scenario(url: str) -> None:
        async with Place("redis", url).opened() as opened:
            outcomes: list[Outcome] = []
            for start in range(0, 160, 8):
                outcomes += await opened.write(range(start, start + 8))
            assert set(outcomes) == {Outcome.DURABLE, Outcome.NO_ROOM}
            kept = [key for key, outcome in enumerate(outcomes) if outcome is Outcome.DURABLE]
            assert await opened.outcomes(kept) == [Outcome.HIT] * len(kept)
            usage = opened.store.usage()
            assert usage.refused_full == outcomes.count(Outcome.NO_ROOM)
            assert usage.state == "ready"

    with servers.redis(short_dir, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        run(scenario(f"redis://127.0.0.1:{server.port}"))


def test_a_redis_with_a_password_is_used_with_it_and_never_tells_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(number: int) -> None:
        url = f"redis://127.0.0.1:{number}"
        async with Place("redis", url).opened(wait=False) as opened:
            await eventually(lambda: opened.store.usage().state == "degraded")
            assert "REDIS_PASSWORD" in opened.store.usage().state_text
        async with Place("redis", f"redis://:wr0ng-pass@127.0.0.1:{number}").opened(wait=False) as opened:
            await eventually(lambda: opened.store.usage().state == "degraded")
            told = repr(opened.store.usage())
        async with Place("redis", f"redis://:s3cr3t-pass@127.0.0.1:{number}").opened() as opened:
            assert await opened.write([1]) == [Outcome.DURABLE]
        monkeypatch.setenv("REDIS_PASSWORD", "s3cr3t-pass")
        async with Place("redis", url).opened() as opened:
            assert await opened.outcomes([1]) == [Outcome.HIT]
        assert "pass@" not in told
        assert "wr0ng" not in told + caplog.text
        assert "s3cr3t" not in caplog.text

    with servers.redis(short_dir, "--requirepass", "s3cr3t-pass") as server:
        run(scenario(server.port))


def test_used_bytes_are_found_again_when_redis_has_lost_the_count(short_dir: Path) -> None:
    async def scenario(server: Server) -> None:
        async with Place("redis", f"redis://127.0.0.1:{server.port}").opened() as opened:
            await opened.write(range(10))
            exact = opened.store.usage().used_bytes
            for wrong in ("0", "999999999"):
                servers.command(server, "SET", "kvstored:used", wrong)
                await eventually(lambda: servers.command(server, "GET", "kvstored:used").split()[-1] == str(exact))
            await eventually(lambda: opened.store.usage().used_bytes == exact)

    with servers.redis(short_dir) as server:
        run(scenario(server))


def test_a_drop_holds_although_redis_has_lost_it(short_dir: Path) -> None:
    async def scenario(server: Server) -> None:
        epoch = f"kvstored:epoch:{scope_id(SCOPE).hex()}"
        servers.command(server, "SET", "kvstored:sweeper", "another")  # what was dropped stays where it is
        async with Place("redis", f"redis://127.0.0.1:{server.port}").opened() as opened:
            await opened.write([1])
            await opened.store.drop(SCOPE, WITHIN_S)
            for lost in (("DEL", epoch), ("SET", epoch, "0"), ("SET", epoch, "nonsense"), ("LPUSH", epoch, "x")):
                servers.command(server, "DEL", epoch)
                servers.command(server, *lost)
                assert await opened.found([1]) == [False]
                assert set(await opened.outcomes([1])) <= MISSES
            servers.command(server, "DEL", epoch)
            await eventually_writes(opened, 2)
            assert servers.command(server, "GET", epoch).split()[-1] == "1"
            assert await opened.outcomes([1, 2]) == [Outcome.ABSENT, Outcome.HIT]

    with servers.redis(short_dir) as server:
        run(scenario(server))


def test_one_daemon_sweeps_redis_at_a_time(short_dir: Path) -> None:
    async def scenario(server: Server) -> None:
        servers.command(server, "SET", "kvstored:sweeper", "another")
        servers.command(server, "SET", "kvstored:b:" + "0" * 64 + ":0:" + "0" * 64, "no record")
        async with Place("redis", f"redis://127.0.0.1:{server.port}").opened() as opened:
            await opened.write([1])
            assert ":1" in servers.command(server, "EXISTS", "kvstored:b:" + "0" * 64 + ":0:" + "0" * 64)
            servers.command(server, "DEL", "kvstored:sweeper")
            await eventually(lambda: opened.store.usage().swept_blocks == 1)
            assert await opened.outcomes([1]) == [Outcome.HIT]

    with servers.redis(short_dir) as server:
        run(scenario(server))


# ---- what lies on a disk may be anything


@pytest.fixture
def directory(tmp_path: Path) -> Place:
    return Place("file", f"file://{tmp_path}/objects")


def objects_of(found: Place) -> list[Path]:
    root = Path(found.url.removeprefix("file://"))
    return sorted(path for path in root.rglob("*.pack"))


@pytest.mark.parametrize("at", [0, 40, 200, BLOCK_BYTES // 2, BLOCK_BYTES + 100])
def test_a_flipped_byte_at_rest_is_a_miss_and_told(directory: Place, at: int) -> None:
    async def scenario() -> None:
        async with directory.opened() as opened:
            await opened.write([1, 2])
            (path,) = objects_of(directory)
            flip(path, at)
            first, second = await opened.outcomes([1, 2])
            assert (first, second) == (Outcome.CORRUPT, Outcome.HIT)
            assert opened.store.usage().checksum_failures == 1
            assert await opened.found([1, 2]) == [False, True]
            assert await opened.write([1]) == [Outcome.DURABLE]
            assert await opened.outcomes([1, 2]) == [Outcome.HIT] * 2

    run(scenario())


@pytest.mark.parametrize("cut", [1, 40, 300, BLOCK_BYTES + 10, 2 * BLOCK_BYTES])
def test_an_object_that_was_cut_off_is_a_miss_now_and_swept_after_a_restart(directory: Place, cut: int) -> None:
    async def scenario() -> None:
        async with directory.opened() as opened:
            await opened.write([1, 2])
            (path,) = objects_of(directory)
            os.truncate(path, path.stat().st_size - cut)
            outcomes = await opened.outcomes([1, 2])
            assert set(outcomes) <= {Outcome.CORRUPT, Outcome.HIT, Outcome.ABSENT}
        async with directory.opened() as again:
            await eventually(lambda: again.store.usage().objects == 0)
            assert not objects_of(directory)
            assert again.store.usage().used_bytes == 0
            assert again.store.usage().checksum_failures == 1

    run(scenario())


def test_an_object_swapped_for_another_is_a_miss(directory: Place) -> None:
    async def scenario() -> None:
        async with directory.opened() as opened:
            await opened.write([1])
            await opened.write([2])
            one, two = objects_of(directory)
            one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
            one.write_bytes(two_bytes)
            two.write_bytes(one_bytes)
            assert await opened.outcomes([1, 2]) == [Outcome.CORRUPT] * 2
        async with directory.opened() as again:  # by their tables they are what they hold, whatever they are called
            assert set(await again.outcomes([1, 2])) <= MISSES | {Outcome.HIT}

    run(scenario())


def test_drops_leave_one_object_a_namespace(directory: Place) -> None:
    async def scenario() -> None:
        async with directory.opened() as opened:
            for _ in range(3):
                await opened.write([1])
                await opened.store.drop(SCOPE, WITHIN_S)
            assert await opened.outcomes([1]) == [Outcome.ABSENT]
        epochs = Path(directory.url.removeprefix("file://")) / "epochs"
        assert [path.name.rpartition(".")[2] for path in epochs.iterdir()] == ["00000003"]

    run(scenario())


def test_files_that_are_none_of_ours_are_left_alone(directory: Place) -> None:
    async def scenario() -> None:
        async with directory.opened() as opened:
            await opened.write([1])
        root = Path(directory.url.removeprefix("file://"))
        strange = root / "packs" / "node-1" / "notes.txt"
        strange.write_text("mine")
        (root / "packs" / "else").mkdir()
        (root / "packs" / "else" / ("0" * 64 + ".pack")).write_text("mine too")
        async with directory.opened() as again:
            assert await again.outcomes([1]) == [Outcome.HIT]
            assert again.store.usage().objects == 1
        assert strange.read_text() == "mine"

    run(scenario())


def test_the_objects_of_a_writer_that_is_gone_for_a_day_are_swept(directory: Place) -> None:
    async def scenario() -> None:
        async with directory.opened("node-1") as one:
            await one.write([1])
        marker = Path(directory.url.removeprefix("file://")) / "writers" / "node-1"
        async with directory.opened("node-2") as two:
            await two.write([2])
            await eventually_found(two, [1, 2], [True, True])
            days_ago_s = time.time() - 90_000
            os.utime(marker, (days_ago_s, days_ago_s))
            await eventually_found(two, [1, 2], [False, True])
        assert [PackName.read(f"packs/{p.parent.name}/{p.name}") is not None for p in objects_of(directory)] == [True]

    run(scenario())


def test_a_cap_below_what_is_there_is_met_after_the_restart(directory: Place) -> None:
    async def scenario() -> None:
        async with directory.opened() as opened:
            for key in range(20):
                await opened.write([key])
        directory.capacity_bytes = 10 * (BLOCK_BYTES + 4 * KIB)
        async with directory.opened() as again:
            await eventually(lambda: again.store.usage().used_bytes <= directory.capacity_bytes)
            assert sum(path.stat().st_size for path in objects_of(directory)) <= directory.capacity_bytes
            await eventually_found(again, [0, 19], [False, True])

    run(scenario())


def test_a_place_that_can_not_be_used_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "objects").mkdir()
        (tmp_path / "objects" / "packs").write_text("a file where a directory should be")
        async with Place("file", f"file://{tmp_path}/objects").opened(wait=False) as opened:
            assert set(await opened.write([1])) <= MISSES
            assert await opened.outcomes([1]) == [Outcome.ABSENT]

    run(scenario())


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))


def test_a_redis_record_that_was_changed_is_a_miss_and_can_be_written_again(short_dir: Path) -> None:
    async def scenario(server: Server) -> None:
        async with Place("redis", f"redis://127.0.0.1:{server.port}").opened() as opened:
            await opened.write([1, 2, 3])
            names = {key: f"kvstored:b:{scope_id(SCOPE).hex()}:0:{hash_of(key).hex()}" for key in (1, 2, 3)}
            servers.command(server, "SETRANGE", names[1], "500", "x")
            servers.command(server, "SET", names[2], "cut")
            assert await opened.outcomes([1, 2, 3]) == [Outcome.CORRUPT, Outcome.CORRUPT, Outcome.HIT]
            assert opened.store.usage().checksum_failures == 2
            assert await opened.write([1, 2]) == [Outcome.DURABLE] * 2
            assert await opened.outcomes([1, 2, 3]) == [Outcome.HIT] * 3

    with servers.redis(short_dir) as server:
        run(scenario(server))
