"""A connection that ends while one of its requests waits: nothing is granted to it, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, Daemon, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)
AWAITED = keys(4, "awaited")
PATIENT_S = 300.0


def wait(client: RawClient, ns: int) -> wire.Message:
    return wire.Wait(client.next_id(), ns, AWAITED, PATIENT_S)


def copying(client: RawClient, ns: int) -> wire.Message:
    return wire.Acquire(client.next_id(), ns, AWAITED, wait_s=PATIENT_S, deadline_s=PATIENT_S, lease_s=60.0)


def in_place(client: RawClient, ns: int) -> wire.Message:
    return wire.Acquire(
        client.next_id(), ns, AWAITED, copying=False, wait_s=PATIENT_S, deadline_s=PATIENT_S, lease_s=60.0
    )


@pytest.mark.parametrize("goodbye", [True, False])
@pytest.mark.parametrize("request_of", [wait, copying, in_place])
def test_who_waited_for_blocks_gets_no_lease_when_they_come(
    short_dir: Path, request_of: Callable[[RawClient, int], wire.Message], goodbye: bool
) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        leaver = daemon.client()
        leaver.send(request_of(leaver, leaver.open(SPACE)))
        leaver.ask(wire.Ping(leaver.next_id()))  # it is read, and waits
        leaver.close(goodbye=goodbye)
        await_sessions(client, 1)
        assert client.put(ns, AWAITED) == [Outcome.SEALED] * 4
        assert_nothing_is_held(client)
        assert client.report(wire.Evict(client.next_id(), "cpu"))["evicted_blocks"] == 4, "nobody holds them"
        client.check(verify=True)


@pytest.mark.parametrize("goodbye", [True, False])
def test_who_waited_for_room_to_write_gets_no_slots_when_there_is_some(short_dir: Path, goodbye: bool) -> None:
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        holder, tickets = take_what_may_be_open(daemon)
        leaver = daemon.client()
        leaver_ns = leaver.open(SPACE)
        leaver.send(wire.Reserve(leaver.next_id(), leaver_ns, AWAITED, PATIENT_S))
        leaver.ask(wire.Ping(leaver.next_id()))
        leaver.close(goodbye=goodbye)
        await_sessions(client, 2)
        for ticket in tickets:
            holder.ask(wire.Forfeit(holder.next_id(), ticket), wire.Done)
        holder.close()
        await_sessions(client, 1)
        assert_nothing_is_held(client)
        assert client.put(ns, AWAITED) == [Outcome.SEALED] * 4, "nobody writes them"
        client.check(verify=True)


@pytest.mark.parametrize("goodbye", [True, False])
def test_who_waited_for_room_to_read_holds_nothing(short_dir: Path, goodbye: bool) -> None:
    """Leases pin all that they may; a request waits for that to end, and its connection ends first."""
    with running(short_dir, cpu="16MiB", ssd=None) as daemon, daemon.client() as client, daemon.client() as holder:
        ns = client.open(SPACE)
        holder_ns = holder.open(SPACE)
        there = keys(160, "there")
        client.put(ns, there)
        leases: list[int] = []
        for block_hash in there:
            got = holder.acquire(holder_ns, [block_hash], lease_s=60.0, deadline_s=0.0)
            if not got.lease:
                break
            leases.append(got.lease)
        assert len(leases) < len(there)
        leaver = daemon.client()
        leaver_ns = leaver.open(SPACE)
        leaver.send(wire.Acquire(leaver.next_id(), leaver_ns, there[-4:], lease_s=60.0, deadline_s=PATIENT_S))
        leaver.ask(wire.Ping(leaver.next_id()))
        leaver.close(goodbye=goodbye)
        await_sessions(client, 2)
        for lease in leases:
            holder.release(lease)
        holder.ask(wire.Ping(holder.next_id()))
        assert_nothing_is_held(client)
        client.check(verify=True)


@pytest.mark.parametrize("goodbye", [True, False])
def test_what_was_sealed_for_good_is_so_even_if_nobody_hears_of_it(short_dir: Path, goodbye: bool) -> None:
    with running(short_dir, cpu="16MiB", ssd="64MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        for number in range(20):
            leaver = daemon.client()
            leaver_ns = leaver.open(SPACE)
            hashes = keys(4, f"sealed {number}")
            got = leaver.reserve(leaver_ns, hashes)
            leaver.send(wire.Seal(leaver.next_id(), got.ticket, durable=True, wait_s=PATIENT_S))
            leaver.close(goodbye=goodbye)
            eventually(lambda hashes=hashes: client.lookup(ns, hashes).hits == 4, "sealed")  # type: ignore[misc]
        await_sessions(client, 1)
        eventually(lambda: client.tier("ssd")["durable_blocks"] == 80, "durable")
        assert_nothing_is_held(client)
        client.check()


def take_what_may_be_open(daemon: Daemon) -> tuple[RawClient, list[int]]:
    """Return a client and its tickets, after which one process gets no more slots to write to."""
    holder = daemon.client()
    ns = holder.open(SPACE)
    tickets: list[int] = []
    for number in range(1000):
        got = holder.reserve(ns, keys(1, f"open {number}"))
        if Outcome.GRANTED not in got.outcomes:
            return holder, tickets
        tickets.append(got.ticket)
    raise AssertionError("there is always room")


def await_sessions(client: RawClient, count: int) -> None:
    eventually(lambda: client.stats()["sessions"]["open"] == count, f"{count} connections are left")


def assert_nothing_is_held(client: RawClient) -> None:
    """Once the requests that were under way are over, nothing is leased, reserved or in quarantine."""
    client.ask(wire.Ping(client.next_id()))
    held = client.stats()
    assert held["sessions"]["leases"] == held["sessions"]["reservations"] == 0, held["sessions"]
    assert held["sessions"]["quarantined_slots"] == 0
    assert held["tiers"]["cpu"]["pinned_bytes"] == 0
