"""What a namespace's handle of either client makes of a verb's arguments: the operation to run.

Invariants
1. Arguments are checked here, before anything is sent: what is wrong with them raises in the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvclient import _operations
from kvclient._assembly import GroupLookup, Siblings
from kvclient._buffers import blocks_of
from kvclient._fetch import Fetch, Hold
from kvclient._operations import Abort, PerBlock, Progress, Space, hashes_of
from kvclient._store import Store
from kvclient.results import Changed, Lookup
from kvstore.block import Namespace
from kvstore.errors import UsageError


class Verbs:
    """The operations on the blocks of one namespace."""

    def __init__(self, namespace: Namespace, ttl_s: float | None) -> None:
        self.namespace = namespace
        self.space = Space.of(namespace, ttl_s)
        self._siblings = Siblings(namespace)

    def looking_up(self, hashes: Sequence[bytes], *, run: bool, max_ms: float | None) -> PerBlock[Lookup]:
        return _operations.lookup(self.space, hashes_of(hashes), run=run, max_ms=max_ms)

    def looking_up_group(self, hashes: Sequence[bytes]) -> GroupLookup:
        return GroupLookup(self.space, self._siblings, hashes_of(hashes))

    def storing(
        self,
        hashes: Sequence[bytes],
        sources: Any,
        *,
        ttl_s: float | None,
        durable: bool,
        wait_s: float,
        progress: Progress | None,
    ) -> Store:
        wanted = hashes_of(hashes)
        blocks = blocks_of(sources, len(wanted), self.space.block_bytes, writable=False)
        return Store(
            self.space, wanted, blocks, ttl_s=ttl_s, durable=durable, wait_s=waiting(wait_s), progress=progress
        )

    def fetching(
        self,
        hashes: Sequence[bytes],
        into: Any,
        *,
        wait_s: float,
        max_ms: float | None,
        run: bool,
        count: bool,
        slices: bool,
        progress: Progress | None,
    ) -> Fetch:
        wanted = hashes_of(hashes)
        blocks = blocks_of(into, len(wanted), self.space.block_bytes, writable=True)
        return Fetch(
            self.space,
            wanted,
            blocks,
            wait_s=waiting(wait_s),
            max_ms=max_ms,
            run=run,
            count=count,
            siblings=self._siblings if slices else None,
            progress=progress,
        )

    def holding(self, hashes: Sequence[bytes], *, wait_s: float, max_ms: float | None, count: bool) -> Hold:
        return Hold(self.space, hashes_of(hashes), wait_s=waiting(wait_s), max_ms=max_ms, count=count)

    def prefetching(self, hashes: Sequence[bytes]) -> PerBlock[Lookup]:
        return _operations.prefetch(self.space, hashes_of(hashes))

    def awaiting(self, hashes: Sequence[bytes], wait_s: float) -> PerBlock[Lookup]:
        return _operations.wait(self.space, hashes_of(hashes), waiting(wait_s))

    def aborting(self, hashes: Sequence[bytes]) -> Abort:
        return Abort(self.space, hashes_of(hashes))

    def dropping(self, hashes: Sequence[bytes]) -> PerBlock[Changed]:
        return _operations.drop(self.space, hashes_of(hashes))

    def pinning(self, hashes: Sequence[bytes], for_s: float) -> PerBlock[Changed]:
        return _operations.pin(self.space, hashes_of(hashes), waiting(for_s))

    def unpinning(self, hashes: Sequence[bytes]) -> PerBlock[Changed]:
        return _operations.unpin(self.space, hashes_of(hashes))

    def setting_ttl(self, hashes: Sequence[bytes], ttl_s: float) -> PerBlock[Changed]:
        return _operations.set_ttl(self.space, hashes_of(hashes), waiting(ttl_s))


def waiting(seconds: float) -> float:
    """Return `seconds` if it is a time to wait."""
    if not 0 <= seconds <= 1e9:
        raise UsageError(f"a time to wait is between 0 and 1e9 seconds, not {seconds}")
    return seconds
