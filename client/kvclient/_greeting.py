"""How a connection begins: the socket, the hello, the answer and the file descriptors that come with it.

Invariants
1. However it ends, every descriptor that was received is either in the returned greeting or closed.
2. It ends by its deadline, whatever the daemon does or doesn't do, and however often it is to be tried.
"""

from __future__ import annotations

import array
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore import wire
from kvstore.errors import DeadlineExceeded, PeerUnreachable, RemoteProtocolError, from_wire
from kvstore.paths import socket_address

_FDS_MAX = 2
_RECEIVE_BYTES = 64 << 10
RETRIES_MAX = 1_000_000
_BACK_OFF_S_MIN = 0.01
_BACK_OFF_S_MAX = 1.0
_GREETING_S_MAX = 2.0


@dataclass(slots=True)
class Greeting:
    """A socket on which the daemon has said welcome, and the descriptors that it sent. The receiver owns both."""

    sock: socket.socket
    welcome: wire.Welcome
    fds: list[int]

    def close(self) -> None:
        """Close both."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


def greet_again(path: Path, client: str, deadline_at: float, retries: int) -> Greeting:
    """As `greet`, tried again up to `retries` times where nothing listens; the pauses double from 10 ms.

    Each attempt has 2 s, all of them and the pauses together end by the deadline.
    """
    pause_s = _BACK_OFF_S_MIN
    while True:
        try:
            return greet(path, client, min(deadline_at, time.monotonic() + _GREETING_S_MAX))
        except PeerUnreachable:
            retries -= 1
            if retries < 0 or time.monotonic() + pause_s >= deadline_at:
                raise
        time.sleep(pause_s)
        pause_s = min(_BACK_OFF_S_MAX, 2 * pause_s)


def greet(path: Path, client: str, deadline_at: float) -> Greeting:
    """Connect to the daemon at `path` and say hello.

    Raises
    ------
    PeerUnreachable
        Nothing listens there.
    DeadlineExceeded
        Something listens and did not answer in time.
    RemoteProtocolError
        What listens there does not speak this protocol.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        _connect(sock, path, deadline_at)
        hello = wire.Hello(1, wire.PROTOCOL_MIN, wire.PROTOCOL_MAX, client)
        sock.settimeout(_left_s(path, deadline_at))
        sock.sendall(wire.encode(hello))
        welcome = _welcome(sock, path, fds, deadline_at)
        if not wire.PROTOCOL_MIN <= welcome.protocol <= wire.PROTOCOL_MAX:
            raise RemoteProtocolError(
                f"the daemon at {path} speaks protocol {welcome.protocol}; this client speaks "
                f"{wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}: update the older of the two"
            )
        if not 0 < welcome.keys_max <= wire.KEYS_MAX or not welcome.window_bytes:
            raise RemoteProtocolError(f"the daemon at {path} announces limits that can't be: {welcome}")
        return Greeting(sock, welcome, fds)
    except BaseException as exc:
        sock.close()
        for fd in fds:
            os.close(fd)
        if isinstance(exc, TimeoutError):
            raise DeadlineExceeded(f"the daemon at {path} accepts, but does not answer: is it stopped?") from exc
        if isinstance(exc, OSError):
            raise PeerUnreachable(
                f"no daemon answers at {path} ({exc.strerror or exc}): start kvstored, or name its socket "
                "(KVSTORED_SOCKET)"
            ) from exc
        raise


def _connect(sock: socket.socket, path: Path, deadline_at: float) -> None:
    sock.settimeout(_left_s(path, deadline_at))
    try:
        with socket_address(path) as address:
            sock.connect(address)
    except BlockingIOError as exc:  # more connections wait to be accepted than the daemon allows
        raise TimeoutError from exc


def _welcome(sock: socket.socket, path: Path, fds: list[int], deadline_at: float) -> wire.Welcome:
    frames = wire.FrameBuffer()
    while True:
        sock.settimeout(_left_s(path, deadline_at))
        bodies = list(frames.feed(_receive(sock, path, fds)))
        if not bodies:
            continue
        reply = wire.decode_reply(bodies[0])
        if isinstance(reply, wire.Failure):
            raise from_wire(reply.code, reply.text)
        if not isinstance(reply, wire.Welcome) or reply.id != 1 or len(bodies) > 1 or frames.buffered_bytes:
            raise RemoteProtocolError(f"what listens at {path} did not answer the hello with a welcome")
        return reply


def _receive(sock: socket.socket, path: Path, fds: list[int]) -> bytes:
    """Return some bytes; descriptors that come with them are added to `fds`."""
    # Room for more descriptors than belong, so that a surplus is seen, received and closed.
    room = socket.CMSG_SPACE(4 * _FDS_MAX * array.array("i").itemsize)
    received, ancillary, flags, _ = sock.recvmsg(_RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    strange = False
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            some = array.array("i")
            some.frombytes(content[: len(content) - len(content) % some.itemsize])
            fds.extend(some)
        else:
            strange = True
    if flags & socket.MSG_CTRUNC and len(fds) < _FDS_MAX and not strange:
        raise PeerUnreachable(
            f"the daemon at {path} passed descriptors for which this process has no room: raise its limit (ulimit -n)"
        )
    if strange or flags & socket.MSG_CTRUNC or len(fds) > _FDS_MAX:
        raise RemoteProtocolError(f"what listens at {path} sent file descriptors that don't belong to a welcome")
    if not received:
        raise PeerUnreachable(f"the daemon at {path} hung up during the greeting: see its log")
    return received


def _left_s(path: Path, deadline_at: float) -> float:
    left_s = deadline_at - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded(f"the daemon at {path} did not answer the hello by the deadline")
    return left_s


