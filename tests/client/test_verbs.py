"""Each verb of the blocking client against the real daemon."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvclient import Client, Namespace, Outcome, errors, prefix
from kvstore import wire
from tests.client.blocks import (
    BLOCK_BYTES,
    await_all_memory,
    empty_buffers,
    flat_namespace,
    new_hashes,
    payload,
    payloads,
)
from tests.daemon_fixture import Daemon, running


def test_stored_blocks_are_fetched_byte_by_byte(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(50)
    stored = blocks.store(hashes, payloads(hashes))
    assert (stored.stored, stored.present, stored.failed) == (50, 0, 0)
    into = empty_buffers(50)
    found = blocks.fetch(hashes, into)
    assert found.hits == found.hit_count == 50
    assert found.missing == []
    assert into == payloads(hashes)


def test_one_buffer_holds_all_blocks_one_behind_the_other(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(20)
    assert blocks.store(hashes, b"".join(payloads(hashes))).stored == 20
    into = bytearray(20 * BLOCK_BYTES)
    assert blocks.fetch(hashes, into).hits == 20
    assert into == b"".join(payloads(hashes))


def test_a_second_store_of_the_same_block_writes_nothing(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    blocks.store(hashes[:1], payloads(hashes[:1]))
    again = blocks.store(hashes, payloads(hashes))
    assert again.outcomes == (Outcome.PRESENT, Outcome.SEALED, Outcome.SEALED)
    assert (again.stored, again.present, again.failed) == (2, 1, 0)


def test_a_hash_given_twice_is_written_once(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
    stored = blocks.store(hashes * 2, payloads(hashes * 2))
    assert stored.stored == 1
    assert stored.present == 1
    into = empty_buffers(2)
    assert blocks.fetch(hashes * 2, into).hits == 2
    assert into == payloads(hashes * 2)


def test_a_run_ends_at_the_first_miss(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(6)
    present = [at for at in range(6) if at != 2]
    blocks.store([hashes[at] for at in present], [payload(hashes[at]) for at in present])
    into = empty_buffers(6)
    found = blocks.fetch(hashes, into)
    assert found.hits == 2
    assert into[:2] == payloads(hashes[:2])
    assert set(found.outcomes[2:]) == {Outcome.ABSENT}
    assert blocks.lookup(hashes).hits == 2


def test_without_run_every_block_that_is_there_is_a_hit(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(6)
    blocks.store(hashes[1::2], payloads(hashes[1::2]))
    into = empty_buffers(6)
    found = blocks.fetch(hashes, into, run=False)
    assert found.hits == 0
    assert found.missing == [0, 2, 4]
    assert into[1::2] == payloads(hashes[1::2])
    seen = blocks.lookup(hashes, run=False)
    assert seen.missing == [0, 2, 4]
    assert seen.tier_names(1) == ("cpu",)
    assert seen.tier_names(0) == ()


def test_empty_batches_are_answered_without_the_daemon(tmp_path: Path) -> None:
    with Client(tmp_path / "nobody.sock", strict=True) as client:
        blocks = client.namespace(flat_namespace())
        assert blocks.lookup([]).hits == 0
        assert blocks.store([], []).stored == 0
        assert blocks.fetch([], []).hits == 0
        with blocks.acquire([]) as lease:
            assert len(lease.views) == 0
        assert blocks.abort([]) == 0


def test_an_engines_own_hashes_of_other_lengths_are_keys_too(client: Client) -> None:
    blocks = client.namespace(flat_namespace())
    hashes = [b"\x01" * 8, b"\x02" * 16, b"\x03" * 64, bytes(bytearray(b"\x04" * 32))]
    blocks.store(hashes, payloads(hashes))
    into = empty_buffers(4)
    assert blocks.fetch(hashes, into).hits == 4
    assert into == payloads(hashes)


@pytest.mark.parametrize("bad", [[b"short"], [12345], ["text" * 8], [None]])
def test_what_is_no_hash_is_refused(client: Client, bad: list[bytes]) -> None:
    with pytest.raises(errors.BadKey):
        client.namespace(flat_namespace()).lookup(bad)


def test_namespaces_do_not_see_each_others_blocks(client: Client) -> None:
    hashes = new_hashes(2)
    client.namespace(flat_namespace()).store(hashes, payloads(hashes))
    assert client.namespace(flat_namespace()).lookup(hashes).hits == 0


def test_prefix_hashes_are_found_up_to_the_first_different_token(client: Client) -> None:
    namespace = flat_namespace()
    blocks = client.namespace(namespace)
    tokens = list(range(160))
    hashes = prefix.chain(namespace.digest, tokens, namespace.block_tokens)
    blocks.store(hashes, payloads(hashes))
    other = prefix.chain(namespace.digest, [*tokens[:100], 7, *tokens[101:]], namespace.block_tokens)
    assert blocks.lookup(other).hits == 6


def test_progress_is_told_up_to_the_end(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(5)
    told: list[tuple[int, int]] = []
    blocks.store(hashes, payloads(hashes), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (5, 5)
    told.clear()
    blocks.fetch(hashes, empty_buffers(5), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (5, 5)


def test_dropped_blocks_miss(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    blocks.store(hashes, payloads(hashes))
    dropped = blocks.drop([hashes[1], new_hashes(1)[0]])
    assert dropped.outcomes == (Outcome.DONE, Outcome.ABSENT)
    assert dropped.done == 1
    assert blocks.lookup(hashes).hits == 1


def test_blocks_expire_by_the_stores_ttl(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
    blocks.store(hashes[:1], payloads(hashes[:1]), ttl_s=0.001)
    blocks.store(hashes[1:], payloads(hashes[1:]), ttl_s=1000)
    while blocks.lookup(hashes[:1]).hits:
        threading.Event().wait(0.002)
    assert blocks.lookup(hashes[1:]).hits == 1


def test_admins_pin_and_unpin(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
    blocks.store(hashes, payloads(hashes))
    assert blocks.pin(hashes, 60).done == 2
    assert client.admin(wire.Stats(0))["pins"]["blocks"] == 2
    assert blocks.unpin(hashes).done == 2
    assert client.admin(wire.Stats(0))["pins"]["blocks"] == 0
    assert blocks.set_ttl(hashes, 500).done == 2


def test_operators_questions_are_answered_with_plain_values(client: Client) -> None:
    assert client.ping()
    assert client.admin(wire.Status(0))["state"] == "ready"
    assert client.admin(wire.Check(0))["ok"]
    with pytest.raises(errors.UsageError):
        client.admin(wire.Keys(0, b"\0" * 32))


def test_a_waiting_fetch_is_woken_by_the_seal(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    into = empty_buffers(3)
    results: list[int] = []
    waiting = threading.Thread(
        target=lambda: results.append(blocks.fetch(hashes, into, wait_s=60).hits), name="waiting"
    )
    waiting.start()
    for at in range(3):
        blocks.store(hashes[at : at + 1], payloads(hashes[at : at + 1]))
    waiting.join()
    assert results == [3]
    assert into == payloads(hashes)


def test_a_waiting_fetch_is_told_of_an_abort(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
    results: list[tuple[Outcome, ...]] = []
    waiting = threading.Thread(
        target=lambda: results.append(blocks.fetch(hashes, empty_buffers(1), wait_s=60).outcomes)
    )
    waiting.start()
    while not blocks.abort(hashes):
        threading.Event().wait(0.001)
    waiting.join()
    assert results == [(Outcome.ABORTED,)]


def test_waiting_ends_when_its_time_is_over(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(2)
    blocks.store(hashes[:1], payloads(hashes[:1]))
    assert blocks.wait(hashes, 0.01).outcomes == (Outcome.HIT, Outcome.DEADLINE)
    assert blocks.fetch(hashes, empty_buffers(2), wait_s=0.01).hits == 1


def test_views_read_the_pool_in_place_until_released(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(4)
    blocks.store(hashes, payloads(hashes))
    with blocks.acquire(hashes) as lease:
        assert lease.hits == 4
        assert [bytes(view) for view in lease.views if view is not None] == payloads(hashes)
        view = lease.views[0]
        assert view is not None
        assert view.readonly
        assert client.admin(wire.Stats(0))["sessions"]["leases"] == 1
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with pytest.raises(errors.LeaseExpired):
        _ = lease.views
    lease.release()
    assert client.admin(wire.Stats(0))["sessions"]["leases"] == 0


def test_a_lease_holds_all_of_its_blocks_or_none(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(3)
    blocks.store(hashes[:2], payloads(hashes[:2]))
    with blocks.acquire(hashes) as lease:
        assert lease.outcomes == (Outcome.LATER, Outcome.LATER, Outcome.ABSENT)
        assert list(lease.views) == [None, None, None]
    assert client.admin(wire.Stats(0))["sessions"]["leases"] == 0


def test_a_release_refuses_while_an_array_reads_a_view(client: Client) -> None:
    numpy = pytest.importorskip("numpy")
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(1)
    blocks.store(hashes, payloads(hashes))
    lease = blocks.acquire(hashes)
    array = numpy.frombuffer(lease.views[0], dtype=numpy.uint8)
    with pytest.raises(errors.UsageError, match="drop it"):
        lease.release()
    assert array.tobytes() == payload(hashes[0])
    assert client.admin(wire.Stats(0))["sessions"]["leases"] == 1
    del array
    lease.release()
    assert client.admin(wire.Stats(0))["sessions"]["leases"] == 0


def test_a_lease_outlives_its_client(shared_daemon: Daemon) -> None:
    hashes = new_hashes(1)
    with Client(shared_daemon.socket, strict=True) as observer:
        with Client(shared_daemon.socket, strict=True) as client:
            blocks = client.namespace(flat_namespace())
            blocks.store(hashes, payloads(hashes))
            lease = blocks.acquire(hashes)
        assert observer.admin(wire.Stats(0))["sessions"]["leases"] == 1
        view = lease.views[0]
        assert view is not None
        assert bytes(view) == payload(hashes[0])
        del view
        lease.release()
        while observer.admin(wire.Stats(0))["sessions"]["leases"]:
            threading.Event().wait(0.001)


def test_counters_say_what_came_of_each_block(client: Client) -> None:
    blocks, hashes = client.namespace(flat_namespace()), new_hashes(4)
    blocks.store(hashes[:3], payloads(hashes[:3]))
    blocks.store(hashes[:1], payloads(hashes[:1]))
    blocks.fetch(hashes, empty_buffers(4))
    counts = client.stats.snapshot()
    assert counts["stored_blocks"] == 3
    assert counts["present_blocks"] == 1
    assert counts["hit_blocks"] == 3
    assert counts["misses"]["absent"] == 1
    assert counts["bytes_in"] == counts["bytes_out"] == 3 * BLOCK_BYTES
    assert counts["calls"] == 3
    assert counts["failures"] == {}


def test_a_fetch_that_was_looked_up_is_not_counted_twice(client: Client) -> None:
    namespace, hashes = flat_namespace(), new_hashes(4)
    blocks = client.namespace(namespace)
    blocks.store(hashes, payloads(hashes))
    blocks.lookup(hashes)
    blocks.fetch(hashes, empty_buffers(4), count=False)
    assert _counts(client, namespace)["queried_blocks"] == 4
    blocks.fetch(hashes, empty_buffers(4))
    assert _counts(client, namespace)["queried_blocks"] == 8


def test_a_batch_larger_than_memory_is_fetched_in_windows(short_dir: Path) -> None:
    """All of it lies on ssd; at no time does more than the tier hold have to be in memory."""
    size, count = 1 << 20, 48
    with (
        running(short_dir, cpu="16MiB", ssd="128MiB") as daemon,
        Client(daemon.socket, strict=True) as client,
    ):
        blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(count)
        for start in range(0, count, 4):
            part = hashes[start : start + 4]
            assert blocks.store(part, payloads(part, size), durable=True, wait_s=30).durable == 4
        into = empty_buffers(count, size)
        assert blocks.fetch(hashes, into, deadline_s=60).hits == count
        assert into == payloads(hashes, size)


def test_a_batch_beyond_one_window_is_stored_and_fetched(short_dir: Path) -> None:
    size, count = 1 << 20, 200
    with (
        running(short_dir, cpu="256MiB", ssd=None) as daemon,
        Client(daemon.socket, strict=True) as client,
    ):
        blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(count)
        source = payload(hashes[0], size)
        await_all_memory(client)
        told: list[int] = []
        assert blocks.store(hashes, [source] * count, progress=lambda done, _: told.append(done)).stored == count
        assert len(set(told)) > 2
        into = bytearray(count * size)
        assert blocks.fetch(hashes, into).hits == count
        assert into == source * count


@pytest.mark.parametrize("flags", [("--mode", "strict"), ("--verify-reads", "--checksum-at-seal", "always")])
def test_other_modes_serve_the_same_bytes(short_dir: Path, flags: tuple[str, ...]) -> None:
    with (
        running(short_dir, *flags, cpu="256MiB", ssd=None) as daemon,
        Client(daemon.socket, strict=True) as client,
    ):
        for size, count in ((BLOCK_BYTES, 300), (1 << 20, 90)):
            await_all_memory(client)
            blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(count)
            expected = payloads(hashes, size)
            assert blocks.store(hashes, expected).stored == count
            into = empty_buffers(count, size)
            assert blocks.fetch(hashes, into).hits == count
            assert into == expected
            with blocks.acquire(hashes[:3]) as lease:
                assert [bytes(view) for view in lease.views if view is not None] == expected[:3]


def test_what_finds_no_room_is_told_and_the_rest_is_stored(short_dir: Path) -> None:
    size = 1 << 20
    with (
        running(short_dir, cpu="16MiB", ssd=None) as daemon,
        Client(daemon.socket, strict=True) as client,
    ):
        blocks, hashes = client.namespace(flat_namespace(size)), new_hashes(24)
        stored = blocks.store(hashes, payloads(hashes, size))
        assert stored.stored + stored.count(Outcome.NO_ROOM) == 24
        assert stored.stored > 0
        into = empty_buffers(24, size)
        found = blocks.fetch(hashes, into, run=False)
        for at, outcome in enumerate(found.outcomes):
            if outcome == Outcome.HIT:
                assert into[at] == payload(hashes[at], size)
        assert client.admin(wire.Check(0))["ok"]


def _counts(client: Client, namespace: Namespace) -> dict[str, int]:
    (row,) = [
        row
        for row in client.admin(wire.Stats(0))["namespaces"]
        if row["digest"] in (namespace.digest.hex(), namespace.digest.hex()[: len(row["digest"])])
    ]
    counts: dict[str, int] = row
    return counts
