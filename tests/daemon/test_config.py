"""Settings: where they come from, what they become on a machine, and how everything wrong is told at once."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kvstored.cgroup import MemoryLimit
from kvstored.config import Settings, as_toml
from kvstored.host import Filesystem
from kvstored.options import OPTIONS
from kvstored.readers import Principals
from kvstored.resolve import CHUNK_BYTES, OWN_MEMORY_BYTES, Resolution, resolve
from tests.daemon.host import GIB, TIB, KnownHost

MIB = 1 << 20


@pytest.fixture
def host() -> KnownHost:
    return KnownHost()


@pytest.fixture
def environ(short_dir: Path) -> dict[str, str]:
    (short_dir / "state").mkdir()
    return {"XDG_RUNTIME_DIR": str(short_dir), "STATE_DIRECTORY": str(short_dir / "state")}


class Shell:
    """Resolves settings on a known machine, in an environment of its own."""

    def __init__(self, host: KnownHost, environ: dict[str, str], directory: Path) -> None:
        self.host = host
        self.environ = environ
        self.directory = directory

    def resolve(self, config: str | None = None, env: dict[str, str] | None = None, /, **flags: Any) -> Resolution:
        path = None
        if config is not None:
            path = self.directory / "kvstored.toml"
            path.write_text(config)
        written = {key.replace("_", "-"): value for key, value in flags.items()}
        return resolve(written, {**self.environ, **(env or {})}, path, self.host)

    def settings(self, config: str | None = None, env: dict[str, str] | None = None, /, **flags: Any) -> Settings:
        resolution = self.resolve(config, env, **flags)
        assert resolution.settings is not None, [str(fault) for fault in resolution.faults]
        return resolution.settings

    def faults(self, config: str | None = None, env: dict[str, str] | None = None, /, **flags: Any) -> list[str]:
        resolution = self.resolve(config, env, **flags)
        assert (resolution.settings is None) == bool(resolution.faults)
        return [str(fault) for fault in resolution.faults]

    def fault(self, config: str | None = None, env: dict[str, str] | None = None, /, **flags: Any) -> str:
        faults = self.faults(config, env, **flags)
        assert len(faults) == 1, faults
        return faults[0]


@pytest.fixture
def shell(host: KnownHost, environ: dict[str, str], short_dir: Path) -> Shell:
    return Shell(host, environ, short_dir)


# ---- precedence and sources


def test_flag_goes_before_variable_before_file_before_default(shell: Shell) -> None:
    config = "ttl = '3h'\nio-threads = 3\nlease-max = 33\n"
    env = {"KVSTORED_TTL": "2h", "KVSTORED_IO_THREADS": "2"}
    resolution = shell.resolve(config, env, ttl="1h")
    settings = resolution.settings
    assert settings is not None
    assert (settings.ttl_s, settings.io_threads, settings.lease_s_max) == (3600, 2, 33)
    assert settings.reservation_s == 10
    assert resolution.sources["ttl"] == "flag --ttl"
    assert resolution.sources["io-threads"] == "variable KVSTORED_IO_THREADS"
    assert resolution.sources["lease-max"] == f"file {shell.directory / 'kvstored.toml'}"
    assert resolution.sources["reservation"] == "default"


def test_config_file_is_found_by_a_variable(shell: Shell) -> None:
    path = shell.directory / "named.toml"
    path.write_text("io-threads = 7\n")
    assert shell.settings(None, {"KVSTORED_CONFIG": str(path)}).io_threads == 7


def test_all_faults_are_told_at_once_with_key_value_source_and_fix(shell: Shell) -> None:
    faults = shell.faults(
        "tll = 5\nio-threads = 'many'\n",
        {"KVSTORED_EVICTION": "random", "KVSTORED_TTY": "1"},
        cpu_size="4G",
        mode="open",
    )
    text = "\n".join(faults)
    assert len(faults) == 6
    for expected in (
        "cpu-size = '4G' (flag --cpu-size): '4G' could mean two sizes: write 4GiB or 4GB",
        "mode = 'open' (flag --mode): 'open' is not one of trusted, strict: write one of those",
        "eviction = 'random' (variable KVSTORED_EVICTION)",
        "KVSTORED_TTY = '1' (environment): there is no such setting: did you mean KVSTORED_TTL?",
        f"tll = 5 (file {shell.directory / 'kvstored.toml'}): there is no such setting: did you mean ttl?",
        "io-threads = 'many'",
    ):
        assert expected in text


def test_value_that_loses_to_a_flag_is_still_checked(shell: Shell) -> None:
    assert "ttl = 'soon'" in shell.fault("ttl = 'soon'\n", ttl="1h")


def test_variables_that_kubernetes_sets_for_a_service_are_no_settings(shell: Shell) -> None:
    shell.settings(None, {"KVSTORED_SERVICE_HOST": "10.0.0.1", "KVSTORED_PORT": "tcp://x", "KVSTORED_PORT_80_TCP": "y"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"ttl = \n", "is not a TOML file"),
        (b"ttl = '\xff'\n", "is not a TOML file"),
        (b"#" * (1 << 21), "is over 1048576 bytes"),
    ],
)
def test_broken_config_file_is_one_fault(shell: Shell, content: bytes, expected: str) -> None:
    path = shell.directory / "broken.toml"
    path.write_bytes(content)
    resolution = resolve({}, shell.environ, path, shell.host)
    assert [expected in str(fault) and str(path) in str(fault) for fault in resolution.faults] == [True]


def test_missing_config_file_is_named(shell: Shell) -> None:
    resolution = resolve({}, shell.environ, shell.directory / "none.toml", shell.host)
    assert "none.toml" in str(resolution.faults[0])
    assert "No such file" in str(resolution.faults[0])


def test_every_setting_can_be_given_by_flag_variable_and_file(shell: Shell) -> None:
    shell.host.cuda_missing = None
    given = {
        "tiers": "cpu,ssd,remote", "cpu-size": "1GiB", "remote": "s3://bucket/x", "remote-size": "1TiB",
        "remote-write-policy": "back", "remote-writer": "me", "remote-refresh": "5s",
        "ssd-size": "2GiB", "ssd-dir": str(shell.directory / "kv"),
        "socket": str(shell.directory / "s.sock"), "http": "127.0.0.1:1", "ttl": "1h", "eviction": "reuse",
        "ttl-mode": "access",
        "write-policy": "back", "mode": "strict", "arena-size": "8MiB", "verify-reads": "true",
        "checksum-at-seal": "always", "huge-pages": "off", "quota": "a:cpu=1GiB", "tenant": "a=uid:1",
        "admin": "uid:5", "high-watermark": "0.9", "low-watermark": "0.8", "drain-timeout": "1s", "lease-max": "5s",
        "reservation": "3s", "sessions-max": "7", "io-threads": "2", "write-queue": "4MiB", "log-level": "debug",
        "log-format": "json", "allow-shared-pool-across-tenants": "false",
    }  # fmt: skip
    assert set(given) == {option.key for option in OPTIONS}
    # This one has an effect in the other mode only.
    del given["allow-shared-pool-across-tenants"]
    by_flag = shell.settings(**{key.replace("-", "_"): text for key, text in given.items()})
    by_variable = shell.settings(
        None, {option.variable: given[option.key] for option in OPTIONS if option.key in given}
    )
    quoted = "".join(f'{key} = "{text}"\n' for key, text in given.items())
    assert by_flag == by_variable == shell.settings(quoted)
    assert by_flag.tenants == {"a": Principals(frozenset({1}))}
    assert by_flag.quotas == {"a": {"cpu": GIB}}


def test_settings_printed_as_a_file_give_the_same_settings(shell: Shell) -> None:
    flags = {"quota": ["default:cpu=1GiB"], "http": "[::1]:9469", "ttl": "90m", "write_policy": "second-touch"}
    for explain in (True, False):
        resolution = shell.resolve(**flags)
        assert resolution.settings is not None
        printed = as_toml(resolution.settings, resolution.sources, resolution.idle, explain=explain)
        assert shell.settings(printed) == resolution.settings


def test_tables_of_the_file_and_texts_of_flags_say_the_same(shell: Shell) -> None:
    config = '[quota.a]\ncpu = "1GiB"\n[tenant]\na = ["uid:1", "gid:2"]\n'
    assert shell.settings(config) == shell.settings(quota=["a:cpu=1GiB"], tenant=["a=uid:1,gid:2"])


# ---- defaults for a machine


def test_default_sizes_follow_the_machine(shell: Shell) -> None:
    settings = shell.settings()
    assert settings.tiers == ("cpu", "ssd")
    assert settings.cpu_size_bytes == 16 * GIB
    assert settings.ssd_size_bytes == TIB // 10
    assert settings.ssd_dir == shell.directory / "state" / "ssd"
    assert settings.socket == shell.directory / "kvstored.sock"
    assert settings.http == "127.0.0.1:9469"


def test_default_cpu_size_stays_within_the_control_group(shell: Shell) -> None:
    shell.host.groups = [MemoryLimit("cgroup v2 limit /sys/fs/cgroup/memory.max", 2 * GIB, GIB)]
    assert shell.settings().cpu_size_bytes == GIB - OWN_MEMORY_BYTES


def test_default_ssd_size_is_half_of_what_is_free_on_a_full_disk(shell: Shell) -> None:
    shell.host.disk = Filesystem("xfs", TIB, 10 * GIB)
    assert shell.settings().ssd_size_bytes == 5 * GIB


def test_default_ssd_size_is_the_same_after_a_restart(shell: Shell) -> None:
    shell.host.disk = Filesystem("xfs", TIB, 10 * GIB)
    before = shell.settings().ssd_size_bytes
    shell.host.disk = Filesystem("xfs", TIB, 6 * GIB)
    shell.host.ours_bytes = 4 * GIB
    assert shell.settings().ssd_size_bytes == before


def test_write_queue_may_name_every_block_in_memory(shell: Shell) -> None:
    assert shell.settings(cpu_size="16MiB").write_queue_bytes == 16 * MIB
    assert shell.settings(cpu_size="16MiB", write_queue="64MiB").write_queue_bytes == 64 * MIB


def test_admins_are_root_and_the_daemons_own_user(shell: Shell) -> None:
    assert shell.settings().admins == Principals(frozenset({0, os.geteuid()}))
    assert shell.settings(admin=["uid:7,gid:8", "gid:9"]).admins == Principals(frozenset({7}), frozenset({8, 9}))


# ---- tiers


@pytest.mark.parametrize(
    ("kind", "tiers"), [("ext4", ("cpu", "ssd")), ("tmpfs", ("cpu",)), ("nfs4", ("cpu",)), ("xfs", ("cpu", "ssd"))]
)
def test_auto_takes_ssd_only_on_a_local_disk(shell: Shell, kind: str, tiers: tuple[str, ...]) -> None:
    shell.host.disk = Filesystem(kind, TIB, TIB // 2)
    assert shell.settings().tiers == tiers


def test_auto_without_a_writable_directory_says_why_there_is_no_ssd(shell: Shell) -> None:
    shell.host.read_only = "/var is not writable for uid 1"
    # The socket's directory is read-only on this machine as well, so it is one that exists and is checked apart.
    resolution = shell.resolve()
    assert any("no ssd tier: /var is not writable" in note for note in resolution.notes)


def test_auto_leaves_a_cuda_device_alone_and_says_so(shell: Shell) -> None:
    shell.host.cuda_missing = None
    resolution = shell.resolve()
    assert resolution.settings is not None
    assert resolution.settings.tiers == ("cpu", "ssd")
    assert any("no gpu tier yet" in note for note in resolution.notes)


def test_gpu_tier_without_a_device_names_the_fix(shell: Shell) -> None:
    fault = shell.fault(tiers="gpu,cpu,ssd")
    assert "tiers = 'gpu,cpu,ssd' (flag --tiers)" in fault
    assert "no /dev/nvidia0" in fault
    assert "--tiers cpu,ssd" in fault


def test_gpu_tier_with_a_device_is_refused_as_not_there_yet(shell: Shell) -> None:
    shell.host.cuda_missing = None
    assert "this version has no gpu tier yet: start with --tiers cpu,ssd" in shell.fault(tiers="gpu,cpu")


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ("ssd", "add it, as in --tiers cpu,ssd"),
        ("cpu,disk", "there is no tier 'disk'"),
        ("cpu,cpu", "named twice"),
        ("", "there is no tier ''"),
        ("auto,cpu", "there is no tier 'auto'"),
    ],
)
def test_wrong_tiers_are_refused(shell: Shell, tiers: str, expected: str) -> None:
    assert any(expected in fault for fault in shell.faults(tiers=tiers))


def test_explicit_ssd_on_tmpfs_is_taken_with_a_note(shell: Shell) -> None:
    shell.host.disk = Filesystem("tmpfs", TIB, TIB // 2)
    resolution = shell.resolve(tiers="cpu,ssd")
    assert resolution.settings is not None
    assert any("takes memory" in note for note in resolution.notes)


def test_ssd_index_is_refused_on_a_network_filesystem(shell: Shell) -> None:
    shell.host.disk = Filesystem("nfs4", TIB, TIB // 2)
    assert "is on nfs4, where the index can't be kept" in shell.fault(tiers="cpu,ssd")


def test_ssd_directory_on_a_disk_that_is_not_mounted_is_refused(shell: Shell) -> None:
    missing = shell.directory / "nvme" / "kv"
    fault = shell.fault(tiers="cpu,ssd", ssd_dir=str(missing))
    assert f"its parent {missing.parent} does not exist: mount the disk" in fault


# ---- settings without effect


@pytest.mark.parametrize("key", ["ssd-size", "ssd-dir", "io-threads", "write-queue", "write-policy"])
def test_ssd_setting_without_the_ssd_tier_is_a_fault(shell: Shell, key: str) -> None:
    value = {"ssd-dir": "/tmp/x", "io-threads": "2", "write-policy": "back"}.get(key, "1GiB")
    fault = shell.fault(tiers="cpu", **{key.replace("-", "_"): value})
    tier = "ssd or remote" if key == "write-queue" else "ssd"
    assert f"it has no effect without the {tier} tier: remove it, or add {tier} to --tiers" in fault


def test_ssd_setting_says_why_auto_left_the_tier_out(shell: Shell) -> None:
    shell.host.disk = Filesystem("tmpfs", TIB, TIB // 2)
    assert "on tmpfs, which is memory" in shell.fault(ssd_size="1GiB")


def test_arena_size_needs_strict_mode(shell: Shell) -> None:
    assert "no effect in trusted mode: remove it, or set --mode strict" in shell.fault(arena_size="8MiB")
    assert shell.settings(arena_size="8MiB", mode="strict").arena_bytes == 8 * MIB


def test_quota_for_a_tier_that_is_off_is_a_fault(shell: Shell) -> None:
    assert "it has no effect: the tier ssd" in shell.fault(tiers="cpu", quota=["default:ssd=1GiB"])


def test_quota_for_an_unknown_tenant_is_a_fault(shell: Shell) -> None:
    assert "there is no tenant team-a" in shell.fault(quota=["team-a:cpu=1GiB"])


# ---- tenants


def test_trusted_mode_with_two_tenants_needs_an_explicit_word(shell: Shell) -> None:
    two = ["a=uid:1", "b=uid:2"]
    fault = shell.fault(tenant=two)
    assert "--mode strict" in fault
    assert "--allow-shared-pool-across-tenants" in fault
    assert len(shell.settings(tenant=two, mode="strict").tenants) == 2
    assert len(shell.settings(tenant=two, allow_shared_pool_across_tenants=True).tenants) == 2


def test_user_in_two_tenants_is_a_fault(shell: Shell) -> None:
    assert "uid:1 is in a and in b" in shell.fault(tenant=["a=uid:1", "b=uid:1"], mode="strict")


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        ("a", "is not NAME=WHO"),
        ("a=1000", "names no user and no group"),
        ("a=uid:nobody-of-this-name", "there is no user"),
        ("a b=uid:1", "is not a tenant's name"),
    ],
)
def test_malformed_tenants_are_refused(shell: Shell, tenant: str, expected: str) -> None:
    assert expected in shell.fault(tenant=[tenant])


def test_principals_match_by_user_or_by_any_group() -> None:
    who = Principals(frozenset({1000}), frozenset({50}))
    assert who.include(1000, frozenset())
    assert who.include(7, frozenset({20, 50}))
    assert not who.include(7, frozenset({1000}))


# ---- sizes against limits


def test_pool_over_the_control_groups_limit_names_limit_need_room_and_fix(shell: Shell) -> None:
    shell.host.groups = [MemoryLimit("cgroup v2 limit /sys/fs/cgroup/a/memory.max", 200 * MIB, 150 * MIB)]
    fault = shell.fault(cpu_size="256MiB")
    for expected in (
        "cpu-size = '256MiB' (flag --cpu-size)",
        "268435456 bytes (256 MiB)",
        "/sys/fs/cgroup/a/memory.max is 209715200 bytes (200 MiB)",
        "157286400 bytes (150 MiB) free",
        f"--cpu-size {150 * MIB - OWN_MEMORY_BYTES}",
        "MemoryMax=",
    ):
        assert expected in fault
    most = re.search(r"--cpu-size (\d+) or less", fault)
    assert most
    assert shell.settings(cpu_size=most[1]).cpu_size_bytes == int(most[1])


def test_group_with_no_room_at_all_is_told_as_such(shell: Shell) -> None:
    shell.host.groups = [MemoryLimit("cgroup v1 limit /x", 64 * MIB, 30 * MIB)]
    for flags in ({}, {"cpu_size": "256MiB"}):
        fault = shell.fault(**flags)
        assert "30 MiB" in fault
        assert "or less" not in fault


def test_pool_over_available_memory_is_refused(shell: Shell) -> None:
    assert "MemAvailable" in shell.fault(cpu_size="65GiB")


def test_pool_over_the_file_size_limit_is_refused(shell: Shell) -> None:
    shell.host.file_limit_bytes = 100 * MIB
    fault = shell.fault(tiers="cpu", cpu_size="256MiB")
    assert "RLIMIT_FSIZE" in fault
    assert "--cpu-size 104857600 or less" in fault
    assert shell.settings(tiers="cpu").cpu_size_bytes == 100 * MIB
    assert "RLIMIT_FSIZE" in shell.fault(cpu_size="64MiB")
    assert shell.settings(cpu_size="64MiB", ssd_size="64MiB").ssd_size_bytes == 64 * MIB


def test_ssd_size_over_the_filesystem_is_refused_and_our_own_files_count_as_room(shell: Shell) -> None:
    shell.host.disk = Filesystem("ext4", TIB, 10 * GIB)
    fault = shell.fault(ssd_size="20GiB")
    assert "ssd-size = '20GiB'" in fault
    assert "room for 10737418240 bytes (10 GiB)" in fault
    shell.host.ours_bytes = 15 * GIB
    assert shell.settings(ssd_size="20GiB").ssd_size_bytes == 20 * GIB


@pytest.mark.parametrize("key", ["cpu_size", "ssd_size"])
def test_sizes_too_small_to_work_are_refused(shell: Shell, key: str) -> None:
    assert "at least" in shell.fault(**{key: "1MiB"})


def test_default_sizes_are_whole_chunks(shell: Shell) -> None:
    shell.host.available_bytes = 10_000_000_001
    assert shell.settings().cpu_size_bytes % CHUNK_BYTES == 0


def test_real_machine_gives_settings(short_dir: Path) -> None:
    flags = {"ssd-dir": str(short_dir / "kv"), "socket": str(short_dir / "s"), "tiers": "cpu,ssd", "cpu-size": "8MiB"}
    resolution = resolve(flags, {})
    assert resolution.settings is not None, resolution.faults


# ---- other values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("127.0.0.1:9469", "127.0.0.1:9469"),
        ("0.0.0.0:80", "0.0.0.0:80"),
        ("9469", "127.0.0.1:9469"),
        (":9469", "127.0.0.1:9469"),
        ("[::1]:9469", "[::1]:9469"),
        ("localhost:0", "localhost:0"),
        ("off", None),
    ],
)
def test_http_address_is_loopback_unless_said(shell: Shell, given: str, expected: str | None) -> None:
    assert shell.settings(http=given).http == expected


@pytest.mark.parametrize("given", ["host", "127.0.0.1:70000", "::1:9469", "[nonsense]:1", "1.2.3.4:x", ""])
def test_malformed_http_address_is_refused(shell: Shell, given: str) -> None:
    assert shell.fault(http=given).startswith("http = ")


@pytest.mark.parametrize("given", ["0", "1.5", "-1", "101%", "most", "nan"])
def test_malformed_fraction_is_refused(shell: Shell, given: str) -> None:
    assert "is not a fraction" in shell.faults(high_watermark=given)[0]


def test_watermarks_are_in_order(shell: Shell) -> None:
    assert "is not below the high one" in shell.fault(low_watermark="95%")
    assert shell.settings(low_watermark="50%").low_watermark == 0.5


def test_verifying_reads_needs_checksums(shell: Shell) -> None:
    assert "nothing to verify" in shell.fault(verify_reads=True, checksum_at_seal="never")


def test_socket_path_that_is_taken_by_a_file_is_refused(shell: Shell) -> None:
    path = shell.directory / "plain"
    path.write_text("")
    assert "exists and is not a socket" in shell.fault(socket=str(path))


def test_socket_that_a_dead_daemon_left_is_no_fault(shell: Shell) -> None:
    path = shell.directory / "left.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert shell.settings(socket=str(path)).socket == path


def test_missing_socket_directory_is_refused(shell: Shell) -> None:
    assert "does not exist: make it" in shell.fault(socket=str(shell.directory / "no" / "s.sock"))
