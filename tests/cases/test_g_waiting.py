"""Cases G: nobody waits for what will not come. G01 aborts wake the waiter, G05 loads never wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, eventually, running
from tests.puppet import Puppet, puppet
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)
LONG_S = 300.0


# ---- G01: an abort is a message; whoever waits hears of it at once


def killed(writer: Puppet, client: RawClient, ns: int) -> None:
    writer.kill()


def hung_up(writer: Puppet, client: RawClient, ns: int) -> None:
    writer.call("hang_up")


def said_goodbye(writer: Puppet, client: RawClient, ns: int) -> None:
    writer.call("say_goodbye")


def forfeited(writer: Puppet, client: RawClient, ns: int) -> None:
    writer.call("forfeit")


def aborted_by_another(writer: Puppet, client: RawClient, ns: int) -> None:
    assert client.ask(wire.Abort(client.next_id(), ns, keys(1)), wire.Done).count >= 1


def dropped(writer: Puppet, client: RawClient, ns: int) -> None:
    client.report(wire.DropNamespace(client.next_id(), SPACE.digest))


def out_of_time(writer: Puppet, client: RawClient, ns: int) -> None:
    """The reservation ends by itself after the second that this daemon gives."""


ENDINGS = [killed, hung_up, said_goodbye, forfeited, aborted_by_another, dropped, out_of_time]


@pytest.mark.parametrize("ending", ENDINGS)
def test_g01_who_waits_hears_at_once_that_a_put_will_not_come(
    short_dir: Path, ending: Callable[[Puppet, RawClient, int], None]
) -> None:
    reservation = "1s" if ending is out_of_time else "60s"
    with (
        running(short_dir, "--reservation", reservation, cpu="16MiB", ssd=None) as daemon,
        puppet(daemon.socket) as writer,
        daemon.client(timeout_s=20) as client,
        daemon.client() as other,
    ):
        ns = client.open(SPACE)
        other.open(SPACE)
        writer.call("open", 64 * KIB)
        assert writer.call("reserve", 2, 0) == [Outcome.GRANTED] * 2
        waits = [
            wire.Wait(client.next_id(), ns, keys(1), LONG_S),
            wire.Acquire(client.next_id(), ns, keys(1), wait_s=LONG_S, deadline_s=LONG_S),
            wire.Acquire(client.next_id(), ns, keys(1), copying=False, wait_s=LONG_S, deadline_s=LONG_S),
        ]
        for request in waits:
            client.send(request)
        client.ask(wire.Ping(client.next_id()))
        ending(writer, other, ns)
        # Each of these fails at the socket's 20 s, far from the 300 s that were asked for.
        for request in waits:
            reply = client.answer(request.id)
            assert isinstance(reply, wire.Found | wire.Acquired)
            assert list(reply.outcomes) == [Outcome.ABORTED], ending.__name__
        client.check()


def test_g01_who_waits_for_several_blocks_hears_of_the_first_that_will_not_come(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon, daemon.client() as writer, daemon.client(timeout_s=20) as client:
        ns = client.open(SPACE)
        writer.open(SPACE)
        reserved = writer.reserve(ns, keys(3))
        wait = wire.Wait(client.next_id(), ns, keys(3), LONG_S)
        client.send(wait)
        client.ask(wire.Ping(client.next_id()))
        writer.ask(wire.Seal(writer.next_id(), reserved.ticket, [0]))
        writer.ask(wire.Forfeit(writer.next_id(), reserved.ticket, [2]))
        found = client.answer(wait.id, wire.Found)
        assert list(found.outcomes) == [Outcome.HIT, Outcome.ABORTED, Outcome.ABORTED]


def test_g01_who_waits_is_woken_by_the_seal(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon, daemon.client() as writer, daemon.client(timeout_s=20) as client:
        ns = client.open(SPACE)
        writer.open(SPACE)
        waits = [
            wire.Wait(client.next_id(), ns, keys(3), LONG_S),
            wire.Acquire(client.next_id(), ns, keys(3), wait_s=LONG_S, deadline_s=LONG_S),
        ]
        for request in waits:
            client.send(request)
        client.ask(wire.Ping(client.next_id()))
        writer.put(ns, keys(3))
        assert client.answer(waits[0].id, wire.Found).hits == 3
        acquired = client.answer(waits[1].id, wire.Acquired)
        assert list(acquired.outcomes) == [Outcome.HIT] * 3
        client.release(acquired.lease)
        # One who waits beyond its deadline is told so.
        found = client.ask(wire.Wait(client.next_id(), ns, keys(1, "never"), 0.05), wire.Found)
        assert list(found.outcomes) == [Outcome.DEADLINE]
        client.check()


# ---- G05: memory for loads is taken with a deadline, all or nothing, and given back on failure


def store_on_ssd(client: RawClient, ns: int, label: str, count: int) -> list[bytes]:
    """Return hashes of blocks that lie on ssd alone."""
    hashes = keys(count, label)
    assert set(client.put(ns, hashes, durable=True, batch=1)) == {Outcome.DURABLE}
    client.report(wire.Evict(client.next_id(), "cpu"))
    assert set(client.tiers_of(ns, hashes)) == {"ssd"}
    return hashes


@pytest.mark.parametrize("copying", [True, False], ids=["copying", "zero-copy"])
def test_g05_parallel_loads_of_more_than_memory_all_return(short_dir: Path, copying: bool) -> None:
    """Memory holds 8 blocks of 1 MiB; four clients want four each from ssd, all at the same time, over and over."""
    space = namespace(1 * MIB)
    with running(short_dir, cpu="8MiB") as daemon, daemon.client() as client:
        ns = client.open(space)
        wanted = [store_on_ssd(client, ns, f"g05-{number}", 4) for number in range(4)]
        problems: list[str] = []

        def fetch(hashes: list[bytes]) -> None:
            try:
                with daemon.client(timeout_s=20) as own:
                    number = own.open(space)
                    for _ in range(5):
                        found = own.get(number, hashes, copying=copying, deadline_s=5.0)
                        assert set(found) <= {Outcome.HIT, Outcome.NO_ROOM}, found
                        if copying:
                            assert set(found) == {Outcome.HIT}, found
            except (AssertionError, OSError, KVStoreError) as exc:
                problems.append(repr(exc))

        threads = [threading.Thread(target=fetch, args=(hashes,)) for hashes in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems or (not copying and all("TooLarge" in problem for problem in problems)), problems
        stats = client.stats()
        assert stats["tiers"]["cpu"]["pinned_bytes"] == 0
        assert stats["sessions"]["leases"] == 0
        client.check(verify=True)


def test_g05_a_memory_full_of_pins_still_serves_copies_of_what_lies_on_ssd(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, daemon.client() as holder:
        ns = client.open(SPACE)
        holder.open(SPACE)
        cold = store_on_ssd(client, ns, "cold", 64)
        pin_everything(daemon, client, holder, ns)
        assert client.get(ns, cold) == [Outcome.HIT] * 64
        client.check(verify=True)


def pin_everything(daemon: Daemon, client: RawClient, holder: RawClient, ns: int) -> None:
    """Leave no evictable block in memory: half is leased, a quarter pinned by the operator, the rest being written."""
    capacity = client.tier("cpu")["capacity_bytes"]
    count = capacity // SPACE.block_bytes
    label = "held"
    hashes = keys(count, label)
    client.put(ns, hashes, wait_s=0.5)
    left = [h for h in hashes if holder.acquire(ns, [h], copying=False, deadline_s=0.0).outcomes[0] != Outcome.HIT]
    for block_hash in left:
        try:
            client.ask(wire.Pin(client.next_id(), SPACE.digest, [block_hash], 600.0), wire.Found)
        except KVStoreError:
            break
    number = 0
    while Outcome.GRANTED in holder.reserve(ns, keys(1, f"open-{number}")).outcomes:
        number += 1
    body = client.report(wire.Evict(client.next_id(), "cpu"))
    for _ in range(body["evicted_blocks"]):
        if Outcome.GRANTED not in holder.reserve(ns, keys(1, f"more-{number}")).outcomes:
            break
        number += 1


def test_g05_a_load_that_finds_no_room_by_its_deadline_is_a_miss_that_says_so(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client, daemon.client() as holder:
        ns = client.open(SPACE)
        holder.open(SPACE)
        cold = store_on_ssd(client, ns, "cold", 8)
        held = keys(200, "held")
        client.put(ns, held)
        # Leases pin as much as they may.
        outcomes = [holder.acquire(ns, [h], copying=False, deadline_s=0.0).outcomes[0] for h in held]
        assert set(outcomes) == {Outcome.HIT, Outcome.NO_ROOM}
        refused = client.acquire(ns, cold, copying=False, deadline_s=0.3)
        assert list(refused.outcomes) == [Outcome.NO_ROOM] * 8
        assert refused.lease == 0
        holder.close()
        eventually(lambda: client.tier("cpu")["pinned_bytes"] == 0, "leases end with their session")
        got = client.acquire(ns, cold, copying=False)
        assert list(got.outcomes) == [Outcome.HIT] * 8
        client.release(got.lease)
        client.check(verify=True)


def test_g05_a_cancelled_load_leaves_no_pin(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        cold = store_on_ssd(client, ns, "cold", 16)
        for turn in range(30):
            request = wire.Acquire(client.next_id(), ns, cold, copying=turn % 2 == 0)
            client.send(request)
            client.send(wire.Cancel(client.next_id(), request.id))
            if turn % 3 == 0:
                client.report(wire.Evict(client.next_id(), "cpu"))
        # What was granted before its Cancel came is released here; no more than that may be left.
        client.ask(wire.Ping(client.next_id()))
        for reply in client.take_replies():
            if isinstance(reply, wire.Acquired) and reply.lease:
                client.release(reply.lease)
        eventually(lambda: client.stats()["sessions"]["leases"] == 0, "no lease is left")
        eventually(lambda: client.tier("cpu")["loads_in_flight"] == 0, "no load is left")
        client.report(wire.Evict(client.next_id(), "cpu"))
        assert client.tier("cpu")["used_bytes"] == 0, "nothing is held"
        assert client.get(ns, cold) == [Outcome.HIT] * 16
        client.check(verify=True)


def test_g05_a_client_that_dies_in_the_middle_of_a_load_leaves_no_pin(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        store_on_ssd(client, ns, "cold", 64)
        for _ in range(5):
            with puppet(daemon.socket) as reader:
                reader.call("open", 64 * KIB)
                reader.begin("get", 64, "cold")
            client.report(wire.Evict(client.next_id(), "cpu"))
        eventually(lambda: client.stats()["sessions"]["open"] == 1, "they are gone")
        eventually(lambda: client.tier("cpu")["loads_in_flight"] == 0, "no load is left")
        assert client.tier("cpu")["pinned_bytes"] == 0
        client.report(wire.Evict(client.next_id(), "cpu"))
        assert client.tier("cpu")["used_bytes"] == 0, "nothing is held"
        client.check()
