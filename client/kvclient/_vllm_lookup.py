"""Asks the store about a request: once, in one batch, over all ranks, without keeping the scheduler waiting.

Theory of operation. One thread asks; the scheduler waits for it at most `PATIENCE_S`, and then lets the request wait
and goes on with others: vLLM asks again in its next step. In one step the scheduler is kept waiting once. A batch is
two questions sent together: `Lookup` for the first rank's own slice, which counts in the daemon's hit rate and says
what can be loaded in time, and `GroupLookup` for what each slice of the model holds.

Invariants
1. A block is found only if every rank can read it, from its own slice or put together from others.
2. A step of the scheduler waits for lookups at most `PATIENCE_S` in all, and so it does for one request in all its
   steps. Only a step that has nothing to run waits longer: at most `IDLE_S`, and the engine would only ask again.
3. A lookup without an answer within its budget has found nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, TimeoutError, wait
from dataclasses import dataclass
from typing import Any

from kvclient._assembly import Siblings
from kvclient._operations import Space, opened
from kvclient._session import Session
from kvclient._steps import Operation, Send, Step, Steps, answer
from kvclient.client import Client
from kvstore import wire
from kvstore.block import Namespace
from kvstore.errors import KVStoreError, RemoteProtocolError
from kvstore.wire import Outcome

PATIENCE_S = 0.0008
IDLE_S = 0.005
_HIT = bytes([Outcome.HIT])


@dataclass(frozen=True, slots=True)
class Found:
    """How many leading blocks every rank can read, and in which tiers (a byte of bits each) the first rank's are."""

    blocks: int
    tiers: bytes = b""
    failure: KVStoreError | None = None


class Ranks:
    """The namespaces of an engine's ranks, the first rank's first."""

    def __init__(self, namespaces: Sequence[Namespace], ttl_s: float | None) -> None:
        different = list(dict.fromkeys(namespaces))
        self.block_tokens = different[0].block_tokens
        self.spaces = [Space.of(namespace, ttl_s) for namespace in different]
        self.siblings = [Siblings(namespace) for namespace in different]


class RankLookup(Operation[Found]):
    """Which leading blocks can every rank read?"""

    def __init__(self, ranks: Ranks, hashes: Sequence[bytes], max_ms: float) -> None:
        super().__init__(len(hashes))
        self._ranks = ranks
        self._hashes = hashes
        self._max_ms = max_ms
        self._blocks = 0
        self._tiers = b""

    def steps(self, session: Session, deadline_at: float) -> Steps:
        number = yield from opened(session, self._ranks.spaces[0])
        size = session.welcome.keys_max
        for start in range(0, len(self._hashes), size):
            window = list(self._hashes[start : start + size])
            hits = yield from self._window(session, number, window)
            self._blocks += hits
            if hits < len(window):
                return

    def result(self, failure: KVStoreError | None) -> Found:
        if failure is not None:
            return Found(0, failure=failure)
        return Found(self._blocks, self._tiers[: self._blocks])

    def _window(self, session: Session, number: int, window: list[bytes]) -> Generator[Step, Any, int]:
        lookup = wire.Lookup(session.next_id(), number, window, run=True, max_ms=self._max_ms)
        group = wire.GroupLookup(session.next_id(), number, window)
        yield Send([lookup, group])
        found = yield from answer(lookup.id, wire.Found)
        slices = yield from answer(group.id, wire.Group)
        if len(found.outcomes) != len(window) or len(slices.namespaces) != len(slices.outcomes):
            raise RemoteProtocolError("the daemon's reply has not one outcome for each block that was asked about")
        if any(len(outcomes) != len(window) for outcomes in slices.outcomes):
            raise RemoteProtocolError("the daemon's reply has not one outcome for each block that was asked about")
        self._tiers += bytes(found.tiers).ljust(len(window), b"\0")
        held = dict(zip(slices.namespaces, slices.outcomes, strict=True))
        hits = len(window)
        for rank, siblings in enumerate(self._ranks.siblings):
            own = held.get(siblings.own.encode(), b"\0" * len(window)) if rank else found.outcomes
            hits = min(hits, _readable(siblings, own, held, hits, is_first=rank == 0))
        return hits


def _readable(
    siblings: Siblings, own: bytes, held: dict[bytes, bytes], end: int, *, is_first: bool
) -> int:
    """Return how many leading blocks one rank can read, of `end` that matter."""
    hits = len(own) - len(own.lstrip(_HIT))
    others = {encoded: outcomes for encoded, outcomes in held.items() if encoded != siblings.own.encode()}
    if not others:
        return hits
    mine = held.get(siblings.own.encode())
    while hits < end:
        if mine is not None and mine[hits] == Outcome.HIT:
            if is_first and (hits >= len(own) or own[hits] not in (Outcome.HIT, Outcome.ABSENT)):
                break  # it is there, but can't be loaded in time
        else:
            holders = tuple(encoded for encoded, outcomes in others.items() if outcomes[hits] == Outcome.HIT)
            if not holders or siblings.plan_from(holders) is None:
                break
        hits += 1
    return hits


@dataclass(slots=True)
class _Asked:
    until: float
    future: Future[Found]
    patience_s: float = PATIENCE_S


class Asker:
    """Asks about requests, on a thread of its own."""

    def __init__(self, client: Client, threads: Executor, budget_s: float, load_timeout_ms: float) -> None:
        self._client = client
        self._threads = threads
        self._budget_s = budget_s
        self._load_timeout_ms = load_timeout_ms
        self._asked: dict[str, _Asked] = {}
        self._patience_s = PATIENCE_S

    def ask(self, request_id: str, ranks: Ranks, hashes: Sequence[bytes]) -> Found | None:
        """Return what there is of a request; None: ask again later."""
        asked = self._asked.get(request_id)
        if asked is None:
            operation = RankLookup(ranks, hashes, self._load_timeout_ms)
            future = self._threads.submit(self._client.run, operation, self._budget_s)
            asked = self._asked[request_id] = _Asked(time.monotonic() + self._budget_s, future)
        future = asked.future
        if not future.done():
            began_at = time.monotonic()
            found = _wait(future, min(asked.patience_s, self._patience_s))
            waited_s = time.monotonic() - began_at
            asked.patience_s -= waited_s
            self._patience_s -= waited_s
            if not found and began_at < asked.until:
                return None
        del self._asked[request_id]
        if not future.done():
            future.cancel()
            return Found(0)
        failure = future.exception()
        if failure is not None:
            return Found(0, failure=failure if isinstance(failure, KVStoreError) else KVStoreError(str(failure)))
        return future.result()

    def next_step(self, others: Sequence[Future[Any]] = (), *, is_idle: bool) -> None:
        """Note that a step of the scheduler has ended: the next one may wait again.

        `others` are waited for in an idle step, too.
        """
        self._patience_s = PATIENCE_S
        if is_idle and (self._asked or others):
            asked = [asked.future for asked in self._asked.values()]
            wait([*asked, *others], timeout=IDLE_S, return_when=FIRST_COMPLETED)

    def forget_all(self) -> None:
        """Forget what was asked about all requests."""
        for request_id in list(self._asked):
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Forget what was asked about a request."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.future.cancel()


def _wait(future: Future[Found], patience_s: float) -> bool:
    """Return whether the answer came in time."""
    if patience_s <= 0:
        return future.done()
    try:
        future.exception(timeout=patience_s)
    except TimeoutError:
        return False
    return True
