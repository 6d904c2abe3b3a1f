"""Whether to bother the daemon at all: after a failure callers are turned away at once, and one probes now and then.

Invariants
1. Open, a call costs a comparison: no system call, no waiting.
2. A daemon that has come back is found by the first call after at most `RETRY_S_MAX` (and by no thread of its own).
3. At most one caller probes at a time.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0
PROBE_S_MAX = 2.0
SILENCE_S = 0.1


class Admission(enum.Enum):
    """What a caller may do."""

    PASS = 1
    PROBE = 2  # ask a small question first
    REFUSED = 3


class Breaker:
    """Closed while the daemon answers; open for a time that doubles with each failed probe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._retry_s = RETRY_S_MIN
        self._refuse_until: float | None = None
        self._probe_until = 0.0
        self._silent_since: float | None = None
        self.reason = ""
        self.opened_count = 0

    def admit(self) -> Admission:
        """Return whether the caller may go on; a caller who may probe reports `answered` or `failed` afterwards."""
        refuse_until = self._refuse_until
        if refuse_until is None:
            return Admission.PASS
        now = self._now()
        if now < refuse_until:
            return Admission.REFUSED
        with self._lock:
            if now < self._probe_until:
                return Admission.REFUSED
            self._probe_until = now + PROBE_S_MAX
            return Admission.PROBE

    def answered(self) -> None:
        """Something came from the daemon."""
        if self._silent_since is None and self._refuse_until is None:
            return
        with self._lock:
            self._silent_since = self._refuse_until = None
            self._probe_until = 0.0
            self._retry_s = RETRY_S_MIN

    def failed(self, reason: str) -> None:
        """No daemon could be reached, or a probe was not answered."""
        with self._lock:
            now = self._now()
            if self._refuse_until is not None and now < self._refuse_until:
                return
            self.reason = reason
            self.opened_count += 1
            self._refuse_until = now + self._retry_s
            self._retry_s = min(RETRY_S_MAX, 2 * self._retry_s)
            self._probe_until = 0.0

    def silent(self, since: float, reason: str) -> None:
        """A call that began at `since` ended unanswered: one too many opens the breaker."""
        with self._lock:
            first = self._silent_since = min(since, self._silent_since or since)
        if self._now() - first >= SILENCE_S:
            self.failed(reason)

    @property
    def retry_in_s(self) -> float:
        """Seconds until the next probe."""
        return max(0.0, (self._refuse_until or 0.0) - self._now())
