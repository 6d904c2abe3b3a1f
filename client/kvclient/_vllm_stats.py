"""What a connector counts, and what vLLM's logs and Prometheus call it.

Invariants
1. Each block that was to be loaded counts once, as loaded or as failed; each that was to be stored once, as stored,
   present, failed or dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

LOGGER = "vllm.kvstored"  # below vLLM's own, which has a handler and the level that its user asked for

# Name, and what Prometheus is told of it. All only ever grow.
COUNTERS: dict[str, str] = {
    "lookups": "Requests that the store was asked about.",
    "lookup_timeouts": "Lookups without an answer in time: counted as misses.",
    "lookup_blocks": "Blocks that the store was asked about.",
    "hit_blocks": "Leading blocks that the store had when asked.",
    "waits": "Requests that waited for a prefill under way, as they were told to.",
    "waits_in_vain": "Of these, those that began without all blocks: too late, given up, or stored where none looked.",
    "wait_seconds": "Seconds that these requests waited.",
    "loaded_blocks": "Blocks loaded into the engine's KV cache.",
    "load_failed_blocks": "Blocks that were gone, damaged or late when they were to be loaded; computed instead.",
    "loaded_bytes": "Bytes loaded into the engine's KV cache.",
    "load_seconds": "Seconds spent on loads, summed over threads.",
    "stored_blocks": "Blocks written to the store.",
    "present_blocks": "Blocks that were in the store already, or on their way.",
    "store_failed_blocks": "Blocks that the store did not take.",
    "store_dropped_blocks": "Blocks not given to the store, since stores did not keep up.",
    "stored_bytes": "Bytes written to the store.",
    "store_seconds": "Seconds spent on stores, summed over threads.",
}


class Counters:
    """Counts since it was last asked, added to by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, **counts: float) -> None:
        """Add to some counters."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of two sets of counts."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def summary(counts: Mapping[str, float]) -> dict[str, int | float]:
    """Return what a log line says of an interval."""
    shown: dict[str, int | float] = {
        name: round(count, 6) if name.endswith("seconds") else int(count)
        for name, count in counts.items()
        if not name.endswith("_bytes")
    }
    for verb in ("load", "store"):
        seconds, size = counts.get(f"{verb}_seconds", 0), counts.get(f"{verb.rstrip('e')}ed_bytes", 0)
        if seconds and size:
            shown[f"{verb}_gb_per_s"] = round(size / seconds / 1e9, 2)
    return dict(sorted(shown.items()))
