"""Namespaces as tenants see them: the unit of visibility, epochs and counting. The catalog owns their fields.

Invariants
1. There is one tenancy for a tenant's namespace, and all slices of a group know each other.
2. What is made for engines is bounded: namespaces in all and a tenant, slices a group, sizes of blocks.
3. A number is given to another namespace only when no block, ticket or connection knows the former one, and with it
   nothing is lost: a life that was set is remembered, and none begins below the epoch of one that was forgotten.
4. A lane is given to another size or tenant only when no namespace, and so no block, stands in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.block import Namespace
from kvstore.counters import NamespaceCounters
from kvstore.errors import Backpressure
from kvstore.table import Tier

NAMESPACES_MAX = 65_536
TENANT_NAMESPACES_MAX = 32_768
IDLE_KEPT = 1024  # so many namespaces keep their counters even if nothing is stored or open of them
SLICES_MAX = 256
LANES_MAX = 1024
TENANT_LANES_MAX = 256
_K = TypeVar("_K")


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
    users: int = 0  # connections that have it open, and work under way
    used_times: int = 0
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

    @property
    def is_idle(self) -> bool:
        """Whether nothing visible is stored of it and nobody has it open."""
        return not self.users and not self.rows and not any(self.blocks.values())

    def begin_use(self) -> None:
        """Keep it from being forgotten until `end_use`."""
        self.users += 1
        self.used_times += 1

    def end_use(self) -> None:
        """Undo one `begin_use`."""
        assert self.users > 0
        self.users -= 1


class Tenancies:
    """All of them. `by_number` has forgotten ones, too, until their numbers are given to others."""

    def __init__(self, tiers: tuple[Tier, ...]) -> None:
        self.by_number: list[Tenancy] = []
        self.lanes: list[tuple[int, str, Tier]] = []  # lane -> slot size, tenant, tier; empty ones as they were last
        self.epoch_floor = 0
        self.forgotten: dict[str, NamespaceCounters] = {}  # what was counted of forgotten ones, by tenant
        self._tiers = tiers
        self._by_identity: dict[tuple[str, bytes], Tenancy] = {}
        self._by_digest: dict[bytes, list[Tenancy]] = {}
        self._groups: dict[tuple[str, bytes], list[Tenancy]] = {}
        self._lane_numbers: dict[tuple[int, str, Tier], int] = {}
        self._lane_namespaces: list[int] = []  # how many stand in each lane
        self._free_lanes: list[int] = []
        self._tenant_namespaces: dict[str, int] = {}
        self._tenant_lanes: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._remembered: dict[tuple[str, bytes], tuple[float, int | None]] = {}  # life, number on disk

    def __len__(self) -> int:
        return len(self._by_identity)

    def known(self) -> list[Tenancy]:
        """Return those that are not forgotten, the oldest first."""
        return list(self._by_identity.values())

    def find(self, tenant: str, digest: bytes) -> Tenancy | None:
        return self._by_identity.get((tenant, digest))

    def named(self, digest: bytes) -> list[Tenancy]:
        """Return those of a namespace, one a tenant that has it."""
        return list(self._by_digest.get(digest, ()))

    def check_room(self, tenant: str, namespace: Namespace, slots: Mapping[Tier, int]) -> None:
        """Raise Backpressure if one more would be over a limit. What a restart finds is exempt."""
        if self.find(tenant, namespace.digest) is not None:
            return
        if len(self) >= NAMESPACES_MAX or self._tenant_namespaces.get(tenant, 0) >= TENANT_NAMESPACES_MAX:
            raise Backpressure(
                f"{len(self)} namespaces are known, {self._tenant_namespaces.get(tenant, 0)} of them this tenant's; "
                f"there may be {NAMESPACES_MAX} and {TENANT_NAMESPACES_MAX}: use fewer salts or adapters, close "
                "connections that use others, or drop namespaces; empty ones that nobody uses are forgotten soon"
            )
        if len(self._groups.get((tenant, namespace.group_digest), ())) >= SLICES_MAX:
            raise Backpressure(
                f"this namespace's group has {SLICES_MAX} slices, as many as it may: give each rank one slice of "
                "layers and heads; empty ones that nobody uses are forgotten in time"
            )
        new = sum((slots[tier], tenant, tier) not in self._lane_numbers for tier in self._tiers)
        own = self._tenant_lanes.get(tenant, 0)
        used = len(self._lane_numbers)
        if new and (used + new > LANES_MAX or own + new > TENANT_LANES_MAX):
            raise Backpressure(
                f"blocks have {used} sizes by tenant and tier, {own} of them this tenant's; there may be {LANES_MAX} "
                f"and {TENANT_LANES_MAX}: use few block sizes; those of empty namespaces that nobody uses become free "
                "soon"
            )

    @property
    def lanes_are_scarce(self) -> bool:
        """Whether so many lanes are taken, in all or by one tenant, that empty namespaces should not keep theirs."""
        own = max(self._tenant_lanes.values(), default=0)
        return len(self._lane_numbers) > LANES_MAX // 2 or own > TENANT_LANES_MAX // 2

    def tenancy(self, tenant: str, namespace: Namespace, slots: Mapping[Tier, int], ttl_s: float = 0.0) -> Tenancy:
        """Return the one of a tenant's namespace, made at first use; `slots`: what a block takes in each tier."""
        identity = (tenant, namespace.digest)
        found = self._by_identity.get(identity)
        if found is not None:
            return found
        siblings = self._groups.setdefault((tenant, namespace.group_digest), [])
        lanes = {tier: self._lane(slots[tier], tenant, tier) for tier in self._tiers}
        number = self._free_numbers.pop() if self._free_numbers else len(self.by_number)
        made = Tenancy(number, tenant, namespace, slots, lanes, siblings, epoch=self.epoch_floor, ttl_s=ttl_s)
        made.blocks = dict.fromkeys(self._tiers, 0)
        if identity in self._remembered:
            made.ttl_s, made.disk_number = self._remembered.pop(identity)
        if number < len(self.by_number):
            self.by_number[number] = made
        else:
            self.by_number.append(made)
        siblings.append(made)
        self._by_identity[identity] = made
        self._by_digest.setdefault(namespace.digest, []).append(made)
        self._tenant_namespaces[tenant] = self._tenant_namespaces.get(tenant, 0) + 1
        return made

    def forget(self, idle: Iterable[Tenancy], named: Collection[int], usual_ttl_s: float) -> tuple[int, list[int]]:
        """Forget those that are idle and whose number is not among `named`.

        `named` must hold the numbers of all that rows of the table, tickets and waiters belong to. `usual_ttl_s` is the
        life that need not be remembered. Returns how many were forgotten, and the numbers that the ssd tier knows those
        by of which nothing has to be remembered.
        """
        count, disk_numbers = 0, list[int]()
        for tenancy in idle:
            identity = (tenancy.tenant, tenancy.namespace.digest)
            if not tenancy.is_idle or tenancy.number in named or self._by_identity.get(identity) is not tenancy:
                continue
            self.epoch_floor = max(self.epoch_floor, tenancy.epoch)
            if tenancy.ttl_s != usual_ttl_s:
                self._remembered[identity] = (tenancy.ttl_s, tenancy.disk_number)
            elif tenancy.disk_number is not None:
                disk_numbers.append(tenancy.disk_number)
            for lane in tenancy.lanes.values():
                self._leave_lane(lane)
            self.forgotten.setdefault(tenancy.tenant, NamespaceCounters()).add(tenancy.counters)
            del self._by_identity[identity]
            _remove(self._by_digest, tenancy.namespace.digest, tenancy)
            _remove(self._groups, (tenancy.tenant, tenancy.namespace.group_digest), tenancy)
            self._tenant_namespaces[tenancy.tenant] -= 1
            self._free_numbers.append(tenancy.number)
            count += 1
        return count, disk_numbers

    def _lane(self, slot_bytes: int, tenant: str, tier: Tier) -> int:
        key = (slot_bytes, tenant, tier)
        if key not in self._lane_numbers:
            self._tenant_lanes[tenant] = self._tenant_lanes.get(tenant, 0) + 1
            if self._free_lanes:
                self._lane_numbers[key] = self._free_lanes.pop()
                self.lanes[self._lane_numbers[key]] = key
            else:
                self._lane_numbers[key] = len(self.lanes)
                self.lanes.append(key)
                self._lane_namespaces.append(0)
        self._lane_namespaces[self._lane_numbers[key]] += 1
        return self._lane_numbers[key]

    def _leave_lane(self, lane: int) -> None:
        self._lane_namespaces[lane] -= 1
        if not self._lane_namespaces[lane]:
            del self._lane_numbers[self.lanes[lane]]
            tenant = self.lanes[lane][1]
            self._tenant_lanes[tenant] -= 1
            self._free_lanes.append(lane)


def _remove(lists: dict[_K, list[Tenancy]], key: _K, tenancy: Tenancy) -> None:
    lists[key].remove(tenancy)
    if not lists[key]:
        del lists[key]
