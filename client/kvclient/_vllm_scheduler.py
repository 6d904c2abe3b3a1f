"""The connector beside vLLM's scheduler: what a request can load, and when.

Invariants
1. The store is asked at most once for an admission of a request, and never about an empty prefix.
2. A request waits for an answer (what the ranks' namespaces are, what an adapter holds, what the store has) no longer
   than its budget; then it is a miss.
3. A request that is told to waits for its prefill before the store is asked about it (see `_vllm_waiting`).
4. After `reset` no block that was stored before is found by this engine, and none that it computes is found as one of
   those.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvclient._operations import Abort
from kvclient._vllm_identity import Adapters
from kvclient._vllm_lookup import Asker, Ranks
from kvclient._vllm_plan import Plan, Request, Scheduled, StepPlan, Variant
from kvclient._vllm_settings import Settings
from kvclient._vllm_stats import LOGGER, Counters
from kvclient._vllm_waiting import Waits, wait_s_of
from kvclient._vllm_worker import namespace_of
from kvclient.aio import AsyncClient
from kvclient.client import Client
from kvstore.block import Namespace

_INTRODUCTION_S = 2.0
_ADAPTER_S = 10.0
_RANKS_MAX = 256
_CPU_BIT = 1 << 1

logger = logging.getLogger(LOGGER)

RankName = tuple[int, int]  # its place among pipeline- and tensor-parallel ranks


class Adapter(Protocol):
    """What is read of vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class EngineRequest(Request, Protocol):
    """What is read of vLLM's Request beside what the plan needs."""

    @property
    def lora_request(self) -> Adapter | None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool | None: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None: ...


class Scheduler:
    """Answers vLLM's scheduler.

    Parameters
    ----------
    client, settings, counters
        Shared with the rest of the connector.
    plan : Plan
        The bookkeeping.
    rank_count : int
        How many workers the engine has.
    """

    def __init__(
        self, client: Client, settings: Settings, counters: Counters, plan: Plan, *, rank_count: int
    ) -> None:
        self._client = client
        self._settings = settings
        self._counters = counters
        self._plan = plan
        self._rank_count = rank_count
        self._threads = ThreadPoolExecutor(1, "kvstored-lookup")
        self._readers = ThreadPoolExecutor(1, "kvstored-adapter")
        self._asker = Asker(client, self._threads, settings.lookup_budget_ms / 1e3, settings.load_timeout_ms)
        self._waits = Waits(lambda: AsyncClient(client.socket, name=f"vllm-wait-{os.getpid()}"), counters)
        self._adapters = Adapters(self._readers)
        self._namespaces: dict[RankName, Namespace] = {}
        self._ranks: dict[Variant, Ranks] = {}
        self._done: dict[RankName, int] = {}
        self._salt = b""
        self._introduced_by: float | None = None
        self._adapter_by: dict[str, float] = {}
        self._tiers: dict[str, bytes] = {}

    # ---- admission

    def matched(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Return how many tokens can be loaded beyond `local_tokens`; None: ask again in the next step."""
        request_id = request.request_id
        adapter = self._adapter_of(request)
        if adapter == "" and request.lora_request is not None:
            return None
        variant = Variant(adapter or "", self._salt)
        hashes = self._plan.admit(request, variant, shares=adapter is not None)
        if hashes is not None and not request.skip_reading_prefix_cache:
            if not self._is_introduced() or self._is_waiting(request, variant, hashes, local_tokens):
                return None
            found = self._ask(request_id, variant, hashes)
            if found is None:
                return None
            self._plan.answered(request_id, found)
        return self._plan.matched(request_id, local_tokens)

    def allocated(self, request_id: str, pages: Sequence[int], external_tokens: int) -> None:
        """Note a request's pages, and how many tokens are to be loaded into them."""
        self._plan.allocated(request_id, pages, external_tokens)

    def tokens_by_tier(self, request_id: str, tokens: int, block_tokens: int) -> tuple[int, int]:
        """Return how many of the last `tokens` found of a request are in memory, and how many on disk alone."""
        tiers = self._tiers.get(request_id, b"")[-(tokens // block_tokens) :] if tokens else b""
        in_memory = sum(1 for bits in tiers if bits & _CPU_BIT or not bits) * block_tokens
        return tokens - (len(tiers) * block_tokens - in_memory), len(tiers) * block_tokens - in_memory

    # ---- steps

    def step(self, scheduled: Sequence[Scheduled], preempted: Collection[str]) -> StepPlan:
        """Return what the step that was just scheduled loads and saves."""
        self._asker.next_step(self._waits.running, is_idle=not scheduled)
        return self._plan.step(scheduled, preempted)

    @property
    def wants_introduction(self) -> bool:
        """Whether some worker has not yet said what its namespace is."""
        return len(self._namespaces) < self._rank_count

    def introduced(self, namespaces: Mapping[RankName, bytes]) -> None:
        """Note what workers say of themselves."""
        for rank, encoded in namespaces.items():
            self._namespaces[rank] = Namespace.decode(encoded)

    def done(self, done: Mapping[RankName, int]) -> None:
        """Note the last step up to which each worker's saves have ended."""
        self._done.update(done)
        if len(self._done) == self._rank_count:
            self._plan.done(min(self._done.values()))

    def failed(self, pages: Collection[int]) -> None:
        """Note pages whose load failed."""
        self._plan.failed(pages)

    def finished(self, request_id: str, *, aborted: bool) -> bool:
        """Forget a request; return whether its pages are to be kept until a worker says that they are stored."""
        if aborted:
            self._tell_of_abort(request_id)
        self._asker.forget(request_id)
        self._waits.forget(request_id)
        self._adapter_by.pop(request_id, None)
        self._tiers.pop(request_id, None)
        return self._plan.finished(request_id, aborted=aborted)

    def reset(self) -> None:
        """Part from everything stored so far: it may have been computed with other weights."""
        self._salt = secrets.token_bytes(16)
        self._waits.end_all()
        self._asker.forget_all()
        self._ranks.clear()
        self._plan.reset()

    def close(self) -> None:
        """End the threads."""
        self._waits.close()
        self._threads.shutdown(cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    # ---- what is asked

    def _adapter_of(self, request: EngineRequest) -> str | None:
        """Return what names a request's adapter: None if it can't be shared, "" while that is not known."""
        adapter = request.lora_request
        if adapter is None:
            return ""
        found = self._adapters.identity(adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        if found != "":
            return found
        until = self._adapter_by.setdefault(request.request_id, time.monotonic() + _ADAPTER_S)
        return "" if time.monotonic() < until else None

    def _is_introduced(self) -> bool:
        """Return whether the workers' namespaces are known, or will not be waited for any longer."""
        if not self.wants_introduction:
            return True
        if self._introduced_by is None:
            self._introduced_by = time.monotonic() + _INTRODUCTION_S
        return time.monotonic() >= self._introduced_by

    def _is_waiting(
        self, request: EngineRequest, variant: Variant, hashes: Sequence[bytes], local_tokens: int
    ) -> bool:
        """Return whether a request is to wait for the prefill that it was told of."""
        wait_s = wait_s_of(request.kv_transfer_params, self._settings.longest_wait_s)
        if not wait_s or self.wants_introduction or self._salt or request.num_tokens > request.num_prompt_tokens:
            return False  # nobody stores what this engine could load, or it is not the prompt that is to be loaded
        ranks = self._ranks_of(variant)
        if local_tokens >= len(hashes) * ranks.block_tokens:
            return False
        return self._waits.is_waiting(request.request_id, wait_s, ranks, hashes)

    def _tell_of_abort(self, request_id: str) -> None:
        """Tell those who wait for the blocks of an aborted prompt that they will not come."""
        given_up = self._plan.given_up(request_id)
        if given_up is not None and not self.wants_introduction:
            variant, hashes = given_up
            for space in self._ranks_of(variant).spaces:
                self._threads.submit(self._client.run, Abort(space, hashes), self._settings.lookup_budget_ms / 1e3)

    def _ask(self, request_id: str, variant: Variant, hashes: Sequence[bytes]) -> int | None:
        """Return how many leading blocks the store has; None while that is not known."""
        if self.wants_introduction:
            return 0
        found = self._asker.ask(request_id, self._ranks_of(variant), hashes)
        if found is None:
            return None
        self._counters.add(
            lookups=1, lookup_blocks=len(hashes), hit_blocks=found.blocks, lookup_timeouts=found.failure is not None
        )
        if found.blocks:
            self._tiers[request_id] = found.tiers
        return found.blocks

    def _ranks_of(self, variant: Variant) -> Ranks:
        ranks = self._ranks.get(variant)
        if ranks is None:
            if len(self._ranks) >= _RANKS_MAX:
                self._ranks.clear()
            spaces = [namespace_of(self._namespaces[rank], variant) for rank in sorted(self._namespaces)]
            ranks = self._ranks[variant] = Ranks(spaces, self._settings.ttl_s)
        return ranks
