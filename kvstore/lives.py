"""How long blocks live: their ends, which of them move at a use, and what of that has to be written down.

Theory of operation. A life that a writer gives, by `Seal` or `Open`, or an operator to single blocks, has a fixed end.
One that a block has from its namespace *slides* where the daemon is told so: each use gives the block its namespace's
life anew, so the end moves and is never brought forward. On ssd a moved end is written at the next checkpoint, and only
when it has moved by a 16th of the life, so that a block in use costs the index a bounded number of writes; after a
crash a life is that much shorter at most, and never longer.

Invariants
1. A block whose life is over gets no new one: a use comes too late for it.
2. Each row with an end has at least one entry in the queue at that end or before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.expiry import ExpiryQueue
from kvstore.table import NEVER_S, BlockTable, Tier
from kvstore.tenancy import Tenancy

_STEPS = 16  # a moved end is written down that often in a life, at most


class Lives:
    """The ends of all rows, in `table.expires_s`, on CLOCK_BOOTTIME; `sliding`: a use moves those of namespaces."""

    def __init__(
        self, table: BlockTable, tenancies: Sequence[Tenancy], now_s: Callable[[], float], *, sliding: bool
    ) -> None:
        self.sliding = sliding
        self.moved: dict[int, int] = {}  # rows on ssd whose end is to be written down, with their generations
        self._table = table
        self._tenancies = tenancies
        self._now_s = now_s
        self._queue = ExpiryQueue(now_s())

    def begin(self, rows: Iterable[int]) -> None:
        """Watch over new rows that may have an end."""
        expires_s, namespaces = self._table.expires_s, self._table.namespace
        for row in rows:
            if expires_s[row] != NEVER_S:
                self._tenancies[namespaces[row]].any_expire = True
                self._queue.add(row, expires_s[row])

    def set(self, row: int, ttl_s: float) -> None:
        """Let a block live `ttl_s` from now, whatever uses it; 0: until it is evicted."""
        self._table.slides[row] = 0
        self._table.expires_s[row] = self._now_s() + ttl_s if ttl_s > 0 else NEVER_S
        self.begin((row,))

    def renew(self, rows: Iterable[int]) -> None:
        """Note a use of blocks."""
        if not self.sliding:
            return
        now_s, table = self._now_s(), self._table
        for row in rows:
            end_s = table.expires_s[row]
            if not table.slides[row] or not now_s < end_s < NEVER_S:
                continue
            ttl_s = self._tenancies[table.namespace[row]].ttl_s
            new_s = now_s + ttl_s if ttl_s > 0 else NEVER_S
            if new_s > end_s:
                table.expires_s[row] = new_s  # its entry in the queue leads to the new one in time
                step_s = ttl_s / _STEPS
                has_moved = new_s == NEVER_S or new_s // step_s != end_s // step_s
                if has_moved and table.residency[row] & Tier.SSD.bit:
                    self.moved[row] = table.generation[row]

    def due(self, limit: int) -> list[int]:
        """Return up to `limit` rows whose time to be looked at has come and whose life is over."""
        now_s, table, over = self._now_s(), self._table, list[int]()
        for row in self._queue.due(now_s, limit):
            end_s = table.expires_s[row]
            if end_s <= now_s:
                over.append(row)
            elif table.slides[row] and end_s != NEVER_S:
                self._queue.add(row, end_s)
        return over

    def look_again(self, row: int, at_s: float) -> None:
        """Have a row that is over, but stays for now, found again then."""
        self._queue.add(row, at_s)
