"""The leak fixtures see what they are there to see, and name it."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import leaks


def _leaks(before: leaks.Footprint, temp_dir: Path | None = None) -> list[str]:
    return leaks.leaks(before, temp_dir, shm=False, grace_s=0)


@pytest.fixture
def before() -> leaks.Footprint:
    return leaks.take(shm=False)


def test_a_clean_test_has_no_leaks(before: leaks.Footprint) -> None:
    assert _leaks(before) == []


def test_an_open_socket_is_named_with_its_addresses(before: leaks.Footprint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (line,) = _leaks(before)
        assert f"127.0.0.1', {server.getsockname()[1]}" in line
    assert _leaks(before) == []


def test_a_memfd_is_seen_while_open_and_while_only_mapped(before: leaks.Footprint) -> None:
    fd = os.memfd_create("leak-probe")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED) as mapped:
        os.close(fd)
        mapped[0] = 1
        assert any(line.startswith("memory still mapped: /memfd:leak-probe") for line in _leaks(before))
    assert _leaks(before) == []


def test_a_running_thread_is_named(before: leaks.Footprint) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="leak-probe", daemon=True)
    thread.start()
    assert _leaks(before) == ["thread still running: leak-probe (daemon)"]
    release.set()
    thread.join()


def test_a_child_process_is_named_and_so_is_an_orphaned_grandchild(before: leaks.Footprint) -> None:
    middle = (
        "import subprocess, sys\n"
        "grandchild = subprocess.Popen(['sleep', '120'], stdout=subprocess.DEVNULL)\n"
        "print(grandchild.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert any(str(child.pid) in line and "process still running" in line for line in _leaks(before))
        child.kill()
    assert _leaks(before) == [f"process still running: {grandchild} sleep 120"]
    os.kill(grandchild, 9)
    os.waitpid(grandchild, 0)


def test_a_file_in_the_temp_directory_is_named(tmp_path: Path) -> None:
    before = leaks.take(tmp_path, shm=False)
    (tmp_path / "forgotten").touch()
    assert _leaks(before, tmp_path) == [f"file left in the temp directory: {tmp_path / 'forgotten'}"]


def test_a_task_that_outlives_its_main_coroutine_is_named(tasks_at_loop_end: list[str]) -> None:
    async def forgotten() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        kept = asyncio.create_task(forgotten(), name="leak-probe")
        await asyncio.sleep(0)
        assert not kept.done()

    asyncio.run(main())
    (task,) = tasks_at_loop_end
    assert "leak-probe" in task
    tasks_at_loop_end.clear()


def test_a_short_directory_leaves_room_for_a_socket_name(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(short_dir / "a-socket-with-a-rather-long-name.sock"))
