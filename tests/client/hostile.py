"""A peer that speaks the protocol as badly as a test wants."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvstore import wire
from tests.client.test_session import welcome

Answer = Callable[[socket.socket, wire.Request], None]


class BadDaemon:
    """Listens on a socket; `greet` answers each hello, `answer` each later request."""

    def __init__(self, directory: Path, greet: Answer, answer: Answer | None = None) -> None:
        self.socket = directory / "bad.sock"
        self._greet = greet
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.received: list[wire.Request] = []

    def __enter__(self) -> BadDaemon:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(sock)
            self._start(lambda sock=sock: self._serve(sock))  # type: ignore[misc]

    def _serve(self, sock: socket.socket) -> None:
        frames = wire.FrameBuffer()
        with sock:
            try:
                while received := sock.recv(1 << 16):
                    for body in frames.feed(received):
                        request = wire.decode_request(body)
                        self.received.append(request)
                        if isinstance(request, wire.Hello):
                            self._greet(sock, request)
                        elif self._answer is not None:
                            self._answer(sock, request)
            except OSError:
                return


def good_greeting(pool_bytes: int = 1 << 20, **changes: object) -> Answer:
    """Return a greeting as it should be, with a pool; `changes` are those of the welcome."""

    def greet(sock: socket.socket, request: wire.Request) -> None:
        message = wire.encode(welcome(pool_bytes=pool_bytes, **changes))
        send_with_fds(sock, message, [pool_bytes] if pool_bytes else [])

    return greet


def send_with_fds(sock: socket.socket, message: bytes | bytearray, sizes: list[int]) -> None:
    """Send `message` with a shared-memory file of each size."""
    fds = [os.memfd_create("bad") for _ in sizes]
    try:
        for fd, size in zip(fds, sizes, strict=True):
            os.ftruncate(fd, size)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([bytes(message)], ancillary)
    finally:
        for fd in fds:
            os.close(fd)
