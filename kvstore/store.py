"""The store of one node: the parts put together, opened, kept going and closed. A server stands in front of it.

Theory of operation. All state is owned by the thread of one event loop; only copies, file I/O and checksums run
beside it. `open` finds what the ssd tier holds; `run` populates memory, moves blocks and ends what is overdue until
it is cancelled; `drain` writes what only memory holds; `close` comes last.

Invariants (checked by `check_integrity`, beside those of the parts)
1. In the cpu tier, the slots of rows, of open puts and of puts in quarantine are all the used ones.
2. The ssd tier's used slots are those of rows and of writes and deletes in flight.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.block import Namespace
from kvstore.catalog import Catalog
from kvstore.checksum import NOT_COMPUTED, checksum
from kvstore.clock import Clock, SystemClock
from kvstore.counters import Cause
from kvstore.draining import Drain, Drained, in_portions
from kvstore.errors import KVStoreError, TooLarge
from kvstore.lease import Leases, Session
from kvstore.lifecycle import Copy
from kvstore.mover import Mover
from kvstore.policy import POLICIES
from kvstore.puts import PutLimits, Puts
from kvstore.reads import ReadLimits, Reads
from kvstore.recency import Behind
from kvstore.remote_tier import RemoteTier
from kvstore.restore import WarmStart, slots_for
from kvstore.room import Room
from kvstore.table import NO_SLOT, Tier
from kvstore.tenancy import Tenancy
from kvstore.threads import in_thread, populate
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.remote import RemoteStore
from kvstore.wire import Outcome

log = logging.getLogger("kvstore")

_TICK_S = 0.05
_ROOM_ROUND_S = 0.1
_CHECKPOINT_S = 30.0
_CLEAN_LOOK = 256
_TICK_WORK_S = 0.002  # how long a tick may hold the loop for what has time
_PER_TICK = 2000  # rows that one tick looks at for each purpose
_PER_STEP = 100
_WARM_AT_ONCE = 40_000  # rows: some 30 ms
WINDOW_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a store is made of; the daemon's Settings name the same things."""

    cpu_size_bytes: int
    ssd_size_bytes: int = 0  # 0: no ssd tier
    ssd_dir: Path | None = None
    eviction: str = "lru"
    write_policy: str = "through"  # through, second-touch, back
    remote_write_policy: str = "second-touch"  # the same words, for the remote tier
    read_only_clients: bool = False
    verify_reads: bool = False
    huge_pages: str = "auto"
    ttl_s: float = 0.0
    ttl_mode: str = "write"  # from when a namespace's life counts: write, access
    high_watermark: float = 0.95
    low_watermark: float = 0.92
    lease_s_max: float = 60.0
    reservation_s: float = 10.0
    io_threads: int = 4
    write_queue_bytes: int = 256 << 20
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])


class Store:
    """See the module's docstring. Made by `open`."""

    def __init__(self, settings: StoreSettings, disk: DiskTier | None, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.disk = disk
        self.memory = MemoryTier(
            settings.cpu_size_bytes,
            read_only_clients=settings.read_only_clients,
            huge_pages=settings.huge_pages,
        )
        tiers = (Tier.CPU,) if disk is None else (Tier.CPU, Tier.SSD)
        policy = POLICIES[settings.eviction]
        self.catalog = Catalog(
            {tier: policy() for tier in tiers}, self._free_slot, clock.boottime_s, self.memory.is_transit,
            sliding=settings.ttl_mode == "access",
        )  # fmt: skip
        quotas = {tenant: sizes["cpu"] for tenant, sizes in settings.quotas.items() if "cpu" in sizes}
        self._uses: list[tuple[Sequence[int], Behind | None]] = []  # noted, and not told to the policies yet
        self.room = Room(self.catalog, self.memory, quotas, self._settle_uses)
        self.mover = None if disk is None else Mover(
            self.catalog, self.memory, self.room, disk,
            capacity_bytes=settings.ssd_size_bytes, queue_bytes_max=settings.write_queue_bytes,
            quotas={tenant: sizes["ssd"] for tenant, sizes in settings.quotas.items() if "ssd" in sizes},
        )  # fmt: skip
        self.remote: RemoteTier | None = None
        self._drain = None if self.mover is None else Drain(self.catalog, self.mover, clock)
        usable = self.memory.grantable_bytes()
        self.leases = Leases(self.catalog, usable // 2, min(self.memory.transit_bytes, usable // 4))
        limits = PutLimits(usable // 2, usable // 4, settings.reservation_s)
        self.puts = Puts(self.catalog, self.memory, self.room, limits, self.note_use)
        window_bytes = min(WINDOW_BYTES_MAX, max(usable // 16, 2 << 20))
        self.reads = Reads(
            self.catalog, self.leases, self.puts, None if self.mover is None else self.mover.loads, clock,
            ReadLimits(settings.lease_s_max, window_bytes, settings.verify_reads), self.note_use,
        )  # fmt: skip
        self.started_s = clock.monotonic_s()
        self._next_session = 1
        self._end_pins_s = self.started_s
        self._warm: WarmStart | None = None
        self._defer: Callable[[Callable[[], None]], object] = lambda call: call()

    @classmethod
    async def open(cls, settings: StoreSettings, clock: Clock | None = None) -> Store:
        """Return a store with what its ssd directory holds; memory is not populated yet.

        Raises
        ------
        TierLocked, TierUnavailable, BadSetting
            A tier can't be opened; the text names the fix.
        """
        clock = clock or SystemClock()
        disk: DiskTier | None = None
        if settings.ssd_size_bytes:
            assert settings.ssd_dir is not None
            disk = await DiskTier.open(
                settings.ssd_dir, settings.ssd_size_bytes, clock=clock, io_threads=settings.io_threads
            )
        try:
            store = cls(settings, disk, clock)
            if disk is not None:
                store._warm = WarmStart(store.catalog, disk)
                for _ in range(_WARM_AT_ONCE // _PER_STEP):  # a small store is ready in every respect when it opens
                    if not store._warm.catch_up(_PER_STEP):
                        break
        except BaseException:
            if disk is not None:
                await disk.close()
            raise
        return store

    def attach(self, remote: RemoteStore) -> None:
        """Give the store a remote tier, before `run`."""
        self.remote = RemoteTier(
            self.catalog, self.memory, self.puts, self.reads,
            None if self.disk is None or self.mover is None else (self.disk, self.mover.loads), remote, self.clock,
            policy=self.settings.remote_write_policy, queue_bytes_max=self.settings.write_queue_bytes,
        )  # fmt: skip

    # ---- keeping going

    async def run(self, ready: Callable[[], None]) -> None:
        """Populate memory, move blocks and end what is overdue, until cancelled; `ready`: it can serve now."""
        self._defer = asyncio.get_running_loop().call_soon
        async with asyncio.TaskGroup() as tasks:
            if self.mover is not None:
                tasks.create_task(self.mover.run(), name="mover")
                tasks.create_task(self._forget_stale(), name="stale")
            if self.remote is not None:
                tasks.create_task(self.remote.run(), name="remote")
            tasks.create_task(populate(self.memory, ready), name="populate")
            tasks.create_task(self._tick_forever(), name="ticks")

    async def _forget_stale(self) -> None:
        """Delete what the directory held under older epochs, in portions; what fails is tried again."""
        while self._warm is not None and self.disk is not None and self._warm.stale:
            portion = self._warm.stale[-_PER_TICK:]
            try:
                if await self.disk.forget(portion):
                    del self._warm.stale[-len(portion) :]
            except KVStoreError as exc:
                log.warning("stale blocks can't be deleted now: %s", exc)
            await asyncio.sleep(_TICK_S)

    async def _tick_forever(self) -> None:
        last_checkpoint_s = self.clock.monotonic_s()
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.tick()
                if self.disk is not None and self.clock.monotonic_s() - last_checkpoint_s >= _CHECKPOINT_S:
                    last_checkpoint_s = self.clock.monotonic_s()
                    await self.checkpoint()
            except Exception:  # a bug here must not end the daemon; blocks are safe without ticks
                log.exception("a tick met a bug")

    def tick(self) -> None:
        """End what is overdue and reclaim a little of what is dropped; called every 50 ms."""
        now_s = self.clock.monotonic_s()
        self.puts.expire(now_s)
        self.leases.expire(now_s)
        if self.mover is not None and not self.mover.is_draining:
            self._clean_ahead(self.mover)
        if self.remote is not None:
            self.remote.tick()
        # The rest may be much: it gets what is left of the tick's time, a little of each in turn.
        for _ in range(_PER_TICK // _PER_STEP):
            done = self.catalog.expire(_PER_STEP) + self.catalog.reclaim(_PER_STEP)
            if self._warm is not None:
                done += self._warm.catch_up(_PER_STEP)
            if not done or self.clock.monotonic_s() - now_s > _TICK_WORK_S:
                break
        if now_s >= self._end_pins_s:
            self._end_pins_s = now_s + 1.0
            self.catalog.end_pins()

    def _clean_ahead(self, mover: Mover, look_max: int = _PER_TICK) -> None:
        """Above the high watermark, write the coldest blocks that only memory holds, so that they can be evicted.

        Looks at what the low watermark leaves at the cold end, and at no more than `look_max` blocks of a size. Where
        every block goes to ssd at its seal, only those that the queue could not take are left to find.
        """
        capacity = self.memory.grantable_bytes()
        all_are_queued = self.settings.write_policy == "through" and not mover.left_out
        if all_are_queued or self.memory.slab.used_bytes < capacity * self.settings.high_watermark:
            return
        table = self.catalog.table
        mover.left_out = 0
        for lane, (slot_bytes, _, tier) in enumerate(self.catalog.lanes):
            if tier is not Tier.CPU:
                continue
            left = min(look_max, int(capacity * (1 - self.settings.low_watermark)) // slot_bytes + 1)
            dirty: list[int] = []
            for row in self.catalog.policies[Tier.CPU].coldest(lane):
                if left <= 0 or len(dirty) >= 256:
                    break
                left -= 1
                wanted = table.uses[row] or self.settings.write_policy != "second-touch"
                if wanted and table.residency[row] == Tier.CPU.bit and table.state[Tier.SSD][row] == Copy.ABSENT:
                    dirty.append(row)
            mover.left_out += len(dirty)
            mover.demote(dirty)

    async def checkpoint(self) -> None:
        """Write the order of use on ssd, so that a restart finds it."""
        if self.disk is None:
            return
        addresses = array("Q")
        for lane, (_, _, tier) in enumerate(list(self.catalog.lanes)):
            if tier is Tier.SSD:
                slots, policy = self.catalog.table.slot[Tier.SSD], self.catalog.policies[Tier.SSD]
                addresses.extend([slots[row] async for row in in_portions(policy, lane, len(self.catalog.table))])
        try:
            await self._note_moved_ends(self.disk)
            await self.disk.checkpoint(addresses)
            await self.disk.tidy_namespaces()
        except KVStoreError as exc:
            log.warning("checkpoint failed: %s", exc)
        for address in self.disk.take_lost():
            row = self.disk.owner(address)
            if self.catalog.is_at(row, Tier.SSD, address):
                self.catalog.leave(row, Tier.SSD, Cause.DROP)
        await self._forget_pins(self.disk)

    async def _note_moved_ends(self, disk: DiskTier) -> None:
        """Write down the ends of lives that uses have moved, in portions."""
        table, moved = self.catalog.table, self.catalog.lives.moved
        while moved:
            part = list(moved.items())[:_PER_TICK]
            there = [r for r, g in part if table.generation[r] == g and table.state[Tier.SSD][r] == Copy.READY]
            ends_s = {table.slot[Tier.SSD][row]: table.noted_end_s(row) for row in there}
            for row, _ in part:
                del moved[row]
            try:
                await disk.set_expiry(ends_s)
            except KVStoreError:
                moved.update((row, table.generation[row]) for row in there)
                raise

    async def _forget_pins(self, disk: DiskTier) -> None:
        """Delete the pins on ssd that are over or whose block is gone: a block stored anew would be pinned by them."""
        catalog, kept = self.catalog, set[tuple[int | None, bytes | None]]()
        for row in catalog.pinned:
            kept.add((catalog.tenancies[catalog.table.namespace[row]].disk_number, catalog.table.hash[row]))
        over = [(pin.namespace, pin.hash) for pin in disk.pins() if (pin.namespace, pin.hash) not in kept]
        if over:
            try:
                await disk.delete_pins(over)
            except KVStoreError as exc:
                log.warning("pins that are over could not be deleted: %s", exc)

    async def drain(self, timeout_s: float) -> Drained:
        """Write to ssd what only memory holds, the hottest first, as much as fits; returns by `timeout_s`."""
        ends_s = self.clock.monotonic_s() + timeout_s
        drained = Drained(0, 0, 0)
        if self._drain is not None:
            drained = await self._drain.run(timeout_s)
            await self.checkpoint()
        if self.remote is not None:
            await self.remote.drain(ends_s - self.clock.monotonic_s())
        return drained

    async def close(self) -> None:
        """Close the tiers; nothing may be running any more."""
        if self.remote is not None:
            await self.remote.store.close()
        if self.disk is not None:
            await self.disk.close()
        self.memory.close()

    # ---- sessions and namespaces

    def open_session(self, tenant: str, *, admin: bool, client: str = "", process: int = 0) -> Session:
        """Return a new session; all sessions of one `process` share a limit, 0: it is not known."""
        session = Session(self._next_session, tenant, admin, client, process=process)
        self._next_session += 1
        return session

    def end_session(self, session: Session, *, gone: bool) -> None:
        """End a session's rights; `gone`: its process has ended or said goodbye, so its slots come back, too."""
        session.over = True
        self.puts.end_session(session, gone=gone)
        self.leases.end_session(session, gone=gone)

    def tenancy(self, tenant: str, namespace: Namespace) -> Tenancy:
        """Return a tenant's view of a namespace, made at first use; Backpressure where there are too many.

        It may be forgotten while it is empty, except between its `begin_use` and `end_use`.
        """
        namespaces = self.catalog.namespaces
        found = namespaces.find(tenant, namespace.digest)
        if found is None:
            slots = slots_for(namespace)
            namespaces.check_room(tenant, namespace, slots)
            found = namespaces.tenancy(tenant, namespace, slots, self.settings.ttl_s)
        return found

    def check_fits(self, namespace: Namespace) -> None:
        """Raise TooLarge if a block of this namespace could never be stored and read here."""
        slot_bytes = slots_for(namespace)[Tier.CPU]
        if slot_bytes > self.leases.pinned_bytes_max or not self.memory.slab.span_for(slot_bytes):
            raise TooLarge(
                f"a block of {namespace.block_bytes} bytes is over half of the cpu tier of {self.memory.size_bytes} "
                "bytes: raise --cpu-size, or use fewer tokens a block"
            )

    def block_bytes(self, row: int) -> int:
        return self.catalog.tenancies[self.catalog.table.namespace[row]].block_bytes

    def note_use(self, rows: Sequence[int], behind: Behind | None) -> None:
        """Note a use of blocks soon, when the answer at hand is on its way; `behind`: what they continue."""
        if rows:
            self._uses.append((rows, behind))
            if len(self._uses) == 1:
                self._defer(self._settle_uses)

    def _settle_uses(self) -> None:
        uses, self._uses = self._uses, []
        for rows, behind in uses:
            self.catalog.use(rows, behind)
            if self.mover is not None and self.settings.write_policy == "second-touch":
                self.mover.demote(row for row in rows if self.catalog.table.residency[row] == Tier.CPU.bit)
            if self.remote is not None:
                self.remote.used(rows)

    def stored(self, rows: Sequence[int]) -> None:
        """New blocks were sealed: send them on as the write policy says."""
        if self.remote is not None:
            self.remote.sealed(rows)
        if self.mover is not None and self.settings.write_policy == "through":
            self.mover.demote(rows)
        elif self.mover is not None and self.settings.write_policy == "back" and rows:
            # A burst would push out more between two ticks than what has been written ahead.
            mover = self.mover
            self._defer(lambda: self._clean_ahead(mover, max(_CLEAN_LOOK, 4 * len(rows))))

    async def make_durable(self, rows: Sequence[int], wait_s: float) -> list[bool]:
        """Return, for each block, whether it is on disk for good; waits `wait_s` at most."""
        if self.mover is None:
            return [False] * len(rows)
        try:
            async with asyncio.timeout(wait_s):
                return await self.mover.make_durable(rows)
        except TimeoutError:
            return [self.catalog.table.state[Tier.SSD][row] == Copy.READY for row in rows]

    async def room_changed(self, timeout_s: float) -> None:
        """Return when a lease has ended or bytes have moved, or after a moment: room may have appeared."""
        waits = [asyncio.ensure_future(self.leases.released(min(timeout_s, _ROOM_ROUND_S)))]
        if self.mover is not None:
            waits.append(asyncio.ensure_future(self.mover.progress.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # ---- dropping

    async def verify(self, rows: Iterable[int], tiers: Collection[Tier]) -> list[bytes]:
        """Drop those of these blocks whose bytes in one of `tiers` don't match their checksum; return their hashes."""
        table = self.catalog.table
        held = [row for row in rows if table.hash[row] is not None]
        for row in held:
            self.catalog.hold(row)
        try:
            bad: set[int] = set()
            if Tier.CPU in tiers:
                here = [row for row in held if table.residency[row] & Tier.CPU.bit]
                views = [self.memory.view(table.slot[Tier.CPU][row], self.block_bytes(row)) for row in here]
                sums = await in_thread(lambda: [checksum(view) for view in views])
                bad = {row for row, s in zip(here, sums, strict=True) if table.checksum[row] not in (NOT_COMPUTED, s)}
                self.catalog.counters[Tier.CPU].checksum_failures += len(bad)
            if Tier.SSD in tiers and self.mover is not None:
                bad |= await self.mover.loads.verify([row for row in held if table.residency[row] & Tier.SSD.bit])
            hashes = [block_hash for row in bad if (block_hash := table.hash[row]) is not None]
            for row in bad:
                self.catalog.drop(row, Cause.DROP)
            return hashes
        finally:
            for row in held:
                self.catalog.unhold(row)

    async def drop_blocks(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> bytes:
        """Make blocks invisible, durably when this returns; DONE or ABSENT for each.

        On ssd a block that is being read now goes when that read ends.
        """
        outcomes = bytearray()
        dropped: list[int] = []
        for block_hash in hashes:
            row = self.catalog.find(tenancy, block_hash)
            outcomes.append(Outcome.ABSENT if row is None else Outcome.DONE)
            if row is not None:
                dropped.append(row)
                self.catalog.drop(row, Cause.DROP)
        if self.remote is not None:
            self.remote.forget_blocks(tenancy, hashes)
        if self.mover is not None:
            await self.mover.writes_of(dropped)
            await self.mover.delete_all_departed()
        if self.remote is not None:
            await self.remote.drop_blocks(tenancy, hashes, dropped)
        return bytes(outcomes)

    async def drop_namespaces(self, tenancies: Sequence[Tenancy]) -> int:
        """Make everything in these namespaces invisible; durable when this returns. Returns the number of blocks."""
        dropped = 0
        for tenancy in tenancies:
            dropped += self.catalog.drop_all(tenancy)
            self.puts.drop_all(tenancy)
            if self.remote is not None:
                self.remote.forget(tenancy)
            tenancy.begin_use()
        try:
            if self.disk is not None:
                await self.disk.set_epochs({t.disk_number: t.epoch for t in tenancies if t.disk_number is not None})
            if self.remote is not None:
                await self.remote.drop_namespaces(tenancies)
        finally:
            for tenancy in tenancies:
                tenancy.end_use()
        return dropped

    # ---- the inside

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant of every part holds."""
        self.catalog.check_integrity()
        self.leases.check_integrity()
        self.puts.check_integrity()
        self.memory.check_integrity()
        table = self.catalog.table
        in_rows = sum(self.catalog.slot_bytes(r) for r in table.rows() if table.slot[Tier.CPU][r] != NO_SLOT)
        used = in_rows + self.puts.reserved_bytes + self.puts.quarantined_bytes
        assert used == self.memory.used_bytes, f"cpu tier: {self.memory.used_bytes} bytes used, {used} accounted for"
        filling = {
            tier: sum(self.catalog.slot_bytes(r, tier) for r in table.rows() if table.state[tier][r] == Copy.FILLING)
            for tier in self.catalog.tiers
        }
        filling[Tier.CPU] += self.puts.reserved_bytes + self.puts.quarantined_bytes
        for tier, size_bytes in filling.items():
            promised = sum(b for (_, of), b in self.catalog.promised_bytes.items() if of is tier)
            assert promised == size_bytes, f"{tier.label}: {promised} bytes are promised, {size_bytes} being filled"

    def _free_slot(self, tier: Tier, offset: int) -> None:
        assert tier is Tier.CPU
        self.memory.free(offset)
