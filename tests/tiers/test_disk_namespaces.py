"""Namespaces forgotten on disk: their rows go, their numbers never come back, and neither does an older epoch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_namespaces import Namespaces
from kvstore.tiers.disk_records import DiskNamespace
from kvstore.tiers.index import Changes, Index
from tests.core.scale import examples
from tests.tiers.disk_blocks import MIB, Disk


def test_a_forgotten_namespace_leaves_the_index_and_returns_as_a_new_one(tmp_path: Path) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        old, last = [await disk.tier.add_namespace("tenant", name) for name in (b"old", b"last")]
        await disk.tier.set_epoch(old, 4)
        disk.tier.forget_namespaces([old, old, 999])
        await disk.tier.tidy_namespaces()
        assert [known.encoded for known in disk.tier.namespaces()] == [b"namespace", b"last"]
        assert await disk.tier.add_namespace("tenant", b"old") > last
        await disk.tier.set_epochs({old: 9})  # nobody's word any more
        await disk.tier.set_ttl(old, 1.0)
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert sorted(known.number for known in disk.tier.namespaces()) == [disk.namespace, last, last + 1]
        assert disk.tier.epoch_floor == 4
        await disk.tier.close()

    asyncio.run(run())


def test_no_number_is_given_twice_even_if_the_highest_is_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        given_before: set[int] = set()
        for turn in range(4):
            disk = await Disk.open(tmp_path)
            number = await disk.tier.add_namespace("tenant", b"%d" % turn)
            assert number not in given_before
            given_before.add(number)
            disk.tier.forget_namespaces(known.number for known in disk.tier.namespaces()[1:])
            await disk.tier.tidy_namespaces()
            await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert {known.number for known in disk.tier.namespaces()} == {disk.namespace, max(given_before)}
        await disk.tier.close()

    asyncio.run(run())


def test_records_that_a_forgotten_namespace_left_behind_belong_to_nobody(tmp_path: Path) -> None:
    """As if its blocks' deletes had failed: neither a restart nor its own return may bring them back."""

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        await disk.store(range(5), 64 << 10)
        await disk.tier.add_namespace("tenant", b"another")
        disk.tier.forget_namespaces([disk.namespace])
        await disk.tier.tidy_namespaces()
        again = await disk.tier.add_namespace("tenant", b"namespace")
        assert again != disk.namespace
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert disk.namespace == again
        assert disk.taken() == []
        assert disk.tier.usage().used_bytes == 0
        assert await disk.tier.check_integrity() == []
        await disk.tier.close()

    asyncio.run(run())


def test_of_two_rows_of_one_namespace_the_newer_counts(tmp_path: Path) -> None:
    """A kill came after it was registered anew and before its old row was deleted."""

    async def run() -> None:
        disk = await Disk.open(tmp_path)
        await disk.tier.set_epoch(disk.namespace, 3)
        blocks = await disk.store(range(3), 64 << 10)
        disk.tier.forget_namespaces([disk.namespace])
        again = await disk.tier.add_namespace("tenant", b"namespace")
        await disk.tier.close()
        disk = await Disk.open(tmp_path)
        assert (disk.namespace, disk.tier.epoch_floor) == (again, 3)
        assert [known.number for known in disk.tier.namespaces()] == [again]
        assert len(blocks) == 3
        await disk.tier.tidy_namespaces()
        await disk.tier.close()
        index = Index(tmp_path / "index", map_bytes=MIB, chunk_bytes=MIB)
        assert list(index.load_namespaces()) == [again]
        assert index.epoch_floor == 3
        index.close()

    asyncio.run(run())


def test_a_row_that_cannot_be_deleted_now_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        disk = await Disk.open(tmp_path)
        old = await disk.tier.add_namespace("tenant", b"old")
        await disk.tier.add_namespace("tenant", b"last")
        disk.tier.forget_namespaces([old])
        with monkeypatch.context() as broken:

            def fail(self: Index, changes: Changes, anchor: object) -> None:
                raise TierUnavailable("no index today")

            broken.setattr(Index, "commit", fail)
            with pytest.raises(TierUnavailable):
                await disk.tier.tidy_namespaces()
        for _ in range(100):
            try:
                await disk.tier.tidy_namespaces()
                break
            except TierUnavailable:
                disk.clock.advance(60)
        await disk.tier.close()
        index = Index(tmp_path / "index", map_bytes=MIB, chunk_bytes=MIB)
        assert old not in index.load_namespaces()
        index.close()

    asyncio.run(run())


steps = st.lists(
    st.tuples(st.sampled_from(["add", "drop", "forget", "tidy", "kill", "fail"]), st.integers(0, 3)), max_size=40
)


@settings(max_examples=examples(150), deadline=None)
@given(steps=steps)
def test_no_epoch_and_no_number_of_a_namespace_ever_comes_back(steps: list[tuple[str, int]]) -> None:
    """Against a plain model: what was durable at a kill is what the next life begins with."""

    async def run() -> None:
        on_disk: dict[int, DiskNamespace] = {}
        floor = [0]
        failing = [False]

        def change(changes: Changes) -> asyncio.Future[None]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if failing[0]:
                future.set_exception(TierUnavailable("not now"))
                return future
            for number, row in changes.namespaces.items():
                if row is None:
                    on_disk.pop(number, None)
                else:
                    on_disk[number] = row
            floor[0] = changes.epoch_floor or floor[0]
            future.set_result(None)
            return future

        rows = Namespaces({}, 0, change)
        number_of: dict[bytes, int] = {}
        owner_of: dict[int, bytes] = {}  # every number ever given
        highest: dict[bytes, int] = {}  # the epoch below which nothing of a name may be valid
        for verb, which in steps:
            name = b"%d" % which
            try:
                if verb == "add":
                    number = await rows.add("", name, 0.0, rows.epoch_floor)
                    assert owner_of.setdefault(number, name) == name
                    number_of[name] = number
                elif verb == "drop" and name in number_of:
                    epoch = rows.epoch_of(number_of[name]) + 1
                    await rows.set_epochs({number_of[name]: epoch})
                    highest[name] = epoch
                elif verb == "forget" and name in number_of:
                    rows.forget([number_of.pop(name)])
                elif verb == "tidy":
                    await rows.tidy()
                elif verb == "fail":
                    failing[0] = not failing[0]
            except TierUnavailable:
                pass
            if verb == "kill":
                rows = Namespaces(dict(on_disk), floor[0], change)
                number_of = {row.encoded: row.number for row in rows.known()}
                assert len(number_of) == len(rows.known())
            for known in rows.known():
                assert owner_of.get(known.number, known.encoded) == known.encoded
                assert known.epoch >= highest.get(known.encoded, 0), "what was dropped could be back"

    asyncio.run(run())
