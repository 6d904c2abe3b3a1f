"""Reports as a daemon sends them, and a daemon that sends them."""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Callable
from typing import Any

from kvctl import parser
from kvctl.asking import Progress
from kvctl.cli import VERBS
from kvctl.exits import Exit
from kvctl.printing import Output
from kvctl.verbs import Call
from kvstore import wire

DIGESTS = ("ab12" + "0" * 60, "ab34" + "1" * 60, "cd56" + "2" * 60)
MODELS = ("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B")
MISSES = {reason.name.lower(): 0 for reason in wire.MISS_REASONS}
HASHES = tuple(bytes([number]) * 32 for number in range(1, 6))


def tier(**changed: Any) -> dict[str, Any]:
    return {
        "capacity_bytes": 64 << 30, "capacity_target_bytes": 64 << 30,
        "used_bytes": 45 << 30,
        "reserved_bytes": 8 << 20, "quarantined_bytes": 0,
        "free_bytes": 19 << 30, "pinned_bytes": 8 << 20, "blocks": 23040, "hits": 812345,
        "bytes_in": 123 << 30, "bytes_out": 1 << 40, "evictions": {"pressure": 12345, "ttl": 45, "drop": 6, "quota": 0},
        "eviction_age_s": {"count": 12396, "p50": 754.2, "p90": 3600.0, "p99": 7321.0, "max": 90000.0},
        "promotions": 1234, "demotions": 23456, "demotions_dropped": 7, "loads_in_flight": 2, "checksum_failures": 0,
        "io_errors": 0, "state": "ready", "state_text": "", **changed,
    }  # fmt: skip


def namespace(at: int = 0, **changed: Any) -> dict[str, Any]:
    return {
        "digest": DIGESTS[at], "group": "99" * 32, "model": MODELS[at],
        "revision": "main", "adapter": "", "tenant": "", "epoch": 3, "block_bytes": 917504, "block_tokens": 16,
        "ttl_s": 0.0,
        "blocks": {"cpu": 20000 - at, "ssd": 400000}, "bytes": {"cpu": (18 - at) << 30, "ssd": 350 << 30},
        "queried_blocks": 1000000, "hit_blocks": {"cpu": 700000, "ssd": 112345 * at},
        "misses": {**MISSES, "absent": 187655},
        "stored_blocks": 420000, "present_blocks": 1200, "busy_blocks": 34, "delivered_blocks": 800000,
        "evictions": {"pressure": 12345, "ttl": 45, "drop": 6, "quota": 0}, "pinned_blocks": 9, **changed,
    }  # fmt: skip


def stats(**changed: Any) -> dict[str, Any]:
    report = {
        "tiers": {
            "cpu": tier(),
            "ssd": tier(
                capacity_bytes=1 << 40, used_bytes=812 << 30, free_bytes=212 << 30, pinned_bytes=0, blocks=950000,
                durable_blocks=949990, write_queue_bytes=64 << 20, index_bytes=120 << 20, segments=830,
            ),
        },
        "namespaces": [namespace(0), namespace(1), namespace(2)],
        "totals": {
            "queried_blocks": 3000000, "hit_blocks": {"cpu": 2100000, "ssd": 337035},
            "misses": {**MISSES, "absent": 562000, "expired": 45, "no_room": 920}, "stored_blocks": 1260000,
            "present_blocks": 3600, "busy_blocks": 102, "delivered_blocks": 2400000,
            "bytes_in": 123 << 30, "bytes_out": 1 << 41,
        },
        "sessions": {"open": 3, "leases": 2, "leases_overdue": 1, "reservations": 4, "quarantined_slots": 0},
        "tenants": [
            {"tenant": "", "used_bytes": {"cpu": 45 << 30, "ssd": 812 << 30}, "quota_bytes": {"cpu": None, "ssd": None}}
        ],
        "pins": {"blocks": 9, "bytes": 8 << 20}, "uptime_s": 7384.2,
    }  # fmt: skip
    return copy.deepcopy({**report, **changed})


def status(**changed: Any) -> dict[str, Any]:
    return {
        "version": "0.1.0", "boot_id": "0f" * 16, "pid": 4242, "uptime_s": 7384.2, "state": "ready", "mode": "trusted",
        "role": "admin", "tiers": ["cpu", "ssd"], "socket": "/run/kvstored/kvstored.sock",
        "http": None, "eviction": "lru",
        "write_policy": "through", "ttl_s": 0.0, "ready_fraction": 1.0, "huge_pages": "thp",
        "ssd": {"directory": "/var/lib/kvstored", "direct_io": True}, **changed,
    }  # fmt: skip


def block(raw: bytes, **changed: Any) -> dict[str, Any]:
    return {
        "hash": raw.hex(), "tiers": ["cpu", "ssd"], "size_bytes": 917504, "age_s": 61.0, "ttl_s": None, "pinned": False,
        "generation": 7, **changed,
    }  # fmt: skip


class FakeDaemon:
    """Answers from canned reports and keeps what it was asked."""

    def __init__(self, answers: dict[type[wire.Message], dict[str, Any]] | None = None) -> None:
        self.asked: list[Any] = []
        self.deadlines_s: list[float] = []
        self.present = set(HASHES[:3])
        self.answers: dict[type[wire.Message], dict[str, Any]] = {
            wire.Ping: {"count": 0}, wire.Stats: stats(), wire.Status: status(), **(answers or {}),
        }  # fmt: skip

    def __call__(
        self, request: wire.Message, *, deadline_s: float, progress: Progress | None = None
    ) -> dict[str, Any]:
        self.asked.append(request)
        self.deadlines_s.append(deadline_s)
        if progress is not None:
            progress(1, 2)
        if isinstance(request, wire.Keys) and wire.Keys not in self.answers:
            wanted = request.hashes or sorted(self.present)[request.offset : request.offset + request.limit]
            return {"total": len(self.present), "blocks": [block(raw) for raw in wanted if raw in self.present]}
        if isinstance(request, (wire.Pin, wire.Unpin, wire.Ttl, wire.DropBlocks)):
            outcomes = ["done" if raw in self.present else "absent" for raw in request.hashes]
            return {"hits": 0, "outcomes": outcomes}
        return self.answers[type(request)]

    def changes(self) -> list[Any]:
        """What was asked that changes something."""
        return [request for request in self.asked if not isinstance(request, (wire.Stats, wire.Status, wire.Keys))]


class Screen(io.StringIO):
    """A stream that can say that it is a terminal."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Run:
    """What one invocation left behind."""

    def __init__(self, code: Exit, output: Output, daemon: FakeDaemon) -> None:
        self.code = code
        self.daemon = daemon
        assert isinstance(output.stdout, Screen)
        assert isinstance(output.stderr, Screen)
        self.out = output.stdout.getvalue()
        self.err = output.stderr.getvalue()


def options(*words: str) -> argparse.Namespace:
    return parser.build().parse_args(words)


def run(
    *words: str,
    daemon: FakeDaemon | None = None,
    stdin: str = "",
    is_terminal: bool = False,
    verb: Callable[[Call], Exit] | None = None,
) -> Run:
    """Run one verb against a fake daemon."""
    daemon = daemon or FakeDaemon()
    chosen = options(*words)
    output = Output(
        as_json=getattr(chosen, "json", False),
        stdout=Screen(is_terminal=is_terminal),
        stderr=Screen(is_terminal=is_terminal),
    )
    call = Call(chosen, daemon, output, "/run/kvstored/kvstored.sock", io.StringIO(stdin))
    return Run((verb or VERBS[chosen.verb])(call), output, daemon)
