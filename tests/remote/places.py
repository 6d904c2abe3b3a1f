"""Remote stores under test: each kind on its real server, with short words for what tests do with it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvstore.clock import Clock, SystemClock
from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteFound, RemoteRead, RemoteScope, RemoteWrite
from kvstore.wire import Outcome
from kvstored.remote.bucket import Bucket
from kvstored.remote.guarded import Backend, Guarded
from kvstored.remote.objects import ObjectsBackend
from kvstored.remote.opening import shown
from kvstored.remote.redis import RedisBackend
from kvstored.remote.redis_client import RedisPlace
from tests.remote import servers
from tests.remote.servers import Server

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 64 * KIB
SCOPE = RemoteScope("tenant", hashlib.sha256(b"namespace").digest())
OTHER_SCOPE = RemoteScope("another", SCOPE.namespace)
WITHIN_S = 30.0  # longer than anything takes on a loaded machine
FAST_S = 0.05
T = TypeVar("T")


class SettableClock(SystemClock):
    """This machine's clock, whose wall time can be stepped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


def hash_of(key: int) -> bytes:
    return hashlib.sha256(b"block %d" % key).digest()


def payload_of(key: int, length: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(b"payload %d" % key).digest(1021) * (length // 1021) + bytes(length % 1021)


@dataclass
class Place:
    """One place in one kind of store: what is put there stays for the next who opens it."""

    kind: str
    url: str
    server: Server | None = None
    capacity_bytes: int = 256 * MIB
    clock: SettableClock = field(default_factory=SettableClock)

    @property
    def is_redis(self) -> bool:
        return self.kind in ("redis", "cluster")

    def backend(self, writer: str, clock: Clock) -> Backend:
        if self.is_redis:
            place = RedisPlace.read(self.url)
            return RedisBackend(place, self.capacity_bytes, clock, sweep_s=FAST_S, settle_s=0.0)
        return ObjectsBackend(Bucket(self.url), writer, self.capacity_bytes, clock, refresh_s=FAST_S)

    @contextlib.asynccontextmanager
    async def opened(self, writer: str = "node-1", *, wait: bool = True) -> AsyncGenerator[Opened, None]:
        """Give a store that runs; `wait`: once it has learned what is there."""
        store = Guarded(self.backend(writer, self.clock), shown(self.url), self.clock)
        running = asyncio.create_task(store.run())
        try:
            if wait:
                await eventually(lambda: store.usage().state == "ready")
            yield Opened(store)
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await store.close()


class Opened:
    """An open store."""

    def __init__(self, store: Guarded) -> None:
        self.store = store

    async def write(
        self,
        keys: Iterable[int],
        *,
        scope: RemoteScope = SCOPE,
        length: int = BLOCK_BYTES,
        life_s: float = NEVER_S,
        within_s: float = WITHIN_S,
    ) -> list[Outcome]:
        writes = [
            RemoteWrite(hash_of(key), memoryview(payload_of(key, length)), generation=key, life_s=life_s)
            for key in keys
        ]
        return await self.store.write(scope, writes, within_s)

    async def read(
        self,
        keys: Sequence[int],
        *,
        scope: RemoteScope = SCOPE,
        length: int = BLOCK_BYTES,
        within_s: float = WITHIN_S,
    ) -> list[RemoteFound]:
        """Read blocks; every HIT has been compared byte by byte, and every other destination is as it was."""
        before = b"\xa5" * length
        buffers = [bytearray(before) for _ in keys]
        reads = [RemoteRead(hash_of(key), memoryview(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        found = await self.store.read(scope, reads, within_s)
        for key, buffer, result in zip(keys, buffers, found, strict=True):
            expected = payload_of(key, length) if result.outcome is Outcome.HIT else before
            assert buffer == expected, f"block {key} is {result.outcome.name}, and its bytes are wrong"
        return found

    async def outcomes(self, keys: Sequence[int], **how: Any) -> list[Outcome]:
        return [found.outcome for found in await self.read(keys, **how)]

    async def found(self, keys: Sequence[int], scope: RemoteScope = SCOPE) -> list[bool]:
        return await self.store.find(scope, [hash_of(key) for key in keys], WITHIN_S)


async def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Return when the condition holds; fails after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def eventually_found(
    opened: Opened, keys: Sequence[int], found: Sequence[bool], scope: RemoteScope = SCOPE, within_s: float = 30.0
) -> None:
    """Return when these blocks are, or are not, found."""
    async with asyncio.timeout(within_s):
        while await opened.found(keys, scope) != list(found):
            await asyncio.sleep(0.01)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@contextlib.contextmanager
def place(kind: str, directory: Path, patch: pytest.MonkeyPatch, server: Server | None) -> Generator[Place, None, None]:
    """Give an empty place of a kind on a server that runs."""
    unique = secrets.token_hex(4)
    if kind == "file":
        yield Place(kind, f"file://{directory}/objects-{unique}")
        return
    assert server is not None
    if kind == "s3":
        for name, text in servers.s3_environment(server.port).items():
            patch.setenv(name, text)
        yield Place(kind, f"s3://{servers.BUCKET}/{unique}", server)
    else:
        yield Place(kind, f"redis://127.0.0.1:{server.port}/0?prefix={unique}", server)
