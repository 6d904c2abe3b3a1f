"""The daemon's reports as typed values.

Invariant: what a newer daemon adds is passed over and what an older one lacks is zero, so kvctl can show any daemon
that speaks its protocol. `--json` prints the report as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvstore.errors import RemoteProtocolError

_T = TypeVar("_T", bound="Report")


class Report(msgspec.Struct, frozen=True):
    """Base of what is read out of a report."""


def _zero_by_name() -> dict[str, int]:
    return {}


class Ages(Report, frozen=True):
    """Seconds since the last use, of what was evicted."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class TierReport(Report, frozen=True):
    """One tier of `stats`."""

    state: str = ""
    state_text: str = ""
    capacity_bytes: int = 0
    capacity_target_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    quarantined_bytes: int = 0
    free_bytes: int = 0
    pinned_bytes: int = 0
    blocks: int = 0
    durable_blocks: int = 0
    hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    promotions: int = 0
    demotions: int = 0
    demotions_dropped: int = 0
    loads_in_flight: int = 0
    checksum_failures: int = 0
    io_errors: int = 0
    write_queue_bytes: int = 0
    index_bytes: int = 0
    segments: int = 0
    evictions: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    eviction_age_s: Ages = Ages()

    @property
    def use(self) -> float:
        """Used share of the capacity, 0 to 1."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


class NamespaceReport(Report, frozen=True):
    """One namespace of one tenant in `stats`. `layers` and `heads` are the half-open ranges of its slice."""

    digest: str
    group: str = ""
    model: str = ""
    revision: str = ""
    adapter: str = ""
    dtype: str = ""
    layers: list[int] = msgspec.field(default_factory=list[int])
    heads: list[int] = msgspec.field(default_factory=list[int])
    tenant: str = ""
    epoch: int = 0
    block_bytes: int = 0
    block_tokens: int = 0
    ttl_s: float = 0.0
    blocks: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    bytes: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    queried_blocks: int = 0
    hit_blocks: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    misses: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    stored_blocks: int = 0
    present_blocks: int = 0
    busy_blocks: int = 0
    delivered_blocks: int = 0
    pinned_blocks: int = 0
    evictions: dict[str, int] = msgspec.field(default_factory=_zero_by_name)

    @property
    def title(self) -> str:
        """Model, revision and adapter in one."""
        revision = f"@{self.revision}" if self.revision else ""
        return self.model + revision + (f"+{self.adapter}" if self.adapter else "")

    @property
    def details(self) -> tuple[str, ...]:
        """What else tells it from others of the same model."""
        slices = [
            f"{name} {ends[0]}-{ends[1] - 1}" if len(ends) == 2 else ""
            for name, ends in (("layers", self.layers), ("heads", self.heads))
        ]
        return self.dtype, f"{self.block_tokens}-token blocks", *slices, f"tenant {self.tenant}" if self.tenant else ""


class Totals(Report, frozen=True):
    """All namespaces of `stats` together."""

    queried_blocks: int = 0
    hit_blocks: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    misses: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    stored_blocks: int = 0
    present_blocks: int = 0
    busy_blocks: int = 0
    delivered_blocks: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Sessions(Report, frozen=True):
    """Who is connected and what they hold."""

    open: int = 0
    leases: int = 0
    leases_overdue: int = 0
    reservations: int = 0
    quarantined_slots: int = 0


class TenantReport(Report, frozen=True):
    """What a tenant uses and may use, per tier."""

    tenant: str = ""
    used_bytes: dict[str, int] = msgspec.field(default_factory=_zero_by_name)
    quota_bytes: dict[str, int | None] = msgspec.field(default_factory=dict[str, int | None])


class Pins(Report, frozen=True):
    """What operators have pinned."""

    blocks: int = 0
    bytes: int = 0


class StatsReport(Report, frozen=True):
    """Everything countable."""

    tiers: dict[str, TierReport] = msgspec.field(default_factory=dict[str, TierReport])
    namespaces: list[NamespaceReport] = msgspec.field(default_factory=list[NamespaceReport])
    namespaces_left_out: int = 0
    totals: Totals = Totals()
    sessions: Sessions = Sessions()
    tenants: list[TenantReport] = msgspec.field(default_factory=list[TenantReport])
    pins: Pins = Pins()
    uptime_s: float = 0.0


class StatusReport(Report, frozen=True):
    """What the daemon is and how it was started."""

    version: str = ""
    boot_id: str = ""
    pid: int = 0
    uptime_s: float = 0.0
    state: str = ""
    mode: str = ""
    role: str = ""
    tiers: list[str] = msgspec.field(default_factory=list[str])
    socket: str = ""
    http: str | None = None
    eviction: str = ""
    write_policy: str = ""
    ttl_s: float = 0.0
    ready_fraction: float = 0.0
    huge_pages: str = ""
    ssd: dict[str, Any] | None = None


class BlockReport(Report, frozen=True):
    """One block of `keys`. `ttl_s` None: it never expires."""

    hash: str
    tiers: list[str] = msgspec.field(default_factory=list[str])
    size_bytes: int = 0
    age_s: float = 0.0
    ttl_s: float | None = None
    pinned: bool = False
    generation: int = 0


class KeysReport(Report, frozen=True):
    """Some blocks of a namespace, and how many it has."""

    total: int = 0
    blocks: list[BlockReport] = msgspec.field(default_factory=list[BlockReport])


class CheckReport(Report, frozen=True):
    """Whether all invariants hold."""

    ok: bool = False
    problems: list[str] = msgspec.field(default_factory=list[str])
    blocks_checked: int = 0
    blocks_corrupt: int = 0


class CountReport(Report, frozen=True):
    """What one of the verbs that change something has done; each sets its own of these."""

    reclaimed_blocks: int = 0
    reclaimed_bytes: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    written_blocks: int = 0
    left_out_blocks: int = 0
    remaining_blocks: int = 0
    namespaces: int = 0
    blocks: int = 0
    bytes: int = 0
    skipped: int = 0
    path: str = ""


def read(kind: type[_T], body: Mapping[str, Any]) -> _T:
    """Return `body` as `kind`; raises RemoteProtocolError if a field has another type."""
    try:
        return msgspec.convert(body, kind, strict=False)
    except msgspec.ValidationError as exc:
        raise RemoteProtocolError(
            f"this kvctl can't read the daemon's report ({exc}): use the kvctl of the daemon's version, or --json"
        ) from exc


def hit_rate(hits: Mapping[str, int], queried: int) -> float | None:
    """Return the hit share of the queried blocks, None if there were none."""
    return sum(hits.values()) / queried if queried else None
