"""What is a pool of nodes worth: hits, bytes moved, balance, and what a member that dies costs?

    python -m bench.pool [--json] [--trace FILE] [--requests N] [--nodes N,N,...] [--capacity BLOCKS]
                         [--eviction POLICY] [--seed N]

Simulates nodes on recorded traces with the project's own placement, location records and policies; no daemon is
started and no byte is moved (see bench/pool_model.py). Each request goes to a node at random: the worst case for a
cache that isn't shared. Ways of sharing: "alone"; "copies" (no location records: a home is asked for what was copied
to it); "records" (homes know who has what). `copies` is the number of homes.

Each trace's first 6,000 requests are replayed (--requests 0: all). By default the nodes together have room for a
quarter of the trace's blocks, but each for 512 at least, more than the longest prompt has: 1,000 nodes have room for
all. Rates are shares of the blocks asked for. Gigabytes are those of a model of 128 KiB a token. Balance is the busiest
node as a multiple of the mean: of blocks given to others (`served`), of questions that homes got (`asked`), of location
records kept (`records`). `homes_asked`: by a request, on average. With "dies" a node is killed at half of the trace:
`moved` is the share of runs that get another home, `hits_lost` the share of the blocks asked for in the second half
that would have been hits (negative: chance), `announced_again` the blocks that the others have told the new homes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import finish, hardware, tell
from bench.policy import Request
from bench.pool_model import BLOCK_TOKENS, Node, Pool, Sharing, Totals, hash_blocks, simulate
from kvstore.policy import POLICIES

TRACES = tuple(Path(__file__).resolve().parent / "traces" / f"{name}.jsonl" for name in ("conversation", "synthetic"))
NODES = (10, 100, 1000)
REQUESTS = 6000
SHARINGS = (Sharing("alone"), Sharing("copies", 1), Sharing("copies", 2), Sharing("records", 1), Sharing("records", 2))
COLUMNS = (
    "trace", "nodes", "sharing", "copies", "change", "hit_rate_local", "hit_rate_pool", "fetched_gb", "copied_gb",
    "homes_asked", "served_max_mean", "asked_max_mean", "records_max_mean", "moved", "hits_lost", "announced_again",
)  # fmt: skip
_BLOCK_GB = BLOCK_TOKENS * 128 * 1024 / 1e9
_NODE_BLOCKS_MIN = 512
_DEATHS_NODES_MAX = 100  # of more nodes one holds too little for the difference to show
_MOVED_SAMPLE = 4000  # runs
_TICK_MS = 10


def read_ranges(path: Path) -> list[Request]:
    """Return the requests of a trace of ranges (bench/traces/README.md), or of one with `hash_ids`."""
    requests: list[Request] = []
    with path.open() as lines:
        for line in lines:
            read: dict[str, Any] | list[int] = json.loads(line)
            if isinstance(read, dict):
                requests.append(Request(int(read["timestamp"]) // _TICK_MS, read["hash_ids"]))
                continue
            time_ms, *ranges = read
            blocks = [
                block
                for first, count in zip(ranges[::2], ranges[1::2], strict=True)
                for block in range(first, first + count)
            ]
            requests.append(Request(time_ms // _TICK_MS, blocks))
    return requests


def max_mean(counts: Sequence[int]) -> float | None:
    """Return how many times the mean the largest is."""
    total = sum(counts)
    return round(max(counts) * len(counts) / total, 2) if total else None


def run(
    name: str, requests: Sequence[Request], nodes: Sequence[int], capacity: int | None, eviction: str, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one trace."""
    hashes = hash_blocks(requests)
    unique = len({block for request in requests for block in request.blocks})
    for count in nodes:
        room = capacity or max(_NODE_BLOCKS_MIN, unique // 4 // count)
        fixed = _Fixed(count, room, eviction, seed)
        for sharing in SHARINGS:
            tell(f"{name}: {count} nodes, {sharing.name}, {sharing.copies} copies")
            pool, later = _simulate(requests, hashes, sharing, fixed)
            shown = {"trace": name, "nodes": count, "node_blocks": room}
            yield {**shown, **_row(pool, len(requests)), "change": ""}
            if sharing.name != "alone" and count <= _DEATHS_NODES_MAX:
                pool, after, death = _simulate_death(requests, hashes, sharing, fixed)
                yield {
                    **shown, **_row(pool, len(requests)), "change": "dies", "moved": round(death.moved, 4),
                    "announced_again": death.announced, "hits_lost": round(_hit_rate(later) - _hit_rate(after), 4),
                }  # fmt: skip


class Death(NamedTuple):
    """What follows from a member's death at once: the share of runs that get another home; blocks announced again."""

    moved: float
    announced: int


def die(pool: Pool) -> Death:
    """Let the first node die."""
    before = pool.placement
    keys = sorted(set(pool.run_of.values()))
    keys = random.Random(0).sample(keys, min(len(keys), _MOVED_SAMPLE))
    announced = pool.totals.announced
    pool.die(next(iter(pool.nodes)))
    moved = sum(before.homes(key) != pool.placement.homes(key) for key in keys)
    return Death(moved / len(keys), pool.totals.announced - announced)


class _Fixed(NamedTuple):
    nodes: int
    capacity: int
    eviction: str
    seed: int


def _simulate(
    requests: Sequence[Request],
    hashes: Sequence[bytes],
    sharing: Sharing,
    fixed: _Fixed,
    at_half: Callable[[Pool], None] = lambda pool: None,
) -> tuple[Pool, Totals]:
    nodes, capacity, eviction, seed = fixed
    return simulate(
        requests, hashes, sharing, nodes=nodes, capacity=capacity, eviction=eviction, seed=seed, at_half=at_half
    )


def _simulate_death(
    requests: Sequence[Request], hashes: Sequence[bytes], sharing: Sharing, fixed: _Fixed
) -> tuple[Pool, Totals, Death]:
    deaths: list[Death] = []

    def end_one(pool: Pool) -> None:
        deaths.append(die(pool))

    pool, later = _simulate(requests, hashes, sharing, fixed, end_one)
    (death,) = deaths
    return pool, later, death


def _row(pool: Pool, requests: int) -> dict[str, Any]:
    totals = pool.totals
    nodes: list[Node] = list(pool.nodes.values())
    return {
        "sharing": pool.sharing.name, "copies": pool.sharing.copies,
        "hit_rate_local": round(totals.hits_local / totals.asked, 4),
        "hit_rate_pool": round(totals.hits_pool / totals.asked, 4),
        "fetched_gb": round(totals.fetched * _BLOCK_GB), "copied_gb": round(totals.copied * _BLOCK_GB),
        "homes_asked": round(totals.nodes_asked / requests, 1),
        "fetches_failed": totals.fetches_failed, "announced": totals.announced,
        "served_max_mean": max_mean([node.served for node in nodes]),
        "asked_max_mean": max_mean([node.asked for node in nodes]),
        "records_max_mean": max_mean([len(node.locations) for node in nodes]),
    }  # fmt: skip


def _hit_rate(totals: Totals) -> float:
    return (totals.hits_local + totals.hits_pool) / totals.asked


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pool", description="What a pool of nodes is worth.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--trace", type=Path, action="append", help="a trace of requests; may be given again")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each trace, from its start; 0: all")
    parser.add_argument("--nodes", help="sizes of the pool, as N,N,...", default=",".join(map(str, NODES)))
    parser.add_argument("--capacity", type=int, help="blocks that each node has room for")
    parser.add_argument("--eviction", choices=sorted(POLICIES), default="lru", help="which block goes first")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of nodes")
    options = parser.parse_args(arguments)
    nodes = [int(text) for text in options.nodes.split(",")]
    rows: list[dict[str, Any]] = []
    for path in options.trace or TRACES:
        requests = read_ranges(path)[: options.requests or None]
        rows += run(path.stem, requests, nodes, options.capacity, options.eviction, options.seed)
    report = {
        "bench": "pool", "hardware": hardware(), "seed": options.seed, "eviction": options.eviction,
        "requests_max": options.requests, "block_tokens": BLOCK_TOKENS, "block_gb": _BLOCK_GB, "rows": rows,
    }  # fmt: skip
    finish(report, as_json=options.json, columns=COLUMNS)


if __name__ == "__main__":
    main()
