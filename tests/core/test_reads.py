"""Reads in a store without a server: which slots views may lie in."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvstore import wire
from kvstore.counters import Cause
from kvstore.store import StoreSettings
from kvstore.table import Tier
from kvstore.wire import Outcome
from tests.core.parts import MIB, flat_namespace, hashes_of
from tests.stores import kept_going, stored_durably


def test_views_are_never_lent_out_of_the_reserve_that_copies_pass_through(tmp_path: Path) -> None:
    """Else a few of them, which last, would end what keeps reads going in a memory full of pins."""

    async def run() -> None:
        settings = StoreSettings(cpu_size_bytes=32 * MIB, ssd_size_bytes=64 * MIB, ssd_dir=tmp_path)
        async with kept_going(settings) as store:
            while store.memory.populated_bytes < store.memory.size_bytes:
                await asyncio.sleep(0.01)
            space, cold = store.tenancy("t", flat_namespace(64 << 10)), hashes_of(range(8))
            assert await stored_durably(store, space, cold)
            for row in list(space.rows.values()):
                store.catalog.leave(row, Tier.CPU, Cause.PRESSURE)
            # Nothing that could be evicted, and no slot: as if all memory were pinned.
            taken = store.memory.allocate_many(space.slot_bytes, store.memory.size_bytes // space.slot_bytes)
            reader = store.open_session("t", admin=False)
            view = wire.Acquire(1, 0, cold, copying=False, deadline_s=0.05)
            copy = wire.Acquire(2, 0, cold, copying=True, deadline_s=60.0)

            refused = await store.reads.acquire(reader, space, view)
            assert (refused.lease, set(refused.outcomes)) == (0, {Outcome.NO_ROOM})
            copied = await store.reads.acquire(reader, space, copy)
            assert set(copied.outcomes) == {Outcome.HIT}
            assert all(map(store.catalog.is_in_transit, space.rows.values()))
            assert store.reads.acquire_now(reader, space, view) is None
            refused = await store.reads.acquire(reader, space, view)
            assert (refused.lease, set(refused.outcomes)) == (0, {Outcome.NO_ROOM}), "though they lie in memory now"

            for offset in taken:
                store.memory.free(offset)
            patient = asyncio.create_task(
                store.reads.acquire(reader, space, wire.Acquire(3, 0, cold, copying=False, deadline_s=60.0))
            )
            await asyncio.sleep(0)
            store.leases.release(reader, copied.lease)  # what was in transit leaves, and can be loaded to stay
            lent = await patient
            assert set(lent.outcomes) == {Outcome.HIT}
            assert not any(map(store.catalog.is_in_transit, space.rows.values()))
            store.leases.release(reader, lent.lease)
            store.check_integrity()

    asyncio.run(asyncio.wait_for(run(), 120))
