"""The command kvproxy: its settings, and what it tells of them.

What it does as a process (signals, exit status, last words) is the part of kvstored.process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvproxy.options import OPTIONS, TABLE
from kvproxy.settings import Resolution, Settings, field_of, resolve
from kvproxy.types import Endpoint
from kvstored.arguments import parse
from kvstored.logs import fields
from kvstored.notify import Notifier
from kvstored.process import EXIT_DONE, EXIT_USAGE, Command

if TYPE_CHECKING:
    from kvproxy.app import Served

_CLOSE_S = 10.0  # ending legs, and closing
COMMAND = Command("kvproxy", "proxy", ("uvloop", "aiohttp", "multidict", "prometheus_client"), _CLOSE_S)

log = logging.getLogger("kvproxy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return COMMAND.run(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    arguments = parse(argv, TABLE)
    resolution = resolve(arguments.flags, os.environ, arguments.config, arguments.faults)
    if arguments.action == "check" and arguments.as_json:
        _write(json.dumps(_report(resolution)))
        return EXIT_USAGE if resolution.faults else EXIT_DONE
    settings = resolution.settings
    if settings is None:
        return COMMAND.tell_faults(resolution.faults)
    if arguments.action != "run":
        _write(as_toml(settings, resolution.sources, explain=arguments.action == "print-config"))
        return EXIT_DONE
    return COMMAND.serve(settings.log_level, settings.log_format, lambda: _serve(settings))


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
    faults = [fault.report() for fault in resolution.faults]
    return {"ok": not faults, "settings": told, "faults": faults}


def _serve(settings: Settings) -> None:
    shown = {option.key.replace("-", "_"): as_words(option.key, settings) for option in OPTIONS}
    log.info("settings", extra=fields(**shown))
    COMMAND.allow_descriptors(settings.connections_max + 2 * settings.running_max + 64, "connections")

    import uvloop  # an engine's environment may have the command without the proxy's dependencies

    from kvproxy.app import serve

    notifier = Notifier()

    def ready(served: Served) -> None:
        notifier.ready(f"serving on {served.url}")
        log.info("ready", extra=fields(listen=served.url, admin=served.admin_url))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(COMMAND.until_stopped(serve(settings, ready=ready), settings.drain_s, notifier))


def _write(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()
