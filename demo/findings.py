"""What a run of the demo found out, whether it held, and how it is shown."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from rich.console import Group
from rich.table import Table

Answer = dict[str, Any]


@dataclass
class Findings:
    """Answers of the engine processes, and the daemon's own counts: one report a boot, since each counts anew."""

    model: str = ""
    prompt_tokens: int = 0
    block_tokens: int = 0
    block_bytes: int = 0
    alone: Answer = field(default_factory=dict[str, Any])
    prefill: Answer = field(default_factory=dict[str, Any])
    from_cpu: Answer = field(default_factory=dict[str, Any])
    from_ssd: Answer = field(default_factory=dict[str, Any])
    reports: list[Answer] = field(default_factory=list[dict[str, Any]])
    log_end: str = ""  # of the daemon

    @property
    def blocks_expected(self) -> int:
        """How many blocks D must be given each time: all full ones, if a token is left to compute."""
        return (self.prompt_tokens - 1) // self.block_tokens

    @property
    def tokens_identical(self) -> bool:
        """Whether D said with KV from each tier what is said without a store, and P began in the same way."""
        tokens = self.alone["tokens"]
        return bool(tokens) and tokens == self.from_cpu["tokens"] == self.from_ssd["tokens"] and self._prefill_agrees

    @property
    def hit_blocks(self) -> dict[str, int]:
        """Blocks that the daemon counted as hits, by tier."""
        hits: dict[str, int] = self._sum("totals", "hit_blocks")
        return hits

    @property
    def _prefill_agrees(self) -> bool:
        return bool(self.prefill["tokens"] == self.alone["tokens"][:1])

    def faults(self) -> list[str]:
        """Return what did not hold, in words; nothing if all did."""
        faults: list[str] = []
        if not self.tokens_identical:
            said = {name: getattr(self, name)["tokens"] for name in ("alone", "prefill", "from_cpu", "from_ssd")}
            faults.append("the tokens differ: " + "; ".join(f"{name} {tokens}" for name, tokens in said.items()))
            # In two steps a prompt rounds differently from in one: a model with a near tie may then go another way.
            faults.append(f"the closest choice between two tokens was made by {self.alone['lead']:.2g} of a logit")
        if self.prefill["durable"] < self.blocks_expected:
            faults.append(f"{self.prefill['durable']} of P's {self.prefill['stored']} blocks came to ssd")
        for tier, answer, report in (("cpu", self.from_cpu, 0), ("ssd", self.from_ssd, 1)):
            loaded = answer["loaded_tokens"] // self.block_tokens
            counted = self.reports[report]["totals"]["hit_blocks"]
            if loaded != self.blocks_expected:
                because = f": {answer['failure']}" if answer["failure"] else ""
                faults.append(f"D was given {loaded} blocks from {tier}, not {self.blocks_expected}{because}")
            if counted != {"cpu": 0, "ssd": 0, tier: self.blocks_expected}:
                misses = {reason: n for reason, n in self.reports[report]["totals"]["misses"].items() if n}
                faults.append(f"kvstored counted hits {counted}, misses {misses}, not {self.blocks_expected} in {tier}")
        return faults

    def summary(self) -> Answer:
        """Return the demo's last line."""
        return {
            "demo": "pd",
            "tokens_identical": self.tokens_identical,
            "hit_blocks": sum(self.hit_blocks.values()),
            "ttft_cold_s": round(self.alone["ttft_s"], 4),
            "ttft_cpu_s": round(self.from_cpu["ttft_s"], 4),
            "ttft_ssd_s": round(self.from_ssd["ttft_s"], 4),
        }

    def table(self) -> Group:
        """Return both tables for people."""
        return Group(self._times(), self._blocks())

    def _times(self) -> Table:
        table = Table(title=f"{self.prompt_tokens} prompt tokens, {self.model}", title_justify="left")
        table.add_column("prompt's KV")
        for title in ("first token", "of it loading", "faster", "tokens"):
            table.add_column(title, justify="right")
        cold_s = self.alone["ttft_s"]
        for title, answer in (
            ("computed, no store", self.alone),
            ("from cpu", self.from_cpu),
            ("from ssd, after a restart", self.from_ssd),
        ):
            is_reference = answer is self.alone
            table.add_row(
                title,
                f"{answer['ttft_s']:.3f} s",
                "" if is_reference else f"{answer['load_s']:.3f} s",
                "" if is_reference else f"{cold_s / answer['ttft_s']:.1f} x",
                f"{len(answer['tokens'])}" if is_reference else _same(answer["tokens"] == self.alone["tokens"]),
            )
        return table

    def _blocks(self) -> Table:
        title = f"blocks of {self.block_tokens} tokens, {self.block_bytes / 1024:.0f} KiB"
        table = Table(title=title, title_justify="left")
        for title in ("", "cpu", "ssd"):
            table.add_column(title, justify="left" if not title else "right")
        hits = self.hit_blocks
        # What ssd holds is counted after the restart: before, some of it may still be on its way.
        on_ssd = self.reports[1]["tiers"]["ssd"]["blocks"]
        table.add_row("stored", f"{self._sum('totals', 'stored_blocks')}", f"{on_ssd}")
        table.add_row("hit", f"{hits['cpu']}", f"{hits['ssd']}")
        evicted = {tier: self._sum("tiers", tier, "evictions") for tier in ("cpu", "ssd")}
        table.add_row("evicted", *(_by_cause(evicted[tier]) for tier in ("cpu", "ssd")))
        return table

    def _sum(self, *path: str) -> Any:
        """Return a count of the daemon's, or several by name, summed over its boots."""
        found: list[Any] = [reduce(operator.getitem, path, report) for report in self.reports]
        if isinstance(found[0], int):
            return sum(found)
        totals: Counter[str] = Counter()
        for value in found:
            totals.update(value)
        return dict(totals)


def _same(is_same: bool) -> str:
    return "identical" if is_same else "[red]DIFFERENT[/]"


def _by_cause(evictions: dict[str, int]) -> str:
    causes = [f"{count} by {cause}" for cause, count in evictions.items() if count]
    return ", ".join(causes) or "0"
