"""The view of the pool: what sources tell, what becomes of it, and members that come and go all the time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.clock import ManualClock
from kvstore.runs import RunKey
from kvstored.remote import members as module
from kvstored.remote.members import FLAP_HOLD_S, FLAP_HOLD_S_MAX, FLAP_WINDOW_S, Address, Health, Member, Members

GIB = 1 << 30


def member(name: str, boot: bytes = b"1", **changed: object) -> Member:
    """Return a member of 64 GiB."""
    return replace(Member(name, Address("127.0.0.1", 9470), boot, 64 * GIB), **changed)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def members(clock: ManualClock) -> Members:
    return Members(member("own"), clock.monotonic_s)


def live(members: Members) -> set[str]:
    return set(members.view.placement.weights)


def test_this_daemon_is_a_member_before_anybody_else_is_known(members: Members) -> None:
    assert live(members) == {"own"}
    assert not members.view.is_current
    members.remove("own")
    members.join(member("own", b"another's"))
    assert members.view.members["own"].boot_id == b"1"


def test_a_view_stays_as_it_is_when_members_change(members: Members) -> None:
    members.join(member("a"))
    before = members.view
    members.join(member("b"))
    members.remove("a")
    assert set(before.members) == {"own", "a"}
    assert set(members.view.members) == {"own", "b"}
    assert members.view.number == before.number + 2
    with pytest.raises(TypeError):
        before.members["c"] = member("c")  # type: ignore[index]


def test_what_is_told_again_makes_no_new_view(members: Members) -> None:
    members.join(member("a"))
    before = members.view
    members.join(member("a"))
    members.remove("nobody")
    members.settle()
    assert members.view is before


def test_a_change_of_health_alone_keeps_the_placement_of_the_others(members: Members) -> None:
    members.join(member("a"))
    before = members.view.placement
    members.source_answers(True)
    members.join(member("a", address=Address("127.0.0.2", 1)))
    assert members.view.placement is before, "homes that were worked out stay worked out"


def test_leaving_and_foreign_members_are_seen_and_are_nobodys_home(members: Members) -> None:
    members.join(member("a", is_leaving=True))
    members.join(member("b", protocol=(module.PROTOCOL[1] + 1, module.PROTOCOL[1] + 3)))
    members.join(member("c", protocol=(0, 99)))
    assert {name: found.health for name, found in members.view.members.items()} == {
        "own": Health.LIVE, "a": Health.LEAVING, "b": Health.FOREIGN, "c": Health.LIVE,
    }  # fmt: skip
    assert live(members) == {"own", "c"}
    assert {members.view.placement.homes(RunKey(key << 58))[0] for key in range(64)} == {"own", "c"}


def test_a_member_that_comes_too_often_is_held_back_longer_each_time(members: Members, clock: ManualClock) -> None:
    waits: list[float] = []
    for _ in range(12):
        members.join(member("a"))
        due_s = members.next_due_s()
        waits.append(0.0 if due_s is None else due_s - clock.monotonic_s())
        assert (members.view.members["a"].health is Health.UNSTEADY) == (waits[-1] > 0)
        clock.advance(1)
        members.remove("a")
    assert waits[:3] == [0, 0, 0]
    assert waits[3:6] == [FLAP_HOLD_S, 2 * FLAP_HOLD_S, 4 * FLAP_HOLD_S]
    assert max(waits) == FLAP_HOLD_S_MAX


def test_a_member_that_was_held_back_is_admitted_when_it_has_stayed(members: Members, clock: ManualClock) -> None:
    for _ in range(4):
        members.remove("a")
        members.join(member("a"))
    assert live(members) == {"own"}
    clock.advance(FLAP_HOLD_S)
    members.settle()
    assert live(members) == {"own", "a"}
    clock.advance(2 * FLAP_WINDOW_S)
    members.remove("a")
    members.join(member("a"))
    assert live(members) == {"own", "a"}, "and after a while it is taken for steady again"


def test_daemons_that_restart_now_and_then_are_never_held_back(members: Members, clock: ManualClock) -> None:
    for boot in range(20):
        members.join(member("a", b"%d" % boot))
        assert live(members) == {"own", "a"}
        clock.advance(FLAP_WINDOW_S / 2)


def test_a_removal_that_is_not_believed_yet_is_undone_by_a_return(members: Members, clock: ManualClock) -> None:
    members.join(member("a"))
    members.join(member("b"))
    before = members.view
    for name in ("a", "b"):
        members.remove(name, not_before_s=clock.monotonic_s() + 10)
    clock.advance(5)
    members.join(member("a"))
    members.settle()
    assert members.view is before
    clock.advance(5)
    members.settle()
    assert live(members) == {"own", "a"}


def test_members_beyond_the_limit_are_left_out(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMBERS_MAX", 3)
    for name in "abcdef":
        members.join(member(name))
    assert set(members.view.members) == {"own", "a", "b"}
    members.join(member("a", b"2"))
    assert members.view.members["a"].boot_id == b"2"


def test_who_waits_for_a_change_is_told_of_the_newest_view(members: Members) -> None:
    async def main() -> None:
        waiting = asyncio.ensure_future(members.changed(members.view.number))
        await asyncio.sleep(0)
        assert not waiting.done()
        members.join(member("a"))
        members.join(member("b"))
        assert set((await waiting).members) == {"own", "a", "b"}
        assert (await members.changed(0)) is members.view

    asyncio.run(main())


def test_a_changed_description_of_this_daemon_shows(members: Members) -> None:
    members.update_own(member("own", capacity_bytes=128 * GIB))
    assert members.view.placement.weights == {"own": 128 * GIB}


@pytest.mark.parametrize(
    ("address", "text"), [(Address("10.0.0.1", 5), "10.0.0.1:5"), (Address("fd00::1", 5), "[fd00::1]:5")]
)
def test_an_address_is_written_as_it_is_read(address: Address, text: str) -> None:
    assert str(address) == text
