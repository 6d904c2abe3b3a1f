"""One exchange with one worker: a request sent, an answer read, and nothing left behind however it ends.

Invariants
1. Each wait for a worker ends: by bytes, by its own limit, by the request's deadline, or when the worker is found
   dead (`lose`).
2. Leaving the block closes the connection unless the answer was read to its end, so a worker sees at once that nobody
   waits for the rest.
3. Each leg tells the worker's breaker exactly once what it was like: good, at fault, or nothing. 4xx says nothing.
4. A request is sent a second time to the same worker only when a kept connection turned out to be closed: it had
   been used before, no byte of an answer came, and that showed within `_STALE_S`. Once a leg, on a new connection.
"""

from __future__ import annotations

import asyncio
import enum
import io
import logging
import math
from collections.abc import Awaitable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import TypeVar

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from kvproxy.answers import REQUEST_ID
from kvproxy.breaker import Trial, counts_as_failure
from kvproxy.metrics import Metrics
from kvproxy.settings import Settings
from kvproxy.workers import Worker
from kvstore.errors import UnavailableError
from kvstored.logs import fields

T = TypeVar("T")
log = logging.getLogger("kvproxy.legs")

# uvicorn, and so vLLM, closes idle connections after 5 s.
_KEEP_S = 4.0
_STALE_S = 1.0
_DIRECT_BYTES_MAX = 512 << 10
_ERROR_BYTES_MAX = 64 << 10
_ERROR_S = 2.0


class Fault(enum.StrEnum):
    """What went wrong with a leg."""

    GONE = "gone"  # nobody listens
    BROKEN = "broken"  # the connection or what came over it
    TIMEOUT = "timeout"  # silence
    LOST = "lost"  # /health does not answer either
    STATUS = "status"  # 5xx
    DEADLINE = "deadline"  # the request's own time is over: no fault of the worker


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer, whole."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class LegFailed(UnavailableError):
    """A worker did not answer as it should. `answer` is what it said, if it said that it can't."""

    def __init__(self, fault: Fault, text: str, answer: Answer | None = None) -> None:
        super().__init__(text)
        self.fault = fault
        self.answer = answer


class Wires:
    """The connections to all workers: kept ones, and new ones for who must not trust a kept one."""

    def __init__(self, settings: Settings) -> None:
        self._timeout = aiohttp.ClientTimeout(
            total=None, connect=settings.connect_s, sock_connect=settings.connect_s, sock_read=None
        )
        self._kept: aiohttp.ClientSession | None = None
        self._new: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Wires:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._kept = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S), [trace])
        self._new = self._session(aiohttp.TCPConnector(limit=0, force_close=True), [])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in (self._kept, self._new):
            if session is not None:
                await session.close()

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, told: object = None, new: bool = False
    ) -> aiohttp.ClientResponse:
        """Send a request and return when the answer's headers are there; `told.reused` says over a kept connection."""
        session = self._new if new else self._kept
        assert session is not None
        # Large bodies are written piece by piece.
        data = body if len(body) <= _DIRECT_BYTES_MAX else io.BytesIO(body)
        return await session.post(url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=told)

    async def get(
        self, url: str, limit_s: float, headers: Mapping[str, str] | None = None, limit_bytes: int = _ERROR_BYTES_MAX
    ) -> Answer:
        """Return what a worker answers to GET, up to `limit_bytes` of it.

        Raises
        ------
        TimeoutError, OSError, aiohttp.ClientError
            It doesn't.
        """
        assert self._new is not None
        async with (
            asyncio.timeout(limit_s),
            self._new.get(url, allow_redirects=False, headers=headers) as response,
        ):
            return Answer(response.status, response.headers, await read_up_to(response, limit_bytes))

    def _session(
        self, connector: aiohttp.BaseConnector, traces: list[aiohttp.TraceConfig]
    ) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            trace_configs=traces,
        )


async def _note_reuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, told: aiohttp.TraceConnectionReuseconnParams
) -> None:
    leg = context.trace_request_ctx
    if isinstance(leg, Leg):
        leg.reused = True


async def read_up_to(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Return a body that has at most `limit_bytes`; raises ClientPayloadError if it has more."""
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > limit_bytes:
            raise aiohttp.ClientPayloadError(f"the answer is longer than {limit_bytes} bytes")
    return bytes(body)


@dataclass(frozen=True, slots=True)
class Errand:
    """What a leg is to do: where to, with what, by when, and what it weighs: tokens to compute, blocks to hold.

    `first_byte_s` and `whole_s` are counted from its beginning, `stall_s` from what came last.
    """

    path: str
    body: bytes
    headers: CIMultiDict[str]
    deadline_s: float  # on the loop's clock
    first_byte_s: float
    stall_s: float
    whole_s: float = math.inf
    tokens: int = 0
    blocks: int = 0


class Leg:
    """An exchange with one worker; an async context manager. `open` sends, `read` gives what comes."""

    def __init__(self, wires: Wires, worker: Worker, errand: Errand, metrics: Metrics) -> None:
        self.worker = worker
        self.reused = False
        self.first = b""
        self._wires = wires
        self._errand = errand
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._stack = ExitStack()
        self._response: aiohttp.ClientResponse | None = None
        self._trial: Trial | None = None
        self._scope: asyncio.Timeout | None = None
        self._quiet_since_s: float | None = None
        self._lost: str | None = None
        self._began_s = self._loop.time()
        self._first_by_s = self._began_s + errand.first_byte_s
        self._whole_by_s = self._began_s + errand.whole_s
        self._outcome = "cancelled"

    async def __aenter__(self) -> Leg:
        self._trial = self.worker.breaker.begin()
        self._stack.enter_context(self.worker.busy(self, self._errand.tokens, self._errand.blocks))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._neutral()
        if self._response is not None:
            # Read to its end it has given its connection back already; else this is what tells the worker.
            self._response.close()
        self._metrics.leg(self.worker.endpoint.role, self._outcome, self.elapsed_s)

    # ---- what came

    @property
    def status(self) -> int:
        assert self._response is not None
        return self._response.status

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        assert self._response is not None
        return self._response.headers

    @property
    def content_type(self) -> str:
        assert self._response is not None
        return self._response.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def elapsed_s(self) -> float:
        return self._loop.time() - self._began_s

    async def open(self) -> None:
        """Send the request; returns when the status and the first bytes of the answer are there.

        Raises
        ------
        LegFailed
            Nothing came that could be used. The breaker knows.
        """
        try:
            self._response = await self._sent()
            self.first = await self._hear(self._response.content.readany(), self._first_by_s)
            if counts_as_failure(self.status):
                raise LegFailed(Fault.STATUS, f"the worker answered {self.status}", await self._whole())
        except LegFailed as exc:
            self._fail(exc)
            raise
        self.worker.answered(self)
        if counts_as_failure(self.status) is None:
            self._outcome = "refused"
            self._neutral()

    async def read(self) -> bytes:
        """Return the next bytes, or none at the end.

        Raises
        ------
        LegFailed
            The answer broke off, or nothing came for too long. The breaker knows.
        """
        assert self._response is not None
        try:
            return await self._hear(self._response.content.readany(), self._loop.time() + self._errand.stall_s)
        except LegFailed as exc:
            self._fail(exc)
            raise

    async def rest(self, limit_bytes: int) -> bytes:
        """Return the whole body, the first bytes included; LegFailed if it is longer than `limit_bytes`."""
        body = bytearray(self.first)
        while chunk := await self.read():
            body += chunk
            if len(body) > limit_bytes:
                raise self.unfit(f"the answer is longer than {limit_bytes} bytes")
        return bytes(body)

    # ---- what it was like

    def good(self) -> None:
        """Tell the breaker that the worker does its work."""
        self._outcome = "ok"
        if self._trial is not None:
            self.worker.breaker.succeeded(self._trial)
            self._trial = None

    def unfit(self, text: str) -> LegFailed:
        """Tell the breaker that what came can't be used; returns the error to raise."""
        failure = LegFailed(Fault.BROKEN, text)
        self._fail(failure)
        return failure

    @property
    def quiet_since_s(self) -> float | None:
        return self._quiet_since_s

    def lose(self, why: str) -> None:
        """End it: the worker is gone, or the proxy goes."""
        self._lost = why
        if self._scope is not None:
            self._scope.reschedule(self._loop.time())

    # ---- inside

    async def _sent(self) -> aiohttp.ClientResponse:
        errand = self._errand
        url = self.worker.endpoint.url + errand.path
        try:
            posted = self._wires.post(url, errand.body, errand.headers, told=self)
            return await self._hear(posted, self._first_by_s)
        except LegFailed as exc:
            if exc.fault is not Fault.BROKEN or not self.reused or self.elapsed_s > _STALE_S:
                raise
        self._metrics.retried(self.worker.endpoint.role, "stale-connection")
        posted = self._wires.post(url, errand.body, errand.headers, new=True)
        return await self._hear(posted, self._first_by_s)

    async def _whole(self) -> Answer:
        """Return what a worker says of its failure, as far as it comes soon."""
        assert self._response is not None
        body = bytearray(self.first)
        try:
            async with asyncio.timeout(_ERROR_S):
                while len(body) < _ERROR_BYTES_MAX and (chunk := await self._response.content.readany()):
                    body += chunk
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass
        return Answer(self.status, self.headers, bytes(body))

    async def _hear(self, waiting: Awaitable[T], until_s: float) -> T:
        """Return what `waiting` gives, or fail with what kept it from coming."""
        now_s = self._loop.time()
        ends_s = min(self._errand.deadline_s, self._whole_by_s, until_s) if self._lost is None else now_s
        self._quiet_since_s = now_s
        try:
            async with asyncio.timeout_at(ends_s) as self._scope:
                return await waiting
        except aiohttp.ConnectionTimeoutError as exc:
            raise LegFailed(Fault.GONE, "the worker can't be connected to in time") from exc
        except TimeoutError as exc:
            raise self._silent(now_s) from exc
        except aiohttp.ClientConnectorError as exc:
            raise LegFailed(Fault.GONE, "the worker can't be connected to") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise LegFailed(Fault.BROKEN, "the worker closed the connection before its answer was complete") from exc
        finally:
            self._quiet_since_s = self._scope = None

    def _silent(self, since_s: float) -> LegFailed:
        if self._lost is not None:
            return LegFailed(Fault.LOST, self._lost)
        if self._loop.time() >= self._errand.deadline_s:
            return LegFailed(Fault.DEADLINE, "the request's deadline is over")
        return LegFailed(Fault.TIMEOUT, f"the worker said nothing for {self._loop.time() - since_s:.3g} s")

    def _fail(self, exc: LegFailed) -> None:
        endpoint = self.worker.endpoint
        log.warning(
            "leg failed",
            extra=fields(
                role=endpoint.role, url=endpoint.url, fault=exc.fault, why=str(exc), after_s=self.elapsed_s,
                id=self._errand.headers.get(REQUEST_ID),
            ),
        )  # fmt: skip
        self._outcome = "timeout" if exc.fault in (Fault.TIMEOUT, Fault.DEADLINE) else "failed"
        if exc.fault in (Fault.DEADLINE, Fault.LOST):
            # The one is no fault of the worker, of the other its breaker has been told by who found out.
            self._neutral()
            return
        breaker = self.worker.breaker
        trial = self._trial or (breaker.begin() if breaker.allows() else None)  # it had been good until now
        self._trial = None
        if trial is not None:
            self.worker.failed(trial, gone=exc.fault is Fault.GONE)

    def _neutral(self) -> None:
        if self._trial is not None:
            self.worker.breaker.neutral(self._trial)
            self._trial = None
