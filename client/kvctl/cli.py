"""`kvctl`: reads the command line, connects, runs one verb, turns errors into texts and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import kvstore
from kvctl import parser, size, top, verbs, watch
from kvctl.asking import connect
from kvctl.exits import Exit, exit_of
from kvctl.printing import Output, plain
from kvctl.verbs import Call
from kvstore import wire
from kvstore.errors import KVStoreError, PeerUnreachable, UsageError

VERBS: dict[str, Callable[[Call], Exit]] = {
    "ping": verbs.ping,
    "status": verbs.status,
    "tiers": verbs.tiers,
    "stats": watch.stats,
    "top": top.run,
    "namespaces": verbs.namespaces,
    "lookup": verbs.lookup,
    "keys": verbs.keys,
    "pin": verbs.pin,
    "unpin": verbs.unpin,
    "ttl": verbs.ttl,
    "drop": verbs.drop,
    "evict": verbs.evict,
    "check": verbs.check,
    "gc": verbs.gc,
    "drain": verbs.drain,
    "dump": verbs.dump,
    "load": verbs.load,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run kvctl and return its exit code."""
    options = parser.build().parse_args(arguments)
    output = Output(as_json=getattr(options, "json", False))
    try:
        code = _run(options, output)
        sys.stdout.flush()
        return code
    except KVStoreError as exc:
        output.say(_told(exc))
        return exit_of(exc)
    except KeyboardInterrupt:
        output.end_progress()
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again while it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def _run(options: argparse.Namespace, output: Output) -> Exit:
    if options.verb == "size":
        return size.run(options, output)
    if options.verb == "completion":
        return _completion(options.shell, output)
    if options.verb == "version":
        protocol = f"{wire.PROTOCOL_MIN} to {wire.PROTOCOL_MAX}"
        body = {"version": kvstore.__version__, "protocol_min": wire.PROTOCOL_MIN, "protocol_max": wire.PROTOCOL_MAX}
        output.either(body, f"kvctl {kvstore.__version__}, protocol {protocol}")
        return Exit.DONE
    with ExitStack() as stack:
        ask, socket = stack.enter_context(connect(getattr(options, "socket", None)))
        return VERBS[options.verb](Call(options, ask, output, socket))


def _completion(shell: str, output: Output) -> Exit:
    try:
        import shtab
    except ImportError as exc:
        raise UsageError("completion needs the package shtab: pip install 'kvstored[ctl]'") from exc
    output.text(shtab.complete(parser.build(), shell))
    return Exit.DONE


def _told(error: KVStoreError) -> str:
    lines = [plain(line) for line in str(error).splitlines()] or [type(error).__name__]
    text = "\n".join([f"kvctl: {lines[0]}", *lines[1:]])
    if isinstance(error, PeerUnreachable) and "--socket" not in text:
        text += "\n--socket PATH names another socket for one call"
    return text
