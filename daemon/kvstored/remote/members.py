"""Who is in the pool: one view of it at a time, from whatever source tells of members.

Theory of operation. A source (`remote/etcd_members.py`, `remote/static_members.py`) reports that members are there or
have gone; everybody else reads `Members.view`, an immutable value, and waits for the next. Bad news is taken at once,
good news with care: a member that leaves costs misses alone, and one that comes and goes all the time would move its
share of the pool each time. So who has come too often in a minute is admitted only after it has stayed for a while,
twice as long each time.

This daemon is in its own view always, whatever the source says: what is local goes on when everything else is away.

Invariants
1. A view never changes. Its number grows by one with each.
2. The placement of a view knows exactly its live members: healthy ones that speak this protocol.
3. There are at most MEMBERS_MAX members; further ones are left out and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from kvstore.placement import Placement
from kvstore.progress import Progress
from kvstored.logs import fields

log = logging.getLogger("kvstored.members")

MEMBERS_MAX = 4096
PROTOCOL = (1, 1)  # the oldest and the newest version of the peers' protocol that this daemon speaks
FLAP_WINDOW_S = 60.0
FLAP_JOINS_FREE = 3  # arrivals in the window that are taken at once
FLAP_HOLD_S = 5.0
FLAP_HOLD_S_MAX = 300.0


class Health(enum.Enum):
    """Whether a member takes part."""

    LIVE = "live"
    LEAVING = "leaving"  # it has said that it goes: it gives, and takes nothing
    UNSTEADY = "unsteady"  # it comes and goes: held back for a while
    FOREIGN = "foreign"  # it speaks no version of the protocol that this daemon does


class Address(NamedTuple):
    """Where a member listens for others."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Member:
    """A daemon as it describes itself, and what this one thinks of its health."""

    name: str
    address: Address
    boot_id: bytes
    capacity_bytes: int
    protocol: tuple[int, int] = PROTOCOL
    is_leaving: bool = False
    health: Health = Health.LIVE


@dataclass(frozen=True, slots=True)
class View:
    """All members at one time. `is_current`: whether the source answers; if not, this is what was known last."""

    number: int
    members: Mapping[str, Member]
    placement: Placement
    is_current: bool

    @property
    def boots(self) -> dict[str, bytes]:
        """The boot ids of the live members."""
        return {name: self.members[name].boot_id for name in self.placement.weights}


@dataclass(slots=True)
class _Steadiness:
    """When a member came, and until when it is held back for it."""

    arrivals_s: list[float] = field(default_factory=list[float])
    held: int = 0
    until_s: float = 0.0

    def arrive(self, now_s: float) -> None:
        """Note an arrival, and hold the member back if there were too many lately."""
        self.arrivals_s = [at_s for at_s in self.arrivals_s if now_s - at_s < FLAP_WINDOW_S] + [now_s]
        if len(self.arrivals_s) > FLAP_JOINS_FREE:
            del self.arrivals_s[0]
            self.until_s = now_s + min(FLAP_HOLD_S * 2**self.held, FLAP_HOLD_S_MAX)
            self.held = min(self.held + 1, 16)
        elif len(self.arrivals_s) == 1 and now_s >= self.until_s + FLAP_WINDOW_S:
            self.held = 0


class Members:
    """The present view, and how sources change it. One event loop owns it.

    Parameters
    ----------
    own : Member
        This daemon.
    now_s : callable
        The clock, monotonic.
    """

    def __init__(self, own: Member, now_s: Callable[[], float]) -> None:
        self.own = own
        self.now_s = now_s
        self._known: dict[str, Member] = {own.name: own}
        self._steadiness: dict[str, _Steadiness] = {}
        self._leaves_at_s: dict[str, float] = {}
        self._is_current = False
        self._changed = Progress()
        self._due_moved = Progress()  # what `next_due_s` says may be another time
        self.view = self._made(0)

    async def changed(self, since: int) -> View:
        """Return the view, once its number is over `since`. Cancelling leaves nothing behind."""
        while self.view.number <= since:
            await self._changed.wait()
        return self.view

    def join(self, member: Member) -> None:
        """Take in what is told of a member that is there: new, changed, or as before."""
        if member.name == self.own.name:
            return
        self._leaves_at_s.pop(member.name, None)
        before = self._known.get(member.name)
        if before is None and len(self._known) >= MEMBERS_MAX:
            log.warning("a member is left out", extra=fields(member=member.name, members_max=MEMBERS_MAX))
            return
        if before is None or before.boot_id != member.boot_id:
            steadiness = self._steadiness.setdefault(member.name, _Steadiness())
            steadiness.arrive(self.now_s())
            self._due_moved.signal()
            while len(self._steadiness) > 2 * MEMBERS_MAX:
                del self._steadiness[next(iter(self._steadiness))]
            log.info("a member has come", extra=fields(member=member.name, address=member.address))
        self._known[member.name] = member
        self._renew()

    def remove(self, name: str, not_before_s: float = 0.0) -> None:
        """Take in that a member has gone; with a time, only if it has not come back by then."""
        if name not in self._known or name == self.own.name:
            return
        if not_before_s > self.now_s():
            self._leaves_at_s.setdefault(name, not_before_s)
            self._due_moved.signal()
            return
        del self._known[name]
        self._leaves_at_s.pop(name, None)
        log.info("a member has gone", extra=fields(member=name))
        self._renew()

    def update_own(self, own: Member) -> None:
        """Take in that this daemon describes itself differently."""
        assert own.name == self.own.name
        self.own = self._known[own.name] = own
        self._renew()

    def source_answers(self, answers: bool, why: str = "") -> None:
        """Take in whether the source of members can be reached."""
        if answers != self._is_current:
            self._is_current = answers
            if answers:
                log.info("membership is current", extra=fields(members=len(self._known)))
            else:
                log.warning("membership is not current: the last view is kept", extra=fields(why=why))
            self._renew()

    def next_due_s(self) -> float | None:
        """Return when `settle` has something to do."""
        holds = (self._steadiness[name].until_s for name in self._known if name in self._steadiness)
        now_s = self.now_s()
        due = [*self._leaves_at_s.values(), *(until_s for until_s in holds if until_s > now_s)]
        return min(due, default=None)

    def settle(self) -> None:
        """Do what has become due: let members go that did not come back, admit those that have stayed."""
        now_s = self.now_s()
        for name in [name for name, at_s in self._leaves_at_s.items() if at_s <= now_s]:
            self.remove(name)
        self._renew()

    async def keep_settled(self) -> None:
        """Call `settle` whenever it is due, until cancelled."""
        while True:
            due_s = self.next_due_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due_s is None else max(0.0, due_s - self.now_s())):
                    await self._due_moved.wait()
                    continue
            self.settle()

    def _renew(self) -> None:
        made = self._made(self.view.number + 1)
        if dict(made.members) != dict(self.view.members) or made.is_current != self.view.is_current:
            self.view = made
            self._changed.signal()

    def _made(self, number: int) -> View:
        members = {name: replace(self._known[name], health=self._health(self._known[name])) for name in self._known}
        live = {name: member.capacity_bytes for name, member in members.items() if member.health is Health.LIVE}
        if number and live == {name: self.view.members[name].capacity_bytes for name in self.view.placement.weights}:
            placement = self.view.placement  # with what it has worked out
        else:
            placement = Placement(live)
        return View(number, MappingProxyType(members), placement, self._is_current)

    def _health(self, member: Member) -> Health:
        if member.is_leaving:
            return Health.LEAVING
        if member.protocol[0] > PROTOCOL[1] or member.protocol[1] < PROTOCOL[0]:
            return Health.FOREIGN
        steadiness = self._steadiness.get(member.name)
        if member.name != self.own.name and steadiness is not None and steadiness.until_s > self.now_s():
            return Health.UNSTEADY
        return Health.LIVE
