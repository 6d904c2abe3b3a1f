"""Cases O, on: /metrics, `kvctl stats` and the namespaces' own figures say the same, whatever has happened."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvclient import Client
from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, Daemon, eventually
from tests.rawclient import keys, namespace, payload

SPACE = namespace(64 * KIB)
_SAME = ("queried_blocks", "stored_blocks", "present_blocks", "busy_blocks", "delivered_blocks")


def scraped(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def at_rest(
    daemon: Daemon, port: int
) -> tuple[dict[str, Any], dict[tuple[str, frozenset[tuple[str, str]]], float]] | None:
    """Return what the daemon says in two ways, if nothing changed between the two: it writes and expires by itself."""
    with daemon.client() as client:
        before = client.stats()
        series = scraped(port)
        after = client.stats()
    moving = ("uptime_s",)
    same = all(before[key] == after[key] for key in before if key not in moving)
    return (after, series) if same else None


def agrees(daemon: Daemon, port: int) -> tuple[int, int]:
    """Fail unless all three say the same; return blocks asked for and found."""
    found = eventually(lambda: at_rest(daemon, port), "nothing changes for a moment")
    assert found is not None
    stats, series = found

    def value(name: str, **labels: str) -> float:
        return series[f"kvstored_{name}", frozenset(labels.items())]

    totals: dict[str, Any] = stats["totals"]
    tiers: dict[str, dict[str, Any]] = stats["tiers"]
    namespaces: list[dict[str, Any]] = stats["namespaces"]
    for name in _SAME:
        assert value(f"{name}_total") == totals[name], name
    for tier, counts in tiers.items():
        assert value("hit_blocks_total", tier=tier) == totals["hit_blocks"][tier] == counts["hits"]
        assert value("tier_blocks", tier=tier) == counts["blocks"]
        for name in ("bytes_in", "bytes_out", "promotions", "demotions"):
            assert value(f"tier_{name}_total", tier=tier) == counts[name], (tier, name)
        for cause, number in counts["evictions"].items():
            assert value("tier_evictions_total", tier=tier, cause=cause) == number, (tier, cause)
    for reason, number in totals["misses"].items():
        assert value("missed_blocks_total", reason=reason) == number, reason
    queried: int = totals["queried_blocks"]
    hits = sum(counts["hits"] for counts in tiers.values())
    misses: dict[str, int] = totals["misses"]
    assert queried == hits + sum(misses.values())
    assert sum(counts["queried_blocks"] for counts in namespaces) == queried
    return queried, hits


def test_o01_all_who_tell_figures_agree_through_retries_expiry_stops_and_restarts(
    short_dir: Path, free_port: int
) -> None:
    daemon = Daemon(short_dir, ssd="64MiB", cpu="16MiB")
    daemon.arguments[daemon.arguments.index("--http") + 1] = f"127.0.0.1:{free_port}"
    hashes = keys(40)
    sources = [payload(SPACE.digest, key, SPACE.block_bytes) for key in hashes]
    buffers = [bytearray(SPACE.block_bytes) for _ in hashes]
    daemon.start()
    try:
        with Client(daemon.socket) as client:
            blocks = client.namespace(SPACE)
            for _ in range(3):  # twice in vain: they are there
                blocks.store(hashes, sources, durable=True)
            assert agrees(daemon, free_port) == (0, 0)
            assert blocks.lookup([*hashes, *keys(5, "absent")]).hits == 40
            assert agrees(daemon, free_port) == (45, 40)
            assert blocks.fetch(hashes, buffers).hits == 40
            assert agrees(daemon, free_port) == (85, 80)
            blocks.prefetch(hashes)
            blocks.group_lookup(hashes)
            blocks.wait(hashes, 0.1)
            assert agrees(daemon, free_port) == (85, 80), "none of these is a query"
            blocks.fetch(keys(7, "late"), buffers[:7], wait_s=0.2)
            assert agrees(daemon, free_port) == (92, 80), "a wait in vain counts once"
            blocks.store(keys(4, "short"), sources[:4], ttl_s=0.05)
            eventually(lambda: blocks.lookup(keys(1, "short")).outcomes[0] != Outcome.HIT, "its life is over")
            queried, hits = agrees(daemon, free_port)
            blocks.fetch(keys(4, "short"), buffers[:4])
            assert agrees(daemon, free_port) == (queried + 4, hits)
            blocks.fetch(hashes, buffers, max_ms=0.0)
            assert agrees(daemon, free_port)[0] == queried + 44
            with daemon.client() as operator:
                operator.report(wire.DropNamespace(operator.next_id(), None))
            blocks.lookup(hashes)
            agrees(daemon, free_port)
        assert daemon.stop() == 0
        daemon.start()
        assert agrees(daemon, free_port) == (0, 0), "a new life counts from zero"
        with daemon.client() as again:
            again.get(again.open(SPACE), keys(3))
        assert agrees(daemon, free_port) == (3, 0)
        assert daemon.stop() == 0
    finally:
        daemon.kill()
