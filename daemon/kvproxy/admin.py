"""The admin port: workers are listed, added, drained and removed here, in JSON, by whoever knows the token.

    GET     /workers                                     what there is, and how each does
    POST    /workers        {"role", "url", "node"?}     add one, or take back one that drains
    POST    /workers/drain  {"role", "url"}              no new requests for it
    DELETE  /workers        {"role", "url"}              the same, and it is forgotten once its last request has ended

Invariants
1. Without the token nothing is said and nothing is done, whatever the path: 401. Tokens are compared in constant time.
2. What is refused changes nothing, and the answer says why; an unknown field is refused.
3. At most `WORKERS_MAX` workers of a role are known.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvproxy.options import read_worker
from kvproxy.settings import TOKEN_VARIABLE
from kvproxy.types import Role
from kvproxy.workers import Fleet
from kvstore.errors import BadSetting, UsageError
from kvstored.logs import fields

TOKEN_CHARS_MIN = 16
WORKERS_MAX = 1000
_BODY_BYTES_MAX = 16 << 10
_FILE_BYTES_MAX = 4096

log = logging.getLogger("kvproxy.admin")


class WorkerNamed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which worker is meant."""

    role: Role
    url: str


class WorkerAdded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker to add. `node` is where its store is; the URL's host if it is left out."""

    role: Role
    url: str
    node: str = ""


T = TypeVar("T", WorkerNamed, WorkerAdded)


def read_token(file: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return the token from its file, else from the variable, else None.

    Raises
    ------
    BadSetting
        The file can't be read, others may read or write it, or the token is too short to be a secret.
    """
    if file is None:
        token, where = environ.get(TOKEN_VARIABLE, "").strip(), f"${TOKEN_VARIABLE}"
        if not token:
            return None
    else:
        token, where = _read_file(file), str(file)
    if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.isprintable() or " " in token:
        raise BadSetting(
            f"the admin token in {where} is not {TOKEN_CHARS_MIN} printable characters or more, without spaces: make "
            "one with: openssl rand -hex 32"
        )
    return token


def application(fleet: Fleet, token: str) -> web.Application:
    """Return the admin port's application: it changes `fleet` for those who bring `token`."""
    handlers = _Handlers(fleet)
    made = web.Application(client_max_size=_BODY_BYTES_MAX, middlewares=[_guard(token), _as_json])
    made.router.add_get("/workers", handlers.list)
    made.router.add_post("/workers", handlers.add)
    made.router.add_delete("/workers", handlers.remove)
    made.router.add_post("/workers/drain", handlers.drain)
    return made


class _Handlers:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": self._fleet.report()})

    async def add(self, request: web.Request) -> web.Response:
        asked = await _body_of(request, WorkerAdded)
        endpoint = read_worker(asked.url, asked.role)
        if asked.node:
            endpoint = replace(endpoint, node=asked.node)
        if len(self._fleet.workers(asked.role)) >= WORKERS_MAX:
            raise _refusal(409, f"there are {WORKERS_MAX} {asked.role} workers, and no more may be: remove one first")
        try:
            self._fleet.add(endpoint)
        except UsageError as exc:
            raise _refusal(409, str(exc)) from exc
        log.info("worker added", extra=fields(role=asked.role, url=endpoint.url, node=endpoint.node))
        return web.json_response({"worker": self._report_of(asked.role, endpoint.url)}, status=201)

    async def drain(self, request: web.Request) -> web.Response:
        asked = await _body_of(request, WorkerNamed)
        url = self._url_of(asked)
        self._fleet.drain(asked.role, url)
        log.info("worker draining", extra=fields(role=asked.role, url=url))
        return web.json_response({"worker": self._report_of(asked.role, url)})

    async def remove(self, request: web.Request) -> web.Response:
        asked = await _body_of(request, WorkerNamed)
        url = self._url_of(asked)
        in_flight = self._fleet.remove(asked.role, url)
        log.info("worker removed", extra=fields(role=asked.role, url=url, requests=in_flight))
        return web.json_response({"requests": in_flight}, status=202 if in_flight else 200)

    def _url_of(self, asked: WorkerNamed) -> str:
        """Return the worker's URL as the fleet has it; 404 if there is no such worker."""
        try:
            return self._fleet.worker(asked.role, asked.url).endpoint.url
        except UsageError as exc:
            raise _refusal(404, str(exc)) from exc

    def _report_of(self, role: Role, url: str) -> dict[str, object]:
        return next(told for told in self._fleet.report() if told["role"] == role and told["url"] == url)


def _guard(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, expected):
            log.warning("admin refused", extra=fields(peer=request.remote, method=request.method))
            refusal = _told(401, "bring the admin token: Authorization: Bearer TOKEN")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        return await handler(request)

    return guard


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:  # of aiohttp's own: no such path, a method that isn't there, a body too large
        told = _told(exc.status, exc.text or exc.reason)
        if "Allow" in exc.headers:
            told.headers["Allow"] = exc.headers["Allow"]
        return told
    except (UsageError, msgspec.MsgspecError) as exc:
        return _told(400, str(exc))


async def _body_of(request: web.Request, kind: type[T]) -> T:
    return msgspec.json.decode(await request.read(), type=kind)


def _refusal(status: int, text: str) -> web.HTTPException:
    kinds: dict[int, type[web.HTTPException]] = {404: web.HTTPNotFound, 409: web.HTTPConflict}
    return kinds[status](text=text)


def _told(status: int, text: str) -> web.Response:
    return web.json_response({"error": {"message": text, "code": status}}, status=status)


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            is_open_to_others = bool(os.fstat(file.fileno()).st_mode & (stat.S_IRWXO | stat.S_IWGRP))
            found = file.read(_FILE_BYTES_MAX)
    except OSError as exc:
        text = f"the admin token file {path} can't be read ({exc.strerror}): make it, or name another"
        raise BadSetting(text) from exc
    if is_open_to_others:
        raise BadSetting(f"the admin token file {path} is open to other users: chmod 600 {path}")
    return found.decode(errors="replace").strip()
