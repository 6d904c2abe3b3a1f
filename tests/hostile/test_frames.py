"""Hostile bytes on the socket: the connection ends or the request fails, the daemon lives and takes no more memory."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore import wire
from kvstore.block import Namespace
from kvstore.errors import Backpressure, BadNamespace, KVStoreError, RemoteProtocolError, UsageError
from tests.daemon_fixture import KIB, MIB, Daemon, eventually, running
from tests.rawclient import RawClient, keys, namespace

HELLO = wire.Hello(1, 1, 1, "hostile", False)


@pytest.fixture(scope="module")
def daemon(private_temp_dir: Path) -> Iterator[Daemon]:
    directory = private_temp_dir / "hostile"
    directory.mkdir()
    with running(directory, cpu="32MiB", ssd=None) as started:
        yield started
    for left in sorted(directory.rglob("*"), reverse=True):
        left.unlink()
    directory.rmdir()


@pytest.fixture(autouse=True)
def daemon_is_well_after_each_test(daemon: Daemon) -> Iterator[None]:
    """After each test the daemon answers, is whole, and has let go of every session but this one's."""
    yield
    with daemon.client() as client:
        eventually(lambda: client.stats()["sessions"]["open"] == 1, "the other sessions are gone")
        client.check()
        assert client.stats()["sessions"] == {
            "open": 1, "leases": 0, "leases_overdue": 0, "reservations": 0, "quarantined_slots": 0
        }  # fmt: skip


def connected(daemon: Daemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect(str(daemon.socket))
    return sock


def greeted(daemon: Daemon) -> socket.socket:
    """Return a socket whose Hello was answered."""
    sock = connected(daemon)
    sock.sendall(wire.encode(HELLO))
    assert sock.recv(1 << 16)
    return sock


def send_all(sock: socket.socket, content: bytes) -> None:
    try:
        sock.sendall(content)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the daemon has closed already


def rest(sock: socket.socket) -> list[wire.Reply]:
    """Return what the daemon still says, up to the end of the connection."""
    frames, replies = wire.FrameBuffer(), list[wire.Reply]()
    while True:
        try:
            received = sock.recv(1 << 16)
        except ConnectionResetError:
            break
        if not received:
            break
        replies += map(wire.decode_reply, frames.feed(received))
    sock.close()
    return replies


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def packed(*fields: object) -> bytes:
    return frame(msgspec.msgpack.encode(fields))


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


MALFORMED = {
    "length of zero": struct.pack("<I", 0),
    "length over the limit": struct.pack("<I", wire.FRAME_BYTES_MAX + 1) + b"x" * 100,
    "largest length": b"\xff\xff\xff\xff",
    "no MessagePack": frame(b"\xc1" * 10),
    "cut off body": frame(b"\x93\x04"),
    "a map": packed({"ping": 1}),
    "a number": frame(msgspec.msgpack.encode(5)),
    "unknown tag": packed(9999, 1),
    "text for a tag": packed("2", 1),
    "text for an id": packed(2, "1"),
    "negative id": packed(2, -1),
    "no id": packed(2),
    "hash too short": packed(4, 1, 0, [b"x" * 31]),
    "hash as text": packed(4, 1, 0, ["x" * 32]),
    "too many hashes": packed(4, 1, 0, [b"x" * 32] * (wire.KEYS_MAX + 1)),
    "seconds that are no number": packed(11, 1, 0, [], float("nan")),
    "seconds without end": packed(11, 1, 0, [], float("inf")),
    "negative seconds": packed(11, 1, 0, [], -1.0),
    "a list for a ticket": packed(6, 1, [1]),
    "deeply nested": frame(b"\x91" * 100_000 + b"\x90"),
    "a reply": packed(66, 1, 0),
    "behind the message": frame(msgspec.msgpack.encode((2, 1)) + b"\x00"),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("when", ["first", "after the greeting"])
def test_what_is_no_message_ends_the_connection_with_a_reason(daemon: Daemon, when: str, content: bytes) -> None:
    sock = connected(daemon) if when == "first" else greeted(daemon)
    send_all(sock, content)
    replies = rest(sock)
    assert len(replies) == 1
    assert isinstance(replies[0], wire.Failure)
    assert replies[0].code == RemoteProtocolError.code
    assert replies[0].text


def test_a_first_frame_too_large_for_a_hello_is_refused_at_once(daemon: Daemon) -> None:
    sock = connected(daemon)
    send_all(sock, bytes.fromhex("16030100dc010000d8"))  # how TLS begins
    (reply,) = rest(sock)
    assert isinstance(reply, wire.Failure)
    assert "Hello" in reply.text


def test_a_pickle_is_no_message_and_is_not_run(daemon: Daemon, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        bomb = pickle.dumps(Bomb(marker), protocol)
        for content in (bomb, frame(bomb), packed(3, 1, bomb), packed(1, 1, 1, 1, bomb.decode("latin-1"))):
            for sock in (connected(daemon), greeted(daemon)):
                send_all(sock, content)
                sock.shutdown(socket.SHUT_WR)
                rest(sock)
    assert not marker.exists()


def test_a_second_hello_is_refused_and_the_connection_goes_on(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(UsageError):
            client.ask(wire.Hello(client.next_id(), 1, 1, "again"))
        assert client.ask(wire.Ping(client.next_id())) == wire.Done(client.next_id() - 1)


def test_a_client_of_another_protocol_is_told_both_versions(daemon: Daemon) -> None:
    sock = connected(daemon)
    sock.sendall(wire.encode(wire.Hello(1, 7, 9, "newer")))
    (reply,) = rest(sock)
    assert isinstance(reply, wire.Failure)
    assert "7 to 9" in reply.text
    assert "1 to 1" in reply.text


def test_random_bytes_never_harm(daemon: Daemon) -> None:
    chance = random.Random(1)
    for _ in range(200):
        sock = connected(daemon) if chance.random() < 0.3 else greeted(daemon)
        for _ in range(chance.randrange(1, 4)):
            body = chance.randbytes(chance.randrange(200))
            send_all(sock, frame(body) if chance.random() < 0.8 else body)
        sock.shutdown(socket.SHUT_WR)
        rest(sock)


def test_random_fields_of_the_right_shape_never_harm(daemon: Daemon) -> None:
    """Well-typed nonsense: each request is answered by something, and the connection survives it."""
    chance = random.Random(2)
    hashes = keys(5)
    space = namespace(4 * KIB)

    def number() -> int:
        return chance.choice([0, 1, 2, 7, 2**31, 2**32, 2**63, 2**64 - 1])

    def seconds() -> float:
        return chance.choice([0.0, 0.0, 1e-9, 0.001, 1e9]) if chance.random() < 0.3 else 0.01

    def some() -> list[bytes]:
        return chance.choices(hashes, k=chance.randrange(4))

    def digest() -> bytes:
        return chance.choice([space.digest, bytes(32)])

    shapes: list[Callable[[int, int], wire.Message]] = [
        lambda n, ns: wire.Ping(n),
        lambda n, ns: wire.Open(n, chance.choice([space.encode(), b"", space.encode()[:-1], chance.randbytes(60)])),
        lambda n, ns: wire.Lookup(n, ns, some(), chance.random() < 0.5, chance.choice([None, seconds()])),
        lambda n, ns: wire.Reserve(n, ns, some(), 0.01),
        lambda n, ns: wire.Seal(n, number(), [number(), number()], [number()], seconds(), wait_s=0.01),
        lambda n, ns: wire.Seal(n, number()),
        lambda n, ns: wire.Forfeit(n, number(), [number()]),
        lambda n, ns: wire.Acquire(n, ns, some(), chance.random() < 0.5, seconds(), 0.01, 0.01, seconds()),
        lambda n, ns: wire.Prefetch(n, ns, some()),
        lambda n, ns: wire.Wait(n, ns, some(), 0.01),
        lambda n, ns: wire.Abort(n, ns, some()),
        lambda n, ns: wire.Drop(n, ns, some()),
        lambda n, ns: wire.GroupLookup(n, ns, some()),
        lambda n, ns: wire.Pin(n, digest(), some(), seconds()),
        lambda n, ns: wire.Unpin(n, digest(), some()),
        lambda n, ns: wire.Ttl(n, digest(), some(), seconds()),
        lambda n, ns: wire.Stats(n),
        lambda n, ns: wire.Status(n),
        lambda n, ns: wire.Keys(n, digest(), number(), number(), some()),
        lambda n, ns: wire.DropNamespace(n, digest()),
        lambda n, ns: wire.DropBlocks(n, digest(), some()),
        lambda n, ns: wire.Evict(n, chance.choice(["cpu", "ssd", "", "gpu\0"]), number(), seconds()),
        lambda n, ns: wire.Check(n, chance.random() < 0.5),
        lambda n, ns: wire.Gc(n),
        lambda n, ns: wire.Drain(n, 0.01),
        lambda n, ns: wire.Dump(n, digest(), chance.choice(["", ".", "/", "a\0b", "/nowhere/x", "/proc/self/mem"])),
        lambda n, ns: wire.Load(n, chance.choice(["", ".", "/", "a\0b", "/nowhere/x", "/dev/zero", "/proc/self/mem"])),
    ]
    with daemon.client() as client:
        ns = client.open(space)
        for _ in range(1500):
            message = chance.choice(shapes)(client.next_id(), ns if chance.random() < 0.8 else number())
            try:
                client.ask(message)
            except KVStoreError as exc:
                assert exc.code != KVStoreError.code, f"{message} met a bug: {exc}"  # noqa: PT017
        client.ask(wire.DropNamespace(client.next_id(), space.digest))


def test_a_namespace_that_is_malformed_is_refused(daemon: Daemon) -> None:
    encoded = namespace(4 * KIB).encode()
    chance = random.Random(3)
    with daemon.client() as client:
        for _ in range(300):
            changed = bytearray(encoded)
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            try:
                number = client.ask(wire.Open(client.next_id(), bytes(changed)), wire.Opened).ns
            except KVStoreError:
                continue
            assert Namespace.decode(bytes(changed)).digest != namespace(4 * KIB).digest
            assert number != client.open(namespace(4 * KIB))
        with pytest.raises(BadNamespace):
            client.ask(wire.Open(client.next_id(), encoded + b"\x00"))


def test_requests_with_one_id_at_a_time_do_not_get_around_the_limit(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.open(namespace(4 * KIB))
        wait = wire.Wait(7, ns, keys(1, "never"), 60.0)
        client.send(wait)
        for _ in range(50):
            with pytest.raises(UsageError):
                client.ask(wait)
        for number in range(1000, 1000 + 255):
            client.send(wire.Wait(number, ns, keys(1, "never"), 60.0))
        with pytest.raises(Backpressure):
            client.ask(wire.Wait(2000, ns, keys(1, "never"), 60.0))
        client.ask(wire.Abort(client.next_id(), ns, keys(1, "never")), wire.Done)
        for number in (7, *range(1000, 1255)):
            assert isinstance(client.answer(number), wire.Found)


def test_ten_thousand_unread_replies_end_the_connection_and_cost_no_memory(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.open(namespace(4 * KIB))
    before = daemon.rss_bytes()
    most = before
    sock = greeted(daemon)
    sock.sendall(wire.encode(wire.Open(1, namespace(4 * KIB).encode())))
    sock.recv(1 << 16)
    request = bytes(wire.encode(wire.Lookup(2, ns, keys(512, "unread"), run=False)))  # answered with 1 KiB each
    over = threading.Event()

    def flood() -> None:
        try:
            for _ in range(10_000):
                sock.sendall(request)
        except OSError:
            pass
        over.set()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        while not over.is_set():
            most = max(most, daemon.rss_bytes())
            time.sleep(0.05)
    finally:
        sock.close()
        thread.join()
    assert "a client reads no replies" in daemon.log_text()
    assert most - before < 8 * MIB


def test_small_requests_with_large_replies_cost_no_memory(daemon: Daemon) -> None:
    """Each of these requests takes 8 bytes and its reply thousands: what is not read must not be made."""
    sock = greeted(daemon)
    before = daemon.rss_bytes()
    count = 4_000
    sock.sendall(bytes(wire.encode(wire.Stats(9))) * count)
    with daemon.client() as client:
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < 0.5:
            client.ask(wire.Ping(client.next_id()))
            assert daemon.rss_bytes() - before < 8 * MIB
    frames, replies = wire.FrameBuffer(), 0
    while replies < count:
        replies += sum(1 for _ in frames.feed(sock.recv(1 << 20)))
        assert daemon.rss_bytes() - before < 8 * MIB
    sock.close()


def test_replies_that_were_held_back_all_arrive_in_order(daemon: Daemon) -> None:
    with daemon.client() as client:
        ns = client.open(namespace(4 * KIB))
        wanted = range(100, 1600)
        requests = b"".join(bytes(wire.encode(wire.Lookup(n, ns, keys(300, "many"), run=False))) for n in wanted)
        sender = threading.Thread(target=client.socket.sendall, args=(requests,))
        sender.start()
        time.sleep(0.3)  # long enough for replies to pile up; nothing depends on it
        for number in wanted:
            assert len(client.answer(number, wire.Found).outcomes) == 300
        sender.join()


def test_descriptors_that_a_client_sends_are_never_kept(daemon: Daemon) -> None:
    def descriptors() -> int:
        return daemon.fd_count()

    with daemon.client() as client:
        client.ask(wire.Ping(client.next_id()))
        before = descriptors()
        read_end, write_end = os.pipe()
        try:
            for _ in range(50):
                ping = wire.Ping(client.next_id())
                socket.send_fds(client.socket, [bytes(wire.encode(ping))], [read_end] * 50)
                client.answer(ping.id, wire.Done)
            assert descriptors() == before
            sock = connected(daemon)
            socket.send_fds(sock, [bytes(wire.encode(HELLO))], [read_end] * 50)
            sock.recv(1 << 16)
            sock.close()
            eventually(lambda: descriptors() == before, "no descriptor is left")
        finally:
            os.close(read_end)
            os.close(write_end)


def test_a_hello_that_comes_byte_by_byte_is_cut_off(daemon: Daemon) -> None:
    with daemon.client() as client:
        before = daemon.fd_count()
        slow = [connected(daemon) for _ in range(20)]
        whole = connected(daemon)
        for byte in bytes(wire.encode(HELLO)):
            whole.sendall(bytes([byte]))
        assert whole.recv(1 << 16), "slow but within the time is well"
        whole.close()
        for sock in slow:
            sock.sendall(b"\x10")
        # Nobody waits for them meanwhile.
        client.ask(wire.Ping(client.next_id()))
        for sock in slow:
            assert rest(sock) == []
        eventually(lambda: daemon.fd_count() == before, "no descriptor is left")


def test_a_hello_that_never_ends_is_refused_early(daemon: Daemon) -> None:
    before = daemon.rss_bytes()
    socks = [connected(daemon) for _ in range(30)]
    for sock in socks:
        send_all(sock, struct.pack("<I", 4 * MIB) + bytes(1 * MIB))
    for sock in socks:
        rest(sock)
    assert daemon.rss_bytes() - before < 8 * MIB


def test_thousands_of_connects_leave_nothing(daemon: Daemon) -> None:
    def connect_once(turn: int) -> None:
        if turn % 3 == 0:
            connected(daemon).close()
        elif turn % 3 == 1:
            greeted(daemon).close()
        else:
            RawClient(daemon.socket, want_pool=False).close()

    for turn in range(200):
        connect_once(turn)
    with daemon.client() as client:
        eventually(lambda: client.stats()["sessions"]["open"] == 1)
        before_fds, before = daemon.fd_count(), daemon.rss_bytes()
        for turn in range(2000):
            connect_once(turn)
        eventually(lambda: daemon.fd_count() <= before_fds, "no descriptor is left")
        assert daemon.rss_bytes() - before < 2 * MIB


def test_more_sessions_than_allowed_are_refused_with_the_setting_to_raise(short_dir: Path) -> None:
    with running(short_dir, "--sessions-max", "8", cpu="8MiB", ssd=None) as daemon:
        clients = [daemon.client() for _ in range(8)]
        with pytest.raises(Backpressure, match="sessions-max"):
            daemon.client()
        clients.pop().close()
        eventually(lambda: _can_connect(daemon), "a place is free again")
        for client in clients:
            client.close()


def _can_connect(daemon: Daemon) -> bool:
    try:
        daemon.client().close()
    except Backpressure:
        return False
    return True


def test_out_of_descriptors_the_daemon_waits_instead_of_spinning(short_dir: Path) -> None:
    import resource

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with running(short_dir, cpu="8MiB", ssd=None, before_exec=few) as daemon:
        socks = [connected(daemon) for _ in range(80)]
        for sock in socks[:20]:
            sock.sendall(wire.encode(HELLO))
        eventually(lambda: "no descriptor" in daemon.log_text(), "it says so")
        begun, used = time.monotonic(), _cpu_s(daemon.pid)
        eventually(lambda: time.monotonic() - begun > 1.0, every_s=0.1)
        assert _cpu_s(daemon.pid) - used < 0.5
        for sock in socks:
            sock.close()
        eventually(lambda: _can_connect(daemon), "it serves again")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
