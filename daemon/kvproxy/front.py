"""The door for clients: what is let in, and what each request is answered.

Invariants
1. A request is held in memory only within bounds: `body_bytes_max` for one, `bodies_bytes_max` for all together; more
   is refused before it is read.
2. A request that has a place in the queue gives it back, however it ends. When its client goes, all of it is
   cancelled at once.
3. Nothing of a prompt, of an answer or of a credential is logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from aiohttp import web

from kvproxy import bodies
from kvproxy.answers import REQUEST_ID, Refusal, for_client, for_worker, identity_of
from kvproxy.bodies import Ask, Kind
from kvproxy.exchange import Exchange, Parts
from kvproxy.fairness import FairQueue, Refused, caller_of
from kvproxy.hangups import Hangups
from kvproxy.legs import Answer
from kvproxy.metrics import CONTENT_TYPE
from kvproxy.stream import ClientGone
from kvproxy.types import Role, Route
from kvstored.logs import fields

log = logging.getLogger("kvproxy.front")

DEADLINE = "X-Request-Deadline-Ms"
TIMEOUT = "X-Request-Timeout-Ms"
SESSION = "X-Session-Id"
CLIENT_GONE = 499
_SESSION_CHARS_MAX = 256
_LEG_END_S = 2.0


class Front:
    """Answers clients."""

    def __init__(self, parts: Parts, queue: FairQueue, hangups: Hangups) -> None:
        self._parts = parts
        self._queue = queue
        self._hangups = hangups
        self._bodies_bytes = 0
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._methods: dict[str, str] = {}  # which each path takes

    def application(self) -> web.Application:
        """Return the routes."""
        application = web.Application(client_max_size=self._parts.settings.body_bytes_max)
        for kind in Kind:
            application.router.add_post(kind.path, self._handler(kind))
            self._methods[kind.path] = "POST"
        for path, handler in (
            ("/v1/models", self._models), ("/healthz", self._healthz), ("/health", self._healthz),
            ("/readyz", self._readyz), ("/metrics", self._metrics),
        ):  # fmt: skip
            application.router.add_get(path, handler)
            self._methods[path] = "GET, HEAD"
        application.router.add_route("*", "/{path:.*}", self._unknown)
        return application

    async def drain(self, limit_s: float) -> None:
        """Take no more requests, let those that run go on for `limit_s`, then end them."""
        self._is_draining = True
        self._queue.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests are cut short", extra=fields(running=len(self._running), drain_s=limit_s))
            self._parts.fleet.close("the proxy is shutting down")
            with suppress(TimeoutError):  # what is left after this is cancelled with its connection
                async with asyncio.timeout(_LEG_END_S):
                    await self._idle.wait()

    # ---- requests for workers

    def _handler(self, kind: Kind) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answered(kind, request)

        return answer

    async def _answered(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """Return the answer to one request, accounted for."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        watched = self._hangups.watch(request.transport)
        began_s, status, route = time.monotonic(), CLIENT_GONE, Route.REFUSE
        identity = identity_of(request.headers)
        try:
            response, route = await self._generated(kind, request, identity, began_s)
            status = response.status
            return response
        except Refusal as refusal:
            status = refusal.status
            self._parts.metrics.refused(status, refusal.why)
            response = refusal.response()
            response.headers[REQUEST_ID] = identity
            if self._is_draining:
                response.force_close()
            return response
        except asyncio.CancelledError:
            self._parts.metrics.gone()
            raise
        except ClientGone:
            self._parts.metrics.gone()
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=status)  # goes nowhere
        finally:
            self._hangups.leave(watched)
            self._running.discard(task)
            if not self._running:
                self._idle.set()
            seconds = time.monotonic() - began_s
            self._parts.metrics.finished(str(kind), status, str(route.value), seconds)
            log.debug(
                "request",
                extra=fields(id=identity, endpoint=kind, status=status, route=route.value, seconds=seconds),
            )

    async def _generated(
        self, kind: Kind, request: web.Request, identity: str, began_s: float
    ) -> tuple[web.StreamResponse, Route]:
        if self._is_draining:
            raise Refusal(503, "overloaded_error", "draining", "the proxy is shutting down: try another", 2.0)
        self._parts.budget.earn()
        deadline_s = self._deadline_s(request)
        async with self._body(request) as raw, AsyncExitStack() as stack:
            is_plain = "Content-Encoding" not in request.headers and request.content_type == "application/json"
            ask = bodies.read(kind, raw, is_plain=is_plain)
            await self._admit(stack, request, ask, deadline_s)
            session = request.headers.get(SESSION, "")[:_SESSION_CHARS_MAX] or ask.session
            exchange = Exchange(self._parts, ask, for_worker(request.headers, identity), session, deadline_s)
            opened = await exchange.open(stack)
            self._parts.metrics.first_byte(time.monotonic() - began_s)
            if isinstance(opened, Answer):
                response = web.Response(
                    status=opened.status, headers=for_client(opened.headers, identity), body=opened.body
                )
                return response, exchange.route
            return await opened.relay(request, identity, self._parts.metrics), exchange.route

    async def _admit(self, stack: AsyncExitStack, request: web.Request, ask: Ask, deadline_s: float) -> None:
        caller = caller_of(request.headers, self._parts.settings.caller_header, request.remote or "")
        cost = float(max(1, ask.shape.prompt_tokens))
        try:
            await stack.enter_async_context(self._queue.admit(caller, cost, deadline_s))
        except Refused as exc:
            kind = "rate_limit_error" if exc.status == 429 else "overloaded_error"
            raise Refusal(exc.status, kind, exc.reason, str(exc), exc.retry_after_s) from exc

    @asynccontextmanager
    async def _body(self, request: web.Request) -> AsyncGenerator[bytes, None]:
        """Give the whole body, which counts against the bound of all bodies inside the block."""
        settings = self._parts.settings
        told_bytes = request.content_length
        if told_bytes is not None and told_bytes > settings.body_bytes_max:
            raise self._too_large()
        counted = told_bytes or 0
        self._hold(counted)
        try:
            body = bytearray()
            try:
                while True:
                    async with asyncio.timeout(settings.client_stall_s):
                        chunk = await request.content.readany()
                    if not chunk:
                        break
                    body += chunk
                    if len(body) > settings.body_bytes_max:
                        raise self._too_large()
                    if len(body) > counted:
                        self._hold(len(body) - counted)
                        counted = len(body)
            except TimeoutError as exc:
                raise Refusal(
                    408, "timeout_error", "bad-request", "the body did not come: send it faster"
                ) from exc
            except (web.RequestPayloadError, ValueError) as exc:
                raise Refusal(400, "invalid_request_error", "bad-request", "the body can't be read") from exc
            yield bytes(body)
        finally:
            self._bodies_bytes -= counted

    def _hold(self, size_bytes: int) -> None:
        limit = self._parts.settings.bodies_bytes_max
        if self._bodies_bytes + size_bytes > limit:
            raise Refusal(
                503, "overloaded_error", "bodies-full", f"requests hold {limit} bytes already: try again later", 1.0
            )
        self._bodies_bytes += size_bytes

    def _too_large(self) -> Refusal:
        limit = self._parts.settings.body_bytes_max
        return Refusal(
            413, "invalid_request_error", "body-too-large", f"the body has more than {limit} bytes: send less"
        )

    def _deadline_s(self, request: web.Request) -> float:
        """Return when the request's time is over, on the loop's clock: the earliest of what it and we say."""
        left_s = self._parts.settings.deadline_s
        if (until_ms := _milliseconds(request, DEADLINE)) is not None:
            left_s = min(left_s, until_ms / 1000 - time.time())
        if (timeout_ms := _milliseconds(request, TIMEOUT)) is not None:
            left_s = min(left_s, timeout_ms / 1000)
        if left_s <= 0:
            raise Refusal(504, "timeout_error", "deadline", "the request's deadline is over")
        return asyncio.get_running_loop().time() + left_s

    # ---- the proxy's own

    async def _models(self, request: web.Request) -> web.Response:
        identity = identity_of(request.headers)
        answer = await self._parts.models.listed(dict(for_worker(request.headers, identity)))
        if answer is None:
            return Refusal(503, "overloaded_error", "no-decode-workers", "no worker answers now", 2.0).response()
        return web.Response(status=answer.status, headers=for_client(answer.headers, identity), body=answer.body)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = None
        if self._is_draining:
            reason = "draining"
        elif not self._parts.fleet.usable(Role.DECODE, {}):
            reason = "no decode worker can be used"
        return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self._parts.metrics.render(self._parts.fleet, self._queue)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _unknown(self, request: web.Request) -> web.Response:
        if request.path in self._methods:
            takes = self._methods[request.path]
            response = Refusal(405, "invalid_request_error", "bad-request", f"{request.path} takes {takes}").response()
            response.headers["Allow"] = takes
            return response
        text = f"there is no such path: {request.path}"
        return Refusal(404, "invalid_request_error", "bad-request", text).response()


def _milliseconds(request: web.Request, name: str) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e16:
        raise Refusal(400, "invalid_request_error", "bad-request", f"{name} is no number of milliseconds")
    return value
