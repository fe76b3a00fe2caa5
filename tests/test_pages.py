"""What the pages list is all there is: commands, extras, modules of the reference, findings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import numpy as np

from phasor import Rope
from phasor.cli import COMMANDS, main
from phasor.papers import angle_errors

ROOT = Path(__file__).parent.parent


def page(path: str) -> str:
    """A page's text."""
    return (ROOT / path).read_text("utf-8")


def command(name: str) -> click.Command:
    """A command of `phasor`."""
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


def test_every_command_is_on_its_page() -> None:
    """As it is typed, with a yes where it speaks JSON."""
    rows = re.findall(r"^\| `phasor (\w+).*\|(.*)\|$", page("docs/command-line.md"), re.M)
    speaks_json = {
        name: any("--json" in option.opts for option in command(name).params) for name in COMMANDS
    }
    assert {name: cell.strip() == "yes" for name, cell in rows} == speaks_json


def test_the_readme_is_as_precise_as_it_says() -> None:
    """The usual float32 angle where Llama 3.1's context ends, for the base of the picture."""
    rope = Rope(head_dim=128, pairing="half", base=10_000.0)
    worst = angle_errors(rope, 131_072 + np.arange(1024), "float32 angle").max()
    assert f"{worst:.0e}".replace("e-0", "e-") + " at 131 072 tokens" in page("README.md")


def test_every_extra_is_on_the_first_page_and_in_the_reference() -> None:
    """With what needs it."""
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.findall(r"^pip install '\.\[(\w+)\]'", page("docs/index.md"), re.M)) == set(
        extras
    )
    assert set(re.findall(r"^\| `(\w+)` \|", page("docs/api/index.md"), re.M)) == set(extras)


def test_the_reference_names_the_modules_of_its_pages() -> None:
    """Row by row; `phasor` itself is named by its members."""
    for row in re.findall(r"^\| \[.*$", page("docs/api/index.md"), re.M):
        _, link, modules, _, _ = row.split("|")
        there = re.findall(r"^::: (\S+)", page(f"docs/api/{link.split('(')[1].strip(' )')}"), re.M)
        named = re.findall(r"`(\S+)`", modules)
        assert there == named, link


def test_every_finding_is_explained() -> None:
    """By its name, or with others that say the same of another dtype."""
    code = "".join(
        one.read_text("utf-8") for one in sorted((ROOT / "src/phasor/identification").glob("*.py"))
    )
    names = set(re.findall(r'(?:Finding|_of_mistake)\(\s*"([a-z]+(?:-[a-z0-9]+)*)"', code))
    assert {"samples-part", "remembers"} <= names
    rows = "".join(re.findall(r"^\| `.*$", page("docs/identify.md"), re.M))
    either = {name: (f"`{name}`", f"`{name.split('-in-')[0]}-in-…`") for name in sorted(names)}
    assert [name for name, forms in either.items() if not any(one in rows for one in forms)] == []
