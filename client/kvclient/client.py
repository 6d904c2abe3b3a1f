"""The blocking client.

Invariants
1. A call returns by its deadline, whatever state the daemon is in; without one it never waits.
2. A failure of the daemon, the connection or the protocol makes blocks misses and is counted; it raises only if the
   client is strict. What the caller did wrong always raises (UsageError).
3. One client may be used by any number of threads, and by forked children, each over connections of its own.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvclient import _forks
from kvclient._connection import Connection
from kvclient._connections import Connections
from kvclient._copy import Copier, checksum_of
from kvclient._fetch import Hold
from kvclient._operations import Progress, Question
from kvclient._steps import Await, Copy, Operation, R, Run, Send, Step
from kvclient._verbs import Verbs
from kvclient.results import Changed, FetchResult, Lease, Lookup, StoreResult
from kvclient.stats import ClientStats
from kvstore import __version__, wire
from kvstore.block import Namespace
from kvstore.errors import DeadlineExceeded, KVStoreError, ProtocolError, UsageError
from kvstore.paths import find_socket_path

DEADLINE_S = 10.0
ADMIN_DEADLINE_S = 60.0


class Client:
    """Talks to the daemon of this node.

    Nothing is connected before the first call. Use it as a context manager, or call `close`.

    Parameters
    ----------
    socket : path, optional
        The daemon's unix socket; else $KVSTORED_SOCKET, else the default path.
    deadline_s : float
        Seconds that a call may take unless it says otherwise.
    strict : bool
        Raise failures instead of turning them into misses.
    connections_max : int
        How many threads may be in a call at once; others wait.
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
        connections_max: int = 16,
        connect_retries: int = 0,
        pretouch: bool = True,
        name: str | None = None,
    ) -> None:
        self.deadline_s = check_deadline(deadline_s)
        self._strict = strict
        self._copier = Copier()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.socket = Path(socket).absolute() if socket is not None else find_socket_path()
        self.stats = ClientStats()
        self._connections = Connections(
            self.socket,
            name or default_name(),
            connections_max,
            self.stats,
            pretouch=pretouch,
            retries=connect_retries,
        )
        _forks.register(self)

    def namespace(self, namespace: Namespace, *, ttl_s: float | None = None) -> NamespaceHandle:
        """Return the verbs for the blocks of one namespace; `ttl_s` is how long they live unless a store says else."""
        return NamespaceHandle(self, namespace, ttl_s)

    def ping(self, *, deadline_s: float | None = None) -> bool:
        """Return whether the daemon answers."""
        try:
            self.admin(wire.Ping(0), deadline_s=self.deadline_s if deadline_s is None else deadline_s)
        except UsageError:
            raise
        except KVStoreError:
            return False
        return True

    def admin(
        self, request: wire.Message, *, progress: Progress | None = None, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Return the daemon's answer to an operator's request of kvstore.wire, whose `id` does not matter.

        Its failures always raise: there is no miss to make of them.
        """
        question = Question(request, progress)
        return self.run(question, ADMIN_DEADLINE_S if deadline_s is None else deadline_s)

    def run(self, operation: Operation[R], deadline_s: float | None, wait_s: float = 0.0) -> R:
        """Run an operation to its result; `deadline_s` None is the client's own and the time it may wait for blocks."""
        deadline_at = time.monotonic() + check_deadline(self.deadline_s + wait_s if deadline_s is None else deadline_s)
        failure: KVStoreError | None = None
        try:
            if not operation.is_empty:
                self._drive(operation, deadline_at)
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

    def hold(self, operation: Hold, deadline_s: float | None, wait_s: float) -> Lease:
        """Run an acquire; the lease is the caller's."""
        found = self.run(operation, deadline_s, wait_s)
        lease = Lease(found.raw, found.failure, operation.views, operation.places, operation.release)
        self._leases.add(lease)
        return lease

    def close(self) -> None:
        """Close the connections. Views of leases stay valid until these are released."""
        self._connections.close()

    def after_fork(self) -> None:
        """Begin anew in a forked child; leases stay the parent's."""
        self.stats.after_fork()
        for lease in list(self._leases):
            lease.disown()
        self._leases = weakref.WeakSet()
        self._connections.after_fork()

    def _drive(self, operation: Operation[Any], deadline_at: float) -> None:
        connections = self._connections
        connection = connections.take(deadline_at)
        began_at = time.monotonic()
        run = Run(operation, connection.session, deadline_at)
        try:
            step = run.advance()
            while step is not None:
                step = run.advance(self._perform(connection, run, step, deadline_at))
            if operation.lease:
                connections.hold(connection)
                operation.release = lambda: connections.let_go(connection, operation.lease)
        except DeadlineExceeded as exc:
            connections.breaker.silent(max(began_at, connection.heard_at), str(exc))
            raise
        except ProtocolError:
            connection.is_broken = True
            raise
        except UsageError:
            run.end()
            connection.settle()  # nobody else is kept from blocks that were reserved before the fault was found
            raise
        finally:
            run.end()
            connections.put(connection)

    def _perform(self, connection: Connection, run: Run, step: Step, deadline_at: float) -> Any:
        if isinstance(step, Send):
            connection.send(step.messages, deadline_at)
            return None
        if isinstance(step, Await):
            while (reply := run.arrived(step.request)) is None:
                connection.flush()  # what the daemon may be waiting for
                connection.await_reply(deadline_at, patient=step.patient)
            self._connections.breaker.answered()
            return reply
        if isinstance(step, Copy):
            self._copier.run(step.pieces)
            return [checksum_of(segments) for segments in step.checksums_of]
        time.sleep(step.seconds)
        return None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NamespaceHandle(Verbs):
    """The verbs of a client for one namespace. Cheap, and valid across restarts of the daemon.

    In all verbs `hashes` are block hashes of 32 bytes, or an engine's own of 8 to 64, and `deadline_s` is the seconds
    that the call may take: unless given the client's, plus what the call may wait for blocks.
    """

    def __init__(self, client: Client, namespace: Namespace, ttl_s: float | None) -> None:
        super().__init__(namespace, ttl_s)
        self._client = client

    def lookup(
        self,
        hashes: Sequence[bytes],
        *,
        run: bool = True,
        max_ms: float | None = None,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Return which blocks are there.

        With `run` it stops at the first miss: what is behind it counts as absent. Blocks that can't be loaded within
        `max_ms` count as misses.
        """
        return self._client.run(self.looking_up(hashes, run=run, max_ms=max_ms), deadline_s)

    def group_lookup(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Lookup:
        """Return which blocks a fetch would get, from this slice or put together from others.

        LAYOUT: stored in other slices that can't be put together to this one. It stops at no miss, and counts none.
        """
        return self._client.run(self.looking_up_group(hashes), deadline_s)

    def store(
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
        """Store blocks; returns when each is visible to others, or is not stored.

        Parameters
        ----------
        hashes, deadline_s
            As in all verbs.
        sources : list of buffers, one buffer, or PagedKV
            A buffer a block, or one that holds all of them: numpy, torch, bytes, memoryview and the like.
        ttl_s : float, optional
            Seconds to live; 0: for ever. Else the namespace's.
        durable : bool
            Return only when the blocks are on the ssd tier for good.
        wait_s : float
            How long to wait for room where there is none.
        progress : callable, optional
            Called with the blocks done so far and in all.
        """
        operation = self.storing(
            hashes, sources, ttl_s=ttl_s, durable=durable, wait_s=wait_s, progress=progress
        )
        return self._client.run(operation, deadline_s, wait_s)

    def fetch(
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
        """Copy blocks into the caller's memory.

        Parameters
        ----------
        hashes, deadline_s
            As in all verbs.
        into : list of buffers, one buffer, or PagedKV
            Where the blocks go; of blocks that are no hits it holds anything afterwards.
        wait_s : float
            How long to wait for blocks that are being written, or are not there yet.
        max_ms : float, optional
            Blocks that can't be loaded within this time count as misses.
        run : bool
            Stop at the first miss, since a prefix is of no use behind it.
        count : bool
            Whether the daemon's hit rate is to count these blocks: False where a lookup for the same use did.
        slices : bool
            Put together from other slices of the model, where the layout allows it, what is not stored in this one.
        progress : callable, optional
            Called with the blocks done so far and in all.
        """
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
        return self._client.run(operation, deadline_s, wait_s)

    def acquire(
        self,
        hashes: Sequence[bytes],
        *,
        wait_s: float = 0.0,
        max_ms: float | None = None,
        count: bool = True,
        deadline_s: float | None = None,
    ) -> Lease:
        """Return a lease on blocks, whose views read the daemon's memory in place. Use it in a `with` block.

        It holds all of the blocks or none: where one is missing, the others' outcome is LATER and every view None.
        The other parameters are those of `fetch`.
        """
        operation = self.holding(hashes, wait_s=wait_s, max_ms=max_ms, count=count)
        return self._client.hold(operation, deadline_s, wait_s)

    def prefetch(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Lookup:
        """Start loading blocks to memory; returns where they are now, not when they have arrived."""
        return self._client.run(self.prefetching(hashes), deadline_s)

    def wait(self, hashes: Sequence[bytes], wait_s: float, *, deadline_s: float | None = None) -> Lookup:
        """Return when all blocks can be fetched, one is aborted, or `wait_s` is over."""
        return self._client.run(self.awaiting(hashes, wait_s), deadline_s, wait_s)

    def abort(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> int:
        """Tell everybody who waits for these blocks that they will not come; returns how many were told."""
        return self._client.run(self.aborting(hashes), deadline_s)

    def drop(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Changed:
        """Make blocks invisible now, in every tier."""
        return self._client.run(self.dropping(hashes), deadline_s)

    def pin(self, hashes: Sequence[bytes], for_s: float, *, deadline_s: float | None = None) -> Changed:
        """Keep blocks from eviction and expiry for a time (role admin)."""
        return self._client.run(self.pinning(hashes, for_s), deadline_s)

    def unpin(self, hashes: Sequence[bytes], *, deadline_s: float | None = None) -> Changed:
        """End pins (role admin)."""
        return self._client.run(self.unpinning(hashes), deadline_s)

    def set_ttl(self, hashes: Sequence[bytes], ttl_s: float, *, deadline_s: float | None = None) -> Changed:
        """Set the seconds that blocks live from now on; 0: for ever (role admin)."""
        return self._client.run(self.setting_ttl(hashes, ttl_s), deadline_s)


def check_deadline(deadline_s: float) -> float:
    """Return `deadline_s` if it is one."""
    if not 0 <= deadline_s <= 1e9:
        raise UsageError(f"deadline_s must be between 0 and 1e9 seconds, not {deadline_s}")
    return deadline_s


def default_name() -> str:
    """Return how this process calls itself towards the daemon."""
    return f"kvclient/{__version__} {os.path.basename(sys.argv[0] or 'python')} pid {os.getpid()}"
