"""The order of use: in which tier's order a use of blocks counts, and where in it they take their place.

Theory of operation. A use counts in the fastest tier that holds a block. A copy in transit is gone in a moment, so a
use of it counts on ssd. The tail of a prefix is put at its colder side, and a long prompt comes in several requests,
the head first: what continues it is put next to the block before it, on the colder side. So the prompt stands where
its head does, and is evicted from its tail on, however many requests it came in.

Invariants
1. A use puts rows nowhere but in tiers where they are READY.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from kvstore.policy import Policy
from kvstore.table import BlockTable, Tier
from kvstore.tenancy import Tenancy

_fastest_tier = [(residency & -residency).bit_length() - 1 for residency in range(16)].__getitem__


class Behind(NamedTuple):
    """The block that some others continue, in the same namespace.

    `or_last`: where it has been evicted meanwhile these are of no use without it, and go first of all; else they are as
    recent as any.
    """

    tenancy: Tenancy
    block_hash: bytes
    or_last: bool


class Recency:
    """Tells the policies of uses. `unsettled` has all rows with a copy in transit, and others."""

    def __init__(
        self,
        table: BlockTable,
        policies: Mapping[Tier, Policy],
        unsettled: Collection[int],
        is_in_transit: Callable[[int], bool],
    ) -> None:
        self._table = table
        self._policies = policies
        self._unsettled = unsettled
        self._is_in_transit = is_in_transit

    def use(self, rows: Sequence[int], now: int, behind: Behind | None) -> None:
        """Note a use of blocks, given coldest first; rows that have gone meanwhile are passed over."""
        tiers = list(map(_fastest_tier, map(self._table.residency.__getitem__, rows)))
        if self._unsettled:
            for at, row in enumerate(rows):
                if row in self._unsettled and tiers[at] == Tier.CPU and self._is_in_transit(row):
                    tiers[at] = Tier.SSD
        fastest = set(tiers)
        for tier, policy in self._policies.items():
            if tier in fastest:
                if len(fastest) == 1:
                    used = rows
                else:
                    used = [row for row, own in zip(rows, tiers, strict=True) if own == tier]
                if tier is Tier.SSD:
                    used = [row for row in used if row in policy]  # dropped there since it was loaded
                policy.use_many(used, now)
                if behind is not None and used:
                    self.put_behind(tier, used, behind)

    def put_behind(self, tier: Tier, rows: Sequence[int], behind: Behind) -> None:
        """Put rows of one namespace, just used or admitted and given coldest first, where they belong in a tier."""
        policy = self._policies[tier]
        row = behind.tenancy.rows.get(behind.block_hash)
        if row is not None and row in policy:
            policy.put_behind(rows, row)
        elif behind.or_last:
            policy.put_behind(rows, None)
