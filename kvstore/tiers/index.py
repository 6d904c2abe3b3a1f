"""The ssd tier's index: an LMDB environment that says which blocks are durable, and where.

    database      key                               value
    `blocks`      segment u64 BE                    one record a block (dupsort, dupfixed), sorted by its first 8 bytes:
                                                    address u64 BE | hash 32 B | namespace u32 | length u32 |
                                                    generation u64 | checksum u64 | epoch u64 | expiry f64
    `segments`    segment u64 BE                    slot size u64 | span in chunks u32 | 0 u32
    `namespaces`  number u32 BE                     MessagePack [tenant, canonical encoding, epoch, default ttl_s]
    `pins`        namespace u32 BE | hash 32 B      end f64
    `meta`        "format" "directory" "chunk"      u32 BE | 16 random bytes | u64 BE
                  "epochs"                          u64 BE: no new namespace begins below this epoch
                  "clock"                           an Anchor

Little-endian where BE is not said. A segment is named by its first chunk, an address counts bytes in the
whole slab, times are directory times. Key and record together are eleven 8-byte words, so a bulk read falls
apart into columns by strides.

Invariants
1. Every transaction is on disk when `commit` returns: the environment is synchronous, without NOSYNC,
   MAPASYNC or WRITEMAP.
2. A transaction is applied whole or not at all. After an error other than IndexFull nobody knows which, until
   `reopen`.
3. `data.mdb` is never larger than `map_bytes`, and those bytes are really allocated, so LMDB can't meet a
   full disk.
4. All calls come from one thread at a time; nothing else holds a transaction (LMDB's map can't grow under
   one).
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from kvstore.errors import BadRecord, TierFull, TierUnavailable
from kvstore.tiers.disk_records import Columns, DiskNamespace, DiskRecord
from kvstore.tiers.disk_time import Anchor

FORMAT = 1
MAP_BYTES_MIN = 256 << 10
LOCK_FILE_BYTES_MAX = 64 << 10

_WORD = struct.Struct(">Q")
_RECORD = struct.Struct("<32sIIQQQd")
_SEGMENT = struct.Struct("<QII")
_PIN_KEY = struct.Struct(">I32s")
_NUMBER = struct.Struct(">I")
_F64 = struct.Struct("<d")
RECORD_BYTES = _WORD.size + _RECORD.size
_ROW_BYTES = _WORD.size + RECORD_BYTES
_ROW_WORDS = _ROW_BYTES // 8
_ROWS_AT_ONCE = 1 << 18
_ROW_HASH = struct.Struct(f"16x32s{_ROW_BYTES - 48}x")
_EXPIRY_AT = RECORD_BYTES - 8
_PAGE_BYTES = 4096
_START_EMPTY = "remove the ssd directory's contents to start empty, or give another directory"
assert _ROW_BYTES % 8 == 0

SegmentRows = tuple[int, int, int]  # segment, first row, end row


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """How a segment is cut: the size of its slots and how many chunks it spans."""

    slot_bytes: int
    span: int

    def slots(self, chunk_bytes: int) -> int:
        return self.span * chunk_bytes // self.slot_bytes


class _NamespaceRow(msgspec.Struct, array_like=True):
    tenant: str
    encoded: bytes
    epoch: int
    ttl_s: float


_decode_namespace = msgspec.msgpack.Decoder(_NamespaceRow).decode


@dataclass(slots=True)
class Changes:
    """What one transaction does, in the order of these fields. Deleting what isn't there is no error."""

    deletes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (segment, address)
    segments: dict[int, SegmentShape | None] = field(default_factory=dict[int, SegmentShape | None])  # None: remove
    puts: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])  # segment, address, record
    expiries_s: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    namespaces: dict[int, DiskNamespace | None] = field(default_factory=dict[int, DiskNamespace | None])
    epoch_floor: int = 0  # 0: as it is
    pins: dict[tuple[int, bytes], float | None] = field(default_factory=dict[tuple[int, bytes], float | None])

    def __bool__(self) -> bool:
        return bool(
            self.deletes or self.segments or self.puts or self.expiries_s or self.namespaces or self.pins
        )


class IndexFull(TierFull):
    """The map has no room for the transaction; nothing was changed."""


def pack_record(address: int, record: DiskRecord, expiry_s: float) -> bytes:
    """Return a record as it lies in `blocks`; `expiry_s` is in directory time."""
    return _WORD.pack(address) + _RECORD.pack(
        record.hash, record.namespace, record.length, record.generation, record.checksum, record.epoch, expiry_s
    )


class Index:
    """An open environment.

    Parameters
    ----------
    directory : Path
        Holds data.mdb and lock.mdb; made if it does not exist.
    map_bytes : int
        Size of the map when it is new; an existing one is never made smaller.
    map_bytes_max : int, optional
        An existing map beyond this is only looked at: what its file lacks on disk is not allocated.
    chunk_bytes : int
        Written when it is new; `self.chunk_bytes` is what addresses of this directory are made with.

    Raises
    ------
    BadRecord
        The index is damaged or of another format.
    TierUnavailable
        It can't be opened.
    """

    def __init__(
        self, directory: Path, *, map_bytes: int, chunk_bytes: int, map_bytes_max: int | None = None
    ) -> None:
        self._path = directory
        existing = _own_file_bytes(directory / "data.mdb")
        _own_file_bytes(directory / "lock.mdb")
        self.map_bytes = max(map_bytes, existing, MAP_BYTES_MIN)
        with _mapped_errors(self._path):
            self._open_environment()
            try:
                with self._env.begin(write=True) as txn:
                    self._open_meta(txn, chunk_bytes)
                if map_bytes_max is None or self.map_bytes <= max(map_bytes_max, map_bytes):
                    self._allocate(self.map_bytes)
            except BaseException:
                self._env.close()
                raise

    # ---- opening

    def _open_environment(self) -> None:
        self._env = lmdb.Environment(
            str(self._path), map_size=self.map_bytes, max_dbs=8, max_readers=8, max_spare_txns=1, readahead=False
        )
        try:
            self._blocks = self._env.open_db(b"blocks", dupsort=True, dupfixed=True)
            self._segments = self._env.open_db(b"segments")
            self._namespaces = self._env.open_db(b"namespaces")
            self._pins = self._env.open_db(b"pins")
            self._meta = self._env.open_db(b"meta")
        except BaseException:
            self._env.close()
            raise

    def _open_meta(self, txn: lmdb.Transaction[bytes], chunk_bytes: int) -> None:
        known = txn.get(b"format", db=self._meta)
        if known is None:
            txn.put(b"format", _NUMBER.pack(FORMAT), db=self._meta)
            txn.put(b"directory", secrets.token_bytes(16), db=self._meta)
            txn.put(b"chunk", _WORD.pack(chunk_bytes), db=self._meta)
        elif known != _NUMBER.pack(FORMAT):
            raise BadRecord(
                f"the ssd index in {self._path} has format {int.from_bytes(known, 'big')}, this version reads "
                f"{FORMAT}: start the version that wrote it, or give another directory"
            )
        directory_id, chunk = txn.get(b"directory", db=self._meta), txn.get(b"chunk", db=self._meta)
        if directory_id is None or len(directory_id) != 16 or chunk is None or len(chunk) != _WORD.size:
            raise BadRecord(f"the ssd index in {self._path} lacks its own description: {_START_EMPTY}")
        self.directory_id = directory_id
        self.chunk_bytes = int(_WORD.unpack(chunk)[0])
        self.epoch_floor = int(_WORD.unpack(txn.get(b"epochs", bytes(_WORD.size), db=self._meta))[0])
        clock = txn.get(b"clock", db=self._meta)
        self.anchor = None if clock is None else Anchor.unpack(clock)

    def reopen(self) -> None:
        """Close and open again: after an error only what is on disk counts."""
        with _mapped_errors(self._path):
            self._env.close()
            self._open_environment()

    def close(self) -> None:
        self._env.close()

    # ---- reading, at open

    def load_segments(self) -> dict[int, SegmentShape]:
        """Return the shapes of all segments, ascending."""
        shapes: dict[int, SegmentShape] = {}
        with self._reading() as txn:
            for key, value in txn.cursor(self._segments):
                slot_bytes, span, _ = _unpack(_SEGMENT, value)
                shapes[_unpack(_WORD, key)[0]] = SegmentShape(slot_bytes, span)
        return shapes

    def load_columns(self, segments: Sequence[int]) -> Iterator[tuple[list[SegmentRows], Columns]]:
        """Yield the records of ascending `segments` as columns, a few hundred thousand rows at a time.

        With them comes which rows belong to which segment. `expiries_s` is in directory time.
        """
        with self._reading() as txn:
            cursor = txn.cursor(self._blocks)
            for keys in self._portions(cursor, segments):
                found = cursor.getmulti(keys, dupdata=True, dupfixed_bytes=RECORD_BYTES, keyfixed=True)
                rows = bytes(found)
                if len(rows) % _ROW_BYTES:
                    raise BadRecord(f"records of the ssd index in {self._path} have a wrong size: {_START_EMPTY}")
                names, columns = _columns(rows)
                numbers = [_unpack(_WORD, key)[0] for key in keys]
                starts = [bisect_left(names, number) for number in numbers] + [len(names)]
                yield list(zip(numbers, starts, starts[1:], strict=False)), columns

    def load_recorded_segments(self) -> list[int]:
        """Return every segment that records name, whether `segments` knows it or not."""
        with self._reading() as txn:
            return [_unpack(_WORD, key)[0] for key in txn.cursor(self._blocks).iternext_nodup(keys=True, values=False)]

    def load_namespaces(self) -> dict[int, DiskNamespace]:
        namespaces: dict[int, DiskNamespace] = {}
        with self._reading() as txn:
            for key, value in txn.cursor(self._namespaces):
                number = _unpack(_NUMBER, key)[0]
                try:
                    row = _decode_namespace(value)
                except msgspec.MsgspecError as exc:
                    raise BadRecord(f"namespace {number} of the ssd index in {self._path} is unreadable") from exc
                namespaces[number] = DiskNamespace(number, row.tenant, row.encoded, row.epoch, row.ttl_s)
        return namespaces

    def load_pins(self) -> dict[tuple[int, bytes], float]:
        """Return the ends of all pins, in directory time."""
        pins: dict[tuple[int, bytes], float] = {}
        with self._reading() as txn:
            for key, value in txn.cursor(self._pins):
                namespace, hash_ = _unpack(_PIN_KEY, key)
                pins[namespace, hash_] = _unpack(_F64, value)[0]
        return pins

    def count(self) -> int:
        """Return how many records there are."""
        with self._reading() as txn:
            return txn.stat(self._blocks)["entries"]

    def addresses(self, segment: int) -> array[int]:
        """Return the addresses recorded in one segment, ascending."""
        return next((columns.addresses for _, columns in self.load_columns([segment])), array("Q"))

    # ---- writing

    def commit(self, changes: Changes, anchor: Anchor) -> None:
        """Apply `changes` in one durable transaction.

        Raises
        ------
        IndexFull
            The map is too small; nothing was changed. `grow` it, or delete something first.
        TierUnavailable
            Anything else; call `reopen` before the next commit.
        """
        with _mapped_errors(self._path):
            try:
                with self._env.begin(write=True) as txn:
                    self._apply(txn, changes)
                    txn.put(b"clock", anchor.pack(), db=self._meta)
            except lmdb.MapFullError as exc:
                raise IndexFull(
                    f"the ssd index in {self._path} is full at {self.map_bytes} bytes and may not grow inside the "
                    "tier's capacity: new blocks stay in memory only until some are evicted; give it more capacity"
                ) from exc

    def _apply(self, txn: lmdb.Transaction[bytes], changes: Changes) -> None:
        cursor = txn.cursor(self._blocks)
        for segment, address in changes.deletes:
            if _seek(cursor, segment, address):
                cursor.delete()
        for segment, shape in changes.segments.items():
            key = _WORD.pack(segment)
            if shape is not None:
                txn.put(key, _SEGMENT.pack(shape.slot_bytes, shape.span, 0), db=self._segments)
                continue
            txn.delete(key, db=self._segments)
            if cursor.set_key(key):
                cursor.delete(dupdata=True)
        if changes.puts:
            cursor.putmulti([(_WORD.pack(segment), record) for segment, _, record in sorted(changes.puts)])
        for (segment, address), expiry_s in changes.expiries_s.items():
            if found := _seek(cursor, segment, address):
                cursor.delete()
                cursor.put(_WORD.pack(segment), found[:_EXPIRY_AT] + _F64.pack(expiry_s))
        if changes.epoch_floor:
            txn.put(b"epochs", _WORD.pack(changes.epoch_floor), db=self._meta)
        for number, namespace in changes.namespaces.items():
            if namespace is None:
                txn.delete(_NUMBER.pack(number), db=self._namespaces)
                continue
            row = _NamespaceRow(namespace.tenant, namespace.encoded, namespace.epoch, namespace.ttl_s)
            txn.put(_NUMBER.pack(number), msgspec.msgpack.encode(row), db=self._namespaces)
        for (number, hash_), ends_s in changes.pins.items():
            key = _PIN_KEY.pack(number, hash_)
            if ends_s is None:
                txn.delete(key, db=self._pins)
            else:
                txn.put(key, _F64.pack(ends_s), db=self._pins)

    def grow(self, map_bytes: int) -> None:
        """Make the map at least this large."""
        wanted = map_bytes // _PAGE_BYTES * _PAGE_BYTES
        if wanted > self.map_bytes:
            with _mapped_errors(self._path):
                self._allocate(wanted)
                self._env.set_mapsize(wanted)
                self.map_bytes = wanted

    def _allocate(self, size_bytes: int) -> None:
        fd = os.open(self._path / "data.mdb", os.O_RDWR)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _reading(self) -> Generator[lmdb.Transaction[bytes]]:
        with _mapped_errors(self._path), self._env.begin() as txn:
            yield txn

    @staticmethod
    def _portions(cursor: lmdb.Cursor[bytes], segments: Sequence[int]) -> Iterator[list[bytes]]:
        keys: list[bytes] = []
        rows = 0
        for segment in segments:
            key = _WORD.pack(segment)
            if not cursor.set_key(key):
                continue
            keys.append(key)
            rows += cursor.count()
            if rows >= _ROWS_AT_ONCE:
                yield keys
                keys, rows = [], 0
        if keys:
            yield keys


def _seek(cursor: lmdb.Cursor[bytes], segment: int, address: int) -> bytes | None:
    """Return the record at `address` with the cursor on it, or None."""
    prefix = _WORD.pack(address)
    if cursor.set_range_dup(_WORD.pack(segment), prefix):
        found = cursor.value()
        if found.startswith(prefix):
            return found
    return None


def _columns(rows: bytes) -> tuple[array[int], Columns]:
    words, halves = memoryview(rows).cast("Q"), memoryview(rows).cast("I")
    names, addresses = array("Q"), array("Q")
    names.frombytes(words[0::_ROW_WORDS].tobytes())
    addresses.frombytes(words[1::_ROW_WORDS].tobytes())
    names.byteswap()
    addresses.byteswap()
    columns = Columns(hashes=[hash_ for (hash_,) in _ROW_HASH.iter_unpack(rows)], addresses=addresses)
    columns.namespaces.frombytes(halves[12 :: 2 * _ROW_WORDS].tobytes())
    columns.lengths.frombytes(halves[13 :: 2 * _ROW_WORDS].tobytes())
    columns.generations.frombytes(words[7::_ROW_WORDS].tobytes())
    columns.checksums.frombytes(words[8::_ROW_WORDS].tobytes())
    columns.epochs.frombytes(words[9::_ROW_WORDS].tobytes())
    columns.expiries_s.frombytes(memoryview(rows).cast("d")[10::_ROW_WORDS].tobytes())
    return names, columns


def _unpack(layout: struct.Struct, raw: bytes) -> tuple[Any, ...]:
    if len(raw) != layout.size:
        raise BadRecord(f"the ssd index holds {len(raw)} bytes where {layout.size} belong: {_START_EMPTY}")
    return layout.unpack(raw)


def _own_file_bytes(path: Path) -> int:
    """Return the size of a file that LMDB would write to, 0 if there is none; what it leads elsewhere is refused."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        raise BadRecord(f"{path} is no regular file: {_START_EMPTY}")
    return found.st_size


@contextmanager
def _mapped_errors(path: Path) -> Generator[None]:
    """Let LMDB's and the system's errors out as this project's."""
    try:
        yield
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.IncompatibleError) as exc:
        raise BadRecord(f"the ssd index in {path} is damaged ({exc}): {_START_EMPTY}") from exc
    except lmdb.VersionMismatchError as exc:
        raise BadRecord(f"the ssd index in {path} was written by another LMDB ({exc}): give another directory") from exc
    except lmdb.Error as exc:
        raise TierUnavailable(f"the ssd index in {path} failed: {exc}") from exc
    except OSError as exc:
        raise TierUnavailable(f"the ssd index in {path} failed: {exc}: check the disk and its free space") from exc
