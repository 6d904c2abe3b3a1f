"""Prompts of several windows in a tier too small for all: each loses its tail first, and the oldest go first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvclient import Client
from tests.client.blocks import await_all_memory, empty_buffers, flat_namespace, new_hashes, payloads
from tests.core.scale import examples
from tests.daemon_fixture import Daemon, running

BLOCK_BYTES = 64 << 10
WINDOW_BLOCKS = (2 << 20) // BLOCK_BYTES  # of a tier of this size
LENGTHS = (20, 70, 70, 100, 130)  # up to five windows; 224 fit

steps = st.lists(st.tuples(st.sampled_from(["store", "fetch", "grow"]), st.integers(0, len(LENGTHS) - 1)), max_size=12)


class Prompts:
    """Some prompts that are stored and fetched in any order; knows the order in which they were used."""

    def __init__(self, client: Client) -> None:
        self.blocks = client.namespace(flat_namespace(BLOCK_BYTES))
        self.hashes = [new_hashes(length) for length in LENGTHS]
        self.contents = [payloads(hashes, BLOCK_BYTES) for hashes in self.hashes]
        self.used_blocks = [0] * len(LENGTHS)  # at each one's last use
        self.by_use: list[int] = []  # the one used last comes last

    def store(self, number: int, count: int) -> None:
        result = self.blocks.store(self.hashes[number][:count], self.contents[number][:count])
        assert result.failed == 0, result
        self._used(number, count)

    def fetch(self, number: int) -> None:
        hashes = self.hashes[number]
        there = self.there(number)
        into = empty_buffers(len(hashes), BLOCK_BYTES)
        found = self.blocks.fetch(hashes, into)
        assert found.hits == there
        assert into[:there] == self.contents[number][:there]
        if there:
            self._used(number, there)

    def there(self, number: int) -> int:
        """Return how many blocks of a prompt are there; they must be its head."""
        outcomes = self.blocks.lookup(self.hashes[number], run=False)
        assert outcomes.hits == outcomes.hit_count, f"a tail without its head: {outcomes}"
        return outcomes.hits

    def check(self) -> None:
        """Fail unless the prompts are there as wholes, the one that was used last before all others."""
        room_is_over = False
        for number in reversed(self.by_use):
            there = self.there(number)
            assert not (room_is_over and there), "what was used longer ago outlived it"
            room_is_over = there < self.used_blocks[number]

    def _used(self, number: int, count: int) -> None:
        self.used_blocks[number] = count
        self.by_use = [*(each for each in self.by_use if each != number), number]


@pytest.fixture(scope="module")
def small(private_temp_dir: Path) -> Iterator[Daemon]:
    """Return a daemon with room for 224 blocks."""
    directory = Path(tempfile.mkdtemp(prefix="d-", dir=private_temp_dir))
    with running(directory, cpu="16MiB", ssd=None) as daemon:
        with Client(daemon.socket, strict=True) as client:
            await_all_memory(client)
        yield daemon
    shutil.rmtree(directory)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_pressure_takes_tails_first_and_prompts_by_their_last_use(small: Daemon, steps: list[tuple[str, int]]) -> None:
    with Client(small.socket, strict=True) as client:
        prompts = Prompts(client)
        for verb, number in steps:
            if verb == "store":
                prompts.store(number, LENGTHS[number])
            elif verb == "grow":  # a conversation's next turn: what was there, and some more
                count = min(LENGTHS[number], prompts.there(number) + WINDOW_BLOCKS // 2)
                prompts.store(number, count)
            else:
                prompts.fetch(number)
            prompts.check()


def test_a_prompt_larger_than_the_tier_keeps_its_head(small: Daemon) -> None:
    with Client(small.socket, strict=True) as client:
        blocks, hashes = client.namespace(flat_namespace(BLOCK_BYTES)), new_hashes(600)
        blocks.store(hashes, payloads(hashes, BLOCK_BYTES))
        head = blocks.lookup(hashes).hits
        assert head > 100
        assert blocks.fetch(hashes, empty_buffers(600, BLOCK_BYTES)).hits == head
        blocks.store(hashes, payloads(hashes, BLOCK_BYTES))
        assert blocks.lookup(hashes).hits > 100
