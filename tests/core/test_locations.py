"""Location records against a model of them, and the plan of what to announce against what homes must come to know."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.announcing import Announcements, AnnouncingLimits, Batch, Held
from kvstore.errors import UsageError
from kvstore.locations import HOLDERS_MAX, Holder, Locations, in_turn
from kvstore.placement import Placement
from kvstore.runs import RunKey
from tests.core.parts import hash_of, hashes_of
from tests.core.scale import examples

MEMBERS = ("a", "b", "c")
SCOPES = (b"one", b"two")
CPU, SSD = 2, 4


def locations(*members: str, records_max: int = 1000) -> Locations:
    """Return records of members whose boots are named "1"."""
    made = Locations(records_max)
    for member in members:
        made.welcome(member, b"1")
    return made


def announce(where: Locations, member: str, keys: Sequence[int], tiers: int = CPU, epoch: int = 0) -> int:
    return where.announce(member, b"1", b"ns", epoch, hashes_of(keys), bytes([tiers]) * len(keys))


def holders(where: Locations, key: int, epoch: int = 0) -> list[str]:
    (found,) = where.find(b"ns", epoch, [hash_of(key)])
    return [holder.member for holder in found]


# ---- a model


class LocationsMachine(RuleBasedStateMachine):
    """Any calls in any order; the model holds everything that may be found, as dicts."""

    def __init__(self, records_max: int = 10_000) -> None:
        super().__init__()
        self.locations = Locations(records_max)
        self.records_max = records_max
        self.boots: dict[str, bytes] = {}
        self.epochs: dict[bytes, int] = {}
        self.held: dict[tuple[bytes, int], dict[str, int]] = {}

    def forget(self, member: str) -> None:
        self.boots.pop(member, None)
        for found in self.held.values():
            found.pop(member, None)

    def begin_epoch(self, scope: bytes, epoch: int) -> None:
        if epoch > self.epochs[scope]:
            self.epochs[scope] = epoch
            self.held = {key: found for key, found in self.held.items() if key[0] != scope}

    @rule(member=st.sampled_from(MEMBERS), boot=st.sampled_from([b"1", b"2"]))
    def welcome(self, member: str, boot: bytes) -> None:
        self.locations.welcome(member, boot)
        if self.boots.get(member) != boot:
            self.forget(member)
        self.boots[member] = boot

    @rule(member=st.sampled_from(MEMBERS))
    def dismiss(self, member: str) -> None:
        self.locations.dismiss(member)
        self.forget(member)

    @rule(scope=st.sampled_from(SCOPES), epoch=st.integers(0, 3))
    def drop(self, scope: bytes, epoch: int) -> None:
        self.locations.drop(scope, epoch)
        if scope in self.epochs:
            self.begin_epoch(scope, epoch)

    @rule(
        member=st.sampled_from(MEMBERS),
        boot=st.sampled_from([b"1", b"2"]),
        scope=st.sampled_from(SCOPES),
        epoch=st.integers(0, 3),
        blocks=st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0, CPU, SSD, CPU | SSD])), max_size=6),
    )
    def announce(
        self, member: str, boot: bytes, scope: bytes, epoch: int, blocks: list[tuple[int, int]]
    ) -> None:
        hashes, tiers = hashes_of([key for key, _ in blocks]), bytes(each for _, each in blocks)
        noted = self.locations.announce(member, boot, scope, epoch, hashes, tiers)
        if self.boots.get(member) != boot or epoch < self.epochs.get(scope, 0):
            assert noted == 0
            return
        assert noted == len(blocks)
        self.epochs.setdefault(scope, epoch)
        self.begin_epoch(scope, epoch)
        for key, each in blocks:
            found = self.held.setdefault((scope, key), {})
            if each:
                found[member] = each
            else:
                found.pop(member, None)

    @rule(
        member=st.sampled_from(MEMBERS), boot=st.sampled_from([b"1", b"2"]), scope=st.sampled_from(SCOPES),
        epoch=st.integers(0, 3), key=st.integers(0, 8),
    )  # fmt: skip
    def correct(self, member: str, boot: bytes, scope: bytes, epoch: int, key: int) -> None:
        self.locations.correct(member, boot, scope, epoch, [hash_of(key)])
        if self.boots.get(member) == boot and self.epochs.get(scope) == epoch:
            self.held.get((scope, key), {}).pop(member, None)

    @rule(rows=st.integers(0, 5))
    def sweep(self, rows: int) -> None:
        self.locations.sweep(rows)

    @invariant()
    def what_is_found_is_what_was_announced(self) -> None:
        self.locations.check_integrity()
        assert len(self.locations) <= self.records_max
        assert self.locations.members == self.boots
        for scope in SCOPES:
            for epoch in range(4):
                for key, found in enumerate(self.locations.find(scope, epoch, hashes_of(range(9)))):
                    told = {holder.member: holder.tiers for holder in found}
                    assert all(holder.boot_id == self.boots[holder.member] for holder in found)
                    expected = self.held.get((scope, key), {}) if self.epochs.get(scope) == epoch else {}
                    self.compare(told, expected)

    def compare(self, told: dict[str, int], expected: dict[str, int]) -> None:
        assert told == expected


class SmallLocationsMachine(LocationsMachine):
    """With room for few records: what is found was announced, though not all of that is found."""

    def __init__(self) -> None:
        super().__init__(records_max=4)

    def compare(self, told: dict[str, int], expected: dict[str, int]) -> None:
        assert told.items() <= expected.items()


LocationsMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
SmallLocationsMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestLocations = LocationsMachine.TestCase
TestSmallLocations = SmallLocationsMachine.TestCase


# ---- records


def test_all_that_an_older_boot_announced_is_gone_at_once() -> None:
    where = locations("a", "b")
    announce(where, "a", range(500))
    announce(where, "b", range(10))
    where.welcome("a", b"2")
    assert holders(where, 3) == ["b"]
    assert holders(where, 100) == []
    assert announce(where, "a", range(500)) == 0, "what comes late from the older boot is not heard"
    assert where.counters.of_unknown_boots == 500
    assert len(where) == 500, "the rows are given back bit by bit"
    while where.sweep(7):
        where.check_integrity()
    assert len(where) == 10


def test_a_member_that_is_welcomed_again_with_the_same_boot_keeps_its_records() -> None:
    where = locations("a")
    announce(where, "a", [1])
    where.welcome("a", b"1")
    assert holders(where, 1) == ["a"]


def test_the_member_with_a_block_in_its_fastest_tier_is_named_first() -> None:
    where = locations("a", "b", "c")
    announce(where, "a", [1], SSD)
    announce(where, "b", [1], CPU | SSD)
    announce(where, "c", [1], SSD)
    assert holders(where, 1) == ["b", "a", "c"]
    announce(where, "b", [1], SSD)
    assert where.find(b"ns", 0, [hash_of(1)]) == [tuple(Holder(name, b"1", SSD) for name in ("a", "b", "c"))]


def test_those_who_ask_begin_with_different_holders_and_with_the_fastest_tier() -> None:
    where = locations(*(f"n{number}" for number in range(4)))
    for number in range(4):
        announce(where, f"n{number}", [1], SSD if number == 3 else CPU)
    (known,) = where.find(b"ns", 0, [hash_of(1)])
    orders = [in_turn(known, f"asker-{number}") for number in range(300)]
    assert all(order[-1].member == "n3" for order in orders)
    first = [order[0].member for order in orders]
    assert all(60 < first.count(f"n{number}") < 140 for number in range(3))
    assert in_turn(known, "asker-7") == orders[7]


def test_a_failed_fetch_corrects_one_record_of_one_member() -> None:
    where = locations("a", "b")
    announce(where, "a", [1, 2])
    announce(where, "b", [1])
    where.correct("a", b"1", b"ns", 0, [hash_of(1)])
    assert holders(where, 1) == ["b"]
    assert holders(where, 2) == ["a"]
    where.correct("a", b"1", b"ns", 0, [hash_of(1)])
    assert where.counters.corrected == 1


def test_a_failed_fetch_says_nothing_about_a_boot_that_came_since() -> None:
    where = locations("a")
    where.welcome("a", b"2")
    where.announce("a", b"2", b"ns", 0, hashes_of([1]), bytes([CPU]))
    where.correct("a", b"1", b"ns", 0, hashes_of([1]))
    assert holders(where, 1) == ["a"]


def test_a_newer_epoch_ends_the_records_of_older_ones() -> None:
    where = locations("a", "b")
    announce(where, "a", range(100), epoch=1)
    announce(where, "b", [5], epoch=2)
    assert holders(where, 5, epoch=1) == []
    assert holders(where, 5, epoch=2) == ["b"]
    assert announce(where, "a", [5], epoch=1) == 0
    assert where.counters.of_older_epochs == 1
    while where.sweep(1000):
        pass
    assert len(where) == 1


def test_records_never_exceed_their_limit_and_the_ones_in_use_stay() -> None:
    where = locations("a", records_max=100)
    announce(where, "a", range(100))
    for key in range(100, 1000):
        assert holders(where, 7) == ["a"]
        announce(where, "a", [key])
        assert len(where) <= 100
    where.check_integrity()
    assert holders(where, 7) == ["a"]
    assert holders(where, 999) == ["a"]
    assert where.counters.displaced == 900


def test_what_is_of_no_use_makes_room_before_what_is() -> None:
    where = locations("a", "b", records_max=60)
    announce(where, "a", range(30))
    announce(where, "b", range(100, 130))
    where.dismiss("a")
    announce(where, "b", range(130, 150))
    assert where.counters.displaced == 0
    assert all(holders(where, key) == ["b"] for key in range(100, 150))


def test_a_block_that_everybody_has_names_a_few_the_latest() -> None:
    names = [f"n{number:03}" for number in range(HOLDERS_MAX * 3)]
    where = locations(*names)
    for name in names:
        announce(where, name, [1])
    assert holders(where, 1) == names[-HOLDERS_MAX:]


def test_blocks_and_tiers_must_be_as_many() -> None:
    where = locations("a")
    with pytest.raises(UsageError, match="2 blocks"):
        where.announce("a", b"1", b"ns", 0, hashes_of([1, 2]), b"\x02")
    with pytest.raises(UsageError, match="room"):
        Locations(0)


def test_scopes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.locations.SCOPES_MAX", 3)
    where = locations("a")
    for number in range(5):
        where.announce("a", b"1", b"scope%d" % number, 0, hashes_of([1, 2]), bytes([CPU, CPU]))
    assert where.counters.over_the_limit == 4
    where.check_integrity()


# ---- what to announce, and when


class Blocks:
    """Blocks held, by number: a place in their order is the number."""

    def __init__(self, keys: Sequence[int] = ()) -> None:
        self.held = {key: held(key) for key in keys}

    def portion(self, cursor: int, count: int) -> tuple[Sequence[Held], int]:
        behind = sorted(key for key in self.held if key >= cursor)
        taken = behind[:count]
        return [self.held[key] for key in taken], behind[count] if len(behind) > count else 0


def held(key: int, tiers: int = CPU) -> Held:
    # Runs of four.
    return Held(b"ns", 0, RunKey(int.from_bytes(hash_of(key // 4)[:8], "little")), hash_of(key), tiers)


def plan(**limits: int) -> Announcements:
    return Announcements(AnnouncingLimits(**limits), 0.0)


def place(announcements: Announcements, *members: str, boots: dict[str, bytes] | None = None) -> Placement:
    placement = Placement(dict.fromkeys(members, 1 << 30))
    announcements.place(placement, dict.fromkeys(members, b"1") | (boots or {}))
    return placement


def told(batches: Sequence[Batch]) -> Told:
    return {
        (batch.member, block_hash): tiers
        for batch in batches
        for block_hash, tiers in zip(batch.hashes, batch.tiers, strict=True)
    }


Told = dict[tuple[str, bytes], int]  # member and block -> tiers


def settle(announcements: Announcements, blocks: Blocks, now_s: float = 0.0) -> tuple[Told, float]:
    """Return what is told until nothing waits, and the time at which that was."""
    known: Told = {}
    while not announcements.is_settled:
        due_s = announcements.next_s(now_s)
        assert due_s is not None
        now_s = max(now_s, due_s)
        known |= told(announcements.take(now_s, blocks))
    return known, now_s


def test_a_block_is_told_to_its_homes_in_its_newest_state() -> None:
    announcements = plan(copies=2)
    placement = place(announcements, *MEMBERS)
    announcements.note(held(1, CPU))
    announcements.note(held(1, CPU | SSD))
    announcements.note(held(1, SSD))
    known = told(announcements.take(0.0, Blocks()))
    assert known == {(home, hash_of(1)): SSD for home in placement.homes(held(1).run, 2)}
    assert announcements.is_settled
    assert announcements.next_s(0.0) is None


def test_what_a_change_of_members_moves_is_told_to_its_new_homes_alone() -> None:
    blocks = Blocks(range(4000))
    announcements = plan()
    before = place(announcements, *MEMBERS)
    settle(announcements, blocks)
    after = place(announcements, *MEMBERS, "d")
    known, _ = settle(announcements, blocks)
    moved = {key for key in blocks.held if before.homes(held(key).run) != after.homes(held(key).run)}
    assert known == {("d", hash_of(key)): CPU for key in moved}
    assert 700 < len(moved) < 1300


def test_a_home_that_has_started_anew_is_told_everything_again() -> None:
    blocks = Blocks(range(400))
    announcements = plan()
    placement = place(announcements, *MEMBERS)
    settle(announcements, blocks)
    place(announcements, *MEMBERS, boots={"b": b"2"})
    known, _ = settle(announcements, blocks)
    assert known == {("b", hash_of(key)): CPU for key in range(400) if placement.homes(held(key).run) == ("b",)}


def test_a_home_that_was_away_or_says_it_has_forgotten_is_told_everything_again() -> None:
    blocks = Blocks(range(400))
    announcements = plan()
    placement = place(announcements, *MEMBERS)
    everything, _ = settle(announcements, blocks)
    of_b = {told: tiers for told, tiers in everything.items() if told[0] == "b"}
    place(announcements, "a", "c")
    settle(announcements, blocks)
    place(announcements, *MEMBERS)
    assert settle(announcements, blocks)[0] == of_b
    announcements.forgotten_by("b")
    assert settle(announcements, blocks)[0] == of_b
    assert len(of_b) == sum(placement.homes(each.run) == ("b",) for each in blocks.held.values())


def test_what_is_noted_in_the_middle_of_a_pass_is_known_to_homes_that_come_back() -> None:
    blocks = Blocks(range(50))
    announcements = plan(per_second=10, batch_blocks=5)
    place(announcements, "a")
    _, now_s = settle(announcements, blocks)
    place(announcements, "a", "b")
    for key in range(1000, 1040):
        blocks.held[key] = held(key)
        announcements.note(held(key))
    known: Told = {}
    while announcements.waiting:
        known |= told(announcements.take(now_s, blocks))
    assert not announcements.is_settled
    place(announcements, "a")
    known |= settle(announcements, blocks, now_s)[0]
    assert {("a", hash_of(key)) for key in range(1000, 1040)} <= known.keys()


def test_blocks_are_told_again_at_a_bounded_rate_and_fresh_ones_at_once() -> None:
    blocks = Blocks(range(1000))
    announcements = plan(per_second=100, batch_blocks=64)
    place(announcements, "b")
    announcements.note(held(5000))
    first = told(announcements.take(0.0, blocks))
    assert ("b", hash_of(5000)) in first
    _, ended_s = settle(announcements, blocks)
    assert ended_s == pytest.approx((1000 - 100) / 100, abs=0.7)
    assert announcements.announced_again == 1000


def test_notes_that_nobody_takes_displace_the_oldest() -> None:
    announcements = plan(waiting_max=10)
    place(announcements, "b")
    settle(announcements, Blocks())
    for key in range(25):
        announcements.note(held(key))
    assert announcements.waiting == 10
    assert announcements.displaced == 15
    assert set(told(announcements.take(0.0, Blocks()))) == {("b", hash_of(key)) for key in range(15, 25)}


@settings(max_examples=examples(80))
@given(
    st.lists(st.integers(0, 120), max_size=60, unique=True),
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcde"), min_size=1),  # members
            st.dictionaries(st.sampled_from("abcde"), st.sampled_from([b"1", b"2", b"3"])),  # boots
            st.integers(0, 4),  # takes until the next change
            st.dictionaries(st.integers(0, 120), st.sampled_from([0, CPU, SSD]), max_size=5),  # changes of blocks
        ),
        max_size=6,
    ),
    st.integers(1, 2),
)
def test_however_members_change_all_homes_come_to_know_all_blocks(
    keys: list[int],
    changes: list[tuple[set[str], dict[str, bytes], int, dict[int, int]]],
    copies: int,
) -> None:
    blocks = Blocks(keys)
    announcements = plan(per_second=20, batch_blocks=7, copies=copies)
    homes = {name: Locations(10_000) for name in "abcde"}
    present: dict[str, bytes] = {}
    now_s = 0.0
    placement = Placement({})

    def send() -> None:
        for batch in announcements.take(now_s, blocks):
            if batch.member in present:
                home = homes[batch.member]
                home.announce("me", b"1", batch.scope, batch.epoch, batch.hashes, bytes(batch.tiers))

    for members, boots, takes, moves in [*changes, ({"a", "c"}, {}, 0, {})]:
        now_present = {name: boots.get(name, b"0") for name in members}
        for name in homes:
            if now_present.get(name) != present.get(name):
                homes[name] = Locations(10_000)
            homes[name].welcome("me", b"1")
        present = now_present
        placement = Placement(dict.fromkeys(members, 1 << 30))
        announcements.place(placement, present)
        for key, tiers in moves.items():
            if tiers:
                blocks.held[key] = held(key, tiers)
            else:
                blocks.held.pop(key, None)
            announcements.note(held(key, tiers))
        for _ in range(takes):
            now_s = max(now_s, announcements.next_s(now_s) or 0.0)
            send()
    while (due_s := announcements.next_s(now_s)) is not None:
        now_s = max(now_s, due_s)
        send()
    assert announcements.is_settled
    for key, each in blocks.held.items():
        for name in placement.homes(each.run, copies):
            (found,) = homes[name].find(b"ns", 0, [hash_of(key)])
            assert [holder.tiers for holder in found] == [each.tiers]
