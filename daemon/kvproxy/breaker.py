"""Whether a worker is tried at all: one state table, fed with what became of each trial.

Theory of operation. Whoever uses a worker begins a trial and settles it once. A worker that fails too often is left
alone (OPEN) for a rest that doubles each time. When the rest is over (HALF_OPEN) trials are let through as probes, one
at a time; the first outcome of one closes the circuit or opens it again. A probe is a request like any other and may
take minutes to its first byte, so the next one does not wait for its end, but for `probe_s` at most.

    state      event     becomes
    CLOSED     TRIP      OPEN        too many failures, or its health check says that it is gone
    OPEN       RESTED    HALF_OPEN   the rest is over
    HALF_OPEN  RECOVER   CLOSED      a probe was answered
    HALF_OPEN  RELAPSE   OPEN        a probe failed; the next rest is longer

Invariants
1. An event that a state doesn't list raises IllegalTransition and changes nothing.
2. At most one probe begins in `probe_s`, unless the one before has ended: a worker that is slow, or a probe that got
   lost, never keeps a worker out.
3. A neutral outcome (4xx, a client that left, our own deadline) neither opens nor closes a circuit; a probe that ends
   so makes room for the next at once.
4. The outcome of a trial from before the last change of state changes nothing: a hundred requests that fail together
   open the circuit once. Settling twice does nothing.
5. A rest is at most `open_s_max`; nothing but the clock has to happen before the next probe may go.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.errors import BadSetting

# Outcomes remembered, and how many of them must have failed to open the circuit even if no three in a row did.
WINDOW = 20
WINDOW_FAILED_MAX = 10


class IllegalTransition(AssertionError):
    """A bug of ours: an event came in a state that can't have it."""


class BreakerState(enum.IntEnum):
    """What is thought of a worker."""

    CLOSED = 0  # it is used
    HALF_OPEN = 1  # one trial may find out
    OPEN = 2  # it is left alone


class BreakerEvent(enum.IntEnum):
    """What can happen to a circuit."""

    TRIP = 0
    RESTED = 1
    RECOVER = 2
    RELAPSE = 3


BREAKER_TABLE: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.RESTED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.RECOVER): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.RELAPSE): BreakerState.OPEN,
}


@dataclass(eq=False, slots=True)
class Trial:
    """One use of a worker, to be settled once."""

    epoch: int
    is_probe: bool
    is_settled: bool = False


class Breaker:
    """The circuit of one worker.

    Parameters
    ----------
    now_s : Callable[[], float]
        A clock that never goes back.
    failures_max : int
        Failures in a row that open the circuit.
    open_s, open_s_max : float
        The first rest, and the longest: each relapse doubles it.
    probe_s : float
        How long a probe keeps others from being tried.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        failures_max: int = 3,
        open_s: float = 1.0,
        open_s_max: float = 3.0,
        probe_s: float = 2.0,
    ) -> None:
        if failures_max < 1 or not 0 < open_s <= open_s_max or probe_s <= 0:
            raise BadSetting(
                f"{failures_max=}, {open_s=:g}, {open_s_max=:g}, {probe_s=:g} make no breaker: give failures_max "
                "of 1 and more, 0 < open_s <= open_s_max, probe_s above 0"
            )
        self._now_s = now_s
        self._failures_max = failures_max
        self._open_s = open_s
        self._open_s_max = open_s_max
        self._probe_s = probe_s
        self._state = BreakerState.CLOSED
        self._epoch = 0  # grows with each change of state
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # True: it failed
        self._failed_in_a_row = 0
        self._rests = 0  # since it was last closed
        self._rest_ends_s = 0.0
        self._probe: Trial | None = None
        self._probe_ends_s = 0.0
        self.opened_count = 0

    # ---- questions

    @property
    def state(self) -> BreakerState:
        """The state as of now: rests end by the clock."""
        if self._state is BreakerState.OPEN and self._now_s() >= self._rest_ends_s:
            self._move(BreakerEvent.RESTED)
        return self._state

    @property
    def due_s(self) -> float | None:
        """When it becomes half-open, on its own clock; None if it isn't open."""
        return self._rest_ends_s if self.state is BreakerState.OPEN else None

    def allows(self) -> bool:
        """Return whether a trial may begin now: it is closed, or half-open and no probe has just begun."""
        state = self.state
        has_room = self._probe is None or self._now_s() >= self._probe_ends_s
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and has_room)

    # ---- trials

    def begin(self) -> Trial:
        """Return a trial, which must be settled once by `succeeded`, `failed` or `neutral`.

        Raises
        ------
        IllegalTransition
            `allows` says no.
        """
        if not self.allows():
            raise IllegalTransition(f"a circuit that is {self._state.name} allows no further trial")
        trial = Trial(self._epoch, is_probe=self._state is BreakerState.HALF_OPEN)
        if trial.is_probe:
            self._probe = trial
            self._probe_ends_s = self._now_s() + self._probe_s
        return trial

    def succeeded(self, trial: Trial) -> None:
        """The worker answered as it should."""
        if self._is_news(trial):
            if trial.is_probe:
                self._move(BreakerEvent.RECOVER)
                self._recent.clear()
                self._failed_in_a_row = self._rests = 0
            else:
                self._recent.append(False)
                self._failed_in_a_row = 0

    def failed(self, trial: Trial) -> None:
        """The worker failed this request."""
        if self._is_news(trial):
            if trial.is_probe:
                self._rest(BreakerEvent.RELAPSE)
                return
            self._recent.append(True)
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._failures_max or sum(self._recent) >= WINDOW_FAILED_MAX:
                self._rest(BreakerEvent.TRIP)

    def neutral(self, trial: Trial) -> None:
        """The trial says nothing of the worker."""
        if self._is_news(trial) and trial is self._probe:
            self._probe = None

    def down(self) -> None:
        """The worker is known to be gone: open now, without waiting for requests to fail."""
        match self.state:
            case BreakerState.CLOSED:
                self._rest(BreakerEvent.TRIP)
            case BreakerState.HALF_OPEN:
                self._rest(BreakerEvent.RELAPSE)
            case BreakerState.OPEN:
                pass

    # ---- inside

    def _is_news(self, trial: Trial) -> bool:
        state = self.state
        is_news = not trial.is_settled and trial.epoch == self._epoch and state is not BreakerState.OPEN
        trial.is_settled = True
        return is_news

    def _rest(self, event: BreakerEvent) -> None:
        self._move(event)
        self.opened_count += 1
        rest_s = min(self._open_s_max, self._open_s * 2.0 ** min(self._rests, 32))
        self._rests += 1
        self._rest_ends_s = self._now_s() + rest_s

    def _move(self, event: BreakerEvent) -> None:
        try:
            self._state = BREAKER_TABLE[self._state, event]
        except KeyError:
            raise IllegalTransition(f"a circuit that is {self._state.name} can't {event.name}") from None
        self._epoch += 1
        self._probe = None


def counts_as_failure(status: int) -> bool | None:
    """Return what an HTTP status says of the worker that sent it; None: nothing, 4xx is no fault of a worker."""
    if status < 400:
        return False
    return None if status < 500 or status == 501 else True
