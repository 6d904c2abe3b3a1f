"""Queues of row numbers, linked through arrays: 12 bytes a row, constant time for each operation.

Invariants
1. A row stands in at most one queue; `queue_of[row]` says in which, NOWHERE if in none.
2. From `oldest[queue]` along `newer` one meets each row of that queue exactly once, ending at `newest[queue]`;
   `older` is the same way back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

NOWHERE = 0xFFFF
_END = -1


class RowQueues:
    """Any number (up to 65,535) of queues over one set of rows."""

    __slots__ = ("length", "newer", "newest", "older", "oldest", "queue_of")

    def __init__(self) -> None:
        self.older = array("i")
        self.newer = array("i")
        self.queue_of = array("H")
        self.oldest: list[int] = []
        self.newest: list[int] = []
        self.length: list[int] = []

    def new_queue(self) -> int:
        """Return the number of a new, empty queue."""
        assert len(self.oldest) < NOWHERE
        self.oldest.append(_END)
        self.newest.append(_END)
        self.length.append(0)
        return len(self.oldest) - 1

    def append(self, row: int, queue: int) -> None:
        """Put a row that is in no queue at the new end of `queue`."""
        if row >= len(self.queue_of):
            self._grow(row)
        assert self.queue_of[row] == NOWHERE
        last = self.newest[queue]
        self.older[row] = last
        self.newer[row] = _END
        if last == _END:
            self.oldest[queue] = row
        else:
            self.newer[last] = row
        self.newest[queue] = row
        self.queue_of[row] = queue
        self.length[queue] += 1

    def append_many(self, rows: Sequence[int], queue: int) -> None:
        """Put new rows at the end of an empty or filled queue, in this order."""
        last_row = max(rows)
        if last_row >= len(self.queue_of):
            self._grow(last_row)
        older, newer, queue_of = self.older, self.newer, self.queue_of
        before = self.newest[queue]
        if isinstance(rows, range) and rows.step == 1:
            # A warm start's million rows: whole columns at once.
            older[rows.start : rows.stop] = array("i", range(rows.start - 1, rows.stop - 1))
            newer[rows.start : rows.stop] = array("i", range(rows.start + 1, rows.stop + 1))
            queue_of[rows.start : rows.stop] = array("H", [queue]) * len(rows)
            older[rows.start] = before
            if before != _END:
                newer[before] = rows.start
            before = rows[-1]
            rows_left: Sequence[int] = ()
        else:
            rows_left = rows
        for row in rows_left:
            older[row] = before
            if before != _END:
                newer[before] = row
            queue_of[row] = queue
            before = row
        if self.oldest[queue] == _END:
            self.oldest[queue] = rows[0]
        newer[before] = _END
        self.newest[queue] = before
        self.length[queue] += len(rows)

    def remove(self, row: int) -> int:
        """Take a row out of its queue and return the queue's number."""
        queue = self.queue_of[row]
        assert queue != NOWHERE
        before, after = self.older[row], self.newer[row]
        if before == _END:
            self.oldest[queue] = after
        else:
            self.newer[before] = after
        if after == _END:
            self.newest[queue] = before
        else:
            self.older[after] = before
        self.queue_of[row] = NOWHERE
        self.length[queue] -= 1
        return queue

    def refresh(self, row: int) -> None:
        """Move a row to the new end of its queue."""
        queue = self.queue_of[row]
        last = self.newest[queue]
        if row == last:
            return
        older, newer = self.older, self.newer
        before, after = older[row], newer[row]
        if before == _END:
            self.oldest[queue] = after
        else:
            newer[before] = after
        older[after] = before
        older[row] = last
        newer[row] = _END
        newer[last] = row
        self.newest[queue] = row

    def move_before(self, rows: Sequence[int], anchor: int | None) -> int | None:
        """Move rows of one queue, in this order, to the old side of `anchor`; None: to the old end.

        Returns the row that they stand before now; None if nothing was moved, because `anchor` is one of them or in
        another queue, or there is no row but these.
        """
        queue = self.queue_of[rows[0]]
        if anchor is None:
            anchor = self.oldest[queue]
        if self.queue_of[anchor] != queue or anchor in rows:
            return None
        newer = self.newer
        if all(newer[row] == after for row, after in pairwise(rows)):
            self._splice(rows[0], rows[-1], anchor)
        else:
            for row in rows:
                self._splice(row, row, anchor)
        return anchor

    def ends_with(self, rows: Sequence[int]) -> bool:
        """Return whether these rows, in this order, are the newest of one queue: then moving them changes nothing."""
        if not rows:
            return True
        older, at = self.older, self.newest[self.queue_of[rows[-1]]]
        for row in reversed(rows):
            if row != at:
                return False
            at = older[row]
        return True

    def from_oldest(self, queue: int) -> Iterator[int]:
        """Yield the rows of a queue, oldest first."""
        row = self.oldest[queue]
        while row != _END:
            yield row
            row = self.newer[row]

    def __contains__(self, row: int) -> bool:
        return row < len(self.queue_of) and self.queue_of[row] != NOWHERE

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        for queue, length in enumerate(self.length):
            rows = list(self.from_oldest(queue))
            assert len(rows) == length == len(set(rows)), f"queue {queue} is broken"
            assert all(self.queue_of[row] == queue for row in rows)
            back: list[int] = []
            row = self.newest[queue]
            while row != _END:
                back.append(row)
                row = self.older[row]
            assert back == rows[::-1], f"queue {queue} reads differently from its two ends"
        assert sum(self.length) == sum(1 for queue in self.queue_of if queue != NOWHERE)

    def _splice(self, first: int, last: int, anchor: int) -> None:
        """Move the run from `first` to `last`, which does not hold `anchor`, to the old side of it."""
        older, newer, queue = self.older, self.newer, self.queue_of[anchor]
        before, after = older[first], newer[last]
        if after == anchor:
            return
        if before == _END:
            self.oldest[queue] = after
        else:
            newer[before] = after
        if after == _END:
            self.newest[queue] = before
        else:
            older[after] = before
        before = older[anchor]
        older[first], newer[last], older[anchor] = before, anchor, last
        if before == _END:
            self.oldest[queue] = first
        else:
            newer[before] = first

    def _grow(self, row: int) -> None:
        count = max(1024, len(self.queue_of) // 8, row + 1 - len(self.queue_of))
        self.older.extend([_END] * count)
        self.newer.extend([_END] * count)
        self.queue_of.extend([NOWHERE] * count)
