"""Cases O: what is counted is exact. O01 queried and hit blocks are counted once each, where they were found."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)


def figures(client: RawClient, ns: int) -> dict[str, Any]:
    told = client.count(ns)
    return {
        "queried": told["queried_blocks"],
        "cpu": told["hit_blocks"]["cpu"],
        "ssd": told["hit_blocks"].get("ssd", 0),
        "absent": told["misses"]["absent"],
        "delivered": told["delivered_blocks"],
    }


def adds_up(client: RawClient, ns: int) -> None:
    told = client.count(ns)
    assert told["queried_blocks"] == sum(told["hit_blocks"].values()) + sum(told["misses"].values()), told
    totals = client.stats()["totals"]
    assert totals["queried_blocks"] == sum(totals["hit_blocks"].values()) + sum(totals["misses"].values()), totals


def test_o01_ten_scripted_lookups_are_counted_to_the_unit(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        on_ssd = keys(10, "ssd")
        client.put(ns, on_ssd, durable=True)
        client.report(wire.Evict(client.next_id(), "cpu"))
        in_memory = keys(10, "memory")
        client.put(ns, in_memory)
        absent = keys(10, "absent")
        assert figures(client, ns) == {"queried": 0, "cpu": 0, "ssd": 0, "absent": 0, "delivered": 0}

        # Each: the blocks asked for, whether it stops at the first miss, and hits in memory, hits on ssd, misses.
        script: list[tuple[list[bytes], bool, tuple[int, int, int]]] = [
            (in_memory, True, (10, 0, 0)),
            (on_ssd, True, (0, 10, 0)),
            (absent, True, (0, 0, 10)),
            (in_memory[:5] + on_ssd[:5], True, (5, 5, 0)),
            (in_memory[:3] + absent[:4] + on_ssd[:3], True, (3, 0, 7)),
            (in_memory[:3] + absent[:4] + on_ssd[:3], False, (3, 3, 4)),
            ([], True, (0, 0, 0)),
            (in_memory[:1] * 5, True, (5, 0, 0)),
            (absent[:1] + in_memory, True, (0, 0, 11)),
            (absent[:1] + in_memory, False, (10, 0, 1)),
        ]
        queried = cpu = ssd = missed = 0
        for hashes, run, (memory_hits, ssd_hits, misses) in script:
            found = client.lookup(ns, hashes, run=run)
            assert found.outcomes.count(Outcome.HIT) == memory_hits + ssd_hits
            queried, cpu, ssd, missed = queried + len(hashes), cpu + memory_hits, ssd + ssd_hits, missed + misses
            expected = {"queried": queried, "cpu": cpu, "ssd": ssd, "absent": missed, "delivered": 0}
            assert figures(client, ns) == expected, hashes
            adds_up(client, ns)
        tiers = client.stats()["tiers"]
        assert (tiers["cpu"]["hits"], tiers["ssd"]["hits"]) == (cpu, ssd)


def test_o01_a_fetch_after_its_lookup_is_not_counted_again(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(10)
        client.put(ns, hashes, durable=True)
        client.report(wire.Evict(client.next_id(), "cpu"))
        client.lookup(ns, hashes)
        assert client.get(ns, hashes, count=False) == [Outcome.HIT] * 10
        assert figures(client, ns) == {"queried": 10, "cpu": 0, "ssd": 10, "absent": 0, "delivered": 10}
        # Without a lookup before it, the fetch itself counts: where the blocks were, not where they were loaded to.
        client.report(wire.Evict(client.next_id(), "cpu"))
        assert client.get(ns, [*hashes, *keys(3, "absent")]) == [Outcome.HIT] * 10 + [Outcome.ABSENT] * 3
        assert figures(client, ns) == {"queried": 23, "cpu": 0, "ssd": 20, "absent": 3, "delivered": 20}
        adds_up(client, ns)


def test_o01_a_fetch_in_several_windows_counts_each_block_once(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(500)
        client.put(ns, hashes, durable=True)
        asked = [*hashes, *keys(7, "absent")]
        found = client.get(ns, asked)
        assert found.count(Outcome.HIT) == 500
        told = figures(client, ns)
        assert told["queried"] == 507
        assert told["cpu"] + told["ssd"] == told["delivered"] == 500
        assert told["absent"] == 7
        adds_up(client, ns)


def test_o01_refused_leases_and_looks_by_operators_add_up_too(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(10)
        client.put(ns, hashes)
        refused = client.acquire(ns, [*hashes, *keys(1, "absent")], copying=False)
        assert refused.lease == 0
        adds_up(client, ns)
        assert figures(client, ns)["queried"] == 11
        client.report(wire.Keys(client.next_id(), SPACE.digest, hashes=hashes))
        client.report(wire.Keys(client.next_id(), SPACE.digest))
        client.ask(wire.Wait(client.next_id(), ns, hashes, 0.0))
        client.ask(wire.Prefetch(client.next_id(), ns, hashes))
        client.ask(wire.GroupLookup(client.next_id(), ns, hashes))
        assert figures(client, ns)["queried"] == 11, "none of these is a query"


def test_o01_stored_present_and_busy_blocks_are_told_apart(short_dir: Path) -> None:
    with running(short_dir) as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        other.open(SPACE)
        client.put(ns, keys(5))
        reserved = other.reserve(ns, keys(3, "busy"))
        assert client.put(ns, [*keys(5), *keys(3, "busy"), *keys(2, "new")])[:8] == (
            [Outcome.PRESENT] * 5 + [Outcome.BUSY] * 3
        )
        told = client.count(ns)
        assert (told["stored_blocks"], told["present_blocks"], told["busy_blocks"]) == (7, 5, 3)
        other.ask(wire.Forfeit(other.next_id(), reserved.ticket))
        cpu = client.tier("cpu")
        assert cpu["bytes_in"] == 7 * SPACE.block_bytes
        eventually(lambda: client.tier("ssd")["demotions"] == 7)
        assert client.tier("ssd")["bytes_in"] == 7 * SPACE.block_bytes


def test_o01_counts_stay_exact_when_many_ask_at_once(short_dir: Path) -> None:
    with running(short_dir, cpu="32MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        hashes = keys(64)
        client.put(ns, hashes, durable=True)

        def ask(number: int) -> None:
            with daemon.client() as own:
                mine = own.open(SPACE)
                for turn in range(20):
                    if number % 2:
                        own.lookup(mine, [*hashes, *keys(1, "absent")], run=False)
                    else:
                        own.get(mine, [*hashes, *keys(1, "absent")])
                    if number == 0 and turn % 5 == 0:
                        own.report(wire.Evict(own.next_id(), "cpu"))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = figures(client, ns)
        assert told["queried"] == 6 * 20 * 65
        assert told["cpu"] + told["ssd"] == 6 * 20 * 64
        assert told["absent"] == 6 * 20
        assert told["delivered"] == 3 * 20 * 64
        adds_up(client, ns)


def test_o01_evictions_are_counted_by_cause(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        capacity = 6 * 16
        client.put(ns, keys(capacity))
        client.put(ns, keys(10, "pressure"))
        client.ask(wire.Drop(client.next_id(), ns, keys(5, "pressure")))
        client.put(ns, keys(3, "short"), ttl_s=0.1)
        eventually(lambda: client.tier("cpu")["evictions"]["ttl"] == 3)
        assert client.tier("cpu")["evictions"] == {"pressure": 10, "ttl": 3, "drop": 5, "quota": 0}
        assert client.count(ns)["evictions"] == client.tier("cpu")["evictions"]
        assert client.tier("cpu")["eviction_age_s"]["count"] == 18
        assert client.tier("cpu")["blocks"] == capacity + 10 - 10 - 5
        client.check()
