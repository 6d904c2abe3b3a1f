"""What a real kvstored holds decides whether P is asked: the same tokens, the same hashes, all ranks, one model."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client, Component, Namespace, Slice
from kvproxy.types import Role
from kvstore import wire
from tests.daemon_fixture import Daemon, running
from tests.kvproxy.running import ASK, CHAT_ASK, PROMPT, chain, client, on_loop, proxy
from tests.kvproxy.stub_worker import MODEL, Behaviour, StubWorker

BLOCK = 16
TOKENS = tuple(PROMPT.encode())  # as the stub's /tokenize has it


def namespace(model: str = MODEL, revision: str = "1", rank: int = 0, ranks: int = 1, **more: Any) -> Namespace:
    heads = 4 // ranks
    return Namespace(
        model=model,
        revision=revision,
        dtype="float16",
        components=(Component("kv", "float16", ("layer", "kv", "head", "token", "dim"), (2, 2, 4, BLOCK, 8)),),
        block_tokens=BLOCK,
        slice=Slice(layers=(0, 2), heads=(rank * heads, (rank + 1) * heads)),
        **more,
    )


def store(daemon: Daemon, space: Namespace, chain: Sequence[bytes]) -> None:
    with Client(daemon.socket, strict=True) as writer:
        blocks = writer.namespace(space)
        found = blocks.store(list(chain), [bytes(space.block_bytes)] * len(chain))
        assert found.stored == len(chain)


async def asks_p(daemon: Daemon, ask: dict[str, Any], path: str = "/v1/completions", **flags: Any) -> bool:
    """Return whether P was asked; D was in any case, with the client's request."""
    async with (
        StubWorker(Role.PREFILL) as p,
        StubWorker(Role.DECODE) as d,
        proxy(p, d, store=str(daemon.socket), store_timeout="5s", **flags) as served,
        client(served) as http,
    ):
        async with http.post(path, json=ask) as answer:
            assert answer.status == 200
        assert d.seen[0].json == ask
        return bool(p.seen)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@on_loop
async def test_p_is_not_asked_for_what_the_store_holds(short_dir: Path, algorithm: str) -> None:
    flags = {"block_hash": algorithm, "hash_seed": "0"}
    held = chain(TOKENS, BLOCK, algorithm=algorithm, seed="0")
    with running(short_dir, ssd=None) as daemon:
        assert await asks_p(daemon, ASK, **flags)
        store(daemon, namespace(), held[:2])
        assert await asks_p(daemon, ASK, **flags)
        store(daemon, namespace(), held[2:])
        assert not await asks_p(daemon, ASK, **flags)
        assert not await asks_p(daemon, CHAT_ASK, "/v1/chat/completions", **flags)
        assert not await asks_p(daemon, {**ASK, "prompt": list(TOKENS)}, **flags)
        assert not await asks_p(daemon, {**ASK, "prompt": [PROMPT, list(TOKENS)]}, **flags)
        assert await asks_p(daemon, {**ASK, "prompt": [PROMPT, PROMPT[::-1]]}, **flags)
        assert await asks_p(daemon, ASK, **{**flags, "hash_seed": "1"})
        assert await asks_p(daemon, {**ASK, "cache_salt": "s"}, **flags)
        store(daemon, namespace(), chain(TOKENS, BLOCK, algorithm=algorithm, seed="0", cache_salt="s"))
        assert not await asks_p(daemon, {**ASK, "cache_salt": "s"}, **flags)


@on_loop
async def test_asking_counts_no_query_and_holds_nothing(short_dir: Path) -> None:
    held = chain(TOKENS, BLOCK)
    with running(short_dir, ssd=None) as daemon:
        store(daemon, namespace(), held)
        assert not await asks_p(daemon, ASK)
        with Client(daemon.socket, strict=True) as reader:
            (counted,) = reader.admin(wire.Stats(0))["namespaces"]
            assert counted["queried_blocks"] == 0
            assert reader.admin(wire.Stats(0))["tiers"]["cpu"]["pinned_bytes"] == 0


@on_loop
async def test_a_prefix_is_held_only_if_every_rank_holds_it(short_dir: Path) -> None:
    held = chain(TOKENS, BLOCK)
    with running(short_dir, ssd=None) as daemon:
        store(daemon, namespace(rank=0, ranks=2), held)
        store(daemon, namespace(rank=1, ranks=2), held[:3])
        assert await asks_p(daemon, ASK)
        store(daemon, namespace(rank=1, ranks=2), held[3:])
        assert not await asks_p(daemon, ASK)


@on_loop
async def test_another_model_or_two_of_one_name_stand_for_nothing(short_dir: Path) -> None:
    held = chain(TOKENS, BLOCK)
    with running(short_dir, ssd=None) as daemon:
        store(daemon, namespace("another-model"), held)
        assert await asks_p(daemon, ASK)
        assert not await asks_p(daemon, ASK, namespace="another-model")
        store(daemon, namespace(adapter="lora-1"), held)
        assert await asks_p(daemon, ASK), "an adapter's blocks are not the model's"
        store(daemon, namespace(f"org/{MODEL}"), held)
        assert not await asks_p(daemon, ASK), "a path or an organisation in front is the same model"
        store(daemon, namespace(revision="2"), held[:1])
        assert await asks_p(daemon, ASK), "two revisions: nobody knows which one the engines run"
        digest = namespace(f"org/{MODEL}").digest.hex()
        assert not await asks_p(daemon, ASK, namespace=digest[:12])


@on_loop
async def test_where_tokens_are_not_known_for_sure_p_is_asked(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon:
        store(daemon, namespace(), chain(TOKENS, BLOCK))
        assert await asks_p(daemon, {**ASK, "truncate_prompt_tokens": 10_000})
        async with (
            StubWorker(Role.PREFILL) as p,
            StubWorker(Role.DECODE, Behaviour(tokenizes=False)) as d,
            proxy(p, d, store=str(daemon.socket), store_timeout="5s") as served,
            client(served) as http,
        ):
            p.behaviour = Behaviour(tokenizes=False)
            for _ in range(3):
                async with http.post("/v1/completions", json=ASK) as answer:
                    assert answer.status == 200
            assert len(p.seen) == 3
            asked = [seen for stub in (p, d) for seen in stub.asides if seen.path == "/tokenize"]
            assert len(asked) == 2, "a worker without /tokenize is left alone for a while"


@pytest.mark.parametrize("how", ["killed", "stopped"])
@on_loop
async def test_a_store_that_does_not_answer_costs_its_time_and_no_request(short_dir: Path, how: str) -> None:
    with running(short_dir, ssd=None) as daemon:
        store(daemon, namespace(), chain(TOKENS, BLOCK))
        async with (
            StubWorker(Role.PREFILL) as p,
            StubWorker(Role.DECODE) as d,
            proxy(p, d, store=str(daemon.socket), store_timeout="2s") as served,
            client(served) as http,
        ):

            async def asked_of_p() -> int:
                async with http.post("/v1/completions", json=ASK) as answer:
                    assert answer.status == 200
                return len(p.seen)

            assert await asked_of_p() == 0
            if how == "killed":
                daemon.kill()
            else:
                daemon.signal(signal.SIGSTOP)
            assert await asked_of_p() == 1
            assert await asked_of_p() == 2
            if how == "killed":
                daemon.start()
                store(daemon, namespace(), chain(TOKENS, BLOCK))
            else:
                daemon.signal(signal.SIGCONT)
            for _ in range(200):
                if await asked_of_p() == len(p.seen) and len(d.seen) - len(p.seen) > 1:
                    break
            assert len(d.seen) - len(p.seen) > 1, "it is asked again once it answers"
