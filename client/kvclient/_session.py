"""One session with a daemon, without I/O: request numbers, replies as they arrive, requests that were given up.

Invariants
1. A request that has a reply is expected until that reply or until it is abandoned, and nothing else is expected: any
   other reply raises RemoteProtocolError.
2. What the late reply to an abandoned request grants is given back: `outbox` then holds the message that does it. The
   daemon sends no reply to a request after it has read the Cancel, so a Ping behind that tells when none can come.
3. Numbers of namespaces, leases and tickets mean something in the session that got them, and in no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from kvclient._pool import Mapping
from kvstore import wire
from kvstore.errors import RemoteProtocolError

ABANDONED_MAX = 64
_SILENT = (wire.Release, wire.Cancel, wire.Bye)


class Session:
    """The state of one connection after its greeting.

    Parameters
    ----------
    welcome : wire.Welcome
        What the daemon said of itself and its limits.
    pool, arena : Mapping or None
        The shared memory that offsets of reads and (arena, if there is one) of writes point into.
    on_undo : callable
        Called when a late reply's grant is given back.
    now : callable
        The clock of deadlines and leases, in seconds.
    """

    def __init__(
        self,
        welcome: wire.Welcome,
        pool: Mapping | None,
        arena: Mapping | None = None,
        on_undo: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.welcome = welcome
        self.pool = pool
        self.arena = arena
        self.now = now
        self.namespaces: dict[tuple[bytes, float], int] = {}
        self.outbox: list[wire.Message] = []
        self._on_undo = on_undo
        self._frames = wire.FrameBuffer()
        self._last_id = 1  # the greeting's
        self._expected: set[int] = set()
        self._abandoned: set[int] = set()
        # By the number of a Ping: the abandoned request that is surely over when it is answered.
        self._fences: dict[int, int] = {}
        self._arrived: dict[int, deque[wire.Reply]] = {}

    def next_id(self) -> int:
        """Return a number for a new request."""
        self._last_id += 1
        return self._last_id

    def sent(self, messages: Iterable[wire.Message]) -> list[int]:
        """Note that `messages` go out now; returns the numbers of those that have a reply."""
        expected = [message.id for message in messages if not isinstance(message, _SILENT)]
        self._expected.update(expected)
        return expected

    def unsent(self) -> list[wire.Message]:
        """Return the outbox, which is empty then."""
        messages, self.outbox = self.outbox, []
        return messages

    def feed(self, received: bytes | bytearray | memoryview) -> list[int]:
        """Take in what the socket gave; returns the requests that something arrived for."""
        touched: list[int] = []
        for body in self._frames.feed(received):
            reply = wire.decode_reply(body)
            request = reply.id
            final = type(reply) is not wire.Progress
            if request in self._expected:
                self._arrived.setdefault(request, deque()).append(reply)
                if final:
                    self._expected.discard(request)
                touched.append(request)
            elif request in self._abandoned:
                if final:
                    self._abandoned.discard(request)
                    self._abandoned.discard(self._fences.pop(request, 0))
                    self._undo(reply)
            else:
                raise RemoteProtocolError(
                    f"the daemon answered request {request}, which waits for nothing: the connection is closed"
                )
        return touched

    def take(self, request: int) -> wire.Reply | None:
        """Return the next reply to `request` that has arrived, None if there is none yet."""
        replies = self._arrived.get(request)
        if not replies:
            return None
        reply = replies.popleft()
        if not replies:
            del self._arrived[request]
        return reply

    def abandon(self, request: int) -> None:
        """Give up `request`: the daemon is told, and what it still grants is given back."""
        for reply in self._arrived.pop(request, ()):
            self._undo(reply)
        if request in self._expected:
            self._expected.discard(request)
            self._abandoned.add(request)
            ping = self.dismiss(wire.Ping(0))
            self._fences[ping.id] = request
            self.outbox += [wire.Cancel(self.next_id(), request), ping]

    def dismiss(self, message: wire.Message) -> wire.Message:
        """Return `message` under a number of its own, whose reply, if there is one, will be ignored."""
        numbered = msgspec.structs.replace(message, id=self.next_id())
        if not isinstance(numbered, _SILENT):
            self._abandoned.add(numbered.id)
        return numbered

    @property
    def has_abandoned(self) -> bool:
        """Whether replies may still come that nobody waits for."""
        return bool(self._abandoned)

    @property
    def is_worn_out(self) -> bool:
        """Whether so many requests were given up that a new connection is better."""
        return len(self._abandoned) > ABANDONED_MAX

    def _undo(self, reply: wire.Reply) -> None:
        undo: wire.Message | None = None
        if isinstance(reply, wire.Acquired) and reply.lease:
            undo = wire.Release(0, reply.lease)
        elif isinstance(reply, wire.Reserved) and wire.Outcome.GRANTED in reply.outcomes:
            undo = wire.Forfeit(0, reply.ticket)
        if undo is not None:
            self.outbox.append(self.dismiss(undo))
            self._on_undo()
