"""vLLM's connector to kvstored: a KVConnectorBase_V1, for vLLM 0.24 to 0.33.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoredConnector",
        "kv_connector_module_path": "kvclient.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

Theory of operation. vLLM makes the connector twice: beside its scheduler, where it says what a request can load and
plans each step (`_vllm_scheduler`, `_vllm_plan`), and in each worker, where the plan is carried out (`_vllm_worker`).
The plan travels with each step's metadata. Workers know the geometry of the KV, so they make the namespaces; what they
know travels back with their first step's output. This module and `_vllm_config` alone know vLLM.

Invariants
1. No state of a step is begun in `start_load_kv`: in some versions it comes after the forward pass.
2. A cache whose blocks can't be shared is one that always misses; a configuration that could make blocks of different
   models equal ends the start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvclient._vllm_config import Engine
from kvclient._vllm_errors import Unsupported
from kvclient._vllm_pages import Pages
from kvclient._vllm_plan import Plan, Scheduled, StepPlan
from kvclient._vllm_scheduler import RankName, Scheduler
from kvclient._vllm_settings import Load, Store, check_load, settings_of
from kvclient._vllm_stats import COUNTERS, LOGGER, Counters, added, summary
from kvclient._vllm_worker import Worker
from kvclient.client import Client

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_ENDED_BY_ITSELF = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})

logger = logging.getLogger(LOGGER)


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's side tells the workers of a step; `introduce`: they are to say what their namespaces are."""

    plan: StepPlan
    introduce: bool


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers tell the scheduler's side: their namespaces, and up to which step their saves have ended."""

    namespaces: dict[RankName, bytes] = field(default_factory=dict[RankName, bytes])
    done: dict[RankName, int] = field(default_factory=dict[RankName, int])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return what both say."""
        assert isinstance(other, WorkerReport)
        return WorkerReport({**self.namespaces, **other.namespaces}, {**self.done, **other.done})


@dataclass
class KVStoredStats(KVConnectorStats):
    """What was counted in an interval."""

    data: dict[str, Any] = field(default_factory=dict[str, Any])

    def reset(self) -> None:
        """Forget what was counted."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoredStats:
        """Return the sum of both."""
        return KVStoredStats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return what a log line says."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class KVStoredPromMetrics(KVConnectorPromMetrics):
    """The counters as vLLM's /metrics has them: `vllm:kvstored_` and their name."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in COUNTERS.items():
            counter = metric_types[Counter](
                name=f"vllm:kvstored_{name}", documentation=meaning, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, count in transfer_stats_data.items():
            if count and name in self._counters:
                self._counters[name][engine_idx].inc(count)


class KVStoredConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts in kvstored, and loads what is there instead of computing it."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = settings_of(transfer.kv_connector_extra_config)
        self._engine = Engine(vllm_config, kv_cache_config, self._settings)
        self._saves: bool = transfer.is_kv_producer
        self._loads: bool = transfer.is_kv_consumer
        self._counters = Counters()
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._client: Client | None = None
        self._plan: StepPlan | None = None
        self._introduction: bytes | None = None
        self._reported = -1
        self._rank: RankName = (0, 0)
        try:
            self._engine.check()
        except Unsupported as exc:
            self._give_up(exc)
            return
        self._client = Client(self._settings.socket, name=f"vllm-{role.name.lower()}-{os.getpid()}")
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(self._client)

    def _make_scheduler(self, client: Client) -> Scheduler:
        if self._loads:
            check_load(self._settings.load, self._engine.depth)
        if self._loads and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r: a request whose blocks are gone or damaged when they are loaded FAILS. "
                'Set it to "recompute", so that these blocks are computed instead.',
                self._kv_transfer_config.kv_load_failure_policy,
            )
        self._engine.warn_of_hash_seed()
        plan = Plan(
            self._engine.block_tokens,
            loads=self._loads,
            saves=self._saves,
            loads_within_step=self._settings.load is Load.SYNC,
            keeps_pages=self._settings.store is not Store.SYNC,
            depth=self._engine.depth,
            settles_always=not self._loads,
        )
        return Scheduler(client, self._settings, self._counters, plan, rank_count=self._engine.rank_count)

    def _give_up(self, reason: Unsupported) -> None:
        logger.warning("kvstored is not used by this engine: %s. Everything is computed, nothing is stored.", reason)
        self._worker = self._scheduler = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for this cache: what is dropped is computed again."""
        return False

    # ---- beside the scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond these can be loaded, and whether between steps; None: ask again later."""
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens) and self._settings.load is Load.ASYNC

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the pages of a request, and how many of its tokens are to be loaded."""
        if self._scheduler is not None:
            self._scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what the workers are to do in this step."""
        if self._scheduler is None:
            return StepMetadata(StepPlan(0), introduce=False)
        plan = self._scheduler.step(_scheduled(scheduler_output), scheduler_output.preempted_req_ids or ())
        return StepMetadata(plan, self._scheduler.wants_introduction)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note what the workers say."""
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.introduced(report.namespaces)
            self._scheduler.done(report.done)
        if connector_output.invalid_block_ids:
            self._scheduler.failed(connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the pages are to be kept until their saves have ended."""
        if self._scheduler is None:
            return False, None
        aborted = request.status.name not in _ENDED_BY_ITSELF
        return self._scheduler.finished(request.request_id, aborted=aborted), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the pages are to be kept: the same for caches of several groups, which are not stored."""
        return self.request_finished(request, [])

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return how many loaded tokens come from memory, and how many from disk."""
        # Only versions that know the sources ask.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._scheduler is None or not num_external_tokens:
            return {}
        in_memory, on_disk = self._scheduler.tokens_by_tier(
            request.request_id, num_external_tokens, self._engine.block_tokens
        )
        split = {CacheHitSource.HOST: in_memory, CacheHitSource.DISK: on_disk}
        return {source: tokens for source, tokens in split.items() if tokens}

    def reset_cache(self) -> bool | None:
        """Part from everything stored so far, as after a change of weights; other engines keep it."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # ---- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note where the engine keeps its KV; what it looks like makes the namespace."""
        if self._client is None:
            return
        try:
            rank = self._engine.rank()
            layout = self._engine.layout(kv_caches, rank)
            pages = Pages(kv_caches, layout)
        except Unsupported as exc:
            self._give_up(exc)
            return
        namespace = self._engine.namespace(layout, kv_caches)
        self._worker = Worker(
            self._client,
            self._settings,
            self._counters,
            pages,
            namespace,
            self._engine.page_count,
            saves=self._saves and layout.is_first,
        )
        self._rank = (rank.pp_rank, rank.tp_rank)
        self._introduction = namespace.encode()
        logger.info(
            "kvstored: namespace %s of model %s, %d layers, blocks of %d tokens and %d bytes",
            namespace.digest.hex()[:16], namespace.model, len(layout.layers), namespace.block_tokens, pages.block_bytes,
        )  # fmt: skip

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take a step's plan: the first that a worker hears of a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.plan)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Return when the pages of preempted requests may be overwritten."""
        assert isinstance(kv_connector_metadata, StepMetadata)
        if self._worker is not None:
            self._worker.give_up(kv_connector_metadata.plan.preempted)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Load what this step's forward pass needs."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a step's loads have ended before its forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Copy aside a layer of what this step saves, if that is done layer by layer."""
        if self._worker is not None and not self._engine.is_ubatched:
            self._worker.take_layer(layer_name)

    def wait_for_save(self) -> None:
        """Begin the step's saves; they go on in the background unless somebody waits for them."""
        if self._worker is not None:
            self._worker.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose saves have ended, of those whose pages are kept, and those whose load has ended."""
        if self._worker is None:
            metadata = self._connector_metadata
            # The scheduler's side may not know that nothing is stored here: it must not keep pages for ever.
            return (set(metadata.plan.sending) or None if isinstance(metadata, StepMetadata) else None), None
        sent, received = self._worker.transfers()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that were not loaded."""
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return what is new to the scheduler's side."""
        if self._worker is None:
            return None
        report = WorkerReport()
        metadata = self._connector_metadata
        if isinstance(metadata, StepMetadata) and metadata.introduce and self._introduction is not None:
            report.namespaces[self._rank] = self._introduction
        if self._worker.done != self._reported:
            self._reported = report.done[self._rank] = self._worker.done
        return report if report.namespaces or report.done else None

    # ---- both

    def get_kv_connector_stats(self) -> KVStoredStats | None:
        """Return what was counted since the last call."""
        counted = self._counters.take()
        return KVStoredStats(counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoredStats:
        """Return stats from what they were sent as."""
        return KVStoredStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStoredPromMetrics:
        """Return what adds these stats to Prometheus."""
        return KVStoredPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether the layers' hooks must run although a graph is replayed."""
        return settings_of(extra_config).store is Store.LAYERWISE

    def take_events(self) -> Iterable[Any]:
        """Return no events: the daemon has its own."""
        return ()

    def shutdown(self) -> None:
        """End threads and connections, once what they do is done: each has its deadline."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        if self._client is not None:
            self._client.close()


def _scheduled(output: SchedulerOutput) -> Sequence[Scheduled]:
    """Return the requests of a step."""
    tokens: Mapping[str, int] = output.num_scheduled_tokens
    found = [
        Scheduled(new.req_id, new.num_computed_tokens, tokens[new.req_id], new.block_ids[0], replaces=True)
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    for request_id, computed, pages in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        resumed = request_id in cached.resumed_req_ids
        found.append(Scheduled(request_id, computed, tokens[request_id], pages[0] if pages else (), replaces=resumed))
    return found


def _register() -> None:
    """Make the connector known by its name, by which MultiConnector looks up who counted what."""
    try:
        KVConnectorFactory.register_connector(KVStoredConnector.__name__, __name__, KVStoredConnector.__name__)
    except ValueError:
        logger.debug("vLLM knows a connector of this name already")


_register()
