"""The command kvstored as a process: what it prints, how it exits, what signals do to it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO

import pytest

import kvstore

MIB = 1 << 20

# A daemon whose inside does nothing: it is ready at once and drains as its last argument says.
STAND_IN = """
import asyncio, dataclasses, sys, types
how = sys.argv.pop()
async def serve(settings, *, ready):
    if how == "fails":
        from kvstore.errors import TierLocked
        raise TierLocked(f"{settings.ssd_dir} belongs to another daemon: stop that one, or choose another --ssd-dir")
    if how == "bug":
        raise RuntimeError("our own fault")
    ready()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("draining", flush=True)
        if how == "hangs":
            await asyncio.Event().wait()
        raise
app = types.ModuleType("kvstored.app")
app.serve = serve
sys.modules["kvstored.app"] = app
from kvstored import cli
cli.COMMAND = dataclasses.replace(cli.COMMAND, close_s=0.1)
sys.exit(cli.main())
"""


def environment(directory: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(directory), "XDG_STATE_HOME": str(directory), **variables}


def kvstored(
    directory: Path, *arguments: str, before: Callable[[], None] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstored", *arguments],
        env=environment(directory, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=before,
    )


def small(directory: Path) -> list[str]:
    return [
        "--tiers", "cpu,ssd", "--cpu-size", "8MiB", "--ssd-size", "32MiB", "--ssd-dir", str(directory / "kv"),
        "--socket", str(directory / "s.sock"),
    ]  # fmt: skip


@contextlib.contextmanager
def stand_in(
    directory: Path, how: str, *arguments: str, **variables: str
) -> Generator[subprocess.Popen[str], None, None]:
    process = subprocess.Popen(
        [sys.executable, "-c", STAND_IN, *small(directory), *arguments, how],
        env=environment(directory, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_until(stream: IO[str] | None, event: str) -> str:
    """Return the first line of `stream` with `event` in it; at the stream's end the test fails."""
    assert stream is not None
    seen: list[str] = []
    while line := stream.readline():
        if event in line:
            return line
        seen.append(line)
    raise AssertionError(f"no {event!r} in {''.join(seen)!r}")


# ---- settings


def test_check_prints_the_settings_in_effect_with_their_sources(short_dir: Path) -> None:
    done = kvstored(short_dir, *small(short_dir), "--check", KVSTORED_TTL="1h")
    assert done.returncode == 0, done.stderr
    assert "cpu-size = 8388608  # 8 MiB, flag --cpu-size" in done.stdout
    assert "ttl = 3600.0  # 1h, variable KVSTORED_TTL" in done.stdout
    assert 'eviction = "lru"  # default' in done.stdout
    assert list(short_dir.iterdir()) == []


def test_check_as_json_is_one_object(short_dir: Path) -> None:
    told = json.loads(kvstored(short_dir, *small(short_dir), "--check", "--json").stdout)
    assert told["ok"] is True
    assert told["settings"]["cpu-size"] == {"value": 8 * MIB, "source": "flag --cpu-size"}
    done = kvstored(short_dir, "--check", "--json", "--mode", "open")
    assert done.returncode == 2
    faults = json.loads(done.stdout)["faults"]
    assert [(fault["key"], fault["given"]) for fault in faults] == [("mode", "open")]


def test_all_faults_are_on_standard_error_and_the_status_is_2(short_dir: Path) -> None:
    done = kvstored(short_dir, "--cpu-size", "4G", "--evict", "lru", "stray", "--mode", "open", KVSTORED_TTTL="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvstored: 5 faults in the settings; nothing was started\n")
    for expected in ("cpu-size = '4G'", "mean --eviction?", "stray", "mode = 'open'", "mean KVSTORED_TTL?"):
        assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_flag_without_its_value_is_told_with_the_other_faults(short_dir: Path) -> None:
    done = kvstored(short_dir, "--ttl", KVSTORED_MODE="open")
    assert done.returncode == 2
    assert "--ttl" in done.stderr
    assert "mode = 'open'" in done.stderr


def test_printed_config_file_is_accepted_back(short_dir: Path) -> None:
    printed = kvstored(short_dir, *small(short_dir), "--print-config")
    assert printed.returncode == 0, printed.stderr
    path = short_dir / "kvstored.toml"
    path.write_text(printed.stdout)
    done = kvstored(short_dir, "--config", str(path), "--check")
    assert done.returncode == 0, done.stderr
    assert f"cpu-size = 8388608  # 8 MiB, file {path}" in done.stdout


def test_version_and_help_go_to_standard_output(short_dir: Path) -> None:
    assert kvstored(short_dir, "--version").stdout == f"kvstored {kvstore.__version__}\n"
    done = kvstored(short_dir, "--help")
    assert done.returncode == 0
    assert "--print-config" in done.stdout


def test_reader_that_goes_away_is_no_traceback(short_dir: Path) -> None:
    line = f"{sys.executable} -m kvstored --help | true"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def test_gpu_tier_is_refused_with_the_fix(short_dir: Path) -> None:
    done = kvstored(short_dir, "--tiers", "gpu,cpu,ssd")
    assert done.returncode == 2
    assert "--tiers cpu,ssd" in done.stderr


def test_socket_path_that_can_not_be_shortened_is_refused_with_its_length(short_dir: Path) -> None:
    path = short_dir / ("n" * 120)
    done = kvstored(short_dir, "--socket", str(path))
    assert done.returncode == 2
    for expected in (str(path), f"{len(str(path))} bytes", "107"):
        assert expected in done.stderr


# ---- limits of the machine


def test_pool_over_the_file_size_limit_exits_with_the_limits_name_and_no_signal(short_dir: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, 64 * MIB))

    done = kvstored(short_dir, "--tiers", "cpu", "--cpu-size", "256MiB", before=limit)
    assert done.returncode == 2
    for expected in ("RLIMIT_FSIZE", "67108864", "268435456", "ulimit -f"):
        assert expected in done.stderr


def test_pool_over_the_address_space_limit_exits_with_the_limits_name_and_no_signal(short_dir: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (512 * MIB, 512 * MIB))

    done = kvstored(short_dir, "--tiers", "cpu", "--cpu-size", "1GiB", before=limit)
    assert done.returncode == 2
    assert "RLIMIT_AS" in done.stderr


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Return a control group of 64 MiB, where this user may make one."""
    own = _own_memory_group()
    if own is None:
        pytest.skip("no writable memory control group here")
    path, limit_name = own
    group = path / f"kvstored-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit_name).write_text(str(64 * MIB))
    except OSError as exc:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {exc}")
    yield group
    group.rmdir()


def _own_memory_group() -> tuple[Path, str] | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / name.lstrip("/"), "memory.limit_in_bytes"
    path = Path("/sys/fs/cgroup")
    return (path, "memory.max") if (path / "cgroup.controllers").exists() else None


def test_pool_over_the_control_groups_limit_exits_with_its_name_and_no_oom_kill(
    short_dir: Path, small_group: Path
) -> None:
    def enter() -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))

    done = kvstored(short_dir, "--tiers", "cpu", "--cpu-size", "256MiB", before=enter)
    assert done.returncode == 2, done
    for expected in (f"{small_group.name}/memory.", "67108864", "268435456", "free", "MemoryMax="):
        assert expected in done.stderr


# ---- running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_0(short_dir: Path, number: signal.Signals) -> None:
    with stand_in(short_dir, "drains") as process:
        read_until(process.stderr, "ready")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "draining\n"
    assert f"stopping signal={number.name}" in err
    assert "stopped" in err


def test_second_signal_ends_the_process_at_once(short_dir: Path) -> None:
    with stand_in(short_dir, "hangs", "--drain-timeout", "1h") as process:
        read_until(process.stderr, "ready")
        process.terminate()
        read_until(process.stdout, "draining")
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a second signal (SIGTERM) cut the drain short" in err


def test_drain_that_does_not_end_is_ended_at_its_deadline(short_dir: Path) -> None:
    with stand_in(short_dir, "hangs", "--drain-timeout", "0") as process:
        read_until(process.stderr, "ready")
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "raise --drain-timeout" in err


def test_known_error_is_one_text_and_a_bug_is_a_traceback(short_dir: Path) -> None:
    with stand_in(short_dir, "fails") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "belongs to another daemon" in err
    assert "Traceback" not in err
    with stand_in(short_dir, "bug") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "RuntimeError: our own fault" in err


def test_settings_are_logged_at_the_start(short_dir: Path) -> None:
    with stand_in(short_dir, "drains", "--log-format", "json") as process:
        told = json.loads(read_until(process.stderr, '"settings"'))
        read_until(process.stderr, '"ready"')  # the directory is made after its name has been told
        process.kill()
    assert told["cpu_size"] == 8 * MIB
    assert told["ssd_dir"] == str(short_dir / "kv")
    assert (short_dir / "kv").stat().st_mode & 0o777 == 0o700


def test_service_manager_hears_ready_alive_and_stopping(short_dir: Path) -> None:
    with _service_manager(short_dir) as heard, stand_in(
        short_dir, "drains", NOTIFY_SOCKET=str(short_dir / "notify"), WATCHDOG_USEC="20000"
    ) as process:
        ready, alive = heard("READY=1"), heard("WATCHDOG=1")
        process.terminate()
        stopping = heard("STOPPING=1")
        process.wait(60)
    assert f"MAINPID={process.pid}" in ready
    assert f"STATUS=serving cpu,ssd on {short_dir / 's.sock'}" in ready
    assert alive == "WATCHDOG=1"
    assert "EXTEND_TIMEOUT_USEC=30200000" in stopping


@contextlib.contextmanager
def _service_manager(directory: Path) -> Generator[Callable[[str], str], None, None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(directory / "notify"))
        line.settimeout(60)

        def heard(word: str) -> str:
            while True:
                text = line.recv(4096).decode()
                if text.startswith(word):
                    return text

        yield heard


