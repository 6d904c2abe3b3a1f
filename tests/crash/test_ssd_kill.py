"""After kill -9 at any moment every durable block is exact, no record names unwritten bytes, and usage is exact."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.tiers import disk_layout
from kvstore.wire import Outcome
from tests.crash.ssd_child import CAPACITY_BYTES
from tests.tiers.disk_blocks import Disk, size_on_disk

ROOT = Path(__file__).parents[2]

Told = tuple[int, int, int, int]  # key, address, length, generation


def run_and_kill(directory: Path, seed: int, choose: random.Random) -> tuple[list[Told], set[int]]:
    """Let a child write for a moment; return what it told to be durable and kept, and what it forgot."""
    command = [sys.executable, "-m", "tests.crash.ssd_child", str(directory), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"ready\n", child.stderr.read().decode()
        time.sleep(choose.uniform(0.0, 0.15))  # not a wait for anything: the moment of the kill is what is varied
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().decode().splitlines()
        assert child.wait() == -signal.SIGKILL, child.stderr.read().decode()
    durable: dict[int, Told] = {}
    forgotten: set[int] = set()
    for line in lines:
        kind, *fields = line.split()
        numbers = [int(text) for text in fields]
        if kind == "durable":
            key, address, length, generation = numbers
            durable[address] = (key, address, length, generation)
        elif kind == "forgetting":
            durable.pop(numbers[0], None)
            forgotten.add(numbers[0])
    return list(durable.values()), forgotten


async def reopen(directory: Path, known: dict[int, Told], durable: list[Told], forgotten: set[int]) -> dict[int, Told]:
    """Check the directory after a kill; return all that is in it."""
    disk = await Disk.open(directory, CAPACITY_BYTES)
    found = disk.taken()
    assert set(await disk.outcomes(found)) <= {Outcome.HIT}, "a record names bytes that were not written"
    assert await disk.tier.check_integrity() == []
    present = {b.address: (b.key, b.address, b.record.length, b.record.generation) for b in found}
    assert len(present) == len(found), "two records name one slot"
    for told in [*durable, *(told for address, told in known.items() if address not in forgotten)]:
        assert present.get(told[1]) == told, f"durable block {told} is gone"
    assert disk.tier.usage().used_bytes == sum(disk_layout.slot_bytes(b.record.length) for b in found)
    assert disk.tier.usage().records_lost == 0
    assert size_on_disk(directory) <= CAPACITY_BYTES
    await disk.tier.close()
    return present


def kill_and_reopen(directory: Path, kills: int) -> None:
    choose = random.Random(directory.name)
    known: dict[int, Told] = {}
    blocks = 0
    for n in range(kills):
        durable, forgotten = run_and_kill(directory, n, choose)
        known = asyncio.run(reopen(directory, known, durable, forgotten))
        blocks += len(durable)
    assert blocks > kills, "the children were killed before they had written anything"


def test_twelve_kills_lose_no_durable_block(tmp_path: Path) -> None:
    kill_and_reopen(tmp_path, 12)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_hundred_kills_lose_no_durable_block(tmp_path: Path) -> None:
    kill_and_reopen(tmp_path, 100)
