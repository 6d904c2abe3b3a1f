"""The connection of one asyncio client: made when needed, made anew when lost, by the loop that owns it.

Invariants
1. It belongs to the event loop that first uses it; another one is refused with a UsageError.
2. At most one greeting is on its way; others wait for it, no longer than their deadlines.
3. After a fork the child closes its copy of the socket, sends nothing on it, and may bind a loop of its own.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvclient._aconnection import AsyncConnection
from kvclient._breaker import Admission, Breaker
from kvclient._connections import check_retries
from kvclient._greeting import Greeting, greet_again
from kvclient._pool import Mappings
from kvclient._session import Session
from kvclient.stats import ClientStats
from kvstore import wire
from kvstore.errors import Closing, DeadlineExceeded, KVStoreError, PeerUnreachable, UsageError

_THREADS = 4
_PROBE_S_MAX = 0.25


class AsyncConnections:
    """The one connection to a daemon, and the threads for what would hold up its loop."""

    def __init__(self, path: Path, name: str, stats: ClientStats, *, pretouch: bool, retries: int = 0) -> None:
        self._retries = check_retries(retries)
        self._path = path
        self._name = name
        self._stats = stats
        self._mappings = Mappings(pretouch=pretouch)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: AsyncConnection | None = None
        self._connecting: asyncio.Lock | None = None
        self._threads: ThreadPoolExecutor | None = None
        self.breaker = Breaker(time.monotonic)

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Threads for copies and greetings."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvclient")
        return self._threads

    def let_go(self, connection: AsyncConnection, lease: int) -> None:
        """Release a lease, in the loop's thread."""
        connection.lease_count -= 1
        connection.session.outbox.append(wire.Release(connection.session.next_id(), lease))
        connection.flush()
        if connection is not self._connection and not connection.lease_count:
            connection.close(bye=True)

    async def close(self) -> None:
        """Close the connection, now or when its last lease is released."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None and not connection.lease_count:
            connection.close(bye=True)
        self._mappings.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)
        await asyncio.sleep(0)  # the transport closes its socket in the loop's next round

    def after_fork(self) -> None:
        """Begin anew in a forked child."""
        if self._connection is not None:
            self._connection.after_fork()
        self._mappings.forget()
        self._loop = self._connection = self._connecting = self._threads = None
        self.breaker = Breaker(time.monotonic)

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._connecting = asyncio.Lock()
        elif self._loop is not loop:
            raise UsageError("this AsyncClient is bound to another event loop: make one client for each loop")
        if self._closed:
            raise Closing("this client is closed: make a new one")
        return loop

    async def take(self, deadline_at: float) -> AsyncConnection:
        """Return the connection, made anew if it is lost; errors are those of the blocking client's."""
        loop = self._bind()
        admission = self.breaker.admit()
        if admission is Admission.REFUSED:
            raise PeerUnreachable(f"{self.breaker.reason} (asked again in {self.breaker.retry_in_s:.1f} s)")
        # What was tried in vain is tried once at a time from then on, so that misses cost nothing.
        retries = self._retries if admission is Admission.PASS else 0
        assert self._connecting is not None
        try:
            async with asyncio.timeout(deadline_at - time.monotonic()):
                await self._connecting.acquire()
        except TimeoutError as exc:
            raise DeadlineExceeded("no connection to the daemon was made by the call's deadline") from exc
        try:
            connection = self._connection
            if connection is None or connection.lost is not None or connection.session.is_worn_out:
                if connection is not None and not connection.lease_count:
                    connection.close(bye=True)
                connection = self._connection = await self._connect(loop, deadline_at, retries)
                return connection
        finally:
            self._connecting.release()
        if admission is Admission.PROBE:
            await self._probe(connection, deadline_at)
        return connection

    async def _connect(self, loop: asyncio.AbstractEventLoop, deadline_at: float, retries: int) -> AsyncConnection:
        try:
            greeting = await self._greeted(loop, deadline_at, retries)
            try:
                pool, arena = self._mappings.adopt(greeting.welcome, greeting.fds)
                greeting.sock.setblocking(False)
                connection = AsyncConnection(greeting.sock, Session(greeting.welcome, pool, arena, self._undone))
                await loop.create_unix_connection(lambda: connection, sock=greeting.sock)
            except BaseException:
                greeting.sock.close()
                raise
        except KVStoreError as exc:
            self.breaker.failed(str(exc))
            raise
        self._stats.add("connections_opened")
        self.breaker.answered()
        return connection

    def _undone(self) -> None:
        self._stats.add("late_replies_undone")

    async def _greeted(self, loop: asyncio.AbstractEventLoop, deadline_at: float, retries: int) -> Greeting:
        """Greet in a thread; cancelled, what the thread still brings is closed."""
        greeting = loop.run_in_executor(self.threads, greet_again, self._path, self._name, deadline_at, retries)
        try:
            return await asyncio.shield(greeting)
        except asyncio.CancelledError:
            greeting.add_done_callback(_close_greeting)
            raise

    async def _probe(self, connection: AsyncConnection, deadline_at: float) -> None:
        session = connection.session
        ping = wire.Ping(session.next_id())
        try:
            session.sent([ping])
            connection.send([ping])
            left_s = min(deadline_at - time.monotonic(), _PROBE_S_MAX)
            await connection.arrival(ping.id, left_s)
            session.take(ping.id)
        except TimeoutError as exc:
            session.abandon(ping.id)
            self.breaker.failed("the daemon does not answer: is it stopped?")
            raise DeadlineExceeded("the daemon does not answer a ping: is it stopped?") from exc
        self.breaker.answered()


def _close_greeting(greeting: asyncio.Future[Greeting]) -> None:
    if not greeting.cancelled() and greeting.exception() is None:
        greeting.result().close()
