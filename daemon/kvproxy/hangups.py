"""Notices clients that go, whether anybody reads from them or not.

A server that has enough to do stops reading (requests behind one another on one connection, say), and then doesn't see
the end of the connection either: whoever left is served on. The kernel knows, and tells by EPOLLRDHUP without a read.

Invariants
1. A connection is watched from `watch` to `leave`, or to its end; what is told of is aborted once.
2. A descriptor that has been closed, and perhaps given to another connection, is never touched: transports that close
   are skipped.
"""

from __future__ import annotations

import asyncio
import select
from types import TracebackType


class Hangups:
    """Aborts transports whose other end is gone. A context manager; belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, asyncio.Transport] = {}

    def __enter__(self) -> Hangups:
        self._loop.add_reader(self._epoll.fileno(), self._tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._watched.clear()

    def watch(self, transport: asyncio.Transport | None) -> int:
        """Abort `transport` when its other end goes; returns what `leave` takes, -1 if it is closed already."""
        if transport is None or transport.is_closing():
            return -1
        descriptor: int = transport.get_extra_info("socket").fileno()
        if descriptor < 0 or descriptor in self._watched:
            return -1
        self._epoll.register(descriptor, select.EPOLLRDHUP)
        self._watched[descriptor] = transport
        return descriptor

    def leave(self, descriptor: int) -> None:
        """Watch no more."""
        transport = self._watched.pop(descriptor, None)
        # A closed descriptor has left the set by itself, and its number may be another's by now.
        if transport is not None and not transport.is_closing():
            self._epoll.unregister(descriptor)

    def _tell(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            transport = self._watched.pop(descriptor, None)
            self._epoll.unregister(descriptor)  # or it would be told of again and again
            if transport is not None and not transport.is_closing():
                transport.abort()
