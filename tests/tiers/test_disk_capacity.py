"""The ssd tier's capacity is a hard cap, used well by whatever sizes come; lives are neither stretched nor lost."""

from __future__ import annotations

import asyncio
import threading
from array import array
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.tiers.disk_records import NEVER_S, DiskWrite
from kvstore.wire import Outcome
from tests.tiers.disk_blocks import MIB, Disk, Stored, size_on_disk


class SizeWatch:
    """Samples what a directory takes on disk, in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.largest = 0
        self.samples = 0
        self._directory = directory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self.largest = max(self.largest, size_on_disk(self._directory))
            self.samples += 1

    def __enter__(self) -> SizeWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


async def fill(disk: Disk, first_key: int, length: int, batch: int = 32) -> list[Stored]:
    """Write blocks of one size until there is no room."""
    stored: list[Stored] = []
    while True:
        writes: list[tuple[int, DiskWrite]] = []
        for key in range(first_key + len(stored), first_key + len(stored) + batch):
            write = disk.prepare(disk.record(key, length), key)
            if write is not None:
                writes.append((key, write))
        if not writes:
            return stored
        assert set(await disk.tier.write([write for _, write in writes])) == {Outcome.DURABLE}
        stored += [Stored(key, write.address, write.record) for key, write in writes]


@pytest.mark.parametrize("length", [3000, 50_000, 1 * MIB])
def test_files_never_exceed_the_capacity_while_four_times_as_much_is_written(tmp_path: Path, length: int) -> None:
    capacity = 24 * MIB

    async def run() -> None:
        disk = await Disk.open(tmp_path, capacity)
        live: list[Stored] = []
        written = 0
        while written < 4 * capacity:
            keys = range(written // length % 5000, written // length % 5000 + max(1, 2 * MIB // length))
            while disk.tier.free_slots(length) < len(keys):
                assert await disk.tier.forget([block.address for block in live[: len(keys)]])
                live = live[len(keys) :]
            live += await disk.store(keys, length)
            written += len(keys) * length
            await disk.tier.checkpoint(array("Q", [block.address for block in live]))
        assert disk.tier.usage().used_bytes > 0.65 * capacity
        await disk.check(live[-20:])
        await disk.tier.close()

    with SizeWatch(tmp_path) as watch:
        asyncio.run(run())
    assert watch.samples > 1
    assert 0.75 * capacity < watch.largest <= capacity


@pytest.mark.parametrize(("first", "second"), [(70_272, MIB), (MIB, 70_272), (MIB, 3 * MIB + 5), (20_000, 300_000)])
def test_second_size_reaches_nine_tenths_of_a_tier_filled_with_the_first(
    tmp_path: Path, first: int, second: int
) -> None:
    capacity = 64 * MIB

    async def run() -> None:
        disk = await Disk.open(tmp_path, capacity)
        old = await fill(disk, 0, first)
        assert disk.tier.usage().used_bytes > 0.85 * capacity
        new: list[Stored] = []
        # What eviction does: the coldest segments are emptied one by one, as room is needed.
        while old:
            coldest = disk.tier.segment_of(old[0].address)
            await disk.tier.forget(disk.tier.addresses(coldest))
            old = [block for block in old if disk.tier.segment_of(block.address) != coldest]
            new += await fill(disk, 10_000 + len(new), second)
            assert await disk.tier.check_integrity() == []
        assert len(new) * second >= 0.9 * capacity
        await disk.check(new)
        await disk.tier.close()
        disk = await Disk.open(tmp_path, capacity)
        assert len(disk.taken()) == len(new)
        await disk.check(new)
        await disk.tier.close()

    with SizeWatch(tmp_path) as watch:
        asyncio.run(run())
    assert watch.largest <= capacity


def test_smaller_capacity_drops_the_coldest_segments_at_open(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, 64 * MIB)
        stored = await fill(disk, 0, 500_000)
        order = stored[::-1]
        await disk.tier.checkpoint(array("Q", [block.address for block in order]))
        await disk.tier.close()

        disk = await Disk.open(tmp_path, 32 * MIB)
        assert size_on_disk(tmp_path) <= 32 * MIB
        kept = disk.taken()
        assert 0.75 * 32 * MIB < sum(block.record.length for block in kept) <= 32 * MIB
        hot = {block.key for block in order[-len(kept) // 2 :]}
        assert hot <= {block.key for block in kept}
        await disk.check(kept)
        assert await disk.tier.check_integrity() == []
        await disk.tier.close()

        disk = await Disk.open(tmp_path, 64 * MIB)
        assert len(await fill(disk, 1000, 500_000)) > 40
        await disk.tier.close()

    asyncio.run(run())


def test_directory_of_a_far_larger_tier_is_started_over(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, 1 << 30)
        await disk.store(range(3), 5000)
        await disk.tier.close()
        disk = await Disk.open(tmp_path, 16 * MIB)
        assert disk.taken() == []
        stored = await fill(disk, 0, 300_000)
        assert size_on_disk(tmp_path) <= 16 * MIB
        await disk.check(stored)
        await disk.tier.close()

    asyncio.run(run())


def test_free_slots_is_what_can_be_allocated(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, 16 * MIB)
        for length in (100, 100_000, 2 * MIB):
            expected = disk.tier.free_slots(length)
            addresses: list[int] = []
            while (address := disk.tier.allocate(length)) is not None:
                addresses.append(address)
            assert len(addresses) == expected
            assert len(set(addresses)) == len(addresses)
            for address in addresses:
                disk.tier.release(address)
        assert disk.tier.usage().used_bytes == 0
        assert disk.tier.allocate(64 * MIB) is None
        assert disk.tier.free_slots(64 * MIB) == 0
        await disk.tier.close()

    asyncio.run(run())


# ---- lives


class StepClock(ManualClock):
    """A clock whose wall time can be stepped, and whose boottime starts anew with a boot."""

    def reboot(self, off_s: float, stepped_s: float = 0.0) -> None:
        """Be off for a while; the wall clock is wrong by `stepped_s` more after it."""
        wall_s = self.wall_s() + off_s + stepped_s
        self.now_s = 20.0
        self.wall_offset_s = wall_s - self.now_s


async def remaining_after(tmp_path: Path, ttl_s: float, *steps: tuple[str, float, float]) -> float:
    """Return what is left of a block's life after runs and reboots: ("run", s, wall step) or ("off", s, wall step)."""
    clock = StepClock()
    boot = 0
    disk = await Disk.open(tmp_path, clock=clock, boot_id="boot 0")
    write = disk.prepare(disk.record(1, 100, expires_s=clock.boottime_s() + ttl_s), 1)
    forever = disk.prepare(disk.record(2, 100), 2)
    assert write is not None
    assert forever is not None
    assert await disk.tier.write([write, forever]) == [Outcome.DURABLE] * 2
    for kind, seconds, stepped_s in steps:
        if kind == "run":
            clock.advance(seconds)
            clock.wall_offset_s += stepped_s
            await disk.tier.checkpoint(array("Q"))
            continue
        await disk.tier.close()
        if kind == "off":
            boot += 1
            clock.reboot(seconds, stepped_s)
        else:
            clock.advance(seconds)
        disk = await Disk.open(tmp_path, clock=clock, boot_id=f"boot {boot}")
    await disk.tier.close()
    disk = await Disk.open(tmp_path, clock=clock, boot_id=f"boot {boot}")
    expiry_of = {block.key: block.record.expires_s for block in disk.taken()}
    await disk.tier.close()
    assert expiry_of[2] == NEVER_S
    return expiry_of[1] - clock.boottime_s()


@pytest.mark.parametrize(
    ("steps", "left_s"),
    [
        ([("restart", 100.0, 0.0)], 900.0),
        ([("run", 100.0, 0.0), ("restart", 50.0, 0.0)], 850.0),
        ([("run", 100.0, -1e6), ("restart", 50.0, 0.0)], 850.0),
        ([("run", 100.0, 1e6), ("restart", 50.0, 0.0)], 850.0),
        ([("off", 300.0, 0.0)], 700.0),
        ([("run", 100.0, -1e6), ("off", 300.0, 0.0)], 600.0),
        ([("run", 100.0, 1e6), ("off", 300.0, 0.0), ("off", 100.0, 0.0)], 500.0),
        ([("off", 300.0, 200.0)], 500.0),
        ([("off", 300.0, -1e6)], 980.0),  # nobody can know more than that this kernel has run for 20 s
        ([("off", 2000.0, 0.0)], -20.0),  # over before this kernel began, 20 s ago
    ],
)
def test_life_goes_on_across_restarts_and_no_step_of_the_wall_clock_lengthens_it(
    tmp_path: Path, steps: list[tuple[str, float, float]], left_s: float
) -> None:
    assert asyncio.run(remaining_after(tmp_path, 1000.0, *steps)) == pytest.approx(left_s)


def test_changed_expiry_is_durable(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store(range(3), 5000)
        await disk.tier.set_expiry({stored[0].address: 1234.5, stored[2].address: NEVER_S})
        await disk.check(stored)
        await disk.tier.close()
        disk = await Disk.open(tmp_path, clock=disk.clock)
        assert sorted((block.key, block.record.expires_s) for block in disk.taken()) == [
            (0, 1234.5), (1, NEVER_S), (2, NEVER_S),
        ]  # fmt: skip
        await disk.tier.close()

    asyncio.run(run())
