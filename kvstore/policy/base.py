"""What an eviction policy is.

A policy orders the rows (blocks, by their number in the catalog) of one tier. Rows stand in lanes: blocks of one slot
size and one tenant, since only a block of the same size makes room for another and a quota is met by its own tenant's
blocks.

Invariants
1. A policy names only rows that were admitted and not removed since.
2. It decides from what it is told alone: no clock, no I/O, no randomness of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Policy(Protocol):
    """Orders the rows of one tier. `now` is an unsigned 32-bit tick count of the caller's, never going back."""

    def admit(self, row: int, lane: int, now: int) -> None:
        """Take in a row, as just used."""
        ...

    def admit_many(self, rows: Sequence[int], lane: int, now: int) -> None:
        """Take in new rows, the coldest first."""
        ...

    def use(self, row: int, now: int) -> None:
        """Note that a row was used."""
        ...

    def use_many(self, rows: Sequence[int], now: int) -> None:
        """Note that rows were used, in this order."""
        ...

    def remove(self, row: int) -> None:
        """Forget a row."""
        ...

    def coldest(self, lane: int) -> Iterator[int]:
        """Yield the rows of a lane, the best victim first. The lane may not change while this is consumed."""
        ...

    def last_use(self, row: int) -> int:
        """Return the tick of a row's last use."""
        ...

    def __contains__(self, row: int) -> bool: ...
