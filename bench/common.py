"""What the benches share: a daemon of their own, the memcpy they are measured against, and how figures are printed.

A bench compares with a limit measured in the same run, interleaved with what it measures, and reports medians: machines
are shared and noisy, so only ratios mean anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient import Client, Component, Namespace, Slice
from kvstore import wire

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
START_S = 120.0


@dataclass
class Daemon:
    """A running daemon of the bench's own."""

    socket: Path
    directory: Path
    process: subprocess.Popen[bytes]
    arguments: tuple[str, ...]

    def client(self, **options: Any) -> Client:
        return Client(self.socket, **options)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and wait for it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)

    def start_again(self) -> None:
        """Start it on the same directory; returns at once."""
        self.process = subprocess.Popen(self.arguments, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def running_daemon(*flags: str, directory: Path | None = None) -> Generator[Daemon, None, None]:
    """Give a daemon with these flags, all of its memory reserved; removed afterwards with all it wrote."""
    own = Path(tempfile.mkdtemp(prefix="kvbench-", dir=directory))
    (own / "ssd").mkdir()
    socket = own / "s"
    given = [flag.replace("{ssd}", str(own / "ssd")) for flag in flags]
    arguments = (sys.executable, "-m", "kvstored", "--socket", str(socket), "--log-level", "error", *given)
    daemon = Daemon(socket, own, subprocess.Popen(arguments), arguments)
    try:
        wait_until_ready(daemon)
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(own, ignore_errors=True)


def wait_until_ready(daemon: Daemon) -> None:
    """Return when the daemon has reserved all of its memory."""
    ends_s = time.monotonic() + START_S
    with daemon.client() as client:
        while time.monotonic() < ends_s:
            if daemon.process.poll() is not None:
                raise SystemExit(f"the daemon ended with status {daemon.process.returncode}: see its message above")
            if client.ping() and client.admin(wire.Status(0))["ready_fraction"] >= 1:
                return
            time.sleep(0.02)
    raise SystemExit("the daemon was not ready in time: is there enough free memory?")


def namespace(block_bytes: int, name: str = "bench") -> Namespace:
    """Return a namespace whose blocks have this size."""
    component = Component("kv", "uint8", ("layer", "token", "dim"), (1, 16, block_bytes // 16))
    return Namespace(
        model=name, revision="1", dtype="uint8", components=(component,), block_tokens=16, slice=Slice((0, 1), (0, 1))
    )


class Buffer:
    """Page-aligned memory, touched."""

    def __init__(self, size_bytes: int, seed: int = 0) -> None:
        self.map = mmap.mmap(-1, size_bytes)
        unit = random.Random(seed).randbytes(1 << 20)
        for start in range(0, size_bytes, len(unit)):
            self.map[start : start + len(unit)] = unit[: size_bytes - start]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def blocks(self, block_bytes: int, count: int) -> list[memoryview]:
        whole = memoryview(self.map)
        return [whole[at * block_bytes : (at + 1) * block_bytes] for at in range(count)]


class SharedBuffer:
    """Shared memory like the daemon's pool, all of it real: what a copy to or from the pool is compared with."""

    def __init__(self, size_bytes: int) -> None:
        fd = os.memfd_create("bench")
        os.ftruncate(fd, size_bytes)
        self.map = mmap.mmap(fd, size_bytes)
        os.close(fd)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        if _madvise(self.address, size_bytes, _MADV_POPULATE_WRITE):
            raise SystemExit("there is not enough free memory for this bench")


def memcpy_s(destination: int, source: int, block_bytes: int, count: int) -> float:
    """Return the seconds that plain copies of `count` adjacent blocks take."""
    start = time.perf_counter()
    for offset in range(0, block_bytes * count, block_bytes):
        _memmove(destination + offset, source + offset, block_bytes)
    return time.perf_counter() - start


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that `function` takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the middle value."""
    return quantile(values, 0.5)


def hardware() -> dict[str, Any]:
    """Return what the figures were measured on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    load = os.getloadavg()[0]
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "load_1min_at_start": round(load, 2)}


def tell(text: str) -> None:
    """Say what is being done."""
    print(text, file=sys.stderr, flush=True)


def finish(report: dict[str, Any], *, as_json: bool, columns: Sequence[str]) -> None:
    """Print the report: as one line of JSON, or its rows as a table."""
    if as_json:
        print(json.dumps(report))
        return
    rows = report["rows"]
    widths = [max(len(column), *(len(str(row.get(column, ""))) for row in rows)) for column in columns]
    print("  ".join(column.rjust(width) for column, width in zip(columns, widths, strict=True)))
    for row in rows:
        print("  ".join(str(row.get(column, "")).rjust(width) for column, width in zip(columns, widths, strict=True)))
