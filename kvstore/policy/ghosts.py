"""How often blocks that are gone had been used: two generations of a compact table, 16 to 32 bytes a row.

Blocks must be forgotten in the order in which they left. A prefix is worth as much as its first missing block, so a
memory that forgets here and there takes the blocks of one prefix for different ones, and the policy does worse than
without it (docs/eviction.md).

Invariants
1. What was noted is remembered until twice as many others were noted as the tier has rows, and forgotten after eight
   times as many.
2. A key that was never noted is taken for another with a chance of about one in 2,000.
"""

from __future__ import annotations

from array import array

COUNT_MAX = 7
_COUNT_BITS = 3
_FINGERPRINT_SHIFT = 32 - 13  # an entry: 13 bits of a fingerprint, 3 of a count
_NOTES_MIN = 16384  # in a generation
_NOTES_PER_ROW = 2


class Ghosts:
    """Maps 32-bit identities to counts of 1 to COUNT_MAX, and forgets the oldest."""

    __slots__ = ("_left", "_old", "_young")

    def __init__(self) -> None:
        self._left = _NOTES_MIN
        self._young = array("H", bytes(4 * _NOTES_MIN))
        self._old = array("H", bytes(2))

    @property
    def size_bytes(self) -> int:
        return 2 * (len(self._young) + len(self._old))

    def note(self, identity: int, count: int, rows: int) -> None:
        """Remember a count (from 1 on) for a key; `rows` is how many blocks the tier has now."""
        young = self._young
        mask = len(young) - 1
        fingerprint = identity >> _FINGERPRINT_SHIFT
        at = identity & mask
        while (entry := young[at]) and entry >> _COUNT_BITS != fingerprint:
            at = (at + 1) & mask
        young[at] = fingerprint << _COUNT_BITS | min(count, COUNT_MAX)
        if not entry:
            self._left -= 1
            if not self._left:
                self._turn(rows)

    def recall(self, identity: int) -> int:
        """Return the count noted last for a key, 0 if it is not remembered."""
        fingerprint = identity >> _FINGERPRINT_SHIFT
        for table in (self._young, self._old):
            mask = len(table) - 1
            at = identity & mask
            while entry := table[at]:
                if entry >> _COUNT_BITS == fingerprint:
                    return entry & COUNT_MAX
                at = (at + 1) & mask
        return 0

    def _turn(self, rows: int) -> None:
        """Begin a generation; the one before the last is forgotten."""
        notes = max(_NOTES_MIN, 1 << (rows * _NOTES_PER_ROW - 1).bit_length())
        self._old = self._young
        self._young = array("H", bytes(4 * notes))  # half full at most: probes stay short
        self._left = notes
