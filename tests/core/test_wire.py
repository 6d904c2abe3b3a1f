"""The control protocol without sockets: every message survives the trip, and hostile bytes only ever end it."""

from __future__ import annotations

import os
import pickle
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import LocalProtocolError, RemoteProtocolError
from tests.core.scale import examples

H1, H2 = bytes(range(32)), bytes(range(32, 64))
REQUESTS: tuple[type[wire.Message], ...] = typing.get_args(wire.Request)
REPLIES: tuple[type[wire.Message], ...] = typing.get_args(wire.Reply)
SAMPLES: list[wire.Message] = [
    wire.Hello(1, 1, 1, "vllm 0.11", want_pool=False),
    wire.Ping(2**63),
    wire.Open(3, b"namespace", 60.5),
    wire.Lookup(4, 0, [H1, H2], run=False, max_ms=1.5),
    wire.Reserve(5, 1, [H1], 0.25),
    wire.Seal(6, 9, which=[0, 2], checksums=[1, 2**64 - 1], ttl_s=0.0, durable=True, wait_s=3.0),
    wire.Seal(6, 9),
    wire.Forfeit(7, 9, [1]),
    wire.Acquire(8, 1, [H1], copying=False, lease_s=1.0, wait_s=2.0, deadline_s=3.0, max_ms=4.0, run=True, count=False),
    wire.Release(9, 3),
    wire.Prefetch(10, 0, []),
    wire.Wait(11, 0, [H2], 10.0),
    wire.Cancel(12, 11),
    wire.Abort(13, 0, [H2]),
    wire.Drop(14, 0, [H2]),
    wire.GroupLookup(15, 0, [H1]),
    wire.Pin(16, H1, [H2], 7200.0),
    wire.Unpin(17, H1, [H2]),
    wire.Ttl(18, H1, [], 3600.0),
    wire.Bye(19),
    wire.Corrupt(20, 0, [H1]),
    wire.Stats(32),
    wire.Status(33),
    wire.Keys(34, H1, 10, 20, [H2]),
    wire.DropNamespace(35, None),
    wire.DropNamespace(35, H1),
    wire.Evict(36, "cpu", None, 1.5),
    wire.Check(37, verify=True),
    wire.Gc(38),
    wire.Drain(39, 5.0),
    wire.Dump(40, H1, "/var/lib/dump"),
    wire.Load(41, "/var/lib/dump"),
    wire.DropBlocks(42, H1, [H2]),
    wire.Failure(64, 201, "full: no slot by the deadline"),
    wire.Welcome(
        65, 1, H1[:16], 2, "engine", "default", "trusted", 1 << 40, 0, True, False, 8192, 4 << 20, 60.0, 10.0, 1 << 26,
        "0.1.0",
    ),
    wire.Done(66, 3),
    wire.Opened(67, 1, 0, 1 << 20),
    wire.Found(68, 2, bytes([wire.Outcome.HIT, wire.Outcome.HIT, wire.Outcome.ABSENT]), bytes([2, 6, 0])),
    wire.Reserved(69, 5, bytes([wire.Outcome.GRANTED]), [1 << 40], 10.0),
    wire.Sealed(70, bytes([wire.Outcome.SEALED])),
    wire.Acquired(71, 4, 9.5, bytes([wire.Outcome.HIT]), [4096], [2**64 - 1]),
    wire.Group(72, [b"a", b"b"], [b"\x01", b"\x10"]),
    wire.Progress(73, 1, 2, "blocks"),
    wire.Report(74, {"text": "é", "list": [1, 2.5, None, True], "map": {"a": {}}}),
]

MALFORMED: list[object] = [
    [4, 1, 0, [H1[:31]]],
    [4, 1, 0, [H1 + b"\x00"]],
    [4, 1, 0, ["text"]],
    [4, 1, 0, H1],
    [4, 1, 0, [H1] * (wire.KEYS_MAX + 1)],
    [4, 1, -1, [H1]],
    [4, 1.5, 0, [H1]],
    [4, "1", 0, [H1]],
    [5, 1, 0, [H1], -1.0],
    [5, 1, 0, [H1], float("nan")],
    [5, 1, 0, [H1], float("inf")],
    [5, 1, 0, [H1], 1e300],
    [6, 1, 2, [0] * (wire.KEYS_MAX + 1)],
    [6, 1, 2, [-1]],
    [3, 1, b"x" * ((1 << 16) + 1)],
    [1, 1, 1, 1, "x" * 4097],
    [16, 1, H1[:16], [H1], 1.0],
    [36, 1, "cpu", -1],
    [99, 1],
    [64, 1, 0, "a reply is no request"],
    [1],
    [],
    {},
    {"tag": 1},
    "text",
    7,
    None,
    b"bytes",
    [[[]]],
    [4, 1, 0, [[[]]]],
]


def decode(message: wire.Message, body: bytes) -> wire.Message:
    """Return what the other side of `message` reads."""
    read = wire.decode_request if isinstance(message, typing.cast("Any", wire.Request)) else wire.decode_reply
    return read(body)


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(message) for message in SAMPLES} == {*REQUESTS, *REPLIES}


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_trip(message: wire.Message) -> None:
    frame = wire.encode(message)
    assert wire.body_bytes(frame) == len(frame) - wire.LENGTH_BYTES
    assert decode(message, bytes(frame[wire.LENGTH_BYTES:])) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_another_messagepack_library_reads_and_writes_every_message(message: wire.Message) -> None:
    body = bytes(wire.encode(message)[wire.LENGTH_BYTES:])
    tag, *fields = msgpack.unpackb(body)
    assert tag == type(message).__struct_config__.tag
    assert fields == [getattr(message, name) for name in message.__struct_fields__]
    assert decode(message, msgpack.packb([tag, *fields])) == message


def test_no_tag_is_used_twice_and_none_has_moved() -> None:
    tags = {kind.__name__: kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES)}
    assert len(set(tags.values())) == len(tags)
    assert tags == {
        "Hello": 1, "Ping": 2, "Open": 3, "Lookup": 4, "Reserve": 5, "Seal": 6, "Forfeit": 7, "Acquire": 8,
        "Release": 9, "Prefetch": 10, "Wait": 11, "Cancel": 12, "Abort": 13, "Drop": 14, "GroupLookup": 15,
        "Pin": 16, "Unpin": 17, "Ttl": 18, "Bye": 19, "Corrupt": 20, "Stats": 32, "Status": 33, "Keys": 34,
        "DropNamespace": 35, "Evict": 36, "Check": 37, "Gc": 38, "Drain": 39, "Dump": 40, "Load": 41,
        "DropBlocks": 42, "Failure": 64, "Welcome": 65, "Done": 66, "Opened": 67, "Found": 68, "Reserved": 69,
        "Sealed": 70, "Acquired": 71, "Group": 72, "Progress": 73, "Report": 74,
    }  # fmt: skip


def test_outcomes_have_not_moved_and_misses_are_those_from_16_on() -> None:
    assert [(outcome.name, outcome.value) for outcome in wire.Outcome] == [
        ("HIT", 1), ("GRANTED", 2), ("PRESENT", 3), ("BUSY", 4), ("SEALED", 5), ("DURABLE", 6), ("LATER", 7),
        ("DONE", 8), ("ABSENT", 16), ("EXPIRED", 17), ("NO_ROOM", 18), ("CORRUPT", 19), ("BUDGET", 20),
        ("DEADLINE", 21), ("LAYOUT", 22), ("ABORTED", 23), ("UNAVAILABLE", 24), ("REFUSED", 25), ("NOT_DURABLE", 26),
    ]  # fmt: skip
    assert tuple(outcome for outcome in wire.Outcome if outcome.value >= 16) == wire.MISS_REASONS


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_peer_of_the_next_version_may_add_fields_at_the_end(message: wire.Message) -> None:
    body = msgpack.unpackb(bytes(wire.encode(message)[wire.LENGTH_BYTES:]))
    assert decode(message, msgpack.packb([*body, "new", [1, 2]])) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_fields_with_a_default_may_be_left_out(message: wire.Message) -> None:
    tag, *fields = msgpack.unpackb(bytes(wire.encode(message)[wire.LENGTH_BYTES:]))
    needed = len(fields) - len(message.__struct_defaults__)
    assert type(decode(message, msgpack.packb([tag, *fields[:needed]]))) is type(message)
    with pytest.raises(RemoteProtocolError):
        decode(message, msgpack.packb([tag, *fields[: needed - 1]]))


@pytest.mark.parametrize("body", MALFORMED, ids=repr)
def test_a_body_that_breaks_the_schema_is_refused(body: object) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_request(msgpack.packb(body))


@settings(max_examples=examples(300))
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_a_message(body: bytes) -> None:
    for read in (wire.decode_request, wire.decode_reply):
        try:
            assert isinstance(read(body), wire.Message)
        except RemoteProtocolError:
            pass


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=examples(300))
@given(
    tag=st.sampled_from([kind.__struct_config__.tag for kind in (*REQUESTS, *REPLIES)]),
    fields=st.lists(plain, max_size=8),
)
def test_random_fields_behind_a_real_tag_are_refused_or_a_message(tag: int, fields: list[object]) -> None:
    body = msgpack.packb([tag, *fields])
    for read in (wire.decode_request, wire.decode_reply):
        try:
            message = read(body)
        except RemoteProtocolError:
            continue
        assert type(message).__struct_config__.tag == tag
        # What was accepted is well-typed: it can be sent on as it is.
        assert msgspec.convert(msgspec.to_builtins(message), type(message)) is not None


@settings(max_examples=examples(200))
@given(
    sample=st.sampled_from(SAMPLES),
    where=st.integers(0, 10_000),
    byte=st.integers(0, 255),
    cut=st.integers(0, 10_000),
)
def test_a_changed_or_cut_message_is_refused_or_a_message(
    sample: wire.Message, where: int, byte: int, cut: int
) -> None:
    body = wire.encode(sample)[wire.LENGTH_BYTES:]
    body[where % len(body)] = byte
    for content in (body, body[: cut % len(body)]):
        try:
            assert isinstance(decode(sample, bytes(content)), wire.Message)
        except RemoteProtocolError:
            pass


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
def test_bodies_nested_without_end_are_refused(opening: bytes) -> None:
    for read in (wire.decode_request, wire.decode_reply):
        with pytest.raises(RemoteProtocolError):
            read(opening * 100_000)
        with pytest.raises(RemoteProtocolError):
            read(b"\x93\x4a\x01\x81\xa1a" + opening * 100_000)


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"], ids=["array", "map", "bin", "str"])
def test_a_body_that_announces_more_than_it_has_is_refused(kind: bytes) -> None:
    announced = kind + b"\xff\xff\xff\xff"
    for read in (wire.decode_request, wire.decode_reply):
        with pytest.raises(RemoteProtocolError):
            read(announced)
        with pytest.raises(RemoteProtocolError):
            read(b"\x94\x04\x01\x00" + announced)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "marker"), protocol)
    for body in (bomb, msgpack.packb([3, 1, bomb])[:-1]):
        with pytest.raises(RemoteProtocolError):
            wire.decode_request(body)
    # As an opaque field it is bytes and stays bytes.
    assert wire.decode_request(msgpack.packb([3, 1, bomb])) == wire.Open(1, bomb)
    assert not (tmp_path / "marker").exists()


# ---- frames


@pytest.mark.parametrize("length", [0, wire.FRAME_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_a_frame_of_a_length_that_is_not_allowed_is_refused_before_its_body_comes(length: int) -> None:
    frames = wire.FrameBuffer()
    with pytest.raises(RemoteProtocolError, match=str(length)):
        list(frames.feed(length.to_bytes(4, "little")))
    assert frames.buffered_bytes <= wire.LENGTH_BYTES


def test_a_bad_frame_behind_good_ones_is_refused_after_them() -> None:
    frames = wire.FrameBuffer()
    good = bytes(wire.encode(wire.Ping(1)))
    bodies = frames.feed(good + good + b"\xff\xff\xff\xff" + b"x" * 1000)
    assert [next(bodies), next(bodies)] == [good[4:], good[4:]]
    with pytest.raises(RemoteProtocolError):
        next(bodies)


def test_a_message_above_the_frame_limit_is_refused_by_its_sender() -> None:
    with pytest.raises(LocalProtocolError, match="Report"):
        wire.encode(wire.Report(1, {"text": "x" * wire.FRAME_BYTES_MAX}))


def test_the_largest_batch_fits_a_frame() -> None:
    hashes = [H1] * wire.KEYS_MAX
    largest = [2**63] * wire.KEYS_MAX
    for message in (
        wire.Acquire(2**63, 2**63, hashes),
        wire.Seal(2**63, 2**63, largest, largest),
        wire.Acquired(2**63, 2**63, 1.0, bytes(wire.KEYS_MAX), largest, largest),
    ):
        body = wire.encode(message)[wire.LENGTH_BYTES:]
        assert decode(message, bytes(body)) == message


def cuts(content: bytes, lengths: list[int]) -> Iterator[bytes]:
    """Yield `content` in pieces of these lengths, over and over."""
    at = turn = 0
    while at < len(content):
        length = lengths[turn % len(lengths)]
        yield content[at : at + length]
        at += length
        turn += 1


@settings(max_examples=examples(100))
@given(
    messages=st.lists(st.sampled_from(SAMPLES), max_size=12),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
)
def test_frames_come_out_whole_however_the_stream_is_cut(messages: list[wire.Message], lengths: list[int]) -> None:
    stream = b"".join(bytes(wire.encode(message)) for message in messages)
    frames = wire.FrameBuffer()
    bodies = [body for piece in cuts(stream, lengths) for body in frames.feed(piece)]
    assert [decode(message, body) for message, body in zip(messages, bodies, strict=True)] == messages
    assert frames.buffered_bytes == 0


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=64), max_size=20))
def test_a_random_stream_is_cut_into_frames_or_refused(pieces: list[bytes]) -> None:
    frames = wire.FrameBuffer()
    try:
        for piece in pieces:
            for body in frames.feed(piece):
                assert 0 < len(body) <= wire.FRAME_BYTES_MAX
            assert frames.buffered_bytes < wire.FRAME_BYTES_MAX + wire.LENGTH_BYTES
    except RemoteProtocolError:
        pass
