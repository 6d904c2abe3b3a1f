"""Every setting of the proxy: its names, its reader, its default, and what it is for, in one table.

Invariants
1. RTP-LLM's names stand behind our own variables and before the file; a value that loses is still read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from kvclient.rtp import ALIASES as RTP_ALIASES
from kvproxy.types import Endpoint, Role
from kvstore.errors import BadSetting
from kvstored import readers
from kvstored.readers import choice, duration, integer, size
from kvstored.tables import Alias, Option, Table

PREFIX = "KVPROXY_"
_option = functools.partial(Option, prefix=PREFIX)
TIER_SPEEDS = {"gpu": 4e6, "cpu": 400e3, "ssd": 60e3, "remote": 20e3}


def read_workers(role: Role) -> Callable[[Any], tuple[Endpoint, ...]]:
    """Return a reader of workers: URL or URL#NODE, several with commas between or as a list."""

    def read(given: Any) -> tuple[Endpoint, ...]:
        parts = list(cast("Iterable[Any]", given)) if isinstance(given, list) else [given]
        texts = [text.strip() for part in parts for text in str(part).split(",") if text.strip()]
        found = tuple(read_worker(text, role) for text in texts)
        for endpoint in found:
            if sum(other.url == endpoint.url for other in found) > 1:
                raise BadSetting(f"{endpoint.url} is named twice: name it once")
        return found

    return read


def read_worker(text: str, role: Role) -> Endpoint:
    """Return the worker that URL or URL#NODE names; its node is the host unless it is given."""
    try:
        split = urlsplit(text)
        port = split.port
    except ValueError as exc:
        raise BadSetting(f"{text!r} is no URL ({exc}): write http://HOST:PORT") from exc
    if split.scheme not in ("http", "https") or not split.hostname or split.query or split.username or port == 0:
        raise BadSetting(f"{text!r} is no worker: write http://HOST:PORT, or http://HOST:PORT#NODE")
    return Endpoint(text.partition("#")[0].rstrip("/"), role, split.fragment or split.hostname)


def read_speeds(given: Any) -> dict[str, float]:
    """Return tokens a second per tier, from cpu=400000,ssd=60000 or a table; tiers left out keep their default."""
    if isinstance(given, Mapping):
        pairs: list[tuple[str, Any]] = [(str(tier), value) for tier, value in cast("Mapping[str, Any]", given).items()]
    else:
        pairs = [(tier.strip(), value) for tier, _, value in (part.partition("=") for part in str(given).split(","))]
    found = dict(TIER_SPEEDS)
    for tier, value in pairs:
        if tier not in TIER_SPEEDS:
            raise BadSetting(f"there is no tier {tier!r}: write cpu=400000,ssd=60000")
        found[tier] = read_speed(value)
    return found


def read_speed(given: Any) -> float:
    """Return tokens a second."""
    try:
        speed = -1.0 if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        speed = -1.0
    if not 1 <= speed <= 1e12:
        raise BadSetting(f"{given!r} is not a number of tokens a second from 1 to 1e12: write one")
    return speed


def read_text(given: Any) -> str:
    """Return a short text."""
    if not isinstance(given, (str, int)) or isinstance(given, bool) or len(str(given)) > 4096:
        raise BadSetting(f"{given!r} is no text: write up to 4096 characters")
    return str(given)


OPTIONS = (
    _option(
        "listen", "HOST:PORT", readers.read_address,
        "where clients connect; a port alone means 127.0.0.1", "127.0.0.1:8100",
    ),
    _option(
        "prefill", "URL[#NODE],...", read_workers(Role.PREFILL),
        "prefill workers", default_text="none: decode workers do all", repeated=True,
    ),
    _option(
        "decode", "URL[#NODE],...", read_workers(Role.DECODE),
        "decode workers; at least one is needed", default_text="none", repeated=True,
    ),
    _option(
        "store", "SOCKET", readers.read_path,
        "the kvstored to ask what is cached", default_text="none: nothing is asked",
    ),
    _option(
        "namespace", "NAME", read_text,
        "the namespace of the engines: the start of its digest, or its model",
        default_text="the one of the request's model",
    ),
    _option(
        "tokenizer", "worker|off|DIR", read_text,
        "who turns prompts to tokens: the worker's /tokenize, nobody, or a tokenizer.json in DIR", "worker",
    ),
    _option(
        "block-hash", "NAME", choice("sha256", "sha256_cbor"),
        "the engines' --prefix-caching-hash-algo", "sha256",
    ),
    _option("hash-seed", "TEXT", read_text, "the engines' PYTHONHASHSEED", "vllm-none-hash"),
    _option(
        "hash-block-tokens", "N", integer(0, 65536),
        "the engines' block size where hashes are finer than stored blocks; 0: as stored", 0,
    ),
    _option(
        "admin", "HOST:PORT", readers.read_address,
        "where workers are added and drained; off: nowhere", "off",
    ),
    _option(
        "admin-token-file", "FILE", readers.read_path,
        "a file that holds the token of the admin port", default_text="none",
    ),
    _option(
        "entrance", "ROLE", choice("prefill", "decode"),
        "decode: D is asked at once and pulls what P computes meanwhile", "prefill",
    ),
    _option(
        "on-prefill-loss", "POLICY", choice("plain", "503"),
        "without any P: D does all by itself, or the request is refused", "plain",
    ),
    _option("prefill-retries", "N", integer(0, 1_000_000), "how many more P are tried", 1),
    _option(
        "prefill-retry-timeout", "DURATION", duration(0, 86400),
        "how long P are tried in all; 0: until the deadline", "0s",
    ),
    _option(
        "prefill-wait", "DURATION", duration(0, 86400),
        "how long a request may wait for all P that it tries; 0: until the deadline", "4m",
    ),
    _option(
        "decode-retries", "N", integer(0, 1_000_000),
        "how many more D are tried before the first byte", 1,
    ),
    _option(
        "decode-retry-timeout", "DURATION", duration(0, 86400),
        "how long D are tried in all; 0: until the deadline", "0s",
    ),
    _option(
        "deadline", "DURATION", duration(0.1, 86400),
        "the most a request may take, whatever its own deadline says", "10m",
    ),
    _option(
        "connect-timeout", "DURATION", duration(0.01, 300),
        "how long a connection to a worker may take", "2s",
    ),
    _option(
        "first-byte-timeout", "DURATION", duration(0.1, 86400),
        "how long D may be silent before its first byte", "5m",
    ),
    _option(
        "stall-timeout", "DURATION", duration(0.1, 86400),
        "how long D may be silent after its first byte", "60s",
    ),
    _option(
        "client-timeout", "DURATION", duration(0.1, 86400),
        "how long a client may send or take nothing", "60s",
    ),
    _option(
        "probe-interval", "DURATION", duration(0.05, 60),
        "how often a suspected worker's /health is asked", "1s",
    ),
    _option("probe-timeout", "DURATION", duration(0.05, 60), "how long /health may take", "2s"),
    _option("body-size", "SIZE", size(1024), "the largest request body", "32MiB"),
    _option(
        "bodies-size", "SIZE", size(1024),
        "the most that all request bodies may hold together", "512MiB",
    ),
    _option(
        "answer-size", "SIZE", size(1024),
        "up to this much of an answer that is no stream is kept until it is whole", "1MiB",
    ),
    _option("running-max", "N", integer(1, 1_000_000), "requests that run at a time", 256),
    _option(
        "waiting-max", "N", integer(0, 1_000_000),
        "requests that wait at a time; more are refused with 503", 1024,
    ),
    _option(
        "caller-waiting-max", "N", integer(0, 1_000_000),
        "requests of one caller that wait; more are refused with 429", 256,
    ),
    _option(
        "caller-header", "NAME", read_text,
        "a header that a gateway names callers by, for fairness", default_text="none: by API key, else by address",
    ),
    _option(
        "waiting-timeout", "DURATION", duration(0, 86400),
        "how long a request may wait before it runs", "30s",
    ),
    _option(
        "connections-max", "N", integer(1, 1_000_000),
        "client connections at a time", 4096,
    ),
    _option(
        "min-prefill-tokens", "N", integer(0, 1_000_000_000),
        "a prompt with fewer tokens to compute goes to D alone", 64,
    ),
    _option(
        "prefill-speed", "TOKENS/S", read_speed,
        "how fast a P prefills, until it was measured", 8000,
    ),
    _option("decode-speed", "TOKENS/S", read_speed, "how fast a D prefills", 8000),
    _option(
        "fetch-speed", "TIER=TOKENS/S,...", read_speeds,
        "how fast an engine fetches cached tokens from a tier", "cpu=400000,ssd=60000",
    ),
    _option(
        "tokenize-timeout", "DURATION", duration(0.01, 60),
        "how long tokenising may take; then the prompt's length is estimated", "1s",
    ),
    _option(
        "store-timeout", "DURATION", duration(0.001, 60),
        "how long the store may take; then nothing counts as cached", "250ms",
    ),
    _option(
        "drain-timeout", "DURATION", duration(0, 3600),
        "at SIGTERM, how long running requests may take", "30s",
    ),
    _option(
        "log-level", "LEVEL", choice("debug", "info", "warning", "error"),
        "least important line to log", "info",
    ),
    _option(
        "log-format", "FORMAT", choice("text", "json"),
        "one event a line, as key=value or a JSON object", "text",
    ),
)  # fmt: skip

_RTP_KEYS = {
    "PREFILL_RETRY_TIMES": "prefill-retries", "PREFILL_RETRY_TIMEOUT_MS": "prefill-retry-timeout",
    "PREFILL_MAX_WAIT_TIMEOUT_MS": "prefill-wait", "DECODE_RETRY_TIMES": "decode-retries",
    "DECODE_RETRY_TIMEOUT_MS": "decode-retry-timeout", "DECODE_ENTRANCE": "entrance",
}  # fmt: skip


def _rtp_aliases() -> tuple[Alias, ...]:
    def in_words(name: str) -> Callable[[str], Any]:
        theirs = next(alias for alias in RTP_ALIASES if alias.name == name)

        def words(text: str) -> Any:
            value = theirs.parse(text)
            if theirs.unit == "switch":
                return "decode" if value else "prefill"
            return f"{value}ms" if theirs.unit == "ms" else value

        return words

    return tuple(Alias(name, key, in_words(name)) for name, key in _RTP_KEYS.items())


TABLE = Table(
    "kvproxy",
    "Sends requests to prefill and decode workers that share a kvstored; speaks OpenAI's API.",
    ("prefill", "http://10.0.0.1:8000"),
    OPTIONS,
    _rtp_aliases(),
)
