"""What does a prefix lookup cost in a large store, when it is quiet and when it is not?

    python -m bench.lookup [--json] [--blocks N]

A store of 1 M blocks of 4 KiB; prefixes of 512 and 2,048 blocks, all of them there. Cases: "quiet"; "busy": 8 other
processes look up prefixes of 512 blocks every 5 ms, as schedulers do each step, while blocks of 1 MiB are stored and go
to ssd as fast as they come; "threads": two threads in the client's own process run Python without a pause.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from bench.common import Buffer, finish, hardware, median, namespace, quantile, running_daemon, tell
from kvclient import Client, NamespaceHandle

BLOCK_BYTES = 4096
PREFIXES = (512, 2048)
SAMPLES = 400
OTHERS = 8
STEP_S = 0.005
COLUMNS = ("blocks", "case", "p50_us", "p99_us")


def fill(blocks: NamespaceHandle, count: int) -> list[bytes]:
    """Store `count` blocks and return their hashes."""
    hashes = [at.to_bytes(32, "big") for at in range(count)]
    step = 8192
    source = memoryview(Buffer(step * BLOCK_BYTES).map)
    for start in range(0, count, step):
        part = hashes[start : start + step]
        stored = blocks.store(part, source[: len(part) * BLOCK_BYTES], wait_s=30)
        if stored.stored != len(part):
            raise SystemExit(f"only {stored.stored} of {len(part)} blocks were stored")
    return hashes


def sample(blocks: NamespaceHandle, hashes: list[bytes], length: int) -> list[float]:
    """Return the times of lookups of `length` blocks at changing places."""
    times: list[float] = []
    for at in range(SAMPLES + 20):
        start = at * 7919 % (len(hashes) - length)
        prefix = hashes[start : start + length]
        began_s = time.perf_counter()
        found = blocks.lookup(prefix)
        times.append(time.perf_counter() - began_s)
        if found.hits != length:
            raise SystemExit(f"{found.hits} of {length} blocks were found")
        time.sleep(0.001)
    return times[20:]


def ask_in_steps(socket: Path, total: int, stop: Event) -> None:
    """Look up prefixes every step until told to stop."""
    with Client(socket) as client:
        blocks = client.namespace(namespace(BLOCK_BYTES, "bench-lookup"))
        at = os.getpid()
        while not stop.is_set():
            start = at % (total - 512)
            blocks.lookup([number.to_bytes(32, "big") for number in range(start, start + 512)])
            at += 7919
            time.sleep(STEP_S)


def write_without_pause(socket: Path, stop: Event) -> None:
    """Store blocks that go to ssd until told to stop."""
    source = Buffer(16 << 20).blocks(1 << 20, 16)
    with Client(socket) as client:
        blocks = client.namespace(namespace(1 << 20, "bench-writes"))
        while not stop.is_set():
            hashes = [os.urandom(32) for _ in source]
            blocks.store(hashes, source, durable=True, wait_s=5)
            blocks.drop(hashes)  # or they would take the place of what is looked up


def with_others(socket: Path, total: int, work: Callable[[], None]) -> None:
    """Do `work` while other processes ask and write."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    others = [context.Process(target=ask_in_steps, args=(socket, total, stop)) for _ in range(OTHERS)]
    others.append(context.Process(target=write_without_pause, args=(socket, stop)))
    for process in others:
        process.start()
    try:
        time.sleep(3)  # let all of them have started
        work()
    finally:
        stop.set()
        for process in others:
            process.join()


def with_busy_threads(work: Callable[[], None]) -> None:
    """Do `work` while two threads of this process run Python."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            count += 1

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def main() -> None:
    """Run every case and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.lookup", description="prefix lookups in a large store")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the store")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    report = {"bench": "lookup", "hardware": hardware(), "store_blocks": options.blocks, "rows": rows}
    cpu_bytes = options.blocks * BLOCK_BYTES * 5 // 4 + (512 << 20)
    flags = (
        "--tiers", "cpu,ssd", "--ssd-dir", "{ssd}", "--ssd-size", "2GiB", "--write-policy", "second-touch",
        "--write-queue", "64MiB", "--cpu-size", str(cpu_bytes), "--http", "off",
    )  # fmt: skip
    with running_daemon(*flags) as daemon, daemon.client() as client:
        blocks = client.namespace(namespace(BLOCK_BYTES, "bench-lookup"))
        tell(f"storing {options.blocks} blocks")
        hashes = fill(blocks, options.blocks)

        def measure(case: str) -> None:
            for length in PREFIXES:
                tell(f"{case}: {length} blocks")
                times = sample(blocks, hashes, length)
                rows.append({
                    "blocks": length,
                    "case": case,
                    "p50_us": round(median(times) * 1e6, 1),
                    "p99_us": round(quantile(times, 0.99) * 1e6, 1),
                })  # fmt: skip

        measure("quiet")
        with_busy_threads(lambda: measure("threads"))
        with_others(daemon.socket, options.blocks, lambda: measure("busy"))
    finish(report, as_json=options.json, columns=COLUMNS)


if __name__ == "__main__":
    main()
