"""Blocks in Redis or Valkey: one key a block, kept as records, with the server's own expiry.

    PREFIX:b:SCOPE:EPOCH:HASH   a record (records.py), with PX where its life has an end
    PREFIX:epoch:SCOPE          how often the scope was dropped
    PREFIX:used                 bytes of records, for the cap
    PREFIX:sweeper              the daemon that sweeps now; goes by itself

Theory of operation. Every call asks for its scope's epoch along with what it wants under the epoch it knows, and asks
again if that is not the one any more, so a drop by any daemon shows at once and costs no round trip. The cap is kept by
a counter that all writers add to before they write: what is added and not written (somebody else had it, the server
refused it) is taken off again, and what the server expires or evicts by itself is found by the sweep, which counts
what is really there. One daemon sweeps at a time.

Invariants
1. `used` is never less than the records that are there, but for what the server itself makes of that key: so the cap is
   a hard one for all daemons together. While a sweep counts, what is written meanwhile may count twice until the next.
2. A key is written whole, once (SET NX), and only under the epoch that its scope had when the write began.
3. A sweep looks at keys of its own prefix only, and takes what is of an older epoch, then the oldest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.clock import Clock
from kvstore.errors import CorruptionError, KVStoreError, TierUnavailable
from kvstore.threads import in_thread
from kvstore.tiers.disk_records import NEVER_S
from kvstore.tiers.remote import RemoteFound, RemoteRead, RemoteScope, RemoteUsage, RemoteWrite
from kvstore.wire import Outcome
from kvstored.logs import fields
from kvstored.remote.copying import copy
from kvstored.remote.guarded import Note
from kvstored.remote.health import Health
from kvstored.remote.records import HEADER_BYTES, checked, pack_header, read_header, scope_id
from kvstored.remote.redis_client import Command, RedisClient, RedisPlace, is_out_of_memory

log = logging.getLogger("kvstored.remote")

READ_BYTES = 8 << 20  # of answers that are in memory at once
WRITE_BYTES = 2 << 20  # a bound on how long one pipeline holds the loop
FIND_KEYS = 512
SWEEP_S = 60.0
SETTLE_S = 30.0  # no write takes longer
SWEEP_CALL_S = 10.0
_RETRY_S = 2.0
_LOCK_S = 600
_SCAN_KEYS = 500
_HIGH, _LOW = 15 / 16, 14 / 16  # of the cap: where a sweep begins to take blocks, and how far it goes
_BUCKET_S = 10.0  # ages are told apart this finely


class RedisBackend:
    """See the module's docstring."""

    batch_bytes = 8 << 20
    asks_to_find = True

    def __init__(
        self,
        place: RedisPlace,
        capacity_bytes: int,
        clock: Clock,
        *,
        sweep_s: float = SWEEP_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._client = RedisClient(place)
        self._prefix = place.prefix
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._sweep_s = sweep_s
        self._settle_s = settle_s
        self._me = secrets.token_hex(8)
        self._epochs: dict[bytes, int] = {}
        self._untold: set[RemoteScope] = set()  # dropped, and the server does not know
        self._drops: Counter[RemoteScope] = Counter()
        self._full = asyncio.Event()
        self._used_bytes = 0
        self._blocks = 0
        self._ready = False
        self._counts: Counter[str] = Counter()

    @property
    def answers(self) -> int:
        return self._client.answers

    # ---- calls

    async def find(self, scope: RemoteScope, hashes: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(hashes), FIND_KEYS):
            part = hashes[start : start + FIND_KEYS]
            answers, _ = await self._ask(scope, partial(_exist, part))
            found += [answer == 1 for answer in answers] if answers else [False] * len(part)
        return found

    async def read(self, scope: RemoteScope, reads: Sequence[RemoteRead], note: Note[RemoteFound]) -> None:
        for part in _portions([HEADER_BYTES + len(read.destination) for read in reads], READ_BYTES):
            wanted = [reads[at] for at in part]
            answers, epoch = await self._ask(scope, partial(_get, [read.hash for read in wanted]))
            answers = answers or [None] * len(part)
            taken = await in_thread(partial(self._take_all, scope, epoch, wanted, answers))
            for at, found in zip(part, taken, strict=True):
                note(at, found)
            corrupt = [read for read, found in zip(wanted, taken, strict=True) if found.outcome is Outcome.CORRUPT]
            if corrupt:  # a key that is there is never written again
                await self._client.run([("UNLINK", self._key(scope, epoch, read.hash)) for read in corrupt])

    def _take_all(
        self, scope: RemoteScope, epoch: int, reads: Sequence[RemoteRead], answers: Sequence[object]
    ) -> list[RemoteFound]:
        return [self._take(scope, epoch, read, raw) for read, raw in zip(reads, answers, strict=True)]

    def _take(self, scope: RemoteScope, epoch: int, read: RemoteRead, raw: object) -> RemoteFound:
        if not isinstance(raw, bytes):
            return RemoteFound(Outcome.ABSENT)
        try:
            header, payload = checked(memoryview(raw), read.hash, scope_id(scope), epoch, len(read.destination))
        except CorruptionError as exc:
            self._counts["checksum_failures"] += 1
            log.warning("a remote block is damaged", extra=fields(hash=read.hash.hex(), why=str(exc)))
            return RemoteFound(Outcome.CORRUPT)
        life_s = header.life_s(self._clock.wall_s())
        if life_s <= 0:
            return RemoteFound(Outcome.EXPIRED)
        copy(read.destination, payload)
        return RemoteFound(Outcome.HIT, header.checksum, life_s)

    async def write(self, scope: RemoteScope, writes: Sequence[RemoteWrite], note: Note[Outcome]) -> None:
        if scope in self._untold:
            for at in range(len(writes)):
                note(at, Outcome.UNAVAILABLE)
            return
        drops = self._drops[scope]
        epoch = await self._epoch(scope)
        if drops != self._drops[scope]:
            # The epoch may be the new one already, and these blocks are from before the drop.
            for at in range(len(writes)):
                note(at, Outcome.UNAVAILABLE)
            return
        for part in _portions([HEADER_BYTES + len(write.payload) for write in writes], WRITE_BYTES):
            records = await in_thread(partial(self._records, scope, epoch, [writes[at] for at in part]))
            room = await self._reserve([len(record) for record in records])
            commands: list[Command] = []
            for at, record in zip(part[:room], records[:room], strict=True):
                life_s = writes[at].life_s
                ends: Command = () if life_s == NEVER_S else ("PX", max(1, int(life_s * 1000)))
                commands.append(("SET", self._key(scope, epoch, writes[at].hash), memoryview(record), "NX", *ends))
            answers = await self._client.run(commands) if commands else []
            unused = 0
            for at, record, answer in zip(part[:room], records[:room], answers, strict=True):
                outcome = _written(answer)
                if outcome is not Outcome.DURABLE:
                    unused += len(record)
                self._counts["refused_full"] += outcome is Outcome.NO_ROOM
                note(at, outcome)
            for at in part[room:]:
                self._counts["refused_full"] += 1
                note(at, Outcome.NO_ROOM)
            if unused:  # if that is refused, the next sweep counts anew
                (raw,) = await self._client.run([("DECRBY", f"{self._prefix}:used", unused)])
                self._used_bytes = _number(raw) if isinstance(raw, int) else self._used_bytes

    async def delete(self, scope: RemoteScope, hashes: Sequence[bytes]) -> None:
        epoch = await self._epoch(scope)
        for start in range(0, len(hashes), FIND_KEYS):
            keys = [self._key(scope, epoch, block_hash) for block_hash in hashes[start : start + FIND_KEYS]]
            await self._client.run([("UNLINK", key) for key in keys])

    def forget(self, scope: RemoteScope) -> None:
        self._drops[scope] += 1
        self._untold.add(scope)

    async def drop(self, scope: RemoteScope) -> None:
        await self._drop(scope_id(scope))
        self._untold.discard(scope)

    async def drop_all(self) -> None:
        keys: set[bytes] = set()
        async for portion in self._client.scan(f"{self._prefix}:b:*", _SCAN_KEYS):
            keys.update(map(_scope_of, portion))
        for key in keys:
            await self._drop(bytes.fromhex(key.decode()))

    async def _drop(self, key: bytes) -> None:
        (epoch,) = await self._client.run([("INCR", self._epoch_key(key))])
        if not isinstance(epoch, int):
            raise TierUnavailable(f"the drop was refused: {epoch}")
        self._epochs[key] = epoch

    def usage(self, place: str) -> RemoteUsage:
        return RemoteUsage(
            place=place,
            capacity_bytes=self._capacity_bytes,
            used_bytes=max(0, self._used_bytes),
            known_bytes=max(0, self._used_bytes),
            blocks=self._blocks,
            objects=self._blocks,
            state="ready" if self._ready else "starting",
            state_text="" if self._ready else "it has not answered yet",
            checksum_failures=self._counts["checksum_failures"],
            refused_full=self._counts["refused_full"],
            swept_blocks=self._counts["swept_blocks"],
        )

    async def close(self) -> None:
        await self._client.close()

    # ---- keys and epochs

    def _key(self, scope: RemoteScope, epoch: int, block_hash: bytes) -> str:
        return f"{self._prefix}:b:{scope_id(scope).hex()}:{epoch}:{block_hash.hex()}"

    def _epoch_key(self, scope_key: bytes) -> str:
        return f"{self._prefix}:epoch:{scope_key.hex()}"

    async def _epoch(self, scope: RemoteScope) -> int:
        key = scope_id(scope)
        (raw,) = await self._client.run([("GET", self._epoch_key(key))])
        return await self._note_epoch(key, raw)

    async def _note_epoch(self, key: bytes, raw: object) -> int:
        """Return a scope's epoch, from what the server told of it; never less than it was before."""
        told, known = _told_epoch(raw), self._epochs.get(key, 0)
        if told < known:  # the server has lost it, by its eviction policy or a restart
            await self._client.run([("SET", self._epoch_key(key), known)])
        self._epochs[key] = max(told, known)
        return self._epochs[key]

    async def _ask(
        self, scope: RemoteScope, commands: Callable[[Callable[[bytes], str]], list[Command]]
    ) -> tuple[list[Any], int]:
        """Return answers, and the epoch they are of: the scope's when they were given; none if it is dropped."""
        if scope in self._untold:
            return [], 0
        key = scope_id(scope)
        while True:
            epoch = self._epochs.get(key, 0)
            wanted = commands(partial(self._key, scope, epoch))
            raw, *answers = await self._client.run([("GET", self._epoch_key(key)), *wanted])
            if await self._note_epoch(key, raw) == epoch:
                return answers, epoch

    def _records(self, scope: RemoteScope, epoch: int, writes: Sequence[RemoteWrite]) -> list[bytearray]:
        return [self._record(scope, epoch, write) for write in writes]

    def _record(self, scope: RemoteScope, epoch: int, write: RemoteWrite) -> bytearray:
        record = bytearray(HEADER_BYTES + len(write.payload))
        record[:HEADER_BYTES] = pack_header(scope, scope_id(scope), epoch, write, self._clock.wall_s())
        copy(memoryview(record)[HEADER_BYTES:], write.payload)
        return record

    # ---- the cap

    async def _reserve(self, sizes: Sequence[int]) -> int:
        """Add to `used` what fits under the cap; return how many of the sizes, from the first on, that is."""
        total = sum(sizes)
        (raw,) = await self._client.run([("INCRBY", f"{self._prefix}:used", total)])
        if is_out_of_memory(raw):
            return 0
        used = _number(raw)
        count = len(sizes)
        while count and used > self._capacity_bytes:
            count -= 1
            used -= sizes[count]
        if count < len(sizes):
            self._full.set()
            await self._client.run([("DECRBY", f"{self._prefix}:used", sum(sizes[count:]))])
        self._used_bytes = used
        if used > self._capacity_bytes * _HIGH:
            self._full.set()
        return count

    async def run(self, health: Health) -> None:
        """Sweep now and then, and when there is no room, until cancelled."""
        while True:
            pause_s = min(self._sweep_s, _RETRY_S)
            try:
                with health.call(SWEEP_CALL_S):  # a sweep takes long: others must not have to wait for its end
                    await self.recover()
                await self._sweep()
                pause_s = self._sweep_s
            except (KVStoreError, TimeoutError):
                pass  # the health says it, or the next call will
            except Exception:  # a bug here must not end the daemon
                log.exception("a sweep of the remote store met a bug")
            self._full.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._full.wait()

    async def recover(self) -> bool:
        (used,) = await self._bounded([("GET", f"{self._prefix}:used")])
        self._used_bytes, self._ready = _number(used), True
        for scope in list(self._untold):
            await self.drop(scope)
        return not self._untold

    async def _sweep(self) -> None:
        """Count what is there, and take what is of older epochs and, above the high mark, the oldest."""
        lock: Command = ("SET", f"{self._prefix}:sweeper", self._me, "NX", "PX", _LOCK_S * 1000)
        granted, used_before = await self._bounded([lock, ("GET", f"{self._prefix}:used")])
        if granted is None or isinstance(granted, Exception):
            return
        try:
            # What was added to `used` before this moment is written, or never will be, when this pause is over.
            await asyncio.sleep(self._settle_s)
            total, blocks, ages = await self._count()
            counted = total
            if total > self._capacity_bytes * _HIGH:
                counted -= await self._take_oldest(ages, total - int(self._capacity_bytes * _LOW))
            change = counted - _number(used_before)
            (used,) = await self._bounded([("INCRBY", f"{self._prefix}:used", change)])
            self._used_bytes, self._blocks = _number(used), blocks
        finally:
            with contextlib.suppress(KVStoreError, TimeoutError):
                (owner,) = await self._bounded([("GET", f"{self._prefix}:sweeper")])
                if owner == self._me.encode():
                    await self._bounded([("DEL", f"{self._prefix}:sweeper")])

    async def _bounded(self, commands: Sequence[Command]) -> list[Any]:
        async with asyncio.timeout(SWEEP_CALL_S):
            return await self._client.run(commands)

    async def _count(self) -> tuple[int, int, Counter[int]]:
        """Return bytes and number of the records, and bytes by age; unlinks what is of an older epoch or damaged."""
        total = blocks = 0
        ages: Counter[int] = Counter()
        async for keys in self._client.scan(f"{self._prefix}:b:*", _SCAN_KEYS):
            heads = await self._bounded(
                [("GETRANGE", key, 0, HEADER_BYTES - 1) for key in keys] + [("STRLEN", key) for key in keys]
            )
            epochs = await self._epochs_of(keys)
            stale: list[Command] = []
            for key, head, size in zip(keys, heads, heads[len(keys) :], strict=False):
                age = _age_bucket(head)
                if age is None or epochs.get(_scope_of(key)) != _epoch_of(key):
                    stale.append(("UNLINK", key))
                else:
                    total += int(size)
                    blocks += 1
                    ages[age] += int(size)
            if stale:
                await self._bounded(stale)
                self._counts["swept_blocks"] += len(stale)
        return total, blocks, ages

    async def _epochs_of(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        scopes = list({_scope_of(key) for key in keys})
        answers = await self._bounded([("GET", f"{self._prefix}:epoch:{scope.decode()}") for scope in scopes])
        return {
            scope: max(_told_epoch(raw), self._epochs.get(bytes.fromhex(scope.decode()), 0))
            for scope, raw in zip(scopes, answers, strict=True)
        }

    async def _take_oldest(self, ages: Counter[int], excess_bytes: int) -> int:
        """Unlink the oldest records until `excess_bytes` are free; return how many bytes that were."""
        left, limit = excess_bytes, 0
        for limit in sorted(ages):
            left -= ages[limit]
            if left <= 0:
                break
        freed = 0
        async for keys in self._client.scan(f"{self._prefix}:b:*", _SCAN_KEYS):
            heads = await self._bounded([("GETRANGE", key, 0, HEADER_BYTES - 1) for key in keys])
            ages_here = [_age_bucket(head) for head in heads]
            old = [key for key, age in zip(keys, ages_here, strict=True) if age is not None and age <= limit]
            sizes = await self._bounded([("STRLEN", key) for key in old]) if old else []
            gone: list[Command] = []
            for key, size in zip(old, sizes, strict=True):
                if freed < excess_bytes:
                    gone.append(("UNLINK", key))
                    freed += int(size)
            if gone:
                await self._bounded(gone)
                self._counts["swept_blocks"] += len(gone)
            if freed >= excess_bytes:
                break
        return freed


def _exist(hashes: Sequence[bytes], key: Callable[[bytes], str]) -> list[Command]:
    return [("EXISTS", key(block_hash)) for block_hash in hashes]


def _get(hashes: Sequence[bytes], key: Callable[[bytes], str]) -> list[Command]:
    return [("GET", key(block_hash)) for block_hash in hashes]


def _written(answer: object) -> Outcome:
    if answer is None:
        return Outcome.PRESENT
    if is_out_of_memory(answer):
        return Outcome.NO_ROOM
    return Outcome.UNAVAILABLE if isinstance(answer, Exception) else Outcome.DURABLE


def _number(raw: object) -> int:
    return int(raw) if isinstance(raw, bytes | int) else 0


def _told_epoch(raw: object) -> int:
    """Return the epoch that the server told; what is none must not pass for the first, whose blocks may be dropped."""
    if raw is None:
        return 0
    if isinstance(raw, bytes) and raw.isdigit():
        return int(raw)
    raise TierUnavailable(f"the server does not tell a namespace's epoch: {raw!r}")


def _scope_of(key: bytes) -> bytes:
    return key.rsplit(b":", 3)[1]


def _epoch_of(key: bytes) -> int:
    epoch = key.rsplit(b":", 2)[1]
    return int(epoch) if epoch.isdigit() else -1


def _age_bucket(head: object) -> int | None:
    """Return when a record was written, in steps; None if it is none of ours."""
    try:
        return int(read_header(head).written_s / _BUCKET_S) if isinstance(head, bytes) else None
    except CorruptionError:
        return None


def _portions(sizes: Sequence[int], bytes_max: int) -> list[list[int]]:
    """Return the positions of `sizes` in portions of at most `bytes_max`, or of one."""
    portions: list[list[int]] = []
    room = 0
    for at, size in enumerate(sizes):
        if not portions or size > room:
            portions.append([])
            room = bytes_max
        portions[-1].append(at)
        room -= size
    return portions
