"""The catalog against a plain model: what is visible, where it lies, and when its slots come back."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.counters import Cause
from kvstore.lifecycle import Copy
from kvstore.policy import POLICIES
from kvstore.prefix import leading_run
from kvstore.table import NEVER_S, Columns, Tier
from kvstore.tenancy import Tenancy
from tests.core.parts import BLOCK_BYTES, MIB, Core, core, flat_namespace, hash_of, hashes_of, sliced_namespace
from tests.core.scale import examples

CPU, SSD = Tier.CPU, Tier.SSD


@pytest.fixture
def parts() -> Iterator[Core]:
    """Return a catalog with a real pool, and an ssd tier of which there are only slot numbers."""
    with core(with_ssd=True) as made:
        yield made


@pytest.fixture
def tenancy(parts: Core) -> Tenancy:
    return parts.tenancy()


def residency(parts: Core, row: int) -> list[Tier]:
    return [tier for tier in parts.catalog.tiers if parts.catalog.table.residency[row] & tier.bit]


# ---- what is visible


def test_a_block_is_found_in_its_own_namespace_and_tenant_only(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    assert parts.catalog.find(tenancy, hash_of(0)) == row
    assert parts.catalog.find(tenancy, hash_of(1)) is None
    for other in (parts.tenancy(flat_namespace(salt=b"other")), parts.tenancy(tenant="other")):
        assert parts.catalog.find(other, hash_of(0)) is None
    assert parts.tenancy() is tenancy
    assert parts.catalog.named(tenancy.namespace.digest) == [tenancy, parts.tenancy(tenant="other")]


def test_the_leading_run_ends_at_the_first_block_that_is_not_there(parts: Core, tenancy: Tenancy) -> None:
    rows = parts.store(tenancy, [0, 1, 2, 4])
    assert parts.catalog.leading_rows(tenancy, hashes_of(range(6))) == rows[:3]
    assert parts.catalog.leading_rows(tenancy, hashes_of([7, 0])) == []
    assert parts.catalog.leading_rows(tenancy, []) == []


def test_the_leading_run_ends_at_the_first_block_that_has_expired(parts: Core, tenancy: Tenancy) -> None:
    rows = parts.store(tenancy, range(4))
    parts.catalog.set_ttl(rows[2], 5.0)
    assert parts.catalog.leading_rows(tenancy, hashes_of(range(4))) == rows
    parts.clock.advance(5.0)
    assert parts.catalog.leading_rows(tenancy, hashes_of(range(4))) == rows[:2]
    assert parts.keys_of(tenancy, range(4)) == [0, 1, 3]


# ---- lives


def test_an_expired_block_never_hits_even_before_it_is_swept(parts: Core, tenancy: Tenancy) -> None:
    rows = parts.store(tenancy, range(2))
    parts.catalog.set_ttl(rows[0], 5.0)
    parts.clock.advance(4.999)
    assert parts.catalog.find(tenancy, hash_of(0)) == rows[0]
    parts.clock.advance(0.001)
    assert parts.catalog.find(tenancy, hash_of(0)) is None
    assert parts.catalog.counters[CPU].evictions[Cause.TTL] == 1
    assert parts.memory.used_bytes == BLOCK_BYTES


def test_the_sweep_drops_what_is_over_a_little_at_a_time(parts: Core, tenancy: Tenancy) -> None:
    for row in parts.store(tenancy, range(10)):
        parts.catalog.set_ttl(row, 5.0)
    parts.clock.advance(7.0)
    assert parts.catalog.expire(4) == 4
    assert parts.catalog.expire(100) == 6
    assert parts.catalog.expire(100) == 0
    assert parts.memory.used_bytes == 0


def test_a_renewed_life_is_the_one_that_counts(parts: Core, tenancy: Tenancy) -> None:
    rows = parts.store(tenancy, range(3))
    for row, ttl_s in zip(rows, (5.0, 50.0, 5.0), strict=True):
        parts.catalog.set_ttl(row, ttl_s)
    parts.catalog.set_ttl(rows[0], 20.0)
    parts.catalog.set_ttl(rows[1], 5.0)
    parts.catalog.set_ttl(rows[2], 0.0)
    parts.clock.advance(10.0)
    parts.catalog.expire(100)
    parts.catalog.end_pins()
    assert parts.keys_of(tenancy, range(3)) == [0, 2]
    parts.clock.advance(15.0)
    parts.catalog.expire(100)
    parts.catalog.end_pins()
    assert parts.keys_of(tenancy, range(3)) == [2]


def test_a_pinned_block_outlives_its_time_and_goes_when_the_pin_ends(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    parts.catalog.set_ttl(row, 5.0)
    parts.catalog.pins.pin(row, parts.clock.boottime_s() + 60.0)
    parts.clock.advance(30.0)
    assert parts.catalog.expire(100) == 0
    assert parts.catalog.find(tenancy, hash_of(0)) == row
    parts.clock.advance(31.0)
    parts.catalog.expire(100)
    parts.catalog.end_pins()
    assert parts.catalog.find(tenancy, hash_of(0)) is None


# ---- epochs


def test_a_dropped_namespace_is_empty_at_once_and_reclaimed_piece_by_piece(parts: Core, tenancy: Tenancy) -> None:
    parts.store(tenancy, range(10))
    epoch = tenancy.epoch
    assert parts.catalog.drop_all(tenancy) == 10
    assert tenancy.epoch == epoch + 1
    assert parts.keys_of(tenancy, range(10)) == []
    assert parts.memory.used_bytes == 10 * BLOCK_BYTES
    steps = [(parts.catalog.reclaim(limit), parts.catalog.reclaiming) for limit in (4, 100, 100)]
    assert steps == [(4, True), (6, False), (0, False)]
    assert parts.memory.used_bytes == 0


def test_what_is_stored_after_a_drop_is_not_taken_for_what_was_before(parts: Core, tenancy: Tenancy) -> None:
    parts.store(tenancy, range(5))
    parts.catalog.drop_all(tenancy)
    rows = parts.store(tenancy, range(3))
    parts.catalog.reclaim(100)
    assert parts.keys_of(tenancy, range(5)) == [0, 1, 2]
    assert [parts.catalog.find(tenancy, hash_of(key)) for key in range(3)] == rows
    parts.check_integrity()


def test_rows_that_pressure_freed_before_the_reclaim_may_belong_to_others_by_then(parts: Core) -> None:
    dropped, other = parts.tenancy(), parts.tenancy(flat_namespace(salt=b"other"))
    parts.store(dropped, range(24))
    parts.catalog.drop_all(dropped)
    parts.store(other, range(24))  # a full pool: each takes the place of one that was dropped
    parts.catalog.reclaim(100)
    assert parts.keys_of(other, range(24)) == list(range(24))
    parts.check_integrity()


def test_a_load_begun_before_a_drop_can_not_become_visible(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    parts.catalog.hold(row)
    parts.catalog.fill(row, SSD, 7)
    parts.catalog.drop_all(tenancy)
    parts.catalog.reclaim(100)
    parts.catalog.filled(row, SSD)
    assert parts.catalog.find(tenancy, hash_of(0)) is None
    parts.catalog.unhold(row)
    assert parts.delete_departed() == [7]
    assert len(parts.catalog.table) == parts.memory.used_bytes == 0
    parts.check_integrity()


# ---- copies and holds


def test_a_block_is_visible_while_it_has_a_ready_copy_anywhere(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    parts.copy_to_ssd(row, 3)
    assert residency(parts, row) == [CPU, SSD]
    parts.catalog.leave(row, CPU, Cause.PRESSURE)
    assert parts.catalog.find(tenancy, hash_of(0)) == row
    assert residency(parts, row) == [SSD]
    assert parts.memory.used_bytes == 0
    parts.catalog.leave(row, SSD, Cause.PRESSURE)
    assert parts.catalog.find(tenancy, hash_of(0)) is None
    assert len(parts.catalog.table) == 1, "its entry on ssd is not deleted yet"
    assert parts.delete_departed() == [3]
    assert len(parts.catalog.table) == 0


def test_a_copy_that_fails_leaves_the_block_as_it_was(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    parts.catalog.hold(row)
    parts.catalog.fill(row, SSD, 3)
    assert residency(parts, row) == [CPU]
    assert parts.catalog.fail(row, SSD) == 3
    parts.catalog.unhold(row)
    assert residency(parts, row) == [CPU]
    assert parts.catalog.find(tenancy, hash_of(0)) == row
    parts.check_integrity()


def test_a_held_block_keeps_its_slot_in_memory_and_its_entry_on_ssd_is_deleted(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    parts.copy_to_ssd(row, 3)
    parts.catalog.hold(row)
    parts.catalog.drop(row, Cause.DROP)
    assert parts.catalog.find(tenancy, hash_of(0)) is None
    assert parts.catalog.table.state[SSD][row] == Copy.DELETING
    assert parts.delete_departed() == [3]
    assert parts.memory.used_bytes == BLOCK_BYTES
    parts.check_integrity()
    parts.catalog.unhold(row)
    assert parts.memory.used_bytes == len(parts.catalog.table) == 0


def test_a_copy_in_transit_leaves_when_nobody_holds_it(parts: Core, tenancy: Tenancy) -> None:
    (row,) = parts.store(tenancy, [0])
    parts.copy_to_ssd(row, 3)
    parts.catalog.leave(row, CPU, Cause.PRESSURE)
    slot = parts.memory.allocate_transit(BLOCK_BYTES)
    assert slot is not None
    evicted = parts.catalog.counters[CPU].evictions[Cause.PRESSURE]
    for _ in range(2):
        parts.catalog.hold(row)
    parts.catalog.fill(row, CPU, slot)
    parts.catalog.filled(row, CPU)
    parts.catalog.unhold(row)
    assert residency(parts, row) == [CPU, SSD]
    parts.catalog.unhold(row)
    assert residency(parts, row) == [SSD]
    assert parts.memory.used_bytes == 0
    assert parts.catalog.counters[CPU].evictions[Cause.PRESSURE] == evicted, "nobody pressed for it"
    parts.check_integrity()


def test_neither_a_held_nor_a_pinned_block_is_a_victim(parts: Core, tenancy: Tenancy) -> None:
    rows = parts.store(tenancy, range(24))
    parts.catalog.hold(rows[0])
    parts.catalog.pins.pin(rows[1], NEVER_S)
    parts.store(tenancy, range(100, 122))
    assert parts.keys_of(tenancy, range(24)) == [0, 1]
    parts.catalog.unhold(rows[0])
    parts.check_integrity()


def test_the_ssd_copy_of_a_block_used_in_memory_is_recent_once_memory_lets_it_go(parts: Core, tenancy: Tenancy) -> None:
    rows = parts.store(tenancy, range(3))
    for row in rows:
        parts.copy_to_ssd(row, 10 + row)
    parts.clock.advance(60.0)
    parts.catalog.use([rows[0]])
    policy, lane = parts.catalog.policies[SSD], tenancy.lanes[SSD]
    assert next(policy.coldest(lane)) == rows[0], "a hit in memory leaves the order on ssd alone"
    parts.catalog.leave(rows[0], CPU, Cause.PRESSURE)
    assert list(policy.coldest(lane))[-1] == rows[0]


def test_bytes_are_charged_to_the_tenant_from_the_promise_on(parts: Core) -> None:
    tenancy = parts.tenancy(tenant="t")
    parts.catalog.promise(tenancy, CPU, 2)
    assert parts.catalog.charged_bytes(tenancy, CPU) == 2 * BLOCK_BYTES
    parts.catalog.promise(tenancy, CPU, -2)
    rows = parts.store(tenancy, range(3))
    assert parts.catalog.charged_bytes(tenancy, CPU) == 3 * BLOCK_BYTES
    parts.catalog.drop(rows[0], Cause.DROP)
    assert parts.catalog.charged_bytes(tenancy, CPU) == 2 * BLOCK_BYTES
    assert parts.catalog.charged_bytes(parts.tenancy(), CPU) == 0


# ---- slices


def test_the_slices_of_a_block_are_evicted_together(parts: Core) -> None:
    ranks = [parts.tenancy(sliced_namespace(head)) for head in range(4)]
    assert all(rank.siblings == ranks for rank in ranks)
    for rank in ranks:
        parts.store(rank, range(3))
    row = parts.catalog.find(ranks[2], hash_of(1))
    assert row is not None
    assert parts.catalog.evict_with_slices(row, CPU, Cause.PRESSURE) == 4
    assert [parts.keys_of(rank, range(3)) for rank in ranks] == [[0, 2]] * 4
    assert parts.catalog.counters[CPU].evictions[Cause.PRESSURE] == 4


def test_a_slice_in_use_stays_when_the_others_are_evicted(parts: Core) -> None:
    ranks = [parts.tenancy(sliced_namespace(head)) for head in range(4)]
    rows = [parts.store(rank, [0])[0] for rank in ranks]
    parts.catalog.hold(rows[1])
    parts.catalog.pins.pin(rows[2], NEVER_S)
    assert parts.catalog.evict_with_slices(rows[0], CPU, Cause.PRESSURE) == 2
    assert [parts.keys_of(rank, [0]) for rank in ranks] == [[], [0], [0], []]
    parts.catalog.unhold(rows[1])


def test_slices_of_two_tenants_have_nothing_to_do_with_each_other(parts: Core) -> None:
    mine, theirs = parts.tenancy(sliced_namespace(0), "a"), parts.tenancy(sliced_namespace(1), "b")
    row = parts.store(mine, [0])[0]
    parts.store(theirs, [0])
    assert parts.catalog.evict_with_slices(row, CPU, Cause.PRESSURE) == 1
    assert parts.keys_of(theirs, [0]) == [0]


# ---- another size


def test_blocks_of_another_size_take_the_place_of_colder_ones(parts: Core, tenancy: Tenancy) -> None:
    parts.store(tenancy, range(24))
    large = parts.tenancy(flat_namespace(2 * MIB))
    parts.clock.advance(60.0)
    assert len(parts.store(large, range(1))) == 1
    assert len(parts.keys_of(tenancy, range(24))) == 16, "one chunk of 8 blocks went, the rest stays"
    assert len(parts.store(large, range(1, 3))) == 2
    parts.check_integrity()


# ---- warm start


def warm_start(parts: Core, numbers: list[int], keys: list[int], expires_s: list[float]) -> list[int]:
    count = len(keys)
    columns = Columns(
        checksums=array("Q", range(1, count + 1)),
        generations=array("Q", range(101, 101 + count)),
        expires_s=array("d", expires_s),
        slots=array("q", range(1000, 1000 + count)),
    )
    return parts.catalog.restore(hashes_of(keys), array("I", numbers), columns)


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_what_the_ssd_tier_found_at_start_is_visible_coldest_first(eviction: str) -> None:
    with core(with_ssd=True, eviction=eviction) as parts:
        one, two = parts.tenancy(), parts.tenancy(flat_namespace(salt=b"two"))
        end_s = parts.clock.boottime_s() + 5.0
        assert warm_start(parts, [0, 1, 0, 1], [0, 0, 1, 2], [NEVER_S, NEVER_S, end_s, NEVER_S]) == []
        assert (parts.keys_of(one, range(4)), parts.keys_of(two, range(4))) == ([0, 1], [0, 2])
        table, policy = parts.catalog.table, parts.catalog.policies[SSD]
        found = [(table.hash[row], table.slot[SSD][row]) for row in policy.coldest(one.lanes[SSD])]
        assert sorted(found) == sorted(zip(hashes_of([0, 0, 1, 2]), range(1000, 1004), strict=True))
        assert parts.catalog.used_bytes["", SSD] == 4 * BLOCK_BYTES
        parts.check_integrity()
        parts.clock.advance(5.0)
        assert parts.keys_of(one, range(4)) == [0]
        (new,) = parts.store(one, [9])
        assert table.generation[new] > 104, "generations go on from the highest that was found"
        parts.check_integrity()


def test_of_two_records_of_one_block_the_later_is_visible_and_the_other_to_be_dropped(parts: Core) -> None:
    one = parts.tenancy()
    doubled = warm_start(parts, [0, 0, 0], [5, 6, 5], [NEVER_S] * 3)
    assert len(doubled) == 1
    row = parts.catalog.find(one, hash_of(5))
    assert row is not None
    assert parts.catalog.table.slot[SSD][row] == 1002
    for double in doubled:
        parts.catalog.drop(double, Cause.DROP)
    assert parts.delete_departed() == [1000]
    assert parts.keys_of(one, range(10)) == [5, 6]
    parts.check_integrity()


def test_of_two_records_of_one_block_the_newer_is_kept_wherever_it_lies(parts: Core) -> None:
    one = parts.tenancy()
    columns = Columns(array("Q", [1, 2]), array("Q", [9, 5]), array("d", [NEVER_S, 0.5]), array("q", [1000, 1001]))
    doubled = parts.catalog.restore(hashes_of([5, 5]), array("I", [one.number] * 2), columns)
    row = parts.catalog.find(one, hash_of(5))
    assert row is not None
    assert parts.catalog.table.slot[SSD][row] == 1000
    for double in doubled:
        parts.catalog.drop(double, Cause.DROP)
    assert parts.delete_departed() == [1001]
    parts.check_integrity()


def test_nothing_found_at_start_is_nothing_restored(parts: Core) -> None:
    assert warm_start(parts, [], [], []) == []


# ---- any order of events


@dataclass
class Block:
    """What the model knows of a visible block."""

    row: int
    tiers: set[Tier]
    expires_s: float = NEVER_S
    pinned_until_s: float = 0.0
    holds: int = 0


@dataclass
class Ghost:
    """A block that is not visible any more and was held when it went."""

    row: int
    tiers: set[Tier] = field(default_factory=set[Tier])
    holds: int = 0


class CatalogMachine(RuleBasedStateMachine):
    """Two slices of one model and another namespace, few keys, both tiers."""

    KEYS = 6

    def __init__(self, eviction: str = "lru") -> None:
        super().__init__()
        self.context = core(4 * MIB, with_ssd=True, eviction=eviction)
        self.parts = self.context.__enter__()
        self.catalog = self.parts.catalog
        self.tenancies = [
            self.parts.tenancy(sliced_namespace(0)),
            self.parts.tenancy(sliced_namespace(1)),
            self.parts.tenancy(flat_namespace(), tenant="other"),
        ]
        self.blocks: dict[tuple[int, int], Block] = {}
        self.ghosts: list[Ghost] = []
        self.ssd_slots = itertools.count(1)
        self.deleting: set[int] = set()  # ssd slots of what has left and is not deleted yet

    def teardown(self) -> None:
        still_held: list[Block | Ghost] = [*self.blocks.values(), *self.ghosts]
        for held in still_held:
            for _ in range(held.holds):
                self.catalog.unhold(held.row)
        for tenancy in self.tenancies:
            self.catalog.drop_all(tenancy)
        self.catalog.reclaim(1000)
        self.parts.delete_departed()
        assert len(self.catalog.table) == self.parts.memory.used_bytes == 0
        self.parts.check_integrity()
        self.context.__exit__(None, None, None)

    def now_s(self) -> float:
        return self.parts.clock.boottime_s()

    def is_over(self, block: Block) -> bool:
        return block.expires_s <= self.now_s() and not self.is_pinned(block)

    def is_pinned(self, block: Block) -> bool:
        return block.row in self.catalog.pinned

    def pick(self, number: int) -> tuple[tuple[int, int], Block]:
        key = sorted(self.blocks)[number % len(self.blocks)]
        return key, self.blocks[key]

    def gone(self, name: tuple[int, int]) -> None:
        block = self.blocks.pop(name)
        if block.holds:
            self.ghosts.append(Ghost(block.row, block.tiers, block.holds))

    def left(self, name: tuple[int, int], tier: Tier) -> None:
        block = self.blocks[name]
        block.tiers.discard(tier)
        if not block.tiers:
            self.gone(name)

    def forget_expired(self) -> None:
        for name, block in list(self.blocks.items()):
            if self.is_over(block):
                self.gone(name)

    @rule(
        tenancy=st.integers(0, 2),
        keys=st.sets(st.integers(0, KEYS - 1), max_size=3),
        ttl_s=st.sampled_from([0.0, 3.0]),
    )
    def store(self, tenancy: int, keys: set[int], ttl_s: float) -> None:
        new = [key for key in sorted(keys) if self.catalog.find(self.tenancies[tenancy], hash_of(key)) is None]
        self.forget_expired()
        slots = self.parts.memory.allocate_many(BLOCK_BYTES, len(new))
        rows = self.catalog.adopt(self.tenancies[tenancy], hashes_of(new[: len(slots)]), slots, [1] * len(slots), ttl_s)
        for key, row in zip(new, rows, strict=False):
            self.blocks[tenancy, key] = Block(row, {CPU}, self.now_s() + ttl_s if ttl_s else NEVER_S)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 30.0]), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.parts.clock.advance(seconds)
        if sweep:
            self.catalog.expire(100)
            self.catalog.end_pins()
            for block in self.blocks.values():
                assert self.is_pinned(block) == (block.pinned_until_s > self.now_s())
        self.forget_expired_where_looked_at()

    def forget_expired_where_looked_at(self) -> None:
        """Looking at every key drops what is over, as the invariant below does anyway."""
        for number, tenancy in enumerate(self.tenancies):
            for key in range(self.KEYS):
                found = self.catalog.find(tenancy, hash_of(key))
                block = self.blocks.get((number, key))
                assert found == (None if block is None or self.is_over(block) else block.row)
        self.forget_expired()

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100), ttl_s=st.sampled_from([0.0, 1.0, 20.0]))
    def set_ttl(self, number: int, ttl_s: float) -> None:
        _, block = self.pick(number)
        self.catalog.set_ttl(block.row, ttl_s)
        block.expires_s = self.now_s() + ttl_s if ttl_s else NEVER_S

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100), for_s=st.sampled_from([0.0, 5.0]))
    def pin(self, number: int, for_s: float) -> None:
        _, block = self.pick(number)
        block.pinned_until_s = self.now_s() + for_s
        if for_s:
            self.catalog.pins.pin(block.row, block.pinned_until_s)
        else:
            self.catalog.pins.unpin(block.row)

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100))
    def hold(self, number: int) -> None:
        _, block = self.pick(number)
        self.catalog.hold(block.row)
        block.holds += 1

    @rule(number=st.integers(0, 100))
    def unhold(self, number: int) -> None:
        held: list[Block | Ghost] = [block for _, block in sorted(self.blocks.items()) if block.holds]
        held += self.ghosts
        if held:
            block = held[number % len(held)]
            block.holds -= 1
            self.catalog.unhold(block.row)
            self.ghosts = [ghost for ghost in self.ghosts if ghost.holds]

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100), fails=st.booleans())
    def demote(self, number: int, fails: bool) -> None:
        _, block = self.pick(number)
        if self.catalog.table.state[SSD][block.row] != Copy.ABSENT:
            return
        self.catalog.hold(block.row)
        self.catalog.fill(block.row, SSD, next(self.ssd_slots))
        assert residency(self.parts, block.row) == sorted(block.tiers)
        if fails:
            self.catalog.fail(block.row, SSD)
        else:
            self.catalog.filled(block.row, SSD)
            block.tiers.add(SSD)
        self.catalog.unhold(block.row)

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100), fails=st.booleans())
    def promote(self, number: int, fails: bool) -> None:
        _, block = self.pick(number)
        if self.catalog.table.state[CPU][block.row] != Copy.ABSENT:
            return
        slot = self.parts.memory.allocate(BLOCK_BYTES)
        if slot is None:
            return
        self.catalog.hold(block.row)
        self.catalog.fill(block.row, CPU, slot)
        if fails:
            self.parts.memory.free(self.catalog.fail(block.row, CPU))
        else:
            self.catalog.filled(block.row, CPU)
            block.tiers.add(CPU)
        self.catalog.unhold(block.row)

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100), tier=st.sampled_from([CPU, SSD]))
    def evict(self, number: int, tier: Tier) -> None:
        (tenancy, key), block = self.pick(number)
        if not self.catalog.is_evictable(block.row, tier):
            assert tier not in block.tiers or block.holds or self.is_pinned(block)
            return
        assert tier in block.tiers
        names = [(rank, key) for rank in ((0, 1) if tenancy < 2 else (2,)) if (rank, key) in self.blocks]
        going = [name for name in names if self.catalog.is_evictable(self.blocks[name].row, tier)]
        assert self.catalog.evict_with_slices(block.row, tier, Cause.PRESSURE) == len(going)
        for name in going:
            self.left(name, tier)

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 100))
    def drop(self, number: int) -> None:
        name, block = self.pick(number)
        self.catalog.drop(block.row, Cause.DROP)
        self.gone(name)

    @rule(tenancy=st.integers(0, 2), reclaim=st.integers(0, 4))
    def drop_namespace(self, tenancy: int, reclaim: int) -> None:
        names = [name for name in self.blocks if name[0] == tenancy]
        assert self.catalog.drop_all(self.tenancies[tenancy]) == len(names)
        for name in names:
            self.gone(name)
        self.catalog.reclaim(reclaim)

    @rule(limit=st.integers(1, 5))
    def reclaim(self, limit: int) -> None:
        assert self.catalog.reclaim(limit) <= limit

    @rule()
    def delete_departed(self) -> None:
        self.parts.delete_departed()

    @rule(names=st.lists(st.integers(0, 100), max_size=4))
    def use(self, names: list[int]) -> None:
        rows = [self.pick(number)[1].row for number in names if self.blocks]
        self.catalog.use(rows)

    @invariant()
    def finds_what_the_model_has(self) -> None:
        self.forget_expired_where_looked_at()
        self.parts.check_integrity()
        for (number, _), block in self.blocks.items():
            assert residency(self.parts, block.row) == sorted(block.tiers)
            for tier in (CPU, SSD):
                evictable = tier in block.tiers and not block.holds and not self.is_pinned(block)
                assert self.catalog.is_evictable(block.row, tier) == evictable
            assert self.catalog.table.namespace[block.row] == number

    @invariant()
    def runs_are_as_long_as_in_the_model(self) -> None:
        for number, tenancy in enumerate(self.tenancies):
            found = [(number, key) in self.blocks for key in range(self.KEYS)]
            assert len(self.catalog.leading_rows(tenancy, hashes_of(range(self.KEYS)))) == leading_run(found)

    @invariant()
    def held_blocks_that_went_keep_their_slots_in_memory(self) -> None:
        for ghost in self.ghosts:
            if CPU in ghost.tiers:  # READY: of a dropped namespace that is not reclaimed yet
                assert self.catalog.table.state[CPU][ghost.row] in (Copy.LEAVING, Copy.READY)


class CatalogMachineWithReuse(CatalogMachine):
    """The same with the other policy."""

    def __init__(self) -> None:
        super().__init__("reuse")


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestCatalogMachineWithReuse = CatalogMachineWithReuse.TestCase
TestCatalogMachineWithReuse.settings = settings(max_examples=examples(15), stateful_step_count=40)
