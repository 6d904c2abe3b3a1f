"""The bookkeeping beside vLLM's scheduler, against a scheduler that does whatever vLLM's may do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvclient._vllm_plan import Plan, Scheduled, StepPlan, Transfer, Variant

BLOCK = 4
NO_VARIANT = Variant()


@dataclass
class Prompt:
    """A request as the plan sees it: its hashes grow with its tokens."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int = 100
    tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    family: str = ""  # prompts of one family are prefixes of each other

    def __post_init__(self) -> None:
        self.grow(self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        return self.tokens

    def grow(self, count: int) -> None:
        self.tokens += count
        while (len(self.block_hashes) + 1) * BLOCK <= self.tokens:
            self.block_hashes.append(f"{self.family or self.request_id}/{len(self.block_hashes)}".encode())


def admitted(plan: Plan, request: Prompt, *, found: int = 0, local: int = 0) -> int:
    """Admit a request of whose blocks the store has `found`; returns the tokens that can be loaded."""
    if plan.admit(request, NO_VARIANT) is not None:
        plan.answered(request.request_id, found)
    return plan.matched(request.request_id, local)


def scheduled(plan: Plan, request: Prompt, computed: int, new: int, pages: list[int]) -> StepPlan:
    return plan.step([Scheduled(request.request_id, computed, new, pages, replaces=True)])


def saved(plan: StepPlan) -> list[tuple[bytes, int]]:
    return [pair for save in plan.saves for pair in zip(save.hashes, save.pages, strict=True)]


# ---- one thing at a time


def test_a_prompt_shorter_than_a_block_is_neither_asked_for_nor_saved() -> None:
    plan = Plan(BLOCK)
    for count in range(1, BLOCK):
        request = Prompt(f"r{count}", count)
        assert plan.admit(request, NO_VARIANT) is None
        assert plan.matched(request.request_id, 0) == 0
        plan.allocated(request.request_id, [count], 0)
        assert not scheduled(plan, request, 0, count, [count]).saves


@pytest.mark.parametrize("count", [BLOCK, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_token_is_left_to_compute(count: int) -> None:
    plan = Plan(BLOCK)
    asked = plan.admit(Prompt("r", count), NO_VARIANT) or []
    assert len(asked) == (count - 1) // BLOCK


def test_the_store_is_asked_once_for_an_admission() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 40)
    assert admitted(plan, request, found=5) == 20
    assert plan.admit(request, NO_VARIANT) is None
    assert plan.matched("r", 8) == 12, "its own cache has more by now"
    assert plan.matched("r", 24) == 0


def test_a_prompt_in_chunks_is_saved_chunk_by_chunk_and_each_block_once() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request)
    plan.allocated("r", [10, 11, 12, 13, 14, 15], 0)
    assert saved(scheduled(plan, request, 0, 10, [10, 11, 12])) == [(b"r/0", 10), (b"r/1", 11)]
    step = plan.step([Scheduled("r", 10, 10, [13, 14], replaces=False)])
    assert saved(step) == [(b"r/2", 12), (b"r/3", 13), (b"r/4", 14)]
    assert not plan.step([Scheduled("r", 20, 2, [15], replaces=False)]).saves


def test_blocks_that_the_store_has_are_loaded_into_their_pages_and_not_saved() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    assert admitted(plan, request, found=4, local=4) == 12
    plan.allocated("r", [10, 11, 12, 13, 14, 15], 12)
    first = plan.step([])
    (load,) = first.loads
    assert (load.hashes, load.pages) == ([b"r/1", b"r/2", b"r/3"], [11, 12, 13])
    assert not plan.step([]).loads
    assert saved(scheduled(plan, request, 16, 6, [10, 11, 12, 13, 14, 15])) == [(b"r/4", 14)]


def test_what_the_engine_has_and_the_store_lacks_is_saved() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    assert admitted(plan, request, found=1, local=16) == 0
    plan.allocated("r", [10, 11, 12, 13, 14, 15], 0)
    assert [block for block, _ in saved(scheduled(plan, request, 16, 6, [10, 11, 12, 13, 14, 15]))] == [
        b"r/1", b"r/2", b"r/3", b"r/4",
    ]  # fmt: skip


def test_a_block_is_saved_only_when_its_tokens_are_known() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 7)
    admitted(plan, request)
    plan.allocated("r", [1, 2, 3], 0)
    assert saved(scheduled(plan, request, 0, 7, [1, 2, 3])) == [(b"r/0", 1)]
    # A step that was scheduled before the token that it computes was known: nothing says which block that makes.
    assert not plan.step([Scheduled("r", 7, 1, (), replaces=False)]).saves
    request.grow(2)
    assert saved(plan.step([Scheduled("r", 8, 1, (), replaces=False)])) == [(b"r/1", 2)]


def test_a_request_none_of_whose_blocks_could_be_loaded_loads_nothing_again_and_saves_all() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request, found=4)
    plan.allocated("r", [10, 11, 12, 13], 16)
    plan.step([])
    plan.failed({10, 11, 12, 13})
    assert admitted(plan, request, found=4) == 0
    plan.allocated("r", [10, 11, 12, 13, 14, 15], 0)
    assert len(saved(scheduled(plan, request, 0, 22, [10, 11, 12, 13, 14, 15]))) == 5


def test_blocks_that_could_not_be_loaded_are_computed_and_saved() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request, found=4)
    plan.allocated("r", [10, 11, 12, 13], 16)
    plan.step([])
    plan.failed({12, 13})
    plan.allocated("r", [10, 11, 12, 13, 14, 15], 0)
    assert saved(scheduled(plan, request, 8, 14, [10, 11, 12, 13, 14, 15])) == [
        (b"r/2", 12), (b"r/3", 13), (b"r/4", 14),
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_saved_while_a_load_within_a_step_may_have_failed(depth: int) -> None:
    plan = Plan(BLOCK, loads_within_step=True, depth=depth)
    loading, other = Prompt("loading", 22), Prompt("other", 22)
    admitted(plan, other)
    plan.allocated("other", list(range(20, 26)), 0)
    admitted(plan, loading, found=2)
    plan.allocated("loading", list(range(10, 16)), 8)
    step = plan.step(
        [
            Scheduled("other", 0, 22, list(range(20, 26)), replaces=True),
            Scheduled("loading", 8, 14, list(range(10, 16)), replaces=True),
        ]
    )
    assert step.loads and not step.saves
    for number in range(1, depth):
        assert not plan.step([Scheduled("other", 21 + number, 1, (), replaces=False)]).saves
    caught_up = plan.step([Scheduled("other", 22, 1, (), replaces=False)])
    assert [block for block, _ in saved(caught_up)] == [f"other/{at}".encode() for at in range(5)]


def test_nothing_is_saved_while_a_load_of_another_connector_may_have_failed() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request)
    plan.allocated("r", list(range(6)), 0)
    assert not scheduled(plan, request, 8, 14, list(range(6))).saves
    assert len(saved(plan.step([Scheduled("r", 22, 1, (), replaces=False)]))) == 5


def test_what_another_connector_has_loaded_between_steps_is_saved() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request)
    plan.allocated("r", list(range(4)), 0)
    plan.step([])  # it waits for its load
    plan.allocated("r", list(range(6)), 0)
    assert len(saved(scheduled(plan, request, 8, 14, list(range(6))))) == 5


def test_a_request_that_is_preempted_is_asked_about_again() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request)
    plan.allocated("r", list(range(6)), 0)
    scheduled(plan, request, 0, 12, [0, 1, 2])
    assert plan.step([], preempted={"r"}).preempted == ["r"]
    assert admitted(plan, request, found=3) == 12
    plan.allocated("r", [30, 31, 32, 33, 34, 35], 12)
    plan.step([])
    resumed = plan.step([Scheduled("r", 12, 10, [30, 31, 32, 33, 34, 35], replaces=True)])
    assert saved(resumed) == [(b"r/3", 33), (b"r/4", 34)]


def test_pages_are_kept_at_the_end_of_a_request_exactly_while_saves_may_read_them() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 9)
    admitted(plan, request)
    plan.allocated("r", [1, 2, 3], 0)
    step = scheduled(plan, request, 0, 9, [1, 2, 3])
    assert plan.finished("r", aborted=False)
    assert plan.step([]).sending == ["r"]
    assert not plan.finished("r", aborted=False), "it is forgotten"

    again = Prompt("s", 9)
    admitted(plan, again)
    plan.allocated("s", [1, 2, 3], 0)
    step = scheduled(plan, again, 0, 9, [1, 2, 3])
    plan.done(step.number)
    assert not plan.finished("s", aborted=False)


def test_an_engine_that_stores_within_its_steps_keeps_no_pages() -> None:
    plan = Plan(BLOCK, keeps_pages=False)
    request = Prompt("r", 9)
    admitted(plan, request)
    plan.allocated("r", [1, 2, 3], 0)
    assert scheduled(plan, request, 0, 9, [1, 2, 3]).saves
    assert not plan.finished("r", aborted=False)


def test_a_prompt_that_somebody_else_goes_on_with_is_stored_when_its_answer_is_there() -> None:
    for request, settles in ((Prompt("p", 9, max_tokens=1), True), (Prompt("d", 9, max_tokens=2), False)):
        plan = Plan(BLOCK)
        admitted(plan, request)
        plan.allocated(request.request_id, [1, 2, 3], 0)
        assert not scheduled(plan, request, 0, 4, [1]).settles, "the prompt goes on"
        step = plan.step([Scheduled(request.request_id, 4, 5, [2, 3], replaces=False)])
        assert step.settles == settles
        assert plan.finished(request.request_id, aborted=False) != settles
    plan = Plan(BLOCK, settles_always=True)
    request = Prompt("p", 9)
    admitted(plan, request)
    plan.allocated("p", [1, 2, 3], 0)
    assert scheduled(plan, request, 0, 9, [1, 2, 3]).settles


def test_what_a_request_could_not_save_before_its_end_is_saved_behind_it_unless_it_was_aborted() -> None:
    for aborted in (False, True):
        plan = Plan(BLOCK, loads_within_step=True)
        request = Prompt("r", 22)
        admitted(plan, request, found=2)
        plan.allocated("r", list(range(6)), 8)
        assert not scheduled(plan, request, 8, 14, list(range(6))).saves
        assert plan.finished("r", aborted=aborted) != aborted
        step = plan.step([])
        assert saved(step) == ([] if aborted else [(b"r/2", 2), (b"r/3", 3), (b"r/4", 4)])
        assert step.sending == ([] if aborted else ["r"])


def test_after_a_reset_nothing_of_the_requests_before_it_is_saved() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request)
    plan.allocated("r", list(range(6)), 0)
    running = Prompt("running", 9)
    admitted(plan, running)
    plan.allocated("running", [7, 8, 9], 0)
    assert scheduled(plan, running, 0, 9, [7, 8, 9]).saves
    plan.reset()
    assert not scheduled(plan, request, 0, 22, list(range(6))).saves
    assert not plan.finished("r", aborted=False)
    assert plan.finished("running", aborted=False), "a save may still read its pages"


def test_after_a_reset_a_request_that_waits_is_asked_about_anew() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    admitted(plan, request, found=4)
    plan.reset()
    assert plan.admit(request, Variant(salt=b"new")) is not None


def test_a_request_that_can_not_be_shared_is_neither_loaded_nor_saved() -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 22)
    assert plan.admit(request, NO_VARIANT, shares=False) is None
    assert plan.matched("r", 0) == 0
    plan.allocated("r", list(range(6)), 0)
    assert not scheduled(plan, request, 0, 22, list(range(6))).saves


# ---- whatever a scheduler does

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
        self.ends(next(name for name, run in self.running.items() if not run.is_loading), aborted=True)

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
