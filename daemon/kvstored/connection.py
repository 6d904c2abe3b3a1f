"""One client's connection: frames in, requests to the service, replies out.

Invariants
1. Whatever a client sends, the daemon lives: bytes that are no message end the connection with a Failure that says
   why.
2. Memory a connection can take is bounded: requests are neither read nor answered while replies are not read, those
   under way are counted and have ids of their own, and who reads nothing for `STALLED_S` is cut off.
3. When the connection is over its requests are cancelled and its session's rights end; what its process may still
   touch is kept until the process has ended or said goodbye.
4. A bug of ours in one request fails that request, with an ERROR in the log, and no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, NamedTuple, Protocol, cast

from kvstore import wire
from kvstore.errors import Backpressure, BadNamespace, KVStoreError, RemoteProtocolError, UsageError
from kvstore.lease import Session
from kvstore.tenancy import Tenancy
from kvstored.logs import fields
from kvstored.node import Node
from kvstored.peer import Peer

log = logging.getLogger("kvstored.connection")

STALLED_S = 10.0
REQUESTS_MAX = 256
NAMESPACES_MAX = 4096
_WRITE_BUFFER_BYTES = 256 << 10


Answer = wire.Message | Awaitable[wire.Message] | None


class Opening(NamedTuple):
    """A namespace as a connection has opened it. `ttl_s` None: what it stores lives as long as the namespace says."""

    tenancy: Tenancy
    ttl_s: float | None


class Answering(Protocol):
    """Who answers requests: at once, by a coroutine, or not at all; raises KVStoreError for a Failure."""

    def answer(self, connection: Connection, request: wire.Request) -> Answer: ...


class Connection(asyncio.Protocol):
    """The protocol of an accepted and greeted socket. `over` is set when nothing of it is left."""

    def __init__(self, node: Node, service: Answering, session: Session, peer: Peer, early: list[bytes]) -> None:
        self.session = session
        self.peer = peer
        self.over = asyncio.Event()
        self.said_goodbye = False
        self._node = node
        self._service = service
        self._early = early
        self._frames = wire.FrameBuffer()
        self._openings: dict[int, Opening] = {}  # by this connection's number
        self._numbers: dict[Opening, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._stalled: asyncio.TimerHandle | None = None  # runs while replies are not read
        self._closing: asyncio.TimerHandle | None = None
        self._held: list[bytes] = []  # what came in while replies were not read

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        for part in self._early:
            self.data_received(part)

    def data_received(self, data: bytes) -> None:
        if self._is_stalled():
            self._held.append(data)
            return
        try:
            for body in self._frames.feed(data):
                self._receive(wire.decode_request(body))
                if self._is_stalled():
                    break  # the rest stays in the buffer until replies are read
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
            # Not from here: this is called inside a write.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Answer what was held back, then read on."""
        held, self._held = self._held, []
        for data in (b"", *held):
            self.data_received(data)
        if not self._is_stalled() and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._stalled, self._closing):
            if timer is not None:
                timer.cancel()
        self._transport = None
        self._held.clear()
        for task in self._tasks.values():
            task.cancel()
        for opening in self._openings.values():
            opening.tenancy.end_use()
        self._openings.clear()
        self.over.set()

    def _is_stalled(self) -> bool:
        return self._stalled is not None

    # ---- namespaces

    def open(self, opening: Opening) -> int:
        """Return this connection's number for a namespace, which is not forgotten until the connection is over."""
        number = self._numbers.get(opening)
        if number is None:
            if len(self._openings) >= NAMESPACES_MAX:
                raise Backpressure(f"a connection may open {NAMESPACES_MAX} namespaces: use another connection")
            number = opening.tenancy.number
            if opening.ttl_s is not None:
                number += (len(self._openings) + 1) << 32  # each life has a number of its own
            self._numbers[opening] = number
            self._openings[number] = opening
            opening.tenancy.begin_use()
        return number

    def opening(self, ns: int) -> Opening:
        """Return what was opened under a number; BadNamespace if nothing was."""
        try:
            return self._openings[ns]
        except KeyError:
            raise BadNamespace(f"namespace {ns} was not opened on this connection: send Open first") from None

    # ---- requests and replies

    def reply(self, message: wire.Message) -> None:
        """Send a message, unless the connection is over."""
        if self._transport is not None and not self._transport.is_closing():
            try:
                frame = wire.encode(message)
            except KVStoreError as exc:  # it is too large
                frame = wire.encode(wire.Failure(message.id, exc.code, str(exc)))
            self._transport.write(frame)

    def close(self) -> None:
        """End the connection after what was written has been sent, or could not be sent for `STALLED_S`."""
        if self._transport is not None:
            self._transport.close()
            if self._closing is None:
                self._closing = asyncio.get_running_loop().call_later(STALLED_S, self._cut_off)

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
        except Exception as exc:  # noqa: BLE001 - see invariant 4
            self.reply(_failure(request, exc))
            return
        if answer is None:
            return
        if isinstance(answer, wire.Message):
            self.reply(answer)
        elif refusal := self._refusal(request):
            cast("Coroutine[Any, Any, wire.Message]", answer).close()
            self.reply(_failure(request, refusal))
        else:
            task = self._node.spawn(self._finish(request, answer))
            self._tasks[request.id] = task

    def _refusal(self, request: wire.Request) -> KVStoreError | None:
        """Return why a request that takes time can't be begun."""
        if request.id in self._tasks:
            return UsageError(f"a request with the id {request.id} is under way: number requests one by one")
        if len(self._tasks) >= REQUESTS_MAX:
            return Backpressure(f"{REQUESTS_MAX} requests are under way on this connection: wait for replies")
        return None

    async def _finish(self, request: wire.Request, answer: Awaitable[wire.Message]) -> None:
        try:
            reply = await answer
        except Exception as exc:  # noqa: BLE001 - see invariant 4
            reply = _failure(request, exc)
        finally:
            self._tasks.pop(request.id, None)
        # No await between the answer and this: a lease that was granted is known to be on its way.
        self.reply(reply)

    def _cut_off(self) -> None:
        log.warning("a client reads no replies", extra=fields(pid=self.peer.pid, stalled_s=STALLED_S))
        if self._transport is not None:
            self._transport.abort()


def _failure(request: wire.Request, exc: Exception) -> wire.Failure:
    if isinstance(exc, KVStoreError):
        return wire.Failure(request.id, exc.code, str(exc))
    verb = type(request).__name__
    log.error("a request met a bug", extra=fields(verb=verb), exc_info=exc)
    return wire.Failure(request.id, KVStoreError.code, f"{verb} met a bug of the daemon ({exc!r}): report its log")
