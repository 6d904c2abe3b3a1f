"""The command line: verbs, their options, their help.

Invariant: --json, --socket and --timeout mean the same in every verb, and may stand before it or behind it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from kvctl.sizing import ALIASES, STORAGES
from kvstore.errors import BadSetting
from kvstore.units import parse_duration, parse_size, parse_whole

_T = TypeVar("_T")
# What shtab's scripts call to complete a file name (shtab.FILE, without importing shtab for it).
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
_EPILOG = """\
NS is a namespace: the start of its digest (see kvctl namespaces), or its model.
Durations: 45s, 30m, 2h, 7d. Sizes: 512MiB, 10GB (MB is 10^6, MiB is 2^20).
Exit codes: 0 done, 1 failed, 2 usage, 3 no daemon answers.
"""


class Verbs:
    """Adds verbs to a parser, each with the options they all have."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")

    def add(self, name: str, summary: str, *, details: str = "", needs_daemon: bool = True) -> argparse.ArgumentParser:
        verb = self._subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}".strip(),
            allow_abbrev=False,
        )
        _common(verb, needs_daemon=needs_daemon)
        return verb


def build() -> argparse.ArgumentParser:
    """Return the parser of kvctl."""
    parser = argparse.ArgumentParser(
        prog="kvctl",
        description="Looks into a running kvstored and changes what it holds.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _common(parser, needs_daemon=True)
    verbs = Verbs(parser)
    _looking(verbs)
    _blocks(verbs)
    _removing(verbs)
    _upkeep(verbs)
    _without_daemon(verbs)
    return parser


def _common(parser: argparse.ArgumentParser, *, needs_daemon: bool) -> None:
    # SUPPRESS: an option that isn't given behind the verb must not undo the one that was given before it.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON for programs")
    if needs_daemon:
        socket = parser.add_argument(
            "--socket", metavar="PATH", default=argparse.SUPPRESS, help="the daemon's socket ($KVSTORED_SOCKET)"
        )
        _completes_files(socket)
        parser.add_argument(
            "--timeout",
            metavar="DURATION",
            type=_as_type(parse_duration),
            default=argparse.SUPPRESS,
            help="how long to wait for the daemon (10s; where it reads or moves much, 1h)",
        )


def _looking(verbs: Verbs) -> None:
    ping = verbs.add("ping", "ask whether the daemon answers, and how fast")
    ping.add_argument("--count", metavar="N", type=_positive, default=1, help="how many times (1)")
    verbs.add("status", "show what the daemon is and how it was started")
    verbs.add("tiers", "show how full and how healthy each tier is")
    stats = verbs.add("stats", "show everything countable: tiers, lookups, evictions, namespaces, sessions")
    stats.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const=2.0,
        type=_as_type(parse_duration),
        help="go on with a line of rates every SECONDS (2); with --json, a report a line",
    )
    stats.add_argument("--count", metavar="N", type=_positive, help="with --watch: end after N lines")
    top = verbs.add("top", "watch the store live", details="Keys: q quit, s sort the namespaces.")
    top.add_argument(
        "--interval", metavar="DURATION", type=_as_type(parse_duration), default=1.0, help="between two looks (1s)"
    )
    verbs.add("namespaces", "list the namespaces")


def _blocks(verbs: Verbs) -> None:
    lookup = verbs.add(
        "lookup",
        "show where blocks are",
        details="An operator's look: it counts no query, loads nothing, pins nothing.",
    )
    _which_blocks(lookup)
    keys = verbs.add("keys", "list the blocks of a namespace")
    _namespace(keys)
    keys.add_argument("--limit", metavar="N", type=_positive, default=1000, help="at most N blocks (1000)")
    keys.add_argument("--offset", metavar="N", type=_not_negative, default=0, help="leave the first N out")
    pin = verbs.add("pin", "keep blocks from eviction and expiry for a while")
    _which_blocks(pin)
    duration = _as_type(parse_duration)
    pin.add_argument("--for", dest="for_s", metavar="DURATION", type=duration, required=True, help="how long, e.g. 2h")
    _which_blocks(verbs.add("unpin", "end an operator's pin"))
    ttl = verbs.add(
        "ttl",
        "set when blocks expire",
        details="Without blocks: how long what is stored in the namespace from now on lives by default.",
    )
    _which_blocks(ttl)
    ttl.add_argument(
        "--to",
        dest="ttl_s",
        metavar="DURATION",
        type=_as_type(_ttl),
        required=True,
        help="from now on, e.g. 30m; never: no end",
    )


def _removing(verbs: Verbs) -> None:
    drop = verbs.add(
        "drop",
        "make blocks invisible now, in every tier",
        details="Shows its plan; does it with --yes. --namespace and --all end an epoch: nothing stored "
        "before is ever served again, and the space comes back in the background.",
    )
    _which_blocks(drop, namespace_optional=True)
    whole = drop.add_mutually_exclusive_group()
    whole.add_argument(
        "--namespace", dest="whole", metavar="NS", action="append", help="all of a namespace; may be given again"
    )
    whole.add_argument("--all", action="store_true", help="all of every namespace")
    _needs_yes(drop)
    evict = verbs.add(
        "evict",
        "make room in a tier now, the coldest blocks first",
        details="Shows its plan; does it with --yes. A block that is in no other tier is lost. Pinned ones stay.",
    )
    evict.add_argument("--tier", metavar="TIER", required=True, help="cpu, ssd, ...")
    evict.add_argument(
        "--bytes", dest="size_bytes", metavar="SIZE", type=_as_type(parse_size), help="at most so much (all)"
    )
    evict.add_argument(
        "--older-than",
        dest="older_than_s",
        metavar="DURATION",
        type=_as_type(parse_duration),
        default=0.0,
        help="only what was not used for so long",
    )
    _needs_yes(evict)


def _upkeep(verbs: Verbs) -> None:
    check = verbs.add("check", "check every invariant of the store; ends with 1 if one is broken")
    check.add_argument("--verify", action="store_true", help="read every block and check its bytes too")
    verbs.add("gc", "reclaim now what is expired, dropped or orphaned")
    drain = verbs.add("drain", "write what only memory holds to the ssd tier; ends with 1 if something is left")
    drain.add_argument(
        "--wait", dest="wait_s", metavar="DURATION", type=_as_type(parse_duration), default=60.0, help="how long (60s)"
    )
    dump = verbs.add("dump", "write a namespace's blocks to a new file on the daemon's host")
    _namespace(dump)
    _completes_files(dump.add_argument("file", metavar="FILE", help="a path the daemon may write to"))
    load = verbs.add("load", "store the blocks of a dump")
    _completes_files(load.add_argument("file", metavar="FILE", help="a path the daemon may read"))


def _without_daemon(verbs: Verbs) -> None:
    sizes = verbs.add(
        "size",
        "compute KV bytes per token, block and prompt from a model's config.json",
        details="Ends with 1 if the model keeps something that has no known size.",
        needs_daemon=False,
    )
    config = sizes.add_argument("--config", metavar="FILE|DIR", required=True, help="a Hugging Face config.json")
    _completes_files(config)
    names = ", ".join([*STORAGES, *ALIASES])
    sizes.add_argument("--dtype", metavar="NAME", help=f"how KV is stored, else as the config says: {names}")
    sizes.add_argument(
        "--scale-bytes", metavar="N", type=_not_negative, default=0, help="scales kept beside each head's key and value"
    )
    sizes.add_argument("--tokens", metavar="N", type=_positive, action="append", help="a prompt's; may be given again")
    sizes.add_argument("--block-tokens", metavar="N", type=_positive, default=16, help="tokens in a block (16)")
    sizes.add_argument("--tp", metavar="N", type=_positive, default=1, help="tensor-parallel ranks (1)")
    sizes.add_argument(
        "--fit", dest="fit_bytes", metavar="SIZE", type=_as_type(parse_size), help="how much a tier of SIZE holds"
    )
    sizes.add_argument(
        "--set", dest="overrides", metavar="FIELD=N", action="append", default=[], help="a field the config lacks"
    )
    completion = verbs.add("completion", "print a shell's completion script", needs_daemon=False)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")
    verbs.add("version", "print the versions of kvctl and its protocol", needs_daemon=False)


def _namespace(verb: argparse.ArgumentParser, *, optional: bool = False) -> None:
    verb.add_argument(
        "namespace", metavar="NS", nargs="?" if optional else None, help="the start of a digest, or a model"
    )


def _which_blocks(verb: argparse.ArgumentParser, *, namespace_optional: bool = False) -> None:
    _namespace(verb, optional=namespace_optional)
    verb.add_argument("hashes", metavar="HASH", nargs="*", help="block hashes in hex; -: from standard input")
    tokens = verb.add_argument(
        "--tokens", metavar="FILE", help="the full blocks of these token ids instead; -: from standard input"
    )
    _completes_files(tokens)


def _needs_yes(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--yes", action="store_true", help="do it")


def _completes_files(argument: Any) -> None:
    argument.complete = _FILES


def _as_type(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` with errors that argparse shows with the option's name."""

    def typed(text: str) -> _T:
        try:
            return parse(text)
        except BadSetting as exc:
            raise argparse.ArgumentTypeError(str(exc)) from exc

    return typed


def _ttl(text: str) -> float:
    """Return seconds, 0 for never; a ttl of 0 is refused, as it would mean the opposite of what it says."""
    if text == "never":
        return 0.0
    seconds = parse_duration(text)
    if not seconds:
        raise BadSetting("a ttl of 0 would be ambiguous: write never, or drop the blocks")
    return seconds


def _not_negative(text: str) -> int:
    number = parse_whole(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return number


def _positive(text: str) -> int:
    number = _not_negative(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return number
