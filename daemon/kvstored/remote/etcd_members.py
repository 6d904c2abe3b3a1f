"""Membership through etcd: this daemon's own key under a lease, and a watch on everybody's; epochs beside them.

    /kvstored/CLUSTER/members/NAME      what a daemon says of itself, JSON, bound to its lease
    /kvstored/CLUSTER/epochs/SCOPE      the newest epoch of a tenant's namespace (SCOPE in hexadecimal), decimal

Theory of operation. Two loops that fail alone and begin anew alone. One keeps the lease: while etcd is away it goes on
trying, and registers again under a new lease only when the old one has ended. The other reads a snapshot and follows
the changes behind it; when the connection breaks it goes on from the last revision, and where etcd has compacted that
away, it reads a new snapshot and takes in the difference.

An outage of etcd ends leases, everybody's at once. So what is gone after an outage is believed only when it has stayed
gone for the life of a lease: until then its daemon had no chance to come back.

Invariants
1. Whatever becomes of etcd, nothing is removed from the view by it before etcd says so.
2. Of an epoch the highest one that was seen counts, here and in etcd: a value never goes down.
3. A daemon that finds its name taken by a later one does not fight for it: it says so and waits for the name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable

import msgspec

from kvstore.errors import KVStoreError, UnavailableError
from kvstored.logs import fields
from kvstored.remote.etcd import Compacted, Entry, Etcd
from kvstored.remote.members import Address, Member, Members

log = logging.getLogger("kvstored.members")

RETRY_S_MIN = 0.2
RETRY_S_MAX = 5.0
EPOCH_TRIES = 16


class MemberRecord(msgspec.Struct, frozen=True):
    """A member's value in etcd. Fields that a reader does not know are passed over."""

    host: str
    port: int
    boot_id: str
    capacity_bytes: int
    protocol_min: int
    protocol_max: int
    is_leaving: bool = False


class EtcdMembers:
    """Keeps `members` and the epochs as etcd has them, while `run` runs.

    Parameters
    ----------
    etcd : Etcd
        An open client.
    members : Members
        What is kept current; `members.own` is what is registered.
    ttl_s : int
        The life of a lease: how long a daemon that has died is taken for alive.
    on_epoch : callable
        Told of each scope's newest epoch, as it becomes known.
    """

    def __init__(
        self,
        etcd: Etcd,
        members: Members,
        *,
        ttl_s: int,
        on_epoch: Callable[[bytes, int], None],
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.5),  # noqa: S311
    ) -> None:
        self.registered_times = 0
        self._etcd = etcd
        self._members = members
        self._ttl_s = ttl_s
        self._on_epoch = on_epoch
        self._jitter = jitter
        self._lease = 0
        self._registered = asyncio.Event()
        self._own_changed = asyncio.Event()
        self._written = b""  # the own value in etcd
        self._claimed_at = 0  # the revision that wrote it
        self._taken = False
        self._believe_at_s = 0.0  # when removals are believed again
        self._epochs: dict[bytes, int] = {}
        self._member_prefix = f"{etcd.place.prefix}members/"
        self._epoch_prefix = f"{etcd.place.prefix}epochs/"

    async def run(self) -> None:
        """Stay registered and keep the view current, until cancelled; the key then lives as long as its lease.

        Failures of etcd are logged and tried again, those of this user's rights too: an operator may mend them.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_registered(), name="etcd registration")
            tasks.create_task(self._stay_current(), name="etcd watch")
            tasks.create_task(self._members.keep_settled(), name="settling members")

    async def registered(self) -> None:
        """Return once this daemon is registered."""
        await self._registered.wait()

    def renew_own(self) -> None:
        """Write the own entry again: `members.own` has changed."""
        self._own_changed.set()

    async def leave(self) -> None:
        """Take this daemon out of the pool, for others to see at once. Call it when `run` has ended.

        Raises
        ------
        UnavailableError
            etcd does not answer; the others learn of it when the lease ends.
        """
        if self._lease:
            lease, self._lease = self._lease, 0
            await self._etcd.revoke(lease)

    async def raise_epoch(self, scope: bytes, epoch: int) -> int:
        """Make a scope's epoch at least this one, durably and for everybody; return what it is now.

        Raises
        ------
        UnavailableError
            etcd does not answer, or others change it all the time. It may or may not have been raised.
        """
        key = self._epoch_prefix + scope.hex()
        for _ in range(EPOCH_TRIES):
            found = (await self._etcd.read(key)).entries
            known = next((entry for entry in found if entry.key == key), None)
            newest = 0 if known is None else _epoch(known)
            if newest >= epoch and known is not None:
                self._note_epoch(known)
                return newest
            if await self._etcd.write_if(key, b"%d" % epoch, 0 if known is None else known.revision):
                self._know_epoch(scope, epoch)
                return epoch
        raise UnavailableError(f"the epoch of {scope.hex()} was changed by others {EPOCH_TRIES} times: try again")

    # ---- being registered

    async def _stay_registered(self) -> None:
        retry_s = RETRY_S_MIN
        while True:
            self._own_changed.clear()
            try:
                await self._keep_lease()
                retry_s = RETRY_S_MIN
                pause_s = self._ttl_s / 3
            except KVStoreError as exc:
                event = "the lease was not renewed" if self._lease else "not registered"
                log.warning(event, extra=fields(why=str(exc)))
                self._distrust(retry_s)
                pause_s = retry_s * self._jitter()
                retry_s = min(2 * retry_s, RETRY_S_MAX, self._ttl_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._own_changed.wait()

    async def _keep_lease(self) -> None:
        """Renew the lease; where there is none, or it has ended, register under a new one."""
        if self._lease and await self._etcd.keep_alive(self._lease) <= 0:
            log.warning("the lease has ended: registering again", extra=fields(member=self._members.own.name))
            self._lease = 0
            self._registered.clear()
        if self._taken:
            return
        if not self._lease:
            lease = await self._etcd.grant(self._ttl_s)
            await self._write_own(lease)
            self._lease = lease
            self.registered_times += 1
            self._registered.set()
        elif self._written != self._own_record():
            await self._write_own(self._lease)

    async def _write_own(self, lease: int) -> None:
        written = self._own_record()
        self._claimed_at = await self._etcd.write(self._own_key, written, lease)
        self._written = written

    @property
    def _own_key(self) -> str:
        return self._member_prefix + self._members.own.name

    def _own_record(self) -> bytes:
        own = self._members.own
        low, high = own.protocol
        return msgspec.json.encode(
            MemberRecord(*own.address, own.boot_id.hex(), own.capacity_bytes, low, high, own.is_leaving)
        )

    # ---- being current

    async def _stay_current(self) -> None:
        retry_s = RETRY_S_MIN
        revision: int | None = None
        while True:
            try:
                if revision is None:
                    revision = await self._take_snapshot()
                    retry_s = RETRY_S_MIN
                async with contextlib.aclosing(
                    self._etcd.watch(self._etcd.place.prefix, revision + 1, silent_s=self._ttl_s)
                ) as batches:
                    async for changes in batches:
                        self._members.source_answers(True)
                        retry_s = RETRY_S_MIN
                        for change in changes:
                            self._take_in(change.key, change.entry, change.revision)
                            revision = max(revision, change.revision)
            except Compacted as exc:
                log.info("reading all members anew", extra=fields(why=str(exc)))
                revision = None
            except KVStoreError as exc:
                self._members.source_answers(False, str(exc))
                self._distrust(retry_s)
                await asyncio.sleep(retry_s * self._jitter())
                retry_s = min(2 * retry_s, RETRY_S_MAX, self._ttl_s)

    def _distrust(self, retry_s: float) -> None:
        """Believe no removal before its daemon had the time to come back: etcd is away for so long at least."""
        self._believe_at_s = self._members.now_s() + retry_s * 2 + self._ttl_s

    async def _take_snapshot(self) -> int:
        snapshot = await self._etcd.read(self._etcd.place.prefix)
        self._members.source_answers(True)
        present: set[str] = set()
        for entry in snapshot.entries:
            self._take_in(entry.key, entry, entry.revision)
            present.add(entry.key)
        self._miss(name for name in self._members.view.members if self._member_prefix + name not in present)
        if self._own_key not in present:
            self._free_name()
        return snapshot.revision

    def _take_in(self, key: str, entry: Entry | None, revision: int) -> None:
        if key.startswith(self._epoch_prefix):
            if entry is not None:
                self._note_epoch(entry)
        elif key == self._own_key:
            self._see_own(entry, revision)
        elif key.startswith(self._member_prefix):
            if entry is None:
                self._miss([key.removeprefix(self._member_prefix)])
            elif (member := self._member(key, entry)) is not None:
                self._members.join(member)

    def _miss(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._members.remove(name, not_before_s=self._believe_at_s)

    def _member(self, key: str, entry: Entry) -> Member | None:
        try:
            record = msgspec.json.decode(entry.value, type=MemberRecord)
            boot_id = bytes.fromhex(record.boot_id)
            if record.capacity_bytes <= 0:
                raise ValueError("the capacity is not positive")
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as exc:
            log.warning("an entry in etcd is no member", extra=fields(key=key, why=str(exc)))
            return None
        return Member(
            key.removeprefix(self._member_prefix), Address(record.host, record.port), boot_id, record.capacity_bytes,
            (record.protocol_min, record.protocol_max), record.is_leaving,
        )  # fmt: skip

    def _see_own(self, entry: Entry | None, revision: int) -> None:
        if entry is None:
            self._free_name()
            return
        member = self._member(self._own_key, entry)
        if member is None or member.boot_id == self._members.own.boot_id or revision <= self._claimed_at:
            return
        if self._lease and not self._taken:
            log.error(
                "another daemon has this one's name: this one is out of the pool until that is gone",
                extra=fields(name=member.name, address=member.address, fix="give each daemon a name of its own"),
            )
            self._taken = True
            self._registered.clear()

    def _free_name(self) -> None:
        if self._taken:
            self._taken = False
            self._lease = 0
        self._own_changed.set()

    def _note_epoch(self, entry: Entry) -> None:
        scope, epoch = entry.key.removeprefix(self._epoch_prefix), _epoch(entry)
        try:
            named = bytes.fromhex(scope)
        except ValueError:
            log.warning("an entry in etcd is no epoch", extra=fields(key=entry.key))
            return
        self._know_epoch(named, epoch)

    def _know_epoch(self, scope: bytes, epoch: int) -> None:
        if epoch > self._epochs.get(scope, 0):
            self._epochs[scope] = epoch
            self._on_epoch(scope, epoch)


def _epoch(entry: Entry) -> int:
    """Return an epoch as it is written, 0 for anything else."""
    return int(entry.value) if entry.value.isdigit() and len(entry.value) < 20 else 0
