"""The metrics, parsed as Prometheus parses them, and the HTTP server they come from."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from typing import Any, cast

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import BadSetting, UnavailableError
from kvstore.wire import MISS_REASONS
from kvstored.http import CONNECTIONS_MAX, listening
from kvstored.metrics import NAMED_MAX, OTHER, Exposition
from tests.daemon.report import exposed, full_report

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(report: dict[str, Any], exposition: Exposition | None = None) -> Samples:
    text = asyncio.run((exposition or exposed(lambda: report)).text()).decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[(f"kvstored_{name}", frozenset(labels.items()))]


def test_every_number_of_the_report_is_exposed() -> None:
    report = full_report()
    found = samples(report)
    for tier in ("cpu", "ssd"):
        row = report["tiers"][tier]
        assert value(found, "tier_used_bytes", tier=tier) == row["used_bytes"]
        assert value(found, "tier_hits_total", tier=tier) == row["hits"]
        assert value(found, "tier_evictions_total", tier=tier, cause="quota") == row["evictions"]["quota"]
        assert value(found, "hit_blocks_total", tier=tier) == report["totals"]["hit_blocks"][tier]
        age = row["eviction_age_s"]
        assert value(found, "tier_eviction_age_seconds", tier=tier, quantile="0.99") == age["p99"]
        assert value(found, "tier_eviction_age_seconds_count", tier=tier) == age["count"]
    assert value(found, "missed_blocks_total", reason="no_room") == report["totals"]["misses"]["no_room"]
    # Numbers of the report are all different: what none of the series shows has been forgotten.
    shown = set(found.values())
    for part in (report["tiers"]["cpu"], report["tiers"]["ssd"], report["totals"], report["sessions"], report["pins"]):
        for key, number in _numbers(part).items():
            assert number in shown, key


def _numbers(part: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, inner in part.items():
        if isinstance(inner, dict):
            nested = cast("dict[str, Any]", inner)
            found.update({f"{key}.{name}": number for name, number in _numbers(nested).items()})
        elif isinstance(inner, int):
            found[key] = inner
    return found


def test_every_series_is_there_at_zero_before_anything_happened() -> None:
    empty, full = samples({}), samples(full_report(namespaces=0, tenants=0))
    process = {key for key in full if key[0].startswith("process_")}
    assert set(empty) - process == set(full) - process
    for reason in MISS_REASONS:
        assert value(empty, "missed_blocks_total", reason=reason.name.lower()) == 0
    assert value(empty, "tier_state", tier="ssd", state="off") == 1
    assert value(empty, "tier_state", tier="ssd", state="ready") == 0


def test_process_memory_and_descriptors_are_exposed() -> None:
    found = samples({})
    assert found[("process_open_fds", frozenset())] > 0
    assert found[("process_resident_memory_bytes", frozenset())] > 0


def test_namespaces_and_tenants_past_the_cap_share_one_name() -> None:
    found = samples(full_report(namespaces=NAMED_MAX + 50, tenants=NAMED_MAX + 50))
    for name, label in (("namespace_blocks", "namespace"), ("tenant_used_bytes", "tenant")):
        names = {dict(labels)[label] for series, labels in found if series == f"kvstored_{name}"}
        assert len(names) == NAMED_MAX + 1
        assert OTHER in names
    assert value(found, "namespaces") == NAMED_MAX + 50


def test_other_namespaces_are_summed_and_never_counted_back() -> None:
    report = full_report(namespaces=NAMED_MAX + 3)
    exposition = exposed(lambda: report)
    name = {"namespace": OTHER, "model": OTHER}
    late = report["namespaces"][NAMED_MAX:]
    expected = sum(namespace["queried_blocks"] for namespace in late)
    assert value(samples(report, exposition), "namespace_queried_blocks_total", **name) == expected
    report["namespaces"] = report["namespaces"][: NAMED_MAX + 1]
    assert value(samples(report, exposition), "namespace_queried_blocks_total", **name) == expected
    report["namespaces"][NAMED_MAX]["queried_blocks"] += 7
    assert value(samples(report, exposition), "namespace_queried_blocks_total", **name) == expected + 7


def test_names_from_outside_can_not_break_the_format() -> None:
    report = full_report(namespaces=1)
    report["namespaces"][0]["model"] = 'a"b\\c\nd' + "x" * 500
    found = samples(report)
    models = {dict(labels)["model"] for series, labels in found if series == "kvstored_namespace_blocks"}
    assert [len(model) for model in models] == [64]


# ---- over HTTP


class Daemon:
    """What the HTTP server asks of the daemon."""

    def __init__(self) -> None:
        self.reason: str | None = None

    async def stats(self) -> dict[str, Any]:
        return full_report()

    def unready(self) -> str | None:
        return self.reason


@contextlib.asynccontextmanager
async def served(daemon: Daemon, address: str = "127.0.0.1:0") -> AsyncGenerator[str, None]:
    async with listening(address, daemon.stats, daemon.unready) as bound:
        yield f"http://{bound}"


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def test_metrics_are_served_as_prometheus_wants_them() -> None:
    async def run() -> None:
        async with (
            served(Daemon()) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/metrics") as response,
        ):
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            families = {family.name for family in text_string_to_metric_families(await response.text())}
        assert "kvstored_tier_used_bytes" in families

    asyncio.run(run())


def test_ready_means_ready_and_healthy_means_alive() -> None:
    async def run() -> None:
        daemon = Daemon()
        async with served(daemon) as url:
            assert await get(f"{url}/readyz") == (200, "ready\n")
            daemon.reason = "starting: 40 % of the pool is populated"
            assert await get(f"{url}/readyz") == (503, "starting: 40 % of the pool is populated\n")
            assert await get(f"{url}/healthz") == (200, "ok\n")
            assert "kvstored_ready 0.0" in (await get(f"{url}/metrics"))[1]
            assert (await get(f"{url}/nothing"))[0] == 404

    asyncio.run(run())


def test_port_that_is_taken_is_named_with_the_fix() -> None:
    async def run() -> None:
        async with served(Daemon()) as url:
            address = url.removeprefix("http://")
            with pytest.raises(UnavailableError, match=r"is taken: .* another --http") as caught:
                async with served(Daemon(), address):
                    pass
            assert address in str(caught.value)

    asyncio.run(run())


def test_what_a_malformed_request_holds_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with served(Daemon()) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer s3cret\x00\r\nHost a\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    with caplog.at_level("DEBUG"):
        asyncio.run(run())
    assert "a request is malformed" in caplog.text
    assert "s3cret" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no-such-host.invalid:0", f"{'x' * 64}.invalid:0"])
def test_address_of_another_machine_is_refused(address: str) -> None:
    async def run() -> None:
        with pytest.raises(BadSetting, match="of this machine"):
            async with served(Daemon(), address):
                pass

    asyncio.run(run())


def test_all_addresses_may_be_listened_at_when_asked_for() -> None:
    async def run() -> None:
        async with served(Daemon(), "0.0.0.0:0") as url:
            port = url.rpartition(":")[2]
            assert (await get(f"http://127.0.0.1:{port}/healthz"))[0] == 200

    asyncio.run(run())


def test_scraper_gone_wild_takes_a_bounded_number_of_connections() -> None:
    async def run() -> None:
        async with served(Daemon()) as url:
            host, port = url.removeprefix("http://").split(":")
            loop = asyncio.get_running_loop()
            with contextlib.ExitStack() as stack, socket.socket() as refused:
                for _ in range(CONNECTIONS_MAX):
                    held = stack.enter_context(socket.socket())
                    held.setblocking(False)
                    await loop.sock_connect(held, (host, int(port)))
                    await loop.sock_sendall(held, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await loop.sock_recv(held, 4096)).startswith(b"HTTP/1.1 200")
                refused.setblocking(False)
                await loop.sock_connect(refused, (host, int(port)))
                assert await loop.sock_recv(refused, 1) == b""

    asyncio.run(run())
