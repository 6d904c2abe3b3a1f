"""Waits, beside the scheduler, for blocks that a prefill under way is about to store.

Theory of operation. Who sends a request to P and D at once tells D so in its kv_transfer_params: `{"kvstored":
{"wait_ms": 20000}}`. D then asks the store only when P's blocks are there. Until then vLLM is told to ask again later,
and a coroutine waits on a loop and a connection that all waits share; the daemon tells it of a seal or an abort.
It waits in each rank's own slice, and in the other slices of the model that have been met, since P may be split over
another number of ranks. What ends a wait says nothing of what there is: the ordinary lookup follows it.

Invariants
1. A request waits once, no longer than it was told and than the operator allows, and `WAITING_MAX` at a time.
2. A wait ends when every rank can read all blocks, when one of them is aborted, when nobody is left who could store
   them, when the daemon is gone, and when the request is forgotten.
3. Nothing that a request says raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from kvclient import _operations
from kvclient._assembly import GroupLookup
from kvclient._vllm_lookup import Ranks
from kvclient._vllm_stats import LOGGER, Counters
from kvclient.aio import AsyncClient
from kvstore.wire import Outcome

WAITING_MAX = 128
_MINE = "kvstored"  # our object in kv_transfer_params
_END_S = 10.0

logger = logging.getLogger(LOGGER)


def wait_s_of(params: object, longest_s: float) -> float:
    """Return how long a request is to wait for its prefill, by what it was sent with; 0: not at all."""
    if not isinstance(params, Mapping):
        return 0.0
    told = cast("Mapping[object, object]", params).get(_MINE)
    if not isinstance(told, Mapping):
        return 0.0
    wait_ms = cast("Mapping[object, object]", told).get("wait_ms")
    if isinstance(wait_ms, bool) or not isinstance(wait_ms, (int, float)) or not wait_ms > 0:
        return 0.0  # nothing, or none that a proxy of ours would send
    return min(wait_ms, longest_s * 1e3) / 1e3


class Waits:
    """The requests of one engine that wait for their prefill.

    Parameters
    ----------
    make : callable
        Makes the client; called once, when something first waits.
    counters
        Shared with the rest of the connector.
    """

    def __init__(self, make: Callable[[], AsyncClient], counters: Counters) -> None:
        self._make = make
        self._counters = counters
        self._waiter: _Waiter | None = None
        self._running: dict[str, tuple[float, Future[bool]]] = {}
        self._over: set[str] = set()

    def is_waiting(self, request_id: str, wait_s: float, ranks: Ranks, hashes: Sequence[bytes]) -> bool:
        """Return whether a request is to be left alone for now; the first time this begins its wait."""
        if request_id in self._over or wait_s <= 0:
            return False
        began = self._running.get(request_id)
        if began is None:
            if len(self._running) >= WAITING_MAX:
                self._over.add(request_id)
                return False
            if self._waiter is None:
                self._waiter = _Waiter(self._make())
            future = self._waiter.begin(lambda client: _arrival(client, ranks, hashes, wait_s))
            began = self._running[request_id] = (time.monotonic(), future)
        if not began[1].done():
            return True
        del self._running[request_id]
        self._over.add(request_id)
        self._count(*began)
        return False

    @property
    def running(self) -> list[Future[bool]]:
        """What is waited for."""
        return [future for _, future in self._running.values()]

    def forget(self, request_id: str) -> None:
        """End a request's wait, if it has one, and forget that it waited."""
        self._over.discard(request_id)
        began = self._running.pop(request_id, None)
        if began is not None:
            began[1].cancel()

    def end_all(self) -> None:
        """End all waits; those requests do not wait again."""
        for request_id, (_, future) in self._running.items():
            future.cancel()
            self._over.add(request_id)
        self._running.clear()

    def close(self) -> None:
        """End all waits, and the thread."""
        self.end_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.close()

    def _count(self, began_at: float, future: Future[bool]) -> None:
        raised = future.exception()
        if raised is not None:
            logger.error("a wait for a prefill failed: %s", raised, exc_info=raised)
        in_vain = raised is not None or not future.result()
        self._counters.add(waits=1, waits_in_vain=in_vain, wait_seconds=time.monotonic() - began_at)


class _Waiter:
    """A thread with an event loop, and the one client on it."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvstored-wait", daemon=True)
        self._thread.start()

    def begin(self, wait: Callable[[AsyncClient], Coroutine[Any, Any, bool]]) -> Future[bool]:
        return asyncio.run_coroutine_threadsafe(wait(self._client), self._loop)

    def close(self) -> None:
        ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(TimeoutError):
            ended.result(_END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()


async def _arrival(client: AsyncClient, ranks: Ranks, hashes: Sequence[bytes], wait_s: float) -> bool:
    """Return whether every rank can read all blocks, once that is so or nothing more is to be hoped for."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            return await _all_there(client, ranks, list(hashes), wait_s)
    return False


async def _all_there(client: AsyncClient, ranks: Ranks, hashes: list[bytes], wait_s: float) -> bool:
    if await _are_readable(client, ranks, hashes, wait_s):
        return True
    own = {space.encoded: space for space in ranks.spaces}
    others = {space.encoded: space for siblings in ranks.siblings for space in siblings.met()}
    async with asyncio.TaskGroup() as group:
        waits = {
            group.create_task(client.run(_operations.wait(space, hashes, wait_s), None, wait_s)): encoded in own
            for encoded, space in {**others, **own}.items()
        }
        try:
            while waits:
                ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                others_left = any(not is_own for wait, is_own in waits.items() if wait not in ended)
                others_ended = any(not waits.pop(wait) for wait in ended)
                found = [wait.result() for wait in ended]
                if any(result.failure is not None or result.count(Outcome.ABORTED) for result in found):
                    return False
                if await _are_readable(client, ranks, hashes, wait_s):
                    return True
                if others_ended and not others_left:
                    return False  # P has stored all that it will, and it can't be put together here
            return False
        finally:
            for wait in waits:
                wait.cancel()


async def _are_readable(client: AsyncClient, ranks: Ranks, hashes: list[bytes], within_s: float) -> bool:
    for space, siblings in zip(ranks.spaces, ranks.siblings, strict=True):
        found = await client.run(GroupLookup(space, siblings, hashes), within_s)
        if found.hits < len(hashes):
            return False
    return True
