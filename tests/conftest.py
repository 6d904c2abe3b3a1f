"""Fixtures of every test: a private temp directory, free ports, and the proof that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import obstore
import obstore.store
import pytest
import uvloop

from tests import leaks

_PRIVATE_DIR = pytest.StashKey[Path]()
# Workers can't tell their own shared memory from their neighbours': .ci/run looks at it once they are gone.
_ALONE = "PYTEST_XDIST_WORKER" not in os.environ

# In CI two runs of one commit try the same examples; elsewhere each run tries new ones. Nothing is timed: the
# machines are shared.
hypothesis.settings.register_profile(
    "kvstored",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvstored")


def pytest_configure(config: pytest.Config) -> None:
    """Give this process and all it starts a short private temp directory, and no way to a model hub."""
    # pytest's own directories stay where they were: those of failed tests are kept there to be looked at.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    base = tempfile.gettempdir()
    # A unix socket's path has room for 107 bytes.
    private = Path(tempfile.mkdtemp(prefix="kvt-", dir=base if len(base) <= 32 else "/tmp"))
    config.stash[_PRIVATE_DIR] = private
    tempfile.tempdir = os.environ["TMPDIR"] = str(private)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        os.environ[variable] = str(private / variable.lower())
    for variable in [name for name in os.environ if name.startswith(("KVSTORED_", "KVPROXY_", "KVCLIENT_", "KVCTL_"))]:
        del os.environ[variable]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    leaks.adopt_orphans()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the private temp directory; what a session left in it has been reported by then."""
    private = config.stash.get(_PRIVATE_DIR, None)
    if private is not None:
        shutil.rmtree(private, ignore_errors=True)


@pytest.fixture(scope="session")
def private_temp_dir(request: pytest.FixtureRequest) -> Path:
    """Return this worker's own temp directory."""
    return request.config.stash[_PRIVATE_DIR]


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing(private_temp_dir: Path) -> Iterator[None]:
    uvloop.new_event_loop().close()  # opens libuv's signal pipe, once a process
    _open_reactor()
    before = leaks.take(private_temp_dir, shm=_ALONE)
    yield
    left = leaks.leaks(before, private_temp_dir, shm=_ALONE)
    if left:
        pytest.fail("fixtures of this session left behind:\n  " + "\n  ".join(left), pytrace=False)


def _open_reactor() -> None:
    """Have obstore open its reactor's descriptors, once a process."""
    store = obstore.store.MemoryStore()

    async def touch() -> None:
        await obstore.put_async(store, "x", b"")

    asyncio.run(touch())


@pytest.fixture(scope="session")
def tasks_at_loop_end() -> list[str]:
    """Return the tasks that asyncio.run had to cancel since the test began; one that means to clears it."""
    return leaks.note_tasks_at_loop_end()


@pytest.fixture(autouse=True)
def _test_leaves_nothing(
    _session_leaves_nothing: None, private_temp_dir: Path, tasks_at_loop_end: list[str]
) -> Iterator[None]:
    tasks_at_loop_end.clear()
    here = os.getcwd()
    before = leaks.take(private_temp_dir, shm=_ALONE)
    yield
    left = leaks.leaks(before, private_temp_dir, shm=_ALONE)
    left += [f"asyncio task still running at its loop's end: {task}" for task in tasks_at_loop_end]
    if os.getcwd() != here:
        left.append(f"working directory moved from {here} to {os.getcwd()}")
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def short_dir(private_temp_dir: Path) -> Iterator[Path]:
    """Return an empty directory whose path leaves room for a unix socket's name; removed after the test."""
    path = Path(tempfile.mkdtemp(prefix="d-", dir=private_temp_dir))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
