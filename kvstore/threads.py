"""Work in threads that use memory of ours: whoever waits for it waits for its end, however often cancelled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvstore.tiers.disk_waiting import finished
from kvstore.tiers.memory import MemoryTier

_POPULATE_BYTES = 128 << 20
_POPULATE_THREADS = min(8, os.cpu_count() or 1)
_T = TypeVar("_T")


async def in_thread(function: Callable[[], _T]) -> _T:
    """Return `function()`, run in a thread; cancellation is delivered only when that has ended."""
    return await finished(asyncio.get_running_loop().run_in_executor(None, function))


async def populate(memory: MemoryTier, ready: Callable[[], None]) -> None:
    """Make all of the pool real, part by part; `ready` is called after the first."""
    step = max(memory.chunk_bytes, _POPULATE_BYTES // memory.chunk_bytes * memory.chunk_bytes)
    told = False
    for start in range(0, memory.size_bytes, step):
        length = min(step, memory.size_bytes - start)
        await _make_real(memory, start, length)
        memory.add_populated(length)
        if not told:
            told = True
            ready()


async def _make_real(memory: MemoryTier, start: int, length: int) -> None:
    """Populate a part of the pool with several threads: the kernel clears pages at a fraction of memory speed."""
    share = max(memory.chunk_bytes, -(-length // _POPULATE_THREADS // 4096) * 4096)
    async with asyncio.TaskGroup() as tasks:
        for at in range(start, start + length, share):
            part = partial(memory.populate_blocking, at, min(share, start + length - at))
            tasks.create_task(in_thread(part))
