"""The real kvproxy, with stub workers on this test's loop.

    async with proxied(short_dir, p_count=1, d_count=2) as proxy:
        answer = await proxy.ask(stream=True)

`proxied` starts the command; at the end of the block it is stopped by SIGTERM and must end with status 0. `inside` runs
the same on this test's loop, which takes milliseconds: for what is tried in dozens of ways. Neither may log an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvproxy.app import running
from kvproxy.settings import resolve
from kvproxy.types import Role
from tests.kvproxy.stub_worker import COMPLETIONS, MODEL, StubWorker

TOKEN = "a-token-for-the-admin-port"
# Long for what happens in milliseconds, since the machine may be busy.
PATIENCE_S = 60.0
# A prompt that is long enough to be worth a P.
PROMPT = "tell me a story about a proxy " * 60


@dataclass(slots=True)
class Answer:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool = False  # the connection broke off before the end
    first_byte_s: float = 0.0

    @property
    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)
        return told

    @property
    def events(self) -> list[str]:
        """The data of each event, in order."""
        lines = self.body.decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def text(self) -> str:
        """What was generated, of a completion."""
        if "text/event-stream" not in self.headers.get("Content-Type", ""):
            return str(self.json["choices"][0]["text"])
        told = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(one["choices"][0]["text"] for one in told if "choices" in one)

    @property
    def error(self) -> dict[str, Any]:
        """The error object: of the body, or of a stream's last event."""
        if "text/event-stream" in self.headers.get("Content-Type", ""):
            last: dict[str, Any] = json.loads(self.events[-1])
            return dict(last["error"])
        return dict(self.json["error"])


@dataclass(slots=True)
class Proxy:
    """A running proxy, its workers, and a client."""

    directory: Path
    prefill: list[StubWorker]
    decode: list[StubWorker]
    session: aiohttp.ClientSession
    arguments: list[str]
    url: str = ""
    admin_url: str = ""
    process: asyncio.subprocess.Process | None = None
    is_ending: bool = False

    @property
    def log(self) -> Path:
        return self.directory / "proxy.log"

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def flags(self) -> dict[str, str]:
        """Return its settings; each worker is on a node of its own, so that D is told where P's blocks are."""
        token = self.directory / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        given = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "admin-token-file": str(token)}
        for role, stubs in (("prefill", self.prefill), ("decode", self.decode)):
            if stubs:
                given[role] = ",".join(f"{stub.url}#{role}-{number}" for number, stub in enumerate(stubs))
        return given | dict(argument.removeprefix("--").split("=", 1) for argument in self.arguments)

    # ---- the process

    async def start(self) -> None:
        """Start it and return when it serves."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvproxy", "--log-format=json",
                *(f"--{key}={value}" for key, value in self.flags().items()),
                stdin=asyncio.subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        await eventually(self._is_ready, "the proxy serves")

    async def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, f"the proxy ended:\n{self.log_text()}"
        for line in self.log_text().splitlines():
            if '"ready"' in line and line.endswith("}"):
                told = json.loads(line)
                self.url, self.admin_url = told["listen"], told["admin"]
                return True
        return False

    def terminate(self) -> None:
        """Ask it to end in order; a second time nothing is sent, since that would cut its drain short."""
        assert self.process is not None
        if not self.is_ending and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        self.is_ending = True

    async def stop(self) -> int:
        """End it in order and return its exit status."""
        self.terminate()
        assert self.process is not None
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def fd_count(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    # ---- clients

    async def ask(
        self,
        *,
        stream: bool = False,
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        on_first: Callable[[], None] | None = None,
        **members: Any,
    ) -> Answer:
        """Send a request and return all of its answer; `on_first` is called when the first bytes are there."""
        sent: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, **members}
        if stream:
            sent["stream"] = True
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with self.session.post(
            self.url + path,
            data=json.dumps(sent).encode() if body is None else body,
            headers={"Content-Type": "application/json", **(headers or {})},
        ) as response:
            answer = Answer(response.status, response.headers, b"", first_byte_s=loop.time() - began_s)
            try:
                while chunk := await response.content.readany():
                    if not answer.body and on_first is not None:
                        on_first()
                    answer.body += chunk
            except (aiohttp.ClientError, ConnectionError):
                answer.cut = True
            return answer

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def admin(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.session.request(method, self.admin_url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return what the proxy thinks of each worker, by URL."""
        _, told = await self.admin("GET", "/workers")
        return {worker["url"]: worker for worker in told["workers"]}

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        _, text = await self.get("/metrics")
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"kvproxy_{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, (name, labels)
        return sum(found)

    async def settled(self) -> None:
        """Return when nothing is in flight any more, in the proxy's own figures; fails if that does not come."""

        async def nothing_is_held() -> bool:
            workers = (await self.workers()).values()
            held = [one[key] for one in workers for key in ("requests", "pending_tokens", "active_blocks")]
            return not any(held) and not await self.metric("queue_running") and not await self.metric("queue_waiting")

        await eventually(nothing_is_held, "nothing is in flight")


async def eventually(condition: Callable[[], Awaitable[object]], what: str, *, within_s: float = PATIENCE_S) -> None:
    """Return once `condition` is true; fails after `within_s`."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + within_s
    while not await condition():
        assert loop.time() < ends_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def proxied(
    directory: Path, *arguments: str, p_count: int = 1, d_count: int = 1
) -> AsyncGenerator[Proxy, None]:
    """Give a proxy that serves, as a process of its own, with stub workers behind it."""
    async with _with_workers(directory, arguments, p_count, d_count) as proxy:
        try:
            await proxy.start()
            yield proxy
            status = await proxy.stop()
        except BaseException:
            sys.stderr.write(f"---- log of the proxy\n{proxy.log_text()[-8000:]}----\n")
            raise
        finally:
            await proxy.kill()
        assert status == 0, f"the proxy ended with status {status}:\n{proxy.log_text()[-8000:]}"
        errors = [line for line in proxy.log_text().splitlines() if "Traceback" in line or '"error"' in line]
        assert not errors, "\n".join(errors)


@asynccontextmanager
async def inside(
    directory: Path, *arguments: str, p_count: int = 1, d_count: int = 1
) -> AsyncGenerator[Proxy, None]:
    """Give a proxy that serves on this loop, with stub workers behind it."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        async with _with_workers(directory, arguments, p_count, d_count) as proxy:
            resolution = resolve({"drain-timeout": "1s", **proxy.flags()}, {})
            assert resolution.settings is not None, resolution.faults
            async with running(resolution.settings) as served:
                assert served.admin_url is not None
                proxy.url, proxy.admin_url = served.url, served.admin_url
                yield proxy
    finally:
        logging.getLogger().removeHandler(errors)
    assert not errors.told, "\n".join(errors.told)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(logging.Formatter().format(record))


@asynccontextmanager
async def _with_workers(
    directory: Path, arguments: Sequence[str], p_count: int, d_count: int
) -> AsyncGenerator[Proxy, None]:
    async with contextlib.AsyncExitStack() as stack:
        prefill = [await stack.enter_async_context(StubWorker(Role.PREFILL)) for _ in range(p_count)]
        decode = [await stack.enter_async_context(StubWorker(Role.DECODE)) for _ in range(d_count)]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=2 * PATIENCE_S)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        yield Proxy(directory, prefill, decode, session, list(arguments))


def run(steps: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine, and end it after a while."""

    async def within_patience() -> None:
        async with asyncio.timeout(100):
            await steps

    asyncio.run(within_patience())
