"""The settings in effect, as the proxy sees them.

Invariants
1. Each size in Settings is in bytes and each time in seconds; no text is left to be read later.
2. All faults are told at once; settings that come out can be started with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvproxy.options import OPTIONS, TABLE
from kvproxy.types import Endpoint
from kvstored.sources import Fault, gather

TOKEN_VARIABLE = "KVPROXY_ADMIN_TOKEN"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the proxy is told, complete. docs/proxy.md says what each setting is for."""

    listen: tuple[str, int] = ("127.0.0.1", 8100)
    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
    store: Path | None = None
    namespace: str = ""
    tokenizer: str = "worker"
    block_hash: str = "sha256"
    hash_seed: str = "vllm-none-hash"
    hash_block_tokens: int = 0
    admin: tuple[str, int] | None = None
    admin_token_file: Path | None = None
    entrance: str = "prefill"
    on_prefill_loss: str = "plain"
    prefill_retries: int = 1
    prefill_retry_s: float = 0.0
    prefill_wait_s: float = 240.0
    decode_retries: int = 1
    decode_retry_s: float = 0.0
    deadline_s: float = 600.0
    connect_s: float = 2.0
    first_byte_s: float = 300.0
    stall_s: float = 60.0
    client_stall_s: float = 60.0
    probe_interval_s: float = 1.0
    probe_s: float = 2.0
    body_bytes_max: int = 32 << 20
    bodies_bytes_max: int = 512 << 20
    answer_bytes_max: int = 1 << 20
    running_max: int = 256
    waiting_max: int = 1024
    caller_waiting_max: int = 256
    caller_header: str | None = None
    waiting_s: float = 30.0
    connections_max: int = 4096
    min_prefill_tokens: int = 64
    prefill_tokens_per_s: float = 8000.0
    decode_tokens_per_s: float = 8000.0
    fetch_tokens_per_s: Mapping[str, float]
    tokenize_s: float = 1.0
    store_s: float = 0.25
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "text"


# The field of Settings that a key sets, where it isn't the key itself.
FIELDS = {
    "prefill-retry-timeout": "prefill_retry_s",
    "prefill-wait": "prefill_wait_s",
    "decode-retry-timeout": "decode_retry_s",
    "deadline": "deadline_s",
    "connect-timeout": "connect_s",
    "first-byte-timeout": "first_byte_s",
    "stall-timeout": "stall_s",
    "client-timeout": "client_stall_s",
    "probe-interval": "probe_interval_s",
    "probe-timeout": "probe_s",
    "body-size": "body_bytes_max",
    "bodies-size": "bodies_bytes_max",
    "answer-size": "answer_bytes_max",
    "waiting-timeout": "waiting_s",
    "prefill-speed": "prefill_tokens_per_s",
    "decode-speed": "decode_tokens_per_s",
    "fetch-speed": "fetch_tokens_per_s",
    "tokenize-timeout": "tokenize_s",
    "store-timeout": "store_s",
    "drain-timeout": "drain_s",
}


@dataclass(frozen=True, slots=True)
class Resolution:
    """The outcome of reading all settings. `settings` is None exactly if there are faults."""

    settings: Settings | None
    sources: Mapping[str, str]
    faults: tuple[Fault, ...]


def field_of(key: str) -> str:
    """Return the field of Settings that `key` sets."""
    return FIELDS.get(key, key.replace("-", "_"))


def resolve(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None = None, faults: tuple[Fault, ...] = ()
) -> Resolution:
    """Return the settings in effect, or everything that is wrong with what was given."""
    # The token is no setting: those are told in logs and reports.
    given = gather(flags, {name: text for name, text in environ.items() if name != TOKEN_VARIABLE}, config, TABLE)
    values = {option.key: option.read(option.default) for option in OPTIONS if option.default is not None}
    values |= given.values
    sources = {option.key: given.sources.get(option.key, "default") for option in OPTIONS}
    found = [*faults, *given.faults]

    def fault(key: str, problem: str) -> None:
        found.append(Fault(key, given.written.get(key), sources[key], problem))

    _check(values, given.values, {one.key for one in given.faults}, fault)
    if values.get("admin") and not values.get("admin-token-file") and not environ.get(TOKEN_VARIABLE, "").strip():
        fault("admin", f"the admin port needs a token: give --admin-token-file FILE, or ${TOKEN_VARIABLE}")
    if found:
        return Resolution(None, sources, tuple(found))
    known = {field.name for field in fields(Settings)}
    chosen = {field_of(key): value for key, value in values.items() if value is not None}
    assert chosen.keys() <= known, chosen.keys() - known
    return Resolution(Settings(**chosen), sources, ())


def _check(
    values: Mapping[str, Any], given: Mapping[str, Any], unread: set[str], fault: Callable[[str, str], None]
) -> None:
    """Tell what can't be in effect together."""
    if not values.get("decode") and not values.get("admin") and "decode" not in unread:
        fault("decode", "a decode worker is needed: give --decode http://HOST:PORT, or --admin to add some later")
    both = {one.url for one in values.get("prefill", ())} & {one.url for one in values.get("decode", ())}
    if both:
        fault("decode", f"{', '.join(sorted(both))} is prefill and decode worker: as the latter alone it does both")
    if "admin-token-file" in given and not values.get("admin"):
        fault("admin-token-file", "it has no effect without --admin HOST:PORT: remove it, or add that")
    if values["listen"] is None:
        fault("listen", "there is nothing to do without an address: write HOST:PORT")
    if values["body-size"] > values["bodies-size"]:
        fault("body-size", "one body may not be larger than all together: lower it, or raise --bodies-size")
    if values.get("store") is None:
        for key in ("namespace", "block-hash", "hash-seed", "hash-block-tokens", "fetch-speed", "store-timeout"):
            if key in given:
                fault(key, "it has no effect without --store SOCKET: remove it, or add that")
    if values.get("store") is not None and values["tokenizer"] == "off":
        fault("tokenizer", "the store is asked by tokens: leave it, or do without --store")
