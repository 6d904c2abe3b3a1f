"""What a member tells the homes of its blocks, and when: the newest state of each block, in batches, at a bounded rate.

Theory of operation. A change of a block (sealed, moved to another tier, gone) is noted; what is noted twice before it
is sent is sent once. When the membership changes, blocks have other homes, which know nothing of them yet: all blocks
that this member holds are gone through once, and those with a new home are announced there. A home that was away, or
came back with another boot, has forgotten all, so it counts as a new one.

A pass compares with `settled`, the homes as of the end of the last complete one. If the membership changes again in
the middle of it, it goes on from where it is, with the newest homes, until it has come round to that place again. What
is noted meanwhile is told to the settled homes too: they may be the newest again before the pass has ended. So every
block is told to its newest homes however often they change; some are told twice.

Fresh notes go first, and as they come: they are as many as blocks are stored. What is announced again is limited to a
rate, since a change of membership makes every member send at the same moment.

Invariants
1. At most `waiting_max` blocks wait as fresh notes. What comes on top displaces the oldest, which is counted: its
   record will be missing, or be stale until a fetch fails.
2. In any time t, blocks are announced again at most `per_second * t` times and one second's worth.
3. When `is_settled`, every block that was held since the last change has been announced to each of its homes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.placement import Placement
from kvstore.runs import RunKey

_ROUNDING = 1e-3  # of a block: sums of seconds are not exact


class Held(NamedTuple):
    """A block that this member holds; `tiers` has the bits of the tiers it lies in, 0: it has gone."""

    scope: bytes
    epoch: int
    run: RunKey
    block_hash: bytes
    tiers: int


class HeldBlocks(Protocol):
    """All blocks that this member holds, in an order that stays."""

    def portion(self, cursor: int, count: int) -> tuple[Sequence[Held], int]:
        """Return up to `count` blocks from a place on, and the place behind them; 0: that was the end.

        A place stays valid while blocks come and go; those that come may be passed over, since they are noted.
        """
        ...


@dataclass(slots=True)
class Batch:
    """An announcement to one member: `tiers` is parallel to `hashes`."""

    member: str
    scope: bytes
    epoch: int
    hashes: list[bytes] = field(default_factory=list[bytes])
    tiers: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class AnnouncingLimits:
    """`per_second`: blocks announced again after a change; `batch_blocks`: of one call, fresh and again each."""

    per_second: float = 20_000.0
    batch_blocks: int = 2048
    waiting_max: int = 131_072
    copies: int = 1


class Announcements:
    """See the module's docstring. The caller sends the batches, those to itself too."""

    def __init__(self, limits: AnnouncingLimits, now_s: float) -> None:
        self.displaced = 0
        self.announced_again = 0
        self._limits = limits
        self._fresh: OrderedDict[tuple[bytes, int, bytes], tuple[RunKey, int]] = OrderedDict()
        self._newest = _Homes(Placement({}), {})
        self._settled = self._newest
        self._cursor = 0
        self._pass_ends_at: int | None = None  # the cursor at which the pass has come round
        self._has_wrapped = False
        self._allowance = limits.per_second
        self._allowance_s = now_s

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be told."""
        return not self._fresh and self._pass_ends_at is None

    @property
    def waiting(self) -> int:
        """How many fresh notes wait."""
        return len(self._fresh)

    def note(self, held: Held) -> None:
        """Let a block's homes know, with the next batch, where it lies now."""
        key = (held.scope, held.epoch, held.block_hash)
        self._fresh[key] = (held.run, held.tiers)
        if len(self._fresh) > self._limits.waiting_max:
            self._fresh.popitem(last=False)
            self.displaced += 1

    def place(self, placement: Placement, boots: Mapping[str, bytes]) -> None:
        """Take in a changed membership: homes, and each member's boot id."""
        self._newest = _Homes(placement, dict(boots))
        # Who was away may have seen us leave, and forgotten us, without a new boot.
        settled = self._settled.boots
        self._settled.boots = {name: boot for name, boot in settled.items() if boots.get(name) == boot}
        self._begin_pass()

    def forgotten_by(self, member: str) -> None:
        """Take in that a member knows nothing of what it was told: tell it all of its blocks again."""
        self._settled.boots.pop(member, None)
        self._begin_pass()

    def take(self, now_s: float, blocks: HeldBlocks) -> list[Batch]:
        """Return what is to be sent now; call again while there is any, and no later than `next_s`."""
        batches: dict[tuple[str, bytes, int], Batch] = {}
        for _ in range(min(len(self._fresh), self._limits.batch_blocks)):
            (scope, epoch, block_hash), (run, tiers) = self._fresh.popitem(last=False)
            for home in self._homes_to_tell(run):
                _add(batches, home, Held(scope, epoch, run, block_hash, tiers))
        self._announce_again(now_s, blocks, batches)
        return list(batches.values())

    def next_s(self, now_s: float) -> float | None:
        """Return when `take` will have something again; None: not before something is noted or changes."""
        if self._fresh:
            return now_s
        if self._pass_ends_at is None:
            return None
        short = self._limits.copies - self._allowance
        return now_s if short <= _ROUNDING else self._allowance_s + short / self._limits.per_second

    def _homes_to_tell(self, run: RunKey) -> Sequence[str]:
        """Return a run's newest homes and, in the middle of a pass, those that it takes for informed."""
        newest = self._newest.of(run, self._limits.copies)
        if self._pass_ends_at is None:
            return newest
        informed = self._settled.of(run, self._limits.copies)
        return [*newest, *(home for home in informed if home not in newest and home in self._settled.boots)]

    def _announce_again(
        self, now_s: float, blocks: HeldBlocks, batches: dict[tuple[str, bytes, int], Batch]
    ) -> None:
        limits = self._limits
        gained = max(0.0, now_s - self._allowance_s) * limits.per_second
        self._allowance = min(limits.per_second, self._allowance + gained)
        self._allowance_s = max(now_s, self._allowance_s)
        if self._pass_ends_at is None or self._allowance + _ROUNDING < limits.copies:
            return
        count = min(limits.batch_blocks, int(self._allowance + _ROUNDING) // limits.copies)
        start = self._cursor
        portion, self._cursor = blocks.portion(start, count)
        for held in portion:
            known = self._settled.of(held.run, limits.copies)
            for home in self._newest.of(held.run, limits.copies):
                if home not in known or self._settled.boots.get(home) != self._newest.boots.get(home):
                    _add(batches, home, held)
                    self.announced_again += 1
                    self._allowance -= 1
        self._end_pass_if_round(start)

    def _end_pass_if_round(self, start: int) -> None:
        """End the pass if this portion, from `start` to the cursor, came round to where it began."""
        assert self._pass_ends_at is not None
        wraps = self._cursor == 0
        if self._has_wrapped and (wraps or self._cursor >= self._pass_ends_at):
            self._settle()
        elif wraps:
            self._has_wrapped = True
            if self._pass_ends_at == 0:
                self._settle()

    def _begin_pass(self) -> None:
        self._pass_ends_at = self._cursor
        self._has_wrapped = False

    def _settle(self) -> None:
        self._settled = _Homes(self._newest.placement, dict(self._newest.boots))
        self._pass_ends_at = None
        self._has_wrapped = False


class _Homes:
    """A membership: who is where at home, and in which boot."""

    def __init__(self, placement: Placement, boots: dict[str, bytes]) -> None:
        self.placement = placement
        self.boots = boots

    def of(self, run: RunKey, copies: int) -> tuple[str, ...]:
        return self.placement.homes(run, copies)


def _add(batches: dict[tuple[str, bytes, int], Batch], member: str, held: Held) -> None:
    key = (member, held.scope, held.epoch)
    batch = batches.get(key)
    if batch is None:
        batch = batches[key] = Batch(member, held.scope, held.epoch)
    batch.hashes.append(held.block_hash)
    batch.tiers.append(held.tiers)
