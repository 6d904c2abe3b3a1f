"""Copies: every size and shift arrives whole, pieces that continue each other are joined."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest

from kvclient import _copy
from kvclient._buffers import OneBuffer, address_of, aligned_buffer, blocks_of
from kvclient._copy import Copier, checksum_of, pairs
from kvstore import errors
from kvstore.checksum import checksum


@pytest.mark.parametrize("slow", [True, False])
def test_every_size_and_shift_within_the_page_arrives_whole(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copy, "aliasing_is_slow", lambda: slow)
    room = 300 << 10
    source = bytearray(random.Random(1).randbytes(room))
    destination = bytearray(room)
    base, to = address_of(source), address_of(destination)
    copier = Copier()
    for size in (1, 2047, 2048, 4096, 70_000, 150_001, 270_000):
        for shift in (0, 1, 15, 31, 32, 2048, 4095):
            # Where the destination begins, so that it is `shift` bytes further in its page than the source.
            start = (base + shift - to) % 4096
            ctypes.memset(to, 0, room)
            copier.run([(to + start, base, size)])
            assert destination[start : start + size] == source[:size], (size, shift)
            assert not any(destination[:start])
            assert not any(destination[start + size : start + size + 64])


def test_the_machine_is_asked_once_whether_aliasing_is_slow() -> None:
    assert _copy.aliasing_is_slow() is _copy.aliasing_is_slow()


def test_a_late_gil_makes_the_next_copies_keep_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    cost_s = [0.0]
    moves: list[str] = []

    def releasing(*_: int) -> None:
        moves.append("release")
        now[0] += cost_s[0]

    def keeping(*_: int) -> None:
        moves.append("keep")

    monkeypatch.setattr(_copy, "_move_releasing", releasing)
    monkeypatch.setattr(_copy, "_move_keeping", keeping)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    copier = Copier()
    mebibyte = (0, 0, 1 << 20)
    copier.run([mebibyte] * 3)
    assert moves == ["release"] * 3
    cost_s[0] = 0.010
    moves.clear()
    for _ in range(6):
        copier.run([mebibyte] * 50)
    assert moves == ["release", *["keep"] * 256, "release", *["keep"] * 42]
    cost_s[0] = 0.0
    moves.clear()
    copier.run([mebibyte] * 220)
    assert moves == [*["keep"] * 214, *["release"] * 6]


def test_small_copies_keep_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []

    def keeping(destination: int, source: int, size: int) -> None:
        moves.append(size)

    monkeypatch.setattr(_copy, "_move_keeping", keeping)
    Copier().run([(0, 0, 64 << 10)] * 5)
    assert moves == [64 << 10] * 5


def test_places_that_continue_each_other_on_both_sides_are_one_copy() -> None:
    buffer = bytearray(6 * 100)
    blocks = OneBuffer(buffer, 6, 100, writable=True)
    base = address_of(buffer)
    assert pairs(blocks, range(6), [1000, 1100, 1200, 5000, 5100, 1300], 100) == [
        (base, 1000, 300),
        (base + 300, 5000, 200),
        (base + 500, 1300, 100),
    ]
    assert pairs(blocks, [4], [7], 100) == [(base + 400, 7, 100)]


def test_blocks_in_pieces_are_laid_out_one_behind_the_other() -> None:
    class Halves:
        count = 2

        def segments(self, position: int) -> list[tuple[int, int]]:
            return [(10_000 + position * 60, 60), (20_000 + position * 40, 40)]

    blocks = blocks_of(Halves(), 2, 100, writable=False)
    assert pairs(blocks, [0, 1], [500, 900], 100) == [
        (10_000, 500, 60),
        (20_000, 560, 40),
        (10_060, 900, 60),
        (20_040, 960, 40),
    ]
    with pytest.raises(errors.NamespaceMismatch, match="120"):
        pairs(blocks_of(Halves(), 2, 120, writable=False), [0], [500], 120)


def test_a_checksum_over_pieces_is_that_of_the_whole() -> None:
    content = bytes(random.Random(2).randbytes(1000))
    base = address_of(content)
    assert checksum_of([(base, 1000)]) == checksum(content)
    assert checksum_of([(base, 300), (base + 300, 1), (base + 301, 699)]) == checksum(content)


def test_aligned_buffers_are_zeroed_writable_and_start_half_a_page_in() -> None:
    buffer = aligned_buffer(5000)
    assert len(buffer) == 5000
    assert not any(buffer)
    buffer[:] = b"x" * 5000
    assert address_of(buffer) % 4096 == 2048
    with pytest.raises(errors.UsageError):
        aligned_buffer(-1)


def test_threads_copy_at_once_without_harm() -> None:
    copier = Copier()
    size, count = 100_000, 20
    sources = [random.Random(at).randbytes(size) for at in range(4)]
    destinations = [bytearray(size) for _ in range(4)]

    def copy(at: int) -> None:
        to, base = address_of(destinations[at]), address_of(sources[at])
        for _ in range(count):
            copier.run([(to, base, size // 2), (to + size // 2, base + size // 2, size // 2)])

    threads = [threading.Thread(target=copy, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert destinations == sources
