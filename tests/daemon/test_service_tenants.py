"""Tenants over the raw socket: who one is comes from the kernel, and nobody sees or spends what is another's.

A test can be only one user, but as root it can connect as a member of any group.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, start_and_fail
from tests.rawclient import RawClient, keys, namespace

SPACE = namespace(64 * KIB)
GIDS = {"red": 54321, "blue": 54322}
TENANTS = ("--tenant", "red=gid:54321", "--tenant", "blue=gid:54322", "--admin", "gid:54322")
STRICT = ("--mode", "strict", "--arena-size", "4MiB")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as a member of any group")


def connect(daemon: Daemon, tenant: str) -> RawClient:
    own = os.getegid()
    os.setegid(GIDS[tenant])
    try:
        return daemon.client()
    finally:
        os.setegid(own)


def started(daemon: Daemon) -> Daemon:
    """Start a daemon that does not know the user of these tests themselves."""
    daemon.start_for(lambda: connect(daemon, "red"))
    return daemon


@as_root
def test_tenants_with_the_same_namespace_share_nothing(short_dir: Path) -> None:
    daemon = started(Daemon(short_dir, *TENANTS, *STRICT, cpu="16MiB"))
    try:
        with connect(daemon, "red") as red, connect(daemon, "blue") as blue:
            assert (red.welcome.tenant, blue.welcome.tenant) == ("red", "blue")
            assert (red.welcome.role, blue.welcome.role) == ("engine", "admin")
            ours, theirs = red.open(SPACE), blue.open(SPACE)
            assert set(red.put(ours, keys(10), durable=True)) == {Outcome.DURABLE}
            assert blue.lookup(theirs, keys(10)).hits == 0
            assert blue.get(theirs, keys(10)) == [Outcome.ABSENT] * 10
            assert blue.ask(wire.GroupLookup(blue.next_id(), theirs, keys(10)), wire.Group).namespaces == []
            assert blue.ask(wire.Drop(blue.next_id(), theirs, keys(10)), wire.Found).hits == 0
            assert set(blue.put(theirs, keys(5))) == {Outcome.SEALED}, "another block under the same key"
            assert red.get(ours, keys(10)) == [Outcome.HIT] * 10
            # A number that the daemon gave to one means nothing for the other.
            with pytest.raises(Exception, match="not opened"):
                blue.lookup(ours, keys(1))
            told = {t["tenant"]: t["used_bytes"]["cpu"] for t in blue.stats()["tenants"]}
            assert told["red"] == 10 * SPACE.block_bytes
            assert told["blue"] == 5 * SPACE.block_bytes
            assert red.report(wire.Keys(red.next_id(), SPACE.digest))["total"] == 10
            blue.check(verify=True)
        daemon.kill()
        started(daemon)
        with connect(daemon, "red") as red, connect(daemon, "blue") as blue:
            assert red.get(red.open(SPACE), keys(10)) == [Outcome.HIT] * 10, "still its own after a restart"
            assert blue.get(blue.open(SPACE), keys(10))[5:] == [Outcome.ABSENT] * 5
        assert daemon.stop() == 0
    finally:
        daemon.kill()


@as_root
def test_one_tenants_quota_is_not_at_anothers_cost(short_dir: Path) -> None:
    quota = ("--quota", "red:cpu=2MiB", "--quota", "red:ssd=4MiB")
    daemon = started(Daemon(short_dir, *TENANTS, *STRICT, *quota, cpu="16MiB"))
    try:
        with connect(daemon, "red") as red, connect(daemon, "blue") as blue:
            ours, theirs = red.open(SPACE), blue.open(SPACE)
            blue.put(theirs, keys(60, "blue"), durable=True)
            for turn in range(10):
                red.put(ours, keys(30, f"red {turn}"), batch=30, durable=True)
                told = {t["tenant"]: t["used_bytes"] for t in blue.stats()["tenants"]}
                assert told["red"]["cpu"] <= 2 * MIB
                assert told["red"]["ssd"] <= 4 * MIB
            assert blue.get(theirs, keys(60, "blue")) == [Outcome.HIT] * 60
            assert set(blue.tiers_of(theirs, keys(60, "blue"))) == {"cpu,ssd"}, "none of them had to go"
            blue.check(verify=True)
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def test_several_tenants_do_not_share_a_writable_pool_unless_told_to(short_dir: Path) -> None:
    status, text = start_and_fail(Daemon(short_dir, *TENANTS, cpu="8MiB", ssd=None))
    assert status == 2
    assert "strict" in text
