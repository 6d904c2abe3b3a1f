"""Fixtures of the tests with SGLang's own cache modules: marked `sglang`, run by `make test-engines`.

SGLang as a whole needs a GPU. What a storage backend meets does not: hicache_storage.py, the backend factory, the host
pools and the cache controller are imported out of a pinned wheel, with torch and transformers of .venv. absent.py says
what stands in for Triton and torchvision, which other modules name at their top.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_fixture import Daemon, running
from tests.engines.sglang import absent

_HERE = Path(__file__).parent
_TEST_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this directory, and give it time: the first test of a process imports SGLang."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(_TEST_S))


@pytest.fixture(scope="session", autouse=True)
def sglang(private_temp_dir: Path) -> Iterator[str]:
    """Make SGLang importable; returns its version."""
    told = os.environ.get("SGLANG_ENVIRONMENT")
    if not told:
        pytest.skip("needs an environment with SGLang: make test-engines")
    cache = tempfile.mkdtemp(prefix="sglang-", dir=private_temp_dir)
    sys.path.append(told)
    absent.stand_in()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            patch.setenv(variable, cache)
        importlib.import_module("sglang.srt.managers.cache_controller")
    yield importlib.import_module("sglang.version").__version__
    shutil.rmtree(cache)


@pytest.fixture(scope="session")
def session_daemon(private_temp_dir: Path) -> Iterator[Daemon]:
    """Return a daemon for tests that keep their blocks apart by a salt."""
    directory = Path(tempfile.mkdtemp(prefix="d-", dir=private_temp_dir))
    with running(directory, cpu="128MiB", ssd=None) as daemon:
        yield daemon
    shutil.rmtree(directory)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Daemon]:
    """Return a daemon for one test, which may do to it what it likes."""
    with running(short_dir, cpu="32MiB") as daemon:
        yield daemon


Attach = Callable[..., Any]


@pytest.fixture
def attach(session_daemon: Daemon) -> Iterator[Attach]:
    """Return a function that makes a backend by SGLang's own factory and gives it a pool, as the engine does."""
    with ExitStack() as stack:

        def attached(pool: Any, *, socket: Path | None = None, **changes: Any) -> Any:
            backend = make_backend(pool, socket or session_daemon.socket, **changes)
            stack.callback(backend.close)
            return backend

        yield attached


def make_backend(pool: Any, socket: Path, **changes: Any) -> Any:
    """Return a backend with a pool; `changes` are fields of SGLang's configuration or settings of ours."""
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    factory = importlib.import_module("sglang.srt.mem_cache.storage").StorageBackendFactory
    fields = storage.HiCacheStorageConfig.__dataclass_fields__
    defaults: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": "MLA" in type(pool).__name__, "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout == "page_first", "model_name": "test/model",
    }  # fmt: skip
    given = {name: changes.pop(name) for name in list(changes) if name in fields}
    extra = {
        "backend_name": "kvstored",
        "module_path": "kvclient.sglang",
        "class_name": "KVStoredHiCache",
        "interface_v1": changes.pop("interface_v1", 1),
        "kvstored": {"socket": str(socket), "revision": "1", **changes},
    }
    known = {name: value for name, value in (defaults | given).items() if name in fields}
    config = storage.HiCacheStorageConfig(**known, extra_config=extra)
    backend = factory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    return backend
