"""Prefill in one process, decode in another: the KV goes through kvstored, and the tokens stay the same.

    python -m demo.pd [--model DIR] [--prompt-tokens N] [--new-tokens N]        ($MODEL is --model's default)

Three engine processes hold the same model. The first generates without a store: what it says, and how long its first
token takes, is what the rest is compared with. P computes the prompt and stores its KV. D generates after the same
prompt with KV from kvstored's memory; then, when P has stored another prompt, which memory has no room for
beside the first, and kvstored was restarted, with KV from its ssd. D is never restarted.

Progress goes to stderr, tables to stdout; the last line there is one JSON object. Exit status: 0 if the tokens were
identical and the hits came from where they should; 1 if not, or if something failed; 2 for wrong arguments; 130 after
Ctrl-C. Whatever ends it, its processes and its files are gone afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from demo.findings import Findings
from demo.processes import INTERRUPTS, Daemon, Failed, Group, Worker, model_directory, scratch
from demo.progress import Steps
from kvclient import Client
from kvstore import wire
from kvstore.errors import KVStoreError

_BLOCK_TOKENS = 16
_FREE_BYTES_MIN = 800 << 20
_MIB = 1 << 20
_STEPS = 9


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    arguments = _parse(argv)
    for number in set(INTERRUPTS) - {signal.SIGINT}:
        signal.signal(number, _exit)
    try:
        with Steps(_STEPS) as steps, scratch(_FREE_BYTES_MIN) as directory:
            findings = _run(arguments, directory, steps)
    except KeyboardInterrupt:
        print("demo: interrupted; its processes and files are gone", file=sys.stderr)
        return 130
    except (Failed, KVStoreError, OSError) as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    Console().print(findings.table())
    faults = findings.faults()
    for fault in faults:
        print(f"demo: {fault}", file=sys.stderr)
    if faults:
        print(f"demo: the end of kvstored's log:\n{findings.log_end}", file=sys.stderr)
    print(json.dumps(findings.summary(), separators=(",", ":")))
    return 1 if faults else 0


def _run(arguments: argparse.Namespace, directory: Path, steps: Steps) -> Findings:
    found = Findings(prompt_tokens=arguments.prompt_tokens, block_tokens=_BLOCK_TOKENS)
    with Group() as group:
        steps.begin("three engine processes start")
        workers = [group.start(Worker, name, directory / f"{name}.log") for name in ("alone", "P", "D")]
        alone, p, d = workers
        model = arguments.model
        if model is None:
            steps.begin("a small Qwen2 with random weights is written")
            model = directory / "demo-qwen2"
            p.call("write", model=str(model))
        else:
            steps.begin(f"the model is {model}")
        _load(steps, found, model, workers)
        prompt = p.call("prompt", tokens=found.prompt_tokens, seed=1)["prompt"]
        other = p.call("prompt", tokens=found.prompt_tokens // 2, seed=2)["prompt"]

        steps.begin(f"alone: {len(prompt)} tokens of prefill, no store")
        found.alone = alone.call("generate", prompt=prompt, new_tokens=arguments.new_tokens)
        alone.stop()

        for worker in (p, d):
            worker.ask("attach", socket=str(directory / "kvstored.sock"), block_tokens=_BLOCK_TOKENS)
        p_blocks, d_blocks = p.answer(), d.answer()
        if p_blocks != d_blocks:
            raise Failed("P and D hold different models: they name their blocks differently")
        found.block_bytes = p_blocks["block_bytes"]
        prompt_bytes = len(prompt) // _BLOCK_TOKENS * found.block_bytes
        sizes = (max(8 * _MIB, prompt_bytes * 5 // 4), max(64 * _MIB, prompt_bytes * 6))
        daemon = group.start(Daemon, directory, *sizes)
        daemon.await_ready()

        steps.begin("P: the same prefill, its KV goes to kvstored")
        # Durable: it will be evicted from memory, and must not be before it is on ssd.
        found.prefill = p.call("generate", prompt=prompt, new_tokens=1, durable=True)
        steps.begin("D: generates with KV from memory")
        found.from_cpu = d.call("generate", prompt=prompt, new_tokens=arguments.new_tokens)
        steps.begin("P: another prompt, which memory has no room for beside the first")
        p.call("generate", prompt=other, new_tokens=1)
        found.reports.append(_stats(daemon))

        steps.begin("kvstored is restarted")
        daemon.drain()
        daemon = group.start(Daemon, directory, *sizes)
        daemon.await_ready()
        steps.begin("D: generates with KV from ssd")
        found.from_ssd = d.call("generate", prompt=prompt, new_tokens=arguments.new_tokens)
        found.reports.append(_stats(daemon))
        daemon.drain()
        found.log_end = daemon.log_end()
    return found


def _load(steps: Steps, found: Findings, model: Path, workers: list[Worker]) -> None:
    steps.begin("each process loads the model")
    for worker in workers:
        worker.ask("load", model=str(model))
    for worker in workers:
        loaded = worker.answer()
        found.model = f"{model.name} ({loaded['parameters'] / 1e6:.0f} M parameters, {loaded['threads']} threads)"


def _stats(daemon: Daemon) -> dict[str, object]:
    with Client(daemon.socket) as client:
        return client.admin(wire.Stats(0))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.pd", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model",
        type=model_directory,
        default=os.environ.get("MODEL") or None,
        metavar="DIR",
        help="a transformers model in a local directory (default: $MODEL, else one written on the spot)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=2010, metavar="N", help="default: 2010")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="default: 32")
    arguments = parser.parse_args(argv)
    if arguments.prompt_tokens <= _BLOCK_TOKENS or arguments.new_tokens < 1:
        parser.error(f"--prompt-tokens must be over {_BLOCK_TOKENS} (a block), --new-tokens at least 1")
    return arguments


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
