"""A namespace as one tenant sees it: the unit of visibility, epochs and counting. The catalog owns its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.block import Namespace
from kvstore.counters import NamespaceCounters
from kvstore.table import Tier


@dataclass(eq=False, slots=True)
class Tenancy:
    """What is known of a tenant's namespace.

    `rows` is what is visible of it. `siblings` are all slices of its group, itself included: they are evicted together.
    `disk_number` is what the ssd tier knows it by, once it does.
    """

    number: int
    tenant: str
    namespace: Namespace
    slots: Mapping[Tier, int]  # bytes that one of its blocks takes in each tier
    lanes: dict[Tier, int]
    siblings: list[Tenancy]
    epoch: int = 0
    ttl_s: float = 0.0
    any_expire: bool = False  # whether a block of it ever had an end: if not, nobody need look
    disk_number: int | None = None
    rows: dict[bytes, int] = field(default_factory=dict[bytes, int])
    blocks: dict[Tier, int] = field(default_factory=dict[Tier, int])
    counters: NamespaceCounters = field(default_factory=NamespaceCounters)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one of its blocks takes in the cpu tier."""
        return self.slots[Tier.CPU]

    @property
    def block_bytes(self) -> int:
        return self.namespace.block_bytes
