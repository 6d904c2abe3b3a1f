"""A door in front of a real server, which passes bytes on, until it is told to be what networks and stores can be.

It counts what it passes, so that a fault comes at a byte and not at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

_THROTTLED = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 58\r\nConnection: close\r\n\r\n"
    b"<Error><Code>SlowDown</Code><Message>Slow</Message></Error>"
)


class Front:
    """One door. `throttle`: so many requests are answered with 503; `cut_after`: bytes of answers, then all is cut."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.throttle = 0
        self.throttled = 0
        self.cut_after: int | None = None
        self.is_cut = asyncio.Event()
        self._to = port
        self._answered_bytes = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving = 0
        self._idle = asyncio.Event()

    def cut(self) -> None:
        """Break every connection, and let nobody in."""
        self.is_cut.set()
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._serving += 1
        try:
            if self.is_cut.is_set():
                return
            if self.throttled < self.throttle:
                self.throttled += 1
                await reader.readuntil(b"\r\n\r\n")
                writer.write(_THROTTLED)
                await writer.drain()
                return
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers.add(other_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass_on(reader, other_writer, lambda count: None))
                tasks.create_task(_pass_on(other_reader, writer, self._count))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._serving -= 1
            self._idle.set()

    async def closed(self) -> None:
        """Return when nobody is served any more."""
        while self._serving:
            self._idle.clear()
            await self._idle.wait()

    def _count(self, count: int) -> None:
        self._answered_bytes += count
        if self.cut_after is not None and self._answered_bytes >= self.cut_after:
            self.cut()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]) -> None:
    try:
        while content := await reader.read(1 << 14):
            count(len(content))
            writer.write(content)
            await writer.drain()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def front(port: int) -> AsyncGenerator[Front, None]:
    """Give a door to the server at `port`."""
    door = Front(port)
    listener = await asyncio.start_server(door.serve, "127.0.0.1", 0)
    door.port = listener.sockets[0].getsockname()[1]
    try:
        yield door
    finally:
        listener.close()
        await asyncio.sleep(0)  # who has just come in is served, too
        door.cut()
        async with asyncio.timeout(10.0):
            await door.closed()
        await listener.wait_closed()
        await asyncio.sleep(0)
