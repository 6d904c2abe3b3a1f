"""How a block lies in its slot: the payload first, the header at the very end.

    | payload, whole sectors            | tail: rest of the payload, zeros, header |
    0                        body_bytes(length)                       slot_bytes(length)

The body goes straight between file and shared memory; the tail, one sector or two, goes through a small
buffer of its own as a second iovec, so nothing beside the payload is ever read from or written to a client's
memory.

Invariants
1. A slot's size is a function of the payload's length alone, and a multiple of SECTOR_BYTES.
2. A header is a function of the directory, the address and the record: a reader compares it whole, byte by
   byte, so a block of another directory, address, key, generation or epoch is never taken for the one
   expected.
"""

from __future__ import annotations

import struct

import xxhash

from kvstore.tiers.disk_records import DiskRecord

SECTOR_BYTES = 4096
TAIL_BYTES_MAX = 2 * SECTOR_BYTES
MAGIC = b"KVsl"
HEADER_FORMAT = 1

# magic, format, header bytes, directory id, address, block hash, namespace number, length, generation, checksum, epoch
_FIELDS = struct.Struct("<4sHH16sQ32sIIQQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size


def slot_bytes(length: int) -> int:
    """Return the size of the slot that a payload of `length` bytes takes with its header."""
    return -(-(length + HEADER_BYTES) // SECTOR_BYTES) * SECTOR_BYTES


def body_bytes(length: int) -> int:
    """Return how many bytes of the payload are whole sectors."""
    return length // SECTOR_BYTES * SECTOR_BYTES


def header(directory_id: bytes, address: int, record: DiskRecord) -> bytes:
    """Return the header of a block."""
    fields = _FIELDS.pack(
        MAGIC,
        HEADER_FORMAT,
        HEADER_BYTES,
        directory_id,
        address,
        record.hash,
        record.namespace,
        record.length,
        record.generation,
        record.checksum,
        record.epoch,
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
