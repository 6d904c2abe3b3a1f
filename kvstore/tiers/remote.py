"""The seam between the store and what keeps blocks elsewhere: the values and the protocol of the remote tier.

Theory of operation. A remote store belongs to several daemons at once, loses what it likes, and may be slow or away.
So it has no rows in the catalog: what it holds is asked for when it is needed, and the answer is good for one use. A
block is named by its scope (a tenant's namespace) and its hash; the store keeps an epoch for each scope, which is part
of every name it gives, so `drop` makes a scope's blocks invisible at once and they are reclaimed later.

Implementations hold sockets, so they live in the daemon's package; tests/remote has one contract suite for all.

Invariants of every implementation
1. Each call returns by `within_s`, whatever the store does, and afterwards never touches the caller's memory again.
   Cancellation leaves the same promise.
2. A block is a HIT only if its record was compared whole and its checksum was right; a destination of any other outcome
   holds what it held before.
3. Only what the caller did wrong raises (UsageError), and `drop` and `delete`, whose callers must know: all else is an
   outcome, so a store that is away makes misses.
4. A life that was given is never made longer: by the store, by another node, or by a clock that was set back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvstore.checksum import NOT_COMPUTED
from kvstore.tiers.disk_records import NEVER_S
from kvstore.wire import Outcome

RemoteState = Literal["starting", "ready", "degraded"]


@dataclass(frozen=True, slots=True)
class RemoteScope:
    """What a drop makes invisible at once: a tenant's namespace, by its digest."""

    tenant: str
    namespace: bytes


@dataclass(frozen=True, slots=True)
class RemoteWrite:
    """A block to keep. `life_s`: how long from now; NEVER_S: until it is swept. `checksum` is of the payload."""

    hash: bytes
    payload: memoryview = field(repr=False)
    generation: int = 0
    checksum: int = NOT_COMPUTED
    life_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """A block to read; its length is that of `destination`."""

    hash: bytes
    destination: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class RemoteFound:
    """What became of a read: HIT with the payload's checksum and the life that is left, or why not."""

    outcome: Outcome
    checksum: int = NOT_COMPUTED
    life_s: float = NEVER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUsage:
    """Figures of a remote store as this daemon knows them.

    `capacity_bytes` bounds `used_bytes`, which counts what is being written, too. `blocks` are those that can be found.
    `known_bytes` is what all daemons together keep there, as far as it is known.
    """

    place: str
    capacity_bytes: int
    used_bytes: int
    known_bytes: int
    blocks: int
    objects: int
    state: RemoteState
    state_text: str
    errors: int = 0
    timeouts: int = 0
    throttled: int = 0
    checksum_failures: int = 0
    refused_full: int = 0  # blocks that found no room
    swept_blocks: int = 0
    swept_expired_blocks: int = 0


class RemoteStore(Protocol):
    """See the module's docstring. `run` must be running for anything to be found or swept."""

    @property
    def place(self) -> str:
        """Where it is, without credentials."""
        ...

    @property
    def batch_bytes(self) -> int:
        """How much is best written at once."""
        ...

    async def run(self) -> None:
        """Learn what is there, renew that, and sweep, until cancelled."""
        ...

    async def find(self, scope: RemoteScope, hashes: Sequence[bytes], within_s: float) -> list[bool]:
        """Return for each block whether it is there, as far as can be told within the time; False if it can't."""
        ...

    async def read(self, scope: RemoteScope, reads: Sequence[RemoteRead], within_s: float) -> list[RemoteFound]:
        """Read blocks; what could not be read in time is DEADLINE or UNAVAILABLE."""
        ...

    async def write(self, scope: RemoteScope, writes: Sequence[RemoteWrite], within_s: float) -> list[Outcome]:
        """Keep blocks: DURABLE, PRESENT, NO_ROOM, DEADLINE or UNAVAILABLE for each.

        They belong to the epoch of the moment of the call: a `drop` that is called later makes them invisible,
        whichever of the two is faster. One that timed out may be there nevertheless; it counts as used until that is
        known.
        """
        ...

    def forget(self, scope: RemoteScope, hashes: Sequence[bytes] | None = None) -> None:
        """Find nothing of these blocks (None: of the scope) here any more, until `delete` (`drop`) has returned."""
        ...

    async def delete(self, scope: RemoteScope, hashes: Sequence[bytes], within_s: float) -> None:
        """Make blocks invisible to all who use the store, and others with them where they lie in one object.

        Raises TierUnavailable if the store could not be told.
        """
        ...

    async def drop(self, scope: RemoteScope, within_s: float) -> None:
        """Make everything invisible that was written in a scope, or was being written, when this was called.

        Raises TierUnavailable as `delete` does; here it is invisible even then.
        """
        ...

    async def drop_all(self, within_s: float) -> None:
        """`drop` every scope that anything is stored of, whoever stored it; raises TierUnavailable as `delete` does."""
        ...

    def usage(self) -> RemoteUsage: ...

    async def close(self) -> None:
        """Let go of connections; nothing may be running any more."""
        ...
