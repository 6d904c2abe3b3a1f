"""What deploy/ holds fits the daemon: settings, series names, the unit and the container file."""

from __future__ import annotations

import asyncio
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

from kvstore.wire import MISS_REASONS
from kvstored.options import OPTIONS, TABLE
from kvstored.sources import gather
from tests.daemon.report import exposed, full_report
from tests.product import ROOT

DEPLOY = ROOT / "deploy"
EXAMPLE = DEPLOY / "kvstored.example.toml"
UNIT = DEPLOY / "kvstored.service"
DASHBOARD = DEPLOY / "grafana-dashboard.json"
RULES = DEPLOY / "kvstored.rules.yml"

# Labels that Prometheus adds to every series.
_SCRAPE_LABELS = {"instance", "job"}


# ---- the example config


def test_example_config_passes_the_check(short_dir: Path) -> None:
    # Sizes and directories are this machine's; everything else is as the file says.
    here = {"cpu-size": "16MiB", "ssd-size": "32MiB", "ssd-dir": short_dir / "kv", "socket": short_dir / "s.sock"}
    flags = [f"--{key}={value}" for key, value in here.items()]
    done = subprocess.run(
        [sys.executable, "-m", "kvstored", "--config", str(EXAMPLE), "--check", *flags],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f'http = "127.0.0.1:9469"  # file {EXAMPLE}' in done.stdout


def test_commented_settings_of_the_example_exist_and_are_not_the_defaults(short_dir: Path) -> None:
    active = re.sub(r"(?m)^# (?=[a-z-]+ = )", "", EXAMPLE.read_text())
    path = short_dir / "all.toml"
    path.write_text(active)
    given = gather({}, {}, path, TABLE)
    assert given.faults == []
    for option in OPTIONS:
        if option.default is not None and option.key in given.values and f"# {option.key} = " in EXAMPLE.read_text():
            assert given.values[option.key] != option.read(option.default), option.key
    remote = {"remote", "remote-size", "remote-write-policy", "remote-writer", "remote-refresh"}
    rarely = {"allow-shared-pool-across-tenants", *remote}
    assert {option.key for option in OPTIONS} - set(given.values) == rarely


# ---- series


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Return every series of /metrics with its labels."""
    text = asyncio.run(exposed(full_report).text()).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
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
        names = re.findall(r"\b(?:kvstored|process)_[a-z0-9_]+", expression)
        assert names, (where, expression)
        for name in names:
            assert name in series, (where, name)
        for name, matchers in re.findall(r"\b((?:kvstored|process)_[a-z0-9_]+)\{([^}]*)\}", expression):
            for label in re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", matchers):
                assert label in series[name] | _SCRAPE_LABELS, (where, name, label)
        labels = set[str]().union(*(series[name] for name in names)) | _SCRAPE_LABELS
        for grouped in re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", expression):
            for label in filter(None, (part.strip() for part in grouped.split(","))):
                assert label in labels, (where, label)
        assert expression.count("(") == expression.count(")"), where
        used.update(names)
    ours = {name for name in series if name.startswith("kvstored_")}
    # What no panel and no alert shows is listed, so that a new series is thought about.
    assert ours - used == {
        "kvstored_build_info", "kvstored_namespaces", "kvstored_namespace_blocks", "kvstored_namespace_bytes",
        "kvstored_namespace_delivered_blocks_total", "kvstored_namespace_queried_blocks_total",
        "kvstored_namespace_stored_blocks_total", "kvstored_pins_blocks", "kvstored_tenant_quota_bytes",
        "kvstored_tier_capacity_target_bytes", "kvstored_tier_eviction_age_seconds_count", "kvstored_tier_hits_total",
        "kvstored_tier_file_bytes", "kvstored_tier_index_bytes", "kvstored_tier_segments",
    }  # fmt: skip


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


# ---- the unit and the container file


def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(UNIT.read_text())
    return parsed


def test_unit_notifies_and_gives_the_drain_more_time_than_its_default() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["LimitMEMLOCK"] == "infinity"
    drain = next(option for option in OPTIONS if option.key == "drain-timeout")
    assert int(service["TimeoutStopSec"]) > drain.read(drain.default)
    assert service["RestartPreventExitStatus"] == "2"


def test_unit_is_verified_by_systemd(short_dir: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    installed = Path(sysconfig.get_path("scripts")) / "kvstored"
    if not installed.exists():
        pytest.skip("the command kvstored is not installed in this environment")
    path = short_dir / "kvstored.service"
    path.write_text(UNIT.read_text().replace("/usr/local/bin/kvstored", str(installed)))
    done = subprocess.run(
        [verify, "verify", str(path)], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kvstored.service" not in done.stderr, done.stderr


def test_container_file_sets_variables_that_exist() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    variables = set(re.findall(r"\b(KVSTORED_[A-Z_]+)=", text))
    assert variables
    assert variables <= {option.variable for option in OPTIONS}
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    wanted = {extra for group in re.findall(r"\[([a-z,]+)\]'", text) for extra in group.split(",")}
    assert wanted
    assert wanted <= set(extras["options.extras_require"])


# ---- docs


def test_operations_explain_every_setting() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    explained = set(re.findall(r"`([a-z-]+)`", "\n".join(line.split("|")[1] for line in _rows(text))))
    assert {option.key for option in OPTIONS} - explained == set()


def test_operations_name_series_that_exist(series: dict[str, set[str]]) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for name in re.findall(r"`(kvstored_[a-z_]+)`", text):
        assert name in series, name
    for outcome in MISS_REASONS:
        assert f"`{outcome.name.lower()}`" in text


def test_every_dependency_has_a_reason() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    groups = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    wanted = {re.split(r"[<>=\[]", line)[0] for group in groups for line in group.split("\n") if line.strip()}
    rows = _rows((ROOT / "docs/dependencies.md").read_text())
    explained = {name.strip() for line in rows for name in line.split("|")[1].split(",")}
    assert wanted
    assert wanted - explained == set()


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]
