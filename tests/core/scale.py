"""How many examples the property tests try: a few by default, many with KVT_STRESS=1 in the environment."""

from __future__ import annotations

import os

_FACTOR = 25 if os.environ.get("KVT_STRESS") else 1


def examples(count: int) -> int:
    """Return how many examples to try where `count` do by default."""
    return count * _FACTOR
