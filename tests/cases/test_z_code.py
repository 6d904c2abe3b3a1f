"""Cases Z: nothing that is read is ever run. Z01 a pickle bomb in every socket and data file."""

from __future__ import annotations

import http.client
import os
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.block import Namespace
from kvstore.checksum import checksum
from kvstore.errors import BadNamespace, BadRecord, KVStoreError, UsageError
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, Daemon, running, start_and_fail
from tests.rawclient import keys, namespace

SPACE = namespace(64 * KIB)


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def bombs(marker: Path) -> list[bytes]:
    made = [pickle.dumps(Bomb(marker), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for bomb in made:  # they do work
        pickle.loads(bomb)
        marker.rmdir()
    return made


def test_z01_a_bomb_sent_to_the_socket_and_to_http_runs_nothing(short_dir: Path, free_port: int) -> None:
    marker = short_dir / "ran"
    with running(short_dir, cpu="8MiB", ssd=None) as quiet:
        quiet.stop()
        quiet.arguments[quiet.arguments.index("--http") + 1] = f"127.0.0.1:{free_port}"
        quiet.start()
        for bomb in bombs(marker):
            for content in (bomb, struct.pack("<I", len(bomb)) + bomb):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(30)
                    sock.connect(str(quiet.socket))
                    sock.sendall(content)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
            with socket.create_connection(("127.0.0.1", free_port), timeout=30) as sock:
                sock.sendall(bomb + b"\r\n\r\n")
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 16)
            connection = http.client.HTTPConnection("127.0.0.1", free_port, timeout=30)
            connection.request("POST", "/metrics", body=bomb, headers={"Content-Type": "application/python-pickle"})
            assert connection.getresponse().status in (400, 404, 405, 415)
            connection.close()
        with quiet.client() as client:
            for bomb in bombs(marker):
                with pytest.raises(BadNamespace):
                    client.ask(wire.Open(client.next_id(), bomb))
                with pytest.raises(BadNamespace):
                    Namespace.decode(bomb)
            client.check()
    assert not marker.exists()


def test_z01_a_block_whose_bytes_are_a_bomb_is_only_bytes(short_dir: Path) -> None:
    marker = short_dir / "ran"
    with running(short_dir, cpu="8MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        reserved = client.reserve(ns, keys(1))
        bomb = bombs(marker)[-1]
        client.write(reserved.offsets[0], bomb)
        client.ask(wire.Seal(client.next_id(), reserved.ticket, durable=True), wire.Sealed)
        client.report(wire.Evict(client.next_id(), "cpu"))
        got = client.acquire(ns, keys(1))
        assert client.peek(got.offsets[0], len(bomb)) == bomb
        client.release(got.lease)
        client.check(verify=True)
    assert not marker.exists()


def test_z01_a_bomb_in_any_file_of_the_ssd_directory_runs_nothing(short_dir: Path) -> None:
    """The daemon starts without it, or refuses to with one text that says what to do; other blocks are exact."""
    marker = short_dir / "ran"
    with running(short_dir, cpu="8MiB") as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(40), durable=True)
            client.put(client.open(namespace(4 * KIB, "small")), keys(40), durable=True)
        daemon.stop()
        files = sorted(path for path in daemon.ssd_dir.rglob("*") if path.is_file() and path.stat().st_size)
        segments = [path for path in files if path.suffix == ".seg"]
        assert len(files) - len(segments) >= 3
        files = [path for path in files if path not in segments[1:]]
        bomb = bombs(marker)[-1]
        for path in files:
            before = path.read_bytes()
            for at in (0, 4096) if "index" in path.parts else (0,):
                if at >= len(before):
                    continue
                path.write_bytes(before[:at] + bomb + before[at + len(bomb) :])
                daemon.launch()
                try:
                    served = _serves_or_refuses(daemon)
                finally:
                    daemon.kill()
                assert not marker.exists(), path
                path.write_bytes(before)
                assert served or "index" in path.parts, f"{path} alone should not stop the start"
        daemon.start()


def _serves_or_refuses(daemon: Daemon) -> bool:
    assert daemon.process is not None
    while daemon.is_running:
        try:
            with daemon.client() as client:
                found = client.get(client.open(SPACE), keys(40))
                assert set(found) <= {Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT}
                return True
        except (OSError, KVStoreError):
            continue
    assert daemon.process.returncode in (1, 2)
    assert "Traceback" not in daemon.log_text()
    return False


def test_z01_a_bomb_for_a_dump_is_refused(short_dir: Path) -> None:
    marker = short_dir / "ran"
    with running(short_dir, cpu="8MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(4))
        dump = short_dir / "dump"
        client.report(wire.Dump(client.next_id(), SPACE.digest, str(dump)))
        whole = dump.read_bytes()
        for number, bomb in enumerate(bombs(marker)):
            path = short_dir / f"bomb{number}"
            for content in (bomb, whole[:16] + bomb, whole[:500] + bomb + whole[500 + len(bomb) :]):
                path.write_bytes(content)
                with pytest.raises((BadRecord, BadNamespace)):
                    client.report(wire.Load(client.next_id(), str(path)))
        client.check(verify=True)
    assert not marker.exists()


@pytest.mark.parametrize("life_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_z01_a_dump_made_by_hand_with_impossible_numbers_is_refused(short_dir: Path, life_s: float) -> None:
    """Checksums keep out accidents, not people: every field is checked for itself."""
    encoded = SPACE.encode()
    head = b"KVSTORED-DUMP-1\n" + struct.pack("<I", len(encoded)) + encoded + struct.pack("<Q", checksum(encoded))
    content = bytes(SPACE.block_bytes)
    header = struct.pack("<32sIdQ", keys(1)[0], len(content), life_s, checksum(content))
    path = short_dir / "made"
    path.write_bytes(head + header + struct.pack("<Q", checksum(header)) + content)
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        with pytest.raises(BadRecord):
            client.report(wire.Load(client.next_id(), str(path)))
        client.check()


def test_z01_a_pipe_for_a_dump_is_refused_at_once(short_dir: Path) -> None:
    os.mkfifo(short_dir / "pipe")
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        with pytest.raises(UsageError):
            client.report(wire.Load(client.next_id(), str(short_dir / "pipe")))
        with pytest.raises(UsageError):
            client.report(wire.Load(client.next_id(), str(short_dir)))


def test_z01_a_bomb_for_a_config_file_is_refused(short_dir: Path) -> None:
    marker = short_dir / "ran"
    config = short_dir / "config.toml"
    for bomb in bombs(marker):
        config.write_bytes(bomb)
        daemon = Daemon(short_dir, "--config", str(config), cpu="8MiB", ssd=None)
        status, text = start_and_fail(daemon)
        assert status == 2, text
        assert str(config) in text
    assert not marker.exists()


def test_z01_offsets_that_clients_name_are_never_followed(short_dir: Path) -> None:
    """A client names tickets and positions, never addresses: the largest numbers there are lead nowhere."""
    strict = ("--mode", "strict", "--arena-size", "4MiB")
    with running(short_dir, *strict, cpu="8MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        reserved = client.reserve(ns, keys(2))
        for position in (2, 2**31, 2**63, 2**64 - 1):
            sealed = client.ask(wire.Seal(client.next_id(), reserved.ticket, [position]), wire.Sealed)
            assert list(sealed.outcomes) == [Outcome.REFUSED]
            assert client.ask(wire.Forfeit(client.next_id(), reserved.ticket, [position]), wire.Done).count == 0
        client.check()
