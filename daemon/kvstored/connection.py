"""One client's connection: frames in, requests to the service, replies out.

Invariants
1. Whatever a client sends, the daemon lives: bytes that are no message end the connection with a Failure that says
   why.
2. Memory a connection can take is bounded: reading stops while replies are not read, requests under way are counted,
   and who reads nothing for `STALLED_S` is cut off.
3. When the connection is over its requests are cancelled and its session's rights end; what its process may still
   touch is kept until the process has ended or said goodbye.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING, cast

from kvstore import wire
from kvstore.catalog import Tenancy
from kvstore.errors import Backpressure, KVStoreError, RemoteProtocolError
from kvstore.lease import Session
from kvstored.logs import fields
from kvstored.peer import Peer

if TYPE_CHECKING:
    from kvstored.service import Service

log = logging.getLogger("kvstored.connection")

STALLED_S = 10.0
REQUESTS_MAX = 256
NAMESPACES_MAX = 4096
_WRITE_BUFFER_BYTES = 1 << 20


class Connection(asyncio.Protocol):
    """The protocol of an accepted and greeted socket. `over` is set when nothing of it is left."""

    def __init__(self, service: Service, session: Session, peer: Peer, early: list[bytes]) -> None:
        self.session = session
        self.peer = peer
        self.namespaces: dict[int, Tenancy] = {}
        self.over = asyncio.Event()
        self.said_goodbye = False
        self._service = service
        self._early = early
        self._frames = wire.FrameBuffer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        for part in self._early:
            self.data_received(part)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._receive(wire.decode_request(body))
        except RemoteProtocolError as exc:
            log.warning("a client broke the protocol", extra=fields(pid=self.peer.pid, why=str(exc)))
            self.reply(wire.Failure(0, exc.code, str(exc)))
            self.close()

    def pause_writing(self) -> None:
        transport = self._transport
        if transport is not None and self._stalled is None:
            transport.pause_reading()
            self._stalled = asyncio.get_running_loop().call_later(STALLED_S, self._cut_off)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._transport = None
        for task in self._tasks.values():
            task.cancel()
        self.over.set()

    # ---- requests and replies

    def reply(self, message: wire.Message) -> None:
        """Send a message, unless the connection is over."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.encode(message))

    def close(self) -> None:
        """End the connection after what was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def cancel(self, request_id: int) -> None:
        """Give up a request under way."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def _receive(self, request: wire.Request) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            answer = self._service.answer(self, request)
        except KVStoreError as exc:
            self.reply(wire.Failure(request.id, exc.code, str(exc)))
            return
        if answer is None:
            return
        if isinstance(answer, wire.Message):
            self._transport.write(wire.encode(answer))
        elif len(self._tasks) >= REQUESTS_MAX:
            answer.close()  # type: ignore[attr-defined]
            failure = Backpressure(f"{REQUESTS_MAX} requests are under way on this connection: wait for replies")
            self.reply(wire.Failure(request.id, failure.code, str(failure)))
        else:
            task = self._service.spawn(self._finish(request, answer))
            self._tasks[request.id] = task

    async def _finish(self, request: wire.Request, answer: Awaitable[wire.Message]) -> None:
        try:
            reply = await answer
        except KVStoreError as exc:
            reply = wire.Failure(request.id, exc.code, str(exc))
        finally:
            self._tasks.pop(request.id, None)
        # No await between the answer and this: a lease that was granted is known to be on its way.
        self.reply(reply)

    def _cut_off(self) -> None:
        log.warning("a client reads no replies", extra=fields(pid=self.peer.pid, stalled_s=STALLED_S))
        if self._transport is not None:
            self._transport.abort()
