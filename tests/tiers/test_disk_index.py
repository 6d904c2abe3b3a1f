"""The ssd tier's index, layout and clock by themselves; the bytes on disk are held by vectors."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import BadRecord, TierUnavailable
from kvstore.tiers import disk_layout, disk_recency, disk_space
from kvstore.tiers.disk_layout import HEADER_BYTES, body_bytes, slot_bytes
from kvstore.tiers.disk_records import NEVER_S, Columns, DiskNamespace, DiskRecord
from kvstore.tiers.disk_time import Anchor, DirectoryTime
from kvstore.tiers.index import RECORD_BYTES, Changes, Index, IndexFull, SegmentShape, pack_record

CHUNK_BYTES = 1 << 20
ANCHOR = Anchor(1.0, 2.0, 3.0, "boot")
RECORD = DiskRecord(
    namespace=3, hash=bytes(range(32)), length=70_272, generation=5, checksum=0x0102030405060708, epoch=9, expires_s=7.5
)


def make(directory: Path, map_bytes: int = 1 << 20) -> Index:
    directory.mkdir(exist_ok=True)
    return Index(directory, map_bytes=map_bytes, chunk_bytes=CHUNK_BYTES)


def put(count: int, segment: int, first: int = 0) -> Changes:
    places = [segment * CHUNK_BYTES + slot * 4096 for slot in range(first, first + count)]
    changes = Changes(segments={segment: SegmentShape(4096, 1)})
    changes.puts = [
        (segment, address, pack_record(address, replace(RECORD, generation=address), NEVER_S)) for address in places
    ]
    return changes


def rows(index: Index) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for _, columns in index.load_columns(index.load_recorded_segments()):
        found += zip(columns.addresses, columns.generations, strict=True)
    return found


def test_record_bytes_are_those_of_format_1() -> None:
    packed = pack_record(0x10000, RECORD, 77.5)
    assert len(packed) == RECORD_BYTES == 80
    assert packed.hex() == (
        "0000000000010000000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "030000008012010005000000000000000807060504030201090000000000000000000000006053" + "40"
    )


def test_header_bytes_are_those_of_format_1() -> None:
    header = disk_layout.header(b"d" * 16, 0x10000, RECORD)
    assert len(header) == HEADER_BYTES == 104
    fields = struct.unpack("<4sHH16sQ32sIIQQQQ", header)
    assert fields[:-1] == (
        b"KVsl", 1, 104, b"d" * 16, 0x10000, bytes(range(32)), 3, 70_272, 5, 0x0102030405060708, 9,
    )  # fmt: skip
    assert fields[-1] == 13_386_845_348_361_904_461


@pytest.mark.parametrize("length", [1, 3991, 3992, 3993, 4096, 8191, 65_536, 70_272, 1 << 20])
def test_header_lies_in_the_padding_where_it_fits(length: int) -> None:
    padding = -length % 4096
    assert slot_bytes(length) == length + padding + (0 if padding >= HEADER_BYTES else 4096)
    assert body_bytes(length) <= length < body_bytes(length) + 4096
    assert slot_bytes(length) - body_bytes(length) <= disk_layout.TAIL_BYTES_MAX


def test_columns_come_back_as_they_were_put(tmp_path: Path) -> None:
    index = make(tmp_path)
    index.commit(put(300, 7), ANCHOR)
    index.commit(put(3, 2), ANCHOR)
    index.close()
    index = make(tmp_path)
    assert index.load_segments() == {2: SegmentShape(4096, 1), 7: SegmentShape(4096, 1)}
    ((ranges, columns),) = index.load_columns([2, 5, 7])
    assert ranges == [(2, 0, 3), (7, 3, 303)]
    assert list(columns.addresses) == list(columns.generations)
    assert columns.record(0) == replace(RECORD, generation=2 * CHUNK_BYTES, expires_s=NEVER_S)
    assert index.anchor == ANCHOR
    index.close()


def test_deletes_and_expiries_touch_only_their_records(tmp_path: Path) -> None:
    index = make(tmp_path)
    index.commit(put(100, 1), ANCHOR)
    index.commit(put(1, 9), ANCHOR)
    at = [CHUNK_BYTES + slot * 4096 for slot in range(100)]
    nine = 9 * CHUNK_BYTES
    changes = Changes(
        deletes=[(1, at[0]), (1, at[50]), (1, at[50]), (9, nine), (9, nine + 4096), (5, 0), (1, at[99] + 4096)],
        expiries_s={(1, at[1]): 5.5, (1, at[50]): 6.0, (9, nine): 7.0},
    )
    index.commit(changes, ANCHOR)
    assert [address for address, _ in rows(index)] == at[1:50] + at[51:]
    ((_, columns),) = index.load_columns([1])
    assert list(columns.expiries_s) == [5.5] + [NEVER_S] * 97
    index.commit(Changes(segments={1: None}), ANCHOR)
    assert rows(index) == []
    assert list(index.load_segments()) == [9]
    index.close()


def test_full_map_changes_nothing_and_takes_more_once_it_has_grown(tmp_path: Path) -> None:
    index = make(tmp_path, map_bytes=256 << 10)
    index.commit(put(100, 1), ANCHOR)
    with pytest.raises(IndexFull, match="is full at 262144 bytes"):
        index.commit(put(5000, 2), ANCHOR)
    assert len(rows(index)) == 100
    index.grow(2 << 20)
    index.commit(put(5000, 2), ANCHOR)
    assert len(rows(index)) == 5100
    assert (tmp_path / "data.mdb").stat().st_size == index.map_bytes == 2 << 20
    index.close()
    index = make(tmp_path, map_bytes=256 << 10)
    assert index.map_bytes == 2 << 20, "an index that has grown keeps its size"
    index.close()


def test_closed_index_fails_as_unavailable_and_works_after_reopen(tmp_path: Path) -> None:
    index = make(tmp_path)
    index.commit(put(10, 1), ANCHOR)
    index.close()
    with pytest.raises(TierUnavailable):
        index.commit(put(10, 2), ANCHOR)
    index.reopen()
    index.commit(put(10, 2), ANCHOR)
    assert len(rows(index)) == 20
    index.close()


def test_namespaces_and_pins_come_back(tmp_path: Path) -> None:
    index = make(tmp_path)
    namespace = DiskNamespace(4, "tenant", b"\x00encoded", 17, 0.5)
    index.commit(Changes(namespaces={4: namespace}, pins={(4, b"h" * 32): 9.0, (4, b"i" * 32): 8.0}), ANCHOR)
    index.commit(Changes(pins={(4, b"i" * 32): None}), ANCHOR)
    assert index.load_namespaces() == {4: namespace}
    assert index.load_pins() == {(4, b"h" * 32): 9.0}
    with index._env.begin(write=True) as txn:  # pyright: ignore[reportPrivateUsage]
        txn.put((5).to_bytes(4, "big"), b"\xc1", db=index._namespaces)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(BadRecord, match="namespace 5"):
        index.load_namespaces()
    index.close()


def test_recency_file_that_is_not_whole_is_no_order_at_all(tmp_path: Path) -> None:
    order = array("Q", [7, 3, 5])
    assert list(disk_recency.read(tmp_path)) == []
    disk_recency.write(tmp_path, order)
    assert disk_recency.read(tmp_path) == order
    whole = (tmp_path / disk_recency.NAME).read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", whole[:-1] + b"\x01", b"X" + whole[1:], whole + b"\0" * 8):
        (tmp_path / disk_recency.NAME).write_bytes(damaged)
        assert list(disk_recency.read(tmp_path)) == []


def test_order_names_each_row_once_whatever_the_checkpoint_says() -> None:
    columns = Columns(
        hashes=[bytes([n]) for n in range(4)],
        namespaces=array("I", range(4)),
        addresses=array("Q", [10, 20, 30, 40]),
        lengths=array("I", range(4)),
        generations=array("Q", [4, 3, 2, 1]),
        checksums=array("Q", range(4)),
        epochs=array("Q", range(4)),
        expiries_s=array("d", range(4)),
    )
    ordered = disk_recency.in_order(columns, array("Q", [30, 99, 30, 10]))
    assert list(ordered.addresses) == [30, 10, 40, 20]
    assert ordered.hashes == [bytes([2]), bytes([0]), bytes([3]), bytes([1])]
    assert list(disk_recency.in_order(Columns(), array("Q", [1])).addresses) == []


def test_directory_time_never_goes_back() -> None:
    clock = ManualClock()
    anchor = DirectoryTime(clock, "a", None).anchor()
    for boot_id, step_s in (("a", 0.0), ("b", -1e9), ("b", 1e6), ("a", -1e9)):
        clock.wall_offset_s += step_s
        time = DirectoryTime(clock, boot_id, anchor)
        now = time.anchor()
        assert now.directory_s >= anchor.directory_s
        assert Anchor.unpack(now.pack()) == now
        anchor = now
    with pytest.raises(BadRecord):
        Anchor.unpack(b"short")


@pytest.mark.parametrize("capacity_bytes", [8 << 20, 100 << 20, 10 << 30, 40 << 40])
def test_chunks_are_a_fair_share_of_the_capacity(capacity_bytes: int) -> None:
    chunk_bytes = disk_space.chunk_bytes_for(capacity_bytes)
    assert chunk_bytes & (chunk_bytes - 1) == 0
    assert 256 << 10 <= chunk_bytes <= 256 << 20
    space = disk_space.Space(capacity_bytes, chunk_bytes, map_bytes=1 << 20)
    assert space.free_slots(4096 * 100) * 409_600 > 0.7 * capacity_bytes
    space.check_integrity()
