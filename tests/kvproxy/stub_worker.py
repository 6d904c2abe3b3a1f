"""A worker as vLLM's server is one on the wire, and with every fault that one can have.

    async with StubWorker(Role.DECODE) as stub:
        stub.behaviour = Behaviour(ending=Ending.CUT_INSIDE_AN_EVENT)
        ...
        (seen,) = await stub.arrived(1)
        await seen.cancelled.wait()

It speaks HTTP/1.1 by itself, since no library lets a server break off where it should not. Nothing in it waits for a
time: what is held back waits for an Event of the test, or for ever.

1. Whatever a request does, it is in `seen` from its last byte on; `done` is set once its answer is written, else
   `cancelled` once its connection is gone.
2. Leaving the block closes every connection; nothing of it is left on the loop. A bug of its own is raised there.
"""

from __future__ import annotations

import asyncio
import enum
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

from kvproxy.types import Endpoint, Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "stub-model"


class Ending(enum.Enum):
    """How an answer ends."""

    WHOLE = "whole"
    WITHOUT_DONE = "a stream without [DONE], its chunks ended in order"
    WITHOUT_LAST_CHUNK = "closed without the last chunk"
    CUT_INSIDE_AN_EVENT = "closed in the middle of an event or a body"
    RESET = "reset after what was sent"
    SILENT = "held open without another byte"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the worker does with requests from now on; the plain one answers as it should.

    Attributes
    ----------
    status, headers, content_type :
        Of the answer; a status other than 200 brings an error body like vLLM's.
    before_headers : asyncio.Event, optional
        Held back until it is set.
    before_body : asyncio.Event, optional
        The headers of a stream are sent, its first event is held back until it is set.
    between_tokens : asyncio.Event, optional
        After the first token, the others are held back until it is set.
    tokens : sequence
        What is generated, token by token.
    ending : Ending
        How the answer ends; for those that break off, after `whole_tokens` tokens.
    hangs : bool
        No byte is ever sent.
    waits_for_prefill : bool
        A request that says where its KV comes from is never answered: that KV never came.
    is_deaf : bool
        It goes on as if its client were there, and keeps its side of the connection.
    resets_before_headers, closes_before_headers : bool
        The connection ends when the request is there.
    closes_reused : bool
        A connection ends when a second request is there: the worker had closed it, and the client could not know yet.
    closes_idle : bool
        The answer says keep-alive, and the connection is closed right behind it.
    padding_bytes : int
        Added to each answer.
    body : bytes, optional
        Sent instead of an answer that is no stream, or of a stream's first event.
    raw : bytes, optional
        Sent instead of a response of HTTP, and the connection is closed.
    transfer : mapping, optional
        kv_transfer_params of answers that are no stream.
    health : int, optional
        The status of /health; None: it is never answered.
    tokenizes : bool
        /tokenize answers with the bytes of the text; else 404.
    """

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    content_type: str | None = None
    before_headers: asyncio.Event | None = None
    before_body: asyncio.Event | None = None
    between_tokens: asyncio.Event | None = None
    tokens: Sequence[str] = ("Once", " upon", " a", " time")
    ending: Ending = Ending.WHOLE
    whole_tokens: int = 1
    hangs: bool = False
    waits_for_prefill: bool = False
    is_deaf: bool = False
    resets_before_headers: bool = False
    closes_before_headers: bool = False
    closes_reused: bool = False
    closes_idle: bool = False
    padding_bytes: int = 0
    body: bytes | None = None
    raw: bytes | None = None
    transfer: Mapping[str, Any] | None = None
    health: int | None = 200
    tokenizes: bool = True


@dataclass(eq=False, slots=True)
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    peer: tuple[str, int]
    at_s: float  # on the loop's clock
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled_s: float | None = None

    @property
    def json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.body))


class StubWorker:
    """A worker on a port of its own; an async context manager."""

    def __init__(self, role: Role, behaviour: Behaviour | None = None) -> None:
        self.role = role
        self.behaviour = behaviour or Behaviour()
        self.seen: list[Seen] = []  # what is to be generated; the rest is in `asides`
        self.asides: list[Seen] = []  # /health, /tokenize, /v1/models
        self.port = 0
        self.connection_count = 0  # since the start
        self.connections: set[_Connection] = set()
        self.bugs: list[BaseException] = []
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.role, "127.0.0.1")

    async def __aenter__(self) -> StubWorker:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.refuse()
        if self.bugs and raised is None:
            raise self.bugs[0]

    async def listen(self) -> None:
        """Accept connections, at the port of before if there was one."""
        assert self._server is None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Be gone: no more connections, and those there are reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = [connection.reset() for connection in list(self.connections)]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        while self.connections:  # connection_lost comes with the next turns of the loop
            await asyncio.sleep(0)

    async def arrived(self, count: int) -> list[Seen]:
        """Return the first `count` requests, once they are there."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.seen) >= count)
        return self.seen[:count]

    async def note(self, seen: Seen) -> None:
        """Take down a request."""
        async with self._arrived:
            (self.seen if seen.path in (COMPLETIONS, CHAT) else self.asides).append(seen)
            self._arrived.notify_all()


class _Connection(asyncio.Protocol):
    """One connection: requests in order, each answered by a task of its own."""

    def __init__(self, stub: StubWorker) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._current: Seen | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_ended_here = False
        self._request_count = 0

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._stub.connections.add(self)
        self._stub.connection_count += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def eof_received(self) -> bool:
        if self._stub.behaviour.is_deaf:
            return True
        self._gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
        self._stub.connections.discard(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def reset(self) -> asyncio.Task[None] | None:
        """End it so that the peer sees a reset; returns the task that was answering, cancelled."""
        task = self._task
        self._is_ended_here = True
        if self._transport is not None:
            found = self._transport.get_extra_info("socket")
            if found is not None:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        self._gone()
        return task

    def _close(self) -> None:
        self._is_ended_here = True
        if self._transport is not None:
            self._transport.close()

    def _gone(self) -> None:
        current = self._current
        if current is not None and not (self._is_ended_here or current.done.is_set() or current.cancelled.is_set()):
            current.cancelled_s = asyncio.get_running_loop().time()
            current.cancelled.set()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    # ---- requests

    def _next(self) -> None:
        if self._task is not None:
            return
        seen = self._parse()
        if seen is not None:
            self._current = seen
            self._request_count += 1
            self._task = asyncio.get_running_loop().create_task(self._answer(seen))
            self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._task = self._current = None
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._stub.bugs.append(bug)
            self.reset()
        if self._transport is not None and not self._transport.is_closing():
            self._next()

    def _parse(self) -> Seen | None:
        """Return the first request of the buffer and take it out, or None while it isn't whole."""
        head, separator, _ = bytes(self._buffer).partition(b"\r\n\r\n")
        if not separator:
            return None
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        at = len(head) + len(separator)
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body, end = _dechunked(bytes(self._buffer), at)
        else:
            end = at + int(headers.get("content-length", "0"))
            body = bytes(self._buffer[at:end]) if len(self._buffer) >= end else None
        if body is None:
            return None
        del self._buffer[:end]
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")
        return Seen(method, path, headers, body, peer, asyncio.get_running_loop().time())

    # ---- answers

    async def _answer(self, seen: Seen) -> None:
        await self._stub.note(seen)
        behaviour = self._stub.behaviour
        if seen.path == "/health":
            if behaviour.health is None:
                await asyncio.Event().wait()
            await self._send(_head(behaviour.health or 200, b"", "text/plain"))
        elif seen.path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "stub"}
            await self._send_json(200, {"object": "list", "data": [model]})
        elif seen.path == "/tokenize" and behaviour.tokenizes:
            await self._send_json(200, _tokenized(seen.json))
        elif seen.path in (COMPLETIONS, CHAT):
            await self._generate(seen, behaviour)
        else:
            await self._send_json(404, {"detail": "Not Found"})
        seen.done.set()

    async def _generate(self, seen: Seen, behaviour: Behaviour) -> None:
        if behaviour.hangs or (behaviour.waits_for_prefill and "kv_transfer_params" in seen.json):
            await asyncio.Event().wait()
        if behaviour.before_headers is not None:
            await behaviour.before_headers.wait()
        if behaviour.raw is not None:
            await self._send(behaviour.raw)
            self._close()
        elif behaviour.resets_before_headers:
            self.reset()
        elif behaviour.closes_before_headers or (behaviour.closes_reused and self._request_count > 1):
            self._close()
        elif behaviour.status != 200:
            error = {"message": f"stub says {behaviour.status}", "type": "StubError", "param": None}
            await self._send_json(behaviour.status, {"error": {**error, "code": behaviour.status}}, behaviour)
        elif _is_stream(seen):
            await self._stream(seen, behaviour)
        else:
            await self._whole(seen, behaviour)
        if behaviour.closes_idle:
            self._close()

    async def _whole(self, seen: Seen, behaviour: Behaviour) -> None:
        told = _completion(seen, behaviour)
        body = json.dumps(told).encode() if behaviour.body is None else behaviour.body
        body += b" " * behaviour.padding_bytes
        head = _head(200, body, behaviour.content_type or "application/json", behaviour.headers)
        if behaviour.ending is Ending.WHOLE:
            await self._send(head)
            return
        sent = len(head) - len(body) // 2
        await self._send(head[:sent])
        await self._break_off(behaviour.ending)

    async def _stream(self, seen: Seen, behaviour: Behaviour) -> None:
        content_type = behaviour.content_type or "text/event-stream; charset=utf-8"
        lines = ["HTTP/1.1 200 OK", f"content-type: {content_type}", "transfer-encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in behaviour.headers]
        await self._send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if behaviour.before_body is not None:
            await behaviour.before_body.wait()
        breaks_off = behaviour.ending not in (Ending.WHOLE, Ending.WITHOUT_DONE)
        for at, token in enumerate(behaviour.tokens):
            if at == 1 and behaviour.between_tokens is not None:
                await behaviour.between_tokens.wait()
            event = _event(seen, behaviour, token, is_last=at == len(behaviour.tokens) - 1)
            if at == 0 and behaviour.body is not None:
                event = behaviour.body
            if breaks_off and at == behaviour.whole_tokens:
                if behaviour.ending is Ending.CUT_INSIDE_AN_EVENT:
                    await self._send(_chunk(event[: len(event) // 2]))
                await self._break_off(behaviour.ending)
                return
            await self._send(_chunk(event))
        if behaviour.ending is Ending.WHOLE:
            await self._send(_chunk(b"data: [DONE]\n\n"))
        await self._send(b"0\r\n\r\n")

    async def _break_off(self, ending: Ending) -> None:
        if ending is Ending.SILENT:
            await asyncio.Event().wait()
        elif ending is Ending.RESET:
            self.reset()
        else:
            self._close()

    async def _send_json(self, status: int, told: object, behaviour: Behaviour | None = None) -> None:
        headers = behaviour.headers if behaviour is not None else ()
        content_type = behaviour.content_type if behaviour is not None else None
        await self._send(_head(status, json.dumps(told).encode(), content_type or "application/json", headers))

    async def _send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)
        await self._writable.wait()


def _head(status: int, body: bytes, content_type: str, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", f"content-type: {content_type}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _dechunked(data: bytes, at: int) -> tuple[bytes | None, int]:
    body = b""
    while (line_end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line_end].split(b";")[0], 16)
        end = line_end + 2 + size + 2
        if len(data) < end:
            break
        if size == 0:
            return body, end
        body += data[line_end + 2 : end - 2]
        at = end
    return None, 0


# ---- the shapes of vLLM's answers


def _is_stream(seen: Seen) -> bool:
    try:
        return seen.json.get("stream") is True
    except ValueError:
        return False


def _tokenized(asked: dict[str, Any]) -> dict[str, Any]:
    texts = [asked.get("prompt")] if "prompt" in asked else [message["content"] for message in asked["messages"]]
    tokens = list("".join(text for text in texts if text).encode())
    return {"count": len(tokens), "max_model_len": 100_000, "tokens": tokens}


def _common(seen: Seen, kind: str) -> dict[str, Any]:
    identity = seen.headers.get("x-request-id", "none")
    return {"id": f"cmpl-{identity}", "object": kind, "created": 1_700_000_000, "model": MODEL}


def _completion(seen: Seen, behaviour: Behaviour) -> dict[str, Any]:
    count = min(len(behaviour.tokens), int(seen.json.get("max_tokens") or len(behaviour.tokens)))
    text = "".join(behaviour.tokens[:count])
    usage = {"prompt_tokens": 5, "total_tokens": 5 + count, "completion_tokens": count}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "stop_reason": None, "logprobs": None}
    if seen.path == CHAT:
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": []}
        told: dict[str, Any] = {**_common(seen, "chat.completion"), "choices": [{**choice, "message": message}]}
    else:
        told = {**_common(seen, "text_completion"), "choices": [{**choice, "text": text}]}
    return {**told, "usage": usage, "kv_transfer_params": behaviour.transfer}


def _event(seen: Seen, behaviour: Behaviour, token: str, *, is_last: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length" if is_last else None}
    if seen.path == CHAT:
        told = {**_common(seen, "chat.completion.chunk"), "choices": [{**choice, "delta": {"content": token}}]}
    else:
        told = {**_common(seen, "text_completion"), "choices": [{**choice, "text": token}]}
    padding = b" " * behaviour.padding_bytes
    return b"data: " + json.dumps(told).encode() + padding + b"\n\n"
