"""What is installed is what is here: an archive, a wheel made of it, and a program that runs it."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from setuptools.command import bdist_wheel
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("src", "csrc", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import phasor
from phasor.cli import run
assert phasor.__file__.startswith(sys.path[0]), phasor.__file__
run()
"""


@pytest.mark.slow
def test_the_wheel_of_the_archive_holds_everything_and_runs(tmp_path: Path) -> None:
    """Data and the extension are in it, tests are not; the demonstration passes away from here."""
    tree, site = tmp_path / "tree", tmp_path / "site"
    tree.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
        else:
            shutil.copy2(ROOT / name, tree)
    built = subprocess.run(
        [sys.executable, "-m", "build", str(tree)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (archive,) = (tree / "dist").glob("*.tar.gz")
    (wheel,) = (tree / "dist").glob("*.whl")
    here = {
        path.relative_to(tree / "src").as_posix()
        for path in (tree / "src" / "phasor").rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as file:
        installed = {name for name in file.namelist() if name.startswith("phasor/")}
        file.extractall(site)
    extension = {name for name in installed if name.startswith("phasor/_native")}
    assert len(extension) == 1
    assert installed - extension == here
    with tarfile.open(archive) as file:
        archived = {name.partition("/")[2] for name in file.getnames()}
    assert {path.relative_to(tree).as_posix() for path in (tree / "csrc").iterdir()} <= archived
    assert not [name for name in archived if name.startswith("tests")]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(site), "demo"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("without_gil", [False, True])
def test_a_python_without_a_gil_is_not_asked_for_the_stable_interface(
    without_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none, and setuptools refuses to name a wheel for it: see its switches."""
    asked: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", int(without_gil))
    monkeypatch.setattr("setuptools.setup", lambda **given: asked.update(given))
    runpy.run_path("setup.py")
    (extension,) = asked["ext_modules"]
    assert extension.py_limited_api is not without_gil
    assert bool(extension.define_macros) is not without_gil
    wheel = bdist_wheel.bdist_wheel(Distribution({"name": "phasor", **asked}))
    for name, value in asked["options"].get("bdist_wheel", {}).items():
        setattr(wheel, name, value)
    wheel.finalize_options()
    assert (wheel.py_limited_api == "cp311") is not without_gil
