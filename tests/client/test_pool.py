"""The mapping of the daemon's pool: its page tables, its views, its end."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from kvclient._pool import BATCH_STEPS, Mapping, Mappings, PageToucher
from kvstore.errors import RemoteProtocolError
from tests.client.test_session import welcome
from tests.daemon_fixture import eventually

STEP = 2 << 20


@contextmanager
def shared_file(size_bytes: int, filled_bytes: int = 0) -> Generator[int, None, None]:
    fd = os.memfd_create("kv-test")
    try:
        os.ftruncate(fd, size_bytes)
        os.pwrite(fd, b"\1" * filled_bytes, 0)
        yield fd
    finally:
        os.close(fd)


def filled_bytes(fd: int) -> int:
    """Return how much memory a shared file takes."""
    return os.fstat(fd).st_blocks * 512


def test_only_what_is_filled_is_touched_ahead() -> None:
    size = (BATCH_STEPS + 3) * STEP + 4096
    with shared_file(size, 2 * STEP + 5000) as fd:
        before = filled_bytes(fd)
        mapping = Mapping(fd, size, writable=True)
        for first in range(0, mapping.step_count, BATCH_STEPS):
            mapping.touch_batch(first)
        assert filled_bytes(fd) == before
        assert not mapping.is_touched
        # The third step is filled in part: it is touched when it is used.
        mapping.touch([0, 2 * STEP], 4096)
        assert filled_bytes(fd) >= 3 * STEP
        os.pwrite(fd, b"\1" * size, 0)
        for first in range(0, mapping.step_count, BATCH_STEPS):
            mapping.touch_batch(first)
        assert mapping.is_touched


@pytest.mark.parametrize("writable", [True, False])
def test_touching_fills_the_page_tables_and_changes_no_byte(writable: bool) -> None:
    size = 4 * STEP
    with shared_file(size, size) as fd:
        mapping = Mapping(fd, size, writable=writable)
        mapping.touch([0, STEP - 10, 3 * STEP], 4096)
        assert not mapping.is_touched or mapping.step_count == 4
        mapping.touch([2 * STEP], 4096)
        assert mapping.is_touched
        assert ctypes.string_at(mapping.address, size) == b"\1" * size


def test_a_background_thread_touches_what_appears_and_ends_with_the_mapping() -> None:
    size = 3 * STEP
    with shared_file(size, size) as fd:
        mapping = Mapping(fd, size, writable=True)
        toucher = PageToucher(mapping)
        toucher.start()
        eventually(lambda: mapping.is_touched, "all is touched")
        toucher.stop()
        toucher.start()  # too late
        assert not any(thread.name == "kvclient-pretouch" for thread in threading.enumerate())


def test_views_are_read_only_and_keep_the_mapping_alive() -> None:
    with shared_file(STEP, 100) as fd:
        mapping = Mapping(fd, STEP, writable=True)
        view, place = mapping.view(50, 100)
        del mapping
        assert view.readonly
        assert view.tobytes() == b"\1" * 50 + b"\0" * 50
        piece = view[10:20]
        view.release()
        assert place() is not None
        assert piece.tobytes() == b"\1" * 10
        piece.release()
        del piece, view
        assert place() is None


def test_offsets_outside_are_refused() -> None:
    with shared_file(STEP) as fd:
        mapping = Mapping(fd, STEP, writable=True)
        mapping.check([0, STEP - 4096], 4096)
        for offset in (STEP - 4095, STEP, 1 << 63):
            with pytest.raises(RemoteProtocolError):
                mapping.check([0, offset], 4096)


def test_one_boot_of_the_daemon_is_mapped_once_and_the_next_one_anew() -> None:
    mappings = Mappings()
    with shared_file(STEP) as fd:
        first, _ = mappings.adopt(welcome(pool_bytes=STEP, boot_id=b"one"), [os.dup(fd)])
        again, _ = mappings.adopt(welcome(pool_bytes=STEP, boot_id=b"one"), [os.dup(fd)])
        other, _ = mappings.adopt(welcome(pool_bytes=STEP, boot_id=b"two"), [os.dup(fd)])
        none, _ = mappings.adopt(welcome(pool_bytes=0, boot_id=b"two"), [])
    assert first is again
    assert other is not first
    assert none is None
    assert isinstance(first, Mapping)
    assert first.memory[: mmap.PAGESIZE] == bytes(mmap.PAGESIZE)
    mappings.close()
