"""One blocking connection: sends and receives in the caller's thread, keeping the GIL while replies are quick.

Theory of operation. A plain socket call releases the GIL and must win it back: with two busy Python threads in the
process a round trip then takes 17 ms. Control replies are small and come within microseconds, so they are received by a
call that keeps the GIL, which SO_RCVTIMEO ends after 4 ms (any Python thread may keep it for 5); after that, and for
requests known to take long, the thread waits in poll(), which releases it. A connection that was slow twice running
waits in poll() at once for some turns. (How long poll() took tells nothing: it includes winning the GIL back.)

Invariants
1. Used by one thread at a time.
2. Every wait ends by a deadline. One that ends a wait for a reply leaves the connection usable; one that cuts a frame
   in two, and any error of the socket or the protocol, leaves it broken.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable

from kvclient._session import Session
from kvstore import wire
from kvstore.errors import DeadlineExceeded, PeerUnreachable, ProtocolError, UnavailableError

_QUICK_US = 4000
_SLOWNESS_MAX = 15
_RECEIVE_BYTES = 64 << 10
_FLUSH_S = 0.1
_SETTLE_S = 0.1
_MSG_DONTWAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

_keeping = ctypes.PyDLL(None, use_errno=True)
_send = _keeping.send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t
_receive = _keeping.recv
_receive.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_receive.restype = ctypes.c_ssize_t


class Connection:
    """A greeted socket and its session."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, _QUICK_US))
        self.session = session
        self.is_broken = False
        self.heard_at = session.now()
        # Messages of other threads, sent by whoever uses the connection next.
        self.deferred: deque[wire.Message] = deque()
        # Leases whose views are in callers' hands.
        self.lease_count = 0
        self._socket = sock
        self._fd = sock.fileno()
        self._buffer = ctypes.create_string_buffer(_RECEIVE_BYTES)
        self._received = memoryview(self._buffer)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        # After so many quick receptions in vain, the next few are not tried.
        self._slowness = 0
        self._patient_turns = 0

    def send(self, messages: Iterable[wire.Message], deadline_at: float) -> None:
        """Send what is in the session's outbox, then `messages`."""
        frame = b"".join(map(wire.encode, (*self.session.unsent(), *messages)))
        if not frame:
            return
        self.is_broken = True  # until the frame is out whole, whatever interrupts it
        while frame:
            sent = _send(self._fd, frame, len(frame), _MSG_DONTWAIT)
            if sent == len(frame):
                break
            if sent >= 0:
                frame = frame[sent:]
            elif ctypes.get_errno() == errno.EAGAIN:
                self._wait(select.POLLOUT, deadline_at)
            elif ctypes.get_errno() != errno.EINTR:
                raise self._lost(ctypes.get_errno())
        self.is_broken = False

    def await_reply(self, deadline_at: float, *, patient: bool) -> None:
        """Receive until something has arrived for some request."""
        if not patient and self._patient_turns:
            self._patient_turns -= 1
            patient = True
        while True:
            if patient:
                self._wait(select.POLLIN, deadline_at)
            received = self._receive_some(0)
            if received is None:
                patient = True
                self._patient_turns = self._slowness
                self._slowness = min(_SLOWNESS_MAX, 2 * self._slowness + 1)
            elif received:
                break
        if not patient:
            self._slowness = 0

    def drain(self) -> bool:
        """Take in what has come unasked; returns whether the connection is still good."""
        try:
            while not self.is_broken and self._receive_some(socket.MSG_DONTWAIT) is not None:
                continue
        except (PeerUnreachable, ProtocolError):
            return False
        return not self.is_broken

    def flush(self) -> None:
        """Send what is in the session's outbox; what can't be sent at once breaks the connection."""
        if self.is_broken or not self.session.outbox:
            return
        try:
            self.send((), self.session.now() + _FLUSH_S)
        except (PeerUnreachable, DeadlineExceeded):
            self.is_broken = True

    def settle(self) -> None:
        """Wait a moment for what was given up, and give back what it granted."""
        until = self.session.now() + _SETTLE_S
        self.flush()
        try:
            while self.session.has_abandoned and not self.is_broken:
                self._wait(select.POLLIN, until)
                self._receive_some(0)
        except (UnavailableError, ProtocolError):
            pass  # what still comes is taken in before the next use
        self.flush()

    def close(self, *, bye: bool) -> None:
        """Close the socket; `bye` tells the daemon that this session touches the pool no more."""
        if bye and not self.is_broken:
            self.session.outbox.append(wire.Bye(self.session.next_id()))
            self.flush()
        self.is_broken = True
        self._received.release()
        self._socket.close()

    def _receive_some(self, flags: int) -> bool | None:
        """Receive once: True if a reply is complete, False if a part came, None if nothing did."""
        self.is_broken = True  # until what is taken from the socket is in the session, whatever interrupts that
        count = _receive(self._fd, self._buffer, _RECEIVE_BYTES, flags)
        if count < 0:
            number = ctypes.get_errno()
            if number in (errno.EAGAIN, errno.EINTR):
                self.is_broken = False
                return None
            raise self._lost(number)
        if count == 0:
            raise self._lost(errno.ECONNRESET)
        self.heard_at = self.session.now()
        touched = self.session.feed(self._received[:count])
        self.is_broken = False
        return bool(touched)

    def _wait(self, events: int, deadline_at: float) -> None:
        """Wait in poll() until the socket is ready."""
        self._poll.modify(self._fd, events)
        while True:
            left_s = deadline_at - self.session.now()
            if left_s <= 0:
                raise DeadlineExceeded("the daemon did not answer by the call's deadline: give it a longer one")
            if self._poll.poll(math.ceil(min(left_s, 1e5) * 1000)):
                return

    def _lost(self, number: int) -> PeerUnreachable:
        self.is_broken = True
        return PeerUnreachable(f"the connection to the daemon is lost ({os.strerror(number)}): was it stopped?")
