"""The real daemon as a process: where it listens, what it says there at first, how it refuses a second one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.paths import socket_address
from tests.daemon.report import full_report
from tests.daemon.test_metrics import samples


class Daemon:
    """A running daemon and its log, an event a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, object]] = []

    def wait_for(self, event: str) -> dict[str, object]:
        """Return the first event of this name; the test fails if the daemon ends before it."""
        for told in self.events:
            if told["event"] == event:
                return told
        assert self.process.stderr is not None
        while line := self.process.stderr.readline():
            self.events.append(json.loads(line) if line.startswith("{") else {"event": line})
            if self.events[-1]["event"] == event:
                return self.events[-1]
        raise AssertionError(f"no {event!r} in {self.events}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


def command(directory: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "kvstored", "--tiers", "cpu,ssd", "--cpu-size", "16MiB", "--ssd-size", "32MiB",
        "--ssd-dir", str(directory / "kv"), "--socket", str(directory / "s.sock"), "--log-format", "json", *arguments,
    ]  # fmt: skip


@contextlib.contextmanager
def started(directory: Path, *arguments: str) -> Generator[Daemon, None, None]:
    process = subprocess.Popen(
        command(directory, *arguments), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            daemon = Daemon(process)
            daemon.wait_for("ready")
            yield daemon
        finally:
            process.kill()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_first_scrape_has_every_series_at_zero(short_dir: Path) -> None:
    with started(short_dir, "--http", "0") as daemon:
        url = f"http://{daemon.wait_for('http')['address']}"
        assert get(f"{url}/readyz") == (200, "ready\n")
        status, text = get(f"{url}/metrics")
        assert status == 200
        assert daemon.stop() == 0
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expected = samples(full_report(namespaces=0, tenants=0))
    assert set(expected) - set(found) == set()
    counted = {name: value for (name, _), value in found.items() if name.startswith("kvstored_") and "_total" in name}
    assert counted
    assert {name: value for name, value in counted.items() if value} == {}


def test_socket_under_a_long_directory_is_reached_by_the_same_rule(short_dir: Path) -> None:
    path = short_dir / ("d" * 120) / "kvstored.sock"
    path.parent.mkdir()
    with started(short_dir, "--socket", str(path)) as daemon:
        with socket.socket(socket.AF_UNIX) as client, socket_address(path) as address:
            client.connect(address)
        assert daemon.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize(("shared", "flag", "other"), [("kv", "--socket", "t.sock"), ("s.sock", "--ssd-dir", "kw")])
def test_second_daemon_on_one_directory_or_socket_is_refused(
    short_dir: Path, shared: str, flag: str, other: str
) -> None:
    with started(short_dir) as daemon:
        second = subprocess.run(
            command(short_dir, flag, str(short_dir / other)), capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1, second.stderr
        refusal = second.stderr.splitlines()[-1]
        assert refusal.startswith("kvstored: ")
        assert str(short_dir / shared) in refusal
        assert str(daemon.process.pid) in refusal
        assert "Traceback" not in second.stderr
        assert daemon.stop() == 0


def test_port_that_is_taken_ends_the_start_with_one_text(short_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            command(short_dir, "--http", address), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert f"kvstored: http = '{address}'" in done.stderr.splitlines()[-1]
    assert "is taken" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (short_dir / "s.sock").exists()


def test_daemon_told_to_stop_while_it_starts_ends_cleanly(short_dir: Path) -> None:
    process = subprocess.Popen(command(short_dir), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            daemon = Daemon(process)
            daemon.wait_for("settings")
            os.kill(process.pid, signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    # Before the loop runs nobody listens for signals yet, and the kernel ends the process; after that it drains.
    assert process.returncode in (0, -signal.SIGTERM), err
    assert "Traceback" not in err
