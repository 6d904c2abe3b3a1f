"""How much memory the daemon's control groups still allow: cgroup v2, cgroup v1, and both mounted at once.

Invariants
1. Every ancestor counts: the room is what the tightest group on the way up to the mounted root leaves.
2. Nothing here raises: a file that is missing or unreadable is no limit, as on a machine without cgroups.
3. Page cache counts as room, as in the kernel's own MemAvailable: it is given up under pressure. Shared
   memory doesn't.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# v1 says "no limit" with the largest multiple of the page size; anything this large can't be a real one.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on this process's memory: where it is set, how large it is, how much of it is left."""

    name: str
    limit_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where one memory controller is mounted, and this process's group in it."""

    version: int
    mount: Path
    group: Path


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return every memory limit of this process's groups, the tightest first. Tests give another `root`."""
    found = [limit for hierarchy in _hierarchies(root) for limit in _limits(hierarchy, root)]
    return sorted(found, key=lambda limit: limit.room_bytes)


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    groups = _own_groups(root)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # "32 31 0:29 /docker/ab /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            version = 2
        elif kinds[0] == "cgroup" and "memory" in kinds[2].split(","):
            version = 1
        else:
            continue
        if version in groups:
            # In a container without a cgroup namespace the mount shows a subtree, and the group repeats it;
            # a group outside of what is mounted ("/../other") can't be read: the mount is all there is.
            shown, group = _unescaped(fields[3]), groups[version]
            inside = group.removeprefix(shown.rstrip("/")) if _is_within(group, shown) else ""
            mount = root / _unescaped(fields[4]).lstrip("/")
            yield _Hierarchy(version, mount, mount / inside.lstrip("/"))


def _own_groups(root: Path) -> dict[int, str]:
    groups: dict[int, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    return groups


def _limits(hierarchy: _Hierarchy, root: Path) -> Iterator[MemoryLimit]:
    group = hierarchy.group
    while True:
        if hierarchy.version == 2:
            names, current, prefix = ["memory.max", "memory.high"], "memory.current", ""
        else:
            names, current, prefix = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
        for name in names:
            limit = _number(group / name)
            if limit is not None and limit < _UNLIMITED_BYTES:
                used = max(0, (_number(group / current) or 0) - _page_cache_bytes(group, prefix))
                shown = "/" + str((group / name).relative_to(root))
                yield MemoryLimit(f"cgroup v{hierarchy.version} limit {shown}", limit, max(0, limit - used))
        if group == hierarchy.mount:
            return
        group = group.parent


def _page_cache_bytes(group: Path, prefix: str) -> int:
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    return sum(int(fields[1]) for fields in lines if len(fields) == 2 and fields[0] in wanted)


def _is_within(path: str, ancestor: str) -> bool:
    return ".." not in path.split("/") and (path == ancestor or path.startswith(ancestor.rstrip("/") + "/"))


def _unescaped(field: str) -> str:
    """Return a mountinfo field without its octal escapes (a backslash and 040 stand for a space)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
