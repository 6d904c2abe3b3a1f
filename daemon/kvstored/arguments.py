"""The command line: one flag a setting, and the few that make the command do something else."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import kvstore
from kvstored.sources import Fault, nearest
from kvstored.tables import Table

_EPILOG = """\
Each flag is also a variable (--{key}: {variable}, entries of repeated ones separated by ;) and a key of the
file ({key} = "{example}"). A flag goes before a variable, a variable before the file. GB is 10^9 bytes, GiB 2^30.
Exit status: 0 done, 1 failed, 2 wrong settings, 3 something needed does not answer.
"""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the command line says: settings as written, what to do, and what was wrong with it."""

    flags: dict[str, Any]
    config: Path | None
    action: str  # run, check or print-config
    as_json: bool
    faults: tuple[Fault, ...]


def parse(argv: Sequence[str], table: Table) -> Arguments:
    """Return what `argv` says. --help and --version print and raise SystemExit(0)."""
    parser = _parser(table)
    faults: list[Fault] = []
    found = argparse.Namespace()
    try:
        found, unknown = parser.parse_known_args(argv, found)
    except argparse.ArgumentError as exc:
        unknown = []
        problem = f"{exc.message}: see {table.command} --help"
        faults.append(Fault(exc.argument_name or "command line", None, "flag", problem))
    faults += _unknown(unknown, table)
    given = vars(found)
    action = "check" if given.get("check") else "print-config" if given.get("print_config") else "run"
    if given.get("json") and action == "run":
        faults.append(Fault("--json", None, "flag", "it has no effect without --check: add that, or remove it"))
    config = given.get("config")
    flags = {key: written for key, written in given.items() if key in table.by_key}
    return Arguments(flags, Path(config) if config else None, action, bool(given.get("json")), tuple(faults))


def _unknown(words: Sequence[str], table: Table) -> list[Fault]:
    faults: list[Fault] = []
    takes_next = False
    for word in words:
        if word.startswith("-"):
            name = word.split("=")[0]
            hint = nearest(name.lstrip("-"), table.by_key, table.command, "--")
            faults.append(Fault(name, None, "flag", f"there is no such flag: {hint}"))
            takes_next = "=" not in word
        elif takes_next:  # most likely the value of the flag before
            takes_next = False
        else:
            problem = f"settings are given as --KEY VALUE: see {table.command} --help"
            faults.append(Fault(word, None, "argument", problem))
    return faults


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that these faults are told with the others."""
        raise argparse.ArgumentError(None, message)


def _parser(table: Table) -> argparse.ArgumentParser:
    key, example = table.example
    parser = _Parser(
        prog=table.command,
        description=table.description,
        epilog=_EPILOG.format(key=key, variable=table.by_key[key].variable, example=example),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    command = parser.add_argument_group("command")
    from_file = f"read settings from a TOML file (or {table.prefix}CONFIG)"
    command.add_argument("--config", metavar="FILE.toml", help=from_file)
    command.add_argument("--check", action="store_true", help="validate, print the settings in effect, and exit")
    command.add_argument("--print-config", action="store_true", help="print a commented config file and exit")
    command.add_argument("--json", action="store_true", help="with --check: print one JSON object")
    command.add_argument("--version", action="version", version=f"{table.command} {kvstore.__version__}")
    settings = parser.add_argument_group("settings")
    for option in table.options:
        default = option.default_text or option.default
        text = f"{option.summary}" if option.is_switch else f"{option.summary} (default: {default})"
        text = text.replace("%", "%%")
        if option.is_switch:
            settings.add_argument(option.flag, dest=option.key, action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if option.repeated else "store"
            settings.add_argument(option.flag, dest=option.key, metavar=option.metavar, action=action, help=text)
    return parser
