"""The proxy's metrics, parsed as Prometheus parses them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvproxy import metrics
from kvproxy.fairness import FairQueue
from kvproxy.metrics import NAMED_MAX, OTHER, Metrics
from kvproxy.types import Endpoint, Reason, Role, Route
from kvproxy.workers import Fleet
from kvstore.clock import ManualClock

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Proxy:
    """What the metrics are told of."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.fleet = Fleet(self.clock.monotonic_s, dict.fromkeys(Role, 1000.0))
        self.queue = FairQueue(self.clock.monotonic_s, running_max=4, waiting_max=4, waiting_s_max=1.0)

    def samples(self) -> Samples:
        found: Samples = {}
        for family in text_string_to_metric_families(self.metrics.render(self.fleet, self.queue).decode()):
            assert family.documentation, family.name
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found, key
                found[key] = sample.value
        return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[(f"kvproxy_{name}", frozenset(labels.items()))]


def use_everything(told: Metrics, word: str | None = None) -> None:
    """Note one of everything; with `word`, all labels that are texts say that."""
    for endpoint in metrics.ENDPOINTS:
        for status in metrics.STATUSES:
            told.finished(word or endpoint, status, word or Route.DECODE_ONLY.value, 0.3)
    told.first_byte(0.2)
    for route in Route:
        for reason in Reason:
            told.decided(route, reason)
    for role in Role:
        for outcome in metrics.LEG_OUTCOMES:
            told.leg(word or role, word or outcome, 0.1)
        for why in metrics.RETRIES:
            told.retried(word or role, word or why)
    for why in metrics.REFUSALS:
        told.refused(503, word or why)
    for why in metrics.CUTS:
        told.cut(word or why)
    told.gone()
    for outcome in metrics.ASKED:
        told.store_asked(word or outcome, 0.001)
        told.tokenized(word or outcome, 0.001)
    told.cached(3, 10)


def test_every_series_is_there_at_zero_before_anything_happened() -> None:
    proxy = Proxy()
    before = proxy.samples()
    use_everything(proxy.metrics)
    assert set(proxy.samples()) == set(before)
    noted = {name for name, _ in before if name.startswith("kvproxy_")} - {"kvproxy_build_info"}
    assert all(number == 0 for (name, _), number in before.items() if name in noted)


def test_a_word_that_is_not_known_counts_as_other_and_makes_no_series() -> None:
    proxy = Proxy()
    before = set(proxy.samples())
    use_everything(proxy.metrics, "made up by a client")
    proxy.metrics.finished("completions", 418, "decode-only", 1.0)
    after = proxy.samples()
    assert set(after) == before
    assert value(after, "cut_total", why=OTHER) == len(metrics.CUTS)
    assert value(after, "requests_total", endpoint="completions", status=OTHER) == 1


def test_times_are_cumulative_histograms() -> None:
    proxy = Proxy()
    for seconds in (0.01, 0.3, 0.3, 1000.0):
        proxy.metrics.first_byte(seconds)
    found = proxy.samples()
    assert value(found, "first_byte_seconds_bucket", le="0.01") == 1, "a bound belongs to its bucket"
    assert value(found, "first_byte_seconds_bucket", le="0.25") == 1
    assert value(found, "first_byte_seconds_bucket", le="0.5") == 3
    assert value(found, "first_byte_seconds_bucket", le="600.0") == 3
    assert value(found, "first_byte_seconds_bucket", le="+Inf") == 4
    assert value(found, "first_byte_seconds_count") == 4
    assert value(found, "first_byte_seconds_sum") == pytest.approx(1000.61)


def test_workers_are_told_by_role_and_state_and_with_what_they_do() -> None:
    proxy = Proxy()
    for number in range(3):
        proxy.fleet.add(Endpoint(f"http://p{number}", Role.PREFILL, "n"))
    proxy.fleet.add(Endpoint("http://d", Role.DECODE, "n"))
    assert value(proxy.samples(), "ready") == 1
    first, second, _ = proxy.fleet.workers(Role.PREFILL)
    first.breaker.down()
    second.pending_tokens = 77
    proxy.fleet.drain(Role.DECODE, "http://d")
    found = proxy.samples()
    assert value(found, "workers", role="prefill", state="open") == 1
    assert value(found, "workers", role="prefill", state="closed") == 2
    assert value(found, "workers", role="decode", state="draining") == 1
    assert value(found, "workers", role="decode", state="closed") == 0
    assert value(found, "worker_pending_tokens", role="prefill", url="http://p1") == 77
    assert value(found, "ready") == 0


def test_circuits_are_counted_and_never_back_when_a_worker_goes() -> None:
    proxy = Proxy()
    proxy.fleet.add(Endpoint("http://p", Role.PREFILL, "n"))
    (worker,) = proxy.fleet.workers(Role.PREFILL)
    worker.breaker.down()
    assert value(proxy.samples(), "breaker_opened_total", role="prefill") == 1
    proxy.fleet.remove(Role.PREFILL, "http://p")
    assert proxy.fleet.workers(Role.PREFILL) == []
    assert value(proxy.samples(), "breaker_opened_total", role="prefill") == 1
    proxy.fleet.add(Endpoint("http://p", Role.PREFILL, "n"))
    (again,) = proxy.fleet.workers(Role.PREFILL)
    again.breaker.down()
    assert value(proxy.samples(), "breaker_opened_total", role="prefill") == 2


def test_workers_past_the_cap_share_one_name() -> None:
    proxy = Proxy()
    for number in range(NAMED_MAX + 5):
        proxy.fleet.add(Endpoint(f"http://d{number}", Role.DECODE, "n"))
    for worker in proxy.fleet.workers(Role.DECODE):
        worker.active_blocks = 2
    found = proxy.samples()
    urls = {dict(labels)["url"] for name, labels in found if name == "kvproxy_worker_active_blocks"}
    assert len(urls) == NAMED_MAX + 1
    assert value(found, "worker_active_blocks", role="decode", url=OTHER) == 10


def test_process_memory_and_descriptors_are_exposed() -> None:
    found = Proxy().samples()
    assert found[("process_open_fds", frozenset())] > 0
    assert found[("process_resident_memory_bytes", frozenset())] > 0
