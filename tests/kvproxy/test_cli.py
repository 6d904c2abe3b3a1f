"""The command as an operator meets it: signals, statuses, systemd, and what its log never holds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.daemon_fixture import eventually

SECRETS = ("a prompt that nobody may read", "sk-a-key-that-nobody-may-read", "an answer that nobody may read")


class Worker(BaseHTTPRequestHandler):
    """Holds /v1/completions back until the server's gate opens."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server = self.server
        assert isinstance(server, Gated)
        server.arrived.set()
        server.gate.wait(60)
        body = json.dumps({"choices": [{"text": SECRETS[2]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Gated(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Worker)
        self.arrived, self.gate = threading.Event(), threading.Event()


@pytest.fixture
def worker() -> Iterator[Gated]:
    server = Gated()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def kvproxy(
    log: Path, *arguments: str, environ: dict[str, str] | None = None
) -> Generator[subprocess.Popen[bytes], None, None]:
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvproxy", "--listen", "127.0.0.1:0", "--log-format", "json", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, **(environ or {})},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def url_of(log: Path, process: subprocess.Popen[bytes]) -> str:
    def listen() -> str:
        assert process.poll() is None, log.read_text()
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return next((line["listen"] for line in lines if line["event"] == "ready"), "")

    return eventually(listen, "kvproxy is ready")


def completed(url: str) -> tuple[int, bytes]:
    body = json.dumps({"prompt": SECRETS[0]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRETS[1]}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        return int(answer.status), answer.read()


def test_a_running_request_is_answered_after_sigterm_and_the_status_is_0(short_dir: Path, worker: Gated) -> None:
    log = short_dir / "log"
    address = f"http://127.0.0.1:{worker.server_address[1]}"
    with kvproxy(log, "--decode", address, "--log-level", "debug") as process:
        url = url_of(log, process)
        answers: list[tuple[int, bytes]] = []
        asking = threading.Thread(target=lambda: answers.append(completed(url)))
        asking.start()
        assert worker.arrived.wait(60)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: '"stopping"' in log.read_text(), "it has heard")
        worker.gate.set()
        asking.join(60)
        assert process.wait(60) == 0
    ((status, body),) = answers
    assert status == 200
    assert SECRETS[2].encode() in body
    text = log.read_text()
    assert '"request"' in text
    assert not [secret for secret in SECRETS if secret in text]
    assert "Traceback" not in text


def test_a_second_signal_ends_it_at_once(short_dir: Path, worker: Gated) -> None:
    log = short_dir / "log"
    with kvproxy(log, "--decode", f"http://127.0.0.1:{worker.server_address[1]}") as process:
        url = url_of(log, process)

        def ask() -> None:
            with pytest.raises(OSError):
                completed(url)

        asking = threading.Thread(target=ask)
        asking.start()
        assert worker.arrived.wait(60)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: '"stopping"' in log.read_text(), "it has heard")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
        asking.join(60)
    assert "a second signal" in log.read_text()


def test_a_hangup_without_a_terminal_changes_nothing_and_is_told(short_dir: Path) -> None:
    log = short_dir / "log"
    with kvproxy(log, "--decode", "http://127.0.0.1:9", "--drain-timeout", "0s") as process:
        url_of(log, process)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "SIGHUP" in log.read_text(), "it is told")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_systemd_is_told_of_the_start_and_the_end(short_dir: Path) -> None:
    log = short_dir / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_dir / "notify"))
        manager.settimeout(60)
        environ = {"NOTIFY_SOCKET": str(short_dir / "notify")}
        with kvproxy(log, "--decode", "http://127.0.0.1:9", "--drain-timeout", "0s", environ=environ) as process:
            told = manager.recv(4096).decode()
            assert told.startswith("READY=1\nSTATUS=serving on http://127.0.0.1:")
            process.send_signal(signal.SIGTERM)
            assert manager.recv(4096).decode().startswith("STOPPING=1\n")
            assert process.wait(60) == 0


def test_an_address_that_is_taken_is_status_1_with_what_to_do(short_dir: Path) -> None:
    log = short_dir / "log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with kvproxy(log, "--decode", "http://127.0.0.1:9", "--listen", f"127.0.0.1:{port}") as process:
            assert process.wait(60) == 1
    assert f"listen = '127.0.0.1:{port}': port {port} is taken" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--decode", "nonsense"), "write http://HOST:PORT"),
        (("--decode", "http://127.0.0.1:9", "--tokenizer", "/nowhere"), "has no tokenizer.json"),
        (("--decode", "http://127.0.0.1:9", "--admin", "0", "--admin-token-file", "/nowhere"), "/nowhere"),
        (("--decode", "http://127.0.0.1:9", "--listen", "203.0.113.1:0"), "203.0.113.1"),
    ],
)
def test_wrong_settings_are_status_2_and_one_clear_text(short_dir: Path, arguments: tuple[str, ...], word: str) -> None:
    log = short_dir / "log"
    with kvproxy(log, *arguments) as process:
        assert process.wait(60) == 2
    assert word in log.read_text()
    assert "Traceback" not in log.read_text()


def test_the_proxy_loads_no_engine_and_no_store() -> None:
    listing = "import sys, kvproxy.app, kvproxy.cli; print('\\n'.join(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    loaded = set(printed.stdout.split())
    assert "kvproxy.app" in loaded
    heavy = {"lmdb", "obstore", "redis", "torch", "numpy", "transformers", "tokenizers", "kvstore.store"}
    assert not heavy & loaded
    assert not {name for name in loaded if name.startswith("kvstored.remote") or name == "kvstored.options"}
