"""A real etcd of the tests' own, on free ports and in a temp directory; killed, stopped, continued, started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from kvstored.remote.etcd_place import EtcdPlace
from tests.daemon_fixture import eventually

_STARTS = 5  # a port that was free may be taken by another worker's test before the server has it


def etcd_program() -> str:
    """Return the path of etcd; skips where there is none, but not in CI."""
    found = shutil.which("etcd")
    if found is None:
        message = "etcd is not installed: apt-get install etcd-server"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


class EtcdServer:
    """One process. `tls` are flags about certificates; with some, clients speak TLS."""

    def __init__(self, directory: Path, tls: Sequence[str] = ()) -> None:
        self.directory = directory
        self.port = 0
        self._tls = tls
        self._log_bytes = 0  # of what former processes wrote
        self._process: subprocess.Popen[bytes] | None = None

    def place(self, cluster: str, environ: dict[str, str] | None = None, options: str = "") -> EtcdPlace:
        """Return how a client speaks to it; each test has a cluster of its own."""
        scheme = "etcds" if self._tls else "etcd"
        return EtcdPlace.read(f"{scheme}://127.0.0.1:{self.port}/{cluster}{options}", environ or {})

    def start(self) -> None:
        """Start it on what its directory holds, on the same port as before if it had one, and wait until it serves."""
        for attempt in range(_STARTS):
            if self._try_to_start():
                return
            if attempt:
                self.port = 0
        raise AssertionError((self.directory / "log").read_text()[-3000:])

    def _try_to_start(self) -> bool:
        self.port = self.port or free_port()
        peers = f"http://127.0.0.1:{free_port()}"
        clients = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        command = [
            etcd_program(), "--name", "only", "--data-dir", str(self.directory / "data"),
            "--listen-client-urls", clients, "--advertise-client-urls", clients,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"only={peers}",
            "--heartbeat-interval", "50", "--election-timeout", "500", *self._tls,
        ]  # fmt: skip
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        with (self.directory / "log").open("ab") as out:
            self._log_bytes = out.tell()
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ)
        with contextlib.suppress(AssertionError):
            eventually(self._serves, "etcd serves")
        if self._process.poll() is None and self._serves():
            return True
        self.kill()
        return False

    def _serves(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True  # it won't serve any more: no use to wait
        return b"ready to serve client requests" in (self.directory / "log").read_bytes()[self._log_bytes :]

    def stop(self) -> None:
        """Stop its process where it is."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it by SIGKILL, stopped or not; what it had stays in its directory."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextlib.contextmanager
def etcd_running(directory: Path, tls: Sequence[str] = ()) -> Generator[EtcdServer, None, None]:
    """Give a running etcd; removed afterwards with all it wrote."""
    directory.mkdir()
    server = EtcdServer(directory, tls)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory)
