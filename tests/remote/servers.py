"""Real servers for the remote tier, on free ports and in temp directories: Redis, a Redis cluster, S3.

Each is a process of its own that can be killed, started again (empty, or with what it had), stopped and continued.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from tests.daemon_fixture import eventually

BUCKET = "kvcache"
_S3 = "import sys; from moto.server import main; main(sys.argv[1:])"


def port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def redis_server() -> str:
    """Return the path of redis-server, or of Valkey's; skips where there is neither, but not in CI."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        message = "redis-server is not installed: apt-get install redis-server"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


class Server:
    """One process that serves on `port`."""

    def __init__(self, command: list[str], number: int, directory: Path) -> None:
        self.port = number
        self._command = command
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it serves."""
        assert self._process is None
        log = (self._directory / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            eventually(self._answers, f"{self._command[0]} serves")
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def kill(self) -> None:
        """End it by SIGKILL, whatever it is doing, stopped or not."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Generator[None, None, None]:
        """Have it stand still, connections open, for the block's time."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if self._process is not None:  # it may have been killed meanwhile
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis(directory: Path, *settings: str) -> Generator[Server, None, None]:
    """Give a Redis that keeps nothing on disk: started again it is empty."""
    directory.mkdir(parents=True, exist_ok=True)
    number = port()
    server = Server(
        [redis_server(), "--port", str(number), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *settings],
        number,
        directory,
    )
    with _running(server):
        yield server


@contextlib.contextmanager
def redis_cluster(directory: Path, nodes: int = 3) -> Generator[list[Server], None, None]:
    """Give a cluster of primaries that share the slots."""
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        buses: list[str] = []
        for number in range(nodes):
            buses.append(str(port()))  # by default the port and 10,000 more, which may be above 65,535
            settings = ("--cluster-enabled", "yes", "--cluster-port", buses[-1])
            servers.append(stack.enter_context(redis(directory / str(number), *settings)))
        share = 16384 // nodes + 1
        for number, server in enumerate(servers):
            first, last = number * share, min(16384, (number + 1) * share) - 1
            command(server, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            for other, bus_port in zip(servers, buses, strict=True):
                if other is not server:
                    command(server, "CLUSTER", "MEET", "127.0.0.1", str(other.port), bus_port)
        for server in servers:
            eventually(partial(_is_whole, server, nodes), "the cluster is whole")
        yield servers


def _is_whole(server: Server, nodes: int) -> bool:
    state = command(server, "CLUSTER", "INFO")
    return "cluster_state:ok" in state and f"cluster_known_nodes:{nodes}" in state


def command(server: Server, *words: str) -> str:
    """Send a command as anybody could, and return the answer as it comes."""
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as connection:
        parts = [f"*{len(words)}\r\n", *(f"${len(word)}\r\n{word}\r\n" for word in words)]
        connection.sendall("".join(parts).encode())
        return connection.recv(1 << 16).decode()


@contextlib.contextmanager
def s3(directory: Path) -> Generator[Server, None, None]:
    """Give a server that speaks S3 and keeps objects in memory, with one bucket."""
    directory.mkdir(parents=True, exist_ok=True)
    number = port()
    server = Server([sys.executable, "-c", _S3, "-H", "127.0.0.1", "-p", str(number)], number, directory)
    with _running(server):
        make_bucket(number)
        yield server


def make_bucket(number: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{number}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()


def s3_environment(number: int) -> dict[str, str]:
    """Return what a daemon's environment says of such a server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{number}",
        "AWS_ACCESS_KEY_ID": "test-user",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def _running(server: Server) -> Generator[None, None, None]:
    server.start()
    try:
        yield
    finally:
        server.kill()
