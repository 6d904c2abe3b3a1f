"""A bit that flips in shared memory: a miss for the reader, and gone for everybody else."""

from __future__ import annotations

from pathlib import Path

from kvclient import Client, Outcome
from kvstore import wire
from tests.client.blocks import BLOCK_BYTES, empty_buffers, flat_namespace, new_hashes, payloads
from tests.daemon_fixture import eventually, running
from tests.rawclient import RawClient


def _flip(path: Path, wanted: bytes) -> None:
    """Flip a bit of the block that begins with `wanted`, through a mapping of the pool like any client's."""
    with RawClient(path) as other:
        assert other.pool is not None
        at = other.pool.find(wanted)
        assert at >= 0
        other.pool[at + 100] ^= 1


def test_a_flipped_bit_in_memory_is_a_miss_and_the_daemon_drops_the_block(short_dir: Path) -> None:
    flags = ("--verify-reads", "--checksum-at-seal", "always")
    with (
        running(short_dir, *flags, cpu="64MiB", ssd=None) as daemon,
        Client(daemon.socket, strict=True) as client,
    ):
        blocks, hashes = client.namespace(flat_namespace(BLOCK_BYTES)), new_hashes(4)
        expected = payloads(hashes, BLOCK_BYTES)
        assert blocks.store(hashes, expected).stored == 4
        _flip(daemon.socket, expected[2][:64])
        into = empty_buffers(4, BLOCK_BYTES)
        found = blocks.fetch(hashes, into, run=False)
        assert list(found.outcomes) == [Outcome.HIT, Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]
        assert [into[at] for at in (0, 1, 3)] == [expected[at] for at in (0, 1, 3)]
        eventually(lambda: blocks.lookup(hashes, run=False).outcomes[2] == Outcome.ABSENT)
        assert client.admin(wire.Stats(0))["tiers"]["cpu"]["checksum_failures"] == 1
        assert client.admin(wire.Check(0, verify=True))["ok"]
        assert blocks.store([hashes[2]], [expected[2]]).stored == 1
