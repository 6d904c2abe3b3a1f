"""The commands of docs/ for SGLang: every flag is one of this version's server, and the extra config is taken."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path

import pytest

from tests.engines.sglang import pools
from tests.engines.sglang.conftest import Attach
from tests.engines.sglang.pools import Shape
from tests.product import ROOT

PAGES = [ROOT / "docs" / name for name in ("sglang.md", "engines.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_the_commands_is_one_of_the_server(page: Path) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    commands = re.findall(r"^    python -m sglang.launch_server.*\n(?:     .*\n)*", page.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        flags = set(re.findall(r"(?<![\w-])--[a-z-]+", command))
        assert len(flags) > 5
        assert flags <= known, flags - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_extra_config_is_taken(page: Path, attach: Attach) -> None:
    texts = re.findall(r'\{"backend_name".*?\}(?=\'|\n\n)', page.read_text(), re.DOTALL)
    assert texts
    for config in map(json.loads, texts):
        assert (config["module_path"], config["class_name"]) == ("kvclient.sglang", "KVStoredHiCache")
        settings = {name: value for name, value in config.get("kvstored", {}).items() if name != "socket"}
        attach(pools.make(Shape("page_first")), interface_v1=config["interface_v1"], **settings)


def test_the_page_has_every_setting() -> None:
    known = importlib.import_module("kvclient._sglang_settings")
    rows = re.findall(r"^\| `([a-z_]+)` \|", PAGES[0].read_text(), re.MULTILINE)
    assert set(known.SETTINGS) <= set(rows)
