"""A pool of nodes, simulated: real placement, location records and eviction; no bytes, no time between.

A request comes to one node, which has some of its leading blocks, asks the pool for those behind them, run by run, and
computes the rest. It keeps what it fetched and computed, and evicts what is coldest. What the nodes tell each other is
told at once.

Ways of sharing
    alone           nobody asks anybody
    copies          a new block is copied to its homes when it is sealed; a home is asked for its own blocks alone
    records         homes know who has a block, and those are asked; at a block's second use it is copied to its homes
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.policy import Request
from kvstore.announcing import Announcements, AnnouncingLimits, Batch, Held
from kvstore.locations import Locations, in_turn
from kvstore.placement import Placement
from kvstore.policy import POLICIES
from kvstore.runs import Run, RunKey, runs

BLOCK_TOKENS = 512
SCOPE = b"trace"
_CPU = 2  # the bit of the only tier


@dataclass(slots=True)
class Totals:
    """What has become of the blocks asked for, and what was moved for it, in blocks."""

    asked: int = 0
    hits_local: int = 0
    hits_pool: int = 0
    fetched: int = 0
    copied: int = 0
    announced: int = 0
    fetches_failed: int = 0
    nodes_asked: int = 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """A way of sharing, see the module's docstring; `copies` is how many homes a block has."""

    name: str
    copies: int = 1


class Node:
    """A node's cache, and the records it keeps as a home."""

    def __init__(self, name: str, boot: bytes, capacity: int, eviction: str, hashes: Sequence[bytes]) -> None:
        self.name = name
        self.boot = boot
        self.row_of: dict[int, int] = {}
        self.used_again: set[int] = set()
        self.locations = Locations(max(4096, 8 * capacity))
        self.served = 0
        self.asked = 0
        self._policy = POLICIES[eviction]()
        self._hashes = hashes
        self._block_in = [0] * capacity
        self._free = list(range(capacity))

    def use(self, block: int, now: int) -> None:
        self._policy.use(self.row_of[block], now)

    def add(self, block: int, now: int) -> int | None:
        """Take in a block that isn't there, and return the one that had to go, if one had to."""
        evicted = None
        if not self._free:
            row = next(self._policy.coldest(0))
            self._policy.remove(row)
            evicted = self._block_in[row]
            del self.row_of[evicted]
            self.used_again.discard(evicted)
            self._free.append(row)
        row = self._free.pop()
        self._policy.admit(row, 0, now, 0, self._hashes[block], 0)
        self._block_in[row] = block
        self.row_of[block] = row
        return evicted


@dataclass(slots=True)
class Pool:
    """All nodes, and who is where at home."""

    sharing: Sharing
    eviction: str
    capacity: int
    hashes: Sequence[bytes]
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    placement: Placement = field(default_factory=lambda: Placement({}))
    run_of: dict[int, RunKey] = field(default_factory=dict[int, RunKey])
    totals: Totals = field(default_factory=Totals)
    _homes: dict[RunKey, tuple[str, ...]] = field(default_factory=dict[RunKey, tuple[str, ...]])

    def begin(self, count: int) -> None:
        """Make the nodes."""
        for number in range(count):
            name = f"node-{number:04}"
            self.nodes[name] = Node(name, b"1", self.capacity, self.eviction, self.hashes)
        self._place()

    def die(self, name: str) -> None:
        """Take a node out, with all it had; the others announce to the new homes what those should know."""
        before = self.placement
        del self.nodes[name]
        self._place()
        if self.sharing.name == "records":
            for node in self.nodes.values():
                node.locations.dismiss(name)
            for node in self.nodes.values():
                self._announce_again(node, before)

    def request(self, node: Node, request: Request) -> None:
        """Serve one request at a node."""
        now, blocks = request
        cut = runs([self.hashes[block] for block in blocks], BLOCK_TOKENS)
        for run in cut:
            for block in blocks[run.start : run.stop]:
                self.run_of.setdefault(block, run.key)
        local = next((at for at, block in enumerate(blocks) if block not in node.row_of), len(blocks))
        found = local if self.sharing.name == "alone" else self._fetch(node, blocks, cut, local)
        totals = self.totals
        totals.asked += len(blocks)
        totals.hits_local += local
        totals.hits_pool += found - local
        self._keep(node, blocks, now)

    # ---- reading

    def _fetch(self, node: Node, blocks: Sequence[int], cut: Sequence[Run], start: int) -> int:
        """Return how many leading blocks there are with those that the pool has behind the local ones."""
        for run in cut:
            if run.stop <= start:
                continue
            for name in self._homes_of(run.key):
                wanted = blocks[start : run.stop]
                if not wanted:
                    break
                home = self.nodes[name]
                if home is not node:
                    home.asked += 1
                    self.totals.nodes_asked += 1
                start += self._fetch_through(node, home, wanted)
            if start < run.stop:
                break
        return start

    def _fetch_through(self, node: Node, home: Node, wanted: Sequence[int]) -> int:
        if self.sharing.name == "copies":
            count = next((at for at, block in enumerate(wanted) if not self._has(node, home, block)), len(wanted))
        else:
            holders = home.locations.find(SCOPE, 0, [self.hashes[block] for block in wanted])
            count = 0
            for block, known in zip(wanted, holders, strict=True):
                asked = known if len(known) < 2 else in_turn(known, node.name)
                if not any(self._has(node, self.nodes[holder.member], block, home) for holder in asked):
                    break
                count += 1
        return count

    def _has(self, node: Node, holder: Node, block: int, home: Node | None = None) -> bool:
        if block not in holder.row_of:
            if home is not None:
                self.totals.fetches_failed += 1
                home.locations.correct(holder.name, holder.boot, SCOPE, 0, [self.hashes[block]])
            return False
        if holder is not node:
            holder.served += 1
            self.totals.fetched += 1
        return True

    # ---- writing

    def _keep(self, node: Node, blocks: Sequence[int], now: int) -> None:
        """Note the use of all blocks at a node, the tail first, and do what follows from it."""
        new: list[int] = []
        gone: list[int] = []
        again: list[int] = []
        for block in reversed(blocks):
            if block in node.row_of:
                node.use(block, now)
                if block not in node.used_again:
                    node.used_again.add(block)
                    again.append(block)
            else:
                evicted = node.add(block, now)
                new.append(block)
                if evicted is not None:
                    gone.append(evicted)
        if self.sharing.name == "copies":
            self._copy(new, now, node)
        elif self.sharing.name == "records":
            self._announce(node, new, gone)
            self._copy(again, now, node)

    def _copy(self, blocks: Sequence[int], now: int, source: Node) -> None:
        for block in blocks:
            for name in self._homes_of(self.run_of[block]):
                home = self.nodes[name]
                if home is source or block in home.row_of:
                    continue
                self.totals.copied += 1
                evicted = home.add(block, now)
                if self.sharing.name == "records":
                    self._announce(home, [block], [] if evicted is None else [evicted])

    def _announce(self, node: Node, new: Sequence[int], gone: Sequence[int]) -> None:
        by_home: dict[str, tuple[list[bytes], bytearray]] = {}
        for blocks, tiers in ((gone, 0), (new, _CPU)):
            for block in blocks:
                for name in self._homes_of(self.run_of[block]):
                    batch = by_home.setdefault(name, ([], bytearray()))
                    batch[0].append(self.hashes[block])
                    batch[1].append(tiers)
        for name, (hashes, each) in by_home.items():
            self._tell(node, name, hashes, bytes(each))

    # ---- membership

    def _place(self) -> None:
        self.placement = Placement(dict.fromkeys(self.nodes, 1 << 30))
        self._homes.clear()

    def _homes_of(self, key: RunKey) -> tuple[str, ...]:
        homes = self._homes.get(key)
        if homes is None:
            homes = self._homes[key] = self.placement.homes(key, self.sharing.copies)
        return homes

    def _tell(self, node: Node, home: str, hashes: Sequence[bytes], tiers: bytes) -> None:
        self.totals.announced += len(hashes)
        locations = self.nodes[home].locations
        locations.welcome(node.name, node.boot)
        locations.announce(node.name, node.boot, SCOPE, 0, hashes, tiers)

    def _announce_again(self, node: Node, before: Placement) -> None:
        """Let a node's own plan of announcements bring the new homes up to date."""
        plan = Announcements(AnnouncingLimits(per_second=1e9, copies=self.sharing.copies), 0.0)
        held = _HeldBy(node, self)
        boots = {name: other.boot for name, other in self.nodes.items()}
        plan.place(before, dict.fromkeys(before.weights, b"1"))
        for _ in _all_batches(plan, held):
            pass  # they know it already
        plan.place(self.placement, boots)
        for batch in _all_batches(plan, held):
            self._tell(node, batch.member, batch.hashes, bytes(batch.tiers))


class _HeldBy:
    """The blocks of a node, as its plan of announcements asks for them."""

    def __init__(self, node: Node, pool: Pool) -> None:
        self._held = [Held(SCOPE, 0, pool.run_of[block], pool.hashes[block], _CPU) for block in node.row_of]

    def portion(self, cursor: int, count: int) -> tuple[Sequence[Held], int]:
        behind = cursor + count
        return self._held[cursor:behind], behind if behind < len(self._held) else 0


def _all_batches(plan: Announcements, held: _HeldBy) -> Iterator[Batch]:
    while not plan.is_settled:
        yield from plan.take(0.0, held)


def hash_blocks(requests: Sequence[Request]) -> list[bytes]:
    """Return a hash for each block's number up to the largest."""
    largest = max(max(request.blocks) for request in requests)
    return [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(largest + 1)]


def simulate(
    requests: Sequence[Request],
    hashes: Sequence[bytes],
    sharing: Sharing,
    *,
    nodes: int,
    capacity: int,
    eviction: str,
    seed: int,
    at_half: Callable[[Pool], None] = lambda pool: None,
) -> tuple[Pool, Totals]:
    """Return the pool at the end and the totals of the second half; `at_half` may change it in between."""
    pool = Pool(sharing, eviction, capacity, hashes)
    pool.begin(nodes)
    choose = random.Random(seed)
    half = len(requests) // 2
    first = Totals()
    for number, request in enumerate(requests):
        if number == half:
            first = Totals(*(getattr(pool.totals, name) for name in Totals.__slots__))
            at_half(pool)
        # Drawn from all that there were at the start, so that a run with a change meets the same requests.
        name = f"node-{choose.randrange(nodes):04}"
        if name not in pool.nodes:
            name = choose.choice(list(pool.nodes))
        pool.request(pool.nodes[name], request)
    later = Totals(*(getattr(pool.totals, name) - getattr(first, name) for name in Totals.__slots__))
    return pool, later
