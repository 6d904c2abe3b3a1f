"""The block table: one row a block, one array a field, about 60 bytes a row beside the hash itself.

Objects a block would cost three times as much and a garbage collection over millions of them stops the loop for
seconds; arrays hold no references that a collection follows. The catalog is the only writer of this table.

Invariants
1. A row is either free (its hash is None) or belongs to one block; `len(table)` counts the latter.
2. `residency[row]` has the bit of a tier set exactly when the copy there is READY.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.lifecycle import Copy, CopyEvent, next_copy

NO_SLOT = -1
NEVER_S = float("inf")
LEASE = 1 << 32  # `holds` counts leases in its upper half, all others in its lower


class Tier(enum.IntEnum):
    """The tiers, fastest first; a tier's bit in a residency is `1 << tier`."""

    GPU = 0
    CPU = 1
    SSD = 2
    REMOTE = 3

    @property
    def bit(self) -> int:
        return 1 << self

    @property
    def label(self) -> str:
        return self.name.lower()


class Columns(NamedTuple):
    """What a tier knows of the blocks it found at start, parallel, coldest first. Ends below zero slide."""

    checksums: array[int]
    generations: array[int]
    expires_s: array[float]
    slots: array[int]


class BlockTable:
    """The fields of every block. `slot[tier]` and `state[tier]` are columns too, for the tiers a node has."""

    def __init__(self, tiers: tuple[Tier, ...]) -> None:
        self.hash: list[bytes | None] = []
        self.namespace = array("I")
        self.checksum = array("Q")
        self.generation = array("Q")
        self.expires_s = array("d")
        self.slides = bytearray()  # 1: a use moves the end
        self.holds = array("Q")
        self.uses = bytearray()
        self.is_remote = bytearray()  # 1: the remote tier is known to have it, or had it once
        self.residency = bytearray()
        self.slot = {tier: array("q") for tier in tiers}
        self.state = {tier: bytearray() for tier in tiers}
        self._free = array("I")

    def __len__(self) -> int:
        return len(self.hash) - len(self._free)

    def add_ready(
        self,
        hashes: Sequence[bytes],
        namespace: int,
        tier: Tier,
        slots: Sequence[int],
        checksums: Iterable[int],
        generation: int,
        expires_s: float,
        *,
        slides: bool = False,
    ) -> list[int]:
        """Return new rows, in this order, of blocks READY in `tier`; their generations count up from `generation`."""
        count = len(hashes)
        while len(self._free) < count:
            self._grow()
        rows = self._free[len(self._free) - count :].tolist()[::-1]
        del self._free[len(self._free) - count :]
        ready, bit = next_copy(Copy.ABSENT, CopyEvent.ADOPT), tier.bit
        table_slot, table_state, residency = self.slot[tier], self.state[tier], self.residency
        hash_, ns, sums, generations = self.hash, self.namespace, self.checksum, self.generation
        for row, block_hash, slot, checksum in zip(rows, hashes, slots, checksums, strict=True):
            hash_[row] = block_hash
            ns[row] = namespace
            sums[row] = checksum
            generations[row] = generation
            generation += 1
            table_slot[row] = slot
            table_state[row] = ready
            residency[row] = bit
            self.expires_s[row] = expires_s
            self.slides[row] = slides
            self.uses[row] = 0
            self.is_remote[row] = 0
        return rows

    def remove(self, row: int) -> None:
        """Free a row whose block is absent everywhere and held by nobody."""
        assert self.hash[row] is not None and self.holds[row] == 0 and self.residency[row] == 0
        assert all(state[row] == Copy.ABSENT for state in self.state.values())
        self.hash[row] = None
        self._free.append(row)

    def add_many(self, hashes: list[bytes], namespaces: array[int], tier: Tier, columns: Columns) -> range:
        """Return the rows, adjacent and in this order, of blocks that are READY in `tier` from the start."""
        start, count = len(self.hash), len(hashes)
        self.hash += hashes
        self.namespace += namespaces
        self.checksum += columns.checksums
        self.generation += columns.generations
        if min(columns.expires_s, default=0.0) < 0:
            self.slides += bytes(end_s < 0 for end_s in columns.expires_s)
            self.expires_s.extend(map(abs, columns.expires_s))
        else:
            self.slides += bytes(count)
            self.expires_s += columns.expires_s
        self.holds.frombytes(bytes(count * self.holds.itemsize))
        self.uses += bytes(count)
        self.is_remote += bytes(count)
        self.residency += bytes([tier.bit]) * count
        for each, slots in self.slot.items():
            slots += columns.slots if each is tier else array("q", [NO_SLOT]) * count
        for each, states in self.state.items():
            states += bytes([Copy.READY if each is tier else Copy.ABSENT]) * count
        return range(start, start + count)

    def by_namespace(self, rows: range) -> Mapping[int, Sequence[int]]:
        """Return the rows of each namespace, in order."""
        namespaces = self.namespace[rows.start : rows.stop]
        if namespaces.count(namespaces[0]) == len(rows):
            return {namespaces[0]: rows}
        found: dict[int, list[int]] = {}
        for row, number in zip(rows, namespaces, strict=True):
            found.setdefault(number, []).append(row)
        return found

    def noted_end_s(self, row: int) -> float:
        """Return a block's end as the ssd tier notes it: below zero if it slides."""
        return -self.expires_s[row] if self.slides[row] else self.expires_s[row]

    def lease(self, rows: Iterable[int]) -> int:
        """Count one lease more on each row; return how many had none before."""
        holds, fresh = self.holds, 0
        for row in rows:
            before = holds[row]
            if before < LEASE:
                fresh += 1
            holds[row] = before + LEASE
        return fresh

    def move(self, row: int, tier: Tier, event: CopyEvent) -> Copy:
        """Apply `event` to the copy in `tier` and return its new state."""
        states = self.state[tier]
        state = next_copy(states[row], event)
        states[row] = state
        if state is Copy.READY:
            self.residency[row] |= 1 << tier
        else:
            self.residency[row] &= ~(1 << tier)
        if state is Copy.ABSENT:
            self.slot[tier][row] = NO_SLOT
        return state

    def absent_everywhere(self, row: int) -> bool:
        return all(state[row] == Copy.ABSENT for state in self.state.values())

    def rows(self) -> list[int]:
        """Return every row that belongs to a block."""
        return [row for row, block_hash in enumerate(self.hash) if block_hash is not None]

    def _grow(self) -> None:
        start = len(self.hash)
        count = max(1024, start // 8)
        self.hash.extend([None] * count)
        for column in (self.namespace, self.checksum, self.generation, self.holds):
            column.frombytes(bytes(count * column.itemsize))
        self.expires_s.extend([NEVER_S] * count)
        self.slides.extend(bytes(count))
        self.uses.extend(bytes(count))
        self.is_remote.extend(bytes(count))
        self.residency.extend(bytes(count))
        for slots in self.slot.values():
            slots.extend([NO_SLOT] * count)
        for states in self.state.values():
            states.extend(bytes(count))
        self._free.extend(range(start + count - 1, start - 1, -1))
