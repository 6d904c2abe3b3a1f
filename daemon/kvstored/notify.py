"""Tells systemd how the daemon is doing: ready, stopping, alive. Does nothing where systemd did not start it.

Invariants
1. A notification is never waited for and never fails: a manager that is gone must not take the daemon along.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping


class Notifier:
    """One daemon's line to its service manager; see sd_notify(3) for the words."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() and is_ours else 0.0

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def stopping(self, status: str, allowed_s: float) -> None:
        """Tell that the daemon stops, and for how long the manager should let it."""
        self._send(f"STOPPING=1\nSTATUS={status}\nEXTEND_TIMEOUT_USEC={int(allowed_s * 1e6)}")

    async def keep_watchdog(self) -> None:
        """Tell that the loop runs, twice as often as the manager asked for; for ever, or not at all."""
        while self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.sendto(text.encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            pass
