"""The slab allocator: slots never overlap, nothing is lost, and no size class starves."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvstore.tiers.slab import ALIGNMENT_BYTES, NOBODY, Region, Slab
from tests.core.scale import examples

KIB = 1 << 10
CHUNK = 64 * KIB
# From 16 slots a chunk to one slot over several chunks, with sizes that leave a rest.
SIZES = [4 * KIB, 12 * KIB, 20 * KIB, 40 * KIB, 64 * KIB, 68 * KIB, 100 * KIB, 256 * KIB]


class SlabMachine(RuleBasedStateMachine):
    """Any order of calls, against a dict of what is used."""

    slots: Bundle[int] = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Region] = []
        self.slab = Slab(CHUNK, 4, 16, on_create=self.taken.append, on_release=self.taken.remove)
        self.used: dict[int, int] = {}

    @rule(target=slots, slot_bytes=st.sampled_from(SIZES), count=st.integers(1, 20))
    def allocate(self, slot_bytes: int, count: int) -> MultipleResults[int]:
        offsets = self.slab.allocate_many(slot_bytes, count)
        if len(offsets) < count:
            assert self.slab.regions_possible(slot_bytes) == 0
            assert self.slab.allocate(slot_bytes) is None
        for offset in offsets:
            assert offset not in self.used
            self.used[offset] = slot_bytes
        return multiple(*offsets)

    @rule(offset=consumes(slots))
    def free(self, offset: int) -> None:
        self.slab.free(offset)
        del self.used[offset]

    @rule(offset=slots, owner=st.integers(0, 1000))
    def note_the_owner(self, offset: int, owner: int) -> None:
        self.slab.set_owner(offset, owner)
        assert self.slab.owner_at(offset) == owner
        assert owner in self.slab.owners(self.slab.region_of(offset).first_chunk)

    @rule(count=st.integers(1, 3))
    def grow(self, count: int) -> None:
        self.slab.add_chunks(min(count, self.slab.chunks_max - self.slab.chunks))

    @rule()
    def give_empty_regions_back(self) -> None:
        for region in [region for region in self.slab.regions() if region.used_slots == 0]:
            self.slab.release(region)

    @rule(offset=slots, slot_bytes=st.sampled_from(SIZES))
    def name_what_is_in_the_way(self, offset: int, slot_bytes: int) -> None:
        regions = self.slab.clearing(offset, slot_bytes)
        for first_chunk in regions:
            assert self.slab.owners(first_chunk) is not None

    @invariant()
    def is_whole(self) -> None:
        self.slab.check_integrity()
        assert self.slab.used_bytes == sum(self.used.values()) <= self.slab.capacity_bytes

    @invariant()
    def slots_do_not_overlap(self) -> None:
        end = 0
        for offset, slot_bytes in sorted(self.used.items()):
            assert offset % ALIGNMENT_BYTES == 0
            assert offset >= end, f"the slot at {offset} overlaps the one before"
            end = offset + slot_bytes
        assert end <= self.slab.capacity_bytes

    @invariant()
    def callbacks_told_of_every_region(self) -> None:
        assert sorted(region.first_chunk for region in self.taken) == [r.first_chunk for r in self.slab.regions()]

    @invariant()
    def used_slots_are_listed(self) -> None:
        listed = [offset for region in self.slab.regions() for offset in region.used_offsets()]
        assert listed == sorted(self.used)


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=examples(80), stateful_step_count=40)


def test_a_payload_takes_whole_pages() -> None:
    assert [Slab.slot_bytes_for(length) for length in (0, 1, 4096, 4097, 1 << 20)] == [4096, 4096, 4096, 8192, 1 << 20]


@pytest.mark.parametrize("slot_bytes", range(4 * KIB, CHUNK * 3, 4 * KIB))
def test_a_region_wastes_less_than_an_eighth_or_is_as_short_as_it_can_be(slot_bytes: int) -> None:
    slab = Slab(CHUNK, 256)
    span = slab.span_for(slot_bytes)
    wasted = span * CHUNK % slot_bytes
    assert wasted * 8 <= span * CHUNK or span == -(-slot_bytes // CHUNK)


def test_a_slot_larger_than_all_chunks_is_never_given() -> None:
    slab = Slab(CHUNK, 2)
    assert slab.span_for(3 * CHUNK) == 0
    assert slab.allocate(3 * CHUNK) is None
    assert slab.free_slots(3 * CHUNK) == slab.regions_possible(3 * CHUNK) == 0


def test_a_class_that_starves_takes_an_empty_region_of_another() -> None:
    slab = Slab(CHUNK, 2)
    small = slab.allocate_many(4 * KIB, 100)
    assert len(small) == 32
    assert slab.allocate(64 * KIB) is None
    for offset in small[:16]:
        slab.free(offset)
    large = slab.allocate(64 * KIB)
    assert large == 0
    assert slab.allocate(64 * KIB) is None
    assert slab.region_count(4 * KIB) == slab.region_count(64 * KIB) == 1
    slab.check_integrity()


def test_after_a_change_of_size_the_other_class_reaches_nine_tenths_of_the_capacity() -> None:
    slab = Slab(CHUNK, 64)
    for offset in slab.allocate_many(12 * KIB, 10_000):
        slab.free(offset)
    assert sum(20 * KIB for _ in slab.allocate_many(20 * KIB, 10_000)) >= 0.9 * slab.capacity_bytes


def test_one_used_slot_keeps_its_region() -> None:
    slab = Slab(CHUNK, 1)
    kept, *others = slab.allocate_many(4 * KIB, 16)
    for offset in others:
        slab.free(offset)
    assert slab.allocate(64 * KIB) is None
    assert slab.clearing(kept, 64 * KIB) == (0,)
    with pytest.raises(AssertionError):
        slab.release(slab.region_of(kept))


def test_clearing_names_the_regions_with_the_least_in_use() -> None:
    slab = Slab(CHUNK, 4)
    full = slab.allocate_many(16 * KIB, 4)
    (single,) = slab.allocate_many(16 * KIB, 1)
    assert slab.clearing(single, 64 * KIB) == (slab.region_of(single).first_chunk,)
    wide = slab.clearing(single, 128 * KIB)
    assert slab.region_of(full[0]).first_chunk not in wide


def test_freeing_a_free_slot_or_what_is_no_slot_is_our_own_bug() -> None:
    slab = Slab(CHUNK, 1)
    first, _second = slab.allocate_many(8 * KIB, 2)
    slab.free(first)
    for wrong in (first, 4 * KIB):
        with pytest.raises(AssertionError):
            slab.free(wrong)
    slab.check_integrity()


def test_the_owner_of_a_slot_is_forgotten_when_it_is_freed() -> None:
    slab = Slab(CHUNK, 1)
    (offset,) = slab.allocate_many(4 * KIB, 1)
    slab.set_owner(offset, 7)
    slab.free(offset)
    assert slab.allocate(4 * KIB) == offset
    assert list(slab.owners(0)) == [NOBODY]
    assert slab.owner_at(offset + 1) == slab.owner_at(100 * CHUNK) == NOBODY


def test_a_restored_region_holds_what_it_held() -> None:
    slab = Slab(CHUNK, 8)
    region = slab.restore(3, 20 * KIB, slab.span_for(20 * KIB))
    slab.mark_used(region, array("I", [0, 2]))
    assert list(region.used_offsets()) == [3 * CHUNK, 3 * CHUNK + 40 * KIB]
    assert 3 * CHUNK not in slab.allocate_many(20 * KIB, region.slots - 2)
    slab.check_integrity()
    with pytest.raises(AssertionError):
        slab.mark_used(region, array("I", [2]))
    with pytest.raises(AssertionError):
        slab.restore(3, 4 * KIB, 1)


def test_chunks_beyond_the_limit_are_our_own_bug() -> None:
    slab = Slab(CHUNK, 1, 2)
    slab.add_chunks(1)
    with pytest.raises(AssertionError):
        slab.add_chunks(1)
