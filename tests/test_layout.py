"""The shape of the code base: who may import whom, what is banned everywhere, what no file may mention."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from tests import product
from tests.product import ROOT, Module

MODULES = tuple(product.modules())
KNOWN = frozenset(module.name for module in MODULES)
LINES_MAX = 500

# kvclient -> kvstore <- kvstored; the admin CLI and the proxy are clients.
MAY_IMPORT = {
    "kvstore": {"kvstore"},
    "kvstored": {"kvstored", "kvstore"},
    "kvclient": {"kvclient", "kvstore"},
    "kvctl": {"kvctl", "kvclient", "kvstore"},
    "kvproxy": {"kvproxy", "kvclient", "kvstore", "kvstored"},
}
CLIENTS_SHARE_OF_THE_CORE = {
    "kvstore",
    "kvstore.block",
    "kvstore.prefix",
    "kvstore.errors",
    "kvstore.wire",
    "kvstore.checksum",
    "kvstore.paths",
}
# What every service needs: how it is told its settings, how it logs, how it talks to systemd.
PROXYS_SHARE_OF_THE_DAEMON = {
    "kvstored.arguments",
    "kvstored.listening",
    "kvstored.logs",
    "kvstored.notify",
    "kvstored.process",
    "kvstored.readers",
    "kvstored.sources",
    "kvstored.tables",
}

# The core from the ground up: a module imports its own floor and those below. One that isn't listed stands
# wherever it makes no circle.
CORE_FLOORS = (
    ("errors", "units", "clock", "checksum"),
    ("block", "prefix", "wire"),
    ("lifecycle", "policy", "lease"),
    ("catalog",),
    ("tiers",),
    ("mover",),
)
NO_SERVERS_IN_THE_CORE = {
    *("socket", "socketserver", "ssl", "http", "urllib", "argparse"),
    *("uvloop", "aiohttp", "prometheus_client", "rich", "shtab"),
}

RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {
    re.compile(r"eval|exec"): "runs what it is given",
    re.compile(r"hash"): "differs between processes, so it names nothing: use kvstore.block",
    re.compile(r"torch[.]load|.*[.]deserialize_descs"): "is pickle",
}
# Of 24 such environments opened after a power loss 13 aborted the process and 2 were silently wrong.
UNSAFE_LMDB = {"sync": False, "metasync": False, "map_async": True, "writemap": True}
VAGUE_NAMES = re.compile(r"Manager|Helper|Util")
VAGUE_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

# Written so that this file is not among its own findings.
MACHINE_PATHS = re.compile(
    r"/wor[k]/(?:main|shared|steering|[.]library)|/tm[p]/[a-z-]+-study|/op[t]/(?:wheels|pypi)"
)
REGISTRY_HOSTS = re.compile(
    r"py[p]i[.]org|python[h]osted[.]org|download[.]py[t]orch[.]org|registry[.]np[m]js|deb[.]deb[i]an[.]org"
    r"|proxy[.]go[l]ang|crates[.]i[o]\b"
)


def test_each_package_imports_only_what_its_side_may() -> None:
    faults: list[str] = []
    for module in MODULES:
        top = module.name.partition(".")[0]
        for target, line in product.imports(module, KNOWN).items():
            other = target.partition(".")[0]
            if other in MAY_IMPORT and other not in MAY_IMPORT[top]:
                faults.append(f"{module.where}:{line} imports {target}")
            elif top == "kvclient" and other == "kvstore" and target not in CLIENTS_SHARE_OF_THE_CORE:
                faults.append(
                    f"{module.where}:{line} imports {target}, not of the client's share of the core"
                )
            elif top == "kvproxy" and other == "kvstored" and not _is_proxys(target):
                faults.append(f"{module.where}:{line} imports {target}, not of the proxy's share of the daemon")
    assert not faults, _listed(faults)


def test_the_core_holds_no_server_and_no_command_line() -> None:
    faults = [
        f"{module.where}:{line} imports {target}"
        for module in _of("kvstore")
        for target, line in product.imports(module, KNOWN).items()
        if target.partition(".")[0] in NO_SERVERS_IN_THE_CORE
    ]
    assert not faults, _listed(faults)


def test_the_core_is_built_from_the_ground_up() -> None:
    faults: list[str] = []
    for module in _of("kvstore"):
        floor = _floor(module.name)
        for target, line in product.imports(module, KNOWN).items():
            below = _floor(target)
            if floor is not None and below is not None and below > floor:
                faults.append(f"{module.where}:{line} imports {target} from a floor above")
    assert not faults, _listed(faults)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module.name: set(product.imports(module, KNOWN)) & KNOWN for module in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a circle: " + " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name] - {name}):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_importing_the_client_loads_no_engine_no_server_and_no_store() -> None:
    listing = "import sys, kvclient; print('\\n'.join(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", listing],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, product.SOURCE_ROOTS))},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = printed.stdout.split()
    heavy = {
        "lmdb",
        "nixl",
        "torch",
        "transformers",
        "numpy",
        "aiohttp",
        "aiofiles",
        "uvloop",
        "rich",
        "kvstored",
        "kvctl",
    }
    assert not heavy & {name.partition(".")[0] for name in loaded}
    core = {name for name in loaded if name.partition(".")[0] == "kvstore"}
    assert core <= CLIENTS_SHARE_OF_THE_CORE


def test_nothing_runs_what_it_reads_and_nothing_is_named_by_hash() -> None:
    faults: list[str] = []
    for module in MODULES:
        for target, line in product.imports(module, KNOWN).items():
            if target.partition(".")[0] in RUNS_WHAT_IT_READS:
                faults.append(f"{module.where}:{line} imports {target}, which runs what it reads")
        for call in _calls(module):
            name = ast.unparse(call.func)
            faults += [
                f"{module.where}:{call.lineno} calls {name}, which {why}"
                for banned, why in BANNED_CALLS.items()
                if banned.fullmatch(name)
            ]
            faults += [
                f"{module.where}:{call.lineno} allows pickle"
                for keyword in call.keywords
                if keyword.arg == "allow_pickle" and not _is_constant(keyword.value, False)
            ]
    assert not faults, _listed(faults)


def test_no_index_is_opened_in_a_mode_that_a_power_loss_breaks() -> None:
    faults = [
        f"{module.where}:{call.lineno} opens LMDB with {keyword.arg}"
        for module in MODULES
        for call in _calls(module)
        if ast.unparse(call.func) in ("lmdb.open", "lmdb.Environment", "Environment")
        for keyword in call.keywords
        if keyword.arg in UNSAFE_LMDB and not _is_constant(keyword.value, not UNSAFE_LMDB[keyword.arg])
    ]
    assert not faults, _listed(faults)


def test_names_say_what_a_thing_is() -> None:
    faults = [
        f"{module.where}:{node.lineno} names a class {node.name}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and VAGUE_NAMES.search(node.name)
    ]
    faults += [
        f"{module.where} says nothing by its name" for module in MODULES if module.path.stem in VAGUE_MODULES
    ]
    assert not faults, _listed(faults)


def test_nothing_is_released_by_a_destructor() -> None:
    faults = [
        f"{module.where}:{node.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    assert not faults, _listed(faults)


def test_a_module_holds_one_concept_and_ends_before_500_lines() -> None:
    faults = [
        f"{module.where} has {module.line_count} lines" for module in MODULES if module.line_count > LINES_MAX
    ]
    assert not faults, _listed(faults)


def test_no_file_mentions_a_path_of_some_machine_or_a_registry_host() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{number} {found.group()}"
        for path in product.text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for found in (MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line),)
        if found
    ]
    assert not faults, _listed(faults)


def test_links_between_documents_lead_somewhere() -> None:
    faults = [
        f"{path.relative_to(ROOT)} links to {target}"
        for path in product.text_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not faults, _listed(faults)


def test_every_directory_with_python_is_checked_by_both_type_checkers() -> None:
    with_python = {
        path.relative_to(ROOT).parts[0]
        for path in product.text_files()
        if path.suffix == ".py" and path.parent != ROOT
    }
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert {name.strip() for name in setup["mypy"]["files"].split(",")} == with_python
    assert set(json.loads((ROOT / "pyrightconfig.json").read_text())["include"]) == with_python


def _is_proxys(target: str) -> bool:
    return target == "kvstored" or target in PROXYS_SHARE_OF_THE_DAEMON


def _of(package: str) -> Iterator[Module]:
    return (module for module in MODULES if module.name.partition(".")[0] == package)


def _floor(name: str) -> int | None:
    """Return the floor of a core module, None for one that isn't listed."""
    parts = name.split(".")
    for floor, names in enumerate(CORE_FLOORS):
        if len(parts) > 1 and parts[0] == "kvstore" and parts[1] in names:
            return floor
    return None


def _calls(module: Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def _is_constant(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _listed(faults: list[str]) -> str:
    return "\n  ".join(["", *faults])
