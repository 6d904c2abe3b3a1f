"""What must be made anew in a forked child.

Invariants
1. The child sends nothing on the parent's sockets, and takes none of the parent's locks: it may have been forked while
   another thread held them.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that a forked child has to begin anew."""

    def after_fork(self) -> None: ...


_living: weakref.WeakSet[Forked] = weakref.WeakSet()


def register(thing: Forked) -> None:
    """Call `thing.after_fork()` in every child forked while it lives."""
    _living.add(thing)


def _in_child() -> None:
    for thing in list(_living):
        thing.after_fork()


os.register_at_fork(after_in_child=_in_child)
