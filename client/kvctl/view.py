"""One frame of `kvctl top` as a rich renderable. Pure: reports and rates in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvctl import rates
from kvctl.naming import SHORT_DIGEST, labels
from kvctl.printing import count, duration, percent, plain, rate, size
from kvctl.rates import NamespaceRates, Rates, TierRates
from kvctl.reports import NamespaceReport, StatsReport, StatusReport, TierReport, hit_rate

_OTHER_LINES = 16  # besides those of tiers and namespaces
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NO_RATES = NamespaceRates()


@dataclass(frozen=True, slots=True)
class Frame:
    """All that one frame shows. `trouble` is why the reports are not fresh."""

    status: StatusReport
    stats: StatsReport
    rates: Rates | None
    sort: str
    clock: str
    interval_s: float
    width: int
    height: int
    trouble: str = ""


_Key = Callable[[NamespaceReport, NamespaceRates], float]
# What `s` goes through; each sorts from large to small.
SORTS: dict[str, _Key] = {
    "used": lambda namespace, _: sum(namespace.bytes.values()),
    "queries": lambda _, now: now.queried_per_s,
    "hits": lambda namespace, _: hit_rate(namespace.hit_blocks, namespace.queried_blocks) or 0.0,
    "evictions": lambda namespace, now: now.evicted_per_s * 1e12 + sum(namespace.evictions.values()),
}


def next_sort(sort: str) -> str:
    """Return the order after `sort`."""
    names = list(SORTS)
    return names[(names.index(sort) + 1) % len(names)]


def render(frame: Frame) -> RenderableType:
    """Return the frame, as wide and as high as the terminal."""
    return Group(
        _header(frame),
        Text(frame.trouble, style="bold red", no_wrap=True, overflow="ellipsis"),
        _tiers(frame),
        Text(""),
        _middle(frame),
        _misses(frame.stats),
        _eviction_ages(frame.stats),
        Text(""),
        _namespaces(frame),
        _sessions(frame.stats),
        _footer(frame),
    )


def _header(frame: Frame) -> RenderableType:
    status = frame.status
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    state = status.state if status.ready_fraction >= 1 else f"{status.state} {percent(status.ready_fraction)}"
    left = Text.assemble(
        ("kvstored", "bold"),
        f" {status.version}  ",
        (state, "green" if status.state == "ready" else "yellow"),
        f"  up {duration(frame.stats.uptime_s)}  {status.mode}  {plain(status.socket)}",
    )
    line.add_row(left, Text(f"  every {duration(frame.interval_s)}  {frame.clock}"))
    return line


def _table(*columns: tuple[str, str]) -> Table:
    """Return a table without lines; each column is a heading and "left", "right" or "wide" (left, takes the rest)."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="bold", pad_edge=False)
    for heading, kind in columns:
        table.add_column(
            heading,
            justify="right" if kind == "right" else "left",
            ratio=1 if kind == "wide" else None,
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _tiers(frame: Frame) -> Table:
    roomy = frame.width >= 110
    table = _table(
        ("TIER", "left"), ("USE", "wide"), ("", "right"), ("USED / CAPACITY", "right"), ("PINNED", "right"),
        *([("BLOCKS", "right"), ("HITS", "right")] if roomy else []),
        ("IN/s", "right"), ("OUT/s", "right"),
    )  # fmt: skip
    for name, tier in frame.stats.tiers.items():
        now = frame.rates.tiers.get(name, TierRates()) if frame.rates else None
        table.add_row(
            Text(name if tier.state in ("ready", "") else f"{name} {tier.state}", style=_tier_style(tier)),
            Bar(tier.use),
            percent(tier.use),
            f"{size(tier.used_bytes)} / {size(tier.capacity_bytes)}",
            size(tier.pinned_bytes),
            *([count(tier.blocks), count(tier.hits)] if roomy else []),
            size(now.bytes_in_per_s) if now else "-",
            size(now.bytes_out_per_s) if now else "-",
        )
    return table


def _tier_style(tier: TierReport) -> str:
    return {"degraded": "bold red", "off": "bold red", "filling": "yellow"}.get(tier.state, "")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar as wide as its column, filled to `share` in eighths of a cell."""

    share: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.drawn(options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)

    def drawn(self, width: int) -> Text:
        """Return the bar in `width` cells."""
        whole, part = divmod(round(max(0.0, min(1.0, self.share)) * width * 8), 8)
        filled = "█" * whole + (_EIGHTHS[part] if part else "")
        return Text.assemble((filled, "cyan"), ("░" * (width - len(filled)), "bright_black"))


def _middle(frame: Frame) -> Table:
    grid = Table.grid(expand=True, padding=(0, 3, 0, 0))
    for _ in range(3):
        grid.add_column(ratio=1)
    grid.add_row(_hits(frame), _per_second(frame.rates), _evictions(frame))
    return grid


def _hits(frame: Frame) -> Table:
    totals, now = frame.stats.totals, frame.rates
    table = _table(("HITS", "wide"), ("NOW", "right"), ("EVER", "right"))
    table.add_row(
        "all",
        percent(now.hit_share if now else None),
        percent(hit_rate(totals.hit_blocks, totals.queried_blocks)),
    )
    for tier, hits in totals.hit_blocks.items():
        table.add_row(
            f"  {tier}",
            percent(now.hit_shares.get(tier) if now else None),
            percent(hits / totals.queried_blocks if totals.queried_blocks else None),
        )
    return table


def _per_second(now: Rates | None) -> Table:
    table = _table(("BLOCKS", "wide"), ("PER SECOND", "right"))
    for name in ("queried", "hit", "delivered", "stored", "present"):
        table.add_row(name, rate(getattr(now, f"{name}_per_s")) if now else "-")
    return table


def _evictions(frame: Frame) -> Table:
    table = _table(("EVICTED", "wide"), ("/s", "right"), ("TOTAL", "right"))
    for cause, total in rates.evictions(frame.stats).items():
        per_s = rate(frame.rates.evicted_per_s.get(cause, 0.0)) if frame.rates else "-"
        table.add_row(cause, per_s, count(total))
    return table


def _eviction_ages(stats: StatsReport) -> Text:
    ages = [
        f"{name} {duration(tier.eviction_age_s.p50)}"
        for name, tier in stats.tiers.items()
        if tier.eviction_age_s.count
    ]
    return _line(("EVICTED  ", "bold"), "at a median age of " + "  ".join(ages) if ages else "nothing yet")


def _misses(stats: StatsReport) -> Text:
    missed = {reason: number for reason, number in stats.totals.misses.items() if number}
    parts = "  ".join(f"{reason} {count(number)}" for reason, number in missed.items())
    return _line(("MISSES   ", "bold"), parts or "none")


def _line(*parts: str | tuple[str, str]) -> Text:
    line = Text.assemble(*parts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _namespaces(frame: Frame) -> Table:
    tiers = list(frame.stats.tiers)
    table = _table(
        ("NAMESPACE", "left"), ("MODEL", "wide"), *((tier.upper(), "right") for tier in tiers),
        ("HITS", "right"), ("QUERY/s", "right"), ("EVICT/s", "right"),
    )  # fmt: skip
    shown = _shown(frame)
    for namespace, label in zip(shown, labels(shown), strict=True):
        now = _rates_of(frame, namespace)
        table.add_row(
            namespace.digest[:SHORT_DIGEST],
            Text(label),  # as it is: rich would read [...] in a plain str as markup
            *(size(namespace.bytes.get(tier, 0)) for tier in tiers),
            percent(hit_rate(namespace.hit_blocks, namespace.queried_blocks)),
            rate(now.queried_per_s),
            rate(now.evicted_per_s),
        )
    return table


def _rates_of(frame: Frame, namespace: NamespaceReport) -> NamespaceRates:
    return frame.rates.namespaces.get(namespace.digest, _NO_RATES) if frame.rates else _NO_RATES


def _shown(frame: Frame) -> Sequence[NamespaceReport]:
    key = SORTS[frame.sort]
    ordered = sorted(frame.stats.namespaces, key=lambda one: (-key(one, _rates_of(frame, one)), one.digest))
    return ordered[: max(1, frame.height - _OTHER_LINES - len(frame.stats.tiers))]


def _sessions(stats: StatsReport) -> Text:
    held = stats.sessions
    return _line(
        ("SESSIONS  ", "bold"),
        f"{held.open} open  leases {held.leases} (",
        (f"{held.leases_overdue} overdue", "bold red" if held.leases_overdue else ""),
        f")  reservations {held.reservations}  quarantined {held.quarantined_slots}  pins {count(stats.pins.blocks)}",
    )


def _footer(frame: Frame) -> Text:
    hidden = len(frame.stats.namespaces) + frame.stats.namespaces_left_out - len(_shown(frame))
    more = f"   {hidden} more namespaces" if hidden else ""
    return Text.assemble((" q ", "reverse"), " quit  ", (" s ", "reverse"), f" sort: {frame.sort}{more}")
