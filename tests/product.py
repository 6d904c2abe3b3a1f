"""The product's own files, as the tests on layout and packaging see them."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = (ROOT, ROOT / "daemon", ROOT / "client")
_NOT_PACKAGED = {"tests", "bench", "demo", "docs", "deploy"}


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the product: its dotted name, its file and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module
    line_count: int

    @property
    def where(self) -> str:
        """Return the file's path inside the checkout."""
        return str(self.path.relative_to(ROOT))


def package_dirs() -> dict[str, Path]:
    """Return every package of the product by its dotted name."""
    found: dict[str, Path] = {}
    for source_root in SOURCE_ROOTS:
        for top in sorted(source_root.glob("*/__init__.py")):
            if source_root == ROOT and top.parent.name in _NOT_PACKAGED:
                continue
            for init in sorted(top.parent.rglob("__init__.py")):
                found[".".join(init.parent.relative_to(source_root).parts)] = init.parent
    return found


def modules() -> Iterator[Module]:
    """Yield every module of the product."""
    for package, directory in package_dirs().items():
        for path in sorted(directory.glob("*.py")):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            text = path.read_text()
            yield Module(name, path, ast.parse(text, str(path)), text.count("\n"))


def imports(module: Module, known: frozenset[str]) -> dict[str, int]:
    """Return what `module` imports, each with its line.

    `from a import b` counts as `a.b` where `known` (the product's modules) has it, else as `a`.
    """
    found: dict[str, int] = {}
    package = module.name if module.path.stem == "__init__" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found[full if full in known else base] = node.lineno
    return found


def text_files() -> Iterator[Path]:
    """Yield every text file that is, or would be, in the repository."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
    except (OSError, subprocess.CalledProcessError):  # an unpacked source distribution
        listed = "\0".join(
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        )
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in path.read_bytes():
            yield path
