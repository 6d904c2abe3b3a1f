"""Redis or Valkey, one server or a cluster, as one thing: commands sent together, an answer or an error for each.

Whether a server is one of a cluster is asked at the first connection, and again after it was lost: a team may turn one
into the other. Connections are redis-py's: pooled, made anew when they break, and closed when a call on them is
cancelled, so a late answer is never taken for another's.

Invariants
1. An error that is about one command (out of memory, wrong type) is that command's answer; all others raise, mapped to
   the tree of kvstore/errors.py.
2. Neither a text nor a log line holds a user or a password.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.errors import BadSetting, TierUnavailable

SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}  # and whether they mean TLS
DEFAULT_PORT = 6379
CONNECT_S = 2.0
CALLS_MAX = 16  # at once; a call takes one connection to each node it needs
_CONNECTIONS_MAX = 4 * CALLS_MAX  # never reached: redis-py fails where there are no more, and does not wait
_OPTIONS = {"prefix", "ca"}

Command = tuple[bytes | str | int | memoryview, ...]


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """Where a Redis is and how it is spoken to, read from a URL and the environment."""

    hosts: tuple[tuple[str, int], ...]
    database: int
    prefix: str
    tls: bool
    ca: str | None
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)

    @property
    def text(self) -> str:
        """The URL without credentials."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{'rediss' if self.tls else 'redis'}://{hosts}/{self.database}?prefix={self.prefix}"

    @staticmethod
    def read(url: str) -> RedisPlace:
        """Return what a URL says: redis://[[USER]:PASSWORD@]HOST[:PORT][,HOST...][/DATABASE][?prefix=NAME&ca=FILE].

        REDIS_USERNAME and REDIS_PASSWORD of the environment stand in for what it leaves out. Raises BadSetting.
        """
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        login, _, netloc = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        options = parse_qs(parts.query)
        if unknown := sorted(options.keys() - _OPTIONS):
            raise BadSetting(f"{shown} has the unknown option {unknown[0]}: there are {' and '.join(sorted(_OPTIONS))}")
        database = parts.path.strip("/") or "0"
        if not database.isdecimal():
            raise BadSetting(f"{shown} names the database {database!r}: it is a number, 0 as a rule")
        prefix = options.get("prefix", ["kvstored"])[0]
        if not prefix or any(character in prefix for character in "{}*?[]\\ :") or not prefix.isascii():
            raise BadSetting(f"{shown}: the prefix {prefix!r} must be letters, digits and -_./ only")
        return RedisPlace(
            hosts=tuple(_host(text, shown) for text in netloc.split(",")),
            database=int(database),
            prefix=prefix,
            tls=SCHEMES[parts.scheme],
            ca=options.get("ca", [None])[0],
            user=unquote(user) or os.environ.get("REDIS_USERNAME") or None,
            password=unquote(password) or os.environ.get("REDIS_PASSWORD") or None,
        )


class RedisClient:
    """See the module's docstring. Belongs to the loop that first uses it."""

    def __init__(self, place: RedisPlace) -> None:
        self._place = place
        self.answers = 0
        self._client: redis.asyncio.Redis | RedisCluster | None = None
        self._calls = asyncio.Semaphore(CALLS_MAX)
        self._connecting = asyncio.Lock()

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands at once, each to the node that holds its key; return an answer or a ResponseError for each."""
        async with self._calls:
            return await self._run(commands)

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        with self._mapped():
            client = await self._connected()
            pipeline: Any = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not _is_about_the_command(answer):
                    raise answer
            self.answers += 1
            return answers

    async def scan(self, pattern: str, at_once: int) -> AsyncGenerator[list[bytes], None]:
        """Yield the keys that match, a portion at a time; one that is there all the time comes at least once."""
        with self._mapped():
            client: Any = await self._connected()
            portion: list[bytes] = []
            async for key in client.scan_iter(match=pattern, count=at_once):
                portion.append(key)
                if len(portion) >= at_once:
                    yield portion
                    portion = []
            if portion:
                yield portion

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await client.aclose()

    async def _connected(self) -> redis.asyncio.Redis | RedisCluster:
        async with self._connecting:  # across I/O: one connects, the others have what it found
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> redis.asyncio.Redis | RedisCluster:
        host, port = self._place.hosts[0]
        single = redis.asyncio.Redis(
            host=host, port=port, db=self._place.database, max_connections=_CONNECTIONS_MAX, **self._common()
        )
        is_single = False
        try:
            is_single = len(self._place.hosts) == 1 and not await _is_of_cluster(single)
        finally:
            if not is_single:
                await single.aclose()
        if is_single:
            return single
        cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._place.hosts],
            max_connections=_CONNECTIONS_MAX,
            require_full_coverage=False,
            **self._common(),
        )
        try:
            await cluster.initialize()
        except BaseException:
            await cluster.aclose()
            raise
        return cluster

    def _common(self) -> dict[str, Any]:
        place = self._place
        tls = {"ssl": True, "ssl_ca_certs": place.ca} if place.tls else {}
        return {
            "username": place.user,
            "password": place.password,
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": None,  # whoever calls has a deadline
            "retry": Retry(NoBackoff(), 0),
            **tls,
        }

    @contextlib.contextmanager
    def _mapped(self) -> Any:
        where = self._place.text
        try:
            yield
        except redis.exceptions.AuthenticationError as exc:
            raise TierUnavailable(
                f"{where} refuses the login: set REDIS_PASSWORD (and REDIS_USERNAME), or give them in the URL"
            ) from exc
        except (redis.exceptions.RedisError, OSError) as exc:
            raise TierUnavailable(f"{where}: {_first_line(exc)}") from exc


async def _is_of_cluster(client: Any) -> bool:
    answer: Any = await client.info("cluster")
    return str(answer.get("cluster_enabled")) == "1"


def _is_about_the_command(error: Exception) -> bool:
    """Whether an error says nothing about the server as a whole."""
    return isinstance(error, redis.exceptions.ResponseError) and not isinstance(
        error, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError
    )


def is_out_of_memory(answer: object) -> bool:
    """Whether the answer is that the server's maxmemory is reached."""
    return isinstance(answer, redis.exceptions.OutOfMemoryError) or (
        isinstance(answer, redis.exceptions.ResponseError) and str(answer).startswith("OOM")
    )


def _first_line(exc: BaseException) -> str:
    lines = str(exc).splitlines()
    return lines[0][:300] if lines else type(exc).__name__


def _host(text: str, shown: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadSetting(f"{shown}: {text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)
