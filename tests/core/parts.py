"""The core's parts put together without a store: a real pool of a few MiB, a clock that stands still, no ssd tier."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from kvstore.block import Component, Namespace, Slice
from kvstore.catalog import Catalog
from kvstore.clock import ManualClock
from kvstore.lease import Leases, Session
from kvstore.lifecycle import Copy, Put
from kvstore.policy import POLICIES
from kvstore.puts import PutLimits, Puts, Ticket
from kvstore.recency import Behind
from kvstore.room import Room
from kvstore.table import NO_SLOT, Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.slab import Slab
from kvstore.wire import Outcome

MIB = 1 << 20
BLOCK_BYTES = 256 << 10
RESERVATION_S = 10.0


def hash_of(key: int) -> bytes:
    """Return the hash of a numbered block."""
    return hashlib.sha256(key.to_bytes(8, "little")).digest()


def hashes_of(keys: Sequence[int]) -> list[bytes]:
    """Return the hashes of numbered blocks."""
    return [hash_of(key) for key in keys]


def flat_namespace(block_bytes: int = BLOCK_BYTES, salt: bytes = b"") -> Namespace:
    """Return a namespace of plain bytes."""
    return Namespace(
        model="test",
        revision="1",
        dtype="uint8",
        components=(Component("kv", "uint8", ("dim",), (block_bytes,)),),
        block_tokens=16,
        slice=Slice((0, 1), (0, 1)),
        salt=salt,
    )


def sliced_namespace(head: int, heads: int = 4, slice_bytes: int = BLOCK_BYTES) -> Namespace:
    """Return the namespace of the rank that holds one head of a model with some."""
    return Namespace(
        model="sliced",
        revision="1",
        dtype="uint8",
        components=(Component("kv", "uint8", ("head", "dim"), (heads, slice_bytes)),),
        block_tokens=16,
        slice=Slice((0, 1), (head, head + 1)),
    )


@dataclass
class Core:
    """See the module's docstring. `used` lists the rows of each use that was noted."""

    clock: ManualClock
    memory: MemoryTier
    catalog: Catalog
    room: Room
    leases: Leases
    puts: Puts
    used: list[Sequence[int]]
    sessions: int = 0

    def session(self, tenant: str = "") -> Session:
        self.sessions += 1
        return Session(self.sessions, tenant, admin=False)

    def tenancy(self, namespace: Namespace | None = None, tenant: str = "", ttl_s: float = 0.0) -> Tenancy:
        namespace = namespace or flat_namespace()
        slots = dict.fromkeys(self.catalog.tiers, Slab.slot_bytes_for(namespace.block_bytes))
        found = self.catalog.tenancy(tenant, namespace, slots)
        found.ttl_s = ttl_s
        return found

    def now_s(self) -> float:
        return self.clock.monotonic_s()

    def reserve(self, session: Session, tenancy: Tenancy, keys: Sequence[int]) -> tuple[Ticket, list[Outcome]]:
        ticket, outcomes = self.puts.reserve(session, tenancy, hashes_of(keys), self.now_s())
        return ticket, [Outcome(outcome) for outcome in outcomes]

    def store(self, tenancy: Tenancy, keys: Sequence[int], session: Session | None = None) -> list[int]:
        """Reserve and seal blocks; return the rows of those that are new."""
        ticket, _ = self.reserve(session or self.session(tenancy.tenant), tenancy, keys)
        return self.puts.seal(ticket, None, (), None).rows

    def seal(self, ticket: Ticket, which: Sequence[int] | None = None) -> list[Outcome]:
        return [Outcome(outcome) for outcome in self.puts.seal(ticket, which, (), None).outcomes]

    def copy_to_ssd(self, row: int, slot: int) -> None:
        """Let a block have a copy on ssd, in a slot of this number."""
        self.catalog.hold(row)
        self.catalog.fill(row, Tier.SSD, slot)
        self.catalog.filled(row, Tier.SSD)
        self.catalog.unhold(row)

    def delete_departed(self) -> list[int]:
        """Do what the ssd tier does with what has left it; return the slots that are free now."""
        departed = self.catalog.departed
        return [self.catalog.gone(departed.popleft()) for _ in range(len(departed))]

    def keys_of(self, tenancy: Tenancy, keys: Sequence[int]) -> list[int]:
        """Return those of `keys` whose blocks can be found."""
        return [key for key in keys if self.catalog.find(tenancy, hash_of(key)) is not None]

    def check_integrity(self, tickets: Sequence[Ticket] = ()) -> None:
        """Check every part, and that each used byte of the pool belongs to a row or to a ticket given here."""
        self.memory.check_integrity()
        self.catalog.check_integrity()
        self.leases.check_integrity()
        self.puts.check_integrity()
        for policy in self.catalog.policies.values():
            policy.check_integrity()
        table = self.catalog.table
        rows = [row for row in table.rows() if table.state[Tier.CPU][row] != Copy.ABSENT]
        owned = [table.slot[Tier.CPU][row] for row in rows]
        assert NO_SLOT not in owned
        writing = [t.offsets[at] for t in tickets for at in t.positions(Put.OPEN, Put.OVERDUE)]
        assert len({*owned, *writing}) == len(owned) + len(writing), "a slot has two owners"
        used = sum(map(self.catalog.slot_bytes, rows))
        used += sum(t.tenancy.slot_bytes * len(t.positions(Put.OPEN, Put.OVERDUE)) for t in tickets)
        assert self.memory.used_bytes == used


@contextlib.contextmanager
def core(
    size_bytes: int = 8 * MIB,
    *,
    eviction: str = "lru",
    with_ssd: bool = False,
    pinned_bytes_max: int | None = None,
    quotas: Mapping[str, int] | None = None,
    limits: PutLimits | None = None,
    sliding: bool = False,
) -> Generator[Core, None, None]:
    """Give the parts around a populated pool; checked and closed afterwards."""
    clock = ManualClock()
    memory = MemoryTier(size_bytes, huge_pages="off")
    try:
        memory.populate_blocking(0, memory.size_bytes)
        memory.add_populated(memory.size_bytes)
        tiers = (Tier.CPU, Tier.SSD) if with_ssd else (Tier.CPU,)
        catalog = Catalog(
            {tier: POLICIES[eviction]() for tier in tiers},
            lambda tier, offset: memory.free(offset),
            clock.boottime_s,
            memory.is_transit,
            sliding=sliding,
        )
        room = Room(catalog, memory, quotas or {})
        grantable = memory.grantable_bytes()
        leases = Leases(catalog, grantable // 2 if pinned_bytes_max is None else pinned_bytes_max)
        used: list[Sequence[int]] = []

        def note_use(rows: Sequence[int], behind: Behind | None) -> None:
            if rows:
                used.append(rows)
                catalog.use(rows, behind)

        limits = limits or PutLimits(grantable, grantable, RESERVATION_S)
        yield Core(clock, memory, catalog, room, leases, Puts(catalog, memory, room, limits, note_use), used)
        memory.check_integrity()
        catalog.check_integrity()
    finally:
        memory.close()
