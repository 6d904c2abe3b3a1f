"""Cases S, on: an ssd directory that somebody else has had a hand in. Damage, links, files of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.errors import BadRecord, KVStoreError
from kvstore.tiers import index_trial
from kvstore.tiers.disk import DiskTier
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, MIB, Daemon, disk_bytes, running, start_and_fail
from tests.rawclient import keys, namespace

SPACE = namespace(4 * KIB)
PAGE = 4096
PRECIOUS = b"somebody's work\n" * 1000


def filled(directory: Path) -> Daemon:
    """Return a place where a daemon has ended, with blocks on its ssd tier."""
    with running(directory, cpu="8MiB", ssd="64MiB") as daemon, daemon.client() as client:
        client.put(client.open(SPACE), keys(300), durable=True)
    return daemon


async def opened_and_closed(directory: Path) -> None:
    tier = await DiskTier.open(directory, 16 * MIB, clock=SystemClock())
    await tier.checkpoint(tier.take_recency())
    await tier.close()


def test_s01_an_index_that_was_cut_off_is_refused_in_words(short_dir: Path) -> None:
    """As a full disk or a broken copy leaves it. LMDB ends its process by SIGBUS when it reads behind the end."""
    daemon = filled(short_dir)
    path = daemon.ssd_dir / "index" / "data.mdb"
    whole = path.read_bytes()
    os.truncate(path, 2 * PAGE)
    status, text = start_and_fail(daemon)
    assert status == 1, text
    assert f"index in {path.parent} is damaged" in text
    assert "start empty" in text
    path.write_bytes(whole)
    with running(short_dir, cpu="8MiB", ssd="64MiB") as again, again.client() as client:
        assert client.get(client.open(SPACE), keys(300)) == [Outcome.HIT] * 300


def test_s01_no_lost_page_of_an_index_ends_the_process_that_opens_it(short_dir: Path) -> None:
    """LMDB's answer to many a damaged page is abort(): a trial meets that first, in a process of its own."""
    daemon = filled(short_dir)
    path = daemon.ssd_dir / "index" / "data.mdb"
    whole = path.read_bytes()
    used = [at for at in range(2 * PAGE, len(whole), PAGE) if any(whole[at : at + PAGE])]
    refused = 0
    for at in used[:16]:
        path.write_bytes(whole[:at] + bytes(PAGE) + whole[at + PAGE :])
        try:
            index_trial.check(path.parent)
        except BadRecord:
            refused += 1
    assert refused, "no page was one that LMDB aborts at: the trial was not tried"
    path.write_bytes(whole)
    index_trial.check(path.parent)
    assert path.read_bytes() == whole, "the trial changes nothing"


def test_e01_an_index_that_claims_to_be_huge_is_not_given_its_room_on_disk(short_dir: Path) -> None:
    """A sparse file of 4 GiB; the limit on sizes of files makes it fail for whoever would fill it in."""
    daemon = filled(short_dir)
    os.truncate(daemon.ssd_dir / "index" / "data.mdb", 4 << 30)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, 64 * MIB))  # noqa: E731
    with running(short_dir, cpu="8MiB", ssd="64MiB", before_exec=limit) as again, again.client() as client:
        assert client.tier("ssd")["state"] == "ready"
        assert set(client.put(client.open(SPACE), keys(20), durable=True)) == {Outcome.DURABLE}
        assert disk_bytes(again.ssd_dir) <= 64 * MIB


@pytest.mark.parametrize(
    "place", ["lock", "recency", "recency.tmp", "segments/probe.tmp", "segments/00000000.seg", "index/data.mdb",
              "index/lock.mdb", "index", "segments"],
)  # fmt: skip
def test_z01_a_link_in_the_ssd_directory_leads_nowhere(short_dir: Path, place: str) -> None:
    ssd, elsewhere, file = short_dir / "ssd", short_dir / "elsewhere", short_dir / "file"
    file.write_bytes(PRECIOUS)
    elsewhere.mkdir()
    link = ssd / place
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere if "/" not in place and place in ("index", "segments") else file)
    with contextlib.suppress(KVStoreError):  # it may refuse to
        asyncio.run(opened_and_closed(ssd))
    assert file.read_bytes() == PRECIOUS
    assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("place", ["recency", "segments/probe.tmp", "segments/00000000.seg", "index/data.mdb"])
def test_z01_a_pipe_in_the_ssd_directory_is_not_waited_for(short_dir: Path, place: str) -> None:
    pipe = short_dir / "ssd" / place
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    with contextlib.suppress(KVStoreError):  # it may refuse to
        asyncio.run(opened_and_closed(short_dir / "ssd"))


def test_s01_files_of_others_in_the_ssd_directory_are_left_alone(short_dir: Path) -> None:
    ssd = short_dir / "ssd"
    ssd.mkdir()
    (ssd / "thesis.tmp").write_bytes(PRECIOUS)
    (ssd / "folder.tmp").mkdir()
    asyncio.run(opened_and_closed(ssd))
    assert (ssd / "thesis.tmp").read_bytes() == PRECIOUS
    assert (ssd / "folder.tmp").is_dir()
