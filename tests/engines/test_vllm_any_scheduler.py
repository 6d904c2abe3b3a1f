"""The bookkeeping beside vLLM's scheduler, against a scheduler that does whatever vLLM's may do."""

from __future__ import annotations

import random
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvclient._vllm_plan import Plan, Scheduled, StepPlan, Transfer
from tests.engines.test_vllm_plan import BLOCK, NO_VARIANT, Prompt

PAGES = 24


@dataclass
class Running:
    """A request in the model: how much of it is computed, and where."""

    request: Prompt
    pages: list[int]
    computed: int = 0
    is_loading: bool = False
    is_new: bool = True


class AnyScheduler(RuleBasedStateMachine):
    """Admits, runs in chunks, preempts, aborts and finishes requests; loads fail, stores are slow, as they like.

    The model knows what every page holds. A save is right if its pages hold those blocks' KV whenever it is carried
    out, and a load if the request owns the pages and lacks their blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(BLOCK)
        self.free = set(range(PAGES))
        self.waiting: list[Prompt] = []
        self.running: dict[str, Running] = {}
        self.kept: dict[str, list[int]] = {}  # pages of requests that are over, until their saves are
        self.told: set[str] = set()  # of these, those that the worker has been told of
        self.holds: dict[int, bytes | None] = dict.fromkeys(range(PAGES))
        self.stored = {b"a/%d" % at for at in range(6)} | {b"b/0", b"b/1"}  # by other engines
        self.saved: dict[str, set[bytes]] = {}  # since its last admission
        self.owed: dict[str, set[bytes]] = {}  # of requests that are over
        self.known: dict[str, set[bytes]] = {}  # what the store had when asked; it may have lost it since
        self.jobs: list[tuple[int, Transfer]] = []
        self.number = -1
        self.preempted: set[str] = set()
        self.has_failed: set[str] = set()
        self.count = 0

    @rule(tokens=st.integers(1, 30), max_tokens=st.sampled_from([1, 8]), family=st.sampled_from("abc"))
    def arrives(self, tokens: int, max_tokens: int, family: str) -> None:
        self.count += 1
        self.waiting.append(Prompt(f"r{self.count}", tokens, max_tokens, family=family))

    @precondition(lambda self: bool(self.waiting))
    @rule(own=st.integers(0, 3), known=st.integers(0, 8))
    def admits(self, own: int, known: int) -> None:
        request = self.waiting[0]
        name, whole = request.request_id, (request.num_tokens - 1) // BLOCK
        hashes = self.plan.admit(request, NO_VARIANT)
        if hashes is not None or name in self.has_failed:
            self.known[name] = set()
        if hashes is not None:
            assert 0 < len(hashes) <= whole
            there = [block in self.stored for block in hashes[:known]]
            found = (*there, False).index(False)
            self.plan.answered(name, found)
            self.known[name] = set(hashes[:found])
        local = min(own, whole) * BLOCK
        external = self.plan.matched(name, local)
        assert external % BLOCK == 0 and local + external < request.num_tokens
        assert not external or name not in self.has_failed, "it could fail for ever"
        need = -(-request.num_tokens // BLOCK)
        if need > len(self.free):
            return
        self.waiting.pop(0)
        pages = [self.free.pop() for _ in range(need)]
        for at, page in enumerate(pages):
            self.holds[page] = request.block_hashes[at] if at < local // BLOCK else None
        self.plan.allocated(name, pages, external)
        self.running[name] = Running(request, pages, computed=local + external, is_loading=external > 0)
        self.saved[name] = set()

    @rule(chunk=st.integers(1, 12), failing=st.integers(0, 3), seed=st.integers(0, 99))
    def steps(self, chunk: int, failing: int, seed: int) -> None:
        ready = [run for run in self.running.values() if not run.is_loading]
        entries: list[Scheduled] = []
        for run in ready:
            new = min(chunk, run.request.num_tokens - run.computed)
            pages = run.pages if run.is_new else ()
            entries.append(Scheduled(run.request.request_id, run.computed, new, pages, replaces=run.is_new))
            run.is_new = False
        plan = self.plan.step(entries, self.preempted)
        assert set(plan.preempted) == self.preempted
        self.jobs = [job for job in self.jobs if job[1].request not in self.preempted]  # before they are overwritten
        self.preempted = set()
        self.number = plan.number
        for entry, run in zip(entries, ready, strict=True):
            end = entry.computed_tokens + entry.new_tokens
            for at in range(entry.computed_tokens // BLOCK, end // BLOCK):
                self.holds[run.pages[at]] = run.request.block_hashes[at]
            run.computed = end
        self.takes(plan)
        self.ends_loads(plan, failing, random.Random(seed))
        for run in ready:
            if run.computed == run.request.num_tokens:
                run.request.grow(1)
                if len(run.pages) * BLOCK < run.request.num_tokens:
                    self.ends(run.request.request_id, aborted=False)

    def takes(self, plan: StepPlan) -> None:
        for save in plan.saves:
            already = self.saved.setdefault(save.request, set())
            assert already.isdisjoint(save.hashes), "saved twice"
            already.update(save.hashes)
            self.jobs.append((plan.number, save))
        assert set(plan.sending) <= set(self.kept)
        self.told.update(plan.sending)
        while self.jobs and plan.settles:
            self.stores()
        self.sends()

    @precondition(lambda self: bool(self.jobs))
    @rule()
    def stores(self) -> None:
        _, save = self.jobs.pop(0)
        for block, page in zip(save.hashes, save.pages, strict=True):
            assert page not in self.free, "stored from a page that was given back"
            assert self.holds[page] == block, "stored what is not there"
            self.stored.add(block)
        self.sends()

    def sends(self) -> None:
        """Say what the worker would: which saves have ended."""
        busy = {save.request for _, save in self.jobs}
        for name in self.told - busy:
            self.told.discard(name)
            self.gives_back(name, self.kept.pop(name))
        self.plan.done(min((number - 1 for number, _ in self.jobs), default=self.number))

    def ends_loads(self, plan: StepPlan, failing: int, chance: random.Random) -> None:
        for load in plan.loads:
            run = self.running[load.request]
            at = run.pages.index(load.pages[0])
            assert run.pages[at : at + len(load.pages)] == load.pages
            assert run.request.block_hashes[at : at + len(load.pages)] == load.hashes
            assert all(self.holds[page] is None for page in load.pages), "loaded over what it has itself"
            good = len(load.pages) - (min(failing, len(load.pages)) if chance.random() < 0.5 else 0)
            for block, page in zip(load.hashes[:good], load.pages[:good], strict=True):
                self.holds[page] = block
            run.is_loading = False
            if good < len(load.pages):
                self.stored.difference_update(load.hashes[good:])
                self.known[load.request].difference_update(load.hashes[good:])
                self.has_failed.add(load.request)
                self.plan.failed(set(load.pages[good:]))
                run.computed = (at + good) * BLOCK
                if not run.computed:  # as vLLM does: admitted anew
                    del self.running[load.request]
                    self.free.update(run.pages)
                    self.waiting.insert(0, run.request)

    @precondition(lambda self: any(not run.is_loading and not run.is_new for run in self.running.values()))
    @rule()
    def preempts(self) -> None:
        name = [name for name, run in self.running.items() if not run.is_loading and not run.is_new][-1]
        run = self.running.pop(name)
        self.free.update(run.pages)
        self.preempted.add(name)
        self.waiting.insert(0, run.request)
        self.steps(1, 0, 0)  # vLLM admits nobody in a step that preempts

    @precondition(lambda self: any(not run.is_loading for run in self.running.values()))
    @rule()
    def aborts(self) -> None:
        name = next(name for name, run in self.running.items() if not run.is_loading)
        self.gives_up(self.running[name].request)
        self.ends(name, aborted=True)

    def gives_up(self, request: Prompt) -> None:
        """Look at what those who wait would be told: nothing that somebody still saves, or has."""
        name, prompt = request.request_id, set(request.block_hashes[: request.num_prompt_tokens // BLOCK])
        given_up = self.plan.given_up(name)
        if request.max_tokens > 1:
            assert given_up is None
            return
        lost = set(given_up[1]) if given_up is not None else set[bytes]()
        others = {
            block for run in self.running.values() if run.request is not request for block in run.request.block_hashes
        }
        done = self.saved.get(name, set[bytes]()) | self.known.get(name, set())
        assert lost <= prompt - others - done
        assert lost >= prompt - others - done - self.shared_with_waiting(prompt)

    def shared_with_waiting(self, blocks: set[bytes]) -> set[bytes]:
        """Return those that requests have which the plan may know of, or not."""
        return {block for request in self.waiting for block in request.block_hashes} & blocks

    def ends(self, name: str, *, aborted: bool) -> None:
        run = self.running.pop(name)
        complete = set[bytes]() if aborted else set(run.request.block_hashes[: run.computed // BLOCK])
        self.owed[name] = complete - self.stored - self.known.get(name, set())
        if self.plan.finished(name, aborted=aborted):
            self.kept[name] = run.pages
        else:
            assert all(save.request != name for _, save in self.jobs), "stored from pages that were given back"
            self.gives_back(name, run.pages)

    def gives_back(self, name: str, pages: list[int]) -> None:
        self.free.update(pages)
        assert self.owed.pop(name) <= self.saved[name], "computed, and neither stored nor saved"

    @invariant()
    def pages_are_in_one_place(self) -> None:
        held = [page for run in self.running.values() for page in run.pages]
        held += [page for pages in self.kept.values() for page in pages]
        assert len(held) == len(set(held)) and self.free.isdisjoint(held)
        assert len(held) + len(self.free) == PAGES

    def teardown(self) -> None:
        for _ in range(200):
            if not self.running:
                break
            self.steps(12, 0, 0)
        self.steps(1, 0, 0)
        while self.jobs:
            self.stores()
        assert not self.kept, "pages are kept for ever"


TestAnyScheduler = AnyScheduler.TestCase
TestAnyScheduler.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
