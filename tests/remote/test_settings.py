"""Settings of the remote tier: what it needs, what is refused, and that no password is printed anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstored.config import as_toml
from kvstored.resolve import Resolution, resolve
from tests.daemon.host import KnownHost

SECRET_URL = "redis://user:hush@host:6380/0?prefix=team"


def resolved(directory: Path, config: str | None = None, /, **flags: Any) -> Resolution:
    path = None
    if config is not None:
        path = directory / "kvstored.toml"
        path.write_text(config)
    written = {"tiers": "cpu,remote", **{key.replace("_", "-"): value for key, value in flags.items()}}
    return resolve(written, {"XDG_RUNTIME_DIR": str(directory)}, path, KnownHost())


def fault(resolution: Resolution) -> str:
    assert len(resolution.faults) == 1, [str(each) for each in resolution.faults]
    return str(resolution.faults[0])


def test_the_tier_needs_a_place_and_a_size(short_dir: Path) -> None:
    faults = [str(each) for each in resolved(short_dir).faults]
    assert faults == [
        "remote (default): the remote tier needs it: add --remote, as in --remote s3://bucket/prefix",
        "remote-size (default): the remote tier needs it: add --remote-size, as in --remote-size 10TiB",
    ]


def test_with_both_the_rest_has_defaults(short_dir: Path) -> None:
    settings = resolved(short_dir, remote="s3://bucket/x", remote_size="1TiB").settings
    assert settings is not None
    assert settings.tiers == ("cpu", "remote")
    assert (settings.remote, settings.remote_size_bytes) == ("s3://bucket/x", 1 << 40)
    assert (settings.remote_write_policy, settings.remote_refresh_s) == ("second-touch", 10.0)
    assert settings.remote_writer
    again = resolved(short_dir, remote="s3://bucket/x", remote_size="1TiB").settings
    assert again is not None
    assert again.remote_writer == settings.remote_writer


@pytest.mark.parametrize("key", ["remote", "remote-size", "remote-write-policy", "remote-writer", "remote-refresh"])
def test_a_setting_of_the_tier_without_the_tier_is_a_fault(short_dir: Path, key: str) -> None:
    value = {"remote": SECRET_URL, "remote-write-policy": "back", "remote-writer": "me", "remote-refresh": "5s"}
    told = fault(resolved(short_dir, tiers="cpu", **{key: value.get(key, "1GiB")}))
    assert "it has no effect without the remote tier: remove it, or add remote to --tiers" in told
    assert "hush" not in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"remote": "ftp://user:hush@host/x"}, "it begins with none of s3://"),
        ({"remote": "s3://user:hush@bucket/x"}, "come from the environment"),
        ({"remote": "file://hush/"}, "names no directory"),
        ({"remote_writer": "a/b"}, "is no name"),
        ({"remote_write_policy": "never"}, "never"),
        ({"remote_size": "1"}, "1"),
    ],
)
def test_what_can_not_be_used_is_told_without_a_password(short_dir: Path, flags: dict[str, str], told: str) -> None:
    given = {"remote": "s3://bucket", "remote_size": "1TiB", **flags}
    text = fault(resolved(short_dir, **given))
    assert told in text
    assert "user:hush" not in text


def test_no_password_is_printed_and_the_settings_keep_it(short_dir: Path) -> None:
    resolution = resolved(short_dir, f'remote = "{SECRET_URL}"\nremote-size = "1GiB"\n')
    assert resolution.settings is not None
    assert resolution.settings.remote == SECRET_URL
    printed = as_toml(resolution.settings, resolution.sources, resolution.idle, explain=True)
    assert 'remote = "redis://host:6380/0?prefix=team"' in printed
    assert "hush" not in printed + repr(resolution.settings)


def test_the_write_queue_counts_for_the_remote_tier_too(short_dir: Path) -> None:
    settings = resolved(short_dir, remote="s3://bucket/x", remote_size="1TiB", write_queue="64MiB").settings
    assert settings is not None
    assert settings.write_queue_bytes == 64 << 20
