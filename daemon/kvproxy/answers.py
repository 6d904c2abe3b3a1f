"""What the proxy says itself, in the shape of OpenAI's API, and which headers pass it.

Invariants
1. Headers of one hop (RFC 9110, 7.6.1), those that `Connection` names too, never pass; nor do lengths and framings,
   which the sending side writes anew.
2. An identity that is not plain text of modest length is replaced, so that no log and no worker sees what was in it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping

import msgspec
from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.errors import UnavailableError

REQUEST_ID = "X-Request-Id"
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length",
})  # fmt: skip
# The client's wish for a compressed answer would hide events from us, and 100-continue is answered here.
_NOT_FOR_WORKERS = _HOP_BY_HOP | {"host", "accept-encoding", "expect", "x-request-id"}
_IDENTITY = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Refusal(UnavailableError):
    """The proxy answers by itself that a request will not be served.

    Attributes
    ----------
    status : int
        What HTTP calls it.
    kind : str
        What OpenAI's API calls it.
    why : str
        A label for metrics.
    """

    def __init__(self, status: int, kind: str, why: str, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind
        self.why = why
        self.retry_after_s = retry_after_s

    def response(self) -> web.Response:
        """Return the answer."""
        headers = {"Retry-After": str(max(1, round(self.retry_after_s)))} if self.retry_after_s > 0 else {}
        return web.Response(
            status=self.status, body=self.body(), headers=headers, content_type="application/json", charset="utf-8"
        )

    def body(self) -> bytes:
        """Return the error object."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """Return the event that ends a stream which has begun."""
        return b"event: error\ndata: " + self.body() + b"\n\n"


def for_worker(headers: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    """Return the headers that a worker gets."""
    passed = CIMultiDict(_passed(headers, _NOT_FOR_WORKERS))
    passed["Accept-Encoding"] = "identity"
    passed[REQUEST_ID] = request_id
    return passed


def for_client(headers: Mapping[str, str], request_id: str) -> CIMultiDict[str]:
    """Return the headers that a client gets of a worker's."""
    passed = CIMultiDict(_passed(headers, _HOP_BY_HOP))
    passed[REQUEST_ID] = request_id
    return passed


def identity_of(headers: Mapping[str, str]) -> str:
    """Return the request's identity: the client's if it is fit, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _IDENTITY.fullmatch(given) else secrets.token_hex(16)


def _passed(headers: Mapping[str, str], stopped: frozenset[str]) -> Iterator[tuple[str, str]]:
    named = {
        name.strip().lower()
        for key, value in headers.items()
        if key.lower() == hdrs.CONNECTION.lower()
        for name in value.split(",")
    }
    for name, value in headers.items():
        if name.lower() not in stopped and name.lower() not in named:
            yield name, value
