"""The ssd tier's file system is full, limited, or read as full: blocks stay in memory, and all heals by itself."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, eventually, running
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)
HEAL_S = 80.0  # the tier tries again at intervals that grow to half a minute


@contextlib.contextmanager
def small_file_system(where: Path, size_bytes: int) -> Generator[Path, None, None]:
    """Mount a tmpfs of this size, or skip the test."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kvtest", str(where)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)
        where.rmdir()


def fill(path: Path) -> None:
    """Take all that is left of a file system."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * KIB))


def still_serves(client: RawClient, ns: int, label: str) -> None:
    """Memory goes on whatever the ssd tier does."""
    assert set(client.put(ns, keys(20, label))) == {Outcome.SEALED}
    assert client.get(ns, keys(20, label)) == [Outcome.HIT] * 20
    client.check()


def test_a_full_file_system_degrades_the_ssd_tier_and_room_heals_it(short_dir: Path) -> None:
    with (
        small_file_system(short_dir / "disk", 48 * MIB) as disk,
        running(short_dir, cpu="16MiB", ssd="40MiB", ssd_dir=disk / "ssd") as daemon,
        daemon.client() as client,
    ):
        ns = client.open(SPACE)
        client.put(ns, keys(100, "before"), durable=True)
        filler = disk / "filler"
        fill(filler)
        outcomes = client.put(ns, keys(400, "full"), durable=True)
        assert Outcome.NOT_DURABLE in outcomes
        told = client.tier("ssd")
        assert told["state"] == "degraded"
        assert told["state_text"]
        assert "No space left" in told["state_text"]
        assert client.get(ns, keys(100, "before")).count(Outcome.HIT) == 100, "what was durable can be read"
        still_serves(client, ns, "while full")
        filler.unlink()
        eventually(
            lambda: set(client.put(ns, keys(20, str(os.urandom(4))), durable=True)) == {Outcome.DURABLE},
            "it writes again",
            within_s=HEAL_S,
            every_s=0.1,
        )
        eventually(lambda: client.tier("ssd")["state"] == "ready", "and says so", within_s=HEAL_S)
        log = daemon.log_text()
        assert log.count("ssd tier degraded") <= 5, "told, not repeated for every block"
        assert "ssd tier recovered" in log
        client.check(verify=True)
        daemon.kill()
        daemon.start()
        with daemon.client() as again:
            assert again.get(again.open(SPACE), keys(100, "before")).count(Outcome.HIT) > 0
            again.check(verify=True)


def test_a_limit_on_file_sizes_set_later_leaves_memory_alone(short_dir: Path) -> None:
    """What raises a signal by default must be an error of the ssd tier, and no more than that."""
    with running(short_dir, cpu="16MiB", ssd="256MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        assert set(client.put(ns, keys(20), durable=True)) == {Outcome.DURABLE}
        unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (64 * KIB, unlimited[1]))
        outcomes = client.put(ns, keys(100, "limited"), durable=True)
        assert Outcome.NOT_DURABLE in outcomes
        assert client.tier("ssd")["state"] == "degraded"
        still_serves(client, ns, "while limited")
        client.report(wire.Evict(client.next_id(), "ssd"))
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
        eventually(
            lambda: set(client.put(ns, keys(20, str(os.urandom(4))), durable=True)) == {Outcome.DURABLE},
            "it writes again",
            within_s=HEAL_S,
            every_s=0.1,
        )
        client.check(verify=True)


def test_an_index_that_can_not_be_written_fails_no_request_but_durable_ones(short_dir: Path) -> None:
    """The index's file is limited after the start; deletes and puts fail there, and the daemon goes on."""
    with (
        small_file_system(short_dir / "disk", 24 * MIB) as disk,
        running(short_dir, cpu="4MiB", ssd="20MiB", ssd_dir=disk / "ssd") as daemon,
        daemon.client() as client,
    ):
        space = namespace(4 * KIB)
        ns = client.open(space)
        client.put(ns, keys(200, "before"), durable=True)
        filler = disk / "filler"
        fill(filler)
        for turn in range(10):
            client.put(ns, keys(300, f"full {turn}"), batch=100)
            client.ask(wire.Drop(client.next_id(), ns, keys(200, "before")[turn * 10 : turn * 10 + 10]))
            client.report(wire.Evict(client.next_id(), "cpu", 100 * KIB))
        assert client.get(ns, keys(200, "before")[100:]).count(Outcome.HIT) >= 90
        filler.unlink()
        eventually(
            lambda: set(client.put(ns, keys(20, str(os.urandom(4))), durable=True)) == {Outcome.DURABLE},
            "it writes again",
            within_s=HEAL_S,
            every_s=0.1,
        )
        eventually(lambda: client.report(wire.Check(client.next_id()))["ok"], "all is whole", within_s=HEAL_S)
        client.check(verify=True)


def test_a_directory_that_vanishes_under_the_daemon_leaves_memory_alone(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB", ssd="32MiB") as daemon, daemon.client() as client:
        ns = client.open(SPACE)
        client.put(ns, keys(20), durable=True)
        daemon.ssd_dir.rename(short_dir / "elsewhere")
        assert set(client.put(ns, keys(20, "gone"))) == {Outcome.SEALED}
        assert client.get(ns, keys(20, "gone")) == [Outcome.HIT] * 20
        assert not client.report(wire.Check(client.next_id()))["ok"], "it is told"
        for turn in range(5):
            client.put(ns, keys(60, f"gone {turn}"))
        client.report(wire.Evict(client.next_id(), "cpu"))
        assert set(client.get(ns, keys(20))) <= {Outcome.HIT, Outcome.CORRUPT, Outcome.UNAVAILABLE, Outcome.ABSENT}
        assert daemon.is_running
        (short_dir / "elsewhere").rename(daemon.ssd_dir)
        eventually(
            lambda: set(client.put(ns, keys(20, str(os.urandom(4))), durable=True)) == {Outcome.DURABLE},
            "it writes again",
            within_s=HEAL_S,
            every_s=0.1,
        )
