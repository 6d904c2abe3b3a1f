"""RTP-LLM's names: their defaults, what they set here, and that every fault of an environment is told at once."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from kvclient import AsyncClient, Client, Outcome, _greeting
from kvclient.rtp import ALIASES, RtpSettings
from kvstore.errors import BadSetting, PeerUnreachable, UsageError
from tests import product
from tests.client.blocks import empty_buffers, flat_namespace, new_hashes, payloads
from tests.daemon_fixture import Daemon, eventually, running


def test_an_empty_environment_gives_the_defaults_of_rtp_llm() -> None:
    settings = RtpSettings.from_env({"LOAD_CACHE_TIMEOUT_MS": ""})
    assert {alias.name: getattr(settings, alias.name.lower()) for alias in ALIASES} == {
        alias.name: alias.default for alias in ALIASES
    }
    assert not settings.given
    assert settings.client_arguments() == {"deadline_s": 5.0, "connect_retries": 0}
    assert settings.fetch_arguments() == {"deadline_s": 5.0, "wait_s": 0.0}
    assert settings.store_arguments("prefill") == {"wait_s": 0.0}
    assert settings.store_arguments("decode") == {"wait_s": 0.1}


def test_what_is_set_is_taken_in_the_units_of_this_project() -> None:
    settings = RtpSettings.from_env(
        {
            "LOAD_CACHE_TIMEOUT_MS": " 900000 ",
            "DECODE_POLLING_KV_CACHE_STEP_MS": "10",
            "RDMA_CONNECT_RETRY_TIMES": "2",
            "PREFILL_RETRY_TIMES": "1",
            "PREFILL_RETRY_TIMEOUT_MS": "20",
            "PREFILL_MAX_WAIT_TIMEOUT_MS": "30000",
            "DECODE_RETRY_TIMES": "0",
            "DECODE_RETRY_TIMEOUT_MS": "500",
            "DECODE_ENTRANCE": "True",
            "PREFILL_UNKNOWN": "x",
        }
    )
    assert settings.given == {alias.name for alias in ALIASES}
    assert settings.client_arguments() == {"deadline_s": 900.0, "connect_retries": 2}
    assert settings.fetch_arguments() == {"deadline_s": 900.0, "wait_s": 30.0}, "D, the entry, waits for P"
    assert settings.store_arguments("prefill") == {"wait_s": 0.02}
    assert settings.store_arguments("decode") == {"wait_s": 0.0}, "no retries, no waiting"


def test_zero_has_the_meaning_that_it_has_there() -> None:
    settings = RtpSettings.from_env(
        {"LOAD_CACHE_TIMEOUT_MS": "0", "PREFILL_RETRY_TIMES": "1", "PREFILL_RETRY_TIMEOUT_MS": "0"}
    )
    assert settings.load_cache_timeout_ms == 5000
    assert settings.store_arguments("prefill") == {"wait_s": 5.0}, "as long as the load may take"


def test_all_faults_of_an_environment_are_told_at_once() -> None:
    with pytest.raises(BadSetting) as told:
        RtpSettings.from_env(
            {
                "LOAD_CACHE_TIMEOUT_MS": "5s",
                "RDMA_CONNECT_RETRY_TIMES": "-1",
                "PREFILL_MAX_WAIT_TIMEOUT_MS": "1e3",
                "DECODE_RETRY_TIMES": "1000001",
                "DECODE_ENTRANCE": "perhaps",
            }
        )
    text = str(told.value)
    assert "LOAD_CACHE_TIMEOUT_MS='5s' must be a whole number of milliseconds from 0 to 86400000" in text
    assert "DECODE_ENTRANCE='perhaps' is no switch" in text
    for name in ("RDMA_CONNECT_RETRY_TIMES", "PREFILL_MAX_WAIT_TIMEOUT_MS", "DECODE_RETRY_TIMES"):
        assert name in text


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_CACHE_TIMEOUT_MS", "1234")
    assert RtpSettings.from_env().load_cache_timeout_s == pytest.approx(1.234)


def test_the_page_has_every_name_with_its_default() -> None:
    page = (product.ROOT / "docs" / "rtp-llm.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+?) \|", page, re.MULTILINE))
    assert rows == {alias.name: "false" if alias.unit == "switch" else str(alias.default) for alias in ALIASES}


def test_a_client_takes_the_arguments(short_dir: Path) -> None:
    arguments = RtpSettings.from_env({"LOAD_CACHE_TIMEOUT_MS": "2000"}).client_arguments()
    with Client(short_dir / "nobody", **arguments) as client:
        assert client.deadline_s == 2.0
    assert AsyncClient(short_dir / "nobody", **arguments).deadline_s == 2.0
    with pytest.raises(UsageError, match="connect_retries"):
        Client(short_dir / "nobody", connect_retries=-1)


# ---- RDMA_CONNECT_RETRY_TIMES


def test_a_connection_is_tried_again_with_pauses_that_double(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, pauses = [0], list[float]()

    def refuse(*_: object) -> None:
        tried[0] += 1
        raise PeerUnreachable("nobody is there")

    monkeypatch.setattr("kvclient._greeting.greet", refuse)
    monkeypatch.setattr("kvclient._greeting.time.sleep", pauses.append)
    with Client(short_dir / "nobody", connect_retries=3) as client:
        assert not client.ping()
        assert tried == [4]
        assert pauses == [0.01, 0.02, 0.04]
        assert not client.ping()
        assert tried == [4], "turned away at once from then on"


def test_retries_end_by_the_deadline_of_the_call(short_dir: Path) -> None:
    with Client(short_dir / "nobody", connect_retries=1_000_000) as client:
        began_at = time.monotonic()
        assert not client.ping(deadline_s=0.2)
        assert time.monotonic() - began_at < 10


def test_a_retry_finds_a_daemon_that_starts_meanwhile(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(short_dir, ssd=None)
    hashes = new_hashes(2)
    refused = threading.Event()

    def greet(path: Path, client: str, deadline_at: float) -> _greeting.Greeting:
        try:
            return real(path, client, deadline_at)
        except PeerUnreachable:
            refused.set()
            raise

    real = _greeting.greet
    monkeypatch.setattr("kvclient._greeting.greet", greet)
    with Client(daemon.socket, connect_retries=1_000_000) as client:
        blocks = client.namespace(flat_namespace())
        found: list[int] = []
        waiter = threading.Thread(
            target=lambda: found.append(blocks.store(hashes, payloads(hashes), deadline_s=90).stored)
        )
        waiter.start()
        try:
            assert refused.wait(60)
            daemon.start()
            waiter.join(100)
            assert found == [2]
        finally:
            daemon.kill()
            waiter.join(100)


async def _ping_again(client: AsyncClient) -> None:
    assert not await client.ping(deadline_s=5)
    assert not await client.ping(deadline_s=5)
    await client.close()


def test_an_async_client_tries_again_too(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = [0]

    def refuse(*_: object) -> None:
        tried[0] += 1
        raise PeerUnreachable("nobody is there")

    monkeypatch.setattr("kvclient._greeting.greet", refuse)
    asyncio.run(_ping_again(AsyncClient(short_dir / "nobody", connect_retries=2)))
    assert tried == [3]


# ---- LOAD_CACHE_TIMEOUT_MS: what arrived by the deadline is kept


def test_a_load_whose_deadline_passes_keeps_what_arrived(short_dir: Path) -> None:
    """D waits for a prefix of which P stores only the head in time."""
    arguments = RtpSettings.from_env({"LOAD_CACHE_TIMEOUT_MS": "1500", "DECODE_ENTRANCE": "1"})
    hashes = new_hashes(6)
    expected = payloads(hashes)
    with running(short_dir, ssd=None) as daemon, Client(daemon.socket, **arguments.client_arguments()) as client:
        blocks = client.namespace(flat_namespace(salt=b"load"))
        assert blocks.store(hashes[:4], expected[:4], deadline_s=60).stored == 4
        into = empty_buffers(6)
        began_at = time.monotonic()
        result = blocks.fetch(hashes, into, **arguments.fetch_arguments())
        took_s = time.monotonic() - began_at
        assert 1.0 < took_s < 30, "it waited for the rest, to the deadline"
        assert result.hits == 4
        assert [bytes(buffer) for buffer in into[:4]] == expected[:4]
        assert set(result.outcomes[4:]) <= {Outcome.ABSENT, Outcome.DEADLINE}


def test_a_load_that_is_cut_off_in_the_middle_keeps_what_was_copied(short_dir: Path) -> None:
    """The daemon stops after the first window's copy; the deadline passes while the second is waited for."""
    count = 1500  # more than a window
    size = 4096
    hashes = new_hashes(count)
    expected = payloads(hashes, size)
    with running(short_dir, ssd=None) as daemon, Client(daemon.socket) as client:
        blocks = client.namespace(flat_namespace(size, salt=b"cut"))
        eventually(lambda: not blocks.store(hashes, expected).failed, "there is room for all")
        arrived: list[int] = []

        def stop(done: int, _: int) -> None:
            arrived.append(done)
            daemon.signal(signal.SIGSTOP)

        into = [bytearray(size) for _ in range(count)]
        try:
            # The next window may be on its way already when the daemon stops; the third is not.
            result = blocks.fetch(hashes, into, progress=stop, deadline_s=3)
        finally:
            daemon.signal(signal.SIGCONT)
        assert result.hits >= arrived[0] > 0
        assert [bytes(buffer) for buffer in into[: result.hits]] == expected[: result.hits]
        assert all(outcome in (Outcome.HIT, Outcome.DEADLINE) for outcome in result.outcomes)
