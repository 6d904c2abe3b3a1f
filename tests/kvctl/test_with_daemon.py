"""kvctl and the real daemon: what an operator does in a day."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kvclient import Client
from kvctl.cli import main
from kvstore import prefix
from kvstore.block import BlockHash, Component, Namespace, Slice
from tests.daemon_fixture import Daemon, eventually, running

TOKENS = list(range(16 * 8 + 5))
Kvctl = Callable[..., tuple[int, Any]]


def namespace(model: str, heads: tuple[int, int] = (0, 1)) -> Namespace:
    kv = Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (4, 2, 16, 2, 64))
    return Namespace(
        model=model, revision="r1", dtype="bfloat16", components=(kv,), block_tokens=16, slice=Slice((0, 4), heads)
    )


FIRST, SECOND, OTHER = namespace("org/one"), namespace("org/one", (1, 2)), namespace("org/two")


@pytest.fixture(scope="module")
def daemon() -> Generator[Daemon]:
    # A socket's path is short, and pytest's directories are not.
    with tempfile.TemporaryDirectory(prefix="kc") as directory, running(Path(directory)) as daemon:
        yield daemon


@pytest.fixture
def kvctl(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    def run(*words: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = main(["--json", "--socket", str(daemon.socket), *words])
        out = capsys.readouterr().out
        return int(code), json.loads(out) if out else None

    return run


def filled(daemon: Daemon, space: Namespace) -> list[BlockHash]:
    """Store the blocks of TOKENS, durably, and return their hashes."""
    hashes = prefix.chain(space.digest, TOKENS, 16)
    blocks = [bytes([at + 1]) * space.block_bytes for at in range(len(hashes))]
    with Client(socket=daemon.socket, strict=True) as client:
        client.namespace(space).store(hashes, [bytearray(block) for block in blocks], durable=True)
    return hashes


def fetched(daemon: Daemon, space: Namespace, hashes: list[BlockHash]) -> int:
    into = [bytearray(space.block_bytes) for _ in hashes]
    with Client(socket=daemon.socket, strict=True) as client:
        hits = client.namespace(space).fetch(hashes, into).hits
    assert [block[0] for block in into[:hits]] == list(range(1, hits + 1))
    return hits


def test_the_daemon_is_looked_at(daemon: Daemon, kvctl: Kvctl) -> None:
    hashes = filled(daemon, FIRST)
    assert fetched(daemon, FIRST, hashes) == len(hashes)
    assert kvctl("ping", "--count", "2")[0] == 0
    assert kvctl("status")[1]["tiers"] == ["cpu", "ssd"]
    code, stats = kvctl("stats")
    assert code == 0
    assert stats["totals"]["hit_blocks"]["cpu"] >= len(hashes)
    assert set(kvctl("tiers")[1]["tiers"]) == {"cpu", "ssd"}


def test_stats_of_the_daemon_are_shown_whole(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    filled(daemon, FIRST)
    for verb in ("status", "tiers", "stats", "namespaces"):
        assert main(["--socket", str(daemon.socket), verb]) == 0
    assert "org/one@r1" in capsys.readouterr().out


def test_slices_of_a_model_are_told_apart(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    filled(daemon, FIRST)
    filled(daemon, SECOND)
    assert main(["--socket", str(daemon.socket), "keys", "org/one"]) == 2
    err = capsys.readouterr().err
    assert "heads 0-0" in err
    assert "heads 1-1" in err
    assert SECOND.digest.hex()[:12] in err


def test_tokens_find_the_blocks_that_a_client_stored(daemon: Daemon, kvctl: Kvctl, tmp_path: Path) -> None:
    hashes = filled(daemon, OTHER)
    file = tmp_path / "tokens"
    file.write_text(json.dumps(TOKENS))
    code, body = kvctl("lookup", "org/two", "--tokens", str(file))
    assert (code, body["leading_blocks"]) == (0, len(hashes))
    assert [block["hash"] for block in body["blocks"]] == [name.hex() for name in hashes]
    assert len(kvctl("keys", "org/two", "--limit", "5", "--offset", "5")[1]["blocks"]) == 3


def test_a_look_counts_no_query(daemon: Daemon, kvctl: Kvctl) -> None:
    name = filled(daemon, OTHER)[0].hex()
    before = kvctl("stats")[1]["totals"]["queried_blocks"]
    kvctl("lookup", "org/two", name)
    assert kvctl("stats")[1]["totals"]["queried_blocks"] == before


def test_pins_and_lives_are_set(daemon: Daemon, kvctl: Kvctl) -> None:
    name = filled(daemon, OTHER)[0].hex()
    assert kvctl("pin", "org/two", name, "00" * 32, "--for", "2h")[1]["outcomes"] == {name: "done", "00" * 32: "absent"}
    assert kvctl("lookup", "org/two", name)[1]["blocks"][0]["pinned"] is True
    assert kvctl("unpin", "org/two", name)[0] == 0
    assert kvctl("ttl", "org/two", name, "--to", "30m")[0] == 0
    block = kvctl("lookup", "org/two", name)[1]["blocks"][0]
    assert block["pinned"] is False
    assert 1700 < block["ttl_s"] <= 1800
    assert kvctl("ttl", "org/two", "--to", "never")[0] == 0


def test_dropped_blocks_are_gone_from_every_tier(daemon: Daemon, kvctl: Kvctl) -> None:
    hashes = filled(daemon, OTHER)
    assert kvctl("drop", "org/two", hashes[2].hex())[0] == 2
    assert fetched(daemon, OTHER, hashes) == len(hashes)
    assert kvctl("drop", "org/two", hashes[2].hex(), "--yes")[0] == 0
    assert fetched(daemon, OTHER, hashes) == 2


def test_a_namespace_is_dumped_dropped_and_loaded(daemon: Daemon, kvctl: Kvctl, tmp_path: Path) -> None:
    hashes = filled(daemon, OTHER)
    file = str(tmp_path / "dump")
    assert kvctl("dump", "org/two", file)[1]["blocks"] == len(hashes)
    assert kvctl("dump", "org/two", file)[0] == 2
    assert kvctl("drop", "--namespace", "org/two", "--yes")[1] == {"namespaces": 1, "blocks": len(hashes)}
    assert fetched(daemon, OTHER, hashes) == 0
    assert kvctl("load", file)[1]["blocks"] == len(hashes)
    assert fetched(daemon, OTHER, hashes) == len(hashes)


def test_what_memory_evicts_is_read_from_ssd(daemon: Daemon, kvctl: Kvctl) -> None:
    hashes = filled(daemon, OTHER)
    names = [name.hex() for name in hashes]

    def only_ssd_has_them() -> bool:
        # A block that is being copied to ssd or was just released may be held a moment longer.
        assert kvctl("evict", "--tier", "cpu", "--yes")[0] == 0
        return all(block["tiers"] == ["ssd"] for block in kvctl("lookup", "org/two", *names)[1]["blocks"])

    eventually(only_ssd_has_them)
    assert fetched(daemon, OTHER, hashes) == len(hashes)


def test_the_store_is_sound(daemon: Daemon, kvctl: Kvctl) -> None:
    filled(daemon, FIRST)
    assert kvctl("drain")[1]["remaining_blocks"] == 0
    assert kvctl("gc")[0] == 0
    code, body = kvctl("check", "--verify")
    assert (code, body["ok"], body["blocks_corrupt"]) == (0, True, 0)


def test_everything_is_dropped_at_once(daemon: Daemon, kvctl: Kvctl) -> None:
    hashes = filled(daemon, FIRST)
    filled(daemon, OTHER)
    assert kvctl("drop", "--all", "--yes")[0] == 0
    assert fetched(daemon, FIRST, hashes) == 0
    # The space comes back in the background, or now.
    assert kvctl("gc")[0] == 0
    assert {sum(one["blocks"].values()) for one in kvctl("namespaces")[1]["namespaces"]} == {0}
