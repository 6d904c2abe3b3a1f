"""From prompts to the token ids that the engine will compute.

Who knows them: a worker, by its /tokenize (vLLM; its template makes the prompt of a chat), or a tokenizer.json on this
machine. Prompts that came as token ids need neither.

Invariants
1. What can't be told for sure is None, never a guess: wrong ids would be wrong hashes, and those a wrong skip.
2. It takes `tokenize_s` at most, for all prompts of a request together; a worker that has no /tokenize is not asked
   again for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec
from multidict import CIMultiDict

from kvproxy.bodies import Ask, Kind
from kvproxy.legs import Wires, read_up_to
from kvproxy.metrics import Metrics
from kvproxy.settings import Settings
from kvproxy.types import Role
from kvproxy.workers import Fleet
from kvstore.errors import BadSetting

PROMPTS_MAX = 64
_ANSWER_BYTES_MAX = 32 << 20
_REST_S = 60.0
# What of a chat decides about its prompt, besides the messages.
_CHAT_MEMBERS = (
    "model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_answers = msgspec.json.Decoder(_Tokenized)


class Tokenizer(Protocol):
    """Turns the prompts of a request into token ids."""

    async def tokens_of(self, ask: Ask, headers: CIMultiDict[str]) -> list[Sequence[int]] | None:
        """Return the ids of each prompt, or None where they can't be told."""
        ...


def tokenizer_for(settings: Settings, fleet: Fleet, wires: Wires, metrics: Metrics) -> Tokenizer:
    """Return what the setting `tokenizer` asks for.

    Raises
    ------
    BadSetting
        It names a directory without a tokenizer.json that can be read.
    """
    if settings.tokenizer == "worker":
        return _Asking(settings, fleet, wires, metrics)
    if settings.tokenizer == "off":
        return _Given()
    return _Local(Path(settings.tokenizer), settings.tokenize_s, metrics)


class _Given:
    """Knows the ids of prompts that came as such."""

    async def tokens_of(self, ask: Ask, headers: CIMultiDict[str]) -> list[Sequence[int]] | None:
        ids: list[Sequence[int]] = [prompt for prompt in ask.prompts if not isinstance(prompt, str)]
        return ids if ids and len(ids) == len(ask.prompts) else None


class _Asking(_Given):
    """Asks a worker."""

    def __init__(self, settings: Settings, fleet: Fleet, wires: Wires, metrics: Metrics) -> None:
        self._limit_s = settings.tokenize_s
        self._fleet = fleet
        self._wires = wires
        self._metrics = metrics
        self._rests: dict[str, float] = {}  # workers without /tokenize, and until when they are left alone

    async def tokens_of(self, ask: Ask, headers: CIMultiDict[str]) -> list[Sequence[int]] | None:
        if (known := await super().tokens_of(ask, headers)) is not None:
            return known
        if not ask.hashable or len(ask.prompts) > PROMPTS_MAX:
            return None
        loop = asyncio.get_running_loop()
        began_s, outcome = loop.time(), "failed"
        try:
            async with asyncio.timeout(self._limit_s):
                found = await self._asked(ask, headers)
            outcome = "ok" if found is not None else "failed"
        except TimeoutError:
            found, outcome = None, "timeout"
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError):
            found = None
        finally:
            self._metrics.tokenized(outcome, loop.time() - began_s)
        return found

    async def _asked(self, ask: Ask, headers: CIMultiDict[str]) -> list[Sequence[int]] | None:
        if ask.kind is Kind.CHAT:
            members = {name: ask.members[name] for name in _CHAT_MEMBERS if name in ask.members}
            tokens = await self._one(msgspec.json.encode(members), headers)
            return None if tokens is None else [tokens]
        found: list[Sequence[int]] = []
        special = {name: ask.members[name] for name in ("model", "add_special_tokens") if name in ask.members}
        for prompt in ask.prompts:
            ids: Sequence[int] | None = prompt if not isinstance(prompt, str) else None
            if isinstance(prompt, str):
                ids = await self._one(msgspec.json.encode({**special, "prompt": prompt}), headers)
            if ids is None:
                return None
            found.append(ids)
        return found or None

    async def _one(self, body: bytes, headers: CIMultiDict[str]) -> Sequence[int] | None:
        url = self._whom()
        if url is None:
            return None
        async with await self._wires.post(f"{url}/tokenize", body, headers) as response:
            if response.status != 200:
                if response.status in (404, 405, 501):
                    self._rests[url] = asyncio.get_running_loop().time() + _REST_S
                response.close()
                return None
            return _answers.decode(await read_up_to(response, _ANSWER_BYTES_MAX)).tokens

    def _whom(self) -> str | None:
        """Return the worker with the least to do; a D before a P of equal load, as its loop is less often busy."""
        now_s = asyncio.get_running_loop().time()
        views = [*self._fleet.usable(Role.DECODE, {}), *self._fleet.usable(Role.PREFILL, {})]
        able = [view for view in views if self._rests.get(view.key, 0.0) <= now_s]
        return min(able, key=lambda view: view.requests).key if able else None


class _Local(_Given):
    """Has the tokenizer; for completions, since the template of chats is the worker's."""

    def __init__(self, directory: Path, limit_s: float, metrics: Metrics) -> None:
        self._encode = _encoder(directory)
        self._limit_s = limit_s
        self._metrics = metrics

    async def tokens_of(self, ask: Ask, headers: CIMultiDict[str]) -> list[Sequence[int]] | None:
        if (known := await super().tokens_of(ask, headers)) is not None:
            return known
        if not ask.hashable or ask.kind is Kind.CHAT or "add_special_tokens" in ask.members:
            return None
        loop = asyncio.get_running_loop()
        began_s, outcome = loop.time(), "timeout"
        texts = [prompt for prompt in ask.prompts if isinstance(prompt, str)]
        try:
            async with asyncio.timeout(self._limit_s):  # the thread goes on to its end, and nobody waits for it
                encoded = iter(await loop.run_in_executor(None, self._encode, texts))
            outcome = "ok"
        except TimeoutError:
            return None
        finally:
            self._metrics.tokenized(outcome, loop.time() - began_s)
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in ask.prompts] or None


def _encoder(directory: Path) -> Callable[[list[str]], list[list[int]]]:
    try:
        import tokenizers
    except ModuleNotFoundError as exc:
        raise BadSetting(f"tokenizer = {str(directory)!r} needs tokenizers: pip install tokenizers") from exc
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise BadSetting(f"tokenizer = {str(directory)!r} has no tokenizer.json: name the model's directory, or worker")
    try:
        loaded = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises a bare one for a file that it can't read
        raise BadSetting(f"{file} can't be read ({exc}): is it the model's own?") from exc

    def encode(texts: list[str]) -> list[list[int]]:
        # A batch of any length releases the GIL; a single encode does not.
        return [encoding.ids for encoding in loaded.encode_batch(texts)]

    return encode
