"""The verbs fetch and acquire: a lease on blocks, then copies out of the pool, or views of it.

Invariants
1. A fetched block is a hit only if its copy ended, by this process's own clock, before its lease did.
2. A window's lease is given back before its rest is asked for again: nobody holds room while waiting for room.
3. With checksums asked for, a block is a hit only if the bytes at the caller's match.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from kvclient._assembly import Assembly, Siblings, choices
from kvclient._buffers import Blocks
from kvclient._copy import pairs
from kvclient._operations import ACQUIRED, Progress, Space, check_outcomes, opened, put_outcome, remaining_s, settled
from kvclient._session import Session
from kvclient._steps import Copy, Operation, Pause, Send, Step, Steps, answer, ask
from kvclient._windows import Window, places_of, windows_of
from kvclient.results import FetchResult
from kvclient.stats import ClientStats
from kvstore import wire
from kvstore.errors import ChecksumMismatch, KVStoreError, RemoteProtocolError, TooLarge
from kvstore.wire import Outcome

LEASE_S = 10.0
_LACKING = (Outcome.ABSENT, Outcome.EXPIRED)
_IN_FLIGHT_MAX = 2
_PAUSE_S_MIN = 0.001
_PAUSE_S_MAX = 0.05


class Fetch(Operation[FetchResult]):
    """Acquire, copy out, release."""

    def __init__(
        self,
        space: Space,
        hashes: list[bytes],
        blocks: Blocks,
        *,
        wait_s: float = 0.0,
        max_ms: float | None = None,
        run: bool = True,
        count: bool = True,
        siblings: Siblings | None = None,
        lease_s: float = LEASE_S,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(len(hashes))
        self._space = space
        self._hashes = hashes
        self._blocks = blocks
        self._wait_s = wait_s
        self._max_ms = max_ms
        self._run = run
        self._count = count
        self._siblings = siblings
        self._lease_s = lease_s
        self._progress = progress
        self._outcomes = bytearray(len(hashes))
        self._end = len(hashes)  # the first miss of a run: nothing from there on matters
        self._number = 0
        self._wait_until = 0.0
        self._in_flight: deque[Window] = deque()

    def steps(self, session: Session, deadline_at: float) -> Steps:
        self._number = yield from opened(session, self._space)
        self._wait_until = session.now() + self._wait_s
        positions: Sequence[int] = range(len(self._hashes))
        if self._siblings is not None and self._wait_s > 0:
            # Nobody will seal in this slice what others hold already: it would be waited for in vain.
            positions = yield from self._from_slices(session, deadline_at, self._siblings, positions)
        yield from self._from_own_slice(session, deadline_at, positions)
        if self._siblings is not None and self._wait_s == 0 and (missing := self._not_stored()):
            left = yield from self._from_slices(session, deadline_at, self._siblings, missing)
            self._end = len(self._hashes)
            yield from self._from_own_slice(session, deadline_at, left)
            self._end = next((p for p, outcome in enumerate(self._outcomes) if outcome != Outcome.HIT), self._end)

    def _not_stored(self) -> Sequence[int]:
        """Return the positions that the own slice lacks, as far as they matter."""
        if not self._run:
            return [p for p, outcome in enumerate(self._outcomes) if outcome in _LACKING]
        if self._end < len(self._hashes) and self._outcomes[self._end] in _LACKING:
            return range(self._end, len(self._hashes))
        return ()

    def _from_slices(
        self, session: Session, deadline_at: float, siblings: Siblings, positions: Sequence[int]
    ) -> Generator[Step, Any, list[int]]:
        """Put together what only other slices hold; returns the positions that the own slice may have."""
        found = yield from choices(session, self._number, [self._hashes[p] for p in positions], siblings)
        wanted: list[tuple[int, bytes, tuple[bytes, ...]]] = []
        left: list[int] = []
        for position, choice in zip(positions, found, strict=True):
            if choice.outcome == Outcome.HIT and choice.holders:
                wanted.append((position, self._hashes[position], choice.holders))
            elif choice.outcome == Outcome.HIT or self._wait_s > 0:
                left.append(position)
            else:
                self._outcomes[position] = choice.outcome
                if self._run:
                    break
        assembly = Assembly(session, deadline_at, siblings, self._blocks, self.held, self._lease_s)
        yield from assembly.copy(wanted, self._outcomes.__setitem__)
        return left

    def _from_own_slice(
        self, session: Session, deadline_at: float, positions: Sequence[int]
    ) -> Generator[Step, Any, None]:
        queue = deque(windows_of(positions, self._space.block_bytes, session.welcome))
        pause_s = _PAUSE_S_MIN
        if queue:
            yield from self._acquire(session, deadline_at, queue.popleft())
        while self._in_flight:
            if queue and len(self._in_flight) < _IN_FLIGHT_MAX:
                yield from self._acquire(session, deadline_at, queue.popleft())
            window = self._in_flight.popleft()
            later = yield from self._read(session, window)
            self._report()
            if later and len(later) == len(window.positions) and window.alone:
                yield Pause(min(pause_s, max(0.0, deadline_at - session.now())))
                pause_s = min(_PAUSE_S_MAX, 2 * pause_s)
            if later:
                queue.appendleft(later)
            wanted = [[p for p in some if p < self._end] for some in queue] if self._end < len(self._hashes) else queue
            queue = deque(some for some in wanted if some)
            if self._in_flight and self._in_flight[0].positions[0] >= self._end:
                session.abandon(self._in_flight.popleft().request)
            if queue and not self._in_flight:
                yield from self._acquire(session, deadline_at, queue.popleft())

    def result(self, failure: KVStoreError | None) -> FetchResult:
        if failure is None and self._end < len(self._outcomes):
            self._outcomes[self._end + 1 :] = bytes(o or Outcome.ABSENT for o in self._outcomes[self._end + 1 :])
        return FetchResult(settled(self._outcomes, failure), failure)

    def tally(self, stats: ClientStats, result: FetchResult) -> None:
        super().tally(stats, result)
        stats.fetched(result.raw, self._space.block_bytes)

    def _acquire(
        self, session: Session, deadline_at: float, positions: Sequence[int]
    ) -> Generator[Step, Any, None]:
        left_s = remaining_s(session, deadline_at)
        now = session.now()
        request = wire.Acquire(
            session.next_id(),
            self._number,
            self._hashes if len(positions) == len(self._hashes) else [self._hashes[p] for p in positions],
            copying=True,
            lease_s=min(self._lease_s, session.welcome.lease_s_max),
            wait_s=min(left_s, max(0.0, self._wait_until - now)),
            deadline_s=left_s,
            max_ms=self._max_ms,
            run=self._run,
            count=self._count,
            after=self._hashes[positions[0] - 1] if positions[0] else None,
        )
        alone = not self._in_flight and not self.held
        self._in_flight.append(Window(positions, request.id, now, alone))
        yield Send([request])

    def _read(self, session: Session, window: Window) -> Generator[Step, Any, list[int]]:
        """Copy what a reply grants; returns the positions to be asked for again."""
        self._blocks.addresses(window.positions)  # found out while the daemon works
        reply = yield from answer(window.request, wire.Acquired, patient=self._wait_s > 0)
        if reply.lease:
            self.held[reply.lease] = wire.Release(0, reply.lease)
        check_outcomes(reply.outcomes, len(window.positions), ACQUIRED)
        again: list[int] = []
        if reply.outcomes.count(Outcome.HIT) == len(window.positions):
            hits: Sequence[int] = range(len(window.positions))
        else:
            hits = [at for at, outcome in enumerate(reply.outcomes) if outcome == Outcome.HIT]
            for position, outcome in zip(window.positions, reply.outcomes, strict=True):
                if outcome == Outcome.LATER:
                    again.append(position)
                elif outcome != Outcome.HIT:
                    self._settle(position, outcome)
        if hits:
            again += yield from self._copy(session, window, reply, hits)
        return sorted(again)

    def _copy(
        self, session: Session, window: Window, reply: wire.Acquired, hits: Sequence[int]
    ) -> Generator[Step, Any, Sequence[int]]:
        """Copy the blocks at places `hits` of a window; returns the positions for which the lease was too short."""
        if not reply.lease or len(reply.offsets) != len(window.positions):
            raise RemoteProtocolError("the daemon named hits without a lease or a place for each")
        size = self._space.block_bytes
        slots = places_of(session.pool, reply.offsets, hits, size)
        positions = window.positions if len(hits) == len(window.positions) else [window.positions[at] for at in hits]
        verify = session.welcome.verify_reads and len(reply.checksums) == len(window.positions)
        pieces = pairs(self._blocks, positions, slots, size)
        checksums = yield Copy(pieces, [self._blocks.segments(position) for position in positions] if verify else ())
        in_time = session.now() < window.sent_at + reply.lease_s
        session.outbox.append(session.dismiss(self.held.pop(reply.lease)))
        if not in_time:
            return positions
        if not verify:
            put_outcome(self._outcomes, positions, Outcome.HIT)
            return ()
        corrupt: list[bytes] = []
        for position, at, found in zip(positions, hits, checksums, strict=True):
            good = reply.checksums[at] in (0, found)
            self._settle(position, Outcome.HIT if good else Outcome.CORRUPT)
            if not good:
                corrupt.append(self._hashes[position])
        if corrupt:  # so that nobody else meets them
            session.outbox.append(wire.Corrupt(session.next_id(), self._number, corrupt))
        return ()

    def _settle(self, position: int, outcome: int) -> None:
        self._outcomes[position] = outcome
        if self._run and outcome != Outcome.HIT:
            self._end = min(self._end, position)

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(len(self._outcomes) - self._outcomes.count(0), len(self._outcomes))


class Hold(Operation[FetchResult]):
    """Acquire without copying: all blocks at once, until `lease` is released.

    `views` are theirs, None for a miss; `places` live as long as something reads them.
    """

    def __init__(
        self, space: Space, hashes: list[bytes], *, wait_s: float = 0.0, max_ms: float | None = None, count: bool = True
    ) -> None:
        super().__init__(len(hashes))
        self._space = space
        self._hashes = hashes
        self._wait_s = wait_s
        self._max_ms = max_ms
        self._count = count
        self._outcomes = bytearray(len(hashes))
        self.views: list[memoryview | None] = []
        self.places: list[weakref.ref[Any]] = []

    def steps(self, session: Session, deadline_at: float) -> Steps:
        if len(self._hashes) > session.welcome.keys_max:
            raise TooLarge(
                f"{len(self._hashes)} blocks are more than one lease holds ({session.welcome.keys_max}): "
                "acquire fewer, or fetch them"
            )
        number = yield from opened(session, self._space)
        left_s = remaining_s(session, deadline_at)
        request = wire.Acquire(
            session.next_id(),
            number,
            self._hashes,
            copying=False,
            lease_s=session.welcome.lease_s_max,
            wait_s=min(left_s, self._wait_s),
            deadline_s=left_s,
            max_ms=self._max_ms,
            count=self._count,
        )
        reply = yield from ask(request, wire.Acquired, patient=self._wait_s > 0)
        if reply.lease:
            self.held[reply.lease] = wire.Release(0, reply.lease)
        check_outcomes(reply.outcomes, len(self._hashes), ACQUIRED)
        hits = [at for at, outcome in enumerate(reply.outcomes) if outcome == Outcome.HIT]
        views: list[memoryview | None] = [None] * len(self._hashes)
        places: list[weakref.ref[Any]] = []
        if reply.lease:
            if len(reply.offsets) != len(self._hashes):
                raise RemoteProtocolError("the daemon granted a lease without a place for each block")
            size = self._space.block_bytes
            slots = places_of(session.pool, reply.offsets, hits, size)
            assert session.pool is not None
            for at in hits:
                views[at], place = session.pool.view(reply.offsets[at], size)
                places.append(place)
            yield from self._verify(session, number, reply, hits, slots)
        self.held.pop(reply.lease, None)
        self.lease = reply.lease
        self.views, self.places = views, places
        there = Outcome.HIT if reply.lease else Outcome.LATER
        self._outcomes[:] = reply.outcomes.replace(bytes([Outcome.HIT]), bytes([there]))

    def result(self, failure: KVStoreError | None) -> FetchResult:
        return FetchResult(settled(self._outcomes, failure), failure)

    def tally(self, stats: ClientStats, result: FetchResult) -> None:
        super().tally(stats, result)
        stats.fetched(result.raw, self._space.block_bytes)

    def _verify(
        self, session: Session, number: int, reply: wire.Acquired, hits: list[int], slots: list[int]
    ) -> Generator[Step, Any, None]:
        if not session.welcome.verify_reads or len(reply.checksums) != len(self._hashes):
            return
        found = yield Copy((), [[(slot, self._space.block_bytes)] for slot in slots])
        for at, checksum in zip(hits, found, strict=True):
            if reply.checksums[at] not in (0, checksum):
                session.outbox.append(wire.Corrupt(session.next_id(), number, [self._hashes[at]]))
                raise ChecksumMismatch(
                    f"block {self._hashes[at].hex()} does not match its checksum: the daemon was told; recompute it"
                )
