"""Cases X: the proxy. X01 a client that is gone costs nothing more, X05 P and D are a pair or nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from kvproxy import hashes
from tests.daemon_fixture import running
from tests.kvproxy.proxy_fixture import PROMPT, Answer, Proxy, eventually, proxied, run
from tests.kvproxy.stub_worker import COMPLETIONS, MODEL, Behaviour
from tests.rawclient import namespace

# A second on a machine that does nothing else.
SOON_S = 20.0


def is_right(answer: Answer) -> bool:
    return answer.status == 200 and answer.text == "Once upon a time" and not answer.cut


def transfers(proxy: Proxy) -> list[object]:
    """Return what D was told of P, request by request."""
    return [seen.json.get("kv_transfer_params") for stub in proxy.decode for seen in stub.seen]


# ---- X01: a client that leaves ends both legs, and the store keeps nothing for it


def test_x01_a_client_that_gives_up_ends_the_prefill_and_nothing_is_held_or_tried_again(short_dir: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    space = namespace(4096, model=MODEL)
    held = list(hashes.chain(list(PROMPT.encode()), space.block_tokens))[:40]
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        client.put(client.open(space), held)

        patient = (f"--store={daemon.socket}", "--store-timeout=10s", "--tokenize-timeout=10s")

        async def steps() -> None:
            async with proxied(short_dir, *patient) as proxy:
                proxy.prefill[0].behaviour = Behaviour(hangs=True)
                body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4})
                left = await asyncio.create_subprocess_exec(
                    curl, "--silent", "--max-time", "1", "--header", "Content-Type: application/json", "--data", body,
                    proxy.url + COMPLETIONS, stdout=asyncio.subprocess.DEVNULL,
                )  # fmt: skip
                (seen,) = await proxy.prefill[0].arrived(1)
                assert await left.wait() == 28, "curl's own timeout"
                left_s = asyncio.get_running_loop().time()
                async with asyncio.timeout(SOON_S):
                    await seen.cancelled.wait()
                assert seen.cancelled_s is not None
                assert seen.cancelled_s - left_s < SOON_S
                await proxy.settled()
                assert len(proxy.prefill[0].seen) == 1, "it was tried again for nobody"
                assert not proxy.decode[0].seen, "D was asked for a client that had left"
                assert {worker["state"] for worker in (await proxy.workers()).values()} == {"closed"}
                assert await proxy.metric("clients_gone_total") == 1
                assert await proxy.metric("store_seconds_count", outcome="ok") == 1
                assert await proxy.metric("cached_tokens_total") == len(held) * space.block_tokens

        run(steps())
        assert client.tier("cpu")["pinned_bytes"] == 0
        assert client.stats()["sessions"]["leases"] == 0
        client.check()


# ---- X05: P's circuit is open, so D is asked for all of it, or nobody is; half-open, one probe closes it


@pytest.mark.parametrize("policy", ["plain", "503"])
def test_x05_d_is_told_of_no_p_that_is_gone_and_p_is_used_again_once_it_is_back(short_dir: Path, policy: str) -> None:
    async def steps() -> None:
        async with proxied(short_dir, f"--on-prefill-loss={policy}") as proxy:
            (p,) = proxy.prefill
            told = {"kvstored": {"source_node": "prefill-0"}}
            assert is_right(await proxy.ask())
            await p.refuse()
            opened = p.connection_count
            for _ in range(20):
                answer = await proxy.ask()
                assert is_right(answer) if policy == "plain" else answer.status == 503
            assert transfers(proxy) == [told, *[None] * (20 if policy == "plain" else 0)]
            assert p.connection_count == opened
            state = (await proxy.workers())[p.url]["state"]
            assert state in ("open", "half_open")
            await p.listen()
            loop = asyncio.get_running_loop()
            back_s = loop.time()

            async def is_normal() -> bool:
                return is_right(await proxy.ask()) and transfers(proxy)[-1] == told

            await eventually(is_normal, "P is used again")
            # 5 s on a machine that does nothing else; one that is busy gets six times that.
            assert loop.time() - back_s < 30
            assert (await proxy.workers())[p.url]["state"] == "closed"
            assert await proxy.metric("breaker_opened_total", role="prefill") >= 1

    run(steps())
