"""Every setting of the daemon: its names, its reader, its default, and what it is for, in one table.

Invariants
1. Nothing here looks at the machine or at other settings: that is config.py's part.
"""

from __future__ import annotations

import functools
from typing import Any

from kvstore.errors import BadSetting
from kvstored import readers
from kvstored.readers import choice, duration, integer, size
from kvstored.remote.opening import check_url, shown
from kvstored.tables import Option, Table

VARIABLE_PREFIX = "KVSTORED_"


_option = functools.partial(Option, prefix=VARIABLE_PREFIX)


def read_remote(given: Any) -> str:
    """Return the URL of a remote store."""
    if not isinstance(given, str):
        raise BadSetting(f"{given!r} is no URL: write one such as s3://bucket/prefix")
    return check_url(given.strip())


OPTIONS = (
    _option(
        "tiers", "LIST", readers.read_tiers,
        "tiers to keep blocks in; auto: cpu, and ssd where it can be", "auto",
    ),
    _option(
        "cpu-size", "SIZE", size(4 << 20), "shared memory for blocks, reserved for real at start; a hard cap",
        default_text="25 % of MemAvailable, or what the control group leaves if that is less",
    ),
    _option(
        "ssd-size", "SIZE", size(8 << 20), "hard cap on disk for blocks, index and temporary files together",
        default_text="10 % of the filesystem, or half of what is free if that is less",
    ),
    _option(
        "ssd-dir", "DIR", readers.read_path, "directory of the ssd tier; one daemon a directory",
        default_text="$STATE_DIRECTORY/ssd, /var/lib/kvstored/ssd for root, else under $XDG_STATE_HOME",
    ),
    _option(
        "remote", "URL", read_remote,
        "store of the remote tier: s3://, gs://, az://, file:// or redis://", default_text="none", shown=shown,
    ),
    _option(
        "remote-size", "SIZE", size(1 << 20),
        "hard cap on what this daemon keeps in an object store, or all daemons together in a Redis",
        default_text="none: the remote tier needs one",
    ),
    _option(
        "remote-write-policy", "POLICY", choice("through", "second-touch", "back"),
        "when a block goes to the remote tier: at its seal, at its second use, or when it is about to leave this node",
        "second-touch",
    ),
    _option(
        "remote-writer", "NAME", readers.read_writer,
        "name under which this daemon keeps objects, its own and the same at each start",
        default_text="the host's name and a number made of the socket's path",
    ),
    _option(
        "remote-refresh", "DURATION", duration(0.05, 3600),
        "how often an object store is listed for what others have written, at most", "10s",
    ),
    _option(
        "socket", "PATH", readers.read_path, "unix socket that clients connect to",
        default_text="in $XDG_RUNTIME_DIR, else /run/kvstored for root, else /tmp/kvstored-UID",
    ),
    _option(
        "http", "HOST:PORT", readers.read_address,
        "serve /metrics, /healthz and /readyz here; a port alone means 127.0.0.1", "127.0.0.1:9469",
    ),
    _option(
        "ttl", "DURATION", duration(0, 1e9),
        "life of a block from its write where its writer names none; 0: no end", "0s",
    ),
    _option(
        "ttl-mode", "MODE", choice("write", "access"),
        "whether the life that a block has from its namespace counts from its write or from its last use", "write",
    ),
    _option("eviction", "POLICY", choice("lru", "reuse"), "which block goes first when a tier is full", "lru"),
    _option(
        "write-policy", "POLICY", choice("through", "second-touch", "back"),
        "when a block goes to the ssd tier: at its seal, at its second use, or when memory needs its place",
        "through",
    ),
    _option(
        "mode", "MODE", choice("trusted", "strict"),
        "strict: clients can read the pool only, and write through arenas of their own", "trusted",
    ),
    _option(
        "allow-shared-pool-across-tenants", "", readers.read_switch,
        "start trusted mode with several tenants, each of which can then read and write every block", False,
    ),
    _option("arena-size", "SIZE", size(4 << 20), "strict mode: memory that each client writes through", "64MiB"),
    _option(
        "verify-reads", "", readers.read_switch,
        "check every block read from memory against its checksum", False,
    ),
    _option(
        "checksum-at-seal", "WHEN", choice("auto", "always", "never"),
        "which blocks get a checksum at their seal; auto: those that leave memory or are verified", "auto",
    ),
    _option(
        "huge-pages", "WHEN", choice("auto", "off", "require"),
        "huge pages for the pool; require: don't start without", "auto",
    ),
    _option(
        "quota", "TENANT:TIER=SIZE", readers.read_quotas, "the most a tenant may hold in a tier",
        default_text="none", repeated=True,
    ),
    _option(
        "tenant", "NAME=uid:N,gid:N", readers.read_tenants,
        "a tenant, by its users and groups; others are refused",
        default_text="everybody is the tenant named default", repeated=True,
    ),
    _option(
        "admin", "uid:N,gid:N", readers.read_principals, "who may drop, evict, pin and drain",
        default_text="root and the daemon's own user", repeated=True,
    ),
    _option(
        "high-watermark", "FRACTION", readers.read_fraction,
        "part of a tier in use from which it evicts ahead", 0.95,
    ),
    _option(
        "low-watermark", "FRACTION", readers.read_fraction,
        "part of a tier in use down to which it evicts ahead", 0.92,
    ),
    _option(
        "drain-timeout", "DURATION", duration(0, 3600),
        "at SIGTERM, how long to write out what only memory holds", "30s",
    ),
    _option(
        "lease-max", "DURATION", duration(0.1, 3600), "the longest a copying read may hold a block", "60s"
    ),
    _option(
        "reservation", "DURATION", duration(0.1, 3600),
        "how long a writer may take before another is let in", "10s",
    ),
    _option("sessions-max", "N", integer(1, 100_000), "the most connections at a time", 1024),
    _option("io-threads", "N", integer(1, 64), "threads that read and write the ssd tier", 4),
    _option(
        "write-queue", "SIZE", size(1 << 20),
        "bytes that may wait to be written to ssd; past that they are left out and counted", "256MiB",
    ),
    _option(
        "log-level", "LEVEL", choice("debug", "info", "warning", "error"),
        "least important line to log", "info",
    ),
    _option(
        "log-format", "FORMAT", choice("text", "json"),
        "one event a line, as key=value or a JSON object", "text",
    ),
)  # fmt: skip

TABLE = Table(
    "kvstored",
    "Keeps the KV cache of this node's LLM engines in tiers: memory, then ssd.",
    ("cpu-size", "64GiB"),
    OPTIONS,
)
