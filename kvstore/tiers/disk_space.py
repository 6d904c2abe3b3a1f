"""What fits: the slots of the ssd tier, and what segment files, index and temporary files cost together.

Theory of operation. The slab hands out addresses in a space somewhat larger than the capacity, since a file
is only as long as its slots: what a region wastes at its end costs addresses, not disk. What bounds the tier
is the budget: a new segment is allowed when its file, the index that its slots may need and the recency file
still fit. Segments are made and removed by others, after the fact: a new one is `unmade` until its file
exists, a released one `doomed` until its file is gone, and no file is made before every doomed one is
removed.

Invariants
1. Files that exist, the index's map and the reserves never exceed `capacity_bytes` together.
2. Files of all regions, the index as planned for all their slots and the reserves fit in `capacity_bytes`,
   too.
3. Every region is either made or `unmade`; a doomed segment's number may already name a new, unmade region.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvstore.tiers import disk_recency
from kvstore.tiers.index import SegmentShape
from kvstore.tiers.slab import Region, Slab

CAPACITY_BYTES_MIN = 8 << 20
OVERHEAD_BYTES = 256 << 10  # directories, lock files, the trial file
INDEX_BYTES_BASE = 1 << 20
# Measured under random deletes and puts in groups of 256 and 1024, copies on write included.
INDEX_BYTES_PER_SLOT = 384
INDEX_BYTES_PER_SEGMENT = 1 << 10  # its records lie in a page beside those of others
INDEX_BYTES_PER_LARGE_SEGMENT = 16 << 10  # they have pages of their own
_LARGE_SEGMENT_SLOTS = 20
MAP_GROWTH_BYTES_MIN = 64 << 10
_FILE_OVERHEAD_BYTES = 8192  # a name, and extents that don't fit the inode
_CHUNK_SHARE = 128
_CHUNK_BYTES_MIN, _CHUNK_BYTES_MAX = 256 << 10, 256 << 20


def chunk_bytes_for(capacity_bytes: int) -> int:
    """Return the chunk size of a new directory: a power of two, about a 128th of the capacity."""
    share = max(1, capacity_bytes // _CHUNK_SHARE)
    return min(max(1 << (share.bit_length() - 1), _CHUNK_BYTES_MIN), _CHUNK_BYTES_MAX)


def file_bytes(region: Region) -> int:
    """Return the size of a segment's file."""
    return region.slots * region.slot_bytes


def index_bytes_for(slots: int) -> int:
    """Return how much of the index a segment with so many slots may need."""
    own = INDEX_BYTES_PER_SEGMENT if slots <= _LARGE_SEGMENT_SLOTS else INDEX_BYTES_PER_LARGE_SEGMENT
    return own + slots * INDEX_BYTES_PER_SLOT


def reserve_bytes(slots: int) -> int:
    """Return what is set aside for everything that is neither segment nor index."""
    return OVERHEAD_BYTES + slots * disk_recency.BYTES_PER_BLOCK


def total_bytes(shapes: Iterable[tuple[int, int]], map_bytes: int) -> int:
    """Return what a directory may come to take with these segments, each given as (slots, slot size)."""
    slots = size = 0
    index_bytes = INDEX_BYTES_BASE
    for count, slot_bytes in shapes:
        slots += count
        size += count * slot_bytes + _FILE_OVERHEAD_BYTES
        index_bytes += index_bytes_for(count)
    return size + max(map_bytes, index_bytes) + reserve_bytes(slots)


class Space:
    """Slots and budget. Used on the event loop only; does no I/O.

    Parameters
    ----------
    capacity_bytes : int
        What all files together may take.
    chunk_bytes : int
        As the directory was made with.
    map_bytes : int
        Size of the index's map now.
    chunks_min : int
        End of the last segment that exists already.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: int, *, map_bytes: int, chunks_min: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.map_bytes = map_bytes
        self.unmade: set[int] = set()
        self.lost: set[int] = set()  # of the unmade, those whose file existed once and may in part still do
        self.doomed: dict[int, int] = {}  # segment -> size of the file that still exists
        self._made_bytes = 0
        self._planned_bytes = 0
        self._index_bytes = INDEX_BYTES_BASE
        self._slots = 0
        self._free: dict[int, int] = {}  # slot size -> free slots in existing regions
        chunks = max(capacity_bytes * 5 // 4 // chunk_bytes + 8, chunks_min)
        self.slab = Slab(chunk_bytes, chunks, on_create=self._created, on_release=self._released)

    # ---- slots

    def restore(self, segment: int, shape: SegmentShape, slots: array[int]) -> None:
        """Put a segment whose file exists back where it was, with these slots used."""
        region = self.slab.restore(segment, shape.slot_bytes, shape.span)
        self.note_made(segment)
        self.slab.mark_used(region, slots)
        self._free[shape.slot_bytes] -= len(slots)

    def allocate(self, slot_bytes: int, *, may_create: bool = True) -> int | None:
        """Return the address of a slot that is now used, or None."""
        if not self._free.get(slot_bytes) and not (may_create and self._make_room(slot_bytes)):
            return None
        address = self.slab.allocate(slot_bytes)
        if address is not None:
            self._free[slot_bytes] -= 1
        return address

    def free(self, address: int) -> None:
        """Make a slot free; a segment that never came to be goes with its last slot."""
        region = self.slab.region_of(address)
        self.slab.free(address)
        self._free[region.slot_bytes] += 1
        if region.first_chunk in self.unmade and not region.used_slots:
            self.slab.release(region)

    def region_of(self, address: int) -> Region:
        return self.slab.region_of(address)

    def region(self, segment: int) -> Region:
        return self.slab.region_of(segment * self.slab.chunk_bytes)

    def shape(self, segment: int) -> tuple[SegmentShape, int]:
        """Return a segment's shape and the size of its file."""
        region = self.region(segment)
        return SegmentShape(region.slot_bytes, region.chunks), file_bytes(region)

    def free_slots(self, slot_bytes: int) -> int:
        """Return how many slots of this size could be allocated now, in existing segments and in new ones."""
        slots = self._slots_per_segment(slot_bytes)
        if not slots:
            return 0
        each = slots * (slot_bytes + disk_recency.BYTES_PER_BLOCK) + _FILE_OVERHEAD_BYTES
        low, high = 0, self.capacity_bytes // each + 1  # as many segments fit as `low`, not as many as `high`
        while high - low > 1:
            middle = (low + high) // 2
            if self._room_bytes(middle, slots) >= middle * (slots * slot_bytes + _FILE_OVERHEAD_BYTES):
                low = middle
            else:
                high = middle
        return self._free.get(slot_bytes, 0) + min(low, self.slab.regions_possible(slot_bytes)) * slots

    def free_slots_by_size(self) -> dict[int, int]:
        return {size: count for size, count in self._free.items() if count}

    # ---- files

    def note_made(self, segment: int) -> None:
        """Note that a region's file exists now, whole."""
        self.unmade.discard(segment)
        self.lost.discard(segment)
        self._made_bytes += file_bytes(self.region(segment)) + _FILE_OVERHEAD_BYTES

    def note_lost(self, segment: int) -> None:
        """Note that a region's file has vanished or was cut off and has to be made again."""
        if segment not in self.unmade:
            self.unmade.add(segment)
            self.lost.add(segment)
            self._made_bytes -= file_bytes(self.region(segment)) + _FILE_OVERHEAD_BYTES

    def note_removed(self, segment: int) -> None:
        """Note that a doomed file is gone."""
        del self.doomed[segment]

    def may_make(self, segment: int) -> bool:
        """Return whether the file of an unmade region fits beside all files that exist now."""
        return file_bytes(self.region(segment)) + _FILE_OVERHEAD_BYTES <= self._real_room_bytes() - self.map_bytes

    def index_bytes_planned(self) -> int:
        """Return how large the index's map has to be for the segments there are, made or not."""
        return self._index_bytes

    def claim_map(self) -> int | None:
        """Return to what size the index's map may grow beyond plan, taking that room now; None if there is none."""
        others = max(self._planned_bytes, self._made_bytes + sum(self.doomed.values()))
        wanted = min(2 * self.map_bytes, self.capacity_bytes - reserve_bytes(self._slots) - others)
        if wanted < self.map_bytes + MAP_GROWTH_BYTES_MIN:
            return None
        self.map_bytes = wanted
        return wanted

    def note_map(self, map_bytes: int) -> None:
        """Note how large the map is."""
        self.map_bytes = map_bytes

    @property
    def used_bytes(self) -> int:
        return self.slab.used_bytes

    @property
    def used_slots(self) -> int:
        return self._slots - sum(self._free.values())

    @property
    def data_capacity_bytes(self) -> int:
        """What slots can take if new segments are like the present ones."""
        return max(0, self._planned_bytes + self._room_bytes())

    @property
    def file_bytes(self) -> int:
        """What the files take that exist now, index included."""
        return self._made_bytes + sum(self.doomed.values()) + self.map_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.slab.check_integrity()
        regions = list(self.slab.regions())
        made = sum(file_bytes(r) + _FILE_OVERHEAD_BYTES for r in regions if r.first_chunk not in self.unmade)
        assert made == self._made_bytes
        assert sum(file_bytes(r) + _FILE_OVERHEAD_BYTES for r in regions) == self._planned_bytes
        assert sum(r.slots for r in regions) == self._slots
        assert INDEX_BYTES_BASE + sum(index_bytes_for(r.slots) for r in regions) == self._index_bytes
        assert self.lost <= self.unmade <= {r.first_chunk for r in regions}
        for size, count in self._free.items():
            assert count == sum(len(r.free_slots) for r in regions if r.slot_bytes == size)
        assert self.map_bytes <= self._real_room_bytes(), "the files exceed the capacity"
        assert self._room_bytes() >= 0, "the segments exceed the capacity"

    # ---- the budget

    def _slots_per_segment(self, slot_bytes: int) -> int:
        return self.slab.span_for(slot_bytes) * self.slab.chunk_bytes // slot_bytes

    def _room_bytes(self, more_segments: int = 0, slots_each: int = 0) -> int:
        """What is left for more segment files, every region made and the index as large as they may need it."""
        index_bytes = max(self.map_bytes, self._index_bytes + more_segments * index_bytes_for(slots_each))
        reserved_bytes = reserve_bytes(self._slots + more_segments * slots_each)
        return self.capacity_bytes - reserved_bytes - index_bytes - self._planned_bytes

    def _real_room_bytes(self) -> int:
        """What is left beside the files that exist, the index not counted."""
        return self.capacity_bytes - reserve_bytes(self._slots) - self._made_bytes - sum(self.doomed.values())

    def _make_room(self, slot_bytes: int) -> bool:
        """Return whether one more segment of this class fits, after giving back empty ones of others if need be."""
        slots = self._slots_per_segment(slot_bytes)
        if not slots:
            return False
        cost = slots * slot_bytes + _FILE_OVERHEAD_BYTES
        if self._room_bytes(1, slots) >= cost:
            return True
        for region in [r for r in self.slab.regions() if not r.used_slots and r.slot_bytes != slot_bytes]:
            self.slab.release(region)
            if self._room_bytes(1, slots) >= cost:
                return True
        return False

    def _created(self, region: Region) -> None:
        # A doomed file of the same number stays doomed: it is removed before this one is made.
        self.unmade.add(region.first_chunk)
        self._index_bytes += index_bytes_for(region.slots)
        self._slots += region.slots
        self._planned_bytes += file_bytes(region) + _FILE_OVERHEAD_BYTES
        self._free[region.slot_bytes] = self._free.get(region.slot_bytes, 0) + region.slots

    def _released(self, region: Region) -> None:
        cost = file_bytes(region) + _FILE_OVERHEAD_BYTES
        segment = region.first_chunk
        self._index_bytes -= index_bytes_for(region.slots)
        self._slots -= region.slots
        self._planned_bytes -= cost
        self._free[region.slot_bytes] -= region.slots
        if segment in self.lost:
            self.lost.remove(segment)
            self.unmade.remove(segment)
            self.doomed[segment] = 0
        elif segment in self.unmade:
            self.unmade.remove(segment)
        else:
            self._made_bytes -= cost
            self.doomed[segment] = cost
