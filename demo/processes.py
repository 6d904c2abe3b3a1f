"""The demo's processes: how they are started, asked and ended. No engine is imported here.

Invariants
1. Each process runs in a session of its own: Ctrl-C reaches the demo alone, which ends the others in order.
2. A process that is gone, silent or failed raises Failed with the end of its log.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_A = ParamSpec("_A")
_P = TypeVar("_P", bound="Process")
_ROOT = Path(__file__).resolve().parent.parent
_ANSWER_S = 600.0
_START_S = 60.0
_STOP_S = 45.0
_LOG_LINES = 25


class Failed(Exception):
    """The demo can't go on; the text says why."""


class Process:
    """A child process with its output in a log."""

    def __init__(
        self, name: str, command: list[str], log: Path, *, pass_fds: tuple[int, ...] = (), **variables: str
    ) -> None:
        self.name = name
        self._log = log
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORED_")}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited | variables,
                pass_fds=pass_fds,
                cwd=_ROOT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failed(self, text: str) -> Failed:
        """Return the error `text` with the end of this process's log."""
        return Failed(f"{self.name}: {text}\n{self.log_end()}")

    def log_end(self) -> str:
        """Return the last lines of this process's log, indented."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"  {line}" for line in lines)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the process by SIGTERM, and if that does not help by SIGKILL. Ending twice is harmless."""
        if not self.has_ended:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


class Worker(Process):
    """An engine process. `ask` and `answer` apart let several of them work at once."""

    def __init__(self, name: str, log: Path) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "demo.worker", str(theirs.fileno())]
            variables = {
                "OMP_WAIT_POLICY": "PASSIVE",  # three of them share the cores: threads that wait must not spin
                "TORCHINDUCTOR_CACHE_DIR": str(log.parent / "torch"),  # made even where nothing is compiled
            }
            super().__init__(name, command, log, pass_fds=(theirs.fileno(),), **variables)
        self._line.settimeout(_ANSWER_S)
        self._answers = self._line.makefile("r")

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a request."""
        try:
            self._line.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except OSError as exc:
            raise self.failed("ended before it was asked") from exc

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last request."""
        try:
            text = self._answers.readline()
        except TimeoutError as exc:
            raise self.failed(f"gave no answer for {_ANSWER_S:.0f} s") from exc
        except ConnectionError:
            text = ""
        if not text:
            raise self.failed("ended without an answer")
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise self.failed(answer["error"])
        return answer

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        self.ask(do, **arguments)
        return self.answer()

    def stop(self) -> None:
        super().stop()
        self._answers.close()
        self._line.close()


class Daemon(Process):
    """A kvstored, which takes a moment until it serves: `await_ready`."""

    def __init__(self, directory: Path, cpu_size_bytes: int, ssd_size_bytes: int) -> None:
        self.socket = directory / "kvstored.sock"
        command = [sys.executable, "-m", "kvstored", "--tiers", "cpu,ssd", "--socket", str(self.socket)]
        command += ["--cpu-size", str(cpu_size_bytes), "--ssd-size", str(ssd_size_bytes)]
        command += ["--ssd-dir", str(directory / "ssd"), "--http", "off"]
        name = f"kvstored-demo-{os.getpid()}-{secrets.token_hex(4)}"
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._told.bind(f"\0{name}")  # as systemd does; a name without a file
        super().__init__("kvstored", command, directory / "kvstored.log", NOTIFY_SOCKET=f"@{name}")

    def await_ready(self) -> None:
        """Return when the daemon says that it serves."""
        give_up_at = time.monotonic() + _START_S
        self._told.settimeout(0.2)
        while time.monotonic() < give_up_at:
            try:
                if b"READY=1" in self._told.recv(4096).split(b"\n"):
                    return
            except TimeoutError:
                if self.has_ended:
                    raise self.failed(f"ended with exit code {self._process.returncode} while starting") from None
        raise self.failed(f"was not ready after {_START_S:.0f} s")

    def drain(self) -> None:
        """End the daemon as an operator does: what only memory holds is written out first."""
        self._process.terminate()
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired as exc:
            raise self.failed(f"did not end within {_STOP_S:.0f} s of SIGTERM") from exc
        if code:
            raise self.failed(f"ended with exit code {code} after SIGTERM")

    def stop(self) -> None:
        super().stop()
        self._told.close()


class Group:
    """Processes that end together, at the end of the block, the last started first."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(self, make: Callable[_A, _P], *arguments: _A.args, **options: _A.kwargs) -> _P:
        """Return a new process, which belongs to the group as soon as it exists."""
        with uninterrupted():
            process = make(*arguments, **options)
            self._started.append(process)
        return process

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            for process in reversed(self._started):
                process.stop()


def model_directory(name: str) -> Path:
    """Return the directory that an argument names, which must hold a model."""
    path = Path(name).expanduser().absolute()
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{path} holds no model: there is no config.json in it")
    return path


@contextlib.contextmanager
def scratch(free_bytes_min: int) -> Generator[Path]:
    """Yield an empty directory for model, blocks, logs and socket; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="kvstored-demo-") as name:
        free = shutil.disk_usage(name).free
        if free < free_bytes_min:
            raise Failed(
                f"{free >> 20} MiB are free in {name}, {free_bytes_min >> 20} MiB are needed: "
                "set TMPDIR to a directory with more"
            )
        yield Path(name)


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Put off Ctrl-C and its like to the end of the block, so that what was started is also known."""
    came: list[int] = []
    usual = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
