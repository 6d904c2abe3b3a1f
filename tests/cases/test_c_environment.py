"""Cases C, on: what surrounds the daemon. Signals of terminals, users without a home, paths that are no text."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.wire import Outcome
from kvstored.resolve import resolve
from tests.daemon.host import KnownHost
from tests.daemon_fixture import KIB, Daemon, eventually, running, start_and_fail
from tests.product import ROOT
from tests.rawclient import keys, namespace

SPACE = namespace(64 * KIB)


def test_c02_a_hangup_without_a_terminal_changes_nothing_and_is_told(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(4))
        daemon.signal(signal.SIGHUP)
        eventually(lambda: "SIGHUP" in daemon.log_text(), "it is told")
        assert client.get(ns, keys(4)) == [Outcome.HIT] * 4


def test_c02_a_terminal_that_hangs_up_ends_the_daemon_in_order(short_dir: Path) -> None:
    daemon = Daemon(short_dir, "--write-policy", "back")
    ours, theirs = os.openpty()
    try:
        daemon.process = subprocess.Popen(
            [sys.executable, "-m", "kvstored", *daemon.arguments], stdin=subprocess.DEVNULL, stderr=theirs
        )
        eventually(daemon.socket.exists, "it serves", within_s=60)
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(20))
        daemon.signal(signal.SIGHUP)
        assert daemon.process.wait(60) == 0
        daemon.process = None
    finally:
        daemon.kill()
        os.close(ours)
        os.close(theirs)
    with running(short_dir) as again, again.client() as client:
        assert client.get(client.open(SPACE), keys(20)) == [Outcome.HIT] * 20


def test_c01_a_user_without_a_home_gets_settings_or_a_fault_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers run with a number for a user: there is no entry for it, and no HOME."""

    def nobody(_: int) -> pwd.struct_passwd:
        raise KeyError("uid not found")

    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    host = KnownHost()
    host.read_only = "/var/lib is not writable for uid 54321"
    found = resolve({"tiers": "cpu,ssd", "socket": "/tmp/kvstored-test.sock"}, {}, host=host)
    (fault,) = [fault for fault in found.faults if fault.key == "ssd-dir"]
    assert "--ssd-dir" in fault.problem
    auto = resolve({"tiers": "auto", "socket": "/tmp/kvstored-test.sock"}, {}, host=host)
    assert any("no ssd tier" in note for note in auto.notes)


def test_c01_paths_that_are_no_text_are_refused_before_anything_starts(short_dir: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(short_dir) + b"/\xff\xfe"))
    odd.mkdir()
    daemon = Daemon(odd, cpu="8MiB", ssd="16MiB")
    daemon.log = short_dir / "log"
    status, text = start_and_fail(daemon)
    assert status == 2, text
    assert "Traceback" not in text
    assert "--socket" in text
    assert "--ssd-dir" in text


@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "0<&- 1>&- 2>&-", "2>/dev/full"])
def test_c02_a_daemon_whose_standard_descriptors_are_closed_serves_and_ends_in_order(
    short_dir: Path, closed: str
) -> None:
    """Else a socket of its own would get their numbers, with all that is printed there."""
    daemon = Daemon(short_dir, cpu="8MiB", ssd=None)
    command = shlex.join([sys.executable, "-m", "kvstored", *daemon.arguments])
    daemon.process = subprocess.Popen(["bash", "-c", f"exec {command} {closed}"])
    try:
        eventually(daemon.socket.exists, "it serves", within_s=60)
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(4))
            assert client.get(ns, keys(4)) == [Outcome.HIT] * 4
        assert daemon.stop() == 0
    finally:
        daemon.kill()


ENGINE = """
import resource, sys
from kvclient import Client
from tests.rawclient import keys, namespace, payload
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 64))
space = namespace(65536)
with Client(socket=sys.argv[1]) as client:
    result = client.namespace(space).store(keys(2), [payload(space.digest, key, 65536) for key in keys(2)])
    print(len(result.outcomes), result.failure or "stored")
"""


def test_c02_an_engine_without_descriptors_to_spare_is_told_which_limit_to_raise(short_dir: Path) -> None:
    """The pool comes as a descriptor: where there is no room for it blocks are misses, and the text names the limit."""
    with running(short_dir, cpu="8MiB", ssd=None) as daemon:
        told: list[str] = []
        for limit in range(4, 9):
            command = [sys.executable, "-c", ENGINE, str(daemon.socket), str(limit)]
            answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
            told.append(answer.stdout)
        assert "stored" in told[-1]
        short = [text for text in told if "stored" not in text]
        assert short, "no limit was too low for the test to mean anything"
        assert all("ulimit -n" in text for text in short), short
