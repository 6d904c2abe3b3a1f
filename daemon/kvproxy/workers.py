"""The workers: which there are, how much each has to do, and whether it is used.

Theory of operation. A worker is used while its breaker lets it and nothing says that it is dead. The breaker learns
from legs; `Watch` (health.py) asks /health of those that are suspected: a breaker that has opened keeps its worker out
until /health answers, then lets one leg through to find out; a worker whose legs have been silent is asked too, and if
it does not answer, its legs are ended (`Leg.lose`), so that a process which accepts and does nothing is found in
seconds and not at somebody's deadline.

Invariants
1. requests and active_blocks are sums over the legs in flight, pending_tokens over those that have no answer yet:
   `busy` takes and gives back, tokens at `answered` already.
2. A draining worker gets no new leg; one that is removed is gone once its last leg has ended.
3. A URL is there once a role.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from kvproxy.breaker import Breaker, BreakerState, Trial
from kvproxy.types import Endpoint, Role, View
from kvstore.errors import UsageError

_SPEED_PART = 0.1  # how fast a measured speed follows
_SPEED_TOKENS_MIN = 256  # a shorter prefill says more about latency than about speed


class Losable(Protocol):
    """A leg in flight, as the worker sees it."""

    @property
    def quiet_since_s(self) -> float | None:
        """When it last heard something; None while it does not wait for the worker."""

    def lose(self, why: str) -> None:
        """End it: the worker is gone."""


class Worker:
    """One worker. Belongs to one event loop, like everything here."""

    def __init__(self, endpoint: Endpoint, breaker: Breaker, tokens_per_s: float) -> None:
        self.endpoint = endpoint
        self.breaker = breaker
        self.tokens_per_s = tokens_per_s
        self.draining = False
        self.removed = False
        self.legs: dict[Losable, int] = {}  # each with the tokens that it waits for
        self.pending_tokens = 0
        self.active_blocks = 0
        self.probes_failed = 0
        self._needs_probe = False

    @property
    def requests(self) -> int:
        return len(self.legs)

    @property
    def is_suspect(self) -> bool:
        """Whether /health has to answer before a leg may try it."""
        return self._needs_probe and self.breaker.state is not BreakerState.CLOSED

    @property
    def is_usable(self) -> bool:
        return not self.draining and not self.is_suspect and self.breaker.allows()

    def failed(self, trial: Trial, *, gone: bool) -> None:
        """Take in that a leg failed; `gone`: nobody listens there."""
        self.breaker.failed(trial)
        if gone:
            self.breaker.down()
        if self.breaker.state is BreakerState.OPEN:
            self._needs_probe = True

    def died(self) -> None:
        """Take in that /health does not answer while legs wait: they are ended, and go elsewhere."""
        self.breaker.down()
        self._needs_probe = True
        for leg in list(self.legs):
            if leg.quiet_since_s is not None:
                leg.lose(f"the {self.endpoint.role} worker has stopped answering")

    def probed(self, alive: bool) -> None:
        """Take in what /health said."""
        self.probes_failed = 0 if alive else self.probes_failed + 1
        if alive:
            self._needs_probe = False

    @contextmanager
    def busy(self, leg: Losable, tokens: int, blocks: int) -> Generator[None, None, None]:
        """Count a leg in flight inside the block."""
        self.legs[leg] = tokens
        self.pending_tokens += tokens
        self.active_blocks += blocks
        try:
            yield
        finally:
            self.answered(leg)
            del self.legs[leg]
            self.active_blocks -= blocks

    def answered(self, leg: Losable) -> None:
        """Take in that a leg's prompt has been computed: its answer has begun, or will not come."""
        self.pending_tokens -= self.legs[leg]
        self.legs[leg] = 0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Take in that `tokens` were prefilled in `seconds`."""
        if tokens >= _SPEED_TOKENS_MIN and seconds > 0:
            self.tokens_per_s += _SPEED_PART * (tokens / seconds - self.tokens_per_s)

    def view(self, cached_tokens: Mapping[str, int]) -> View:
        """Return the worker as decisions see it."""
        return View(
            self.endpoint.url, self.requests, self.pending_tokens, self.active_blocks, cached_tokens, self.tokens_per_s
        )


class Fleet:
    """All workers, by role and URL."""

    def __init__(self, now_s: Callable[[], float], speeds: Mapping[Role, float]) -> None:
        self._now_s = now_s
        self._speeds = speeds
        self._workers: dict[tuple[Role, str], Worker] = {}
        self._is_closed = False

    def close(self, why: str) -> None:
        """End all legs, and let none begin any more."""
        self._is_closed = True
        for worker in self._workers.values():
            for leg in list(worker.legs):
                leg.lose(why)

    def workers(self, role: Role) -> list[Worker]:
        """Return all workers of a role, in the order they were added."""
        return [worker for (of, _), worker in self._workers.items() if of is role]

    def usable(self, role: Role, cached_tokens: Mapping[str, int], without: frozenset[str] = frozenset()) -> list[View]:
        """Return the workers of a role that may be used now, but those whose URLs are in `without`."""
        return [
            worker.view(cached_tokens)
            for worker in self.workers(role)
            if worker.is_usable and worker.endpoint.url not in without and not self._is_closed
        ]

    def worker(self, role: Role, url: str) -> Worker:
        """Return a worker.

        Raises
        ------
        UsageError
            There is none of that role with that URL.
        """
        found = self._workers.get((role, url.rstrip("/")))
        if found is None:
            known = ", ".join(one.endpoint.url for one in self.workers(role)) or "none"
            raise UsageError(f"there is no {role} worker {url}: there is {known}")
        return found

    def add(self, endpoint: Endpoint) -> None:
        """Add a worker, or take back one that drains.

        Raises
        ------
        UsageError
            It is there already.
        """
        there = self._workers.get((endpoint.role, endpoint.url))
        if there is not None and not there.draining:
            raise UsageError(f"{endpoint.url} is a {endpoint.role} worker already: drain it, or choose another")
        if there is not None:
            there.draining = there.removed = False
            there.endpoint = endpoint
            return
        self._workers[endpoint.role, endpoint.url] = Worker(
            endpoint, Breaker(self._now_s), self._speeds[endpoint.role]
        )

    def drain(self, role: Role, url: str) -> None:
        """Give a worker no new legs; UsageError if it isn't there."""
        self.worker(role, url).draining = True

    def remove(self, role: Role, url: str) -> int:
        """Drain a worker and forget it once its legs have ended; returns how many are in flight."""
        worker = self.worker(role, url)
        worker.draining = worker.removed = True
        self.forget_removed()
        return worker.requests

    def forget_removed(self) -> None:
        """Forget removed workers whose last leg has ended."""
        for key, worker in list(self._workers.items()):
            if worker.removed and not worker.requests:
                del self._workers[key]

    def report(self) -> list[dict[str, object]]:
        """Return what an operator wants to see of each worker."""
        return [
            {
                "role": str(role),
                "url": url,
                "node": worker.endpoint.node,
                "state": "draining" if worker.draining else worker.breaker.state.name.lower(),
                "usable": worker.is_usable,
                "requests": worker.requests,
                "pending_tokens": worker.pending_tokens,
                "active_blocks": worker.active_blocks,
                "tokens_per_s": round(worker.tokens_per_s, 1),
            }
            for (role, url), worker in self._workers.items()
        ]
