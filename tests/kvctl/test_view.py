"""One frame of top, what is printed on terminals of several widths, and the live view on a real pseudo-terminal."""

from __future__ import annotations

import copy
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvctl import printing, rates, show, view
from kvctl.printing import Output
from kvctl.reports import StatsReport, StatusReport, read
from tests.kvctl import canned
from tests.kvctl.canned import Screen

ROOT = Path(__file__).parent.parent.parent


def grown() -> dict[str, Any]:
    report = canned.stats(uptime_s=7386.2)
    report["totals"]["queried_blocks"] += 24690
    report["totals"]["hit_blocks"]["cpu"] += 12345
    report["tiers"]["cpu"]["bytes_in"] += 2 << 30
    report["tiers"]["ssd"]["evictions"]["ttl"] += 10
    report["namespaces"][2]["queried_blocks"] += 24690
    return report


def frame(width: int = 80, height: int = 24, **changed: Any) -> view.Frame:
    before, after = (read(StatsReport, body) for body in (canned.stats(), changed.pop("stats", grown())))
    fields: dict[str, Any] = {"sort": "used", "clock": "12:00:01", "interval_s": 2.0, "trouble": "", **changed}
    status = read(StatusReport, canned.status())
    return view.Frame(status, after, rates.between(before, after, 2.0), width=width, height=height, **fields)


def drawn(frame: view.Frame) -> list[str]:
    console = Console(width=frame.width, height=frame.height, file=io.StringIO())
    with console.capture() as capture:
        console.print(view.render(frame))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("height", [24, 50])
def test_a_frame_fits_the_terminal(width: int, height: int) -> None:
    many = grown()
    many["namespaces"] = [
        {**canned.namespace(0), "digest": f"{number:064x}", "model": "a-model-with-a-long-name/" * 3}
        for number in range(80)
    ]
    lines = drawn(frame(width, height, stats=many))
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "more namespaces" in lines[-1]
    assert "q  quit" in lines[-1]


def test_a_frame_shows_rates_of_the_interval() -> None:
    text = "\n".join(drawn(frame()))
    for shown in ("12,345", "50.0 %", "81.0 %", "1 GiB", "5.0", "45 GiB / 64 GiB", "70.3 %"):
        assert shown in text


def test_a_frame_without_rates_shows_dashes_not_zeros() -> None:
    first = frame()
    text = drawn(view.Frame(first.status, first.stats, None, "used", "12:00:01", 2.0, 80, 24))
    assert any(line.split()[-2:] == ["-", "-"] for line in text if line.startswith("cpu"))


def test_a_daemon_that_is_gone_is_shown_above_the_last_figures() -> None:
    lines = drawn(frame(trouble="no answer, asking again: kvstored is not there"))
    assert lines[1].startswith("no answer, asking again")
    assert any("45 GiB / 64 GiB" in line for line in lines)


def test_s_goes_through_the_orders_and_comes_back() -> None:
    sort, seen = "used", ["used"]
    for _ in view.SORTS:
        sort = view.next_sort(sort)
        seen.append(sort)
    assert seen == [*view.SORTS, "used"]


@pytest.mark.parametrize(("sort", "first"), [("used", "ab12"), ("queries", "cd56"), ("hits", "cd56")])
def test_namespaces_are_sorted_as_asked(sort: str, first: str) -> None:
    lines = drawn(frame(sort=sort))
    at = next(number for number, line in enumerate(lines) if line.startswith("NAMESPACE"))
    assert lines[at + 1].startswith(first)


@pytest.mark.parametrize(("share", "cells"), [(0, "░░░░"), (0.5, "██░░"), (1, "████"), (2, "████"), (1 / 32, "▏░░░")])
def test_bars_are_drawn_in_eighths(share: float, cells: str) -> None:
    assert view.Bar(share).drawn(4).plain == cells


# ---- rates


def test_there_are_no_rates_across_a_restart() -> None:
    before, after = read(StatsReport, grown()), read(StatsReport, canned.stats(uptime_s=1.0))
    assert rates.between(before, after, 1.0) is None


def test_a_new_namespace_counts_from_zero() -> None:
    before = read(StatsReport, canned.stats(namespaces=[]))
    after = copy.deepcopy(canned.stats(uptime_s=7385.2))
    found = rates.between(before, read(StatsReport, after), 2.0)
    assert found is not None
    assert found.namespaces[canned.DIGESTS[0]].queried_per_s == 500000


# ---- plain tables


def output(columns: int | None, monkeypatch: pytest.MonkeyPatch) -> Output:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    return Output(as_json=False, stdout=Screen(is_terminal=columns is not None), stderr=Screen())


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    report = read(StatsReport, canned.stats())
    keys = [canned.block(raw) for raw in canned.HASHES]
    to = output(columns, monkeypatch)
    from kvctl.reports import KeysReport

    for text in (show.stats(to, report), show.tiers(to, report), show.keys(to, read(KeysReport, {"blocks": keys}))):
        assert max(map(len, text.splitlines())) <= columns
        assert "\x1b" not in text


def test_what_goes_into_a_pipe_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "an-organisation/" + "x" * 200
    report = read(StatsReport, canned.stats(namespaces=[canned.namespace(0, model=long)]))
    assert long in show.namespaces(output(None, monkeypatch), report)
    assert long not in show.namespaces(output(80, monkeypatch), report)


@pytest.mark.parametrize(
    ("is_terminal", "environ", "colour"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(is_terminal: bool, environ: dict[str, str], colour: bool) -> None:
    assert printing.has_colour(Screen(is_terminal=is_terminal), environ) is colour


@pytest.mark.parametrize(("text", "cells"), [("abc", 3), ("模型", 4), ("e\u0301", 1)])
def test_wide_characters_take_two_cells(text: str, cells: int) -> None:
    assert printing.cells(text) == cells


@pytest.mark.parametrize("text", ["模型模型模型", "abcdefghijk", "ab"])
def test_a_cell_has_exactly_its_width(text: str) -> None:
    assert printing.cells(printing.fit(text, 6)) == 6


# ---- the live view

_PROGRAM = """
import sys
from kvctl import top
from kvctl.printing import Output
from kvctl.verbs import Call
from tests.kvctl.canned import FakeDaemon, options
sys.exit(top.run(Call(options("top"), FakeDaemon(), Output(as_json=False))))
"""


_STYLES = re.compile(rb"\x1b\[[0-9;]*m")


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, program: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        paths = os.pathsep.join((str(ROOT), str(ROOT / "client")))
        environ = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": paths}
        # A group of its own in our session: stop signals do nothing to a group whose parents are elsewhere.
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=slave, stdout=slave, stderr=slave, env=environ, process_group=0
        )
        self.slave = slave
        self.seen = b""

    def read_until(self, wanted: bytes) -> None:
        """Read until `wanted` has come, whatever colours it has; the test's timeout bounds it."""
        start = len(self.seen)
        while wanted not in self.seen[start:] and wanted not in _STYLES.sub(b"", self.seen[start:]):
            ready, _, _ = select.select([self.master], [], [], 60)
            assert ready, self.seen[-2000:]
            self.seen += os.read(self.master, 65536)

    def wait(self) -> int:
        """Return the exit code, reading what the program still writes."""
        while self.process.poll() is None:
            ready, _, _ = select.select([self.master], [], [], 0.05)
            if ready:
                self.seen += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Generator[Terminal]:
    opened = Terminal(_PROGRAM)
    yield opened
    opened.close()


def is_restored(terminal: Terminal) -> bool:
    """Whether mode, cursor and screen are as they were."""
    mode = termios.tcgetattr(terminal.slave) == terminal.before
    return mode and terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l") and (
        terminal.seen.rindex(b"\x1b[?1049l") > terminal.seen.rindex(b"\x1b[?1049h")
    )


def test_top_sorts_and_quits_by_its_keys_and_restores_the_terminal(terminal: Terminal) -> None:
    terminal.read_until(b"sort: used")
    assert termios.tcgetattr(terminal.slave) != terminal.before
    os.write(terminal.master, b"s")
    terminal.read_until(b"sort: queries")
    os.write(terminal.master, b"q")
    assert terminal.wait() == 0
    assert is_restored(terminal)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_top_restores_the_terminal_when_a_signal_ends_it(terminal: Terminal, number: int, code: int) -> None:
    terminal.read_until(b"sort: used")
    terminal.process.send_signal(number)
    assert terminal.wait() == code
    assert is_restored(terminal)


def test_top_follows_a_terminal_that_is_resized(terminal: Terminal) -> None:
    terminal.read_until(b"sort: used")
    assert b"HITS  IN/s" not in _STYLES.sub(b"", terminal.seen)
    fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 130, 0, 0))
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.read_until(b"HITS  IN/s")
    os.write(terminal.master, b"q")
    assert terminal.wait() == 0


def test_top_gives_the_terminal_back_while_it_is_stopped(terminal: Terminal) -> None:
    terminal.read_until(b"sort: used")
    terminal.process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
    terminal.read_until(b"\x1b[?1049l")
    assert termios.tcgetattr(terminal.slave) == terminal.before
    terminal.process.send_signal(signal.SIGCONT)
    terminal.read_until(b"sort: used")
    os.write(terminal.master, b"q")
    assert terminal.wait() == 0
    assert is_restored(terminal)
