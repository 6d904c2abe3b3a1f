"""etcd over its JSON gateway: ranges, transactions, leases, watches; several endpoints, TLS, users.

The gateway is part of every etcd server from 3.4 on and listens on the client port. It needs aiohttp, which the daemon
has. The gRPC client for asyncio (aetcd 1.0) opens insecure channels only, knows one endpoint, never renews its token,
and brings grpcio with a Python thread beside the loop. docs/cluster.md says what that means for etcd's own settings.

Invariants
1. Every request ends by its deadline, in an answer or a KVStoreError; a watch ends when it has been silent for a while,
   and goes on from its last revision, so that a connection that died unnoticed is noticed.
2. A watch gives every change behind its first revision once and in order, or raises Compacted.
3. Neither a text nor a log line holds a password or a token.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import aiohttp
import msgspec

from kvstore.errors import NotPermitted, RemoteProtocolError, UnavailableError
from kvstored.remote.etcd_place import EtcdPlace

_Opening = contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]
ANSWER_BYTES_MAX = 64 << 20
_UNAUTHENTICATED = 16
_NOT_FOUND = 5
_PERMISSION_DENIED = 7
_WORDS_CHARS_MAX = 200


class Compacted(UnavailableError):
    """The revision that a watch should begin at is no longer kept: take a new snapshot."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value, its lease (0: none), and the revision that wrote it."""

    key: str
    value: bytes
    revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under a prefix as of a revision."""

    revision: int
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Change:
    """A key was written, or (`entry` None) deleted."""

    key: str
    revision: int
    entry: Entry | None


class Etcd:
    """A client; an async context manager that closes its connections.

    Parameters
    ----------
    place : EtcdPlace
        Where the servers are and how they are spoken to.
    request_s : float
        The deadline of a request, over all endpoints.
    """

    def __init__(self, place: EtcdPlace, request_s: float = 3.0) -> None:
        self.place = place
        self._request_s = request_s
        self._first = 0  # the endpoint that answered last
        self._token: str | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Etcd:
        context: ssl.SSLContext | bool = self.place.tls_context() if self.place.tls else True
        connector = aiohttp.TCPConnector(ssl=context, limit=16)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 18)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- keys

    async def read(self, prefix: str) -> Snapshot:
        """Return all keys under a prefix.

        Raises
        ------
        UnavailableError
            No endpoint answered by the deadline.
        NotPermitted
            The servers refuse this user.
        """
        answer = await self._ask("kv/range", {"key": _coded(prefix), "range_end": _coded(_behind(prefix))})
        return Snapshot(_revision(answer), [_entry(kv) for kv in answer.get("kvs", [])])

    async def write(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write a key, bound to a lease if one is given, and return the revision. Raises as `read`."""
        asked = {"key": _coded(key), "value": _coded(value), "lease": str(lease)}
        return _revision(await self._ask("kv/put", asked))

    async def write_if(self, key: str, value: bytes, revision: int) -> bool:
        """Write a key if it was last written by `revision` (0: if it isn't there); return whether it was."""
        compare = {"key": _coded(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        put = {"requestPut": {"key": _coded(key), "value": _coded(value)}}
        answer = await self._ask("kv/txn", {"compare": [compare], "success": [put]})
        return bool(answer.get("succeeded", False))

    # ---- leases

    async def grant(self, ttl_s: int) -> int:
        """Return a new lease that ends after some seconds unless it is kept alive."""
        return int((await self._ask("lease/grant", {"TTL": str(ttl_s)}))["ID"])

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease and return the seconds that it has now; 0: it has ended."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0))

    async def revoke(self, lease: int) -> None:
        """End a lease and with it the keys bound to it; one that has ended is no error."""
        await self._ask("lease/revoke", {"ID": str(lease)})

    # ---- watching

    async def watch(self, prefix: str, revision: int, silent_s: float) -> AsyncGenerator[Sequence[Change], None]:
        """Yield the changes under a prefix from a revision on; the first, once it is begun, is empty.

        Ends when nothing has come for `silent_s`: watch again from behind the last revision seen.

        Raises
        ------
        Compacted
            Changes from that revision on are no longer kept.
        UnavailableError
            No endpoint began the watch by the deadline, or the connection was lost.
        """
        if self.place.user and self._token is None:
            await self._log_in()
        create = {"key": _coded(prefix), "range_end": _coded(_behind(prefix)), "start_revision": str(revision)}
        async with contextlib.aclosing(self._stream("watch", {"create_request": create}, silent_s)) as answers:
            async for answer in answers:
                result: Mapping[str, Any] = answer.get("result", {})
                if int(result.get("compact_revision", 0)):
                    raise Compacted(f"etcd keeps changes from revision {result['compact_revision']} on, not {revision}")
                if result.get("canceled"):
                    why = _words(result.get("cancel_reason"))
                    if "auth token" in why:
                        self._token = None  # whoever asks next logs in
                    raise UnavailableError(f"etcd has cancelled the watch: {why}")
                yield [_change(event) for event in result.get("events", [])]

    async def _stream(
        self, verb: str, asked: Mapping[str, Any], silent_s: float
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        async with contextlib.AsyncExitStack() as stack:
            response = await self._opened(verb, asked, stack)
            waiting = b""
            try:
                while True:
                    async with asyncio.timeout(silent_s):
                        piece = await response.content.readany()
                    if not piece:
                        raise UnavailableError("etcd has closed the watch")
                    *lines, waiting = (waiting + piece).split(b"\n")
                    if len(waiting) > ANSWER_BYTES_MAX:
                        raise RemoteProtocolError(f"an answer of etcd's is over {ANSWER_BYTES_MAX} bytes")
                    for line in filter(None, lines):
                        answer = _decoded(line)
                        self._check(verb, 200, answer)
                        yield answer
            except TimeoutError:
                return
            except aiohttp.ClientError as exc:
                raise UnavailableError(f"the connection to etcd was lost: {_words(exc)}") from exc

    # ---- requests

    async def _opened(
        self, verb: str, asked: Mapping[str, Any], stack: contextlib.AsyncExitStack
    ) -> aiohttp.ClientResponse:
        """Return the response of the first endpoint that begins one; the others are tried in turn."""
        faults: list[str] = []
        endpoints = self.place.endpoints
        each_s = self._request_s / len(endpoints)
        for at in range(len(endpoints)):
            number = (self._first + at) % len(endpoints)
            try:
                async with asyncio.timeout(each_s):
                    response = await stack.enter_async_context(self._posting(number, verb, asked))
            except (TimeoutError, aiohttp.ClientError, OSError) as exc:
                why = f"no answer in {each_s:.1f} s" if isinstance(exc, TimeoutError) else _words(exc)
                faults.append(f"{endpoints[number]}: {why}")
                continue
            self._first = number
            return response
        raise UnavailableError(f"no etcd server answers: {'; '.join(faults)}")

    def _posting(self, number: int, verb: str, asked: Mapping[str, Any]) -> _Opening:
        if self._session is None:
            raise UnavailableError("the etcd client is closed")
        headers = {"Authorization": self._token} if self._token and verb != "auth/authenticate" else {}
        url = f"{self.place.base_url(number)}/v3/{verb}"
        return self._session.post(
            url, data=msgspec.json.encode(asked), headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def _ask(self, verb: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.place.user and self._token is None:
            await self._log_in()
        try:
            return await self._answer(verb, asked)
        except _TokenEnded:
            await self._log_in()
        return await self._answer(verb, asked)

    async def _answer(self, verb: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self._request_s), contextlib.AsyncExitStack() as stack:
                response = await self._opened(verb, asked, stack)
                body = await _whole(response)
        except TimeoutError as exc:
            raise UnavailableError(f"etcd did not answer {verb} in {self._request_s:.1f} s") from exc
        except aiohttp.ClientError as exc:
            raise UnavailableError(f"the connection to etcd was lost: {_words(exc)}") from exc
        answer = _decoded(body)
        self._check(verb, response.status, answer)
        return answer

    async def _log_in(self) -> None:
        self._token = None
        asked = {"name": self.place.user, "password": self.place.password}
        answer = await self._answer("auth/authenticate", asked)
        self._token = str(answer.get("token", ""))

    def _check(self, verb: str, status: int, answer: Mapping[str, Any]) -> None:
        """Raise what an answer says went wrong, if anything did."""
        error = answer.get("error")
        if error is None and status < 400:
            return
        told = cast("Mapping[str, Any]", error) if isinstance(error, dict) else answer
        code = int(told.get("code", told.get("grpc_code", 0)))
        words = _words(told.get("message", error or f"status {status}"))
        if code == _UNAUTHENTICATED and self._token is not None and verb != "auth/authenticate":
            self._token = None  # whoever asks next logs in
            raise _TokenEnded(words)
        if code in (_UNAUTHENTICATED, _PERMISSION_DENIED) or "user name is empty" in words:
            raise NotPermitted(
                f"etcd refuses this user: {words}: set a user that may read and write under {self.place.prefix}"
            )
        if "authentication failed" in words:
            raise NotPermitted(f"etcd refuses this user: {words}")
        if code == _NOT_FOUND and verb.startswith("lease/"):
            return
        raise UnavailableError(f"etcd can't answer {verb}: {words}")


class _TokenEnded(UnavailableError):
    """The token of this client is no longer valid."""


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > ANSWER_BYTES_MAX:
            raise RemoteProtocolError(f"an answer of etcd's is over {ANSWER_BYTES_MAX} bytes")
    return b"".join(pieces)


def _decoded(body: bytes) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise RemoteProtocolError(
            f"what answers is no etcd with a JSON gateway ({_words(body[:60])}): give the address of its client port, "
            "and don't set --enable-grpc-gateway=false"
        ) from exc


def _words(told: object) -> str:
    """Return what a server or a library says, as bounded text of one line."""
    text = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
    return " ".join(text.split())[:_WORDS_CHARS_MAX] or type(told).__name__


def _behind(prefix: str) -> str:
    """Return the first key behind all those that begin with an ASCII prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _coded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _revision(answer: Mapping[str, Any]) -> int:
    return int(answer.get("header", {}).get("revision", 0))


def _key(kv: Mapping[str, Any]) -> str:
    return base64.b64decode(kv.get("key", "")).decode(errors="replace")


def _entry(kv: Mapping[str, Any]) -> Entry:
    value = base64.b64decode(kv.get("value", ""))
    return Entry(_key(kv), value, int(kv.get("mod_revision", 0)), int(kv.get("lease", 0)))


def _change(event: Mapping[str, Any]) -> Change:
    kv: Mapping[str, Any] = event.get("kv", {})
    entry = None if event.get("type") == "DELETE" else _entry(kv)
    return Change(_key(kv), int(kv.get("mod_revision", 0)), entry)
