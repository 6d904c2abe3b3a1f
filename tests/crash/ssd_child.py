"""The process that test_ssd_kill kills: writes, rewrites and deletes blocks as fast as it can, telling what it did.

Lines on standard output: `ready`, `durable KEY ADDRESS LENGTH GENERATION` after a write has answered, and
`forgetting ADDRESS` before a delete is asked for.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from array import array
from pathlib import Path

from kvstore.tiers.disk_records import DiskWrite
from kvstore.wire import Outcome
from tests.tiers.disk_blocks import Disk, Stored

CAPACITY_BYTES = 16 << 20
LENGTHS = (100, 4096, 20_000, 70_272, 300_000)
KEYS = 2000


def tell(lines: list[str]) -> None:
    os.write(1, "".join(line + "\n" for line in lines).encode())


async def write_and_forget_forever(directory: Path, seed: int) -> None:
    choose = random.Random(seed)
    disk = await Disk.open(directory, CAPACITY_BYTES)
    live = {block.address: block for block in disk.taken()}
    generation = max((block.record.generation for block in live.values()), default=0)
    tell(["ready"])

    async def forget(blocks: list[Stored]) -> None:
        for block in blocks:
            del live[block.address]
        tell([f"forgetting {block.address}" for block in blocks])
        assert await disk.tier.forget([block.address for block in blocks])

    async def write() -> None:
        nonlocal generation
        length = choose.choice(LENGTHS)
        while disk.tier.free_slots(length) < 8:
            segment = disk.tier.segment_of(choose.choice(list(live)))
            await forget([block for block in live.values() if disk.tier.segment_of(block.address) == segment])
        batch: list[tuple[int, DiskWrite]] = []
        for _ in range(choose.randint(1, 8)):
            generation += 1
            key = choose.randrange(KEYS)
            prepared = disk.prepare(disk.record(key, length, generation=generation), key)
            if prepared is not None:
                batch.append((key, prepared))
        outcomes = await disk.tier.write([one for _, one in batch])
        assert set(outcomes) <= {Outcome.DURABLE}, outcomes
        tell([f"durable {key} {w.address} {w.record.length} {w.record.generation}" for key, w in batch])
        live.update({w.address: Stored(key, w.address, w.record) for key, w in batch})

    while True:
        # Slots that are being given up while others are asked for: the moment when a slot could be reused too early.
        gone = choose.sample(list(live.values()), min(len(live) // 3, 20))
        await asyncio.gather(forget(gone), *(write() for _ in range(3)))
        if choose.random() < 0.1:
            await disk.tier.checkpoint(array("Q", live))


if __name__ == "__main__":
    asyncio.run(write_and_forget_forever(Path(sys.argv[1]), int(sys.argv[2])))
