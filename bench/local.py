"""How close do put and get on one node come to a memcpy of the same bytes?

    python -m bench.local [--json] [--quick]

Rounds of memcpy in, memcpy out, put and get of a batch follow each other; a row's ratio is the median over rounds of
(memcpy time / operation time). The memcpys copy as many bytes to and from shared memory that is as large as what the
puts use, so that page tables and caches are as cold for the one as for the other. One warm-up round isn't counted. The
client's page tables are filled beforehand, as an engine does at its start. `mode`: "deferred" is trusted mode on the
cpu tier alone, "checksum" computes checksums at seal, "strict" is strict mode. Two clients are two processes that put
and get at the same time, beside two memcpys at the same time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.common import (
    Buffer,
    SharedBuffer,
    finish,
    hardware,
    median,
    memcpy_s,
    namespace,
    quantile,
    running_daemon,
    tell,
    timed,
)
from kvclient import Client, NamespaceHandle

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB)
BATCHES = (64, 512)
POOL_BYTES = 4 << 30
RING_BYTES = 256 << 20
ROUND_BYTES_MAX = 1 << 30
SECONDS_A_ROW = 1.2
ROUNDS_MIN, ROUNDS_MAX = 7, 60
COLUMNS = ("mode", "op", "block_bytes", "batch", "clients", "gb_s", "ratio_memcpy", "p50_us", "p99_us")


@dataclass(frozen=True)
class Case:
    """One size, batch and number of clients."""

    block_bytes: int
    batch: int
    clients: int

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.batch


class Ring:
    """Buffers larger than the processor's caches, of which each round takes the next part.

    What an engine stores it has computed some time ago, and what it fetches goes to memory that it did not just read.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self._case = case
        self._parts = max(2, RING_BYTES // case.total_bytes)
        self._buffer = Buffer(case.total_bytes * self._parts, seed)
        self._blocks = self._buffer.blocks(case.block_bytes, case.batch * self._parts)
        self._at = 0

    @property
    def address(self) -> int:
        return self._buffer.address + self._at * self._case.total_bytes

    def next(self) -> list[memoryview]:
        """Move on and return the blocks of the part."""
        self._at = (self._at + 1) % self._parts
        return self._blocks[self._at * self._case.batch : (self._at + 1) * self._case.batch]


def measure(socket: Path, case: Case, seed: int, barrier: Barrier | None = None) -> dict[str, list[float]]:
    """Return the times of each round's memcpy, put and get; with a barrier, in step with the other clients."""
    source, target = Ring(case, seed), Ring(case)
    pool = SharedBuffer(POOL_BYTES // 2 // case.clients)
    at = 0
    times: dict[str, list[float]] = {"memcpy in": [], "put": [], "memcpy out": [], "get": []}

    def in_step() -> None:
        if barrier is not None:
            barrier.wait(60)

    with Client(socket, pretouch=True) as client:
        blocks = client.namespace(namespace(case.block_bytes, f"bench-{seed}"))
        warm_up(blocks, case, source)
        ends_s = time.monotonic() + SECONDS_A_ROW
        rounds = 0
        stored: list[bytes] = []
        while rounds < ROUNDS_MIN or (barrier is None and rounds < ROUNDS_MAX and time.monotonic() < ends_s):
            hashes = [os.urandom(32) for _ in range(case.batch)]
            source.next()
            target.next()
            in_step()
            copied_in_s = memcpy_s(pool.address + at, source.address, case.block_bytes, case.batch)
            in_step()
            copied_out_s = memcpy_s(target.address, pool.address + at, case.block_bytes, case.batch)
            at = (at + case.total_bytes) % (pool.size_bytes - case.total_bytes + 1) // 4096 * 4096
            put_from, get_into = source.next(), target.next()
            in_step()
            put_s = timed(partial(blocks.store, hashes, put_from))
            in_step()
            get_s = timed(partial(blocks.fetch, hashes, get_into))
            for name, value in zip(times, (copied_in_s, put_s, copied_out_s, get_s), strict=True):
                times[name].append(value)
            if rounds == 0 and any(a != b for a, b in zip(get_into, put_from, strict=True)):
                raise SystemExit("what was read is not what was written")
            stored += hashes
            if len(stored) * case.block_bytes * case.clients > POOL_BYTES // 2:
                blocks.drop(stored)
                stored = []
            rounds += 1
        blocks.drop(stored)
    return times


def warm_up(blocks: NamespaceHandle, case: Case, source: Ring) -> None:
    """Connect, and wait for the page tables to be filled."""
    hashes = [os.urandom(32) for _ in range(case.batch)]
    stored = blocks.store(hashes, source.next())
    if stored.stored != case.batch:
        raise SystemExit(f"only {stored.stored} of {case.batch} blocks were stored: {set(stored.outcomes)}")
    blocks.drop(hashes)
    while any("touch" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)


def measure_two(socket: Path, case: Case) -> dict[str, list[float]]:
    """Return the times of two clients in step; a round counts with the slower of the two."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    results: Any = context.Queue()
    processes = [
        context.Process(target=_measure_to, args=(results, socket, case, seed, barrier)) for seed in (1, 2)
    ]
    for process in processes:
        process.start()
    both = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return {name: [max(pair) for pair in zip(both[0][name], both[1][name], strict=True)] for name in both[0]}


def _measure_to(results: Any, socket: Path, case: Case, seed: int, barrier: Barrier) -> None:
    results.put(measure(socket, case, seed, barrier))


def rows_of(mode: str, case: Case, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row each for put and get, and for the memcpy that each is compared with."""
    rows: list[dict[str, Any]] = []
    for op, values in times.items():
        limit = times["memcpy in" if op in ("put", "memcpy in") else "memcpy out"]
        ratios = [copied_s / value for copied_s, value in zip(limit, values, strict=True)]
        rows.append({
            "mode": mode,
            "op": op,
            "block_bytes": case.block_bytes,
            "batch": case.batch,
            "clients": case.clients,
            "gb_s": round(case.total_bytes * case.clients / median(values) / 1e9, 3),
            "ratio_memcpy": round(median(ratios), 3),
            "p50_us": round(median(values) * 1e6, 1),
            "p99_us": round(quantile(values, 0.99) * 1e6, 1),
        })  # fmt: skip
    return rows


def main() -> None:
    """Run every case and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.local", description="put and get beside memcpy")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--quick", action="store_true", help="batches of 64 and one client only")
    parser.add_argument("--mode", action="append", choices=("deferred", "checksum", "strict"), help="default: all")
    options = parser.parse_args()
    cases = [
        Case(size, batch, clients)
        for clients in ((1,) if options.quick else (1, 2))
        for batch in (BATCHES[:1] if options.quick else BATCHES)
        for size in SIZES
        if size * batch * clients <= ROUND_BYTES_MAX
    ]
    flags = {
        "deferred": (),
        "checksum": ("--checksum-at-seal", "always"),
        "strict": ("--mode", "strict"),
    }
    rows: list[dict[str, Any]] = []
    report = {"bench": "local", "hardware": hardware(), "seed": 0, "rows": rows}
    for mode in options.mode or flags:
        with running_daemon("--tiers", "cpu", "--http", "off", "--cpu-size", str(POOL_BYTES), *flags[mode]) as daemon:
            for case in cases:
                tell(f"{mode}: {case.block_bytes} bytes x {case.batch}, {case.clients} client(s)")
                times = measure(daemon.socket, case, 0) if case.clients == 1 else measure_two(daemon.socket, case)
                rows += rows_of(mode, case, times)
    finish(report, as_json=options.json, columns=COLUMNS)


if __name__ == "__main__":
    main()
