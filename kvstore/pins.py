"""Operators' pins: which blocks stay whatever the pressure, until when, and what they keep of each tier.

Invariants (checked by `check_integrity`)
1. `size_bytes[tier]` is what the pinned blocks with a READY copy there take, and `blocks_of[namespace]` how many of its
   blocks are pinned; both are kept up to date, so that nobody has to go through all pins.
2. A pin goes with its block at the latest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.table import BlockTable, Tier
from kvstore.tenancy import Tenancy


class Pins:
    """All of them. `ends_s` has the end of each pinned row's pin, on CLOCK_BOOTTIME; only this class changes it."""

    def __init__(self, table: BlockTable, tenancies: Sequence[Tenancy], tiers: Sequence[Tier]) -> None:
        self.ends_s: dict[int, float] = {}
        self.size_bytes = dict.fromkeys(tiers, 0)
        self.blocks_of: dict[int, int] = {}  # by the number of a namespace
        self._table = table
        self._tenancies = tenancies
        self._queue: list[tuple[float, int]] = []  # ends and rows, also of pins that were changed since

    def pin(self, row: int, ends_s: float) -> None:
        """Keep a block until then; a pin that it has already gets this end."""
        if row not in self.ends_s:
            number = self._table.namespace[row]
            self.blocks_of[number] = self.blocks_of.get(number, 0) + 1
            self._add(row, 1)
        self.ends_s[row] = ends_s
        heapq.heappush(self._queue, (ends_s, row))

    def unpin(self, row: int) -> None:
        """Let go of a block; harmless if it is not pinned."""
        if self.ends_s.pop(row, None) is not None:
            number = self._table.namespace[row]
            self.blocks_of[number] -= 1
            if not self.blocks_of[number]:
                del self.blocks_of[number]
            self._add(row, -1)

    def end(self, now_s: float) -> None:
        """Let go of the blocks whose pins are over."""
        while self._queue and self._queue[0][0] <= now_s:
            ends_s, row = heapq.heappop(self._queue)
            if self.ends_s.get(row) == ends_s:
                self.unpin(row)

    def note(self, row: int, tier: Tier, copies: int) -> None:
        """Note that a block has a ready copy more in a tier, or (-1) one less."""
        if row in self.ends_s:
            self.size_bytes[tier] += copies * self._slot_bytes(row, tier)

    def would_take(self, rows: set[int], tier: Tier) -> int:
        """Return what pins would keep of a tier if these rows were pinned, too."""
        bit, residency = tier.bit, self._table.residency
        fresh = sum(self._slot_bytes(row, tier) for row in rows - self.ends_s.keys() if residency[row] & bit)
        return self.size_bytes[tier] + fresh

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sums are right."""
        table = self._table
        for tier, size_bytes in self.size_bytes.items():
            there = [row for row in self.ends_s if table.residency[row] & tier.bit]
            assert size_bytes == sum(self._slot_bytes(row, tier) for row in there), f"pinned bytes of {tier.label}"
        blocks_of: dict[int, int] = {}
        for row in self.ends_s:
            assert table.hash[row] is not None, f"row {row} is pinned and free"
            blocks_of[table.namespace[row]] = blocks_of.get(table.namespace[row], 0) + 1
        assert blocks_of == self.blocks_of

    def _add(self, row: int, copies: int) -> None:
        for tier in self.size_bytes:
            if self._table.residency[row] & tier.bit:
                self.size_bytes[tier] += copies * self._slot_bytes(row, tier)

    def _slot_bytes(self, row: int, tier: Tier) -> int:
        return self._tenancies[self._table.namespace[row]].slots[tier]
