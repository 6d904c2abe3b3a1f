"""The classic deployment on one machine: a vLLM that prefills, a vLLM that decodes, kvstored, and kvproxy in front.

    python -m demo.vllm [--model DIR] [--prompt-tokens N] [--new-tokens N]        ($MODEL is --model's default)

Three vLLM API servers hold the same model. One has no connector: what it says, and how long its first token takes, is
what the rest is compared with. A client then asks kvproxy, as curl would, for a stream: P prefills and stores, D loads
and decodes. Then all engines empty their own prefix caches, as if others were asked, and the client puts a question
behind the same text: the proxy sees that the store has the text, leaves P out, and D loads it.

vLLM runs in an environment of its own, which is made first where it is missing (3 GB, some minutes): see
requirements/engines.sh. Progress goes to stderr, a table to stdout; the last line there is one JSON object. Exit
status: 0 if all held; 1 if not, or if something failed; 2 for wrong arguments; 130 after Ctrl-C. Whatever ends it, its
processes and its files are gone afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from demo import vllm_environment
from demo.processes import INTERRUPTS, Daemon, Failed, Group, Process, model_directory, scratch
from demo.progress import Steps
from demo.vllm_model import LARGER, quieten, write_vllm_model
from demo.vllm_server import BLOCK_TOKENS, MODEL, Server, Streamed, call, connector, held_port, stream
from kvclient import Client
from kvstore import wire
from kvstore.errors import KVStoreError

_FREE_BYTES_MIN = 2 << 30
_STEPS = 7
_HASH = ("--prefix-caching-hash-algo", "sha256_cbor")
_PROXY_START_S = 60.0
_GIVEN = "vllm:external_prefix_cache_hits_total"
_WARM_UP = "The first request of an engine finds nothing: the store is not told of the engine yet."
_QUESTION = " Which of them came first?"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    arguments = _parse(argv)
    for number in set(INTERRUPTS) - {signal.SIGINT}:
        signal.signal(number, _exit)
    quieten()
    try:
        with Steps(_STEPS) as steps, scratch(_FREE_BYTES_MIN) as directory:
            findings = _run(arguments, directory, steps)
    except KeyboardInterrupt:
        print("demo: interrupted; its processes and files are gone", file=sys.stderr)
        return 130
    except (Failed, KVStoreError, OSError, vllm_environment.NoEnvironment) as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    Console().print(findings.table())
    faults = findings.faults()
    for fault in faults:
        print(f"demo: {fault}", file=sys.stderr)
    if faults:
        print(f"demo: the ends of the logs:\n{findings.log_ends}", file=sys.stderr)
    print(json.dumps(findings.summary(), separators=(",", ":")))
    return 1 if faults else 0


class Proxy(Process):
    """kvproxy in front of both."""

    def __init__(self, p: Server, d: Server, daemon: Daemon, scratch: Path) -> None:
        self._held = held_port()
        self.port: int = self._held.getsockname()[1]
        command = [sys.executable, "-m", "kvproxy", "--listen", f"127.0.0.1:{self.port}", "--prefill", p.url]
        command += ["--decode", d.url, "--store", str(daemon.socket), "--block-hash", "sha256_cbor"]
        # The chain of block hashes starts from the engines' PYTHONHASHSEED.
        command += ["--hash-seed", vllm_environment.HASH_SEED]
        super().__init__("kvproxy", command, scratch / "kvproxy.log")

    def stop(self) -> None:
        super().stop()
        self._held.close()


@dataclass
class Findings:
    """What a run found out, and whether it held."""

    prompt_tokens: int = 0
    alone: list[Streamed] = field(default_factory=list[Streamed])
    proxied: list[Streamed] = field(default_factory=list[Streamed])
    p_requests: list[float] = field(default_factory=list[float])
    """How many requests P had answered after each of the client's."""
    given_tokens: list[float] = field(default_factory=list[float])
    """How many tokens D had been given by kvstored after each of them."""
    hit_blocks: dict[str, int] = field(default_factory=dict[str, int])
    log_ends: str = ""

    @property
    def tokens_identical(self) -> bool:
        """Whether each answer through the proxy is what a vLLM without a connector says."""
        pairs = zip(self.alone, self.proxied, strict=True)
        return all(bool(alone.tokens) and alone.tokens == proxied.tokens for alone, proxied in pairs)

    def faults(self) -> list[str]:
        """Return what did not hold, in words; nothing if all did."""
        faults: list[str] = []
        if not self.tokens_identical:
            pairs = zip(self.alone, self.proxied, strict=True)
            said = "; ".join(f"alone {alone.tokens}, proxied {proxied.tokens}" for alone, proxied in pairs)
            faults.append(f"the tokens differ: {said}")
        expected = (self.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        faults += [
            f"D was given {given:.0f} tokens by kvstored, not {expected}" for given in self._given if given != expected
        ]
        if self.p_requests != [1, 1]:
            faults.append(f"P had answered {self.p_requests} requests after each of the client's two, not 1 and 1")
        if not self.hit_blocks.get("cpu"):
            faults.append(f"kvstored counted hits {self.hit_blocks}: none from memory")
        return faults

    def summary(self) -> dict[str, Any]:
        """Return the demo's last line."""
        return {
            "demo": "vllm",
            "tokens_identical": self.tokens_identical,
            "prompt_tokens": self.prompt_tokens,
            "given_tokens": int(self.given_tokens[-1]),
            "hit_blocks": sum(self.hit_blocks.values()),
            "ttft_alone_s": [round(answer.ttft_s, 4) for answer in self.alone],
            "ttft_proxied_s": [round(answer.ttft_s, 4) for answer in self.proxied],
        }

    def table(self) -> Table:
        """Return what people read."""
        table = Table(title=f"{self.prompt_tokens} prompt tokens, time to the first token", title_justify="left")
        table.add_column("asked")
        for title in ("vLLM alone", "kvproxy", "prefilled by", "from kvstored", "tokens"):
            table.add_column(title, justify="right")
        has_prefilled = [self.p_requests[0] > 0, self.p_requests[1] > self.p_requests[0]]
        for at, title in enumerate(("a text", "it and a question")):
            alone, proxied = self.alone[at], self.proxied[at]
            table.add_row(
                title,
                f"{alone.ttft_s:.3f} s",
                f"{proxied.ttft_s:.3f} s",
                "P" if has_prefilled[at] else "nobody",
                f"{self._given[at]:.0f}",
                "identical" if alone.tokens == proxied.tokens else "[red]DIFFERENT[/]",
            )
        return table

    @property
    def _given(self) -> list[float]:
        return [self.given_tokens[0], self.given_tokens[1] - self.given_tokens[0]]


def _run(arguments: argparse.Namespace, directory: Path, steps: Steps) -> Findings:
    found = Findings()
    steps.begin("vLLM's environment")
    environment = vllm_environment.environment()
    model = arguments.model
    steps.begin(f"the model is {model}" if model else "a small Qwen2 with random weights is written")
    if model is None:
        model = directory / "demo-qwen2"
        write_vllm_model(model, LARGER)
    text = _text(arguments.prompt_tokens)
    with Group() as group:
        steps.begin("kvstored and three vLLM servers start")
        daemon = group.start(Daemon, directory, 256 << 20, 1 << 30)
        daemon.await_ready()
        p, d, alone = (
            group.start(Server, name, environment, model, directory, *_HASH, transfer=transfer)
            for name, transfer in (
                ("P", connector(daemon.socket, "kv_producer")),
                ("D", connector(daemon.socket, "kv_consumer")),
                ("alone", None),
            )
        )
        for server in (p, d, alone):
            server.await_ready()
            _ask(server.port, _WARM_UP, 2)
        steps.begin("kvproxy starts in front of P and D")
        proxy = group.start(Proxy, p, d, daemon, directory)
        _await_proxy(proxy)
        before = p.metric("vllm:request_success_total")
        given_before = d.metric(_GIVEN)

        steps.begin("without a store: vLLM alone")
        for asked in (text, text + _QUESTION):
            found.alone.append(_ask(alone.port, asked, arguments.new_tokens))
            call(alone.port, "POST", "/reset_prefix_cache")
        found.prompt_tokens = found.alone[0].prompt_tokens
        steps.begin("through kvproxy: P prefills, D decodes")
        for asked in (text, text + _QUESTION):
            if found.proxied:
                steps.begin("the same text and a question: P is left out")
            found.proxied.append(_ask(proxy.port, asked, arguments.new_tokens))
            found.p_requests.append(p.metric("vllm:request_success_total") - before)
            found.given_tokens.append(d.metric(_GIVEN) - given_before)
            for server in (p, d):
                call(server.port, "POST", "/reset_prefix_cache")
        with Client(daemon.socket) as client:
            found.hit_blocks = client.admin(wire.Stats(0))["totals"]["hit_blocks"]
        found.log_ends = "\n".join(f"{process.name}\n{process.log_end()}" for process in (daemon, p, d, proxy))
    return found


def _ask(port: int, text: str, new_tokens: int) -> Streamed:
    """Return a streamed completion: curl -N http://127.0.0.1:PORT/v1/completions -d BODY."""
    body = {"model": MODEL, "prompt": text, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return stream(port, "/v1/completions", body)


def _await_proxy(proxy: Proxy) -> None:
    ends_s = time.monotonic() + _PROXY_START_S
    while time.monotonic() < ends_s:
        if proxy.has_ended:
            raise proxy.failed("ended while starting")
        with contextlib.suppress(OSError, http.client.HTTPException):
            call(proxy.port, "GET", "/healthz")
            return
        time.sleep(0.1)
    raise proxy.failed(f"did not answer within {_PROXY_START_S:.0f} s")


def _text(tokens: int) -> str:
    """Return a text of so many bytes: the demo's tokenizer makes each of them a token."""
    drawn = random.Random(1)  # noqa: S311  # the same text each time is the point
    towns = ("the harbour", "the old mill", "the station", "the northern gate")
    text = ""
    while len(text) < tokens:
        text += f"On day {drawn.randrange(1, 366)} {drawn.randrange(2, 90)} crates went to {drawn.choice(towns)}. "
    return text[:tokens]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.vllm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model",
        type=model_directory,
        default=os.environ.get("MODEL") or None,
        metavar="DIR",
        help="a model in a local directory (default: $MODEL, else one written on the spot)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=1900, metavar="N", help="default: 1900")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="default: 32")
    arguments = parser.parse_args(argv)
    if not 4 * BLOCK_TOKENS <= arguments.prompt_tokens <= 1900 or not 1 <= arguments.new_tokens <= 100:
        parser.error(f"--prompt-tokens lies between {4 * BLOCK_TOKENS} and 1900, --new-tokens between 1 and 100")
    return arguments


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
