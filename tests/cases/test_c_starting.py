"""Cases C: a start that fails says why. C01 socket paths, C02 memory that can't be had; and the kind of both."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, eventually, running, start_and_fail
from tests.product import ROOT
from tests.rawclient import keys, namespace

SPACE = namespace(64 * KIB)


def kvctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvctl", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


# ---- C01


def test_c01_a_socket_under_a_directory_of_120_bytes_works_for_daemon_client_and_kvctl(short_dir: Path) -> None:
    deep = short_dir / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    assert len(os.fsencode(deep / "s")) > 120
    with running(deep, ssd=None) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(4))
            assert client.get(ns, keys(4)) == [Outcome.HIT] * 4
        answer = kvctl("ping", "--socket", str(daemon.socket))
        assert answer.returncode == 0, answer.stderr


def test_c01_a_name_that_fits_no_address_is_refused_alike_by_daemon_and_kvctl(short_dir: Path) -> None:
    long = short_dir / ("n" * 110)
    daemon = Daemon(short_dir, "--socket", str(long), cpu="8MiB", ssd=None)
    daemon.arguments.remove(str(short_dir / "s"))
    daemon.arguments.remove("--socket")
    status, text = start_and_fail(daemon)
    assert status == 2
    answer = kvctl("ping", "--socket", str(long))
    assert answer.returncode == 2
    for told in (text, answer.stderr):
        assert str(long) in told
        assert str(len(os.fsencode(long))) in told, "its length"
        assert "107" in told, "the limit"


def test_c01_a_file_that_is_no_socket_is_refused_and_kept(short_dir: Path) -> None:
    (short_dir / "s").write_text("somebody's notes")
    status, text = start_and_fail(Daemon(short_dir, cpu="8MiB", ssd=None))
    assert status == 2
    assert str(short_dir / "s") in text
    assert (short_dir / "s").read_text() == "somebody's notes"


def test_c01_the_socket_of_a_dead_daemon_is_replaced(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon:
        daemon.kill()
        assert daemon.socket.exists()
        daemon.start()
        daemon.client().close()
    assert not daemon.socket.exists(), "a daemon that ends in order leaves no socket"


def test_c01_a_second_daemon_on_the_same_socket_or_directory_leaves_the_first_alone(short_dir: Path) -> None:
    (short_dir / "other").mkdir()
    with running(short_dir, cpu="8MiB", ssd="16MiB") as first:
        with first.client() as client:
            client.put(client.open(SPACE), keys(4), durable=True)
        same_socket = Daemon(short_dir, cpu="8MiB", ssd=None)
        same_socket.log = short_dir / "other" / "log"
        status, text = start_and_fail(same_socket)
        assert status == 1
        assert f"(pid {first.pid}) serves {first.socket}" in text
        same_directory = Daemon(short_dir / "other", cpu="8MiB", ssd="16MiB", ssd_dir=first.ssd_dir)
        same_directory.log = short_dir / "other" / "log2"
        status, text = start_and_fail(same_directory)
        assert status == 1
        assert str(first.ssd_dir) in text
        assert str(first.pid) in text
        with first.client() as client:
            assert client.get(client.open(SPACE), keys(4)) == [Outcome.HIT] * 4
            client.check(verify=True)


def test_c01_two_daemons_that_start_at_once_on_one_socket_leave_one(short_dir: Path) -> None:
    (short_dir / "other").mkdir()
    first = Daemon(short_dir, cpu="8MiB", ssd=None)
    second = Daemon(short_dir, cpu="8MiB", ssd=None)
    second.log = short_dir / "other" / "log"
    first.launch()
    second.launch()
    try:
        assert first.process is not None
        assert second.process is not None
        loser = eventually(lambda: next((d for d in (first, second) if not d.is_running), None), "one gives up")
        assert loser is not None
        winner = second if loser is first else first
        assert loser.process is not None
        assert loser.process.returncode == 1
        loser.process = None
        eventually(lambda: "ready" in winner.log_text(), "the other serves")
        winner.client().close()
        assert winner.stop() == 0
    finally:
        first.kill()
        second.kill()


# ---- C02


def limited(what: int, size_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (size_bytes, size_bytes))


def test_c02_a_limit_on_file_sizes_ends_the_start_with_its_name(short_dir: Path) -> None:
    daemon = Daemon(short_dir, cpu="256MiB", ssd=None, before_exec=limited(resource.RLIMIT_FSIZE, 64 * MIB))
    status, text = start_and_fail(daemon)
    assert status in (1, 2), text
    assert "ulimit -f" in text or "RLIMIT_FSIZE" in text
    assert str(256 * MIB) in text, "what was needed"
    assert "Traceback" not in text


def test_c02_a_limit_on_address_space_ends_the_start_with_its_name(short_dir: Path) -> None:
    daemon = Daemon(short_dir, cpu="4GiB", ssd=None, before_exec=limited(resource.RLIMIT_AS, 2 << 30))
    status, text = start_and_fail(daemon)
    assert status in (1, 2), text
    assert "RLIMIT_AS" in text or "ulimit -v" in text
    assert "Traceback" not in text


def test_c02_more_memory_than_the_machine_has_is_refused_with_what_is_free(short_dir: Path) -> None:
    status, text = start_and_fail(Daemon(short_dir, cpu="64TiB", ssd=None))
    assert status == 2, text
    assert str(64 << 40) in text
    assert "MemAvailable" in text or "cgroup" in text


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Generator[Path, None, None]:
    """Give a fresh control group with this memory limit, or skip the test."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = base / f"kvtest-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no control group can be made here: {exc.strerror}")
    try:
        if not (group / name).exists():
            pytest.skip(f"{base} has no memory controller")
        (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        eventually(lambda: _removed(group), "the group is empty")


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def test_c02_a_control_group_with_too_little_memory_ends_the_start_with_its_limit(short_dir: Path) -> None:
    """Neither a signal nor the kernel's out-of-memory killer: the sizes are compared before anything is touched."""
    with memory_group(64 * MIB) as group:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        status, text = start_and_fail(Daemon(short_dir, cpu="256MiB", ssd=None, before_exec=enter))
    assert status == 2, (status, text)
    assert "cgroup" in text
    assert str(256 * MIB) in text, "what was needed"
    assert str(64 * MIB) in text, "what there is"


def test_c02_a_pool_within_the_control_groups_limit_starts_and_can_be_filled(short_dir: Path) -> None:
    with memory_group(512 * MIB) as group:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        with running(short_dir, cpu="128MiB", ssd=None, before_exec=enter) as daemon, daemon.client() as client:
            ns = client.open(SPACE)
            eventually(lambda: client.tier("cpu")["capacity_bytes"] == 128 * MIB, "all of it is reserved")
            assert set(client.put(ns, keys(2000))) == {Outcome.SEALED}
            client.check()


def test_c02_the_pool_is_really_reserved_before_it_is_handed_out(short_dir: Path) -> None:
    with running(short_dir, cpu="64MiB", ssd=None) as daemon, daemon.client() as client:
        eventually(lambda: client.tier("cpu")["capacity_bytes"] == 64 * MIB, "all of it is reserved")
        shmem = next(
            int(line.split()[1]) * KIB
            for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
            if line.startswith("RssShmem:")
        )
        assert shmem >= 64 * MIB


# ---- the end


def test_c02_a_daemon_told_to_stop_under_load_drains_and_ends_with_0(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            client.put(ns, keys(300))
            pending = wire.Wait(client.next_id(), ns, keys(1, "never"), 300.0)
            client.send(pending)
            client.ask(wire.Ping(client.next_id()))
            assert daemon.stop() == 0
            with pytest.raises(OSError):  # noqa: PT012
                client.answer(pending.id)
                client.answer(pending.id)
        daemon.start()
        with daemon.client() as client:
            assert client.get(client.open(SPACE), keys(300)) == [Outcome.HIT] * 300


def test_c02_a_second_signal_ends_the_daemon_at_once_and_durable_blocks_survive(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with daemon.client() as client:
            client.put(client.open(SPACE), keys(20), durable=True)
        assert daemon.process is not None
        daemon.signal(signal.SIGTERM)
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(60) in (0, 1)
        daemon.process = None
        daemon.start()
        with daemon.client() as client:
            assert client.get(client.open(SPACE), keys(20)) == [Outcome.HIT] * 20
            client.check(verify=True)


def test_c02_a_socket_that_vanishes_does_not_disturb_those_connected(short_dir: Path) -> None:
    with running(short_dir, cpu="8MiB", ssd=None) as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        daemon.socket.unlink()
        client.put(ns, keys(4))
        assert client.get(ns, keys(4)) == [Outcome.HIT] * 4
        # Somebody else's socket at that path is not removed at the end.
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(daemon.socket))
            client.close()
            assert daemon.stop() == 0
            assert daemon.socket.exists()
