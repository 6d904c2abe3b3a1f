"""The asyncio client: the same verbs over one connection, whose replies are told apart by number.

Invariants
1. It belongs to the event loop that first uses it; another one is refused with a UsageError. (A loop an own client.)
2. A cancelled call gives back what it holds, and returns only when no thread touches its buffers any more.
3. Long copies run in threads of its own; the loop is never held for more than a small copy.
4. Deadlines, failures and results are those of the blocking client.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvclient import _forks
from kvclient._aconnection import AsyncConnection
from kvclient._aconnections import AsyncConnections
from kvclient._copy import Copier, checksum_of
from kvclient._fetch import Hold
from kvclient._operations import Progress, Question
from kvclient._steps import Await, Copy, Operation, R, Run, Send, Step
from kvclient._verbs import Verbs
from kvclient.client import ADMIN_DEADLINE_S, DEADLINE_S, check_deadline, default_name
from kvclient.results import Changed, FetchResult, Lease, Lookup, StoreResult
from kvclient.stats import ClientStats
from kvstore import wire
from kvstore.block import Namespace
from kvstore.errors import DeadlineExceeded, KVStoreError, ProtocolError, UsageError
from kvstore.paths import find_socket_path

_INLINE_BYTES_MAX = 256 << 10


class AsyncClient:
    """Talks to the daemon of this node from one event loop.

    Nothing is connected before the first call. Use it in an `async with` block, or call `close`.

    Parameters
    ----------
    socket : path, optional
        The daemon's unix socket; else $KVSTORED_SOCKET, else the default path.
    deadline_s : float
        Seconds that a call may take unless it says otherwise.
    strict : bool
        Raise failures instead of turning them into misses.
    connect_retries : int
        How often a connection is tried again where no daemon listens, with pauses that double from 10 ms, within the
        call's deadline. Once that was in vain, calls are turned away at once until a daemon is found.
    pretouch : bool
        Fill this process's page tables for the pool in the background, so that first copies are as fast as later ones.
    name : str, optional
        How the daemon's log and stats name this client.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        strict: bool = False,
        connect_retries: int = 0,
        pretouch: bool = True,
        name: str | None = None,
    ) -> None:
        self.deadline_s = check_deadline(deadline_s)
        self.socket = Path(socket).absolute() if socket is not None else find_socket_path()
        self.stats = ClientStats()
        self._strict = strict
        self._copier = Copier()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._connections = AsyncConnections(
            self.socket, name or default_name(), self.stats, pretouch=pretouch, retries=connect_retries
        )
        _forks.register(self)

    def namespace(self, namespace: Namespace, *, ttl_s: float | None = None) -> AsyncNamespaceHandle:
        """Return the verbs for the blocks of one namespace; `ttl_s` is how long they live unless a store says else."""
        return AsyncNamespaceHandle(self, namespace, ttl_s)

    async def ping(self, *, deadline_s: float | None = None) -> bool:
        """Return whether the daemon answers."""
        try:
            await self.admin(wire.Ping(0), deadline_s=self.deadline_s if deadline_s is None else deadline_s)
        except UsageError:
            raise
        except KVStoreError:
            return False
        return True

    async def admin(
        self, request: wire.Message, *, progress: Progress | None = None, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Return the daemon's answer to an operator's request of kvstore.wire, whose `id` does not matter.

        Its failures always raise: there is no miss to make of them.
        """
        question = Question(request, progress)
        return await self.run(question, ADMIN_DEADLINE_S if deadline_s is None else deadline_s)

    async def run(self, operation: Operation[R], deadline_s: float | None, wait_s: float = 0.0) -> R:
        """Run an operation to its result; `deadline_s` None is the client's own and the time it may wait for blocks.

        Cancelled, it gives back what the operation holds, after a copy under way has ended.
        """
        deadline_at = time.monotonic() + check_deadline(self.deadline_s + wait_s if deadline_s is None else deadline_s)
        failure: KVStoreError | None = None
        try:
            if not operation.is_empty:
                await self._drive(operation, deadline_at)
        except UsageError:
            raise
        except KVStoreError as exc:
            self.stats.failed(exc)
            if self._strict:
                raise
            failure = exc
        result = operation.result(failure)
        operation.tally(self.stats, result)
        return result

    async def hold(self, operation: Hold, deadline_s: float | None, wait_s: float) -> Lease:
        """Run an acquire; the lease is the caller's."""
        found = await self.run(operation, deadline_s, wait_s)
        lease = Lease(found.raw, found.failure, operation.views, operation.places, operation.release)
        self._leases.add(lease)
        return lease

    async def close(self) -> None:
        """Close the connection. Views of leases stay valid until these are released."""
        await self._connections.close()

    def after_fork(self) -> None:
        """Begin anew in a forked child, with the loop that uses it first there; leases stay the parent's."""
        self.stats.after_fork()
        for lease in list(self._leases):
            lease.disown()
        self._leases = weakref.WeakSet()
        self._connections.after_fork()

    async def _drive(self, operation: Operation[Any], deadline_at: float) -> None:
        connection = await self._connections.take(deadline_at)
        began_at = time.monotonic()
        run = Run(operation, connection.session, deadline_at)
        try:
            step = run.advance()
            while step is not None:
                step = run.advance(await self._perform(connection, run, step, deadline_at))
            if operation.lease:
                connection.lease_count += 1
                operation.release = self._releaser(connection, operation.lease)
        except DeadlineExceeded as exc:
            self._connections.breaker.silent(max(began_at, connection.heard_at), str(exc))
            raise
        except ProtocolError:
            connection.close(bye=False)
            raise
        finally:
            run.end()
            connection.flush()

    async def _perform(self, connection: AsyncConnection, run: Run, step: Step, deadline_at: float) -> Any:
        if isinstance(step, Send):
            connection.send(step.messages)
            return None
        if isinstance(step, Await):
            while (reply := run.arrived(step.request)) is None:
                connection.flush()
                try:
                    await connection.arrival(step.request, deadline_at - time.monotonic())
                except TimeoutError as exc:
                    raise DeadlineExceeded(
                        "the daemon did not answer by the call's deadline: give it a longer one"
                    ) from exc
            self._connections.breaker.answered()
            return reply
        if isinstance(step, Copy):
            return await self._copy(step)
        await asyncio.sleep(step.seconds)
        return None

    async def _copy(self, step: Copy) -> list[int]:
        size = sum(piece[2] for piece in step.pieces)
        size += sum(segment[1] for segments in step.checksums_of for segment in segments)
        if size <= _INLINE_BYTES_MAX:
            return self._copied(step)
        copying = asyncio.get_running_loop().run_in_executor(self._connections.threads, self._copied, step)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # The caller will free the buffers, so the thread is waited for, however often the task is cancelled.
            while not copying.done():
                try:
                    await asyncio.wait([copying])
                except asyncio.CancelledError:
                    continue
            raise

    def _copied(self, step: Copy) -> list[int]:
        self._copier.run(step.pieces)
        return [checksum_of(segments) for segments in step.checksums_of]

    def _releaser(self, connection: AsyncConnection, lease: int) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def from_any_thread() -> None:
            try:
                here = asyncio.get_running_loop() is loop
            except RuntimeError:
                here = False
            if here:
                self._connections.let_go(connection, lease)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._connections.let_go, connection, lease)

        return from_any_thread

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncNamespaceHandle(Verbs):
    """The verbs of an AsyncClient for one namespace; their arguments and results are NamespaceHandle's."""

    def __init__(self, client: AsyncClient, namespace: Namespace, ttl_s: float | None) -> None:
        super().__init__(namespace, ttl_s)
        self._client = client

    async def lookup(
        self,
        hashes: Sequence[bytes],
        *,
        run: bool = True,
        max_ms: float | None = None,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Return which blocks are there."""
        return await self._client.run(self.looking_up(hashes, run=run, max_ms=max_ms), deadline_s)

    async def group_lookup(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Lookup:
        """Return which blocks a fetch would get, from this slice or put together from others."""
        return await self._client.run(self.looking_up_group(hashes), deadline_s)

    async def store(
        self,
        hashes: Sequence[bytes],
        sources: Any,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        wait_s: float = 0.0,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> StoreResult:
        """Store blocks. Cancelled, blocks may have been stored or not; the sources are no longer in use."""
        operation = self.storing(
            hashes, sources, ttl_s=ttl_s, durable=durable, wait_s=wait_s, progress=progress
        )
        return await self._client.run(operation, deadline_s, wait_s)

    async def fetch(
        self,
        hashes: Sequence[bytes],
        into: Any,
        *,
        wait_s: float = 0.0,
        max_ms: float | None = None,
        run: bool = True,
        count: bool = True,
        slices: bool = True,
        progress: Progress | None = None,
        deadline_s: float | None = None,
    ) -> FetchResult:
        """Copy blocks into the caller's memory. Cancelled, that holds anything, and is no longer in use."""
        operation = self.fetching(
            hashes,
            into,
            wait_s=wait_s,
            max_ms=max_ms,
            run=run,
            count=count,
            slices=slices,
            progress=progress,
        )
        return await self._client.run(operation, deadline_s, wait_s)

    async def acquire(
        self,
        hashes: Sequence[bytes],
        *,
        wait_s: float = 0.0,
        max_ms: float | None = None,
        count: bool = True,
        deadline_s: float | None = None,
    ) -> Lease:
        """Return a lease on blocks: `with await blocks.acquire(hashes) as lease`. Cancelled, nothing is held."""
        operation = self.holding(hashes, wait_s=wait_s, max_ms=max_ms, count=count)
        return await self._client.hold(operation, deadline_s, wait_s)

    async def prefetch(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Lookup:
        """Start loading blocks to memory; cancelled, that goes on."""
        return await self._client.run(self.prefetching(hashes), deadline_s)

    async def wait(self, hashes: Sequence[bytes], wait_s: float, *, deadline_s: float | None = None) -> Lookup:
        """Return when all blocks can be fetched, one is aborted, or `wait_s` is over."""
        return await self._client.run(self.awaiting(hashes, wait_s), deadline_s, wait_s)

    async def abort(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> int:
        """Tell everybody who waits for these blocks that they will not come; returns how many were told."""
        return await self._client.run(self.aborting(hashes), deadline_s)

    async def drop(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Changed:
        """Make blocks invisible now, in every tier. Cancelled, they may be dropped or not."""
        return await self._client.run(self.dropping(hashes), deadline_s)

    async def pin(self, hashes: Sequence[bytes], for_s: float, *, deadline_s: float | None = None) -> Changed:
        """Keep blocks from eviction and expiry for a time (role admin)."""
        return await self._client.run(self.pinning(hashes, for_s), deadline_s)

    async def unpin(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Changed:
        """End pins (role admin)."""
        return await self._client.run(self.unpinning(hashes), deadline_s)

    async def set_ttl(self, hashes: Sequence[bytes], ttl_s: float, *, deadline_s: float | None = None) -> Changed:
        """Set the seconds that blocks live from now on; 0: for ever (role admin)."""
        return await self._client.run(self.setting_ttl(hashes, ttl_s), deadline_s)
