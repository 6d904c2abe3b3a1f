"""Whether a remote store answers: a store that is away is asked now and then by one caller, not by each.

Theory of operation. After a failure all calls are turned away at once until a pause is over; then one call is let
through to find out, and the others are turned away until it has. Each failure doubles the pause, any success ends it.
A store that says "slow down" is given its pause the same way. Callers in a hurry say little about a store: what does
not come within their milliseconds is a failure only if it happens several times on end.

Invariants
1. While it is degraded at most one call is in flight.
2. A call that is turned away costs nothing and counts as no failure.
3. Only an answer of the store ends it: a call that could do without asking says nothing about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator

from kvstore.clock import Clock
from kvstore.errors import Backpressure, DeadlineExceeded, KVStoreError, TierUnavailable
from kvstored.logs import fields

log = logging.getLogger("kvstored.remote")

PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 10.0
PATIENT_S = 1.0
HASTY_TIMEOUTS_MAX = 5


class Health:
    """One store's. `why` is the text of the last failure, empty while all is well.

    `answers` counts the store's answers; without it each call that ends well is taken for one.
    """

    def __init__(self, place: str, clock: Clock, answers: Callable[[], int] | None = None) -> None:
        self._answers = answers
        self.why = ""
        self.trouble = asyncio.Event()  # set when it fails, for who looks after it
        self.errors = 0
        self.timeouts = 0
        self.throttled = 0
        self._place = place
        self._clock = clock
        self._pause_s = PAUSE_S_MIN
        self._closed_until_s = 0.0
        self._probing = False
        self._hasty_timeouts = 0

    @property
    def is_degraded(self) -> bool:
        return bool(self.why)

    @contextlib.contextmanager
    def call(self, within_s: float) -> Generator[None, None, None]:
        """Stand around one call that may take `within_s`: turns it away, and learns from how it ends.

        Raises TierUnavailable if it is turned away; what the block raises goes on.
        """
        probing = self.is_degraded
        if probing and (self._probing or self._clock.monotonic_s() < self._closed_until_s):
            raise TierUnavailable(f"{self._place} does not answer ({self.why}); it is asked again soon")
        self._probing = self._probing or probing
        before = self._answers() if self._answers else -1
        try:
            yield
        except Backpressure as exc:
            self.throttled += 1
            self._failed(exc)
            raise
        except (TimeoutError, DeadlineExceeded) as exc:
            self.timeouts += 1
            self._hasty_timeouts += 1
            if within_s >= PATIENT_S or self._hasty_timeouts >= HASTY_TIMEOUTS_MAX or probing:
                self._failed(DeadlineExceeded(f"no answer within {within_s:g} s") if type(exc) is TimeoutError else exc)
            raise
        except KVStoreError as exc:
            self.errors += 1
            self._failed(exc)
            raise
        else:
            if self._answers is None or self._answers() != before:
                self._succeeded()
        finally:
            if probing:
                self._probing = False

    def _failed(self, exc: Exception) -> None:
        self._hasty_timeouts = 0
        if not self.is_degraded:
            self._pause_s = PAUSE_S_MIN
            log.warning("the remote store is degraded", extra=fields(place=self._place, why=str(exc)))
        self.why = str(exc)
        self.trouble.set()
        self._closed_until_s = self._clock.monotonic_s() + self._pause_s
        self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)

    def _succeeded(self) -> None:
        if self.is_degraded:
            log.info("the remote store is back", extra=fields(place=self._place))
        self.why = ""
        self._hasty_timeouts = 0
