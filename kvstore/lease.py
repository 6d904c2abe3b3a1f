"""Who holds what, until when: sessions, their leases, and how much of the cpu tier leases may pin.

A session is a connection. A copying lease has an end, before which its slots are not reused whatever becomes of the
session: a reader checks its own clock after the copy. A zero-copy lease ends only by release or by the end of the
client's process; overdue ones are reported and keep their slots.

Invariants
1. A lease belongs to one session; another session's token is refused as if it did not exist. Releasing twice is
   harmless.
2. Leases pin at most `pinned_bytes_max` in all; a block pinned by several leases counts once. Zero-copy leases, which
   may last, leave `kept_for_copies_bytes` of that to copying ones, which end: reads never stop.
3. A session holds at most LEASES_MAX leases.
4. When a session is over, its leases end: at once if its process is gone or it said goodbye, else at their end.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import TooLarge, TooManyLeases

LEASES_MAX = 16384


class Holds(Protocol):
    """What leases ask of the catalog."""

    def lease(self, rows: Iterable[int]) -> int: ...

    def unlease(self, rows: Iterable[int]) -> int: ...

    def leases_on(self, row: int) -> int: ...

    def slot_bytes(self, row: int) -> int: ...


class WriteWindow(Protocol):
    """Strict mode: memory of its own that a client writes to, and the daemon copies from at seal."""

    @property
    def address(self) -> int: ...

    def allocate_many(self, slot_bytes: int, count: int) -> list[int]: ...

    def free(self, offset: int) -> None: ...


@dataclass(eq=False, slots=True)
class Session:
    """A client's connection, as the store knows it."""

    token: int
    tenant: str
    admin: bool
    client: str = ""
    leases: set[int] = field(default_factory=set[int])
    tickets: set[int] = field(default_factory=set[int])
    process: int = 0  # its sessions share a limit on unsealed memory; 0: not known, a session stands for itself
    arena: WriteWindow | None = None  # strict mode: where this client writes
    over: bool = False

    @property
    def holder(self) -> int:
        """Return who is charged for memory that it may be writing."""
        return self.process or -self.token


@dataclass(eq=False, slots=True)
class Lease:
    """A right to read blocks in the cpu tier."""

    token: int
    session: Session
    rows: Sequence[int]
    ends_s: float
    copying: bool


class Leases:
    """All leases of a store. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, catalog: Holds, pinned_bytes_max: int, kept_for_copies_bytes: int = 0) -> None:
        self.pinned_bytes = 0
        self.pinned_bytes_max = pinned_bytes_max
        self.kept_for_copies_bytes = kept_for_copies_bytes
        self._catalog = catalog
        self._leases: dict[int, Lease] = {}
        self._ends: list[tuple[float, int]] = []
        self._next_token = 1
        self._released = asyncio.Event()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, session: Session, rows: Sequence[int], ends_s: float, *, copying: bool) -> Lease:
        """Return a lease on blocks of one namespace, at least one, that are READY in the cpu tier.

        Raises
        ------
        TooLarge
            It is larger than what leases may ever pin.
        TooManyLeases
            Others pin too much now, or the session has too many leases.
        """
        if len(session.leases) >= LEASES_MAX:
            raise TooManyLeases(f"this connection holds {LEASES_MAX} leases, which is the limit: release some first")
        slot_bytes = self._catalog.slot_bytes(rows[0])
        limit = self._limit_bytes(copying=copying)
        if self.pinned_bytes + len(rows) * slot_bytes > limit:
            self.check_ever(rows, copying=copying)
            fresh = sum(not self._catalog.leases_on(row) for row in set(rows))
            if self.pinned_bytes + fresh * slot_bytes > limit:
                raise TooManyLeases(
                    f"leases pin {self.pinned_bytes} bytes and may pin {limit}: release some, then try again"
                )
        self.pinned_bytes += self._catalog.lease(rows) * slot_bytes
        lease = Lease(self._next_token, session, rows, ends_s, copying)
        self._next_token += 1
        self._leases[lease.token] = lease
        session.leases.add(lease.token)
        heapq.heappush(self._ends, (ends_s, lease.token))
        return lease

    def check_ever(self, rows: Sequence[int], *, copying: bool) -> None:
        """Raise TooLarge if a lease on these rows could not be granted even with no other lease around."""
        wanted = len(set(rows)) * self._catalog.slot_bytes(rows[0]) if rows else 0
        limit = self._limit_bytes(copying=copying)
        if wanted > limit:
            raise TooLarge(
                f"a lease on {wanted} bytes can never be granted: leases may pin {limit} bytes of the cpu tier; "
                "acquire fewer blocks at once, fetch copies of them, or raise --cpu-size"
            )

    def _limit_bytes(self, *, copying: bool) -> int:
        return self.pinned_bytes_max - (0 if copying else self.kept_for_copies_bytes)

    def room_bytes(self) -> int:
        """Return how many more bytes copying leases may pin now."""
        return self.pinned_bytes_max - self.pinned_bytes

    def release(self, session: Session, token: int) -> Sequence[int]:
        """End a lease of this session and return its rows; nothing if there is no such lease."""
        lease = self._leases.get(token)
        if lease is None or lease.session is not session:
            return ()
        self._end(lease)
        return lease.rows

    def end_session(self, session: Session, *, gone: bool) -> None:
        """End what a session holds: everything if its process is `gone`, else what no copy of it can be reading."""
        for token in list(session.leases):
            if gone:
                self._end(self._leases[token])

    async def released(self, timeout_s: float) -> None:
        """Return when a lease has ended, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._released.wait()
        except TimeoutError:
            pass

    def expire(self, now_s: float) -> None:
        """End the copying leases whose time is over."""
        while self._ends and self._ends[0][0] <= now_s:
            _, token = heapq.heappop(self._ends)
            lease = self._leases.get(token)
            if lease is not None and lease.copying:
                self._end(lease)

    def overdue(self, now_s: float) -> list[Lease]:
        """Return the zero-copy leases that should have ended."""
        return [lease for lease in self._leases.values() if not lease.copying and lease.ends_s <= now_s]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        leases: Counter[int] = Counter()
        for lease in self._leases.values():
            assert lease.token in lease.session.leases
            leases.update(lease.rows)
        assert all(self._catalog.leases_on(row) == count for row, count in leases.items())
        assert self.pinned_bytes == sum(map(self._catalog.slot_bytes, leases))

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.token]
        lease.session.leases.discard(lease.token)
        slot_bytes = self._catalog.slot_bytes(lease.rows[0])
        self.pinned_bytes -= self._catalog.unlease(lease.rows) * slot_bytes
        self._released.set()
        self._released = asyncio.Event()
