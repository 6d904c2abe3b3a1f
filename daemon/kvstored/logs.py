"""Logs: one event a line, with fields, to standard error.

An event is an ordinary `logging` record whose message names it; `fields(...)` attaches what belongs to it:

    log.warning("ssd tier degraded", extra=fields(directory=path, error=exc))
    2026-01-31T12:00:00.123Z WARNING kvstored.disk "ssd tier degraded" directory=/mnt/kv error="disk full"

Invariants
1. Bytes never reach the log, as a field or as an argument: KV and tokens are named by length only.
2. An event is one line, whatever its fields hold, and a line has at most `LINE_CHARS_MAX` characters.
3. A repeated event is let through `REPEATS_MAX` times a `WINDOW_S`; how many were held back is told with the next.
4. Logging never waits: a reader that doesn't read costs lines, which are counted, and neither the daemon's loop
   nor its end.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

LINE_CHARS_MAX = 4096
VALUE_CHARS_MAX = 512
TRACEBACK_CHARS_MAX = 3000
REPEATS_MAX = 5
WINDOW_S = 60.0
_EVENTS_MAX = 1000
_QUEUE_LINES_MAX = 10_000
_FLUSH_S = 2.0
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def fields(**values: Any) -> dict[str, Any]:
    """Return `extra=` for a logging call, carrying `values` as the event's fields."""
    return {"fields": values}


@contextmanager
def logging_to(
    descriptor: int, level: str, form: str, environ: Mapping[str, str] = os.environ
) -> Generator[None, None, None]:
    """Log to `descriptor` inside the `with` block, from a thread of its own; on leaving, what waits is written."""
    sink = _Sink(descriptor, prefix=form == "text" and _is_journal(descriptor, environ))
    sink.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_QUEUE_LINES_MAX)
    handler = Enqueue(lines)
    handler.addFilter(RepeatLimit())
    writer = threading.Thread(target=_write_lines, args=(lines, sink), name="kvstored-log", daemon=True)
    root = logging.getLogger()
    level_before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)
        _end(lines, writer)


class RepeatLimit(logging.Filter):
    """Lets an event through a few times a window. Equal is what has the same logger, level and message."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._seen: dict[tuple[str, int, str], list[float]] = {}  # start of the window, let through, held back

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._now_s()
        event = (record.name, record.levelno, str(record.msg))
        seen = self._seen.get(event)
        if seen is None or now_s - seen[0] >= WINDOW_S:
            held_back = int(seen[2]) if seen else 0
            self._seen.pop(event, None)
            while len(self._seen) >= _EVENTS_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[event] = [now_s, 1, 0]
            if held_back:
                record.fields = {**_fields_of(record), "held_back": held_back}
            return True
        if seen[1] < REPEATS_MAX:
            seen[1] += 1
            return True
        seen[2] += 1
        return False


class TextFormatter(logging.Formatter):
    """`time LEVEL logger "event" key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, record.name, _quoted(_event(record))]
        parts += [f"{key}={_quoted(_plain(value, _limit(key)))}" for key, value in _all_fields(record).items()]
        return " ".join(parts)[:LINE_CHARS_MAX]


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the fields beside `time`, `level`, `logger` and `event`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record), "level": record.levelname.lower(), "logger": record.name, "event": _event(record)
        }  # fmt: skip
        room = LINE_CHARS_MAX - len(json.dumps(line))
        for key, value in _all_fields(record).items():
            shown = _plain(value, _limit(key))
            room -= len(json.dumps(shown)) + len(key) + 6
            if room < 0:
                break
            line.setdefault(key, shown)
        return json.dumps(line)


class Enqueue(logging.handlers.QueueHandler):
    """Formats nothing and waits for nothing; counts what a full queue makes it drop."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # Values are turned to text here, while they are what they were when the event happened.
        record.msg, record.args = _event(record), None
        record.fields = {key: _plain(value, _limit(key)) for key, value in _all_fields(record).items()}
        record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._dropped:
            record.fields = {**_fields_of(record), "lines_dropped": self._dropped}
        try:
            self.queue.put_nowait(record)
            self._dropped = 0
        except queue.Full:
            self._dropped += 1


class _Sink(logging.Handler):
    """Writes lines past every buffer and lock of Python's; to the systemd journal with the priority in front."""

    def __init__(self, descriptor: int, *, prefix: bool) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>" if self._prefix else ""
        line = f"{prefix}{self.format(record)}\n".encode(errors="backslashreplace")
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:
            pass  # nobody reads any more, and there is nobody else to tell


def _end(lines: queue.Queue[logging.LogRecord | None], writer: threading.Thread) -> None:
    """Let what waits be written for a moment, then give it up: a reader that is stuck must not hold up the exit."""
    try:
        lines.put(None, timeout=_FLUSH_S)
        writer.join(_FLUSH_S)
    except queue.Full:
        pass
    if writer.is_alive():
        with lines.mutex:
            lines.queue.clear()
            lines.queue.append(None)
            lines.not_empty.notify()


def _write_lines(lines: queue.Queue[logging.LogRecord | None], sink: logging.Handler) -> None:
    while (record := lines.get()) is not None:
        sink.handle(record)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    found = getattr(record, "fields", None)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _all_fields(record: logging.LogRecord) -> dict[str, Any]:
    if not record.exc_info or record.exc_info[1] is None:
        return _fields_of(record)
    trace = logging.Formatter().formatException(record.exc_info)
    return {**_fields_of(record), "exception": repr(record.exc_info[1]), "traceback": trace}


def _event(record: logging.LogRecord) -> str:
    if not record.args:
        return str(record.msg)
    if isinstance(record.args, Mapping):
        return str(record.msg) % {key: _bare(value) for key, value in record.args.items()}
    return str(record.msg) % tuple(_bare(value) for value in record.args)


def _bare(value: Any) -> Any:
    return f"<{len(cast('bytes', value))} bytes>" if isinstance(value, (bytes, bytearray, memoryview)) else value


def _limit(key: str) -> int:
    return TRACEBACK_CHARS_MAX if key == "traceback" else VALUE_CHARS_MAX


def _plain(value: Any, limit: int) -> Any:
    """Return a number as it is and anything else as bounded text."""
    value = _bare(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return round(value, 6)
    text = ",".join(map(str, cast("list[Any]", value))) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def _quoted(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    text = str(value)
    is_bare = text and text.isprintable() and not any(character in ' "=\\' for character in text)
    quoted = text if is_bare else json.dumps(text, ensure_ascii=False)
    # JSON leaves some alone that end a line or command a terminal: C1 controls, separators, marks of direction.
    return quoted if quoted.isprintable() else "".join(map(_printable, quoted))


def _printable(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def _is_journal(descriptor: int, environ: Mapping[str, str]) -> bool:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
