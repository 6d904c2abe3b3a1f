"""The daemon's settings as the daemon sees them, and as text that its own config file could hold.

Invariants
1. Every size in Settings is in bytes and every time in seconds; no text is left to be read later.
2. What `as_toml` writes is a config file that gives the same settings on the same machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.units import format_duration, format_size
from kvstored.options import OPTIONS
from kvstored.readers import Principals
from kvstored.remote.opening import shown
from kvstored.tables import Option

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the daemon is told, complete. docs/operations.md says what each setting is for."""

    socket: Path
    cpu_size_bytes: int
    tiers: tuple[str, ...] = ("cpu",)
    ssd_size_bytes: int | None = None
    ssd_dir: Path | None = None
    remote: str | None = field(default=None, repr=False)  # a URL, perhaps with a password
    remote_size_bytes: int | None = None
    remote_write_policy: str = "second-touch"
    remote_writer: str | None = None
    remote_refresh_s: float = 10.0
    http: str | None = None
    http_by_default: bool = False  # nobody asked for this address: go without if it is taken
    ttl_s: float = 0.0
    ttl_mode: str = "write"
    eviction: str = "lru"
    write_policy: str = "through"
    mode: str = "trusted"
    allow_shared_pool_across_tenants: bool = False
    arena_bytes: int = 64 << 20
    verify_reads: bool = False
    checksum_at_seal: str = "auto"
    huge_pages: str = "auto"
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    tenants: Mapping[str, Principals] = field(default_factory=dict[str, Principals])
    admins: Principals = field(default_factory=lambda: Principals(frozenset({0, os.geteuid()})))
    high_watermark: float = 0.95
    low_watermark: float = 0.92
    drain_s: float = 30.0
    lease_s_max: float = 60.0
    reservation_s: float = 10.0
    sessions_max: int = 1024
    io_threads: int = 4
    write_queue_bytes: int = 256 << 20
    log_level: str = "info"
    log_format: str = "text"


# The field of Settings that a key sets, where it isn't the key itself.
FIELDS = {
    "cpu-size": "cpu_size_bytes", "ssd-size": "ssd_size_bytes", "remote-size": "remote_size_bytes",
    "ttl": "ttl_s", "quota": "quotas", "tenant": "tenants", "admin": "admins", "drain-timeout": "drain_s",
    "lease-max": "lease_s_max", "remote-refresh": "remote_refresh_s",
    "reservation": "reservation_s", "write-queue": "write_queue_bytes", "arena-size": "arena_bytes",
}  # fmt: skip


def field_of(key: str) -> str:
    """Return the field of Settings that `key` sets."""
    return FIELDS.get(key, key.replace("-", "_"))


def as_words(key: str, settings: Settings) -> Any:
    """Return the setting `key` as the config file holds it: text, a number, true or false, a list or a table."""
    value = getattr(settings, field_of(key))
    if key == "http":
        return value or "off"
    if key == "remote":
        return settings.remote and shown(settings.remote)
    if key == "tenant":
        return {name: _principals(who) for name, who in settings.tenants.items()}
    if key == "admin":
        return _principals(settings.admins)
    if key == "quota":
        return {tenant: dict(sizes) for tenant, sizes in settings.quotas.items()}
    if isinstance(value, tuple):
        return list(settings.tiers)
    return str(value) if isinstance(value, Path) else value


def as_toml(settings: Settings, sources: Mapping[str, str], idle: Mapping[str, str], *, explain: bool) -> str:
    """Return the settings as a config file, each with its source.

    `explain` puts what a setting is for above it, and comments out what is a default.
    """
    lines: list[str] = []
    for option in OPTIONS:
        if explain:
            lines += ["", f"# {option.summary}"]
        words = as_words(option.key, settings)
        remark = ", ".join(text for text in (_readable(option, words), sources[option.key]) if text)
        if option.key in idle:
            lines.append(f"# {option.key}: {idle[option.key]}")
        else:
            # A file that starts out from this should not fix what is a default, and may be another one elsewhere.
            mark = "# " if explain and sources[option.key] == "default" else ""
            lines.append(f"{mark}{option.key} = {_toml(words)}  # {remark}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _readable(option: Option, words: Any) -> str:
    if option.metavar == "SIZE" and words:
        return format_size(words)
    return format_duration(words) if option.metavar == "DURATION" else ""


def _principals(who: Principals) -> list[str]:
    return [f"uid:{uid}" for uid in sorted(who.uids)] + [f"gid:{gid}" for gid in sorted(who.gids)]


def _toml(words: Any) -> str:
    if isinstance(words, dict):
        entries = ", ".join(f"{json.dumps(str(key))} = {_toml(value)}" for key, value in words.items())  # pyright: ignore
        return "{" + entries + "}"
    # Lists, texts, numbers and booleans are written alike in TOML and JSON.
    return json.dumps(words, ensure_ascii=False)
