"""What every remote store promises, on real servers of each kind: a block comes back exact, or it is a miss."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteRead
from kvstore.wire import Outcome
from tests.remote.places import (
    BLOCK_BYTES,
    MIB,
    OTHER_SCOPE,
    SCOPE,
    WITHIN_S,
    Place,
    eventually,
    eventually_found,
    hash_of,
    payload_of,
    run,
)


def test_blocks_are_exact_for_who_wrote_them_for_others_and_after_a_restart(any_place: Place) -> None:
    async def scenario() -> None:
        keys = range(40)
        async with any_place.opened("node-1") as writer:
            assert await writer.write(keys) == [Outcome.DURABLE] * 40
            assert await writer.found([*keys, 99]) == [True] * 40 + [False]
            assert await writer.outcomes([*keys, 99]) == [Outcome.HIT] * 40 + [Outcome.ABSENT]
            async with any_place.opened("node-2") as reader:
                await eventually_found(reader, keys, [True] * 40)
                assert await reader.outcomes(keys) == [Outcome.HIT] * 40
        async with any_place.opened("node-1") as again:
            await eventually_found(again, keys, [True] * 40)
            found = await again.read(list(reversed(keys)))
            assert [(each.outcome, each.life_s) for each in found] == [(Outcome.HIT, NEVER_S)] * 40

    run(scenario())


@pytest.mark.parametrize("length", [1, 100, 4097, 3 * MIB])
def test_blocks_of_every_size_are_exact(any_place: Place, length: int) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            assert await opened.write(range(5), length=length) == [Outcome.DURABLE] * 5
            assert await opened.outcomes([4, 0, 2], length=length) == [Outcome.HIT] * 3

    run(scenario())


def test_a_block_that_is_there_is_not_written_again(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            await opened.write([1])
            used_bytes = opened.store.usage().used_bytes
            assert await opened.write([1, 2]) == [Outcome.PRESENT, Outcome.DURABLE]
            await opened.write([1, 2])
            assert opened.store.usage().used_bytes < 2.5 * used_bytes

    run(scenario())


def test_scopes_do_not_see_each_other(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            await opened.write([1, 2])
            await opened.write([2], scope=OTHER_SCOPE)
            assert await opened.outcomes([1, 2], scope=OTHER_SCOPE) == [Outcome.ABSENT, Outcome.HIT]

    run(scenario())


def test_a_drop_is_seen_at_once_here_soon_by_others_and_after_a_restart(any_place: Place) -> None:
    async def scenario() -> None:
        keys = range(6)
        async with any_place.opened("node-1") as one, any_place.opened("node-2") as two:
            await one.write(keys)
            await one.write(keys, scope=OTHER_SCOPE)
            await eventually_found(two, keys, [True] * 6)
            await two.store.drop(SCOPE, WITHIN_S)
            assert await two.found(keys) == [False] * 6
            assert await two.outcomes(keys) == [Outcome.ABSENT] * 6
            await eventually_found(one, keys, [False] * 6)
            assert await one.outcomes(keys, scope=OTHER_SCOPE) == [Outcome.HIT] * 6
            assert await one.write([0, 1]) == [Outcome.DURABLE] * 2
            assert await one.outcomes([0, 1, 2]) == [Outcome.HIT, Outcome.HIT, Outcome.ABSENT]
        async with any_place.opened("node-1") as again:
            await eventually_found(again, keys, [True] * 2 + [False] * 4)
            await eventually_found(again, keys, [True] * 6, OTHER_SCOPE)
            await eventually(lambda: again.store.usage().blocks == 8)  # what was dropped is reclaimed

    run(scenario())


def test_a_drop_of_all_reaches_what_this_daemon_never_heard_of(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened("node-1") as one, any_place.opened("node-2") as two:
            await one.write(range(3))
            await one.write(range(3), scope=OTHER_SCOPE)
            await two.store.drop_all(WITHIN_S)
            assert await two.found(range(3), OTHER_SCOPE) == [False] * 3
            await eventually_found(one, range(3), [False] * 3)
            assert await one.write([0]) == [Outcome.DURABLE]
            assert await one.outcomes([0, 1]) == [Outcome.HIT, Outcome.ABSENT]

    run(scenario())


def test_single_blocks_can_be_deleted_for_all(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened("node-1") as one, any_place.opened("node-2") as two:
            await one.write(range(3))
            await one.write([10])
            await eventually_found(two, [0, 1, 2, 10], [True] * 4)
            await two.store.delete(SCOPE, [hash_of(1), hash_of(77)], WITHIN_S)
            assert await two.found([1]) == [False]
            assert await two.found([10]) == [True]
            await eventually_found(one, [1], [False])
            assert await one.write([1]) == [Outcome.DURABLE]
            assert await one.outcomes([1, 10]) == [Outcome.HIT] * 2

    run(scenario())


def test_a_life_ends_by_the_wall_clock_and_is_never_made_longer(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            await opened.write([1], life_s=3600.0)
            await opened.write([2])
            (found,) = await opened.read([1])
            assert 3500 < found.life_s <= 3600
            any_place.clock.ahead_s = -86_400.0  # set back by a day
            (found,) = await opened.read([1])
            assert found.life_s <= 3600
            any_place.clock.ahead_s = 3601.0
            (over, other) = await opened.outcomes([1, 2])
            assert over in (Outcome.ABSENT, Outcome.EXPIRED)
            assert other is Outcome.HIT

    run(scenario())


def test_the_store_itself_forgets_what_is_over(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            await opened.write([1, 2], life_s=0.3)
            await opened.write([3])
            await eventually(lambda: opened.store.usage().blocks == 1)
            assert await opened.found([1, 2, 3]) == [False, False, True]

    run(scenario())


def test_a_buffer_of_another_length_is_a_miss(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            await opened.write([1])
            buffer = bytearray(BLOCK_BYTES + 1)
            (found,) = await opened.store.read(SCOPE, [RemoteRead(hash_of(1), memoryview(buffer))], WITHIN_S)
            assert found.outcome is Outcome.CORRUPT
            assert buffer == bytes(len(buffer))

    run(scenario())


def test_used_bytes_never_pass_the_cap_and_the_oldest_make_room(any_place: Place) -> None:
    async def scenario() -> None:
        any_place.capacity_bytes = 2 * MIB
        async with any_place.opened() as opened:
            refused = 0
            room = any_place.capacity_bytes - BLOCK_BYTES * 2
            for key in range(60):  # 3.75 MiB, one object each
                any_place.clock.ahead_s = 20.0 * key  # ages are told apart by ten seconds
                (outcome,) = await opened.write([key])
                refused += outcome is Outcome.NO_ROOM
                assert opened.store.usage().used_bytes <= any_place.capacity_bytes
                if outcome is Outcome.NO_ROOM:  # Redis makes room in the background
                    await eventually(lambda: opened.store.usage().used_bytes < room)
            assert opened.store.usage().refused_full == refused
            kept = await opened.found(range(60))
            assert 20 <= sum(kept) <= 32
            assert not any(kept[:10])
            assert any(kept[-3:])

    run(scenario())


def test_many_readers_and_writers_at_once_get_exact_blocks(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened("node-1") as one, any_place.opened("node-2") as two:
            await one.write(range(16))
            await eventually_found(two, range(16), [True] * 16)

            async def read(opened_by_two: bool, start: int) -> None:
                opened = two if opened_by_two else one
                keys = [(start + step) % 16 for step in range(8)]
                assert await opened.outcomes(keys) == [Outcome.HIT] * 8

            async with asyncio.TaskGroup() as tasks:
                for start in range(16):
                    tasks.create_task(read(start % 2 == 0, start))
                    tasks.create_task(one.write([100 + start, 101 + start]))
                    tasks.create_task(two.write([100 + start, 200 + start]))
            await eventually_found(one, [*range(100, 117), *range(200, 216)], [True] * 33)
            assert set(await one.outcomes([*range(100, 117), *range(200, 216)])) == {Outcome.HIT}

    run(scenario())


def test_nothing_of_a_tenant_or_of_credentials_is_told(any_place: Place) -> None:
    async def scenario() -> None:
        async with any_place.opened() as opened:
            await opened.write([1])
            text = repr(opened.store.usage())
            assert "test-secret" not in text
            assert payload_of(1)[:20].hex() not in text

    run(scenario())
