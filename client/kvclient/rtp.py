"""RTP-LLM's names for deadlines and retries, as aliases of settings of this project.

    settings = RtpSettings.from_env()
    with Client(**settings.client_arguments()) as client:
        blocks = client.namespace(namespace)
        blocks.fetch(hashes, into, **settings.fetch_arguments())

Who moves from RTP-LLM keeps the environment of the deployment. `ALIASES` has a row a name: its default there, what it
governs there and what it sets here; docs/rtp-llm.md says where they differ. kvproxy reads the same table.

Invariants
1. All faults of an environment are told at once, by a BadSetting that names each variable and what it takes.
2. A name that is not set has RTP-LLM's default; `given` tells it from one that is.
3. No value makes a call endless: each is a bound within a deadline, or ends by one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from kvstore.errors import BadSetting

Side = Literal["prefill", "decode"]

_TIMES_MAX = 1_000_000
_MS_MAX = 24 * 3600 * 1000
_SWITCH = {**dict.fromkeys(("1", "true", "yes", "on"), 1), **dict.fromkeys(("0", "false", "no", "off"), 0)}
# RTP-LLM's own answer to a load timeout of zero.
_LOAD_MS_IF_ZERO = 5000


@dataclass(frozen=True, slots=True)
class Alias:
    """One of RTP-LLM's names.

    `there` says what it governs in RTP-LLM, `here` what it sets; `unit` is "ms", "retries" or "switch".
    """

    name: str
    default: int
    unit: Literal["ms", "retries", "switch"]
    there: str
    here: str

    @property
    def value_max(self) -> int:
        """The largest value that is taken."""
        return {"ms": _MS_MAX, "retries": _TIMES_MAX, "switch": 1}[self.unit]

    def parse(self, text: str) -> int:
        """Return the value that `text` stands for.

        Raises
        ------
        BadSetting
            It stands for none; the text says what would.
        """
        if self.unit == "switch":
            value = _SWITCH.get(text.strip().lower())
            if value is None:
                raise BadSetting(f"{self.name}={text!r} is no switch: use 1 or 0, true or false")
            return value
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not 0 <= value <= self.value_max:
            what = "milliseconds" if self.unit == "ms" else "retries"
            raise BadSetting(f"{self.name}={text!r} must be a whole number of {what} from 0 to {self.value_max}")
        return value


ALIASES: tuple[Alias, ...] = (
    Alias(
        "LOAD_CACHE_TIMEOUT_MS",
        5000,
        "ms",
        "how long D loads the KV of a request from P, up to 100 ms more; then the request fails",
        "one absolute deadline of a load (`fetch(deadline_s=)`): what arrived is kept, the rest is recomputed",
    ),
    Alias(
        "DECODE_POLLING_KV_CACHE_STEP_MS",
        30,
        "ms",
        "how long D sleeps between two looks at whether a load is done",
        "nothing: the daemon tells who waits at once, nobody looks again",
    ),
    Alias(
        "RDMA_CONNECT_RETRY_TIMES",
        0,
        "retries",
        "how often a load whose connection failed is tried again, at once (TP 1 only)",
        "how often a connection is tried again (`Client(connect_retries=)`), with a back-off that doubles from 10 ms",
    ),
    Alias(
        "PREFILL_RETRY_TIMES",
        0,
        "retries",
        "how often P tries again to reach D and get memory there",
        "kvproxy: how many more P are tried; a store of P: 0 means not to wait for room",
    ),
    Alias(
        "PREFILL_RETRY_TIMEOUT_MS",
        0,
        "ms",
        "how long P tries so in all; 0: as long as the request may take",
        "kvproxy: how long P are tried in all; a store of P: how long it waits for room",
    ),
    Alias(
        "PREFILL_MAX_WAIT_TIMEOUT_MS",
        600_000,
        "ms",
        "how long a request may stand in P's queue before it runs; then it fails",
        "kvproxy: how long a request may wait for P; a load that waits for P's blocks: how long at most",
    ),
    Alias(
        "DECODE_RETRY_TIMES",
        100,
        "retries",
        "how often D tries again to get KV memory for a request, every millisecond",
        "kvproxy: how many more D are tried before the first byte; a store of D: 0 means not to wait for room",
    ),
    Alias(
        "DECODE_RETRY_TIMEOUT_MS",
        100,
        "ms",
        "how long D tries so in all; 0: as long as the request may take",
        "kvproxy: how long D are tried in all; a store of D: how long it waits for room",
    ),
    Alias(
        "DECODE_ENTRANCE",
        0,
        "switch",
        "D takes requests first, and calls P",
        "kvproxy: the D worker is the entry, it pulls; a load waits for blocks that P is still computing",
    ),
)


class ClientArguments(TypedDict):
    """Arguments of `Client` and `AsyncClient`."""

    deadline_s: float
    connect_retries: int


class FetchArguments(TypedDict):
    """Arguments of `fetch`."""

    deadline_s: float
    wait_s: float


class StoreArguments(TypedDict):
    """Arguments of `store`."""

    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RtpSettings:
    """The values of all aliases; `given` are the names that the environment sets.

    Times are as RTP-LLM has them, in milliseconds; what asks for seconds here gets seconds.
    """

    load_cache_timeout_ms: int
    decode_polling_kv_cache_step_ms: int
    rdma_connect_retry_times: int
    prefill_retry_times: int
    prefill_retry_timeout_ms: int
    prefill_max_wait_timeout_ms: int
    decode_retry_times: int
    decode_retry_timeout_ms: int
    decode_entrance: bool
    given: frozenset[str] = frozenset()

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> RtpSettings:
        """Return what an environment says, by default that of this process; an empty value is as none.

        Raises
        ------
        BadSetting
            Some values can't be; all of them are named.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, int] = {}
        given: set[str] = set()
        faults: list[str] = []
        for alias in ALIASES:
            text = environ.get(alias.name, "")
            values[alias.name] = alias.default
            if text.strip():
                given.add(alias.name)
                try:
                    values[alias.name] = alias.parse(text)
                except BadSetting as fault:
                    faults.append(str(fault))
        if faults:
            raise BadSetting("; ".join(faults))
        return RtpSettings(
            load_cache_timeout_ms=values["LOAD_CACHE_TIMEOUT_MS"] or _LOAD_MS_IF_ZERO,
            decode_polling_kv_cache_step_ms=values["DECODE_POLLING_KV_CACHE_STEP_MS"],
            rdma_connect_retry_times=values["RDMA_CONNECT_RETRY_TIMES"],
            prefill_retry_times=values["PREFILL_RETRY_TIMES"],
            prefill_retry_timeout_ms=values["PREFILL_RETRY_TIMEOUT_MS"],
            prefill_max_wait_timeout_ms=values["PREFILL_MAX_WAIT_TIMEOUT_MS"],
            decode_retry_times=values["DECODE_RETRY_TIMES"],
            decode_retry_timeout_ms=values["DECODE_RETRY_TIMEOUT_MS"],
            decode_entrance=bool(values["DECODE_ENTRANCE"]),
            given=frozenset(given),
        )

    @property
    def load_cache_timeout_s(self) -> float:
        """Seconds that a load may take in all."""
        return self.load_cache_timeout_ms / 1e3

    def client_arguments(self) -> ClientArguments:
        """Return the arguments of a client whose calls keep to these settings."""
        return {"deadline_s": self.load_cache_timeout_s, "connect_retries": self.rdma_connect_retry_times}

    def fetch_arguments(self) -> FetchArguments:
        """Return the arguments of a load.

        It waits for blocks that are not there yet only where D is the entry, and so is asked before P has them.
        """
        wait_ms = min(self.load_cache_timeout_ms, self.prefill_max_wait_timeout_ms) if self.decode_entrance else 0
        return {"deadline_s": self.load_cache_timeout_s, "wait_s": wait_ms / 1e3}

    def store_arguments(self, side: Side) -> StoreArguments:
        """Return the arguments of a store by a prefill or a decode engine: how long it waits for room."""
        times, timeout_ms = (
            (self.prefill_retry_times, self.prefill_retry_timeout_ms)
            if side == "prefill"
            else (self.decode_retry_times, self.decode_retry_timeout_ms)
        )
        return {"wait_s": (timeout_ms or self.load_cache_timeout_ms) / 1e3 if times else 0.0}
