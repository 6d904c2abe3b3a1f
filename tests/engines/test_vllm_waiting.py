"""D waits for P's blocks beside its scheduler: on a real daemon, woken by it, never for longer than it was told."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client, Component, Namespace, Slice
from kvclient._steps import Operation, R
from kvclient._vllm_lookup import Ranks
from kvclient._vllm_plan import Plan, Scheduled
from kvclient._vllm_scheduler import Scheduler
from kvclient._vllm_settings import Settings
from kvclient._vllm_stats import Counters
from kvclient._vllm_waiting import WAITING_MAX, Waits, wait_s_of
from kvclient.aio import AsyncClient
from tests.daemon_fixture import Daemon, eventually, running

TOKENS, HEADS, LAYERS, DIM = 16, 4, 2, 32
LONG_S = 60.0  # no test waits so long unless something is wrong
OUTSIDE = Component("kv", "float32", ("layer", "kv", "head", "token", "dim"), (LAYERS, 2, HEADS, TOKENS, DIM))
INSIDE = Component("kv", "float32", ("layer", "kv", "token", "head", "dim"), (LAYERS, 2, TOKENS, HEADS, DIM))


def model(name: str, component: Component = OUTSIDE) -> Namespace:
    return Namespace(name, "r", "float32", (component,), TOKENS, Slice((0, LAYERS), (0, HEADS)))


def slices(namespace: Namespace, count: int) -> list[Namespace]:
    """Return the namespaces of `count` tensor-parallel ranks."""
    heads = HEADS // count
    return [namespace.with_slice(Slice((0, LAYERS), (at * heads, (at + 1) * heads))) for at in range(count)]


def hashes(label: str, count: int) -> list[bytes]:
    return [f"{label} {number}".encode().ljust(32, b".") for number in range(count)]


def told(wait_s: float = LONG_S) -> dict[str, Any]:
    return {"kvstored": {"wait_ms": round(wait_s * 1000)}}


@dataclass
class Prompt:
    """A request of six full blocks and a bit, as the connector reads it."""

    request_id: str
    kv_transfer_params: Mapping[str, object] | None = field(default_factory=told)
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_prompt_tokens: int = 6 * TOKENS + 1
    max_tokens: int = 16
    lora_request: None = None
    skip_reading_prefix_cache: bool | None = None
    num_tokens: int = 6 * TOKENS + 1

    def __post_init__(self) -> None:
        self.block_hashes = self.block_hashes or hashes(self.request_id, 6)


@dataclass
class Node:
    """A daemon, a model of this test's own, and what stands for P."""

    daemon: Daemon
    client: Client
    model: Namespace
    beside: list[Scheduler] = field(default_factory=list[Scheduler])

    def scheduler(self, *ranks: Namespace, counters: Counters | None = None, **settings: Any) -> Scheduler:
        """Return D's, or P's: it has no engine behind it."""
        given: dict[str, Any] = {"lookup_budget_ms": 30_000.0, "wait_timeout_ms": LONG_S * 1000, **settings}
        made = Scheduler(
            self.client, Settings(**given), counters or Counters(), Plan(TOKENS), rank_count=max(1, len(ranks))
        )
        made.introduced({(0, rank): namespace.encode() for rank, namespace in enumerate(ranks or [self.model])})
        self.beside.append(made)
        return made

    def store(self, blocks: Sequence[bytes], namespace: Namespace | None = None) -> None:
        namespace = namespace or self.model
        sources = [bytes(namespace.block_bytes) for _ in blocks]
        assert self.client.namespace(namespace).store(blocks, sources).failed == 0

    def abort_until_somebody_is_told(self, block: bytes) -> None:
        handle = self.client.namespace(self.model)
        eventually(lambda: handle.abort([block]), "somebody waits for the block")


@pytest.fixture(scope="module")
def directory(private_temp_dir: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="w-", dir=private_temp_dir))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[Daemon]:
    with running(directory, ssd=None) as daemon:
        yield daemon


@pytest.fixture
def node(shared: Daemon, request: pytest.FixtureRequest) -> Iterator[Node]:
    with Client(shared.socket) as client:
        node = Node(shared, client, model(request.node.name))
        yield node
        for beside in node.beside:
            beside.close()


def goes_on_waiting(beside: Scheduler, request: Prompt, steps: int = 3) -> None:
    """Check that a request is to be asked about again later; the scheduler goes on meanwhile."""
    for _ in range(steps):
        assert beside.matched(request, 0) is None
        beside.step([], ())


def answer(beside: Scheduler, request: Prompt, within_s: float = LONG_S / 2) -> int:
    """Ask as often as vLLM does until there is an answer."""
    ends_s = time.monotonic() + within_s
    while (tokens := beside.matched(request, 0)) is None:
        assert time.monotonic() < ends_s, "it waits still"
        beside.step([], ())
    return tokens


# ---- what a request says


@pytest.mark.parametrize(
    ("params", "wait_s"),
    [
        ({"kvstored": {"wait_ms": 1500, "source_node": "n"}}, 1.5),
        ({"kvstored": {"wait_ms": 0.5}, "do_remote_prefill": True}, 0.0005),
        ({"kvstored": {"wait_ms": 10**400}}, 5.0),
        ({"kvstored": {"wait_ms": float("inf")}}, 5.0),
        ({"kvstored": {"wait_ms": float("nan")}}, 0.0),
        ({"kvstored": {"wait_ms": -1}}, 0.0),
        ({"kvstored": {"wait_ms": 0}}, 0.0),
        ({"kvstored": {"wait_ms": True}}, 0.0),
        ({"kvstored": {"wait_ms": "1500"}}, 0.0),
        ({"kvstored": {"wait_ms": [1500]}}, 0.0),
        ({"kvstored": {"wait_ms": None}}, 0.0),
        ({"kvstored": {"source_node": "n"}}, 0.0),
        ({"kvstored": {}}, 0.0),
        ({"kvstored": [1]}, 0.0),
        ({"kvstored": 1500}, 0.0),
        ({"kvstored": None}, 0.0),
        ({1: 2}, 0.0),
        ({}, 0.0),
        (None, 0.0),
        ("kvstored", 0.0),
        ([("kvstored", {"wait_ms": 1})], 0.0),
    ],
)
def test_whatever_a_request_says_it_waits_no_longer_than_the_operator_allows(params: object, wait_s: float) -> None:
    assert wait_s_of(params, 5.0) == wait_s


def test_a_request_waits_as_long_as_a_load_may_take_unless_the_operator_says_otherwise() -> None:
    assert Settings(load_timeout_ms=3000).longest_wait_s == 3.0
    assert Settings(load_timeout_ms=3000, wait_timeout_ms=60_000).longest_wait_s == 60.0


# ---- D waits


def test_a_request_waits_until_its_prefill_has_stored_all_blocks(node: Node) -> None:
    counters = Counters()
    beside, request = node.scheduler(counters=counters), Prompt("x")
    goes_on_waiting(beside, request)
    node.store(request.block_hashes[:4])
    goes_on_waiting(beside, request)
    assert answer(beside, Prompt("other", None)) == 0, "others go on"
    node.store(request.block_hashes[4:])
    assert answer(beside, request) == 6 * TOKENS
    counted = counters.take()
    assert (counted["waits"], counted.get("waits_in_vain", 0)) == (1, 0)
    assert counted["wait_seconds"] > 0


def test_what_is_there_already_is_not_waited_for(node: Node) -> None:
    request = Prompt("x")
    node.store(request.block_hashes)
    assert answer(node.scheduler(), request) == 6 * TOKENS


def test_what_the_engine_has_itself_is_not_waited_for(node: Node) -> None:
    beside = node.scheduler()
    request = Prompt("x")
    answered: list[int] = []

    def is_answered() -> bool:
        tokens = beside.matched(request, 6 * TOKENS)
        answered.extend([] if tokens is None else [tokens])
        return bool(answered)

    eventually(is_answered, "it does not wait")
    assert answered == [0]


def test_a_prefill_that_is_given_up_leaves_what_is_there(node: Node) -> None:
    counters = Counters()
    beside, request = node.scheduler(counters=counters), Prompt("x")
    node.store(request.block_hashes[:2])
    goes_on_waiting(beside, request)
    node.abort_until_somebody_is_told(request.block_hashes[3])
    assert answer(beside, request) == 2 * TOKENS
    assert counters.take()["waits_in_vain"] == 1


def test_a_wait_ends_with_its_time(node: Node) -> None:
    request = Prompt("x", told(0.2))
    node.store(request.block_hashes[:2])
    assert answer(node.scheduler(), request) == 2 * TOKENS
    limited = node.scheduler(wait_timeout_ms=200)
    assert answer(limited, Prompt("y")) == 0
    by_load = node.scheduler(wait_timeout_ms=None, load_timeout_ms=200)
    assert answer(by_load, Prompt("z")) == 0


def test_a_request_waits_once(node: Node) -> None:
    beside, request = node.scheduler(), Prompt("x", told(0.2))
    assert answer(beside, request) == 0
    beside.allocated("x", list(range(7)), 0)
    beside.step([Scheduled("x", 0, 6 * TOKENS + 1, list(range(7)), replaces=True)], ())
    beside.step([], {"x"})
    request.kv_transfer_params = told()
    assert answer(beside, request) == 0, "preempted, it is asked about again, at once"


def test_a_reset_ends_all_waits(node: Node) -> None:
    beside, request = node.scheduler(), Prompt("x")
    goes_on_waiting(beside, request)
    beside.reset()
    assert answer(beside, request) == 0
    assert answer(beside, Prompt("later")) == 0, "nobody stores what this engine could load"


def test_an_engine_may_end_while_requests_wait(node: Node) -> None:
    beside = node.scheduler()
    goes_on_waiting(beside, Prompt("x"))
    beside.close()
    assert not any(thread.name == "kvstored-wait" for thread in threading.enumerate())


class Noting(AsyncClient):
    """Notes which of its calls were cancelled."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.running = 0
        self.cancelled = threading.Event()

    async def run(self, operation: Operation[R], deadline_s: float | None, wait_s: float = 0.0) -> R:
        self.running += 1
        try:
            return await super().run(operation, deadline_s, wait_s)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1


def test_a_request_that_its_client_aborts_waits_no_more(node: Node) -> None:
    client = Noting(node.daemon.socket)
    waits = Waits(lambda: client, Counters())
    ranks = Ranks([node.model], None)
    assert waits.is_waiting("x", LONG_S, ranks, hashes("x", 6))
    eventually(lambda: client.running, "it waits")
    waits.forget("x")
    assert client.cancelled.wait(LONG_S / 2)
    assert not waits.running
    waits.close()


def test_so_many_requests_wait_at_once_and_no_more(node: Node) -> None:
    waits = Waits(lambda: AsyncClient(node.daemon.socket), Counters())
    ranks = Ranks([node.model], None)
    for number in range(WAITING_MAX):
        assert waits.is_waiting(f"{number}", LONG_S, ranks, hashes(f"{number}", 2))
    assert not waits.is_waiting("one more", LONG_S, ranks, hashes("one more", 2))
    node.store(hashes("5", 2))
    eventually(lambda: not waits.is_waiting("5", LONG_S, ranks, hashes("5", 2)), "the others are told as ever")
    assert waits.is_waiting("next", LONG_S, ranks, hashes("next", 2))
    assert not waits.is_waiting("one more", LONG_S, ranks, hashes("one more", 2)), "it has gone on"
    waits.close()


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.stop])
def test_a_wait_ends_with_the_daemon(short_dir: Path, end: Callable[[Daemon], Any]) -> None:
    with running(short_dir, ssd=None) as daemon, Client(daemon.socket) as client:
        node = Node(daemon, client, model("m"))
        beside, request = node.scheduler(lookup_budget_ms=1000), Prompt("x")
        goes_on_waiting(beside, request)
        end(daemon)
        assert answer(beside, request) == 0
        assert answer(beside, Prompt("without a daemon")) == 0
        beside.close()


# ---- P is split otherwise


def test_every_rank_s_blocks_are_waited_for(node: Node) -> None:
    ranks = slices(node.model, 2)
    beside, request = node.scheduler(*ranks), Prompt("x")
    node.store(request.block_hashes, ranks[0])
    goes_on_waiting(beside, request)
    node.store(request.block_hashes, ranks[1])
    assert answer(beside, request) == 6 * TOKENS


def test_blocks_of_a_prefill_over_other_ranks_are_waited_for_once_these_have_been_met(node: Node) -> None:
    ranks = slices(node.model, 2)
    beside, request = node.scheduler(), Prompt("x")
    for rank in ranks:
        node.store(hashes("met", 6), rank)
    assert answer(beside, Prompt("met")) == 6 * TOKENS
    goes_on_waiting(beside, request)
    node.store(request.block_hashes, ranks[1])
    goes_on_waiting(beside, request)
    node.store(request.block_hashes, ranks[0])
    assert answer(beside, request) == 6 * TOKENS


def test_what_is_stored_and_can_not_be_put_together_is_not_waited_for(node: Node) -> None:
    whole = model(node.model.model, INSIDE)
    ranks = slices(whole, 2)
    beside = node.scheduler(whole)
    for label in ("met", "x"):
        request = Prompt(label)
        for rank in ranks:
            node.store(request.block_hashes, rank)
        assert answer(beside, request) == 0


# ---- P gives up


def test_an_aborted_prefill_ends_the_waits_for_what_it_had_not_stored(node: Node) -> None:
    p, d = node.scheduler(), node.scheduler()
    prefilling, request = Prompt("x", None, max_tokens=1), Prompt("d", block_hashes=hashes("x", 6))
    assert answer(p, prefilling) == 0
    p.allocated("x", list(range(7)), 0)
    p.step([Scheduled("x", 0, 2 * TOKENS, [0, 1], replaces=True)], ())
    node.store(request.block_hashes[:2])
    goes_on_waiting(d, request)
    again = 0

    def is_told() -> bool:
        nonlocal again
        again += 1
        p.finished("x" if again == 1 else f"x{again}", aborted=True)
        more = Prompt(f"x{again + 1}", None, hashes("x", 6), max_tokens=1)
        assert answer(p, more) == 2 * TOKENS
        return d.matched(request, 0) is not None

    # Its wait may not have reached the daemon when the first abort does; P's clients may be as quick.
    eventually(is_told, "D is told")
    assert answer(d, request) == 2 * TOKENS
