"""A stats report with a different number everywhere, as `kvctl stats` and /metrics get it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kvstore.wire import MISS_REASONS
from kvstored.metrics import Exposition

CAUSES = ("pressure", "ttl", "drop", "quota")
_TIER = (
    "capacity_bytes", "capacity_target_bytes", "used_bytes", "reserved_bytes", "quarantined_bytes", "free_bytes",
    "pinned_bytes", "blocks", "hits", "bytes_in", "bytes_out", "promotions", "demotions", "demotions_dropped",
    "loads_in_flight", "checksum_failures", "io_errors",
)  # fmt: skip
_SSD = ("durable_blocks", "write_queue_bytes", "file_bytes", "index_bytes", "segments")


def full_report(namespaces: int = 2, tenants: int = 2) -> dict[str, Any]:
    """Return a report in which every number is another one."""
    count = itertools.count(1)

    def numbers(*names: str) -> dict[str, int]:
        return {name: next(count) for name in names}

    def tier(*names: str) -> dict[str, Any]:
        return {
            **numbers(*names),
            "evictions": numbers(*CAUSES),
            "eviction_age_s": numbers("count", "p50", "p90", "p99", "max"),
            "state": "ready",
            "state_text": "",
        }

    def misses() -> dict[str, int]:
        return numbers(*(outcome.name.lower() for outcome in MISS_REASONS))

    totals = ("queried_blocks", "stored_blocks", "present_blocks", "busy_blocks", "delivered_blocks")
    return {
        "tiers": {"cpu": tier(*_TIER), "ssd": tier(*_TIER, *_SSD)},
        "namespaces": [namespace(number, numbers, misses) for number in range(namespaces)],
        "totals": {
            **numbers(*totals, "bytes_in", "bytes_out"), "hit_blocks": numbers("cpu", "ssd"), "misses": misses(),
        },
        "sessions": numbers("open", "leases", "leases_overdue", "reservations", "quarantined_slots"),
        "tenants": [
            {"tenant": f"t{number}", "used_bytes": numbers("cpu", "ssd"), "quota_bytes": numbers("cpu", "ssd")}
            for number in range(tenants)
        ],
        "pins": numbers("blocks", "bytes"),
        "uptime_s": next(count),
    }  # fmt: skip


def namespace(number: int, numbers: Any, misses: Any) -> dict[str, Any]:
    """Return one namespace's part of a report."""
    return {
        "digest": f"{number:08x}" * 8, "group": "g", "model": f"model-{number}", "revision": "r", "adapter": "",
        "tenant": "default", "epoch": 1, "block_bytes": 4096, "block_tokens": 16, "ttl_s": 0,
        "blocks": numbers("cpu", "ssd"), "bytes": numbers("cpu", "ssd"), "hit_blocks": numbers("cpu", "ssd"),
        "misses": misses(), "evictions": numbers(*CAUSES),
        **numbers("queried_blocks", "stored_blocks", "present_blocks", "busy_blocks", "delivered_blocks",
                  "pinned_blocks"),
    }  # fmt: skip


def exposed(report: Callable[[], dict[str, Any]]) -> Exposition:
    """Return the metrics of a daemon that serves clients and whose report is always this one."""

    async def told() -> dict[str, Any]:
        return report()

    return Exposition(told, lambda: None)
