"""The bookkeeping beside vLLM's scheduler, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvclient._vllm_plan import Plan, Scheduled, StepPlan, Variant

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


@pytest.mark.parametrize(("accepted", "blocks"), [(0, []), (1, [(b"r/1", 11)])])
def test_of_a_request_that_ends_with_rejected_drafts_only_what_has_its_own_kv_is_saved(
    accepted: int, blocks: list[tuple[bytes, int]]
) -> None:
    plan = Plan(BLOCK)
    request = Prompt("r", 7)
    admitted(plan, request)
    plan.allocated("r", [10, 11, 12], 0)
    step = plan.step([Scheduled("r", 0, 7 + 3, [10, 11, 12], replaces=True)])  # with three drafts
    assert saved(step) == [(b"r/0", 10)]
    request.grow(accepted + 1)
    assert plan.finished("r", aborted=False)
    assert saved(plan.step([])) == blocks


def test_an_aborted_prompt_that_is_for_somebody_else_says_which_blocks_will_not_come() -> None:
    plan = Plan(BLOCK)
    request, own = Prompt("p", 22, max_tokens=1), Prompt("own", 22)
    for one in (request, own):
        admitted(plan, one, found=1)
        plan.allocated(one.request_id, list(range(6)), 4)
    scheduled(plan, request, 4, 8, list(range(6)))
    assert plan.given_up("p") == (NO_VARIANT, [b"p/3", b"p/4"])
    assert plan.given_up("own") is None
    plan.finished("p", aborted=True)
    assert plan.given_up("p") is None
    assert Plan(BLOCK, saves=False).given_up("p") is None


def test_blocks_that_another_request_is_about_to_save_are_not_given_up() -> None:
    plan = Plan(BLOCK, settles_always=True)
    short, long = Prompt("short", 10, family="x"), Prompt("long", 22, family="x")
    admitted(plan, long)
    assert plan.given_up("long") == (NO_VARIANT, [f"x/{at}".encode() for at in range(5)])
    admitted(plan, short)
    assert plan.given_up("long") == (NO_VARIANT, [b"x/2", b"x/3", b"x/4"])
    assert plan.given_up("short") is None
    other = Prompt("other", 22, family="x")
    plan.admit(other, Variant("adapter"))
    assert plan.given_up("other") == (Variant("adapter"), [f"x/{at}".encode() for at in range(5)])


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
