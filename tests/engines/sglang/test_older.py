"""The tests of this directory pass with an older SGLang too, in a process of its own: one imports a single version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_WITHIN_S = 800


@pytest.mark.timeout(_WITHIN_S + 60)
def test_all_of_it_holds_with_an_older_version() -> None:
    older = os.environ.get("OLDER_SGLANG_ENVIRONMENT")
    if not older:
        pytest.skip("needs an environment with an older SGLang: make test-engines")
    environment = os.environ | {"SGLANG_ENVIRONMENT": older, "OLDER_SGLANG_ENVIRONMENT": ""}
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "sglang", here]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None
    assert int(passed[1]) >= 60, ended.stdout[-2000:]
