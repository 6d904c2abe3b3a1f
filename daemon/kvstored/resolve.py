"""From what was given to settings in effect: completed with defaults for this machine, and checked against it.

Invariants
1. Every fault is reported at once and nothing is started. Settings that come out can be started here and now.
2. A setting that was given and would have no effect is a fault, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.paths import (
    check_socket_path,
    default_socket_path,
    is_default_directory,
    refuse_foreign_directory,
)
from kvstore.units import describe_size
from kvstored.config import DEFAULT_TENANT, Settings, field_of
from kvstored.host import Filesystem, Host
from kvstored.options import OPTIONS, TABLE
from kvstored.readers import TIERS, Principals
from kvstored.remote.opening import default_writer
from kvstored.sources import Fault, Given, gather

CHUNK_BYTES = 2 << 20
CPU_SIZE_BYTES_MIN = 4 << 20
SSD_SIZE_BYTES_MIN = 8 << 20
# Segment files and the index of a large tier may each grow to about this.
SSD_FILE_BYTES_MAX = 1 << 30
# What the interpreter, the libraries and the catalog of a modest store take beside the pool.
OWN_MEMORY_BYTES = 64 << 20

# What a setting needs to have an effect: a tier, or the other mode.
_NEEDS = {
    "ssd-size": "ssd", "ssd-dir": "ssd", "io-threads": "ssd", "write-queue": "ssd or remote", "write-policy": "ssd",
    "remote": "remote", "remote-size": "remote", "remote-write-policy": "remote", "remote-writer": "remote",
    "remote-refresh": "remote",
    "arena-size": "strict", "allow-shared-pool-across-tenants": "trusted",
}  # fmt: skip
_RAISE_LIMIT = {
    "cgroup": "raise that limit (MemoryMax= of systemd, --memory of docker, resources.limits.memory of Kubernetes)",
    "MemAvailable": "free memory on this machine",
    "RLIMIT_AS": "raise the limit (ulimit -v, LimitAS= of systemd)",
}


@dataclass(frozen=True, slots=True)
class Resolution:
    """The outcome of reading all settings. `settings` is None exactly if there are faults."""

    settings: Settings | None
    sources: Mapping[str, str]
    idle: Mapping[str, str]
    notes: tuple[str, ...]
    faults: tuple[Fault, ...]


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: Path | None = None,
    host: Host | None = None,
    faults: tuple[Fault, ...] = (),
) -> Resolution:
    """Return the settings in effect, or everything that is wrong with what was given.

    `flags` maps keys to text as written; `faults` are those of the command line itself, to be told with the others.
    """
    resolver = _Resolver(gather(flags, environ, config, TABLE), environ, host or Host())
    resolver.faults[:0] = faults
    return resolver.resolve()


class _Resolver:
    """One pass over what was given: completes it, checks it, and collects sources, notes and faults."""

    def __init__(self, given: Given, environ: Mapping[str, str], host: Host) -> None:
        self.given = given
        self.environ = environ
        self.host = host
        self.faults = given.faults
        self.sources = dict(given.sources)
        self.notes: list[str] = []
        self.idle: dict[str, str] = {}

    def resolve(self) -> Resolution:
        # What could not be read has its fault already; its default stands in so that the rest is checked too.
        values = {option.key: self._value(option.key) for option in OPTIONS}
        values["socket"] = self._socket()
        values["ssd-dir"] = values["ssd-dir"] or self._default_ssd_dir()
        values["tiers"] = self._tiers(values["tiers"], values["ssd-dir"])
        self._check_effective(values)
        values["cpu-size"] = self._cpu_size(values)
        if "ssd" in values["tiers"]:
            values["ssd-size"] = self._ssd_size(values["ssd-dir"])
        else:
            values["ssd-dir"] = values["ssd-size"] = None
        self._check_remote(values)
        if "write-queue" not in self.given.values:
            values["write-queue"] = values["cpu-size"]  # what waits there holds no memory of its own
        self._check_tenants(values)
        self._check_together(values)
        settings = None
        if not self.faults:
            settings = self._settings(values)
        return Resolution(settings, self.sources, self.idle, tuple(self.notes), tuple(self.faults))

    def _value(self, key: str) -> Any:
        if key in self.given.values:
            return self.given.values[key]
        option = next(option for option in OPTIONS if option.key == key)
        self.sources.setdefault(key, "default")
        return None if option.default is None else option.read(option.default)

    def _fault(self, key: str, problem: str) -> None:
        self.faults.append(Fault(key, self.given.written.get(key), self.sources[key], problem))

    def _settings(self, values: Mapping[str, Any]) -> Settings:
        settings = Settings(socket=values["socket"], cpu_size_bytes=values["cpu-size"])
        chosen = {field_of(key): value for key, value in values.items() if value is not None}
        if values["http"] is not None:
            host, port = values["http"]
            chosen["http"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            chosen["http_by_default"] = "http" not in self.given.values
        return replace(settings, **chosen)

    # ---- tiers and directories

    def _tiers(self, wanted: tuple[str, ...], ssd_dir: Path) -> tuple[str, ...]:
        if wanted == ("auto",):
            if self.host.cuda_device_missing() is None:
                self.notes.append("this machine has a CUDA device, but this version has no gpu tier yet")
            obstacle = self._ssd_obstacle(ssd_dir, auto=True)
            if obstacle:
                self.notes.append(f"no ssd tier: {obstacle}")
                return ("cpu",)
            return ("cpu", "ssd")
        for tier in wanted:
            if tier == "gpu":
                self._fault("tiers", self._no_gpu())
        if "cpu" not in wanted:
            self._fault("tiers", "the cpu tier is where clients read and write: add it, as in --tiers cpu,ssd")
        if "ssd" in wanted and (obstacle := self._ssd_obstacle(ssd_dir, auto=False)):
            self._fault("ssd-dir", obstacle)
        return wanted

    def _no_gpu(self) -> str:
        missing = self.host.cuda_device_missing()
        if missing:
            return (
                f"the gpu tier needs a CUDA device and {missing}: start with --tiers cpu,ssd, or make the device "
                "visible (docker run --gpus all; nvidia-smi must work)"
            )
        return "there is a CUDA device, but this version has no gpu tier yet: start with --tiers cpu,ssd"

    def _default_ssd_dir(self) -> Path:
        if state := self.environ.get("STATE_DIRECTORY"):  # systemd's, a list
            return Path(state.split(":")[0]).absolute() / "ssd"
        if os.geteuid() == 0:
            return Path("/var/lib/kvstored/ssd")
        if state := self.environ.get("XDG_STATE_HOME"):
            return Path(state).absolute() / "kvstored/ssd"
        try:
            home = Path(self.environ.get("HOME") or "~").expanduser()
        except RuntimeError:  # a user without an entry, as containers have them: told as a directory of root's is
            return Path("/var/lib/kvstored/ssd")
        return home.absolute() / ".local/state/kvstored/ssd"

    def _ssd_obstacle(self, directory: Path, *, auto: bool) -> str | None:
        """Return why `directory` can't hold the ssd tier, with what to do about it."""
        if reason := _unspeakable(directory):
            return f"{reason}: choose another --ssd-dir"
        # A directory that was named must not be made on the root disk when the disk it was meant for isn't mounted.
        if directory != self._default_ssd_dir() and not directory.parent.is_dir():
            return f"its parent {directory.parent} does not exist: mount the disk, or mkdir -p {directory.parent}"
        if reason := self.host.unwritable(directory):
            return f"{reason}: choose another --ssd-dir, or change its owner"
        filesystem = self._filesystem(directory)
        if filesystem is None:
            return f"the filesystem of {directory} can't be examined: choose another --ssd-dir"
        if filesystem.on_network:
            return f"{directory} is on {filesystem.kind}, where the index can't be kept: choose a local disk"
        if filesystem.in_memory:
            if auto:
                return f"{directory} is on {filesystem.kind}, which is memory: name a disk with --ssd-dir"
            self.notes.append(f"the ssd tier is on {filesystem.kind}: it takes memory and is lost at a reboot")
        return None

    def _filesystem(self, directory: Path) -> Filesystem | None:
        try:
            return self.host.filesystem(directory)
        except OSError:
            return None

    def _socket(self) -> Path:
        path: Path = self.given.values.get("socket") or default_socket_path(self.environ)
        if reason := _unspeakable(path):
            self._fault("socket", f"{reason}: choose another --socket")
            return path
        try:
            check_socket_path(path)
            refuse_foreign_directory(path.parent)
        except KVStoreError as exc:
            self._fault("socket", str(exc))
            return path
        parent = path.parent
        if not parent.is_dir() and not is_default_directory(parent):
            self._fault("socket", f"the directory {parent} does not exist: make it, or choose another --socket")
        elif reason := self.host.unwritable(parent):
            self._fault("socket", f"{reason}: choose another --socket, or change its owner")
        elif path.exists() and not path.is_socket():
            self._fault("socket", f"{path} exists and is not a socket: remove it, or choose another --socket")
        return path

    # ---- sizes

    def _cpu_size(self, values: Mapping[str, Any]) -> int:
        own_bytes = OWN_MEMORY_BYTES + (values["arena-size"] if values["mode"] == "strict" else 0)
        limits = self.host.memory_limits()
        file_limit = self.host.file_size_limit_bytes()
        if values["cpu-size"] is None:
            rooms = [limit.room_bytes - own_bytes for limit in limits]
            size_bytes = min([self.host.mem_available_bytes() // 4, *rooms])
            if file_limit is not None:
                size_bytes = min(size_bytes, file_limit)
            size_bytes = max(CPU_SIZE_BYTES_MIN, size_bytes // CHUNK_BYTES * CHUNK_BYTES)
        else:
            size_bytes = int(values["cpu-size"])
        for limit in limits[:1]:
            if limit.room_bytes < size_bytes + own_bytes:
                most = (limit.room_bytes - own_bytes) // CHUNK_BYTES * CHUNK_BYTES
                remedy = next(text for name, text in _RAISE_LIMIT.items() if limit.name.startswith(name))
                if most >= CPU_SIZE_BYTES_MIN:
                    remedy = f"give --cpu-size {most} or less, or {remedy}"
                self._fault(
                    "cpu-size",
                    f"{describe_size(size_bytes)} and {describe_size(own_bytes)} for the daemon itself are needed, "
                    f"but {limit.name} is {describe_size(limit.limit_bytes)} and has "
                    f"{describe_size(limit.room_bytes)} free: {remedy}",
                )
        if file_limit is not None and size_bytes > file_limit:
            self._file_limit_fault("cpu-size", size_bytes, file_limit, "a file, shared memory included")
        return size_bytes

    def _file_limit_fault(self, key: str, needed_bytes: int, file_limit: int, what: str) -> None:
        self._fault(
            key,
            f"{describe_size(needed_bytes)} are needed, but RLIMIT_FSIZE (ulimit -f) allows "
            f"{describe_size(file_limit)} {what}: give --{key} {file_limit} or less, "
            "or raise it (ulimit -f unlimited, LimitFSIZE=infinity of systemd)",
        )

    def _ssd_size(self, directory: Path) -> int:
        filesystem = self._filesystem(directory)
        if filesystem is None or any(fault.key == "ssd-dir" for fault in self.faults):
            return SSD_SIZE_BYTES_MIN
        # Our own files are room too: the default stays the same over a restart, and a given size keeps fitting.
        room_bytes = filesystem.free_bytes + self.host.occupied_bytes(directory)
        given: int | None = self.given.values.get("ssd-size")
        size_bytes = min(filesystem.total_bytes // 10, room_bytes // 2) if given is None else given
        size_bytes = max(size_bytes, SSD_SIZE_BYTES_MIN)
        if size_bytes > room_bytes:
            self._fault(
                "ssd-size",
                f"{describe_size(size_bytes)} are needed, but the filesystem of {directory} "
                f"({describe_size(filesystem.total_bytes)}) has room for {describe_size(room_bytes)}: "
                f"give --ssd-size {room_bytes * 9 // 10} or less, free space, or choose another --ssd-dir",
            )
        file_limit = self.host.file_size_limit_bytes()
        if file_limit is not None and min(size_bytes, SSD_FILE_BYTES_MAX) > file_limit:
            self._file_limit_fault("ssd-size", min(size_bytes, SSD_FILE_BYTES_MAX), file_limit, "a file")
        return size_bytes

    # ---- settings that depend on each other

    def _check_effective(self, values: Mapping[str, Any]) -> None:
        for key, need in _NEEDS.items():
            wanted = need.split(" or ")
            if not {values["mode"], *values["tiers"]}.isdisjoint(wanted):
                continue
            is_tier = wanted[0] in TIERS
            reason = f"it has no effect in {values['mode']} mode"
            if is_tier:
                reason = f"it has no effect without the {need} tier"
                reason += "".join(f" ({note})" for note in self.notes if note.startswith(f"no {wanted[0]} tier"))
            self.idle[key] = reason
            if key in self.given.values:
                remedy = f"add {need} to --tiers" if is_tier else f"set --mode {need}"
                self._fault(key, f"{reason}: remove it, or {remedy}")

    def _check_remote(self, values: dict[str, Any]) -> None:
        if "remote" not in values["tiers"]:
            values["remote"] = values["remote-size"] = values["remote-writer"] = None
            return
        for key, example in (("remote", "s3://bucket/prefix"), ("remote-size", "10TiB")):
            if key not in self.given.values and not any(fault.key == key for fault in self.faults):
                self._fault(key, f"the remote tier needs it: add --{key}, as in --{key} {example}")
        values["remote-writer"] = values["remote-writer"] or default_writer(values["socket"])

    def _check_tenants(self, values: dict[str, Any]) -> None:
        tenants: dict[str, Principals] = values["tenant"] or {}
        quotas: dict[str, dict[str, int]] = values["quota"] or {}
        if values["admin"] is None:
            values["admin"] = Principals(frozenset({0, os.geteuid()}))
        if len(tenants) > 1 and values["mode"] == "trusted" and not values["allow-shared-pool-across-tenants"]:
            self._fault(
                "tenant",
                f"in trusted mode every client can read and write all blocks, so {len(tenants)} tenants would not be "
                "kept apart: set --mode strict, or accept it with --allow-shared-pool-across-tenants",
            )
        owners: dict[tuple[str, int], str] = {}
        for tenant, who in tenants.items():
            for principal in [("uid", uid) for uid in who.uids] + [("gid", gid) for gid in who.gids]:
                if (other := owners.setdefault(principal, tenant)) != tenant:
                    self._fault(
                        "tenant", f"{principal[0]}:{principal[1]} is in {other} and in {tenant}: keep it in one"
                    )
        for tenant, sizes in quotas.items():
            if tenant not in (tenants.keys() or {DEFAULT_TENANT}):
                known = ", ".join(tenants) or f"{DEFAULT_TENANT}, as no --tenant is set"
                self._fault("quota", f"there is no tenant {tenant}: name one of {known}, or add --tenant {tenant}=WHO")
            for tier in sizes:
                if tier not in values["tiers"]:
                    self._fault("quota", f"it has no effect: the tier {tier} of {tenant}:{tier} is not in --tiers")

    def _check_together(self, values: Mapping[str, Any]) -> None:
        if values["low-watermark"] >= values["high-watermark"]:
            key = "low-watermark" if "low-watermark" in self.given.values else "high-watermark"
            self._fault(
                key,
                f"the low watermark {values['low-watermark']:g} is not below the high one "
                f"{values['high-watermark']:g}: lower it, or raise the other",
            )
        if values["verify-reads"] and values["checksum-at-seal"] == "never":
            self._fault("verify-reads", "there is nothing to verify with --checksum-at-seal never: drop one of them")


def _unspeakable(path: Path) -> str | None:
    """Return why neither the index nor a report could hold a path, or None: both are UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{str(path)!a} is not valid UTF-8"
    return None
