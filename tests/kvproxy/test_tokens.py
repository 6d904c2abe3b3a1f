"""Token ids are the engine's, or none: from the worker, from a tokenizer.json, or from the request itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from kvproxy.bodies import Kind, read
from kvproxy.legs import Wires
from kvproxy.metrics import Metrics
from kvproxy.tokens import Tokenizer, tokenizer_for
from kvproxy.types import Role
from kvproxy.workers import Fleet
from kvstore.errors import BadSetting
from tests.kvproxy.running import on_loop, settings_of
from tests.kvproxy.stub_worker import Behaviour, StubWorker

JSON = CIMultiDict({"Content-Type": "application/json", "Authorization": "Bearer k"})


@asynccontextmanager
async def tokenizer(*stubs: StubWorker, setting: str = "worker", **flags: Any) -> AsyncGenerator[Tokenizer, None]:
    settings = settings_of(*stubs, tokenizer=setting, **flags)
    fleet = Fleet(lambda: 0.0, dict.fromkeys(Role, 1.0))
    for endpoint in (*settings.prefill, *settings.decode):
        fleet.add(endpoint)
    async with Wires(settings) as wires:
        yield tokenizer_for(settings, fleet, wires, Metrics())


async def ids(found: Tokenizer, kind: Kind, **body: Any) -> list[Sequence[int]] | None:
    return await found.tokens_of(read(kind, json.dumps(body).encode()), JSON)


@on_loop
async def test_a_worker_is_asked_with_what_decides_about_the_prompt_and_nothing_else() -> None:
    async with StubWorker(Role.DECODE) as d, tokenizer(d) as found:
        assert await ids(
            found, Kind.COMPLETIONS, model="m", prompt=["ab", "c"], max_tokens=5, add_special_tokens=False
        ) == [
            [97, 98],
            [99],
        ]
        assert [seen.json for seen in d.asides] == [
            {"model": "m", "prompt": "ab", "add_special_tokens": False},
            {"model": "m", "prompt": "c", "add_special_tokens": False},
        ]
        assert d.asides[0].headers["authorization"] == "Bearer k"
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}}
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert await ids(found, Kind.CHAT, **chat, tools=tools, temperature=1, stream=True) == [[120]]
        assert d.asides[-1].json == {**chat, "tools": tools}


@on_loop
async def test_ids_in_the_request_need_nobody() -> None:
    async with StubWorker(Role.DECODE) as d:
        for setting in ("worker", "off"):
            async with tokenizer(d, setting=setting) as found:
                assert await ids(found, Kind.COMPLETIONS, prompt=[[1, 2], [3]]) == [(1, 2), (3,)]
        async with tokenizer(d, setting="off") as found:
            assert await ids(found, Kind.COMPLETIONS, prompt="text") is None
        assert not d.asides


@pytest.mark.parametrize("fault", ["nobody listens", "no ids", "no /tokenize"])
@on_loop
async def test_a_worker_that_can_t_tell_gives_none(fault: str) -> None:
    async with StubWorker(Role.DECODE, Behaviour(tokenizes=fault != "no /tokenize")) as d, tokenizer(d) as found:
        if fault == "nobody listens":
            await d.refuse()
        prompt = {"a": 1} if fault == "no ids" else "text"
        assert await ids(found, Kind.COMPLETIONS, prompt=prompt) is None


@on_loop
async def test_a_worker_that_is_silent_costs_the_time_that_is_allowed() -> None:
    async with StubWorker(Role.DECODE) as d:
        held: list[asyncio.StreamWriter] = []
        await d.refuse()
        silent = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", d.port)
        async with silent, tokenizer(d, tokenize_timeout="200ms") as found:
            assert await ids(found, Kind.COMPLETIONS, prompt="text") is None
        assert len(held) == 1
        for writer in held:
            writer.transport.abort()


@on_loop
async def test_a_tokenizer_of_this_machine_needs_no_worker_for_completions(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[UNK]": 0, "once": 1, "upon": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    async with StubWorker(Role.DECODE) as d, tokenizer(d, setting=str(tmp_path)) as found:
        assert await ids(found, Kind.COMPLETIONS, prompt=["once upon", [7], "a"]) == [[1, 2], (7,), [0]]
        assert await ids(found, Kind.COMPLETIONS, prompt=["once upon", "a once"]) == [[1, 2], [0, 1]]
        assert await ids(found, Kind.CHAT, messages=[{"role": "user", "content": "once"}]) is None
        assert await ids(found, Kind.COMPLETIONS, prompt="once", add_special_tokens=False) is None
        assert not d.asides


def test_a_directory_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    async def make() -> None:
        async with StubWorker(Role.DECODE) as d, tokenizer(d, setting=str(tmp_path)):
            pass

    with pytest.raises(BadSetting, match=r"no tokenizer\.json"):
        on_loop(make)()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadSetting, match="can't be read"):
        on_loop(make)()
