"""A drain: the hottest blocks that only memory holds are written to ssd, as many as fit, each once.

Theory of operation. The blocks in memory are gone through from the hottest on. One that is on ssd already is kept
there, one that is not is written and then kept; room comes from what has not been reached yet, so from what is colder.
A size of slots for which nothing more can be evicted is full: what is left of that size is left out. In the end the
order of use on ssd is that of memory, so that a restart finds it.

Invariants
1. While a drain goes on nothing that it keeps is evicted from ssd; so it writes each block once, and ends.
2. However it ends, nothing is kept any more afterwards.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import NamedTuple

from kvstore.catalog import Catalog
from kvstore.clock import Clock
from kvstore.lifecycle import Copy
from kvstore.mover import Mover
from kvstore.policy import Policy
from kvstore.table import Tier

_PORTION = 4096  # blocks at once: enough to keep the ssd busy, few enough to hold the loop only for moments
_ORDER_PORTION = 2000  # rows between two moments for others


class Drained(NamedTuple):
    """What came of a drain, in blocks. `left_out` are those of `remaining` that hotter ones left no room for."""

    written: int
    left_out: int
    remaining: int


class Drain:
    """Drains one store; two drains at a time take turns."""

    def __init__(self, catalog: Catalog, mover: Mover, clock: Clock) -> None:
        self._catalog = catalog
        self._mover = mover
        self._clock = clock
        self._turn = asyncio.Lock()

    async def run(self, timeout_s: float) -> Drained:
        """Write what only memory holds, and return when that is done, can't be done, or `timeout_s` is over.

        Cancellation leaves what was written; writes under way may still come.
        """
        ends_s = self._clock.monotonic_s() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()  # held across I/O: two at a time would keep each other's room
        except TimeoutError:
            return Drained(0, 0, self._remaining())
        try:
            with self._mover.draining() as full:
                rows = await self._hottest_first()
                written, left_out = await self._write(rows, full, ends_s)
                await self._order_ssd_like(rows)
        finally:
            self._turn.release()
        return Drained(written, left_out, self._remaining())

    async def _write(
        self, rows: Sequence[tuple[int, int]], full: Collection[int], ends_s: float
    ) -> tuple[int, int]:
        """Keep on ssd, or write and keep, what there is room for; return how many were written and left out."""
        table, kept = self._catalog.table, self._catalog.kept
        written = left_out = 0
        for start in range(0, len(rows), _PORTION):
            left_s = ends_s - self._clock.monotonic_s()
            if left_s <= 0:
                break
            # A row may have gone, or have another block, while the ones before were written.
            part = [r for r, g in rows[start : start + _PORTION] if table.generation[r] == g and table.hash[r]]
            new: list[int] = []
            for row in part:
                if table.state[Tier.SSD][row] == Copy.READY:
                    self._catalog.keep_on_ssd(row)
                elif table.residency[row] == Tier.CPU.bit:
                    if self._lane(row) in full:
                        left_out += 1
                    else:
                        new.append(row)
            kept.update(new)
            durable = await self._durable(new, left_s)
            written += sum(durable)
            refused = [row for row, done in zip(new, durable, strict=True) if not done]
            kept.difference_update(refused)
            left_out += sum(self._lane(row) in full for row in refused)
        return written, left_out

    async def _durable(self, rows: Sequence[int], wait_s: float) -> list[bool]:
        try:
            async with asyncio.timeout(wait_s):
                return await self._mover.make_durable(rows)
        except TimeoutError:
            return [self._catalog.table.state[Tier.SSD][row] == Copy.READY for row in rows]

    async def _hottest_first(self) -> list[tuple[int, int]]:
        """Return the rows of all blocks in memory with their generations."""
        table, policy = self._catalog.table, self._catalog.policies[Tier.CPU]
        lanes: list[list[tuple[float, int]]] = []
        for lane, (_, _, tier) in enumerate(list(self._catalog.lanes)):
            if tier is Tier.CPU:
                # By place, not by rank alone: many share a tick.
                order = [(policy.rank(row), row) async for row in in_portions(policy, lane, len(table))]
                lanes.append(order[::-1])
        hottest = list(heapq.merge(*lanes, key=lambda ranked: -ranked[0]))
        seen = {row for _, row in hottest}
        # What was moved while the order was read may be missing from it.
        missed = [row for row in self._mover.unwritten() if row not in seen]
        return [(row, table.generation[row]) for row in [*(row for _, row in hottest), *missed]]

    async def _order_ssd_like(self, rows: Sequence[tuple[int, int]]) -> None:
        """Let the order on ssd end with these rows, the hottest last: as if memory had let go of them one by one."""
        table, policy = self._catalog.table, self._catalog.policies[Tier.SSD]
        for number, (row, generation) in enumerate(reversed(rows)):
            if table.generation[row] == generation and row in policy:
                policy.renew(row, self._catalog.tick(), table.uses[row])
            if number % _ORDER_PORTION == _ORDER_PORTION - 1:
                await asyncio.sleep(0)

    def _lane(self, row: int) -> int:
        return self._catalog.tenancies[self._catalog.table.namespace[row]].lanes[Tier.SSD]

    def _remaining(self) -> int:
        return self._catalog.table.residency.count(Tier.CPU.bit)


async def in_portions(policy: Policy, lane: int, count_max: int) -> AsyncGenerator[int, None]:
    """Yield up to `count_max` rows of a lane, the coldest first, letting others run now and then.

    The order is that of the moment when each is reached; where it breaks off because a row has gone, so does this.
    """
    rows = policy.coldest(lane)
    for number in range(count_max):
        row = next(rows, None)
        if row is None or row not in policy:
            break
        yield row
        if number % _ORDER_PORTION == _ORDER_PORTION - 1:
            await asyncio.sleep(0)
