"""Eviction decisions, pure: a policy is told of uses and names victims; it moves and frees nothing."""

from __future__ import annotations

from kvstore.policy.base import Policy
from kvstore.policy.lru import LeastRecentlyUsed

POLICIES: dict[str, type[LeastRecentlyUsed]] = {"lru": LeastRecentlyUsed}

__all__ = ["POLICIES", "LeastRecentlyUsed", "Policy"]
