"""What memory does the daemon take besides its pool: for each block, and after a long life?

    python -m bench.memory [--json] [--blocks N]

RssAnon is read while a store of 4 KiB blocks grows from a tenth of N to N: the slope is what one more block costs.
Then, at a constant number of blocks: 10,000 connects, 1 M puts (each evicting a block) and 100,000 misses; RssAnon
may not grow.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from bench.common import Buffer, Daemon, finish, hardware, namespace, running_daemon, tell
from kvclient import Client, NamespaceHandle

BLOCK_BYTES = 4096
STEP = 8192
COLUMNS = ("what", "count", "rss_anon_mib", "bytes_each")


def rss_anon_bytes(daemon: Daemon) -> int:
    """Return the daemon's anonymous resident memory; the pool is shared memory and not in it."""
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the kernel tells no RssAnon")


def store(blocks: NamespaceHandle, source: memoryview, first: int, last: int) -> None:
    """Store the blocks numbered `first` to `last`."""
    for start in range(first, last, STEP):
        part = [at.to_bytes(32, "big") for at in range(start, min(last, start + STEP))]
        stored = blocks.store(part, source[: len(part) * BLOCK_BYTES], wait_s=30)
        if stored.stored != len(part):
            raise SystemExit(f"only {stored.stored} of {len(part)} blocks were stored")


def main() -> None:
    """Run every case and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description="memory of the daemon besides its pool")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the store")
    options = parser.parse_args()
    count: int = options.blocks
    rows: list[dict[str, Any]] = []
    report = {"bench": "memory", "hardware": hardware(), "rows": rows}

    def row(what: str, number: int, before: int, after: int) -> None:
        each = round((after - before) / number, 1)
        rows.append({"what": what, "count": number, "rss_anon_mib": round(after / 2**20, 1), "bytes_each": each})

    # Just enough room for the blocks, so that the puts behind them evict.
    size_bytes = count * BLOCK_BYTES * 16 // 15 + (64 << 20)
    with running_daemon("--tiers", "cpu", "--cpu-size", str(size_bytes), "--http", "off") as daemon:
        source = memoryview(Buffer(STEP * BLOCK_BYTES).map)
        with daemon.client(deadline_s=60) as client:
            blocks = client.namespace(namespace(BLOCK_BYTES))
            tell(f"storing {count} blocks")
            store(blocks, source, 0, count // 10)
            few = rss_anon_bytes(daemon)
            store(blocks, source, count // 10, count)
            many = rss_anon_bytes(daemon)
            row("a block", count - count // 10, few, many)
            tell("one put after the other")
            # Python's dict makes room once for what was deleted from it: 42 bytes a block, the first time around.
            store(blocks, source, count, 2 * count)
            row("a block, after evictions", count - count // 10, few, rss_anon_bytes(daemon))
            before = rss_anon_bytes(daemon)
            store(blocks, source, 2 * count, 3 * count)
            row("a put", count, before, rss_anon_bytes(daemon))
            tell("misses")
            before = rss_anon_bytes(daemon)
            for _ in range(1000):
                blocks.lookup([os.urandom(32) for _ in range(100)], run=False)
            row("a miss", 100_000, before, rss_anon_bytes(daemon))
        tell("connects")
        connect(daemon, 500)
        before = rss_anon_bytes(daemon)
        connect(daemon, 10_000)
        row("a connect", 10_000, before, rss_anon_bytes(daemon))
    finish(report, as_json=options.json, columns=COLUMNS)


def connect(daemon: Daemon, times: int) -> None:
    """Connect, ask something, and leave."""
    for _ in range(times):
        with Client(daemon.socket) as client:
            if not client.ping():
                raise SystemExit("the daemon does not answer")


if __name__ == "__main__":
    main()
