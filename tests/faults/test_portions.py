"""What goes over every block is done in portions: the event loop serves others in between."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvstore import draining
from kvstore import store as store_module
from kvstore.store import Store, StoreSettings
from kvstore.table import Tier
from kvstore.tiers.disk import DiskTier
from tests.core.parts import MIB, flat_namespace, hashes_of
from tests.stores import kept_going, stored_durably

COUNT, PORTION = 300, 10
SPACE = flat_namespace(4096)


def settings_in(directory: Path) -> StoreSettings:
    return StoreSettings(cpu_size_bytes=8 * MIB, ssd_size_bytes=32 * MIB, ssd_dir=directory)


def test_the_order_of_use_is_gathered_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "_ORDER_PORTION", PORTION)
    turns = 0
    gathered: list[tuple[int, int]] = []  # how many addresses, and how many turns others had had by then

    async def written(self: DiskTier, addresses: array[int]) -> None:
        gathered.append((len(addresses), turns))

    async def run() -> None:
        nonlocal turns
        async with kept_going(settings_in(tmp_path)) as store:
            assert await stored_durably(store, store.tenancy("t", SPACE), hashes_of(range(COUNT)))
            monkeypatch.setattr(DiskTier, "checkpoint", written)
            working = asyncio.create_task(store.checkpoint())
            while not working.done():
                await asyncio.sleep(0)
                turns += 1
            working.result()

    asyncio.run(asyncio.wait_for(run(), 60))
    ((count, turns_before),) = gathered
    assert count == COUNT
    assert turns_before >= COUNT // PORTION - 1


def test_a_block_that_goes_while_the_order_is_gathered_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "_ORDER_PORTION", PORTION)

    async def run() -> None:
        async with kept_going(settings_in(tmp_path)) as store:
            space = store.tenancy("t", SPACE)
            assert await stored_durably(store, space, hashes_of(range(COUNT)))
            policy, lane = store.catalog.policies[Tier.SSD], space.lanes[Tier.SSD]
            seen: list[int] = []
            async for row in draining.in_portions(policy, lane, COUNT):
                seen.append(row)
                if len(seen) == 2 * PORTION:
                    for later in list(policy.coldest(lane))[len(seen) - 1 : len(seen) + 5]:
                        policy.remove(later)
            assert len(seen) < COUNT
            assert len(set(seen)) == len(seen)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_what_an_older_epoch_left_is_deleted_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_PER_TICK", PORTION)
    forgotten: list[int] = []
    forget = DiskTier.forget

    async def counted(self: DiskTier, addresses: Iterable[int]) -> bool:
        portion = list(addresses)
        forgotten.append(len(portion))
        return await forget(self, portion)

    async def leave_stale_records() -> None:
        store = await Store.open(settings_in(tmp_path))
        ready = asyncio.Event()
        keeping = asyncio.create_task(store.run(ready.set))
        await ready.wait()
        space = store.tenancy("t", SPACE)
        assert await stored_durably(store, space, hashes_of(range(COUNT)))
        monkeypatch.setattr(store_module, "_TICK_S", 3600.0)
        await store.drop_namespaces([space])
        keeping.cancel()
        await asyncio.wait([keeping])
        await store.close()
        monkeypatch.undo()
        monkeypatch.setattr(store_module, "_PER_TICK", PORTION)

    async def find_them_gone() -> None:
        monkeypatch.setattr(store_module, "_TICK_S", 0.001)
        monkeypatch.setattr(DiskTier, "forget", counted)
        async with kept_going(settings_in(tmp_path)) as store:
            assert not store.tenancy("t", SPACE).rows
            assert store.disk is not None
            while store.disk.usage().live_blocks:
                await asyncio.sleep(0.001)
            store.check_integrity()

    asyncio.run(asyncio.wait_for(leave_stale_records(), 60))
    asyncio.run(asyncio.wait_for(find_them_gone(), 60))
    assert sum(forgotten) == COUNT
    assert max(forgotten) <= PORTION
