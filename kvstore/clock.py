"""Time, injected: a store is handed a Clock and never asks the operating system itself.

Invariants
1. `monotonic_s` never goes back and does not count suspended time: it bounds waits, leases and reservations.
2. `boottime_s` counts suspended time too: it bounds the life of a block (TTL) while the machine runs.
3. `wall_s` may be stepped at any moment. It is written beside the kernel's boot id for restarts, and never compared
   with anything else.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What the store needs to know of time, all in seconds."""

    def monotonic_s(self) -> float: ...

    def boottime_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The clocks of this machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def boottime_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to, for tests."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self.now_s = start_s
        self.wall_offset_s = 1_700_000_000.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic_s(self) -> float:
        return self.now_s

    def boottime_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s + self.wall_offset_s


def kernel_boot_id() -> str:
    """Return the id the kernel drew at its boot: `boottime_s` values are comparable only under the same one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
