"""From `--remote URL` to a store. The libraries are loaded only for the kind that is asked for."""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kvstore.clock import Clock
from kvstore.errors import BadSetting
from kvstored.remote.guarded import Backend, Guarded

OBJECT_SCHEMES = ("s3", "gs", "az", "file")
REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys")


def check_url(url: str) -> str:
    """Return the URL if it names a kind of store that there is; raises BadSetting, whose text has no credentials."""
    parts = urlsplit(url)
    if parts.scheme not in OBJECT_SCHEMES + REDIS_SCHEMES:
        raise BadSetting(
            f"it begins with none of {', '.join(f'{scheme}://' for scheme in OBJECT_SCHEMES + REDIS_SCHEMES)}"
        )
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            raise BadSetting(f"{shown(url)} names no directory: write file:///DIRECTORY")
    elif not parts.netloc.rpartition("@")[2]:
        raise BadSetting(f"{shown(url)} names no {'bucket' if parts.scheme in OBJECT_SCHEMES else 'host'}")
    if parts.scheme in OBJECT_SCHEMES and ("@" in parts.netloc or parts.query):
        raise BadSetting(f"{shown(url)}: credentials and options of object stores come from the environment")
    return url


def shown(url: str) -> str:
    """Return a URL as it may be printed: without user and password, and without options unless it is a Redis's."""
    parts = urlsplit(url)
    options = f"?{parts.query}" if parts.query and parts.scheme in REDIS_SCHEMES else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{options}"


def default_writer(socket_path: Path) -> str:
    """Return a name for this daemon that is its own, and the same after a restart: its host's, and its socket's."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:100] or "host"
    return f"{host}-{zlib.crc32(str(socket_path).encode()):08x}"


def open_store(url: str, capacity_bytes: int, writer: str, clock: Clock, refresh_s: float) -> Guarded:
    """Return the store at `url`; nothing is asked of it yet, so it may be away now.

    Raises
    ------
    BadSetting
        The URL can't be understood, or the library for it is not installed; the text names the fix.
    """
    if urlsplit(check_url(url)).scheme in REDIS_SCHEMES:
        backend = _load("redis", lambda: _redis(url, capacity_bytes, clock))
    else:
        backend = _load("objects", lambda: _objects(url, capacity_bytes, writer, clock, refresh_s))
    return Guarded(backend, shown(url), clock)


def _load(extra: str, make: Callable[[], Backend]) -> Backend:
    try:
        return make()
    except ModuleNotFoundError as exc:
        raise BadSetting(
            f"this kind of remote store needs the package {exc.name}: pip install 'kvstored[{extra}]'"
        ) from exc


def _redis(url: str, capacity_bytes: int, clock: Clock) -> Backend:
    from kvstored.remote.redis import RedisBackend
    from kvstored.remote.redis_client import RedisPlace

    return RedisBackend(RedisPlace.read(url), capacity_bytes, clock)


def _objects(url: str, capacity_bytes: int, writer: str, clock: Clock, refresh_s: float) -> Backend:
    from kvstored.remote.bucket import Bucket
    from kvstored.remote.objects import ObjectsBackend

    return ObjectsBackend(Bucket(url), writer, capacity_bytes, clock, refresh_s=refresh_s)
