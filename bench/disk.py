"""How close does the ssd tier come to the same O_DIRECT loop without a daemon, and how fast is a restart?

    python -m bench.disk [--json] [--restart-blocks N] [--directory DIR]

Rounds of the bare loop's writes, puts that return when durable, the bare loop's reads and gets from ssd follow each
other, over the same number of 1 MiB blocks; a row's ratio is the median over rounds of (loop time / operation time).
The loop writes and reads preallocated files with O_DIRECT from 4 threads, and syncs once. Before a get the blocks are
evicted from memory.

The restart row: a store of 1 M blocks of 4 KiB on ssd is killed (kill -9, so there is nothing but the index to go
by); the time runs from exec to the first hit. The page cache is warm.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import (
    START_S,
    Buffer,
    Daemon,
    finish,
    hardware,
    median,
    namespace,
    quantile,
    running_daemon,
    tell,
    timed,
)  # fmt: skip
from kvclient import NamespaceHandle
from kvstore import wire

BLOCK_BYTES = 1 << 20
BATCH = 256
ROUNDS = 9
THREADS = 4
COLUMNS = ("op", "block_bytes", "batch", "gb_s", "ratio_loop", "p50_ms", "p99_ms")


class BareLoop:
    """The limit: the same bytes, the same threads, O_DIRECT, and nothing else."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "loop.bin"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, BLOCK_BYTES * BATCH)
        self._memory = memoryview(mmap.mmap(-1, BLOCK_BYTES * BATCH))
        self._memory[:] = bytes(BLOCK_BYTES) * BATCH
        self._threads = ThreadPoolExecutor(THREADS)

    def write(self) -> None:
        list(self._threads.map(self._write_part, range(THREADS)))
        os.fdatasync(self._fd)

    def read(self) -> None:
        list(self._threads.map(self._read_part, range(THREADS)))

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _write_part(self, part: int) -> None:
        for at in self._offsets(part):
            os.pwritev(self._fd, [self._memory[at : at + BLOCK_BYTES]], at)

    def _read_part(self, part: int) -> None:
        for at in self._offsets(part):
            os.preadv(self._fd, [self._memory[at : at + BLOCK_BYTES]], at)

    @staticmethod
    def _offsets(part: int) -> range:
        share = BATCH // THREADS * BLOCK_BYTES
        return range(part * share, (part + 1) * share, BLOCK_BYTES)


def throughput(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the rows of put and get beside the loop."""
    loop = BareLoop(daemon.directory)
    source, target = Buffer(BLOCK_BYTES * BATCH, 1), Buffer(BLOCK_BYTES * BATCH)
    put_from, get_into = source.blocks(BLOCK_BYTES, BATCH), target.blocks(BLOCK_BYTES, BATCH)
    times: dict[str, list[float]] = {name: [] for name in ("loop write", "put", "loop read", "get")}
    with daemon.client(deadline_s=120) as client:
        blocks = client.namespace(namespace(BLOCK_BYTES))
        for number in range(ROUNDS + 1):
            tell(f"round {number} of {ROUNDS}")
            hashes = [os.urandom(32) for _ in range(BATCH)]
            write_s = timed(loop.write)
            put_s = timed(partial(put_durably, blocks, hashes, put_from))
            client.admin(wire.Evict(0, "cpu"))
            read_s = timed(loop.read)
            get_s = timed(partial(get_all, blocks, hashes, get_into))
            if target.map[:] != source.map[:]:
                raise SystemExit("what was read is not what was written")
            blocks.drop(hashes)
            if number:  # the first round warms up: files are made, slots are written for the first time
                for name, value in zip(times, (write_s, put_s, read_s, get_s), strict=True):
                    times[name].append(value)
    loop.close()
    limits = {"loop write": "loop write", "put": "loop write", "loop read": "loop read", "get": "loop read"}
    return [row_of(name, values, times[limits[name]]) for name, values in times.items()]


def put_durably(blocks: NamespaceHandle, hashes: list[bytes], sources: list[memoryview]) -> None:
    """Store blocks; returns when all are durable."""
    stored = blocks.store(hashes, sources, durable=True, wait_s=60)
    if any(outcome != wire.Outcome.DURABLE for outcome in stored.outcomes):
        raise SystemExit(f"not all blocks became durable: {set(stored.outcomes)}")


def get_all(blocks: NamespaceHandle, hashes: list[bytes], into: list[memoryview]) -> None:
    """Fetch blocks that are all there."""
    found = blocks.fetch(hashes, into)
    if found.hits != len(hashes):
        raise SystemExit(f"only {found.hits} of {len(hashes)} blocks were read: {set(found.outcomes)}")


def row_of(op: str, values: list[float], limit: list[float]) -> dict[str, Any]:
    """Return one row."""
    return {
        "op": op,
        "block_bytes": BLOCK_BYTES,
        "batch": BATCH,
        "gb_s": round(BLOCK_BYTES * BATCH / median(values) / 1e9, 3),
        "ratio_loop": round(median([b / v for b, v in zip(limit, values, strict=True)]), 3),
        "p50_ms": round(median(values) * 1e3, 1),
        "p99_ms": round(quantile(values, 0.99) * 1e3, 1),
    }


def restart(directory: Path | None, count: int) -> dict[str, Any]:
    """Return how long a daemon takes from exec to its first hit, with `count` blocks of 4 KiB in its index."""
    size_bytes = count * 4096
    flags = (
        "--tiers", "cpu,ssd", "--ssd-dir", "{ssd}", "--cpu-size", str(max(256 << 20, size_bytes // 4)),
        "--ssd-size", str(size_bytes * 5 // 2 + (1 << 30)), "--http", "off",
    )  # fmt: skip
    with running_daemon(*flags, directory=directory) as daemon:
        hashes = [at.to_bytes(32, "big") for at in range(count)]
        with daemon.client(deadline_s=300) as client:
            blocks = client.namespace(namespace(4096))
            source = memoryview(Buffer(4096 * 8192).map)
            for start in range(0, count, 8192):
                part = hashes[start : start + 8192]
                blocks.store(part, source[: 4096 * len(part)], durable=True, wait_s=120)
                if start % (8192 * 16) == 0:
                    tell(f"restart: {start} of {count} blocks are on ssd")
            durable = client.admin(wire.Stats(0))["tiers"]["ssd"]["durable_blocks"]
        daemon.stop(signal.SIGKILL)
        times = [first_hit_s(daemon, hashes[-1]) for _ in range(3)]
    return {"op": "restart", "blocks": durable, "p50_ms": round(median(times) * 1e3), "p99_ms": round(max(times) * 1e3)}


def first_hit_s(daemon: Daemon, block_hash: bytes) -> float:
    """Start the daemon, wait for a hit, kill it; return the seconds from exec to the hit."""
    into = [bytearray(4096)]
    began_s = time.monotonic()
    daemon.start_again()
    while time.monotonic() - began_s < START_S:
        with daemon.client(deadline_s=30) as client:
            if client.namespace(namespace(4096)).fetch([block_hash], into).hits:
                took_s = time.monotonic() - began_s
                daemon.stop(signal.SIGKILL)
                return took_s
        time.sleep(0.01)
    raise SystemExit("the restarted daemon did not answer with a hit")


def main() -> None:
    """Run every case and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.disk", description="the ssd tier beside a bare loop")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--restart-blocks", type=int, default=1_000_000, help="blocks in the restarted store; 0: skip")
    parser.add_argument("--directory", type=Path, help="where to make the files (default: the temporary directory)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    report = {"bench": "disk", "hardware": hardware(), "threads": THREADS, "rows": rows}
    flags = ("--tiers", "cpu,ssd", "--ssd-dir", "{ssd}", "--ssd-size", "2GiB", "--cpu-size", "1GiB", "--http", "off")
    with running_daemon(*flags, "--io-threads", str(THREADS), directory=options.directory) as daemon:
        rows += throughput(daemon)
    if options.restart_blocks:
        rows.append(restart(options.directory, options.restart_blocks))
    finish(report, as_json=options.json, columns=(*COLUMNS, "blocks"))


if __name__ == "__main__":
    main()
