"""docs/proxy.md says what the proxy does: settings, routes, reasons, series."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from kvproxy.bodies import Kind
from kvproxy.fairness import FairQueue
from kvproxy.metrics import Metrics
from kvproxy.options import OPTIONS, TABLE
from kvproxy.types import Endpoint, Reason, Role
from kvproxy.workers import Fleet
from kvstore.clock import ManualClock
from tests.documents import DOCS, plain, table_of

PROXY = DOCS / "proxy.md"


def test_every_setting_has_a_row_with_its_default_and_every_row_a_setting() -> None:
    told: dict[str, str] = {}
    for setting, defaults, *_ in table_of(PROXY, "setting", "default"):
        keys = re.findall(r"`([a-z-]+)`", setting)
        each = defaults.split(", ") if len(keys) > 1 and ", " in defaults else [defaults] * len(keys)
        told.update(zip(keys, each, strict=True))
    assert told == {
        option.key: option.default_text if option.default is None else str(option.default) for option in OPTIONS
    }


def test_the_reasons_are_those_of_the_code() -> None:
    assert {plain(row[0]) for row in table_of(PROXY, "reason", "when")} == {str(reason) for reason in Reason}


def test_every_series_has_its_question_and_every_series_named_exists() -> None:
    clock = ManualClock()
    fleet = Fleet(clock.monotonic_s, dict.fromkeys(Role, 1.0))
    fleet.add(Endpoint("http://h", Role.DECODE, "h"))
    queue = FairQueue(clock.monotonic_s, running_max=1, waiting_max=1, waiting_s_max=1.0)
    text = Metrics().render(fleet, queue).decode()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    short = {re.sub("_(bucket|sum|count)$", "", name) for name in names if name.startswith("kvproxy_")}
    questions = "\n".join(row[1] for row in table_of(PROXY, "question", "series"))
    assert set(re.findall(r"`(kvproxy_[a-z_]+)`", questions)) == short - {"kvproxy_build_info"}
    assert set(re.findall(r"`(kvproxy_[a-z_]+)`", PROXY.read_text())) <= short | names


def test_the_routes_are_those_of_the_code() -> None:
    told = {plain(row[0]) for row in table_of(PROXY, "route", "what it is")}
    assert {f"POST {kind.path}" for kind in Kind} <= told
    assert told - {f"POST {kind.path}" for kind in Kind} == {
        "GET /v1/models", "GET /healthz", "GET /readyz", "GET /metrics"
    }  # fmt: skip


def test_every_variable_in_the_document_exists() -> None:
    known = {option.variable for option in OPTIONS} | {"KVPROXY_ADMIN_TOKEN"}
    assert set(re.findall(r"\bKVPROXY_[A-Z_]+", PROXY.read_text())) <= known
    assert TABLE.command == "kvproxy"
