"""The index of the ssd tier fails once: what is told durable stays, and a drop says if it is not for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.block import Component, Namespace, Slice
from kvstore.errors import TierUnavailable
from kvstore.store import Store, StoreSettings
from kvstore.tenancy import Tenancy
from kvstore.tiers.index import Index

MIB = 1 << 20
SPACE = Namespace(
    model="m",
    revision="r",
    dtype="uint8",
    components=(Component("kv", "uint8", ("layer", "token", "dim"), (1, 16, 512)),),
    block_tokens=16,
    slice=Slice((0, 1), (0, 1)),
)
HASH = bytes(range(32))


@asynccontextmanager
async def running(directory: Path) -> AsyncGenerator[Store, None]:
    store = await Store.open(StoreSettings(cpu_size_bytes=8 * MIB, ssd_size_bytes=64 * MIB, ssd_dir=directory))
    ready = asyncio.Event()
    keeping = asyncio.create_task(store.run(ready.set))
    await ready.wait()
    try:
        yield store
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await store.close()


async def store_durably(store: Store, tenancy: Tenancy) -> bool:
    session = store.open_session("t", admin=True)
    ticket, _ = store.puts.reserve(session, tenancy, [HASH], store.clock.monotonic_s())
    store.memory.view(ticket.offsets[0], SPACE.block_bytes)[:] = HASH * (SPACE.block_bytes // 32)
    rows = store.puts.seal(ticket, None, [], None).rows
    return (await store.make_durable(rows, 20.0)) == [True]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def fail(self: Index, *arguments: object) -> None:
    raise lmdb.DiskError("the disk fails")


def test_what_is_durable_after_a_drop_whose_commit_failed_is_there_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with running(tmp_path) as store:
            tenancy = store.tenancy("t", SPACE)
            assert await store_durably(store, tenancy)
            with monkeypatch.context() as patch:
                patch.setattr(Index, "_apply", fail)
                with pytest.raises(TierUnavailable):
                    await store.drop_namespaces([tenancy])
            assert store.catalog.find(tenancy, HASH) is None
            durable = await store_durably(store, tenancy)
            while not durable:  # the tier backs off for a while
                await asyncio.sleep(0.05)
                durable = await store.make_durable([tenancy.rows[HASH]], 20.0) == [True]
        async with running(tmp_path) as store:
            assert store.catalog.find(store.tenancy("t", SPACE), HASH) is not None

    run(work())


def test_a_drop_that_can_not_be_made_durable_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running(tmp_path) as store:
            tenancy = store.tenancy("t", SPACE)
            assert await store_durably(store, tenancy)
            with monkeypatch.context() as patch:
                patch.setattr(Index, "_apply", fail)
                with pytest.raises(TierUnavailable, match="drop it again"):
                    await store.drop_blocks(tenancy, [HASH])
            assert store.catalog.find(tenancy, HASH) is None

    run(work())
