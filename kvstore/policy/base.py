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
    """Orders the rows of one tier. `now` is an unsigned 32-bit tick count of the caller's, never going back.

    Rows come and go; what stays is the number of a block's namespace and its hash, by which a policy may know a block
    again that was evicted.
    """

    def admit(self, row: int, lane: int, now: int, namespace: int, block_hash: bytes, uses: int) -> None:
        """Take in a row, as just used; `uses` is how often the block was used before, in any tier."""
        ...

    def admit_many(self, rows: Sequence[int], lane: int, now: int, namespace: int, hashes: Sequence[bytes]) -> None:
        """Take in new rows that were never used, the coldest first; `hashes` is parallel."""
        ...

    def restore(self, rows: Sequence[int], lane: int, now: int, namespace: int, hashes: Sequence[bytes]) -> None:
        """Take in what a restart found, the coldest first; written for millions."""
        ...

    def use(self, row: int, now: int) -> None:
        """Note that a row was used."""
        ...

    def use_many(self, rows: Sequence[int], now: int) -> None:
        """Note that rows were used, in this order."""
        ...

    def put_behind(self, rows: Sequence[int], anchor: int | None) -> None:
        """Put rows of a lane, just used or admitted and given coldest first, next to `anchor` on its colder side.

        They count as last used when it was. `anchor` None: they go to the cold end.
        """
        ...

    def renew(self, row: int, now: int, uses: int) -> None:
        """Take a row for just used, without counting it: its copy in a faster tier, which had these uses, has gone."""
        ...

    def remove(self, row: int) -> None:
        """Forget a row."""
        ...

    def coldest(self, lane: int) -> Iterator[int]:
        """Yield the rows of a lane, the best victim first. The lane may not change while this is consumed."""
        ...

    def rank(self, row: int) -> float:
        """Return what orders the rows of several lanes: the one with the least goes first."""
        ...

    def last_use(self, row: int) -> int:
        """Return the tick of a row's last use."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless the policy's own books are right."""
        ...

    def __contains__(self, row: int) -> bool: ...
