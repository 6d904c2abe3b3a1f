"""Which rows may be due: rows by the second in which their life ends, four bytes each.

An entry is a hint, not the truth: a row may have been renewed or given to another block since, so whoever takes a due
row looks at its expiry. Each change of an expiry adds an entry of its own, so none need be put back. Times are seconds
of CLOCK_BOOTTIME.
"""

from __future__ import annotations

from array import array


class ExpiryQueue:
    """Rows in order of their end."""

    def __init__(self, now_s: float) -> None:
        self._until = int(now_s)  # every second before this one is empty
        self._ends: dict[int, array[int]] = {}

    def add(self, row: int, expires_s: float) -> None:
        """Remember that a row's life ends then; a time that is over counts as now."""
        second = max(int(expires_s), self._until)
        self._ends.setdefault(second, array("I")).append(row)

    def due(self, now_s: float, limit: int) -> list[int]:
        """Return up to `limit` rows whose second is over, and forget them."""
        found: list[int] = []
        while len(found) < limit and self._until < int(now_s):
            rows = self._ends.get(self._until)
            if rows:
                wanted = limit - len(found)
                found.extend(rows[-wanted:])
                del rows[-wanted:]
            else:
                self._ends.pop(self._until, None)
                self._until += 1
        return found
