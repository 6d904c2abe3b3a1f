"""The documents say what the code does: tables, the worked example, names, flags and links are checked against it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import struct
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import msgspec
import pytest

from kvctl import parser as kvctl_parser
from kvproxy.options import TABLE as PROXY_TABLE
from kvstore import __version__, errors, lifecycle, prefix, wire
from kvstore.block import Namespace
from kvstore.checksum import checksum
from kvstore.errors import NotPermitted
from kvstored.arguments import parse
from kvstored.options import OPTIONS, TABLE, VARIABLE_PREFIX
from tests import documents, product
from tests.daemon_fixture import running
from tests.documents import DOCS, Code, code_of, plain, table_of
from tests.product import ROOT
from tests.rawclient import RawClient

PROTOCOL = DOCS / "protocol.md"
ARCHITECTURE = DOCS / "architecture.md"
REQUESTS: tuple[type[wire.Message], ...] = typing.get_args(wire.Request)
REPLIES: tuple[type[wire.Message], ...] = typing.get_args(wire.Reply)
REQUEST_TABLE = {plain(row[1]): row for row in table_of(PROTOCOL, "tag", "message", "fields behind the id", "from")}
EXAMPLE = documents.worked_example(PROTOCOL)


# ---- docs/protocol.md: tables


def test_the_messages_of_the_protocol_are_those_of_the_code() -> None:
    told = [row[:3] for row in table_of(PROTOCOL, "tag", "message")]
    assert told == [
        [str(message.__struct_config__.tag), f"`{message.__name__}`", documents.fields_of(message)]
        for message in (*REQUESTS, *REPLIES)
    ]


def test_the_outcomes_of_the_protocol_are_those_of_the_code() -> None:
    rows = table_of(PROTOCOL, "number", "name")
    assert [(row[0], plain(row[1])) for row in rows] == [(str(int(o)), o.name) for o in wire.Outcome]
    used = {
        node.attr
        for module in product.modules()
        if module.name.startswith(("kvstore.", "kvstored."))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Outcome"
    }
    assert {plain(row[1]) for row in rows if row[2] == "never"} == {o.name for o in wire.Outcome} - used


def test_the_error_codes_of_the_protocol_are_those_of_the_code() -> None:
    def tree(root: type[errors.KVStoreError]) -> Iterator[type[errors.KVStoreError]]:
        yield root
        for child in root.__subclasses__():
            yield from tree(child)

    told = [[row[0], plain(row[1]), row[2]] for row in table_of(PROTOCOL, "code", "name", "retry")]
    known = {kind for kind in tree(errors.KVStoreError) if kind.__module__ == "kvstore.errors"}
    assert told == [
        [str(kind.code), kind.__name__, "yes" if kind.retryable else "no"]
        for kind in sorted(known, key=lambda kind: kind.code)
    ]


def test_the_limits_of_the_protocol_are_those_of_the_code() -> None:
    for limit, value, _, constant in table_of(PROTOCOL, "limit", "value", "unit", "constant"):
        module, _, name = plain(constant).rpartition(".")
        assert f"{getattr(importlib.import_module(module), name):,}" == value, limit


def test_a_reader_passes_over_fields_it_does_not_know_and_does_without_those_that_have_a_default() -> None:
    block_hash = bytes(32)
    assert _decoded([4, 1, 0, [block_hash]]) == wire.Lookup(1, 0, [block_hash])
    assert _decoded([2, 1, "of a later version", 7]) == wire.Ping(1)
    assert _decoded([5, 1, 0, [], 3]) == wire.Reserve(1, 0, [], 3.0)  # an integer is a real


@pytest.mark.parametrize(
    "body",
    [
        [99, 1],  # no such tag
        [2],  # no id
        [2, -1],
        [2, 1.0],
        [4, 1, 0, ["text" * 8]],  # a block hash is bin, not str
        [4, 1, 0, [], 1],  # a bool is no number
        [5, 1, 0, [], float("nan")],
        [5, 1, 0, [], 1e9 + 1],
    ],
    ids=repr,
)
def test_what_a_field_can_not_hold_breaks_the_protocol(body: list[object]) -> None:
    with pytest.raises(errors.RemoteProtocolError):
        _decoded(body)


def _decoded(body: list[object]) -> wire.Request:
    return wire.decode_request(msgpack.packb(body))


# ---- docs/protocol.md: the worked example


def test_the_worked_example_is_what_our_encoder_writes_and_any_messagepack_library_reads() -> None:
    assert [example.name for example in EXAMPLE if example.from_client] == [
        "Hello", "Open", "Lookup", "Reserve", "Seal", "Lookup", "Acquire", "Release", "Bye",
    ]  # fmt: skip
    for example in EXAMPLE:
        body = example.frame[4:]
        assert struct.unpack("<I", example.frame[:4]) == (len(body),), example.name
        assert msgpack.unpackb(body, raw=False) == example.body, example.name
        message = _message(body, from_client=example.from_client)
        assert type(message).__name__ == example.name
        assert bytes(wire.encode(message)) == example.frame, example.name


def test_the_identities_in_the_worked_example_are_those_that_the_code_computes() -> None:
    sent = {example.name: _message(example.frame[4:], from_client=True) for example in EXAMPLE if example.from_client}
    opened, reserved, seal = sent["Open"], sent["Reserve"], sent["Seal"]
    assert isinstance(opened, wire.Open)
    assert isinstance(reserved, wire.Reserve)
    assert isinstance(seal, wire.Seal)
    space = Namespace.decode(opened.namespace)
    assert space.digest.hex() in PROTOCOL.read_text()
    assert reserved.hashes == prefix.chain(space.digest, range(1, 33), space.block_tokens)
    assert seal.checksums == [checksum(bytes([number]) * space.block_bytes) for number in (1, 2)]


def test_a_daemon_answers_the_worked_example_as_it_is_written(short_dir: Path) -> None:
    with running(short_dir, "--checksum-at-seal", "always", cpu="64MiB", ssd=None) as daemon, daemon.client() as client:
        told = _message(EXAMPLE[1].frame[4:], from_client=False)
        assert isinstance(told, wire.Welcome)
        differ = {name: getattr(client.welcome, name) for name in ("boot_id", "session", "version")}
        # RawClient's greeting is the example's but for the name; it maps the pool, and the rest is sent byte by byte.
        assert msgspec.structs.replace(told, **differ) == client.welcome
        for example in EXAMPLE[2:]:
            if example.from_client:
                client.socket.sendall(example.frame)
                continue
            expected = _message(example.frame[4:], from_client=False)
            assert client.receive(expected.id) == expected
            if isinstance(expected, wire.Reserved):
                for number, offset in enumerate(expected.offsets, 1):
                    client.write(offset, bytes([number]) * 16384)
            if isinstance(expected, wire.Acquired):
                for number, offset in enumerate(expected.offsets, 1):
                    assert client.peek(offset, 16384) == bytes([number]) * 16384
        assert client.socket.recv(1) == b"", "the daemon closes after Bye"


def _message(body: bytes, *, from_client: bool) -> wire.Message:
    return wire.decode_request(body) if from_client else wire.decode_reply(body)


# ---- docs/protocol.md: who may ask, and what the answer is


def test_each_request_is_answered_as_the_protocol_says(short_dir: Path) -> None:
    with running(short_dir, cpu="16MiB") as daemon, daemon.client() as client:
        for request in _requests(client, short_dir):
            answers = set(re.findall(r"`(\w+)`", REQUEST_TABLE[type(request).__name__][4]))
            client.send(request)
            if not answers:
                continue  # whatever came would be taken for the answer to a later request with another id
            assert type(client.answer(request.id)).__name__ in answers
        assert client.socket.recv(1) == b"", "there is nothing behind the answers but the end"
        assert not client.take_replies()


def test_only_an_admin_may_ask_what_the_protocol_says_so_of(short_dir: Path) -> None:
    with running(short_dir, "--admin", "uid:4000000001", cpu="16MiB", ssd=None) as daemon, daemon.client() as client:
        assert client.welcome.role == "engine"
        refused: set[str] = set()
        for request in _requests(client, short_dir):
            client.send(request)
            if REQUEST_TABLE[type(request).__name__][4] != "none":
                try:
                    client.answer(request.id)
                except NotPermitted:
                    refused.add(type(request).__name__)
        assert refused == {name for name, row in REQUEST_TABLE.items() if row[3] == "admin"}


def _requests(client: RawClient, directory: Path) -> Iterator[wire.Message]:
    """Yield a request of each kind but Hello, each after the reply to the one before."""
    opened = _message(EXAMPLE[2].frame[4:], from_client=True)
    assert isinstance(opened, wire.Open)
    digest = Namespace.decode(opened.namespace).digest
    absent = [bytes(32)]
    dump = str(directory / "dump")
    make: dict[type[wire.Message], Callable[[int], wire.Message]] = {
        wire.Open: lambda number: wire.Open(number, opened.namespace),
        wire.Ping: wire.Ping,
        wire.Lookup: lambda number: wire.Lookup(number, 0, absent),
        wire.Reserve: lambda number: wire.Reserve(number, 0, absent),
        wire.Seal: lambda number: wire.Seal(number, 1, []),
        wire.Forfeit: lambda number: wire.Forfeit(number, 1),
        wire.Acquire: lambda number: wire.Acquire(number, 0, absent),
        wire.Release: lambda number: wire.Release(number, 1),
        wire.Prefetch: lambda number: wire.Prefetch(number, 0, absent),
        wire.Wait: lambda number: wire.Wait(number, 0, absent, 0.0),
        wire.Cancel: lambda number: wire.Cancel(number, 1),
        wire.Abort: lambda number: wire.Abort(number, 0, absent),
        wire.Drop: lambda number: wire.Drop(number, 0, absent),
        wire.GroupLookup: lambda number: wire.GroupLookup(number, 0, absent),
        wire.Pin: lambda number: wire.Pin(number, digest, absent, 1.0),
        wire.Unpin: lambda number: wire.Unpin(number, digest, absent),
        wire.Ttl: lambda number: wire.Ttl(number, digest, [], 1.0),
        wire.Stats: wire.Stats,
        wire.Status: wire.Status,
        wire.Keys: lambda number: wire.Keys(number, digest),
        wire.DropNamespace: lambda number: wire.DropNamespace(number, digest),
        wire.Evict: lambda number: wire.Evict(number, "cpu"),
        wire.Check: wire.Check,
        wire.Gc: wire.Gc,
        wire.Drain: wire.Drain,
        wire.Dump: lambda number: wire.Dump(number, digest, dump),
        wire.Load: lambda number: wire.Load(number, dump),
        wire.DropBlocks: lambda number: wire.DropBlocks(number, digest, absent),
        wire.Corrupt: lambda number: wire.Corrupt(number, 0, absent),
        wire.Bye: wire.Bye,
    }
    assert {*make, wire.Hello} == set(REQUESTS)
    for of in make.values():
        yield of(client.next_id())


# ---- commands: flags, verbs, variables


def _help(call: Callable[[], object]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        call()
    return printed.getvalue()


def _flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


def _kvctl_help(*words: str) -> str:
    return _help(lambda: kvctl_parser.build().parse_args([*words, "--help"]))


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Return the flags of each command that the documents may name, a verb of kvctl being a command."""
    known = {
        "kvstored": _flags(_help(lambda: parse(["--help"], TABLE))),
        "kvproxy": _flags(_help(lambda: parse(["--help"], PROXY_TABLE))),
    }
    overview = _kvctl_help()
    known["kvctl"] = _flags(overview)
    for verb in re.findall(r"^    ([a-z]+) {2,}", overview, re.MULTILINE):
        known[f"kvctl {verb}"] = _flags(_kvctl_help(verb)) | known["kvctl"]
    for path in sorted((ROOT / "bench").glob("*.py")):
        if "argparse" in path.read_text() and not path.stem.startswith("_"):
            known[f"python -m bench.{path.stem}"] = _flags(_module_help(f"bench.{path.stem}"))
    known["python -m demo.pd"] = _flags(_module_help("demo.pd"))
    return known


def _module_help(name: str) -> str:
    main: Callable[[], object] = importlib.import_module(name).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, "--help"])
        return _help(main)


# Of other programs, in lines that don't begin with their names.
FOREIGN_FLAGS = {"--index-url", "--no-index", "--find-links", "--memory"} | {
    "--kv-transfer-config",
    "--disable-hybrid-kv-cache-manager",
    # Of SGLang's: tests/engines/sglang looks them up.
    *("--port", "--model-path", "--revision", "--kv-cache-dtype", "--enable-metrics", "--page-size"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "--hicache-mem-layout", "--hicache-storage-prefetch-policy"),
    *("--hicache-storage-backend", "--hicache-storage-backend-extra-config"),
}
_COMMAND = re.compile(r"(?<![\w/.-])(kvstored|kvproxy|kvctl(?: [a-z]+)?|python -m [\w.]+)(?= |$)(?!\.)")


def test_every_flag_in_the_documents_exists(flags: dict[str, set[str]]) -> None:
    everything = set[str]().union(*flags.values()) | FOREIGN_FLAGS
    faults: list[str] = []
    for code in _code():
        found = _COMMAND.search(code.text)
        command = found[1].strip() if found else None
        if code.document == "kvctl.md" and command is None and f"kvctl {code.text.split()[0]}" in flags:
            command = f"kvctl {code.text.split()[0]}"
        allowed = flags.get(command or "", everything)
        faults += [f"{code.document}:{code.line} {flag} of {command}" for flag in _flags(code.text) - allowed]
    assert not faults, "\n".join(faults)


def test_every_verb_of_kvctl_in_the_documents_exists(flags: dict[str, set[str]]) -> None:
    for code in _code():
        for verb in re.findall(r"(?<![\w/.-])kvctl(?: --json)? ([a-z]+)", code.text):
            assert f"kvctl {verb}" in flags, f"{code.document}:{code.line} kvctl {verb}"


def test_every_setting_has_a_row_in_operations_and_every_row_a_setting() -> None:
    rows = table_of(DOCS / "operations.md", "setting")
    told = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row[0])}
    assert told == {option.key for option in OPTIONS}


def test_every_variable_and_make_target_in_the_documents_exists() -> None:
    variables = {option.variable for option in OPTIONS} | {f"{VARIABLE_PREFIX}CONFIG"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in _code():
        assert set(re.findall(rf"\b{VARIABLE_PREFIX}[A-Z_]+\b(?!-)", code.text)) <= variables, code
        assert set(re.findall(r"^make ([a-z]+)", code.text)) <= targets, code


def _code() -> list[Code]:
    return [code for path in documents.documents() for code in code_of(path)]


# ---- docs/architecture.md: tables and names


def test_the_life_cycles_in_architecture_are_those_of_the_code() -> None:
    for word, transitions in (("put", lifecycle.PUT_TABLE), ("copy", lifecycle.COPY_TABLE)):
        told = table_of(ARCHITECTURE, word, "event", "becomes")
        assert told == [[state.name, event.name, after.name] for (state, event), after in transitions.items()]


def test_the_core_is_built_in_the_order_that_architecture_says() -> None:
    rows = table_of(ARCHITECTURE, "modules of `kvstore/`")
    floors = {
        name.removesuffix(".py").removesuffix("/").replace("/", "."): floor
        for floor, row in enumerate(rows)
        for name in re.findall(r"`(kvstore/[^`]*)`", row[0])
    }
    modules = tuple(module for module in product.modules() if module.name.partition(".")[0] == "kvstore")
    known = frozenset(module.name for module in modules)

    def floor_of(name: str) -> int | None:
        parts_of_the_ssd_tier = "kvstore.tiers.disk" if name.startswith("kvstore.tiers.") else ""
        names = (name, name.rpartition(".")[0], parts_of_the_ssd_tier)
        return next((floors[known] for known in names if known in floors), None)

    faults: list[str] = []
    for module in modules:
        own = floor_of(module.name)
        if own is None and module.name not in ("kvstore", "kvstore.tiers"):
            faults.append(f"docs/architecture.md does not say where {module.name} stands")
        for target in product.imports(module, known):
            below = floor_of(target)
            if own is not None and below is not None and below > own:
                faults.append(f"{module.name} imports {target}, which is said to be above it")
    assert not faults, "\n".join(faults)


def test_every_module_class_and_function_that_architecture_names_exists() -> None:
    classes: dict[str, set[str]] = {}
    functions: set[str] = set()
    for module in product.modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(_members(node))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.add(node.name)
    faults: list[str] = []
    for code in code_of(ARCHITECTURE):
        if re.fullmatch(r"[\w/.]+\.(py|md)", code.text) or code.text.endswith("/"):
            if not (ROOT / code.text).exists():
                faults.append(f"line {code.line}: there is no {code.text}")
        elif found := re.fullmatch(r"([A-Z]\w+)\.(\w+)", code.text):
            if found[2] not in classes.get(found[1], set()):
                faults.append(f"line {code.line}: {found[1]} has no {found[2]}")
        elif (found := re.fullmatch(r"(\w+)\(\)", code.text)) and found[1] not in functions:
            faults.append(f"line {code.line}: there is no function {found[1]}")
    assert not faults, "\n".join(faults)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inner.name
        elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
            yield inner.attr
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            yield inner.target.id
        elif isinstance(inner, ast.Assign):
            yield from (target.id for target in inner.targets if isinstance(target, ast.Name))


def test_the_index_names_every_document() -> None:
    linked = {Path(target).name for target in documents.links_of(DOCS / "README.md")}
    missing = {path.name for path in DOCS.glob("*.md")} - {"README.md"} - linked
    assert not missing, f"give each a row in docs/README.md: {sorted(missing)}"


def test_links_lead_to_files_and_headings_that_exist() -> None:
    faults: list[str] = []
    for path in documents.documents():
        for target in documents.links_of(path):
            name, _, anchor = target.partition("#")
            document = path.parent / name if name else path
            if not document.exists():
                faults.append(f"{path.name} links to {target}")
            elif anchor and anchor not in documents.anchors_of(document):
                faults.append(f"{path.name} links to {target}, and there is no such heading")
    assert not faults, "\n".join(faults)


def test_the_changelog_has_the_version_of_the_package() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()

