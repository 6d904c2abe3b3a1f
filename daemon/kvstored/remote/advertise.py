"""Which address of this machine the other members are told to connect to.

Theory of operation. What the operator names is taken as it is. Otherwise the kernel knows: the source address of the
route to etcd, or to the first peer, is one that others there can answer to. Where there is no route to ask for, the
only address that is left when those of no use to other machines are skipped is taken; of several, one that is public
inside the cluster at least, the first that the kernel names.

A choice is a guess until somebody has connected back. So a daemon that joins asks a member to (`connects`), and does
not join on an address that nobody reaches: members would wait for it at each fetch.

Choosing is pure, and apart from looking (`remote/interfaces.py`) and connecting.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import BadSetting, PeerUnreachable
from kvstored.remote.interfaces import InterfaceAddress, IpAddress
from kvstored.remote.members import Address

DIAL_BACK_S = 2.0
SETTING = "advertise"
# Ends of links into containers and the bridges between them: the same addresses on every machine.
_CONTAINERS = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|cilium|kube-|lxc|lxd|podman|nodelocaldns)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address of this machine, and why it is not advertised without being asked for; empty: it may be."""

    interface: str
    address: IpAddress
    skipped: str

    def __str__(self) -> str:
        return f"{self.address} ({self.interface}{': ' + self.skipped if self.skipped else ''})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The address to advertise, how it was come by, and what else there was."""

    address: Address
    why: str
    candidates: tuple[Candidate, ...]


def candidates(addresses: Sequence[InterfaceAddress]) -> tuple[Candidate, ...]:
    """Return all addresses of a machine, each with why it is skipped."""
    return tuple(Candidate(each.interface, each.address, _skipped(each)) for each in addresses)


def choose(
    explicit: str | None, port: int, addresses: Sequence[InterfaceAddress], towards_others: IpAddress | None
) -> Choice:
    """Return what to advertise.

    Parameters
    ----------
    explicit : str, optional
        What the operator set: a host or an address, without a port.
    port : int
        Where this daemon listens for peers.
    addresses : sequence of InterfaceAddress
        The machine's.
    towards_others : IPv4Address or IPv6Address, optional
        The source address of the route to etcd or a peer; None: unknown.

    Raises
    ------
    BadSetting
        There is no usable address; the text lists all, each with what speaks against it.
    """
    known = candidates(addresses)
    if explicit is not None:
        return Choice(Address(_explicit(explicit), port), "it is set", known)
    if towards_others is not None and not (towards_others.is_loopback or towards_others.is_link_local):
        return Choice(Address(str(towards_others), port), "it is this machine's on the way to the others", known)
    usable = [candidate for candidate in known if not candidate.skipped]
    if not usable:
        if towards_others is not None and towards_others.is_loopback:
            return Choice(Address(str(towards_others), port), "all members are on this machine", known)
        raise BadSetting(
            f"this machine has no address that others could reach ({_listed(known)}): set `{SETTING}` to the one that "
            "they can"
        )
    best = min(usable, key=lambda candidate: (not _is_routable(candidate.address), candidate.address.version))
    why = "it is the only one" if len(usable) == 1 else f"it is the first of {len(usable)}"
    return Choice(Address(str(best.address), port), why, known)


def unreachable(choice: Choice, by: str, why: str) -> PeerUnreachable:
    """Return the error for an advertised address that a member could not connect to."""
    return PeerUnreachable(
        f"{by} can't connect to this daemon at {choice.address} ({why}), which is advertised because {choice.why}: set "
        f"`{SETTING}` to an address of this machine that the others reach, and let them through to port "
        f"{choice.address.port}; this machine has {_listed(choice.candidates)}"
    )


async def connects(address: Address, deadline_s: float = DIAL_BACK_S) -> str | None:
    """Return why no connection to an address comes about, None if one does; it is closed at once."""
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"no answer in {deadline_s:g} s"
    except OSError as exc:
        return exc.strerror or str(exc)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def _skipped(each: InterfaceAddress) -> str:
    address = each.address
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.is_unspecified or address.is_multicast:
        return "no address of one machine"
    if not each.is_up:
        return "down"
    if _CONTAINERS.match(each.interface):
        return "for containers on this machine"
    return "a bridge" if each.is_bridge else ""


def _is_routable(address: IpAddress) -> bool:
    """Return whether an address is one that a data centre gives its machines, public or private."""
    return address.is_global or address.is_private


def _explicit(text: str) -> str:
    """Return a host as it is set, an IPv6 address without brackets."""
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host):
            raise BadSetting(
                f"`{SETTING}` is {text!r}: set it to a host name or an address, without a port"
            ) from None
        return host
    if address.is_unspecified or address.is_multicast:
        raise BadSetting(f"`{SETTING}` is {text}, which is no address of one machine: set one that the others reach")
    return str(address)


def _listed(known: Sequence[Candidate]) -> str:
    return ", ".join(map(str, known)) or "none"
