"""What is counted, by whom it is read: plain integers that only grow, one owner each.

Invariants
1. Every block that was asked for is counted once as queried, and once as a hit or as a miss with one reason, so
   queried = hits over tiers + misses over reasons.
2. Every evicted copy is counted under one cause.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

from kvstore.table import Tier
from kvstore.wire import MISS_REASONS


class Cause(enum.Enum):
    """Why a copy left a tier."""

    PRESSURE = "pressure"
    TTL = "ttl"
    DROP = "drop"
    QUOTA = "quota"


def _per_cause() -> dict[Cause, int]:
    return dict.fromkeys(Cause, 0)


def miss_reasons() -> dict[str, int]:
    """Return a zero for each reason a miss can have."""
    return {reason.name.lower(): 0 for reason in MISS_REASONS}


class Ages:
    """The most recent ages at eviction, for percentiles."""

    def __init__(self, kept: int = 1024) -> None:
        self.count = 0
        self._recent: deque[float] = deque(maxlen=kept)

    def add(self, age_s: float) -> None:
        self.count += 1
        self._recent.append(age_s)

    def report(self) -> dict[str, float]:
        ordered = sorted(self._recent)
        last = len(ordered) - 1

        def at(share: float) -> float:
            return round(ordered[round(share * last)], 3) if ordered else 0.0

        return {"count": self.count, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0)}


@dataclass(slots=True)
class TierCounters:
    """One tier's."""

    hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    promotions: int = 0
    demotions: int = 0
    demotions_dropped: int = 0
    checksum_failures: int = 0
    io_errors: int = 0
    evictions: dict[Cause, int] = field(default_factory=_per_cause)
    eviction_age: Ages = field(default_factory=Ages)

    def report(self) -> dict[str, object]:
        return {
            "hits": self.hits,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "promotions": self.promotions,
            "demotions": self.demotions,
            "demotions_dropped": self.demotions_dropped,
            "checksum_failures": self.checksum_failures,
            "io_errors": self.io_errors,
            "evictions": {cause.value: count for cause, count in self.evictions.items()},
            "eviction_age_s": self.eviction_age.report(),
        }


@dataclass(slots=True)
class NamespaceCounters:
    """One namespace's. `hit_blocks` counts what lookups and fetches found, `delivered_blocks` what was read."""

    queried_blocks: int = 0
    hit_blocks: Counter[Tier] = field(default_factory=Counter[Tier])
    misses: dict[str, int] = field(default_factory=miss_reasons)
    stored_blocks: int = 0
    present_blocks: int = 0
    busy_blocks: int = 0
    delivered_blocks: int = 0
    evictions: dict[Cause, int] = field(default_factory=_per_cause)

    def add(self, other: NamespaceCounters) -> None:
        """Count what another has counted, too."""
        self.queried_blocks += other.queried_blocks
        self.stored_blocks += other.stored_blocks
        self.present_blocks += other.present_blocks
        self.busy_blocks += other.busy_blocks
        self.delivered_blocks += other.delivered_blocks
        for tier, count in other.hit_blocks.items():
            self.hit_blocks[tier] += count
        for reason, count in other.misses.items():
            if count:
                self.misses[reason] += count
        for cause, count in other.evictions.items():
            if count:
                self.evictions[cause] += count

    @property
    def is_zero(self) -> bool:
        """Whether nothing was looked up or stored: then all else is zero, too."""
        return not (self.queried_blocks or self.stored_blocks or self.present_blocks or self.busy_blocks)

    def report(self, tiers: tuple[Tier, ...]) -> dict[str, object]:
        return {
            "queried_blocks": self.queried_blocks,
            "hit_blocks": {tier.label: self.hit_blocks[tier] for tier in tiers},
            "misses": dict(self.misses),
            "stored_blocks": self.stored_blocks,
            "present_blocks": self.present_blocks,
            "busy_blocks": self.busy_blocks,
            "delivered_blocks": self.delivered_blocks,
            "evictions": {cause.value: count for cause, count in self.evictions.items()},
        }
