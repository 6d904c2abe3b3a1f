"""Memory limits of control groups, read from trees as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

from kvstored.cgroup import memory_limits

MIB = 1 << 20


class Tree:
    """A root directory with /proc/self and /sys/fs/cgroup as some machine has them."""

    def __init__(self, root: Path, mounts: list[str], groups: list[str]) -> None:
        self.root = root
        self.write("proc/self/mountinfo", "".join(f"{line}\n" for line in mounts))
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in groups))

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def group(self, path: str, **values: str) -> None:
        for name, text in values.items():
            self.write(f"{path}/{name.replace('__', '.')}", text)


V2 = ["30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"]
V1 = [
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory",
]


def test_tightest_ancestor_of_v2_decides(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2, ["0::/system.slice/kvstored.service"])
    tree.group("sys/fs/cgroup/system.slice", memory__max=f"{100 * MIB}\n", memory__current=f"{90 * MIB}\n")
    tree.group(
        "sys/fs/cgroup/system.slice/kvstored.service",
        memory__max="max\n", memory__high=f"{80 * MIB}\n", memory__current=f"{20 * MIB}\n",
    )  # fmt: skip
    limits = memory_limits(tmp_path)
    assert [(limit.limit_bytes // MIB, limit.room_bytes // MIB) for limit in limits] == [(100, 10), (80, 60)]
    assert limits[0].name == "cgroup v2 limit /sys/fs/cgroup/system.slice/memory.max"


def test_page_cache_counts_as_room_and_shared_memory_does_not(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2, ["0::/"])
    tree.group(
        "sys/fs/cgroup", memory__max=f"{100 * MIB}", memory__current=f"{90 * MIB}",
        memory__stat=f"anon 5\nfile {60 * MIB}\nshmem {30 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n",
    )  # fmt: skip
    assert memory_limits(tmp_path)[0].room_bytes == 40 * MIB


def test_v1_limit_is_read_where_the_memory_controller_is_mounted(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V1, ["9:name=systemd:/", "4:memory:/a/b", "0::/"])
    tree.group("sys/fs/cgroup/memory", memory__limit_in_bytes="9223372036854771712")
    tree.group(
        "sys/fs/cgroup/memory/a/b", memory__limit_in_bytes=f"{64 * MIB}", memory__usage_in_bytes=f"{4 * MIB}",
        memory__stat=f"total_inactive_file {MIB}\ninactive_file 0\n",
    )  # fmt: skip
    limits = memory_limits(tmp_path)
    assert [(limit.limit_bytes, limit.room_bytes) for limit in limits] == [(64 * MIB, 61 * MIB)]
    assert "cgroup v1 limit /sys/fs/cgroup/memory/a/b/memory.limit_in_bytes" in limits[0].name


def test_container_without_a_namespace_of_its_own_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    mounts = ["35 31 0:32 /docker/ab\\040c /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"]
    tree = Tree(tmp_path, mounts, ["4:memory:/docker/ab c"])
    tree.group("sys/fs/cgroup/memory", memory__limit_in_bytes=f"{64 * MIB}", memory__usage_in_bytes="0")
    assert memory_limits(tmp_path)[0].room_bytes == 64 * MIB


def test_group_outside_of_the_mount_ends_at_the_mount(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2, ["0::/../elsewhere"])
    tree.group("sys/fs/cgroup", memory__max=f"{64 * MIB}", memory__current="0")
    assert memory_limits(tmp_path)[0].limit_bytes == 64 * MIB


def test_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    Tree(tmp_path, ["nonsense", "1 2 3 4"], ["nonsense"])
    assert memory_limits(tmp_path) == []


def test_this_machine_can_be_asked() -> None:
    assert all(limit.room_bytes >= 0 for limit in memory_limits())
