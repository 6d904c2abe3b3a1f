"""Asks /health of workers that are suspected, and of no other.

Suspected is a worker whose circuit has opened, and one whose legs have been silent for a while. The first comes back
into use once it answers; the legs of the second are ended when it has not answered `_FAILED_MAX` times in a row, or
when nobody listens there any more.

Invariants
1. A worker is asked at most once an interval, and all are asked at once: a dead one delays no other.
2. Any answer below 500 is life: a worker without /health is not dead.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from kvproxy.legs import Wires
from kvproxy.settings import Settings
from kvproxy.types import Role
from kvproxy.workers import Fleet, Worker
from kvstored.logs import fields

log = logging.getLogger("kvproxy.health")

_FAILED_MAX = 3
_QUIET_INTERVALS = 2


class Watch:
    """Looks after the workers of a fleet, for ever."""

    def __init__(self, fleet: Fleet, wires: Wires, settings: Settings) -> None:
        self._fleet = fleet
        self._wires = wires
        self._interval_s = settings.probe_interval_s
        self._limit_s = settings.probe_s

    async def run(self) -> None:
        """Look each interval; ends by cancellation only."""
        while True:
            await asyncio.sleep(self._interval_s)
            self._fleet.forget_removed()
            suspects = [worker for role in Role for worker in self._fleet.workers(role) if self._is_suspect(worker)]
            async with asyncio.TaskGroup() as group:
                for worker in suspects:
                    group.create_task(self._look(worker))

    def _is_suspect(self, worker: Worker) -> bool:
        return worker.is_suspect or self._is_quiet(worker)

    def _is_quiet(self, worker: Worker) -> bool:
        since_s = asyncio.get_running_loop().time() - _QUIET_INTERVALS * self._interval_s
        return any(leg.quiet_since_s is not None and leg.quiet_since_s <= since_s for leg in worker.legs)

    async def _look(self, worker: Worker) -> None:
        was_suspect = worker.is_suspect
        alive, gone = True, False
        try:
            answer = await self._wires.get(f"{worker.endpoint.url}/health", self._limit_s)
            alive = answer.status < 500
        except aiohttp.ClientConnectorError:
            alive, gone = False, True
        except (TimeoutError, aiohttp.ClientError, OSError):
            alive = False
        worker.probed(alive)
        if alive and was_suspect:
            log.info("worker answers again", extra=fields(url=worker.endpoint.url, role=worker.endpoint.role))
        if not alive and (gone or worker.probes_failed >= _FAILED_MAX) and self._is_quiet(worker):
            log.warning(
                "worker is dead",
                extra=fields(url=worker.endpoint.url, role=worker.endpoint.role, legs_ended=worker.requests),
            )
            worker.died()
