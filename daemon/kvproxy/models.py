"""Which models the workers serve, and what each is called elsewhere: /v1/models, and the names in the store.

Invariants
1. At most one question is under way; its answer is believed for `_BELIEVED_S`.
2. An adapter has no name here: its blocks have hashes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec

from kvproxy.breaker import counts_as_failure
from kvproxy.legs import Answer, Wires
from kvproxy.types import Role
from kvproxy.workers import Fleet

_BELIEVED_S = 30.0
_LIMIT_S = 2.0
_ALL_S = 10.0
_NAMES_S = 0.5  # requests wait for it
_BYTES_MAX = 4 << 20


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_cards = msgspec.json.Decoder(_Cards)


class Models:
    """What the workers say they serve."""

    def __init__(self, fleet: Fleet, wires: Wires) -> None:
        self._fleet = fleet
        self._wires = wires
        self._names: dict[str, tuple[str, ...] | None] = {}
        self._read_s = -_BELIEVED_S
        self._asking = asyncio.Lock()

    async def listed(self, headers: dict[str, str]) -> Answer | None:
        """Return a worker's answer to /v1/models, D's first; None if none answers, however many there are."""
        views = [view for role in (Role.DECODE, Role.PREFILL) for view in self._fleet.usable(role, {})]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ALL_S):
                for view in views:
                    with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                        answer = await self._wires.get(f"{view.key}/v1/models", _LIMIT_S, headers, _BYTES_MAX)
                        if not counts_as_failure(answer.status):
                            return answer
        return None

    async def names_of(self, model: str) -> tuple[str, ...] | None:
        """Return the names that a model goes by, or None for an adapter."""
        async with self._asking:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._read_s + _BELIEVED_S:
                self._read_s = now_s
                try:
                    async with asyncio.timeout(_NAMES_S):
                        answer = await self.listed({})
                except TimeoutError:
                    answer = None
                if answer is not None and answer.status == 200:
                    self._note(answer.body)
        return self._names.get(model, (model,))

    def _note(self, body: bytes) -> None:
        try:
            cards = _cards.decode(body).data
        except msgspec.MsgspecError:
            return
        self._names = {
            card.id: None if card.parent else (card.id, *([card.root] if card.root else [])) for card in cards
        }
