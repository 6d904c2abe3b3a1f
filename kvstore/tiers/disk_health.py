"""Is the tier well? Each thing that can fail is a cause with a text, a back-off and a rate-limited warning.

A cause is raised by a failure and cleared by the next success of the same kind of work. While a cause backs
off, work of its kind is refused at once instead of being tried: a full disk costs one attempt now and then,
not one a block.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvstore.clock import Clock
from kvstore.tiers.disk_records import DiskState

_BACK_OFF_FIRST_S = 0.25
_BACK_OFF_MAX_S = 30.0
_WARNING_INTERVAL_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Cause:
    text: str
    failures: int
    retry_at_s: float
    warned_at_s: float


class Health:
    """Keeps the causes for which the tier is degraded."""

    def __init__(self, clock: Clock, directory: str) -> None:
        self._clock = clock
        self._directory = directory
        self._causes: dict[str, _Cause] = {}
        self.io_errors = 0

    def failed(self, cause: str, exc: BaseException) -> None:
        """Note that work of this kind failed."""
        now_s = self._clock.monotonic_s()
        self.io_errors += 1
        known = self._causes.get(cause)
        failures = known.failures + 1 if known else 1
        warned_at_s = known.warned_at_s if known else float("-inf")
        back_off_s = min(_BACK_OFF_MAX_S, _BACK_OFF_FIRST_S * 2.0 ** min(failures - 1, 10))
        if now_s - warned_at_s >= _WARNING_INTERVAL_S:
            warned_at_s = now_s
            _log.warning(
                "ssd tier degraded: cause=%s error=%s directory=%s retry_s=%.2f: "
                "blocks stay in memory only until it recovers",
                cause, exc, self._directory, back_off_s,
            )  # fmt: skip
        self._causes[cause] = _Cause(f"{cause}: {exc}", failures, now_s + back_off_s, warned_at_s)

    def succeeded(self, cause: str) -> None:
        """Note that work of this kind succeeded."""
        if self._causes and self._causes.pop(cause, None) is not None:
            _log.info("ssd tier recovered: cause=%s directory=%s", cause, self._directory)

    def backs_off(self, cause: str) -> bool:
        """Return whether work of this kind should not be tried yet."""
        known = self._causes.get(cause)
        return known is not None and self._clock.monotonic_s() < known.retry_at_s

    @property
    def state(self) -> DiskState:
        return "degraded" if self._causes else "ready"

    @property
    def text(self) -> str:
        return "; ".join(cause.text for cause in self._causes.values())
