"""The verbs that move no bytes: lookup, wait, prefetch, abort, drop, and what operators ask.

Invariants
1. A batch of any length is cut to what one request may hold; all its requests are on their way before the first answer
   is awaited.
2. A namespace is opened once a session, before its first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import msgspec

from kvclient._session import Session
from kvclient._steps import Await, Operation, R, Send, Step, Steps, answer, ask
from kvclient.results import Changed, Lookup
from kvstore import wire
from kvstore.block import Namespace, block_hash
from kvstore.errors import (
    BadKey,
    CapacityError,
    CorruptionError,
    DeadlineExceeded,
    KVStoreError,
    RemoteProtocolError,
    from_wire,
)
from kvstore.wire import Outcome

Progress = Callable[[int, int], None]
# What the daemon is asked to keep to is a little shorter than what the caller was promised.
_MARGIN_S_MAX = 0.05


@dataclass(frozen=True)
class Space:
    """A namespace as an operation needs it."""

    encoded: bytes
    digest: bytes
    block_bytes: int
    ttl_s: float

    @staticmethod
    def of(namespace: Namespace, ttl_s: float | None) -> Space:
        """Return what stands for `namespace`; its encoding and digest are computed here, once."""
        return Space(namespace.encode(), namespace.digest, namespace.block_bytes, ttl_s or 0.0)


def hashes_of(given: Sequence[bytes]) -> list[bytes]:
    """Return `given` as a list of 32-byte block hashes; those of other lengths are mapped as kvstore.block does."""
    hashes = list(given)
    if set(map(type, hashes)) - {bytes}:
        for item in cast("list[Any]", hashes):
            if not isinstance(item, (bytes, bytearray, memoryview)):
                raise BadKey(f"a block hash is bytes, not {type(item).__name__}: {item!r}")
        hashes = list(map(bytes, hashes))
    if set(map(len, hashes)) - {32}:
        return [block_hash(item) for item in hashes]
    return hashes


def remaining_s(session: Session, deadline_at: float) -> float:
    """Return the seconds that the daemon may take, so that its answer still comes by the deadline."""
    left_s = deadline_at - session.now()
    if left_s <= 0:
        raise DeadlineExceeded("the call did not finish by its deadline: give it a longer one")
    return left_s - min(_MARGIN_S_MAX, left_s / 10)


def opened(session: Session, space: Space) -> Generator[Step, Any, int]:
    """Return the session's number for a namespace."""
    key = (space.digest, space.ttl_s)
    number = session.namespaces.get(key)
    if number is None:
        reply = yield from ask(wire.Open(session.next_id(), space.encoded, space.ttl_s), wire.Opened)
        if reply.block_bytes != space.block_bytes:
            raise RemoteProtocolError(
                f"the daemon takes blocks of this namespace for {reply.block_bytes} bytes, not {space.block_bytes}: "
                "are its version and the client's compatible?"
            )
        number = session.namespaces[key] = reply.ns
    return number


def outcome_of(failure: KVStoreError) -> Outcome:
    """Return the outcome of blocks that a failed call says nothing else of."""
    if isinstance(failure, CapacityError):
        return Outcome.NO_ROOM
    if isinstance(failure, DeadlineExceeded):
        return Outcome.DEADLINE
    return Outcome.CORRUPT if isinstance(failure, CorruptionError) else Outcome.UNAVAILABLE


def settled(outcomes: bytearray, failure: KVStoreError | None) -> bytes:
    """Return `outcomes` with what is still open (zero) filled in."""
    rest = Outcome.UNAVAILABLE if failure is None else outcome_of(failure)
    return bytes(outcomes).replace(b"\0", bytes([rest]))


def put_outcome(outcomes: bytearray, positions: Sequence[int], outcome: int) -> None:
    """Set the outcome of `positions`."""
    if isinstance(positions, range) and positions.step == 1:
        outcomes[positions.start : positions.stop] = bytes([outcome]) * len(positions)
    else:
        for position in positions:
            outcomes[position] = outcome


def check_outcomes(outcomes: bytes, count: int, allowed: bytes) -> None:
    """Raise RemoteProtocolError unless there are `count` outcomes, all `allowed`."""
    if len(outcomes) != count or outcomes.translate(None, allowed):
        raise RemoteProtocolError(f"the daemon's reply has not one proper outcome for each of {count} blocks")


MISSES = bytes(wire.MISS_REASONS)
ACQUIRED = MISSES + bytes([Outcome.HIT, Outcome.LATER, Outcome.BUSY])
_FOUND = MISSES + bytes([Outcome.HIT, Outcome.BUSY, Outcome.LATER, Outcome.DONE, Outcome.PRESENT])


class PerBlock(Operation[R], Generic[R]):
    """Asks one question of each block of a batch.

    Parameters
    ----------
    space, hashes
        The blocks.
    make : callable
        Makes the request from its number, the session's number of the namespace and some hashes.
    wrap : callable
        Makes the result from outcomes, tiers and the failure.
    until_miss : bool
        What is behind the first miss does not matter.
    patient : bool
        The answer is known to take long.
    """

    def __init__(
        self,
        space: Space,
        hashes: list[bytes],
        make: Callable[[int, int, list[bytes]], wire.Message],
        wrap: Callable[[bytes, bytes, KVStoreError | None], R],
        *,
        until_miss: bool = False,
        patient: bool = False,
    ) -> None:
        super().__init__(len(hashes))
        self._space = space
        self._hashes = hashes
        self._make = make
        self._wrap = wrap
        self._until_miss = until_miss
        self._patient = patient
        self._outcomes = bytearray(len(hashes))
        self._tiers = bytearray(len(hashes))

    def steps(self, session: Session, deadline_at: float) -> Steps:
        number = yield from opened(session, self._space)
        step = session.welcome.keys_max
        requests: list[tuple[int, int]] = []
        for start in range(0, len(self._hashes), step):
            request = self._make(session.next_id(), number, self._hashes[start : start + step])
            yield Send([request])
            requests.append((start, request.id))
        for start, request_id in requests:
            end = min(start + step, len(self._hashes))
            found = yield from answer(request_id, wire.Found, patient=self._patient)
            check_outcomes(found.outcomes, end - start, _FOUND)
            self._outcomes[start:end] = found.outcomes
            if found.tiers:
                self._tiers[start:end] = found.tiers
            if self._until_miss and found.hits < end - start:
                self._outcomes[end:] = bytes([Outcome.ABSENT]) * (len(self._hashes) - end)
                return

    def result(self, failure: KVStoreError | None) -> R:
        return self._wrap(settled(self._outcomes, failure), bytes(self._tiers), failure)


def lookup(space: Space, hashes: list[bytes], *, run: bool, max_ms: float | None) -> PerBlock[Lookup]:
    """Return the operation behind `lookup`."""
    return PerBlock(
        space,
        hashes,
        lambda number, ns, some: wire.Lookup(number, ns, some, run, max_ms),
        _as_lookup,
        until_miss=run,
    )


def prefetch(space: Space, hashes: list[bytes]) -> PerBlock[Lookup]:
    """Return the operation behind `prefetch`."""
    return PerBlock(space, hashes, wire.Prefetch, _as_lookup)


def wait(space: Space, hashes: list[bytes], wait_s: float) -> PerBlock[Lookup]:
    """Return the operation behind `wait`."""
    until = time.monotonic() + wait_s

    def make(number: int, ns: int, some: list[bytes]) -> wire.Wait:
        return wire.Wait(number, ns, some, max(0.0, until - time.monotonic()))

    return PerBlock(space, hashes, make, _as_lookup, patient=True)


def drop(space: Space, hashes: list[bytes]) -> PerBlock[Changed]:
    """Return the operation behind `drop`."""
    return PerBlock(space, hashes, wire.Drop, _as_changed)


def pin(space: Space, hashes: list[bytes], for_s: float) -> PerBlock[Changed]:
    """Return the operation behind `pin`."""
    return PerBlock(
        space, hashes, lambda number, _, some: wire.Pin(number, space.digest, some, for_s), _as_changed
    )


def unpin(space: Space, hashes: list[bytes]) -> PerBlock[Changed]:
    """Return the operation behind `unpin`."""
    return PerBlock(space, hashes, lambda number, _, some: wire.Unpin(number, space.digest, some), _as_changed)


def set_ttl(space: Space, hashes: list[bytes], ttl_s: float) -> PerBlock[Changed]:
    """Return the operation behind `set_ttl`."""
    return PerBlock(
        space, hashes, lambda number, _, some: wire.Ttl(number, space.digest, some, ttl_s), _as_changed
    )


def _as_lookup(raw: bytes, tiers: bytes, failure: KVStoreError | None) -> Lookup:
    return Lookup(raw, failure, tiers)


def _as_changed(raw: bytes, _: bytes, failure: KVStoreError | None) -> Changed:
    return Changed(raw, failure)


class Abort(Operation[int]):
    """Tells those who wait for blocks that they will not come; returns how many were told."""

    def __init__(self, space: Space, hashes: list[bytes]) -> None:
        super().__init__(len(hashes))
        self._space = space
        self._hashes = hashes
        self._count = 0

    def steps(self, session: Session, deadline_at: float) -> Steps:
        number = yield from opened(session, self._space)
        step = session.welcome.keys_max
        for start in range(0, len(self._hashes), step):
            request = wire.Abort(session.next_id(), number, self._hashes[start : start + step])
            done = yield from ask(request, wire.Done)
            self._count += done.count

    def result(self, failure: KVStoreError | None) -> int:
        return self._count


class Question(Operation[dict[str, Any]]):
    """Asks what operators ask. Its failure is always an error: there is no miss to degrade to."""

    def __init__(self, request: wire.Message, progress: Progress | None) -> None:
        super().__init__()
        self._request = request
        self._progress = progress
        self._body: dict[str, Any] = {}

    def steps(self, session: Session, deadline_at: float) -> Steps:
        request = msgspec.structs.replace(self._request, id=session.next_id())
        yield Send([request])
        while True:
            reply = yield Await(request.id, patient=True)
            if isinstance(reply, wire.Progress):
                if self._progress is not None:
                    self._progress(reply.done, reply.total)
                continue
            self._body = _plain(reply)
            return

    def result(self, failure: KVStoreError | None) -> dict[str, Any]:
        if failure is not None:
            raise failure
        return self._body


def _plain(reply: wire.Reply) -> dict[str, Any]:
    if isinstance(reply, wire.Report):
        return reply.body
    if isinstance(reply, wire.Done):
        return {"count": reply.count}
    if isinstance(reply, wire.Found):
        return {"hits": reply.hits, "outcomes": [_name(outcome) for outcome in reply.outcomes]}
    if isinstance(reply, wire.Failure):
        raise from_wire(reply.code, reply.text)
    raise RemoteProtocolError(f"the daemon answered an operator's question with a {type(reply).__name__}")


def _name(outcome: int) -> str:
    try:
        return Outcome(outcome).name.lower()
    except ValueError:
        return f"outcome {outcome}"
