"""Blocks in an object store, or in a directory (file://): many in each object, an index of them in memory.

    packs/WRITER/...         objects with blocks (packing.py)
    epochs/SCOPE.EPOCH       how often a scope was dropped; the highest counts
    writers/WRITER           written now and then by each daemon: it lives

Theory of operation. A listing every few seconds (`refresh_s`, or twenty times what a listing takes) shows what others
have written and deleted; objects that are new are asked for their tables in the background, the newest first. After a
restart the same brings everything back. Each daemon writes under a name of its own, `writer`, keeps its own objects
under the cap, and deletes its own least recently used ones for new ones. What is over or was dropped anybody may
delete, and so the objects of a writer that has given no sign of life for a day, by the store's own clock.

Invariants
1. `used` is what this writer's objects take, with those being written and those whose writing was not answered, and
   never more than the cap. Until the first listing is complete nothing is written.
2. An object's bytes are put together in memory of our own, and read into memory of the library's: no transfer ever
   touches the pool, so one that is given up late harms nothing.
3. A drop is an object of its own that is there before `drop` returns; it is seen by others at their next listing.
4. Dropping single blocks deletes the objects that hold them: their neighbours become misses, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from datetime import datetime
from functools import partial

from kvstore.clock import Clock
from kvstore.errors import CorruptionError, KVStoreError
from kvstore.threads import in_thread
from kvstore.tiers.remote import RemoteFound, RemoteRead, RemoteScope, RemoteUsage, RemoteWrite
from kvstore.wire import Outcome
from kvstored.logs import fields
from kvstored.remote.bucket import Bucket, Gone
from kvstored.remote.copying import copy
from kvstored.remote.guarded import Note
from kvstored.remote.health import Health
from kvstored.remote.pack_index import Location, Pack, PackIndex
from kvstored.remote.packing import (
    BLOCKS_MAX,
    END_BYTES,
    PACKS,
    TRAILER_BYTES,
    PackName,
    Range,
    assemble,
    merged,
    pack_bytes,
    read_table,
    table_span,
)
from kvstored.remote.records import HEADER_BYTES, checked, scope_id

log = logging.getLogger("kvstored.remote")

REFRESH_S = 10.0
LISTING_SHARE = 20  # a listing may take one part in so many of the time
LISTING_S = 60.0  # for one portion of it
REQUESTS_MAX = 16
TABLES_AT_ONCE = 8
ALIVE_S = 600.0  # how often a writer says that it lives
SILENT_S = 86_400.0  # and when it is taken for gone
OVER_GRACE_S = 60.0  # others' objects that are over: their writer comes first
_DELETED_AT_ONCE = 256
_LOOKED_AT_ONCE = 2000
EPOCHS, WRITERS = "epochs", "writers"


class ObjectsBackend:
    """See the module's docstring."""

    batch_bytes = 32 << 20
    asks_to_find = False

    def __init__(
        self, bucket: Bucket, writer: str, capacity_bytes: int, clock: Clock, *, refresh_s: float = REFRESH_S
    ) -> None:
        self.index = PackIndex()
        self._bucket = bucket
        self._writer = writer
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._refresh_s = refresh_s
        self._life = secrets.token_hex(6)
        self._written = 0
        self._ready = False
        self._untold: set[RemoteScope] = set()  # dropped, and the store does not know
        self._own_bytes = 0
        self._writing: dict[str, int] = {}  # name -> size, of objects that no listing has shown yet
        self._unanswered: dict[str, tuple[int, int]] = {}  # name -> size, and how many listings had begun by then
        self._listings = 0  # that have begun
        self._listing = asyncio.Lock()
        self._removed_since: set[str] = set()  # names, since the last listing began
        self._own: OrderedDict[Pack, None] = OrderedDict()  # this writer's objects, the least recently used first
        self._alive_s = float("-inf")
        self._making_room = asyncio.Lock()
        self._requests = asyncio.Semaphore(REQUESTS_MAX)
        self._counts: Counter[str] = Counter()

    @property
    def answers(self) -> int:
        return self._bucket.answers

    # ---- calls

    async def find(self, scope: RemoteScope, hashes: Sequence[bytes]) -> list[bool]:
        return [self._locate(scope, block_hash) is not None for block_hash in hashes]

    async def read(self, scope: RemoteScope, reads: Sequence[RemoteRead], note: Note[RemoteFound]) -> None:
        by_pack: dict[Pack, list[tuple[int, Location]]] = {}
        for at, read in enumerate(reads):
            location = self._locate(scope, read.hash)
            if location is None:
                note(at, RemoteFound(Outcome.ABSENT))
            else:
                by_pack.setdefault(location.pack, []).append((at, location))
        failures: list[KVStoreError] = []
        async with asyncio.TaskGroup() as tasks:
            for pack, members in by_pack.items():
                if pack in self._own:
                    self._own.move_to_end(pack)
                spans = [_span(location) for _, location in members]
                for wanted in merged(spans):
                    parts = [(members[at][0], spans[at][0]) for at in wanted.members]
                    tasks.create_task(self._read_range(pack, wanted, parts, scope, reads, note, failures))
        if failures:
            raise failures[0]

    async def _read_range(
        self,
        pack: Pack,
        wanted: Range,
        parts: list[tuple[int, int]],
        scope: RemoteScope,
        reads: Sequence[RemoteRead],
        note: Note[RemoteFound],
        failures: list[KVStoreError],
    ) -> None:
        """Read what lies side by side in an object; `parts`: positions in `reads`, and where their records begin."""
        try:
            async with self._requests:
                raw = await self._bucket.get(pack.name.text, wanted.start, wanted.end)
        except Gone:
            self._removed(pack)
            for at, _ in parts:
                note(at, RemoteFound(Outcome.ABSENT))
            return
        except KVStoreError as exc:
            failures.append(exc)
            return
        found = await in_thread(
            lambda: [self._take(pack, raw[start - wanted.start :], reads[at]) for at, start in parts]
        )
        for (at, _), result in zip(parts, found, strict=True):
            if result.outcome is Outcome.CORRUPT:
                self.index.forget(scope_id(scope), reads[at].hash)
            note(at, result)

    def _take(self, pack: Pack, raw: memoryview, read: RemoteRead) -> RemoteFound:
        try:
            header, payload = checked(raw, read.hash, pack.name.scope, pack.name.epoch, len(read.destination))
        except CorruptionError as exc:
            self._damaged(pack.name.text, exc)
            return RemoteFound(Outcome.CORRUPT)
        life_s = header.life_s(self._clock.wall_s())
        if life_s <= 0:
            return RemoteFound(Outcome.EXPIRED)
        copy(read.destination, payload)
        return RemoteFound(Outcome.HIT, header.checksum, life_s)

    async def write(self, scope: RemoteScope, writes: Sequence[RemoteWrite], note: Note[Outcome]) -> None:
        if not self._ready or scope in self._untold:
            for at in range(len(writes)):
                note(at, Outcome.UNAVAILABLE)
            return
        epoch = self.index.epoch(scope_id(scope))  # of this moment: what is dropped meanwhile stays dropped
        fresh: list[int] = []
        for at, write in enumerate(writes):
            if self._locate(scope, write.hash) is None:
                fresh.append(at)
            else:
                note(at, Outcome.PRESENT)
        while fresh:
            count, size_bytes = 1, len(writes[fresh[0]].payload)
            while count < min(len(fresh), BLOCKS_MAX) and size_bytes < self.batch_bytes:
                size_bytes += len(writes[fresh[count]].payload)
                count += 1
            outcome = await self._write_pack(scope, epoch, [writes[at] for at in fresh[:count]])
            for at in fresh[:count]:
                note(at, outcome)
            del fresh[:count]

    async def _write_pack(self, scope: RemoteScope, epoch: int, writes: Sequence[RemoteWrite]) -> Outcome:
        key, now_s = scope_id(scope), self._clock.wall_s()
        size_bytes = pack_bytes([len(write.payload) for write in writes])
        self._written += 1
        ends_s = now_s + max(write.life_s for write in writes)
        name = PackName.make(self._writer, key, epoch, now_s, ends_s, f"{self._life}-{self._written:x}")
        if not await self._make_room(size_bytes, name.text):
            self._counts["refused_full"] += len(writes)
            return Outcome.NO_ROOM
        try:
            content, table = await in_thread(partial(assemble, scope, key, epoch, writes, now_s))
            async with self._requests:
                await self._bucket.put(name.text, content)
        except BaseException:
            if name.text not in self.index.packs:
                self._unanswered[name.text] = (size_bytes, self._listings)
            raise
        finally:
            self._writing.pop(name.text, None)
        pack = self.index.packs.get(name.text) or self._add(name, size_bytes)  # a listing may have been quicker
        self.index.fill(pack, table)
        return Outcome.DURABLE

    async def delete(self, scope: RemoteScope, hashes: Sequence[bytes]) -> None:
        await self.learn()  # what others have written since must go, too
        wanted, key = set(hashes), scope_id(scope)
        packs = [
            pack
            for pack in self.index.packs.values()
            if pack.name.scope == key and pack.table is not None and not wanted.isdisjoint(pack.table.hashes)
        ]
        await self._delete(packs)

    def forget(self, scope: RemoteScope) -> None:
        self._untold.add(scope)

    async def drop(self, scope: RemoteScope) -> None:
        key = scope_id(scope)
        await self._drop(key, max(self.index.epoch(key), (await self._epochs()).get(key, 0)) + 1)
        self._untold.discard(scope)

    async def drop_all(self) -> None:
        await self._refresh()
        for key in {pack.name.scope for pack in self.index.packs.values()}:
            await self._drop(key, self.index.epoch(key) + 1)

    async def _drop(self, key: bytes, epoch: int) -> None:
        await self._bucket.put(_epoch_name(key, epoch), b"dropped")
        self.index.set_epoch(key, epoch)
        with contextlib.suppress(KVStoreError):  # it counts no more; one that stays harms nothing
            await self._bucket.delete([_epoch_name(key, epoch - 1)])

    def usage(self, place: str) -> RemoteUsage:
        return RemoteUsage(
            place=place,
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._used_bytes,
            known_bytes=self.index.size_bytes,
            blocks=self.index.blocks,
            objects=len(self.index.packs),
            state="ready" if self._ready else "starting",
            state_text="" if self._ready else "what is there is being listed",
            checksum_failures=self._counts["checksum_failures"],
            refused_full=self._counts["refused_full"],
            swept_blocks=self._counts["swept_blocks"],
            swept_expired_blocks=self._counts["swept_expired_blocks"],
        )

    async def close(self) -> None:
        """Nothing is open: the library's connections end with it."""

    def _locate(self, scope: RemoteScope, block_hash: bytes) -> Location | None:
        if scope in self._untold:
            return None
        return self.index.find(scope_id(scope), block_hash, self._clock.wall_s())

    # ---- the cap

    @property
    def _used_bytes(self) -> int:
        return self._own_bytes + sum(self._writing.values()) + sum(size for size, _ in self._unanswered.values())

    async def _make_room(self, size_bytes: int, name: str = "") -> bool:
        """Count an object of `size_bytes` as being written, deleting own ones for it; False if that can't be had."""
        if size_bytes > self._capacity_bytes:
            return False
        async with self._making_room:  # across I/O: two that make room at once would delete twice as much
            while (over_bytes := self._used_bytes + size_bytes - self._capacity_bytes) > 0:
                victims: list[Pack] = []
                for pack in self._own:
                    victims.append(pack)
                    over_bytes -= pack.size_bytes
                    if over_bytes <= 0 or len(victims) >= _DELETED_AT_ONCE:
                        break
                if not victims:
                    return False
                await self._sweep(victims, "swept_blocks")
            if name:
                self._writing[name] = size_bytes
        return True

    async def _sweep(self, packs: Sequence[Pack], counted: str) -> None:
        await self._delete(packs)
        self._counts[counted] += sum(0 if pack.table is None else len(pack.table) for pack in packs)

    async def _delete(self, packs: Sequence[Pack]) -> None:
        for start in range(0, len(packs), _DELETED_AT_ONCE):
            part = packs[start : start + _DELETED_AT_ONCE]
            await self._bucket.delete([pack.name.text for pack in part])
            for pack in part:
                self._removed(pack)

    def _add(self, name: PackName, size_bytes: int) -> Pack:
        pack = self.index.add(name, size_bytes)
        if name.writer == self._writer:
            self._own[pack] = None
            self._own_bytes += size_bytes
            self._writing.pop(name.text, None)  # or it would count twice
        return pack

    def _removed(self, pack: Pack) -> None:
        if pack in self._own:
            del self._own[pack]
            self._own_bytes -= pack.size_bytes
        self._removed_since.add(pack.name.text)
        self.index.remove(pack)

    # ---- what is there

    async def run(self, health: Health) -> None:
        """List, learn and sweep until cancelled."""
        while True:
            began_s, pause_s = self._clock.monotonic_s(), self._refresh_s
            try:
                with health.call(LISTING_S):
                    await self._say_alive()
                    await self._refresh()
                pause_s = max(self._refresh_s, LISTING_SHARE * (self._clock.monotonic_s() - began_s))
                # From here on it takes as long as it takes: others must not have to wait for its end.
                await self._read_tables()
                await self._sweep_what_is_over()
            except (KVStoreError, TimeoutError):
                pass  # the health says it, or the next call will
            except Exception:  # a bug here must not end the daemon
                log.exception("a listing of the remote store met a bug")
            await asyncio.sleep(pause_s)

    async def recover(self) -> bool:
        for scope, epoch in (await self._epochs()).items():
            self.index.set_epoch(scope, epoch)
        for each in list(self._untold):
            await self.drop(each)
        return not self._untold

    async def _say_alive(self) -> None:
        if self._clock.monotonic_s() - self._alive_s >= ALIVE_S:
            async with asyncio.timeout(LISTING_S):
                await self._bucket.put(f"{WRITERS}/{self._writer}", b"alive")
            self._alive_s = self._clock.monotonic_s()

    async def learn(self) -> None:
        """Know, when this returns, what others had written before it was called."""
        await self._refresh()
        await self._read_tables()

    async def _refresh(self) -> None:
        """Make the index agree with the store, but for what is written or deleted meanwhile, and for tables."""
        async with self._listing:  # across I/O: an older listing's news must not come after a newer one's
            self._listings += 1
            for scope, epoch in (await self._epochs()).items():
                self.index.set_epoch(scope, epoch)
            last = self.index.newest
            self._removed_since.clear()
            seen = {name: size_bytes for name, size_bytes, _ in await self._listed(PACKS)}
            for pack in [pack for pack in self.index.packs.values() if pack.name.text not in seen]:
                if pack.number <= last:  # what was added after the listing began is not in it
                    self._removed(pack)
            found = [PackName.read(text) for text in seen.keys() - self.index.packs.keys() - self._removed_since]
            for name in sorted((name for name in found if name is not None), key=lambda name: name.written_s):
                self.index.set_epoch(name.scope, name.epoch)
                self._add(name, seen[name.text])
            for text, (_, listings) in list(self._unanswered.items()):
                # A store may still be busy with a request that was given up: the second listing counts.
                if listings + 1 < self._listings or text in self.index.packs:
                    del self._unanswered[text]
            self._ready = True

    async def _listed(self, prefix: str) -> list[tuple[str, int, datetime]]:
        found: list[tuple[str, int, datetime]] = []
        async with contextlib.aclosing(self._bucket.list(prefix)) as listing:
            while True:
                async with asyncio.timeout(LISTING_S):
                    portion = await anext(listing, None)
                if portion is None:
                    return found
                found += portion

    async def _epochs(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for name, _, _ in await self._listed(EPOCHS):
            scope, _, epoch = name.removeprefix(f"{EPOCHS}/").partition(".")
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(scope)
                found[key] = max(found.get(key, 0), int(epoch, 16))
        return found

    async def _read_tables(self) -> None:
        """Learn what lies in the objects whose tables are not known yet, the newest first."""
        unread = [pack for pack in self.index.packs.values() if pack.table is None and not self.index.is_stale(pack)]
        unread.sort(key=lambda pack: pack.name.written_s, reverse=True)
        for start in range(0, len(unread), TABLES_AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for pack in unread[start : start + TABLES_AT_ONCE]:
                    tasks.create_task(self._read_table(pack))

    async def _read_table(self, pack: Pack) -> None:
        name, size_bytes = pack.name.text, pack.size_bytes
        try:
            async with asyncio.timeout(LISTING_S):
                first = max(0, size_bytes - END_BYTES)
                end = await self._bucket.get(name, first, size_bytes)
                starts, ends = table_span(end, size_bytes)
                entries = end[max(0, starts - first) : ends - first]
                if starts < first:
                    entries = memoryview(bytes(await self._bucket.get(name, starts, first)) + bytes(entries))
            table = await in_thread(partial(read_table, entries, end[-TRAILER_BYTES:], starts))
        except Gone:
            self._removed(pack)
        except CorruptionError as exc:
            self._damaged(name, exc)
            if pack.name.writer == self._writer:
                await self._delete([pack])  # it holds nothing that could be found, and counts as used
        except (KVStoreError, TimeoutError):
            return  # the next listing tries again
        else:
            if name in self.index.packs:
                self.index.fill(pack, table)

    async def _sweep_what_is_over(self) -> None:
        now_s = self._clock.wall_s()
        over: list[Pack] = []
        for at, pack in enumerate(list(self.index.packs.values())):
            if at % _LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            grace_s = 0.0 if pack.name.writer == self._writer else OVER_GRACE_S
            if pack.name.expires_s + grace_s < now_s or self.index.is_stale(pack):
                over.append(pack)
        await self._sweep(over, "swept_expired_blocks")
        await self._make_room(0)  # what was written after all, though nobody was told, may be beyond the cap
        silent = await self._silent_writers()
        await self._sweep([pack for pack in self.index.packs.values() if pack.name.writer in silent], "swept_blocks")

    async def _silent_writers(self) -> set[str]:
        """Return the writers that were last heard of a day ago, by the store's own clock."""
        heard = {name.rpartition("/")[2]: written for name, _, written in await self._listed(WRITERS)}
        now = heard.get(self._writer)
        if now is None or self._clock.monotonic_s() - self._alive_s >= ALIVE_S:
            return set()
        return {writer for writer, written in heard.items() if (now - written).total_seconds() > SILENT_S}

    def _damaged(self, name: str, exc: CorruptionError) -> None:
        self._counts["checksum_failures"] += 1
        log.warning("a remote object is damaged", extra=fields(object=name, why=str(exc)))


def _span(location: Location) -> tuple[int, int]:
    start = location.table.offsets[location.slot]
    return start, start + HEADER_BYTES + location.table.lengths[location.slot]


def _epoch_name(scope: bytes, epoch: int) -> str:
    return f"{EPOCHS}/{scope.hex()}.{epoch:08x}"
