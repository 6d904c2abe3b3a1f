"""The two life cycles of the store, each an Enum and one table.

Theory of operation. A put is a position of a ticket: `reserve` opens it; `seal` makes its bytes a block; `forfeit`
gives it up. When its time is over the key is free for another writer, but the slot stays in quarantine, since its
writer may still be writing: only the writer's own word (`acknowledge`: a late seal or forfeit, or the end of its
process) frees it.

A block's copy in one tier is filled from another tier or adopted from a put, is then ready, and leaves by eviction,
expiry or drop. It is gone when nobody reads its slot any more and, on ssd, when its index entry's delete is durable.

Invariants
1. An event that a state doesn't list raises IllegalTransition and changes nothing.
2. A slot is reusable only in states FREE and ABSENT.
"""

from __future__ import annotations

import enum


class IllegalTransition(AssertionError):
    """A bug of ours: an event came in a state that can't have it."""


class Put(enum.IntEnum):
    """The life of one position of a ticket."""

    FREE = 0  # no slot, or given back
    OPEN = 1  # granted; its writer may write and seal
    OVERDUE = 2  # its time is over; its writer may still write: quarantine
    SEALED = 3  # its slot belongs to a block now


class PutEvent(enum.IntEnum):
    """What can happen to a put."""

    GRANT = 0
    SEAL = 1
    FORFEIT = 2
    EXPIRE = 3
    ACKNOWLEDGE = 4


PUT_TABLE: dict[tuple[Put, PutEvent], Put] = {
    (Put.FREE, PutEvent.GRANT): Put.OPEN,
    (Put.OPEN, PutEvent.SEAL): Put.SEALED,
    (Put.OPEN, PutEvent.FORFEIT): Put.FREE,
    (Put.OPEN, PutEvent.EXPIRE): Put.OVERDUE,
    (Put.OVERDUE, PutEvent.ACKNOWLEDGE): Put.FREE,
}


class Copy(enum.IntEnum):
    """The state of a block's copy in one tier."""

    ABSENT = 0
    FILLING = 1  # bytes are on their way into its slot
    READY = 2
    LEAVING = 3  # not to be found any more; whoever holds it may still read its slot
    DELETING = 4  # nobody holds it; its index entry is being deleted durably


class CopyEvent(enum.IntEnum):
    """What can happen to a copy."""

    FILL = 0
    FILLED = 1
    FAIL = 2
    ADOPT = 3
    LEAVE = 4
    DELETE = 5
    GONE = 6


COPY_TABLE: dict[tuple[Copy, CopyEvent], Copy] = {
    (Copy.ABSENT, CopyEvent.FILL): Copy.FILLING,
    (Copy.ABSENT, CopyEvent.ADOPT): Copy.READY,
    (Copy.FILLING, CopyEvent.FILLED): Copy.READY,
    (Copy.FILLING, CopyEvent.FAIL): Copy.ABSENT,
    (Copy.READY, CopyEvent.LEAVE): Copy.LEAVING,
    (Copy.LEAVING, CopyEvent.DELETE): Copy.DELETING,
    (Copy.LEAVING, CopyEvent.GONE): Copy.ABSENT,
    (Copy.DELETING, CopyEvent.GONE): Copy.ABSENT,
}


def next_put(state: int, event: PutEvent) -> Put:
    """Return the state of a put after `event`."""
    try:
        return PUT_TABLE[Put(state), event]
    except KeyError:
        raise IllegalTransition(f"a put that is {Put(state).name} can't {event.name}") from None


def next_copy(state: int, event: CopyEvent) -> Copy:
    """Return the state of a copy after `event`."""
    try:
        return COPY_TABLE[Copy(state), event]
    except KeyError:
        raise IllegalTransition(f"a copy that is {Copy(state).name} can't {event.name}") from None
