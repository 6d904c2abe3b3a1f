"""How long does D take to its first token: without a cache, with vLLM's ExampleConnector, and with kvstored?

    python -m bench.vllm [--json] [--tokens N,N] [--rounds N] [--load async|sync] [--directory DIR]

Real vLLM engines on the CPU with a model of 100 M parameters: one without a connector, a P and a D with kvstored, and
two with ExampleConnector, a shared folder of safetensors that comes with vLLM. Each P has prefilled the prompts; then
rounds of D's prefills follow each other: computed, read from the folder (from the page cache, and from disk once the
files were dropped from it), loaded from kvstored's memory, loaded from its ssd (read with O_DIRECT). Each engine's own
prefix cache is emptied before. All must say the same first token.

Overhead: prompts that nobody stored, on a D (a miss) and on a P (a store). The connector's hooks are timed inside the
engine; a row tells their sum as a share of the time to first token, and the time beside that of an engine without a
connector.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Daemon, finish, hardware, median, running_daemon, tell
from bench.vllm_engine import Engine, Host
from demo import vllm_environment
from demo.vllm_model import LARGER, quieten, write_vllm_model
from demo.vllm_server import connector
from kvstore import wire

TOKENS = (512, 1024, 1536, 1900)
ROUNDS = 7
BLOCK_TOKENS = 32
SEED = 7
_SETTLE_S = 60.0
# Room for one prompt; prompts are prefilled in one step, which ExampleConnector needs to store them whole.
_SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 160 << 20, "max_num_batched_tokens": 2048}
COLUMNS = (
    "tokens", "computed_ms", "example_ms", "example_disk_ms", "cpu_ms", "ssd_ms", "cpu_vs_computed", "cpu_vs_example",
    "ssd_vs_example_disk", "ssd_vs_example", "miss_hooks_share", "miss_lookup_ms", "miss_vs_computed",
    "store_hooks_share", "store_vs_computed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a run: all have the same model."""

    alone: Engine
    p: Engine
    d: Engine
    example_p: Engine
    example_d: Engine


def prompt(seed: object, count: int) -> list[int]:
    """Return random tokens: the same for the same seed."""
    drawn = random.Random(f"{SEED} {seed}")
    return [drawn.randrange(3, LARGER["vocab"]) for _ in range(count)]


@contextlib.contextmanager
def engines(host: Host, model: Path, daemon: Daemon, folder: Path, load: str) -> Generator[Engines]:
    """Give engines that are ready."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    transfers: dict[str, dict[str, Any] | None] = {
        "alone": None,
        "P": connector(daemon.socket, "kv_producer"),
        "D": connector(daemon.socket, "kv_consumer", load=load),
        "example-P": example,
        "example-D": example,
    }
    started: list[Engine] = []
    for name, transfer in transfers.items():
        engine = host.engine(name, model, transfer=transfer, **_SETTINGS)
        engine.generate(prompt("warm up", 600), max_tokens=2)
        started.append(engine)
    yield Engines(*started)
    for engine in started:
        engine.stop()


def first_token(engine: Engine, tokens: list[int], *, hits: int) -> tuple[float, int]:
    """Return the seconds to the first token, and that token; the prompt's hits must be these."""
    engine.call("forget")
    (output,) = engine.generate(tokens, max_tokens=1)
    if output.cached != hits or output.ttft_s is None:
        raise SystemExit(f"{engine.name} was given {output.cached} tokens of {len(tokens)}, not {hits}")
    return output.ttft_s, output.tokens[0]


class Bench:
    """One run: its engines, its daemon, and the times it took."""

    def __init__(self, engines: Engines, daemon: Daemon, folder: Path) -> None:
        self._engines = engines
        self._daemon = daemon
        self._folder = folder
        self._fresh = 0

    def store(self, tokens: list[int]) -> None:
        """Have both P prefill a prompt, and all of it durable."""
        self._engines.p.generate(tokens, max_tokens=1)
        self._engines.example_p.generate(tokens, max_tokens=1)
        self._settle(len(tokens) // BLOCK_TOKENS)
        for file in self._folder.rglob("*.safetensors"):
            with file.open("rb") as written:
                os.fsync(written.fileno())  # what is not on disk can't be dropped from the page cache

    def hits(self, tokens: list[int], number: int) -> dict[str, float]:
        """Return the seconds to the first token for each place that the prompt's KV can come from."""
        hits = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        # Where one token follows the last full block ExampleConnector leaves that block out.
        example_hits = (len(tokens) - 2) // BLOCK_TOKENS * BLOCK_TOKENS
        cases: dict[str, tuple[Callable[[], None], Engine, int]] = {
            "computed": (lambda: None, self._engines.alone, 0),
            "example": (self._read_folder, self._engines.example_d, example_hits),
            "example_disk": (self._drop_folder, self._engines.example_d, example_hits),
            "cpu": (lambda: None, self._engines.d, hits),
            "ssd": (self._evict, self._engines.d, hits),
        }
        order = list(cases)
        order = order[number % len(order) :] + order[: number % len(order)]
        times: dict[str, float] = {}
        said: set[int] = set()
        for case in order:
            prepare, engine, expected = cases[case]
            if case == "cpu":
                first_token(engine, tokens, hits=hits)  # whatever was only on ssd is in memory again
            prepare()
            times[case], token = first_token(engine, tokens, hits=expected)
            said.add(token)
        if len(said) != 1:
            raise SystemExit(f"the engines said different tokens: {said}")
        return times

    def overhead(self, count: int) -> dict[str, float]:
        """Return what a prompt that nobody has costs on D and on P, beside an engine without a connector."""
        found: dict[str, float] = {}
        self._fresh += 1
        tokens = prompt(f"fresh {self._fresh}", count)
        alone_s, token = first_token(self._engines.alone, tokens, hits=0)
        for name, engine in (("miss", self._engines.d), ("store", self._engines.p)):
            engine.call("hook_seconds")
            took_s, said = first_token(engine, tokens, hits=0)
            hooks: dict[str, float] = engine.call("hook_seconds")
            if said != token:
                raise SystemExit(f"{engine.name} said {said}, not {token}")
            found[f"{name}_hooks_share"] = sum(hooks.values()) / took_s
            found[f"{name}_vs_computed"] = took_s / alone_s
            if name == "miss":
                found["miss_lookup_ms"] = hooks["get_num_new_matched_tokens"] * 1e3
        self._settle(0)
        return found

    def time_hooks(self) -> None:
        """From now on the connector's hooks are timed, which costs a little itself."""
        for engine in (self._engines.d, self._engines.p):
            engine.call("time_hooks")

    def _settle(self, stored_blocks: int) -> None:
        ends_s = time.monotonic() + _SETTLE_S
        with self._daemon.client() as client:
            while time.monotonic() < ends_s:
                tiers = client.admin(wire.Stats(0))["tiers"]
                if tiers["cpu"]["blocks"] >= stored_blocks and tiers["ssd"]["durable_blocks"] >= tiers["cpu"]["blocks"]:
                    return
                time.sleep(0.02)
        raise SystemExit(f"what P computed did not get to ssd within {_SETTLE_S:.0f} s")

    def _evict(self) -> None:
        with self._daemon.client() as client:
            client.admin(wire.Evict(0, "cpu"))

    def _read_folder(self) -> None:
        for file in self._folder.rglob("*.safetensors"):
            file.read_bytes()

    def _drop_folder(self) -> None:
        for file in self._folder.rglob("*.safetensors"):
            with file.open("rb") as read:
                os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(bench: Bench, lengths: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each prompt length."""
    times: dict[int, dict[str, list[float]]] = {count: {} for count in lengths}

    def note(count: int, found: dict[str, float]) -> None:
        for name, value in found.items():
            times[count].setdefault(name, []).append(value)

    for count in lengths:
        tell(f"P prefills {count} tokens")
        bench.store(prompt("stored", count))
    for number in range(rounds + 1):
        tell(f"round {number} of {rounds}")
        for count in lengths:
            found = bench.hits(prompt("stored", count), number)
            if number:  # the first round warms up
                note(count, found)
    bench.time_hooks()
    for number in range(rounds + 1):
        tell(f"overhead: round {number} of {rounds}")
        for count in lengths:
            found = bench.overhead(count)
            if number:
                note(count, found)
    return [row_of(count, times[count]) for count in lengths]


def row_of(count: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return one row: medians, and medians of ratios within a round."""

    def ratio(of: str, to: str) -> float:
        return round(median([a / b for a, b in zip(times[of], times[to], strict=True)]), 3)

    row: dict[str, Any] = {"tokens": count}
    for name in ("computed", "example", "example_disk", "cpu", "ssd"):
        row[f"{name}_ms"] = round(median(times[name]) * 1e3, 2)
    for of, to in (
        ("cpu", "computed"),
        ("cpu", "example"),
        ("ssd", "computed"),
        ("ssd", "example"),
        ("ssd", "example_disk"),
    ):
        row[f"{of}_vs_{to}"] = ratio(of, to)
    for name in ("miss_hooks_share", "store_hooks_share"):
        row[name] = round(median(times[name]), 5)
    for name in ("miss_lookup_ms", "miss_vs_computed", "store_vs_computed"):
        row[name] = round(median(times[name]), 3)
    return row


def main() -> None:
    """Run every case and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description="time to first token on a real vLLM")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--tokens", type=_lengths, default=TOKENS, help="prompt lengths (default: 512,1024,1536,1900)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--load", choices=("async", "sync"), default="async", help="how D loads (default: async)")
    parser.add_argument("--directory", type=Path, help="where to make the files (default: the temporary directory)")
    options = parser.parse_args()
    try:
        environment = vllm_environment.environment()
    except vllm_environment.NoEnvironment as exc:
        raise SystemExit(f"bench.vllm: {exc}") from exc
    report: dict[str, Any] = {"bench": "vllm", "hardware": hardware(), "seed": SEED, "load": options.load}
    flags = ("--tiers", "cpu,ssd", "--ssd-dir", "{ssd}", "--ssd-size", "4GiB", "--cpu-size", "1GiB", "--http", "off")
    scratch = Path(tempfile.mkdtemp(prefix="kvbench-vllm-", dir=options.directory))
    try:
        folder = scratch / "example"
        folder.mkdir()
        tell("five engines start")
        quieten()
        write_vllm_model(scratch / "model", LARGER)
        with (
            running_daemon(*flags, directory=options.directory) as daemon,
            Host(environment, scratch) as host,
            engines(host, scratch / "model", daemon, folder, options.load) as started,
        ):
            report |= {"vllm": host.version, "block_tokens": BLOCK_TOKENS, "rounds": options.rounds}
            report["rows"] = measured(Bench(started, daemon, folder), options.tokens, options.rounds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    finish(report, as_json=options.json, columns=COLUMNS)


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) for part in text.split(","))
    if not all(2 * BLOCK_TOKENS < count < 2000 for count in lengths):
        raise argparse.ArgumentTypeError(f"lengths lie between {2 * BLOCK_TOKENS} and 2000 tokens")
    return lengths


if __name__ == "__main__":
    main()
