"""The unix socket: binds it, greets whoever connects, hands over the pool, and watches over processes until they end.

The greeting happens on the raw socket, because a descriptor can only be passed there; then the event loop's transport
takes over. Descriptors that a client sends are never received: plain reads let the kernel close them.

Invariants
1. One daemon a socket: a live one is found by its lock and refused with TierLocked; a dead one's socket is replaced.
2. A greeting ends within `GREETING_S` and is small; at most `sessions_max` are under way, and as many sessions open.
3. A session's memory comes back when its process ends, even if a forked child keeps the connection open.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path

from kvstore import wire
from kvstore.errors import Backpressure, KVStoreError, RemoteProtocolError, TierLocked, UnavailableError
from kvstore.lease import Session
from kvstore.paths import socket_address
from kvstore.tiers.arena import Arena
from kvstored.connection import Connection
from kvstored.logs import fields
from kvstored.node import Node
from kvstored.peer import Peer, identify
from kvstored.service import Service

log = logging.getLogger("kvstored.server")

GREETING_S = 5.0
HELLO_BYTES_MAX = 64 << 10
_LOOK_AGAIN_S = 1.0
_NO_DESCRIPTOR_PAUSE_S = 0.5
_BACKLOG = 256
_SOCKET_MODE = 0o660


class Server:
    """Accepts connections until `close_listener`; `service` answers them."""

    def __init__(self, node: Node, service: Service) -> None:
        self._node = node
        self._settings = node.settings
        self._store = node.store
        self._service = service
        self._connections: set[Connection] = set()
        self._lock_fd = -1
        self._listener: socket.socket | None = None
        self._inode: tuple[int, int] | None = None
        self._greetings = 0  # under way

    # ---- the listening socket

    def bind(self) -> None:
        """Take the socket's path.

        Raises
        ------
        TierLocked
            Another daemon serves there.
        UnavailableError
            The path can't be bound; the text says why.
        """
        path = self._settings.socket
        self._lock_fd = _lock(path.with_name(path.name + ".lock"), path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            _remove_socket(path)
            with socket_address(path) as address:
                listener.bind(address)
            path.chmod(_SOCKET_MODE)
            listener.listen(_BACKLOG)
        except (OSError, KVStoreError) as exc:
            listener.close()
            self.close()
            if isinstance(exc, KVStoreError):
                raise
            raise UnavailableError(f"socket {path} can't be bound ({exc.strerror}): choose another --socket") from exc
        found = path.stat()
        self._inode = (found.st_dev, found.st_ino)
        self._listener = listener

    def listen(self) -> None:
        """Begin to accept."""
        assert self._listener is not None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close_listener(self) -> None:
        """Accept no more; connections go on."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def close_connections(self) -> None:
        """Close every connection, after what was written to it has been sent."""
        for connection in list(self._connections):
            connection.close()

    def close(self) -> None:
        """Remove the socket's file, if it is still ours, and let the path go."""
        path = self._settings.socket
        try:
            found = path.lstat()
            if (found.st_dev, found.st_ino) == self._inode:
                path.unlink()
        except OSError:
            pass  # somebody removed it already
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_BACKLOG):
            if self._greetings >= self._settings.sessions_max:
                self._pause_accepting(_NO_DESCRIPTOR_PAUSE_S)  # each is over within GREETING_S
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    log.warning("no descriptor for a new connection", extra=fields(fix="raise LimitNOFILE"))
                    self._pause_accepting(_NO_DESCRIPTOR_PAUSE_S)
                return
            sock.setblocking(False)
            self._greetings += 1
            self._node.spawn(self._serve(sock))

    def _pause_accepting(self, pause_s: float) -> None:
        """Let whoever connects wait in the kernel's queue for a moment."""
        assert self._listener is not None
        loop, listener = asyncio.get_running_loop(), self._listener
        loop.remove_reader(listener.fileno())

        def go_on() -> None:
            if self._listener is listener:
                self.listen()

        loop.call_later(pause_s, go_on)

    async def _serve(self, sock: socket.socket) -> None:
        """Greet one client and stay with its session until its process has no part in it any more."""
        pidfd = -1
        connection: Connection | None = None
        try:
            try:
                async with asyncio.timeout(GREETING_S):
                    # Hear it out even if it is refused: who is cut off in mid-sentence does not read why.
                    hello, early = await _read_hello(sock)
                    peer = identify(sock, self._settings)
                    pidfd = peer.pidfd
                    connection = await self._greet(sock, peer, hello, early)
            except KVStoreError as exc:
                _refuse(sock, exc)
            except (OSError, TimeoutError):
                pass  # it went away, or has nothing to say
            except Exception:  # a bug of ours: one client's greeting is not the daemon's end
                log.exception("a greeting met a bug")
            finally:
                self._greetings -= 1
                if connection is None:
                    sock.close()
            if connection is not None:
                await self._watch(connection, pidfd)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    async def _greet(self, sock: socket.socket, peer: Peer, hello: wire.Hello, early: list[bytes]) -> Connection:
        loop = asyncio.get_running_loop()
        if not hello.protocol_min <= wire.PROTOCOL_MAX or not hello.protocol_max >= wire.PROTOCOL_MIN:
            raise RemoteProtocolError(
                f"client speaks protocol {hello.protocol_min} to {hello.protocol_max}, this daemon "
                f"{wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}: update the older of the two"
            )
        if len(self._connections) >= self._settings.sessions_max:
            raise Backpressure(f"{self._settings.sessions_max} sessions are open: raise sessions-max")
        session = self._store.open_session(
            peer.tenant, admin=peer.admin, client=hello.client, process=peer.pid
        )
        arena: Arena | None = None
        try:
            descriptors: list[int] = []
            if hello.want_pool:
                descriptors.append(self._store.memory.fd)
                if self._settings.mode == "strict":
                    arena = Arena(self._settings.arena_bytes)
                    session.arena = arena
                    descriptors.append(arena.fd)
            welcome = self._service.welcome(hello, session, peer, arena)
            _send_with(sock, wire.encode(welcome), descriptors)
            connection = Connection(self._node, self._service, session, peer, early)
            await loop.connect_accepted_socket(lambda: connection, sock)
        except BaseException:
            self._end(session, gone=True)
            raise
        self._connections.add(connection)
        self._node.sessions.add(session)
        return connection

    async def _watch(self, connection: Connection, pidfd: int) -> None:
        """Return when the connection is over and its process has ended or said goodbye."""
        session = connection.session
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        if pidfd >= 0:
            loop.add_reader(pidfd, ended.set)
        try:
            first = [
                asyncio.ensure_future(connection.over.wait()),
                asyncio.ensure_future(ended.wait()),
            ]
            try:
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in first:
                    waiting.cancel()
            if ended.is_set():
                connection.close()
                self._store.end_session(session, gone=True)
            else:
                # Without a pidfd the end of the connection is all there is to go by.
                gone = connection.said_goodbye or pidfd < 0
                self._store.end_session(session, gone=gone)
                while not gone and not ended.is_set() and (session.leases or session.tickets):
                    # Copying leases end by time, so there may be nothing left to stay for.
                    try:
                        async with asyncio.timeout(_LOOK_AGAIN_S):
                            await ended.wait()
                    except TimeoutError:
                        pass
        finally:
            if pidfd >= 0:
                loop.remove_reader(pidfd)
            connection.close()
            self._connections.discard(connection)
            self._node.sessions.discard(session)
            self._end(session, gone=True)

    def _end(self, session: Session, *, gone: bool) -> None:
        self._store.end_session(session, gone=gone)
        if isinstance(session.arena, Arena):
            session.arena.close()


async def _read_hello(sock: socket.socket) -> tuple[wire.Hello, list[bytes]]:
    """Return the first message, which must be Hello, and what came behind it as frames of their own."""
    loop = asyncio.get_running_loop()
    frames = wire.FrameBuffer()
    while True:
        received = await loop.sock_recv(sock, 65536)
        if not received:
            raise ConnectionResetError("closed before its Hello")
        bodies = list(frames.feed(received))
        if bodies:
            break
        if frames.buffered_bytes >= wire.LENGTH_BYTES and wire.body_bytes(frames.rest()) > HELLO_BYTES_MAX:
            raise RemoteProtocolError(f"a connection begins with Hello, which has less than {HELLO_BYTES_MAX} bytes")
    hello = wire.decode_request(bodies[0])
    if not isinstance(hello, wire.Hello):
        raise RemoteProtocolError(f"a connection begins with Hello, not {type(hello).__name__}")
    early = [len(body).to_bytes(wire.LENGTH_BYTES, "little") + body for body in bodies[1:]]
    return hello, early + ([frames.rest()] if frames.buffered_bytes else [])


def _send_with(sock: socket.socket, frame: bytearray, descriptors: list[int]) -> None:
    """Send a small frame on a fresh socket, with descriptors beside its first byte."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sent = sock.sendmsg([frame], ancillary)
    if sent != len(frame):
        raise ConnectionResetError("the greeting did not fit into the socket's buffer")


def _refuse(sock: socket.socket, exc: KVStoreError) -> None:
    log.warning("a connection was refused", extra=fields(why=str(exc)))
    try:
        sock.send(wire.encode(wire.Failure(0, exc.code, str(exc))))
    except OSError:
        pass  # it went away meanwhile


def _remove_socket(path: Path) -> None:
    """Remove what a dead daemon left at `path`; anything but a socket is somebody's file and stays."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UnavailableError(f"{path} exists and is no socket: choose another --socket, or move it away")
    except FileNotFoundError:
        return
    path.unlink(missing_ok=True)


def _lock(lock_path: Path, path: Path) -> int:
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise UnavailableError(
            f"the socket's directory {path.parent} can't be written to ({exc.strerror}): "
            "make it, or choose another --socket"
        ) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise TierLocked(f"another kvstored (pid {owner}) serves {path}: stop it, or choose another --socket") from exc
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
