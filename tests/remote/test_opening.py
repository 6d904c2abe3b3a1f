"""What `--remote URL` may say, what is printed of it, and how objects are named and read."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import ManualClock, SystemClock
from kvstore.errors import Backpressure, BadRecord, BadSetting, CorruptionError, TierUnavailable
from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteWrite
from kvstored.remote.health import HASTY_TIMEOUTS_MAX, Health
from kvstored.remote.opening import check_url, default_writer, open_store, shown
from kvstored.remote.packing import (
    MERGE_GAP_BYTES,
    MERGED_BYTES_MAX,
    TRAILER_BYTES,
    PackName,
    assemble,
    merged,
    pack_bytes,
    read_table,
    table_span,
)
from kvstored.remote.records import HEADER_BYTES, checked, life_left_s, pack_header, read_header, scope_id
from kvstored.remote.redis_client import RedisPlace
from tests.remote.places import OTHER_SCOPE, SCOPE, hash_of, payload_of


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/some/prefix", "gs://bucket", "az://container/x", "file:///var/kv", "redis://host", "rediss://u:p@h:1/2",
     "valkey://a:1,b:2,[::1]:3/0?prefix=team-a"],
)  # fmt: skip
def test_urls_of_every_kind_are_taken(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://host/x", "begins with none of"),
        ("/var/kv", "begins with none of"),
        ("file:///", "names no directory"),
        ("file://host/dir", "names no directory"),
        ("s3:///prefix", "names no bucket"),
        ("redis://:secret@/0", "names no host"),
        ("s3://key:secret@bucket/x", "come from the environment"),
        ("s3://bucket/x?secret=secret", "come from the environment"),
    ],
)
def test_other_urls_are_refused_without_a_credential_in_the_text(url: str, told: str) -> None:
    with pytest.raises(BadSetting, match=told) as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["redis://u:secret@host:x", "redis://u:secret@host/name", "redis://u:secret@h/0?pre=x", "redis://:secret@h?prefix=a*"],
)
def test_a_redis_url_that_can_not_be_read_says_why_without_the_password(url: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_store(url, 1 << 20, "writer", SystemClock(), 10.0)
    assert "secret" not in str(caught.value)


def test_a_redis_url_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read = RedisPlace.read("rediss://user:p%40ss@a:1,[::1]:2,c/3?prefix=team&ca=/etc/ca.pem")
    assert read.hosts == (("a", 1), ("::1", 2), ("c", 6379))
    assert (read.database, read.prefix, read.tls, read.ca) == (3, "team", True, "/etc/ca.pem")
    assert (read.user, read.password) == ("user", "p@ss")
    assert "p@ss" not in repr(read) + read.text
    assert "user" not in repr(read) + read.text
    monkeypatch.setenv("REDIS_PASSWORD", "from-environment")
    assert RedisPlace.read("redis://host").password == "from-environment"
    assert shown("redis://user:p%40ss@a:1/3?prefix=team") == "redis://a:1/3?prefix=team"
    assert shown("s3://key:secret@bucket/x?token=secret") == "s3://bucket/x"


def test_a_writers_name_is_its_hosts_and_sockets_and_stays(tmp_path: Path) -> None:
    one, two = default_writer(tmp_path / "a"), default_writer(tmp_path / "b")
    assert one == default_writer(tmp_path / "a") != two
    assert PackName.read(PackName.make(one, bytes(32), 0, 1.0, NEVER_S, "0").text) is not None


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**32 - 1),
    st.floats(0, 2e9),
    st.floats(1, 2e9) | st.just(NEVER_S),
)
def test_a_name_says_what_it_was_made_of(scope: bytes, epoch: int, written_s: float, expires_s: float) -> None:
    name = PackName.make("node.1-x", scope, epoch, written_s, expires_s, "abc-1f")
    assert PackName.read(name.text) == name
    assert (name.scope, name.epoch, name.writer) == (scope, epoch, "node.1-x")
    assert math.isclose(name.written_s, written_s, abs_tol=0.002)
    assert name.expires_s >= expires_s - 0.001


@given(st.text(max_size=200))
def test_names_that_are_none_of_ours_are_told_from_ours(text: str) -> None:
    assert PackName.read(f"packs/{text}") is None


def test_an_object_is_read_by_its_end_and_each_record_by_itself() -> None:
    writes = [RemoteWrite(hash_of(key), memoryview(payload_of(key, 100 * key + 1)), generation=key) for key in range(9)]
    content, table = assemble(SCOPE, scope_id(SCOPE), 3, writes, 1000.0)
    assert len(content) == pack_bytes([len(write.payload) for write in writes])
    starts, ends = table_span(memoryview(content)[-TRAILER_BYTES:], len(content))
    again = read_table(memoryview(content)[starts:ends], memoryview(content)[-TRAILER_BYTES:], starts)
    assert again == table
    for write, offset, length in zip(writes, table.offsets, table.lengths, strict=True):
        raw = memoryview(content)[offset : offset + HEADER_BYTES + length]
        header, payload = checked(raw, write.hash, scope_id(SCOPE), 3, length)
        assert payload == write.payload
        assert (header.generation, header.written_s, header.expires_s) == (write.generation, 1000.0, NEVER_S)
        for wrong in (
            (hash_of(77), scope_id(SCOPE), 3, length),
            (write.hash, scope_id(OTHER_SCOPE), 3, length),
            (write.hash, scope_id(SCOPE), 4, length),
            (write.hash, scope_id(SCOPE), 3, length + 1),
        ):
            with pytest.raises(CorruptionError):
                checked(raw, *wrong)


@given(st.data())
def test_no_changed_byte_of_an_object_goes_unseen(data: st.DataObject) -> None:
    writes = [RemoteWrite(hash_of(key), memoryview(payload_of(key, 50))) for key in range(3)]
    content, table = assemble(SCOPE, scope_id(SCOPE), 0, writes, 1000.0)
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    seen = 0
    for write, offset in zip(writes, table.offsets, strict=True):
        try:
            checked(memoryview(content)[offset:], write.hash, scope_id(SCOPE), 0, 50)
        except CorruptionError:
            seen += 1
    try:
        starts, ends = table_span(memoryview(content)[-TRAILER_BYTES:], len(content))
        read_table(memoryview(content)[starts:ends], memoryview(content)[-TRAILER_BYTES:], starts)
    except BadRecord:
        seen += 1
    assert seen == 1


@given(st.binary(max_size=400))
def test_random_bytes_are_no_record_and_no_end_of_an_object(raw: bytes) -> None:
    with pytest.raises(CorruptionError):
        read_header(raw)
    with pytest.raises(BadRecord):
        table_span(memoryview(raw), len(raw))


def test_a_header_whose_times_are_no_numbers_is_refused() -> None:
    write = RemoteWrite(hash_of(1), memoryview(b"x"), life_s=float("nan"))
    with pytest.raises(BadRecord):
        read_header(pack_header(SCOPE, scope_id(SCOPE), 0, write, 1.0))
    assert struct.calcsize("<4sHH32s32s32sQQQddQ") + 8 == HEADER_BYTES


@pytest.mark.parametrize(
    ("expires_s", "now_s", "left_s"),
    [(NEVER_S, 5.0, NEVER_S), (110.0, 105.0, 5.0), (110.0, 50.0, 10.0), (110.0, 111.0, -1.0)],
)
def test_the_life_that_is_left_is_never_more_than_was_given(expires_s: float, now_s: float, left_s: float) -> None:
    assert life_left_s(100.0, expires_s, now_s) == left_s


@given(st.lists(st.tuples(st.integers(0, 1 << 26), st.integers(1, 1 << 21)), max_size=40))
def test_merged_reads_cover_every_record_once_and_stay_within_their_bounds(spans: list[tuple[int, int]]) -> None:
    ends = [(start, start + length) for start, length in spans]
    ranges = merged(ends)
    assert sorted(at for found in ranges for at in found.members) == list(range(len(ends)))
    for found in ranges:
        members = [ends[at] for at in found.members]
        assert found.start == min(start for start, _ in members)
        assert found.end == max(end for _, end in members)
        assert len(members) == 1 or found.end - found.start <= MERGED_BYTES_MAX
        reached = found.start
        for start, end in sorted(members):
            assert start - reached <= MERGE_GAP_BYTES
            reached = max(reached, end)


def test_adjacent_records_are_read_with_one_request() -> None:
    assert [(r.start, r.end) for r in merged([(200, 300), (0, 100), (100, 200)])] == [(0, 300)]


def fail(health: Health, exc: Exception, within_s: float = 5.0) -> None:
    with pytest.raises(type(exc)), health.call(within_s):
        raise exc


def degraded(health: Health) -> bool:
    return health.is_degraded


def turned_away(health: Health) -> bool:
    outcome = False
    try:
        with health.call(5.0):
            pass
    except TierUnavailable:
        outcome = True
    return outcome


def test_a_store_that_fails_is_asked_by_one_caller_after_a_pause_that_grows() -> None:
    clock = ManualClock()
    health = Health("place", clock)
    pause_s = 0.0
    for _ in range(3):
        fail(health, TierUnavailable("away"))
        began_s = clock.now_s
        while turned_away_without_asking(health):
            clock.advance(0.05)
        assert clock.now_s - began_s > pause_s
        pause_s = clock.now_s - began_s
    assert degraded(health)
    with health.call(5.0):
        assert turned_away(health)  # one is asking
    assert not degraded(health)
    assert not turned_away(health)


def turned_away_without_asking(health: Health) -> bool:
    """Return whether a call would be turned away; one that is not leaves the store as it was thought of."""
    outcome = False
    try:
        with health.call(5.0):
            raise KeyboardInterrupt  # neither good news nor bad
    except TierUnavailable:
        outcome = True
    except KeyboardInterrupt:
        pass
    return outcome


def test_who_is_in_a_hurry_calls_a_store_slow_only_after_several_times() -> None:
    health = Health("place", ManualClock())
    for _ in range(HASTY_TIMEOUTS_MAX - 1):
        fail(health, TimeoutError(), within_s=0.01)
    assert not degraded(health)
    fail(health, TimeoutError(), within_s=0.01)
    assert degraded(health)
    patient = Health("place", ManualClock())
    fail(patient, TimeoutError(), within_s=5.0)
    assert degraded(patient)
    assert patient.timeouts == 1


def test_a_store_that_asks_for_fewer_requests_gets_them() -> None:
    health = Health("place", ManualClock())
    fail(health, Backpressure("slow down"))
    assert (health.throttled, health.errors, degraded(health)) == (1, 0, True)
    assert turned_away(health)
