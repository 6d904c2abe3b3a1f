"""A remote store as the tier sees it: what a kind of store does, inside deadlines and with its failures kept in.

Theory of operation. A kind of store (`Backend`) works a call off piece by piece and notes each piece's outcome as it
comes; it raises what goes wrong. Here a deadline and the store's health stand around each call, and what was not noted
by the end is DEADLINE or UNAVAILABLE: a store that fails in the middle of a batch still gives what it had given.

Invariants: those of kvstore/tiers/remote.py, and: blocks whose deletion the store could not be told are not found here,
nor written again, until it could.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from kvstore.clock import Clock
from kvstore.errors import DeadlineExceeded, KVStoreError, TierUnavailable
from kvstore.tiers.remote import RemoteFound, RemoteRead, RemoteScope, RemoteUsage, RemoteWrite
from kvstore.wire import Outcome
from kvstored.remote.health import Health

log = logging.getLogger("kvstored.remote")
T = TypeVar("T")
Note = Callable[[int, T], None]
_DOOMED_MAX = 65_536
RETRY_S = 1.0
RECOVER_S = 10.0


class Backend(Protocol):
    """One kind of store. Calls raise KVStoreErrors, and when they end nothing of the caller's memory is in use."""

    batch_bytes: int
    asks_to_find: bool  # whether `find` asks the store, or knows

    @property
    def answers(self) -> int:
        """How often the store has answered."""
        ...

    async def run(self, health: Health) -> None: ...

    async def recover(self) -> bool:
        """Ask the store something small, and tell it of drops that it was not told; return whether it knows all."""
        ...

    async def find(self, scope: RemoteScope, hashes: Sequence[bytes]) -> list[bool]: ...

    async def read(self, scope: RemoteScope, reads: Sequence[RemoteRead], note: Note[RemoteFound]) -> None: ...

    async def write(self, scope: RemoteScope, writes: Sequence[RemoteWrite], note: Note[Outcome]) -> None: ...

    async def delete(self, scope: RemoteScope, hashes: Sequence[bytes]) -> None: ...

    def forget(self, scope: RemoteScope) -> None:
        """Make a scope invisible here, at once."""

    async def drop(self, scope: RemoteScope) -> None: ...

    async def drop_all(self) -> None: ...

    def usage(self, place: str) -> RemoteUsage: ...

    async def close(self) -> None: ...


class Guarded:
    """A RemoteStore; see the module's docstring."""

    def __init__(self, backend: Backend, place: str, clock: Clock) -> None:
        self.place = place
        self.health = Health(place, clock, lambda: backend.answers)
        self.backend = backend
        self._doomed: dict[RemoteScope, set[bytes]] = {}  # deleted, and the store does not know

    @property
    def batch_bytes(self) -> int:
        return self.backend.batch_bytes

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.backend.run(self.health), name="remote-backend")
            tasks.create_task(self._recover_forever(), name="remote-recovery")

    async def _recover_forever(self) -> None:
        """After a failure, find out when the store is back, even if nobody else asks for anything."""
        while True:
            await self.health.trouble.wait()
            await asyncio.sleep(RETRY_S)
            knows_all, _ = await self._call(RECOVER_S, self.backend.recover)
            if knows_all and not self.health.is_degraded:
                self.health.trouble.clear()

    async def find(self, scope: RemoteScope, hashes: Sequence[bytes], within_s: float) -> list[bool]:
        asked = self._not_doomed(scope, hashes)
        found: list[bool] | None = None
        if self.health.is_degraded and not self.backend.asks_to_find:
            asked = ()  # what is known to be there could not be read
        if asked:
            found, _ = await self._call(within_s, lambda: self.backend.find(scope, [hashes[at] for at in asked]))
        there = {at for at, is_there in zip(asked, found or (), strict=bool(found)) if is_there}
        return [at in there for at in range(len(hashes))]

    async def read(self, scope: RemoteScope, reads: Sequence[RemoteRead], within_s: float) -> list[RemoteFound]:
        found: dict[int, RemoteFound] = {}
        asked = self._not_doomed(scope, [read.hash for read in reads])
        wanted = [reads[at] for at in asked]

        def note(at: int, result: RemoteFound) -> None:
            found[asked[at]] = result

        _, why = await self._call(within_s, lambda: self.backend.read(scope, wanted, note))
        missed = dict.fromkeys(asked, RemoteFound(why))
        return [found.get(at) or missed.get(at) or RemoteFound(Outcome.ABSENT) for at in range(len(reads))]

    async def write(self, scope: RemoteScope, writes: Sequence[RemoteWrite], within_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        asked = self._not_doomed(scope, [write.hash for write in writes])
        wanted = [writes[at] for at in asked]

        def note(at: int, outcome: Outcome) -> None:
            outcomes[asked[at]] = outcome

        _, why = await self._call(within_s, lambda: self.backend.write(scope, wanted, note))
        why = Outcome.UNAVAILABLE if why is Outcome.ABSENT else why
        return [outcomes.get(at, why) for at in range(len(writes))]

    def forget(self, scope: RemoteScope, hashes: Sequence[bytes] | None = None) -> None:
        if hashes is None:
            self.backend.forget(scope)
            self.health.trouble.set()  # until it is told
            return
        self._doomed.setdefault(scope, set()).update(hashes)
        if sum(map(len, self._doomed.values())) > _DOOMED_MAX:
            self.backend.forget(scope)  # more than can be remembered one by one: none of the scope's is found

    async def delete(self, scope: RemoteScope, hashes: Sequence[bytes], within_s: float) -> None:
        self.forget(scope, hashes)
        await self._tell(within_s, lambda: self.backend.delete(scope, hashes))
        self._doomed.get(scope, set()).difference_update(hashes)

    async def drop(self, scope: RemoteScope, within_s: float) -> None:
        self.forget(scope)
        await self._tell(within_s, lambda: self.backend.drop(scope))
        self._doomed.pop(scope, None)

    async def drop_all(self, within_s: float) -> None:
        await self._tell(within_s, self.backend.drop_all)

    def usage(self) -> RemoteUsage:
        usage, health = self.backend.usage(self.place), self.health
        counted = replace(usage, errors=health.errors, timeouts=health.timeouts, throttled=health.throttled)
        return replace(counted, state="degraded", state_text=health.why) if health.is_degraded else counted

    async def close(self) -> None:
        await self.backend.close()

    def _not_doomed(self, scope: RemoteScope, hashes: Sequence[bytes]) -> Sequence[int]:
        doomed = self._doomed.get(scope)
        return [at for at, block_hash in enumerate(hashes) if not doomed or block_hash not in doomed]

    async def _call(self, within_s: float, work: Callable[[], Awaitable[T]]) -> tuple[T | None, Outcome]:
        """Return what the work gives, or None and what its pieces became that were not noted."""
        try:
            with self.health.call(within_s):
                async with asyncio.timeout(within_s):
                    return await work(), Outcome.ABSENT
        except (TimeoutError, DeadlineExceeded):
            return None, Outcome.DEADLINE
        except KVStoreError:
            return None, Outcome.UNAVAILABLE
        except Exception:  # a bug met by one call must not end the daemon
            log.exception("a call to the remote store met a bug")
            return None, Outcome.UNAVAILABLE

    async def _tell(self, within_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do work whose failure the caller must know; a store that is thought to be away is asked all the same."""
        try:
            async with asyncio.timeout(within_s):
                await work()
        except (TimeoutError, KVStoreError) as exc:
            why = f"no answer within {within_s:g} s" if isinstance(exc, TimeoutError) else str(exc)
            raise TierUnavailable(
                f"what was dropped is invisible here, but {self.place} could not be told ({why}): other daemons, or "
                "this one after a restart, could find it; look at the tier's state (kvctl tiers), then drop it again"
            ) from exc
