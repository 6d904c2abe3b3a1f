"""Blocks that prove themselves: a payload is computed from its key, so any wrong byte shows."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.checksum import checksum
from kvstore.clock import ManualClock
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_records import NEVER_S, DiskRead, DiskRecord, DiskWrite
from kvstore.wire import Outcome

MIB = 1 << 20
_PATTERN_BYTES = 1021  # a prime: bytes that land some sectors off differ, too


def hash_of(key: int) -> bytes:
    return hashlib.sha256(key.to_bytes(8, "little")).digest()


def payload_of(key: int, length: int, generation: int = 1) -> bytes:
    pattern = hashlib.shake_128(b"%d/%d" % (key, generation)).digest(_PATTERN_BYTES)
    return (pattern * (length // _PATTERN_BYTES + 1))[:length]


def pages(length: int) -> memoryview:
    """Return page-aligned memory, as the pool's slots are."""
    return memoryview(mmap.mmap(-1, max(length, 1)))[:length]


def aligned(content: bytes) -> memoryview:
    memory = pages(len(content))
    memory[:] = content
    return memory


@dataclass(frozen=True)
class Stored:
    """What a test remembers of a block."""

    key: int
    address: int
    record: DiskRecord

    @property
    def payload(self) -> bytes:
        return payload_of(self.key, self.record.length, self.record.generation)


class Disk:
    """An open tier with one namespace, and short words for what tests do with it."""

    def __init__(self, tier: DiskTier, namespace: int, clock: ManualClock) -> None:
        self.tier = tier
        self.namespace = namespace
        self.clock = clock

    @classmethod
    async def open(
        cls, directory: Path, capacity_bytes: int = 32 * MIB, *, clock: ManualClock | None = None, **settings: object
    ) -> Disk:
        clock = clock or ManualClock()
        tier = await DiskTier.open(directory, capacity_bytes, clock=clock, **settings)  # type: ignore[arg-type]
        return cls(tier, await tier.add_namespace("tenant", b"namespace"), clock)

    def record(
        self, key: int, length: int, *, generation: int = 1, epoch: int = 0, expires_s: float = NEVER_S
    ) -> DiskRecord:
        content = payload_of(key, length, generation)
        return DiskRecord(self.namespace, hash_of(key), length, generation, checksum(content), epoch, expires_s)

    def prepare(self, record: DiskRecord, key: int) -> DiskWrite | None:
        address = self.tier.allocate(record.length)
        if address is None:
            return None
        return DiskWrite(address, record, aligned(payload_of(key, record.length, record.generation)))

    async def store(self, keys: Iterable[int], length: int, *, generation: int = 1) -> list[Stored]:
        """Write blocks; each must become durable."""
        writes: list[DiskWrite] = []
        numbers = list(keys)
        for key in numbers:
            write = self.prepare(self.record(key, length, generation=generation), key)
            assert write is not None, "the tier is full"
            writes.append(write)
        outcomes = await self.tier.write(writes)
        assert set(outcomes) <= {Outcome.DURABLE}, (outcomes, self.tier.usage().state_text)
        return [Stored(key, w.address, w.record) for key, w in zip(numbers, writes, strict=True)]

    async def outcomes(self, blocks: Sequence[Stored]) -> list[Outcome]:
        """Read blocks; those that hit must be exact."""
        reads = [DiskRead(b.address, b.record, pages(b.record.length)) for b in blocks]
        outcomes = await self.tier.read(reads)
        for block, read, outcome in zip(blocks, reads, outcomes, strict=True):
            assert outcome is not Outcome.HIT or bytes(read.destination) == block.payload, f"block {block.key} is wrong"
        return outcomes

    async def check(self, blocks: Sequence[Stored]) -> None:
        """Every block must hit, exact, and the tier must be of one piece."""
        outcomes = await self.outcomes(blocks)
        assert set(outcomes) <= {Outcome.HIT}, outcomes
        assert await self.tier.check_integrity() == []

    def taken(self) -> list[Stored]:
        """Return what the tier knew when it was opened; keys are found by their hashes."""
        columns = self.tier.take_records()
        rows = range(len(columns))
        return [Stored(_KEYS[columns.hashes[row]], columns.addresses[row], columns.record(row)) for row in rows]


_KEYS = {hash_of(key): key for key in range(20_000)}


def size_on_disk(directory: Path) -> int:
    """Return what `du` would say of a directory."""
    total = 0
    for path in [directory, *directory.rglob("*")]:
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
