"""What is installed is what is here: an archive, the wheels made of it, and what they say."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from setuptools.command import bdist_wheel
from setuptools.dist import Distribution

from phasor.errors import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SOURCE = ("src", "csrc", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
SITE = "https://phasor.example/latest"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import phasor
from phasor.cli import run
assert phasor.__file__.startswith(sys.path[0]), phasor.__file__
run()
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, without anything built."""
    tree = tmp_path_factory.mktemp("tree")
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
        else:
            shutil.copy2(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that does not optimize: `make demo` has just done that, for a minute."""
    path = tmp_path_factory.mktemp("compiler") / "c++"
    path.write_text('#!/bin/bash\nexec c++ "${@/#-O3/-O0}"\n')
    path.chmod(0o755)
    return str(path)


def build(tree: Path, *options: str, **environment: str) -> None:
    """Run ``python -m build`` on ``tree``, with this environment's setuptools."""
    process = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *options, str(tree)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]


def modules_and_data(tree: Path) -> set[str]:
    """The files of the package, as an archive names them."""
    package = tree / "src" / "phasor"
    return {
        path.relative_to(tree / "src").as_posix() for path in package.rglob("*") if path.is_file()
    }


def demonstrated(site: Path) -> str:
    """What ``phasor demo`` prints, run from ``site``."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(site), "demo"],
        capture_output=True,
        text=True,
        check=False,
        cwd=site,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


@pytest.mark.slow
def test_the_wheel_of_the_archive_holds_everything_and_runs(
    tree: Path, tmp_path: Path, quick_compiler: str
) -> None:
    """Data and the extension are in it, tests are not; the demonstration passes away from here."""
    build(tree, "--outdir", str(tmp_path), CC=quick_compiler, CXX=quick_compiler)
    (archive,) = tmp_path.glob("phasor_rope-*.tar.gz")
    (wheel,) = tmp_path.glob("phasor_rope-*.whl")
    with zipfile.ZipFile(wheel) as file:
        installed = {name for name in file.namelist() if name.startswith("phasor/")}
        file.extractall(tmp_path / "site")
    extension = {
        name
        for name in installed
        if name.startswith("phasor/_native.") and not name.endswith("pyi")
    }
    assert len(extension) == 1
    assert installed - extension == modules_and_data(tree)
    with tarfile.open(archive) as file:
        archived = {name.partition("/")[2] for name in file.getnames()}
    assert {path.relative_to(tree).as_posix() for path in (tree / "csrc").iterdir()} <= archived
    assert not [name for name in archived if name.startswith("tests")]
    assert "pip install" not in demonstrated(tmp_path / "site")


@pytest.mark.slow
def test_the_wheel_for_every_system_says_at_first_use_how_to_get_the_kernel(
    tree: Path, tmp_path: Path
) -> None:
    """All but the kernel is in it, it rotates, and its description names no file that is here."""
    build(tree, "--wheel", "--outdir", str(tmp_path), PHASOR_NO_KERNEL="1")
    (wheel,) = tmp_path.glob("phasor_rope-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        installed = {name for name in file.namelist() if name.startswith("phasor/")}
        file.extractall(tmp_path / "site")
    assert installed == modules_and_data(tree)
    assert {one.suffix for one in tmp_path.rglob("*_native*")} == {".pyi"}
    assert f"--no-binary {DISTRIBUTION} {DISTRIBUTION}" in demonstrated(tmp_path / "site")
    (metadata,) = tmp_path.glob("site/*.dist-info/METADATA")
    written = Parser().parsestr(metadata.read_text("utf-8"))
    assert (written["Name"], written["Author"]) == (DISTRIBUTION, "phasor contributors")
    assert outside_links(written.get_payload()) == []


@pytest.mark.slow
def test_a_wheel_without_the_kernel_that_was_wanted_is_for_every_system(
    tree: Path, tmp_path: Path
) -> None:
    """A compiler that fails leaves no name under which pip would keep it for this system."""
    build(tree, "--wheel", "--outdir", str(tmp_path), CC="/bin/false", CXX="/bin/false")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")


def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py tells setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    runpy.run_path("setup.py")
    return given


@pytest.mark.parametrize("without_gil", [False, True])
def test_a_python_without_a_gil_is_not_asked_for_the_stable_interface(
    without_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none, and setuptools refuses to name a wheel for it: see its switches."""
    monkeypatch.delenv("PHASOR_NO_KERNEL", raising=False)
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", int(without_gil))
    given = told(monkeypatch)
    (extension,) = given["ext_modules"]
    assert extension.py_limited_api is not without_gil
    assert bool(extension.define_macros) is not without_gil
    wheel = bdist_wheel.bdist_wheel(Distribution({"name": "phasor", **given}))
    for name, value in given["options"].get("bdist_wheel", {}).items():
        setattr(wheel, name, value)
    wheel.finalize_options()
    assert (wheel.py_limited_api == "cp311") is not without_gil


@pytest.mark.parametrize("windows", [False, True])
def test_where_the_kernel_cannot_be_the_build_says_so_and_the_wheel_is_for_every_system(
    windows: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On Windows, and by PHASOR_NO_KERNEL."""
    if windows:
        monkeypatch.setattr(sys, "platform", "win32")
    else:
        monkeypatch.setenv("PHASOR_NO_KERNEL", "1")
    given = told(monkeypatch)
    assert (given["ext_modules"], given["options"]) == ([], {})
    assert "without its CPU kernel" in capsys.readouterr().err


@pytest.fixture
def index_readme(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], str]:
    """The function of setup.py."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path("setup.py")["index_readme"]


def outside_links(text: str) -> list[str]:
    """Targets of a page's links and pictures that are no addresses."""
    code = re.compile(r"^```.*?^```$", re.M | re.S)
    targets = re.findall(r"\]\(([^)]*)\)|^\[[^]]+\]:\s*(\S+)", code.sub("", text), re.M)
    return [one for pair in targets for one in pair if one and not one.startswith("https://")]


def test_on_an_index_no_link_of_the_readme_is_broken(
    index_readme: Callable[[str, str | None], str],
) -> None:
    """Without an address there is none; with one, each leads to a page or a picture of the site."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert outside_links(readme)
    assert outside_links(index_readme(readme, None)) == []
    linked = index_readme(readme, SITE)
    assert outside_links(linked) == []
    places = re.findall(rf"\]\({SITE}/([^)#]*)", linked)
    assert len(places) == len(re.findall(r"\]\(docs/", readme))
    for place in places:
        pages = [f"{place}index.md", re.sub(r"/$", ".md", place)]
        assert any((ROOT / "docs" / page).is_file() for page in pages), place


@pytest.mark.parametrize(
    ("written", "without", "at_site"),
    [
        ("a [`b`](docs/c.md) d", "a `b` d", f"a [`b`]({SITE}/c/) d"),
        ("[b](docs/index.md#c)", "b", f"[b]({SITE}/#c)"),
        ("[b](docs/api/index.md)", "b", f"[b]({SITE}/api/)"),
        ("![b](docs/images/c.png)", "", f"![b]({SITE}/images/c.png)"),
        ("[b](CONTRIBUTING.md)", "b", "b"),
        ("[b](https://c.example/d)", "[b](https://c.example/d)", "[b](https://c.example/d)"),
        ("`x[0](y)` [b](docs/c.md)", "`x[0](y)` b", f"`x[0](y)` [b]({SITE}/c/)"),
        ("```py\nx[0](y)\n```\n", "```py\nx[0](y)\n```\n", "```py\nx[0](y)\n```\n"),
    ],
)
def test_a_link_of_the_readme_on_an_index(
    written: str, without: str, at_site: str, index_readme: Callable[[str, str | None], str]
) -> None:
    """Its text, or an address of the site; code stays as it is."""
    assert index_readme(written, None) == without
    assert index_readme(written, SITE) == at_site


def test_every_hint_to_install_names_this_distribution() -> None:
    """In src by the one constant; in the README and the documentation as it is, or a checkout."""
    assert PROJECT["name"] == DISTRIBUTION
    extras = set(PROJECT["optional-dependencies"])
    code = {path: path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py"))}
    by_hand = [str(path) for path, text in code.items() if re.search(r"phasor(-rope)?\[\w", text)]
    assert by_hand == [str(ROOT / "src/phasor/errors.py")]
    called = set(re.findall(r"install_hint\(['\"](\w+)['\"]\)", "".join(code.values())))
    assert {"torch", "gguf"} <= called <= extras
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pages:
        text = path.read_text("utf-8")
        for name, which in re.findall(r"pip install .*?'?([\w.-]+)\[([^]]*)\]", text):
            assert name in (DISTRIBUTION, "."), path
            assert set(which.split(",")) <= extras, path
        assert not re.search(r"pip install '?phasor['\[ ]", text), path


def test_the_citation_is_of_this_version() -> None:
    """With the authors that the metadata names."""
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert re.findall(r"^  - name: \"(.*)\"$", citation, re.M) == [
        author["name"] for author in PROJECT["authors"]
    ]


def test_the_changelog_has_the_usual_form() -> None:
    """Keep a Changelog's: versions with dates, and its six kinds of changes."""
    headings = re.findall(r"^##+ .*$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    form = (
        r"## \[Unreleased\]|## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d"
        r"|### (Added|Changed|Deprecated|Removed|Fixed|Security)"
    )
    assert [one for one in headings if not re.fullmatch(form, one)] == []
    assert headings[0] == "## [Unreleased]"
