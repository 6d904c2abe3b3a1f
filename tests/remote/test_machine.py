"""Any sequence of writes, reads, drops, deletes and restarts by two daemons agrees with a dict."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvstore.tiers.remote import RemoteScope
from kvstore.wire import Outcome
from kvstored.remote.objects import ObjectsBackend
from tests.remote.places import OTHER_SCOPE, SCOPE, WITHIN_S, Opened, Place, hash_of, place
from tests.remote.servers import Server

LENGTH = 5000
KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)
SCOPES = st.sampled_from([SCOPE, OTHER_SCOPE])
NODES = st.sampled_from([0, 1])
_T = TypeVar("_T")


class RemoteMachine(RuleBasedStateMachine):
    """The model is the set of blocks that are there; what a node has not heard of yet it may miss, for a while."""

    def __init__(self, found: Place) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.place = found
        self.there: set[tuple[RemoteScope, int]] = set()
        self.stacks = [AsyncExitStack(), AsyncExitStack()]
        self.nodes: list[Opened] = []

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    @initialize()
    def start(self) -> None:
        self.nodes = [self.run(self._open(node)) for node in (0, 1)]

    async def _open(self, node: int) -> Opened:
        return await self.stacks[node].enter_async_context(self.place.opened(f"node-{node}"))

    def teardown(self) -> None:
        for stack in self.stacks:
            self.run(stack.aclose())
        self.runner.close()

    @rule(node=NODES, scope=SCOPES, keys=KEYS)
    def write(self, node: int, scope: RemoteScope, keys: list[int]) -> None:
        outcomes = self.run(self.nodes[node].write(keys, scope=scope, length=LENGTH))
        assert set(outcomes) <= {Outcome.DURABLE, Outcome.PRESENT}
        self.there |= {(scope, key) for key in keys}

    @rule(node=NODES, scope=SCOPES, keys=KEYS)
    def read(self, node: int, scope: RemoteScope, keys: list[int]) -> None:
        outcomes = self.run(self.nodes[node].outcomes(keys, scope=scope, length=LENGTH))
        for key, outcome in zip(keys, outcomes, strict=True):
            assert outcome in (Outcome.HIT, Outcome.ABSENT)
            assert outcome is Outcome.ABSENT or (scope, key) in self.there

    @rule(node=NODES, scope=SCOPES)
    def drop(self, node: int, scope: RemoteScope) -> None:
        self.run(self.nodes[node].store.drop(scope, WITHIN_S))
        self.there = {block for block in self.there if block[0] != scope}
        self.run(self._all_have_heard())

    @rule(node=NODES, scope=SCOPES, keys=KEYS)
    def delete(self, node: int, scope: RemoteScope, keys: list[int]) -> None:
        self.run(self.nodes[node].store.delete(scope, [hash_of(key) for key in keys], WITHIN_S))
        self.there -= {(scope, key) for key in keys}
        self.run(self._all_have_heard())
        left = {(each, key) for each in (SCOPE, OTHER_SCOPE) for key in range(12) if self._is_found(node, each, key)}
        if self.place.is_redis:
            assert left == self.there
        self.there = left  # an object's other blocks go with it

    @rule(node=NODES)
    def restart(self, node: int) -> None:
        self.run(self.stacks[node].aclose())
        self.nodes[node] = self.run(self._open(node))
        self.run(self._all_have_heard())
        for scope in (SCOPE, OTHER_SCOPE):
            for key in range(12):
                assert self._is_found(node, scope, key) == ((scope, key) in self.there)

    @invariant()
    def the_index_is_whole(self) -> None:
        for node in self.nodes:
            backend = node.store.backend
            if isinstance(backend, ObjectsBackend):
                backend.index.check_integrity()

    def _is_found(self, node: int, scope: RemoteScope, key: int) -> bool:
        return self.run(self.nodes[node].found([key], scope))[0]

    async def _all_have_heard(self) -> None:
        """Let every node list what is there; Redis is asked each time anyway."""
        for node in self.nodes:
            backend = node.store.backend
            if isinstance(backend, ObjectsBackend):
                await backend.learn()


@pytest.mark.parametrize("any_server", ["file", "redis"], indirect=True, scope="module")
def test_any_sequence_of_calls_agrees_with_a_dict(
    any_server: tuple[str, Server | None], monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    kind, server = any_server

    def machine() -> RemoteMachine:
        directory = Path(tempfile.mkdtemp(dir=short_dir))
        with place(kind, directory, monkeypatch, server) as found:
            return RemoteMachine(found)

    few = settings(max_examples=12, stateful_step_count=15)
    run_state_machine_as_test(machine, settings=few)  # type: ignore[arg-type]
