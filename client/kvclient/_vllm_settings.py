"""What an operator may say in `kv_connector_extra_config`: its keys, their defaults and limits.

Invariants
1. An unknown key, and a value of the wrong kind or out of its range, is refused with a text that names what is allowed.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvstore.errors import BadSetting, UnknownSetting, UsageError

_TTL_S_MAX = 1e9


class Load(enum.Enum):
    """When blocks that the store has are loaded."""

    ASYNC = "async"  # between steps: the request waits, the others go on
    SYNC = "sync"  # within the step, before its forward pass


class Store(enum.Enum):
    """When blocks that a step has computed are stored."""

    BACKGROUND = "background"  # in a thread, out of the engine's pages, which are kept until then
    SYNC = "sync"  # within the step, after its forward pass
    LAYERWISE = "layerwise"  # each layer is copied aside as soon as it is computed, and stored in a thread


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one connector.

    Parameters
    ----------
    socket : str, optional
        The daemon's socket; else $KVSTORED_SOCKET, else the default path.
    load, store
        See `Load` and `Store`.
    revision : str
        Names the weights instead of the repository's commit or a digest of the files.
    salt : str
        Separates engines that must not share blocks.
    ttl_s : float, optional
        How long blocks live that this engine stores.
    lookup_budget_ms, load_timeout_ms, store_timeout_ms : float
        How long an answer to "what is there?", a load, a store may take; what is not there by then is a miss, computed
        by the engine, or not stored.
    wait_timeout_ms : float, optional
        The most that a request waits for a prefill that it is told is under way; else as long as a load may take.
    """

    socket: str | None = None
    load: Load = Load.ASYNC
    store: Store = Store.BACKGROUND
    revision: str = ""
    salt: str = ""
    ttl_s: float | None = None
    lookup_budget_ms: float = 50.0
    load_timeout_ms: float = 2_000.0
    store_timeout_ms: float = 5_000.0
    wait_timeout_ms: float | None = None

    @property
    def longest_wait_s(self) -> float:
        """The most that a request waits for its prefill."""
        return (self.load_timeout_ms if self.wait_timeout_ms is None else self.wait_timeout_ms) / 1e3


_NUMBERS = {
    "ttl_s": (0.001, _TTL_S_MAX),
    "lookup_budget_ms": (0.1, 60_000.0),
    "load_timeout_ms": (1.0, 600_000.0),
    "store_timeout_ms": (1.0, 600_000.0),
    "wait_timeout_ms": (1.0, 3_600_000.0),
}
_CHOICES: dict[str, type[Load] | type[Store]] = {"load": Load, "store": Store}
KEYS = ("socket", "load", "store", "revision", "salt", *_NUMBERS)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings that an extra config states."""
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownSetting(f"kv_connector_extra_config has no {key!r}: {hint}known are {', '.join(KEYS)}")
    return Settings(**{key: _value(key, value) for key, value in given.items()})


def check_load(load: Load, depth: int) -> None:
    """Raise UsageError if vLLM would compute on from a load within a step before it hears that it failed.

    It discards the output of that step alone: what a step that it had already planned says (with async scheduling or
    pipeline stages, `depth` over 1) is computed from garbage and goes to the client.
    """
    if load is Load.SYNC and depth > 1:
        raise UsageError(
            f"load is sync, and this engine plans {depth} steps ahead: the second is computed before a failed load is "
            "known, and its token would be wrong. Use load async, or start vLLM with --no-async-scheduling and without "
            "pipeline stages"
        )


def _value(key: str, value: object) -> Any:
    if key in _CHOICES:
        kind = _CHOICES[key]
        allowed = [cast("str", choice.value) for choice in kind]
        if value not in allowed:
            raise BadSetting(f"{key} is one of {', '.join(allowed)}, not {value!r}")
        return kind(value)
    if key in _NUMBERS:
        least, most = _NUMBERS[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise BadSetting(f"{key} is a number between {least:g} and {most:g}, not {value!r}")
        return float(value)
    if not isinstance(value, str) or (key == "socket" and not value):
        raise BadSetting(f"{key} is text, not {value!r}")
    return value
