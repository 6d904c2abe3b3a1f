"""A directory's own clock: seconds that a block's life is counted in, across restarts and reboots.

Theory of operation. Boottime counts exactly, but only under one kernel; wall time survives a reboot, but may
be stepped. So every index transaction leaves an anchor: the directory's time, beside it the boottime, the
wall time and the kernel's boot id of that moment. Under the same boot id the time since the anchor is the
difference in boottime. After a reboot it is the difference in wall time, and at least as long as the new
kernel has run. Expiry is stored on this scale: one number a record.

Invariants
1. Directory time never goes back, so no step of the wall clock lengthens the life of a block that was stored
   before it by more than the time the machine was off. A step forward while the machine is off shortens it.
2. While one kernel runs, wall time takes no part.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.clock import Clock
from kvstore.errors import BadRecord

_ANCHOR = struct.Struct("<ddd64s")


@dataclass(frozen=True, slots=True)
class Anchor:
    """One moment on all clocks, in seconds."""

    directory_s: float
    boottime_s: float
    wall_s: float
    boot_id: str

    def pack(self) -> bytes:
        return _ANCHOR.pack(self.directory_s, self.boottime_s, self.wall_s, self.boot_id.encode())

    @staticmethod
    def unpack(raw: bytes) -> Anchor:
        if len(raw) != _ANCHOR.size:
            raise BadRecord("the clock record of the ssd index has the wrong size: remove the directory to start empty")
        directory_s, boottime_s, wall_s, boot_id = _ANCHOR.unpack(raw)
        return Anchor(directory_s, boottime_s, wall_s, boot_id.rstrip(b"\0").decode(errors="replace"))


class DirectoryTime:
    """Turns boottime into directory time and back. `anchor` None: the directory is new.

    Ends that slide are negative in both, and keep their sign; what was over before this kernel began ends at 0.
    """

    def __init__(self, clock: Clock, boot_id: str, anchor: Anchor | None) -> None:
        self._clock = clock
        self._boot_id = boot_id
        self._ahead_s = 0.0  # directory time minus boottime, constant while this kernel runs
        if anchor is not None:
            now_s = clock.boottime_s()
            if anchor.boot_id == boot_id:
                elapsed_s = now_s - anchor.boottime_s
            else:
                elapsed_s = max(clock.wall_s() - anchor.wall_s, now_s)
            self._ahead_s = anchor.directory_s + max(0.0, elapsed_s) - now_s

    def to_directory_s(self, boottime_s: float) -> float:
        return -(self._ahead_s - boottime_s) if boottime_s < 0 else boottime_s + self._ahead_s

    def to_boottime_s(self, directory_s: float) -> float:
        end_s = max(0.0, abs(directory_s) - self._ahead_s)
        return -end_s if directory_s < 0 else end_s

    def anchor(self) -> Anchor:
        """Return this moment, to be written with every transaction."""
        now_s = self._clock.boottime_s()
        return Anchor(self.to_directory_s(now_s), now_s, self._clock.wall_s(), self._boot_id)
