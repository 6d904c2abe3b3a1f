"""How many blocks would each eviction policy have served on a recorded trace, and what does a decision cost?

    python -m bench.policy [--json] [--trace FILE] [--capacities N,N,...]

Replays a trace of requests, each a list of block hashes in the order of its prefix, against a tier of so many blocks. A
hit is a block of the leading run that is there; then the request's blocks are used or stored, its tail first. "belady"
knows the future and evicts what is used again last: the bound for all. "fifo" is told of no use.

A trace is JSON lines with `timestamp` (milliseconds) and `hash_ids`; without --trace, the excerpt that the tests use.
`us_per_op` is CPU time for each block of each request, the simulation's own part (about 0.4 us) included.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.common import finish, hardware, tell
from kvstore.policy import POLICIES, LeastRecentlyUsed, Policy

EXCERPT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "traces" / "conversation.jsonl"
COLUMNS = ("policy", "capacity_blocks", "hit_rate", "us_per_op")
_TICK_MS = 10
_SHARES = (64, 16, 8, 4, 2)  # capacities: one part in so many of the trace's blocks


class Request(NamedTuple):
    """One request: when it came, and the blocks of its prompt."""

    tick: int
    blocks: list[int]


class FirstInFirstOut(LeastRecentlyUsed):
    """The order of arrival: what a policy must beat to be worth anything."""

    def use(self, row: int, now: int) -> None:
        pass


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a trace."""
    requests: list[Request] = []
    with path.open() as lines:
        for line in lines:
            fields = json.loads(line)
            requests.append(Request(int(fields["timestamp"]) // _TICK_MS, fields["hash_ids"]))
    return requests


def replay(requests: Iterable[Request], capacity: int, policy: Policy) -> float:
    """Return the share of blocks that are hits under `policy` in a tier of `capacity` blocks."""
    row_of: dict[int, int] = {}
    block_in = [0] * capacity
    free = list(range(capacity))
    hits = total = 0
    for tick, blocks in requests:
        total += len(blocks)
        hits += leading_hits(blocks, row_of)
        for block in reversed(blocks):
            row = row_of.get(block)
            if row is not None:
                policy.use(row, tick)
                continue
            if not free:
                victim = next(policy.coldest(0))
                policy.remove(victim)
                del row_of[block_in[victim]]
                free.append(victim)
            row = free.pop()
            row_of[block] = row
            block_in[row] = block
            policy.admit(row, 0, tick, 0, block.to_bytes(32, "little"), 0)
    return hits / total


def belady(requests: Sequence[Request], capacity: int) -> float:
    """Return the share of hits of a tier that evicts the block whose next use is farthest away."""
    next_use: list[list[int]] = []
    later: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        next_use.append([later.get(block, len(requests)) for block in blocks])
        later.update(dict.fromkeys(blocks, number))
    next_use.reverse()
    there: dict[int, int] = {}  # block -> the request that uses it next
    farthest: list[tuple[int, int]] = []  # the same, turned round, with entries that no longer hold
    hits = total = 0
    for (_, blocks), nexts in zip(requests, next_use, strict=True):
        total += len(blocks)
        hits += leading_hits(blocks, there)
        for block, following in zip(reversed(blocks), reversed(nexts), strict=True):
            there[block] = following
            heapq.heappush(farthest, (-following, block))
        while len(there) > capacity:
            following, block = heapq.heappop(farthest)
            if there.get(block) == -following:
                del there[block]
    return hits / total


def leading_hits(blocks: Sequence[int], there: dict[int, int]) -> int:
    """Return how many leading blocks are there."""
    for position, block in enumerate(blocks):
        if block not in there:
            return position
    return len(blocks)


def measure(requests: Sequence[Request], capacities: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield a row for each policy and capacity."""
    made: dict[str, Callable[[], Policy]] = {"fifo": FirstInFirstOut, **POLICIES}
    operations = sum(len(request.blocks) for request in requests)
    for capacity in capacities:
        for name, make in made.items():
            start_s = time.process_time()
            rate = replay(requests, capacity, make())
            spent_s = time.process_time() - start_s
            yield _row(name, capacity, rate, round(spent_s / operations * 1e6, 2))
        yield _row("belady", capacity, belady(requests, capacity), None)


def _row(policy: str, capacity: int, hit_rate: float, us_per_op: float | None) -> dict[str, object]:
    return {"policy": policy, "capacity_blocks": capacity, "hit_rate": round(hit_rate, 4), "us_per_op": us_per_op}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policy", description="Hit rates of the eviction policies.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--trace", type=Path, default=EXCERPT, help="a trace of requests (JSON lines)")
    parser.add_argument("--capacities", help="blocks in the tier, as N,N,...; else shares of the trace's")
    options = parser.parse_args(arguments)
    requests = read_trace(options.trace)
    unique = len({block for request in requests for block in request.blocks})
    capacities = [max(1, unique // share) for share in _SHARES]
    if options.capacities:
        capacities = [int(text) for text in options.capacities.split(",")]
    blocks = sum(len(request.blocks) for request in requests)
    tell(f"{len(requests)} requests, {blocks} blocks, {unique} of them different")
    report = {
        "bench": "policy", "hardware": hardware(),
        "trace": options.trace.name, "requests": len(requests), "blocks": blocks, "unique_blocks": unique,
        "hit_rate_without_limit": round(replay(requests, unique, LeastRecentlyUsed()), 4),
        "rows": list(measure(requests, capacities)),
    }  # fmt: skip
    finish(report, as_json=options.json, columns=COLUMNS)


if __name__ == "__main__":
    main()
