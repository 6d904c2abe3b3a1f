"""Daemons and clients for the tests of this directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient import Client
from tests.daemon_fixture import Daemon, running


@pytest.fixture(scope="module")
def shared_daemon(private_temp_dir: Path) -> Iterator[Daemon]:
    """Return a daemon with a cpu tier for the tests of one file, which use namespaces of their own."""
    directory = Path(tempfile.mkdtemp(prefix="d-", dir=private_temp_dir))
    with running(directory, cpu="128MiB", ssd=None) as daemon:
        yield daemon
    shutil.rmtree(directory)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Daemon]:
    """Return a daemon with a cpu tier for one test, which may do to it what it likes."""
    with running(short_dir, ssd=None) as daemon:
        yield daemon


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[Client]:
    """Return a strict client of the shared daemon: a failure fails the test."""
    with Client(shared_daemon.socket, strict=True) as client:
        yield client
