"""A machine of known size for tests of settings."""

from __future__ import annotations

from pathlib import Path

from kvstored.cgroup import MemoryLimit
from kvstored.host import Filesystem, Host

GIB = 1 << 30
TIB = 1 << 40


class KnownHost(Host):
    """64 GiB of memory, a 1 TiB disk that is half full, no device; each fact is an attribute to change."""

    def __init__(self) -> None:
        self.available_bytes = 64 * GIB
        self.groups: list[MemoryLimit] = []
        self.file_limit_bytes: int | None = None
        self.cuda_missing: str | None = "there is no /dev/nvidia0"
        self.disk = Filesystem("ext4", TIB, TIB // 2)
        self.ours_bytes = 0
        self.read_only: str | None = None

    def mem_available_bytes(self) -> int:
        return self.available_bytes

    def memory_limits(self) -> list[MemoryLimit]:
        available = MemoryLimit("MemAvailable of /proc/meminfo", self.available_bytes, self.available_bytes)
        return sorted([*self.groups, available], key=lambda limit: limit.room_bytes)

    def file_size_limit_bytes(self) -> int | None:
        return self.file_limit_bytes

    def cuda_device_missing(self) -> str | None:
        return self.cuda_missing

    def filesystem(self, path: Path) -> Filesystem:
        return self.disk

    def occupied_bytes(self, directory: Path) -> int:
        return self.ours_bytes

    def unwritable(self, directory: Path) -> str | None:
        return self.read_only
