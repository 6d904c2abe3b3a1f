"""What a test leaves behind, told by name: nothing may be.

`take` writes down what this process holds; `leaks` looks again and names what was not there before.
tests/conftest.py puts every test, and every worker's whole run, between two such looks.

1. A thing is reported once it has outlived a grace (a killed child takes a moment to go); the grace is waited
   for only when there is something to report, so a clean test pays for two looks (1 ms) and no more.
2. Whatever was there before is nobody's leak: fixtures of a wider scope may hold what they like.
3. Only this process's own tree and its own temp directory are looked at, so two workers, or two runs at once,
   never blame each other; /dev/shm, which all share, only by a process that runs the tests alone.
"""

from __future__ import annotations

import asyncio.runners
import ctypes
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
# Opened once, on first use, for the life of the process.
_LAZY_FILES = frozenset({"/dev/urandom", "/dev/random"})
_LAZY_THREADS = frozenset({"TMonitor"})  # tqdm's
_LAZY_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process holds: each field maps an identity to a name for people."""

    fds: dict[int, str]
    threads: dict[threading.Thread, str]
    children: dict[int, str]
    mappings: dict[str, str]
    files: dict[str, str]
    shm: dict[str, str]


def take(temp_dir: Path | None = None, *, shm: bool = True) -> Footprint:
    """Return what this process holds now.

    Parameters
    ----------
    temp_dir : Path, optional
        The directory whose entries count as files left behind.
    shm : bool
        Whether to look at /dev/shm, which this process shares with every other.
    """
    return Footprint(
        fds=_open_fds(),
        threads={t: t.name for t in threading.enumerate() if type(t).__name__ not in _LAZY_THREADS},
        children=_children(),
        mappings=_memfd_mappings(),
        files=_entries(temp_dir),
        shm=_entries(SHM if shm else None),
    )


def leaks(
    before: Footprint, temp_dir: Path | None = None, *, shm: bool = True, grace_s: float = 3.0
) -> list[str]:
    """Return a line for each thing held now and not in `before`, once it has outlived the grace."""
    lines = _compare(before, take(temp_dir, shm=shm))
    if not lines:
        return []
    gc.collect()
    deadline = time.monotonic() + grace_s
    while True:
        lines = _compare(before, take(temp_dir, shm=shm))
        if not lines or time.monotonic() >= deadline:
            return lines
        time.sleep(0.01)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that a stray grandchild is seen here."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def note_tasks_at_loop_end() -> list[str]:
    """Return a list to which, from now on, the end of each asyncio.run adds the tasks it has to cancel."""
    noted: list[str] = []
    cancel_all_tasks: Callable[[asyncio.AbstractEventLoop], None] = asyncio.runners.__dict__[
        "_cancel_all_tasks"
    ]

    def noting(loop: asyncio.AbstractEventLoop) -> None:
        noted.extend(repr(task) for task in asyncio.all_tasks(loop))
        cancel_all_tasks(loop)

    # There is no public hook between a main coroutine's return and the cancelling of what it left.
    asyncio.runners.__dict__["_cancel_all_tasks"] = noting
    return noted


def _compare(before: Footprint, after: Footprint) -> list[str]:
    lines = [
        f"fd {fd} still open: {_fd_name(fd, target)}"
        for fd, target in after.fds.items()
        if before.fds.get(fd) != target
    ]
    lines += [
        f"thread still running: {name}{' (daemon)' if thread.daemon else ''}"
        for thread, name in after.threads.items()
        if thread not in before.threads
    ]
    for what, then, now in (
        ("process still running", before.children, after.children),
        ("memory still mapped", before.mappings, after.mappings),
        ("file left in the temp directory", before.files, after.files),
        ("entry left in /dev/shm", before.shm, after.shm),
    ):
        lines += [f"{what}: {name}" for key, name in now.items() if key not in then]
    return lines


def _open_fds() -> dict[int, str]:
    fds: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target not in _LAZY_FILES:
            fds[int(name)] = target.removesuffix(" (deleted)")
    return fds


def _fd_name(fd: int, target: str) -> str:
    """Return `target`, with both ends' addresses if the descriptor is a socket."""
    if not target.startswith("socket:"):
        return target
    try:
        with socket.socket(fileno=os.dup(fd)) as view:
            try:
                peer = view.getpeername()
            except OSError:
                peer = "no peer"
            return f"{target} {view.family.name} {view.getsockname()!r} -> {peer!r}"
    except OSError:
        return target


def _children() -> dict[int, str]:
    """Return the living children of every thread; a zombie holds nothing and is not counted."""
    found: dict[int, str] = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{thread}/children").read_text().split()
        except OSError:
            continue  # the thread has ended
        for pid in pids:
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            command = b" ".join(arguments).decode(errors="replace").strip()
            if command and not any(lazy in command for lazy in _LAZY_CHILDREN):
                found[int(pid)] = f"{pid} {command[:200]}"
    return found


def _memfd_mappings() -> dict[str, str]:
    found: dict[str, str] = {}
    maps = Path("/proc/self/maps").read_bytes()
    if b"/memfd:" not in maps:
        return found
    for line in maps.decode(errors="replace").splitlines():
        if "/memfd:" in line:
            _, _, _, _, inode, name = line.split(maxsplit=5)
            found[f"{inode} {name}"] = f"{name} (inode {inode})"
    return found


def _entries(directory: Path | None) -> dict[str, str]:
    if directory is None or not directory.is_dir():
        return {}
    return {name: str(directory / name) for name in os.listdir(directory)}
