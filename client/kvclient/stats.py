"""What a client counts about itself: calls, hits, misses by reason, bytes, and every failure that became a miss.

Invariants
1. Each block of a fetch counts once, as a hit or under one reason; each block of a store once, under its outcome.
2. A failure that the caller was spared counts under its error's name.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.wire import MISS_REASONS, Outcome

_PLAIN = (
    "calls",
    "connections_opened",
    "late_replies_undone",
    "hit_blocks",
    "stored_blocks",
    "present_blocks",
    "busy_blocks",
    "bytes_in",
    "bytes_out",
)
_REASONS = {int(outcome): outcome.name.lower() for outcome in MISS_REASONS}


class ClientStats:
    """Counters of one client, added to by all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._not_stored: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a plain counter."""
        with self._lock:
            self._plain[name] += count

    def failed(self, failure: KVStoreError) -> None:
        """Count a call that failed, whether or not its caller is told."""
        with self._lock:
            self._failures[type(failure).__name__] += 1

    def fetched(self, raw: bytes, block_bytes: int) -> None:
        """Count the outcomes of a fetch or an acquire."""
        with self._lock:
            hits = raw.count(Outcome.HIT)
            self._plain["hit_blocks"] += hits
            self._plain["bytes_out"] += hits * block_bytes
            if hits < len(raw):
                _tally(self._misses, raw)

    def stored(self, raw: bytes, block_bytes: int) -> None:
        """Count the outcomes of a store."""
        with self._lock:
            written = sum(map(raw.count, (Outcome.SEALED, Outcome.DURABLE, Outcome.NOT_DURABLE)))
            self._plain["stored_blocks"] += written
            self._plain["bytes_in"] += written * block_bytes
            self._plain["present_blocks"] += raw.count(Outcome.PRESENT)
            self._plain["busy_blocks"] += raw.count(Outcome.BUSY)
            if written < len(raw):
                _tally(self._not_stored, raw.replace(bytes([Outcome.NOT_DURABLE]), b""))

    def snapshot(self) -> dict[str, Any]:
        """Return all counters: plain ones, and those by reason under "misses", "not_stored" and "failures"."""
        with self._lock:
            return {
                **{name: self._plain[name] for name in _PLAIN},
                "misses": {name: self._misses[name] for name in _REASONS.values()},
                "not_stored": dict(self._not_stored),
                "failures": dict(self._failures),
            }

    def after_fork(self) -> None:
        """Make the lock usable in a forked child; the counts go on from the parent's."""
        self._lock = threading.Lock()


def _tally(counter: Counter[str], raw: bytes) -> None:
    for value, name in _REASONS.items():
        if count := raw.count(value):
            counter[name] += count
