"""Least recently used: the victim is the block whose last use is longest ago."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvstore.policy.queues import RowQueues


class LeastRecentlyUsed:
    """One queue a lane; a use moves a row to the new end."""

    def __init__(self) -> None:
        self._queues = RowQueues()
        self._queue_of_lane: dict[int, int] = {}
        self._last_use = array("I")

    def admit(self, row: int, lane: int, now: int, namespace: int, block_hash: bytes, uses: int) -> None:
        queue = self._queue(lane)
        if row >= len(self._last_use):
            self._last_use.extend([0] * max(1024, len(self._last_use) // 8, row + 1 - len(self._last_use)))
        self._last_use[row] = now
        self._queues.append(row, queue)

    def admit_many(self, rows: Sequence[int], lane: int, now: int, namespace: int, hashes: Sequence[bytes]) -> None:
        if not rows:
            return
        last_use = self._last_use
        if (last := max(rows)) >= len(last_use):
            last_use.extend([0] * max(1024, len(last_use) // 8, last + 1 - len(last_use)))
        for row in rows:
            last_use[row] = now
        self._queues.append_many(rows, self._queue(lane))

    def restore(self, rows: Sequence[int], lane: int, now: int, namespace: int, hashes: Sequence[bytes]) -> None:
        self.admit_many(rows, lane, now, namespace, hashes)

    def use(self, row: int, now: int) -> None:
        self._last_use[row] = now
        self._queues.refresh(row)

    def use_many(self, rows: Sequence[int], now: int) -> None:
        last_use = self._last_use
        for row in rows:
            last_use[row] = now
        if not self._queues.ends_with(rows):
            for row in rows:
                self.use(row, now)

    def put_behind(self, rows: Sequence[int], anchor: int | None) -> None:
        if (used := self._queues.move_before(rows, anchor)) is not None:
            last_use, used_at = self._last_use, self._last_use[used]
            for row in rows:
                last_use[row] = used_at

    def renew(self, row: int, now: int, uses: int) -> None:
        self.use(row, now)

    def remove(self, row: int) -> None:
        self._queues.remove(row)

    def coldest(self, lane: int) -> Iterator[int]:
        queue = self._queue_of_lane.get(lane)
        return iter(()) if queue is None else self._queues.from_oldest(queue)

    def rank(self, row: int) -> float:
        return self._last_use[row]

    def last_use(self, row: int) -> int:
        return self._last_use[row]

    def __contains__(self, row: int) -> bool:
        return row in self._queues

    def _queue(self, lane: int) -> int:
        queue = self._queue_of_lane.get(lane)
        if queue is None:
            queue = self._queue_of_lane[lane] = self._queues.new_queue()
        return queue

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queues are whole."""
        self._queues.check_integrity()
