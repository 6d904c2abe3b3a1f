"""Cases W: never a wrong token. W01 failed puts, W05 namespaces that differ in one field, W10 keys from any process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import wire
from kvstore.block import Component, Namespace, Slice
from kvstore.errors import BadKey, BadNamespace
from kvstore.prefix import chain
from kvstore.wire import Outcome
from tests.daemon_fixture import KIB, eventually, running
from tests.product import ROOT
from tests.puppet import puppet
from tests.rawclient import RawClient, keys, namespace, payload

SPACE = namespace(64 * KIB)


def exact_or_miss(client: RawClient, ns: int, hashes: list[bytes]) -> list[bool]:
    """Return which blocks hit; the client itself fails on a wrong byte."""
    found = client.get(ns, hashes)
    assert set(found) <= {Outcome.HIT, Outcome.ABSENT}, found
    return [outcome == Outcome.HIT for outcome in found]


# ---- W01: a failed put leaves nothing


def test_w01_a_block_of_a_batch_that_was_given_up_is_a_miss_and_the_others_are_exact(short_dir: Path) -> None:
    hashes = keys(8)
    with running(short_dir) as daemon:
        with daemon.client() as client:
            ns = client.open(SPACE)
            reserved = client.reserve(ns, hashes)
            for at in (0, 2, 3, 4, 5, 6, 7):
                client.write(reserved.offsets[at], payload(SPACE.digest, hashes[at], SPACE.block_bytes))
            client.write(reserved.offsets[1], b"\xff" * 100)
            assert exact_or_miss(client, ns, hashes) == [False] * 8, "visible before its seal"
            client.ask(wire.Forfeit(client.next_id(), reserved.ticket, [1]))
            sealed = client.ask(wire.Seal(client.next_id(), reserved.ticket, durable=True), wire.Sealed)
            assert list(sealed.outcomes) == [Outcome.DURABLE] * 7
            assert exact_or_miss(client, ns, hashes) == [True, False] + [True] * 6
            client.check(verify=True)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            assert exact_or_miss(client, client.open(SPACE), hashes) == [True, False] + [True] * 6
            client.check(verify=True)


@pytest.mark.parametrize("how", ["killed", "hung up", "said goodbye"])
def test_w01_a_batch_whose_writer_left_half_way_leaves_nothing(short_dir: Path, how: str) -> None:
    with running(short_dir) as daemon, puppet(daemon.socket) as writer, daemon.client() as client:
        ns = client.open(SPACE)
        writer.call("open", 64 * KIB)
        writer.call("reserve", 8, "half")
        writer.call("write", 0.5)
        if how == "killed":
            writer.kill()
        elif how == "hung up":
            writer.call("hang_up")
        else:
            writer.call("say_goodbye")
        eventually(lambda: client.tier("cpu")["reserved_bytes"] == 0, "the reservation ends with its session")
        assert exact_or_miss(client, ns, keys(8, "half")) == [False] * 8
        client.check()


def test_w01_blocks_that_the_disk_refused_are_exact_or_missing_after_a_restart(short_dir: Path) -> None:
    """Where the ssd tier can't make a file for the blocks, they live in memory and are lost with it: never half."""
    hashes = keys(8)
    with running(short_dir) as daemon:
        # A directory where the first segment's file would be.
        for number in range(8):
            (daemon.ssd_dir / "segments" / f"{number:08d}.seg" / "in-the-way").mkdir(parents=True)
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert set(client.put(ns, hashes, durable=True)) == {Outcome.NOT_DURABLE}
            assert exact_or_miss(client, ns, hashes) == [True] * 8
            assert client.tier("ssd")["state"] == "degraded"
            client.check()
        daemon.kill()
        for number in range(8):
            (daemon.ssd_dir / "segments" / f"{number:08d}.seg" / "in-the-way").rmdir()
            (daemon.ssd_dir / "segments" / f"{number:08d}.seg").rmdir()
        daemon.start()
        with daemon.client() as client:
            ns = client.open(SPACE)
            assert exact_or_miss(client, ns, hashes) == [False] * 8
            assert set(client.put(ns, hashes, durable=True)) == {Outcome.DURABLE}
            client.check(verify=True)


def test_w01_a_seal_of_what_was_not_granted_is_refused(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon, daemon.client() as writer, daemon.client() as other:
        ns = writer.open(SPACE)
        other.open(SPACE)
        reserved = writer.reserve(ns, keys(2))
        busy = other.reserve(ns, keys(3))
        assert list(busy.outcomes) == [Outcome.BUSY, Outcome.BUSY, Outcome.GRANTED]
        request = wire.Seal(other.next_id(), busy.ticket, [0, 1, 2, 99])
        sealed = other.ask(request, wire.Sealed)
        assert list(sealed.outcomes) == [Outcome.REFUSED, Outcome.REFUSED, Outcome.SEALED, Outcome.REFUSED]
        assert other.lookup(ns, keys(3), run=False).outcomes == bytes([Outcome.ABSENT, Outcome.ABSENT, Outcome.HIT])
        writer.ask(wire.Forfeit(writer.next_id(), reserved.ticket), wire.Done)
        writer.check()


# ---- W05: everything that changes a block's bytes is part of its name


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "another"},
    "revision": {"revision": "another"},
    "dtype": {"dtype": "fp8"},
    "adapter": {"adapter": "lora:1"},
    "salt": {"salt": b"user"},
    "component's dtype": {
        "components": (Component("kv", "float16", ("layer", "kv", "token", "head", "dim"), (2, 2, 16, 1, 512)),)
    },
    "component's name": {
        "components": (Component("k", "bfloat16", ("layer", "kv", "token", "head", "dim"), (2, 2, 16, 1, 512)),)
    },
    "order of axes": {
        "components": (Component("kv", "bfloat16", ("kv", "layer", "token", "head", "dim"), (2, 2, 16, 1, 512)),)
    },
    "heads of the model": {
        "components": (Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (2, 2, 16, 2, 512)),)
    },
    "tensor parallel rank": {
        "components": (Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (2, 2, 16, 2, 512)),),
        "slice": Slice.of_rank(layers=2, heads=2, tp_size=2, tp_rank=1),
    },
    "pipeline parallel rank": {
        "components": (Component("kv", "bfloat16", ("layer", "kv", "token", "head", "dim"), (4, 2, 16, 1, 512)),),
        "slice": Slice.of_rank(layers=4, heads=1, pp_size=2, pp_rank=1),
    },
}


def test_w05_a_namespace_that_differs_in_any_field_misses(short_dir: Path) -> None:
    hashes = keys(4)
    space = namespace(128 * KIB)
    with running(short_dir, ssd=None) as daemon, daemon.client() as client:
        client.put(client.open(space), hashes)
        seen = {space.digest}
        for what, change in CHANGES.items():
            other = dataclasses.replace(space, **change)
            assert other.digest not in seen, what
            seen.add(other.digest)
            assert client.lookup(client.open(other), hashes).hits == 0, what
            assert client.get(client.open(other), hashes) == [Outcome.ABSENT] * 4, what
            # What is stored there under the same hashes is another block.
            client.put(client.open(other), hashes)
        assert client.get(client.open(space), hashes) == [Outcome.HIT] * 4
        client.check(verify=True)


def test_w05_missing_unknown_and_repeated_fields_are_refused(short_dir: Path) -> None:
    from kvstore import block

    space = namespace(64 * KIB)
    fields = space._fields()  # pyright: ignore[reportPrivateUsage]
    domain = block._DIGEST_DOMAIN  # pyright: ignore[reportPrivateUsage]
    encode = block._encode  # pyright: ignore[reportPrivateUsage]
    assert domain + encode(fields) == space.encode()
    with running(short_dir, ssd=None) as daemon, daemon.client() as client:
        changed = [[pair for pair in fields if pair[0] != name] for name, _ in fields]
        changed += [[*fields, ("kv_scale", "1.0")], [*fields, fields[0]], fields[::-1], []]
        for pairs in changed:
            with pytest.raises(BadNamespace):
                client.ask(wire.Open(client.next_id(), domain + encode(pairs)))
        with pytest.raises(BadNamespace):
            client.ask(wire.Open(client.next_id(), encode(fields)))


def test_w05_a_number_of_a_namespace_means_nothing_on_another_connection(short_dir: Path) -> None:
    with running(short_dir, ssd=None) as daemon, daemon.client() as client, daemon.client() as other:
        ns = client.open(SPACE)
        client.put(ns, keys(1))
        with pytest.raises(BadNamespace):
            other.lookup(ns, keys(1))


# ---- W10: keys are the same in every process


TOKENS_SCRIPT = """
import sys
from kvstore.prefix import chain
from tests.rawclient import namespace
print(*(h.hex() for h in chain(namespace(65536).digest, range(64), 16)))
"""
# SHA-256 chained over the digest of `namespace(64 KiB)` and the tokens 0..63 in blocks of 16.
GOLDEN_DIGEST = "2cc4b29ccbe424e70c72172af0d4178ab3986f21f744e7d31bb7976267b62d24"
GOLDEN = (
    "f397eca2128b7381bd8c72f35bccc4873a4cafc573fe0b6a77fb239ff7113495",
    "0d184753ec82c24a605581ea36fdf5163b007e797ffb8a4f4007f8cd7ea4c9b4",
)


def chained(seed: str | None) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environ["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", TOKENS_SCRIPT]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_w10_keys_of_one_prompt_are_those_of_the_golden_vector_in_every_process() -> None:
    assert namespace(64 * KIB).digest.hex() == GOLDEN_DIGEST
    seen = [chained("0"), chained("1"), chained(None)]
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0][0], seen[0][3]) == GOLDEN


def test_w10_blocks_stored_by_one_process_hit_in_another_and_after_a_restart(short_dir: Path) -> None:
    with running(short_dir) as daemon:
        with puppet(daemon.socket) as writer:
            writer.call("open", 64 * KIB)
            assert set(writer.call("put", 8, "shared")) == {Outcome.SEALED}
        with puppet(daemon.socket) as reader:
            reader.call("open", 64 * KIB)
            assert reader.call("get", 8, "shared") == [Outcome.HIT] * 8
        daemon.stop()
        daemon.start()
        with puppet(daemon.socket) as reader:
            reader.call("open", 64 * KIB)
            assert reader.call("get", 8, "shared") == [Outcome.HIT] * 8


def test_w10_the_same_tokens_in_any_container_have_the_same_keys() -> None:
    """What an engine has at hand: lists, arrays of any width, order and stride. Packed bytes would be a guess."""
    root, tokens = namespace(64 * KIB).digest, list(range(64))
    expected = chain(root, tokens, 16)
    containers: list[Any] = [
        tuple(tokens), iter(tokens), array("Q", tokens), array("B", tokens), memoryview(array("H", tokens)),
        np.arange(64), np.arange(64, dtype=np.int32), np.arange(64, dtype=">i4"), np.arange(128)[::2] // 2,
        np.arange(64, dtype=np.uint32).astype(">u2"),
    ]  # fmt: skip
    for container in containers:
        assert chain(root, container, 16) == expected, type(container)
    wrong: list[Any] = [bytes(tokens), bytearray(tokens), [1.0] * 16, [-1] * 16, [1 << 32] * 16, "a" * 16, [None] * 16]
    for container in wrong:
        with pytest.raises(BadKey):
            chain(root, container, 16)


def test_w10_a_namespace_says_the_same_to_every_version_of_python() -> None:
    """The encoding itself, byte by byte: what it is made of has no order but its own."""
    tiny = Namespace(
        "m", "r", "bf16", (Component("k", "int8", ("token",), (1,)),), 1, Slice((0, 1), (0, 1)), salt=b"\x01"
    )
    start = b"kvstored/namespace/1" b"l\x08\0\0\0" b"l\x02\0\0\0" b"s\x05\0\0\0model" b"s\x01\0\0\0m"
    assert tiny.encode().startswith(start)
    assert Namespace.decode(tiny.encode()) == tiny
