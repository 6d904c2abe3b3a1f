"""`kvctl stats`, once or as a line of rates every few seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from kvctl import rates, verbs
from kvctl.exits import Exit
from kvctl.printing import fit, percent, rate, size
from kvctl.rates import Rates
from kvctl.reports import StatsReport, read
from kvctl.verbs import Call
from kvstore import wire

_LINES_A_HEADER = 20
_Column = tuple[str, int, Callable[[StatsReport, Rates], str]]


def stats(
    call: Call, *, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Exit:
    """Print everything countable; with --watch go on with rates until interrupted or `--count` is reached."""
    interval_s: float | None = call.options.watch
    if interval_s is None:
        return verbs.stats(call)
    at_s, before = now(), call.report(wire.Stats(0))
    lines = 0
    while call.options.count is None or lines < call.options.count:
        sleep(max(0.0, interval_s - (now() - at_s)))
        last_s, at_s = at_s, now()
        after = call.report(wire.Stats(0))
        _line(call, before, after, at_s - last_s, lines)
        before, lines = after, lines + 1
    return Exit.DONE


def _line(call: Call, before: dict[str, Any], after: dict[str, Any], elapsed_s: float, number: int) -> None:
    output = call.output
    if output.as_json:
        output.text(json.dumps(after))
    else:
        new = read(StatsReport, after)
        found = rates.between(read(StatsReport, before), new, elapsed_s)
        if found is None:
            output.say("the daemon was restarted: the next line counts from here")
        else:
            columns = _columns(new)
            if number % _LINES_A_HEADER == 0:
                output.text(output.heading(" ".join(fit(name, width, False) for name, width, _ in columns)))
            output.text(" ".join(fit(value(new, found), width, False) for _, width, value in columns))
    output.stdout.flush()


def _columns(report: StatsReport) -> list[_Column]:
    def used(tier: str) -> Callable[[StatsReport, Rates], str]:
        return lambda stats, _: percent(stats.tiers[tier].use)

    clock: _Column = ("TIME", 8, lambda _stats, _rates: time.strftime("%H:%M:%S"))
    return [
        clock,
        *((tier.upper(), 7, used(tier)) for tier in report.tiers),
        ("HITS", 7, lambda _, found: percent(found.hit_share)),
        ("QUERY/s", 8, lambda _, found: rate(found.queried_per_s)),
        ("STORE/s", 8, lambda _, found: rate(found.stored_per_s)),
        ("IN/s", 9, lambda _, found: size(sum(tier.bytes_in_per_s for tier in found.tiers.values()))),
        ("OUT/s", 9, lambda _, found: size(sum(tier.bytes_out_per_s for tier in found.tiers.values()))),
        ("EVICT/s", 8, lambda _, found: rate(sum(found.evicted_per_s.values()))),
    ]
