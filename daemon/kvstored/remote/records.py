"""A block as every remote store keeps it: a header, then the payload.

    | magic, format, header bytes | hash | scope | namespace | epoch | generation | length | written | expires |
    | payload's checksum | check |  payload ...

The scope is SHA-256 over tenant and namespace, so no store is told a tenant's name. `written` and `expires` are wall
time in seconds. The payload's checksum is the one that goes with the block in every tier; `check` is xxh3-64 over
all fields before it, so the two together cover header and payload with one pass over the bytes.

Invariants
1. A reader compares hash, scope, epoch and length with what it asked for: a record that is whole but another one's is
   never taken for the one expected.
2. The life that is left is at most the life that was given: a wall clock that was set back lengthens nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import xxhash

from kvstore.checksum import NOT_COMPUTED, checksum
from kvstore.errors import BadRecord, ChecksumMismatch
from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteScope, RemoteWrite

MAGIC = b"KVrm"
RECORD_FORMAT = 1
_NO_END = 0.0

_FIELDS = struct.Struct("<4sHH32s32s32sQQQddQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself, known to be as it was written."""

    hash: bytes
    scope: bytes
    namespace: bytes
    epoch: int
    generation: int
    length: int
    written_s: float
    expires_s: float  # NEVER_S: no end
    checksum: int

    def life_s(self, now_s: float) -> float:
        """Return how long the block may still live."""
        return life_left_s(self.written_s, self.expires_s, now_s)


def life_left_s(written_s: float, expires_s: float, now_s: float) -> float:
    """Return how long what expires then may still live, by a wall clock that may have been set back."""
    if expires_s == NEVER_S:
        return NEVER_S
    return min(expires_s - now_s, expires_s - written_s)


def scope_id(scope: RemoteScope) -> bytes:
    """Return the 32 bytes that stand for a scope in names and records."""
    tenant = scope.tenant.encode()
    return hashlib.sha256(struct.pack("<I", len(tenant)) + tenant + scope.namespace).digest()


def pack_header(scope: RemoteScope, scope_key: bytes, epoch: int, write: RemoteWrite, now_s: float) -> bytes:
    """Return the header of a block that is written now; its checksum is computed if it has none."""
    sum_ = write.checksum if write.checksum != NOT_COMPUTED else checksum(write.payload)
    fields = _FIELDS.pack(
        MAGIC, RECORD_FORMAT, HEADER_BYTES, write.hash, scope_key, scope.namespace, epoch, write.generation,
        len(write.payload), now_s, _NO_END if write.life_s == NEVER_S else now_s + write.life_s, sum_,
    )  # fmt: skip
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def read_header(raw: bytes | memoryview) -> Header:
    """Return the header at the start of `raw`; BadRecord if it is none, is cut off or was changed."""
    if len(raw) < HEADER_BYTES:
        raise BadRecord(f"a record is cut off: {len(raw)} bytes, its header alone has {HEADER_BYTES}")
    fields = bytes(raw[: _FIELDS.size])
    (check,) = _CHECK.unpack(raw[_FIELDS.size : HEADER_BYTES])
    if xxhash.xxh3_64_intdigest(fields) != check:
        raise ChecksumMismatch("a record's header does not match its checksum")
    magic, form, size, hash_, scope, namespace, epoch, generation, length, written_s, expires_s, sum_ = _FIELDS.unpack(
        fields
    )
    if (magic, form, size) != (MAGIC, RECORD_FORMAT, HEADER_BYTES):
        raise BadRecord(f"a record of format {form} is there; this daemon reads format {RECORD_FORMAT}")
    if not (math.isfinite(written_s) and math.isfinite(expires_s)):
        raise BadRecord("a record's times are no numbers")
    ends_s = NEVER_S if expires_s == _NO_END else expires_s
    return Header(hash_, scope, namespace, epoch, generation, length, written_s, ends_s, sum_)


def checked(raw: memoryview, hash_: bytes, scope_key: bytes, epoch: int, length: int) -> tuple[Header, memoryview]:
    """Return header and payload of the record that `raw` begins with, if it is the one expected and whole.

    Raises
    ------
    BadRecord, ChecksumMismatch
        It is another record, is cut off, or its bytes are not what was written.
    """
    header = read_header(raw)
    if (header.hash, header.scope, header.epoch) != (hash_, scope_key, epoch):
        raise BadRecord("another block's record lies where this one should be")
    if header.length != length:
        raise BadRecord(f"the record has a payload of {header.length} bytes; a block of its namespace has {length}")
    payload = raw[HEADER_BYTES : HEADER_BYTES + length]
    if len(payload) != length:
        raise BadRecord(f"a record is cut off: {len(payload)} bytes of its payload of {length}")
    if checksum(payload) != header.checksum:
        raise ChecksumMismatch("a block's bytes do not match the checksum in their record")
    return header, payload
