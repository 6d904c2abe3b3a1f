"""How an operation is run over a session: what it may ask its driver for, and what is left to tidy up at its end.

An operation is a generator without I/O: it yields steps, a driver performs them and sends back what they gave. The one
in client.py blocks, the one in aio.py awaits; nothing else differs between the two clients.

Invariants
1. However a run ends, its requests without a reply are abandoned and what it still holds is given back: `end`.
2. An operation settles the outcome of a key only when the bytes are where they belong, so what has not been settled
   when it fails is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kvclient._buffers import Segment
from kvclient._copy import Piece
from kvclient._session import Session
from kvclient.stats import ClientStats
from kvstore import wire
from kvstore.errors import KVStoreError, RemoteProtocolError, from_wire


class Send(NamedTuple):
    """Send messages, in one go and behind what is in the session's outbox; gives nothing.

    A system call that wakes the daemon takes 20 us, so what has time (releases) goes to the outbox.
    """

    messages: Sequence[wire.Message]


class Await(NamedTuple):
    """Wait for the next reply to a request; gives it. `patient`: it is known to take long."""

    request: int
    patient: bool = False


class Copy(NamedTuple):
    """Perform copies, then take checksums of other memory; gives the list of these."""

    pieces: Sequence[Piece]
    checksums_of: Sequence[Sequence[Segment]] = ()


class Pause(NamedTuple):
    """Let some time pass; gives nothing."""

    seconds: float


Step = Send | Await | Copy | Pause
Steps = Generator[Step, Any, None]
R = TypeVar("R")
M = TypeVar("M", bound=wire.Message)


class Operation(Generic[R]):
    """One call of a verb, from its arguments to its result."""

    # Messages that give back what the run holds now, by the number of the lease or ticket.
    held: dict[int, wire.Message]
    # A lease that outlives the run: from its end on the caller's, who calls `release`.
    lease: int = 0
    release: Callable[[], None] | None = None

    def __init__(self, count: int = 1) -> None:
        self.held = {}
        # Without blocks there is nothing to ask.
        self.is_empty = count == 0

    def steps(self, session: Session, deadline_at: float) -> Steps:
        """Yield what is to be done; `deadline_at` is on the session's clock."""
        raise NotImplementedError

    def result(self, failure: KVStoreError | None) -> R:
        """Return what the caller gets; with a `failure`, what had not been settled before it is a miss."""
        raise NotImplementedError

    def tally(self, stats: ClientStats, result: R) -> None:
        """Count what came of it."""
        stats.add("calls")


class Run:
    """One operation on its way over one session."""

    def __init__(self, operation: Operation[Any], session: Session, deadline_at: float) -> None:
        self._operation = operation
        self._session = session
        self._steps = operation.steps(session, deadline_at)
        self._outstanding: set[int] = set()

    def advance(self, given: Any = None) -> Step | None:
        """Return the next step, None at the end."""
        try:
            step = self._steps.send(given)
        except StopIteration:
            return None
        if type(step) is Send:
            self._outstanding.update(self._session.sent(step.messages))
        return step

    def arrived(self, request: int) -> wire.Reply | None:
        """Return a reply to `request` if there is one."""
        reply = self._session.take(request)
        if reply is not None and type(reply) is not wire.Progress:
            self._outstanding.discard(request)
        return reply

    def end(self) -> None:
        """End the run; what the daemon must still be told is in the session's outbox then."""
        self._steps.close()
        for request in self._outstanding:
            self._session.abandon(request)
        self._outstanding.clear()
        self._session.outbox += map(self._session.dismiss, self._operation.held.values())
        self._operation.held.clear()


def answer(request: int, kind: type[M], *, patient: bool = False) -> Generator[Step, Any, M]:
    """Wait for the reply to `request`, which must be a `kind`; a Failure is raised as the error it stands for."""
    reply = yield Await(request, patient)
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, wire.Failure):
        raise from_wire(reply.code, reply.text)
    raise RemoteProtocolError(f"the daemon answered with a {type(reply).__name__} where a {kind.__name__} belongs")


def ask(message: wire.Message, kind: type[M], *, patient: bool = False) -> Generator[Step, Any, M]:
    """Send `message` and wait for its reply, which must be a `kind`."""
    yield Send([message])
    return (yield from answer(message.id, kind, patient=patient))
