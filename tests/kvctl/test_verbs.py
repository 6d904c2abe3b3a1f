"""Each verb against a daemon that answers from canned reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvctl import verbs, watch
from kvctl.exits import Exit
from kvctl.verbs import Call
from kvstore import prefix, wire
from kvstore.errors import BadKey, BadNamespace, BadSetting, RemoteProtocolError, UsageError
from tests.kvctl import canned
from tests.kvctl.canned import DIGESTS, HASHES, FakeDaemon, run

HEX = [raw.hex() for raw in HASHES]


@pytest.mark.parametrize("words", [
    ["ping"], ["ping", "--count", "3"], ["status"], ["tiers"], ["stats"], ["namespaces"], ["keys", "ab12"],
    ["lookup", "ab12", HEX[0], HEX[4]], ["pin", "ab12", HEX[0], "--for", "2h"], ["unpin", "ab12", HEX[0]],
    ["ttl", "ab12", HEX[0], "--to", "30m"], ["ttl", "ab12", "--to", "never"], ["drop", "ab12", HEX[0], "--yes"],
])  # fmt: skip
def test_json_is_one_object_and_nothing_else(words: list[str]) -> None:
    found = run(*words, "--json")
    assert found.code == Exit.DONE
    assert isinstance(json.loads(found.out), dict)
    assert found.out.count("\n") == 1


def test_stats_shows_every_number_of_the_tiers() -> None:
    text = run("stats").out
    for word in ("64 GiB", "45 GiB", "70.3 %", "12,345", "12m34s", "949,990", "120 MiB", "830", "absent 562,000"):
        assert word in text
    assert "Llama-3.1-8B@main" in text
    assert "1 overdue" in text


def test_tables_line_up() -> None:
    lines = run("stats").out.split("\n\n", maxsplit=1)[0].splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_degraded_tier_says_why() -> None:
    report = canned.stats(tiers={"ssd": canned.tier(state="degraded", state_text="no space left on device")})
    text = run("tiers", daemon=FakeDaemon({wire.Stats: report})).out
    assert "ssd is degraded: no space left on device" in text


def test_names_from_elsewhere_cannot_command_the_terminal() -> None:
    report = canned.stats(namespaces=[canned.namespace(0, model="evil\x1b]0;title\x07\x1b[2J")])
    text = run("namespaces", daemon=FakeDaemon({wire.Stats: report}), is_terminal=True).out
    assert "\x1b]" not in text
    assert "\\x1b[2J" in text or "evil\\x1b" in text


def test_reports_of_other_versions_are_read() -> None:
    sparse = {"tiers": {"cpu": {"capacity_bytes": 1024}}, "news": {"from": "the future"}}
    assert "1 KiB" in run("stats", daemon=FakeDaemon({wire.Stats: sparse})).out


def test_a_report_of_other_types_is_a_clear_error() -> None:
    with pytest.raises(RemoteProtocolError, match="kvctl"):
        run("stats", daemon=FakeDaemon({wire.Stats: {"tiers": 5}}))


# ---- names


@pytest.mark.parametrize("name", ["ab12", DIGESTS[0], "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B@main", "AB12"])
def test_a_namespace_is_named_by_digest_or_model(name: str) -> None:
    assert json.loads(run("keys", name, "--json").out)["namespace"] == DIGESTS[0]


def test_an_ambiguous_name_lists_its_candidates() -> None:
    with pytest.raises(BadNamespace) as caught:
        run("keys", "ab")
    assert "names 2 namespaces" in str(caught.value)
    assert DIGESTS[0][:12] in str(caught.value)
    assert DIGESTS[1][:12] in str(caught.value)
    assert DIGESTS[2][:12] not in str(caught.value)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(BadNamespace, match="there is no namespace") as caught:
        run("keys", "zz")
    assert "Qwen/Qwen3-8B@main" in str(caught.value)


def test_an_empty_store_has_no_names() -> None:
    with pytest.raises(BadNamespace, match="nothing has been stored"):
        run("keys", "zz", daemon=FakeDaemon({wire.Stats: canned.stats(namespaces=[])}))


@pytest.mark.parametrize("word", ["xyz", "ab", "0" * 130])
def test_what_is_no_hash_is_refused(word: str) -> None:
    with pytest.raises(BadKey):
        run("lookup", "ab12", word)


# ---- blocks


def test_lookup_counts_the_run_without_a_gap() -> None:
    found = run("lookup", "ab12", HEX[0], HEX[1], HEX[4], HEX[2], "--json")
    body = json.loads(found.out)
    assert (body["leading_blocks"], body["leading_tokens"]) == (2, 32)
    assert [bool(block["tiers"]) for block in body["blocks"]] == [True, True, False, True]


def test_lookup_asks_once_for_many_blocks() -> None:
    many = [bytes([0, 0, *divmod(number, 256)]).ljust(32, b"x").hex() for number in range(5000)]
    found = run("lookup", "ab12", "-", stdin="\n".join(many))
    sizes = [len(request.hashes) for request in found.daemon.asked if isinstance(request, wire.Keys)]
    assert sizes == [4096, 904]


@pytest.mark.parametrize("text", ["[1,2,3,4]", "1 2 3 4", "1,2,\n3,4\n"])
def test_tokens_are_hashed_as_the_client_does(text: str) -> None:
    report = canned.stats(namespaces=[canned.namespace(0, block_tokens=2)])
    daemon = FakeDaemon({wire.Stats: report})
    body = json.loads(run("lookup", "ab12", "--tokens", "-", "--json", stdin=text, daemon=daemon).out)
    expected = prefix.chain(bytes.fromhex(DIGESTS[0]), [1, 2, 3, 4], 2)
    assert [block["hash"] for block in body["blocks"]] == [name.hex() for name in expected]


@pytest.mark.parametrize("text", ["1 two", "[1, true]", "[1, [2]]", "[1", "-3", "99999999999"])
def test_what_are_no_tokens_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        run("lookup", "ab12", "--tokens", "-", stdin=text)


def test_tokens_that_fill_no_block_are_said_to() -> None:
    with pytest.raises(UsageError, match="fill no block"):
        run("lookup", "ab12", "--tokens", "-", stdin="1 2 3")


def test_keys_go_on_page_by_page() -> None:
    daemon = FakeDaemon()
    daemon.present = {bytes([0, *divmod(number, 256)]).ljust(32, b"x") for number in range(5000)}
    body = json.loads(run("keys", "ab12", "--limit", "4500", "--offset", "10", "--json", daemon=daemon).out)
    assert len(body["blocks"]) == 4500
    assert body["total"] == 5000
    pages = [(request.offset, request.limit) for request in daemon.asked if isinstance(request, wire.Keys)]
    assert pages == [(10, 4096), (4106, 404)]


def test_pins_are_asked_for_by_digest_and_time() -> None:
    found = run("pin", "ab12", HEX[0], HEX[0], HEX[1], "--for", "1h30m")
    assert found.daemon.changes() == [wire.Pin(0, bytes.fromhex(DIGESTS[0]), [HASHES[0], HASHES[1]], 5400.0)]
    assert "2 of 2 blocks pinned for 1h30m" in found.out


def test_a_refused_pin_ends_with_1() -> None:
    class Full(FakeDaemon):
        def __call__(self, request: wire.Message, **how: Any) -> dict[str, Any]:
            if isinstance(request, wire.Pin):
                return {"hits": 0, "outcomes": ["done", "no_room"]}
            return super().__call__(request, **how)

    found = run("pin", "ab12", HEX[0], HEX[1], "--for", "2h", daemon=Full())
    assert found.code == Exit.FAILED
    assert "1 of 2 blocks pinned for 2h; 1 no room" in found.out


def test_ttl_without_blocks_is_the_namespaces() -> None:
    found = run("ttl", "ab12", "--to", "30m")
    assert found.daemon.changes() == [wire.Ttl(0, bytes.fromhex(DIGESTS[0]), [], 1800.0)]


@pytest.mark.parametrize("words", [["--to", "0"], ["--to", "soon"], []])
def test_a_ttl_that_says_nothing_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("ttl", "ab12", *words)
    assert caught.value.code == Exit.USAGE


# ---- removing


@pytest.mark.parametrize("words", [
    ["drop", "ab12", HEX[0]], ["drop", "--namespace", "ab12"], ["drop", "--all"], ["evict", "--tier", "cpu"],
])  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_without_yes_the_plan_is_all_that_happens(words: list[str], as_json: bool) -> None:
    found = run(*words, *(["--json"] if as_json else []))
    assert found.code == Exit.USAGE
    assert not found.daemon.changes()
    assert "Plan:" in found.err
    assert "--yes" in found.err
    assert (json.loads(found.out)["done"] is False) if as_json else not found.out


def test_dropped_blocks_are_named_by_digest() -> None:
    found = run("drop", "ab12", HEX[0], HEX[4], "--yes")
    assert found.daemon.changes() == [wire.DropBlocks(0, bytes.fromhex(DIGESTS[0]), [HASHES[0], HASHES[4]])]
    assert "1 of 2 blocks dropped; 1 absent" in found.out
    assert found.code == Exit.DONE


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--all"], [None]),
        (["--namespace", "ab12"], [bytes.fromhex(DIGESTS[0])]),
        (["--namespace", "ab12", "--namespace", "cd"], [bytes.fromhex(DIGESTS[0]), bytes.fromhex(DIGESTS[2])]),
    ],
)
def test_namespaces_are_dropped_whole(words: list[str], asked: list[bytes | None]) -> None:
    daemon = FakeDaemon({wire.DropNamespace: {"namespaces": 1, "blocks": 20}})
    found = run("drop", *words, "--yes", daemon=daemon)
    assert [request.namespace for request in daemon.changes()] == asked
    assert f"dropped {20 * len(asked)} blocks" in found.out


@pytest.mark.parametrize(
    "words",
    [
        [], ["ab12"], ["ab12", HEX[0], "--all"], ["--namespace", "ab12", "--tokens", "x"],
        ["ab12", HEX[0], "--tokens", "x"],
    ],
)  # fmt: skip
def test_an_unclear_drop_is_refused(words: list[str]) -> None:
    daemon = FakeDaemon()
    with pytest.raises(UsageError):
        run("drop", *words, "--yes", daemon=daemon)
    assert not daemon.changes()


def test_evict_takes_sizes_and_ages() -> None:
    daemon = FakeDaemon({wire.Evict: {"evicted_blocks": 12, "evicted_bytes": 11010048}})
    found = run("evict", "--tier", "ssd", "--bytes", "10GB", "--older-than", "2h", "--yes", daemon=daemon)
    assert daemon.changes() == [wire.Evict(0, "ssd", 10**10, 7200.0)]
    assert "evicted 12 blocks, 11010048 bytes (10.5 MiB)" in found.out


def test_a_tier_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadSetting, match="cpu, ssd"):
        run("evict", "--tier", "gpu", "--yes")


# ---- upkeep


def test_check_ends_with_1_when_an_invariant_is_broken() -> None:
    broken = {"ok": False, "problems": ["cpu: free + used is not capacity"], "blocks_checked": 9, "blocks_corrupt": 1}
    found = run("check", "--verify", daemon=FakeDaemon({wire.Check: broken}))
    assert found.code == Exit.FAILED
    assert "free + used is not capacity" in found.out
    assert found.daemon.asked == [wire.Check(0, True)]


def test_check_of_a_sound_store_ends_with_0() -> None:
    sound: dict[str, Any] = {"ok": True, "problems": [], "blocks_checked": 9, "blocks_corrupt": 0}
    found = run("check", daemon=FakeDaemon({wire.Check: sound}))
    assert (found.code, found.out) == (Exit.DONE, "all invariants hold; 9 blocks checked, 0 corrupt\n")


@pytest.mark.parametrize(("left", "code"), [(0, Exit.DONE), (5, Exit.FAILED)])
def test_drain_ends_with_1_when_something_is_left(left: int, code: Exit) -> None:
    daemon = FakeDaemon({wire.Drain: {"written_blocks": 7, "remaining_blocks": left}})
    assert run("drain", "--wait", "30s", daemon=daemon).code == code
    assert daemon.asked == [wire.Drain(0, 30.0)]
    assert daemon.deadlines_s == [40.0]


def test_drain_says_how_many_blocks_found_no_room() -> None:
    daemon = FakeDaemon({wire.Drain: {"written_blocks": 7, "left_out_blocks": 5, "remaining_blocks": 5}})
    found = run("drain", daemon=daemon)
    assert found.code == Exit.FAILED
    assert "5 of them found no room beside hotter ones: raise --ssd-size" in found.err
    assert "wait longer" not in found.err


def test_gc_says_what_came_back() -> None:
    daemon = FakeDaemon({wire.Gc: {"reclaimed_blocks": 1, "reclaimed_bytes": 4096}})
    assert run("gc", daemon=daemon).out == "reclaimed 1 block, 4096 bytes (4 KiB)\n"


def test_files_of_dumps_are_absolute_for_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    answer = {"blocks": 3, "bytes": 2752512, "path": str(tmp_path / "x.dump"), "skipped": 1}
    daemon = FakeDaemon({wire.Dump: answer, wire.Load: answer})
    assert "wrote 3 blocks" in run("dump", "ab12", "x.dump", daemon=daemon).out
    assert "1 skipped" in run("load", "x.dump", daemon=daemon).out
    assert [request.path for request in daemon.changes()] == [str(tmp_path / "x.dump")] * 2


def test_progress_is_shown_on_a_terminal_and_wiped() -> None:
    daemon = FakeDaemon({wire.Gc: {}})
    assert "1 of 2  50 %" in run("gc", daemon=daemon, is_terminal=True).err
    assert run("gc", daemon=daemon, is_terminal=True).err.endswith("\r\x1b[K")
    assert run("gc", daemon=daemon).err == ""


def test_a_timeout_bounds_every_answer() -> None:
    daemon = FakeDaemon({wire.Gc: {}})
    run("gc", "--timeout", "3s", daemon=daemon)
    run("--timeout", "4s", "gc", daemon=daemon)
    run("gc", daemon=daemon)
    assert daemon.deadlines_s == [3.0, 4.0, verbs.WORK_S]


# ---- watch


class Growing(FakeDaemon):
    """Each look finds 100 more queried blocks, 80 of them hit, one second later; the third look finds a restart."""

    looks = 0

    def __call__(self, request: wire.Message, **how: Any) -> dict[str, Any]:
        self.looks += 1
        report = canned.stats(uptime_s=1000.0 + self.looks)
        if self.looks == 3:
            return canned.stats(uptime_s=1.0)
        report["totals"]["queried_blocks"] += 100 * self.looks
        report["totals"]["hit_blocks"]["cpu"] += 80 * self.looks
        return report


def watching(*words: str, daemon: FakeDaemon) -> canned.Run:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    def verb(call: Call) -> Exit:
        return watch.stats(call, now=lambda: clock[0], sleep=sleep)

    return run("stats", "--watch", *words, daemon=daemon, verb=verb)


def test_watch_prints_rates() -> None:
    found = watching("1", "--count", "1", daemon=Growing())
    header, line = found.out.splitlines()
    assert header.split() == ["TIME", "CPU", "SSD", "HITS", "QUERY/s", "STORE/s", "IN/s", "OUT/s", "EVICT/s"]
    assert "80.0 %" in line
    assert " 100 " in line
    assert len(header) == len(line) <= 80


def test_watch_never_shows_a_negative_rate_after_a_restart() -> None:
    found = watching("--count", "2", daemon=Growing())
    assert "restarted" in found.err
    assert len(found.out.splitlines()) == 2


def test_watch_in_json_is_a_report_a_line() -> None:
    found = watching("--json", "--count", "2", daemon=Growing())
    assert [json.loads(line)["uptime_s"] for line in found.out.splitlines()] == [1002.0, 1.0]
