"""`kvctl top`: the live view. The terminal's owner while it runs.

Invariants
1. However top ends (q, a signal, an error), the terminal is as it was: its mode, its screen, its cursor.
2. A daemon that goes away is shown as gone, with the last figures, and is asked again; top ends only when told to.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from kvctl import rates
from kvctl.exits import Exit
from kvctl.reports import StatsReport, StatusReport, read
from kvctl.verbs import Call
from kvstore import wire
from kvstore.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from kvctl.view import Frame

_ANSWER_S = 2.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (*_ENDINGS, signal.SIGWINCH, signal.SIGTSTP)


def run(call: Call) -> Exit:
    """Show the store until q or a signal."""
    if call.output.as_json:
        raise UsageError("top is for people: use kvctl stats --watch --json")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise UsageError("top needs a terminal: use kvctl stats --watch, which needs none")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as exc:
        raise UsageError("top needs the package rich: pip install 'kvstored[ctl]'") from exc
    watched = Watched(call)
    watched.look()
    if watched.trouble:
        watched.raise_trouble()
    console = Console()
    with _wakeups() as wakeups, Screen(console, Live) as screen:
        return _loop(call.options.interval, watched, screen, wakeups)


def _loop(interval_s: float, watched: Watched, screen: Screen, wakeups: int) -> Exit:
    due_s = time.monotonic() + interval_s
    while True:
        screen.show(watched.frame(interval_s, *screen.measure()))
        ready, _, _ = select.select([sys.stdin, wakeups], [], [], max(0.0, due_s - time.monotonic()))
        if wakeups in ready:
            signals = set(os.read(wakeups, 64))
            if ending := signals & set(_ENDINGS):
                return Exit.INTERRUPTED if signal.SIGINT in ending else Exit.DONE
            if signal.SIGTSTP in signals:
                screen.suspend()
        if sys.stdin in ready:
            # An empty read is a terminal that hung up.
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return Exit.DONE
            if b"s" in keys.lower():
                watched.sort_by_the_next()
        if time.monotonic() >= due_s:
            watched.look()
            due_s = time.monotonic() + interval_s


class Watched:
    """The daemon's last two reports."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._status = StatusReport()
        self._stats = StatsReport()
        self._rates: rates.Rates | None = None
        self._looked_s: float | None = None
        self._sort = "used"
        self._error: UnavailableError | None = None
        self.trouble = ""

    def look(self) -> None:
        """Ask the daemon again; if it does not answer the last figures stay."""
        deadline_s = min(_ANSWER_S, self._call.deadline_s(_ANSWER_S))
        try:
            status = self._call.ask(wire.Status(0), deadline_s=deadline_s)
            stats = self._call.ask(wire.Stats(0), deadline_s=deadline_s)
        except UnavailableError as exc:
            self._error, self.trouble = exc, f"no answer, asking again: {str(exc).splitlines()[0]}"
            self._rates = self._looked_s = None
            return
        now_s = time.monotonic()
        before, self._status, self._stats = self._stats, read(StatusReport, status), read(StatsReport, stats)
        last_s, self._looked_s = self._looked_s, now_s
        self._rates = None if last_s is None else rates.between(before, self._stats, now_s - last_s)
        self._error, self.trouble = None, ""

    def raise_trouble(self) -> None:
        """Raise what kept the last look from an answer."""
        if self._error is not None:
            raise self._error

    def sort_by_the_next(self) -> None:
        """Change the order of the namespaces."""
        from kvctl.view import next_sort

        self._sort = next_sort(self._sort)

    def frame(self, interval_s: float, width: int, height: int) -> Frame:
        """Return what there is to show."""
        from kvctl.view import Frame

        clock = time.strftime("%H:%M:%S")
        return Frame(
            self._status, self._stats, self._rates, self._sort, clock, interval_s, width, height, self.trouble
        )


class Screen:
    """The terminal in the mode that top needs: keys without Enter or echo, the alternate screen, no cursor."""

    def __init__(self, console: Any, live: Callable[..., Any]) -> None:
        self._console = console
        self._new_live = live
        self._live: Any = None
        self._mode: list[Any] = []

    def __enter__(self) -> Screen:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def measure(self) -> tuple[int, int]:
        """Return columns and lines as they are now; $COLUMNS would say what they were when a shell exported it."""
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        self._console.size = (columns, lines) = (columns or 80, lines or 24)
        return columns, lines

    def show(self, frame: Frame) -> None:
        """Draw a frame."""
        from kvctl.view import render

        self._live.update(render(frame), refresh=True)

    def suspend(self) -> None:
        """Give the terminal back and stop, as Ctrl-Z asks; go on when the shell says so."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _nothing)
        self._enter()

    def _enter(self) -> None:
        self._mode = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        try:
            self._live = self._new_live(console=self._console, screen=True, auto_refresh=False)
            self._live.start()
        except BaseException:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._mode)
            raise

    def _leave(self) -> None:
        try:
            self._live.stop()
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._mode)


@contextmanager
def _wakeups() -> Generator[int]:
    """Turn signals into bytes on a pipe, so that the loop meets them where it waits and nowhere else."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, _nothing) for number in _SIGNALS}
    previous_fd = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Take a signal that the pipe tells of."""
