"""Membership through a real etcd: coming, going, lost leases, outages, compaction, taken names, epochs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import UnavailableError
from kvstored.remote.etcd import Compacted, Etcd
from kvstored.remote.etcd_members import EtcdMembers
from kvstored.remote.etcd_place import EtcdPlace
from kvstored.remote.members import Address, Member, Members
from tests.remote.etcd_server import EtcdServer, etcd_running

TTL_S = 2
PATIENCE_S = 40.0
# As another version of the daemon may write it.
MEMBER = (
    b'{"host":"127.0.0.1","port":1,"boot_id":"31","capacity_bytes":5000,"protocol_min":1,"protocol_max":1,'
    b'"of_a_later_version":true}'
)
_clusters = itertools.count()


@pytest.fixture(scope="module")
def shared_etcd(private_temp_dir: Path) -> Iterator[EtcdServer]:
    """Return an etcd for tests that let it run."""
    directory = Path(tempfile.mkdtemp(prefix="etcd-", dir=private_temp_dir))
    with etcd_running(directory / "only") as server:
        yield server
    shutil.rmtree(directory)


@pytest.fixture
def own_etcd(short_dir: Path) -> Iterator[EtcdServer]:
    """Return an etcd for a test that stops it."""
    with etcd_running(short_dir / "etcd") as server:
        yield server


class Node:
    """One daemon's part in membership."""

    def __init__(self, place: EtcdPlace, name: str, boot: bytes = b"1", ttl_s: int = TTL_S) -> None:
        self.members = Members(Member(name, Address("127.0.0.1", 9470), boot, 1 << 30), time.monotonic)
        self.etcd = Etcd(place, request_s=1.0)
        self.epochs: dict[bytes, int] = {}
        self.source = EtcdMembers(
            self.etcd, self.members, ttl_s=ttl_s, on_epoch=self.epochs.__setitem__, jitter=lambda: 1.0
        )
        self.names: list[set[str]] = []  # of each view so far
        self.task: asyncio.Task[None] | None = None

    @property
    def live(self) -> set[str]:
        return set(self.members.view.placement.weights)

    async def start(self) -> None:
        await self.etcd.__aenter__()
        self.task = asyncio.create_task(self._run())
        async with asyncio.timeout(PATIENCE_S):
            await self.source.registered()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.source.run())
            tasks.create_task(self._watch())

    async def _watch(self) -> None:
        number = -1
        while True:
            view = await self.members.changed(number)
            number = view.number
            self.names.append(set(view.placement.weights))

    async def vanish(self) -> None:
        """Stop as a process does that is killed: nothing is said, the lease runs out."""
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
            self.task = None
        await self.etcd.__aexit__(None, None, None)

    async def sees(self, *names: str) -> None:
        await self.until(lambda: self.live == set(names), f"{self.members.own.name} sees {names}")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                number = -1
                while not condition():
                    # Most conditions come true with a view; the others are looked at now and then.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            number = (await self.members.changed(number)).number
        except TimeoutError:
            raise AssertionError(f"not in {PATIENCE_S} s: {what}; it sees {self.live}") from None


@contextlib.asynccontextmanager
async def nodes(place: EtcdPlace, *names: str, ttl_s: int = TTL_S) -> AsyncGenerator[list[Node], None]:
    made = [Node(place, name, ttl_s=ttl_s) for name in names]
    try:
        for node in made:
            await node.start()
        for node in made:
            await node.sees(*names)
        yield made
    finally:
        for node in made:
            await node.vanish()


def with_nodes(server: EtcdServer, test: Callable[[list[Node]], Awaitable[None]], *names: str) -> None:
    async def main() -> None:
        async with nodes(server.place(f"t{next(_clusters)}"), *names) as made:
            await test(made)

    asyncio.run(main())


def test_members_see_each_other_come_and_go_at_once_where_they_say_so(shared_etcd: EtcdServer) -> None:
    async def test(made: list[Node]) -> None:
        a, b, c = made
        assert a.members.view.is_current
        assert a.members.view.members["b"].boot_id == b"1"
        assert a.members.view.members["b"].address == Address("127.0.0.1", 9470)
        c.members.update_own(replace(c.members.own, is_leaving=True))
        c.source.renew_own()
        await a.sees("a", "b")
        assert "c" in a.members.view.members, "it can still be read from"
        await c.vanish()
        await c.etcd.__aenter__()
        await c.source.leave()
        await a.until(lambda: "c" not in a.members.view.members, "c is gone")
        await b.until(lambda: "c" not in b.members.view.members, "c is gone")

    with_nodes(shared_etcd, test, "a", "b", "c")


def test_a_member_that_is_killed_is_gone_when_its_lease_ends_and_comes_back_with_another_boot(
    shared_etcd: EtcdServer,
) -> None:
    async def test(made: list[Node]) -> None:
        a, b = made
        await b.vanish()
        await a.sees("a")
        again = Node(a.etcd.place, "b", b"2")
        try:
            await again.start()
            await a.sees("a", "b")
            assert a.members.view.boots["b"] == b"2"
        finally:
            await again.vanish()

    with_nodes(shared_etcd, test, "a", "b")


def test_a_restart_before_the_lease_ends_is_a_change_of_boot_and_no_gap(shared_etcd: EtcdServer) -> None:
    async def main() -> None:
        place = shared_etcd.place("restart")
        async with nodes(place, "a", "b", ttl_s=20) as (a, b), Etcd(place) as editor:
            (entry,) = (await editor.read(place.prefix + "members/b")).entries
            await b.vanish()
            views = len(a.names)
            again = Node(place, "b", b"2", ttl_s=20)
            try:
                await again.start()
                await a.until(lambda: a.members.view.boots.get("b") == b"2", "the new boot")
                await editor.revoke(entry.lease)
                await editor.write(place.prefix + "members/c", MEMBER)
                await a.sees("a", "b", "c")
                assert all("b" in names for names in a.names[views:]), "it was never gone"
            finally:
                await again.vanish()

    asyncio.run(main())


def test_a_lost_lease_is_replaced_and_the_member_comes_back(shared_etcd: EtcdServer) -> None:
    async def test(made: list[Node]) -> None:
        a, b = made
        await a.etcd.revoke(int((await a.etcd.read(a.etcd.place.prefix + "members/b")).entries[0].lease))
        await b.until(lambda: b.source.registered_times == 2, "b registers again")
        await a.sees("a", "b")
        assert {"a"} in a.names, "it was gone for a moment"
        assert b.live == {"a", "b"}

    with_nodes(shared_etcd, test, "a", "b")


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_an_etcd_that_is_away_stops_nothing_and_heals_alone_even_after_three_lease_times(
    own_etcd: EtcdServer, how: str
) -> None:
    async def test(made: list[Node]) -> None:
        a, b = made
        if how == "stopped":
            own_etcd.stop()
        else:
            own_etcd.kill()
        await a.until(lambda: not a.members.view.is_current, "the view is known to be old")
        if how == "stopped":
            await asyncio.sleep(3 * TTL_S)
        assert a.live == b.live == {"a", "b"}, "the last view is kept"
        with pytest.raises(UnavailableError):
            await a.source.raise_epoch(b"ns", 1)
        if how == "stopped":
            own_etcd.go_on()
        else:
            await asyncio.to_thread(own_etcd.start)
        late = Node(a.etcd.place, "c")
        try:
            await late.start()
            await a.sees("a", "b", "c")
            await b.sees("a", "b", "c")
            await late.sees("a", "b", "c")
            assert a.members.view.is_current
        finally:
            await late.vanish()
        await a.sees("a", "b")

    with_nodes(own_etcd, test, "a", "b")


@contextlib.asynccontextmanager
async def out_of_sight(server: EtcdServer, place: EtcdPlace, node: Node) -> AsyncGenerator[Etcd, None]:
    """Give a client whose changes the nodes see only once it has ended: meanwhile etcd serves on another port."""
    port = server.port
    server.kill()
    await node.until(lambda: not node.members.view.is_current, "the view is known to be old")
    server.port = 0
    await asyncio.to_thread(server.start)
    async with Etcd(server.place(place.cluster)) as editor:
        yield editor
    server.kill()
    server.port = port
    await asyncio.to_thread(server.start)


def test_who_is_gone_after_an_outage_is_given_the_time_to_come_back(own_etcd: EtcdServer) -> None:
    async def main() -> None:
        place = own_etcd.place("ghosts")
        async with nodes(place, "a") as (a,), Etcd(place) as before:
            ghost = await before.grant(3600)
            await before.write(place.prefix + "members/ghost", MEMBER, ghost)
            await a.sees("a", "ghost")
            views = len(a.names)
            async with out_of_sight(own_etcd, place, a) as editor:
                await editor.revoke(ghost)
                await editor.write(place.prefix + "members/new", MEMBER)
            await a.sees("a", "new")
            assert {"a", "ghost", "new"} in a.names[views:], "its removal came with the new one, and was not believed"

    asyncio.run(main())


def test_a_member_that_died_while_etcd_was_away_is_gone_in_the_end(own_etcd: EtcdServer) -> None:
    async def test(made: list[Node]) -> None:
        a, b = made
        own_etcd.stop()
        await b.vanish()
        await a.until(lambda: not a.members.view.is_current, "the view is known to be old")
        own_etcd.go_on()
        await a.sees("a")

    with_nodes(own_etcd, test, "a", "b")


def test_changes_that_etcd_has_compacted_away_are_made_good_by_a_snapshot(own_etcd: EtcdServer) -> None:
    async def main() -> None:
        place = own_etcd.place("compacted")
        async with nodes(place, "a", "b") as (a, b), Etcd(place) as other:
            first = (await other.read(place.prefix)).revision
            async with out_of_sight(own_etcd, place, a) as editor:
                last = 0
                for number in range(20):
                    last = await editor.write(f"{place.prefix}members/c", b"{}" if number % 2 else b"nonsense")
                await editor.write(f"{place.prefix}members/c", MEMBER)
                await compact(editor, last)
                with pytest.raises(Compacted):
                    async for _ in editor.watch(place.prefix, first, silent_s=5):
                        pass
            await a.sees("a", "b", "c")
            await b.sees("a", "b", "c")

    asyncio.run(main())


async def compact(etcd: Etcd, revision: int) -> None:
    await etcd._ask("kv/compaction", {"revision": str(revision)})  # pyright: ignore[reportPrivateUsage]


def test_entries_that_are_no_members_are_passed_over(shared_etcd: EtcdServer) -> None:
    async def test(made: list[Node]) -> None:
        (a,) = made
        prefix = a.etcd.place.prefix
        for name, value in {
            "x": b"\xff\xfe", "y": b'{"host": 5}', "members/z": b"[]", "members/q": b"{}", "epochs/zz": b"5",
            "epochs/6e73": b"not a number", "members/w": b'{"host":"h","port":1,"boot_id":"zz","capacity_bytes":1,'
            b'"protocol_min":1,"protocol_max":1}',
        }.items():  # fmt: skip
            await a.etcd.write(prefix + name, value)
        late = Node(a.etcd.place, "b")
        try:
            await late.start()
            await a.sees("a", "b")
            await late.sees("a", "b")
        finally:
            await late.vanish()

    with_nodes(shared_etcd, test, "a")


def test_a_daemon_whose_name_is_taken_says_so_and_comes_back_when_it_is_free(
    shared_etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(made: list[Node]) -> None:
        a, b = made
        twin = Node(a.etcd.place, "b", b"twin")
        try:
            await twin.start()
            await a.until(lambda: a.members.view.boots.get("b") == b"twin", "the later one has the name")
            await b.until(lambda: "has this one's name" in caplog.text, "the earlier one says so")
            await asyncio.sleep(TTL_S)
            assert a.members.view.boots["b"] == b"twin", "they do not fight"
        finally:
            await twin.vanish()
        await a.until(lambda: a.members.view.boots.get("b") == b"1", "the earlier one is back")

    with_nodes(shared_etcd, test, "a", "b")


def test_the_highest_epoch_wins_everywhere_and_is_there_for_those_who_come_later(shared_etcd: EtcdServer) -> None:
    async def test(made: list[Node]) -> None:
        a, b = made
        assert await a.source.raise_epoch(b"ns", 3) == 3
        await b.until(lambda: b.epochs == {b"ns": 3}, "b hears of it")
        assert await b.source.raise_epoch(b"ns", 2) == 3, "an epoch never goes down"
        raised = await asyncio.gather(*(node.source.raise_epoch(b"ns", 4 + at) for at, node in enumerate([a, b, a, b])))
        assert max(raised) == 7
        late = Node(a.etcd.place, "c")
        try:
            await late.start()
            await late.until(lambda: late.epochs == {b"ns": 7}, "one that comes later knows it")
        finally:
            await late.vanish()
        await b.until(lambda: b.epochs == {b"ns": 7}, "so do the others")

    with_nodes(shared_etcd, test, "a", "b")


def test_pools_of_another_name_on_the_same_etcd_do_not_mix(shared_etcd: EtcdServer) -> None:
    async def main() -> None:
        async with nodes(shared_etcd.place("one"), "a") as (a,), nodes(shared_etcd.place("one-two"), "b") as (b,):
            assert a.live == {"a"}
            assert b.live == {"b"}

    asyncio.run(main())
