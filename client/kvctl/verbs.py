"""The verbs that ask a daemon: each takes a Call and returns an exit code.

Invariant: a verb that removes something shows what it would do and does nothing without --yes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from kvctl import naming, show
from kvctl.asking import Ask
from kvctl.exits import Exit
from kvctl.printing import Output, count, counted, duration, plain, size
from kvctl.reports import (
    BlockReport,
    CheckReport,
    CountReport,
    KeysReport,
    NamespaceReport,
    StatsReport,
    StatusReport,
    read,
)
from kvstore import prefix, wire
from kvstore.block import BlockHash
from kvstore.errors import BadSetting, UsageError
from kvstore.units import describe_size

ANSWER_S = 10.0
WORK_S = 3600.0
KEYS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation: what was asked, of whom, and where the answer goes."""

    options: argparse.Namespace
    ask: Ask
    output: Output
    socket: str = ""
    stdin: TextIO = field(default_factory=lambda: sys.stdin)

    def deadline_s(self, usual_s: float) -> float:
        given: float | None = getattr(self.options, "timeout", None)
        return usual_s if given is None else given

    def report(self, request: wire.Message, usual_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the report that answers `request`, with progress shown on the way."""
        try:
            return self.ask(request, deadline_s=self.deadline_s(usual_s), progress=self.output.progress)
        finally:
            self.output.end_progress()

    def stats(self, name: str = "") -> StatsReport:
        """Return the figures; of thousands of namespaces only the largest, or those that `name` may stand for."""
        return read(StatsReport, self.report(wire.Stats(0, name)))

    def namespace(self) -> NamespaceReport:
        return self.named(self.options.namespace)

    def named(self, name: str) -> NamespaceReport:
        """Return the namespace that `name` stands for, however many there are."""
        return naming.resolve(self.stats(name).namespaces or self.stats().namespaces, name)

    def hashes(self, namespace: NamespaceReport) -> list[BlockHash]:
        """Return the blocks that were named, by hash or by tokens."""
        options = self.options
        if options.tokens is not None and options.hashes:
            raise UsageError("give block hashes or --tokens, not both")
        if options.tokens is None:
            return naming.hashes_from_words(options.hashes, self.stdin)
        hashes, tokens = naming.hashes_of_tokens(namespace, options.tokens, self.stdin)
        if not hashes:
            raise UsageError(
                f"{tokens} tokens fill no block of {namespace.block_tokens}: only full blocks are stored"
            )
        self.output.say(f"{count(tokens)} tokens: {count(len(hashes))} full blocks of {namespace.block_tokens}")
        return hashes

    def some_hashes(self, namespace: NamespaceReport) -> list[BlockHash]:
        hashes = self.hashes(namespace)
        if not hashes:
            raise UsageError("name at least one block: hashes in hex, - to read them from stdin, or --tokens FILE")
        return hashes

    def is_confirmed(self, text: str, plan: dict[str, Any]) -> bool:
        """Show the plan; returns whether to go on."""
        self.output.say(text)
        if self.options.yes:
            return True
        if self.output.as_json:
            self.output.report({"plan": plan, "done": False})
        self.output.say("Nothing was done: add --yes to do it.")
        return False


# ---- looking


def ping(call: Call) -> Exit:
    """Ask for nothing, and time it."""
    round_trips_us: list[float] = []
    for _ in range(call.options.count):
        start_ns = time.perf_counter_ns()
        call.ask(wire.Ping(0), deadline_s=call.deadline_s(ANSWER_S))
        round_trips_us.append(round((time.perf_counter_ns() - start_ns) / 1000, 1))
    median_us = statistics.median(round_trips_us)
    text = f"kvstored at {plain(call.socket)} answered in {median_us:,.0f} us"
    if len(round_trips_us) > 1:
        text += f" (median of {len(round_trips_us)}; {min(round_trips_us):,.0f} to {max(round_trips_us):,.0f})"
    call.output.either({"socket": call.socket, "median_us": median_us, "round_trips_us": round_trips_us}, text)
    return Exit.DONE


def status(call: Call) -> Exit:
    """Show what the daemon is."""
    body = call.report(wire.Status(0))
    call.output.either(body, show.status(call.output, read(StatusReport, body)))
    return Exit.DONE


def tiers(call: Call) -> Exit:
    """Show the tiers, one a line."""
    body = call.report(wire.Stats(0))
    call.output.either({"tiers": body.get("tiers", {})}, show.tiers(call.output, read(StatsReport, body)))
    return Exit.DONE


def stats(call: Call) -> Exit:
    """Show everything countable, once."""
    body = call.report(wire.Stats(0))
    call.output.either(body, show.stats(call.output, read(StatsReport, body)))
    return Exit.DONE


def namespaces(call: Call) -> Exit:
    """List the namespaces."""
    body = call.report(wire.Stats(0))
    report = read(StatsReport, body)
    text = "no namespaces: nothing has been stored or looked up yet"
    if report.namespaces:
        text = show.namespaces(call.output, report)
    left_out = report.namespaces_left_out
    call.output.either({"namespaces": body.get("namespaces", []), "namespaces_left_out": left_out}, text)
    return Exit.DONE


# ---- blocks


def lookup(call: Call) -> Exit:
    """Show where blocks are."""
    namespace = call.namespace()
    hashes = call.some_hashes(namespace)
    found = _found(call, namespace, hashes)
    run = prefix.leading_run([name.hex() in found for name in hashes])
    names = [name.hex() for name in hashes]
    call.output.either(
        {
            "namespace": namespace.digest,
            "leading_blocks": run,
            "leading_tokens": run * namespace.block_tokens,
            "blocks": [found.get(name, {"hash": name, "tiers": []}) for name in names],
        },
        show.lookup(call.output, names, {name: read(BlockReport, block) for name, block in found.items()}),
    )
    call.output.say(
        f"{count(len(found))} of {count(len(set(names)))} blocks are there; the first {count(run)} without a gap, "
        f"{count(run * namespace.block_tokens)} tokens"
    )
    return Exit.DONE


def _found(call: Call, namespace: NamespaceReport, hashes: Sequence[BlockHash]) -> dict[str, dict[str, Any]]:
    wanted = list(dict.fromkeys(hashes))
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, len(wanted), KEYS_AT_ONCE):
        part: list[bytes] = list(wanted[start : start + KEYS_AT_ONCE])
        body = call.report(wire.Keys(0, bytes.fromhex(namespace.digest), 0, len(part), part))
        for block in body.get("blocks", []):
            if block["tiers"]:
                found[block["hash"]] = block
    return found


def keys(call: Call) -> Exit:
    """List the blocks of a namespace, page by page."""
    namespace = call.namespace()
    digest, limit, at = bytes.fromhex(namespace.digest), call.options.limit, call.options.offset
    blocks: list[dict[str, Any]] = []
    total = 0
    while len(blocks) < limit:
        asked = min(KEYS_AT_ONCE, limit - len(blocks))
        body = call.report(wire.Keys(0, digest, at + len(blocks), asked))
        total = body.get("total", 0)
        part = body.get("blocks", [])
        blocks += part
        if not part or at + len(blocks) >= total:
            break
    body = {"namespace": namespace.digest, "total": total, "blocks": blocks}
    call.output.either(body, show.keys(call.output, read(KeysReport, body)))
    if at + len(blocks) < total:
        call.output.say(f"{count(len(blocks))} of {count(total)} blocks: --limit and --offset show others")
    return Exit.DONE


def pin(call: Call) -> Exit:
    """Keep blocks for a while."""
    for_s = call.options.for_s
    if not for_s:
        raise UsageError("--for 0 pins nothing: write how long, e.g. --for 2h")
    return _each_block(
        call, lambda digest, hashes: wire.Pin(0, digest, hashes, for_s), f"pinned for {duration(for_s)}"
    )


def unpin(call: Call) -> Exit:
    """End pins."""
    return _each_block(call, lambda digest, hashes: wire.Unpin(0, digest, hashes), "unpinned")


def ttl(call: Call) -> Exit:
    """Set the life of blocks, or the default of a namespace."""
    ttl_s = call.options.ttl_s
    ends = f"in {duration(ttl_s)}" if ttl_s else "never"
    if call.options.hashes or call.options.tokens is not None:
        return _each_block(call, lambda digest, hashes: wire.Ttl(0, digest, hashes, ttl_s), f"expire {ends}")
    namespace = call.namespace()
    call.ask(wire.Ttl(0, bytes.fromhex(namespace.digest), [], ttl_s), deadline_s=call.deadline_s(ANSWER_S))
    call.output.either(
        {"namespace": namespace.digest, "ttl_s": ttl_s},
        f"what is stored in {namespace.digest[: naming.SHORT_DIGEST]} from now on expires {ends}",
    )
    return Exit.DONE


def _each_block(
    call: Call,
    request_for: Callable[[bytes, list[bytes]], wire.Message],
    done: str,
    namespace: NamespaceReport | None = None,
    hashes: Sequence[BlockHash] | None = None,
) -> Exit:
    """Ask for all blocks in as many requests as it takes; ends with 1 if one that exists was refused."""
    namespace = namespace or call.namespace()
    wanted = list(dict.fromkeys(call.some_hashes(namespace) if hashes is None else hashes))
    outcomes: dict[str, str] = {}
    for start in range(0, len(wanted), KEYS_AT_ONCE):
        part: list[bytes] = list(wanted[start : start + KEYS_AT_ONCE])
        request = request_for(bytes.fromhex(namespace.digest), part)
        reply = call.ask(request, deadline_s=call.deadline_s(ANSWER_S))
        outcomes.update(zip((name.hex() for name in part), reply["outcomes"], strict=True))
    tally = {kind: list(outcomes.values()).count(kind) for kind in dict.fromkeys(outcomes.values())}
    good = tally.pop("done", 0)
    rest = "".join(f"; {number} {kind.replace('_', ' ')}" for kind, number in tally.items())
    text = f"{count(good)} of {count(len(wanted))} blocks {done}{rest}"
    call.output.either({"namespace": namespace.digest, "outcomes": outcomes}, text)
    return Exit.DONE if not tally or set(tally) <= {"absent", "expired"} else Exit.FAILED


# ---- removing


def drop(call: Call) -> Exit:
    """Make blocks or whole namespaces invisible."""
    options = call.options
    if options.whole or options.all:
        if options.namespace or options.hashes or options.tokens is not None:
            raise UsageError("name blocks, or --namespace NS, or --all: not two of them")
        return _drop_namespaces(call)
    if not options.namespace:
        raise UsageError("name what to drop: NS HASH..., NS --tokens FILE, --namespace NS, or --all")
    if not options.hashes and options.tokens is None:
        raise UsageError(
            f"name the blocks of {options.namespace!r} to drop, or write --namespace {options.namespace} for all of it"
        )
    namespace = call.namespace()
    hashes = call.some_hashes(namespace)
    found = _found(call, namespace, hashes)
    absent = len(set(hashes)) - len(found)
    plan = {"namespace": namespace.digest, "blocks": len(found), "absent": absent}
    text = (
        f"Plan: drop {counted(len(found), 'block')}, {describe_size(len(found) * namespace.block_bytes)}, of "
        f"{_named(namespace)} from every tier; {count(absent)} of those named are not there."
    )
    if not call.is_confirmed(text, plan):
        return Exit.USAGE
    return _each_block(
        call, lambda digest, part: wire.DropBlocks(0, digest, part), "dropped", namespace, hashes
    )


def _drop_namespaces(call: Call) -> Exit:
    left_out = 0
    if call.options.all:
        report = call.stats()
        chosen, left_out = report.namespaces, report.namespaces_left_out
    else:
        named = dict.fromkeys(call.named(name).digest for name in call.options.whole)
        # A digest stands for the namespaces of all tenants that use it.
        chosen = [one for digest in named for one in call.stats(digest).namespaces if one.digest == digest]
    digests = list(dict.fromkeys(namespace.digest for namespace in chosen))
    total_count = counted(len(chosen) + left_out, "namespace")
    lines = [f"Plan: drop everything stored so far in {total_count}, from every tier:"]
    for namespace in chosen:
        held = ", ".join(
            f"{tier} {count(blocks)} blocks ({size(namespace.bytes.get(tier, 0))})"
            for tier, blocks in namespace.blocks.items()
        )
        lines.append(f"  {_named(namespace)}: {held or 'nothing'}; {count(namespace.pinned_blocks)} pinned")
    if left_out:
        lines.append(f"  and {count(left_out)} smaller ones")
    plan = {
        "namespaces": [{"digest": one.digest, "blocks": one.blocks, "bytes": one.bytes} for one in chosen],
        "namespaces_left_out": left_out,
    }
    if not call.is_confirmed("\n".join(lines), plan):
        return Exit.USAGE
    requests = [None] if call.options.all else [bytes.fromhex(digest) for digest in digests]
    reports = [read(CountReport, call.report(wire.DropNamespace(0, request), WORK_S)) for request in requests]
    total = {"namespaces": sum(one.namespaces for one in reports), "blocks": sum(one.blocks for one in reports)}
    where = counted(total["namespaces"], "namespace")
    call.output.either(total, f"dropped {counted(total['blocks'], 'block')} in {where}")
    return Exit.DONE


def _named(namespace: NamespaceReport) -> str:
    tenant = f" of tenant {plain(namespace.tenant)}" if namespace.tenant not in ("", "default") else ""
    return f"{namespace.digest[: naming.SHORT_DIGEST]} {plain(namespace.title)}{tenant}"


def evict(call: Call) -> Exit:
    """Make room in a tier."""
    options = call.options
    found = call.stats().tiers
    if options.tier not in found:
        raise BadSetting(f"this daemon has no tier {options.tier!r}: its tiers are {', '.join(found)}")
    tier = found[options.tier]
    most = tier.used_bytes if options.size_bytes is None else min(tier.used_bytes, options.size_bytes)
    age = f" that were not used for {duration(options.older_than_s)}" if options.older_than_s else ""
    text = (
        f"Plan: evict at most {describe_size(most)} of the {size(tier.used_bytes)} used in {options.tier}, the coldest "
        f"blocks{age} first; {size(tier.pinned_bytes)} are leased and stay, as do pinned blocks. What is in no other "
        "tier is lost."
    )
    plan = {"tier": options.tier, "bytes_max": most, "older_than_s": options.older_than_s}
    if not call.is_confirmed(text, plan):
        return Exit.USAGE
    body = call.report(wire.Evict(0, options.tier, options.size_bytes, options.older_than_s), WORK_S)
    done = read(CountReport, body)
    call.output.either(body, f"evicted {show.bytes_and_blocks(done.evicted_blocks, done.evicted_bytes)}")
    return Exit.DONE


# ---- upkeep


def check(call: Call) -> Exit:
    """Check the invariants."""
    body = call.report(wire.Check(0, call.options.verify), WORK_S)
    found = read(CheckReport, body)
    call.output.either(body, show.check(call.output, found))
    if not found.ok:
        call.output.say("keep the daemon's log and this output for a report; drop --namespace frees what is affected")
    return Exit.DONE if found.ok else Exit.FAILED


def gc(call: Call) -> Exit:
    """Reclaim what nobody can read any more."""
    body = call.report(wire.Gc(0), WORK_S)
    done = read(CountReport, body)
    call.output.either(body, f"reclaimed {show.bytes_and_blocks(done.reclaimed_blocks, done.reclaimed_bytes)}")
    return Exit.DONE


def drain(call: Call) -> Exit:
    """Write to ssd what only memory holds."""
    wait_s = call.options.wait_s
    body = call.report(wire.Drain(0, wait_s), wait_s + ANSWER_S)
    done = read(CountReport, body)
    written, left = count(done.written_blocks), count(done.remaining_blocks)
    call.output.either(body, f"wrote {written} blocks to ssd; {left} are left in memory only")
    if done.left_out_blocks:
        call.output.say(f"{count(done.left_out_blocks)} of them found no room beside hotter ones: raise --ssd-size")
    if done.remaining_blocks > done.left_out_blocks:
        call.output.say("not all is written: wait longer with --wait, or see in kvctl tiers whether ssd is well")
    return Exit.FAILED if done.remaining_blocks else Exit.DONE


def dump(call: Call) -> Exit:
    """Write a namespace to a file."""
    namespace = call.namespace()
    body = call.report(wire.Dump(0, bytes.fromhex(namespace.digest), os.path.abspath(call.options.file)), WORK_S)
    done = read(CountReport, body)
    call.output.either(
        body, f"wrote {show.bytes_and_blocks(done.blocks, done.bytes)} of {_named(namespace)} to {plain(done.path)}"
    )
    return Exit.DONE


def load(call: Call) -> Exit:
    """Store the blocks of a file."""
    body = call.report(wire.Load(0, os.path.abspath(call.options.file)), WORK_S)
    done = read(CountReport, body)
    call.output.either(
        body, f"stored {show.bytes_and_blocks(done.blocks, done.bytes)}; {count(done.skipped)} skipped (there already)"
    )
    return Exit.DONE
