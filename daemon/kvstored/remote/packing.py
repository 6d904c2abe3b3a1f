"""How many blocks lie in one object, and how an object is named.

    | record | record | ... | table: one entry a record | trailer |

A record is a header and a payload (records.py), so it can be checked by itself. An entry of the table is hash, offset,
length of payload, generation and end of life; the trailer, at the very end, says how long the table is. One ranged read
of an object's end tells what lies where, and records that lie side by side are read with one ranged read.

An object is called `packs/WRITER/SCOPE.EPOCH.WRITTEN.EXPIRES.UNIQUE.pack`: all that is needed to drop it, to sweep it
or to leave it alone is told by a listing. WRITTEN and EXPIRES are hexadecimal milliseconds of wall time.

Invariants
1. An object is written once, by one request, under a name that no other daemon and no other life of this one can give:
   nobody ever sees half of it, and nothing in it changes.
2. EXPIRES is the end of the longest life in it, 0 if one has no end: what it says is over is over.
3. What a name, a trailer or a table says is checked before it is used: lengths against the size of the object.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.checksum import checksum
from kvstore.errors import BadRecord
from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteScope, RemoteWrite
from kvstored.remote.copying import copy
from kvstored.remote.records import HEADER_BYTES, pack_header

PACKS = "packs"
BLOCKS_MAX = 4096  # in one object
END_BYTES = 64 << 10  # of an object's end are read at first: the table of some 1,200 blocks
MERGE_GAP_BYTES = 64 << 10  # what lies closer together is read with one request
MERGED_BYTES_MAX = 16 << 20
_MAGIC = b"KVpk"
_FORMAT = 1
_ENTRY = struct.Struct("<32sQIQd")
_TRAILER = struct.Struct("<4sHHIQQ")  # magic, format, entry bytes, entries, offset of the table, its checksum
TRAILER_BYTES = _TRAILER.size
_NAME = re.compile(
    r"packs/([A-Za-z0-9_.-]{1,128})/([0-9a-f]{64})\.([0-9a-f]{8})\.([0-9a-f]{12})\.([0-9a-f]{12})\.([0-9a-f-]{1,40})\.pack"
)


@dataclass(frozen=True, slots=True)
class PackName:
    """What the name of an object says; `text` is the name itself."""

    text: str
    writer: str
    scope: bytes
    epoch: int
    written_s: float
    expires_s: float

    @staticmethod
    def make(writer: str, scope: bytes, epoch: int, written_s: float, expires_s: float, unique: str) -> PackName:
        written_ms = round(written_s * 1000)
        expires_ms = 0 if expires_s == NEVER_S else round(expires_s * 1000) + 1
        text = f"{PACKS}/{writer}/{scope.hex()}.{epoch:08x}.{written_ms:012x}.{expires_ms:012x}.{unique}.pack"
        return PackName(text, writer, scope, epoch, written_ms / 1000, expires_ms / 1000 if expires_ms else NEVER_S)

    @staticmethod
    def read(text: str) -> PackName | None:
        """Return what a name says, None if it is no object of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        writer, scope, epoch, written_ms, expires_ms, _ = match.groups()
        expires_s = int(expires_ms, 16) / 1000 or NEVER_S
        return PackName(text, writer, bytes.fromhex(scope), int(epoch, 16), int(written_ms, 16) / 1000, expires_s)


@dataclass(frozen=True, slots=True)
class Table:
    """What lies where in an object, parallel: a million blocks are no million objects."""

    hashes: list[bytes] = field(default_factory=list[bytes])
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    generations: array[int] = field(default_factory=lambda: array("Q"))
    expiries_s: array[float] = field(default_factory=lambda: array("d"))  # wall time; NEVER_S: no end

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, block_hash: bytes, offset: int, length: int, generation: int, expires_s: float) -> None:
        self.hashes.append(block_hash)
        self.offsets.append(offset)
        self.lengths.append(length)
        self.generations.append(generation)
        self.expiries_s.append(expires_s)

    def pack(self) -> bytes:
        rows = zip(self.hashes, self.offsets, self.lengths, self.generations, self.expiries_s, strict=True)
        return b"".join(_ENTRY.pack(*row) for row in rows)


def pack_bytes(lengths: Sequence[int]) -> int:
    """Return the size of an object with blocks of these lengths."""
    return sum(lengths) + len(lengths) * (HEADER_BYTES + _ENTRY.size) + _TRAILER.size


def assemble(
    scope: RemoteScope, scope_key: bytes, epoch: int, writes: Sequence[RemoteWrite], now_s: float
) -> tuple[bytearray, Table]:
    """Return an object's bytes and its table. Takes as long as copying and hashing the blocks: run it in a thread."""
    table, size = Table(), pack_bytes([len(write.payload) for write in writes])
    content = bytearray(size)
    view = memoryview(content)
    at = 0
    for write in writes:
        view[at : at + HEADER_BYTES] = pack_header(scope, scope_key, epoch, write, now_s)
        table.add(write.hash, at, len(write.payload), write.generation, now_s + write.life_s)
        at += HEADER_BYTES
        copy(view[at : at + len(write.payload)], write.payload)
        at += len(write.payload)
    entries = table.pack()
    view[at : at + len(entries)] = entries
    view[at + len(entries) :] = _TRAILER.pack(_MAGIC, _FORMAT, _ENTRY.size, len(table), at, checksum(entries))
    return content, table


def table_span(end: memoryview, size_bytes: int) -> tuple[int, int]:
    """Return where the table of an object of `size_bytes` begins and ends; `end` are its last bytes.

    Raises BadRecord if that is no end of an object of ours.
    """
    if len(end) < _TRAILER.size:
        raise BadRecord(f"an object of {size_bytes} bytes has no trailer")
    magic, form, entry_bytes, count, offset, _ = _TRAILER.unpack(end[-_TRAILER.size :])
    ends = size_bytes - _TRAILER.size
    if (magic, form, entry_bytes) != (_MAGIC, _FORMAT, _ENTRY.size):
        raise BadRecord("an object's trailer is damaged, or of another format")
    if count > BLOCKS_MAX or offset + count * _ENTRY.size != ends:
        raise BadRecord(f"an object's trailer names {count} blocks at {offset}, which {size_bytes} bytes can't hold")
    return offset, ends


def read_table(entries: memoryview, trailer: memoryview, starts: int) -> Table:
    """Return a table that begins at `starts`; BadRecord if its bytes or what they say are wrong."""
    *_, expected = _TRAILER.unpack(trailer)
    if checksum(entries) != expected:
        raise BadRecord("an object's table does not match its checksum")
    table = Table()
    for block_hash, offset, length, generation, expires_s in _ENTRY.iter_unpack(entries):
        if offset + HEADER_BYTES + length > starts or expires_s != expires_s:
            raise BadRecord("an object's table names a record beyond its records, or an end that is no time")
        table.add(block_hash, offset, length, generation, expires_s)
    return table


@dataclass(slots=True)
class Range:
    """One ranged read: bytes `start` to `end` of an object, and which of the wanted records lie there."""

    start: int
    end: int
    members: list[int]


def merged(spans: Sequence[tuple[int, int]]) -> list[Range]:
    """Return ranged reads that cover `spans` (start, end), those that lie close merged; members: positions there."""
    ranges: list[Range] = []
    for at in sorted(range(len(spans)), key=lambda at: spans[at]):
        start, end = spans[at]
        last = ranges[-1] if ranges else None
        if last and start - last.end <= MERGE_GAP_BYTES and max(end, last.end) - last.start <= MERGED_BYTES_MAX:
            last.end = max(last.end, end)
            last.members.append(at)
        else:
            ranges.append(Range(start, end, [at]))
    return ranges
