"""One question to the daemon, one answer: all that kvctl needs of a connection.

Invariant: kvctl itself never repeats a question; an answer that does not come by the deadline is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import kvclient
from kvstore import wire
from kvstore.paths import find_socket_path

Progress = Callable[[int, int], None]


class Ask(Protocol):
    """Sends a request and returns what is in its reply; raises the error that a failure stands for.

    A Report gives its body, a Done {"count": n}, a Found {"hits": n, "outcomes": [names in lower case]}.
    """

    def __call__(
        self, request: wire.Message, *, deadline_s: float, progress: Progress | None = None
    ) -> dict[str, Any]: ...


@contextmanager
def connect(socket: str | None) -> Generator[tuple[Ask, str]]:
    """Give the way to ask the daemon at `socket` (None: where a daemon of this user listens), and the socket's path."""
    path = find_socket_path() if socket is None else Path(socket).absolute()
    with kvclient.Client(socket=path, strict=True, name="kvctl") as client:

        def ask(request: wire.Message, *, deadline_s: float, progress: Progress | None = None) -> dict[str, Any]:
            return client.admin(request, deadline_s=deadline_s, progress=progress)

        yield ask, str(path)
