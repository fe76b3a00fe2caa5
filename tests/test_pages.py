"""What the pages list is all there is: commands, extras, modules of the reference, findings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
from tools.doc_tables import fill
from tools.site_check import not_plain

from phasor import Rope
from phasor.cli import COMMANDS, main
from phasor.identification.report import NAMES, SENTENCES
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


@pytest.mark.parametrize("name", ["laws.md", "api/index.md", "api/scaling.md"])
def test_the_tables_of_laws_are_what_their_tool_writes(name: str) -> None:
    """``python -m tools.doc_tables --write`` makes them of the registry."""
    assert fill(name) == page(f"docs/{name}")


def test_the_table_of_defects_is_what_its_tool_writes() -> None:
    """``python -m tools.doc_tables --write verify-defects.md`` makes it of the published ones."""
    assert fill("verify-defects.md") == page("docs/verify-defects.md")


@pytest.mark.slow
def test_the_table_of_translations_is_what_its_tool_writes() -> None:
    """``python -m tools.doc_tables --write`` makes it; date and versions may be older."""
    assert fill("translate.md", "targets", "map") == page("docs/translate.md")


def test_both_first_screens_open_alike() -> None:
    """With one picture, and then the same ten lines."""
    readme, index = page("README.md"), page("docs/index.md")
    for part in (r"!\[[^]]*\]\((?:docs/)?(images/[\w.-]+)\)", r"^```python\n(.*?)^```"):
        found = [re.search(part, text, re.M | re.S) for text in (readme, index)]
        assert found[0] is not None
        assert found[1] is not None
        assert found[0][1] == found[1][1]


def test_code_is_as_wide_as_a_page() -> None:
    """No line of a block is longer than 79 characters, or 80 of what a terminal printed."""
    wide: list[tuple[str, str]] = []
    for one in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        blocks = re.findall(r"^```(\w*).*?\n(.*?)^```", one.read_text("utf-8"), re.M | re.S)
        for language, block in blocks:
            most = 80 if language == "console" else 79
            wide += [(one.name, line) for line in block.splitlines() if len(line) > most]
    assert wide == []


def test_pages_and_messages_are_plain_english() -> None:
    """No file of the library, no page and no line of the changelog has a word of the list."""
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    texts += [one for one in (ROOT / "src").rglob("*") if one.suffix in (".py", ".toml")]
    found = {str(one.relative_to(ROOT)): not_plain(one.read_text("utf-8")) for one in texts}
    assert {name: words for name, words in found.items() if words} == {}


def test_every_extra_is_on_the_first_page_and_in_the_reference() -> None:
    """With what needs it."""
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    assert set(re.findall(r"^pip install '\.\[(\w+)\]'", page("docs/index.md"), re.M)) == set(
        extras
    )
    assert set(re.findall(r"^\| `(\w+)` \|", page("docs/api/index.md"), re.M)) == set(extras)


def test_the_reference_lists_what_its_pages_show() -> None:
    """Section by section: a page shows the members that it names, or one object."""
    sections = re.split(r"^## ", page("docs/api/index.md"), flags=re.M)[1:]
    for section in sections:
        heading, _, rows = section.partition("\n")
        link = re.search(r"\((\w+\.md)\)", heading)
        if link is None:
            continue
        shown: set[str] = set()
        for block in page(f"docs/api/{link[1]}").split("::: ")[1:]:
            module = block.split("\n")[0]
            members = re.search(r"members: \[(.*)\]", block)
            more = re.search(r'"\^\(?([\w|]+)\)?\$"\]', block)  # what filters let through
            names = members[1].split(", ") if members else []
            shown |= {f"{module}.{name}" for name in names}
            if not members or module == "phasor.LayerRopes":
                shown.add(module)
            if more and not members:
                shown |= {f"{module}.{name}" for name in more[1].split("|")}
        listed = re.findall(r"\]\[(phasor[\w.]+)\]", rows)
        methods = {name for name in listed if name.rpartition(".")[0] in listed}
        assert len(listed) == len(set(listed))
        assert set(listed) - methods == shown - methods, heading


def test_every_finding_has_a_name_that_the_page_lists() -> None:
    """One vocabulary: each name has one sentence, stands once, and no other is made."""
    room = ROOT / "src/phasor/identification"
    name = r'(?:inding|_replaced)\(\s*f?"([a-z]+(?:-[a-z0-9]+)*(?:-{.*?})?)"'
    made = {one for file in room.glob("*.py") for one in re.findall(name, file.read_text("utf-8"))}
    listed = [name for names in NAMES.values() for name in names]
    dtypes = {name for name in SENTENCES if name.endswith("-in-float32")}
    assert len(set(listed)) == len(listed)
    assert SENTENCES.keys() - dtypes == set(listed)
    assert made <= SENTENCES.keys()


def test_every_file_that_a_page_names_is_there() -> None:
    """Tests, tools and benchmarks that a reader is told to run."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        name
        for one in pages
        for name in re.findall(r"\b(?:tests|bench|tools|examples)/[\w/]+\.py\b", one.read_text())
    }
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
