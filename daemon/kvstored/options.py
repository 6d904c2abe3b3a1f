"""Every setting of the daemon: its names, its reader, its default, and what it is for, in one table.

Invariants
1. A setting has one key. The flag is --KEY, the variable KVSTORED_KEY with underscores, the file's key KEY.
2. Nothing here looks at the machine or at other settings: that is config.py's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstored import readers
from kvstored.readers import choice, duration, integer, size
from kvstored.remote.opening import shown

VARIABLE_PREFIX = "KVSTORED_"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting as an operator sees it. `default` is in the words of the file; None: see `default_text`."""

    key: str
    metavar: str
    read: Callable[[Any], Any]
    summary: str
    default: Any = None
    default_text: str = ""
    repeated: bool = False
    prefix: str = VARIABLE_PREFIX
    shown: Callable[[str], str] | None = None  # how what was written is printed, where it may hold a password

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        return self.prefix + self.key.upper().replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.read is readers.read_switch


@dataclass(frozen=True, slots=True)
class Alias:
    """A variable of another system that stands for a setting; `in_words` turns its text into ours."""

    variable: str
    key: str
    in_words: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The settings of one command; `example` is a key and a value of it, for the help."""

    command: str
    description: str
    example: tuple[str, str]
    options: tuple[Option, ...]
    aliases: tuple[Alias, ...] = ()

    @property
    def by_key(self) -> dict[str, Option]:
        return {option.key: option for option in self.options}

    @property
    def prefix(self) -> str:
        return f"{self.command.upper()}_"


OPTIONS = (
    Option(
        "tiers", "LIST", readers.read_tiers,
        "tiers to keep blocks in; auto: cpu, and ssd where it can be", "auto",
    ),
    Option(
        "cpu-size", "SIZE", size(4 << 20), "shared memory for blocks, reserved for real at start; a hard cap",
        default_text="25 % of MemAvailable, or what the control group leaves if that is less",
    ),
    Option(
        "ssd-size", "SIZE", size(8 << 20), "hard cap on disk for blocks, index and temporary files together",
        default_text="10 % of the filesystem, or half of what is free if that is less",
    ),
    Option(
        "ssd-dir", "DIR", readers.read_path, "directory of the ssd tier; one daemon a directory",
        default_text="$STATE_DIRECTORY/ssd, /var/lib/kvstored/ssd for root, else under $XDG_STATE_HOME",
    ),
    Option(
        "remote", "URL", readers.read_remote,
        "store of the remote tier: s3://, gs://, az://, file:// or redis://", default_text="none", shown=shown,
    ),
    Option(
        "remote-size", "SIZE", size(1 << 20),
        "hard cap on what this daemon keeps in an object store, or all daemons together in a Redis",
        default_text="none: the remote tier needs one",
    ),
    Option(
        "remote-write-policy", "POLICY", choice("through", "second-touch", "back"),
        "when a block goes to the remote tier: at its seal, at its second use, or when it is about to leave this node",
        "second-touch",
    ),
    Option(
        "remote-writer", "NAME", readers.read_writer,
        "name under which this daemon keeps objects, its own and the same at each start",
        default_text="the host's name and a number made of the socket's path",
    ),
    Option(
        "remote-refresh", "DURATION", duration(0.05, 3600),
        "how often an object store is listed for what others have written, at most", "10s",
    ),
    Option(
        "socket", "PATH", readers.read_path, "unix socket that clients connect to",
        default_text="in $XDG_RUNTIME_DIR, else /run/kvstored for root, else /tmp/kvstored-UID",
    ),
    Option(
        "http", "HOST:PORT", readers.read_address,
        "serve /metrics, /healthz and /readyz here; a port alone means 127.0.0.1", "127.0.0.1:9469",
    ),
    Option(
        "ttl", "DURATION", duration(0, 1e9),
        "life of a block from its write where its writer names none; 0: no end", "0s",
    ),
    Option(
        "ttl-mode", "MODE", choice("write", "access"),
        "whether the life that a block has from its namespace counts from its write or from its last use", "write",
    ),
    Option("eviction", "POLICY", choice("lru", "reuse"), "which block goes first when a tier is full", "lru"),
    Option(
        "write-policy", "POLICY", choice("through", "second-touch", "back"),
        "when a block goes to the ssd tier: at its seal, at its second use, or when memory needs its place",
        "through",
    ),
    Option(
        "mode", "MODE", choice("trusted", "strict"),
        "strict: clients can read the pool only, and write through arenas of their own", "trusted",
    ),
    Option(
        "allow-shared-pool-across-tenants", "", readers.read_switch,
        "start trusted mode with several tenants, each of which can then read and write every block", False,
    ),
    Option("arena-size", "SIZE", size(4 << 20), "strict mode: memory that each client writes through", "64MiB"),
    Option(
        "verify-reads", "", readers.read_switch,
        "check every block read from memory against its checksum", False,
    ),
    Option(
        "checksum-at-seal", "WHEN", choice("auto", "always", "never"),
        "which blocks get a checksum at their seal; auto: those that leave memory or are verified", "auto",
    ),
    Option(
        "huge-pages", "WHEN", choice("auto", "off", "require"),
        "huge pages for the pool; require: don't start without", "auto",
    ),
    Option(
        "quota", "TENANT:TIER=SIZE", readers.read_quotas, "the most a tenant may hold in a tier",
        default_text="none", repeated=True,
    ),
    Option(
        "tenant", "NAME=uid:N,gid:N", readers.read_tenants,
        "a tenant, by its users and groups; others are refused",
        default_text="everybody is the tenant named default", repeated=True,
    ),
    Option(
        "admin", "uid:N,gid:N", readers.read_principals, "who may drop, evict, pin and drain",
        default_text="root and the daemon's own user", repeated=True,
    ),
    Option(
        "high-watermark", "FRACTION", readers.read_fraction,
        "part of a tier in use from which it evicts ahead", 0.95,
    ),
    Option(
        "low-watermark", "FRACTION", readers.read_fraction,
        "part of a tier in use down to which it evicts ahead", 0.92,
    ),
    Option(
        "drain-timeout", "DURATION", duration(0, 3600),
        "at SIGTERM, how long to write out what only memory holds", "30s",
    ),
    Option(
        "lease-max", "DURATION", duration(0.1, 3600), "the longest a copying read may hold a block", "60s"
    ),
    Option(
        "reservation", "DURATION", duration(0.1, 3600),
        "how long a writer may take before another is let in", "10s",
    ),
    Option("sessions-max", "N", integer(1, 100_000), "the most connections at a time", 1024),
    Option("io-threads", "N", integer(1, 64), "threads that read and write the ssd tier", 4),
    Option(
        "write-queue", "SIZE", size(1 << 20),
        "bytes that may wait to be written to ssd; past that they are left out and counted", "256MiB",
    ),
    Option(
        "log-level", "LEVEL", choice("debug", "info", "warning", "error"),
        "least important line to log", "info",
    ),
    Option(
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
