"""The ssd tier when its disk, its files or its index fail: it says so, goes on with what works, and recovers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import shutil
import subprocess
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.errors import TierUnavailable
from kvstore.tiers import disk_recency, disk_space
from kvstore.tiers.disk_records import DiskWrite
from kvstore.tiers.index import Index
from kvstore.wire import Outcome
from tests.tiers.disk_blocks import MIB, Disk, Stored

BACK_OFF_S = 60.0


async def write_keys(disk: Disk, keys: range, length: int) -> tuple[list[Outcome], list[Stored]]:
    """Write what fits, whatever becomes of it."""
    writes: list[tuple[int, DiskWrite]] = []
    for key in keys:
        write = disk.prepare(disk.record(key, length), key)
        if write is not None:
            writes.append((key, write))
    outcomes = await disk.tier.write([write for _, write in writes])
    durable = [
        Stored(key, write.address, write.record)
        for (key, write), outcome in zip(writes, outcomes, strict=True)
        if outcome is Outcome.DURABLE
    ]
    return outcomes, durable


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@contextmanager
def file_size_limit(size_bytes: int) -> Generator[None]:
    """Let no file of this process grow beyond a size: every fallocate above it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_degrades_and_recovers_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        before = await disk.store(range(3), 100_000)
        with file_size_limit(64 << 10):
            for _ in range(5):
                outcomes, _ = await write_keys(disk, range(10, 14), 20_000)
                assert set(outcomes) <= {Outcome.NOT_DURABLE}
            usage = disk.tier.usage()
            assert usage.state == "degraded"
            assert "space" in usage.state_text
            assert disk.tier.allocate(20_000) is None, "no new segment is tried while the tier backs off"
            await disk.check(before)
        disk.clock.advance(BACK_OFF_S)
        after = await disk.store(range(20, 24), 20_000)
        assert disk.tier.usage().state == "ready"
        await disk.check(before + after)
        await disk.tier.close()

    asyncio.run(run())
    assert len([text for text in warnings(caplog) if "degraded" in text]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_really_full_file_system_degrades_and_recovers(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this container may not mount")

    async def run() -> None:
        disk = await Disk.open(small, 64 * MIB)
        stored: list[Stored] = []
        for n in range(10):
            _, durable = await write_keys(disk, range(n * 100, n * 100 + 20), 200_000)
            stored += durable
        assert stored
        assert disk.tier.usage().state == "degraded"
        await disk.check(stored)
        await disk.tier.forget([block.address for block in stored[:10]])
        stored = stored[10:] + await disk.store(range(5000, 5010), 200_000)
        await disk.check(stored)
        await disk.tier.close()

    try:
        asyncio.run(run())
    finally:
        subprocess.run(["umount", str(small)], check=True)


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, place: int) -> None:
    """Make `os.preadv` or `os.pwritev` fail wherever it touches a place of a file."""
    real: Callable[[int, Sequence[memoryview], int], int] = getattr(os, name)

    def call(fd: int, iovecs: Sequence[memoryview], at: int) -> int:
        if at <= place < at + sum(map(len, iovecs)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, iovecs, at)

    monkeypatch.setattr(os, name, call)


def fails(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def has_no_room(_: disk_space.Space) -> None:
    return None


def test_bad_slot_spoils_no_other_block_and_is_not_used_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        await disk.store([100], 20_000)
        bad = disk.tier.allocate(20_000)
        assert bad is not None
        disk.tier.release(bad)
        place = bad - disk.tier.segment_of(bad) * disk.tier.usage().segment_bytes
        with monkeypatch.context() as patch:
            fail_at(patch, "pwritev", place)
            outcomes, durable = await write_keys(disk, range(4), 20_000)
            assert sorted(outcomes) == [Outcome.DURABLE] * 3 + [Outcome.NOT_DURABLE]
            assert disk.tier.usage().state == "degraded"
            assert disk.tier.usage().quarantined_bytes == 20_480
            more = await disk.store(range(10, 14), 20_000)
            assert bad not in [block.address for block in more]
        disk.clock.advance(BACK_OFF_S)
        again = await disk.store(range(20, 23), 20_000)
        assert bad in [block.address for block in again]
        await disk.check(durable + more + again)
        assert disk.tier.usage().state == "ready"
        await disk.tier.close()

    asyncio.run(run())


def test_block_whose_sync_failed_is_not_durable_and_not_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        before = await disk.store([100], 20_000)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            outcomes, _ = await write_keys(disk, range(4), 20_000)
            assert set(outcomes) == {Outcome.NOT_DURABLE}
            assert disk.tier.usage().state == "degraded"
            await disk.check(before)
        after = await disk.store(range(10, 14), 20_000)
        await disk.check(before + after)
        assert disk.tier.usage().state == "ready"
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert sorted(block.key for block in disk.taken()) == [10, 11, 12, 13, 100]
        await disk.tier.close()

    asyncio.run(run())


@pytest.mark.parametrize("took_effect", [False, True])
def test_slots_of_a_transaction_of_unknown_effect_wait_for_a_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_effect: bool
) -> None:
    apply = Index._apply  # pyright: ignore[reportPrivateUsage]

    class Failing(lmdb.DiskError):
        pass

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        kept, gone = await disk.store([100, 101], 20_000)
        with monkeypatch.context() as patch:
            if took_effect:
                commit = Index.commit

                def after(self: Index, *args: Any) -> None:
                    commit(self, *args)
                    raise TierUnavailable("the disk failed after the commit")

                patch.setattr(Index, "commit", after)
            else:

                def before(self: Index, *args: Any) -> None:
                    apply(self, *args)
                    raise Failing("the disk failed")

                patch.setattr(Index, "_apply", before)
            outcomes, _ = await write_keys(disk, range(4), 20_000)
            assert set(outcomes) == {Outcome.NOT_DURABLE}
            assert not await disk.tier.forget([gone.address]), "the index backs off: the delete is kept for later"
            used = disk.tier.usage().used_bytes
            assert used == 6 * 20_480, "nobody knows yet whether the records exist, so their slots are not free"
        disk.clock.advance(BACK_OFF_S)
        after_it = await disk.store(range(10, 14), 20_000)
        assert disk.tier.usage().state == "ready"
        assert disk.tier.usage().used_bytes == 5 * 20_480
        await disk.check([kept, *after_it])
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert sorted(block.key for block in disk.taken()) == [10, 11, 12, 13, 100]
        await disk.tier.close()

    asyncio.run(run())


def test_unreadable_block_is_a_miss_and_the_others_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store(range(3), 20_000)
        bad = stored[1].address - stored[0].address
        with monkeypatch.context() as patch:
            fail_at(patch, "preadv", bad)
            assert await disk.outcomes(stored) == [Outcome.HIT, Outcome.UNAVAILABLE, Outcome.HIT]
        await disk.check(stored)
        assert disk.tier.usage().io_errors > 0
        await disk.tier.close()

    asyncio.run(run())


@pytest.mark.parametrize("cut", [0, 70_000, None])
def test_segment_lost_while_closed_takes_only_its_own_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int | None
) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        small = await disk.store(range(10), 20_000)
        large = await disk.store(range(20, 23), MIB)
        await disk.tier.checkpoint(array("Q", [block.address for block in small + large]))
        victim = tmp_path / "segments" / f"{disk.tier.segment_of(small[0].address):08d}.seg"
        await disk.tier.close()
        if cut is None:
            victim.unlink()
        else:
            os.truncate(victim, cut)
        (tmp_path / "segments" / "00000077.seg").write_bytes(b"orphan")
        (tmp_path / "recency.tmp").write_bytes(b"left over")

        disk = await Disk.open(tmp_path)
        assert not (tmp_path / "segments" / "00000077.seg").exists()
        assert not (tmp_path / "recency.tmp").exists()
        kept = small[: (cut or 0) // 20_480] + large
        found = disk.taken()
        assert found == kept
        assert disk.tier.usage().records_lost == 13 - len(kept)
        await disk.check(found)
        await disk.check(await disk.store(range(30, 40), 20_000))
        await disk.tier.close()

    asyncio.run(run())
    assert len(warnings(caplog)) == 1
    assert "records dropped" in warnings(caplog)[0]


@pytest.mark.parametrize("cut", [0, None])
def test_segment_lost_under_the_daemon_is_noticed_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int | None
) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        small = await disk.store(range(5), 20_000)
        large = await disk.store(range(20, 23), MIB)
        victim = tmp_path / "segments" / f"{disk.tier.segment_of(small[0].address):08d}.seg"
        if cut is None:
            victim.unlink()
        else:
            os.truncate(victim, cut)
        outcomes, _ = await write_keys(disk, range(30, 33), 20_000)
        assert set(outcomes) == {Outcome.NOT_DURABLE}, "a file that is gone keeps nothing"
        assert disk.tier.usage().state == "degraded"
        assert list(disk.tier.take_lost()) == [block.address for block in small]
        assert set(await disk.outcomes(small)) <= {Outcome.CORRUPT, Outcome.HIT}, "an unlinked file may still be open"
        after = await disk.store(range(40, 44), 20_000)
        assert set(await disk.outcomes(small)) == {Outcome.CORRUPT}
        await disk.tier.forget([block.address for block in small])
        await disk.check(large + after)
        assert disk.tier.usage().state == "ready"
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert {block.key for block in disk.taken()} == {block.key for block in large + after}
        await disk.tier.close()

    asyncio.run(run())


def test_checkpoint_notices_a_lost_segment(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store(range(5), 20_000)
        next((tmp_path / "segments").iterdir()).unlink()
        await disk.tier.checkpoint(array("Q"))
        assert disk.tier.usage().state == "degraded"
        assert list(disk.tier.take_lost()) == [block.address for block in stored]
        await disk.tier.forget(disk.tier.take_lost())
        await disk.tier.checkpoint(array("Q"))
        assert disk.tier.usage().state == "ready"
        await disk.check(await disk.store(range(10), 20_000))
        await disk.tier.close()

    asyncio.run(run())


def test_failed_checkpoint_costs_only_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store(range(3), 5000)
        with monkeypatch.context() as patch:
            patch.setattr(disk_recency, "write", fails)
            await disk.tier.checkpoint(array("Q"))
        assert disk.tier.usage().state == "degraded"
        await disk.check(stored)
        await disk.tier.checkpoint(array("Q"))
        assert disk.tier.usage().state == "ready"
        await disk.tier.close()

    asyncio.run(run())


def test_small_index_grows_inside_the_capacity(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, 64 * MIB, index_map_bytes=256 << 10)
        stored: list[Stored] = []
        for n in range(8):
            stored += await disk.store(range(n * 1000, n * 1000 + 1000), 100)
        assert disk.tier.usage().index_bytes > 512 << 10
        assert disk.tier.usage().state == "ready"
        await disk.check(stored[::50])
        await disk.tier.close()

    asyncio.run(run())


def test_full_index_that_may_not_grow_refuses_new_blocks_and_recovers_with_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As if the index took far more than planned, in a tier that has no other room left.
    monkeypatch.setattr(disk_space.Space, "claim_map", has_no_room)
    for name in ("INDEX_BYTES_BASE", "INDEX_BYTES_PER_SLOT", "INDEX_BYTES_PER_LARGE_SEGMENT"):
        monkeypatch.setattr(disk_space, name, 0)

    async def run() -> None:
        disk = await Disk.open(tmp_path, 16 * MIB, index_map_bytes=256 << 10)
        stored: list[Stored] = []
        for n in range(20):
            _, durable = await write_keys(disk, range(n * 250, n * 250 + 250), 100)
            stored += durable
        assert 100 < len(stored) < 3500
        assert disk.tier.usage().state == "degraded"
        assert disk.tier.usage().used_bytes == len(stored) * 4096, "what found no room has lost its slot"
        assert await disk.tier.forget([block.address for block in stored[:400]])
        stored = stored[400:] + await disk.store(range(15_000, 15_100), 100)
        assert disk.tier.usage().state == "ready"
        await disk.check(stored)
        await disk.tier.close()

    asyncio.run(run())
    assert len(warnings(caplog)) == 1


@pytest.mark.stress
def test_hundred_thousand_keys_outgrow_a_map_of_one_mebibyte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, 1 << 30, index_map_bytes=MIB)
        for n in range(100):
            await disk.store(range(n * 1000, n * 1000 + 1000), 100)
        assert disk.tier.usage().live_blocks == 100_000
        assert disk.tier.usage().state == "ready"
        assert await disk.tier.check_integrity() == []
        await disk.tier.close()

    asyncio.run(run())
    assert len(warnings(caplog)) <= 1
    shutil.rmtree(tmp_path)
