"""A client in a process of its own, moved step by step from a test: it can be stopped, killed and forked at any point.

`with puppet(daemon) as client: client.reserve(...)` sends one line of JSON to the process and waits for one line back.
Run as a module this file is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.wire import Outcome
from tests.rawclient import RawClient, keys, namespace, payload

ROOT = Path(__file__).resolve().parent.parent


class Puppet:
    """The test's end. Methods return what `Strings` in the other process returns."""

    def __init__(self, socket: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.puppet", str(socket)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def begin(self, verb: str, *arguments: Any) -> None:
        """Let the process begin something without waiting for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        """Return what the process says when it is done."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client's process ended with {self.process.wait()}"
        return json.loads(line)

    def call(self, verb: str, *arguments: Any) -> Any:
        """Let the process do something and return what it says."""
        self.begin(verb, *arguments)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@contextlib.contextmanager
def puppet(socket: Path) -> Generator[Puppet, None, None]:
    """Give a connected client process; it is killed in the end if it still runs."""
    made = Puppet(socket)
    try:
        assert made.end() == "ready"
        yield made
    finally:
        made.kill()
        for pipe in (made.process.stdin, made.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Strings:
    """The other process's end: what it can be told to do."""

    def __init__(self, socket: Path) -> None:
        self._client = RawClient(socket)
        self._space = namespace(4096)
        self._ns = 0
        self._hashes: list[bytes] = []
        self._reserved = wire.Reserved(0, 0, b"", [], 0.0)
        self._acquired = wire.Acquired(0, 0, 0.0, b"", [])
        self._sent_s = 0.0

    def open(self, block_bytes: int, model: str = "m") -> int:
        self._space = namespace(block_bytes, model)
        self._ns = self._client.open(self._space)
        return self._ns

    def put(self, count: int, label: str) -> list[int]:
        return list(self._client.put(self._ns, keys(count, label)))

    def get(self, count: int, label: str) -> list[int]:
        return list(self._client.get(self._ns, keys(count, label)))

    def reserve(self, count: int, label: object) -> list[int]:
        self._hashes = keys(count, label)
        self._reserved = self._client.reserve(self._ns, self._hashes)
        return list(self._reserved.outcomes)

    def write(self, share: float = 1.0) -> None:
        """Write what was granted, or only the leading part of each block."""
        for outcome, offset, block_hash in zip(
            self._reserved.outcomes, self._reserved.offsets, self._hashes, strict=True
        ):
            if outcome == Outcome.GRANTED:
                content = payload(self._space.digest, block_hash, self._space.block_bytes)
                self._client.write(offset, content[: int(len(content) * share)])

    def write_for(self, seconds: float) -> list[int]:
        """Write over and over what was granted, then seal it."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self.write()
        return self.seal()

    def seal(self) -> list[int]:
        """Seal what was granted; [0] when the ticket is over."""
        try:
            request = wire.Seal(self._client.next_id(), self._reserved.ticket)
            return list(self._client.ask(request, wire.Sealed).outcomes)
        except KVStoreError:
            return [0]

    def forfeit(self) -> None:
        self._client.ask(wire.Forfeit(self._client.next_id(), self._reserved.ticket))

    def acquire(self, count: int, label: str, options: dict[str, Any]) -> list[int]:
        self._hashes = keys(count, label)
        self._sent_s = time.monotonic()
        self._acquired = self._client.acquire(self._ns, self._hashes, **options)
        return list(self._acquired.outcomes)

    def exact(self) -> bool:
        """Return whether every block that was acquired is what it must be, read now from the pool."""
        return all(
            self._client.peek(offset, self._space.block_bytes)
            == payload(self._space.digest, block_hash, self._space.block_bytes)
            for outcome, offset, block_hash in zip(
                self._acquired.outcomes, self._acquired.offsets, self._hashes, strict=True
            )
            if outcome == Outcome.HIT
        )

    def read_for(self, seconds: float) -> str:
        """Read over and over what was acquired; "wrong" if a copy that ended within the lease is not exact."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            exact = self.exact()
            in_time = time.monotonic() < self._sent_s + self._acquired.lease_s
            if not in_time:
                return "over"
            if not exact:
                return "wrong"
        return "exact"

    def release(self) -> None:
        self._client.release(self._acquired.lease)

    def hang_up(self) -> None:
        """Close the connection without a word; the process and its mapping of the pool live on."""
        self._client.socket.close()

    def say_goodbye(self) -> None:
        """Close the connection in order."""
        self._client.close()

    def fork(self) -> int:
        """Return a child that has everything open and does nothing."""
        child = os.fork()
        if child == 0:
            # The test's end of the pipes must see this process's end, not its child's.
            os.close(0)
            os.close(1)
            signal.pause()
            os._exit(0)
        return child


def main() -> None:
    strings = Strings(Path(sys.argv[1]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(strings, verb)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
