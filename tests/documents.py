"""Reads the documents as their tests need it: tables, code, headings, links, and the protocol's worked example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from kvstore import wire
from tests.product import ROOT

DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")


def documents() -> list[Path]:
    """Return every document that a user reads."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


# ---- parts of a document


@dataclass(frozen=True, slots=True)
class Code:
    """One line of code in a document."""

    document: str
    line: int
    text: str


def code_of(path: Path) -> Iterator[Code]:
    """Yield inline code, and the lines of indented and fenced code."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield Code(path.name, number, line.strip())
        else:
            for found in _INLINE.finditer(line):
                yield Code(path.name, number, found.group(1).replace("\\|", "|"))


def tables_of(path: Path) -> Iterator[list[list[str]]]:
    """Yield each table as rows of cells, its header first and the line below that left out."""
    rows: list[list[str]] = []
    for line in [*path.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def table_of(path: Path, *header: str) -> list[list[str]]:
    """Return the rows of all tables whose header begins with these cells."""
    return [row for table in tables_of(path) if table[0][: len(header)] == list(header) for row in table[1:]]


def plain(cell: str) -> str:
    """Return a cell without the marks of code."""
    return cell.replace("`", "")


def anchors_of(path: Path) -> set[str]:
    """Return what a link to a heading of this document can name."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links_of(path: Path) -> list[str]:
    """Return the targets of links, those of other sites left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", _INLINE.sub("", _FENCE.sub("", path.read_text())))
    return [target for target in found if "://" not in target]


# ---- the protocol's tables


def fields_of(message: type[wire.Message]) -> str:
    """Return the fields of a message behind its id, as its row in docs/protocol.md has them."""
    described = inspect.type_info(message)
    assert isinstance(described, inspect.StructType)
    return ", ".join(map(_field, described.fields[1:]))


def _field(field: inspect.Field) -> str:
    text = f"`{field.name}` {_type(field.type)}"
    if field.required:
        return text
    return f"{text} = {_default([] if field.default is msgspec.NODEFAULT else field.default)}"


def _default(value: object) -> str:
    match value:
        case None:
            return "nil"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case str():
            return f'"{value}"'
        case bytes():
            return f"h'{value.hex()}'"
        case _:
            return repr(value)


def _type(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(map(_type, types))
        case inspect.NoneType():
            return "nil"
        case inspect.BoolType():
            return "bool"
        case inspect.IntType(ge=ge):
            return "int" if ge is None else "u64"
        case inspect.FloatType(ge=ge):
            return "float" if ge is None else "real"
        case inspect.StrType(max_length=longest):
            return "str" if longest is None else "text"
        case inspect.BytesType(min_length=32, max_length=32):
            return "b32"
        case inspect.BytesType(max_length=longest):
            return "bytes" if longest is None else f"bytes({longest})"
        case inspect.ListType(item_type=item, max_length=longest):
            return f"{_type(item)}[]" if longest is None else f"{_type(item)}[{longest}]"
        case inspect.DictType():
            return "map"
        case _:
            raise AssertionError(f"docs/protocol.md has no word for {kind}")


# ---- the protocol's worked example


@dataclass(frozen=True, slots=True)
class Example:
    """One message of the worked example: who sends it, its name, its bytes, and what the text says they are."""

    from_client: bool
    name: str
    frame: bytes
    body: list[Any]


def worked_example(path: Path) -> list[Example]:
    """Return the messages of the worked example, in order.

    Each is a fenced block: `--> Name` or `<-- Name`, lines of hex bytes, `=` and the body in MessagePack's terms.
    """
    found: list[Example] = []
    for block in _FENCE.findall(path.read_text()):
        lines = block.splitlines()[1:-1]
        head = re.fullmatch(r"(-->|<--) (\w+)", lines[0]) if lines else None
        if head is not None:
            split = next(at for at, line in enumerate(lines) if line.startswith("= "))
            body = ast.literal_eval(_as_python(" ".join(lines[split:])[2:]))
            found.append(Example(head[1] == "-->", head[2], bytes.fromhex("".join(lines[1:split])), body))
    return found


def _as_python(text: str) -> str:
    text = re.sub(r"h'([0-9a-f ]*)'", lambda hex_: repr(bytes.fromhex(hex_[1])), text)
    words = {"true": "True", "false": "False", "nil": "None"}
    return re.sub(r"\b(true|false|nil)\b", lambda word: words[word[1]], text)
