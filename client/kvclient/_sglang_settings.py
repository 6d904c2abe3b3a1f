"""What SGLang's configuration says to its backend: our own settings, and all that changes a page's bytes.

    --hicache-storage-backend-extra-config '{"backend_name": "kvstored", "module_path": "kvclient.sglang",
        "class_name": "KVStoredHiCache", "interface_v1": 1, "kvstored": {"load_timeout_ms": 2000}}'

Our settings stand under the key "kvstored", so that none of them can be taken for one of SGLang's.

Invariants
1. A setting that is unknown, malformed or impossible ends the start with an error that names it and what it takes.
2. Two servers have one identity only if everything that SGLang was told about the weights and about how KV is computed
   from them is equal.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvstore.errors import BadNamespace, BadSetting, UnknownSetting

_DEFAULT_TIMEOUTS_MS = {"lookup_timeout_ms": 250, "load_timeout_ms": 5000, "store_timeout_ms": 5000}
_TEXTS = ("socket", "model", "revision", "kv_cache_dtype", "salt")
SETTINGS = (*_TEXTS, *_DEFAULT_TIMEOUTS_MS, "ttl_s")
_MS_MAX = 3600 * 1000
# Arguments of SGLang's server that change what KV is computed from the same tokens. Those that a version lacks are left
# out; the parallel layout is told by the pools.
_SERVER_ARGUMENTS = (
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "quantization_param_path",
    "json_model_override_args",
    "torchao_config",
    "modelopt_quant",
    "mm_process_config",
)
_ADAPTER = "adapter_config.json"
_DRAFT_ARGUMENTS = ("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of the extra config that is ours. `is_zero_copy`: SGLang calls batch_get_v1 and batch_set_v1."""

    socket: str | None
    model: str | None
    revision: str | None
    kv_cache_dtype: str | None
    salt: str
    ttl_s: float
    lookup_timeout_s: float
    load_timeout_s: float
    store_timeout_s: float
    is_zero_copy: bool

    @staticmethod
    def of(extra_config: Mapping[str, Any] | None) -> Settings:
        """Return the settings in SGLang's extra config.

        Raises
        ------
        UnknownSetting, BadSetting
            Something in it can't be.
        """
        extra = extra_config or {}
        ours: Any = extra.get("kvstored", {})
        if not isinstance(ours, dict):
            raise BadSetting(f'"kvstored" in the extra config must be an object of settings, not {ours!r}')
        given: dict[str, Any] = dict(ours)  # pyright: ignore[reportUnknownArgumentType]
        if unknown := sorted(map(str, set(given) - set(SETTINGS))):
            raise UnknownSetting(
                f'"kvstored" in the extra config has unknown settings {unknown}; known are {", ".join(SETTINGS)}'
            )
        texts = {name: _text(given, name) for name in _TEXTS}
        seconds = {name: _milliseconds(given, name, default) / 1e3 for name, default in _DEFAULT_TIMEOUTS_MS.items()}
        return Settings(
            socket=texts["socket"],
            model=texts["model"],
            revision=texts["revision"],
            kv_cache_dtype=texts["kv_cache_dtype"],
            salt=texts["salt"] or "",
            ttl_s=_number(given, "ttl_s", 0, 1e9),
            lookup_timeout_s=seconds["lookup_timeout_ms"],
            load_timeout_s=seconds["load_timeout_ms"],
            store_timeout_s=seconds["store_timeout_ms"],
            is_zero_copy=bool(extra.get("interface_v1", 0)),
        )


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise BadSetting(f'"{name}" of "kvstored" must be text, not {value!r}')
    return value


def _number(given: Mapping[str, Any], name: str, default: float, value_max: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= value_max:
        raise BadSetting(f'"{name}" of "kvstored" must be a number from 0 to {value_max:g}, not {value!r}')
    return float(value)


def _milliseconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = _number(given, name, default, _MS_MAX)
    if not value:
        raise BadSetting(f'"{name}" of "kvstored" must be at least 1 ms: every call has a deadline')
    return value


@dataclass(frozen=True, slots=True)
class Rank:
    """Where this process stands among those of one model, and what SGLang says of the ranks' KV."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    is_replicated: bool
    is_writer: bool

    @staticmethod
    def of(config: Any) -> Rank:
        """Return the rank in a HiCacheStorageConfig; fields that its version lacks are those of a single process.

        Raises
        ------
        BadSetting
            The pages are cut in a way that the pools do not tell.
        """
        if getattr(config, "dcp_size", 1) > 1:
            raise BadSetting("decode context parallelism deals out the tokens of a page: run without it, or without L3")
        if getattr(config, "should_split_heads", False):
            raise BadSetting("tp_lcm_size cuts pages by heads, which this backend does not need: remove it")
        return Rank(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=getattr(config, "pp_rank", 0),
            pp_size=getattr(config, "pp_size", 1),
            cp_rank=getattr(config, "attn_cp_rank", 0),
            cp_size=getattr(config, "attn_cp_size", 1),
            is_replicated=bool(config.is_mla_model),
            is_writer=bool(getattr(config, "is_storage_writer", config.tp_rank == 0 or not config.is_mla_model)),
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Which weights, and how KV is computed from them; `draft` is that of a draft model beside."""

    model: str
    revision: str
    kv_cache_dtype: str | None
    salt: str
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    draft: Mapping[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def of(settings: Settings, model_name: str | None) -> Identity:
        """Return the identity of the server that this process belongs to.

        Raises
        ------
        BadSetting
            The model has no name, its pages' keys would not tell adapters apart, or nothing names an adapter's weights.
        """
        server = _server_arguments()
        model = settings.model or model_name
        if not model:
            raise BadSetting('SGLang gives no model name: set "model" of "kvstored" in the extra config')
        if getattr(server, "enable_lora", False) and not _keys_tell_adapters():
            raise BadSetting(
                "this version of SGLang computes the same page keys for all LoRA adapters: update it, "
                "or run without LoRA or without L3"
            )
        arguments = _given(server, _SERVER_ARGUMENTS)
        scales = Path(arguments.get("quantization_param_path", ""))
        if scales.is_file():
            arguments["quantization_param_path"] = hashlib.sha256(scales.read_bytes()).hexdigest()
        if adapters := _adapters(server):
            arguments["adapters"] = adapters
        if getattr(server, "load_format", None) == "dummy":
            arguments["weights"] = "dummy"
        kv_cache_dtype = settings.kv_cache_dtype or arguments.get("kv_cache_dtype")
        return Identity(
            model=model,
            revision=settings.revision or revision_of(getattr(server, "model_path", None) or model, server),
            kv_cache_dtype=None if kv_cache_dtype == "auto" else kv_cache_dtype,
            salt=settings.salt,
            arguments=arguments,
            draft=_given(server, _DRAFT_ARGUMENTS),
        )


def _adapters(server: Any) -> str:
    """Return what names the weights of the adapters that the server starts with, "" if there are none.

    SGLang's page keys hold their names and paths, which stay the same when an adapter is trained anew. Adapters that
    are loaded later have keys of their own each time.
    """
    given: Any = getattr(server, "lora_paths", None) or ()
    items = list[Any](given.values() if isinstance(given, dict) else given)  # pyright: ignore[reportUnknownArgumentType]
    found: list[str] = []
    for path in map(_adapter_path, items):
        files = Path(path)
        cached = partial(_commit_in_cache, path, None, _ADAPTER)
        revision = _revision_on_disk(files) if files.exists() else _attempt(cached)
        if revision is None:
            raise BadSetting(
                f"nothing says which weights the adapter {path!r} has, and its pages could be mixed up with those of "
                "others: give --lora-paths a directory"
            )
        found.append(f"{path} {revision}")
    return "\n".join(sorted(found))


def _adapter_path(given: Any) -> str:
    """Return the path in one of the forms that --lora-paths takes: an object, a reference, NAME=PATH, or PATH alone."""
    if isinstance(given, dict):
        return str(given["lora_path"])  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(given, str):
        return given.partition("=")[2] or given
    return str(given.lora_path)


def _given(server: Any, names: Sequence[str]) -> dict[str, str]:
    return {name: str(value) for name in names if (value := getattr(server, name, None)) is not None}


def revision_of(model: str, server: Any = None) -> str:
    """Return what names the weights behind a model's name: its files on disk, or the commit in the hub's cache.

    Raises
    ------
    BadNamespace
        Neither can be found out.
    """
    path = Path(model)
    if path.exists():
        return _revision_on_disk(path)
    asked: str | None = getattr(server, "revision", None)
    if commit := _attempt(lambda: _commit_in_cache(model, asked)):
        return commit
    if asked:
        return asked
    raise BadNamespace(
        f"the revision of {model!r} can't be found out, and blocks of other weights would be mixed up with its own: "
        'give --revision, or "revision" of "kvstored" in the extra config'
    )


def _revision_on_disk(path: Path) -> str:
    """Return a digest of a model's files: the text of its configuration; name, size and time of its weights."""
    digest = hashlib.sha256(b"kvstored/sglang-model/1")
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix == ".json" and "token" not in file.name:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
        elif file.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            status = file.stat()
            content = f"{status.st_size} {status.st_mtime_ns}"
        else:
            continue
        digest.update(f"{file.name}\0{content}\0".encode())
    return f"on-disk:{digest.hexdigest()[:32]}"


def _commit_in_cache(model: str, revision: str | None, file: str = "config.json") -> str | None:
    hub = importlib.import_module("huggingface_hub")
    found = hub.try_to_load_from_cache(model, file, revision=revision)
    return f"commit:{Path(found).parent.name}" if isinstance(found, str) and os.path.exists(found) else None


def _server_arguments() -> Any:
    """Return the arguments of the SGLang server in this process, None outside of one."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        found = _attempt(partial(_called, module, name))
        if found is not None:
            return found
    return None


def _called(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)()


def _keys_tell_adapters() -> bool:
    """Return whether SGLang seeds page keys with what else a request's KV depends on."""
    utils = _attempt(lambda: importlib.import_module("sglang.srt.mem_cache.utils"))
    return hasattr(utils, "storage_namespace_seed")


def _attempt(call: Callable[[], T]) -> T | None:
    """Return what `call` returns, None if this version of a package does not have it."""
    try:
        return call()
    except (ImportError, AttributeError, ValueError, RuntimeError, OSError):
        return None
