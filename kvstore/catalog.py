"""The catalog: which blocks exist, in which tiers, and who holds them. It decides what is visible; it moves no bytes.

Theory of operation. Each namespace has a dict from block hash to row; what is not in that dict is invisible. A put's
slot is adopted, a load or a demotion fills a copy, and copies leave one by one; with its last ready copy a block
leaves the dict. A row lives on, unseen, until its slots are given back: those of the cpu tier when nobody holds the
row, those of the ssd tier when the tier has deleted the index entry durably (`departed` lists what it is to delete,
held or not: that tier itself keeps a slot that is being read). Dropping a namespace exchanges its dict: constant time,
and nothing stored or begun before can come back. The old rows are reclaimed piece by piece.

Invariants (checked by `check_integrity`)
1. A hash in a namespace's dict leads to a row with that hash and namespace and with at least one READY copy.
2. A row stands in a tier's policy exactly when its copy there is READY.
3. A held row (`holds > 0`: leases, loads, writes) loses no slot in the cpu tier and is no victim in any; a row pinned
   by an operator is no victim either, nor is one on ssd that a drain keeps there.
4. A slot of a tier belongs to at most one row.
5. A row without any copy and any hold is free.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvstore.block import Namespace
from kvstore.counters import Cause, TierCounters
from kvstore.lifecycle import Copy, CopyEvent
from kvstore.lives import Lives
from kvstore.pins import Pins
from kvstore.policy import Policy
from kvstore.recency import Behind, Recency
from kvstore.table import LEASE, NEVER_S, NO_SLOT, BlockTable, Columns, Tier
from kvstore.tenancy import Tenancies, Tenancy

TICKS_PER_S = 100
_PIN_LOOK_S = 10.0  # how often a pinned block whose life is over is looked at


class Catalog:
    """See the module's docstring.

    Parameters
    ----------
    policies : dict
        The tiers of this node and the eviction policy of each.
    free_slot : callable
        Called with a tier and an offset when a slot has no reader and no copy any more (not for ssd: see `departed`).
    now_s : callable
        CLOCK_BOOTTIME in seconds: what lives of blocks are measured in.
    is_transit : callable
        Whether an offset in the cpu tier lies in its reserve for transit: such a copy leaves when nobody holds it.
    sliding : bool
        Whether a life that a block has from its namespace begins anew at each use.
    """

    def __init__(
        self,
        policies: dict[Tier, Policy],
        free_slot: Callable[[Tier, int], None],
        now_s: Callable[[], float],
        is_transit: Callable[[int], bool] = lambda offset: False,
        *,
        sliding: bool = False,
    ) -> None:
        self.tiers = tuple(policies)
        self.policies = policies
        self.table = BlockTable(self.tiers)
        self.counters = {tier: TierCounters() for tier in self.tiers}
        self.namespaces = Tenancies(self.tiers)
        self.tenancies = self.namespaces.by_number
        self.departed: deque[int] = deque()  # rows whose ssd copy is DELETING, and not yet handed to the tier
        self.pins = Pins(self.table, self.tenancies, self.tiers)
        self.pinned: Mapping[int, float] = self.pins.ends_s  # row -> end of an operator's pin, boottime
        self.kept: set[int] = set()  # rows that a drain under way keeps on ssd
        self.used_bytes: dict[tuple[str, Tier], int] = {}  # of READY copies, by tenant and tier
        self.promised_bytes: dict[tuple[str, Tier], int] = {}  # of slots that are being filled or written
        self.lanes = self.namespaces.lanes
        self._free_slot = free_slot
        self._is_transit = is_transit
        self._now_s = now_s
        self._start_s = now_s()
        self._unsettled: set[int] = set()  # held rows that have something to give back when they are let go
        self._condemned: deque[Iterator[tuple[bytes, int]]] = deque()
        self.lives = Lives(self.table, self.tenancies, now_s, sliding=sliding)
        self._recency = Recency(self.table, policies, self._unsettled, self.is_in_transit)
        self._generation = 0

    # ---- namespaces

    def tenancy(self, tenant: str, namespace: Namespace, slots: Mapping[Tier, int]) -> Tenancy:
        """Return the entry of a tenant's namespace, made at first use; `slots`: what a block takes in each tier."""
        return self.namespaces.tenancy(tenant, namespace, slots)

    def named(self, digest: bytes) -> list[Tenancy]:
        """Return the entries of a namespace, one a tenant that has it."""
        return self.namespaces.named(digest)

    def drop_all(self, tenancy: Tenancy) -> int:
        """Make everything in a namespace invisible at once and return how many blocks that were."""
        tenancy.epoch += 1
        rows = tenancy.rows
        tenancy.rows = {}
        if rows:
            self._condemned.append(iter(rows.items()))
        return len(rows)

    def reclaim(self, limit: int) -> int:
        """Free up to `limit` blocks of dropped namespaces; return how many were looked at (0: none are left)."""
        looked_at = 0
        table = self.table
        while self._condemned and looked_at < limit:
            for block_hash, row in self._condemned[0]:
                looked_at += 1
                # A row that pressure has freed meanwhile may belong to another block by now.
                if table.hash[row] is block_hash and self._visible_row(row, block_hash) != row:
                    self.drop(row, Cause.DROP)
                if looked_at >= limit:
                    return looked_at
            self._condemned.popleft()
        return looked_at

    @property
    def reclaiming(self) -> bool:
        return bool(self._condemned)

    # ---- finding

    def is_over(self, tenancy: Tenancy, block_hash: bytes) -> bool:
        """Whether a block is there but its life is over: `find` will drop it."""
        row = tenancy.rows.get(block_hash)
        return row is not None and self.table.expires_s[row] <= self._now_s() and row not in self.pinned

    def find(self, tenancy: Tenancy, block_hash: bytes) -> int | None:
        """Return the row of a visible block that has not expired."""
        row = tenancy.rows.get(block_hash)
        if row is None or self.table.expires_s[row] > self._now_s() or row in self.pinned:
            return row
        self.drop(row, Cause.TTL)
        return None

    def leading_rows(self, tenancy: Tenancy, hashes: Sequence[bytes]) -> list[int]:
        """Return the rows of the leading run of visible blocks that have not expired; made for batches of thousands."""
        found = list(map(tenancy.rows.get, hashes))
        rows: list[int] = found[: found.index(None)] if None in found else found  # type: ignore[assignment]
        if not tenancy.any_expire or not rows:
            return rows
        now_s = self._now_s()
        if min(map(self.table.expires_s.__getitem__, rows)) <= now_s:
            for position, row in enumerate(rows):
                if self.table.expires_s[row] <= now_s and row not in self.pinned:
                    return rows[:position]
        return rows

    # ---- copies

    def adopt(
        self,
        tenancy: Tenancy,
        hashes: Sequence[bytes],
        slots: Sequence[int],
        checksums: Iterable[int],
        ttl_s: float | None,
        behind: Behind | None = None,
    ) -> list[int]:
        """Return the rows of new blocks whose bytes, complete and checked, lie in the cpu tier in `slots`.

        Give them in the order of their prefix: its tail is taken for the colder end. `ttl_s` None: their life is the
        namespace's. `behind`: what they continue.
        """
        count, life_s = len(hashes), tenancy.ttl_s if ttl_s is None else ttl_s
        rows = self.table.add_ready(
            hashes, tenancy.number, Tier.CPU, slots, checksums, self._generation + 1,
            self._now_s() + life_s if life_s > 0 else NEVER_S, slides=self.lives.sliding and ttl_s is None,
        )  # fmt: skip
        self._generation += count
        assert tenancy.rows.keys().isdisjoint(hashes)
        tenancy.rows.update(zip(hashes, rows, strict=True))
        tenancy.blocks[Tier.CPU] += count
        owner = (tenancy.tenant, Tier.CPU)
        self.used_bytes[owner] = self.used_bytes.get(owner, 0) + tenancy.slot_bytes * count
        lane = tenancy.lanes[Tier.CPU]
        self.policies[Tier.CPU].admit_many(rows[::-1], lane, self.tick(), tenancy.number, hashes[::-1])
        if behind is not None:
            self._recency.put_behind(Tier.CPU, rows[::-1], behind)
        if life_s > 0:
            self.lives.begin(rows)
        return rows

    def restore(self, hashes: list[bytes], namespaces: array[int], columns: Columns) -> list[int]:
        """Take in the blocks that the ssd tier found at start, the coldest first; `namespaces` are tenancies' numbers.

        Returns the rows, none as a rule, whose key another row has too: they are invisible, and are to be dropped.
        """
        if not hashes:
            return []
        rows = self.table.add_many(hashes, namespaces, Tier.SSD, columns)
        self._generation = max(self._generation, max(columns.generations))
        doubled: list[int] = []
        for number, own in self.table.by_namespace(rows).items():
            tenancy = self.tenancies[number]
            own_hashes = hashes if own is rows else [hashes[row - rows.start] for row in own]
            tenancy.rows = dict(zip(own_hashes, own, strict=True))
            if len(tenancy.rows) < len(own):
                generation = self.table.generation.__getitem__
                for block_hash, row in zip(own_hashes, own, strict=True):
                    if generation(row) > generation(tenancy.rows[block_hash]):
                        tenancy.rows[block_hash] = row
                doubled += [row for h, row in zip(own_hashes, own, strict=True) if tenancy.rows[h] != row]
            tenancy.blocks[Tier.SSD] += len(own)
            self.used_bytes[tenancy.tenant, Tier.SSD] = (
                self.used_bytes.get((tenancy.tenant, Tier.SSD), 0) + tenancy.slots[Tier.SSD] * len(own)
            )
            self.policies[Tier.SSD].restore(own, tenancy.lanes[Tier.SSD], self.tick(), number, own_hashes)
        if min(columns.expires_s) != NEVER_S:
            self.lives.begin(rows)
        return doubled

    def fill(self, row: int, tier: Tier, slot: int) -> None:
        """Begin a copy: bytes will be put into `slot`. The caller holds the row."""
        self.table.move(row, tier, CopyEvent.FILL)
        self.table.slot[tier][row] = slot
        self.promise(self.tenancies[self.table.namespace[row]], tier, 1)
        if tier is Tier.CPU and self._is_transit(slot):
            self._unsettled.add(row)

    def filled(self, row: int, tier: Tier) -> None:
        """The copy that was begun is complete."""
        self.table.move(row, tier, CopyEvent.FILLED)
        tenancy = self.tenancies[self.table.namespace[row]]
        self.promise(tenancy, tier, -1)
        self._arrived(tenancy, row, tier)
        if not self.is_visible(row):
            self.drop(row, Cause.DROP)

    def fail(self, row: int, tier: Tier) -> int:
        """The copy that was begun will not come; return its slot, which the caller frees."""
        slot = self.table.slot[tier][row]
        self.table.move(row, tier, CopyEvent.FAIL)
        self.promise(self.tenancies[self.table.namespace[row]], tier, -1)
        return slot

    def leave(self, row: int, tier: Tier, cause: Cause) -> None:
        """Begin the end of a ready copy; without another one the block is invisible from now on."""
        self._leave_one(row, tier, cause)
        self._settle(row)

    def drop(self, row: int, cause: Cause) -> None:
        """Make a block invisible and end its copies."""
        self._unlink(row)
        for tier in self.tiers:
            if self.table.state[tier][row] == Copy.READY:
                self._leave_one(row, tier, cause)
        self._settle(row)

    def gone(self, row: int) -> int:
        """The ssd tier has deleted the entry of a row in `departed`; return its slot, which is free now."""
        slot = self.table.slot[Tier.SSD][row]
        self.table.move(row, Tier.SSD, CopyEvent.GONE)
        self._settle(row)
        return slot

    def evict_with_slices(self, row: int, tier: Tier, cause: Cause) -> int:
        """Evict a copy and those of the same block's other slices that may go; return how many."""
        tenancy = self.tenancies[self.table.namespace[row]]
        block_hash = self.table.hash[row]
        assert block_hash is not None
        evicted = 1
        if len(tenancy.siblings) > 1:
            for sibling in tenancy.siblings:
                other = sibling.rows.get(block_hash)
                if other is not None and other != row and self.is_evictable(other, tier):
                    self.leave(other, tier, cause)
                    evicted += 1
        self.leave(row, tier, cause)
        return evicted

    def promise(self, tenancy: Tenancy, tier: Tier, slots: int) -> None:
        """Count slots (or fewer, below zero) that a tenant has taken in a tier and that hold no block yet."""
        owner = (tenancy.tenant, tier)
        self.promised_bytes[owner] = self.promised_bytes.get(owner, 0) + slots * tenancy.slots[tier]

    def charged_bytes(self, tenancy: Tenancy, tier: Tier) -> int:
        """Return what counts against the tenant's quota in a tier: blocks, and slots that are being filled."""
        owner = (tenancy.tenant, tier)
        return self.used_bytes.get(owner, 0) + self.promised_bytes.get(owner, 0)

    # ---- holds, pins, lives

    def lease(self, rows: Iterable[int]) -> int:
        """Keep the slots of blocks where they are until `unlease`; return how many had no lease before."""
        return self.table.lease(rows)

    def unlease(self, rows: Iterable[int]) -> int:
        """Undo one `lease`; return how many have no lease any more."""
        holds, unsettled, ended = self.table.holds, self._unsettled, 0
        for row in rows:
            left = holds[row] - LEASE
            holds[row] = left
            if left < LEASE:
                ended += 1
                if not left and row in unsettled:
                    self._let_go(row)
        return ended

    def leases_on(self, row: int) -> int:
        """Return how many leases there are on a block."""
        return self.table.holds[row] // LEASE

    def hold(self, row: int) -> None:
        """Keep a row's slots where they are until `unhold`."""
        self.table.holds[row] += 1

    def unhold(self, row: int) -> None:
        """Undo one `hold`."""
        self.table.holds[row] -= 1
        if not self.table.holds[row]:
            self._let_go(row)

    def use(self, rows: Sequence[int], behind: Behind | None = None) -> None:
        """Note a use of blocks; give the tail of a prefix first, so that its head is evicted last.

        `behind` is the block that they continue, if any. Rows that have gone meanwhile are passed over. A hit in memory
        leaves the order on ssd alone: a block is put at its recent end when its copy in memory goes.
        """
        uses = self.table.uses
        for row in rows:
            if uses[row] < 255:
                uses[row] += 1
        self._recency.use(rows, self.tick(), behind)
        self.lives.renew(rows)

    def slot_bytes(self, row: int, tier: Tier = Tier.CPU) -> int:
        """Return what a block takes in a tier."""
        return self.tenancies[self.table.namespace[row]].slots[tier]

    def is_visible(self, row: int) -> bool:
        block_hash = self.table.hash[row]
        return block_hash is not None and self._visible_row(row, block_hash) == row

    def is_in_transit(self, row: int) -> bool:
        """Whether a block's copy in memory is there for a reader's moment only."""
        return self.table.state[Tier.CPU][row] != Copy.ABSENT and self._is_transit(self.table.slot[Tier.CPU][row])

    def is_at(self, row: int, tier: Tier, slot: int) -> bool:
        """Whether a row's copy in `tier` is ready and lies in `slot`; row numbers below zero name no row."""
        table = self.table
        return row >= 0 and table.state[tier][row] == Copy.READY and table.slot[tier][row] == slot

    def is_evictable(self, row: int, tier: Tier) -> bool:
        """Whether the copy in `tier` is ready and neither held, pinned nor kept."""
        if self.table.state[tier][row] != Copy.READY or self.table.holds[row]:
            return False
        return row not in self.pinned and (tier is not Tier.SSD or row not in self.kept)

    def keep_on_ssd(self, row: int) -> None:
        """Let a block that is on ssd be no victim there until `kept` is emptied; its place is among the recent ones."""
        self.kept.add(row)
        self.policies[Tier.SSD].renew(row, self.tick(), self.table.uses[row])

    def set_ttl(self, row: int, ttl_s: float) -> None:
        """Let a block live `ttl_s` from now; 0: until it is evicted."""
        self.lives.set(row, ttl_s)

    def expire(self, limit: int) -> int:
        """Drop blocks whose life is over, looking at `limit` at most; return how many were dropped."""
        dropped = 0
        for row in self.lives.due(limit):
            if not self.is_visible(row):
                continue
            if row in self.pinned:
                self.lives.look_again(row, self._now_s() + _PIN_LOOK_S)
            else:
                self.drop(row, Cause.TTL)
                dropped += 1
        return dropped

    def end_pins(self) -> None:
        """Forget the operators' pins that are over."""
        self.pins.end(self._now_s())

    def tick(self) -> int:
        """Return the policies' unit of time."""
        return int((self._now_s() - self._start_s) * TICKS_PER_S)

    def idle_s(self, row: int, tier: Tier) -> float:
        """Return how long ago a ready copy was last used."""
        return (self.tick() - self.policies[tier].last_use(row)) / TICKS_PER_S

    # ---- the inside

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        self.pins.check_integrity()
        table = self.table
        visible: set[int] = set()
        for tenancy in self.tenancies:
            for block_hash, row in tenancy.rows.items():
                assert table.hash[row] == block_hash and table.namespace[row] == tenancy.number
                assert table.residency[row], f"row {row} is visible without a ready copy"
                visible.add(row)
        assert len(visible) == sum(len(t.rows) for t in self.tenancies), "two hashes lead to one row"
        for tier in self.tiers:
            slots: set[int] = set()
            used: dict[str, int] = {}
            for row in table.rows():
                state, slot = table.state[tier][row], table.slot[tier][row]
                assert (state == Copy.READY) == bool(table.residency[row] & tier.bit) == (row in self.policies[tier])
                assert (state == Copy.ABSENT) == (slot == NO_SLOT)
                if slot != NO_SLOT and state != Copy.DELETING:  # that one is the ssd tier's own again, soon or already
                    assert slot not in slots, f"slot {slot} of {tier.label} belongs to two rows"
                    slots.add(slot)
                if state == Copy.READY:
                    tenancy = self.tenancies[table.namespace[row]]
                    used[tenancy.tenant] = used.get(tenancy.tenant, 0) + tenancy.slots[tier]
            for (tenant, counted_tier), count in self.used_bytes.items():
                assert counted_tier != tier or count == used.get(tenant, 0), f"{tenant}'s bytes in {tier.label}"
        for row in table.rows():
            assert row in visible or table.holds[row] or not table.absent_everywhere(row), f"row {row} is lost"

    def _visible_row(self, row: int, block_hash: bytes) -> int | None:
        return self.tenancies[self.table.namespace[row]].rows.get(block_hash)

    def _unlink(self, row: int) -> None:
        block_hash = self.table.hash[row]
        assert block_hash is not None
        if self._visible_row(row, block_hash) == row:
            del self.tenancies[self.table.namespace[row]].rows[block_hash]

    def _arrived(self, tenancy: Tenancy, row: int, tier: Tier) -> None:
        block_hash = self.table.hash[row]
        assert block_hash is not None
        uses = self.table.uses[row]
        self.policies[tier].admit(row, tenancy.lanes[tier], self.tick(), tenancy.number, block_hash, uses)
        self.pins.note(row, tier, 1)
        tenancy.blocks[tier] += 1
        owner = (tenancy.tenant, tier)
        self.used_bytes[owner] = self.used_bytes.get(owner, 0) + tenancy.slots[tier]

    def _leave_one(self, row: int, tier: Tier, cause: Cause | None) -> None:
        tenancy = self.tenancies[self.table.namespace[row]]
        if cause is not None:
            counters = self.counters[tier]
            counters.evictions[cause] += 1
            counters.eviction_age.add(self.idle_s(row, tier))
            tenancy.counters.evictions[cause] += 1
        slot = self.table.slot[tier][row]
        self.table.move(row, tier, CopyEvent.LEAVE)
        self.policies[tier].remove(row)
        self.pins.note(row, tier, -1)
        tenancy.blocks[tier] -= 1
        self.used_bytes[tenancy.tenant, tier] -= tenancy.slots[tier]
        if tier is Tier.CPU and self.table.residency[row] & Tier.SSD.bit and not self._is_transit(slot):
            # While it was in memory its order on ssd stood still: it starts there as recent.
            self.policies[Tier.SSD].renew(row, self.tick(), self.table.uses[row])
        if not self.table.residency[row]:
            self._unlink(row)

    def _let_go(self, row: int) -> None:
        """Nobody holds this row any more: end what was only waiting for that."""
        table = self.table
        if table.state[Tier.CPU][row] == Copy.READY and self._is_transit(table.slot[Tier.CPU][row]):
            self._leave_one(row, Tier.CPU, None)
        self._settle(row)

    def _settle(self, row: int) -> None:
        """Give back the slots of a row that nobody holds, and the row itself when nothing is left of it."""
        table = self.table
        if table.hash[row] is None:
            return
        if Tier.SSD in self.policies and table.state[Tier.SSD][row] == Copy.LEAVING:
            table.move(row, Tier.SSD, CopyEvent.DELETE)
            self.departed.append(row)
        if table.holds[row]:
            self._unsettled.add(row)
            return
        self._unsettled.discard(row)
        for tier in self.tiers:
            if table.state[tier][row] == Copy.LEAVING:
                slot = table.slot[tier][row]
                table.move(row, tier, CopyEvent.GONE)
                self._free_slot(tier, slot)
        if table.absent_everywhere(row):
            self._unlink(row)
            self.pins.unpin(row)
            self.kept.discard(row)
            table.remove(row)
