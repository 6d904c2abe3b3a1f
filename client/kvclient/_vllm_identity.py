"""Which weights an engine computes KV with: named by a commit, by the operator, or by a digest of their files.

Theory of operation. A model that comes from a repository is named by the commit. Of one in a directory all files that
can change KV are digested, which takes about a second a gigabyte and core, once: the digests are kept in a file of the
user's cache, beside size, times and inode of what was digested. The ranks of an engine wait for each other there.

Invariants
1. Two models have the same name only if commit or content are the same, or the operator says so.
2. A digest from the cache is used only if nothing of the file's status has changed, its inode's change time included.
3. An adapter whose files change while the engine runs is shared no more: which of them the engine has loaded is not
   known.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvstore.errors import UsageError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CODE_AND_SETTINGS = (".json", ".py")
_NO_IDENTITY = re.compile(r"(tokenizer|vocab|merges|special_tokens|added_tokens|generation_config|chat_template).*")
_MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
_COMMIT = re.compile(r"snapshots/([0-9a-f]{40})/?$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DIGESTS_AT_ONCE = 4
_ADAPTERS_MAX = 1024
# In a model's configuration, but nothing that KV depends on.
_NO_CONFIG = frozenset({"_name_or_path", "transformers_version", "use_cache", "id2label", "label2id"})

Status = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine's configuration says of one model.

    Parameters
    ----------
    model : str
        A directory, a file, or a name on a hub.
    revision : str
        What the operator calls the weights; "" if nothing.
    commit : str
        The commit that the files were taken from; "" if unknown.
    config : mapping
        The model's configuration as the engine uses it, overrides included.
    is_random : bool
        The weights are made up, not loaded.
    """

    model: str
    revision: str
    commit: str
    config: Mapping[str, Any]
    is_random: bool = False


def media_settings(config: object) -> dict[str, Any] | None:
    """Return what an engine's settings of media change in their embeddings; None of a model without media.

    The hash of an image holds what its request says of its processing, not what the engine was started with.
    """
    return None if config is None else {name: getattr(config, name, None) for name in _MEDIA_SETTINGS}


def name_of(model: str) -> str:
    """Return what people call a model: the last part of a path, or its whole name on a hub."""
    return Path(model).name if os.path.exists(model) else model


def revision_of(facts: Facts, cache: Path | None = None) -> str:
    """Return what stands for a model's weights and configuration.

    Parameters
    ----------
    facts : Facts
        The model.
    cache : path, optional
        Where digests are kept; by default the user's cache directory.

    Raises
    ------
    UsageError
        Nothing says which weights these are.
    """
    return f"{_weights_of(facts, cache)}+config:{config_digest(facts.config)}"


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of a model's configuration, without what KV does not depend on."""
    return hashlib.sha256(json.dumps(_plain(config), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    """Return a part of a configuration as what JSON has, the same in every process."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        return {str(name): _plain(part) for name, part in fields.items() if name not in _NO_CONFIG}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in cast("Sequence[object]", value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, cast("set[object]", value)))
    if value is None or isinstance(value, (str, int, float)):
        return value
    return _ADDRESS.sub("", str(value))


def _weights_of(facts: Facts, cache: Path | None) -> str:
    if facts.revision:
        return f"named:{facts.revision}"
    if facts.is_random:
        raise UsageError(
            "the engine makes up its weights, so nothing says whose KV this is: name them by "
            "kv_connector_extra_config {'revision': ...}"
        )
    path = Path(facts.model)
    if path.exists():
        commit = _COMMIT.search(str(path.resolve() if path.is_symlink() else path))
        return f"commit:{commit[1]}" if commit else digest_of_files(files_of(path), cache)
    if facts.commit:
        return f"commit:{facts.commit}"
    raise UsageError(
        f"nothing says which weights {facts.model!r} has: it is no directory here and no commit of a repository; "
        "name them by kv_connector_extra_config {'revision': ...}"
    )


def files_of(path: Path) -> list[Path]:
    """Return the files in a directory that KV can depend on; of a file, itself."""
    if path.is_file():
        return [path]
    found = [
        file
        for file in sorted(path.iterdir())
        if file.is_file()
        and (file.suffix in _WEIGHTS or (file.suffix in _CODE_AND_SETTINGS and not _NO_IDENTITY.match(file.name)))
    ]
    if not any(file.suffix in _WEIGHTS for file in found):
        raise UsageError(
            f"{path} holds no weights ({', '.join(_WEIGHTS)}): "
            "name them by kv_connector_extra_config {'revision': ...}"
        )
    return found


def digest_of_files(files: Sequence[Path], cache: Path | None = None) -> str:
    """Return a digest of files' names and contents; what has been digested before is taken from the cache."""
    directory = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvstored"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "digests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank digests, the others find the result
        known = _read(directory / "digests.json")
        digests = {str(file.resolve()): known.get(_key(file)) for file in files}
        missing = [file for file in files if digests[str(file.resolve())] is None]
        if missing:
            with ThreadPoolExecutor(_DIGESTS_AT_ONCE) as threads:
                for file, (key, digest) in zip(missing, threads.map(_digest, missing), strict=True):
                    digests[str(file.resolve())] = known[key] = digest
            _write(directory / "digests.json", known)
    lines = [[file.name, digests[str(file.resolve())]] for file in files]
    return "sha256:" + hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _status(file: Path) -> Status:
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _key(file: Path) -> str:
    return f"{' '.join(map(str, _status(file)))} {file.resolve()}"


def _is_current(key: str) -> bool:
    try:
        return _key(Path(key.split(" ", 4)[-1])) == key
    except (OSError, ValueError):
        return False


def _digest(file: Path) -> tuple[str, str]:
    before = _key(file)
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if _key(file) != before:
        raise UsageError(f"{file} changed while it was read: start the engine when its weights are complete")
    return before, digest


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(key): str(value) for key, value in cast("dict[object, object]", content).items()}


def _write(path: Path, known: dict[str, str]) -> None:
    living = {key: digest for key, digest in known.items() if _is_current(key)}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        json.dump(living, file)
    os.replace(file.name, path)


@dataclass(slots=True)
class _Adapter:
    statuses: dict[Path, Status]
    digest: Future[str]
    has_changed: bool = False


class Adapters:
    """The LoRA adapters that an engine has met, named by the content of their files.

    vLLM's block hashes hold an adapter's name, in later versions its path too; neither says what is in the files.
    """

    def __init__(self, threads: Executor, cache: Path | None = None) -> None:
        self._threads = threads
        self._cache = cache
        self._known: dict[tuple[str, int, str], _Adapter] = {}

    def identity(self, name: str, number: int, path: str) -> str | None:
        """Return what names an adapter in a namespace: None if nothing can, "" while its files are being read."""
        key = (name, number, path)
        adapter = self._known.get(key)
        if adapter is None:
            if not os.path.isdir(path) or len(self._known) >= _ADAPTERS_MAX:
                return None  # which revision of a repository it was, the engine does not tell
            adapter = self._known[key] = _Adapter(_statuses(path), self._threads.submit(self._digest, Path(path)))
        if not adapter.digest.done():
            return ""
        if adapter.has_changed or adapter.digest.exception() is not None:
            return None
        if _statuses(path) != adapter.statuses:
            adapter.has_changed = True
            return None
        return f"{name}@{adapter.digest.result()}"

    def _digest(self, path: Path) -> str:
        return digest_of_files(files_of(path), self._cache)


def _statuses(path: str) -> dict[Path, Status]:
    try:
        return {file: _status(file) for file in files_of(Path(path))}
    except (OSError, UsageError):
        return {}
