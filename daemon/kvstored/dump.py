r"""A namespace's blocks as one file: `kvctl dump` and `kvctl load`. Streaming: memory stays at one window of blocks.

    b"KVSTORED-DUMP-1\\n"
    u32 length, the namespace's canonical encoding, u64 checksum of it
    for each block:  32 bytes hash, u32 length, f64 seconds it may still live (0: for ever), u64 checksum of its bytes,
                     u64 checksum of these 52 bytes, then its bytes
    the end:         32 zero bytes, u32 0, f64 0, u64 number of blocks, u64 checksum of these 52 bytes

All numbers are little-endian.

Invariants
1. A file under its final name is complete: it is written beside it, synced, and renamed.
2. Nothing of a block becomes visible unless its header and its bytes match their checksums.
"""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os
from aiofiles.threadpool.binary import AsyncBufferedReader

from kvstore.block import Namespace
from kvstore.checksum import NOT_COMPUTED, checksum
from kvstore.errors import BadRecord, NamespaceMismatch, TierFull, UnavailableError, UsageError
from kvstore.lease import Session
from kvstore.store import Store
from kvstore.table import NEVER_S, Tier
from kvstore.tenancy import Tenancy
from kvstore.threads import in_thread
from kvstore.tiers.disk_recency import sync_directory
from kvstore.wire import Outcome

MAGIC = b"KVSTORED-DUMP-1\n"
_LENGTH = struct.Struct("<I")
_SUM = struct.Struct("<Q")
_HEADER = struct.Struct("<32sIdQ")
_END_HASH = bytes(32)
_WINDOW_BYTES = 8 << 20
_ROOM_WAIT_S = 30.0
_LIFE_S_MAX = 1e9

Progress = Callable[[int, int], None]


async def write(store: Store, tenancy: Tenancy, path: Path, progress: Progress) -> dict[str, Any]:
    """Write every visible block of a namespace to a new file; return what was written.

    "skipped" are the blocks that went away meanwhile.

    Raises
    ------
    UsageError
        The file exists, or the path names none.
    UnavailableError, TierFull
        It can't be written; no block could be brought to memory. Nothing is left under its name then, nor after a
        cancellation.
    """
    _check_path(path)
    if await aiofiles.os.path.exists(path):
        raise UsageError(f"{path} exists: name a new file, or remove it first")
    part = path.with_name(path.name + ".part")
    try:
        async with aiofiles.open(part, "xb") as file:
            try:
                encoded = tenancy.namespace.encode()
                await file.write(MAGIC + _LENGTH.pack(len(encoded)) + encoded + _SUM.pack(checksum(encoded)))
                blocks, skipped = await _write_blocks(store, tenancy, file, progress)
                await file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
                size_bytes = await file.tell()
                await aiofiles.os.rename(part, path)
            except BaseException:
                part.unlink(missing_ok=True)  # here and now: this may be a cancellation
                raise
        await asyncio.to_thread(sync_directory, path.parent)
    except FileExistsError as exc:
        raise UsageError(f"{part} exists: another dump writes it, or left it behind; remove it then") from exc
    except OSError as exc:
        raise UnavailableError(
            f"{path} can't be written ({exc.strerror}): is there room, and may the daemon write there?"
        ) from exc
    return {"blocks": blocks, "bytes": size_bytes, "path": str(path), "skipped": skipped}


async def read(store: Store, session: Session, path: Path, progress: Progress) -> dict[str, Any]:
    """Store the blocks of a dump file for the session's tenant; what is there already is skipped.

    Raises
    ------
    UsageError
        The path names no regular file.
    BadRecord
        The file is no dump, or is damaged or cut off; the blocks before that place are stored.
    UnavailableError, TierFull, TooLarge
        It can't be read; there is no room for a block, or could never be.
    """
    _check_path(path)
    try:
        found = await aiofiles.os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # to open a pipe would wait for ever
            raise UsageError(f"{path} is no regular file: give the file that kvctl dump has written")
        async with aiofiles.open(path, "rb") as file:
            if await file.read(len(MAGIC)) != MAGIC:
                raise BadRecord(f"{path} is no dump of kvstored, or one of another version")
            namespace = await _read_namespace(file, path)
            store.check_fits(namespace)
            total = max(1, found.st_size // (namespace.block_bytes + _HEADER.size + _SUM.size))
            tenancy = store.tenancy(session.tenant, namespace)
            tenancy.begin_use()
            try:
                return await _read_blocks(store, session, tenancy, file, path, lambda done: progress(done, total))
            finally:
                tenancy.end_use()
    except OSError as exc:
        raise UnavailableError(
            f"{path} can't be read by the daemon ({exc.strerror}): give it a path it may read"
        ) from exc


def _check_path(path: Path) -> None:
    if not path.is_absolute() or not path.name or b"\0" in os.fsencode(path):
        raise UsageError(f"{str(path)!r} names no file: give an absolute path on the daemon's host")


async def _write_blocks(store: Store, tenancy: Tenancy, file: Any, progress: Progress) -> tuple[int, int]:
    """Return how many blocks were written, and how many were gone before that."""
    hashes = list(tenancy.rows)
    step = max(1, _WINDOW_BYTES // tenancy.slot_bytes)
    written = 0
    for start in range(0, len(hashes), step):
        left = hashes[start : start + step]
        done: set[bytes | None] = set()
        ends_s = store.clock.monotonic_s() + _ROOM_WAIT_S
        while left := [block_hash for block_hash in left if store.catalog.find(tenancy, block_hash) is not None]:
            rows = await store.reads.hold_in_memory(tenancy, left)
            try:
                for row in rows:
                    await file.write(await _record(store, row))
                    written += 1
                    done.add(store.catalog.table.hash[row])
            finally:
                for row in rows:
                    store.catalog.unhold(row)
            left = [block_hash for block_hash in left if block_hash not in done]
            if rows:
                ends_s = store.clock.monotonic_s() + _ROOM_WAIT_S
            elif store.clock.monotonic_s() >= ends_s:
                raise TierFull("no room in memory to read blocks from ssd: unpin or release some, then dump again")
            if left:
                await store.room_changed(1.0)
        progress(min(start + step, len(hashes)), len(hashes))
    await file.write(_packed(_END_HASH, 0, 0.0, written))
    return written, len(hashes) - written


async def _record(store: Store, row: int) -> bytes:
    table = store.catalog.table
    view = store.memory.view(table.slot[Tier.CPU][row], store.block_bytes(row))
    found = await in_thread(lambda: checksum(view))
    if table.checksum[row] not in (NOT_COMPUTED, found):
        raise BadRecord("a block in memory does not match its checksum: run kvctl check --verify, then dump again")
    expires_s, block_hash = table.expires_s[row], table.hash[row]
    assert block_hash is not None
    life_s = 0.0 if expires_s == NEVER_S else max(0.001, expires_s - store.clock.boottime_s())
    return _packed(block_hash, len(view), life_s, found) + bytes(view)


def _packed(block_hash: bytes, length: int, life_s: float, number: int) -> bytes:
    header = _HEADER.pack(block_hash, length, life_s, number)
    return header + _SUM.pack(checksum(header))


async def _read_namespace(file: AsyncBufferedReader, path: Path) -> Namespace:
    (length,) = _LENGTH.unpack(await _exactly(file, _LENGTH.size, path))
    if length > 1 << 16:
        raise BadRecord(f"{path} is damaged: its namespace can't have {length} bytes")
    encoded = await _exactly(file, length, path)
    (expected,) = _SUM.unpack(await _exactly(file, _SUM.size, path))
    if checksum(encoded) != expected:
        raise BadRecord(f"{path} is damaged: its namespace does not match its checksum")
    return Namespace.decode(encoded)


async def _read_blocks(
    store: Store,
    session: Session,
    tenancy: Tenancy,
    file: AsyncBufferedReader,
    path: Path,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    seen = stored = 0
    while True:
        raw = await _exactly(file, _HEADER.size, path)
        (expected,) = _SUM.unpack(await _exactly(file, _SUM.size, path))
        if checksum(raw) != expected:
            raise BadRecord(f"{path} is damaged behind block {seen}; the {stored} blocks before are stored")
        block_hash, length, life_s, number = _HEADER.unpack(raw)
        if block_hash == _END_HASH and length == 0:
            if number != seen:
                raise BadRecord(f"{path} names {number} blocks but holds {seen}; these are stored")
            size_bytes = stored * tenancy.block_bytes
            return {"blocks": stored, "bytes": size_bytes, "path": str(path), "skipped": seen - stored}
        if not 0 <= life_s <= _LIFE_S_MAX:  # neither is what isn't a number
            raise BadRecord(f"{path}: block {seen} can't have {life_s} seconds to live")
        if length != tenancy.block_bytes:
            raise NamespaceMismatch(f"{path}: block {seen} has {length} bytes, its namespace {tenancy.block_bytes}")
        payload = await _exactly(file, length, path)
        if await asyncio.to_thread(checksum, payload) != number:
            raise BadRecord(f"{path}: block {seen} does not match its checksum; the {stored} blocks before are stored")
        stored += await _store_block(store, session, tenancy, block_hash, payload, number, life_s)
        seen += 1
        progress(seen)


async def _store_block(
    store: Store, session: Session, tenancy: Tenancy, block_hash: bytes, payload: bytes, number: int, life_s: float
) -> bool:
    """Store one block; return False if it is there already."""
    ends_s = store.clock.monotonic_s() + _ROOM_WAIT_S
    while True:
        ticket, outcomes = store.puts.reserve(session, tenancy, [block_hash], store.clock.monotonic_s(), pool=True)
        if outcomes[0] != Outcome.NO_ROOM:
            break
        if store.clock.monotonic_s() >= ends_s:
            raise TierFull("there is no room for the dump's blocks: raise --cpu-size, or unpin and release blocks")
        await store.room_changed(1.0)
    if outcomes[0] != Outcome.GRANTED:
        return False
    store.memory.view(ticket.offsets[0], len(payload))[:] = payload
    result = store.puts.seal(ticket, None, [number], life_s)
    store.stored(result.rows)
    # A dump may be larger than memory: what waits for ssd while its place in memory is taken would be lost.
    may_wait = min(store.settings.write_queue_bytes, store.memory.size_bytes // 4) // 2
    while store.mover is not None and store.mover.queued_bytes > may_wait:
        await store.room_changed(1.0)
    return bool(result.rows)


async def _exactly(file: AsyncBufferedReader, length: int, path: Path) -> bytes:
    content = await file.read(length)
    if len(content) != length:
        raise BadRecord(f"{path} is cut off: the blocks before its end are stored, the rest is missing")
    return content
