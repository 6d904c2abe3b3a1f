"""Settings of the proxy: where they come from, RTP-LLM's names, and faults, all told at once."""

from __future__ import annotations

import dataclasses
import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvclient.rtp import ALIASES
from kvproxy.cli import as_toml, main
from kvproxy.options import OPTIONS, TABLE
from kvproxy.settings import TOKEN_VARIABLE, Settings, field_of, resolve
from kvproxy.types import Endpoint, Role

DECODE = {"decode": "http://127.0.0.1:1"}


def settings(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> Settings:
    found = resolve(flags or DECODE, environ or {})
    assert found.settings is not None, found.faults
    return found.settings


def test_each_option_sets_a_field_and_each_field_has_an_option() -> None:
    assert {field_of(option.key) for option in OPTIONS} == {field.name for field in dataclasses.fields(Settings)}


def test_defaults_of_the_table_are_those_of_the_settings() -> None:
    found = settings()
    for field in dataclasses.fields(Settings):
        if field.default is not dataclasses.MISSING and field.name != "decode":
            assert getattr(found, field.name) == field.default, field.name


def test_workers_are_urls_with_the_node_behind() -> None:
    found = settings({"prefill": ["http://10.0.0.1:8000/,https://p.example:1/base#rack-1"], "decode": "http://[::1]:9"})
    assert found.prefill == (
        Endpoint("http://10.0.0.1:8000", Role.PREFILL, "10.0.0.1"),
        Endpoint("https://p.example:1/base", Role.PREFILL, "rack-1"),
    )
    assert found.decode == (Endpoint("http://[::1]:9", Role.DECODE, "::1"),)


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:8000",
        "ftp://a:1",
        "http://",
        "http://a:b",
        "http://a:99999",
        "http://a:0",
        "http://u:p@a:1",
        "http://a?x=1",
    ],
)
def test_what_is_no_worker_is_told_with_what_would_be(url: str) -> None:
    (fault,) = resolve({"decode": url}, {}).faults
    assert fault.key == "decode"
    assert "write http://HOST:PORT" in fault.problem


def test_a_flag_goes_before_a_variable_before_an_alias_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(
        'decode = ["http://f:1"]\nprefill-retries = 7\ndecode-retries = 8\nentrance = "decode"\ndeadline = "9s"\n'
    )
    environ = {
        "KVPROXY_DECODE": "http://v:1;http://w:1",
        "PREFILL_RETRY_TIMES": "5",
        "KVPROXY_DECODE_RETRIES": "3",
        "DECODE_RETRY_TIMES": "4",
    }
    found = resolve({}, environ, file)
    assert found.settings is not None, found.faults
    assert [endpoint.url for endpoint in found.settings.decode] == ["http://v:1", "http://w:1"]
    assert (found.settings.prefill_retries, found.settings.decode_retries) == (5, 3)
    assert (found.settings.entrance, found.settings.deadline_s) == ("decode", 9.0)
    assert found.sources["prefill-retries"] == "variable PREFILL_RETRY_TIMES"
    assert found.sources["decode"] == "variable KVPROXY_DECODE"
    assert found.sources["deadline"] == f"file {file}"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("PREFILL_RETRY_TIMES", "2", "prefill_retries", 2),
        ("PREFILL_RETRY_TIMEOUT_MS", "20", "prefill_retry_s", 0.02),
        ("PREFILL_MAX_WAIT_TIMEOUT_MS", "600000", "prefill_wait_s", 600.0),
        ("DECODE_RETRY_TIMES", "100", "decode_retries", 100),
        ("DECODE_RETRY_TIMEOUT_MS", "100", "decode_retry_s", 0.1),
        ("DECODE_ENTRANCE", "1", "entrance", "decode"),
        ("DECODE_ENTRANCE", "false", "entrance", "prefill"),
    ],
)
def test_names_of_rtp_llm_set_what_they_mean_here(name: str, text: str, field: str, value: object) -> None:
    assert getattr(settings(environ={name: text}), field) == value


def test_each_alias_is_one_that_rtp_llm_has() -> None:
    assert {alias.variable for alias in TABLE.aliases} <= {alias.name for alias in ALIASES}


def test_a_bad_alias_is_a_fault_that_names_it() -> None:
    (fault,) = resolve(DECODE, {"PREFILL_RETRY_TIMES": "many"}).faults
    assert fault.source == "variable PREFILL_RETRY_TIMES"
    assert "whole number" in fault.problem


def test_all_faults_are_told_at_once() -> None:
    found = resolve(
        {"listen": "nowhere", "running-max": "0", "prefill": "x", "on-prefill-loss": "maybe", "namespace": "m"},
        {"KVPROXY_DEADLIN": "1s"},
    )
    assert found.settings is None
    assert {fault.key for fault in found.faults} >= {
        "listen", "running-max", "prefill", "on-prefill-loss", "namespace", "KVPROXY_DEADLIN", "decode",
    }  # fmt: skip
    assert "did you mean KVPROXY_DEADLINE?" in str(found.faults)


@pytest.mark.parametrize(
    ("flags", "key", "word"),
    [
        ({}, "decode", "a decode worker is needed"),
        ({**DECODE, "prefill": "http://127.0.0.1:1"}, "decode", "as the latter alone it does both"),
        ({"decode": "http://a:1,http://a:1/"}, "decode", "named twice"),
        ({**DECODE, "admin": "127.0.0.1:0"}, "admin", "needs a token"),
        ({**DECODE, "admin-token-file": "/x"}, "admin-token-file", "no effect without --admin"),
        ({**DECODE, "listen": "off"}, "listen", "nothing to do"),
        ({**DECODE, "body-size": "1GiB"}, "body-size", "raise --bodies-size"),
        ({**DECODE, "store": "/s", "tokenizer": "off"}, "tokenizer", "asked by tokens"),
        ({**DECODE, "block-hash": "sha256_cbor"}, "block-hash", "no effect without --store"),
        ({**DECODE, "store": "/s", "fetch-speed": "moon=1"}, "fetch-speed", "no tier 'moon'"),
        ({**DECODE, "store": "/s", "fetch-speed": "cpu=fast"}, "fetch-speed", "tokens a second"),
    ],
)
def test_what_can_t_be_is_a_fault_that_says_what_to_do(flags: dict[str, Any], key: str, word: str) -> None:
    found = resolve(flags, {})
    assert [fault.key for fault in found.faults] == [key]
    assert word in found.faults[0].problem


def test_the_token_s_variable_is_no_setting_and_is_enough() -> None:
    assert settings({**DECODE, "admin": "127.0.0.1:0"}, {TOKEN_VARIABLE: "x" * 32}).admin == ("127.0.0.1", 0)


def test_a_tier_left_out_keeps_its_speed() -> None:
    speeds = settings({**DECODE, "store": "/s", "fetch-speed": "ssd=5000"}).fetch_tokens_per_s
    assert speeds["ssd"] == 5000
    assert speeds["cpu"] == 400_000


@pytest.mark.parametrize("explain", [False, True])
def test_what_is_printed_is_a_file_that_gives_the_same_settings(tmp_path: Path, explain: bool) -> None:
    flags = {
        **DECODE,
        "prefill": "http://p:1#n",
        "store": "/run/s",
        "fetch-speed": "cpu=7",
        "deadline": "90s",
        "admin": "[::1]:5",
        "admin-token-file": "/t",
    }
    first = resolve(flags, {})
    assert first.settings is not None, first.faults
    file = tmp_path / "proxy.toml"
    file.write_text(as_toml(first.settings, first.sources, explain=explain))
    again = resolve({}, {}, file)
    assert again.settings == first.settings, again.faults
    if explain:
        assert all(option.summary in file.read_text() for option in OPTIONS)
    tomllib.loads(file.read_text())


def test_the_command_leaves_the_signals_of_who_called_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    assert main(["--check", "--decode", "http://127.0.0.1:9"]) == 0
    assert signal.getsignal(signal.SIGHUP) == before


def test_check_tells_settings_and_faults_with_the_status_that_belongs_to_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--check", "--json", "--decode", "http://127.0.0.1:1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert told["settings"]["decode"]["value"] == ["http://127.0.0.1:1#127.0.0.1"]
    assert main(["--check", "--json"]) == 2
    assert [fault["key"] for fault in json.loads(capsys.readouterr().out)["faults"]] == ["decode"]
    assert main(["--decode", "x", "--nonsense"]) == 2
    text = capsys.readouterr().err
    assert "2 faults" in text
    assert "--nonsense" in text
