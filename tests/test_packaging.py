"""What is built from this checkout is whole, and the thin client installs with two small dependencies."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import product
from tests.product import ROOT


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    return parsed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built offline from the source distribution, itself built from a copy of the checkout."""
    scratch = tmp_path_factory.mktemp("packaging")
    for path in product.text_files():
        copy = scratch / "checkout" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(scratch / "dist"),
        str(scratch / "checkout"),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (built,) = (scratch / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """Return a directory with the wheel installed in it and none of its dependencies."""
    target = wheel.parent.parent / "installed"
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(target)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(wheel)], capture_output=True, check=True
    )
    return target


def test_setup_cfg_lists_every_package(setup_cfg: configparser.ConfigParser) -> None:
    assert set(setup_cfg["options"]["packages"].split()) == set(product.package_dirs())


def test_the_wheel_holds_every_module_and_its_types(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"{module.name.replace('.', '/')}.py"
        for module in product.modules()
        if module.path.stem != "__init__"
    }
    wanted |= {f"{package.replace('.', '/')}/__init__.py" for package in product.package_dirs()}
    wanted |= {f"{package}/py.typed" for package in product.package_dirs() if "." not in package}
    assert wanted <= held
    tops = {name.partition("/")[0] for name in held if ".dist-info" not in name}
    assert tops == {package for package in product.package_dirs() if "." not in package}


def test_the_installed_client_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(installed)!r}); import kvclient; print(kvclient.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(installed / "kvclient" / "__init__.py"), done.stderr


@pytest.mark.parametrize("command", ["kvstored", "kvproxy", "kvctl"])
def test_each_command_starts_and_tells_its_use(installed: Path, tmp_path: Path, command: str) -> None:
    (script,) = importlib.metadata.distribution("kvstored").entry_points.select(name=command)
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); sys.argv = [{command!r}, '--help']; "
        f"from {script.module} import {script.attr}; sys.exit({script.attr}())"
    )
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout


def test_the_thin_client_depends_on_msgspec_and_xxhash_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    required = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    assert {need.name for need in required if need.marker is None} == {"msgspec", "xxhash"}


def test_the_lock_pins_everything_that_setup_cfg_asks_for(setup_cfg: configparser.ConfigParser) -> None:
    lines = [
        line
        for file in ("lock.txt", "torch.txt")
        for line in (ROOT / "requirements" / file).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pinned = {_normal(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(pinned.values()), "each line is name==version"
    extras = setup_cfg["options.extras_require"].values()
    for line in "\n".join([setup_cfg["options"]["install_requires"], *extras]).split("\n"):
        if line.strip():
            need = Requirement(line)
            assert need.specifier.contains(pinned[_normal(need.name)]), f"{line} is not what the lock pins"


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
