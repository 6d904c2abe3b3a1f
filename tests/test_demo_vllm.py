"""The classic deployment's demo: what did not hold is told; with real servers it is run by name (stress)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from demo.vllm import Findings
from demo.vllm_server import Streamed
from tests.product import ROOT


def said(*tokens: int, ttft_s: float = 1.0) -> Streamed:
    return Streamed(tokens, ttft_s, prompt_tokens=100, cached_tokens=96)


def findings(**changes: Any) -> Findings:
    usual: dict[str, Any] = {
        "prompt_tokens": 100,
        "alone": [said(5, 6), said(7, 8)],
        "proxied": [said(5, 6), said(7, 8)],
        "p_requests": [1, 1],
        "given_tokens": [96, 192],
        "hit_blocks": {"cpu": 6, "ssd": 0},
    }
    return Findings(**{**usual, **changes})


def test_what_held_has_no_faults() -> None:
    found = findings()
    assert found.faults() == []
    assert found.summary()["given_tokens"] == 192
    assert found.table().row_count == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"proxied": [said(5, 6), said(7, 9)]}, "tokens differ"),
        ({"alone": [said(), said()], "proxied": [said(), said()]}, "tokens differ"),
        ({"given_tokens": [0, 96]}, "given 0 tokens"),
        ({"given_tokens": [96, 96]}, "given 0 tokens"),
        ({"p_requests": [1, 2]}, "not 1 and 1"),
        ({"p_requests": [0, 0]}, "not 1 and 1"),
        ({"hit_blocks": {"cpu": 0, "ssd": 6}}, "none from memory"),
    ],
)
def test_what_did_not_hold_is_a_fault(changes: dict[str, Any], told: str) -> None:
    assert told in "\n".join(findings(**changes).faults())


@pytest.mark.parametrize("arguments", [("--model", "/nowhere"), ("--prompt-tokens", "16"), ("--new-tokens", "0")])
def test_wrong_arguments_end_with_status_2(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.vllm", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert arguments[0] in done.stderr or "no config.json" in done.stderr
    assert done.stdout == ""


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_the_whole_demo_holds() -> None:
    done = subprocess.run([sys.executable, "-m", "demo.vllm"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tokens_identical"] is True
