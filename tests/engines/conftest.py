"""Engines write to directories of their own as soon as they are imported; here these are removed again."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiler_cache(private_temp_dir: Path) -> Iterator[None]:
    """Give torch's compiler, which some models import, a directory for its cache."""
    directory = tempfile.mkdtemp(prefix="torch-", dir=private_temp_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", directory)
        yield
    shutil.rmtree(directory)
