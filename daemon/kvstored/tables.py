"""What a setting is: its names, its reader, its default, what it is for; and the table of all settings of a command.

Invariants
1. A setting has one key. The flag is --KEY, the variable COMMAND_KEY with underscores, the file's key KEY.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvstored.readers import read_switch


@dataclass(frozen=True, slots=True)
class Option:
    """One setting as an operator sees it. `default` is in the words of the file; None: see `default_text`."""

    key: str
    metavar: str
    read: Callable[[Any], Any]
    summary: str
    default: Any = None
    default_text: str = ""
    repeated: bool = False
    prefix: str = field(kw_only=True)
    shown: Callable[[str], str] | None = None  # how what was written is printed, where it may hold a password

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        return self.prefix + self.key.upper().replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.read is read_switch


@dataclass(frozen=True, slots=True)
class Alias:
    """A variable of another system that stands for a setting; `in_words` turns its text into ours."""

    variable: str
    key: str
    in_words: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The settings of one command; `example` is a key and a value of it, for the help."""

    command: str
    description: str
    example: tuple[str, str]
    options: tuple[Option, ...]
    aliases: tuple[Alias, ...] = ()

    @property
    def by_key(self) -> dict[str, Option]:
        return {option.key: option for option in self.options}

    @property
    def prefix(self) -> str:
        return f"{self.command.upper()}_"
