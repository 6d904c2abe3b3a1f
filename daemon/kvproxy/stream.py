"""D's answer on its way to the client.

Invariants
1. Nothing is sent, no status either, before D's first bytes: the first whole event of a stream; an answer that is no
   stream is kept until it is whole, as far as `answer_bytes_max`. Until then another D may still be tried.
2. A stream's client sees whole events only. If D fails after the first, an error event follows and the stream ends;
   a stream without `[DONE]` has failed, however cleanly its connection was closed, and one with it has not.
3. Where there are no events to say it with (an answer that is no stream and broke off late, a compressed one, an event
   so long that it was passed on in parts), the connection is cut, so that nobody takes a part for the whole.
4. What a client doesn't take isn't read from D; a client that takes nothing for `client_stall_s` is cut off.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable

from aiohttp import web

from kvproxy.answers import Refusal, for_client
from kvproxy.legs import Leg, LegFailed
from kvproxy.metrics import Metrics
from kvproxy.settings import Settings

EVENT_BYTES_MAX = 4 << 20
_END_BYTES_MAX = 4
_END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DONE = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][ \t]*[\r\n]")


class EventCutter:
    """Turns the bytes of a server-sent event stream into whole events, and parts of those that are too long to keep."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.is_done = False  # [DONE] has been seen
        self.is_within = False  # a part of an event has been given, and its end has not

    def feed(self, chunk: bytes) -> bytes:
        """Return what may go on now: complete events as they came, and what is beyond `EVENT_BYTES_MAX` of one."""
        # An end may be cut in two: this is where the longest one could have begun.
        looked = max(0, len(self._rest) - _END_BYTES_MAX + 1)
        self._rest += chunk
        end = 0
        for found in _END_OF_EVENT.finditer(self._rest, looked):
            end = found.end()
        events = bytes(self._rest[:end])
        if b"[DONE]" in events and _DONE.search(events):
            self.is_done = True
        self.is_within = self.is_within and not end
        if len(self._rest) - end > EVENT_BYTES_MAX:
            self.is_within = True
            end = len(self._rest) - _END_BYTES_MAX + 1  # an end that is cut in two is still seen
        given = bytes(self._rest[:end])
        del self._rest[:end]
        return given


class Opened:
    """An answer of D's whose beginning is worth sending; `relay` sends it."""

    def __init__(self, leg: Leg, settings: Settings) -> None:
        self.leg = leg
        self._settings = settings
        self._cutter: EventCutter | None = None
        self._head = b""
        self._is_whole = False

    async def begin(self) -> None:
        """Read until there is something to send.

        Raises
        ------
        LegFailed
            D failed before that; nothing has been sent.
        """
        leg = self.leg
        if leg.status < 400 and leg.content_type == "text/event-stream" and "Content-Encoding" not in leg.headers:
            self._cutter = EventCutter()
            self._head = self._cutter.feed(leg.first)
            while not self._head:
                if not (chunk := await leg.read()):
                    raise leg.unfit("the stream ended before its first event")
                self._head = self._cutter.feed(chunk)
        else:
            if leg.status < 400 and leg.content_type not in ("application/json", "text/event-stream"):
                raise leg.unfit(f"the answer is {leg.content_type[:64] or 'of no type'}, and no JSON")
            await self._keep()
        if leg.status < 400:
            leg.good()

    async def relay(self, request: web.Request, request_id: str, metrics: Metrics) -> web.StreamResponse:
        """Send the answer to its end, whatever becomes of D; returns what was sent.

        Raises
        ------
        ClientGone
            Nobody takes it.
        """
        leg = self.leg
        headers = for_client(leg.headers, request_id)
        if self._is_whole:
            return web.Response(status=leg.status, headers=headers, body=self._head)
        if self._cutter is not None:
            headers.setdefault("X-Accel-Buffering", "no")
        response = web.StreamResponse(status=leg.status, headers=headers)
        await self._within(response.prepare(request))
        await self._within(response.write(self._head))
        try:
            await self._rest(response)
        except LegFailed as exc:
            metrics.cut(str(exc.fault))
            if self._cutter is None or self._cutter.is_within:
                _cut_off(request)
                return response
            failure = Refusal(502, "upstream_error", "stream-cut", f"the answer was cut short: {exc}")
            await self._within(response.write(failure.event()))
        await self._within(response.write_eof())
        return response

    async def _rest(self, response: web.StreamResponse) -> None:
        cutter = self._cutter
        try:
            while chunk := await self.leg.read():
                if given := cutter.feed(chunk) if cutter is not None else chunk:
                    await self._within(response.write(given))
        except LegFailed:
            if cutter is None or not cutter.is_done:
                raise
            return  # nothing is missing but the end of D's connection
        if cutter is not None and not cutter.is_done:
            raise self.leg.unfit("the stream ended without its last event")

    async def _keep(self) -> None:
        """Read the answer to its end, or to as much as may be kept."""
        kept = bytearray(self.leg.first)
        while len(kept) <= self._settings.answer_bytes_max:
            if not (chunk := await self.leg.read()):
                self._is_whole = True
                if not kept and self.leg.status < 400:
                    raise self.leg.unfit("the answer is empty")
                break
            kept += chunk
        self._head = bytes(kept)

    async def _within(self, sending: Awaitable[object]) -> None:
        """Wait for the client to take something; one that doesn't is cut off."""
        try:
            async with asyncio.timeout(self._settings.client_stall_s):
                await sending
        except TimeoutError as exc:
            raise ClientGone("the client takes nothing") from exc
        except ConnectionError as exc:
            raise ClientGone("the client is gone") from exc


class ClientGone(ConnectionResetError):
    """Nobody is there to answer to."""


def _cut_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
