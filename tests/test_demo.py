"""The demo with a tiny model: what it prints, when it succeeds, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.findings import Findings
from demo.processes import Daemon, Failed, Worker
from tests.product import ROOT

PROMPT, NEW, SIZE = 200, 8, 16
KEYS = ["demo", "tokens_identical", "hit_blocks", "ttft_cold_s", "ttft_cpu_s", "ttft_ssd_s"]


@pytest.fixture(scope="module")
def tiny(private_temp_dir: Path) -> Iterator[Path]:
    # In a process of its own, for torch leaves a directory behind where it is imported.
    directory = Path(tempfile.mkdtemp(prefix="tiny-", dir=private_temp_dir))
    program = "import sys, pathlib; from demo.model import *; write_model(pathlib.Path(sys.argv[1]), TINY)"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory / "torch")}
    subprocess.run([sys.executable, "-c", program, directory], cwd=ROOT, env=environment, check=True)
    yield directory
    shutil.rmtree(directory)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "demo.pd", *map(str, arguments)]


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_demo_ends_with_one_line_of_json_and_status_0(tiny: Path) -> None:
    done = run("--prompt-tokens", PROMPT, "--new-tokens", NEW, MODEL=str(tiny))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == KEYS
    assert result["demo"] == "pd"
    assert result["tokens_identical"] is True
    assert result["hit_blocks"] == 2 * ((PROMPT - 1) // SIZE)
    assert all(result[key] > 0 for key in KEYS[3:])
    assert "identical" in done.stdout
    assert "evicted" in done.stdout
    steps = [line for line in done.stderr.splitlines() if line.startswith("demo:")]
    assert len(steps) == 9
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(("number", "step", "status"), [(signal.SIGINT, 6, 130), (signal.SIGTERM, 1, 143)])
def test_an_interrupted_demo_takes_everything_with_it(
    tiny: Path, number: signal.Signals, step: int, status: int
) -> None:
    # Of the processes, files and shared memory of each test nothing may be left: tests/conftest.py looks.
    demo = subprocess.Popen(
        command("--model", tiny, "--prompt-tokens", PROMPT),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stderr is not None
    for line in demo.stderr:
        if f"[{step}/" in line:
            break
    demo.send_signal(number)
    output, _ = demo.communicate()
    assert demo.returncode == status
    assert output == ""


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("--model", "/nowhere"), {}, "no config.json"),
        ((), {"MODEL": "/nowhere"}, "no config.json"),
        (("--prompt-tokens", "16"), {}, "--prompt-tokens"),
        (("--prompt-tokens", "many"), {}, "--prompt-tokens"),
    ],
)
def test_wrong_arguments_end_with_status_2(arguments: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    done = run(*arguments, **variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_model_that_can_not_be_loaded_is_told_with_the_engine_s_log(short_dir: Path) -> None:
    (short_dir / "config.json").write_text("{}")
    done = run("--model", short_dir)
    assert done.returncode == 1
    assert "demo: alone:" in done.stderr
    assert done.stdout == ""


def test_a_daemon_that_does_not_start_is_told_with_its_log(short_dir: Path) -> None:
    daemon = Daemon(short_dir, cpu_size_bytes=1, ssd_size_bytes=1)
    try:
        with pytest.raises(Failed, match=r"(?s)exit code 2 while starting.*cpu-size"):
            daemon.await_ready()
    finally:
        daemon.stop()


def test_an_engine_that_dies_is_told(short_dir: Path) -> None:
    worker = Worker("P", short_dir / "log")
    try:
        worker.signal(signal.SIGKILL)
        with pytest.raises(Failed, match="P: ended"):
            worker.call("load", model="/nowhere")
    finally:
        worker.stop()


def report(cpu: int, ssd: int) -> dict[str, Any]:
    return {
        "totals": {"hit_blocks": {"cpu": cpu, "ssd": ssd}, "misses": {"absent": 3, "expired": 0}, "stored_blocks": 2},
        "tiers": {tier: {"evictions": {"pressure": 1, "ttl": 0}, "blocks": 2} for tier in ("cpu", "ssd")},
    }


def answer(**changes: Any) -> dict[str, Any]:
    usual = {"tokens": [5, 6], "ttft_s": 1.0, "load_s": 0.1, "loaded_tokens": 32, "failure": "", "lead": 0.1}
    return {**usual, "stored": 2, "durable": 2, **changes}


def findings(**changes: Any) -> Findings:
    usual: dict[str, Any] = {
        "prompt_tokens": 40,
        "block_tokens": SIZE,
        "block_bytes": 4096,
        "alone": answer(loaded_tokens=0),
        "prefill": answer(tokens=[5], loaded_tokens=0),
        "from_cpu": answer(),
        "from_ssd": answer(),
        "reports": [report(2, 0), report(0, 2)],
    }
    return Findings(**{**usual, **changes})


def test_what_held_has_no_faults() -> None:
    assert findings().faults() == []
    assert findings().summary()["hit_blocks"] == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"from_ssd": answer(tokens=[5, 7])}, "tokens differ"),
        ({"prefill": answer(tokens=[6])}, "tokens differ"),
        ({"alone": answer(tokens=[]), "from_cpu": answer(tokens=[]), "from_ssd": answer(tokens=[])}, "tokens differ"),
        ({"from_cpu": answer(loaded_tokens=16)}, "given 1 blocks from cpu"),
        ({"from_ssd": answer(loaded_tokens=0, failure="no daemon")}, "no daemon"),
        ({"reports": [report(2, 0), report(2, 0)]}, "not 2 in ssd"),
        ({"reports": [report(4, 0), report(0, 2)]}, "not 2 in cpu"),
        ({"prefill": answer(tokens=[5], durable=1)}, "came to ssd"),
    ],
)
def test_what_did_not_hold_is_a_fault(changes: dict[str, Any], said: str) -> None:
    assert said in "\n".join(findings(**changes).faults())


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_the_whole_demo_holds() -> None:
    done = run(MODEL="")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == KEYS
    assert result["tokens_identical"] is True
    assert result["hit_blocks"] == 250
