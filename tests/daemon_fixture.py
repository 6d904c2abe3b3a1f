"""The real daemon as a subprocess, for tests that talk to it: started, watched, stopped or killed, never left over.

`with running(short_dir) as daemon:` gives one that serves; `daemon.kill()` and `daemon.start()` give the next one on
the same directory and socket. At the end of the block it is stopped by SIGTERM, and must end with status 0.
Directories come from the fixture `short_dir`, so nothing stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from kvstore.errors import KVStoreError
from tests.rawclient import RawClient

KIB, MIB = 1 << 10, 1 << 20
START_S = 60.0
T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "", *, within_s: float = 30.0, every_s: float = 0.01) -> T:
    """Return the first true value of `condition`; fails after `within_s`, telling the last value."""
    ends_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= ends_s:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}; the last value was {value!r}")
        time.sleep(every_s)


class Daemon:
    """One place for a daemon: a socket, an ssd directory, a log, and the process that serves there now."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        cpu: str = "64MiB",
        ssd: str | None = "256MiB",
        ssd_dir: Path | None = None,
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self.directory = directory
        self.socket = directory / "s"
        self.ssd_dir = ssd_dir or directory / "ssd"
        self.log = directory / "log"
        self.arguments = [
            "--tiers", "cpu,ssd" if ssd else "cpu", "--cpu-size", cpu, "--socket", str(self.socket), "--http", "off",
            *(["--ssd-size", ssd, "--ssd-dir", str(self.ssd_dir)] if ssd else []), *arguments,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self._before_exec = before_exec

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self) -> None:
        """Start the process without waiting until it serves."""
        assert self.process is None, "it runs already"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvstored", *self.arguments],
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=self._before_exec,
            )

    def start(self, *, within_s: float = START_S) -> Daemon:
        """Start the process and return when it answers."""
        return self.start_for(lambda: self.client(want_pool=False, timeout_s=START_S), within_s=within_s)

    def start_for(self, connect: Callable[[], RawClient], *, within_s: float = START_S) -> Daemon:
        """Start the process and return when it answers those who connect so."""
        self.launch()
        try:
            eventually(lambda: self._answers(connect), "the daemon answers", within_s=within_s)
        except BaseException:
            self.kill()
            raise
        return self

    def _answers(self, connect: Callable[[], RawClient]) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log_text()}"
        try:
            connect().close()
        except (OSError, KVStoreError):
            return False
        return True

    def client(self, *, want_pool: bool = True, timeout_s: float = 30.0) -> RawClient:
        """Return a new connection."""
        return RawClient(self.socket, want_pool=want_pool, timeout_s=timeout_s)

    def stop(self) -> int:
        """End the process in order and return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self.process = None
        return status

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    # ---- what it takes

    def rss_bytes(self) -> int:
        """Return the daemon's private memory: the pool is not in it."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * KIB
        raise AssertionError("no RssAnon")

    def fd_count(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def disk_bytes(self) -> int:
        """Return what all files of the ssd directory take on disk now."""
        return disk_bytes(self.ssd_dir)


def start_and_fail(daemon: Daemon, within_s: float = START_S) -> tuple[int, str]:
    """Return the exit status and the text of a daemon that should not come up."""
    daemon.launch()
    assert daemon.process is not None
    try:
        status = daemon.process.wait(within_s)
        daemon.process = None
    finally:
        daemon.kill()
    return status, daemon.log_text()


def disk_bytes(directory: Path) -> int:
    """Return what the files under a directory take, those that vanish meanwhile not counted."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


@contextlib.contextmanager
def running(
    directory: Path,
    *arguments: str,
    cpu: str = "64MiB",
    ssd: str | None = "256MiB",
    ssd_dir: Path | None = None,
    before_exec: Callable[[], None] | None = None,
) -> Generator[Daemon, None, None]:
    """Give a daemon that serves; it is stopped in the end, and must end with status 0 if it still runs."""
    daemon = Daemon(directory, *arguments, cpu=cpu, ssd=ssd, ssd_dir=ssd_dir, before_exec=before_exec)
    daemon.start()
    try:
        yield daemon
    except BaseException:
        daemon.kill()
        sys.stderr.write(f"---- log of the daemon\n{daemon.log_text()[-8000:]}----\n")
        raise
    if daemon.process is not None:
        assert daemon.is_running, f"the daemon ended by itself with {daemon.process.returncode}:\n{daemon.log_text()}"
        status = daemon.stop()
        assert status == 0, f"the daemon ended with status {status}:\n{daemon.log_text()[-8000:]}"
    assert "Traceback" not in daemon.log_text(), daemon.log_text()[-8000:]
