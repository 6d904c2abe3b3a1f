"""An object store's five requests, through obstore, with its errors in this project's words.

Credentials and endpoints come from the environment, by the names that each vendor's own tools use (AWS_*, GOOGLE_*,
AZURE_*); obstore reads them. It tries a request again by itself where that helps: throttling, 5xx, a dropped
connection, a few times with growing pauses, inside the caller's deadline.

Invariant: no text of an error holds a credential. Those come in headers, and in the query part of a URL, which is cut.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncGenerator, Generator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
import obstore.exceptions
import obstore.store

from kvstore.errors import Backpressure, BadSetting, TierUnavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
CONNECT_S = 2.0
REQUEST_S = 60.0  # a bound of the library's own; callers' deadlines are shorter
_LIST_AT_ONCE = 1000
_RETRIES_MAX = 4
_QUERY = re.compile(r"[?][^\s>\"')]*")
_THROTTLED = re.compile(r"\b(429|503)\b|SlowDown|TooManyRequests|ServerBusy", re.IGNORECASE)


class Gone(TierUnavailable):
    """The object does not exist, or not any more."""


class Bucket:
    """A place in an object store: names are relative to it."""

    def __init__(self, url: str) -> None:
        self.place = place_of(url)
        self.answers = 0
        try:
            self._store = _open(url)
        except (obstore.exceptions.BaseError, ValueError, OSError) as exc:
            raise BadSetting(f"{self.place} can't be used: {_told(exc)}") from exc

    async def put(self, name: str, content: bytes | bytearray) -> None:
        """Write an object; nobody sees a part of it."""
        with self._mapped():
            await obstore.put_async(self._store, name, content, use_multipart=False)

    async def get(self, name: str, start: int, end: int) -> memoryview:
        """Return bytes `start` to `end` of an object, fewer if it ends before; raises Gone if there is none."""
        with self._mapped():
            return memoryview(await obstore.get_range_async(self._store, name, start=start, end=end))

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is gone is no error."""
        for name in names if len(names) <= 2 else ():
            with contextlib.suppress(Gone), self._mapped():
                await obstore.delete_async(self._store, name)
        if len(names) > 2:
            with contextlib.suppress(Gone), self._mapped():
                await obstore.delete_async(self._store, list(names))

    async def written(self, name: str) -> datetime:
        """Return when an object was written, by the store's clock."""
        with self._mapped():
            return (await obstore.head_async(self._store, name))["last_modified"]

    async def list(self, prefix: str) -> AsyncGenerator[list[tuple[str, int, datetime]], None]:
        """Yield portions of name, size and time of writing of all objects below `prefix`."""
        with self._mapped():
            store: Any = self._store
            async for portion in store.list(prefix, chunk_size=_LIST_AT_ONCE):
                yield [(each["path"], each["size"], each["last_modified"]) for each in portion]

    @contextlib.contextmanager
    def _mapped(self) -> Generator[None, None, None]:
        try:
            yield
            self.answers += 1
        except FileNotFoundError as exc:
            self.answers += 1
            raise Gone(f"{self.place}: an object is gone") from exc
        except (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError) as exc:
            raise TierUnavailable(
                f"{self.place} refuses the credentials of the daemon's environment: {_told(exc)}"
            ) from exc
        except (obstore.exceptions.BaseError, OSError, ValueError) as exc:
            text = _told(exc)
            if _THROTTLED.search(text):
                raise Backpressure(f"{self.place} asks for fewer requests: {text}") from exc
            raise TierUnavailable(f"{self.place}: {text}") from exc


def place_of(url: str) -> str:
    """Return a URL without credentials and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _open(url: str) -> ObjectStore:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return obstore.store.from_url(url, mkdir=True)
    endpoints = [os.environ.get(f"{name}_ENDPOINT{tail}", "") for name in ("AWS", "AZURE") for tail in ("", "_URL")]
    options: Any = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
    }
    retries: Any = {
        "max_retries": _RETRIES_MAX,
        "retry_timeout": timedelta(seconds=REQUEST_S),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    config: Any = {}
    if parts.scheme == "s3" and not any(name in os.environ for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
        config = {"region": "us-east-1"}  # what stores that speak S3 and have no regions expect
    return obstore.store.from_url(url, config=config, client_options=options, retry_config=retries)


def _told(exc: BaseException) -> str:
    text = _QUERY.sub("?...", " ".join(str(exc).split("Debug source:")[0].split()))
    return text[:300] or type(exc).__name__
