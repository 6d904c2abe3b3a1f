"""Cases Z: hostile input that is no code. Numbers without end, texts without a bottom, names that command."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvctl.cli import main
from kvctl.reports import NamespaceReport, StatsReport, StatusReport
from kvctl.view import Frame, render
from kvstored.logs import JsonFormatter, TextFormatter, fields
from tests.daemon_fixture import Daemon, start_and_fail
from tests.product import ROOT

DIGITS = "9" * 5000  # Python refuses to read more than 4300
NESTED = 100_000
MODEL: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip
CONTROLS = "\x1b[31m\x9b31m\x85\u2028\u202e"


# ---- numbers without end, texts without a bottom


def test_z01_numbers_without_end_are_faults_told_with_all_others() -> None:
    given = {
        "io-threads": DIGITS, "http": f"127.0.0.1:{DIGITS}", "sessions-max": DIGITS, "ttl": DIGITS, "cpu-size": DIGITS,
        "high-watermark": DIGITS, "tenant": f"a=uid:{DIGITS}", "quota": f"a:cpu={DIGITS}", "lease-max": "nan",
        "reservation": "-1", "low-watermark": "inf",
    }  # fmt: skip
    flags = [word for key, text in given.items() for word in (f"--{key}", text)]
    command = [sys.executable, "-m", "kvstored", "--check", *flags]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2, answer.stderr[-2000:]
    assert "Traceback" not in answer.stderr
    for key in given:
        assert f"\n  {key} = " in answer.stderr, f"{key} is not among the faults"


@pytest.mark.parametrize(
    "content",
    [f"ttl = {'9' * 400}", f"cpu-size = {DIGITS}", "x = " + "[" * NESTED, "x = " + "{a=" * NESTED, "ttl = nan"],
    ids=["a life", "a size", "lists", "tables", "no number"],
)
def test_z01_a_config_file_without_a_bottom_is_a_fault(short_dir: Path, content: str) -> None:
    config = short_dir / "config.toml"
    config.write_text(content)
    status, text = start_and_fail(Daemon(short_dir, "--config", str(config), cpu="8MiB", ssd=None))
    assert status == 2, text
    assert str(config) in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": 10**12},
        {"head_dim": 10**400},
        {"head_dim": float("nan")},
        {"num_attention_heads": 10**30, "num_key_value_heads": 10**30, "head_dim": 1},
        {"model_type": "llama4_text", "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "no_rope_layers": 5},
        {"sliding_window": [1], "model_type": "mistral"},
        {"sliding_window": 10**300, "model_type": "mistral"},
        {"num_key_value_heads": True},
        {"layer_types": [["full_attention"]] * 32},
    ],
    ids=lambda changed: ",".join(changed),
)
def test_z01_a_models_config_of_impossible_values_is_refused_or_not_sized(
    short_dir: Path, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = short_dir / "config.json"
    path.write_text(json.dumps({**MODEL, **changed}))
    assert main(["size", "--config", str(path)]) in (1, 2)
    assert capsys.readouterr().err


@pytest.mark.parametrize("content", ["[" * NESTED, '{"text_config":' * 500 + json.dumps(MODEL) + "}" * 500, DIGITS])
def test_z01_a_models_config_without_a_bottom_is_refused(
    short_dir: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = short_dir / "config.json"
    path.write_text(content)
    assert main(["size", "--config", str(path)]) == 2
    assert len(capsys.readouterr().err) < 1000


def test_z01_a_models_config_that_never_ends_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--config", "/dev/zero"]) == 2
    assert "/dev/zero" in capsys.readouterr().err


# ---- names that command terminals, and lines


def commands(text: str) -> set[str]:
    """Return the characters of `text` that a terminal or a reader of lines would obey."""
    return {character for character in text if not character.isprintable() and character != "\n"}


def test_z01_a_models_config_can_not_command_the_terminal(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = short_dir / "config.json"
    for field in ("sliding_window", "torch_dtype", "model_type", "layer_types"):
        value: object = [CONTROLS] * 32 if field == "layer_types" else CONTROLS
        path.write_text(json.dumps({**MODEL, field: value}))
        main(["size", "--config", str(path)])
        told = capsys.readouterr()
        assert commands(told.out + told.err) == set(), field


@pytest.mark.parametrize("model", ["a[/b]", "[bold red]a", "[link=http://x]a[/link]", "[@click=x]a"])
def test_z01_a_models_name_is_shown_by_top_as_it_is(model: str) -> None:
    stats = StatsReport(namespaces=[NamespaceReport("ab" * 32, model=model, revision="r")])
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(render(Frame(StatusReport(), stats, None, "used", "12:00:00", 1.0, 120, 40)))
    assert isinstance(console.file, io.StringIO)
    assert f"{model}@r" in console.file.getvalue()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_z01_a_clients_name_can_not_command_a_terminal_nor_forge_a_line_of_the_log(
    formatter: logging.Formatter,
) -> None:
    record = logging.LogRecord("kvstored", logging.WARNING, "", 0, f"event {CONTROLS}", (), None)
    record.__dict__.update(fields(client=f"{CONTROLS}\nINFO forged", plain="über", both=[CONTROLS]))
    line = formatter.format(record)
    assert commands(line) == set()
    assert len(line.splitlines()) == 1
    assert "über" in line or "\\u00fc" in line
