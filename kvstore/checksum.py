"""The one checksum of this project: xxh3-64 over a block's bytes.

It guards against torn writes, bit rot and our own bugs, not against an adversary. xxhash releases the GIL and runs at
about 0.6 of a memcpy. Zero stands for "not computed yet" in records, so a true zero is folded to one.
"""

from __future__ import annotations

import xxhash

NOT_COMPUTED = 0


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """Return the checksum of `payload` as a non-zero unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(payload) or 1
