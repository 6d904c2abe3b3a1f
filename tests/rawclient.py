"""The protocol spoken directly: a blocking socket, the pool mapped by hand, no part of kvclient.

Tests of the daemon use it so that a fault of the client library can't hide one of the daemon, nor the other way
round. `put` and `get` are the whole way of a block; everything else is one message and its reply.
"""

from __future__ import annotations

import array
import hashlib
import mmap
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np

from kvstore import wire
from kvstore.block import Component, Namespace, Slice
from kvstore.errors import from_wire
from kvstore.paths import socket_address
from kvstore.wire import Outcome

R = TypeVar("R", bound=wire.Message)
_STEP = 0x9E3779B97F4A7C15


def namespace(block_bytes: int, model: str = "m", **changed: object) -> Namespace:
    """Return a namespace whose blocks have this many bytes, a multiple of 256."""
    tokens = 16
    dim, rest = divmod(block_bytes, 2 * tokens * 2 * 2)
    assert rest == 0 and dim, "a multiple of 128 bytes"
    fields: dict[str, object] = {
        "model": model,
        "revision": "r",
        "dtype": "bfloat16",
        "components": (
            Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (2, 2, tokens, 1, dim)),
        ),
        "block_tokens": tokens,
        "slice": Slice.of_rank(layers=2, heads=1),
    }
    made = Namespace(**{**fields, **changed})  # type: ignore[arg-type]
    assert changed or made.block_bytes == block_bytes
    return made


def keys(count: int, label: object = 0) -> list[bytes]:
    """Return block hashes that are the same in every run."""
    return [hashlib.sha256(f"{label}/{number}".encode()).digest() for number in range(count)]


def payload(digest: bytes, block_hash: bytes, length: int) -> bytes:
    """Return a block's one right content, made from its identity: any wrong byte shows, wherever it came from."""
    seed = int.from_bytes(hashlib.sha256(digest + block_hash).digest()[:8], "little")
    words = np.arange(-(-length // 8), dtype=np.uint64)
    words *= np.uint64(_STEP)
    words ^= np.uint64(seed)
    return words.tobytes()[:length]


class RawClient:
    """One connection. Failures are raised as the errors that they stand for."""

    def __init__(self, path: Path, *, want_pool: bool = True, timeout_s: float = 30.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(timeout_s)
        self._frames = wire.FrameBuffer()
        self._replies: dict[int, list[wire.Reply]] = {}
        self._last_id = 0
        self._namespaces: dict[int, Namespace] = {}
        self.pool: mmap.mmap | None = None
        self.arena: mmap.mmap | None = None
        try:
            with socket_address(path) as address:
                self.socket.connect(address)
            self.welcome = self._greet(want_pool)
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, goodbye: bool = True) -> None:
        """End the connection, with a Bye unless told otherwise, and unmap the pool."""
        if goodbye:
            try:
                self.send(wire.Bye(self.next_id()))
            except OSError:
                pass  # the daemon went first
        self.socket.close()
        for mapping in (self.pool, self.arena):
            if mapping is not None:
                mapping.close()

    # ---- messages

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, message: wire.Message) -> None:
        """Send a message and wait for nothing."""
        self.socket.sendall(wire.encode(message))

    def receive(self, request_id: int) -> wire.Reply:
        """Return the next reply to a request; ConnectionError when the daemon has closed."""
        while not self._replies.get(request_id):
            received = self.socket.recv(1 << 20)
            if not received:
                raise ConnectionResetError("the daemon has closed the connection")
            for body in self._frames.feed(received):
                reply = wire.decode_reply(body)
                self._replies.setdefault(reply.id, []).append(reply)
        replies = self._replies[request_id]
        reply = replies.pop(0)
        if not replies:
            del self._replies[request_id]
        return reply

    def take_replies(self) -> list[wire.Reply]:
        """Return the replies that have come in and that nobody has asked for."""
        replies = [reply for waiting in self._replies.values() for reply in waiting]
        self._replies.clear()
        return replies

    @overload
    def ask(self, message: wire.Message, kind: type[R]) -> R: ...
    @overload
    def ask(self, message: wire.Message) -> wire.Reply: ...
    def ask(self, message: wire.Message, kind: type[R] | None = None) -> wire.Reply | R:
        """Send a message and return its reply, of type `kind` if given; Progress is passed over."""
        self.send(message)
        return self.answer(message.id) if kind is None else self.answer(message.id, kind)

    @overload
    def answer(self, request_id: int, kind: type[R]) -> R: ...
    @overload
    def answer(self, request_id: int) -> wire.Reply: ...
    def answer(self, request_id: int, kind: type[R] | None = None) -> wire.Reply | R:
        """Return the reply to a request that was sent before."""
        reply = self.receive(request_id)
        while isinstance(reply, wire.Progress):
            reply = self.receive(request_id)
        if isinstance(reply, wire.Failure):
            raise from_wire(reply.code, reply.text)
        assert kind is None or isinstance(reply, kind), reply
        return reply

    def report(self, message: wire.Message) -> dict[str, Any]:
        """Return the body of the Report that answers an operator's request."""
        return self.ask(message, wire.Report).body

    # ---- namespaces and blocks

    def open(self, space: Namespace, ttl_s: float = 0.0) -> int:
        """Return this connection's number for a namespace."""
        number = self.ask(wire.Open(self.next_id(), space.encode(), ttl_s), wire.Opened).ns
        self._namespaces[number] = space
        return number

    def reserve(self, ns: int, hashes: Sequence[bytes], wait_s: float = 0.0) -> wire.Reserved:
        return self.ask(wire.Reserve(self.next_id(), ns, list(hashes), wait_s), wire.Reserved)

    def write(self, offset: int, content: bytes) -> None:
        """Write where a reservation points: to the arena in strict mode, else to the pool."""
        target = self.arena if self.arena is not None else self.pool
        assert target is not None
        target[offset : offset + len(content)] = content

    def put(
        self,
        ns: int,
        hashes: Sequence[bytes],
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        wait_s: float = 10.0,
        batch: int = 16,
    ) -> list[Outcome]:
        """Store self-checking blocks, a few at a time; return an outcome a hash."""
        space = self._namespaces[ns]
        outcomes: list[Outcome] = []
        for at in range(0, len(hashes), batch):
            left = list(hashes[at : at + batch])
            found = dict.fromkeys(left, Outcome.NO_ROOM)
            ends_s = time.monotonic() + wait_s
            while left:
                got = self.reserve(ns, left, wait_s=max(0.0, ends_s - time.monotonic()))
                granted = [i for i, outcome in enumerate(got.outcomes) if outcome == Outcome.GRANTED]
                for i in granted:
                    self.write(got.offsets[i], payload(space.digest, left[i], space.block_bytes))
                found.update((left[i], Outcome(outcome)) for i, outcome in enumerate(got.outcomes))
                if granted:
                    request = wire.Seal(self.next_id(), got.ticket, granted, ttl_s=ttl_s, durable=durable)
                    sealed = self.ask(request, wire.Sealed)
                    found.update((left[i], Outcome(o)) for i, o in zip(granted, sealed.outcomes, strict=True))
                left = [block_hash for block_hash in left if found[block_hash] == Outcome.NO_ROOM]
                if time.monotonic() >= ends_s:
                    break
            outcomes += [found[block_hash] for block_hash in hashes[at : at + batch]]
        return outcomes

    def acquire(self, ns: int, hashes: Sequence[bytes], **options: object) -> wire.Acquired:
        request = wire.Acquire(self.next_id(), ns, list(hashes), **options)  # type: ignore[arg-type]
        return self.ask(request, wire.Acquired)

    def release(self, lease: int) -> None:
        self.send(wire.Release(self.next_id(), lease))

    def get(self, ns: int, hashes: Sequence[bytes], **options: object) -> list[Outcome]:
        """Fetch blocks as a copying client does, in rounds, and compare each hit with what it must be."""
        return [outcome for outcome, _ in self.read(ns, hashes, **options)]

    def read(self, ns: int, hashes: Sequence[bytes], **options: object) -> list[tuple[Outcome, bytes | None]]:
        """Fetch blocks and return outcome and content of each; a content that is not the block's own fails the test."""
        space = self._namespaces[ns]
        found: list[tuple[Outcome, bytes | None]] = [(Outcome.LATER, None)] * len(hashes)
        left = list(range(len(hashes)))
        while left:
            sent_s = time.monotonic()
            got = self.acquire(ns, [hashes[i] for i in left], **options)
            contents: list[bytes | None] = []
            for outcome, offset in zip(got.outcomes, got.offsets, strict=True):
                contents.append(self.peek(offset, space.block_bytes) if outcome == Outcome.HIT else None)
            in_time = time.monotonic() < sent_s + got.lease_s
            if got.lease:
                self.release(got.lease)
            for i, outcome, content in zip(left, got.outcomes, contents, strict=True):
                if content is not None and not in_time:
                    found[i] = (Outcome.DEADLINE, None)  # the lease was over before the copy was
                    continue
                found[i] = (Outcome(outcome), content)
                assert content is None or content == payload(space.digest, hashes[i], space.block_bytes), (
                    f"wrong bytes in block {i} of {len(hashes)}: {differing(content, space, hashes[i])}"
                )
            assert got.lease or Outcome.LATER not in got.outcomes, "LATER without a lease"
            left = [i for i in left if found[i][0] == Outcome.LATER]
        return found

    def peek(self, offset: int, length: int) -> bytes:
        """Return bytes of the pool."""
        assert self.pool is not None
        return self.pool[offset : offset + length]

    def lookup(self, ns: int, hashes: Sequence[bytes], **options: object) -> wire.Found:
        request = wire.Lookup(self.next_id(), ns, list(hashes), **options)  # type: ignore[arg-type]
        return self.ask(request, wire.Found)

    def tiers_of(self, ns: int, hashes: Sequence[bytes]) -> list[str]:
        """Return the tiers of each block, as "cpu", "ssd", "cpu,ssd" or ""; counts no query."""
        body = self.report(wire.Keys(self.next_id(), self._namespaces[ns].digest, hashes=list(hashes)))
        known: dict[str, str] = {block["hash"]: ",".join(block["tiers"]) for block in body["blocks"]}
        return [known.get(block_hash.hex(), "") for block_hash in hashes]

    # ---- operators

    def stats(self) -> dict[str, Any]:
        return self.report(wire.Stats(self.next_id()))

    def tier(self, name: str) -> dict[str, Any]:
        """Return the figures of one tier."""
        told: dict[str, Any] = self.stats()["tiers"][name]
        return told

    def count(self, ns: int) -> dict[str, Any]:
        """Return what the daemon has counted for a namespace."""
        digest = self._namespaces[ns].digest.hex()
        listed: list[dict[str, Any]] = self.stats()["namespaces"]
        return next(told for told in listed if told["digest"] == digest)

    def check(self, *, verify: bool = False) -> None:
        """Fail unless every invariant of the daemon holds and its figures add up."""
        body = self.report(wire.Check(self.next_id(), verify))
        assert body["ok"], body["problems"]
        tiers: dict[str, dict[str, Any]] = self.stats()["tiers"]
        for name, tier in tiers.items():
            total: int = sum(tier[part] for part in ("used_bytes", "reserved_bytes", "quarantined_bytes", "free_bytes"))
            if name == "cpu":
                assert total == tier["capacity_bytes"], tier
            else:
                assert total <= tier["capacity_bytes"], tier

    # ---- the greeting

    def _greet(self, want_pool: bool) -> wire.Welcome:
        self.send(wire.Hello(self.next_id(), 1, 1, f"test {os.getpid()}", want_pool))
        received, descriptors = b"", array.array("i")
        while True:
            part, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(8 * descriptors.itemsize))
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
            received += part
            if not part:
                raise ConnectionResetError("the daemon closed the connection instead of greeting")
            bodies = list(self._frames.feed(part))
            if bodies:
                break
        try:
            reply = wire.decode_reply(bodies[0])
            if isinstance(reply, wire.Failure):
                raise from_wire(reply.code, reply.text)
            assert isinstance(reply, wire.Welcome), reply
            self._map(list(descriptors), reply)
            return reply
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, received: list[int], reply: wire.Welcome) -> None:
        """Map what came along; the descriptors are closed afterwards."""
        if received:
            protection = mmap.PROT_READ if reply.mode == "strict" else mmap.PROT_READ | mmap.PROT_WRITE
            self.pool = mmap.mmap(received[0], reply.pool_bytes, prot=protection)
        if len(received) > 1:
            self.arena = mmap.mmap(received[1], reply.arena_bytes)


def differing(content: bytes, space: Namespace, block_hash: bytes) -> str:
    """Return where a block differs from what it must be."""
    right = np.frombuffer(payload(space.digest, block_hash, space.block_bytes), np.uint8)
    wrong = np.flatnonzero(np.frombuffer(content, np.uint8) != right)
    return f"{len(wrong)} bytes, the first at {wrong[0]}, the last at {wrong[-1]}"
