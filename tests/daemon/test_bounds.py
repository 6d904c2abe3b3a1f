"""What any client may make grow is bounded: namespaces, slices, block sizes, reports. Whose word counts for whom."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvctl.cli import main
from kvstore import forgetting, tenancy, wire
from kvstore.block import Namespace
from kvstore.errors import Backpressure
from kvstore.forgetting import forget_idle
from kvstore.store import Store, StoreSettings
from kvstore.table import Tier
from kvstore.tenancy import Tenancies
from kvstore.wire import Outcome
from kvstored import reports
from kvstored.config import Settings
from kvstored.metrics import NAMED_MAX
from kvstored.node import Node
from tests.core.parts import Core, core, flat_namespace, hash_of, sliced_namespace
from tests.daemon.report import exposed
from tests.daemon.test_metrics import samples, value
from tests.daemon_fixture import KIB, MIB, eventually, running
from tests.rawclient import RawClient, keys, namespace
from tests.stores import kept_going, stored_durably

SPACE = namespace(4 * KIB)


def salted(number: int) -> Namespace:
    return flat_namespace(4096, salt=number.to_bytes(8, "little"))


def room(spaces: Tenancies, space: Namespace, tenant: str = "", slot_bytes: int = 4096) -> None:
    """Make a namespace as an engine's Open does."""
    slots = {Tier.CPU: slot_bytes}
    spaces.check_room(tenant, space, slots)
    spaces.tenancy(tenant, space, slots)


# ---- limits


def test_namespaces_are_limited_for_a_tenant_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "NAMESPACES_MAX", 6)
    monkeypatch.setattr(tenancy, "TENANT_NAMESPACES_MAX", 4)
    spaces = Tenancies((Tier.CPU,))
    for number in range(4):
        room(spaces, salted(number), "greedy")
    with pytest.raises(Backpressure, match="fewer salts"):
        room(spaces, salted(4), "greedy")
    room(spaces, salted(3), "greedy")  # a known one may be opened again
    room(spaces, salted(0), "modest")
    room(spaces, salted(1), "modest")
    with pytest.raises(Backpressure, match="6 namespaces"):
        room(spaces, salted(2), "modest")


def test_slices_of_a_group_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "SLICES_MAX", 3)
    spaces = Tenancies((Tier.CPU,))
    ranks = [sliced_namespace(rank) for rank in range(4)]
    for rank in ranks[:3]:
        room(spaces, rank)
    with pytest.raises(Backpressure, match="3 slices"):
        room(spaces, ranks[3])
    room(spaces, ranks[3], "another tenant")


def test_sizes_of_blocks_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "LANES_MAX", 6)
    monkeypatch.setattr(tenancy, "TENANT_LANES_MAX", 4)
    spaces = Tenancies((Tier.CPU,))
    for number in range(4):
        room(spaces, salted(number), "greedy", 4096 * (number + 1))
    with pytest.raises(Backpressure, match="few block sizes"):
        room(spaces, salted(4), "greedy", 4096 * 5)
    room(spaces, salted(4), "greedy", 4096)
    for number in range(2):
        room(spaces, salted(number), "modest", 4096 * (number + 1))
    with pytest.raises(Backpressure, match="few block sizes"):
        room(spaces, salted(2), "third")
    assert len(spaces.lanes) == 6


def test_a_size_too_many_fails_its_open_and_nothing_else(short_dir: Path) -> None:
    with running(short_dir, cpu="32MiB", ssd=None) as daemon, daemon.client() as client:
        sizes = [namespace(4 * KIB * number) for number in range(1, tenancy.TENANT_LANES_MAX + 2)]
        opened = [client.open(space) for space in sizes[:-1]]
        with pytest.raises(Backpressure, match="few block sizes"):
            client.open(sizes[-1])
        for ns in (opened[0], opened[-1]):
            assert client.put(ns, keys(1)) == [Outcome.SEALED]
        client.check()


# ---- forgetting


@pytest.fixture(name="parts")
def parts_that_keep_nothing_idle(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(forgetting, "IDLE_KEPT", 0)
    with core() as parts:
        yield parts


def forgotten(parts: Core) -> int:
    count = asyncio.run(forget_idle(parts.catalog, parts.puts, 0.0))
    parts.catalog.check_integrity()
    parts.puts.check_integrity()
    return count


def test_only_namespaces_without_blocks_tickets_waiters_and_users_are_forgotten(parts: Core) -> None:
    stored, held, writing, awaited, opened, idle = (parts.tenancy(salted(number)) for number in range(6))
    parts.store(stored, [1])
    (row,) = parts.store(held, [1])
    parts.catalog.hold(row)
    parts.catalog.drop_all(held)
    parts.catalog.reclaim(10)
    ticket, _ = parts.reserve(parts.session(), writing, [1])
    arrival = parts.puts.wait(awaited, keys(1), lambda outcome: None)
    opened.begin_use()
    assert forgotten(parts) == 1
    assert parts.catalog.named(idle.namespace.digest) == []
    assert parts.catalog.namespaces.known() == [stored, held, writing, awaited, opened]

    parts.catalog.unhold(row)
    parts.puts.forfeit(ticket, None)
    parts.puts.stop_waiting(arrival)
    opened.end_use()
    assert forgotten(parts) == 4
    assert parts.catalog.namespaces.known() == [stored]


def test_a_number_that_is_given_anew_shows_nothing_of_the_former_namespace(parts: Core) -> None:
    first = parts.tenancy(salted(1))
    parts.store(first, [1, 2])
    first.epoch = 7
    parts.catalog.drop_all(first)
    parts.catalog.reclaim(10)
    assert forgotten(parts) == 1
    second = parts.tenancy(salted(2))
    assert second.number == first.number
    assert (second.epoch, second.siblings) == (8, [second]), "none begins below the epoch of one that was forgotten"
    parts.store(second, [1])
    assert parts.catalog.find(second, hash_of(1)) is not None
    again = parts.tenancy(salted(1))
    assert again.epoch == 8
    assert not again.rows
    assert again.number != second.number


def test_a_life_that_an_operator_has_set_is_remembered(parts: Core) -> None:
    first = parts.tenancy(salted(1), ttl_s=60.0)
    first.disk_number = 3
    assert forgotten(parts) == 1
    again = parts.catalog.tenancy("", salted(1), first.slots)
    assert (again.ttl_s, again.disk_number) == (60.0, 3)


def test_lanes_of_forgotten_namespaces_are_given_to_other_sizes(
    parts: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "LANES_MAX", 4)
    monkeypatch.setattr(tenancy, "TENANT_LANES_MAX", 4)
    spaces = parts.catalog.namespaces
    for number in range(4):
        room(spaces, salted(number), slot_bytes=4096 * (number + 1))
    stored = spaces.known()[0]
    parts.store(stored, [1, 2])
    with pytest.raises(Backpressure, match="few block sizes"):
        room(spaces, salted(9), slot_bytes=4096 * 9)
    assert forgotten(parts) == 3, "they are scarce"
    for number in range(5, 8):
        room(spaces, salted(number), slot_bytes=4096 * number)
    assert len(spaces.lanes) == 4
    assert len({lane for known in spaces.known() for lane in known.lanes.values()}) == 4
    new = spaces.known()[-1]
    parts.store(new, [3])
    assert [size for size, _, _ in spaces.lanes].count(new.slots[Tier.CPU]) == 1
    parts.check_integrity()


def test_where_lanes_are_scarce_no_empty_namespace_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "TENANT_LANES_MAX", 4)
    with core() as parts:
        for number in range(3):
            room(parts.catalog.namespaces, salted(number), slot_bytes=4096 * (number + 1))
        assert forgotten(parts) == 3, "far fewer than are kept where nothing is scarce"


def test_namespaces_that_are_forgotten_leave_the_ssd_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "IDLE_KEPT", 0)
    settings = StoreSettings(cpu_size_bytes=8 * MIB, ssd_size_bytes=32 * MIB, ssd_dir=tmp_path)

    async def run() -> None:
        async with kept_going(settings) as store:
            spaces = [store.tenancy("t", salted(number)) for number in range(5)]
            for space in spaces:
                assert await stored_durably(store, space, keys(1))
            await store.drop_namespaces(spaces[:3])
            await store.drop_namespaces(spaces[:1])
            while store.catalog.reclaiming or store.catalog.departed:
                store.tick()
                await asyncio.sleep(0.01)
            assert store.mover is not None
            await store.mover.delete_all_departed()
            while await forget_idle(store.catalog, store.puts, 0.0, store.disk) == 0:
                await asyncio.sleep(0.01)
            assert store.disk is not None
            assert len(store.disk.namespaces()) == 2
            again = store.tenancy("t", salted(0))
            assert (again.epoch, again.disk_number) == (2, None)
            assert await stored_durably(store, again, keys(1))
            store.check_integrity()
        async with kept_going(settings) as store:
            assert store.disk is not None
            assert len(store.disk.namespaces()) == 3
            assert [len(store.tenancy("t", salted(number)).rows) for number in range(5)] == [1, 0, 0, 1, 1]
            assert store.tenancy("t", salted(0)).epoch == 2
            assert store.tenancy("t", salted(1)).epoch == 2, "the floor is durable"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_totals_keep_what_was_counted_of_forgotten_namespaces(parts: Core) -> None:
    one = parts.tenancy(salted(1), tenant="us")
    parts.store(one, [1, 2, 3])
    parts.catalog.drop_all(one)
    parts.catalog.reclaim(10)
    assert forgotten(parts) == 1
    assert parts.catalog.namespaces.forgotten["us"].stored_blocks == 3


# ---- reports


def test_a_report_lists_the_largest_namespaces_and_counts_all(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = reports.LISTED_MAX + 44
    with running(short_dir, cpu="32MiB", ssd=None) as daemon, daemon.client() as client:
        numbers = [client.open(salted(number)) for number in range(count)]
        largest, last = numbers[-1], salted(count - 2)
        client.put(largest, keys(3))
        for ns in numbers:
            client.lookup(ns, keys(2))
        report = client.stats()
        assert len(report["namespaces"]) == reports.LISTED_MAX
        assert report["namespaces_left_out"] == 44
        assert report["namespaces"][0]["digest"] == salted(count - 1).digest.hex()
        assert report["totals"]["queried_blocks"] == 2 * count
        assert last.digest.hex() not in {told["digest"] for told in report["namespaces"]}
        (told,) = client.report(wire.Stats(client.next_id(), last.digest.hex()[:20]))["namespaces"]
        assert told["digest"] == last.digest.hex()
        by_model = client.report(wire.Stats(client.next_id(), "test@1"))
        assert len(by_model["namespaces"]) == reports.LISTED_MAX
        assert client.report(wire.Stats(client.next_id(), "another"))["namespaces"] == []

        for words in (
            ("keys", last.digest.hex()),
            ("namespaces",),
            ("drop", "--namespace", last.digest.hex(), "--yes"),
        ):
            assert main(["--json", "--socket", str(daemon.socket), *words]) == 0
        assert '"namespaces":1,"blocks":0' in capsys.readouterr().out.replace(" ", "").replace("\n", "")


def test_namespaces_with_endless_names_fit_a_report(short_dir: Path) -> None:
    with running(short_dir, cpu="32MiB", ssd=None) as daemon, daemon.client() as client:
        for number in range(reports.LISTED_MAX):
            endless = str(number) + "\U0001f999" * 5000
            client.open(namespace(4 * KIB, endless, revision=endless, adapter=endless))
        listed = client.stats()["namespaces"]
        assert len(listed) == reports.LISTED_MAX
        assert {len(told["model"]) for told in listed} == {512}


def test_an_engine_sees_its_own_tenant_and_an_admin_sees_all() -> None:
    async def run() -> None:
        settings = StoreSettings(cpu_size_bytes=8 * MIB)
        store = await Store.open(settings)
        try:
            async with asyncio.TaskGroup() as tasks:
                node = Node(Settings(socket=Path("s"), cpu_size_bytes=8 * MIB), store, b"b", tasks)
                for tenant, number in (("us", 1), ("us", 2), ("them", 1)):
                    store.tenancy(tenant, salted(number)).counters.queried_blocks = 5
                ours = await reports.stats_for(node, "us", "")
                assert {told["tenant"] for told in ours["namespaces"]} == {"us"}
                assert [told["tenant"] for told in ours["tenants"]] == ["us"]
                assert ours["totals"]["queried_blocks"] == 10
                everything = await reports.stats_for(node, None, "")
                assert [told["tenant"] for told in everything["tenants"]] == ["them", "us"]
                assert everything["totals"]["queried_blocks"] == 15
                assert (await reports.stats(node))["totals"] == everything["totals"], "metrics are whole"
        finally:
            await store.close()

    asyncio.run(run())


def test_a_report_over_many_namespaces_lets_others_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 65,536 namespaces one go would take 150 ms; a portion takes about one."""
    monkeypatch.setattr(reports, "_PORTION", 10)
    monkeypatch.setattr(reports, "_ROWS_PORTION", 16)

    async def run() -> None:
        store = await Store.open(StoreSettings(cpu_size_bytes=8 * MIB))
        try:
            async with asyncio.TaskGroup() as tasks:
                node = Node(Settings(socket=Path("s"), cpu_size_bytes=8 * MIB), store, b"b", tasks)
                for number in range(300):
                    store.tenancy("us", salted(number)).counters.queried_blocks = 1
                for report in (reports.stats(node), reports.stats_for(node, None, "")):
                    asked = tasks.create_task(report)
                    turns = 0
                    while not asked.done():
                        await asyncio.sleep(0)
                        turns += 1
                    assert turns >= 300 // 10 + reports.LISTED_MAX // 16
                    assert len(asked.result()["namespaces"]) == reports.LISTED_MAX
                    assert asked.result()["namespaces_left_out"] == 300 - reports.LISTED_MAX
                    assert asked.result()["totals"]["queried_blocks"] == 300
        finally:
            await store.close()

    asyncio.run(run())


def test_metrics_sum_the_namespaces_that_a_report_leaves_out() -> None:
    def report(queried: list[int], left_out: int) -> dict[str, Any]:
        listed = [
            {
                "digest": f"{at:016x}" * 4,
                "model": "m",
                "queried_blocks": count,
                "blocks": {"cpu": 1},
                "bytes": {"cpu": 2},
            }
            for at, count in enumerate(queried)
        ]
        return {
            "namespaces": listed[: len(listed) - left_out],
            "namespaces_left_out": left_out,
            "totals": {"queried_blocks": sum(queried)},
            "tiers": {"cpu": {"blocks": len(queried)}},
            "tenants": [{"tenant": "", "used_bytes": {"cpu": 2 * len(queried)}}],
        }

    first = report([1] * (NAMED_MAX + 50), left_out=20)
    exposition = exposed(lambda: first)
    found = samples(first, exposition)
    other = {"namespace": "other", "model": "other"}
    assert value(found, "namespaces") == NAMED_MAX + 50
    assert value(found, "namespace_queried_blocks_total", **other) == 50
    assert value(found, "namespace_blocks", tier="cpu", **other) == 50
    assert value(found, "namespace_bytes", tier="cpu", **other) == 100


# ---- whose life counts


def ttls(client: RawClient, space: Namespace) -> dict[str, float | None]:
    body = client.report(wire.Keys(client.next_id(), space.digest))
    return {block["hash"]: block["ttl_s"] for block in body["blocks"]}


@pytest.mark.parametrize("mode", ["trusted", "strict"])
def test_the_life_of_an_open_is_that_of_what_is_stored_through_it_only(short_dir: Path, mode: str) -> None:
    with running(short_dir, "--mode", mode, cpu="32MiB", ssd=None) as daemon, daemon.client() as operator:
        plain = operator.open(SPACE)
        operator.ask(wire.Ttl(operator.next_id(), SPACE.digest, [], 5000.0), wire.Done)
        with daemon.client() as engine:
            short, long, usual = engine.open(SPACE, 100.0), engine.open(SPACE, 1000.0), engine.open(SPACE)
            assert len({short, long, usual}) == 3
            assert engine.open(SPACE, 100.0) == short
            engine.put(short, keys(1, "short"))
            engine.put(long, keys(1, "long"))
            engine.put(usual, keys(1, "usual"))
            engine.put(short, keys(1, "sealed"), ttl_s=2000.0)
            engine.put(short, keys(1, "for ever"), ttl_s=0.0)
        operator.put(plain, keys(1, "operator"))
        found = ttls(operator, SPACE)

        def left_s(label: str) -> float:
            life_s = found[keys(1, label)[0].hex()]
            assert life_s is not None
            return life_s

        assert 0 < left_s("short") <= 100 < left_s("long") <= 1000 < left_s("sealed") <= 2000
        assert 2000 < left_s("usual") <= 5000
        assert 2000 < left_s("operator") <= 5000
        assert found[keys(1, "for ever")[0].hex()] is None
        assert operator.count(plain)["ttl_s"] == 5000.0


# ---- the loop is given back


def test_a_group_lookup_of_many_slices_and_keys_lets_others_in_between(short_dir: Path) -> None:
    slices = [sliced_namespace(rank, 16, 4096) for rank in range(16)]
    with running(short_dir, cpu="64MiB", ssd=None) as daemon, daemon.client() as client:
        numbers = [client.open(space) for space in slices]
        hashes = keys(wire.KEYS_MAX)
        for ns in numbers:
            client.put(ns, hashes[:64], batch=64)
        asked = wire.GroupLookup(client.next_id(), numbers[0], hashes)
        ping = wire.Ping(client.next_id())
        client.socket.sendall(wire.encode(asked) + wire.encode(ping))
        group = client.answer(asked.id, wire.Group)
        client.answer(ping.id, wire.Done)
        assert len(group.namespaces) == 16
        right = bytes([Outcome.HIT] * 64 + [Outcome.ABSENT] * (wire.KEYS_MAX - 64))
        assert set(group.outcomes) == {right}


def test_keys_come_in_pages_that_are_whole_together(short_dir: Path) -> None:
    with running(short_dir, cpu="32MiB", ssd=None) as daemon, daemon.client() as client:
        hashes = keys(100)
        client.put(client.open(SPACE), hashes, batch=100)
        found: list[str] = []
        for offset in range(0, 110, 10):
            body = client.report(wire.Keys(client.next_id(), SPACE.digest, offset, 10))
            assert body["total"] == 100
            found += [block["hash"] for block in body["blocks"]]
        assert found == [block_hash.hex() for block_hash in hashes]
        huge = wire.Keys(client.next_id(), SPACE.digest, (1 << 64) - 1, (1 << 64) - 1)
        assert client.report(huge)["blocks"] == []


def test_an_eviction_goes_past_pinned_blocks_portion_by_portion(short_dir: Path) -> None:
    count = 2500
    with running(short_dir, cpu="64MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(count), batch=500)
        client.ask(wire.Pin(client.next_id(), SPACE.digest, keys(count)[::5], 600.0), wire.Found)
        part = client.report(wire.Evict(client.next_id(), "cpu", 100 * 4096))
        assert part["evicted_blocks"] == 100
        rest = client.report(wire.Evict(client.next_id(), "cpu"))
        assert rest["evicted_blocks"] == count * 4 // 5 - 100
        assert client.tier("cpu")["blocks"] == count // 5
        client.check()


def test_with_ttl_mode_access_what_is_read_lives_on_and_the_rest_ends(short_dir: Path) -> None:
    mode = ("--ttl", "8s", "--ttl-mode", "access")
    with running(short_dir, *mode, cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(2))
        used, unused = keys(2)

        def unused_is_gone() -> bool:
            assert client.get(ns, [used], count=False) == [Outcome.HIT], "each read begins its life anew"
            return client.lookup(ns, [unused]).hits == 0

        eventually(unused_is_gone, "nobody reads it")
        assert client.get(ns, [used]) == [Outcome.HIT]
        client.check()
