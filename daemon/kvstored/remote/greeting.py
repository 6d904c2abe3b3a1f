"""How two daemons of a pool meet: who each is, which protocol they speak, and that both know the pool's token.

    caller                                   called
    Hello: versions, pool, itself, nonce  ->
                                          <- Challenge: version, itself, nonce
    Proof                                 ->
                                          <- Ready: its proof
    (either may send Refusal instead, which ends the connection)

A proof is an HMAC with the token over the role of who sends it and all bytes of Hello and Challenge. So a proof is of
no use in the other direction or on another connection, and no word of either can be changed on the way. It proves who
is there at the start; that nobody listens or meddles later is TLS's part, under which this runs unchanged.

Invariants
1. Before Ready nothing is taken in but these messages, each of GREETING_BYTES_MAX at most, all by one deadline.
2. Whatever the other end sends, what comes of it is a Member or a KVStoreError.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import ssl
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from kvstore import errors
from kvstore.errors import KVStoreError, NotPermitted, PeerUnreachable, RemoteProtocolError
from kvstored.remote.members import PROTOCOL, Address, Member

GREETING_BYTES_MAX = 4096
GREETING_S = 2.0
_NONCE_BYTES = 16
_LENGTH = struct.Struct("<I")
_LABEL = b"kvstored peers, first greeting"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """A daemon as it describes itself."""

    name: _Name
    host: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    boot_id: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    capacity_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    protocol_min: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    protocol_max: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    is_leaving: bool = False


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Opens the conversation."""

    pool: _Name
    caller: Description
    nonce: _Nonce


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answers Hello; `version` is what both will speak."""

    version: int
    called: Description
    nonce: _Nonce


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The caller knows the token."""

    mac: _Mac


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """So does the called one."""

    mac: _Mac


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The conversation ends; `code` is one of kvstore/errors.py."""

    code: int
    why: Annotated[str, msgspec.Meta(max_length=1000)]


_DECODER = msgspec.msgpack.Decoder(Hello | Challenge | Proof | Ready | Refusal)
_T = TypeVar("_T", Hello, Challenge, Proof, Ready)


@dataclass(frozen=True, slots=True)
class Pool:
    """What members of one pool have in common: its name and its token (empty: none is asked for)."""

    name: str
    token: bytes = field(default=b"", repr=False)

    def mac(self, role: bytes, hello: bytes, challenge: bytes) -> bytes:
        """Return the proof of a role over the two messages that came before."""
        digest = hashlib.sha256(_LENGTH.pack(len(hello)) + hello + challenge).digest()
        return hmac.digest(self.token, _LABEL + role + digest, "sha256")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A connection to a member that has been greeted."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    other: Member
    version: int


@contextlib.asynccontextmanager
async def calling(
    address: Address, own: Member, pool: Pool, tls: ssl.SSLContext | None = None, deadline_s: float = GREETING_S
) -> AsyncGenerator[Conversation, None]:
    """Connect to a daemon and greet it; the connection is closed on leaving, and when cancelled.

    Raises
    ------
    PeerUnreachable
        No daemon answered by the deadline.
    KVStoreError
        The two don't fit: another pool, another token (NotPermitted), no common version, or no daemon at all.
    """
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
            try:
                conversation = await _call(reader, writer, own, pool)
            except BaseException:
                writer.transport.abort()
                raise
    except TimeoutError as exc:
        raise PeerUnreachable(f"no daemon has answered at {address} in {deadline_s:g} s") from exc
    except (OSError, asyncio.IncompleteReadError) as exc:
        raise PeerUnreachable(f"no daemon answers at {address}: {exc}") from exc
    try:
        yield conversation
    finally:
        writer.transport.abort()


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Member, pool: Pool, deadline_s: float = GREETING_S
) -> Conversation:
    """Greet whoever has connected; the caller of this closes the connection.

    Raises
    ------
    KVStoreError
        The two don't fit, or nothing sensible came by the deadline. The other end has been told why.
    """
    try:
        async with asyncio.timeout(deadline_s):
            try:
                return await _answer(reader, writer, own, pool)
            except KVStoreError as exc:
                send(writer, Refusal(exc.code, str(exc)[:1000]))
                raise
    except TimeoutError as exc:
        raise PeerUnreachable(f"who has connected did not greet in {deadline_s:g} s") from exc
    except (OSError, asyncio.IncompleteReadError) as exc:
        raise PeerUnreachable(f"who has connected is gone: {exc}") from exc


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next message, GREETING_BYTES_MAX at most."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > GREETING_BYTES_MAX:
        raise RemoteProtocolError(f"a greeting of {length} bytes is over {GREETING_BYTES_MAX}: is a daemon there?")
    return await reader.readexactly(length)


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> bytes:
    """Send a message and return its bytes."""
    raw = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(raw)) + raw)
    return raw


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Member, pool: Pool
) -> Conversation:
    hello = send(writer, Hello(pool.name, _described(own), secrets.token_bytes(_NONCE_BYTES)))
    challenge, raw = await _receive(reader, Challenge)
    if not PROTOCOL[0] <= challenge.version <= PROTOCOL[1]:
        raise RemoteProtocolError(f"version {challenge.version} of the peers' protocol was not on offer")
    send(writer, Proof(pool.mac(b"caller", hello, raw)))
    ready, _ = await _receive(reader, Ready)
    if not hmac.compare_digest(ready.mac, pool.mac(b"called", hello, raw)):
        raise NotPermitted(f"{challenge.called.name} does not know this pool's token: give all members the same one")
    return Conversation(reader, writer, _member(challenge.called), challenge.version)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Member, pool: Pool
) -> Conversation:
    hello, raw = await _receive(reader, Hello)
    if hello.pool != pool.name:
        raise NotPermitted(f"this is a member of the pool {pool.name!r}, not of {hello.pool!r}")
    version = min(hello.caller.protocol_max, PROTOCOL[1])
    if version < max(hello.caller.protocol_min, PROTOCOL[0]):
        raise RemoteProtocolError(
            f"{hello.caller.name} speaks the peers' protocol {hello.caller.protocol_min} to "
            f"{hello.caller.protocol_max}, this daemon {PROTOCOL[0]} to {PROTOCOL[1]}: upgrade the older one"
        )
    challenge = send(writer, Challenge(version, _described(own), secrets.token_bytes(_NONCE_BYTES)))
    proof, _ = await _receive(reader, Proof)
    if not hmac.compare_digest(proof.mac, pool.mac(b"caller", raw, challenge)):
        raise NotPermitted("the token is not this pool's: give all members the same one")
    send(writer, Ready(pool.mac(b"called", raw, challenge)))
    return Conversation(reader, writer, _member(hello.caller), version)


async def _receive(reader: asyncio.StreamReader, kind: type[_T]) -> tuple[_T, bytes]:
    """Return the next message, which must be of a kind, and its bytes; a refusal is raised."""
    raw = await receive_frame(reader)
    try:
        message = _DECODER.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise RemoteProtocolError(f"what came is no greeting of a daemon: {exc}") from exc
    if isinstance(message, Refusal):
        raise errors.from_wire(message.code, f"refused: {message.why}")
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"{type(message).__name__} came where {kind.__name__} is due")
    return message, raw


def _described(member: Member) -> Description:
    return Description(
        member.name, *member.address, member.boot_id, member.capacity_bytes, *member.protocol, member.is_leaving
    )


def _member(told: Description) -> Member:
    return Member(
        told.name, Address(told.host, told.port), told.boot_id, told.capacity_bytes,
        (told.protocol_min, told.protocol_max), told.is_leaving,
    )  # fmt: skip
