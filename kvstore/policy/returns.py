"""When blocks come back: what is learnt of the time between two uses, evicted blocks included.

Theory of operation. The uses of a sample of all keys are followed, whether a block is still there or not. Each interval
between two uses belongs to the class that its block is in at the interval's start; it ends with the next use, or is cut
off when the key is no longer followed. From a class's intervals, those still running included, the chance of a return
at each age follows as in a life table (Kaplan and Meier, 1958). What keeping a block of that age is worth is the best
ratio, over all spans it could be kept from now on, of the hits to expect in the span to the time in which it will take
room (an index as of Gittins, 1979).

Invariants
1. At most FOLLOWED_MAX keys are followed, and those used since the last look, however many blocks there are: the larger
   the tier, the thinner the sample.
2. Which keys are followed depends on the keys alone, so it says nothing about their use.
3. Old intervals lose weight, so that a change of load is learnt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, islice, takewhile
from operator import add

FOLLOWED_MAX = 8192
_SPAN = 8  # keys followed for each block there is, in the sample: how far back evicted ones are known
_AGES = 64  # bins of an age: two an octave of ticks, so that the last begins at 2**31 + 2**30
_USES_A_LOOK = 512  # uses between two looks at what was learnt: a look takes about 0.4 ms
_FOLLOWED_A_LOOK = 64
_HALF_LIFE = 32 * FOLLOWED_MAX  # of an interval's weight, in followed uses
_FEW = 10  # intervals: a class of which not many more were seen is taken for an average one
_PRIOR = 0.02  # returns assumed in each bin before any is seen: with none, the block unused longest is worth least


def age_bin(age: int) -> int:
    """Return the number of the bin of an age in ticks."""
    if age < 2:
        return max(age, 0)
    octave = age.bit_length() - 1
    return min(2 * octave + (age >> (octave - 1) & 1), _AGES - 1)


def bin_start(number: int) -> int:
    """Return the least age in a bin."""
    return number if number < 2 else (2 + (number & 1)) << (number // 2 - 1)


_BIN_STARTS = [bin_start(number) for number in range(_AGES)]
_WIDTHS = [float(bin_start(number + 1) - bin_start(number)) for number in range(_AGES)]


class Returns:
    """See the module's docstring. Keys are named by 32 well-mixed bits; classes are small numbers.

    `worth[class][age_bin]` is in hits per tick of keeping a block.
    """

    def __init__(self, classes: int) -> None:
        self.worth = [[0.0] * _AGES for _ in range(classes)]
        self._returned = [[0.0] * _AGES for _ in range(classes)]
        self._cut_off = [[0.0] * _AGES for _ in range(classes)]
        self._running: list[dict[int, int]] = [{} for _ in range(classes)]  # key -> its last use, the oldest first
        self._class_of: dict[int, int] = {}
        self._one_in = 1
        self._until_look = _FOLLOWED_A_LOOK
        self._look(0)

    def __len__(self) -> int:
        return len(self._class_of)

    def follows(self, identity: int) -> bool:
        """Return whether a key is in the sample."""
        return not identity & (self._one_in - 1)

    def note_use(self, identity: int, new_class: int, now: int) -> None:
        """Note a use of a key in the sample: an interval ends, and one of `new_class` begins."""
        old_class = self._class_of.get(identity)
        if old_class is not None:
            self._returned[old_class][age_bin(now - self._running[old_class][identity])] += 1.0
        self.begin(identity, new_class, now)
        self._until_look -= 1
        if self._until_look <= 0:
            self._look(now)

    def begin(self, identity: int, new_class: int, now: int) -> None:
        """Begin an interval of a key in the sample, and forget the one that was running."""
        old_class = self._class_of.get(identity)
        if old_class is not None:
            del self._running[old_class][identity]
        self._class_of[identity] = new_class
        self._running[new_class][identity] = now

    def fit(self, blocks: int) -> None:
        """Thin the sample out until it is small enough for this many blocks."""
        while blocks * _SPAN > FOLLOWED_MAX * self._one_in:
            self._one_in *= 2
            self._class_of = {key: old for key, old in self._class_of.items() if self.follows(key)}
            self._running = [{key: at for key, at in one.items() if self.follows(key)} for one in self._running]

    def _look(self, now: int) -> None:
        """Work out anew what each age of each class is worth."""
        noted = max(_USES_A_LOOK // self._one_in, _FOLLOWED_A_LOOK)
        self._until_look = noted
        weight = 0.5 ** (noted / _HALF_LIFE)
        self._cut_oldest(len(self._class_of) - FOLLOWED_MAX, now)
        unfinished: list[list[float]] = []
        for number, running in enumerate(self._running):
            ages = _histogram(list(running.values()), now)
            unfinished.append(list(map(add, self._cut_off[number], ages)))
            self._returned[number] = [count * weight for count in self._returned[number]]
            self._cut_off[number] = [count * weight for count in self._cut_off[number]]
        average = chances_of_return(_summed(self._returned), _summed(unfinished))
        for number, returned in enumerate(self._returned):
            self.worth[number][:] = best_ratios(chances_of_return(returned, unfinished[number], average))

    def _cut_oldest(self, count: int, now: int) -> None:
        """Follow the keys unused longest no more, `count` of them and those last used in the same tick."""
        if count <= 0:
            return
        oldest = sorted(chain.from_iterable(islice(running.values(), count) for running in self._running))
        for running, cut_off in zip(self._running, self._cut_off, strict=True):
            for identity, since in list(takewhile(lambda item: item[1] <= oldest[count - 1], running.items())):
                del running[identity], self._class_of[identity]
                cut_off[age_bin(now - since)] += 1.0


def _histogram(since: list[int], now: int) -> list[int]:
    """Return how many of the ascending ticks `since` have an age in each bin."""
    ends = [bisect_right(since, now - start) for start in _BIN_STARTS]  # how many are at least this old
    return [end - older for end, older in zip(ends, [*ends[1:], 0], strict=True)]


def _summed(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def chances_of_return(
    returned: Sequence[float], unfinished: Sequence[float], average: Sequence[float] = ()
) -> list[float]:
    """Return the chance of a return in each bin for a block that has reached it.

    `returned` and `unfinished` count the intervals that ended with a use in a bin, and those known to have lasted to
    it. `average` are the chances in a larger group.
    """
    at_risk = sum(returned) + sum(unfinished)
    chances: list[float] = []
    for number, (back, left) in enumerate(zip(returned, unfinished, strict=True)):
        exposed = max(at_risk - left / 2, 0.0)
        if average:
            chances.append(min(1.0, (back + _FEW * average[number]) / (exposed + _FEW)))
        else:
            chances.append(min(1.0, (back + _PRIOR) / (exposed + 1.0)))
        at_risk = max(at_risk - back - left, 0.0)
    return chances


def best_ratios(chances: Sequence[float]) -> list[float]:
    """Return the best ratio of hits to time that can be had from the start of each bin on."""
    # From the last bin back, each is joined with what follows as long as that has the better ratio: the span joined to
    # a bin is the best one to keep a block from there on.
    spans: list[tuple[float, float, float]] = []  # hits and time to expect from its start, chance of outlasting it
    ratios = [0.0] * _AGES
    for number in range(_AGES - 1, -1, -1):
        hits = chances[number]
        time, lasting = (1 - hits / 2) * _WIDTHS[number], 1 - hits
        while spans and spans[-1][0] * time > hits * spans[-1][1]:
            more_hits, more_time, more_lasting = spans.pop()
            hits, time, lasting = hits + lasting * more_hits, time + lasting * more_time, lasting * more_lasting
        spans.append((hits, time, lasting))
        ratios[number] = hits / time
    return ratios
