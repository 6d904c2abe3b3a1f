"""A node under test: one real daemon, and real vLLM engines that use it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from bench.vllm_engine import Engine, Host, Output
from demo.vllm_model import TINY, write_adapter, write_vllm_model
from demo.vllm_server import connector
from kvclient import Client
from kvstore import wire
from tests.daemon_fixture import Daemon, eventually

BLOCK_TOKENS = 32
# Keys and values of all layers and heads, in float32.
BLOCK_BYTES = TINY["layers"] * 2 * TINY["kv_heads"] * (TINY["hidden"] // TINY["heads"]) * BLOCK_TOKENS * 4
PAGE = mmap.PAGESIZE
_SETTLE_S = 60.0
ROUNDING = 1e-4


def prompt(seed: int | str, count: int) -> list[int]:
    """Return `count` random tokens: the same for the same seed."""
    drawn = random.Random(f"prompt {seed}")
    return [drawn.randrange(3, TINY["vocab"]) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Models:
    """Two models and two adapters, each pair alike in all but their weights."""

    one: Path
    other: Path
    adapter: Path
    other_adapter: Path


def write_models(directory: Path) -> Models:
    """Write them."""
    models = Models(directory / "one", directory / "other", directory / "adapter", directory / "other-adapter")
    write_vllm_model(models.one, seed=0)
    write_vllm_model(models.other, seed=1)
    write_adapter(models.adapter, seed=2)
    write_adapter(models.other_adapter, seed=3)
    return models


def agree(output: Output, said: Output) -> None:
    """Check that an output is what was said: the same tokens, and logprobs but for rounding.

    A prompt computed in two steps rounds differently from one computed at once.
    """
    assert output.tokens == said.tokens
    assert output.logprobs == pytest.approx(said.logprobs, abs=ROUNDING)
    assert output.finish == "length"


class Baseline:
    """What an engine without a connector says; each prompt is computed once."""

    def __init__(self, host: Host, model: Path, **settings: Any) -> None:
        self._engine = host.engine("baseline", model, **settings)
        self._known: dict[tuple[Any, ...], Output] = {}

    def __call__(self, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> Output:
        key = (tuple(prompt), max_tokens, *options.items())
        if key not in self._known:
            self._engine.call("forget")
            (self._known[key],) = self._engine.generate(prompt, max_tokens=max_tokens, **options)
        return self._known[key]

    def with_own_cache(self, prompt: Sequence[int], max_tokens: int = 16) -> Output:
        """Return what it says where its own cache has all full blocks: the steps of an engine that loads them."""
        self._engine.generate(prompt, max_tokens=1)
        (output,) = self._engine.generate(prompt, max_tokens=max_tokens)
        assert output.cached == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return output

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.kill()


class Node:
    """A place for a daemon, and the engines that use it; as a context manager, with a daemon that runs.

    Engines outlive daemons: `serving` runs one for a while, `engines` alone need none.
    """

    def __init__(self, host: Host, model: Path, directory: Path, *flags: str, **sizes: Any) -> None:
        self.host = host
        self.model = model
        self.daemon = Daemon(directory, *flags, **sizes)
        self._engines: dict[str, Engine] = {}

    def engine(
        self, name: str, role: str = "kv_both", *, settings: dict[str, Any] | None = None, **options: Any
    ) -> Engine:
        """Return the engine of this name, started at the first call; `options` are the connector's."""
        if name not in self._engines:
            given: dict[str, Any] = {"transfer": connector(self.daemon.socket, role, **options), **(settings or {})}
            self._engines[name] = self.host.engine(name, given.pop("model", self.model), **given)
        return self._engines[name]

    # ---- the daemon's state

    def stats(self) -> dict[str, Any]:
        with Client(self.daemon.socket) as client:
            return client.admin(wire.Stats(0))

    def totals(self) -> dict[str, Any]:
        found: dict[str, Any] = self.stats()["totals"]
        return found

    def stored(self, engine: Engine, prompt: Sequence[int], *, new_blocks: int | None = None, **options: Any) -> Output:
        """Have an engine prefill a prompt; returns when the daemon has all of its full blocks in every tier.

        `new_blocks` of them are new to the daemon; by default all.
        """
        before = self.totals()["stored_blocks"]
        (output,) = engine.generate(prompt, max_tokens=1, **options)
        expected = len(prompt) // BLOCK_TOKENS if new_blocks is None else new_blocks
        eventually(
            lambda: self.totals()["stored_blocks"] - before >= expected,
            f"{expected} blocks of the prompt are stored",
            within_s=_SETTLE_S,
        )
        self.settle()
        return output

    def settle(self) -> None:
        """Return when all that is in memory is durable."""

        def durable() -> bool:
            tiers = self.stats()["tiers"]
            return "ssd" not in tiers or bool(
                tiers["ssd"]["write_queue_bytes"] == 0 and tiers["ssd"]["durable_blocks"] >= tiers["cpu"]["blocks"]
            )

        eventually(durable, "what is in memory is durable", within_s=_SETTLE_S)

    def await_stores(self, engine: Engine, seed: str) -> None:
        """Return when what an engine computes gets to the daemon: it may have been without one for a while."""
        tried = 0

        def is_stored() -> bool:
            nonlocal tried
            tried += 1
            before = self.totals()["stored_blocks"]
            engine.generate(prompt(f"{seed} {tried}", BLOCK_TOKENS + 1), max_tokens=2)
            return bool(self.totals()["stored_blocks"] > before)

        eventually(is_stored, f"what {engine.name} computes is stored", within_s=_SETTLE_S, every_s=0.1)

    def drop_all(self) -> None:
        with Client(self.daemon.socket) as client:
            client.admin(wire.DropNamespace(0, None))

    def leave_memory(self) -> None:
        """Have only the ssd hold what was stored."""
        self.settle()
        with Client(self.daemon.socket) as client:
            client.admin(wire.Evict(0, "cpu"))
        eventually(lambda: self.stats()["tiers"]["cpu"]["blocks"] == 0, "memory is empty", within_s=_SETTLE_S)

    # ---- what goes wrong

    @contextlib.contextmanager
    def stopped_daemon(self) -> Generator[None]:
        """Have the daemon neither answer nor end."""
        self.daemon.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.daemon.signal(signal.SIGCONT)

    def corrupt_memory(self) -> None:
        """Flip a bit of one block in the daemon's memory."""
        flipped = 0
        for fd in Path(f"/proc/{self.daemon.pid}/fd").iterdir():
            if "memfd:" not in os.readlink(fd):
                continue
            with fd.open("r+b") as pool, mmap.mmap(pool.fileno(), 0) as view:
                for start in range(0, len(view), BLOCK_BYTES):
                    if any(view[start : start + PAGE]):
                        view[start + PAGE - 1] ^= 0x40
                        flipped += 1
                        break
            if flipped:
                return
        raise AssertionError("no block was found in the daemon's memory")

    def corrupt_ssd(self) -> None:
        """Flip a bit of one block on ssd."""
        for segment in sorted((self.daemon.ssd_dir / "segments").glob("*.seg")):
            with segment.open("r+b") as file:
                first = file.read(PAGE)
                if any(first):
                    file.seek(PAGE - 1)
                    file.write(bytes([first[-1] ^ 0x40]))
                    os.fsync(file.fileno())
                    return
        raise AssertionError("no block was found on ssd")

    # ---- who runs when

    @contextlib.contextmanager
    def serving(self) -> Generator[Node]:
        """Run a daemon for the block; the test may have ended it before."""
        self.daemon.start()
        try:
            yield self
            if self.daemon.is_running:
                status = self.daemon.stop()
                assert status == 0, f"the daemon ended with status {status}:\n{self.daemon.log_text()[-8000:]}"
            assert "Traceback" not in self.daemon.log_text(), self.daemon.log_text()[-8000:]
        finally:
            self.daemon.kill()

    @contextlib.contextmanager
    def engines(self) -> Generator[Node]:
        """End all engines at the end of the block: in order, if nothing went wrong."""
        try:
            yield self
            for engine in self._engines.values():
                engine.stop()
        finally:
            for engine in self._engines.values():
                engine.kill()

    def __enter__(self) -> Node:
        self._both = contextlib.ExitStack()
        self._both.enter_context(self.serving())
        return self._both.enter_context(self.engines())

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._both.__exit__(kind, raised, trace)
