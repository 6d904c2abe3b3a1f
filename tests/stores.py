"""A store without a server, for tests that look inside: opened on a directory, populated and kept going."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from kvstore.clock import Clock
from kvstore.store import Store, StoreSettings
from kvstore.tenancy import Tenancy


@contextlib.asynccontextmanager
async def kept_going(settings: StoreSettings, clock: Clock | None = None) -> AsyncGenerator[Store, None]:
    """Give a store that serves; it is closed afterwards without a drain."""
    store = await Store.open(settings, clock)
    ready = asyncio.Event()
    keeping = asyncio.create_task(store.run(ready.set))
    try:
        await ready.wait()
        yield store
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        await store.close()


async def stored_durably(store: Store, space: Tenancy, hashes: Sequence[bytes]) -> bool:
    """Store blocks and return whether all of them are on ssd for good."""
    session = store.open_session(space.tenant, admin=True)
    ticket, _ = store.puts.reserve(session, space, hashes, store.clock.monotonic_s())
    rows = store.puts.seal(ticket, None, (), None).rows
    return len(rows) == len(hashes) and all(await store.make_durable(rows, 30.0))
