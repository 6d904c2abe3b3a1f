"""Who is at the other end of a unix socket: credentials from the kernel, and a pidfd that tells when the process ends.

The end of the process, not of the connection, is what frees memory that it may still write: a forked child can keep a
connection open, and a thread can still be copying after its connection was closed.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from kvstore.errors import NotPermitted
from kvstored.config import DEFAULT_TENANT, Settings

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_GROUPS_MAX = 65536  # the kernel's NGROUPS_MAX
_GROUP = struct.Struct("I")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """A client's process and what it may do. `pidfd` is -1 where the kernel gives none (the process can't be seen)."""

    pid: int
    uid: int
    gid: int
    pidfd: int
    tenant: str
    admin: bool

    @property
    def role(self) -> str:
        return "admin" if self.admin else "engine"


def identify(sock: socket.socket, settings: Settings) -> Peer:
    """Return who is at the other end of `sock`; the caller closes its `pidfd`.

    Raises
    ------
    NotPermitted
        Tenants are configured and this user belongs to none of them.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    gids = _groups(sock) | {gid}
    admin = settings.admins.include(uid, gids)
    tenant = next((name for name, who in settings.tenants.items() if who.include(uid, gids)), None)
    if tenant is None:
        if settings.tenants and not admin:
            raise NotPermitted(
                f"uid {uid} belongs to no tenant of this daemon: name it in the setting `tenant`, or use another user"
            )
        tenant = DEFAULT_TENANT
    return Peer(pid, uid, gid, _pidfd(sock, pid), tenant, admin)


def _groups(sock: socket.socket) -> frozenset[int]:
    """Return the supplementary groups of the other end."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_MAX * _GROUP.size)
    except OSError:
        return frozenset()
    return frozenset(group for (group,) in _GROUP.iter_unpack(raw))


def _pidfd(sock: socket.socket, pid: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass  # before Linux 6.5
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
