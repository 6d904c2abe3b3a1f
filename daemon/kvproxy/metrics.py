"""The proxy's Prometheus metrics: counts and times noted as requests go, and gauges read at each scrape.

Invariants
1. Every series is there from the first scrape on, at zero, but those of single workers, which come and go with them.
2. Label sets are bounded: all values are listed here or in enums of the proxy, and any other value counts as "other";
   of the workers the first `NAMED_MAX` of a role have their URL, all others share the name "other".
3. A counter never goes back, whatever workers come and go.
4. Noting costs a dictionary's look-up: it is done on the loop, at each step of each request.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import kvstore
from kvproxy import fairness
from kvproxy.breaker import BreakerState
from kvproxy.fairness import FairQueue
from kvproxy.types import Reason, Role, Route
from kvproxy.workers import Fleet, Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAMED_MAX = 100
OTHER = "other"

ENDPOINTS = ("completions", "chat")
STATUSES = (200, 400, 401, 403, 404, 408, 413, 422, 429, 499, 500, 502, 503, 504)
ROUTES = tuple(route.value for route in Route)
LEG_OUTCOMES = ("ok", "refused", "failed", "timeout", "cancelled", "retried")
RETRIES = ("stale-connection", "failed", "budget-spent")
REFUSALS = (
    *fairness.REASONS,
    *("no-decode-workers", "prefill-lost", "decode-failed", "body-too-large", "bodies-full", "bad-request", "deadline"),
    "draining",
)
CUTS = ("gone", "broken", "timeout", "lost", "status", "deadline")
ASKED = ("ok", "timeout", "failed")
WORKER_STATES = (*(state.name.lower() for state in BreakerState), "draining")

_WORKER_GAUGES = {
    "requests": "Requests in flight",
    "pending_tokens": "Prompt tokens sent and not answered",
    "active_blocks": "Blocks that the requests in flight may hold",
    "tokens_per_s": "Measured speed of prefill",
}
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_ASK_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Labels = dict[str, Sequence[str]]


class Metrics:
    """What one proxy counts. Belongs to one event loop."""

    def __init__(self) -> None:
        roles = [str(role) for role in Role]
        self._requests = _Counts(
            "requests", "Requests answered", {"endpoint": ENDPOINTS, "status": [str(code) for code in STATUSES]}
        )
        self._request_s = _Times(
            "request_seconds", "Time from a request to the end of its answer", {"route": ROUTES}, _REQUEST_S
        )
        self._first_byte_s = _Times("first_byte_seconds", "Time from a request to its first byte", {}, _REQUEST_S)
        self._decisions = _Counts("decisions", "Ways chosen, and why", {"route": ROUTES, "reason": [*Reason]})
        self._legs = _Counts("legs", "Requests to workers that ended", {"role": roles, "outcome": LEG_OUTCOMES})
        self._leg_s = _Times("leg_seconds", "Time of a request to a worker", {"role": roles}, _REQUEST_S)
        self._retries = _Counts("retries", "Second tries, or why there was none", {"role": roles, "why": RETRIES})
        self._refused = _Counts("refused", "Requests that no worker got", {"why": REFUSALS})
        self._cuts = _Counts("cut", "Answers that ended after they had begun", {"why": CUTS})
        self._gone = _Counts("clients_gone", "Clients that left before the end of their answer", {})
        self._store = _Times("store_seconds", "Time of a question to the store", {"outcome": ASKED}, _ASK_S)
        self._tokenize = _Times("tokenize_seconds", "Time to tokenise a prompt", {"outcome": ASKED}, _ASK_S)
        self._prompt_tokens = _Counts("prompt_tokens", "Tokens of prompts that the store was asked about", {})
        self._cached_tokens = _Counts("cached_tokens", "Of those, tokens that the store held", {})
        self._workers = _WorkerFamilies()
        self._process = ProcessCollector(registry=None)

    # ---- what happened

    def finished(self, endpoint: str, status: int, route: str, seconds: float) -> None:
        """Note that a request is over: its answer's status, the way it went, and how long it took."""
        self._requests.add(endpoint, str(status))
        self._request_s.add(seconds, route)

    def first_byte(self, seconds: float) -> None:
        """Note when a client got the first byte of its answer."""
        self._first_byte_s.add(seconds)

    def decided(self, route: Route, reason: Reason) -> None:
        """Note which way a request goes, and why."""
        self._decisions.add(route.value, reason)

    def leg(self, role: str, outcome: str, seconds: float) -> None:
        """Note that a request to a worker ended."""
        self._legs.add(role, outcome)
        self._leg_s.add(seconds, role)

    def retried(self, role: str, why: str) -> None:
        """Note why a leg is tried again, or why it is not."""
        self._retries.add(role, why)

    def refused(self, status: int, why: str) -> None:
        """Note that a request is refused by the proxy itself; its status is counted by `finished`."""
        self._refused.add(why)

    def cut(self, why: str) -> None:
        """Note that an answer ended early after it had begun."""
        self._cuts.add(why)

    def gone(self) -> None:
        """Note that a client left before the end of its answer."""
        self._gone.add()

    def store_asked(self, outcome: str, seconds: float) -> None:
        """Note what became of a question to the store."""
        self._store.add(seconds, outcome)

    def tokenized(self, outcome: str, seconds: float) -> None:
        """Note what became of tokenising a prompt."""
        self._tokenize.add(seconds, outcome)

    def cached(self, tokens: int, of: int) -> None:
        """Note how many tokens of a prompt the store held."""
        self._cached_tokens.add(count=tokens)
        self._prompt_tokens.add(count=of)

    # ---- what is told

    def render(self, fleet: Fleet, queue: FairQueue) -> bytes:
        """Return all series in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self._families(fleet, queue)))
        return generate_latest(registry)

    def _families(self, fleet: Fleet, queue: FairQueue) -> Iterator[Metric]:
        build = GaugeMetricFamily("kvproxy_build_info", "What runs here", labels=["version"])
        build.add_metric([kvstore.__version__], 1)
        yield build
        ready = any(worker.is_usable for worker in fleet.workers(Role.DECODE))
        yield GaugeMetricFamily("kvproxy_ready", "1 when a decode worker can be used", value=int(ready))
        for noted in (
            *(self._requests, self._request_s, self._first_byte_s, self._decisions, self._legs, self._leg_s),
            *(self._retries, self._refused, self._cuts, self._gone, self._store, self._tokenize),
            *(self._prompt_tokens, self._cached_tokens),
        ):
            yield noted.family()
        yield GaugeMetricFamily("kvproxy_queue_running", "Requests that have a place", value=queue.running)
        yield GaugeMetricFamily("kvproxy_queue_waiting", "Requests that wait for a place", value=queue.waiting)
        yield CounterMetricFamily("kvproxy_queue_admitted", "Requests that got a place", value=queue.admitted_count)
        yield from self._workers.families(fleet)
        yield from self._process.collect()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Counts:
    """A counter for each combination of known label values, all of them there from the start."""

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self._name = f"kvproxy_{name}"
        self._text = text
        self._labels = {label: frozenset(values) for label, values in labels.items()}
        every = itertools.product(*((*values, OTHER) for values in labels.values()))
        self._counts: dict[tuple[str, ...], int] = dict.fromkeys(every, 0)

    def add(self, *values: str, count: int = 1) -> None:
        if values not in self._counts:
            values = _known(values, self._labels)
        self._counts[values] += count

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        for values, count in self._counts.items():
            family.add_metric(list(values), count)
        return family


class _Times:
    """A histogram for each combination of known label values, all of them there from the start."""

    def __init__(self, name: str, text: str, labels: Labels, bounds_s: Sequence[float]) -> None:
        self._name = f"kvproxy_{name}"
        self._text = text
        self._labels = {label: frozenset(values) for label, values in labels.items()}
        self._bounds_s = bounds_s
        every = list(itertools.product(*((*values, OTHER) for values in labels.values())))
        self._buckets = {values: [0] * (len(bounds_s) + 1) for values in every}
        self._sums_s = dict.fromkeys(every, 0.0)

    def add(self, seconds: float, *values: str) -> None:
        if values not in self._sums_s:
            values = _known(values, self._labels)
        self._buckets[values][bisect_left(self._bounds_s, seconds)] += 1
        self._sums_s[values] += seconds

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = [_bound(bound) for bound in (*self._bounds_s, float("inf"))]
        for values, buckets in self._buckets.items():
            sums = itertools.accumulate(buckets)
            family.add_metric(list(values), list(zip(bounds, sums, strict=True)), self._sums_s[values])
        return family


class _WorkerFamilies:
    """What is told of the workers, and how often their circuits opened since the start."""

    def __init__(self) -> None:
        self._opened = dict.fromkeys(Role, 0)
        self._opened_last: dict[Worker, int] = {}

    def families(self, fleet: Fleet) -> Iterator[Metric]:
        workers = {role: fleet.workers(role) for role in Role}
        count = GaugeMetricFamily("kvproxy_workers", "Workers, by what is thought of them", labels=["role", "state"])
        for role, of_role in workers.items():
            states = [_state(worker) for worker in of_role]
            for state in WORKER_STATES:
                count.add_metric([role, state], states.count(state))
        yield count
        yield self._circuits(workers)
        for name, text in _WORKER_GAUGES.items():
            yield _of_workers(name, text, workers)

    def _circuits(self, workers: Mapping[Role, Sequence[Worker]]) -> Metric:
        last, self._opened_last = self._opened_last, {}
        for role, of_role in workers.items():
            for worker in of_role:
                self._opened_last[worker] = worker.breaker.opened_count
                self._opened[role] += worker.breaker.opened_count - last.get(worker, 0)
        family = CounterMetricFamily("kvproxy_breaker_opened", "Times that a worker was left alone", labels=["role"])
        for role, number in self._opened.items():
            family.add_metric([role], number)
        return family


def _of_workers(name: str, text: str, workers: Mapping[Role, Sequence[Worker]]) -> Metric:
    family = GaugeMetricFamily(f"kvproxy_worker_{name}", text, labels=["role", "url"])
    for role, of_role in workers.items():
        for worker in of_role[:NAMED_MAX]:
            family.add_metric([role, worker.endpoint.url], getattr(worker, name))
        if of_role[NAMED_MAX:]:
            family.add_metric([role, OTHER], sum(getattr(worker, name) for worker in of_role[NAMED_MAX:]))
    return family


def _state(worker: Worker) -> str:
    return "draining" if worker.draining else worker.breaker.state.name.lower()


def _known(values: Sequence[str], labels: dict[str, frozenset[str]]) -> tuple[str, ...]:
    return tuple(value if value in known else OTHER for value, known in zip(values, labels.values(), strict=True))


def _bound(seconds: float) -> str:
    return "+Inf" if seconds == float("inf") else str(seconds)
