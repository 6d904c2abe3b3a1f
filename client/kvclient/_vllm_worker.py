"""The connector in a worker: begins loads, carries out saves, and knows when they have ended.

Theory of operation. A step's plan comes by `begin`, before the forward pass. Loads run on threads; those that belong to
the step are waited for in `load`. Saves begin in `save`, behind the forward pass, and go on in a thread, one job for
all requests of a variant. vLLM learns in `transfers` which requests have their blocks, and which saves have ended of
requests whose pages it keeps; `take_failed` names the pages that were not loaded.

Invariants
1. A page is not read by a save after `begin` of a step that overwrites it: what has not begun is dropped, what has is
   waited for. (Each ends by its deadline.)
2. A load that was begun is reported exactly once, its failed pages at that time at the latest.
3. Only requests that the plan names are reported as sent, each once, when none of its saves is on its way or still to
   be begun: with speculative decoding vLLM asks before it calls `save`.
4. Pages on their way to the store are at most `QUEUE_SHARE` of all: what is over is not stored.
5. Who waits for a block that was to be stored and was not is told that it will not come, as far as the daemon answers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvclient._vllm_pages import LayerwiseSource, Pages, Source
from kvclient._vllm_plan import StepPlan, Transfer, Variant
from kvclient._vllm_settings import Load, Settings, Store
from kvclient._vllm_stats import LOGGER, Counters
from kvclient.client import Client, NamespaceHandle
from kvclient.results import StoreResult
from kvstore.block import Namespace

QUEUE_SHARE = 0.25
_LOADS_AT_ONCE = 2
_VARIANTS_MAX = 256
_IDLE_WAIT_S = 0.005
_COMPLAINT_S = 60.0
_ABORT_S = 0.25
_GIVEN_UP_MAX = 256

logger = logging.getLogger(LOGGER)


@dataclass(slots=True)
class _Job:
    step: int
    requests: frozenset[str]
    block_count: int
    future: Future[None]


@dataclass(slots=True)
class _Batch:
    """What a step saves of one variant."""

    variant: Variant
    requests: frozenset[str]
    hashes: list[bytes]
    pages: list[int]
    source: LayerwiseSource | None = None


class Worker:
    """One rank's loads and saves.

    Parameters
    ----------
    client, settings, counters
        Shared with the rest of the connector.
    pages : Pages
        Where the engine keeps its KV.
    namespace : Namespace
        This rank's, without adapter.
    page_count : int
        How many pages the engine has.
    saves : bool
        Whether this rank stores: others hold the same bytes if not.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        counters: Counters,
        pages: Pages,
        namespace: Namespace,
        page_count: int,
        *,
        saves: bool,
    ) -> None:
        self._client = client
        self._settings = settings
        self._counters = counters
        self._pages = pages
        self._namespace = namespace
        self._saves = saves
        self._queue_max = max(1, int(page_count * QUEUE_SHARE))
        self._loaders = ThreadPoolExecutor(_LOADS_AT_ONCE, "kvstored-load")
        self._storer = ThreadPoolExecutor(1, "kvstored-store")
        self._handles: dict[Variant, NamespaceHandle] = {}
        self._plan = StepPlan(-1)
        self._batches: list[_Batch] = []
        self._loading: dict[str, tuple[Transfer, Future[list[int]]]] = {}
        self._jobs: list[_Job] = []
        self._sending: set[str] = set()
        self._failed: set[int] = set()
        self._complained_at = -_COMPLAINT_S
        self._given_up: deque[tuple[Variant, list[bytes]]] = deque(maxlen=_GIVEN_UP_MAX)

    # ---- a step, in order

    def begin(self, plan: StepPlan) -> None:
        """Take a step's plan, before anything of it is computed."""
        self.give_up(plan.preempted)
        self._plan = plan
        self._sending.update(plan.sending)
        self._batches = self._batches_of(plan.saves) if self._saves else []
        if self._settings.load is Load.ASYNC:
            for transfer, future in self._begin_loads(plan.loads):
                self._loading[transfer.request] = (transfer, future)

    def load(self) -> None:
        """Load what the step's forward pass needs."""
        if self._settings.load is Load.ASYNC:
            return
        loads, self._plan.loads = self._plan.loads, []
        for transfer, future in self._begin_loads(loads):
            self._failed.update(_not_loaded(transfer, future))

    def take_layer(self, layer: str) -> None:
        """Copy aside a layer of what the step saves, now that it is computed."""
        for batch in self._batches:
            if batch.source is not None:
                batch.source.take(layer)

    def save(self) -> None:
        """Begin the step's saves, and wait for them if somebody waits for these blocks."""
        batches, self._batches = self._batches, []
        futures: list[Future[None]] = []
        for batch in batches:
            source: Source
            if batch.source is not None:
                batch.source.finish()
                source = batch.source
            else:
                source = self._pages.source(batch.pages)
            future = self._storer.submit(self._store, batch, source)
            future.add_done_callback(_complain)
            futures.append(future)
            self._jobs.append(_Job(self._plan.number, batch.requests, len(batch.pages), future))
        if self._plan.settles:
            # Pages of all saves up to this step count as free from now on, also where this step's own were dropped.
            wait([job.future for job in self._jobs])
        elif futures and self._settings.store is Store.SYNC:
            wait(futures)

    def transfers(self) -> tuple[set[str], set[str]]:
        """Return the requests whose saves have ended, of those whose pages are kept, and those whose load has ended."""
        if self._plan.is_idle:
            self.save()  # nothing is computed before it, and not all versions call it
        if self._plan.is_idle and (self._loading or self._sending):
            running: list[Future[Any]] = [future for _, future in self._loading.values()]
            running += [job.future for job in self._jobs]
            wait(running, timeout=_IDLE_WAIT_S, return_when=FIRST_COMPLETED)  # vLLM would only ask again
        received = {request for request, (_, future) in self._loading.items() if future.done()}
        for request in received:
            self._failed.update(_not_loaded(*self._loading.pop(request)))
        self._jobs = [job for job in self._jobs if not job.future.done()]
        unfinished: list[_Job | _Batch] = [*self._jobs, *self._batches]
        busy = frozenset[str]().union(*(some.requests for some in unfinished))
        sent = self._sending - busy
        self._sending -= sent
        return sent, received

    def take_failed(self) -> set[int]:
        """Return the pages whose load has failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    @property
    def done(self) -> int:
        """The last step up to which all saves have ended."""
        last = self._plan.number - 1 if self._batches else self._plan.number
        return min((job.step - 1 for job in self._jobs if not job.future.done()), default=last)

    # ---- others

    def give_up(self, requests: Iterable[str]) -> None:
        """Return when nothing reads the pages of some requests any more."""
        gone = frozenset(requests)
        if not gone:
            return
        jobs = [job for job in self._jobs if job.requests & gone]
        for job in jobs:
            if job.future.cancel():
                self._counters.add(store_dropped_blocks=job.block_count)
        wait([job.future for job in jobs if not job.future.cancelled()])

    def close(self) -> None:
        """End the threads, when what they do is done."""
        self._storer.shutdown()
        self._loaders.shutdown(cancel_futures=True)

    # ---- on the engine's thread

    def _begin_loads(self, loads: Sequence[Transfer]) -> list[tuple[Transfer, Future[list[int]]]]:
        ready = self._pages.queued() if loads else None
        return [(transfer, self._loaders.submit(self._fetch, transfer, ready)) for transfer in loads]

    def _batches_of(self, saves: Sequence[Transfer]) -> list[_Batch]:
        alike: dict[Variant, list[Transfer]] = {}
        for transfer in saves:
            alike.setdefault(transfer.variant, []).append(transfer)
        queued = sum(job.block_count for job in self._jobs if not job.future.done())
        batches: list[_Batch] = []
        for variant, transfers in alike.items():
            hashes = [block for transfer in transfers for block in transfer.hashes]
            pages = [page for transfer in transfers for page in transfer.pages]
            if queued and queued + len(pages) > self._queue_max:
                self._counters.add(store_dropped_blocks=len(pages))
                self._given_up.append((variant, hashes))
                if len(self._given_up) == 1:
                    self._storer.submit(self._tell_of_dropped)
                continue
            queued += len(pages)
            source = self._pages.layerwise(pages) if self._settings.store is Store.LAYERWISE else None
            requests = frozenset(transfer.request for transfer in transfers)
            batches.append(_Batch(variant, requests, hashes, pages, source))
        return batches

    # ---- on threads

    def _fetch(self, transfer: Transfer, ready: torch.cuda.Event | None) -> list[int]:
        """Load a request's blocks; returns the pages that have none."""
        began_at = time.monotonic()
        result = self._pages.fetch(
            self._handle(transfer.variant),
            transfer.hashes,
            transfer.pages,
            ready=ready,
            deadline_s=self._settings.load_timeout_ms / 1e3,
        )
        missing = result.missing
        loaded = len(transfer.pages) - len(missing)
        self._counters.add(
            loaded_blocks=loaded,
            load_failed_blocks=len(missing),
            loaded_bytes=loaded * self._pages.block_bytes,
            load_seconds=time.monotonic() - began_at,
        )
        return [transfer.pages[at] for at in missing]

    def _store(self, batch: _Batch, source: Source) -> None:
        began_at = time.monotonic()
        deadline_s = self._settings.store_timeout_ms / 1e3
        result = source.store(self._handle(batch.variant), batch.hashes, deadline_s)
        self._count(result, time.monotonic() - began_at)
        if result.failed:
            self._abort(batch.variant, [batch.hashes[at] for at in result.not_stored])

    def _tell_of_dropped(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._abort(*self._given_up.popleft())

    def _abort(self, variant: Variant, hashes: Sequence[bytes]) -> None:
        """Tell those who wait for blocks that they will not come."""
        self._handle(variant).abort(hashes, deadline_s=_ABORT_S)

    def _count(self, result: StoreResult, took_s: float) -> None:
        self._counters.add(
            stored_blocks=result.stored,
            present_blocks=result.present,
            store_failed_blocks=result.failed,
            stored_bytes=result.stored * self._pages.block_bytes,
            store_seconds=took_s,
        )
        if result.failed and time.monotonic() - self._complained_at > _COMPLAINT_S:
            self._complained_at = time.monotonic()
            logger.warning("%d blocks were not stored: %s", result.failed, result.failure or "no room")

    def _handle(self, variant: Variant) -> NamespaceHandle:
        handle = self._handles.get(variant)
        if handle is None:
            if len(self._handles) >= _VARIANTS_MAX:
                self._handles.clear()
            namespace = namespace_of(self._namespace, variant)
            handle = self._handles[variant] = self._client.namespace(namespace, ttl_s=self._settings.ttl_s)
        return handle


def namespace_of(namespace: Namespace, variant: Variant) -> Namespace:
    """Return the namespace of a variant."""
    if variant == Variant():
        return namespace
    return replace(namespace, adapter=variant.adapter, salt=namespace.salt + variant.salt)


def _not_loaded(transfer: Transfer, future: Future[list[int]]) -> Sequence[int]:
    """Return the pages that a load has left without their block."""
    raised = future.exception()
    if raised is None:
        return future.result()
    logger.error("a load failed, its blocks are computed instead: %s", raised, exc_info=raised)
    return transfer.pages


def _complain(future: Future[None]) -> None:
    """Log what a store raised: a fault of the connector's, which costs the engine nothing."""
    if not future.cancelled() and (raised := future.exception()) is not None:
        logger.error("a store failed: %s", raised, exc_info=raised)
