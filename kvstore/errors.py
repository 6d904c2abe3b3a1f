"""Every error that crosses a module boundary of this project, as one tree.

Invariants
1. Each concrete class has a wire `code` of its own, never reused, never renumbered.
2. `retryable` says whether the same call may succeed later without a change by the caller.
3. A miss is a result, never an error. Foreign errors (OSError, lmdb.Error, ...) are mapped once, at the edge
   where they enter, with `raise ... from exc`.
4. The text of an error names what was wrong, the value, the limit, and what to do about it.
"""

from __future__ import annotations

from typing import ClassVar


class KVStoreError(Exception):
    """Base of all errors of kvstore, kvstored, kvclient and kvctl."""

    code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class UsageError(KVStoreError):
    """The caller is wrong: the same call will fail again."""

    code = 100


class BadKey(UsageError):
    """A block hash or key has the wrong type or length."""

    code = 101


class BadNamespace(UsageError):
    """A namespace lacks a field, has an unknown one, or does not match its digest."""

    code = 102


class NamespaceMismatch(UsageError):
    """Bytes or buffers do not have the shape or size that the namespace declares."""

    code = 103


class LeaseExpired(UsageError):
    """A lease, ticket or handle is stale: it ended, was released, or belongs to another boot of the daemon."""

    code = 104


class UnknownSetting(UsageError):
    """A configuration key does not exist or has no effect in this combination."""

    code = 105


class BadSetting(UsageError):
    """A configuration value is malformed or out of its range."""

    code = 106


class NotPermitted(UsageError):
    """The credential of this connection does not allow the verb."""

    code = 107


class CapacityError(KVStoreError):
    """Nothing is wrong; there is no room now. Try later, or with less."""

    code = 200
    retryable = True


class TierFull(CapacityError):
    """No slot could be freed in a tier by the deadline."""

    code = 201


class TooManyLeases(CapacityError):
    """A lease would pin more of a tier than leases may."""

    code = 202


class Backpressure(CapacityError):
    """A queue or a session has reached its limit."""

    code = 203


class TooLarge(CapacityError):
    """The request is larger than what could ever be granted; retrying it unchanged is pointless."""

    code = 204
    retryable = False


class UnavailableError(KVStoreError):
    """The world is wrong: a daemon, a peer or a device does not answer."""

    code = 300
    retryable = True


class PeerUnreachable(UnavailableError):
    """No daemon answers at the address."""

    code = 301


class DeadlineExceeded(UnavailableError):
    """The call did not finish by its deadline."""

    code = 302


class Closing(UnavailableError):
    """The client or the daemon is shutting down."""

    code = 303


class TierUnavailable(UnavailableError):
    """A tier can't be opened or has stopped working."""

    code = 304


class TierLocked(UnavailableError):
    """Another daemon owns the directory or the socket."""

    code = 305


class CorruptionError(KVStoreError):
    """The bytes are wrong."""

    code = 400


class ChecksumMismatch(CorruptionError):
    """Stored bytes do not match the checksum in their record."""

    code = 401


class BadRecord(CorruptionError):
    """A record on disk or in a dump can't be what was written."""

    code = 402


class ProtocolError(KVStoreError):
    """One side of a connection broke the protocol; the connection ends."""

    code = 500


class LocalProtocolError(ProtocolError):
    """This side tried to send what the protocol forbids."""

    code = 501


class RemoteProtocolError(ProtocolError):
    """The other side sent what the protocol forbids."""

    code = 502


def _concrete(root: type[KVStoreError]) -> dict[int, type[KVStoreError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_concrete(child))
    return found


_BY_CODE = _concrete(KVStoreError)


def from_wire(code: int, message: str) -> KVStoreError:
    """Return the error that `code` stands for; an unknown code of a newer peer keeps its hundred's meaning."""
    kind = _BY_CODE.get(code) or _BY_CODE.get(code // 100 * 100) or KVStoreError
    return kind(message)
