"""The recency file: addresses from coldest to hottest, as of the last checkpoint.

Recency is a hint. A file that is missing, cut off or damaged costs the order and nothing else, and addresses
that hold another block by now, or none, are harmless: the index alone says what exists.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
from array import array
from pathlib import Path

import xxhash

from kvstore.tiers.disk_records import Columns

NAME = "recency"
_TEMPORARY = "recency.tmp"
BYTES_PER_BLOCK = 16  # the file and, for a moment, its successor beside it
_HEAD = struct.Struct("<8sQQ")  # magic, count, xxh3-64 of the addresses
_MAGIC = b"KVrecen1"
assert sys.byteorder == "little", "files of the ssd tier are little-endian and read without conversion"


def write(directory: Path, addresses_coldest_first: array[int]) -> None:
    """Replace the file, so that a crash at any moment leaves the old one or the new one."""
    content = memoryview(addresses_coldest_first).cast("B")
    remove_leftover(directory)
    temporary = directory / _TEMPORARY
    with temporary.open("xb") as file:
        file.write(_HEAD.pack(_MAGIC, len(addresses_coldest_first), xxhash.xxh3_64_intdigest(content)))
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / NAME)
    sync_directory(directory)


def remove_leftover(directory: Path) -> None:
    """Remove what a write that was cut short has left; other files in the directory are nobody's business."""
    (directory / _TEMPORARY).unlink(missing_ok=True)


def read(directory: Path) -> array[int]:
    """Return the addresses of the last checkpoint, coldest first; none if there is no valid file."""
    addresses = array("Q")
    try:
        fd = os.open(directory / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return addresses
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return addresses
        raw = file.read()
    if len(raw) < _HEAD.size:
        return addresses
    magic, count, check = _HEAD.unpack_from(raw)
    content = memoryview(raw)[_HEAD.size :]
    if magic == _MAGIC and len(content) == count * 8 and xxhash.xxh3_64_intdigest(content) == check:
        addresses.frombytes(content)
    return addresses


def in_order(columns: Columns, coldest_first: array[int]) -> Columns:
    """Return the columns coldest first: in the checkpoint's order, then what was written after it by generation."""
    row_of = dict(zip(columns.addresses, range(len(columns)), strict=True))
    order = [row for address in coldest_first if (row := row_of.pop(address, None)) is not None]
    order += sorted(row_of.values(), key=columns.generations.__getitem__)
    return columns.select(order)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
