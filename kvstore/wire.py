"""The control protocol, without I/O: bytes in, messages out. docs/protocol.md has a worked example.

A frame is a little-endian u32 length and a MessagePack body; a body is an array `[tag, id, fields...]`. Both sides
number their requests themselves; a reply carries the id of its request and replies may overtake each other. Batches
travel as flat parallel arrays: `hashes` is a list of 32-byte strings, and what is said of each of them is one byte
of a bytes field in the same order (`Outcome`).

Invariants
1. Random or hostile bytes raise RemoteProtocolError, or decode to a well-typed message; nothing else can happen.
2. No frame above `FRAME_BYTES_MAX` is ever buffered: its length is refused before its body is read.
3. Tags and outcomes are never renumbered. Fields are only ever added at the end, with a default.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated, Any, cast

import msgspec

from kvstore.errors import LocalProtocolError, RemoteProtocolError

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
FRAME_BYTES_MAX = 4 << 20
KEYS_MAX = 8192
LENGTH_BYTES = 4


class Outcome(enum.IntEnum):
    """What happened to one key of a batch. From 16 on it is a miss, and the name is the reason."""

    HIT = 1
    GRANTED = 2  # reserve: write it
    PRESENT = 3  # reserve, seal: somebody's valid bytes are there already
    BUSY = 4  # reserve, wait: somebody else is writing it
    SEALED = 5  # seal: visible, in memory
    DURABLE = 6  # seal(durable): its index transaction is on disk
    LATER = 7  # acquire: exists, but there is no room beside what this reply grants; ask again after the release
    DONE = 8  # drop, pin, unpin, ttl, forfeit
    ABSENT = 16
    EXPIRED = 17
    NO_ROOM = 18
    CORRUPT = 19
    BUDGET = 20  # could not be loaded within the load budget
    DEADLINE = 21
    LAYOUT = 22  # no stored slices can be put together to the slice asked for
    ABORTED = 23  # its writer gave up
    UNAVAILABLE = 24  # its tier or the daemon does not answer
    REFUSED = 25  # seal: the ticket is over, or the namespace was dropped meanwhile
    NOT_DURABLE = 26  # seal(durable): sealed, but the ssd tier did not take it


MISS_FIRST = 16
MISS_REASONS = tuple(outcome for outcome in Outcome if outcome >= MISS_FIRST)

U64 = Annotated[int, msgspec.Meta(ge=0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Hashes = Annotated[list[Digest], msgspec.Meta(max_length=KEYS_MAX)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages; `id` is the number of the request, chosen by whoever asks."""

    id: U64


# ---- requests of engines


class Hello(Message, frozen=True, tag=1):
    """First on every connection. `want_pool` asks for the shared-memory pool's file descriptor with the reply."""

    protocol_min: int
    protocol_max: int
    client: Text
    want_pool: bool = True


class Ping(Message, frozen=True, tag=2):
    """Is anybody there?"""


class Open(Message, frozen=True, tag=3):
    """Names a namespace for this connection. `ttl_s` above 0: the life of what it stores where a Seal says none."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=1 << 16)]
    ttl_s: Seconds = 0.0


class Lookup(Message, frozen=True, tag=4):
    """Which blocks are there? `run` stops at the first miss. What can't be loaded in `max_ms` counts as a miss."""

    ns: U64
    hashes: Hashes
    run: bool = True
    max_ms: Seconds | None = None


class Reserve(Message, frozen=True, tag=5):
    """Asks for slots to write blocks to; `wait_s` is how long to wait for room (0: what finds none now is NO_ROOM).

    `after`: the block before the first of these in their chain, where that came in a request before.
    """

    ns: U64
    hashes: Hashes
    wait_s: Seconds = 0.0
    after: Digest | None = None


class Seal(Message, frozen=True, tag=6):
    """The blocks at positions `which` of a ticket are completely written (None: all granted ones).

    `checksums` is parallel to `which`, or empty. `ttl_s` None: as Open says, 0: never expires. `after`: as in Reserve.
    """

    ticket: U64
    which: Annotated[list[U64], msgspec.Meta(max_length=KEYS_MAX)] | None = None
    checksums: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=KEYS_MAX)] = []
    ttl_s: Seconds | None = None
    durable: bool = False
    wait_s: Seconds = 10.0
    after: Digest | None = None


class Forfeit(Message, frozen=True, tag=7):
    """The blocks at positions `which` of a ticket (None: all left) will not be written any more."""

    ticket: U64
    which: Annotated[list[U64], msgspec.Meta(max_length=KEYS_MAX)] | None = None


class Acquire(Message, frozen=True, tag=8):
    """Asks for a lease on blocks, loading them to memory where needed.

    `copying`: the client copies out at once; the lease has an end, and a key that doesn't fit now is answered LATER.
    Otherwise the lease is all or nothing and ends by release or exit (zero-copy views).
    `wait_s`: how long to wait for blocks that are being written or are not there yet. `max_ms`: load budget.
    `count`: count these keys as queried; False where a lookup of the same use has counted them. `after`: as in Reserve.
    """

    ns: U64
    hashes: Hashes
    copying: bool = True
    lease_s: Seconds = 10.0
    wait_s: Seconds = 0.0
    deadline_s: Seconds = 10.0
    max_ms: Seconds | None = None
    run: bool = False
    count: bool = True
    after: Digest | None = None


class Release(Message, frozen=True, tag=9):
    """Ends a lease. There is no reply; an unknown lease is ignored (releasing twice is harmless)."""

    lease: U64


class Prefetch(Message, frozen=True, tag=10):
    """Starts loading blocks to memory; the reply says what was started, not what has arrived."""

    ns: U64
    hashes: Hashes


class Wait(Message, frozen=True, tag=11):
    """Answered when every block is sealed, as soon as one is aborted, or after `wait_s`."""

    ns: U64
    hashes: Hashes
    wait_s: Seconds


class Cancel(Message, frozen=True, tag=12):
    """Gives up the request `request`; what it would have granted is undone. There is no reply of its own."""

    request: U64


class Abort(Message, frozen=True, tag=13):
    """Tells everybody who waits for these blocks that they will not come."""

    ns: U64
    hashes: Hashes


class Drop(Message, frozen=True, tag=14):
    """Makes blocks invisible now, in every tier."""

    ns: U64
    hashes: Hashes


class GroupLookup(Message, frozen=True, tag=15):
    """Which slices of this namespace's group hold these blocks?"""

    ns: U64
    hashes: Hashes


class Pin(Message, frozen=True, tag=16):
    """Keeps blocks from eviction and expiry for `for_s` seconds. Admin only, like Unpin and Ttl."""

    namespace: Digest
    hashes: Hashes
    for_s: Seconds


class Unpin(Message, frozen=True, tag=17):
    """Undoes Pin."""

    namespace: Digest
    hashes: Hashes


class Ttl(Message, frozen=True, tag=18):
    """Sets the remaining life of blocks, or with no hashes the default of the namespace. 0: never expires."""

    namespace: Digest
    hashes: Hashes
    ttl_s: Seconds


class Bye(Message, frozen=True, tag=19):
    """The client closes; it touches the pool no more. There is no reply."""


class Corrupt(Message, frozen=True, tag=20):
    """A reader found that these blocks' bytes in memory do not match their checksums. There is no reply.

    The daemon looks for itself and drops what is corrupt.
    """

    ns: U64
    hashes: Hashes


# ---- requests of operators


class Stats(Message, frozen=True, tag=32):
    """Report: everything countable. Of many namespaces it lists the largest of those that `name` may stand for."""

    name: Text = ""


class Status(Message, frozen=True, tag=33):
    """Report: version, boot, uptime, state of the daemon and its tiers."""


class Keys(Message, frozen=True, tag=34):
    """Report: up to `limit` blocks of a namespace from `offset` on, or those of `hashes`. Counts no query."""

    namespace: Digest
    offset: U64 = 0
    limit: U64 = 1000
    hashes: Hashes = []


class DropNamespace(Message, frozen=True, tag=35):
    """Makes everything stored before invisible, durably, in one namespace or (None) in all."""

    namespace: Digest | None


class Evict(Message, frozen=True, tag=36):
    """Evicts from a tier: at most `size_bytes` (None: all that may be), only blocks unused for `older_than_s`."""

    tier: Text
    size_bytes: U64 | None = None
    older_than_s: Seconds = 0.0


class Check(Message, frozen=True, tag=37):
    """Report: whether every invariant holds; `verify` reads and checks every block's bytes too."""

    verify: bool = False


class Gc(Message, frozen=True, tag=38):
    """Reclaims what is expired, dropped or orphaned now instead of in the background."""


class Drain(Message, frozen=True, tag=39):
    """Writes what only memory holds to the ssd tier; answered when it is durable or after `wait_s`."""

    wait_s: Seconds = 60.0


class Dump(Message, frozen=True, tag=40):
    """Writes a namespace's blocks to a new file on the daemon's host. Answered by Progress, then a Report."""

    namespace: Digest
    path: Text


class Load(Message, frozen=True, tag=41):
    """Stores the blocks of a dump file. Answered by Progress, then a Report."""

    path: Text


class DropBlocks(Message, frozen=True, tag=42):
    """Makes blocks of any namespace invisible now, in every tier; answered by Found. Admin only."""

    namespace: Digest
    hashes: Hashes


# ---- replies


class Failure(Message, frozen=True, tag=64):
    """The request failed as a whole; `code` is one of kvstore.errors."""

    code: int
    text: str


class Welcome(Message, frozen=True, tag=65):
    """Answers Hello. With `pool_bytes` > 0 the pool's descriptor comes along, and the arena's in strict mode."""

    protocol: int
    boot_id: bytes
    session: U64
    role: str
    tenant: str
    mode: str
    pool_bytes: U64
    arena_bytes: U64
    checksum_at_seal: bool
    verify_reads: bool
    keys_max: U64
    frame_bytes_max: U64
    lease_s_max: float
    reservation_s: float
    window_bytes: U64
    version: str


class Done(Message, frozen=True, tag=66):
    """Answers Ping, Abort, Forfeit and Ttl without hashes: what has nothing else to say."""

    count: U64 = 0


class Opened(Message, frozen=True, tag=67):
    """Answers Open: `ns` is this connection's number for the namespace."""

    ns: U64
    epoch: U64
    block_bytes: U64


class Found(Message, frozen=True, tag=68):
    """Answers Lookup, Wait, Drop, Pin, Unpin, Ttl and Prefetch: one outcome a key; `hits` counts the leading hits.

    `tiers` is parallel: bit 0 gpu, bit 1 cpu, bit 2 ssd, bit 3 remote; empty where it has no meaning.
    """

    hits: U64
    outcomes: bytes
    tiers: bytes = b""


class Reserved(Message, frozen=True, tag=69):
    """Answers Reserve. `offsets` is parallel: bytes into the pool (strict mode: the arena); 0 where not granted."""

    ticket: U64
    outcomes: bytes
    offsets: list[U64]
    reservation_s: float


class Sealed(Message, frozen=True, tag=70):
    """Answers Seal: SEALED, DURABLE, NOT_DURABLE, PRESENT or REFUSED for each position, in the order of `which`."""

    outcomes: bytes


class Acquired(Message, frozen=True, tag=71):
    """Answers Acquire. `lease` 0: nothing is held. `offsets` is parallel: bytes into the pool for a HIT, else 0.

    The client may read until `lease_s` after it sent the request. `checksums` is parallel where reads are verified.
    """

    lease: U64
    lease_s: float
    outcomes: bytes
    offsets: list[U64]
    checksums: list[Annotated[int, msgspec.Meta(ge=0)]] = []


class Group(Message, frozen=True, tag=72):
    """Answers GroupLookup: parallel, one namespace (canonical encoding) and one byte string of outcomes a slice."""

    namespaces: list[bytes]
    outcomes: list[bytes]


class Progress(Message, frozen=True, tag=73):
    """Comes any number of times before the reply of a long request."""

    done: U64
    total: U64
    what: str = ""


class Report(Message, frozen=True, tag=74):
    """Answers the operators' questions with a map of plain values."""

    body: dict[str, Any]


Request = (
    Hello | Ping | Open | Lookup | Reserve | Seal | Forfeit | Acquire | Release | Prefetch | Wait | Cancel | Abort
    | Drop | GroupLookup | Pin | Unpin | Ttl | Bye | Corrupt
    | Stats | Status | Keys | DropNamespace | Evict | Check | Gc | Drain | Dump | Load | DropBlocks
)  # fmt: skip
Reply = Failure | Welcome | Done | Opened | Found | Reserved | Sealed | Acquired | Group | Progress | Report

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Message) -> bytearray:
    """Return `message` as one frame."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    length = len(frame) - LENGTH_BYTES
    if length > FRAME_BYTES_MAX:
        raise LocalProtocolError(
            f"a {type(message).__name__} of {length} bytes is over the frame limit of {FRAME_BYTES_MAX}: "
            "send smaller batches"
        )
    frame[:LENGTH_BYTES] = length.to_bytes(LENGTH_BYTES, "little")
    return frame


def decode_request(body: bytes | bytearray | memoryview) -> Request:
    """Return the request in a frame's body."""
    return cast("Request", _decode(_request_decoder, body))


def decode_reply(body: bytes | bytearray | memoryview) -> Reply:
    """Return the reply in a frame's body."""
    return cast("Reply", _decode(_reply_decoder, body))


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | bytearray | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise RemoteProtocolError(f"not a message of this protocol: {exc}") from exc


def body_bytes(prefix: bytes | bytearray | memoryview) -> int:
    """Return the length that a frame's first four bytes announce; one above the limit is refused."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 0 < length <= FRAME_BYTES_MAX:
        raise RemoteProtocolError(f"a frame announces {length} bytes; allowed are 1 to {FRAME_BYTES_MAX}")
    return length


class FrameBuffer:
    """Cuts a stream of bytes into frame bodies. Holds at most one frame and what came with it."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, received: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Yield each body that is complete now; raises RemoteProtocolError at a length that is not allowed."""
        pending = self._pending
        pending += received
        at = 0
        try:
            while len(pending) - at >= LENGTH_BYTES:
                start = at + LENGTH_BYTES
                end = start + body_bytes(pending[at:start])
                if len(pending) < end:
                    break
                body = bytes(pending[start:end])
                at = end
                yield body
        finally:
            del pending[:at]

    @property
    def buffered_bytes(self) -> int:
        return len(self._pending)

    def rest(self) -> bytes:
        """Return what is buffered of a frame that is not complete, for another buffer to go on with."""
        return bytes(self._pending)
