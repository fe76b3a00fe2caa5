"""The page that goes through five documents names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "seeds.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`((?:\w+/)*test_\w+)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("module", "name"), NAMED, ids="::".join)
def test_every_test_that_is_named_is_there(module: str, name: str) -> None:
    """A row without its test would be a claim."""
    source = (TESTS / f"{module}.py").read_text("utf-8")
    assert re.search(rf"^def {name}\(", source, re.M)


def test_every_row_says_where_it_is_and_what_shows_it() -> None:
    """No cell of the wide tables is empty."""
    tables = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in cells] for cells in tables if len(cells) == 4]
    assert len(rows) > 80
    assert [cells[0] for cells in rows if not all(cells)] == []
