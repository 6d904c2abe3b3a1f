"""What is loaded and stored for each request, step by step: the connector's bookkeeping beside vLLM's scheduler.

Theory of operation. A request is admitted (asked about, once), given pages, scheduled in any number of steps, preempted
and admitted again, finished or aborted. In each step a save is planned for the blocks that the step completes, to be
carried out after its forward pass. Blocks that the store had when asked are not saved, whoever computed or loaded them.

A load within a step may fail, and is known to have failed only some steps later (`depth`, the number of batches that
vLLM keeps in flight). Until then whatever was computed may have been computed from garbage, on every rank and for
every request that shares a page. So nothing is saved in these steps; it is caught up on afterwards.

Invariants
1. A block is saved only when all of its tokens are known and their KV is there at the end of the step.
2. A block of a request is saved at most once between two admissions, and never if the store had it when asked.
3. No save names a page that the request has given back: not after a preemption, and after the end of a request only if
   `finished` said that its pages are to be kept.
4. Nothing that was computed while a load could still turn out to have failed is saved before that is known.
5. A request one of whose loads failed loads nothing again: it can't fail for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Request(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: list[bytes]

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Variant:
    """Which of an engine's namespaces: an adapter with its version, and a salt that is new after a reset."""

    adapter: str = ""
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks to load or to save for a request: their hashes, and the engine's pages."""

    request: str
    variant: Variant
    hashes: list[bytes]
    pages: list[int]


class Scheduled(NamedTuple):
    """A request in a step: its pages are appended to those it had, or take their place."""

    request: str
    computed_tokens: int
    new_tokens: int
    pages: Sequence[int]
    replaces: bool


@dataclass(slots=True)
class StepPlan:
    """What a step loads and saves.

    Attributes
    ----------
    number : int
        Counts the steps.
    loads, saves : list of Transfer
        Loads are begun before the forward pass, saves after it.
    preempted : list of str
        Requests whose pages are about to be overwritten.
    sending : list of str
        Finished requests whose pages vLLM keeps until it is told that their saves are done.
    settles : bool
        Somebody waits for these saves as soon as the step's output is known: they are waited for.
    is_idle : bool
        The step has no forward pass.
    """

    number: int
    loads: list[Transfer] = field(default_factory=list[Transfer])
    saves: list[Transfer] = field(default_factory=list[Transfer])
    preempted: list[str] = field(default_factory=list[str])
    sending: list[str] = field(default_factory=list[str])
    settles: bool = False
    is_idle: bool = True


@dataclass(slots=True)
class _Tracked:
    """One request since its last admission."""

    request: Request
    variant: Variant
    shares: bool
    found: int = 0  # leading blocks that the store had when asked
    is_asked: bool = False
    local_tokens: int = 0  # what the engine had itself
    loaded_tokens: int = 0
    allocated_at: int = -1  # the step in which it first got pages
    is_running: bool = False
    may_load: bool = True
    pages: list[int] = field(default_factory=list[int])
    end: int = 0  # tokens whose KV is there after the last planned step
    saved: int = 0  # leading blocks whose save is planned or not needed
    saved_at: int = -1


class Plan:
    """The requests of one engine.

    Parameters
    ----------
    block_tokens : int
        Tokens in a block, which is a page.
    loads, saves : bool
        What this engine's role allows.
    loads_within_step : bool
        Loads are part of the step in which they are planned.
    keeps_pages : bool
        Saves go on after their step: pages are kept for them at the end of a request.
    depth : int
        Batches that vLLM keeps in flight.
    settles_always : bool
        All of this engine's prompts are for somebody else to go on with.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        loads: bool = True,
        saves: bool = True,
        loads_within_step: bool = False,
        keeps_pages: bool = True,
        depth: int = 1,
        settles_always: bool = False,
    ) -> None:
        self._asks = loads
        self._block_tokens = block_tokens
        self._saves = saves
        self._loads_within_step = loads_within_step
        self._keeps_pages = keeps_pages
        self._depth = depth
        self._settles_always = settles_always
        self._tracked: dict[str, _Tracked] = {}
        self._number = 0
        self._suspect_until = 0
        self._done: int = -1  # all saves of steps up to this one have ended
        self._loads: list[Transfer] = []
        self._late: list[Transfer] = []
        self._sending: list[str] = []

    # ---- admission

    def admit(self, request: Request, variant: Variant, *, shares: bool = True) -> list[bytes] | None:
        """Return the hashes that the store is to be asked about; None if that has been done, or is of no use.

        At least one token is left for the engine to compute. `shares` False: nothing is loaded or saved for it.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.is_running:
            may_load = tracked is None or tracked.may_load
            tracked = _Tracked(request, variant, shares, may_load=may_load)
            self._tracked[request.request_id] = tracked
        if tracked.is_asked or not (self._asks and shares and tracked.may_load):
            return None
        wanted = request.block_hashes[: max(0, request.num_tokens - 1) // self._block_tokens]
        return wanted or None

    def answered(self, request_id: str, found: int) -> None:
        """Note how many leading blocks the store has."""
        tracked = self._tracked[request_id]
        tracked.is_asked = True
        tracked.found = tracked.saved = found

    def matched(self, request_id: str, local_tokens: int) -> int:
        """Return how many tokens can be loaded beyond what the engine has itself."""
        tracked = self._tracked[request_id]
        tracked.local_tokens, tracked.loaded_tokens, tracked.allocated_at = local_tokens, 0, -1
        if not tracked.may_load:
            return 0
        return max(0, tracked.found * self._block_tokens - local_tokens)

    def found(self, request_id: str) -> int:
        """Return how many leading blocks the store had when asked about a request; 0 if it was not."""
        tracked = self._tracked.get(request_id)
        return tracked.found if tracked is not None else 0

    def allocated(self, request_id: str, pages: Sequence[int], external_tokens: int) -> None:
        """Note the pages of an admitted request; `external_tokens` of its blocks are to be loaded now."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if tracked.allocated_at < 0:
            tracked.allocated_at = self._number
        tracked.pages = list(pages)
        if external_tokens <= 0:
            return
        tracked.loaded_tokens = external_tokens
        start = tracked.found - external_tokens // self._block_tokens
        hashes = tracked.request.block_hashes[start : tracked.found]
        self._loads.append(
            Transfer(request_id, tracked.variant, list(hashes), list(pages[start : tracked.found]))
        )
        if self._loads_within_step:
            self._suspect_until = self._number + self._depth

    # ---- steps

    def step(self, scheduled: Sequence[Scheduled], preempted: Collection[str] = ()) -> StepPlan:
        """Return what the step that was just scheduled loads and saves."""
        plan = StepPlan(
            self._number,
            loads=self._loads,
            saves=self._late,
            preempted=list(preempted),
            sending=self._sending,
            is_idle=not scheduled,
        )
        self._loads, self._late, self._sending = [], [], []
        for request_id in preempted:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.is_running:
                tracked.pages, tracked.end = [], 0
        for entry in scheduled:
            self._enter(entry)
        if self._number >= self._suspect_until:
            for entry in scheduled:
                self._save(entry, plan)
        if plan.settles:
            self.done(self._number)  # by the time that the step's output is known
        self._number += 1
        return plan

    def _enter(self, entry: Scheduled) -> None:
        tracked = self._tracked.get(entry.request)
        if tracked is None:
            return
        if entry.replaces:
            tracked.pages = list(entry.pages)
        else:
            tracked.pages += entry.pages
        if not tracked.is_running:
            tracked.is_running = True
            loaded_by_others = entry.computed_tokens > tracked.local_tokens + tracked.loaded_tokens
            if loaded_by_others and tracked.allocated_at == self._number:
                self._suspect_until = self._number + self._depth
        tracked.end = entry.computed_tokens + entry.new_tokens

    def _save(self, entry: Scheduled, plan: StepPlan) -> None:
        tracked = self._tracked.get(entry.request)
        if tracked is None:
            return
        transfer = self._completed(tracked)
        if transfer is not None:
            tracked.saved_at = self._number
            plan.saves.append(transfer)
            if self._is_for_others(tracked.request):
                plan.settles |= tracked.end >= tracked.request.num_prompt_tokens

    def _is_for_others(self, request: Request) -> bool:
        """Return whether somebody else goes on with a prompt."""
        return self._settles_always or request.max_tokens <= 1

    def _completed(self, tracked: _Tracked) -> Transfer | None:
        """Return the save of the blocks that are complete and not yet saved, and note that it is planned."""
        if tracked.end < (tracked.saved + 1) * self._block_tokens or not self._saves or not tracked.shares:
            return None  # of most requests in most steps
        hashes, pages = tracked.request.block_hashes, tracked.pages
        end = min(tracked.end // self._block_tokens, len(hashes), len(pages))
        start, tracked.saved = tracked.saved, max(tracked.saved, end)
        if start >= end:
            return None
        request_id = tracked.request.request_id
        return Transfer(request_id, tracked.variant, hashes[start:end], pages[start:end])

    # ---- what comes back

    def done(self, number: int) -> None:
        """Note that all saves of the steps up to `number` have ended, on every rank."""
        self._done = max(self._done, number)

    def failed(self, pages: Collection[int]) -> None:
        """Note pages whose load failed: their blocks are computed, so they are to be saved."""
        for tracked in self._tracked.values():
            for position, page in enumerate(tracked.pages):
                if page in pages:
                    tracked.saved = min(tracked.saved, position)
                    tracked.may_load = False
                    break

    def finished(self, request_id: str, *, aborted: bool) -> bool:
        """Forget a request; return whether its pages are to be kept until its saves have ended.

        What it completed and could not yet save is saved with the next step, unless it was aborted: the last steps of a
        request that ended by itself are known to be good. Its last token has no KV, and where drafts were rejected the
        KV of another token is in that place.
        """
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False
        tracked.end = min(tracked.end, tracked.request.num_tokens - 1)
        late = None if aborted or not tracked.is_running else self._completed(tracked)
        if late is not None:
            self._late.append(late)
        elif not self._keeps_pages or tracked.saved_at <= self._done:
            return False
        self._sending.append(request_id)
        return True

    def given_up(self, request_id: str) -> tuple[Variant, list[bytes]] | None:
        """Return the blocks that a request, aborted now, leaves unsaved and somebody may wait for, if there are any.

        To be asked before `finished`. Blocks that another request is about to save are left out.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not (self._saves and tracked.shares and self._is_for_others(tracked.request)):
            return None
        own = tracked.request.block_hashes[: tracked.request.num_prompt_tokens // self._block_tokens]
        start = tracked.saved
        for other in self._tracked.values():
            if other is not tracked and other.shares and other.variant == tracked.variant:
                theirs = other.request.block_hashes
                while start < min(len(own), len(theirs)) and own[start] == theirs[start]:
                    start += 1  # hashes are chained: what two prompts share is their head
        return (tracked.variant, own[start:]) if start < len(own) else None

    def reset(self) -> None:
        """Save nothing more of the requests that have pages, and ask anew about those that have none.

        Those with pages stay known: saves that are on their way may read them.
        """
        for request_id, tracked in list(self._tracked.items()):
            if tracked.pages:
                tracked.shares = False
            else:
                del self._tracked[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tracked
