"""An HTTP listener: bound to one address, bounded in connections, and silent on what its clients send.

Invariants
1. At most `connections_max` connections are held: more are closed at once, so that clients gone wild don't take the
   process's descriptors.
2. Of a malformed request nothing is logged but that there was one: aiohttp tells each as an error, with its bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvstore.errors import BadSetting, UnavailableError
from kvstored.logs import fields

_BACKLOG_MAX = 1024


@asynccontextmanager
async def serving(
    runner: web.AppRunner, address: tuple[str, int], key: str, connections_max: int
) -> AsyncGenerator[str, None]:
    """Serve inside the block; gives HOST:PORT as it is bound, which names the port chosen for port 0.

    `key` is the setting that the address comes from. Leaving the block, by cancellation too, closes the listener and
    every connection.

    Raises
    ------
    BadSetting
        The address is not one of this machine, or may not be bound.
    UnavailableError
        Something else listens there.
    """
    await runner.setup()
    try:
        with await _bound(address, key, min(connections_max, _BACKLOG_MAX)) as listener:
            server = await asyncio.get_running_loop().create_server(_bounded(runner, connections_max), sock=listener)
            try:
                yield _shown(*listener.getsockname()[:2])
            finally:
                server.close()
    finally:
        await runner.cleanup()


def quiet_logger(name: str) -> logging.Logger:
    """Return the logger of that name, for aiohttp: it tells no malformed request's bytes."""
    logger = logging.getLogger(name)
    logger.addFilter(_no_bytes)
    return logger


def _no_bytes(record: logging.LogRecord) -> bool:
    raised = record.exc_info[1] if record.exc_info else None
    if not isinstance(raised, HttpProcessingError):
        return True
    logging.getLogger(record.name).debug("a request is malformed", extra=fields(kind=type(raised).__name__))
    return False


def _bounded(runner: web.AppRunner, connections_max: int) -> Callable[[], asyncio.BaseProtocol]:
    server = runner.server
    assert server is not None  # set up just before

    def accept() -> asyncio.BaseProtocol:
        return _Refuse() if len(server.connections) >= connections_max else server()

    return accept


class _Refuse(asyncio.Protocol):
    """Closes the connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _bound(address: tuple[str, int], key: str, backlog: int) -> socket.socket:
    host, port = address
    where = f"{key} = {_shown(host, port)!r}"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, target = found[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    except (OSError, UnicodeError) as exc:  # the latter: no name can be written so
        raise BadSetting(f"{where}: {host} can't be resolved ({exc}): write an address of this machine") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            raise UnavailableError(
                f"{where}: port {port} is taken: stop what listens there (ss -ltnp), or choose another --{key} "
                "HOST:PORT"
            ) from exc
        raise BadSetting(
            f"{where} can't be bound ({os.strerror(exc.errno or 0)}): write an address of this machine and a port "
            "above 1023"
        ) from exc
    return listener


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
