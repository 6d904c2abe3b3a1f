"""vLLM engines as the tests and the bench drive them: real ones, in processes of vLLM's own environment.

`with Host(environment, scratch) as host, host.engine("P", model) as p: p.generate(prompts)`. Engines start side by
side: `engine` returns at once, and the first call waits.

1. Every call has a deadline. An engine that is silent, gone or failing is killed and raises EngineFailed with the end
   of its log.
2. Whatever ends the block, the host and all its engines are gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from demo import vllm_environment

_IMPORT_S = 300.0
_START_S = 240.0
_CALL_S = 120.0
_LOG_LINES = 40
# Small, deterministic, and not compiled: what the engines here have in common.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "seed": 0,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
}


class EngineFailed(Exception):
    """An engine did not do what it was told; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    """Prompt tokens that were not computed: the engine's own cache and the connector's together."""
    finish: str | None
    ttft_s: float | None


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, line: socket.socket, log: Path) -> None:
        self.name = name
        self.log = log
        self._line = line
        self._answers = line.makefile("r")
        self._pid: int | None = None
        self._requests = 0
        self._has_ended = False

    @property
    def pid(self) -> int:
        """Return the process's id, once the engine is there."""
        self.await_ready()
        assert self._pid is not None
        return self._pid

    def await_ready(self) -> None:
        """Return when the engine has loaded its model."""
        if self._pid is None:
            self._pid = int(self._answer("starting", _START_S))

    def call(self, do: str, *, within_s: float = _CALL_S, **arguments: Any) -> Any:
        """Have the engine do something and return what it answers: see bench.vllm_host.Engine."""
        self.await_ready()
        try:
            self._line.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except OSError as exc:
            raise self._failed(f"ended before '{do}'") from exc
        return self._answer(do, within_s)

    def add(self, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> str:
        """Queue a request and return its name."""
        self._requests += 1
        name = f"{self.name}-{self._requests}"
        self.call("add", name=name, prompt=list(prompt), max_tokens=max_tokens, logprobs=1, **options)
        return name

    def finish(self, *, within_s: float = _CALL_S) -> dict[str, Output]:
        """Compute all that is queued; returns outputs by name."""
        outputs = self.call("finish", within_s=within_s)
        return {name: _output(fields) for name, fields in outputs.items()}

    def generate(self, *prompts: Sequence[int], max_tokens: int = 16, **options: Any) -> list[Output]:
        """Return the outputs for prompts that are computed together."""
        names = [self.add(prompt, max_tokens, **options) for prompt in prompts]
        outputs = self.finish()
        return [outputs[name] for name in names]

    def external_hits(self) -> int:
        """Return how many tokens the connector gave so far, as vLLM counts them."""
        return int(self.call("metrics").get("vllm:external_prefix_cache_hits", 0))

    def counter(self, name: str) -> float:
        """Return one of the connector's own counters, as vLLM has it."""
        return float(self.call("metrics").get(f"vllm:kvstored_{name}", 0))

    def stop(self) -> None:
        """End the engine in order."""
        if not self._has_ended:
            self.call("stop")
            self._end()

    def kill(self) -> None:
        """End the engine at once. Ending twice is harmless."""
        if not self._has_ended:
            if self._pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            self._end()

    def log_end(self) -> str:
        """Return the last lines of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _answer(self, to: str, within_s: float) -> Any:
        self._line.settimeout(within_s)
        try:
            text = self._answers.readline()
        except TimeoutError as exc:
            raise self._failed(f"no answer to '{to}' for {within_s:.0f} s") from exc
        except ConnectionError:
            text = ""
        if not text:
            raise self._failed(f"ended without an answer to '{to}'")
        answer = json.loads(text)
        if "error" in answer:
            raise self._failed(f"'{to}' failed: {answer['error']}")
        return answer["value"]

    def _failed(self, text: str) -> EngineFailed:
        failed = EngineFailed(f"engine {self.name}: {text}\n---- the end of its log\n{self.log_end()}\n----")
        self.kill()
        return failed

    def _end(self) -> None:
        self._has_ended = True
        self._answers.close()
        self._line.close()


class Host:
    """The process that has imported vLLM and forks engines."""

    def __init__(self, environment: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._engines: list[Engine] = []
        self._log = scratch / "host.log"
        self._control, theirs = socket.socketpair()
        with theirs, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [vllm_environment.python(environment), "-m", "bench.vllm_host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | vllm_environment.variables(environment, scratch),
                pass_fds=(theirs.fileno(),),
                cwd=vllm_environment.ROOT,
                start_new_session=True,
            )
        self.version = ""

    def await_ready(self) -> None:
        """Return when vLLM is imported."""
        if self.version:
            return
        self._control.settimeout(_IMPORT_S)
        try:
            text = self._control.recv(1 << 16)
        except TimeoutError as exc:
            raise EngineFailed(f"vLLM was not imported within {_IMPORT_S:.0f} s") from exc
        if not text:
            raise EngineFailed(f"vLLM can't be imported:\n{self._log.read_text(errors='replace')[-4000:]}")
        self.version = str(json.loads(text)["ready"])

    def engine(
        self,
        name: str,
        model: Path,
        *,
        transfer: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        **settings: Any,
    ) -> Engine:
        """Return an engine that is starting.

        `transfer` is its kv_transfer_config (see demo.vllm_server.connector), `variables` are this engine's alone,
        and `settings` are arguments of vllm.LLM that differ from SETTINGS.
        """
        self.await_ready()
        log = self._scratch / f"{len(self._engines)}-{name}.log"
        log.touch()
        ours, theirs = socket.socketpair()
        given = {**SETTINGS, "model": str(model), "kv_transfer_config": transfer, **settings}
        message = {"settings": given, "log": str(log), "variables": variables or {}}
        with theirs:
            socket.send_fds(self._control, [json.dumps(message).encode()], [theirs.fileno()])
        engine = Engine(name, ours, log)
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """End every engine and the host."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for engine in self._engines:
            engine.kill()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _output(fields: dict[str, Any]) -> Output:
    return Output(
        tokens=tuple(fields["tokens"]),
        logprobs=tuple(fields["logprobs"]),
        cached=fields["cached"],
        finish=fields["finish"],
        ttft_s=fields["ttft_s"],
    )
