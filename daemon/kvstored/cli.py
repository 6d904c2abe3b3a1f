"""The command kvstored: settings, logging, signals, and an exit status that tells a script what happened.

Invariants
1. Whatever goes wrong ends in one clear text on standard error and a status: 0 done, 1 failed, 2 wrong settings,
   3 something needed does not answer. A traceback is for our own bugs only.
2. The first SIGTERM or SIGINT starts one orderly drain with one deadline; the second ends the process at once.
   What is durable survives either. SIGHUP is a stop where it means that the terminal is gone, else it changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, cast

from kvstore.errors import BadSetting, KVStoreError, PeerUnreachable, UsageError
from kvstore.paths import make_socket_directory
from kvstored.arguments import parse
from kvstored.config import Settings, as_toml, as_words
from kvstored.logs import fields, logging_to
from kvstored.notify import Notifier
from kvstored.options import OPTIONS, TABLE
from kvstored.resolve import Resolution, resolve

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
# What closing may take after the drain's own deadline before the process is ended.
_CLOSE_S = 5.0
_DESCRIPTORS_A_SESSION = 4
_DESCRIPTORS_OWN = 256
_DEPENDENCIES = ("uvloop", "lmdb", "aiofiles", "aiohttp", "prometheus_client")

log = logging.getLogger("kvstored")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    _fill_standard_descriptors()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if not _is_on_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv, TABLE)
        resolution = resolve(arguments.flags, os.environ, arguments.config, faults=arguments.faults)
        if arguments.action == "check":
            return _check(resolution, as_json=arguments.as_json)
        if resolution.settings is None:
            return _tell_faults(resolution)
        if arguments.action == "print-config":
            sys.stdout.write(as_toml(resolution.settings, resolution.sources, resolution.idle, explain=True))
            sys.stdout.flush()
            return EXIT_DONE
        return _run(resolution.settings, resolution)
    except BrokenPipeError:
        # Whoever read our output went away; nothing more can be told, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _check(resolution: Resolution, *, as_json: bool) -> int:
    settings = resolution.settings
    if as_json:
        told = {
            option.key: {"value": as_words(option.key, settings), "source": resolution.sources[option.key]}
            for option in OPTIONS
            if settings is not None and option.key not in resolution.idle
        }
        faults = [
            {"key": fault.key, "given": fault.given, "source": fault.source, "problem": fault.problem}
            for fault in resolution.faults
        ]
        report = {"ok": not faults, "settings": told, "notes": resolution.notes, "faults": faults}
        sys.stdout.write(json.dumps(report, default=str) + "\n")
        sys.stdout.flush()
        return EXIT_USAGE if faults else EXIT_DONE
    if settings is None:
        return _tell_faults(resolution)
    for note in resolution.notes:
        _tell(f"note: {note}")
    sys.stdout.write(as_toml(settings, resolution.sources, resolution.idle, explain=False))
    sys.stdout.flush()
    return EXIT_DONE


def _tell_faults(resolution: Resolution) -> int:
    count = len(resolution.faults)
    _tell(f"{count} fault{'s' if count > 1 else ''} in the settings; nothing was started")
    for fault in resolution.faults:
        sys.stderr.write(f"  {fault}\n")
    return EXIT_USAGE


def _run(settings: Settings, resolution: Resolution) -> int:
    try:
        with logging_to(sys.stderr.fileno(), settings.log_level, settings.log_format):
            _announce(settings, resolution)
            _prepare(settings)
            _serve(settings)
        return EXIT_DONE
    except KeyboardInterrupt:  # before the loop listens for signals
        _tell("interrupted while it started; nothing is lost")
        return EXIT_FAILED
    except (KVStoreError, OSError, MemoryError, ModuleNotFoundError, ExceptionGroup) as exc:
        return _fail(exc)


def _announce(settings: Settings, resolution: Resolution) -> None:
    effective = {
        option.key.replace("-", "_"): as_words(option.key, settings)
        for option in OPTIONS
        if option.key not in resolution.idle
    }
    log.info("settings", extra=fields(**effective))
    for note in resolution.notes:
        log.warning(note)


def _prepare(settings: Settings) -> None:
    """Make the directories that are ours to make, and room for the descriptors of all sessions."""
    make_socket_directory(settings.socket)
    if settings.ssd_dir is not None:
        try:
            settings.ssd_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise BadSetting(
                f"the ssd tier's directory {settings.ssd_dir} can't be made ({exc.strerror}): choose another --ssd-dir"
            ) from exc
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = settings.sessions_max * _DESCRIPTORS_A_SESSION + _DESCRIPTORS_OWN
    if hard < needed:
        log.warning("descriptors may run out before sessions", extra=fields(ulimit_n=hard, needed=needed))


def _serve(settings: Settings) -> None:
    import uvloop  # an engine's environment may have the command without the daemon's dependencies

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(settings, Notifier()))


async def _until_stopped(settings: Settings, notifier: Notifier) -> None:
    """Serve until a signal, or until serving fails. Cancelling `serve` is what asks it to drain and return."""
    from kvstored.app import serve

    def ready() -> None:
        notifier.ready(f"serving {','.join(settings.tiers)} on {settings.socket}")
        log.info("ready", extra=fields(socket=settings.socket, tiers=",".join(settings.tiers)))

    async with asyncio.TaskGroup() as group:
        watchdog = group.create_task(notifier.keep_watchdog())
        serving = group.create_task(serve(settings, ready=ready))
        with _stopping(serving.cancel, settings.drain_s, notifier):
            await asyncio.wait([serving])
        watchdog.cancel()
    log.info("stopped")


@contextmanager
def _stopping(stop: Callable[[], object], drain_s: float, notifier: Notifier) -> Generator[None, None, None]:
    """Call `stop` at the first signal inside the block; end the process at the second, or past the deadline."""
    loop = asyncio.get_running_loop()
    deadline: asyncio.TimerHandle | None = None

    def signalled(name: str) -> None:
        nonlocal deadline
        if deadline is not None:
            _end_now(f"a second signal ({name}) cut the drain short: what only memory held is gone")
        log.info("stopping", extra=fields(signal=name, drain_s=drain_s))
        notifier.stopping(f"draining for up to {drain_s:g} s", drain_s + 2 * _CLOSE_S)
        deadline = loop.call_later(
            drain_s + _CLOSE_S, _end_now, f"not stopped {drain_s + _CLOSE_S:g} s after {name}: raise --drain-timeout"
        )
        stop()

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in signals:
        is_stop = number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup ignores it, too
        loop.add_signal_handler(number, signalled if is_stop else _tell_of, number.name)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        if deadline is not None:
            deadline.cancel()


def _tell_of(name: str) -> None:
    log.warning("signal ignored", extra=fields(signal=name, fix="settings are read at the start only: restart"))


def _is_on_terminal() -> bool:
    return sys.stderr.isatty()


def _fill_standard_descriptors() -> None:
    """Let whatever was closed lead nowhere: else a file or socket of ours gets its number, and what is told there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _end_now(why: str) -> NoReturn:
    os.write(sys.stderr.fileno(), f"kvstored: {why}\n".encode())
    os._exit(EXIT_FAILED)


def _fail(exc: Exception) -> int:
    """Tell what ended the daemon and return the status that stands for it; what is no known error is raised again."""
    causes = list(_leaves(exc))
    for cause in causes:
        if isinstance(cause, ModuleNotFoundError) and cause.name in _DEPENDENCIES:
            _tell(f"{cause.name} is not installed: pip install 'kvstored[daemon]'")
        elif isinstance(cause, KVStoreError):
            _tell(str(cause))
        elif isinstance(cause, OSError):
            _tell(f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''} (errno {cause.errno})")
        elif isinstance(cause, MemoryError):
            _tell("out of memory: give less --cpu-size, or free memory on this machine")
        else:
            raise exc
    if any(isinstance(cause, UsageError) for cause in causes):
        return EXIT_USAGE
    if any(isinstance(cause, PeerUnreachable) for cause in causes):
        return EXIT_UNREACHABLE
    return EXIT_FAILED


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for part in cast("BaseExceptionGroup[BaseException]", exc).exceptions:
            yield from _leaves(part)
    else:
        yield exc


def _tell(text: str) -> None:
    sys.stderr.write(f"kvstored: {text}\n")
