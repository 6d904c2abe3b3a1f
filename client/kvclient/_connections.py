"""The connections of one sync client: opened when needed, one thread at a time each, the last used first.

Invariants
1. At most `limit` connections are open; a caller waits for one no longer than its deadline.
2. A connection is in exactly one place: idle here, or with the one caller who took it. What other threads have for it
   (released leases) goes through `deferred`.
3. Only a session none of whose views are in use says Bye.
4. After a fork the child closes its copies of the sockets and sends nothing on them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvclient._breaker import Admission, Breaker
from kvclient._connection import Connection
from kvclient._greeting import RETRIES_MAX, Greeting, greet_again
from kvclient._pool import Mappings
from kvclient._session import Session
from kvclient.stats import ClientStats
from kvstore import wire
from kvstore.errors import Closing, DeadlineExceeded, KVStoreError, PeerUnreachable, UsageError

_PROBE_S_MAX = 0.25


class Connections:
    """A bounded stack of connections to one daemon."""

    def __init__(
        self, path: Path, name: str, limit: int, stats: ClientStats, *, pretouch: bool, retries: int = 0
    ) -> None:
        if limit < 1:
            raise UsageError(f"connections_max must be at least 1, not {limit}")
        self._retries = check_retries(retries)
        self._path = path
        self._name = name
        self._limit = limit
        self._stats = stats
        self._mappings = Mappings(pretouch=pretouch)
        self._closed = False
        self.breaker = Breaker(time.monotonic)
        self._lock = threading.Lock()
        self._idle_or_room = threading.Condition(self._lock)
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._opening = 0
        # Of a closed client: they end when their last lease does.
        self._lingering: set[Connection] = set()
        # Whether late replies may have come on idle connections.
        self._undrained = False

    def take(self, deadline_at: float) -> Connection:
        """Return a connection for the caller alone, who gives it back by `put`.

        Raises
        ------
        PeerUnreachable
            No daemon can be reached, or none could a moment ago.
        DeadlineExceeded
            All connections are in use until the deadline, or the daemon does not answer.
        """
        admission = self.breaker.admit()
        if admission is Admission.REFUSED:
            raise PeerUnreachable(f"{self.breaker.reason} (asked again in {self.breaker.retry_in_s:.1f} s)")
        if self._undrained:
            self._sweep()
        # What was tried in vain is tried once at a time from then on, so that misses cost nothing.
        retries = self._retries if admission is Admission.PASS else 0
        connection = self._idle_one(deadline_at) or self._new_one(deadline_at, retries)
        if admission is Admission.PROBE:
            self._probe(connection, deadline_at)
        return connection

    def put(self, connection: Connection) -> None:
        """Take back a connection; one that is broken or worn out is closed."""
        session = connection.session
        while True:
            while connection.deferred:
                session.outbox.append(session.dismiss(connection.deferred.popleft()))
            connection.flush()
            with self._lock:
                if connection.deferred:
                    continue
                good = connection in self._open and not connection.is_broken and not session.is_worn_out
                self._idle_or_room.notify()
                if good and not self._closed:
                    self._idle.append(connection)
                    self._undrained |= session.has_abandoned
                    return
                self._open.discard(connection)
                if self._closed and connection.lease_count and not connection.is_broken:
                    self._lingering.add(connection)
                    return
            break
        connection.close(bye=connection.lease_count == 0)

    def hold(self, connection: Connection) -> None:
        """Note that a lease of this connection is in a caller's hands."""
        with self._lock:
            connection.lease_count += 1

    def let_go(self, connection: Connection, lease: int) -> None:
        """Release a lease, from whatever thread."""
        with self._lock:
            connection.lease_count -= 1
            connection.deferred.append(wire.Release(0, lease))
            if connection in self._idle:
                self._idle.remove(connection)
            elif connection in self._lingering:
                self._lingering.discard(connection)
            else:
                return  # whoever uses it sends what is deferred; or its session is over, and with it the lease
        self.put(connection)

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._idle_or_room.notify_all()
        for connection in idle:
            self.put(connection)
        self._mappings.close()

    def after_fork(self) -> None:
        """Begin anew in a forked child."""
        for connection in (*self._open, *self._lingering):
            connection.is_broken = True
            connection.close(bye=False)
        self._mappings.forget()
        self.breaker = Breaker(time.monotonic)
        self._lock = threading.Lock()
        self._idle_or_room = threading.Condition(self._lock)
        self._idle = []
        self._open = set()
        self._opening = 0
        self._lingering = set()
        self._undrained = False

    def _idle_one(self, deadline_at: float) -> Connection | None:
        """Return an idle connection that is still good; None if there is room for a new one, which the caller opens."""
        while True:
            with self._lock:
                while True:
                    if self._closed:
                        raise Closing("this client is closed: make a new one")
                    if self._idle:
                        connection = self._idle.pop()
                        break
                    if len(self._open) + self._opening < self._limit:
                        self._opening += 1
                        return None
                    if not self._idle_or_room.wait(max(0.0, deadline_at - time.monotonic())):
                        raise DeadlineExceeded(
                            f"all {self._limit} connections were in use until the deadline: raise connections_max"
                        )
            if connection.drain():
                return connection
            self._discard(connection)

    def _new_one(self, deadline_at: float, retries: int) -> Connection:
        """Open a connection in the room that `_idle_one` set aside."""
        opened: list[Connection] = []
        try:
            opened.append(self._greeted(greet_again(self._path, self._name, deadline_at, retries)))
        except KVStoreError as exc:
            self.breaker.failed(str(exc))
            raise
        finally:
            with self._lock:
                self._opening = max(0, self._opening - 1)
                self._open.update(opened)
                self._idle_or_room.notify()
        self._stats.add("connections_opened")
        self.breaker.answered()
        return opened[0]

    def _greeted(self, greeting: Greeting) -> Connection:
        try:
            pool, arena = self._mappings.adopt(greeting.welcome, greeting.fds)
            return Connection(greeting.sock, Session(greeting.welcome, pool, arena, self._undone))
        except BaseException:
            greeting.sock.close()
            raise

    def _undone(self) -> None:
        self._stats.add("late_replies_undone")

    def _probe(self, connection: Connection, deadline_at: float) -> None:
        """Ask for a sign of life; without one the connection goes back and the breaker stays open."""
        session = connection.session
        ping = wire.Ping(session.next_id())
        until = min(deadline_at, time.monotonic() + _PROBE_S_MAX)
        try:
            session.sent([ping])
            connection.send([ping], until)
            while session.take(ping.id) is None:
                connection.await_reply(until, patient=False)
        except KVStoreError as exc:
            session.abandon(ping.id)
            self.breaker.failed(str(exc))
            self.put(connection)
            raise
        self.breaker.answered()

    def _sweep(self) -> None:
        """Take in late replies on idle connections, so that what they grant is given back soon."""
        with self._lock:
            late = [connection for connection in self._idle if connection.session.has_abandoned]
            self._idle = [connection for connection in self._idle if connection not in late]
            self._undrained = False
        for connection in late:
            if connection.drain():
                self.put(connection)
            else:
                self._discard(connection)

    def _discard(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
            self._idle_or_room.notify()
        connection.close(bye=False)


def check_retries(retries: int) -> int:
    """Return `retries` if it is a number of them."""
    if not 0 <= retries <= RETRIES_MAX:
        raise UsageError(f"connect_retries must be between 0 and {RETRIES_MAX}, not {retries}")
    return retries
