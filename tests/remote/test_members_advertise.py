"""Which address is advertised: chosen from known interfaces, looked up on this machine, and tried from another host.

The other host is a network namespace joined by a pair of veth, so those tests need root.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import pytest

from kvstore.errors import BadSetting
from kvstored.remote.advertise import choose, connects, unreachable
from kvstored.remote.interfaces import InterfaceAddress, interface_addresses, source_towards
from kvstored.remote.members import Address
from tests.product import ROOT
from tests.remote.etcd_server import free_port

PORT = 9470


def at(interface: str, address: str, *, up: bool = True, bridge: bool = False) -> InterfaceAddress:
    return InterfaceAddress(interface, ipaddress.ip_address(address), up, bridge)


LOOPBACK = at("lo", "127.0.0.1")
DOCKER = at("docker0", "172.17.0.1", bridge=True)
ETHERNET = at("eth0", "10.0.0.5")
FABRIC = at("ib0", "10.9.0.5")
OF_NO_USE = [
    LOOPBACK, at("lo", "::1"), DOCKER, at("br-1f2e3d", "172.18.0.1", bridge=True), at("veth12ab", "169.254.1.1"),
    at("eth0", "fe80::1"), at("cni0", "10.244.0.1", bridge=True), at("eth1", "10.0.1.5", up=False),
    at("virbr0", "192.168.122.1"), at("br0", "192.168.1.2", bridge=True),
]  # fmt: skip


def chosen(
    *addresses: InterfaceAddress, explicit: str | None = None, towards: str | None = None
) -> str:
    source = None if towards is None else ipaddress.ip_address(towards)
    return choose(explicit, PORT, addresses, source).address.host


# ---- choosing


def test_what_is_set_is_taken_whatever_the_machine_has() -> None:
    assert chosen(ETHERNET, explicit="node-7.cluster.local", towards="10.0.0.5") == "node-7.cluster.local"
    assert chosen(ETHERNET, explicit="172.17.0.1") == "172.17.0.1"
    assert chosen(explicit="[fd00::7]") == "fd00::7"


@pytest.mark.parametrize("text", ["", "host:1", "a b", "0.0.0.0", "::", "224.0.0.1", "-x", "http://host"])
def test_what_is_set_must_name_one_machine(text: str) -> None:
    with pytest.raises(BadSetting, match="advertise"):
        chosen(ETHERNET, explicit=text)


def test_the_address_on_the_way_to_the_others_is_preferred_to_all() -> None:
    assert chosen(ETHERNET, FABRIC, towards="10.9.0.5") == "10.9.0.5"
    assert chosen(*OF_NO_USE, towards="192.168.1.2") == "192.168.1.2", "a bridge that leads out"


def test_addresses_that_are_of_no_use_to_other_machines_are_skipped() -> None:
    assert chosen(*OF_NO_USE, ETHERNET) == "10.0.0.5"
    assert chosen(*OF_NO_USE, at("eth0", "fd00::5")) == "fd00::5"
    assert chosen(ETHERNET, at("eth0", "fd00::5")) == "10.0.0.5"


def test_an_etcd_on_this_machine_says_nothing_about_the_way_to_others() -> None:
    assert chosen(LOOPBACK, ETHERNET, towards="127.0.0.1") == "10.0.0.5"
    assert chosen(LOOPBACK, DOCKER, towards="127.0.0.1") == "127.0.0.1", "a cluster on one machine"


def test_without_a_usable_address_the_error_lists_all_and_says_what_to_set() -> None:
    with pytest.raises(BadSetting, match="advertise") as caught:
        chosen(*OF_NO_USE)
    for each in OF_NO_USE:
        assert str(each.address) in str(caught.value)
    for why in ("loopback", "link-local", "down", "for containers", "a bridge"):
        assert why in str(caught.value)


# ---- looking


def test_the_addresses_of_this_machine_are_found() -> None:
    found = interface_addresses()
    loopback = [each for each in found if each.address == ipaddress.ip_address("127.0.0.1")]
    assert [(each.interface, each.is_up, each.is_bridge) for each in loopback] == [("lo", True, False)]


def test_the_source_address_towards_a_host_is_found_and_nothing_is_sent() -> None:
    assert source_towards("127.0.0.1", 9) == ipaddress.ip_address("127.0.0.1")
    assert source_towards("no-such-host.invalid", 9) is None


def test_a_connection_comes_about_or_the_reason_is_told() -> None:
    async def main() -> None:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            number = server.sockets[0].getsockname()[1]
            assert await connects(Address("127.0.0.1", number)) is None
        # All of 127/8 is this machine, and nobody listens there.
        why = await connects(Address("127.0.0.9", free_port()))
        assert why is not None
        error = unreachable(choose("127.0.0.9", PORT, [LOOPBACK, ETHERNET], None), "node-2", why)
        for words in ("node-2", "127.0.0.9:9470", why, "set `advertise`", "10.0.0.5 (eth0)", "loopback"):
            assert words in str(error)

    asyncio.run(main())


# ---- two hosts


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str

    def run(self, *command: str) -> str:
        done = subprocess.run(["ip", "netns", "exec", self.name, *command], capture_output=True, text=True, check=True)
        return done.stdout

    def python(self, program: str) -> str:
        return self.run(sys.executable, "-c", f"import sys; sys.path[:0] = {PATHS!r}\n{program}").strip()


PATHS = [str(ROOT), str(ROOT / "daemon")]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Return two hosts, 10.77.0.1 and 10.77.0.2; the first has docker0 and an interface that leads nowhere."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2: the hosts are network namespaces")
    suffix = secrets.token_hex(3)
    pair = (Host(f"kvt-a-{suffix}"), Host(f"kvt-b-{suffix}"))
    with contextlib.ExitStack() as stack:
        for host in pair:
            made = subprocess.run(["ip", "netns", "add", host.name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", host.name], check=True)
        first, second = pair
        first.run("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.name)
        for number, host in enumerate(pair, 1):
            host.run("ip", "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            host.run("ip", "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
            for name in ("lo", "eth0"):
                host.run("ip", "link", "set", name, "up")
        for name, address in (("docker0", "172.17.0.1/16"), ("fabric0", "10.99.0.1/24")):
            # A pair whose other end stays here: not every kernel has bridges and dummy interfaces.
            first.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-end")
            first.run("ip", "address", "add", address, "dev", name)
            first.run("ip", "link", "set", name, "up")
            first.run("ip", "link", "set", f"{name}-end", "up")
        yield pair


CHOOSE = """
from kvstored.remote.advertise import choose
from kvstored.remote.interfaces import interface_addresses, source_towards
towards = {towards}
print(choose(None, 9470, interface_addresses(), towards and source_towards(towards, 2379)).address.host)
"""
CONNECT = """
import asyncio
from kvstored.remote.advertise import choose, connects, unreachable
from kvstored.remote.members import Address
why = asyncio.run(connects(Address({host!r}, {port})))
print("reached" if why is None else why)
"""
SERVE = """
import socket
family = socket.AF_INET6 if {ipv6} else socket.AF_INET
with socket.create_server(("", {port}), family=family) as server:
    print("listening", flush=True)
    server.settimeout(30)
    try:
        while True:
            server.accept()[0].close()
    except TimeoutError:
        pass
"""


@contextlib.contextmanager
def listening(host: Host, port: int, *, ipv6: bool = False) -> Generator[None, None, None]:
    process = subprocess.Popen(
        ["ip", "netns", "exec", host.name, sys.executable, "-c", SERVE.format(port=port, ipv6=ipv6)],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_n01_the_address_towards_the_others_is_chosen_and_they_reach_it(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert first.python(CHOOSE.format(towards="'10.77.0.2'")) == "10.77.0.1"
    assert first.python(CHOOSE.format(towards="'fd77::2'")) == "fd77::1"
    with listening(first, PORT):
        assert second.python(CONNECT.format(host="10.77.0.1", port=PORT)) == "reached"
    with listening(first, PORT, ipv6=True):
        assert second.python(CONNECT.format(host="fd77::1", port=PORT)) == "reached"


def test_n01_an_address_that_others_do_not_reach_is_told_within_its_deadline(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    second.run("ip", "route", "add", "10.99.0.0/24", "dev", "eth0")  # nobody answers there
    with listening(first, PORT):
        first.run("ip", "neigh", "flush", "all")
        first.run("sysctl", "-qw", "net.ipv4.conf.all.arp_ignore=1")  # as a switch does: fabric0's is not eth0's
        start_s = time.monotonic()
        assert second.python(CONNECT.format(host="10.99.0.1", port=PORT)) != "reached"
        assert time.monotonic() - start_s < 30
        assert second.python(CONNECT.format(host="172.17.0.1", port=PORT)) != "reached"
