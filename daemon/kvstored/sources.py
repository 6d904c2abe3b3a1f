"""Where settings come from: flags, variables, a TOML file. Collects what was given and everything wrong with it.

Invariants
1. Flag before variable before file before default; a value that loses is still read, and its faults are told.
2. A fault names the key, the value, the source and what to do. All are found before any is reported.
3. A key that nothing would read is a fault, with the nearest one that exists.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import BadSetting
from kvstored.tables import Alias, Table

_FILE_BYTES_MAX = 1 << 20
# Kubernetes sets these in every pod of a namespace that has a service called like the command.
_SERVICE_LINK = re.compile(r"(SERVICE_|PORT(_|$))")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with the settings: where, what was given, what is wrong, what to do."""

    key: str
    given: Any
    source: str
    problem: str

    def __str__(self) -> str:
        shown = "" if self.given is None else f" = {self.given!r}"
        return f"{self.key}{shown} ({self.source}): {self.problem}"

    def report(self) -> dict[str, Any]:
        """Return it for a program to read."""
        return {"key": self.key, "given": self.given, "source": self.source, "problem": self.problem}


@dataclass(slots=True)
class Given:
    """What was given: for each key its value as read, its value as written and its source."""

    table: Table
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    written: dict[str, Any] = field(default_factory=dict[str, Any])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    faults: list[Fault] = field(default_factory=list[Fault])

    def take(self, key: str, written: Any, source: str) -> None:
        """Read one value; the first source to give a key keeps it."""
        option = self.table.by_key[key]
        given, written = written, option.shown(written) if option.shown and isinstance(written, str) else written
        try:
            value = option.read(given)
        except BadSetting as exc:
            self.faults.append(Fault(key, written, source, str(exc)))
            return
        if key not in self.values:
            self.values[key], self.written[key], self.sources[key] = value, written, source


def gather(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None, table: Table
) -> Given:
    """Return what flags, variables and the file give. `config` is the file that --config names."""
    given = Given(table)
    config_variable = f"{table.prefix}CONFIG"
    for key, written in flags.items():
        given.take(key, written, f"flag --{key}")
    _take_variables(given, environ)
    source = "flag --config"
    if config is None and (named := environ.get(config_variable)):
        config, source = Path(named), f"variable {config_variable}"
    if config is not None:
        _take_file(given, config, source)
    return given


def nearest(key: str, known: Iterable[str], command: str, prefix: str = "") -> str:
    """Return a hint at the existing key that `key` was probably meant to be."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"did you mean {prefix}{close[0]}?" if close else f"{command} --help lists what there is"


def _take_variables(given: Given, environ: Mapping[str, str]) -> None:
    table = given.table
    by_variable = {option.variable: option for option in table.options}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(table.prefix) or variable == f"{table.prefix}CONFIG":
            continue
        option = by_variable.get(variable)
        source = f"variable {variable}"
        if option is not None:
            # Several entries of a repeated setting stand in one variable with semicolons between.
            parts: Any = [part for part in text.split(";") if part.strip()] if option.repeated else text
            given.take(option.key, parts, source)
        elif not _SERVICE_LINK.match(variable.removeprefix(table.prefix)):
            hint = nearest(variable, by_variable, table.command)
            given.faults.append(Fault(variable, text, "environment", f"there is no such setting: {hint}"))
    for alias in table.aliases:  # behind our own names, which therefore go first
        if text := environ.get(alias.variable, "").strip():
            _take_alias(given, alias, text)


def _take_alias(given: Given, alias: Alias, text: str) -> None:
    source = f"variable {alias.variable}"
    try:
        written = alias.in_words(text)
    except BadSetting as exc:
        given.faults.append(Fault(alias.key, text, source, str(exc)))
        return
    given.take(alias.key, written, source)


def _take_file(given: Given, path: Path, source: str) -> None:
    try:
        with path.open("rb") as stream:
            raw = stream.read(_FILE_BYTES_MAX + 1)
        if len(raw) > _FILE_BYTES_MAX:
            raise ValueError(f"it is over {_FILE_BYTES_MAX} bytes")
        table = tomllib.loads(raw.decode("utf-8-sig"))  # some editors put a mark in front
    except OSError as exc:
        problem = f"can't be read ({exc.strerror}): name a file that this user can read"
        given.faults.append(Fault("config", str(path), source, problem))
        return
    except (ValueError, RecursionError) as exc:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        problem = f"is not a TOML file ({exc}): write lines such as cpu-size = \"64GiB\""
        given.faults.append(Fault("config", str(path), source, problem))
        return
    for key, written in table.items():
        if key in given.table.by_key:
            given.take(key, written, f"file {path}")
        else:
            hint = nearest(key.replace("_", "-"), given.table.by_key, given.table.command)
            given.faults.append(Fault(key, written, f"file {path}", f"there is no such setting: {hint}"))
