"""The two life cycles: each pair of state and event is listed, or raises and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from kvstore.lifecycle import (
    COPY_TABLE,
    PUT_TABLE,
    Copy,
    CopyEvent,
    IllegalTransition,
    Put,
    PutEvent,
    next_copy,
    next_put,
)
from kvstore.table import NO_SLOT, BlockTable, Tier


@pytest.mark.parametrize(("state", "event"), [*itertools.product(Put, PutEvent)])
def test_a_put_moves_as_its_table_says_or_not_at_all(state: Put, event: PutEvent) -> None:
    if (state, event) in PUT_TABLE:
        assert next_put(state, event) is PUT_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=rf"{state.name}.*{event.name}"):
            next_put(state, event)


@pytest.mark.parametrize(("state", "event"), [*itertools.product(Copy, CopyEvent)])
def test_a_copy_moves_as_its_table_says_or_not_at_all(state: Copy, event: CopyEvent) -> None:
    if (state, event) in COPY_TABLE:
        assert next_copy(state, event) is COPY_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=rf"{state.name}.*{event.name}"):
            next_copy(state, event)


@pytest.mark.parametrize(("state", "event"), [*itertools.product(Copy, CopyEvent)])
def test_a_copy_in_the_table_keeps_its_state_when_an_event_is_refused(state: Copy, event: CopyEvent) -> None:
    table = BlockTable((Tier.CPU, Tier.SSD))
    (row,) = table.add_ready([bytes(32)], 0, Tier.CPU, [4096], [1], 1, 0.0)
    table.state[Tier.SSD][row] = state
    table.slot[Tier.SSD][row] = 8192
    before = table.residency[row]
    if (state, event) in COPY_TABLE:
        after = table.move(row, Tier.SSD, event)
        assert table.state[Tier.SSD][row] == after
        assert bool(table.residency[row] & Tier.SSD.bit) == (after is Copy.READY)
        assert (table.slot[Tier.SSD][row] == NO_SLOT) == (after is Copy.ABSENT)
    else:
        with pytest.raises(IllegalTransition):
            table.move(row, Tier.SSD, event)
        assert (table.state[Tier.SSD][row], table.slot[Tier.SSD][row], table.residency[row]) == (state, 8192, before)


def test_every_state_is_reached_and_left_and_every_event_has_a_use() -> None:
    assert {state for state, _ in PUT_TABLE} | {Put.SEALED} == set(PUT_TABLE.values()) == set(Put)
    assert {event for _, event in PUT_TABLE} == set(PutEvent)
    assert {state for state, _ in COPY_TABLE} == set(COPY_TABLE.values()) == set(Copy)
    assert {event for _, event in COPY_TABLE} == set(CopyEvent)


def test_a_slot_is_reusable_only_when_its_writer_or_its_tier_says_so() -> None:
    assert {pair for pair, after in PUT_TABLE.items() if after is Put.FREE} == {
        (Put.OPEN, PutEvent.FORFEIT),
        (Put.OVERDUE, PutEvent.ACKNOWLEDGE),
    }
    assert {pair for pair, after in COPY_TABLE.items() if after is Copy.ABSENT} == {
        (Copy.FILLING, CopyEvent.FAIL),
        (Copy.LEAVING, CopyEvent.GONE),
        (Copy.DELETING, CopyEvent.GONE),
    }


def test_what_is_overdue_is_never_sealed() -> None:
    reachable = {Put.OVERDUE}
    while more := {after for (state, _), after in PUT_TABLE.items() if state in reachable} - reachable - {Put.FREE}:
        reachable |= more
    assert Put.SEALED not in reachable


def test_an_illegal_transition_is_a_bug_of_ours_and_no_error_for_callers() -> None:
    assert issubclass(IllegalTransition, AssertionError)
