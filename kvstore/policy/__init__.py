"""Eviction decisions, pure: a policy is told of uses and names victims; it moves and frees nothing."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.policy.base import Policy
from kvstore.policy.lru import LeastRecentlyUsed
from kvstore.policy.reuse import ReuseClasses

POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed, "reuse": ReuseClasses}

__all__ = ["POLICIES", "LeastRecentlyUsed", "Policy", "ReuseClasses"]
