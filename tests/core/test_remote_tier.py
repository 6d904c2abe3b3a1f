"""The remote tier in the middle of a call: what is dropped, stored or given up while the store has not answered yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore import wire
from kvstore.checksum import checksum
from kvstore.counters import Cause
from kvstore.store import Store, StoreSettings
from kvstore.table import Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteFound, RemoteRead, RemoteScope, RemoteUsage, RemoteWrite
from kvstore.wire import Outcome
from tests.core.parts import flat_namespace, hashes_of

MIB = 1 << 20
BLOCK_BYTES = 64 << 10


class HeldStore:
    """A remote store that has what it was given, and answers reads and writes when it is let.

    `entered` is set by a call that waits for `release`; what was forgotten is not told.
    """

    place = "held://"
    batch_bytes = MIB

    def __init__(self) -> None:
        self.entered, self.release = asyncio.Event(), asyncio.Event()
        self.blocks: dict[bytes, bytes] = {}
        self.calls: list[str] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def find(self, scope: RemoteScope, hashes: Sequence[bytes], within_s: float) -> list[bool]:
        return [block_hash in self.blocks for block_hash in hashes]

    async def read(self, scope: RemoteScope, reads: Sequence[RemoteRead], within_s: float) -> list[RemoteFound]:
        self.calls.append("read")
        contents = [self.blocks[read.hash] for read in reads]
        self.entered.set()
        await self.release.wait()
        for read, content in zip(reads, contents, strict=True):
            read.destination[:] = content
        return [RemoteFound(Outcome.HIT, checksum(content), NEVER_S) for content in contents]

    async def write(self, scope: RemoteScope, writes: Sequence[RemoteWrite], within_s: float) -> list[Outcome]:
        self.calls.append("write")
        self.entered.set()
        await self.release.wait()
        self.blocks.update((write.hash, bytes(write.payload)) for write in writes)
        self.calls.append("written")
        return [Outcome.DURABLE] * len(writes)

    def forget(self, scope: RemoteScope, hashes: Sequence[bytes] | None = None) -> None:
        for block_hash in list(self.blocks) if hashes is None else hashes:
            self.blocks.pop(block_hash, None)

    async def delete(self, scope: RemoteScope, hashes: Sequence[bytes], within_s: float) -> None:
        self.calls.append("delete")
        self.forget(scope, hashes)

    async def drop(self, scope: RemoteScope, within_s: float) -> None:
        self.calls.append("drop")
        self.forget(scope)

    async def drop_all(self, within_s: float) -> None:
        self.blocks.clear()

    def usage(self) -> RemoteUsage:
        count = len(self.blocks)
        return RemoteUsage(
            place=self.place, capacity_bytes=MIB, used_bytes=0, known_bytes=0, blocks=count, objects=count,
            state="ready", state_text="",
        )  # fmt: skip

    async def close(self) -> None:
        pass


@dataclass
class Node:
    """A store that runs, with a remote tier that holds its answers back."""

    store: Store
    remote: HeldStore
    space: Tenancy

    def acquire(self, hashes: Sequence[bytes]) -> Coroutine[Any, Any, wire.Acquired]:
        tier = self.store.remote
        assert tier is not None
        session = self.store.open_session("", admin=True)
        request = wire.Acquire(1, 0, list(hashes), deadline_s=30.0)
        return tier.reads.acquire(session, self.space, request)

    def put(self, hashes: Sequence[bytes]) -> list[int]:
        session = self.store.open_session("", admin=True)
        ticket, _ = self.store.puts.reserve(session, self.space, hashes, self.store.clock.monotonic_s())
        rows = self.store.puts.seal(ticket, None, (), None).rows
        self.store.stored(rows)
        return rows

    def is_here(self, block_hash: bytes) -> bool:
        return self.store.catalog.find(self.space, block_hash) is not None


@contextlib.asynccontextmanager
async def node() -> AsyncGenerator[Node, None]:
    store = await Store.open(
        StoreSettings(cpu_size_bytes=8 * MIB, huge_pages="off", remote_write_policy="through")
    )
    remote = HeldStore()
    store.attach(remote)
    ready = asyncio.Event()
    keeping = asyncio.create_task(store.run(ready.set))
    try:
        await ready.wait()
        yield Node(store, remote, store.tenancy("", flat_namespace(BLOCK_BYTES)))
        store.check_integrity()
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await store.close()


async def drop_namespace(made: Node, hashes: Sequence[bytes]) -> None:
    await made.store.drop_namespaces([made.space])


async def drop_blocks(made: Node, hashes: Sequence[bytes]) -> None:
    await made.store.drop_blocks(made.space, hashes)


@pytest.mark.parametrize("drop", [drop_namespace, drop_blocks])
def test_what_is_dropped_while_it_is_loaded_never_becomes_visible(
    drop: Callable[[Node, Sequence[bytes]], Coroutine[Any, Any, None]],
) -> None:
    async def scenario() -> None:
        async with node() as made:
            hashes = hashes_of(range(4))
            made.remote.blocks.update((block_hash, bytes(BLOCK_BYTES)) for block_hash in hashes)
            reading = asyncio.create_task(made.acquire(hashes))
            await made.remote.entered.wait()
            await drop(made, hashes)
            made.remote.release.set()
            assert set((await reading).outcomes) == {Outcome.ABSENT}
            assert not any(made.is_here(block_hash) for block_hash in hashes)
            assert made.store.memory.used_bytes == 0

    asyncio.run(scenario())


def test_what_a_writer_stores_while_it_is_loaded_stays_and_the_load_joins_it() -> None:
    async def scenario() -> None:
        async with node() as made:
            hashes = hashes_of(range(2))
            made.remote.blocks.update((block_hash, bytes(BLOCK_BYTES)) for block_hash in hashes)
            reading = asyncio.create_task(made.acquire(hashes))
            await made.remote.entered.wait()
            rows = made.put(hashes[:1])
            made.remote.release.set()
            answer = await reading
            assert list(answer.outcomes) == [Outcome.HIT] * 2
            assert made.store.catalog.find(made.space, hashes[0]) == rows[0]
            assert answer.offsets[0] == made.store.catalog.table.slot[Tier.CPU][rows[0]]

    asyncio.run(scenario())


def test_a_waiter_that_gives_up_leaves_nothing_held_and_others_their_load() -> None:
    async def scenario() -> None:
        async with node() as made:
            hashes = hashes_of(range(3))
            made.remote.blocks.update((block_hash, bytes(BLOCK_BYTES)) for block_hash in hashes)
            readings = [asyncio.create_task(made.acquire(hashes)) for _ in range(3)]
            await made.remote.entered.wait()
            readings[0].cancel()
            await asyncio.wait(readings[:1])
            made.remote.release.set()
            for reading in readings[1:]:
                assert list((await reading).outcomes) == [Outcome.HIT] * 3
            assert made.remote.calls == ["read"]
            table = made.store.catalog.table
            rows = [made.space.rows[block_hash] for block_hash in hashes]
            assert [made.store.catalog.leases_on(row) for row in rows] == [2] * 3
            assert not any(table.holds[row] & 0xFFFFFFFF for row in rows)

    asyncio.run(scenario())


def test_a_drop_waits_for_the_write_of_its_block_that_is_under_way() -> None:
    async def scenario() -> None:
        async with node() as made:
            hashes = hashes_of(range(2))
            made.put(hashes)
            await made.remote.entered.wait()
            dropping = asyncio.create_task(drop_blocks(made, hashes))
            await asyncio.sleep(0)
            made.remote.release.set()
            await dropping
            assert made.remote.calls == ["write", "written", "delete"]
            assert not made.remote.blocks

    asyncio.run(scenario())


def test_a_block_that_is_being_sent_is_no_victim() -> None:
    async def scenario() -> None:
        async with node() as made:
            (row,) = made.put(hashes_of([1]))
            await made.remote.entered.wait()
            assert not made.store.catalog.is_evictable(row, Tier.CPU)
            made.store.catalog.drop(row, Cause.DROP)
            assert made.store.catalog.table.hash[row] is not None  # its slot stays until the store has it
            made.remote.release.set()
            while made.store.memory.used_bytes:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
