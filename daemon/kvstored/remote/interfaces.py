"""The addresses of this machine's network interfaces, from getifaddrs and /sys; nothing is changed by looking."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_IFF_UP = 0x1
_IFF_RUNNING = 0x40
_SYS_NET = Path("/sys/class/net")
_V4_OFFSET, _V6_OFFSET = 4, 8  # of the address in sockaddr_in and sockaddr_in6


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One address of an interface; `is_up`: it is switched on and has a carrier."""

    interface: str
    address: IpAddress
    is_up: bool
    is_bridge: bool


class _IfAddrs(ctypes.Structure):
    # struct ifaddrs of <ifaddrs.h>
    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
        ("netmask", ctypes.c_void_p),
        ("broadcast", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    )

    next: int | None
    name: bytes
    flags: int
    address: int | None


_libc = ctypes.CDLL(None, use_errno=True)
_libc.getifaddrs.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
_libc.freeifaddrs.argtypes = (ctypes.c_void_p,)
_libc.freeifaddrs.restype = None


def interface_addresses() -> list[InterfaceAddress]:
    """Return every IPv4 and IPv6 address of this machine, in the kernel's order; empty if it can't be asked."""
    found: list[InterfaceAddress] = []
    with _listed() as at:
        while at:
            entry = _IfAddrs.from_address(at)
            address = _address(entry.address) if entry.address else None
            if address is not None:
                name = entry.name.decode(errors="replace")
                is_up = entry.flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING
                found.append(InterfaceAddress(name, address, is_up, (_SYS_NET / name / "bridge").is_dir()))
            at = entry.next or 0
    return found


def source_towards(host: str, port: int) -> IpAddress | None:
    """Return this machine's own address on the way to another; None: there is no way, or no such name.

    No packet is sent: a datagram socket that is connected has looked up its route, and that is all. A name is looked
    up, which may take as long as the resolver allows: not for the loop.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return ipaddress.ip_address(str(probe.getsockname()[0]).partition("%")[0])
    except OSError:
        return None


@contextmanager
def _listed() -> Generator[int, None, None]:
    first = ctypes.c_void_p()
    if _libc.getifaddrs(ctypes.byref(first)):
        yield 0
        return
    try:
        yield first.value or 0
    finally:
        _libc.freeifaddrs(first)


def _address(at: int) -> IpAddress | None:
    family = ctypes.c_ushort.from_address(at).value
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(at + _V4_OFFSET, 4))
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(at + _V6_OFFSET, 16))
    return None
