"""What this machine has and allows: memory, disks, devices, limits. Settings are checked against it.

Invariants
1. Nothing is changed by looking: no directory is made, no file is written, no device is opened.
2. A fact that can't be had is the harmless answer (no limit, no device), except where writing is concerned.
"""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvstored.cgroup import MemoryLimit, memory_limits

_MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# LMDB's locks and memory map need one machine's page cache.
_NETWORK_KINDS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ncpfs"})


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem that a directory is, or would be made, on."""

    kind: str
    total_bytes: int
    free_bytes: int

    @property
    def in_memory(self) -> bool:
        return self.kind in _MEMORY_KINDS

    @property
    def on_network(self) -> bool:
        return self.kind in _NETWORK_KINDS


class Host:
    """The machine this process runs on. Tests override what they need."""

    def mem_available_bytes(self) -> int:
        """Return what the kernel says can be taken without swapping."""
        try:
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def memory_limits(self) -> list[MemoryLimit]:
        """Return everything that bounds the memory of this process, the tightest first."""
        available = self.mem_available_bytes()
        limits = [*memory_limits(), MemoryLimit("MemAvailable of /proc/meminfo", available, available)]
        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
        if address_space != resource.RLIM_INFINITY:
            room = max(0, address_space - _mapped_bytes())
            limits.append(MemoryLimit("RLIMIT_AS (ulimit -v)", address_space, room))
        return sorted(limits, key=lambda limit: limit.room_bytes)

    def file_size_limit_bytes(self) -> int | None:
        """Return RLIMIT_FSIZE, which bounds a memfd and every file, or None where there is none."""
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    def cuda_device_missing(self) -> str | None:
        """Return why no CUDA device can be used, or None if one can. Loads no torch and starts no context."""
        if not any(Path("/dev").glob("nvidia[0-9]*")):
            return "there is no /dev/nvidia0"
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is a /dev/nvidia0, but libcuda.so.1 can't be loaded"
        return None

    def filesystem(self, path: Path) -> Filesystem:
        """Return the filesystem of `path`, or of its nearest ancestor that exists. Raises OSError."""
        existing = nearest_existing(path)
        found = os.statvfs(existing)
        kind = _filesystem_kind(existing.resolve())
        return Filesystem(kind, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def occupied_bytes(self, directory: Path) -> int:
        """Return what the files of `directory` take on disk: after a restart that room is ours already."""
        occupied = 0
        for parent, _, names in os.walk(directory):
            for name in names:
                try:
                    occupied += os.lstat(os.path.join(parent, name)).st_blocks * 512
                except OSError:
                    continue
        return occupied

    def unwritable(self, directory: Path) -> str | None:
        """Return why nothing can be written in `directory`, which may yet have to be made, or None."""
        existing = nearest_existing(directory)
        if not existing.is_dir():
            return f"{existing} is not a directory"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} is not writable for uid {os.geteuid()}"
        return None


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest of its ancestors that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _filesystem_kind(path: Path) -> str:
    best, kind = -1, "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        # Later mounts hide earlier ones at the same place.
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), right.split()[0]
    return kind


def _mapped_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
