"""What kvctl says of a daemon that only answers: text from reports. Pure but for the terminal's width and colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvctl.naming import SHORT_DIGEST, labels
from kvctl.printing import Output, count, counted, duration, percent, plain, size
from kvctl.reports import (
    BlockReport,
    CheckReport,
    KeysReport,
    NamespaceReport,
    StatsReport,
    StatusReport,
    TenantReport,
    TierReport,
    hit_rate,
)
from kvstore.units import describe_size

_BLOCK_HEADERS = ("HASH", "TIERS", "IDLE", "TTL", "PINNED", "SIZE")


def status(output: Output, report: StatusReport) -> str:
    """Return what the daemon is and how it was started."""
    ready = "" if report.ready_fraction >= 1 else f", {percent(report.ready_fraction)} of the cpu tier's memory there"
    pairs = [
        ("state", f"{report.state}{ready}"),
        ("version", report.version),
        ("uptime", duration(report.uptime_s)),
        ("pid", str(report.pid)),
        ("boot", report.boot_id),
        ("socket", plain(report.socket)),
        ("http", report.http or "off"),
        ("tiers", ", ".join(report.tiers)),
        ("mode", report.mode),
        ("your role", report.role),
        ("eviction", report.eviction),
        ("write policy", report.write_policy),
        ("default ttl", duration(report.ttl_s or None)),
        ("huge pages", report.huge_pages),
    ]
    pairs += [(f"ssd {name.replace('_', ' ')}", plain(_word(value))) for name, value in (report.ssd or {}).items()]
    return _pairs(output, pairs)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _pairs(output: Output, pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{output.heading(name.ljust(width))}  {value}" for name, value in pairs)


def tiers(output: Output, report: StatsReport) -> str:
    """Return one line a tier: how full, how healthy."""
    rows = [
        [
            name,
            tier.state,
            size(tier.capacity_bytes),
            size(tier.used_bytes),
            percent(tier.use),
            size(tier.pinned_bytes),
            count(tier.blocks),
            count(tier.hits),
            count(sum(tier.evictions.values())),
        ]
        for name, tier in report.tiers.items()
    ]
    headers = ["TIER", "STATE", "CAPACITY", "USED", "USE", "PINNED", "BLOCKS", "HITS", "EVICTED"]
    troubles = [
        output.alarming(f"{name} is {tier.state}: {plain(tier.state_text)}")
        for name, tier in report.tiers.items()
        if tier.state_text and tier.state not in ("ready", "filling")
    ]
    return "\n".join([output.table(headers, rows, left=2), *troubles])


def stats(output: Output, report: StatsReport) -> str:
    """Return everything countable, in sections."""
    sections = [_tier_columns(output, report.tiers), _lookups(output, report)]
    if report.namespaces:
        sections.append(namespaces(output, report))
    if len(report.tenants) > 1 or any(any(tenant.quota_bytes.values()) for tenant in report.tenants):
        sections.append(_tenants(output, report.tenants))
    sections.append(_sessions(output, report))
    return "\n\n".join(sections)


# Each row of the tiers' section. A row that is zero in every tier is left out where it says so.
_Row = tuple[str, Callable[[TierReport], str], bool]
_TIER_ROWS: tuple[_Row, ...] = (
    ("state", lambda tier: tier.state, False),
    ("capacity", lambda tier: size(tier.capacity_bytes), False),
    ("  once filled", lambda tier: _target(tier), True),
    ("used", lambda tier: size(tier.used_bytes), False),
    ("  of capacity", lambda tier: percent(tier.use), False),
    ("free", lambda tier: size(tier.free_bytes), False),
    ("reserved", lambda tier: size(tier.reserved_bytes), False),
    ("quarantined", lambda tier: size(tier.quarantined_bytes), True),
    ("pinned", lambda tier: size(tier.pinned_bytes), False),
    ("blocks", lambda tier: count(tier.blocks), False),
    ("  durable", lambda tier: count(tier.durable_blocks), True),
    ("hits", lambda tier: count(tier.hits), False),
    ("bytes in", lambda tier: size(tier.bytes_in), False),
    ("bytes out", lambda tier: size(tier.bytes_out), False),
    ("evicted: pressure", lambda tier: count(tier.evictions.get("pressure", 0)), False),
    ("evicted: ttl", lambda tier: count(tier.evictions.get("ttl", 0)), False),
    ("evicted: drop", lambda tier: count(tier.evictions.get("drop", 0)), False),
    ("evicted: quota", lambda tier: count(tier.evictions.get("quota", 0)), False),
    ("  age, median", lambda tier: duration(tier.eviction_age_s.p50) if tier.eviction_age_s.count else "-", False),
    ("  age, p99", lambda tier: duration(tier.eviction_age_s.p99) if tier.eviction_age_s.count else "-", False),
    ("promotions", lambda tier: count(tier.promotions), False),
    ("demotions", lambda tier: count(tier.demotions), False),
    ("  dropped", lambda tier: count(tier.demotions_dropped), False),
    ("loads in flight", lambda tier: count(tier.loads_in_flight), False),
    ("write queue", lambda tier: size(tier.write_queue_bytes), True),
    ("index", lambda tier: size(tier.index_bytes), True),
    ("segments", lambda tier: count(tier.segments), True),
    ("checksum failures", lambda tier: count(tier.checksum_failures), False),
    ("io errors", lambda tier: count(tier.io_errors), False),
)


def _target(tier: TierReport) -> str:
    return size(tier.capacity_target_bytes if tier.capacity_target_bytes != tier.capacity_bytes else 0)


def _tier_columns(output: Output, found: Mapping[str, TierReport]) -> str:
    rows = [
        [label, *(text(tier) for tier in found.values())]
        for label, text, hide_zeros in _TIER_ROWS
        if not hide_zeros or any(text(tier) not in ("0", "0 B") for tier in found.values())
    ]
    return output.table(["TIERS", *found], rows)


def _lookups(output: Output, report: StatsReport) -> str:
    totals = report.totals
    share = hit_rate(totals.hit_blocks, totals.queried_blocks)
    of_queried = "" if share is None else f", {percent(share)} of them"
    hits = "  ".join(f"{tier} {count(number)}" for tier, number in totals.hit_blocks.items())
    misses = "  ".join(f"{reason} {count(number)}" for reason, number in totals.misses.items() if number)
    puts = f"{count(totals.stored_blocks)} blocks; present already {count(totals.present_blocks)}"
    return "\n".join([
        output.heading("LOOKUPS AND PUTS"),
        f"queried    {count(totals.queried_blocks)} blocks",
        f"hit        {count(sum(totals.hit_blocks.values()))}{of_queried}: {hits or 'none'}",
        f"missed     {count(sum(totals.misses.values()))}: {misses or 'none'}",
        f"delivered  {count(totals.delivered_blocks)} blocks, {size(totals.bytes_out)}",
        f"stored     {puts}, being written {count(totals.busy_blocks)}; {size(totals.bytes_in)}",
    ])


def namespaces(output: Output, report: StatsReport) -> str:
    """Return one line a namespace, the largest first."""
    found = report.namespaces
    tiers = _tier_names(found)
    ordered = sorted(found, key=lambda one: (-sum(one.bytes.values()), one.digest))
    rows = [
        [
            namespace.digest[:SHORT_DIGEST],
            label,
            size(namespace.block_bytes),
            *(size(namespace.bytes.get(tier, 0)) for tier in tiers),
            percent(hit_rate(namespace.hit_blocks, namespace.queried_blocks)),
            count(namespace.stored_blocks),
            count(sum(namespace.evictions.values())),
        ]
        for namespace, label in zip(ordered, labels(ordered), strict=True)
    ]
    headers = ["NAMESPACE", "MODEL", "BLOCK", *(tier.upper() for tier in tiers), "HITS", "STORED", "EVICTED"]
    table = output.table(headers, rows, left=2, shrink=1)
    left_out = report.namespaces_left_out
    return f"{table}\n{count(left_out)} smaller namespaces are left out" if left_out else table


def _tier_names(found: Iterable[NamespaceReport]) -> list[str]:
    return list(dict.fromkeys(tier for namespace in found for tier in namespace.bytes))


def _tenants(output: Output, found: Sequence[TenantReport]) -> str:
    tiers = list(dict.fromkeys(tier for tenant in found for tier in tenant.used_bytes))
    rows: list[list[str]] = []
    for tenant in found:
        row = [plain(tenant.tenant) or "(default)"]
        for tier in tiers:
            quota = tenant.quota_bytes.get(tier)
            row += [size(tenant.used_bytes.get(tier, 0)), size(quota) if quota else "-"]
        rows.append(row)
    headers = ["TENANT", *(word for tier in tiers for word in (tier.upper(), "QUOTA"))]
    return output.table(headers, rows)


def _sessions(output: Output, report: StatsReport) -> str:
    held = report.sessions
    overdue = f"{held.leases_overdue} overdue"
    return "\n".join([
        output.heading("SESSIONS"),
        f"open {held.open}   leases {held.leases} ({output.alarming(overdue) if held.leases_overdue else overdue})   "
        f"reservations {held.reservations}   quarantined slots {held.quarantined_slots}",
        f"pins {count(report.pins.blocks)} blocks, {size(report.pins.bytes)}   uptime {duration(report.uptime_s)}",
    ])


def keys(output: Output, report: KeysReport) -> str:
    """Return one line a block."""
    return output.table(_BLOCK_HEADERS, [_block_row(block) for block in report.blocks], left=2, least=2)


def _block_row(block: BlockReport) -> list[str]:
    return [
        block.hash,
        ",".join(block.tiers) or "-",
        duration(block.age_s),
        duration(block.ttl_s),
        "yes" if block.pinned else "no",
        size(block.size_bytes),
    ]


def lookup(output: Output, hashes: Sequence[str], found: Mapping[str, BlockReport]) -> str:
    """Return one line a block that was asked for, there or not."""
    rows = [_block_row(found[name]) if name in found else [name, "absent", "-", "-", "-", "-"] for name in hashes]
    return output.table(_BLOCK_HEADERS, rows, left=2, least=2)


def check(output: Output, report: CheckReport) -> str:
    """Return the verdict, and each problem on a line."""
    verdict = "all invariants hold" if report.ok else output.alarming(counted(len(report.problems), "problem"))
    checked = f"{count(report.blocks_checked)} blocks checked, {count(report.blocks_corrupt)} corrupt"
    return "\n".join([f"{verdict}; {checked}", *(f"  {plain(problem)}" for problem in report.problems)])


def bytes_and_blocks(blocks: int, size_bytes: int) -> str:
    """Return a number of blocks and their size, to the byte."""
    return f"{counted(blocks, 'block')}, {describe_size(size_bytes)}"
