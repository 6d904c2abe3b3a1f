"""The demo's progress on stderr: a bar on a terminal, else a line a step."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Steps:
    """A context manager; `begin` ends the step before."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begun = 0
        self._began_at = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._task = self._bar.add_task("", total=total)

    def begin(self, text: str) -> None:
        """Show that this step is being done now."""
        self._begun += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._begun - 1, description=text)
        else:
            elapsed_s = time.monotonic() - self._began_at
            print(f"demo: {elapsed_s:5.1f} s  [{self._begun}/{self._total}] {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
