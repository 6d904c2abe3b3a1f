"""The ssd tier on the real disk: what goes in comes out exact, or is a miss."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import BadRecord, BadSetting, Closing, TierLocked, TierUnavailable
from kvstore.tiers import disk_layout
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk_io import BlockIO
from kvstore.tiers.disk_records import DiskPin, DiskRead, DiskWrite
from kvstore.tiers.index import Index
from kvstore.wire import Outcome
from tests.tiers.disk_blocks import MIB, Disk, Stored, pages, payload_of

LENGTHS = (1, 100, 3992, 3993, 4096, 12_288, 65_536, 70_272, 200_000, MIB, MIB + 1)


@pytest.fixture(params=["auto", "off"])
def direct_io(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_blocks_of_every_size_are_exact_now_and_after_a_restart(tmp_path: Path, direct_io: str) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, 64 * MIB, direct_io=direct_io)
        stored = [
            block for n, length in enumerate(LENGTHS) for block in await disk.store(range(n * 10, n * 10 + 3), length)
        ]
        await disk.check(stored)
        usage = disk.tier.usage()
        assert usage.used_bytes == sum(disk_layout.slot_bytes(block.record.length) for block in stored)
        assert usage.live_blocks == len(stored)
        await disk.tier.close()

        disk = await Disk.open(tmp_path, 64 * MIB, direct_io=direct_io)
        found = disk.taken()
        assert sorted(found, key=lambda b: b.key) == stored
        assert disk.tier.usage().used_bytes == usage.used_bytes
        await disk.check(found)
        await disk.tier.close()

    asyncio.run(run())


def test_memory_that_direct_io_cannot_use_is_copied(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        content = payload_of(1, 20_000)
        sources = [memoryview(content), memoryview(bytearray(b"x" + content))[1:]]
        writes: list[DiskWrite] = []
        for source in sources:
            address = disk.tier.allocate(20_000)
            assert address is not None
            writes.append(DiskWrite(address, disk.record(1, 20_000), source))
        assert await disk.tier.write(writes) == [Outcome.DURABLE] * 2
        destination = memoryview(bytearray(20_001))[1:]
        for write in writes:
            assert await disk.tier.read([DiskRead(write.address, write.record, destination)]) == [Outcome.HIT]
            assert bytes(destination) == content
        await disk.tier.close()

    asyncio.run(run())


def test_missing_checksum_is_computed_while_writing(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        expected = disk.record(5, 9000)
        write = disk.prepare(replace(expected, checksum=0), 5)
        assert write is not None
        assert await disk.tier.write([write]) == [Outcome.DURABLE]
        assert write.record == expected
        await disk.tier.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "changed", [{"generation": 2}, {"epoch": 1}, {"namespace": 9}, {"hash": bytes(32)}, {"length": 8999}]
)
def test_block_that_is_not_the_one_expected_is_corrupt(tmp_path: Path, changed: dict[str, object]) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        (block,) = await disk.store([1], 9000)
        other = replace(block.record, **changed)  # type: ignore[arg-type]
        assert await disk.tier.read([DiskRead(block.address, other, pages(other.length))]) == [Outcome.CORRUPT]
        await disk.check([block])
        await disk.tier.close()

    asyncio.run(run())


@pytest.mark.parametrize("at", [0, 5000, 8191, 8192, 12_288 - 1, 12_288 - disk_layout.HEADER_BYTES])
def test_flipped_bit_is_corrupt_and_its_neighbours_are_exact(tmp_path: Path, at: int) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store(range(3), 12_000)
        await disk.tier.close()
        (segment,) = (tmp_path / "segments").iterdir()
        with segment.open("r+b") as file:
            place = stored[1].address - stored[0].address + at
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 4]))
        disk = await Disk.open(tmp_path)
        assert await disk.outcomes(stored) == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]
        assert disk.tier.usage().checksum_failures == 1
        await disk.tier.close()

    # Bytes between payload and header are padding, which nobody reads.
    if not 12_000 <= at < 12_288 - disk_layout.HEADER_BYTES:
        asyncio.run(run())


def test_forgotten_block_is_gone_after_a_restart_and_its_slot_is_free(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        kept, gone = await disk.store(range(2), 5000)
        assert await disk.tier.forget([gone.address])
        assert disk.tier.usage().used_bytes == disk_layout.slot_bytes(5000)
        assert disk.tier.allocate(5000) == gone.address
        disk.tier.release(gone.address)
        await disk.check([kept])
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert disk.taken() == [kept]
        await disk.tier.close()

    asyncio.run(run())


class Gate:
    """Holds a thread inside a call until it is let on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)

    def hold(self) -> None:
        self.entered.set()
        assert self.release.wait(30)


def test_slot_is_not_reused_before_its_delete_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    commit = Index.commit

    def slow(self: Index, *args: object) -> None:
        gate.hold()
        commit(self, *args)  # type: ignore[arg-type]

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        (block,) = await disk.store([1], 5000)
        monkeypatch.setattr(Index, "commit", slow)
        forgetting = asyncio.create_task(disk.tier.forget([block.address]))
        await gate.wait_entered()
        other = disk.tier.allocate(5000)
        assert other is not None
        assert other != block.address
        gate.release.set()
        assert await forgetting
        assert disk.tier.allocate(5000) == block.address
        await disk.tier.close()

    asyncio.run(run())


def hold_reads(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    read = BlockIO.read

    def slow(self: BlockIO, *args: object) -> object:
        gate.hold()
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockIO, "read", slow)


def test_cancelled_read_ends_only_when_no_thread_touches_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store([1], 5000)
        hold_reads(monkeypatch, gate)
        reading = asyncio.create_task(disk.outcomes(stored))
        await gate.wait_entered()
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0)
            assert not reading.done()
        gate.release.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        monkeypatch.undo()
        await disk.check(stored)
        await disk.tier.close()

    asyncio.run(run())


def test_slot_is_not_reused_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store([1], 5000)
        hold_reads(monkeypatch, gate)
        reading = asyncio.create_task(disk.outcomes(stored))
        await gate.wait_entered()
        assert await disk.tier.forget([stored[0].address])
        assert disk.tier.allocate(5000) != stored[0].address
        gate.release.set()
        assert await reading == [Outcome.HIT]
        assert disk.tier.allocate(5000) == stored[0].address
        await disk.tier.close()

    asyncio.run(run())


def test_cancelled_write_is_durable_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    commit = Index.commit

    def slow(self: Index, *args: object) -> None:
        gate.hold()
        commit(self, *args)  # type: ignore[arg-type]

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        write = disk.prepare(disk.record(3, 5000), 3)
        assert write is not None
        monkeypatch.setattr(Index, "commit", slow)
        writing = asyncio.create_task(disk.tier.write([write]))
        await gate.wait_entered()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        gate.release.set()
        await disk.tier.close()
        monkeypatch.undo()
        disk = await Disk.open(tmp_path)
        assert disk.taken() == [Stored(3, write.address, write.record)]
        await disk.tier.close()

    asyncio.run(run())


def test_writes_beyond_the_queue_are_refused_and_lose_their_slots(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path, write_queue_bytes=10_000)
        writes = [disk.prepare(disk.record(key, 6000), key) for key in range(3)]
        outcomes = await disk.tier.write([write for write in writes if write is not None])
        assert outcomes == [Outcome.DURABLE, Outcome.NO_ROOM, Outcome.NO_ROOM]
        assert disk.tier.usage().used_bytes == disk_layout.slot_bytes(6000)
        assert disk.tier.usage().write_queue_bytes == 0
        await disk.store([9], 60_000)
        await disk.tier.close()

    asyncio.run(run())


def test_many_small_blocks_go_out_in_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write_run = BlockIO._write_run  # pyright: ignore[reportPrivateUsage]

    def counted(self: BlockIO, fd: int, start: int, run: list[DiskWrite]) -> None:
        calls.append(len(run))
        write_run(self, fd, start, run)

    async def run() -> None:
        monkeypatch.setattr(BlockIO, "_write_run", counted)
        disk = await Disk.open(tmp_path)
        await disk.check(await disk.store(range(300), 3000))
        await disk.tier.close()

    asyncio.run(run())
    assert sum(calls) == 300
    assert len(calls) < 20


def test_second_opener_is_told_who_owns_the_directory(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        with pytest.raises(TierLocked, match=r"belongs to the running process \d+"):
            await Disk.open(tmp_path)
        await disk.tier.close()
        with pytest.raises(Closing):
            await disk.tier.write([])
        await (await Disk.open(tmp_path)).tier.close()

    asyncio.run(run())


def test_directory_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def opened(directory: Path, capacity_bytes: int = 32 * MIB) -> None:
        await (await DiskTier.open(directory, capacity_bytes, clock=ManualClock())).close()

    with pytest.raises(TierUnavailable, match="does not exist"):
        asyncio.run(opened(tmp_path / "absent"))
    with pytest.raises(BadSetting, match="too small"):
        asyncio.run(opened(tmp_path, 1 * MIB))
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="does not exist"):
        asyncio.run(opened(tmp_path / "file"))
    (tmp_path / "dir" / "lock").mkdir(parents=True)
    with pytest.raises(TierUnavailable, match="not writable"):
        asyncio.run(opened(tmp_path / "dir"))


def test_index_of_an_unknown_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    async def run(check: Callable[[], None]) -> None:
        disk = await Disk.open(tmp_path)
        await disk.store([1], 5000)
        await disk.tier.close()
        index = Index(tmp_path / "index", map_bytes=MIB, chunk_bytes=4096)
        with index._env.begin(write=True) as txn:  # pyright: ignore[reportPrivateUsage]
            txn.put(b"format", (99).to_bytes(4, "big"), db=index._meta)  # pyright: ignore[reportPrivateUsage]
        index.close()
        check()

    def refused() -> None:
        with pytest.raises(BadRecord, match="has format 99, this version reads 1"):
            asyncio.run(Disk.open(tmp_path))

    (tmp_path / "index").mkdir()
    asyncio.run(run(lambda: None))
    before = {path: path.stat().st_size for path in tmp_path.rglob("*.seg")}
    refused()
    refused()
    assert {path: path.stat().st_size for path in tmp_path.rglob("*.seg")} == before


def test_damaged_index_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(b"\xff" * 65_536)
    with pytest.raises((BadRecord, TierUnavailable), match="index"):
        asyncio.run(Disk.open(tmp_path))


def test_namespaces_epochs_and_pins_survive(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        number = await disk.tier.add_namespace("other", b"namespace", ttl_s=5.0)
        assert number != disk.namespace
        assert await disk.tier.add_namespace("other", b"namespace") == number
        await disk.tier.set_epoch(number, 7)
        await disk.tier.set_epoch(number, 3)
        await disk.tier.set_ttl(number, 60.0)
        pins = [DiskPin(number, bytes([n]) * 32, disk.clock.boottime_s() + n) for n in range(3)]
        await disk.tier.put_pins(pins)
        await disk.tier.delete_pins([(number, pins[0].hash)])
        before = disk.tier.namespaces()
        await disk.tier.close()
        disk = await Disk.open(tmp_path, clock=disk.clock)
        assert disk.tier.namespaces() == before
        assert (before[1].epoch, before[1].ttl_s) == (7, 60.0)
        assert disk.tier.pins() == pins[1:]
        await disk.tier.close()

    asyncio.run(run())


def test_recency_is_that_of_the_last_checkpoint(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        stored = await disk.store(range(4), 5000)
        order = [stored[2], stored[0], stored[3], stored[1]]
        await disk.tier.checkpoint(array("Q", [block.address for block in order]))
        newer = await disk.store([11], 5000, generation=9) + await disk.store([10], 5000, generation=8)
        await disk.tier.forget([stored[3].address])
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert {block.key for block in disk.taken()} == {2, 0, 1, 10, 11}
        assert list(disk.tier.take_recency()) == [block.address for block in order]
        assert list(disk.tier.take_recency()) == []
        await disk.tier.close()

        (tmp_path / "recency").write_bytes(b"nonsense")
        disk = await Disk.open(tmp_path)
        assert list(disk.tier.take_recency()) == []
        assert {block.key for block in disk.taken()} == {block.key for block in stored + newer} - {3}
        await disk.tier.close()

    asyncio.run(run())
