"""The simulated pool: what each way of sharing must and must not do, on the head of a recorded trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from bench.policy import Request
from bench.pool import TRACES, die, read_ranges
from bench.pool_model import Pool, Sharing, Totals, hash_blocks, simulate

NODES = 6
REQUESTS = 400


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return list(islice(read_ranges(TRACES[0]), REQUESTS))


def run(
    requests: list[Request], sharing: Sharing, capacity: int = 4000, at_half: Callable[[Pool], None] = lambda pool: None
) -> tuple[Pool, Totals]:
    hashes = hash_blocks(requests)
    return simulate(
        requests, hashes, sharing, nodes=NODES, capacity=capacity, eviction="lru", seed=3, at_half=at_half
    )


def hits(pool: Pool) -> int:
    return pool.totals.hits_local + pool.totals.hits_pool


def bound(requests: list[Request]) -> int:
    """Return the hits of one cache without a limit."""
    seen: set[int] = set()
    count = 0
    for request in requests:
        count += next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
    return count


@pytest.mark.parametrize("sharing", [Sharing("records", 1), Sharing("records", 2), Sharing("copies", 1)])
def test_a_pool_with_room_for_all_serves_what_one_cache_would(requests: list[Request], sharing: Sharing) -> None:
    pool, _ = run(requests, sharing, capacity=20_000)
    assert hits(pool) == bound(requests) > 1.2 * hits(run(requests, Sharing("alone"), capacity=20_000)[0])


def test_records_serve_more_than_copies_where_room_is_scarce_and_move_less(requests: list[Request]) -> None:
    records, copies = (run(requests, Sharing(name), capacity=400)[0] for name in ("records", "copies"))
    assert hits(copies) < hits(records) <= bound(requests)
    assert records.totals.copied < copies.totals.copied
    for node in records.nodes.values():
        node.locations.check_integrity()
        assert len(node.row_of) <= 400


def test_the_same_seed_gives_the_same_figures(requests: list[Request]) -> None:
    assert run(requests, Sharing("records"))[1] == run(requests, Sharing("records"))[1]


def test_a_death_costs_the_hits_of_one_node_and_records_are_made_good(requests: list[Request]) -> None:
    unknown: list[int] = []

    def end_one(pool: Pool) -> None:
        death = die(pool)
        assert 0.08 < death.moved < 0.28
        for node in pool.nodes.values():
            for block in node.row_of:
                home = pool.nodes[pool.placement.homes(pool.run_of[block])[0]]
                (found,) = home.locations.find(b"trace", 0, [pool.hashes[block]])
                if node.name not in [holder.member for holder in found]:
                    unknown.append(block)

    pool, later = run(requests, Sharing("records"), 20_000, end_one)
    whole, undisturbed = run(requests, Sharing("records"), 20_000)
    assert not unknown, "each block that is left is known to its home"
    assert hits(pool) < hits(whole)
    lost = undisturbed.hits_local + undisturbed.hits_pool - later.hits_local - later.hits_pool
    assert lost < later.asked / NODES
