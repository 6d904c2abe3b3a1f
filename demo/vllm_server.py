"""A vLLM API server as a process: what people run, with a small model and kvclient's connector."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import vllm_environment
from demo.processes import Failed, Process

MODEL = "tiny"
BLOCK_TOKENS = 32
_PATIENCE = {"lookup_budget_ms": 10_000, "load_timeout_ms": 30_000, "store_timeout_ms": 30_000}
_KV_BYTES = 160 << 20
_START_S = 300.0
_ANSWER_S = 120.0
_BETWEEN_PROBES_S = 0.1


def connector(socket: Path, role: str, **options: Any) -> dict[str, Any]:
    """Return the kv_transfer_config that has an engine use the daemon behind `socket`.

    It waits longer than it would by default: here many processes share few cores, and what is late counts as missing.
    """
    return {
        "kv_connector": "KVStoredConnector",
        "kv_connector_module_path": "kvclient.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), **_PATIENCE, **options},
    }


def held_port() -> socket.socket:
    """Return a socket bound to a port of 127.0.0.1 that nobody but a server told of it will take, until it is closed.

    Servers take seconds to get to their bind. It succeeds beside this one, since both allow it and this never listens;
    whoever wants any free port is not given this one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Server(Process):
    """An API server; `await_ready` returns when it answers."""

    def __init__(
        self,
        name: str,
        environment: Path,
        model: Path,
        scratch: Path,
        *arguments: str,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        self._held = held_port()
        self.port: int = self._held.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [vllm_environment.python(environment), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
        command += ["--max-num-seqs", "4", "--seed", "0", "--block-size", str(BLOCK_TOKENS)]
        command += ["--kv-cache-memory-bytes", str(_KV_BYTES), "--enable-prompt-tokens-details", *arguments]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        variables = vllm_environment.variables(environment, scratch)
        super().__init__(name, command, scratch / f"{name}.log", pass_fds=(), **variables)

    def await_ready(self) -> None:
        """Return when the server answers; there is no other way to hear of it than to ask."""
        ends_s = time.monotonic() + _START_S
        while time.monotonic() < ends_s:
            if self.has_ended:
                raise self.failed("ended while starting")
            with contextlib.suppress(OSError, http.client.HTTPException):
                call(self.port, "GET", "/health")
                return
            time.sleep(_BETWEEN_PROBES_S)
        raise self.failed(f"did not answer within {_START_S:.0f} s")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON answer to a JSON request."""
        answer: dict[str, Any] = json.loads(call(self.port, "POST", path, json.dumps(body).encode()))
        return answer

    def metric(self, name: str) -> float:
        """Return the sum of a counter's or a gauge's samples."""
        lines = call(self.port, "GET", "/metrics").decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def stop(self) -> None:
        """End the server and the engine process behind it."""
        super().stop()
        self._held.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a streamed completion brought."""

    tokens: tuple[int, ...]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine did not compute."""


def stream(port: int, path: str, body: dict[str, Any]) -> Streamed:
    """Return a streamed completion; Failed if it is refused, or ends before its end."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    ttft_s = 0.0
    start_s = time.perf_counter()
    with _answer(port, "POST", path, json.dumps(asked).encode()) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise Failed(f"{path} answered {event['error']}")
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or ()
            if tokens and not ttft_s:
                ttft_s = time.perf_counter() - start_s
            usage = event.get("usage") or usage
    if not usage:
        raise Failed(f"{path}: the stream ended before its end")
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    return Streamed(tuple(tokens), ttft_s, usage["prompt_tokens"], details.get("cached_tokens") or 0)


def call(port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    """Return what a server of this machine answers; Failed, with its text, if that tells of an error."""
    with _answer(port, method, path, body) as answer:
        return answer.read()


@contextlib.contextmanager
def _answer(port: int, method: str, path: str, body: bytes | None) -> Generator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"{path} answered {answer.status}: {answer.read().decode(errors='replace')[:2000]}")
        yield answer
