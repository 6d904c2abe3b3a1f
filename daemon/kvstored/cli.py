"""The command kvstored: its settings, what it tells of them, and what it makes before it serves.

What it does as a process (signals, exit status, last words) is process.py's part. What is durable survives any end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence

from kvstore.errors import BadSetting
from kvstore.paths import make_socket_directory
from kvstored.arguments import parse
from kvstored.config import Settings, as_toml, as_words
from kvstored.logs import fields
from kvstored.notify import Notifier
from kvstored.options import OPTIONS, TABLE
from kvstored.process import EXIT_DONE, EXIT_USAGE, Command
from kvstored.resolve import Resolution, resolve

_CLOSE_S = 5.0
_DESCRIPTORS_A_SESSION = 4
_DESCRIPTORS_OWN = 256
COMMAND = Command(
    "kvstored",
    "daemon",
    ("uvloop", "lmdb", "aiofiles", "aiohttp", "prometheus_client"),
    _CLOSE_S,
    memory_fix="give less --cpu-size, or free memory on this machine",
    drain_loss="what only memory held is gone",
)

log = logging.getLogger("kvstored")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return COMMAND.run(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    arguments = parse(argv, TABLE)
    resolution = resolve(arguments.flags, os.environ, arguments.config, faults=arguments.faults)
    if arguments.action == "check":
        return _check(resolution, as_json=arguments.as_json)
    settings = resolution.settings
    if settings is None:
        return COMMAND.tell_faults(resolution.faults)
    if arguments.action == "print-config":
        sys.stdout.write(as_toml(settings, resolution.sources, resolution.idle, explain=True))
        sys.stdout.flush()
        return EXIT_DONE
    return COMMAND.serve(settings.log_level, settings.log_format, lambda: _serve(settings, resolution))


def _check(resolution: Resolution, *, as_json: bool) -> int:
    settings = resolution.settings
    if as_json:
        told = {
            option.key: {"value": as_words(option.key, settings), "source": resolution.sources[option.key]}
            for option in OPTIONS
            if settings is not None and option.key not in resolution.idle
        }
        faults = [fault.report() for fault in resolution.faults]
        report = {"ok": not faults, "settings": told, "notes": resolution.notes, "faults": faults}
        sys.stdout.write(json.dumps(report, default=str) + "\n")
        sys.stdout.flush()
        return EXIT_USAGE if faults else EXIT_DONE
    if settings is None:
        return COMMAND.tell_faults(resolution.faults)
    for note in resolution.notes:
        COMMAND.tell(f"note: {note}")
    sys.stdout.write(as_toml(settings, resolution.sources, resolution.idle, explain=False))
    sys.stdout.flush()
    return EXIT_DONE


def _serve(settings: Settings, resolution: Resolution) -> None:
    _announce(settings, resolution)
    _prepare(settings)

    import uvloop  # an engine's environment may have the command without the daemon's dependencies

    from kvstored.app import serve

    notifier = Notifier()

    def ready() -> None:
        notifier.ready(f"serving {','.join(settings.tiers)} on {settings.socket}")
        log.info("ready", extra=fields(socket=settings.socket, tiers=",".join(settings.tiers)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(COMMAND.until_stopped(serve(settings, ready=ready), settings.drain_s, notifier))


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
    COMMAND.allow_descriptors(settings.sessions_max * _DESCRIPTORS_A_SESSION + _DESCRIPTORS_OWN, "sessions")
