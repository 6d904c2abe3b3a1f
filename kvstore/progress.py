"""A signal that something has moved: whoever waits for room or for a write wakes up and looks again."""

from __future__ import annotations

import asyncio


class Progress:
    """Wakes all who wait, each time anew."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()

    def signal(self) -> None:
        """Wake everybody who waits now."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next signal."""
        await self._moved.wait()
