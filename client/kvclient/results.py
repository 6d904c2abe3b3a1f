"""What the verbs return: an outcome for each block, in the order of the hashes given.

Invariants
1. A result has exactly one outcome a hash, whatever failed; `failure` then says what.
2. `hits` counts the leading hits: the blocks of a prefix that can be used.
3. The views of a lease read the daemon's memory directly; after `release` they raise on use.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvstore.errors import KVStoreError, LeaseExpired, UsageError
from kvstore.wire import Outcome

_BY_VALUE: list[Outcome] = [
    Outcome(value) if value in set(Outcome) else Outcome.UNAVAILABLE for value in range(256)
]
_HIT = bytes([Outcome.HIT])
_TIER_NAMES = ("gpu", "cpu", "ssd", "remote")
_WRITTEN = (Outcome.SEALED, Outcome.DURABLE, Outcome.NOT_DURABLE)
_THERE = (Outcome.PRESENT, Outcome.BUSY)


class _PerBlock:
    """One byte a block, as the protocol has it, and why the call failed, if it did."""

    raw: bytes
    failure: KVStoreError | None

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What happened to each block."""
        # Not functools.cached_property: Python 3.11's has a lock, which a child forked meanwhile would find held.
        found: tuple[Outcome, ...] | None = self.__dict__.get("_outcomes")
        if found is None:
            found = self.__dict__["_outcomes"] = tuple(map(_BY_VALUE.__getitem__, self.raw))
        return found

    def __len__(self) -> int:
        return len(self.raw)

    def count(self, *outcomes: Outcome) -> int:
        """Return how many blocks met one of `outcomes`."""
        return sum(map(self.raw.count, outcomes))


class _Read(_PerBlock):
    @property
    def hits(self) -> int:
        """How many leading blocks are hits."""
        return len(self.raw) - len(self.raw.lstrip(_HIT))

    @property
    def hit_count(self) -> int:
        """How many blocks are hits, wherever they are."""
        return self.count(Outcome.HIT)

    @property
    def missing(self) -> list[int]:
        """The positions that are no hits."""
        return [position for position, outcome in enumerate(self.raw) if outcome != Outcome.HIT]


@dataclass(frozen=True)
class Lookup(_Read):
    """Answers lookup, wait and prefetch: where each block is, as far as anybody asked."""

    raw: bytes
    failure: KVStoreError | None = None
    tiers: bytes = b""

    def tier_names(self, position: int) -> tuple[str, ...]:
        """Return the tiers that hold the block at `position`."""
        bits = self.tiers[position] if position < len(self.tiers) else 0
        return tuple(name for bit, name in enumerate(_TIER_NAMES) if bits & 1 << bit)


@dataclass(frozen=True)
class FetchResult(_Read):
    """Answers fetch. The buffers of blocks that are no hits hold anything."""

    raw: bytes
    failure: KVStoreError | None = None


@dataclass(frozen=True)
class StoreResult(_PerBlock):
    """Answers store. Stored and present blocks can be fetched; busy ones soon, by another's store."""

    raw: bytes
    failure: KVStoreError | None = None

    @property
    def stored(self) -> int:
        """How many blocks this call wrote."""
        return self.count(*_WRITTEN)

    @property
    def present(self) -> int:
        """How many blocks needed no writing, since they were there or on their way."""
        return self.count(*_THERE)

    @property
    def durable(self) -> int:
        """How many blocks this call wrote to the ssd tier for good."""
        return self.count(Outcome.DURABLE)

    @property
    def failed(self) -> int:
        """How many blocks are not stored."""
        return len(self.raw) - self.stored - self.present

    @property
    def not_stored(self) -> list[int]:
        """The positions of blocks that are not stored."""
        return [position for position, outcome in enumerate(self.outcomes) if outcome not in (*_WRITTEN, *_THERE)]


@dataclass(frozen=True)
class Changed(_PerBlock):
    """Answers drop, pin, unpin and ttl: DONE for each block that was there."""

    raw: bytes
    failure: KVStoreError | None = None

    @property
    def done(self) -> int:
        """How many blocks were there and are changed."""
        return self.count(Outcome.DONE)


class Lease(_Read):
    """Blocks held in the daemon's memory and read in place, until `release`.

    A context manager. `views[i]` is a read-only memoryview of block i, None where it is no hit. Slices of a view and
    arrays made from it must be dropped before the release, which refuses while it sees one. (It can't see what
    torch.frombuffer makes: use torch.from_numpy(numpy.asarray(view)).) A lease belongs to the process that got it: in a
    forked child it is over.
    """

    def __init__(
        self,
        raw: bytes,
        failure: KVStoreError | None,
        views: Sequence[memoryview | None],
        places: Sequence[weakref.ref[Any]],
        give_back: Callable[[], None] | None,
    ) -> None:
        self.raw = raw
        self.failure = failure
        self._views = views
        self._places = places
        self._give_back = give_back
        self._is_over = False
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def views(self) -> Sequence[memoryview | None]:
        """The blocks' bytes.

        Raises
        ------
        LeaseExpired
            The lease was released, or belongs to the parent of this process.
        """
        if self._pid != os.getpid():
            raise LeaseExpired("this lease belongs to the process that forked this one: acquire again here")
        if self._is_over:
            raise LeaseExpired("this lease was released: acquire the blocks again")
        return self._views

    def release(self) -> None:
        """Give the blocks back; the views can't be used any more. Releasing twice is harmless.

        Raises
        ------
        UsageError
            An array or another view still refers to a view's memory: the blocks stay held until a later release.
        """
        with self._lock:
            if self._is_over or self._pid != os.getpid():
                return
            self._end_views()
            self._is_over = True
            if self._give_back is not None:
                self._give_back()

    def disown(self) -> None:
        """End the lease in a forked child: it stays the parent's."""
        self._lock = threading.Lock()
        for view in self._views:
            if view is not None:
                try:
                    view.release()
                except BufferError:
                    continue  # an array made from it in the parent; `views` refuses it from now on

    def _end_views(self) -> None:
        for view in self._views:
            if view is not None:
                try:
                    view.release()
                except BufferError:
                    continue  # somebody is in the middle of reading it: its place is alive
        if any(place() is not None for place in self._places):
            raise UsageError(
                "a slice of a lease's view, or an array made from one, is still in use: drop it, then release again"
            )

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except UsageError:
            if raised is None:
                raise
