"""Servers that the tests of a module share, one of each kind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.remote import servers
from tests.remote.places import Place, place
from tests.remote.servers import Server

KINDS = ("file", "s3", "redis", "cluster")


@pytest.fixture(scope="module")
def servers_dir(private_temp_dir: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="servers-", dir=private_temp_dir))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module", params=KINDS)
def any_server(request: pytest.FixtureRequest, servers_dir: Path) -> Iterator[tuple[str, Server | None]]:
    """Return each kind of store in turn, and its server."""
    kind = str(request.param)
    with ExitStack() as stack:
        server: Server | None = None
        if kind == "s3":
            server = stack.enter_context(servers.s3(servers_dir / kind))
        elif kind == "redis":
            server = stack.enter_context(servers.redis(servers_dir / kind))
        elif kind == "cluster":
            server = stack.enter_context(servers.redis_cluster(servers_dir / kind))[0]
        yield kind, server


@pytest.fixture
def any_place(
    any_server: tuple[str, Server | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """Return an empty place of each kind of store in turn."""
    kind, server = any_server
    with place(kind, tmp_path, monkeypatch, server) as found:
        yield found
