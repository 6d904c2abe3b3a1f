"""Where the daemon's unix socket is, the same answer for the daemon, the client and kvctl.

Invariants
1. Both ends reach a socket by one rule, from its path alone: no file, registry or message tells them where.
2. An address handed to the kernel never exceeds `SOCKET_PATH_BYTES_MAX`; a path that can not be shortened
   is refused with its length and the limit.
3. A directory under /tmp that another user could have made is never trusted.

A path over the limit is addressed through a descriptor of its directory, `/proc/self/fd/N/name`: the socket
still lies at its own path, so permissions, bind mounts and `ls` mean what they say.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import BadSetting, NotPermitted

SOCKET_PATH_BYTES_MAX = 107
SOCKET_VARIABLE = "KVSTORED_SOCKET"
SYSTEM_SOCKET = Path("/run/kvstored/kvstored.sock")
_DESCRIPTOR_PREFIX_BYTES = len("/proc/self/fd/2147483647/")


def default_socket_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return where a daemon of this user listens unless told otherwise.

    $KVSTORED_SOCKET; else in $XDG_RUNTIME_DIR; else /run/kvstored for root, /tmp/kvstored-UID for others.
    """
    if given := environ.get(SOCKET_VARIABLE):
        return Path(given).absolute()
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime).absolute() / "kvstored.sock"
    uid = os.getuid() if uid is None else uid
    return SYSTEM_SOCKET if uid == 0 else private_directory(uid) / "kvstored.sock"


def find_socket_path(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return where a client looks for the daemon: the default path, or the system's if only that exists."""
    path = default_socket_path(environ, uid)
    if not environ.get(SOCKET_VARIABLE) and not path.exists() and SYSTEM_SOCKET.exists():
        return SYSTEM_SOCKET
    return path


def check_socket_path(path: Path) -> None:
    """Raise BadSetting, with the length and the limit, if no address can be made for `path`."""
    name_bytes = len(os.fsencode(path.name))
    limit = SOCKET_PATH_BYTES_MAX - _DESCRIPTOR_PREFIX_BYTES
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX and name_bytes > limit:
        raise BadSetting(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, its last part {name_bytes}; "
            f"the address of a unix socket has at most {SOCKET_PATH_BYTES_MAX}"
            f": keep the path within that, or its last part within {limit}"
        )
    if not path.name or b"\0" in os.fsencode(path):
        raise BadSetting(f"the socket path {str(path)!r} names no file: give one such as {SYSTEM_SOCKET}")


@contextmanager
def socket_address(path: Path) -> Generator[str, None, None]:
    """Give the address to bind or connect to for `path`, valid inside the `with` block only.

    Raises
    ------
    BadSetting
        No address can be made for the path.
    NotPermitted
        The path is in a directory under /tmp that belongs to another user.
    OSError
        The directory of a long path can't be opened, as connect() itself would raise it.
    """
    check_socket_path(path)
    refuse_foreign_directory(path.parent)
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        yield os.fspath(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def make_socket_directory(path: Path) -> None:
    """Make the directory of `path` if it is one of the defaults; another is the operator's to make."""
    parent = path.parent
    try:
        if parent == SYSTEM_SOCKET.parent:
            parent.mkdir(mode=0o755, exist_ok=True)
        elif parent == private_directory():
            parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise BadSetting(
            f"the socket's directory {parent} can't be made ({exc.strerror}): make it or set another --socket"
        ) from exc
    refuse_foreign_directory(parent)


def refuse_foreign_directory(directory: Path) -> None:
    """Raise NotPermitted if `directory` is the default one under /tmp and others can write to it."""
    if directory != private_directory():
        return
    try:
        found = os.lstat(directory)
    except OSError:
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NotPermitted(
            f"{directory} is not a directory that only you (uid {os.getuid()}) can write to: whoever made it "
            f"could pose as the daemon. Remove it, or set {SOCKET_VARIABLE} to a path of your own"
        )


def is_default_directory(directory: Path) -> bool:
    """Return whether the daemon makes `directory` itself when it is missing."""
    return directory in (SYSTEM_SOCKET.parent, private_directory())


def private_directory(uid: int | None = None) -> Path:
    """Return the directory under /tmp that is a user's own by name, which proves nothing: anybody can make it."""
    return Path(f"/tmp/kvstored-{os.getuid() if uid is None else uid}")
