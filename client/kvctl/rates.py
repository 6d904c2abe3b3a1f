"""What happened per second between two reports of `stats`. Pure.

Invariant: counters only grow while a daemon runs. Where one shrank the daemon was restarted between the reports and
there is no rate, rather than a negative one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl.reports import NamespaceReport, StatsReport, TierReport, hit_rate


@dataclass(frozen=True, slots=True)
class TierRates:
    """One tier's, per second."""

    bytes_in_per_s: float = 0.0
    bytes_out_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NamespaceRates:
    """One namespace's, per second; `hit_share` is of the interval, None if nothing was queried in it."""

    queried_per_s: float = 0.0
    evicted_per_s: float = 0.0
    hit_share: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """The whole store's, per second, and its parts'. `hit_shares` are per tier, of the queried blocks."""

    elapsed_s: float
    queried_per_s: float
    hit_per_s: float
    stored_per_s: float
    present_per_s: float
    busy_per_s: float
    delivered_per_s: float
    hit_share: float | None
    hit_shares: Mapping[str, float]
    evicted_per_s: Mapping[str, float]
    tiers: Mapping[str, TierRates]
    namespaces: Mapping[str, NamespaceRates]


def between(before: StatsReport, after: StatsReport, elapsed_s: float) -> Rates | None:
    """Return the rates between two reports taken `elapsed_s` apart; None across a restart of the daemon."""
    old, new = before.totals, after.totals
    restarted = after.uptime_s < before.uptime_s or new.queried_blocks < old.queried_blocks
    if elapsed_s <= 0 or restarted:
        return None
    queried = new.queried_blocks - old.queried_blocks
    hits = _difference(old.hit_blocks, new.hit_blocks)
    evicted = _difference(evictions(before), evictions(after))
    return Rates(
        elapsed_s=elapsed_s,
        queried_per_s=queried / elapsed_s,
        hit_per_s=sum(hits.values()) / elapsed_s,
        stored_per_s=(new.stored_blocks - old.stored_blocks) / elapsed_s,
        present_per_s=(new.present_blocks - old.present_blocks) / elapsed_s,
        busy_per_s=(new.busy_blocks - old.busy_blocks) / elapsed_s,
        delivered_per_s=(new.delivered_blocks - old.delivered_blocks) / elapsed_s,
        hit_share=hit_rate(hits, queried),
        hit_shares={tier: count / queried for tier, count in hits.items()} if queried else {},
        evicted_per_s={cause: count / elapsed_s for cause, count in evicted.items()},
        tiers={
            name: _tier_rates(before.tiers.get(name, TierReport()), tier, elapsed_s)
            for name, tier in after.tiers.items()
        },
        namespaces=_namespaces(before, after, elapsed_s),
    )


def evictions(stats: StatsReport) -> dict[str, int]:
    """Return evicted copies by cause, over all tiers."""
    total: dict[str, int] = {}
    for tier in stats.tiers.values():
        for cause, count in tier.evictions.items():
            total[cause] = total.get(cause, 0) + count
    return total


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: max(0, count - before.get(name, 0)) for name, count in after.items()}


def _tier_rates(before: TierReport, after: TierReport, elapsed_s: float) -> TierRates:
    return TierRates(
        max(0, after.bytes_in - before.bytes_in) / elapsed_s, max(0, after.bytes_out - before.bytes_out) / elapsed_s
    )


def _namespaces(before: StatsReport, after: StatsReport, elapsed_s: float) -> dict[str, NamespaceRates]:
    known = {namespace.digest: namespace for namespace in before.namespaces}
    rates: dict[str, NamespaceRates] = {}
    for new in after.namespaces:
        old = known.get(new.digest, NamespaceReport(new.digest))
        queried = max(0, new.queried_blocks - old.queried_blocks)
        evicted = sum(_difference(old.evictions, new.evictions).values())
        rates[new.digest] = NamespaceRates(
            queried / elapsed_s, evicted / elapsed_s, hit_rate(_difference(old.hit_blocks, new.hit_blocks), queried)
        )
    return rates
