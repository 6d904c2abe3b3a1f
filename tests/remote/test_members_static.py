"""Daemons that greet each other over TCP: who fits, who does not, what strangers send; and membership from a list."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncGenerator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import KVStoreError, NotPermitted, PeerUnreachable, RemoteProtocolError
from kvstored.remote import greeting
from kvstored.remote.advertise import choose
from kvstored.remote.dial_back import answer_check, check
from kvstored.remote.greeting import Conversation, Description, Hello, Pool, answer, calling
from kvstored.remote.members import PROTOCOL, Address, Member, Members
from kvstored.remote.static_members import StaticMembers
from tests.core.scale import examples
from tests.remote.etcd_server import free_port

SECRET = b"tell-nobody-7734"
POOL = Pool("prod", SECRET)


def member(name: str, port: int, boot: bytes = b"1", protocol: tuple[int, int] = PROTOCOL) -> Member:
    return Member(name, Address("127.0.0.1", port), boot, 64 << 30, protocol)


class Daemon:
    """The port of one daemon: answers greetings, and keeps what came of them."""

    def __init__(self, own: Member, pool: Pool = POOL) -> None:
        self.own = own
        self.pool = pool
        self.met: list[Member] = []
        self.failures: list[KVStoreError] = []
        self._meeting: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncGenerator[Daemon, None]:
        async with await asyncio.start_server(self.meet, "127.0.0.1", self.own.address.port):
            yield self
        while self._meeting:
            await asyncio.wait(self._meeting)

    async def talk(self, conversation: Conversation) -> None:
        await conversation.reader.read()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._meeting.add(task)
        task.add_done_callback(self._meeting.discard)
        try:
            conversation = await answer(reader, writer, self.own, self.pool)
            self.met.append(conversation.other)
            with contextlib.suppress(OSError):
                await self.talk(conversation)
        except KVStoreError as exc:
            self.failures.append(exc)
        finally:
            writer.close()


async def meet(called: Daemon, own: Member, pool: Pool = POOL) -> Member:
    async with called.listening(), calling(called.own.address, own, pool) as conversation:
        assert conversation.version == PROTOCOL[1]
        return conversation.other


# ---- greetings


def test_two_members_of_a_pool_learn_who_the_other_is() -> None:
    async def main() -> None:
        called = Daemon(member("b", free_port(), b"boot of b"))
        own = member("a", 1, b"boot of a")
        assert await meet(called, own) == called.own
        assert called.met == [own]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("pool", "words"),
    [(Pool("prod", b"another"), "token"), (Pool("prod"), "token"), (Pool("test", SECRET), "pool 'prod'")],
)
def test_who_has_another_token_or_pool_is_refused_and_told_why(pool: Pool, words: str) -> None:
    async def main() -> None:
        called = Daemon(member("b", free_port()))
        with pytest.raises(NotPermitted, match=words) as caught:
            await meet(called, member("a", 1), pool)
        assert not called.met
        assert SECRET.decode() not in f"{caught.value}{called.failures}{POOL!r}"

    asyncio.run(main())


def test_versions_that_do_not_meet_are_told_apart() -> None:
    async def main() -> None:
        called = Daemon(member("b", free_port()))
        with pytest.raises(RemoteProtocolError, match="upgrade the older one"):
            await meet(called, member("a", 1, protocol=(PROTOCOL[1] + 1, PROTOCOL[1] + 2)))
        assert (await meet(called, member("a", 1, protocol=(0, PROTOCOL[1] + 2)))).name == "b"

    asyncio.run(main())


def test_one_that_only_repeats_what_it_heard_proves_nothing() -> None:
    async def main() -> None:
        async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Knows no token: its challenge is its own, and as its proof it sends back the caller's.
            header = await reader.readexactly(4)
            hello = msgspec.msgpack.decode(await reader.readexactly(*struct.unpack("<I", header)))
            challenge = msgspec.msgpack.encode([2, PROTOCOL[1], hello[2], bytes(16)])
            writer.write(struct.pack("<I", len(challenge)) + challenge)
            header = await reader.readexactly(4)
            proof = msgspec.msgpack.decode(await reader.readexactly(*struct.unpack("<I", header)))
            ready = msgspec.msgpack.encode([4, proof[1]])
            writer.write(struct.pack("<I", len(ready)) + ready)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(mirror, "127.0.0.1", 0) as server:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(NotPermitted, match="does not know"):
                async with calling(address, member("a", 1), POOL):
                    pass

    asyncio.run(main())


def test_a_port_where_nobody_listens_or_nobody_speaks_is_an_error_by_the_deadline() -> None:
    async def main() -> None:
        with pytest.raises(PeerUnreachable, match="no daemon answers"):
            async with calling(Address("127.0.0.1", free_port()), member("a", 1), POOL):
                pass
        hold = asyncio.Event()

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await hold.wait()
            writer.close()

        async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(PeerUnreachable, match=r"in 0\.2 s"):
                async with calling(address, member("a", 1), POOL, deadline_s=0.2):
                    pass
            hold.set()

    asyncio.run(main())


HELLO = msgspec.msgpack.encode(
    Hello("prod", Description("a", "h", 1, b"1", 1, *PROTOCOL), bytes(16))
)
_noise = st.binary(max_size=64) | st.binary(max_size=64).map(lambda raw: HELLO[: len(raw)] + raw)


@settings(max_examples=examples(40))
@given(st.lists(_noise | st.just(HELLO), max_size=4), st.booleans())
def test_whatever_a_stranger_sends_comes_to_an_error(pieces: list[bytes], framed: bool) -> None:
    async def main() -> None:
        called = Daemon(member("b", 1))
        async with await asyncio.start_server(called.meet, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            for piece in pieces:
                writer.write(struct.pack("<I", len(piece)) + piece if framed else piece)
            writer.write_eof()
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
        while not called.failures:
            await asyncio.sleep(0.001)
        assert not called.met

    asyncio.run(main())


def test_a_greeting_that_never_ends_is_cut_off_at_its_limit() -> None:
    async def main() -> None:
        called = Daemon(member("b", free_port()))
        async with called.listening():
            reader, writer = await asyncio.open_connection(*called.own.address)
            writer.write(struct.pack("<I", greeting.GREETING_BYTES_MAX + 1))
            assert b"over 4096" in await reader.read()
            writer.close()
        assert isinstance(called.failures[0], RemoteProtocolError)

    asyncio.run(main())


# ---- connecting back


class Checking(Daemon):
    """A daemon that connects back when it is asked to."""

    async def talk(self, conversation: Conversation) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await answer_check(conversation, self.own, self.pool)


async def check_back(own: Member) -> None:
    called = Checking(member("b", free_port(), b"2"))
    choice = choose(own.address.host, own.address.port, [], None)
    async with called.listening(), calling(called.own.address, own, POOL) as conversation:
        await check(conversation, choice)


def test_a_daemon_that_is_reached_where_it_says_may_join() -> None:
    async def main() -> None:
        own = Daemon(member("a", free_port()))
        async with own.listening():
            await check_back(own.own)
        assert own.met[0].name == "b"

    asyncio.run(main())


def test_n01_a_daemon_that_nobody_reaches_where_it_says_is_told_so_and_what_to_set() -> None:
    async def main() -> None:
        own = Member("a", Address("127.0.0.9", free_port()), b"1", 64 << 30)
        with pytest.raises(PeerUnreachable, match="set `advertise`") as caught:
            await check_back(own)
        assert str(own.address) in str(caught.value)

    asyncio.run(main())


def test_another_daemon_at_the_address_that_one_advertises_is_noticed() -> None:
    async def main() -> None:
        other = Daemon(member("c", free_port(), b"3"))
        async with other.listening():
            with pytest.raises(PeerUnreachable, match="another daemon, c, answers there"):
                await check_back(member("a", other.own.address.port))

    asyncio.run(main())


def test_an_answer_that_makes_no_sense_is_an_error() -> None:
    class Babbling(Daemon):
        async def talk(self, conversation: Conversation) -> None:
            greeting.send(conversation.writer, Description("a", "h", 1, b"1", 1, *PROTOCOL))
            await super().talk(conversation)

    async def main() -> None:
        called = Babbling(member("b", free_port()))
        choice = choose("127.0.0.1", 1, [], None)
        async with called.listening(), calling(called.own.address, member("a", 1), POOL) as conversation:
            with pytest.raises(RemoteProtocolError, match="DialedBack"):
                await check(conversation, choice)

    asyncio.run(main())


# ---- membership


async def until(members: Members, *names: str) -> None:
    async with asyncio.timeout(40):
        number = -1
        while set(members.view.placement.weights) != set(names):
            number = (await members.changed(number)).number


def test_members_of_a_list_are_found_lost_and_found_again() -> None:
    async def main() -> None:
        own, other = Daemon(member("a", free_port())), Daemon(member("b", free_port(), b"2"))
        nobody = Address("127.0.0.1", free_port())
        members = Members(own.own, time.monotonic)
        source = StaticMembers(
            members, POOL, [own.own.address, other.own.address, nobody], interval_s=0.05, jitter=lambda: 1.0
        )
        async with own.listening(), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(source.run())
            async with other.listening():
                await until(members, "a", "b")
                assert members.view.is_current
                assert members.view.boots == {"a": b"1", "b": b"2"}
            await until(members, "a")
            again = Daemon(member("b", other.own.address.port, b"3"))
            async with again.listening():
                await until(members, "a", "b")
                assert members.view.boots["b"] == b"3"
            await until(members, "a")
            stranger = Daemon(member("c", other.own.address.port), Pool("prod", b"another"))
            async with stranger.listening():
                while not stranger.failures:
                    await asyncio.sleep(0.01)
            assert set(members.view.placement.weights) == {"a"}
            running.cancel()

    asyncio.run(main())


def test_another_daemon_at_a_known_address_takes_the_place_of_the_former() -> None:
    async def main() -> None:
        port = free_port()
        members = Members(member("a", 1, b"own"), time.monotonic)
        source = StaticMembers(members, POOL, [Address("127.0.0.1", port)], interval_s=0.05, jitter=lambda: 1.0)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(source.run())
            async with Daemon(member("b", port)).listening():
                await until(members, "a", "b")
            async with Daemon(member("c", port)).listening():
                await until(members, "a", "c")
            running.cancel()

    asyncio.run(main())
