"""The verb store: reserve, copy in, seal.

Invariants
1. Blocks are sealed only after the last of their bytes has been copied.
2. What was granted and is not sealed at the end is forfeited.
3. A block that found no room beside another window of the same call is asked for again when that is sealed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvclient._buffers import Blocks, Segment
from kvclient._copy import pairs
from kvclient._operations import MISSES, Progress, Space, check_outcomes, opened, put_outcome, remaining_s, settled
from kvclient._session import Session
from kvclient._steps import Copy, Operation, Send, Step, Steps, answer
from kvclient._windows import Window, places_of, runs_of, windows_of
from kvclient.results import StoreResult
from kvclient.stats import ClientStats
from kvstore import wire
from kvstore.errors import KVStoreError, LeaseExpired, RemoteProtocolError
from kvstore.wire import Outcome

_RESERVED = MISSES + bytes([Outcome.GRANTED, Outcome.PRESENT, Outcome.BUSY])
_THERE = (0, Outcome.PRESENT, Outcome.SEALED, Outcome.DURABLE)  # 0: written, or about to be
_SEALED = MISSES + bytes([Outcome.SEALED, Outcome.DURABLE, Outcome.PRESENT])


@dataclass(frozen=True, slots=True)
class _Sealing:
    """A seal on its way."""

    positions: Sequence[int]
    request: int
    ticket: int


class Store(Operation[StoreResult]):
    """Reserve, copy in, seal."""

    def __init__(
        self,
        space: Space,
        hashes: list[bytes],
        blocks: Blocks,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        wait_s: float = 0.0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(len(hashes))
        self._space = space
        self._hashes = hashes
        self._blocks = blocks
        self._ttl_s = ttl_s
        self._durable = durable
        self._wait_s = wait_s
        self._wait_until = 0.0
        self._progress = progress
        self._outcomes = bytearray(len(hashes))
        self._number = 0
        self._in_flight: deque[Window] = deque()
        self._sealing: deque[_Sealing] = deque()

    def steps(self, session: Session, deadline_at: float) -> Steps:
        self._number = yield from opened(session, self._space)
        self._wait_until = session.now() + self._wait_s
        left: Sequence[int] = range(len(self._hashes))
        while left:
            left = yield from self._pass(session, deadline_at, left)
            for position in left:
                self._outcomes[position] = 0

    def result(self, failure: KVStoreError | None) -> StoreResult:
        return StoreResult(settled(self._outcomes, failure), failure)

    def tally(self, stats: ClientStats, result: StoreResult) -> None:
        super().tally(stats, result)
        stats.stored(result.raw, self._space.block_bytes)

    def _pass(
        self, session: Session, deadline_at: float, positions: Sequence[int]
    ) -> Generator[Step, Any, list[int]]:
        """Store `positions`; returns those that found no room and may find some now."""
        queue = deque(
            window for run in runs_of(positions) for window in windows_of(run, self._space.block_bytes, session.welcome)
        )
        refused: list[int] = []
        yield from self._reserve(session, deadline_at, queue)
        while self._in_flight:
            if queue:
                if session.arena is not None:  # it has room for one window being written, one being sealed, one ahead
                    yield from self._settle_seals(leave=1)
                yield from self._reserve(session, deadline_at, queue)
            window = self._in_flight.popleft()
            self._blocks.addresses(window.positions)  # found out while the daemon works
            reserved = yield from answer(window.request, wire.Reserved)
            check_outcomes(reserved.outcomes, len(window.positions), _RESERVED)
            granted = self._granted(window, reserved)
            if not window.alone or session.now() < self._wait_until:
                refused += [p for p in window.positions if self._outcomes[p] == Outcome.NO_ROOM]
            if granted:
                yield from self._write(session, deadline_at, window, reserved, granted)
            self._report()
        yield from self._settle_seals(leave=0)
        self._report()
        return refused

    def _reserve(
        self, session: Session, deadline_at: float, queue: deque[Sequence[int]]
    ) -> Generator[Step, Any, None]:
        positions = queue.popleft()
        wanted = self._hashes if len(positions) == len(self._hashes) else [self._hashes[p] for p in positions]
        alone = not self._in_flight and not self._sealing
        now = session.now()
        wait_s = min(remaining_s(session, deadline_at), max(0.0, self._wait_until - now)) if alone else 0.0
        request = wire.Reserve(session.next_id(), self._number, wanted, wait_s, self._continued(positions[0]))
        self._in_flight.append(Window(positions, request.id, now, alone))
        yield Send([request])

    def _continued(self, position: int) -> bytes | None:
        """Return the nearest block before `position` that is there, as far as is known."""
        for before in range(position - 1, -1, -1):
            if self._outcomes[before] in _THERE:
                return self._hashes[before]
        return None

    def _granted(self, window: Window, reserved: wire.Reserved) -> Sequence[int]:
        """Note the outcomes of a Reserve; returns the places within the window that are to be written."""
        if reserved.outcomes.count(Outcome.GRANTED) == len(window.positions):
            granted: Sequence[int] = range(len(window.positions))
        else:
            granted = [at for at, outcome in enumerate(reserved.outcomes) if outcome == Outcome.GRANTED]
            for position, outcome in zip(window.positions, reserved.outcomes, strict=True):
                if outcome != Outcome.GRANTED:
                    self._outcomes[position] = outcome
        if granted:
            self.held[reserved.ticket] = wire.Forfeit(0, reserved.ticket)
            if len(reserved.offsets) != len(window.positions):
                raise RemoteProtocolError("the daemon granted slots without naming the place of each")
        return granted

    def _write(
        self,
        session: Session,
        deadline_at: float,
        window: Window,
        reserved: wire.Reserved,
        granted: Sequence[int],
    ) -> Generator[Step, Any, None]:
        size = self._space.block_bytes
        slots = places_of(session.arena or session.pool, reserved.offsets, granted, size)
        whole = len(granted) == len(window.positions)
        positions = window.positions if whole else [window.positions[at] for at in granted]
        summed: list[list[Segment]] = []
        if session.welcome.checksum_at_seal:
            summed = [[(slot, size)] for slot in slots]
        places = pairs(self._blocks, positions, slots, size)
        checksums = yield Copy([(slot, source, length) for source, slot, length in places], summed)
        seal = wire.Seal(
            session.next_id(),
            reserved.ticket,
            list(granted),
            checksums,
            self._ttl_s,
            self._durable,
            remaining_s(session, deadline_at),
            self._continued(window.positions[0]),
        )
        yield Send([seal])
        self._sealing.append(_Sealing(positions, seal.id, reserved.ticket))

    def _settle_seals(self, leave: int) -> Generator[Step, Any, None]:
        while len(self._sealing) > leave:
            sealing = self._sealing.popleft()
            positions = sealing.positions
            try:
                sealed = yield from answer(sealing.request, wire.Sealed, patient=self._durable)
            except LeaseExpired:  # the copy took longer than the reservation; others may write the blocks now
                outcomes = bytes([Outcome.REFUSED]) * len(positions)
            else:
                outcomes = sealed.outcomes
                check_outcomes(outcomes, len(positions), _SEALED)
            self.held.pop(sealing.ticket, None)
            if outcomes.count(Outcome.SEALED) == len(positions):
                put_outcome(self._outcomes, positions, Outcome.SEALED)
            else:
                for position, outcome in zip(positions, outcomes, strict=True):
                    self._outcomes[position] = outcome

    def _report(self) -> None:
        if self._progress is not None:
            unsealed = sum(len(sealing.positions) for sealing in self._sealing)
            self._progress(len(self._outcomes) - self._outcomes.count(0) + unsealed, len(self._outcomes))
