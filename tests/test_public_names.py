"""What is public stands in one list, docs/api/index.md; what is not listed is private."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from tools.public_names import FILE, ROOT, listed, text

import phasor
from phasor import torch

# it says how an angle is made, from the constants that make it
EXPLAIN_WHAT_IS_PRIVATE = {"docs/precision.md"}


def test_the_signatures_are_those_of_the_file() -> None:
    """A change is meant, and is seen in a review."""
    assert FILE.read_text("utf-8") == text(), "`python -m tools.public_names` writes the file"


@pytest.mark.parametrize("package", [phasor, torch])
def test_what_a_package_exports_is_listed(package: ModuleType) -> None:
    """The errors stand on a page that one of them leads to."""
    exported: list[str] = package.__all__
    errors = ("Error", "Warning")
    names = {f"{package.__name__}.{one}" for one in exported if not one.endswith(errors)}
    assert names - set(listed()) == set()


def imported(page: Path) -> set[str]:
    """The names of phasor that the code of a page imports."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    code = re.sub(r"^(>>>|\.\.\.) ", "", "\n".join(blocks), flags=re.M)
    return {
        f"{module}.{name}"
        for module, names in re.findall(r"from (phasor[\w.]*) import (\([^)]*\)|.*)", code)
        for name in re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", names))
    }


def test_pages_use_what_is_listed() -> None:
    """A reader who copies a block depends on nothing that may change."""
    names = set(listed())
    offered = {part for one in names for part in (one, one.rpartition(".")[0])}
    offered.add("phasor.torch.positions")  # the names of phasor.positions
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = {str(one.relative_to(ROOT)): imported(one) - offered for one in pages}
    private = {page: found for page, found in used.items() if found}
    assert sum(map(len, map(imported, pages))) > 100  # the pages are read
    assert private.keys() == EXPLAIN_WHAT_IS_PRIVATE, private
