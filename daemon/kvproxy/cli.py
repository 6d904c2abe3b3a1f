"""The command kvproxy: settings, logging, signals, and an exit status that tells a script what happened.

Invariants
1. Whatever goes wrong ends in one clear text on standard error and a status: 0 done, 1 failed, 2 wrong settings,
   3 something needed does not answer. A traceback is for our own bugs only.
2. The first SIGTERM or SIGINT starts one orderly drain with one deadline; the second ends the process at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvproxy.options import OPTIONS, TABLE
from kvproxy.settings import Resolution, Settings, field_of, resolve
from kvproxy.types import Endpoint
from kvstore.errors import KVStoreError, PeerUnreachable, UsageError
from kvstored.arguments import parse
from kvstored.logs import fields, logging_to
from kvstored.notify import Notifier

if TYPE_CHECKING:
    from kvproxy.app import Served

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
# What ending legs and closing may take after the drain's own deadline before the process is ended.
_CLOSE_S = 10.0
_DEPENDENCIES = ("uvloop", "aiohttp", "multidict", "prometheus_client")

log = logging.getLogger("kvproxy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv, TABLE)
        resolution = resolve(arguments.flags, os.environ, arguments.config, arguments.faults)
        if arguments.action == "check" and arguments.as_json:
            _write(json.dumps(_report(resolution)))
            return EXIT_USAGE if resolution.faults else EXIT_DONE
        if resolution.settings is None:
            return _tell_faults(resolution)
        if arguments.action != "run":
            _write(as_toml(resolution.settings, resolution.sources, explain=arguments.action == "print-config"))
            return EXIT_DONE
        return _run(resolution.settings)
    except BrokenPipeError:
        # Whoever read our output went away; nothing more can be told, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def as_words(key: str, settings: Settings) -> Any:
    """Return a setting as the config file holds it: text, a number, a list or a table."""
    value = getattr(settings, field_of(key))
    if key in ("listen", "admin"):
        return "off" if value is None else f"[{value[0]}]:{value[1]}" if ":" in value[0] else f"{value[0]}:{value[1]}"
    if key in ("prefill", "decode"):
        return [f"{endpoint.url}#{endpoint.node}" for endpoint in cast("tuple[Endpoint, ...]", value)]
    return str(value) if isinstance(value, Path) else value


def as_toml(settings: Settings, sources: Mapping[str, str], *, explain: bool) -> str:
    """Return the settings as a config file, each with its source; `explain` says what each is for."""
    lines: list[str] = []
    for option in OPTIONS:
        words = as_words(option.key, settings)
        if explain:
            lines += ["", f"# {option.summary}"]
        if words is None:
            lines.append(f"# {option.key}: {option.default_text}")
            continue
        written = json.dumps(words)
        if option.key == "fetch-speed":
            written = "{" + ", ".join(f"{tier} = {speed!r}" for tier, speed in words.items()) + "}"
        mark = "# " if explain and sources[option.key] == "default" else ""
        lines.append(f"{mark}{option.key} = {written}  # {sources[option.key]}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _report(resolution: Resolution) -> dict[str, Any]:
    settings = resolution.settings
    told = {
        option.key: {"value": as_words(option.key, settings), "source": resolution.sources[option.key]}
        for option in OPTIONS
        if settings is not None
    }
    faults = [
        {"key": fault.key, "given": fault.given, "source": fault.source, "problem": fault.problem}
        for fault in resolution.faults
    ]
    return {"ok": not faults, "settings": told, "faults": faults}


def _tell_faults(resolution: Resolution) -> int:
    count = len(resolution.faults)
    _tell(f"{count} fault{'s' if count > 1 else ''} in the settings; nothing was started")
    for fault in resolution.faults:
        sys.stderr.write(f"  {fault}\n")
    return EXIT_USAGE


def _run(settings: Settings) -> int:
    try:
        with logging_to(sys.stderr.fileno(), settings.log_level, settings.log_format):
            shown = {option.key.replace("-", "_"): as_words(option.key, settings) for option in OPTIONS}
            log.info("settings", extra=fields(**shown))
            _allow_descriptors(settings)
            _serve(settings)
        return EXIT_DONE
    except KeyboardInterrupt:  # before the loop listens for signals
        _tell("interrupted while it started")
        return EXIT_FAILED
    except ModuleNotFoundError as exc:
        if exc.name not in _DEPENDENCIES:
            raise
        _tell(f"{exc.name} is not installed: pip install 'kvstored[proxy]'")
        return EXIT_FAILED
    except KVStoreError as exc:
        _tell(str(exc))
        return EXIT_USAGE if isinstance(exc, UsageError) else (
            EXIT_UNREACHABLE if isinstance(exc, PeerUnreachable) else EXIT_FAILED
        )
    except OSError as exc:
        _tell(f"{exc.strerror}{f': {exc.filename}' if exc.filename else ''} (errno {exc.errno})")
        return EXIT_FAILED


def _allow_descriptors(settings: Settings) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = settings.connections_max + 2 * settings.running_max + 64
    if hard < needed:
        log.warning("descriptors may run out before connections", extra=fields(ulimit_n=hard, needed=needed))


def _serve(settings: Settings) -> None:
    import uvloop  # an engine's environment may have the command without the proxy's dependencies

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(settings, Notifier()))


async def _until_stopped(settings: Settings, notifier: Notifier) -> None:
    """Serve until a signal, or until serving fails. Cancelling `serve` is what asks it to drain and return."""
    from kvproxy.app import serve

    def ready(served: Served) -> None:
        notifier.ready(f"serving on {served.url}")
        log.info("ready", extra=fields(listen=served.url, admin=served.admin_url))

    watchdog = asyncio.ensure_future(notifier.keep_watchdog())
    serving = asyncio.ensure_future(serve(settings, ready=ready))
    try:
        with _stopping(serving, settings.drain_s, notifier):
            await asyncio.wait((serving,))
    finally:
        watchdog.cancel()
        await asyncio.wait((watchdog,))
    if not serving.cancelled():
        serving.result()
    log.info("stopped")


@contextmanager
def _stopping(serving: asyncio.Future[None], drain_s: float, notifier: Notifier) -> Generator[None, None, None]:
    """Cancel `serving` at the first signal inside the block; end the process at the second, or past the deadline."""
    loop = asyncio.get_running_loop()
    deadline: asyncio.TimerHandle | None = None

    def signalled(name: str) -> None:
        nonlocal deadline
        if deadline is not None:
            _end_now(f"a second signal ({name}) cut the drain short")
        log.info("stopping", extra=fields(signal=name, drain_s=drain_s))
        notifier.stopping(f"draining for up to {drain_s:g} s", drain_s + 2 * _CLOSE_S)
        deadline = loop.call_later(
            drain_s + _CLOSE_S, _end_now, f"not stopped {drain_s + _CLOSE_S:g} s after {name}: raise --drain-timeout"
        )
        serving.cancel()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, signalled, number.name)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
        if deadline is not None:
            deadline.cancel()


def _end_now(why: str) -> NoReturn:
    os.write(sys.stderr.fileno(), f"kvproxy: {why}\n".encode())
    os._exit(EXIT_FAILED)


def _write(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stderr.write(f"kvproxy: {text}\n")
