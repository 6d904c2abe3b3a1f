"""One connection of an asyncio client, shared by all tasks of its loop: replies find their requests by number.

Invariants
1. Everything here runs in the loop's thread.
2. When the connection is lost, everybody who waits for a reply is told at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable

from kvclient._session import Session
from kvstore import wire
from kvstore.errors import KVStoreError, PeerUnreachable, RemoteProtocolError


class AsyncConnection(asyncio.Protocol):
    """The protocol of a greeted socket, and its session."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.session = session
        self.heard_at = session.now()
        self.lease_count = 0
        self.lost: KVStoreError | None = None
        self._socket = sock
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.heard_at = self.session.now()
        try:
            touched = self.session.feed(data)
        except RemoteProtocolError as exc:
            self._end(exc)
            return
        for request in touched:
            waiting = self._waiting.get(request)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        lost = PeerUnreachable(f"the connection to the daemon is lost ({exc or 'it hung up'}): was it stopped?")
        lost.__cause__ = exc
        self._end(lost)

    def send(self, messages: Iterable[wire.Message]) -> None:
        """Send what is in the session's outbox, then `messages`."""
        frame = b"".join(map(wire.encode, (*self.session.unsent(), *messages)))
        if self.lost is not None:
            raise self.lost
        if frame and self._transport is not None:
            self._transport.write(frame)

    def flush(self) -> None:
        """Send what is in the session's outbox, if that is still possible."""
        if self.session.outbox and self.lost is None:
            self.send(())

    async def arrival(self, request: int, timeout_s: float) -> None:
        """Return when something has arrived for `request`; raises TimeoutError, or why nothing can come any more."""
        if self.lost is not None:
            raise self.lost
        waiting = self._waiting[request] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await waiting
        finally:
            del self._waiting[request]

    def close(self, *, bye: bool) -> None:
        """Close the socket; `bye` tells the daemon that this session touches the pool no more."""
        if self.lost is None and bye:
            self.send([wire.Bye(self.session.next_id())])
        self._end(PeerUnreachable("this connection was closed by its client"))

    def after_fork(self) -> None:
        """Close the child's copy of the socket. The loop stays the parent's: it must not learn of it."""
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)
        self._transport = None
        self.lost = PeerUnreachable("this connection belongs to the process that forked this one")

    def _end(self, why: KVStoreError) -> None:
        if self.lost is None:
            self.lost = why
            if self._transport is not None:
                self._transport.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self.lost)
