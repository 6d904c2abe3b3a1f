"""The namespaces that an ssd directory knows: numbers, epochs, default lives; and how one is forgotten for good.

Theory of operation. Records name a namespace by its number. A namespace that the store has forgotten, since nothing
of it is left and nobody uses it, is unknown here from that moment on, and its row in the index goes as soon as it can.
When it comes back it is a new one, with a number of its own.

No older epoch comes back by that. What is left on disk of a forgotten number is of no namespace: it is dropped at the
next open, because no number is ever given twice (the row with the highest one stays, forgotten or not). And no
namespace ever begins below the highest epoch of any that was forgotten: that floor is durable in the transaction that
deletes the row. So other nodes, which know the epoch that a block had, can't take an old copy for a current one.

Invariants
1. No number is given to two namespaces, across restarts.
2. One namespace has one number. Should a kill leave a forgotten row beside the new one, the higher number counts.
3. An epoch never goes back, and the floor is at least the epoch of each row that was deleted.
4. A number is told, and an epoch answered for, only once it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvstore.tiers.disk_records import DiskNamespace
from kvstore.tiers.index import Changes

_ROWS_AT_ONCE = 1000  # in one transaction


class Namespaces:
    """The rows of one directory; `change` makes changes of the index durable."""

    def __init__(
        self, rows: Mapping[int, DiskNamespace], epoch_floor: int, change: Callable[[Changes], asyncio.Future[Any]]
    ) -> None:
        self.epoch_floor = epoch_floor
        self._change = change
        self._rows: dict[int, DiskNamespace] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._doomed: set[int] = set()  # numbers whose rows are to be deleted
        self._last_number = max(rows, default=0)
        self._changing = asyncio.Lock()  # held across I/O: two changes of one row would undo each other
        for number in sorted(rows, reverse=True):
            row = rows[number]
            if (row.tenant, row.encoded) in self._numbers:
                self._doom(row)
            else:
                self._note(row)

    def known(self) -> list[DiskNamespace]:
        """Return every namespace that is not forgotten, by number."""
        return sorted(self._rows.values(), key=lambda row: row.number)

    def epoch_of(self, number: int) -> int:
        """Return the epoch of a namespace that is durable."""
        return self._rows[number].epoch

    async def add(self, tenant: str, encoded: bytes, ttl_s: float, epoch: int) -> int:
        """Return the number of a namespace, durably registered; until it is forgotten it keeps that.

        A new one begins with `epoch`, which was at least the floor when the store first met it.
        """
        async with self._changing:
            known = self._numbers.get((tenant, encoded))
            if known is not None:
                return known
            self._last_number += 1
            await self._put([DiskNamespace(self._last_number, tenant, encoded, epoch, ttl_s)])
            return self._last_number

    async def set_epochs(self, epochs: Mapping[int, int]) -> None:
        """Set, durably and all in one, the epochs of namespaces; an epoch never goes back."""
        async with self._changing:
            changed = [
                replace(row, epoch=max(epoch, row.epoch))
                for number, epoch in epochs.items()
                if (row := self._rows.get(number)) is not None
            ]
            await self._put(changed)

    async def set_ttl(self, number: int, ttl_s: float) -> None:
        """Set, durably, the default life of a namespace's blocks."""
        async with self._changing:
            if number in self._rows:
                await self._put([replace(self._rows[number], ttl_s=ttl_s)])

    def forget(self, numbers: Iterable[int]) -> None:
        """Know these namespaces no more, from now on; `tidy` deletes their rows."""
        for number in numbers:
            row = self._rows.pop(number, None)
            if row is not None:
                del self._numbers[row.tenant, row.encoded]
                self._doom(row)

    async def tidy(self) -> None:
        """Delete the rows of forgotten namespaces, durably; what fails is tried again by the next call."""
        async with self._changing:
            doomed = sorted(self._doomed - {self._last_number})
            for start in range(0, len(doomed), _ROWS_AT_ONCE):
                part = doomed[start : start + _ROWS_AT_ONCE]
                await self._change(Changes(namespaces=dict.fromkeys(part), epoch_floor=self.epoch_floor))
                self._doomed.difference_update(part)

    def _doom(self, row: DiskNamespace) -> None:
        self._doomed.add(row.number)
        self.epoch_floor = max(self.epoch_floor, row.epoch)

    def _note(self, row: DiskNamespace) -> None:
        self._rows[row.number] = row
        self._numbers[row.tenant, row.encoded] = row.number

    async def _put(self, rows: list[DiskNamespace]) -> None:
        if rows:
            await self._change(Changes(namespaces={row.number: row for row in rows}))
        for row in rows:
            # One that was forgotten meanwhile has been written again: `tidy` waits for this change.
            if row.number not in self._doomed:
                self._note(row)
