"""Whether slab, index and segment files of the ssd tier say the same. Looks, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.tiers.disk_commit import GroupCommit
from kvstore.tiers.disk_slots import Slots
from kvstore.tiers.disk_space import Space
from kvstore.tiers.index import Index, SegmentShape
from kvstore.tiers.segments import SegmentFiles
from kvstore.tiers.slab import Region


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """The parts that are compared."""

    space: Space
    slots: Slots
    commit: GroupCommit
    index: Index
    files: SegmentFiles

    async def problems(self) -> list[str]:
        """Return what is wrong: nothing, unless there is a bug or a fault.

        Blocks that are being written or deleted meanwhile are not judged.
        """
        problems: list[str] = []
        try:
            self.space.check_integrity()
        except AssertionError as exc:
            problems.append(f"slab: {exc}")
        # A segment that is made or given back meanwhile is not judged either.
        made = {r.first_chunk: r for r in self.space.slab.regions() if r.first_chunk not in self.space.unmade}
        used, moving = self.slots.used(), self.slots.moving()
        try:
            recorded, shapes, sizes = await self.commit.on_index_thread(self._read_all)
        except (OSError, KVStoreError) as exc:
            return [*problems, f"index and segment files can't be read: {exc}"]
        used |= self.slots.used()
        moving |= self.slots.moving()
        named = set(recorded)
        if len(named) < len(recorded):
            problems.append(f"index: {len(recorded) - len(named)} records name a slot that another record names")
        if unknown := named - used:
            problems.append(f"index: {len(unknown)} records name free slots, the first {min(unknown)}")
        if missing := used - named - moving:
            problems.append(f"slab: {len(missing)} used slots have no record, the first {min(missing)}")
        return problems + self._segments(made, shapes, sizes)

    def _segments(
        self, made: dict[int, Region], shapes: dict[int, SegmentShape], sizes: dict[int, int]
    ) -> list[str]:
        problems: list[str] = []
        for region in self.space.slab.regions():
            segment = region.first_chunk
            if made.get(segment) is not region or segment in self.space.unmade:
                continue
            shape, size_bytes = self.space.shape(segment)
            if shapes.get(segment, shape) != shape:
                problems.append(f"index: segment {segment} is recorded as {shapes[segment]}, not {shape}")
            if sizes.get(segment, 0) < size_bytes:
                problems.append(f"segment {segment}: its file has {sizes.get(segment, 0)} of {size_bytes} bytes")
        return problems

    def _read_all(self) -> tuple[list[int], dict[int, SegmentShape], dict[int, int]]:
        recorded = self.index.load_columns(self.index.load_recorded_segments())
        addresses = [address for _, columns in recorded for address in columns.addresses]
        return addresses, self.index.load_segments(), self.files.sizes()
