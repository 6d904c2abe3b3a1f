"""What the store holds of a prompt, in the words of the plan.

The store is asked by the hashes that the engines compute (hashes.py), in the namespaces of the request's model, each
rank's of a model that is split. Nothing is counted as a query there, nothing is loaded, nothing is pinned: the proxy
holds no lease, so none can outlive a client.

Invariants
1. An answer is exact for the moment it was given, or None: no namespace or more than one that the model may stand for,
   tokens that are not known, a store that doesn't answer within `store_s`.
2. A prefix counts as held only if every rank holds it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

from kvclient import AsyncClient
from kvproxy import hashes
from kvproxy.metrics import Metrics
from kvproxy.settings import Settings
from kvproxy.types import Cached
from kvstore import wire
from kvstore.errors import DeadlineExceeded, KVStoreError

_WINDOW = 256
_NAMES_S = 5.0  # how long the list of namespaces is believed, if the model is in it
_TIERS = ("gpu", "cpu", "ssd", "remote")


@dataclass(frozen=True, slots=True)
class Group:
    """The namespaces of one model's ranks."""

    digests: tuple[bytes, ...]
    block_tokens: int


class StoreView:
    """Asks the kvstored of this node. Belongs to one event loop."""

    def __init__(self, client: AsyncClient, settings: Settings, metrics: Metrics) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._namespaces: list[Mapping[str, Any]] = []
        self._read_s = -_NAMES_S

    async def cached(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], cache_salt: str = ""
    ) -> Cached | None:
        """Return what is held of the prompts, in sum; `names` are those that the model goes by.

        Cancelled, nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        began_s, outcome = loop.time(), "failed"
        try:
            async with asyncio.timeout(self._settings.store_s):
                found = await self._cached(names, prompts, cache_salt)
            outcome = "ok"
        except (TimeoutError, DeadlineExceeded):
            found, outcome = None, "timeout"
        except (KVStoreError, ValueError):
            found = None
        finally:
            self._metrics.store_asked(outcome, loop.time() - began_s)
        if found is not None:
            self._metrics.cached(found.tokens, sum(map(len, prompts)))
        return found

    async def _cached(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], cache_salt: str
    ) -> Cached | None:
        group = await self._group(names)
        if group is None:
            return None
        fine = self._settings.hash_block_tokens or group.block_tokens
        if group.block_tokens % fine:
            return None
        held: dict[str, int] = dict.fromkeys((*_TIERS, ""), 0)
        for prompt in prompts:
            chain = hashes.chain(
                prompt, fine, algorithm=self._settings.block_hash, seed=self._settings.hash_seed, cache_salt=cache_salt
            )
            step = group.block_tokens // fine
            runs = await self._runs(group, itertools.islice(chain, step - 1, None, step))
            for tier in held:
                held[tier] += min(run[tier] for run in runs) * group.block_tokens
        anywhere = held.pop("")
        return Cached({tier: tokens for tier, tokens in held.items() if tokens}, anywhere, group.block_tokens)

    async def _runs(self, group: Group, chain: Iterator[bytes]) -> list[dict[str, int]]:
        """Return, for each rank, the leading run of blocks in each tier, and under "" that in any.

        Hashes are computed as far as the run goes: a prompt that nobody knows costs one window.
        """
        runs: list[dict[str, int]] = [dict.fromkeys((*_TIERS, ""), 0) for _ in group.digests]
        start = 0
        while window := list(itertools.islice(chain, _WINDOW)):
            for digest, run in zip(group.digests, runs, strict=True):
                report = await self._ask(wire.Keys(0, digest, hashes=window))
                places = {block["hash"]: block["tiers"] for block in cast("list[dict[str, Any]]", report["blocks"])}
                for number, block_hash in enumerate(window, start):
                    tiers = places.get(block_hash.hex(), ())
                    for tier in (*tiers, *([""] if tiers else [])):
                        if run.get(tier) == number:
                            run[tier] += 1
            start += len(window)
            if min(run[""] for run in runs) < start:
                break
        return runs

    async def _group(self, names: Sequence[str]) -> Group | None:
        now_s = asyncio.get_running_loop().time()
        found = self._chosen(names)
        if found is None or now_s >= self._read_s + _NAMES_S:
            report = await self._ask(wire.Stats(0))
            self._namespaces = [one for one in report["namespaces"] if not one["adapter"]]
            self._read_s = now_s
            found = self._chosen(names)
        return found

    def _chosen(self, names: Sequence[str]) -> Group | None:
        wanted = self._settings.namespace
        if wanted:
            names = (wanted,)
        known = {form for name in names for form in (name, PurePosixPath(name).name)}
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for one in self._namespaces:
            is_named = one["model"] in known or PurePosixPath(one["model"]).name in known
            if is_named or (wanted and one["digest"].startswith(wanted.lower())):
                groups.setdefault(one["group"], []).append(one)
        if len(groups) != 1:
            return None
        (ranks,) = groups.values()
        block_tokens = {int(rank["block_tokens"]) for rank in ranks}
        if len(block_tokens) != 1 or not min(block_tokens):
            return None
        digests = tuple(sorted({bytes.fromhex(rank["digest"]) for rank in ranks}))
        return Group(digests, block_tokens.pop())

    async def _ask(self, request: wire.Message) -> dict[str, Any]:
        return await self._client.admin(request, deadline_s=self._settings.store_s)
