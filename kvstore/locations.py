"""Location records at a home: which members hold a block, in which of their tiers.

Theory of operation. A record is a hint. It says where to ask; the bytes are asked for by their full key and epoch, from
a member that knows what it has. So a record that is wrong costs one failed fetch, which corrects it, and one that is
missing costs a miss. That is why records are kept in memory alone, are bounded, and are never repaired by anything but
the next announcement.

Members announce states, not changes: "this block lies in these tiers of mine now", none of them when it is gone. An
announcement may therefore be lost, doubled or merged with a later one.

A member stands for one life of a daemon, its boot. Once a member has another boot, or has left, nothing that its
former boot announced is seen again, in constant time: records name boots by numbers that are never given twice. So it
is with the epoch of a scope (a tenant's namespace). The rows of both are given back by `sweep`, in portions, or when
their place is needed.

Invariants
1. There are at most `records_max` records, each with at most HOLDERS_MAX holders, and one member is in it once.
2. What is found is of a present boot and of the scope's newest epoch that was announced.
3. `row_of` and the rows agree: a key's row has that key, and a row without a key is free, and free once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.errors import UsageError

HOLDERS_MAX = 8
SCOPES_MAX = 65_536
_TIER_BITS = 4
_TIERS = (1 << _TIER_BITS) - 1
_SCOPE_BYTES = 8
_STEPS_MAX = 64  # that the hand makes for one new record


class Holder(NamedTuple):
    """A member that says it has a block; `tiers` has a tier's bit set for each that holds it."""

    member: str
    boot_id: bytes
    tiers: int


def in_turn(holders: Sequence[Holder], asker: str) -> list[Holder]:
    """Return the holders of a block in the order in which a member should ask them.

    The fastest tier first; among equals each asker begins with another, so that a block which all want is not read from
    the one that happens to be named first.
    """
    return sorted(
        holders,
        key=lambda holder: (holder.tiers & -holder.tiers, xxh3_64_intdigest(f"{asker}/{holder.member}".encode())),
    )


@dataclass(slots=True)
class LocationCounters:
    """What has become of announcements and records, in blocks."""

    announced: int = 0
    gone: int = 0
    of_unknown_boots: int = 0
    of_older_epochs: int = 0
    over_the_limit: int = 0  # of scopes
    displaced: int = 0  # records that made room for others
    corrected: int = 0  # by a fetch that failed


class Locations:
    """See the module's docstring. One thread owns it.

    Parameters
    ----------
    records_max : int
        The most blocks to remember; each takes about 200 bytes beside its hash.
    """

    def __init__(self, records_max: int) -> None:
        if records_max < 1:
            raise UsageError(f"there must be room for a location record, not for {records_max}")
        self.counters = LocationCounters()
        self._records_max = records_max
        self._row_of: dict[bytes, int] = {}  # scope's number and block hash -> row
        self._keys: list[bytes | None] = []
        self._holders: list[tuple[int, ...]] = []
        self._touched = bytearray()  # announced or found since the hand was there
        self._free = array("Q")
        self._hand = 0
        self._unswept = 0
        self._boots: dict[str, tuple[int, bytes]] = {}
        self._member_of: dict[int, Holder] = {}  # a boot's number -> the member, for those that are present
        self._scopes: dict[bytes, tuple[int, int]] = {}  # scope -> number, epoch
        self._scope_numbers: set[int] = set()
        self._last_number = 0
        self._same: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def members(self) -> dict[str, bytes]:
        """The members whose announcements are heard, each with its boot id."""
        return {name: boot_id for name, (_, boot_id) in self._boots.items()}

    def welcome(self, member: str, boot_id: bytes) -> None:
        """Hear a member from now on; if it has another boot id than before, its records are gone."""
        known = self._boots.get(member)
        if known is not None:
            if known[1] == boot_id:
                return
            self.dismiss(member)
        number = self._next_number()
        self._boots[member] = (number, boot_id)
        self._member_of[number] = Holder(member, boot_id, 0)

    def dismiss(self, member: str) -> None:
        """Forget a member and all that it announced. One that isn't known is no error."""
        known = self._boots.pop(member, None)
        if known is not None:
            del self._member_of[known[0]]
            self._unswept = len(self._keys)

    def drop(self, scope: bytes, epoch: int) -> None:
        """Forget what was announced of a scope under epochs before this one."""
        known = self._scopes.get(scope)
        if known is not None and epoch > known[1]:
            self._scope_numbers.discard(known[0])
            self._scopes[scope] = (self._new_scope_number(), epoch)
            self._unswept = len(self._keys)

    def announce(
        self, member: str, boot_id: bytes, scope: bytes, epoch: int, hashes: Sequence[bytes], tiers: bytes
    ) -> int:
        """Note where blocks are; return how many of them were noted.

        Parameters
        ----------
        member, boot_id
            Who says so. Nothing is noted unless that boot was welcomed and is the newest.
        scope, epoch
            A tenant's namespace and its epoch. A newer epoch than known ends all records of older ones; of an older
            one nothing is noted.
        hashes : sequence of bytes
            The blocks.
        tiers : bytes
            Parallel: the bits of the member's tiers that hold each block; 0: it has it no more.
        """
        if len(hashes) != len(tiers):
            raise UsageError(f"{len(hashes)} blocks are announced with the tiers of {len(tiers)}")
        known = self._boots.get(member)
        if known is None or known[1] != boot_id:
            self.counters.of_unknown_boots += len(hashes)
            return 0
        prefix = self._prefix(scope, epoch, len(hashes))
        if prefix is None:
            return 0
        boot = known[0]
        for block_hash, held in zip(hashes, tiers, strict=True):
            key = prefix + block_hash
            row = self._row_of.get(key)
            if held & _TIERS:
                self.counters.announced += 1
                self._put(key, row, boot << _TIER_BITS | held & _TIERS)
            else:
                self.counters.gone += 1
                if row is not None:
                    self._take_out(row, boot)
        return len(hashes)

    def find(self, scope: bytes, epoch: int, hashes: Sequence[bytes]) -> list[tuple[Holder, ...]]:
        """Return who holds each block, those with it in their fastest tier first; empty: nobody is known."""
        known = self._scopes.get(scope)
        if known is None or known[1] != epoch:
            return [()] * len(hashes)
        prefix = known[0].to_bytes(_SCOPE_BYTES, "little")
        found: list[tuple[Holder, ...]] = []
        for block_hash in hashes:
            row = self._row_of.get(prefix + block_hash)
            if row is None:
                found.append(())
            else:
                self._touched[row] = 1
                found.append(self._present(row))
        return found

    def correct(self, member: str, boot_id: bytes, scope: bytes, epoch: int, hashes: Sequence[bytes]) -> None:
        """Note that a member was asked for blocks and does not have them."""
        known, space = self._boots.get(member), self._scopes.get(scope)
        if known is None or known[1] != boot_id or space is None or space[1] != epoch:
            return
        prefix = space[0].to_bytes(_SCOPE_BYTES, "little")
        for block_hash in hashes:
            row = self._row_of.get(prefix + block_hash)
            if row is not None and self._take_out(row, known[0]):
                self.counters.corrected += 1

    def sweep(self, rows: int) -> bool:
        """Give back rows of what has been forgotten, looking at some; return whether there may be more."""
        while rows > 0 and self._unswept > 0:
            rows -= 1
            self._unswept -= 1
            if self._keys[self._unswept] is not None and not self._is_of_use(self._unswept):
                self._release(self._unswept)
        return self._unswept > 0

    # ---- records

    def _put(self, key: bytes, row: int | None, entry: int) -> None:
        if row is None:
            row = self._new_row()
            self._keys[row] = key
            self._row_of[key] = row
            self._holders[row] = self._shared((entry,))
        else:
            boot = entry >> _TIER_BITS
            others = [other for other in self._holders[row] if other >> _TIER_BITS in self._member_of]
            at = next((at for at, other in enumerate(others) if other >> _TIER_BITS == boot), None)
            if at is not None:
                others[at] = entry
            else:
                others.append(entry)
            self._holders[row] = self._shared(tuple(others[-HOLDERS_MAX:]))
        self._touched[row] = 1

    def _take_out(self, row: int, boot: int) -> bool:
        before = self._holders[row]
        left = tuple(entry for entry in before if entry >> _TIER_BITS != boot)
        if not left:
            self._release(row)
        else:
            self._holders[row] = self._shared(left)
        return len(left) < len(before)

    def _present(self, row: int) -> tuple[Holder, ...]:
        found: list[Holder] = []
        for entry in self._holders[row]:
            holder = self._member_of.get(entry >> _TIER_BITS)
            if holder is not None:
                found.append(holder._replace(tiers=entry & _TIERS))
        if len(found) > 1:
            found.sort(key=lambda holder: holder.tiers & -holder.tiers)
        return tuple(found)

    def _is_of_use(self, row: int) -> bool:
        key = self._keys[row]
        assert key is not None
        if int.from_bytes(key[:_SCOPE_BYTES], "little") not in self._scope_numbers:
            return False
        return any(entry >> _TIER_BITS in self._member_of for entry in self._holders[row])

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self._keys) < self._records_max:
            self._keys.append(None)
            self._holders.append(())
            self._touched.append(0)
            return len(self._keys) - 1
        self._release(self._victim())
        return self._free.pop()

    def _victim(self) -> int:
        """Return a row that is of no use, else one that was not touched since the hand was there, else the next."""
        for _ in range(_STEPS_MAX):
            row = self._hand
            self._hand = (row + 1) % len(self._keys)
            if not self._is_of_use(row):
                return row
            if not self._touched[row]:
                break
            self._touched[row] = 0
        self.counters.displaced += 1
        return (self._hand or len(self._keys)) - 1

    def _release(self, row: int) -> None:
        key = self._keys[row]
        assert key is not None
        del self._row_of[key]
        self._keys[row] = None
        self._holders[row] = ()
        self._touched[row] = 0
        self._free.append(row)

    def _shared(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        """Return an equal tuple that other records have too: most blocks of a member lie in the same tiers."""
        if len(self._same) > SCOPES_MAX:
            self._same.clear()
        return self._same.setdefault(holders, holders)

    # ---- numbers

    def _prefix(self, scope: bytes, epoch: int, blocks: int) -> bytes | None:
        known = self._scopes.get(scope)
        if known is None:
            if len(self._scopes) >= SCOPES_MAX:
                self.counters.over_the_limit += blocks
                return None
            self._scopes[scope] = (self._new_scope_number(), epoch)
        elif epoch < known[1]:
            self.counters.of_older_epochs += blocks
            return None
        else:
            self.drop(scope, epoch)
        return self._scopes[scope][0].to_bytes(_SCOPE_BYTES, "little")

    def _new_scope_number(self) -> int:
        number = self._next_number()
        self._scope_numbers.add(number)
        return number

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert len(self._keys) == len(self._holders) == len(self._touched) <= self._records_max
        free = set(self._free)
        assert len(free) == len(self._free)
        assert free == {row for row, key in enumerate(self._keys) if key is None}
        assert self._row_of == {key: row for row, key in enumerate(self._keys) if key is not None}
        for row in self._row_of.values():
            boots = [entry >> _TIER_BITS for entry in self._holders[row]]
            assert 0 < len(boots) <= HOLDERS_MAX
            assert len(set(boots)) == len(boots)
            assert all(entry & _TIERS for entry in self._holders[row])
            members = [holder.member for holder in self._present(row)]
            assert len(set(members)) == len(members)
        assert {number for number, _ in self._boots.values()} == set(self._member_of)
        assert {number for number, _ in self._scopes.values()} == self._scope_numbers
        assert len(self._scopes) <= SCOPES_MAX
