"""The worker's and the scheduler's side of the vLLM connector, on a real daemon and tensors as vLLM registers them."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvclient import Client, Namespace, Slice
from kvclient._vllm_layout import Rank, layout_of
from kvclient._vllm_lookup import Asker, RankLookup, Ranks
from kvclient._vllm_pages import Pages
from kvclient._vllm_plan import Plan, Scheduled, StepPlan, Transfer, Variant
from kvclient._vllm_scheduler import Scheduler
from kvclient._vllm_settings import Load, Settings, Store
from kvclient._vllm_stats import Counters
from kvclient._vllm_worker import Worker, namespace_of
from kvclient.aio import AsyncClient
from kvclient.results import Lookup
from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import Daemon, eventually, running

PAGES, TOKENS, HEADS, DIM, LAYERS = 32, 16, 4, 16, 3
NO_VARIANT = Variant()
LOADS = tuple(Load)
STORES = tuple(Store)


def hashes(label: str, count: int) -> list[bytes]:
    return [f"{label} {number}".encode().ljust(32, b".") for number in range(count)]


@dataclass
class Engine:
    """A rank's tensors and what the connector has in its worker."""

    tensors: dict[str, torch.Tensor]
    worker: Worker
    namespace: Namespace
    counters: Counters
    client: Client
    number: int = 0

    def step(
        self,
        *,
        loads: Sequence[Transfer] = (),
        saves: Sequence[Transfer] = (),
        preempted: Sequence[str] = (),
        sending: Sequence[str] = (),
        settles: bool = False,
    ) -> tuple[set[str], set[str], set[int]]:
        """Run a step as vLLM does; returns what was sent, received, and not loaded."""
        plan = StepPlan(self.number, list(loads), list(saves), list(preempted), list(sending), settles)
        plan.is_idle = not saves
        self.number += 1
        self.worker.begin(plan)
        self.worker.load()
        for layer in self.tensors:
            self.worker.take_layer(layer)
        self.worker.save()
        return *self.worker.transfers(), self.worker.take_failed()

    def load(self, transfer: Transfer) -> set[int]:
        """Load a request's blocks; returns the pages that have none."""
        _, received, failed = self.step(loads=[transfer])
        if transfer.request in received or not self.is_async:
            return failed
        ends_s = time.monotonic() + 30
        while transfer.request not in received:
            assert time.monotonic() < ends_s
            _, received, failed = self.step()
        return failed

    is_async: bool = True

    def fill(self, page: int) -> None:
        for number, tensor in enumerate(self.tensors.values()):
            tensor[page] = page + number / 8 + torch.arange(tensor[page].numel()).view(tensor[page].shape)

    def holds(self, page: int, of: int) -> bool:
        """Return whether a page holds what `fill` wrote to page `of`."""
        return all(
            torch.equal(
                tensor[page], of + number / 8 + torch.arange(tensor[page].numel()).view(tensor[page].shape).float()
            )
            for number, tensor in enumerate(self.tensors.values())
        )


def engine(socket: Path, *, load: Load = Load.ASYNC, store: Store = Store.BACKGROUND, **settings: Any) -> Engine:
    tensors = {f"layers.{number}": torch.zeros(PAGES, HEADS, TOKENS, DIM) for number in range(LAYERS)}
    rank = Rank(0, 1, 0, 1, layers=LAYERS, kv_heads=HEADS)
    layout = layout_of(tensors, rank, block_count=PAGES, block_tokens=TOKENS, local_heads=HEADS)
    namespace = Namespace("m", "r", "float32", layout.components, TOKENS, layout.slice)
    client, counters = Client(socket), Counters()
    given = Settings(load=load, store=store, **settings)
    worker = Worker(client, given, counters, Pages(tensors, layout), namespace, PAGES, saves=True)
    return Engine(tensors, worker, namespace, counters, client, is_async=load is Load.ASYNC)


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
def daemon(shared: Daemon) -> Daemon:
    """Return the daemon of all tests, with nothing in it."""
    with Client(shared.socket) as client:
        client.admin(wire.DropNamespace(0, None))
    return shared


def close(*engines: Engine) -> None:
    for one in engines:
        one.worker.close()
        one.client.close()


def transfer(request: str, label: str, pages: Sequence[int], variant: Variant = NO_VARIANT) -> Transfer:
    return Transfer(request, variant, hashes(label, len(pages)), list(pages))


# ---- in a worker


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("store", STORES)
def test_what_one_engine_saves_another_loads_to_other_pages(daemon: Daemon, load: Load, store: Store) -> None:
    p, d = engine(daemon.socket, store=store), engine(daemon.socket, load=load)
    for page in (3, 9, 4):
        p.fill(page)
    p.step(saves=[transfer("r", "x", [3, 9, 4])], settles=True)
    assert d.load(transfer("q", "x", [20, 21, 22])) == set()
    assert d.holds(20, 3) and d.holds(21, 9) and d.holds(22, 4)
    assert d.counters.take()["loaded_blocks"] == 3
    counted = p.counters.take()
    assert (counted["stored_blocks"], counted["stored_bytes"]) == (3, 3 * p.namespace.block_bytes)
    p.step(saves=[transfer("again", "x", [3, 9, 4])], settles=True)
    assert p.counters.take()["present_blocks"] == 3, "nothing is stored twice"
    close(p, d)


@pytest.mark.parametrize("load", LOADS)
def test_blocks_that_are_gone_are_reported_page_by_page(daemon: Daemon, load: Load) -> None:
    p, d = engine(daemon.socket, store=Store.SYNC), engine(daemon.socket, load=load)
    p.fill(1)
    p.step(saves=[transfer("r", "x", [1])])
    assert d.load(transfer("q", "x", [5, 6, 7])) == {6, 7}
    assert d.holds(5, 1)
    assert d.counters.take()["load_failed_blocks"] == 2
    close(p, d)


def test_variants_never_share(daemon: Daemon) -> None:
    one = engine(daemon.socket, store=Store.SYNC)
    one.fill(1)
    variants = [NO_VARIANT, Variant("lora@1"), Variant("lora@2"), Variant("", b"after a reset")]
    one.step(saves=[transfer("r", "x", [1], variants[1])])
    assert [one.load(transfer(f"q{at}", "x", [5], variant)) for at, variant in enumerate(variants)] == [
        {5}, set(), {5}, {5},
    ]  # fmt: skip
    assert len({namespace_of(one.namespace, variant).digest for variant in variants}) == len(variants)
    close(one)


@pytest.mark.parametrize("store", [Store.BACKGROUND, Store.LAYERWISE])
def test_a_request_s_pages_are_said_to_be_free_once_nothing_reads_them(daemon: Daemon, store: Store) -> None:
    p = engine(daemon.socket, store=store)
    p.fill(1)
    sent, _, _ = p.step(saves=[transfer("r", "x", [1])], sending=["r", "without saves"])
    assert "without saves" in sent
    ends_s = time.monotonic() + 30
    while "r" not in sent:
        assert time.monotonic() < ends_s
        sent, _, _ = p.step()
    assert p.worker.done == p.number - 1
    assert p.step()[0] == set(), "each is told once"
    close(p)


def test_pages_are_not_free_where_the_engine_asks_before_it_calls_save(daemon: Daemon) -> None:
    p = engine(daemon.socket)
    entered, release = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        entered.set()
        release.wait(30)

    p.worker._storer.submit(slow)  # pyright: ignore[reportPrivateUsage]
    assert entered.wait(30)
    p.fill(1)
    plan = StepPlan(0, saves=[transfer("r", "x", [1])], sending=["r"], is_idle=False)
    p.worker.begin(plan)
    assert p.worker.transfers()[0] == set()
    assert p.worker.done == -1
    p.worker.save()
    p.number = 1
    assert p.step()[0] == set()
    assert p.worker.done == -1
    release.set()
    sent: set[str] = set()
    ends_s = time.monotonic() + 30
    while "r" not in sent:
        assert time.monotonic() < ends_s
        sent, _, _ = p.step()
    assert p.load(transfer("q", "x", [2])) == set()
    assert p.holds(2, 1)
    close(p)


def test_a_step_without_forward_pass_saves_also_where_the_engine_does_not_call_save(daemon: Daemon) -> None:
    p = engine(daemon.socket)
    p.fill(1)
    p.worker.begin(StepPlan(0, saves=[transfer("r", "x", [1])], sending=["r"], settles=True))
    sent, _ = p.worker.transfers()
    assert sent == {"r"}
    p.number = 1
    assert p.load(transfer("q", "x", [2])) == set()
    assert p.holds(2, 1)
    close(p)


def test_a_save_that_has_not_begun_is_dropped_where_its_pages_are_taken_away(daemon: Daemon) -> None:
    p = engine(daemon.socket)
    entered, release = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        entered.set()
        release.wait(30)

    blocker = p.worker._storer.submit(slow)  # pyright: ignore[reportPrivateUsage]
    assert entered.wait(30)
    p.fill(1)
    p.step(saves=[transfer("r", "x", [1])])
    p.step(preempted=["r"], sending=["r"])
    release.set()
    blocker.result(30)
    p.step(saves=[transfer("s", "y", [1])], settles=True)
    assert p.load(transfer("q", "x", [2])) == {2}
    assert p.load(transfer("q2", "y", [2])) == set()
    assert p.counters.take()["store_dropped_blocks"] == 1
    close(p)


def test_a_save_that_has_begun_is_waited_for_before_its_pages_are_overwritten(daemon: Daemon) -> None:
    p = engine(daemon.socket)
    daemon.signal(signal.SIGSTOP)
    p.fill(1)
    p.step(saves=[transfer("r", "x", [1])])
    threading.Timer(0.3, daemon.signal, [signal.SIGCONT]).start()
    p.step(preempted=["r"])
    p.tensors["layers.0"][1] = -1
    d = engine(daemon.socket)
    assert d.load(transfer("q", "x", [2])) == {2} or d.holds(2, 1)
    close(p, d)


def test_saves_that_do_not_keep_up_are_dropped_and_counted(daemon: Daemon) -> None:
    p = engine(daemon.socket)
    release = threading.Event()
    p.worker._storer.submit(release.wait, 30)  # pyright: ignore[reportPrivateUsage]
    for number in range(4):
        p.step(saves=[transfer(f"r{number}", f"x{number}", range(number * 4, number * 4 + 4))])
    release.set()
    eventually(lambda: p.worker.done == p.number - 1, "what was taken is stored")
    p.step(saves=[transfer("last", "last", [1])], settles=True)
    counted = p.counters.take()
    assert (counted["store_dropped_blocks"], counted["stored_blocks"]) == (2 * 4, 2 * 4 + 1), "8 pages are a quarter"
    close(p)


def test_a_step_that_settles_waits_for_the_saves_before_it_where_its_own_are_dropped(daemon: Daemon) -> None:
    p = engine(daemon.socket)
    p.worker._queue_max = 1  # pyright: ignore[reportPrivateUsage]
    release = threading.Event()
    p.worker._storer.submit(release.wait, 30)  # pyright: ignore[reportPrivateUsage]
    p.fill(1)
    p.step(saves=[transfer("r", "x", [1])])
    assert p.worker.done == -1
    threading.Timer(0.3, release.set).start()
    p.step(saves=[transfer("s", "y", [2])], settles=True)
    assert p.worker.done == 1
    assert p.counters.take()["store_dropped_blocks"] == 1
    p.tensors["layers.0"][1] = -1  # as who gets the page next
    assert p.load(transfer("q", "x", [3])) == set()
    assert p.holds(3, 1)
    close(p)


def test_who_waits_for_blocks_that_do_not_keep_up_is_told_that_they_will_not_come(daemon: Daemon) -> None:
    p, late = engine(daemon.socket), hashes("late", 4)
    release = threading.Event()
    p.worker._storer.submit(release.wait, 30)  # pyright: ignore[reportPrivateUsage]
    p.step(saves=[transfer("first", "first", range(8))])

    async def waited() -> Lookup:
        async with AsyncClient(daemon.socket) as client:
            handle = client.namespace(p.namespace)
            await handle.lookup(late)
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(handle.wait(late, 60.0))
                await asyncio.sleep(0)  # it is sent
                assert await client.ping()  # and the daemon has it
                p.step(saves=[transfer("late", "late", range(8, 12))])
                release.set()
            return waiting.result()

    assert asyncio.run(waited()).outcomes == (Outcome.ABORTED,) * 4
    close(p)


def test_a_daemon_that_is_absent_or_stopped_costs_an_engine_nothing_and_is_found_again(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon:
        daemon.kill()
        p = engine(daemon.socket, load_timeout_ms=200, store_timeout_ms=200)
        p.fill(1)
        began_s = time.monotonic()
        for number in range(20):
            assert p.load(transfer(f"q{number}", "x", [2])) == {2}
            p.step(saves=[transfer(f"r{number}", "x", [1])], settles=True)
        assert time.monotonic() - began_s < 10
        daemon.start()

        def returns() -> bool:
            p.step(saves=[transfer("r", "x", [1])], settles=True)
            return p.load(transfer("q", "x", [2])) == set()

        eventually(returns, "blocks are stored and loaded again")
        daemon.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        for number in range(20):
            assert p.load(transfer(f"s{number}", "y", [3])) == {3}
        assert time.monotonic() - began_s < 10
        daemon.signal(signal.SIGCONT)
        eventually(returns, "blocks are stored and loaded again")
        close(p)


# ---- beside the scheduler


def slices(namespace: Namespace, count: int) -> list[Namespace]:
    """Return the namespaces of `count` tensor-parallel ranks."""
    heads = HEADS // count
    return [namespace.with_slice(Slice((0, LAYERS), (at * heads, (at + 1) * heads))) for at in range(count)]


def stored(client: Client, namespace: Namespace, label: str, count: int) -> None:
    buffers = [bytes(namespace.block_bytes) for _ in range(count)]
    assert client.namespace(namespace).store(hashes(label, count), buffers).failed == 0


def found(client: Client, namespaces: Sequence[Namespace], label: str, count: int) -> int:
    return client.run(RankLookup(Ranks(namespaces, None), hashes(label, count), 1000.0), 10.0).blocks


def test_a_block_is_found_if_every_rank_can_read_it(daemon: Daemon) -> None:
    whole = engine(daemon.socket).namespace
    first, second = slices(whole, 2)
    with Client(daemon.socket) as client:
        assert found(client, [whole], "x", 6) == 0
        stored(client, first, "x", 6)
        assert found(client, [first, second], "x", 6) == 0
        assert found(client, [first], "x", 6) == 6
        stored(client, second, "x", 4)
        assert found(client, [first, second], "x", 6) == 4
        assert found(client, [whole], "x", 6) == 4, "put together from both"
        assert found(client, slices(whole, 4), "x", 6) == 4, "parts of both"
        stored(client, whole, "x", 1)
        assert found(client, [whole], "x", 6) == 4
        stored(client, whole, "y", 2)
        assert found(client, [first, second], "y", 6) == 2
        assert found(client, [first, second], "z", 6) == 0


def test_a_prompt_of_more_blocks_than_a_request_holds_is_asked_about_in_windows(daemon: Daemon) -> None:
    whole = engine(daemon.socket).namespace
    small = replace(whole, components=(replace(whole.components[0], axes=("layer", "dim"), shape=(LAYERS, 1)),))
    with Client(daemon.socket) as client:
        assert found(client, [small], "long", 20_000) == 0


@dataclass
class Prompt:
    """A request as the connector reads it."""

    request_id: str
    block_hashes: list[bytes]
    num_prompt_tokens: int
    max_tokens: int = 16
    lora_request: None = None
    skip_reading_prefix_cache: bool | None = None
    kv_transfer_params: None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens


def prompt(label: str, tokens: int) -> Prompt:
    return Prompt(f"request {label}", hashes(label, tokens // TOKENS), tokens)


def scheduler(client: Client, namespace: Namespace | None, **settings: Any) -> Scheduler:
    plan = Plan(TOKENS)
    made = Scheduler(client, Settings(**settings), Counters(), plan, rank_count=1)
    if namespace is not None:
        made.introduced({(0, 0): namespace.encode()})
    return made


def answer(beside: Scheduler, request: Prompt, within_s: float = 30.0) -> int:
    """Ask as often as vLLM does until there is an answer."""
    ends_s = time.monotonic() + within_s
    while (tokens := beside.matched(request, 0)) is None:
        assert time.monotonic() < ends_s
        beside.step([], ())
    return tokens


def test_the_scheduler_hears_what_the_store_has_and_asks_once(daemon: Daemon) -> None:
    one = engine(daemon.socket)
    with Client(daemon.socket) as client:
        stored(client, one.namespace, "x", 5)
        beside = scheduler(client, one.namespace, lookup_budget_ms=30_000)
        request = prompt("x", 6 * TOKENS)
        calls = client.stats.snapshot()["calls"]
        assert answer(beside, request) == 5 * TOKENS
        assert beside.matched(request, 2 * TOKENS) == 3 * TOKENS
        assert client.stats.snapshot()["calls"] == calls + 1
        assert beside.tokens_by_tier(request.request_id, 5 * TOKENS, TOKENS) == (5 * TOKENS, 0)
        skipping = replace(prompt("x", 6 * TOKENS), request_id="other", skip_reading_prefix_cache=True)
        assert answer(beside, skipping) == 0
        beside.reset()
        assert answer(beside, replace(request, request_id="later")) == 0, "another life"
        beside.close()
    close(one)


def test_an_answer_to_what_was_asked_before_a_reset_is_none(daemon: Daemon) -> None:
    one = engine(daemon.socket)
    with Client(daemon.socket) as client:
        stored(client, one.namespace, "x", 5)
        beside = scheduler(client, one.namespace, lookup_budget_ms=30_000)
        daemon.signal(signal.SIGSTOP)
        assert beside.matched(prompt("x", 6 * TOKENS), 0) is None
        beside.reset()
        daemon.signal(signal.SIGCONT)
        assert answer(beside, prompt("x", 6 * TOKENS)) == 0
        beside.close()
    close(one)


def test_a_request_waits_for_the_workers_and_not_for_ever(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(daemon.socket)
    with Client(daemon.socket) as client:
        stored(client, one.namespace, "x", 5)
        beside = scheduler(client, None, lookup_budget_ms=30_000)
        assert beside.matched(prompt("x", 6 * TOKENS), 0) is None
        assert beside.wants_introduction
        beside.introduced({(0, 0): one.namespace.encode()})
        assert answer(beside, prompt("x", 6 * TOKENS)) == 5 * TOKENS
        beside.close()
        monkeypatch.setattr("kvclient._vllm_scheduler._INTRODUCTION_S", 0.0)
        beside = scheduler(client, None)
        assert beside.matched(prompt("x", 6 * TOKENS), 0) == 0
        beside.close()
    close(one)


def test_a_stopped_daemon_keeps_the_scheduler_waiting_once_a_step(daemon: Daemon) -> None:
    one = engine(daemon.socket)
    with Client(daemon.socket) as client, ThreadPoolExecutor(1) as threads:
        assert client.ping()
        asker = Asker(client, threads, 0.05, 1000.0)
        ranks = Ranks([one.namespace], None)
        daemon.signal(signal.SIGSTOP)
        waited: list[float] = []
        for number in range(50):
            began_s = time.monotonic()
            assert asker.ask(f"r{number}", ranks, hashes("x", 4)) is None or number
            waited.append(time.monotonic() - began_s)
        assert sum(waited) < 1.0, "50 requests in one step wait together as long as one"
        ends_s = time.monotonic() + 30
        while (answered := asker.ask("r1", ranks, hashes("x", 4))) is None:
            asker.next_step(is_idle=True)
            assert time.monotonic() < ends_s
        assert answered.blocks == 0
        for _ in range(50):  # steps with something to run
            began_s = time.monotonic()
            asker.next_step(is_idle=False)
            asker.ask("patient", ranks, hashes("x", 4))
            waited.append(time.monotonic() - began_s)
        assert sum(waited) < 1.0, "a request keeps all of its steps together waiting as long as one"
        daemon.signal(signal.SIGCONT)
        for number in range(50):
            asker.forget(f"r{number}")
        asker.forget("patient")
    close(one)


def test_a_plan_goes_from_one_side_to_the_other_and_back(daemon: Daemon) -> None:
    p, d = engine(daemon.socket, store=Store.SYNC), engine(daemon.socket)
    request = prompt("x", 4 * TOKENS + 1)
    for page in range(4):
        p.fill(page)
    with Client(daemon.socket) as client:
        beside = scheduler(client, p.namespace, lookup_budget_ms=30_000)
        assert answer(beside, request) == 0
        beside.allocated(request.request_id, [0, 1, 2, 3, 4], 0)
        plan = beside.step([Scheduled(request.request_id, 0, 4 * TOKENS + 1, [0, 1, 2, 3, 4], replaces=True)], ())
        p.step(saves=plan.saves)
        beside.done({(0, 0): plan.number})
        assert not beside.finished(request.request_id, aborted=False)
        again = replace(request, request_id="again")
        assert answer(beside, again) == 4 * TOKENS
        beside.allocated("again", [10, 11, 12, 13, 14], 4 * TOKENS)
        (load,) = beside.step([], ()).loads
        assert d.load(load) == set()
        assert all(d.holds(10 + page, page) for page in range(4))
        beside.close()
    close(p, d)
