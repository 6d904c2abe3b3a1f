"""Least recently used by class of reuse: blocks used once, twice, a few times and often stand in queues of their own.

The victim is the end of a queue that is worth least by what `returns` has learnt of its class: the block with the
fewest hits to expect for the room and time it would take. docs/eviction.md has the figures.

Invariants
1. The rows of a class and lane are ordered by last use.
2. Uses within SAME_USE_TICKS of a counted one belong to the same request (a fetch, and the store that finds the block
   present) and do not count as another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import xxhash

from kvstore.policy.ghosts import Ghosts
from kvstore.policy.queues import RowQueues
from kvstore.policy.returns import Returns, age_bin

SAME_USE_TICKS = 200
_CLASS_OF_REUSES = bytes([0, 1, 2, 2, 3])
_REUSES_MAX = len(_CLASS_OF_REUSES) - 1
_CLASSES = 4


class ReuseClasses:
    """One queue for each class of each lane; 23 bytes a row, and up to 32 for what is remembered of evicted ones."""

    def __init__(self) -> None:
        self._queues = RowQueues()
        self._queue_of_lane: dict[int, int] = {}  # the first of a lane's
        self._last_use = array("I")
        self._counted_at = array("I")
        self._identity = array("I")
        self._reuses = bytearray()
        self._ghosts = Ghosts()
        self.returns = Returns(_CLASSES)
        self._rows = 0
        self._now = 0

    def admit(self, row: int, lane: int, now: int, namespace: int, block_hash: bytes, uses: int) -> None:
        self._admit(row, self._queue(lane), now, _identity(block_hash, namespace), uses)

    def admit_many(self, rows: Sequence[int], lane: int, now: int, namespace: int, hashes: Sequence[bytes]) -> None:
        queue = self._queue(lane)
        for row, block_hash in zip(rows, hashes, strict=True):
            self._admit(row, queue, now, _identity(block_hash, namespace), 0)

    def restore(self, rows: Sequence[int], lane: int, now: int, namespace: int, hashes: Sequence[bytes]) -> None:
        if not rows:
            return
        self._grow(max(rows))
        for row, block_hash in zip(rows, hashes, strict=True):
            self._last_use[row] = self._counted_at[row] = now
            self._identity[row] = _identity(block_hash, namespace)
            self._reuses[row] = 0
        self._queues.append_many(rows, self._queue(lane))
        self._rows += len(rows)
        self.returns.fit(self._rows)

    def use(self, row: int, now: int) -> None:
        self._now = now
        self._last_use[row] = now
        if now - self._counted_at[row] < SAME_USE_TICKS:
            self._queues.refresh(row)
            return
        self._counted_at[row] = now
        reuses = min(self._reuses[row] + 1, _REUSES_MAX)
        self._classify(row, reuses)
        identity = self._identity[row]
        if self.returns.follows(identity):
            self.returns.note_use(identity, _CLASS_OF_REUSES[reuses], now)

    def use_many(self, rows: Sequence[int], now: int) -> None:
        for row in rows:
            self.use(row, now)

    def put_behind(self, rows: Sequence[int], anchor: int | None) -> None:
        by_class: dict[int, list[int]] = {}
        for row in rows:
            by_class.setdefault(_CLASS_OF_REUSES[self._reuses[row]], []).append(row)
        for some in by_class.values():  # one of another class than the anchor's is ordered by its worth anyway
            if (used := self._queues.move_before(some, anchor)) is not None:
                for row in some:
                    self._last_use[row] = self._last_use[used]

    def renew(self, row: int, now: int, uses: int) -> None:
        self._now = now
        self._last_use[row] = self._counted_at[row] = now
        reuses = min(max(uses, self._reuses[row]), _REUSES_MAX)
        self._classify(row, reuses)
        identity = self._identity[row]
        if self.returns.follows(identity):
            self.returns.begin(identity, _CLASS_OF_REUSES[reuses], now)

    def remove(self, row: int) -> None:
        self._queues.remove(row)
        self._ghosts.note(self._identity[row], self._reuses[row] + 1, self._rows)
        self._rows -= 1

    def coldest(self, lane: int) -> Iterator[int]:
        first = self._queue_of_lane.get(lane)
        if first is None:
            return
        queues, worth_of, last_use = self._queues, self.returns.worth, self._last_use
        ends: list[tuple[float, int, int, int]] = []  # worth, last use, class, row: the least goes first
        for reuse_class in range(_CLASSES):
            row = queues.oldest[first + reuse_class]
            if row >= 0:
                used = last_use[row]
                ends.append((worth_of[reuse_class][age_bin(self._now - used)], used, reuse_class, row))
        while ends:
            end = min(ends)
            yield end[3]
            ends.remove(end)
            row = queues.newer[end[3]]
            if row >= 0:
                used = last_use[row]
                ends.append((worth_of[end[2]][age_bin(self._now - used)], used, end[2], row))

    def rank(self, row: int) -> float:
        reuse_class = _CLASS_OF_REUSES[self._reuses[row]]
        return self.returns.worth[reuse_class][age_bin(self._now - self._last_use[row])]

    def last_use(self, row: int) -> int:
        return self._last_use[row]

    def __contains__(self, row: int) -> bool:
        return row in self._queues

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queues are whole and in order."""
        self._queues.check_integrity()
        assert self._rows == sum(self._queues.length)
        for first in self._queue_of_lane.values():
            for reuse_class in range(_CLASSES):
                rows = list(self._queues.from_oldest(first + reuse_class))
                assert all(_CLASS_OF_REUSES[self._reuses[row]] == reuse_class for row in rows)
                used = [self._last_use[row] for row in rows]
                assert used == sorted(used), f"class {reuse_class} is not in the order of use"

    def _admit(self, row: int, queue: int, now: int, identity: int, uses: int) -> None:
        self._now = now
        if row >= len(self._last_use):
            self._grow(row)
        self._rows += 1
        reuses = min(max(uses, self._ghosts.recall(identity)), _REUSES_MAX)
        self._last_use[row] = self._counted_at[row] = now
        self._identity[row] = identity
        self._reuses[row] = reuses
        self._queues.append(row, queue + _CLASS_OF_REUSES[reuses])
        if self.returns.follows(identity):
            self.returns.fit(self._rows)
            self.returns.note_use(identity, _CLASS_OF_REUSES[reuses], now)

    def _classify(self, row: int, reuses: int) -> None:
        """Put a row at the new end of the queue that this many reuses belong to."""
        queue = self._queues.remove(row)
        self._queues.append(row, queue - _CLASS_OF_REUSES[self._reuses[row]] + _CLASS_OF_REUSES[reuses])
        self._reuses[row] = reuses

    def _queue(self, lane: int) -> int:
        queue = self._queue_of_lane.get(lane)
        if queue is None:
            queue = self._queue_of_lane[lane] = self._queues.new_queue()
            for _ in range(1, _CLASSES):
                self._queues.new_queue()
        return queue

    def _grow(self, row: int) -> None:
        if row < len(self._last_use):
            return
        count = max(1024, len(self._last_use) // 8, row + 1 - len(self._last_use))
        for column in (self._last_use, self._counted_at, self._identity):
            column.frombytes(bytes(count * column.itemsize))
        self._reuses.extend(bytes(count))


def _identity(block_hash: bytes, namespace: int) -> int:
    return xxhash.xxh3_64_intdigest(block_hash, namespace) & 0xFFFFFFFF
