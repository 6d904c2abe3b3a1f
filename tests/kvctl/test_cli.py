"""The command line as a whole: exit codes, where texts go, what needs no daemon."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvctl import parser
from kvctl.cli import VERBS, main
from kvctl.exits import Exit, exit_of
from kvstore import errors
from tests.kvctl.test_sizing import config_of, rows

ROOT = Path(__file__).parent.parent.parent


def program(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client"))), **how.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "kvctl", *words], env=environ, capture_output=True, text=True, check=False, **how
    )


def test_no_daemon_ends_with_3_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", str(tmp_path / "none.sock")]) == Exit.UNREACHABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert "none.sock" in err
    assert "start kvstored" in err
    assert "--socket PATH" in err


def test_a_daemon_that_does_not_answer_ends_with_3_at_the_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        assert main(["--timeout", "50ms", "ping", "--socket", str(tmp_path / "s")]) == Exit.UNREACHABLE
    assert "kvctl:" in capsys.readouterr().err


def test_a_socket_path_that_fits_no_address_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("x" * 120)
    assert main(["ping", "--socket", str(path)]) == Exit.USAGE
    assert "107" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.PeerUnreachable("x"), 3),
        (errors.DeadlineExceeded("x"), 3),
        (errors.BadNamespace("x"), 2),
        (errors.BadSetting("x"), 2),
        (errors.NotPermitted("x"), 1),
        (errors.LeaseExpired("x"), 1),
        (errors.TooManyLeases("x"), 1),
        (errors.TierUnavailable("x"), 1),
        (errors.ChecksumMismatch("x"), 1),
        (errors.RemoteProtocolError("x"), 1),
    ],
)
def test_each_error_has_its_exit_code(error: errors.KVStoreError, code: int) -> None:
    assert exit_of(error) == code


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["pin", "ns", "ab" * 32],
        ["evict"],
        ["evict", "--tier", "cpu", "--bytes", "4G"],
        ["evict", "--tier", "cpu", "--older-than", "old"],
        ["keys", "ns", "--limit", "0"],
        ["drop", "--all", "--namespace", "x"],
        ["--timeout", "-1s", "ping"],
    ],
)
def test_a_wrong_command_line_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == Exit.USAGE
    assert "usage: kvctl" in capsys.readouterr().err


def test_every_verb_of_the_parser_is_there() -> None:
    for verb in (*VERBS, "size", "completion", "version"):
        with pytest.raises(SystemExit) as caught:
            parser.build().parse_args([verb, "--help"])
        assert caught.value.code == 0


@pytest.mark.parametrize("words", [["--json", "version"], ["version", "--json"]])
def test_an_option_may_stand_before_or_behind_the_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["protocol_max"] >= 1


def test_top_without_a_terminal_points_to_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--socket", str(tmp_path / "none.sock")]) == Exit.USAGE
    assert "stats --watch" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_verbs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == Exit.DONE
    script = capsys.readouterr().out
    assert "namespaces" in script
    assert "older-than" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes_verbs_and_options() -> None:
    script = program("completion", "bash").stdout
    ask = "COMP_WORDS=(kvctl dr); COMP_CWORD=1; _shtab_kvctl; printf '%s ' \"${COMPREPLY[@]}\""
    found = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["drop", "drain"] or found.stdout.split() == ["drain", "drop"]


def test_kvctl_does_not_wait_for_rich_unless_it_draws() -> None:
    code = "import sys; from kvctl.cli import main; main(['version']); sys.exit('rich' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True)


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    command = f"{sys.executable} -m kvctl completion bash | true"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client")))}
    found = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=False)
    assert found.stderr == ""


# ---- size


@pytest.fixture
def model(tmp_path: Path) -> Path:
    row = next(row for row in rows() if row["model"] == "gpt-oss-120b")
    (tmp_path / "config.json").write_text(json.dumps(config_of(row)))
    return tmp_path


def test_size_of_a_directory_in_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--config", str(model), "--tokens", "1000", "--tp", "8", "--fit", "1GiB", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["bytes_per_token"] == 73728
    assert body["rank_bytes_per_token"] == 9216
    assert body["growth_bytes_per_token"] == 36864
    assert body["window_bytes"] == 128 * 36864
    assert body["block"] == {"tokens": 16, "rank_bytes": 147456, "rank_slot_bytes": 147456}
    assert body["prompts"][0] == {
        "tokens": 1000, "bytes": 73728000, "engine_bytes": 36864 * 1128, "full_blocks": 62, "stored_bytes": 73728 * 992,
    }  # fmt: skip
    assert body["fit"] == {"bytes": 1 << 30, "blocks": 7281, "tokens": 116496}


def test_size_shows_its_arithmetic(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--config", str(model / "config.json"), "--dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "36,864 B = 2 x 36 layers x 8 heads x (64 = 64 B)" in out
    assert "18 layers of 128 tokens" in out


def test_size_of_a_hybrid_gives_no_total_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["size", "--config", str(tmp_path), "--json"]) == Exit.FAILED
    out, err = capsys.readouterr()
    body = json.loads(out)
    assert body["bytes_per_token"] is None
    assert body["sized_layers_bytes_per_token"] == 24576
    assert "36 layers of kind linear_attention" in err


@pytest.mark.parametrize("content", ["", "[]", "{", '{"num_hidden_layers": 2}', '{"num_hidden_layers": -1}'])
def test_size_of_what_is_no_config_ends_with_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["size", "--config", str(tmp_path)]) == Exit.USAGE
    assert capsys.readouterr().err.startswith("kvctl: ")


def test_size_of_nothing_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--config", str(tmp_path)]) == Exit.USAGE
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["head_dim", "head_dim=x", "=3"])
def test_a_field_without_a_number_is_refused(word: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--config", str(model), "--set", word]) == Exit.USAGE
    assert "--set head_dim=128" in capsys.readouterr().err
