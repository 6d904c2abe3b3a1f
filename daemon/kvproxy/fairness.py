"""Who goes next: a bounded queue that is fair to callers, whatever each of them sends.

Theory of operation. A request that is let in occupies one of `running_max` places until it is done; the others wait.
Of the callers that wait, the one that was served least comes next, where a request weighs what it costs (its tokens).
Each caller has a virtual time: the next request of a caller starts at the later of that time and the queue's, and moves
it on by its cost (start-time fair queueing). So a caller that was idle saves up no credit, one that sends a thousand
requests delays another's single one by the requests in front, not by the thousand, and the longest prompt of one
tenant is paid for by that tenant.

What is refused: a caller whose share of the queue is full (429), anybody once the whole is full (503), who would not
come up before its deadline (503), all when the queue is closed (503). When the whole is full, a newcomer pushes out the
newest request of the caller that has most of them waiting (429), if that is more than the newcomer would have.

Invariants
1. running <= running_max, waiting <= waiting_max, waiting of one caller <= share_max.
2. While a place is free, nobody waits.
3. A place is given back once, however the request ends; a wait that is cancelled leaves nothing behind.
4. A waiter is woken by its place, its refusal or its deadline, never by polling. A place that was granted to a waiter
   which is gone by then goes to the next.
5. Callers that hold nothing are remembered only while others wait, and `_IDLE_CALLERS_MAX` of them at most: no number
   of names makes the queue grow.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvstore.errors import Backpressure, BadSetting

SHARE_FULL, QUEUE_FULL, WAITED, CLOSING = "share-full", "queue-full", "waited", "closing"
REASONS = (SHARE_FULL, QUEUE_FULL, WAITED, CLOSING)
RETRY_AFTER_S_MAX = 60
# A guess of how long a place is held, until the first are given back; and how fast the mean follows.
_HOLD_S_FIRST = 1.0
_HOLD_PART = 0.1
_HOLDS_MEASURED_MIN = 8  # before the mean is good enough to refuse somebody by it
_IDLE_CALLERS_MAX = 4096
_STALE_TURNS_MAX = 64
_CALLER_CHARS_MAX = 64


class Refused(Backpressure):
    """A request is not let in.

    Attributes
    ----------
    status : int
        429: the caller should send less; 503: nobody can be let in.
    retry_after_s : float
        When there should be room, in whole seconds.
    reason : str
        One of `REASONS`.
    """

    def __init__(self, status: int, retry_after_s: float, reason: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s
        self.reason = reason


@dataclass(eq=False, slots=True)
class _Waiter:
    key: str
    cost: float
    place: asyncio.Future[None]


@dataclass(eq=False, slots=True)
class _Caller:
    key: str
    served: float = 0.0  # virtual time at which its next request starts, unless the queue's is later
    turn: int = 0  # the number of its entry in the queue of turns that counts; 0: it has none
    running: int = 0
    waiters: deque[_Waiter] = field(default_factory=deque[_Waiter])


class FairQueue:
    """Places for requests, given out fairly. Belongs to one event loop.

    Parameters
    ----------
    now_s : Callable[[], float]
        A clock that never goes back, in step with that of the loop.
    running_max : int
        Places.
    waiting_max : int
        Requests that may wait for one.
    waiting_s_max : float
        How long one may wait.
    share_max : int, optional
        Requests of one caller that may wait; a quarter of `waiting_max` if it is not given.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        running_max: int,
        waiting_max: int,
        waiting_s_max: float,
        share_max: int | None = None,
    ) -> None:
        if running_max < 1 or waiting_max < 0 or waiting_s_max <= 0 or (share_max is not None and share_max < 0):
            raise BadSetting(
                f"{running_max=}, {waiting_max=}, {waiting_s_max=:g}, {share_max=} make no queue: give one place and "
                "more, a time above 0, and no number below 0"
            )
        self.running_max = running_max
        self.waiting_max = waiting_max
        self.share_max = max(1, waiting_max // 4) if share_max is None else share_max
        self.running = 0
        self.waiting = 0
        self.admitted_count = 0
        self.refused_counts: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._waiting_s_max = waiting_s_max
        self._now_s = now_s
        self._is_closed = False
        self._callers: dict[str, _Caller] = {}
        self._with_waiters: dict[str, _Caller] = {}
        self._turns: list[tuple[float, int, _Caller]] = []  # a heap of who waits; entries of former turns are skipped
        self._turn_count = 0
        self._idle: dict[str, None] = {}  # callers that hold nothing, the longest idle first
        self._virtual = 0.0
        self._hold_s = _HOLD_S_FIRST
        self._holds_measured = 0

    @asynccontextmanager
    async def admit(self, key: str, cost: float, deadline_s: float = math.inf) -> AsyncGenerator[None, None]:
        """Wait for a place, hold it inside the block, give it back behind it.

        Parameters
        ----------
        key : str
            Who asks; see `caller_of`.
        cost : float
            What the request weighs against others, in tokens; at least 1 is taken.
        deadline_s : float
            When the request itself has no use for a place any more, on the queue's clock.

        Raises
        ------
        Refused
            There is no room to wait, it went to somebody who has less of it, the wait was or would be too long, or the
            queue was closed.

        Cancelled while waiting, or inside the block, it leaves neither a waiter nor a place taken.
        """
        await self._enter(key, max(1.0, cost), min(deadline_s, self._now_s() + self._waiting_s_max))
        began_s = self._now_s()
        try:
            yield
        finally:
            self._note_hold(max(0.0, self._now_s() - began_s))
            self._leave(key)

    def close(self) -> None:
        """Let nobody in any more; whoever waits is refused now. Places that are held stay until they are given back."""
        self._is_closed = True
        for known in list(self._with_waiters.values()):
            for waiter in list(known.waiters):
                self._turn_away(waiter, 503, CLOSING, "the proxy is shutting down: send this to another one")

    def retry_after_s(self, key: str) -> float:
        """Return the whole seconds after which a request of this caller should find its place."""
        return float(min(RETRY_AFTER_S_MAX, max(1, math.ceil(self._expected_wait_s(key)))))

    def check_integrity(self) -> list[str]:
        """Return which invariants don't hold; an empty list is what it should be."""
        callers = self._callers
        holding_nothing = {name for name, known in callers.items() if not known.running and not known.waiters}
        checks = {
            "running is counted": self.running == sum(known.running for known in callers.values()),
            "waiting is counted": self.waiting == sum(len(known.waiters) for known in callers.values()),
            "running is bounded": 0 <= self.running <= self.running_max,
            "waiting is bounded": 0 <= self.waiting <= self.waiting_max,
            "a share is bounded": all(len(known.waiters) <= self.share_max for known in callers.values()),
            "nobody waits beside a free place": not self.waiting or self.running == self.running_max,
            "who waits is known": set(self._with_waiters) == {name for name, known in callers.items() if known.waiters},
            "who waits has a turn": self._with_waiters.keys()
            == {known.key for _, turn, known in self._turns if turn == known.turn},
            "turns are bounded": len(self._turns) <= 2 * max(1, self.waiting_max) + _STALE_TURNS_MAX + 1,
            "who holds nothing is known": set(self._idle) == holding_nothing,
            "who holds nothing is bounded": len(self._idle) <= (_IDLE_CALLERS_MAX if self.waiting else 0),
        }
        return [name for name, holds in checks.items() if not holds]

    # ---- in

    async def _enter(self, key: str, cost: float, deadline_s: float) -> None:
        if self._is_closed:
            raise self._refusal(key, 503, CLOSING, "the proxy is shutting down: send this to another one")
        if self.running < self.running_max:  # then nobody waits
            self._begin(self._known(key), cost)
            return
        self._refuse_the_hopeless(key, deadline_s)
        self._make_room(key)
        waiter = self._join(key, cost)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, deadline_s - self._now_s()), self._expire, waiter)
        try:
            await waiter.place
        except BaseException:
            if not waiter.place.cancelled() and waiter.place.exception() is None:
                self._leave(key)  # the place came together with the cancellation
            else:
                self._remove(waiter)
            raise
        finally:
            timer.cancel()

    def _join(self, key: str, cost: float) -> _Waiter:
        waiter = _Waiter(key, cost, asyncio.get_running_loop().create_future())
        known = self._known(key)
        known.waiters.append(waiter)
        self.waiting += 1
        if len(known.waiters) == 1:
            self._with_waiters[key] = known
            known.served = max(known.served, self._virtual)
            self._queue_up(known)
        return waiter

    def _refuse_the_hopeless(self, key: str, deadline_s: float) -> None:
        left_s = deadline_s - self._now_s()
        expected_s = self._expected_wait_s(key) if self._holds_measured >= _HOLDS_MEASURED_MIN else 0.0
        if left_s <= expected_s:
            text = f"the queue takes {expected_s:.1f} s, and this has {max(0.0, left_s):.1f} s to wait: try again later"
            raise self._refusal(key, 503, WAITED, text)

    def _make_room(self, key: str) -> None:
        own = self._waiting_of(key)
        if own >= self.share_max:
            text = f"{own} requests of this caller wait, and one caller may have {self.share_max}: send less at a time"
            raise self._refusal(key, 429, SHARE_FULL, text)
        if self.waiting < self.waiting_max:
            return
        most = max(self._with_waiters, key=self._waiting_of, default=key)
        if self._waiting_of(most) <= own + 1:
            text = f"{self.waiting} requests wait, and {self.waiting_max} may: try again later"
            raise self._refusal(key, 503, QUEUE_FULL, text)
        newest = self._with_waiters[most].waiters[-1]
        self._turn_away(newest, 429, SHARE_FULL, "no caller has more waiting in a full queue: send less at a time")

    def _expire(self, waiter: _Waiter) -> None:
        self._turn_away(waiter, 503, WAITED, "the request found no place in the time it had: try again later")

    def _turn_away(self, waiter: _Waiter, status: int, reason: str, text: str) -> None:
        self._remove(waiter)
        if not waiter.place.done():
            waiter.place.set_exception(self._refusal(waiter.key, status, reason, text))

    def _refusal(self, key: str, status: int, reason: str, text: str) -> Refused:
        self.refused_counts[reason] += 1
        return Refused(status, self.retry_after_s(key), reason, text)

    # ---- out

    def _leave(self, key: str) -> None:
        known = self._callers[key]
        known.running -= 1
        self.running -= 1
        while self.waiting and self.running < self.running_max:
            _, turn, next_one = heapq.heappop(self._turns)
            if turn != next_one.turn:
                continue  # it has left the queue since
            waiter = next_one.waiters[0]
            if not waiter.place.done():  # else it was cancelled, and has yet to notice
                self._begin(next_one, waiter.cost)
                waiter.place.set_result(None)
            self._remove(waiter)
            if next_one.waiters:
                self._queue_up(next_one)
        self._forget(known)

    def _queue_up(self, known: _Caller) -> None:
        if len(self._turns) > 2 * len(self._with_waiters) + _STALE_TURNS_MAX:
            self._turns = [entry for entry in self._turns if entry[1] == entry[2].turn]
            heapq.heapify(self._turns)
        self._turn_count += 1
        known.turn = self._turn_count
        heapq.heappush(self._turns, (known.served, known.turn, known))

    def _begin(self, known: _Caller, cost: float) -> None:
        self._virtual = max(self._virtual, known.served)
        known.served = self._virtual + cost
        known.running += 1
        self.running += 1
        self.admitted_count += 1

    def _remove(self, waiter: _Waiter) -> None:
        known = self._callers.get(waiter.key)
        if known is None or waiter not in known.waiters:
            return
        known.waiters.remove(waiter)
        self.waiting -= 1
        if not known.waiters:
            known.turn = 0
            del self._with_waiters[known.key]
            self._forget(known)

    def _known(self, key: str) -> _Caller:
        known = self._callers.get(key)
        if known is None:
            known = self._callers[key] = _Caller(key)
        self._idle.pop(key, None)
        return known

    def _forget(self, known: _Caller) -> None:
        """Note that a caller may hold nothing now, and forget those whose debts matter to nobody."""
        if not known.running and not known.waiters:
            self._idle[known.key] = None
        while self._idle and (not self.waiting or len(self._idle) > _IDLE_CALLERS_MAX):
            name = next(iter(self._idle))
            del self._idle[name], self._callers[name]

    def _waiting_of(self, key: str) -> int:
        known = self._with_waiters.get(key)
        return 0 if known is None else len(known.waiters)

    # ---- how long it takes

    def _expected_wait_s(self, key: str) -> float:
        """Return how long a new request of this caller should wait: at its fair share of what is given back."""
        own = self._waiting_of(key)
        callers = len(self._with_waiters) + (own == 0)
        ahead = min(self.waiting + 1, (own + 1) * callers)
        return ahead * self._hold_s / self.running_max

    def _note_hold(self, hold_s: float) -> None:
        self._holds_measured += 1
        self._hold_s += max(_HOLD_PART, 1 / self._holds_measured) * (hold_s - self._hold_s)


def caller_of(headers: Mapping[str, str], header: str | None, peer: str) -> str:
    """Return who sent a request, as a name of bounded length.

    That is the value of `header` where the operator names one (a gateway must set it: a client could write anything),
    else a digest of the API key, which is never kept itself, else the peer's address.
    """
    if header is not None and (named := headers.get(header, "").strip()):
        return f"name:{_short(named)}"
    if key := headers.get("Authorization", "").strip():
        return f"key:{_short(_digest(key)[:16])}"
    return f"peer:{_short(peer)}"


def _short(name: str) -> str:
    if len(name) <= _CALLER_CHARS_MAX:
        return name
    return _digest(name)[:_CALLER_CHARS_MAX]


def _digest(text: str) -> str:
    # A header may hold any bytes; what is no UTF-8 stands in it as aiohttp has read it.
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
