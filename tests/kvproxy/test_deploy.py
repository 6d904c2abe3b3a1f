"""What deploy/ holds for the proxy fits it: settings, series names, the unit."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvproxy.fairness import FairQueue
from kvproxy.metrics import Metrics
from kvproxy.options import OPTIONS, TABLE
from kvproxy.types import Endpoint, Role
from kvproxy.workers import Fleet
from kvstore.clock import ManualClock
from kvstored.sources import gather
from tests.product import ROOT

DEPLOY = ROOT / "deploy"
EXAMPLE = DEPLOY / "kvproxy.example.toml"
UNIT = DEPLOY / "kvproxy.service"
DASHBOARD = DEPLOY / "kvproxy-dashboard.json"
RULES = DEPLOY / "kvproxy.rules.yml"

# Labels that Prometheus adds to every series.
_SCRAPE_LABELS = {"instance", "job"}
# What the unit hands over, and what nobody should need to set.
_NOT_IN_THE_EXAMPLE = {"admin-token-file"}


# ---- the example config


def token_file(directory: Path) -> Path:
    path = directory / "token"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o600)
    return path


def test_example_config_passes_the_check(short_dir: Path) -> None:
    token = f"--admin-token-file={token_file(short_dir)}"
    done = subprocess.run(
        [sys.executable, "-m", "kvproxy", "--config", str(EXAMPLE), "--check", token],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"http://10.0.0.4:8000#node-4"' in done.stdout
    assert f"# file {EXAMPLE}" in done.stdout


def test_commented_settings_of_the_example_exist_and_are_not_the_defaults(short_dir: Path) -> None:
    active = re.sub(r"(?m)^# (?=[a-z-]+ = )", "", EXAMPLE.read_text())
    path = short_dir / "all.toml"
    path.write_text(active)
    given = gather({}, {}, path, TABLE)
    assert given.faults == []
    for option in OPTIONS:
        if option.default is not None and option.key in given.values and f"# {option.key} = " in EXAMPLE.read_text():
            assert given.values[option.key] != option.read(option.default), option.key
    assert {option.key for option in OPTIONS} - set(given.values) == _NOT_IN_THE_EXAMPLE


# ---- series


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Return every series of /metrics with its labels."""
    clock = ManualClock()
    fleet = Fleet(clock.monotonic_s, dict.fromkeys(Role, 1000.0))
    for role in Role:
        fleet.add(Endpoint(f"http://{role}", role, "n"))
    queue = FairQueue(clock.monotonic_s, running_max=1, waiting_max=1, waiting_s_max=1.0)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(Metrics().render(fleet, queue).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every query of the dashboard and the rules, each with where it stands."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]


def rules() -> list[dict[str, Any]]:
    yaml: Any = importlib.import_module("yaml")
    loaded: Any = yaml.safe_load(RULES.read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def test_every_series_and_label_of_dashboard_and_rules_is_in_metrics(series: dict[str, set[str]]) -> None:
    used: set[str] = set()
    for where, expression in expressions():
        names = re.findall(r"\b(?:kvproxy|process)_[a-z0-9_]+", expression)
        assert names, (where, expression)
        for name in names:
            assert name in series, (where, name)
        for name, matchers in re.findall(r"\b((?:kvproxy|process)_[a-z0-9_]+)\{([^}]*)\}", expression):
            for label in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers):
                assert label in series[name] | _SCRAPE_LABELS, (where, name, label)
        labels = set[str]().union(*(series[name] for name in names)) | _SCRAPE_LABELS
        for grouped in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expression):
            for label in filter(None, (part.strip() for part in grouped.split(","))):
                assert label in labels, (where, label)
        assert expression.count("(") == expression.count(")"), where
        used.update(re.sub("_(bucket|sum|count)$", "", name) for name in names)
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in series if name.startswith("kvproxy_")}
    # What no panel and no alert shows is listed, so that a new series is thought about.
    assert ours - used == {"kvproxy_build_info"}


def test_values_that_alerts_look_for_are_values_of_the_labels() -> None:
    text = Metrics().render(
        Fleet(ManualClock().monotonic_s, dict.fromkeys(Role, 1.0)),
        FairQueue(ManualClock().monotonic_s, running_max=1, waiting_max=1, waiting_s_max=1.0),
    ).decode()
    for where, expression in expressions():
        for name, matchers in re.findall(r"\b(kvproxy_[a-z0-9_]+)\{([^}]*)\}", expression):
            for label, value in re.findall(r'([a-z_]+)=~?"([a-z_|-]+)"', matchers):
                for word in value.split("|"):
                    if label not in _SCRAPE_LABELS and not name.startswith("kvproxy_worker_"):
                        sample = rf'^{name}\{{[^}}]*\b{label}="{word}"'
                        assert re.search(sample, text, re.MULTILINE), (where, name, label, word)


def test_template_queries_of_the_dashboard_name_series(series: dict[str, set[str]]) -> None:
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            assert name in series
            assert label in series[name] | _SCRAPE_LABELS


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_every_alert_says_what_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}, rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"]


# ---- the unit


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(UNIT.read_text())
    return parsed


def test_unit_notifies_and_gives_the_drain_more_time_than_its_default() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    drain = TABLE.by_key["drain-timeout"]
    assert int(service["TimeoutStopSec"]) > drain.read(drain.default)
    assert service["RestartPreventExitStatus"] == "2"


def test_unit_is_verified_by_systemd(short_dir: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    installed = Path(sysconfig.get_path("scripts")) / "kvproxy"
    if not installed.exists():
        pytest.skip("the command kvproxy is not installed in this environment")
    path = short_dir / "kvproxy.service"
    path.write_text(UNIT.read_text().replace("/usr/local/bin/kvproxy", str(installed)))
    done = subprocess.run(
        [verify, "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kvproxy.service" not in done.stderr, done.stderr
