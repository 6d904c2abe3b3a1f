"""Logs: one line an event, never bytes, bounded repeats, and nobody waits for a reader."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
from collections.abc import Generator

import pytest

from kvstored import logs
from kvstored.logs import LINE_CHARS_MAX, REPEATS_MAX, WINDOW_S, RepeatLimit, fields, logging_to

log = logging.getLogger("kvstored.test")


@contextlib.contextmanager
def captured(form: str = "text", level: str = "info", **environ: str) -> Generator[list[str], None, None]:
    """Give a list that holds the lines once the block is left."""
    lines: list[str] = []
    reader, writer = os.pipe()
    try:
        with logging_to(writer, level, form, environ):
            yield lines
        os.close(writer)
        with os.fdopen(reader) as stream:
            lines += stream.read().splitlines()
    except BaseException:
        os.close(reader)
        raise


def test_event_is_one_line_with_its_fields() -> None:
    with captured() as lines:
        error = OSError("no\nroom")
        log.warning("ssd tier degraded", extra=fields(directory="/mnt/a b", count=3, share=0.5, error=error))
    assert len(lines) == 1
    time, rest = lines[0].split(" ", 1)
    assert time.endswith("Z")
    assert rest == (
        'WARNING kvstored.test "ssd tier degraded" directory="/mnt/a b" count=3 share=0.5 error="no\\nroom"'
    )


def test_json_event_is_one_object() -> None:
    with captured("json") as lines:
        log.info("evicted %d blocks", 5, extra=fields(tier="cpu", blocks=5, none=None, tiers=["cpu", "ssd"]))
    told = json.loads(lines[0])
    assert told["tiers"] == "cpu,ssd"
    assert (told["level"], told["event"], told["tier"], told["blocks"]) == ("info", "evicted 5 blocks", "cpu", 5)


@pytest.mark.parametrize("form", ["text", "json"])
def test_bytes_never_reach_the_log(form: str) -> None:
    secret = b"SECRET-KV"
    with captured(form) as lines:
        log.info("block %s", secret, extra=fields(payload=secret, view=memoryview(secret), array=bytearray(secret)))
    assert "SECRET" not in lines[0]
    assert "9 bytes" in lines[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_line_has_a_limit_whatever_the_fields_hold(form: str) -> None:
    with captured(form) as lines:
        log.info("x" * 2000, extra=fields(**{f"key{i}": "y\n" * 10_000 for i in range(50)}))
    assert len(lines) == 1
    assert len(lines[0]) <= LINE_CHARS_MAX
    if form == "json":
        json.loads(lines[0])


def test_exception_is_kept_on_the_events_line() -> None:
    with captured() as lines:
        try:
            raise ValueError("bad")
        except ValueError:
            log.exception("failed")
    assert len(lines) == 1
    assert "exception=ValueError('bad')" in lines[0]
    assert "Traceback" in lines[0]


def test_level_is_kept_to_and_given_back() -> None:
    before = logging.getLogger().level
    with captured(level="warning") as lines:
        log.info("small talk")
        log.warning("look here")
    assert [line.split()[3] for line in lines] == ['"look']
    assert logging.getLogger().level == before


def test_repeats_are_held_back_and_counted() -> None:
    now_s = 0.0
    limit = RepeatLimit(lambda: now_s)

    def record() -> logging.LogRecord:
        return logging.LogRecord("kvstored", logging.WARNING, __file__, 1, "io error in %s", ("x",), None)

    passed = [limit.filter(record()) for _ in range(100)]
    assert passed == [True] * REPEATS_MAX + [False] * (100 - REPEATS_MAX)
    other = logging.LogRecord("kvstored", logging.WARNING, __file__, 1, "something else", (), None)
    assert limit.filter(other)
    now_s = WINDOW_S
    after = record()
    assert limit.filter(after)
    assert after.__dict__["fields"] == {"held_back": 100 - REPEATS_MAX}


def test_repeat_limit_remembers_a_bounded_number_of_events() -> None:
    limit = RepeatLimit(lambda: 0.0)
    for number in range(5000):
        limit.filter(logging.LogRecord("kvstored", logging.INFO, __file__, 1, f"event {number}", (), None))
    assert len(limit.__dict__["_seen"]) <= 1000


def test_reader_that_stops_reading_holds_up_neither_logging_nor_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FLUSH_S", 0.01)
    reader, writer = os.pipe()
    with logging_to(writer, "info", "text"):
        for number in range(20_000):
            log.info(f"event {number}")
    os.close(reader)  # the write that is stuck fails now, and the thread ends
    os.close(writer)


def test_lines_that_a_full_queue_dropped_are_counted() -> None:
    waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(1)
    handler = logs.Enqueue(waiting)
    for number in range(4):
        handler.handle(logging.LogRecord("kvstored", logging.INFO, __file__, 1, f"event {number}", (), None))
    first = waiting.get_nowait()
    handler.handle(logging.LogRecord("kvstored", logging.INFO, __file__, 1, "after", (), None))
    after = waiting.get_nowait()
    assert first is not None
    assert after is not None
    assert (first.msg, after.msg, after.__dict__["fields"]) == ("event 0", "after", {"lines_dropped": 3})


def test_journal_gets_the_priority_in_front() -> None:
    reader, writer = os.pipe()
    found = os.fstat(writer)
    with os.fdopen(reader) as stream:
        with logging_to(writer, "info", "text", {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}):
            log.error("lost")
        os.close(writer)
        assert stream.read().startswith("<3>")
