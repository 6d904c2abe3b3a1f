"""Membership from a list: each address is greeted now and then, and whoever answers is a member.

For a few nodes without etcd. Every daemon has the same list, itself in it or not, and finds out by itself who is there:
so two nodes may differ for a moment about a third, which costs misses.

Invariants
1. A member is removed when it has not answered MISSES_MAX times in a row, and comes back with its first answer.
2. One greeting an address is under way, and each ends by its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from kvstore.errors import KVStoreError
from kvstored.logs import fields
from kvstored.remote.greeting import Pool, calling
from kvstored.remote.members import Address, Members

log = logging.getLogger("kvstored.members")

INTERVAL_S = 2.0
MISSES_MAX = 3


class StaticMembers:
    """Keeps `members` as the addresses answer, while `run` runs.

    Parameters
    ----------
    members : Members
        What is kept current.
    pool : Pool
        What all of them have in common.
    peers : sequence of Address
        Where they may be.
    interval_s : float
        The time between two greetings of one.
    """

    def __init__(
        self,
        members: Members,
        pool: Pool,
        peers: Sequence[Address],
        *,
        interval_s: float = INTERVAL_S,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311
    ) -> None:
        self._members = members
        self._pool = pool
        self._peers = list(dict.fromkeys(peers))
        self._interval_s = interval_s
        self._jitter = jitter
        self._name_at: dict[Address, str] = {}

    async def run(self) -> None:
        """Keep the view current until cancelled, which leaves it as it is."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._members.keep_settled(), name="settling members")
            for peer in self._peers:
                tasks.create_task(self._follow(peer), name=f"greeting {peer}")
            self._members.source_answers(True)

    async def _follow(self, peer: Address) -> None:
        misses = 0
        while True:
            try:
                async with calling(peer, self._members.own, self._pool) as conversation:
                    other = conversation.other
                misses = 0
                former = self._name_at.get(peer)
                if former not in (None, other.name):
                    self._remove(peer)  # another daemon has its address now
                if other.boot_id != self._members.own.boot_id:
                    self._name_at[peer] = other.name
                    self._members.join(other)
            except KVStoreError as exc:
                misses += 1
                if misses == MISSES_MAX:
                    log.warning("a peer does not answer", extra=fields(peer=peer, why=str(exc)))
                    self._remove(peer)
            await asyncio.sleep(self._interval_s * self._jitter())

    def _remove(self, peer: Address) -> None:
        name = self._name_at.pop(peer, None)
        if name is not None and name not in self._name_at.values():
            self._members.remove(name)
