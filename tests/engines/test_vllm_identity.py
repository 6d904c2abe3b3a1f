"""Whose KV it is: settings, weights and adapters that name the blocks of a vLLM engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient._vllm_identity import (
    Adapters,
    Facts,
    config_digest,
    digest_of_files,
    files_of,
    media_settings,
    name_of,
    revision_of,
)
from kvclient._vllm_settings import KEYS, Load, Settings, Store, check_load, settings_of
from kvclient._vllm_stats import COUNTERS, Counters, added, summary
from kvstore.errors import BadSetting, UnknownSetting, UsageError
from tests.daemon_fixture import eventually


def model(directory: Path, weights: bytes = b"weights", config: str = "{}") -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def revision(path: Path, cache: Path, **facts: Any) -> str:
    given: dict[str, Any] = {"model": str(path), "revision": "", "commit": "", "config": {"layers": 2}, **facts}
    return revision_of(Facts(**given), cache)


# ---- settings


def test_settings_have_defaults_and_all_keys_are_taken() -> None:
    assert settings_of({}) == Settings()
    given = settings_of(
        {"socket": "/s", "load": "sync", "store": "layerwise", "revision": "r", "salt": "x", "ttl_s": 60,
         "lookup_budget_ms": 5, "load_timeout_ms": 100, "store_timeout_ms": 100}
    )  # fmt: skip
    assert given == Settings("/s", Load.SYNC, Store.LAYERWISE, "r", "x", 60.0, 5.0, 100.0, 100.0)
    assert set(KEYS) == set(Settings.__dataclass_fields__)


def test_loads_within_a_step_are_refused_where_vllm_plans_the_next_before_it_knows_of_their_failure() -> None:
    for load, depth in ((Load.ASYNC, 1), (Load.ASYNC, 3), (Load.SYNC, 1)):
        check_load(load, depth)
    with pytest.raises(UsageError, match="--no-async-scheduling"):
        check_load(Load.SYNC, 2)


def test_a_key_that_is_not_known_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownSetting, match="did you mean 'load_timeout_ms'"):
        settings_of({"load_timeout": 3})
    with pytest.raises(UnknownSetting, match="known are socket"):
        settings_of({"zzz": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [("load", "later"), ("store", True), ("socket", ""), ("socket", 3), ("ttl_s", 0), ("ttl_s", True),
     ("lookup_budget_ms", "5"), ("load_timeout_ms", float("nan")), ("salt", None)],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object) -> None:
    with pytest.raises(BadSetting, match=key):
        settings_of({key: value})


# ---- weights


def test_a_copy_of_a_model_is_the_same_model_and_any_changed_byte_another(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one, copy = model(tmp_path / "one"), model(tmp_path / "copies" / "one")
    known = revision(one, cache)
    assert revision(copy, cache) == known
    others = {
        revision(model(tmp_path / "weights", b"weighty"), cache),
        revision(model(tmp_path / "settings", config='{"rope_theta": 1}'), cache),
        revision(one, cache, config={"layers": 2, "rope_scaling": {"factor": 8}}),
        revision(one, cache, revision="named"),
    }
    assert len(others | {known}) == 5
    (copy / "tokenizer.json").write_text('{"changed": true}')
    assert revision(copy, cache) == known, "no token's KV depends on it"


def test_weights_are_read_once_and_again_when_anything_of_their_status_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, cache = model(tmp_path / "one"), tmp_path / "cache"
    first = digest_of_files(files_of(directory), cache)

    def unread(*_: object) -> object:
        raise AssertionError("it was read again")

    with monkeypatch.context() as patched:
        patched.setattr("hashlib.file_digest", unread)
        assert digest_of_files(files_of(directory), cache) == first
    before = (directory / "model.safetensors").stat()
    (directory / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(directory / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of_files(files_of(directory), cache) != first, "size and time of change are those of before"


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": 1}'])
def test_a_damaged_cache_of_digests_costs_reading_again(tmp_path: Path, content: str) -> None:
    directory, cache = model(tmp_path / "one"), tmp_path / "cache"
    first = digest_of_files(files_of(directory), cache)
    (cache / "digests.json").write_text(content)
    assert digest_of_files(files_of(directory), cache) == first


def test_a_commit_names_weights_without_reading_them(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    commit = "0e9e39f249a16976918f6564b8830bc894c89659"
    snapshot = model(tmp_path / "hub" / "snapshots" / commit)
    assert revision(snapshot, cache).startswith(f"commit:{commit}+")
    assert revision(Path("some/model"), cache, commit=commit) == revision(snapshot, cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    "facts", [{"is_random": True}, {"model": "some/model"}], ids=["made up", "neither directory nor commit"]
)
def test_weights_that_nothing_names_are_refused_until_the_operator_does(tmp_path: Path, facts: dict[str, Any]) -> None:
    directory = model(tmp_path / "one")
    with pytest.raises(UsageError, match="'revision'"):
        revision(directory, tmp_path / "cache", **facts)
    assert revision(directory, tmp_path / "cache", **facts, revision="mine").startswith("named:mine+")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no weights"):
        files_of(tmp_path)


def test_a_configuration_s_digest_holds_what_kv_depends_on() -> None:
    plain = config_digest({"layers": 2, "rope": {"factor": 2.0}, "_name_or_path": "a"})
    assert config_digest({"rope": {"factor": 2.0}, "layers": 2, "_name_or_path": "b"}) == plain
    assert config_digest({"layers": 2, "rope": {"factor": 4.0}}) != plain


def test_what_an_engine_was_told_of_media_is_in_its_configuration() -> None:
    assert media_settings(None) is None
    plain = SimpleNamespace(mm_processor_kwargs=None, mm_processor_cache_gb=4)
    digest = config_digest({"media": media_settings(plain)})
    assert config_digest({"media": media_settings(SimpleNamespace(mm_processor_cache_gb=8))}) == digest
    for name, value in (("mm_processor_kwargs", {"num_crops": 4}), ("video_pruning_rate", 0.5)):
        assert config_digest({"media": media_settings(SimpleNamespace(**{name: value}))}) != digest


def test_a_model_is_called_by_its_directory_or_its_name(tmp_path: Path) -> None:
    assert name_of(str(tmp_path / "m")) == str(tmp_path / "m")
    (tmp_path / "m").mkdir()
    assert name_of(str(tmp_path / "m")) == "m"
    assert name_of("org/m") == "org/m"


# ---- adapters

Identify = Callable[[str, int, Path], str | None]


@pytest.fixture
def identify(tmp_path: Path) -> Any:
    with ThreadPoolExecutor(1) as threads:
        adapters = Adapters(threads, tmp_path / "cache")

        def found(name: str, number: int, path: Path) -> str | None:
            eventually(lambda: adapters.identity(name, number, str(path)) != "", "the adapter is read")
            return adapters.identity(name, number, str(path))

        yield found


def test_adapters_of_one_name_differ_by_their_content(tmp_path: Path, identify: Identify) -> None:
    one, other, copy = (
        model(tmp_path / name, content) for name, content in (("one", b"a"), ("other", b"b"), ("copy", b"a"))
    )
    known = identify("lora", 1, one)
    assert known is not None and known.startswith("lora@sha256:")
    assert identify("lora", 2, other) != known
    assert identify("lora", 3, copy) == known


def test_an_adapter_whose_files_change_is_shared_no_more(tmp_path: Path, identify: Identify) -> None:
    path = model(tmp_path / "one")
    assert identify("lora", 1, path)
    (path / "model.safetensors").write_bytes(b"trained further")
    assert identify("lora", 1, path) is None
    (path / "model.safetensors").write_bytes(b"weights")
    assert identify("lora", 1, path) is None, "the engine may have loaded either"
    assert identify("lora", 2, path) is not None, "a number of its own: loaded by now"


def test_an_adapter_that_is_no_directory_here_is_not_shared(tmp_path: Path, identify: Identify) -> None:
    assert identify("lora", 1, tmp_path / "absent") is None
    (tmp_path / "empty").mkdir()
    assert identify("lora", 1, tmp_path / "empty") is None


# ---- counters


def test_counts_are_taken_once_and_added_up() -> None:
    counters = Counters()
    counters.add(lookups=1, hit_blocks=3, load_seconds=0.0)
    counters.add(lookups=1)
    taken = counters.take()
    assert taken == {"lookups": 2, "hit_blocks": 3}
    assert counters.take() == {}
    assert added(taken, {"lookups": 1, "stored_blocks": 5}) == {"lookups": 3, "hit_blocks": 3, "stored_blocks": 5}
    assert set(taken) <= set(COUNTERS)


def test_a_summary_says_how_fast_loads_and_stores_were() -> None:
    shown = summary(
        {"loaded_blocks": 2.0, "loaded_bytes": 2e9, "load_seconds": 0.5, "stored_bytes": 1e9, "store_seconds": 2}
    )
    assert shown == {
        "load_gb_per_s": 4.0, "load_seconds": 0.5, "loaded_blocks": 2, "store_gb_per_s": 0.5, "store_seconds": 2,
    }  # fmt: skip
