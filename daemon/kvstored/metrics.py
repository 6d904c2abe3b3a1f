"""The daemon's Prometheus metrics, made at each scrape from the same report that `kvctl stats` shows.

Invariants
1. Every series is there from the first scrape on, at zero: a tier that is off, a reason that never came up.
2. Label sets are bounded: tiers, causes, reasons and states are fixed; of namespaces and tenants the first
   `NAMED_MAX` have names for as long as the daemon runs, all others share the name "other".
3. A counter never goes back, whatever namespaces come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import kvstore
from kvstore.wire import MISS_REASONS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAMED_MAX = 100
TIERS = ("cpu", "ssd", "remote")
STATES = ("ready", "filling", "starting", "degraded", "off")
CAUSES = ("pressure", "ttl", "drop", "quota")
OTHER = "other"
_REASONS = tuple(outcome.name.lower() for outcome in MISS_REASONS)
_LABEL_CHARS_MAX = 64

Report = Mapping[str, Any]

# Key of the report, and what it says.
_TIER_GAUGES = {
    "capacity_bytes": "Bytes the tier can hold now",
    "capacity_target_bytes": "Bytes the tier will hold once it is filled in",
    "used_bytes": "Bytes in slots that hold blocks",
    "reserved_bytes": "Bytes in slots granted to writers or loads",
    "quarantined_bytes": "Bytes in slots that a client or a device may still touch",
    "free_bytes": "Bytes in no slot",
    "pinned_bytes": "Bytes that leases and pins keep from eviction",
    "blocks": "Blocks in the tier",
    "loads_in_flight": "Blocks on their way to memory",
    "durable_blocks": "Blocks whose index entry is on disk",
    "write_queue_bytes": "Bytes waiting to be written",
    "file_bytes": "Bytes of all files of the tier, which its capacity bounds",
    "index_bytes": "Bytes of the index",
    "segments": "Segment files",
}
_TIER_COUNTERS = {
    "hits": "Blocks found in the tier",
    "bytes_in": "Bytes written to the tier",
    "bytes_out": "Bytes read from the tier",
    "promotions": "Blocks copied to this tier from a slower one",
    "demotions": "Blocks copied to this tier from a faster one",
    "demotions_dropped": "Blocks not written to a slower tier, which could not keep up",
    "checksum_failures": "Blocks whose bytes did not match their checksum",
    "io_errors": "Reads and writes that failed",
}
_TOTALS = {
    "queried_blocks": "Blocks asked for by lookup or fetch",
    "stored_blocks": "Blocks sealed",
    "present_blocks": "Blocks that a writer found already there",
    "busy_blocks": "Blocks that a writer found being written",
    "delivered_blocks": "Blocks handed to readers",
    "bytes_in": "Bytes written by clients",
    "bytes_out": "Bytes read by clients",
}
_SESSIONS = {
    "open": ("sessions", "Connections"),
    "leases": ("leases", "Leases held"),
    "leases_overdue": ("leases_overdue", "Zero-copy leases held past their end"),
    "reservations": ("reservations", "Slots granted and not yet sealed"),
    "quarantined_slots": ("quarantined_slots", "Slots that a client may still write"),
}
_NAMESPACE_COUNTERS = {
    "queried_blocks": "Blocks of the namespace asked for",
    "stored_blocks": "Blocks of the namespace sealed",
    "delivered_blocks": "Blocks of the namespace handed to readers",
}
_QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99", "max": "1"}


class StatsFamilies:
    """Turns stats reports into metric families."""

    def __init__(self, unready: Callable[[], str | None]) -> None:
        self._unready = unready
        self._namespaces = _NamespaceSums()
        self._tenants: set[str] = set()

    def of(self, stats: Report) -> Iterable[Metric]:
        """Yield every family, of one report."""
        yield _gauge("build_info", "What runs here", {"version": kvstore.__version__}, 1)
        yield _gauge("ready", "1 when /readyz says so", {}, 0 if self._unready() else 1)
        yield _gauge("uptime_seconds", "Time since the start", {}, stats.get("uptime_s", 0))
        yield from _tier_families(stats.get("tiers", {}))
        yield from _total_families(stats.get("totals", {}))
        for key, (name, text) in _SESSIONS.items():
            yield _gauge(name, text, {}, stats.get("sessions", {}).get(key, 0))
        for unit in ("blocks", "bytes"):
            yield _gauge(f"pins_{unit}", f"Operator pins, in {unit}", {}, stats.get("pins", {}).get(unit, 0))
        yield from self._tenant_families(stats.get("tenants", []))
        yield from self._namespaces.families(stats)

    def _tenant_families(self, tenants: Iterable[Report]) -> Iterable[Metric]:
        used = GaugeMetricFamily("kvstored_tenant_used_bytes", "Bytes a tenant holds", labels=["tenant", "tier"])
        quota = GaugeMetricFamily(
            "kvstored_tenant_quota_bytes", "Bytes a tenant may hold; 0: no quota", labels=["tenant", "tier"]
        )
        sums: dict[tuple[str, str], list[float]] = {}
        for tenant in tenants:
            name = _bounded(self._tenants, str(tenant.get("tenant", "")))
            for tier in TIERS:
                row = sums.setdefault((name, tier), [0, 0])
                row[0] += tenant.get("used_bytes", {}).get(tier) or 0
                row[1] += tenant.get("quota_bytes", {}).get(tier) or 0
        for labels, (used_bytes, quota_bytes) in sums.items():
            used.add_metric(list(labels), used_bytes)
            quota.add_metric(list(labels), quota_bytes)
        return [used, quota]


class _NamespaceSums:
    """Counters of namespaces, with names for the first ones and one sum for the others."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._last: dict[str, dict[str, int]] = {}
        self._counters: dict[tuple[str, str], dict[str, int]] = {}

    def families(self, stats: Report) -> Iterable[Metric]:
        labels = ["namespace", "model"]
        blocks = GaugeMetricFamily(
            "kvstored_namespace_blocks", "Blocks of the namespace", labels=[*labels, "tier"]
        )
        size = GaugeMetricFamily("kvstored_namespace_bytes", "Bytes of the namespace", labels=[*labels, "tier"])
        held: dict[tuple[str, str, str], list[int]] = {}
        seen: dict[str, dict[str, int]] = {}
        namespaces: list[Report] = stats.get("namespaces", [])
        left_out = int(stats.get("namespaces_left_out", 0))
        for namespace in namespaces:
            digest = str(namespace.get("digest", ""))
            who = self._who(digest, str(namespace.get("model", "")))
            identity = f"{digest}/{namespace.get('tenant', '')}"
            seen[identity] = self._add(who, identity, _namespace_counts(namespace))
            for tier in TIERS:
                row = held.setdefault((*who, tier), [0, 0])
                row[0] += namespace.get("blocks", {}).get(tier, 0)
                row[1] += namespace.get("bytes", {}).get(tier, 0)
        self._last = seen
        if left_out:
            self._sum_left_out(stats, held)
        for place, (block_count, byte_count) in held.items():
            blocks.add_metric(list(place), block_count)
            size.add_metric(list(place), byte_count)
        yield _gauge("namespaces", "Namespaces known", {}, len(namespaces) + left_out)
        yield blocks
        yield size
        for key, text in {**_NAMESPACE_COUNTERS, "hit_blocks": "Blocks of the namespace found"}.items():
            family = CounterMetricFamily(f"kvstored_namespace_{key}", text, labels=labels)
            for who, counts in self._counters.items():
                family.add_metric(list(who), counts[key])
            yield family

    def _who(self, digest: str, model: str) -> tuple[str, str]:
        name = _bounded(self._named, digest[:16])
        return (name, OTHER if name == OTHER else model[:_LABEL_CHARS_MAX])

    def _sum_left_out(self, stats: Report, held: dict[tuple[str, str, str], list[int]]) -> None:
        """Make the sum of the others what the named ones lack of the totals: the report does not list them all."""
        others = (OTHER, OTHER)
        counted = _namespace_counts(stats.get("totals", {}))
        sums = self._counters.setdefault(others, dict.fromkeys(counted, 0))
        for key, total in counted.items():
            named = sum(counts[key] for who, counts in self._counters.items() if who != others)
            sums[key] = max(sums[key], total - named)
        for tier in TIERS:
            used = (tenant.get("used_bytes", {}).get(tier) or 0 for tenant in stats.get("tenants", []))
            for at, total in enumerate((stats.get("tiers", {}).get(tier, {}).get("blocks", 0), sum(used))):
                named = sum(row[at] for (name, _, of), row in held.items() if of == tier and name != OTHER)
                held.setdefault((*others, tier), [0, 0])[at] = max(0, total - named)

    def _add(self, who: tuple[str, str], identity: str, counts: dict[str, int]) -> dict[str, int]:
        last = self._last.get(identity, {})
        sums = self._counters.setdefault(who, dict.fromkeys(counts, 0))
        for key, count in counts.items():
            before = last.get(key, 0)
            # Smaller than before: the namespace was forgotten and came back, counting from zero again.
            sums[key] += count - before if count >= before else count
        return counts


class Exposition:
    """All metrics of this daemon: its report, and the process's own memory, CPU time and descriptors."""

    def __init__(self, stats: Callable[[], Awaitable[Report]], unready: Callable[[], str | None]) -> None:
        self._stats = stats
        self._families = StatsFamilies(unready)
        self._process = ProcessCollector(registry=None)
        self._one_at_a_time = asyncio.Lock()  # a scrape counts on from the one before

    async def text(self) -> bytes:
        """Return them in Prometheus' text format, letting the loop serve others after each family."""
        parts: list[bytes] = []
        async with self._one_at_a_time:
            stats = await self._stats()
            for family in chain(self._families.of(stats), self._process.collect()):
                parts.append(generate_latest(_OneFamily(family)))
                await asyncio.sleep(0)
        return b"".join(parts)


class _OneFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        yield self._family


def _tier_families(tiers: Report) -> Iterable[Metric]:
    rows: dict[str, Report] = {tier: tiers.get(tier, {}) for tier in TIERS}
    for key, text in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvstored_tier_{key}", text, labels=["tier"])
        for tier, row in rows.items():
            gauge.add_metric([tier], row.get(key, 0))
        yield gauge
    for key, text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"kvstored_tier_{key}", text, labels=["tier"])
        for tier, row in rows.items():
            counter.add_metric([tier], row.get(key, 0))
        yield counter
    evictions = CounterMetricFamily(
        "kvstored_tier_evictions", "Blocks that left the tier", labels=["tier", "cause"]
    )
    state = GaugeMetricFamily("kvstored_tier_state", "1 for the state the tier is in", labels=["tier", "state"])
    age = Metric("kvstored_tier_eviction_age_seconds", "Time since the last use, of recent evictions", "summary")
    for tier, row in rows.items():
        for cause in CAUSES:
            evictions.add_metric([tier, cause], row.get("evictions", {}).get(cause, 0))
        for name in STATES:
            state.add_metric([tier, name], 1 if row.get("state", "off") == name else 0)
        ages = row.get("eviction_age_s", {})
        for key, quantile in _QUANTILES.items():
            age.add_sample(age.name, {"tier": tier, "quantile": quantile}, ages.get(key, 0))
        age.add_sample(f"{age.name}_count", {"tier": tier}, ages.get("count", 0))
    yield from (evictions, state, age)


def _total_families(totals: Report) -> Iterable[Metric]:
    for key, text in _TOTALS.items():
        yield CounterMetricFamily(f"kvstored_{key}", text, value=totals.get(key, 0))
    hits = CounterMetricFamily("kvstored_hit_blocks", "Blocks asked for and found", labels=["tier"])
    for tier in TIERS:
        hits.add_metric([tier], totals.get("hit_blocks", {}).get(tier, 0))
    misses = CounterMetricFamily("kvstored_missed_blocks", "Blocks asked for and not found", labels=["reason"])
    for reason in _REASONS:
        misses.add_metric([reason], totals.get("misses", {}).get(reason, 0))
    yield from (hits, misses)


def _namespace_counts(namespace: Report) -> dict[str, int]:
    counts = {key: int(namespace.get(key, 0)) for key in _NAMESPACE_COUNTERS}
    counts["hit_blocks"] = sum(namespace.get("hit_blocks", {}).values())
    return counts


def _bounded(named: set[str], name: str) -> str:
    """Return `name`, shortened, if it is or can still become one of the `named` ones; else the common name."""
    name = name[:_LABEL_CHARS_MAX]
    if name in named:
        return name
    if len(named) >= NAMED_MAX:
        return OTHER
    named.add(name)
    return name


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvstored_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
