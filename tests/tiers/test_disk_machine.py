"""Any sequence of writes, deletes, checkpoints and restarts agrees with a dict."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from array import array
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.tiers import disk_layout
from kvstore.tiers.disk_records import DiskWrite
from kvstore.wire import Outcome
from tests.tiers.disk_blocks import MIB, Disk, Stored, size_on_disk

CAPACITY_BYTES = 8 * MIB
LENGTHS = (100, 3992, 4096, 30_000, 65_536, 250_000, MIB)
_T = TypeVar("_T")


class DiskMachine(RuleBasedStateMachine):
    """The model is a dict from key to what was stored under it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="ssd-"))
        self.live: dict[int, Stored] = {}
        self.generation = 0
        self.next_key = 0

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    @initialize()
    def start(self) -> None:
        self.disk = self.run(Disk.open(self.directory, CAPACITY_BYTES))

    def teardown(self) -> None:
        self.run(self.disk.tier.close())
        self.runner.close()
        shutil.rmtree(self.directory)

    async def _write(self, keys: list[int], lengths: list[int]) -> list[Outcome]:
        writes: list[tuple[int, DiskWrite]] = []
        for key, length in zip(keys, lengths, strict=True):
            self.generation += 1
            write = self.disk.prepare(self.disk.record(key, length, generation=self.generation), key)
            if write is not None:
                writes.append((key, write))
        outcomes = await self.disk.tier.write([write for _, write in writes])
        old = [self.live[key].address for key, _ in writes if key in self.live]
        assert await self.disk.tier.forget(old)
        self.live.update({key: Stored(key, write.address, write.record) for key, write in writes})
        return outcomes

    @rule(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=12))
    def write_new_blocks(self, lengths: list[int]) -> None:
        keys = list(range(self.next_key, self.next_key + len(lengths)))
        self.next_key += len(lengths)
        assert set(self.run(self._write(keys, lengths))) <= {Outcome.DURABLE}

    @precondition(lambda self: self.live)
    @rule(drawn=st.data(), length=st.sampled_from(LENGTHS))
    def write_anew(self, drawn: st.DataObject, length: int) -> None:
        key = drawn.draw(st.sampled_from(sorted(self.live)))
        assert set(self.run(self._write([key], [length]))) <= {Outcome.DURABLE}

    @rule(length=st.sampled_from(LENGTHS))
    def allocate_and_release(self, length: int) -> None:
        free = self.disk.tier.free_slots(length)
        address = self.disk.tier.allocate(length)
        assert (address is not None) == (free > 0)
        if address is not None:
            self.disk.tier.release(address)

    @precondition(lambda self: self.live)
    @rule(drawn=st.data(), share=st.floats(0.0, 1.0))
    def forget_some(self, drawn: st.DataObject, share: float) -> None:
        keys = drawn.draw(st.permutations(sorted(self.live)))[: int(share * len(self.live)) + 1]
        assert self.run(self.disk.tier.forget([self.live.pop(key).address for key in keys]))

    @precondition(lambda self: self.live)
    @rule(drawn=st.data())
    def empty_a_segment(self, drawn: st.DataObject) -> None:
        tier = self.disk.tier
        victim = tier.segment_of(drawn.draw(st.sampled_from(sorted(b.address for b in self.live.values()))))
        gone = {key for key, block in self.live.items() if tier.segment_of(block.address) == victim}
        assert sorted(tier.addresses(victim)) == sorted(self.live[key].address for key in gone)
        assert self.run(tier.forget(tier.addresses(victim)))
        for key in gone:
            del self.live[key]

    @rule(drawn=st.data())
    def checkpoint_and_restart(self, drawn: st.DataObject) -> None:
        order = drawn.draw(st.permutations(sorted(self.live)))
        self.run(self.disk.tier.checkpoint(array("Q", [self.live[key].address for key in order])))
        self._restart()
        assert list(self.disk.tier.take_recency()) == [self.live[key].address for key in order]

    @rule()
    def restart(self) -> None:
        self._restart()

    def _restart(self) -> None:
        before = self.disk.tier.usage()
        self.run(self.disk.tier.close())
        self.disk = self.run(Disk.open(self.directory, CAPACITY_BYTES))
        self.found = self.disk.taken()
        assert {block.key: block for block in self.found} == self.live
        assert len(self.found) == len(self.live)
        after = self.disk.tier.usage()
        assert (after.used_bytes, after.live_blocks) == (before.used_bytes, before.live_blocks)

    @rule()
    def read_everything(self) -> None:
        outcomes = self.run(self.disk.outcomes(list(self.live.values())))
        assert set(outcomes) <= {Outcome.HIT}

    @invariant()
    def is_of_one_piece(self) -> None:
        if not hasattr(self, "disk"):
            return
        usage = self.disk.tier.usage()
        assert usage.used_bytes == sum(disk_layout.slot_bytes(b.record.length) for b in self.live.values())
        assert usage.live_blocks == len(self.live)
        assert usage.state == "ready"
        assert size_on_disk(self.directory) <= CAPACITY_BYTES
        assert self.run(self.disk.tier.check_integrity()) == []


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


