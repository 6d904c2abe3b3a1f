"""The session without I/O: what is expected, given up, undone and refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient._session import ABANDONED_MAX, Session
from kvstore import wire
from kvstore.errors import RemoteProtocolError
from kvstore.wire import Outcome


def welcome(**changes: Any) -> wire.Welcome:
    fields: dict[str, Any] = {
        "id": 1,
        "protocol": 1,
        "boot_id": b"boot",
        "session": 1,
        "role": "engine",
        "tenant": "",
        "mode": "trusted",
        "pool_bytes": 0,
        "arena_bytes": 0,
        "checksum_at_seal": False,
        "verify_reads": False,
        "keys_max": 8192,
        "frame_bytes_max": wire.FRAME_BYTES_MAX,
        "lease_s_max": 60.0,
        "reservation_s": 10.0,
        "window_bytes": 64 << 20,
        "version": "0",
    }
    return wire.Welcome(**{**fields, **changes})


def new_session() -> Session:
    return Session(welcome(), None)


def asked(session: Session, kind: type[wire.Message] = wire.Ping, *arguments: Any) -> int:
    message = kind(session.next_id(), *arguments)
    session.sent([message])
    return message.id


def test_replies_find_their_requests_in_any_order_and_any_pieces() -> None:
    session = new_session()
    first, second = asked(session), asked(session)
    received = wire.encode(wire.Done(second, 2)) + wire.encode(wire.Done(first, 1))
    touched = [request for at in range(len(received)) for request in session.feed(received[at : at + 1])]
    assert touched == [second, first]
    assert session.take(first) == wire.Done(first, 1)
    assert session.take(second) == wire.Done(second, 2)
    assert session.take(first) is None


def test_progress_comes_before_the_reply_and_does_not_end_the_request() -> None:
    session = new_session()
    request = asked(session)
    for message in (wire.Progress(request, 1, 2), wire.Progress(request, 2, 2), wire.Done(request)):
        session.feed(wire.encode(message))
    assert [type(session.take(request)) for _ in range(4)] == [wire.Progress, wire.Progress, wire.Done, type(None)]


def test_a_reply_that_nobody_asked_for_is_refused() -> None:
    session = new_session()
    request = asked(session)
    session.feed(wire.encode(wire.Done(request)))
    with pytest.raises(RemoteProtocolError):
        session.feed(wire.encode(wire.Done(request)))
    with pytest.raises(RemoteProtocolError):
        new_session().feed(wire.encode(wire.Done(7)))


def test_an_abandoned_request_is_cancelled() -> None:
    session = new_session()
    request = asked(session)
    session.abandon(request)
    cancel, ping = session.unsent()
    assert isinstance(cancel, wire.Cancel)
    assert cancel.request == request
    assert isinstance(ping, wire.Ping)
    assert session.has_abandoned
    assert session.unsent() == []


@pytest.mark.parametrize(
    ("late", "undo"),
    [
        (wire.Acquired(0, 77, 10.0, b"\x01", [0]), wire.Release(0, 77)),
        (wire.Reserved(0, 88, bytes([Outcome.PRESENT, Outcome.GRANTED]), [0, 0], 10.0), wire.Forfeit(0, 88)),
        (wire.Acquired(0, 0, 0.0, b"\x10", [0]), None),
        (wire.Reserved(0, 88, bytes([Outcome.PRESENT]), [0], 10.0), None),
        (wire.Failure(0, 1, "no"), None),
        (wire.Done(0), None),
    ],
)
@pytest.mark.parametrize("arrives", ["after", "before"])
def test_what_a_late_reply_grants_is_given_back(
    late: wire.Message, undo: wire.Message | None, arrives: str
) -> None:
    undone: list[bool] = []
    session = Session(welcome(), None, on_undo=lambda: undone.append(True))
    request = asked(session)
    reply = wire.encode(renumbered(late, request))
    if arrives == "before":
        session.feed(reply)
        session.abandon(request)
    else:
        session.abandon(request)
        session.unsent()
        session.feed(reply)
    given_back = [renumbered(message, 0) for message in session.unsent()]
    assert given_back == ([undo] if undo is not None else [])
    assert len(undone) == len(given_back)
    assert session.take(request) is None


def test_the_ping_behind_a_cancel_ends_what_never_gets_a_reply() -> None:
    session = new_session()
    for _ in range(3 * ABANDONED_MAX):
        session.abandon(asked(session))
        _, ping = session.unsent()
        session.feed(wire.encode(wire.Done(ping.id)))
    assert not session.has_abandoned
    assert not session.is_worn_out


def test_a_session_with_many_requests_given_up_is_worn_out() -> None:
    session = new_session()
    for _ in range(ABANDONED_MAX):
        session.abandon(asked(session))
    assert session.is_worn_out


def test_a_request_is_abandoned_once() -> None:
    session = new_session()
    request = asked(session)
    session.abandon(request)
    session.unsent()
    session.abandon(request)
    assert session.unsent() == []


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused_or_wait_for_more(received: bytes) -> None:
    session = new_session()
    try:
        assert session.feed(received) == []
    except RemoteProtocolError:
        pass


def renumbered(message: wire.Message, number: int) -> wire.Message:
    return msgspec.structs.replace(message, id=number)
