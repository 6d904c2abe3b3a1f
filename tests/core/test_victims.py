"""Victims: those of one walk are those that one after the other would be, and nothing in the way makes a walk long."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.catalog import Catalog
from kvstore.counters import Cause
from kvstore.lifecycle import Copy
from kvstore.table import NEVER_S, Columns, Tier
from kvstore.tenancy import Tenancy
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.slab import Slab
from kvstore.victims import Choice, Victims
from kvstore.wire import Outcome
from tests.core.parts import MIB, Core, core, flat_namespace, hash_of, hashes_of, sliced_namespace
from tests.core.scale import examples

KIB = 1 << 10
SMALL, LARGE = 4 * KIB, 64 * KIB


@dataclass
class CountedSpace:
    """The slots of memory; counts the rows that are looked at in regions."""

    memory: MemoryTier
    owners_seen: int = 0

    def region_at(self, slot: int) -> int:
        return self.memory.region_at(slot)

    def clearing(self, slot: int, slot_bytes: int) -> tuple[int, ...]:
        return self.memory.clearing(slot, slot_bytes)

    def owners(self, region: int) -> Iterator[int]:
        for row in self.memory.owners(region):
            self.owners_seen += 1
            yield row

    def region_starts(self) -> Sequence[int]:
        return self.memory.region_starts()


class NoSpace:
    """The slots of a tier in which no region can be emptied."""

    def region_at(self, slot: int) -> int:
        return 0

    def clearing(self, slot: int, slot_bytes: int) -> tuple[int, ...]:
        return ()

    def owners(self, region: int) -> Iterable[int]:
        return ()

    def region_starts(self) -> Sequence[int]:
        return ()


@dataclass
class CountedSpared:
    """Says which rows are spared; counts how often it is asked."""

    rows: set[int] = field(default_factory=set[int])
    asked: int = 0

    def __call__(self, row: int) -> bool:
        self.asked += 1
        return row in self.rows


def never(row: int) -> bool:
    """Spare nothing."""
    return False


def count_looks(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that says how often a row was looked at since it was asked last."""
    looks = [0]
    is_evictable = catalog.is_evictable

    def counting(row: int, tier: Tier) -> bool:
        looks[0] += 1
        return is_evictable(row, tier)

    def looked() -> int:
        count, looks[0] = looks[0], 0
        return count

    monkeypatch.setattr(catalog, "is_evictable", counting)
    return looked


def fill(parts: Core, tenancy: Tenancy, count: int | None = None, first_key: int = 0) -> list[int]:
    """Store blocks in free slots only, as many as fit if no count is given; return their rows, in order of keys."""
    count = parts.memory.slab.free_slots(tenancy.slot_bytes) if count is None else count
    rows: list[int] = []
    for key in range(first_key, first_key + count, 1024):
        rows += parts.store(tenancy, range(key, min(key + 1024, first_key + count)))
    assert len(rows) == count
    return rows


def by_region(parts: Core, rows: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows that lie in each region."""
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(parts.memory.region_at(parts.catalog.table.slot[Tier.CPU][row]), []).append(row)
    return found


# ---- several in one walk


@settings(max_examples=examples(60), deadline=None)
@given(
    tenants=st.lists(st.integers(0, 2), min_size=1, max_size=120),
    on_ssd=st.sets(st.integers(0, 119)),
    held=st.sets(st.integers(0, 119), max_size=15),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    eviction=st.sampled_from(["lru", "reuse"]),
)
def test_several_victims_are_those_that_one_after_the_other_would_be(
    tenants: list[int], on_ssd: set[int], held: set[int], steps: list[int], eviction: str
) -> None:
    def evicted(counts: Iterable[int]) -> list[int]:
        with core(eviction=eviction, with_ssd=True) as parts:
            spaces = [parts.tenancy(flat_namespace(SMALL, b"%d" % number), f"tenant {number}") for number in range(3)]
            keys: dict[int, int] = {}
            for key, tenant in enumerate(tenants):
                (row,) = parts.store(spaces[tenant], [key])
                keys[row] = key
                parts.clock.advance(0.05)
                if key in on_ssd:
                    parts.copy_to_ssd(row, key)
            leased = [row for row, key in keys.items() if key in held]
            parts.catalog.lease(leased)
            table = parts.catalog.table
            victims = Victims(
                parts.catalog, Tier.CPU, NoSpace(), lambda row: table.residency[row] == Tier.CPU.bit
            )  # fmt: skip
            gone: list[int] = []
            for count in counts:
                choice = victims.for_slots(SMALL, count)
                assert not choice.is_region
                for row in choice.rows:
                    gone.append(keys[row])
                    parts.catalog.leave(row, Tier.CPU, Cause.PRESSURE)
            parts.catalog.unlease(leased)
            return gone

    together = evicted(steps)
    assert together == evicted([1] * sum(steps))
    assert len(set(together)) == len(together) == min(sum(steps), len(set(range(len(tenants))) - held))


def test_room_for_many_blocks_is_made_of_as_many_victims() -> None:
    with core() as parts:
        tenancy = parts.tenancy(flat_namespace(LARGE))
        rows = fill(parts, tenancy)
        offsets = parts.room.take_many(tenancy, 40)
        assert len(set(offsets)) == 40
        assert parts.catalog.counters[Tier.CPU].evictions[Cause.PRESSURE] == 40
        assert parts.keys_of(tenancy, range(len(rows))) == list(range(len(rows) - 40)), "the tail goes first"
        for offset in offsets:
            parts.memory.free(offset)


def test_what_goes_along_as_slices_counts_as_room_too() -> None:
    with core() as parts:
        ranks = [parts.tenancy(sliced_namespace(head, slice_bytes=LARGE)) for head in range(4)]
        while parts.memory.slab.free_slots(LARGE) >= len(ranks):
            for rank in ranks:
                parts.store(rank, [len(ranks[-1].rows) if rank is ranks[-1] else len(rank.rows)])
        left_over = parts.memory.slab.free_slots(LARGE)
        offsets = parts.room.take_many(ranks[0], left_over + 6)
        assert len(offsets) == left_over + 6
        assert parts.catalog.counters[Tier.CPU].evictions[Cause.PRESSURE] == 8, "two blocks with their four slices"
        for offset in offsets:
            parts.memory.free(offset)


def test_a_quota_is_met_for_many_blocks_at_once_and_not_by_more_than_it_takes() -> None:
    with core(16 * MIB, quotas={"a": 50 * LARGE}) as parts:
        other, own = parts.tenancy(flat_namespace(LARGE), "b"), parts.tenancy(flat_namespace(LARGE), "a")
        fill(parts, other, 20)
        fill(parts, own, 50)
        offsets = parts.room.take_many(own, 40)
        assert len(offsets) == 40
        assert parts.catalog.counters[Tier.CPU].evictions[Cause.QUOTA] == 40
        assert parts.keys_of(own, range(50)) == list(range(10))
        more = parts.room.take_many(own, 60)
        assert len(more) == 50, "what is taken is charged when it is promised"
        assert len(other.rows) == 20
        for offset in offsets + more:
            parts.memory.free(offset)


def test_with_a_quota_full_of_held_blocks_only_what_is_left_is_given() -> None:
    with core(quotas={"a": 50 * LARGE}) as parts:
        own = parts.tenancy(flat_namespace(LARGE), "a")
        rows = fill(parts, own, 45)
        parts.catalog.lease(rows)
        offsets = parts.room.take_many(own, 40)
        assert len(offsets) == 5
        for offset in offsets:
            parts.memory.free(offset)
        parts.catalog.unlease(rows)


# ---- regions of another size


@dataclass
class TwoSizes:
    """Cold small blocks in whole regions, and warmer large ones, in all of memory."""

    parts: Core
    small: Tenancy
    large: Tenancy
    cold: dict[int, list[int]]  # region -> rows
    space: CountedSpace
    victims: Victims


@pytest.fixture
def sizes() -> Iterator[TwoSizes]:
    """Return a memory whose first half was filled with small blocks an hour ago."""
    with core(64 * MIB) as parts:
        small, large = parts.tenancy(flat_namespace(SMALL)), parts.tenancy(flat_namespace(LARGE))
        rows = fill(parts, small, parts.memory.slab.capacity_bytes // 2 // SMALL // 512 * 512)
        parts.clock.advance(3600)
        fill(parts, large, first_key=1 << 20)
        parts.clock.advance(10)
        space = CountedSpace(parts.memory)
        cold = by_region(parts, rows)
        assert len(cold) >= 14
        yield TwoSizes(parts, small, large, cold, space, Victims(parts.catalog, Tier.CPU, space, never))


def is_whole_region(sizes: TwoSizes, choice: Choice) -> bool:
    return choice.is_region and sorted(choice.rows) in [sorted(rows) for rows in sizes.cold.values()]


def test_a_region_that_is_clearly_colder_is_named_whole(sizes: TwoSizes) -> None:
    choice = sizes.victims.for_slots(LARGE, 8)
    assert is_whole_region(sizes, choice)
    assert sizes.victims.for_slots(SMALL, 8).is_region is False


def test_own_blocks_go_as_far_as_they_are_not_clearly_warmer_than_a_region(sizes: TwoSizes) -> None:
    parts = sizes.parts
    own = list(parts.catalog.policies[Tier.CPU].coldest(sizes.large.lanes[Tier.CPU]))
    parts.catalog.use([row for rows in sizes.cold.values() for row in rows])
    parts.clock.advance(1)
    parts.catalog.use(own[5:])
    parts.clock.advance(10)
    choice = sizes.victims.for_slots(LARGE, 8)
    assert choice == Choice(own[:5] + own[5:8]), "11 s are not clearly colder than 10"
    parts.catalog.use(own[5:])
    assert sizes.victims.for_slots(LARGE, 8) == Choice(own[:5])
    for row in own[:5]:
        parts.catalog.leave(row, Tier.CPU, Cause.PRESSURE)
    assert is_whole_region(sizes, sizes.victims.for_slots(LARGE, 3))


def test_a_region_is_named_before_a_warm_block_even_if_cold_ones_follow_that_are_spared(sizes: TwoSizes) -> None:
    parts = sizes.parts
    own = list(parts.catalog.policies[Tier.CPU].coldest(sizes.large.lanes[Tier.CPU]))
    parts.clock.advance(3600)
    parts.catalog.use([row for rows in sizes.cold.values() for row in rows])
    parts.clock.advance(3600)
    parts.catalog.use(own[3:])
    parts.clock.advance(10)
    spared = CountedSpared(set(own) - {own[3]})
    victims = Victims(parts.catalog, Tier.CPU, sizes.space, spared)
    assert is_whole_region(sizes, victims.for_slots(LARGE, 2))


def test_the_time_that_passes_meanwhile_is_not_compared_with(sizes: TwoSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = sizes.parts
    cold = [row for rows in sizes.cold.values() for row in rows]
    own = list(parts.catalog.policies[Tier.CPU].coldest(sizes.large.lanes[Tier.CPU]))
    ticks = itertools.count(parts.catalog.tick() + 1)
    monkeypatch.setattr(parts.catalog, "tick", lambda: next(ticks))
    for ahead in range(245, 256):  # a quarter of 1,000 ticks, give or take a few
        parts.catalog.use(cold)
        ticks = itertools.count(next(ticks) + ahead)
        parts.catalog.use(own)
        ticks = itertools.count(next(ticks) + 1000)
        choice = sizes.victims.for_slots(LARGE, 4)
        assert choice.is_region or len(choice.rows) == 4


@pytest.mark.parametrize("at", [0, -1])
def test_one_leased_row_in_each_cold_region_costs_a_bounded_look_once(sizes: TwoSizes, at: int) -> None:
    parts = sizes.parts
    leased = [rows[at] for rows in sizes.cold.values()]
    parts.catalog.lease(leased)
    most = 4096 + max(map(len, sizes.cold.values()))
    assert len(sizes.victims.for_slots(LARGE, 64).rows) == 64
    assert sizes.space.owners_seen <= most
    for _ in range(3):  # a bound on each, and none when all regions are known
        parts.clock.advance(1)
        before = sizes.space.owners_seen
        assert len(sizes.victims.for_slots(LARGE, 64).rows) == 64
        assert sizes.space.owners_seen - before <= most
    before = sizes.space.owners_seen
    parts.clock.advance(1)
    sizes.victims.for_slots(LARGE, 64)
    assert sizes.space.owners_seen == before
    parts.catalog.unlease(leased)
    parts.clock.advance(1)
    assert is_whole_region(sizes, sizes.victims.for_slots(LARGE, 64))


def test_a_pinned_row_keeps_its_region_until_the_pin_ends(sizes: TwoSizes) -> None:
    pins = sizes.parts.catalog.pins
    for rows in sizes.cold.values():
        pins.pin(rows[7], NEVER_S)
    assert not sizes.victims.for_slots(LARGE, 1).is_region
    for rows in sizes.cold.values():
        pins.unpin(rows[7])
    sizes.parts.clock.advance(1)
    assert is_whole_region(sizes, sizes.victims.for_slots(LARGE, 1))


def test_a_region_is_looked_at_again_at_once_where_nothing_else_may_go() -> None:
    with core(8 * MIB) as parts:
        small, large = parts.tenancy(flat_namespace(SMALL)), parts.tenancy(flat_namespace(LARGE))
        session = parts.session()
        ticket, outcomes = parts.reserve(session, small, range(parts.memory.slab.free_slots(SMALL)))
        assert set(outcomes) == {Outcome.GRANTED}
        assert parts.room.take_many(large, 1) == []
        parts.seal(ticket)
        parts.clock.advance(1)
        (offset,) = parts.room.take_many(large, 1)
        parts.memory.free(offset)


def test_the_only_region_that_can_be_emptied_is_found_behind_colder_ones_in_use(sizes: TwoSizes) -> None:
    parts = sizes.parts
    huge = 2 * MIB  # a class with nothing to give
    *blocked, free = sizes.cold
    in_use = [row for region in blocked for row in sizes.cold[region][-1:]]
    large = list(parts.catalog.policies[Tier.CPU].coldest(sizes.large.lanes[Tier.CPU]))
    parts.catalog.use(sizes.cold[free])
    parts.catalog.lease(in_use + large)
    calls, most = 1, 2 * (4096 + 512) + 512
    while not (choice := sizes.victims.for_slots(huge, 1)).rows:
        assert sizes.space.owners_seen <= most
        sizes.space.owners_seen = 0
        calls += 1
        assert calls <= 8, "what was in the way before is known, so each call gets further"
    assert choice.is_region
    assert sorted(choice.rows) == sorted(sizes.cold[free])
    parts.catalog.unlease(in_use + large)


# ---- rows in use at the cold end


def test_thousands_of_held_rows_at_the_cold_end_hide_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with core(48 * MIB) as parts:
        tenancy = parts.tenancy(flat_namespace(SMALL))
        rows = fill(parts, tenancy)
        order = list(parts.catalog.policies[Tier.CPU].coldest(tenancy.lanes[Tier.CPU]))
        held = order[:9000]
        parts.catalog.lease(held)
        looked = count_looks(parts.catalog, monkeypatch)
        offsets = parts.room.take_many(tenancy, 100)
        assert len(offsets) == 100
        state = parts.catalog.table.state[Tier.CPU]
        assert [row for row in rows if state[row] != Copy.READY] == sorted(order[9000:9100])
        assert looked() <= 9000 + 4 * 100 + 1024
        more = parts.room.take_many(tenancy, 100)
        assert looked() <= 4 * 100, "they were moved out of the way"
        for offset in offsets + more:
            parts.memory.free(offset)
        parts.catalog.unlease(held)


def test_a_tier_full_of_held_rows_answers_after_a_bounded_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.victims._IN_USE_MAX", 64)
    with core(16 * MIB) as parts:
        tenancy = parts.tenancy(flat_namespace(SMALL))
        held = fill(parts, tenancy)
        parts.catalog.lease(held)
        looked = count_looks(parts.catalog, monkeypatch)
        assert parts.room.take_many(tenancy, 512) == []
        assert looked() <= 16 * 64
        parts.catalog.unlease(held)


# ---- a tier whose spared rows are in use


@dataclass
class OnSsd:
    """Blocks on ssd, the coldest first, some of which are spared as being in memory too."""

    parts: Core
    rows: list[int]
    in_memory: CountedSpared
    victims: Victims

    def evict(self, count: int) -> list[int]:
        """Evict victims of one call; return them."""
        rows = list(self.victims.for_slots(SMALL, count).rows)
        for row in rows:
            self.parts.catalog.leave(row, Tier.SSD, Cause.PRESSURE)
        return rows


@pytest.fixture
def ssd() -> Iterator[OnSsd]:
    """Return 20,000 blocks on ssd."""
    count = 20_000
    with core(with_ssd=True) as parts:
        tenancy = parts.tenancy(flat_namespace(SMALL))
        columns = Columns(
            array("Q", [0]) * count,
            array("Q", range(1, count + 1)),
            array("d", [NEVER_S]) * count,
            array("q", range(0, count * SMALL, SMALL)),
        )
        parts.catalog.restore(hashes_of(range(count)), array("I", [tenancy.number]) * count, columns)
        rows = [tenancy.rows[hash_of(key)] for key in range(count)]
        in_memory = CountedSpared()
        victims = Victims(parts.catalog, Tier.SSD, NoSpace(), in_memory, spared_are_in_use=True)
        yield OnSsd(parts, rows, in_memory, victims)


@pytest.mark.parametrize("a_call", [1, 16, 256])
def test_where_all_blocks_are_in_memory_too_a_victim_costs_some_tens_of_rows(ssd: OnSsd, a_call: int) -> None:
    ssd.in_memory.rows = set(ssd.rows)
    gone: list[int] = []
    while len(gone) < 512:
        before = ssd.in_memory.asked
        victims = ssd.evict(a_call)
        assert len(victims) == a_call
        assert ssd.in_memory.asked - before <= 4096 + 33 * a_call
        gone += victims
    assert len(set(gone)) == len(gone)
    assert ssd.in_memory.asked <= 4096 + 33 * len(gone)


def test_blocks_in_memory_are_passed_over_for_one_behind_a_long_run_of_them(ssd: OnSsd) -> None:
    ssd.in_memory.rows = set(ssd.rows[:3000])
    assert ssd.victims.for_slots(LARGE, 1).rows == (), "a size that nobody has costs nothing of what is saved up"
    assert ssd.evict(1) == [ssd.rows[3000]]
    before = ssd.in_memory.asked
    assert ssd.evict(10) == ssd.rows[3001:3011]
    assert ssd.in_memory.asked - before == 10, "the run was moved away"


def test_what_is_not_looked_at_for_one_victim_may_be_for_a_later_one(ssd: OnSsd) -> None:
    ssd.in_memory.rows = set(ssd.rows)
    for _ in range(4):
        ssd.evict(1)
    before = ssd.in_memory.asked
    ssd.evict(1)
    assert ssd.in_memory.asked - before <= 33, "nothing is saved up"
    ssd.in_memory.rows = set()
    ssd.evict(200)  # each found at once
    ssd.in_memory.rows = set(ssd.rows)
    before = ssd.in_memory.asked
    ssd.evict(1)
    assert 1000 < ssd.in_memory.asked - before <= 4096 + 33


def test_of_blocks_that_are_all_in_memory_too_the_coldest_go(ssd: OnSsd) -> None:
    ssd.in_memory.rows = set(ssd.rows)
    assert ssd.evict(10) == ssd.rows[:10]


def test_slots_are_aligned_as_these_tests_assume() -> None:
    assert [Slab.slot_bytes_for(size) for size in (SMALL, LARGE)] == [SMALL, LARGE]


# ---- what a drain keeps


def test_what_a_drain_keeps_on_ssd_is_no_victim_there_until_it_ends() -> None:
    with core(2 * MIB, with_ssd=True) as parts:
        tenancy = parts.tenancy(flat_namespace(SMALL))
        rows = fill(parts, tenancy, 4)
        for slot, row in enumerate(rows):
            parts.copy_to_ssd(row, slot)
        victims = Victims(parts.catalog, Tier.SSD, NoSpace(), never)
        for row in rows[:3]:
            parts.catalog.keep_on_ssd(row)
        assert victims.for_slots(tenancy.slots[Tier.SSD], 4).rows == [rows[3]]
        assert all(parts.catalog.is_evictable(row, Tier.CPU) for row in rows), "memory lets go of them as before"
        parts.catalog.drop(rows[0], Cause.DROP)  # an operator's word counts for more
        parts.delete_departed()
        assert rows[0] not in parts.catalog.kept
        parts.catalog.kept.clear()
        assert set(victims.for_slots(tenancy.slots[Tier.SSD], 4).rows) == set(rows[1:])
