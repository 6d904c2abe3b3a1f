"""Why an engine's cache can't be shared."""

from __future__ import annotations


class Unsupported(Exception):
    """An engine whose KV is not stored: to it the store is a cache that always misses."""
