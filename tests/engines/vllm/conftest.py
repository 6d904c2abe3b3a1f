"""Fixtures of the tests with real vLLM engines: marked `vllm`, run by `make test-engines`.

vLLM is imported once a session for each version, and every engine is a fork of that process: seconds instead of
minutes. Tests share engines where they can; each has prompts of its own, so none finds what another stored.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.vllm_engine import Host
from tests.engines.vllm.node import Baseline, Models, Node, write_models

_HERE = Path(__file__).parent
_TEST_S = 400
# Set by make: the directories that requirements/engines.sh told.
_VARIABLES = {"0.32": "VLLM_ENVIRONMENT", "0.28": "OLDER_VLLM_ENVIRONMENT"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this directory, and give it time: the first test of a file waits for engines."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(_TEST_S))


def environment(version: str) -> Path:
    """Return the directory of a version's environment."""
    told = os.environ.get(_VARIABLES[version])
    if not told:
        pytest.skip(f"needs an environment with vLLM {version}: make test-engines")
    return Path(told)


@pytest.fixture(scope="session")
def scratch(private_temp_dir: Path) -> Iterator[Path]:
    """Return a directory for models and logs."""
    path = Path(tempfile.mkdtemp(prefix="vllm-", dir=private_temp_dir))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def host(scratch: Path) -> Iterator[Host]:
    """Return the process that has imported vLLM."""
    with Host(environment("0.32"), scratch) as host:
        yield host


@pytest.fixture(scope="session")
def models(scratch: Path) -> Models:
    """Return two models of one shape, and two adapters."""
    return write_models(scratch / "models")


@pytest.fixture(scope="session")
def baseline(host: Host, models: Models) -> Iterator[Baseline]:
    """Return what vLLM says without a connector."""
    with Baseline(host, models.one) as baseline:
        yield baseline


@pytest.fixture(scope="module")
def place_dir(private_temp_dir: Path) -> Iterator[Path]:
    """Return a directory where the daemons of a module can be, one after the other."""
    directory = Path(tempfile.mkdtemp(prefix="n-", dir=private_temp_dir))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def node(host: Host, models: Models, place_dir: Path) -> Iterator[Node]:
    """Return a daemon with engines, shared by the tests of a module; none leaves it stopped or full."""
    with Node(host, models.one, place_dir) as node:
        yield node
