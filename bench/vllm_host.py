"""Real vLLM engines, one a process: vLLM is imported once, and each engine is a fork of that process.

Run as a module in vLLM's environment by bench.vllm_engine, which has the other end of the socket whose number is the
argument. The first message is {"ready": ...}; each message from then on brings the socket of a new engine, its
settings and its log. An engine answers one JSON line with one JSON line: see Engine's verbs.

Scheduler, worker and both sides of a connector share the engine's one process, so a test or bench sees all of them.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What an engine imports by itself later; here once for all of them.
_IMPORTED_LATE = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 16
# Scheduler's and worker's side of a connector, as an engine calls them in a step.
HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "update_connector_output"),
    *("request_finished", "request_finished_all_groups", "take_events", "on_new_request"),
    *("bind_connector_metadata", "clear_connector_metadata", "handle_preemptions", "start_load_kv"),
    *("wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished", "get_block_ids_with_load_errors"),
    *("get_kv_connector_stats", "get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
)


class Engine:
    """One engine and its verbs: each public method answers the message that names it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        vllm = importlib.import_module("vllm")
        transfer = settings.pop("kv_transfer_config", None)
        if transfer is not None:
            settings["kv_transfer_config"] = importlib.import_module("vllm.config").KVTransferConfig(**transfer)
        self._vllm = vllm
        self._llm = vllm.LLM(**settings)
        self._engine = self._llm.llm_engine
        self._outputs: dict[str, dict[str, Any]] = {}
        self._began_s: dict[str, float] = {}
        self._adapters: dict[str, int] = {}
        self._loads_met = 0
        self._spent_s: dict[str, float] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        logprobs: int | None = None,
        adapter: str | None = None,
        adapter_name: str | None = None,
        salt: str | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        """Queue a request; nothing is computed yet."""
        params = self._vllm.SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
        )
        lora = None
        if adapter is not None:
            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            request = importlib.import_module("vllm.lora.request").LoRARequest
            lora = request(adapter_name or Path(adapter).name, number, adapter)
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        self._began_s[name] = time.perf_counter()
        self._outputs[name] = {"tokens": [], "logprobs": [], "cached": 0, "finish": None, "ttft_s": None}
        self._engine.add_request(name, given, params, lora_request=lora)

    def step(self, count: int = 1) -> int:
        """Run so many steps and return how many requests are unfinished."""
        for _ in range(count):
            for output in self._engine.step():
                self._note(output)
        return int(self._engine.get_num_unfinished_requests())

    def finish(self, within_s: float = 120.0) -> dict[str, dict[str, Any]]:
        """Step until no request is left, and return the outputs of all that were added since the last time."""
        ends_s = time.monotonic() + within_s
        while self._engine.has_unfinished_requests():
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{self._engine.get_num_unfinished_requests()} requests left after {within_s} s")
            self.step()
        outputs, self._outputs = self._outputs, {}
        return outputs

    def abort(self, names: list[str]) -> None:
        """Abort requests."""
        self._engine.abort_request(names)

    def forget(self) -> bool:
        """Empty the engine's own prefix cache; what a connector stored stays."""
        return bool(self._llm.reset_prefix_cache())

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters and gauges by name, those with labels summed."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                found[metric.name] = found.get(metric.name, 0.0) + float(value)
        return found

    def connector(self, side: str = "scheduler", attribute: str | None = None) -> Any:
        """Return what the connector's attribute says: a plain value, or what it returns when called."""
        found = getattr(self._connectors()[side], attribute or "__class__")
        value = found() if callable(found) and attribute else found
        return json.loads(json.dumps(value, default=str))

    def time_hooks(self) -> None:
        """From now on add up what each call into the connector takes: `hook_seconds`."""
        for connector in self._connectors().values():
            for hook in HOOKS:
                if hasattr(connector, hook):
                    setattr(connector, hook, self._timing(hook, getattr(connector, hook)))

    def hook_seconds(self) -> dict[str, float]:
        """Return the seconds each hook took since the last time, and start again at zero."""
        spent, self._spent_s = self._spent_s, {}
        return spent

    def before_next_load(self, pid: int = 0, number: int = 0, socket: str | None = None) -> None:
        """Once, before a load begins that the scheduler has counted on: signal a process, or drop a daemon's blocks."""
        worker = self._connectors()["worker"]
        scheduler = self._connectors()["scheduler"]
        inner_update, inner_load = scheduler.update_state_after_alloc, worker.bind_connector_metadata
        is_expected = False
        self._loads_met = 0

        def update(request: Any, blocks: Any, num_external_tokens: int, *more: Any, **named: Any) -> Any:
            nonlocal is_expected
            is_expected = is_expected or num_external_tokens > 0
            return inner_update(request, blocks, num_external_tokens, *more, **named)

        def load(*arguments: Any, **named: Any) -> Any:
            nonlocal is_expected
            if is_expected:
                is_expected = False
                scheduler.update_state_after_alloc, worker.bind_connector_metadata = inner_update, inner_load
                self._loads_met += 1
                if number:
                    os.kill(pid, number)
                if socket is not None:
                    _drop_all(socket)
            return inner_load(*arguments, **named)

        scheduler.update_state_after_alloc, worker.bind_connector_metadata = update, load

    def loads_met(self) -> int:
        """Return how often the load that `before_next_load` waits for has begun."""
        return self._loads_met

    def free_blocks(self) -> int:
        """Return how many blocks of the engine's own cache no request holds."""
        return int(self._block_pool().get_num_free_blocks())

    def total_blocks(self) -> int:
        """Return how many blocks the engine's own cache has; one is kept as a placeholder."""
        return int(self._block_pool().num_gpu_blocks) - 1

    def stop(self) -> None:
        """Shut the engine down in order."""
        self._engine.engine_core.shutdown()

    def _block_pool(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    def _connectors(self) -> dict[str, Any]:
        transfer = importlib.import_module("vllm.distributed.kv_transfer")
        core = self._engine.engine_core.engine_core
        return {"scheduler": core.scheduler.connector, "worker": transfer.get_kv_transfer_group()}

    def _timing(self, hook: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self._spent_s[hook] = self._spent_s.get(hook, 0.0) + time.perf_counter() - start_s

        return timed

    def _note(self, output: Any) -> None:
        kept = self._outputs.get(output.request_id)
        if kept is None:
            return
        made = output.outputs[0]
        kept["tokens"] = list(made.token_ids)
        if made.logprobs is not None:
            # The chosen token comes first.
            kept["logprobs"] = [next(iter(place.values())).logprob for place in made.logprobs]
        kept["finish"] = made.finish_reason
        kept["cached"] = output.num_cached_tokens or 0
        if kept["ttft_s"] is None and made.token_ids:
            kept["ttft_s"] = time.perf_counter() - self._began_s[output.request_id]


def _drop_all(socket: str) -> None:
    kvclient, wire = importlib.import_module("kvclient"), importlib.import_module("kvstore.wire")
    with kvclient.Client(socket) as client:
        client.admin(wire.DropNamespace(0, None))


def _serve(line: socket.socket, settings: dict[str, Any]) -> None:
    with line.makefile("rw") as messages:

        def answer(value: Any) -> None:
            messages.write(json.dumps(value) + "\n")
            messages.flush()

        try:
            engine = Engine(settings)
        except BaseException:  # noqa: BLE001  # told to the one who waits for the engine
            answer({"error": traceback.format_exc()})
            return
        answer({"value": os.getpid()})
        for text in messages:
            message = json.loads(text)
            verb = message.pop("do")
            try:
                answer({"value": getattr(engine, verb)(**message)})
            except BaseException:  # noqa: BLE001  # likewise
                answer({"error": traceback.format_exc()})
            if verb == "stop":
                return


def _become_engine(message: dict[str, Any], line: socket.socket) -> None:
    """Run an engine in this fork, to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(message["variables"])
    try:
        _serve(line, message["settings"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # this fork's exit handlers are the host's


def main() -> int:
    """Import vLLM, then fork an engine for each message."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # engines that ended are no zombies
    start_s = time.monotonic()
    version = importlib.import_module("vllm").__version__
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    control.sendall(json.dumps({"ready": version, "seconds": round(time.monotonic() - start_s, 1)}).encode() + b"\n")
    while True:
        text, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not text:
            return 0
        with socket.socket(fileno=fds[0]) as line:
            if os.fork() == 0:
                control.close()
                _become_engine(json.loads(text), line)


if __name__ == "__main__":
    sys.exit(main())
