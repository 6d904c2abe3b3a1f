"""What the ssd tier is told and tells: records, reads and writes, columns and figures; values only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from kvstore.checksum import NOT_COMPUTED

NEVER_S = float("inf")
DiskState = Literal["ready", "degraded"]


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """All that is known of a block on disk besides where it lies.

    Parameters
    ----------
    namespace : int
        The number that `DiskTier.add_namespace` gave.
    hash : bytes
        The block hash, 32 bytes.
    length : int
        Bytes of payload.
    generation, epoch : int
        As the catalog counts them.
    checksum : int
        Of the payload. NOT_COMPUTED: the tier computes it while writing.
    expires_s : float
        On the boottime clock of the running kernel; NEVER_S if it never expires; below zero if it slides.
    """

    namespace: int
    hash: bytes
    length: int
    generation: int
    checksum: int = NOT_COMPUTED
    epoch: int = 0
    expires_s: float = NEVER_S


@dataclass(slots=True)
class DiskWrite:
    """A block to write to an allocated slot. After the write `record` names the checksum that is on disk."""

    address: int
    record: DiskRecord
    payload: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class DiskRead:
    """A block to read: what `address` is expected to hold, and where its `record.length` bytes go."""

    address: int
    record: DiskRecord
    destination: memoryview = field(repr=False)


@dataclass(slots=True)
class Columns:
    """Live records as parallel columns, coldest first: a million rows are no million objects."""

    namespaces: array[int] = field(default_factory=lambda: array("I"))
    hashes: list[bytes] = field(default_factory=list[bytes])
    addresses: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    generations: array[int] = field(default_factory=lambda: array("Q"))
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    epochs: array[int] = field(default_factory=lambda: array("Q"))
    expiries_s: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.hashes)

    def extend(self, more: Columns) -> None:
        """Append the rows of other columns."""
        self.namespaces.extend(more.namespaces)
        self.hashes.extend(more.hashes)
        self.addresses.extend(more.addresses)
        self.lengths.extend(more.lengths)
        self.generations.extend(more.generations)
        self.checksums.extend(more.checksums)
        self.epochs.extend(more.epochs)
        self.expiries_s.extend(more.expiries_s)

    def select(self, rows: Sequence[int]) -> Columns:
        """Return some rows, in this order."""
        if len(rows) < 2:  # itemgetter of one index gives no tuple
            pick: Callable[[Any], Any] = lambda column: [column[row] for row in rows]  # noqa: E731
        else:
            pick = itemgetter(*rows)
        return Columns(
            namespaces=array("I", pick(self.namespaces)),
            hashes=list(pick(self.hashes)),
            addresses=array("Q", pick(self.addresses)),
            lengths=array("I", pick(self.lengths)),
            generations=array("Q", pick(self.generations)),
            checksums=array("Q", pick(self.checksums)),
            epochs=array("Q", pick(self.epochs)),
            expiries_s=array("d", pick(self.expiries_s)),
        )

    def record(self, row: int) -> DiskRecord:
        """Return one row as a record."""
        return DiskRecord(
            namespace=self.namespaces[row],
            hash=self.hashes[row],
            length=self.lengths[row],
            generation=self.generations[row],
            checksum=self.checksums[row],
            epoch=self.epochs[row],
            expires_s=self.expiries_s[row],
        )


@dataclass(frozen=True, slots=True)
class DiskNamespace:
    """A namespace as the directory knows it: `encoded` canonically; `ttl_s` 0 means the daemon's default."""

    number: int
    tenant: str
    encoded: bytes
    epoch: int = 0
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DiskPin:
    """An operator's pin on a block; `ends_s` is on the boottime clock."""

    namespace: int
    hash: bytes
    ends_s: float


@dataclass(frozen=True, slots=True)
class SegmentUsage:
    """One segment: its number, the size of its slots, how many there are and how many are taken."""

    segment: int
    slot_bytes: int
    slots: int
    used_slots: int


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Figures of the tier, exact at the moment of the call.

    `capacity_bytes` bounds all files together; `data_capacity_bytes` is what of it slots may take beside the index as
    it is planned now. `used_bytes` counts whole slots: live, being written, being deleted and quarantined ones.
    `free_slots` is by slot size and counts existing segments only; `DiskTier.free_slots` also counts what could be
    made. `records_lost` were dropped at open because their bytes were gone.
    """

    capacity_bytes: int
    data_capacity_bytes: int
    used_bytes: int
    live_blocks: int
    quarantined_bytes: int
    free_slots: dict[int, int]
    segments: int
    segment_bytes: int
    index_bytes: int
    file_bytes: int
    write_queue_bytes: int
    io_errors: int
    checksum_failures: int
    records_lost: int
    state: DiskState
    state_text: str
    direct_io: bool
    io_mode: str
