"""Before a daemon joins, a member connects back to the address that it advertises.

An address can be wrong in ways that its own machine can't see: a bridge that exists everywhere, a firewall, a NAT. What
the member reaches there must be the same daemon, in the same boot: another one at that address would answer for it.

Only a member that was greeted may ask, so the token's holders alone can have a daemon connect anywhere.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

import msgspec

from kvstore.errors import KVStoreError, PeerUnreachable, RemoteProtocolError
from kvstored.remote.advertise import DIAL_BACK_S, Choice, unreachable
from kvstored.remote.greeting import Conversation, Pool, calling, receive_frame, send
from kvstored.remote.members import Member

_ANSWER_MARGIN_S = 0.5
_T = TypeVar("_T", bound=msgspec.Struct)


class DialBack(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Asks to be called at the address that the asking daemon has given in its greeting."""


class DialedBack(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Answers DialBack; `why` is empty if the daemon was met there, else what stood in the way."""

    why: Annotated[str, msgspec.Meta(max_length=1000)]


async def check(conversation: Conversation, choice: Choice) -> None:
    """Have the other end of a conversation connect back, and return if it reaches this daemon.

    Raises
    ------
    PeerUnreachable
        It does not, or gives no answer in time; the text lists this machine's addresses and says what to set.
    RemoteProtocolError
        What it answers makes no sense.
    """
    send(conversation.writer, DialBack())
    try:
        async with asyncio.timeout(DIAL_BACK_S + _ANSWER_MARGIN_S):
            answer = _decoded(await receive_frame(conversation.reader), DialedBack)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
        raise PeerUnreachable(f"{conversation.other.name} did not say whether it reaches {choice.address}") from exc
    if answer.why:
        raise unreachable(choice, conversation.other.name, answer.why)


async def answer_check(conversation: Conversation, own: Member, pool: Pool) -> None:
    """Take one DialBack from a conversation, connect back, and answer. Raises RemoteProtocolError, or OSError."""
    _decoded(await receive_frame(conversation.reader), DialBack)
    send(conversation.writer, DialedBack(await _why_not(conversation.other, own, pool)))
    await conversation.writer.drain()


async def _why_not(other: Member, own: Member, pool: Pool) -> str:
    try:
        async with calling(other.address, own, pool, deadline_s=DIAL_BACK_S) as back:
            if back.other.boot_id == other.boot_id:
                return ""
            return f"another daemon, {back.other.name}, answers there"
    except KVStoreError as exc:
        return str(exc)[:1000]


def _decoded(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise RemoteProtocolError(f"what came is no {kind.__name__}: {exc}") from exc
