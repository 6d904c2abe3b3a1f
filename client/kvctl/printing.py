"""Text for people: tables that line up, numbers that read well, names that can't harm a terminal.

Invariants
1. Data goes to stdout, talk to stderr; with --json stdout holds JSON and nothing else.
2. No escape sequence goes to what is not a terminal, or where NO_COLOR is set; what came from elsewhere (names of
   models, error texts) never reaches a terminal with its control characters.
3. A table is cut to the width of a terminal only: what goes into a file or a pipe is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from kvstore.units import format_duration, format_size

_BOLD, _RED, _YELLOW, _OFF = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"


def has_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `stream` is a terminal that shows colours and nobody has asked for none (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Output:
    """Where a verb writes to."""

    def __init__(self, *, as_json: bool, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.as_json = as_json
        self.stdout = sys.stdout if stdout is None else stdout
        self.stderr = sys.stderr if stderr is None else stderr
        self.colour = has_colour(self.stdout)
        self._progress_shown = False

    @property
    def width(self) -> int | None:
        """Columns of the terminal, None where nothing limits a line."""
        return shutil.get_terminal_size().columns if self.stdout.isatty() else None

    def text(self, text: str) -> None:
        """Write data for people."""
        self.stdout.write(text + "\n")

    def report(self, body: Any) -> None:
        """Write data for programs: one line, or indented on a terminal."""
        indent = 2 if self.stdout.isatty() else None
        self.stdout.write(json.dumps(body, indent=indent, default=_hex) + "\n")

    def either(self, body: Any, text: str) -> None:
        """Write `body` with --json, else `text`."""
        if self.as_json:
            self.report(body)
        else:
            self.text(text)

    def say(self, text: str) -> None:
        """Write talk."""
        self.end_progress()
        self.stderr.write(text + "\n")
        self.stderr.flush()

    def progress(self, done: int, total: int) -> None:
        """Show how far a long request is, on a terminal only."""
        if not self.stderr.isatty():
            return
        share = f"{100 * done // total:3d} %" if total else ""
        self.stderr.write(f"\r\x1b[K{done:,} of {total:,} {share}")
        self.stderr.flush()
        self._progress_shown = True

    def end_progress(self) -> None:
        """Remove what `progress` has shown."""
        if self._progress_shown:
            self.stderr.write("\r\x1b[K")
            self._progress_shown = False

    def heading(self, text: str) -> str:
        return f"{_BOLD}{text}{_OFF}" if self.colour else text

    def alarming(self, text: str) -> str:
        return f"{_RED}{text}{_OFF}" if self.colour else text

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        left: int = 1,
        shrink: int | None = None,
        least: int | None = None,
    ) -> str:
        """Return aligned columns: the first `left` to the left, numbers to the right.

        On a terminal that is too narrow, column `shrink` is cut, then columns behind the first `least` are left out.
        """
        widths = [max(map(cells, column)) for column in zip(headers, *rows, strict=True)]
        if self.width is not None and shrink is not None:
            excess = _line_cells(widths) - self.width
            widths[shrink] = max(min(widths[shrink], 6), widths[shrink] - max(0, excess))
        if self.width is not None and least is not None:
            while len(widths) > least and _line_cells(widths) > self.width:
                widths.pop()
        lines = [
            "  ".join(fit(cell, width, at < left) for at, (cell, width) in enumerate(zip(row, widths, strict=False)))
            for row in (headers, *rows)
        ]
        return "\n".join([self.heading(lines[0].rstrip()), *(line.rstrip() for line in lines[1:])])


def plain(text: str) -> str:
    """Return `text` with what is not printable written out, so that no terminal obeys it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cells(text: str) -> int:
    """Return how many columns of a terminal `text` takes."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)


def fit(text: str, width: int, to_the_left: bool = True) -> str:
    """Return `text` in exactly `width` columns, cut with an ellipsis or padded."""
    if cells(text) > width:
        while text and cells(text) >= width:
            text = text[:-1]
        text += "…"
    padding = " " * (width - cells(text))
    return text + padding if to_the_left else padding + text


def count(number: float) -> str:
    """Return a whole number in groups of three digits."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it belongs."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def rate(per_s: float) -> str:
    """Return a rate with one decimal below ten."""
    return f"{per_s:.1f}" if 0 < per_s < 9.95 else f"{per_s:,.0f}"


def percent(share: float | None) -> str:
    """Return a share in percent, "-" where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def size(size_bytes: float) -> str:
    """Return a size in a binary unit."""
    return format_size(size_bytes)


def duration(seconds: float | None, none: str = "never") -> str:
    """Return a duration, or `none` where there is no end."""
    return none if seconds is None else format_duration(seconds)


def _line_cells(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _hex(value: object) -> str:
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no place in a report")
