"""Cases C, on: what surrounds the daemon. Signals of terminals, users without a home, paths that are no text."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.wire import Outcome
from kvstored.resolve import resolve
from tests.daemon.host import KnownHost
from tests.daemon_fixture import KIB, Daemon, eventually, running, start_and_fail
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
