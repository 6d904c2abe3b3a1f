"""Making index and segment files agree after a restart.

The index decides. A file that it doesn't know is removed. A record whose bytes can't be there any more is
deleted: its segment has vanished or was cut off before its slot, or the record names no slot, or one that
another record names too. A segment that was cut off gets its size back. When the capacity is smaller than it
was, the coldest segments go. Blocking; runs in a thread, before anything else uses the directory.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.tiers import disk_layout as layout
from kvstore.tiers import disk_space
from kvstore.tiers.disk_records import Columns
from kvstore.tiers.disk_time import Anchor
from kvstore.tiers.index import Changes, Index, IndexFull, SegmentRows, SegmentShape
from kvstore.tiers.segments import SegmentFiles

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Agreed:
    """What both index and files have, and what it takes to make them agree."""

    columns: Columns = field(default_factory=Columns)
    shapes: dict[int, SegmentShape] = field(default_factory=dict[int, SegmentShape])
    slots: dict[int, array[int]] = field(default_factory=dict[int, "array[int]"])  # segment -> used slots
    changes: Changes = field(default_factory=Changes)
    removed_files: list[int] = field(default_factory=list[int])
    short_files: list[int] = field(default_factory=list[int])
    lost: int = 0
    trimmed: int = 0


def reconcile(index: Index, files: SegmentFiles, namespaces: set[int]) -> Agreed:
    """Return what index and files agree on; records of other namespaces than these are lost. Changes nothing yet."""
    agreed = Agreed()
    sizes = files.sizes()
    end = 0
    for segment, shape in index.load_segments().items():
        if segment not in sizes or not _is_sound(shape, index.chunk_bytes) or segment < end:
            agreed.changes.segments[segment] = None
            continue
        agreed.shapes[segment] = shape
        end = segment + shape.span
        if sizes[segment] < shape.slots(index.chunk_bytes) * shape.slot_bytes:
            agreed.short_files.append(segment)
    agreed.removed_files = [segment for segment in sizes if segment not in agreed.shapes]

    for rows, columns in index.load_columns(index.load_recorded_segments()):
        places = {number: _places(agreed, number, sizes, index.chunk_bytes) for number, _, _ in rows}
        bad = set(_unplaced(rows, columns, places))
        if not namespaces.issuperset(columns.namespaces):
            bad.update(row for row, number in enumerate(columns.namespaces) if number not in namespaces)
        if bad:
            rows, columns = _without(agreed, rows, columns, bad)
        for segment, first, last in rows:
            agreed.slots[segment] = array("I", map(places[segment].index, columns.addresses[first:last]))
        agreed.columns.extend(columns)
    return agreed


def is_too_large(agreed: Agreed, index: Index, capacity_bytes: int) -> bool:
    """Return whether all segments together may come to take more than the capacity."""
    cut = ((shape.slots(index.chunk_bytes), shape.slot_bytes) for shape in agreed.shapes.values())
    return disk_space.total_bytes(cut, index.map_bytes) > capacity_bytes


def trim(agreed: Agreed, columns: Columns, index: Index, capacity_bytes: int) -> Columns:
    """Return the columns, given coldest first, without the coldest segments that a smaller capacity has no room for."""
    shapes = agreed.shapes
    owner = {chunk: segment for segment, shape in shapes.items() for chunk in range(segment, segment + shape.span)}
    hottest = dict.fromkeys(shapes, -1)
    for row, address in enumerate(columns.addresses):
        hottest[owner[address // index.chunk_bytes]] = row
    for segment in sorted(hottest, key=hottest.__getitem__):
        if not is_too_large(agreed, index, capacity_bytes):
            break
        del shapes[segment]
        agreed.trimmed += len(agreed.slots.pop(segment, ()))
        agreed.changes.segments[segment] = None
        agreed.removed_files.append(segment)
    agreed.short_files = [segment for segment in agreed.short_files if segment in shapes]
    return columns.select(
        [row for row, address in enumerate(columns.addresses) if owner[address // index.chunk_bytes] in shapes]
    )


def apply(agreed: Agreed, index: Index, files: SegmentFiles, anchor: Anchor) -> None:
    """Carry it out: records first, files after them."""
    while agreed.changes:
        try:
            index.commit(agreed.changes, anchor)
            break
        except IndexFull:
            index.grow(2 * index.map_bytes)
    for segment in agreed.removed_files:
        files.remove(segment)
    for segment in agreed.short_files:
        shape = agreed.shapes[segment]
        try:
            files.extend(segment, shape.slots(index.chunk_bytes) * shape.slot_bytes)
        except OSError as exc:
            _log.warning("ssd segment stays cut off: file=%s error=%s", files.path(segment), exc)
    if agreed.lost or agreed.short_files or agreed.trimmed:
        _log.warning(
            "ssd records dropped at open: lost=%d trimmed=%d segments_vanished=%d segments_cut_off=%d directory=%s: "
            "their blocks will be computed again",
            agreed.lost, agreed.trimmed, len(agreed.changes.segments), len(agreed.short_files), files.directory,
        )  # fmt: skip


def _is_sound(shape: SegmentShape, chunk_bytes: int) -> bool:
    size = shape.slot_bytes
    return size > 0 and size % layout.SECTOR_BYTES == 0 and shape.slots(chunk_bytes) > 0


def _places(agreed: Agreed, segment: int, sizes: dict[int, int], chunk_bytes: int) -> range:
    """Return the addresses of a segment's slots whose bytes exist."""
    shape = agreed.shapes.get(segment)
    if shape is None:
        return range(0)
    slots = min(shape.slots(chunk_bytes), sizes[segment] // shape.slot_bytes)
    start = segment * chunk_bytes
    return range(start, start + slots * shape.slot_bytes, shape.slot_bytes)


def _unplaced(rows: list[SegmentRows], columns: Columns, places: dict[int, range]) -> Iterator[int]:
    """Yield the rows that name no slot of their segment, or one that is named twice."""
    for segment, first, last in rows:
        where = places[segment]
        addresses, lengths = columns.addresses[first:last], columns.lengths[first:last]
        if (
            all(map(where.__contains__, addresses))
            and len(set(addresses)) == len(addresses)
            and all(layout.slot_bytes(length) == where.step for length in set(lengths))
        ):
            continue
        named = Counter(addresses)
        for row, address, length in zip(range(first, last), addresses, lengths, strict=True):
            if address not in where or named[address] > 1 or layout.slot_bytes(length) != where.step:
                yield row


def _without(
    agreed: Agreed, rows: list[SegmentRows], columns: Columns, bad: set[int]
) -> tuple[list[SegmentRows], Columns]:
    """Return the columns without some rows, which are deleted from the index."""
    agreed.lost += len(bad)
    kept: list[int] = []
    ranges: list[SegmentRows] = []
    for segment, first, last in rows:
        start = len(kept)
        for row in range(first, last):
            if row not in bad:
                kept.append(row)
            elif segment in agreed.shapes:
                agreed.changes.deletes.append((segment, columns.addresses[row]))
            else:
                agreed.changes.segments[segment] = None
        if len(kept) > start:
            ranges.append((segment, start, len(kept)))
    return ranges, columns.select(kept)
