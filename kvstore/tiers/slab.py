"""Where a slot is free: a slab allocator over equal chunks, shared by the memory and the ssd tier.

Theory of operation. Capacity is a row of equal chunks. A region is a run of adjacent chunks given to one size class
(all its slots have the same size), long enough that less than an eighth of it is wasted. A class takes a new region
when its slots are all used; an empty region goes back when another class needs its chunks. The allocator knows
offsets and sizes only: not what lies in a slot, nor which block should go; whoever wants a full region moved empties
it first.

Invariants
1. Slots never overlap: each chunk belongs to at most one region, and slots stay inside their region.
2. `used_bytes` is the sum of the sizes of the used slots, and never exceeds `capacity_bytes`.
3. A used slot's offset is returned by no other `allocate` until it was freed; freeing a free slot is our own bug.
4. A slot's offset and size are multiples of `ALIGNMENT_BYTES`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import compress

ALIGNMENT_BYTES = 4096
NOBODY = -1
_WASTE_SHARE_MAX = 8  # a region may waste one part in eight


class Region:
    """A run of chunks cut into slots of one size. Its first chunk's number names it."""

    __slots__ = ("chunks", "first_chunk", "free_slots", "owner", "slot_bytes", "slots", "start", "used")

    def __init__(self, first_chunk: int, chunks: int, chunk_bytes: int, slot_bytes: int) -> None:
        self.first_chunk = first_chunk
        self.chunks = chunks
        self.start = first_chunk * chunk_bytes
        self.slot_bytes = slot_bytes
        self.slots = chunks * chunk_bytes // slot_bytes
        self.free_slots = array("I", range(self.slots - 1, -1, -1))  # a stack: the lowest slot is handed out first
        self.used = bytearray(self.slots)
        self.owner = array("i", [NOBODY]) * self.slots  # what the slab's user noted for each used slot

    @property
    def used_slots(self) -> int:
        return self.slots - len(self.free_slots)

    def slot_of(self, offset: int) -> int:
        slot, rest = divmod(offset - self.start, self.slot_bytes)
        assert rest == 0 and 0 <= slot < self.slots, f"offset {offset} is not a slot of region {self.first_chunk}"
        return slot

    def used_offsets(self) -> Iterator[int]:
        """Yield the offsets of the used slots, ascending."""
        slot = self.used.find(1)
        while slot >= 0:
            yield self.start + slot * self.slot_bytes
            slot = self.used.find(1, slot + 1)


class Slab:
    """Hands out slots.

    Parameters
    ----------
    chunk_bytes : int
        Size of a chunk, a multiple of ALIGNMENT_BYTES.
    chunks : int
        How many there are now; `add_chunks` adds more behind them.
    chunks_max : int, optional
        How many there will be at most, which bounds a slot's size; `chunks` if not given.
    on_create, on_release : callable, optional
        Told of each region that is taken or given back (the ssd tier makes and removes segment files).
    """

    def __init__(
        self,
        chunk_bytes: int,
        chunks: int,
        chunks_max: int | None = None,
        *,
        on_create: Callable[[Region], None] | None = None,
        on_release: Callable[[Region], None] | None = None,
    ) -> None:
        assert chunk_bytes % ALIGNMENT_BYTES == 0 and chunk_bytes > 0
        self.chunk_bytes = chunk_bytes
        self.chunks_max = chunks if chunks_max is None else chunks_max
        self.used_bytes = 0
        self._owner: list[Region | None] = [None] * chunks
        self._free_chunks = chunks
        self._open: dict[int, dict[int, Region]] = {}  # slot size -> regions with a free slot, by first chunk
        self._count: dict[int, int] = {}  # slot size -> number of regions
        self._empty: dict[int, Region] = {}  # regions without a used slot, by first chunk
        self._on_create = on_create
        self._on_release = on_release

    @property
    def chunks(self) -> int:
        return len(self._owner)

    @property
    def capacity_bytes(self) -> int:
        return len(self._owner) * self.chunk_bytes

    @staticmethod
    def slot_bytes_for(length: int) -> int:
        """Return the slot size that a payload of `length` bytes takes."""
        return max(1, -(-length // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES

    def span_for(self, slot_bytes: int) -> int:
        """Return how many adjacent chunks a region of this class takes; 0 if such a slot can never fit."""
        least = -(-slot_bytes // self.chunk_bytes)
        if least > self.chunks_max:
            return 0
        for span in range(least, min(2 * least + 8, self.chunks_max // 4) + 1):
            total = span * self.chunk_bytes
            if (total % slot_bytes) * _WASTE_SHARE_MAX <= total:
                return span
        return least

    def add_chunks(self, count: int) -> None:
        """Make `count` more chunks available behind the present ones."""
        assert self.chunks + count <= self.chunks_max
        self._owner.extend([None] * count)
        self._free_chunks += count

    def allocate(self, slot_bytes: int) -> int | None:
        """Return the offset of a slot that is now used, or None if the class has none and no chunks are free."""
        return next(iter(self.allocate_many(slot_bytes, 1)), None)

    def allocate_many(self, slot_bytes: int, count: int) -> list[int]:
        """Return the offsets of up to `count` slots that are now used: fewer where there are no more."""
        offsets: list[int] = []
        while len(offsets) < count:
            open_regions = self._open.get(slot_bytes)
            region = next(iter(open_regions.values())) if open_regions else self._create(slot_bytes)
            if region is None:
                break
            taken = region.free_slots[max(0, len(region.free_slots) - (count - len(offsets))) :]
            del region.free_slots[len(region.free_slots) - len(taken) :]
            if not region.free_slots:
                del self._open[slot_bytes][region.first_chunk]
            self._empty.pop(region.first_chunk, None)
            start, used = region.start, region.used
            for slot in reversed(taken):
                used[slot] = 1
                offsets.append(start + slot * slot_bytes)
        self.used_bytes += len(offsets) * slot_bytes
        return offsets

    def free(self, offset: int) -> None:
        """Make a used slot free."""
        region = self.region_of(offset)
        slot = region.slot_of(offset)
        assert region.used[slot], f"slot at {offset} freed twice"
        region.used[slot] = 0
        region.owner[slot] = NOBODY
        region.free_slots.append(slot)
        self._open.setdefault(region.slot_bytes, {})[region.first_chunk] = region
        if len(region.free_slots) == region.slots:
            self._empty[region.first_chunk] = region
        self.used_bytes -= region.slot_bytes

    def set_owner(self, offset: int, owner: int) -> None:
        """Note who uses a slot (a row's number); forgotten when the slot is freed."""
        region = self.region_of(offset)
        region.owner[region.slot_of(offset)] = owner

    def owner_at(self, offset: int) -> int:
        """Return who was noted as the user of the slot that begins at `offset`; NOBODY if there is no such slot."""
        chunk = offset // self.chunk_bytes
        region = self._owner[chunk] if chunk < len(self._owner) else None
        if region is None:
            return NOBODY
        slot, rest = divmod(offset - region.start, region.slot_bytes)
        return NOBODY if rest or slot >= region.slots else region.owner[slot]

    def restore(self, first_chunk: int, slot_bytes: int, span: int) -> Region:
        """Return a region re-made at the place it had before; its slots are free until `mark_used`."""
        owners = self._owner[first_chunk : first_chunk + span]
        assert len(owners) == span and not any(owners), f"chunks {first_chunk}+{span} are not free"
        return self._install(first_chunk, slot_bytes, span)

    def mark_used(self, region: Region, slots: array[int]) -> None:
        """Mark free slots of a restored region as used, by number."""
        for slot in slots:
            assert not region.used[slot], f"slot {slot} of region {region.first_chunk} is named twice"
            region.used[slot] = 1
        region.free_slots = array("I", (s for s in range(region.slots - 1, -1, -1) if not region.used[s]))
        if not region.free_slots:
            self._open[region.slot_bytes].pop(region.first_chunk, None)
        if region.used_slots:
            self._empty.pop(region.first_chunk, None)
        self.used_bytes += len(slots) * region.slot_bytes

    def region_of(self, offset: int) -> Region:
        """Return the region that holds `offset`."""
        region = self._owner[offset // self.chunk_bytes]
        assert region is not None, f"offset {offset} belongs to no region"
        return region

    def clearing(self, offset: int, slot_bytes: int) -> tuple[int, ...]:
        """Return the regions to empty so that one of this class fits where `offset` lies: those with the least in use.

        None are returned where a region of that class itself lies in every place.
        """
        region = self.region_of(offset)
        span = self.span_for(slot_bytes)
        best: tuple[int, ...] = ()
        least: int | None = None
        last = min(region.first_chunk + region.chunks, self.chunks - span + 1)
        for first in range(max(0, region.first_chunk - span + 1), last) if span else ():
            found = {owner.first_chunk: owner for owner in self._owner[first : first + span] if owner is not None}
            cost = sum(owner.used_slots * owner.slot_bytes for owner in found.values())
            if all(owner.slot_bytes != slot_bytes for owner in found.values()) and (least is None or cost < least):
                best, least = tuple(found), cost
        return best

    def owners(self, first_chunk: int) -> Iterator[int]:
        """Yield what `set_owner` noted for each used slot of a region; NOBODY where nothing was."""
        region = self._owner[first_chunk]
        assert region is not None
        return compress(region.owner, region.used)

    def region_at(self, offset: int) -> int:
        """Return the first chunk of the region that holds `offset`; NOBODY if there is none."""
        region = self._owner[offset // self.chunk_bytes]
        return NOBODY if region is None else region.first_chunk

    def regions_possible(self, slot_bytes: int) -> int:
        """Return how many more regions of this class fit, the empty ones of other classes given back."""
        span = self.span_for(slot_bytes)
        possible = length = 0
        for owner in self._owner if span else ():
            usable = owner is None or (owner.used_slots == 0 and owner.slot_bytes != slot_bytes)
            length = length + 1 if usable else 0
            if length == span:
                possible, length = possible + 1, 0
        return possible

    def release(self, region: Region) -> None:
        """Give an empty region's chunks back."""
        assert region.used_slots == 0, f"region {region.first_chunk} still has used slots"
        for chunk in range(region.first_chunk, region.first_chunk + region.chunks):
            self._owner[chunk] = None
        self._free_chunks += region.chunks
        self._open[region.slot_bytes].pop(region.first_chunk, None)
        del self._empty[region.first_chunk]
        self._count[region.slot_bytes] -= 1
        if self._on_release is not None:
            self._on_release(region)

    def regions(self) -> Iterator[Region]:
        """Yield every region, ascending."""
        chunk = 0
        while chunk < len(self._owner):
            region = self._owner[chunk]
            if region is None:
                chunk += 1
            else:
                yield region
                chunk += region.chunks

    def region_count(self, slot_bytes: int) -> int:
        return self._count.get(slot_bytes, 0)

    def free_slots(self, slot_bytes: int) -> int:
        """Return how many slots of this class `allocate` could hand out, empty regions of others not counted."""
        inside = sum(len(region.free_slots) for region in self._open.get(slot_bytes, {}).values())
        span = self.span_for(slot_bytes)
        if not span:
            return 0
        return inside + self._free_chunks // span * (span * self.chunk_bytes // slot_bytes)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        used_bytes = 0
        owned = 0
        for region in self.regions():
            span = self._owner[region.first_chunk : region.first_chunk + region.chunks]
            assert all(owner is region for owner in span), f"region {region.first_chunk} does not own its chunks"
            assert region.used.count(1) == region.used_slots, f"region {region.first_chunk} counts its slots wrong"
            assert len(set(region.free_slots)) == len(region.free_slots)
            is_open = region.first_chunk in self._open.get(region.slot_bytes, {})
            assert is_open == bool(region.free_slots), f"region {region.first_chunk} is listed wrong"
            is_empty = region.first_chunk in self._empty
            assert is_empty == (not region.used_slots), f"region {region.first_chunk} is taken for empty, or for used"
            used_bytes += region.used_slots * region.slot_bytes
            owned += region.chunks
        assert used_bytes == self.used_bytes <= self.capacity_bytes
        assert owned + self._free_chunks == self.chunks

    def _create(self, slot_bytes: int) -> Region | None:
        span = self.span_for(slot_bytes)
        if not span:
            return None
        first = self._free_run(span)
        if first is None:
            others = [region for region in self._empty.values() if region.slot_bytes != slot_bytes]
            for region in others:
                self.release(region)
            first = self._free_run(span) if others else None
        return None if first is None else self._install(first, slot_bytes, span)

    def _free_run(self, span: int) -> int | None:
        if self._free_chunks < span:
            return None
        length = 0
        for chunk, owner in enumerate(self._owner):
            length = 0 if owner is not None else length + 1
            if length == span:
                return chunk - span + 1
        return None

    def _install(self, first_chunk: int, slot_bytes: int, span: int) -> Region:
        region = Region(first_chunk, span, self.chunk_bytes, slot_bytes)
        for chunk in range(first_chunk, first_chunk + span):
            self._owner[chunk] = region
        self._free_chunks -= span
        self._open.setdefault(slot_bytes, {})[first_chunk] = region
        self._empty[first_chunk] = region
        self._count[slot_bytes] = self._count.get(slot_bytes, 0) + 1
        if self._on_create is not None:
            self._on_create(region)
        return region
