"""Daemons that break the protocol: an error or a miss, never a wrong byte, a crash or a leaked descriptor.

That no descriptor and no mapping is left is checked for every test by tests/conftest.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client, Outcome, errors
from kvstore import wire
from tests.client.blocks import BLOCK_BYTES, empty_buffers, flat_namespace, new_hashes, payloads
from tests.client.hostile import Answer, BadDaemon, good_greeting, send_with_fds
from tests.client.test_session import welcome


def _greeting(message: bytes | bytearray, sizes: list[int]) -> Answer:
    return lambda sock, _: send_with_fds(sock, message, sizes)


def _in_two_parts(sock: socket.socket, _: wire.Request) -> None:
    message = wire.encode(welcome(pool_bytes=4096))
    send_with_fds(sock, message[:10], [4096])
    send_with_fds(sock, message[10:], [4096])


BAD_GREETINGS: dict[str, Answer] = {
    "no descriptor where one belongs": _greeting(wire.encode(welcome(pool_bytes=4096)), []),
    "a descriptor where none belongs": _greeting(wire.encode(welcome()), [4096]),
    "two descriptors for one": _greeting(wire.encode(welcome(pool_bytes=4096)), [4096, 4096]),
    "eight descriptors": _greeting(wire.encode(welcome(pool_bytes=4096)), [4096] * 8),
    "more descriptors than are received": _greeting(wire.encode(welcome(pool_bytes=4096)), [4096] * 60),
    "a descriptor with each part of the message": _in_two_parts,
    "a pool shorter than announced": _greeting(wire.encode(welcome(pool_bytes=8192)), [4096]),
    "an arena shorter than announced": _greeting(
        wire.encode(welcome(pool_bytes=4096, arena_bytes=8192, mode="strict")), [4096, 4096]
    ),
    "garbage": lambda sock, _: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a frame without end": lambda sock, _: sock.sendall(b"\xff\xff\xff\xff"),
    "another reply": _greeting(wire.encode(wire.Done(1)), [4096]),
    "another number": _greeting(wire.encode(welcome(id=2, pool_bytes=4096)), [4096]),
    "two welcomes": _greeting(wire.encode(welcome()) * 2, []),
    "another protocol": _greeting(wire.encode(welcome(protocol=99)), []),
    "impossible limits": _greeting(wire.encode(welcome(keys_max=0)), []),
    "windows of nothing": _greeting(wire.encode(welcome(window_bytes=0)), []),
}


@pytest.mark.parametrize("kind", BAD_GREETINGS)
def test_a_bad_greeting_is_an_error_and_leaks_nothing(short_dir: Path, kind: str) -> None:
    hashes = new_hashes(2)
    with BadDaemon(short_dir, BAD_GREETINGS[kind]) as daemon:
        with Client(daemon.socket, strict=True) as client, pytest.raises(errors.ProtocolError):
            client.namespace(flat_namespace()).lookup(hashes)
        with Client(daemon.socket) as client:
            found = client.namespace(flat_namespace()).fetch(hashes, empty_buffers(2))
            assert found.outcomes == (Outcome.UNAVAILABLE,) * 2
            assert isinstance(found.failure, errors.ProtocolError)


def test_a_daemon_that_hangs_up_during_the_greeting_is_unreachable(short_dir: Path) -> None:
    def hang_up(sock: socket.socket, _: wire.Request) -> None:
        sock.shutdown(socket.SHUT_RDWR)

    with (
        BadDaemon(short_dir, hang_up) as daemon,
        Client(daemon.socket, strict=True) as client,
        pytest.raises(errors.PeerUnreachable),
    ):
        client.namespace(flat_namespace()).lookup(new_hashes(1))


def test_a_refused_greeting_raises_what_the_daemon_says(short_dir: Path) -> None:
    refusal = wire.encode(wire.Failure(1, errors.Backpressure.code, "1024 sessions are open"))
    with (
        BadDaemon(short_dir, _greeting(refusal, [])) as daemon,
        Client(daemon.socket, strict=True) as client,
        pytest.raises(errors.Backpressure, match="1024 sessions"),
    ):
        client.namespace(flat_namespace()).lookup(new_hashes(1))


Reply = Callable[[Any], wire.Message | bytes]


def _answers(reply: Reply) -> Answer:
    """Return an answer that opens namespaces properly and gives `reply` to what comes then."""

    def answer(sock: socket.socket, request: wire.Request) -> None:
        if isinstance(request, wire.Open):
            sock.sendall(wire.encode(wire.Opened(request.id, 1, 0, BLOCK_BYTES)))
        elif isinstance(request, (wire.Lookup, wire.Reserve, wire.Acquire, wire.Seal)):
            message = reply(request)
            sock.sendall(message if isinstance(message, bytes) else wire.encode(message))

    return answer


POOL_BYTES = 1 << 20
BAD_ACQUIRES: dict[str, Reply] = {
    "an offset behind the pool": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01\x01", [0, POOL_BYTES]),
    "an offset whose block ends behind the pool": lambda r: wire.Acquired(
        r.id, 1, 10.0, b"\x01\x01", [0, POOL_BYTES - BLOCK_BYTES + 1]
    ),
    "a huge offset": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01\x01", [0, (1 << 64) - 1]),
    "too few outcomes": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01", [0]),
    "too many outcomes": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01\x01\x01", [0, 0, 0]),
    "too few offsets": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01\x01", [0]),
    "unknown outcomes": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01\xee", [0, 0]),
    "outcomes of another verb": lambda r: wire.Acquired(r.id, 1, 10.0, b"\x02\x05", [0, 0]),
    "hits without a lease": lambda r: wire.Acquired(r.id, 0, 0.0, b"\x01\x01", [0, 0]),
    "another reply": lambda r: wire.Done(r.id),
    "another request's reply": lambda r: wire.Acquired(r.id + 5, 1, 10.0, b"\x01\x01", [0, 0]),
    "garbage": lambda r: b"\x05\x00\x00\x00hello",
    "a frame without end": lambda r: b"\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("kind", BAD_ACQUIRES)
def test_a_bad_answer_to_a_fetch_is_an_error_or_a_miss(short_dir: Path, kind: str) -> None:
    hashes = new_hashes(2)
    with BadDaemon(short_dir, good_greeting(POOL_BYTES), _answers(BAD_ACQUIRES[kind])) as daemon:
        with Client(daemon.socket, strict=True) as client, pytest.raises(errors.RemoteProtocolError):
            client.namespace(flat_namespace()).fetch(hashes, empty_buffers(2))
        with Client(daemon.socket) as client:
            found = client.namespace(flat_namespace()).fetch(hashes, empty_buffers(2))
            assert found.outcomes == (Outcome.UNAVAILABLE,) * 2
            assert client.stats.snapshot()["failures"] == {"RemoteProtocolError": 1}


@pytest.mark.parametrize("kind", [kind for kind in BAD_ACQUIRES if kind != "hits without a lease"])
def test_a_bad_answer_to_an_acquire_is_an_error(short_dir: Path, kind: str) -> None:
    with (
        BadDaemon(short_dir, good_greeting(POOL_BYTES), _answers(BAD_ACQUIRES[kind])) as daemon,
        Client(daemon.socket, strict=True) as client,
        pytest.raises(errors.RemoteProtocolError),
    ):
        client.namespace(flat_namespace()).acquire(new_hashes(2))


BAD_RESERVES: dict[str, Reply] = {
    "an offset behind the pool": lambda r: wire.Reserved(r.id, 1, b"\x02\x02", [0, POOL_BYTES], 10.0),
    "too few offsets": lambda r: wire.Reserved(r.id, 1, b"\x02\x02", [0], 10.0),
    "too few outcomes": lambda r: wire.Reserved(r.id, 1, b"\x02", [0], 10.0),
    "hits": lambda r: wire.Reserved(r.id, 1, b"\x01\x01", [0, 0], 10.0),
    "unknown outcomes": lambda r: wire.Reserved(r.id, 1, b"\x02\x00", [0, 0], 10.0),
    "a seal with too many outcomes": lambda r: (
        wire.Reserved(r.id, 1, b"\x02\x02", [0, 0], 10.0)
        if isinstance(r, wire.Reserve)
        else wire.Sealed(r.id, b"\x05\x05\x05")
    ),
    "a seal that grants": lambda r: (
        wire.Reserved(r.id, 1, b"\x02\x02", [0, 0], 10.0)
        if isinstance(r, wire.Reserve)
        else wire.Sealed(r.id, b"\x02\x02")
    ),
}


@pytest.mark.parametrize("kind", BAD_RESERVES)
def test_a_bad_answer_to_a_store_is_an_error_or_not_stored(short_dir: Path, kind: str) -> None:
    hashes = new_hashes(2)
    with BadDaemon(short_dir, good_greeting(POOL_BYTES), _answers(BAD_RESERVES[kind])) as daemon:
        with Client(daemon.socket, strict=True) as client, pytest.raises(errors.RemoteProtocolError):
            client.namespace(flat_namespace()).store(hashes, payloads(hashes))
        with Client(daemon.socket) as client:
            stored = client.namespace(flat_namespace()).store(hashes, payloads(hashes))
            assert (stored.stored, stored.failed) == (0, 2)


@pytest.mark.parametrize("outcomes", [b"", b"\x01\x01\x01", b"\x00\x00", b"\xff\xff"])
def test_a_bad_answer_to_a_lookup_is_an_error(short_dir: Path, outcomes: bytes) -> None:
    with (
        BadDaemon(
            short_dir, good_greeting(POOL_BYTES), _answers(lambda r: wire.Found(r.id, 2, outcomes))
        ) as daemon,
        Client(daemon.socket, strict=True) as client,
        pytest.raises(errors.RemoteProtocolError),
    ):
        client.namespace(flat_namespace()).lookup(new_hashes(2))


def test_places_in_a_pool_that_was_never_sent_are_refused(short_dir: Path) -> None:
    acquired = _answers(lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01", [0]))
    with (
        BadDaemon(short_dir, good_greeting(0), acquired) as daemon,
        Client(daemon.socket, strict=True) as client,
        pytest.raises(errors.RemoteProtocolError, match="did not send"),
    ):
        client.namespace(flat_namespace()).fetch(new_hashes(1), empty_buffers(1))


def test_a_namespace_of_another_size_is_refused(short_dir: Path) -> None:
    def answer(sock: socket.socket, request: wire.Request) -> None:
        sock.sendall(wire.encode(wire.Opened(request.id, 1, 0, BLOCK_BYTES + 1)))

    with (
        BadDaemon(short_dir, good_greeting(POOL_BYTES), answer) as daemon,
        Client(daemon.socket, strict=True) as client,
        pytest.raises(errors.RemoteProtocolError, match="compatible"),
    ):
        client.namespace(flat_namespace()).lookup(new_hashes(1))


def test_bytes_that_do_not_match_their_checksum_are_a_miss(short_dir: Path) -> None:
    acquired = _answers(lambda r: wire.Acquired(r.id, 1, 10.0, b"\x01\x01", [0, 0], [1, 0]))
    with (
        BadDaemon(short_dir, good_greeting(POOL_BYTES, verify_reads=True), acquired) as daemon,
        Client(daemon.socket) as client,
    ):
        blocks = client.namespace(flat_namespace())
        assert blocks.fetch(new_hashes(2), empty_buffers(2), run=False).outcomes == (Outcome.CORRUPT, Outcome.HIT)
        with blocks.acquire(new_hashes(2)) as lease:
            assert lease.outcomes == (Outcome.CORRUPT,) * 2
            assert list(lease.views) == []


def test_a_lease_that_is_over_before_the_copy_is_asked_for_again_until_the_deadline(short_dir: Path) -> None:
    acquired = _answers(lambda r: wire.Acquired(r.id, 1, 0.0, b"\x01", [0]))
    with (
        BadDaemon(short_dir, good_greeting(POOL_BYTES), acquired) as daemon,
        Client(daemon.socket) as client,
    ):
        found = client.namespace(flat_namespace()).fetch(new_hashes(1), empty_buffers(1), deadline_s=0.05)
        assert found.outcomes == (Outcome.DEADLINE,)
        assert sum(isinstance(request, wire.Acquire) for request in daemon.received) > 1


def test_an_operators_question_raises_what_the_daemon_says(short_dir: Path) -> None:
    def answer(sock: socket.socket, request: wire.Request) -> None:
        if isinstance(request, wire.Gc):
            sock.sendall(wire.encode(wire.Progress(request.id, 1, 2)))
            sock.sendall(wire.encode(wire.Failure(request.id, 9999, "of a later version")))

    told: list[tuple[int, int]] = []
    with (
        BadDaemon(short_dir, good_greeting(POOL_BYTES), answer) as daemon,
        Client(daemon.socket) as client,
        pytest.raises(errors.KVStoreError, match="later version"),
    ):
        client.admin(wire.Gc(0), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2)]
