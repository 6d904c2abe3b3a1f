"""Blocks that are not stored in a reader's own slice, served from the slices that are: P at TP 4, D at TP 2.

Theory of operation. A window needs leases on several slices at once. Who holds some of them and waits for the rest may
wait for somebody who does the same. So while more than one is needed each is asked for with little patience; where one
does not come, all are given back, and after a pause of random length the window is asked for again, in halves and with
more patience, which a slow load may need.

Invariants
1. A block is a hit only if every piece of it was copied under a lease that lasted until its end.
2. What can't be put together is a miss with the reason LAYOUT; what no slice holds, ABSENT.
3. No lease on one slice is held for longer than `patience_s` while another one is waited for, nor during a pause.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvclient._buffers import Blocks, Segment
from kvclient._copy import Piece
from kvclient._operations import ACQUIRED, MISSES, Space, check_outcomes, opened, remaining_s, settled
from kvclient._session import Session
from kvclient._slices import Move, Plan, plan
from kvclient._steps import Copy, Operation, Pause, Send, Step, Steps, answer, ask
from kvclient._windows import places_of, windows_of
from kvclient.results import Lookup
from kvstore import wire
from kvstore.block import Namespace
from kvstore.errors import BadNamespace, KVStoreError, RemoteProtocolError
from kvstore.wire import Outcome

_SIBLINGS_MAX = 256
_PLANS_MAX = 4096
_PATIENCE_S_MIN = 0.1
_PAUSE_S_MAX = 0.2
_IN_VAIN = (Outcome.NO_ROOM, Outcome.DEADLINE)  # so far
_FOUND = MISSES + bytes([Outcome.HIT])


class Siblings:
    """The slices of one group that have been met, and how blocks of one of them come from others.

    Any number of threads may use it: what two of them find out at once is the same.
    """

    def __init__(self, own: Namespace) -> None:
        self.own = own
        self._spaces: dict[bytes, tuple[Space, Namespace]] = {}
        self._plans: dict[tuple[bytes, ...], Plan | None] = {}

    def known(self, encoded: bytes) -> tuple[Space, Namespace]:
        """Return a slice that the daemon named."""
        found = self._spaces.get(encoded)
        if found is None:
            try:
                namespace = Namespace.decode(encoded)
            except BadNamespace as exc:
                raise RemoteProtocolError(f"the daemon named a slice that is none: {exc}") from exc
            if namespace.group_digest != self.own.group_digest:
                raise RemoteProtocolError("the daemon named a slice of another group")
            if len(self._spaces) >= _SIBLINGS_MAX:
                self._spaces.clear()
            found = self._spaces[encoded] = (Space.of(namespace, None), namespace)
        return found

    def met(self) -> list[Space]:
        """Return the slices met so far, but for the own one."""
        own = self.own.encode()
        return [space for encoded, (space, _) in list(self._spaces.items()) if encoded != own]

    def plan_from(self, holders: tuple[bytes, ...]) -> Plan | None:
        """Return how to make a block of the own slice from blocks of `holders`."""
        if holders in self._plans:
            return self._plans[holders]
        made = plan(self.own, [self.known(encoded)[1] for encoded in holders])
        if len(self._plans) < _PLANS_MAX:
            self._plans[holders] = made
        return made


@dataclass(frozen=True, slots=True)
class Choice:
    """What is known of one block: its outcome if it can't be read, else who holds it (none: the own slice)."""

    outcome: int
    holders: tuple[bytes, ...] = ()


def choices(
    session: Session, number: int, hashes: Sequence[bytes], siblings: Siblings
) -> Generator[Step, Any, list[Choice]]:
    """Return for each block where it can be read from; one request for as many as one may hold."""
    own = siblings.own.encode()
    found: list[Choice] = []
    step = session.welcome.keys_max
    for start in range(0, len(hashes), step):
        part = list(hashes[start : start + step])
        group = yield from ask(wire.GroupLookup(session.next_id(), number, part), wire.Group)
        if len(group.namespaces) != len(group.outcomes):
            raise RemoteProtocolError("the daemon named slices without outcomes for each")
        for outcomes in group.outcomes:
            check_outcomes(outcomes, len(part), _FOUND)
        if not group.namespaces:
            found += [Choice(Outcome.ABSENT)] * len(part)
            continue
        for at in range(len(part)):
            holders = tuple(
                encoded
                for encoded, outcomes in zip(group.namespaces, group.outcomes, strict=True)
                if outcomes[at] == Outcome.HIT
            )
            found.append(_choice(own, holders, siblings))
    return found


def _choice(own: bytes, holders: tuple[bytes, ...], siblings: Siblings) -> Choice:
    if own in holders:
        return Choice(Outcome.HIT)
    if not holders:
        return Choice(Outcome.ABSENT)
    return Choice(Outcome.LAYOUT if siblings.plan_from(holders) is None else Outcome.HIT, holders)


class GroupLookup(Operation[Lookup]):
    """Which blocks can be read, from the own slice or put together from others?"""

    def __init__(self, space: Space, siblings: Siblings, hashes: list[bytes]) -> None:
        super().__init__(len(hashes))
        self._space = space
        self._hashes = hashes
        self._siblings = siblings
        self._outcomes = bytearray(len(hashes))

    def steps(self, session: Session, deadline_at: float) -> Steps:
        number = yield from opened(session, self._space)
        found = yield from choices(session, number, self._hashes, self._siblings)
        self._outcomes[:] = bytes(choice.outcome for choice in found)

    def result(self, failure: KVStoreError | None) -> Lookup:
        return Lookup(settled(self._outcomes, failure), failure)


@dataclass(slots=True)
class _Part:
    """What one slice contributes to a window: its request, and what to move from each of its blocks."""

    space: Space
    request: wire.Acquire
    sent_at: float
    moves: list[Move]
    is_final: bool  # it may wait until the call's own deadline


@dataclass(slots=True)
class _Copies:
    """What a window's copies are: the pieces, which checksums to take and compare, and until when leases last."""

    pieces: list[Piece]
    summed: list[list[Segment]]
    expected: list[tuple[int, int]]  # block of the window, checksum
    leases: list[int]
    until: float


class Assembly:
    """Puts blocks together for an operation, which notes the leases in its `held` until they are released."""

    def __init__(
        self,
        session: Session,
        deadline_at: float,
        siblings: Siblings,
        blocks: Blocks,
        held: dict[int, wire.Message],
        lease_s: float,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._jitter = jitter
        self._session = session
        self._deadline_at = deadline_at
        self._siblings = siblings
        self._blocks = blocks
        self._held = held
        self._lease_s = min(lease_s, session.welcome.lease_s_max)

    def copy(
        self, wanted: Sequence[tuple[int, bytes, tuple[bytes, ...]]], settle: Callable[[int, int], None]
    ) -> Generator[Step, Any, None]:
        """Copy blocks, each given by position, hash and holders as `choices` found them.

        `settle` is told each one's position and outcome as soon as that is known.
        """
        patience_s_max = max(_PATIENCE_S_MIN, (self._deadline_at - self._session.now()) / 4)
        alike: dict[tuple[bytes, ...], list[tuple[int, bytes]]] = {}
        for position, block_hash, holders in wanted:
            alike.setdefault(holders, []).append((position, block_hash))
        for holders, some in alike.items():
            made = self._siblings.plan_from(holders)
            assert made is not None, "choices names only what can be put together"
            together = sum(self._siblings.known(holders[place])[0].block_bytes for place in made.moves)
            queue = deque([some[at] for at in part] for part in windows_of(
                range(len(some)), together, self._session.welcome
            ))  # fmt: skip
            patience_s = _PATIENCE_S_MIN if len(made.moves) > 1 else math.inf
            while queue:
                window = queue.popleft()
                found = yield from self._window(holders, made, window, patience_s)
                again: list[tuple[int, bytes]] = []
                for block, outcome in zip(window, found, strict=True):
                    if outcome == Outcome.LATER:
                        again.append(block)
                    else:
                        settle(block[0], outcome)
                if len(again) == len(window):
                    yield Send(())  # the releases in the outbox, before the pause
                    pause_s = self._jitter() * min(patience_s, _PAUSE_S_MAX)
                    yield Pause(min(pause_s, max(0.0, self._deadline_at - self._session.now())))
                    patience_s = min(2 * patience_s, patience_s_max)
                    half = (len(again) + 1) // 2
                    queue.extendleft(part for part in (again[half:], again[:half]) if part)
                elif again:
                    queue.appendleft(again)

    def _window(
        self, holders: tuple[bytes, ...], made: Plan, window: list[tuple[int, bytes]], patience_s: float
    ) -> Generator[Step, Any, list[int]]:
        """Copy one window; returns an outcome for each of its blocks, LATER for those to be asked for again."""
        parts: list[_Part] = []
        for place, moves in made.moves.items():
            space = self._siblings.known(holders[place])[0]
            parts.append((yield from self._ask(space, moves, window, patience_s)))
        outcomes = [int(Outcome.HIT)] * len(window)
        copies = _Copies([], [], [], [], math.inf)
        for part in parts:
            reply = yield from answer(part.request.id, wire.Acquired)
            self._plan_copies(part, reply, window, outcomes, copies)
        checksums: list[int] = []
        if copies.pieces:
            checksums = yield Copy(copies.pieces, copies.summed)
        in_time = self._session.now() < copies.until
        for lease in copies.leases:
            self._session.outbox.append(self._session.dismiss(self._held.pop(lease)))
        if not in_time:
            return [Outcome.LATER if outcome == Outcome.HIT else outcome for outcome in outcomes]
        for (at, expected), found in zip(copies.expected, checksums, strict=True):
            if expected not in (0, found) and outcomes[at] == Outcome.HIT:
                outcomes[at] = Outcome.CORRUPT
        return outcomes

    def _ask(
        self, space: Space, moves: list[Move], window: list[tuple[int, bytes]], patience_s: float
    ) -> Generator[Step, Any, _Part]:
        session = self._session
        number = yield from opened(session, space)
        left_s = remaining_s(session, self._deadline_at)
        request = wire.Acquire(
            session.next_id(),
            number,
            [block_hash for _, block_hash in window],
            lease_s=self._lease_s,
            deadline_s=min(left_s, patience_s),
            count=False,
        )
        part = _Part(space, request, session.now(), moves, is_final=left_s <= patience_s)
        yield Send([request])
        return part

    def _plan_copies(
        self,
        part: _Part,
        reply: wire.Acquired,
        window: list[tuple[int, bytes]],
        outcomes: list[int],
        copies: _Copies,
    ) -> None:
        """Add to `copies` what a slice's reply allows, and to `outcomes` what it does not."""
        if reply.lease:
            self._held[reply.lease] = wire.Release(0, reply.lease)
            copies.leases.append(reply.lease)
            copies.until = min(copies.until, part.sent_at + reply.lease_s)
        check_outcomes(reply.outcomes, len(window), ACQUIRED)
        hits = [at for at, outcome in enumerate(reply.outcomes) if outcome == Outcome.HIT]
        if hits and (not reply.lease or len(reply.offsets) != len(window)):
            raise RemoteProtocolError("the daemon named hits without a lease or a place for each")
        for at, outcome in enumerate(reply.outcomes):
            if outcome in _IN_VAIN and not part.is_final:
                outcome = Outcome.LATER
            # What is gone matters more than what has no room now.
            if outcome != Outcome.HIT and outcomes[at] in (Outcome.HIT, Outcome.LATER):
                outcomes[at] = outcome
        slots = places_of(self._session.pool, reply.offsets, hits, part.space.block_bytes) if hits else []
        verify = self._session.welcome.verify_reads and len(reply.checksums) == len(window)
        for at, slot in zip(hits, slots, strict=True):
            copies.pieces += _pieces(self._blocks.segments(window[at][0]), slot, part.moves)
            if verify:
                copies.summed.append([(slot, part.space.block_bytes)])
                copies.expected.append((at, reply.checksums[at]))


def _pieces(target: Sequence[Segment], slot: int, moves: Sequence[Move]) -> list[Piece]:
    """Return the copies of `moves` out of a slot into a block whose bytes lie in the segments `target`."""
    starts = list(itertools.accumulate((size for _, size in target), initial=0))
    pieces: list[Piece] = []
    for source, start, length in moves:
        place = bisect.bisect_right(starts, start) - 1
        while length:
            address, size = target[place]
            within = start - starts[place]
            part = min(size - within, length)
            pieces.append((address + within, slot + source, part))
            source, start, length, place = source + part, start + part, length - part, place + 1
    return pieces
