"""One request on its way through the proxy: look, decide, P, D.

Invariants
1. Pair or nothing: D is told of a P (kv_transfer_params) only if that P has done its part, or is at it while D runs
   (entrance "decode"); if it is lost then, the leg to D is ended and the plan asked again.
2. One deadline holds for everything. Tries are bounded by the settings, by the workers there are (none is tried twice
   for one request), and by a budget that all requests share: a fleet that fails is not asked twice as much.
3. Cancelled, both legs are closed before the cancellation goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from multidict import CIMultiDict

from kvproxy import balance, bodies, plan
from kvproxy.answers import Refusal
from kvproxy.bodies import Ask
from kvproxy.breaker import counts_as_failure
from kvproxy.legs import Answer, Errand, Fault, Leg, LegFailed, Wires
from kvproxy.metrics import Metrics
from kvproxy.models import Models
from kvproxy.retries import RetryBudget
from kvproxy.settings import Settings
from kvproxy.store import StoreView
from kvproxy.stream import Opened
from kvproxy.tokens import Tokenizer
from kvproxy.types import Cached, Decision, Policy, Reason, Role, Route
from kvproxy.workers import Fleet, Worker

T = TypeVar("T")

_BLOCK_TOKENS = 16  # where nothing says better
_DECODED_TOKENS = 256  # expected of a request that sets no limit
_MINE = "kvstored"  # our object in kv_transfer_params
_NODE = "source_node"


@dataclass(frozen=True, slots=True)
class Parts:
    """What all requests share."""

    settings: Settings
    policy: Policy
    fleet: Fleet
    wires: Wires
    tokenizer: Tokenizer
    store: StoreView | None
    models: Models
    metrics: Metrics
    budget: RetryBudget
    draw: random.Random


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What P has done: where, and what it wants D to be told."""

    node: str
    transfer: Mapping[str, Any]


class PrefillLost(Exception):
    """No P did its part; `decision` is what is to be done without."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(str(decision.reason))
        self.decision = decision


class Exchange:
    """One request. `open` returns D's answer when its beginning is there; the stack closes what it needed."""

    def __init__(
        self, parts: Parts, ask: Ask, headers: CIMultiDict[str], session: str, deadline_s: float
    ) -> None:
        self.route = Route.REFUSE
        self._parts = parts
        self._ask = ask
        self._headers = headers
        self._session = session
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._cached: Cached | None = None
        self._tokens = ask.shape.prompt_tokens

    async def open(self, stack: AsyncExitStack) -> Opened | Answer:
        """Return D's answer, begun; or, whole, the failure that the last D told.

        Raises
        ------
        Refusal
            No worker will serve it; the reason is for the client.
        """
        await self._look()
        decision = self._decide()
        prefilled: Prefilled | None = None
        if decision.route is Route.PREFILL_THEN_DECODE:
            if self._parts.settings.entrance == "decode":
                return await self._open_both(stack)
            try:
                prefilled = await self._prefill()
            except PrefillLost as lost:
                decision = lost.decision
        return await self._open_decided(stack, decision, prefilled)

    async def _open_decided(
        self, stack: AsyncExitStack, decision: Decision, prefilled: Prefilled | None
    ) -> Opened | Answer:
        self._parts.metrics.decided(decision.route, decision.reason)
        self.route = decision.route
        if decision.route is Route.REFUSE:
            raise _refused(decision)
        return await self._decode(stack, self._told(prefilled))

    # ---- looking and deciding

    async def _look(self) -> None:
        """Find out how long the prompt is, and what of it the store holds; as far as it can matter."""
        parts, ask = self._parts, self._ask
        if parts.store is None or not ask.shape.readable or not parts.fleet.workers(Role.PREFILL):
            return
        if ask.shape.beams or ask.shape.needs_whole_prompt or not ask.hashable:
            return
        prompts = await parts.tokenizer.tokens_of(ask, self._headers)
        if prompts is None:
            return
        self._tokens = sum(map(len, prompts))
        shape = replace(ask.shape, prompt_tokens=self._tokens, longest_tokens=max(map(len, prompts), default=0))
        self._ask = replace(ask, shape=shape)
        names = await parts.models.names_of(ask.model)
        if names is not None:
            self._cached = await parts.store.cached(names, prompts, ask.cache_salt)

    def _decide(self, *, without_prefill: bool = False) -> Decision:
        parts = self._parts
        held = self._held
        return plan.decide(
            self._ask.shape,
            self._cached,
            [] if without_prefill else parts.fleet.usable(Role.PREFILL, held),
            parts.fleet.usable(Role.DECODE, held),
            parts.policy,
            prefill_configured=bool(parts.fleet.workers(Role.PREFILL)),
        )

    @property
    def _held(self) -> Mapping[str, int]:
        return self._cached.tokens_by_tier if self._cached is not None else {}

    # ---- P

    async def _prefill(self) -> Prefilled:
        """Have a P do its part; raises PrefillLost if none does."""
        settings, tried = self._parts.settings, set[str]()
        began_s = self._loop.time()
        ends_s = min(self._deadline_s, began_s + (settings.prefill_wait_s or float("inf")))
        retry_ends_s = began_s + (settings.prefill_retry_s or float("inf"))
        while True:
            views = self._parts.fleet.usable(Role.PREFILL, self._held, frozenset(tried))
            if not views:
                break
            view = balance.choose_prefill(views, self._parts.draw, session=self._session)
            tried.add(view.key)
            # Those that may still be tried share the time that is left: one that hangs leaves the next its part.
            turns = min(len(views), settings.prefill_retries + 2 - len(tried))
            limit_s = max(0.0, ends_s - self._loop.time()) / turns
            try:
                return await self._prefill_at(self._parts.fleet.worker(Role.PREFILL, view.key), limit_s)
            except LegFailed as exc:
                self._give_up_at_deadline(exc)
                may = len(tried) <= settings.prefill_retries and self._loop.time() < min(retry_ends_s, ends_s)
                if not may or not self._may_retry(Role.PREFILL):
                    break
        raise PrefillLost(self._decide(without_prefill=True))

    async def _prefill_at(self, worker: Worker, limit_s: float) -> Prefilled:
        parts, settings = self._parts, self._parts.settings
        errand = Errand(
            self._ask.kind.path,
            bodies.for_prefill(self._ask),
            self._headers,
            self._deadline_s,
            first_byte_s=limit_s,
            stall_s=settings.stall_s,
            whole_s=limit_s,
            tokens=self._to_compute,
        )
        is_alone = not worker.requests  # else its time is also that of others
        async with Leg(parts.wires, worker, errand, parts.metrics) as leg:
            await leg.open()
            if counts_as_failure(leg.status) is None:
                if leg.status == 429:
                    raise LegFailed(Fault.STATUS, "the prefill worker has too much to do")
                raise PrefillLost(Decision(Route.DECODE_ONLY, Reason.PREFILL_REFUSED))
            answer = await leg.rest(settings.answer_bytes_max)
            try:
                transfer = _transfers.decode(answer).kv_transfer_params or {}
            except (msgspec.MsgspecError, RecursionError):
                raise leg.unfit("the prefill worker's answer is no completion") from None
            leg.good()
            if is_alone:
                worker.prefilled(self._to_compute, leg.elapsed_s)
            return Prefilled(worker.endpoint.node, transfer)

    # ---- D

    async def _decode(self, stack: AsyncExitStack, transfer: Mapping[str, Any]) -> Opened | Answer:
        """Return the answer of the first D that begins one."""
        settings, tried = self._parts.settings, set[str]()
        retry_ends_s = self._loop.time() + (settings.decode_retry_s or float("inf"))
        failure: LegFailed | None = None
        while True:
            views = self._parts.fleet.usable(Role.DECODE, self._held, frozenset(tried))
            if not views:
                break
            view = balance.choose_decode(
                views, self._parts.draw, session=self._session, block_tokens=self._block_tokens
            )
            tried.add(view.key)
            worker = self._parts.fleet.worker(Role.DECODE, view.key)
            try:
                return await self._decode_at(stack, worker, transfer)
            except LegFailed as exc:
                self._give_up_at_deadline(exc)
                failure = exc
                may = len(tried) <= settings.decode_retries and self._loop.time() < retry_ends_s
                if not may or not self._may_retry(Role.DECODE):
                    break
        if failure is not None and failure.answer is not None:
            return failure.answer
        raise _lost(failure, self._parts.policy)

    async def _decode_at(self, stack: AsyncExitStack, worker: Worker, transfer: Mapping[str, Any]) -> Opened:
        parts, settings = self._parts, self._parts.settings
        told = dict(transfer)
        if told.get(_MINE) == {_NODE: worker.endpoint.node}:
            del told[_MINE]  # what D would ask first is its own store anyway
        errand = Errand(
            self._ask.kind.path,
            bodies.for_decode(self._ask, told),
            self._headers,
            self._deadline_s,
            first_byte_s=settings.first_byte_s,
            stall_s=settings.stall_s,
            tokens=0 if transfer else self._to_compute,  # with a P, what is left to D is fetching
            blocks=self._blocks,
        )
        async with AsyncExitStack() as own:
            leg = await own.enter_async_context(Leg(parts.wires, worker, errand, parts.metrics))
            await leg.open()
            opened = Opened(leg, settings)
            await opened.begin()
            stack.push_async_exit(own.pop_all())
            return opened

    async def _open_both(self, stack: AsyncExitStack) -> Opened | Answer:
        """Ask P and D at once: D is the entrance, and pulls what P has computed by then."""
        remaining_s = max(0.0, self._deadline_s - self._loop.time())
        wait_s = min(self._parts.settings.prefill_wait_s or remaining_s, remaining_s)
        told = {_MINE: {"wait_ms": round(wait_s * 1000)}}
        found: Opened | Answer | LegFailed | Refusal | PrefillLost
        async with asyncio.TaskGroup() as group:  # nothing is raised in it: it would come out wrapped
            prefilling = group.create_task(_as_result(self._prefill()))
            decoding = group.create_task(_as_result(self._decode(stack, told)))
            try:
                await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
                lost = prefilling.result() if not decoding.done() else None
                found = lost if isinstance(lost, PrefillLost) else await decoding
            finally:
                # With D's answer begun, or nobody waiting, nobody needs what is still under way.
                prefilling.cancel()
                decoding.cancel()
        if isinstance(found, PrefillLost):
            return await self._open_decided(stack, found.decision, None)
        self.route = Route.PREFILL_THEN_DECODE
        self._parts.metrics.decided(self.route, Reason.PREFILL)
        if isinstance(found, BaseException):
            raise found
        return found

    # ---- bits

    def _told(self, prefilled: Prefilled | None) -> Mapping[str, Any]:
        """Return what D is told of P: what P wants it to be, and where the blocks are first looked for."""
        if prefilled is None:
            return {}
        return {_MINE: {_NODE: prefilled.node}, **prefilled.transfer}

    @property
    def _block_tokens(self) -> int:
        return self._cached.block_tokens if self._cached is not None else _BLOCK_TOKENS

    @property
    def _to_compute(self) -> int:
        return max(0, self._tokens - (self._cached.tokens if self._cached is not None else 0))

    @property
    def _blocks(self) -> int:
        shape = self._ask.shape
        answers = max(1, len(self._ask.prompts)) * shape.n
        generated = answers * (shape.max_tokens if shape.max_tokens is not None else _DECODED_TOKENS)
        return -(-(self._tokens + generated) // self._block_tokens)

    def _give_up_at_deadline(self, exc: LegFailed) -> None:
        if exc.fault is Fault.DEADLINE or self._loop.time() >= self._deadline_s:
            raise Refusal(504, "timeout_error", "deadline", "the request's deadline is over") from exc

    def _may_retry(self, role: Role) -> bool:
        allowed = self._parts.budget.take()
        self._parts.metrics.retried(role, "failed" if allowed else "budget-spent")
        return allowed


class _Transfer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_transfers = msgspec.json.Decoder(_Transfer)


async def _as_result(doing: Awaitable[T]) -> T | LegFailed | Refusal | PrefillLost:
    """Return what comes of it, an expected failure too: a task group would end its other tasks for one."""
    try:
        return await doing
    except (LegFailed, Refusal, PrefillLost) as exc:
        return exc


def _refused(decision: Decision) -> Refusal:
    what = "decode" if decision.reason is Reason.NO_DECODE_WORKERS else "prefill"
    return Refusal(
        503,
        "overloaded_error",
        str(decision.reason),
        f"no {what} worker can be used now: try again later",
        decision.retry_after_s,
    )


def _lost(failure: LegFailed | None, policy: Policy) -> Refusal:
    """Return what a client is told when no D began an answer."""
    why = "decode-failed"
    if failure is None:
        return _refused(Decision(Route.REFUSE, Reason.NO_DECODE_WORKERS, policy.retry_after_s))
    text = f"the decode worker failed: {failure}"
    match failure.fault:
        case Fault.GONE:
            return Refusal(503, "overloaded_error", why, text, policy.retry_after_s)
        case Fault.TIMEOUT:
            return Refusal(504, "timeout_error", why, text)
        case _:
            return Refusal(502, "upstream_error", why, text)
