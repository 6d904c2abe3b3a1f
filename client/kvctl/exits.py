"""Exit codes, and which error ends with which."""

from __future__ import annotations

import enum

from kvstore.errors import (
    Closing,
    DeadlineExceeded,
    KVStoreError,
    LeaseExpired,
    NotPermitted,
    PeerUnreachable,
    UsageError,
)


class Exit(enum.IntEnum):
    """What kvctl ends with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


def exit_of(error: KVStoreError) -> Exit:
    """Return the code for an error that ended a verb."""
    if isinstance(error, (PeerUnreachable, DeadlineExceeded, Closing)):
        return Exit.UNREACHABLE
    if isinstance(error, UsageError) and not isinstance(error, (NotPermitted, LeaseExpired)):
        return Exit.USAGE
    return Exit.FAILED
