"""Which block lies in which object: this daemon's picture of a bucket, made from listings and from objects' tables.

Theory of operation. A listing tells which objects there are, and their names tell scope, epoch and end of life; the
table at an object's end, read once, tells its blocks. All of it is soft: another daemon may have deleted an object a
moment ago (a read of it finds nothing, and the object leaves the picture) or written one (the next listing shows it).

Invariants (checked by `check_integrity`)
1. A location names an object of the current epoch of its scope that is in `packs`, and an entry of its table.
2. Of several copies of a block the one that was added last is found.
3. `blocks` is the number of locations, and at most `blocks_max`: what would be beyond is the oldest, and is not found.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstored.remote.packing import BLOCKS_MAX, PackName, Table
from kvstored.remote.records import life_left_s

_SLOT_BITS = (BLOCKS_MAX - 1).bit_length()
INDEXED_MAX = 50_000_000  # blocks; some 200 bytes of memory each


@dataclass(eq=False, slots=True)
class Pack:
    """One object. `table` is None until it has been read."""

    number: int
    name: PackName
    size_bytes: int
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a block is: an entry of an object's table."""

    pack: Pack
    slot: int

    @property
    def table(self) -> Table:
        assert self.pack.table is not None
        return self.pack.table


class PackIndex:
    """See the module's docstring."""

    def __init__(self, blocks_max: int = INDEXED_MAX) -> None:
        self.packs: dict[str, Pack] = {}  # by name, the one added first is first
        self.blocks = 0
        self.size_bytes = 0  # of all objects
        self._blocks_max = blocks_max
        self._by_number: dict[int, Pack] = {}
        self._locations: dict[bytes, dict[bytes, int]] = {}  # scope -> hash -> number of the pack, and slot
        self._epochs: dict[bytes, int] = {}
        self._next_number = 0

    def epoch(self, scope: bytes) -> int:
        """Return the epoch of a scope; 0 if it was never dropped."""
        return self._epochs.get(scope, 0)

    def set_epoch(self, scope: bytes, epoch: int) -> None:
        """Take notice of a scope's epoch; what lies under an older one is not found any more."""
        if epoch > self.epoch(scope):
            self._epochs[scope] = epoch
            self.blocks -= len(self._locations.pop(scope, {}))

    def is_stale(self, pack: Pack) -> bool:
        """Whether an object is of an older epoch than its scope's."""
        return pack.name.epoch < self.epoch(pack.name.scope)

    @property
    def newest(self) -> int:
        """The number of the object that was added last."""
        return self._next_number - 1

    def add(self, name: PackName, size_bytes: int) -> Pack:
        """Return the entry of an object, which is new."""
        pack = Pack(self._next_number, name, size_bytes)
        self._next_number += 1
        self.size_bytes += size_bytes
        self.packs[name.text] = pack
        self._by_number[pack.number] = pack
        return pack

    def fill(self, pack: Pack, table: Table) -> None:
        """Take in what an object holds. An epoch that is not the scope's leaves its blocks unseen."""
        pack.table = table
        if pack.name.epoch != self.epoch(pack.name.scope):
            return
        locations = self._locations.setdefault(pack.name.scope, {})
        before = len(locations)
        first = pack.number << _SLOT_BITS
        locations.update(zip(table.hashes, range(first, first + len(table)), strict=True))
        self.blocks += len(locations) - before
        for oldest in list(self.packs.values()) if self.blocks > self._blocks_max else ():
            self._unfill(oldest)
            if self.blocks <= self._blocks_max:
                break

    def remove(self, pack: Pack) -> None:
        """Forget an object, and what it holds."""
        if self.packs.pop(pack.name.text, None) is not None:
            self._unfill(pack)
            self.size_bytes -= pack.size_bytes
            del self._by_number[pack.number]

    def forget(self, scope: bytes, block_hash: bytes) -> None:
        """Forget one block."""
        if self._locations.get(scope, {}).pop(block_hash, None) is not None:
            self.blocks -= 1

    def find(self, scope: bytes, block_hash: bytes, now_s: float) -> Location | None:
        """Return where a block is that lives at the wall time `now_s`."""
        location = self._locations.get(scope, {}).get(block_hash)
        if location is None:
            return None
        pack, slot = self._by_number[location >> _SLOT_BITS], location & (BLOCKS_MAX - 1)
        assert pack.table is not None
        if life_left_s(pack.name.written_s, pack.table.expiries_s[slot], now_s) <= 0:
            return None
        return Location(pack, slot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert self.blocks == sum(map(len, self._locations.values())) <= self._blocks_max
        assert self.size_bytes == sum(pack.size_bytes for pack in self.packs.values())
        assert set(self._by_number.values()) == set(self.packs.values())
        for scope, locations in self._locations.items():
            for block_hash, location in locations.items():
                pack = self._by_number[location >> _SLOT_BITS]
                assert pack.table is not None
                assert pack.table.hashes[location & (BLOCKS_MAX - 1)] == block_hash
                assert (pack.name.scope, pack.name.epoch) == (scope, self.epoch(scope))

    def _unfill(self, pack: Pack) -> None:
        locations = self._locations.get(pack.name.scope, {})
        if pack.table is None or self.is_stale(pack):
            return
        first = pack.number << _SLOT_BITS
        for slot, block_hash in enumerate(pack.table.hashes):
            if locations.get(block_hash) == first + slot:
                del locations[block_hash]
                self.blocks -= 1
