"""The page of the papers' equations: its functions exist, and what it prints is printed by code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import phasor
from phasor.papers import abel_bound

PAGE = (Path(__file__).parent.parent / "docs" / "seeds.md").read_text("utf-8")
LINKED = sorted(set(re.findall(r"\]\[(phasor\.[\w.]+)\]", PAGE)))
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| Equation")
]
# a number with its sign and exponent, not a part of a word
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def find(name: str) -> object:
    """What is imported by a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)


def printed(text: str) -> set[float]:
    """Numbers in the output of the examples in ``text``."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(>>>|\.\.\.)", line)]
    return {float(number) for line in lines for number in NUMBER.findall(line)}


@pytest.mark.parametrize("name", LINKED)
def test_every_linked_function_is_there(name: str) -> None:
    """As it is imported."""
    assert callable(find(name)) or isinstance(find(name), property)


def test_what_a_text_says_itself_is_no_erratum() -> None:
    """RoFormer sets h_{d/2} = 0 before eq. 36: with it the bound holds, and is not 0 for ones."""
    (row,) = [row for row in ROWS if row[0] == "36, 37"]
    assert "Incomplete" not in row[1]
    assert "h_{d/2} = 0" in row[1]
    rope = phasor.Rope(head_dim=8, pairing="interleaved")
    h = np.append(np.full(4, 2.0 + 0j), 0)  # q k* of four pairs of ones, and the one that is set
    sums = np.cumsum(np.exp(1j * 3 * 10_000.0 ** (-np.arange(4) / 4)))
    bound = np.abs(np.diff(h)).max() * np.abs(sums).sum()
    assert abel_bound(np.ones(8), np.ones(8), 3, rope) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("slip", ["lacks the power", "the difference of their positions",
                                  "takes them for positions"])  # fmt: skip
def test_every_slip_of_the_texts_is_listed(slip: str) -> None:
    """Once, in a row that says what holds."""
    (row,) = [row for row in ROWS if slip in row[1]]
    assert re.search(r"\*(Wrong|Loose):\*", row[1])


def test_every_row_has_a_function_or_a_page() -> None:
    """No cell but that of the number is empty."""
    assert len(ROWS) > 60
    assert [row[0] for row in ROWS if len(row) != 4 or not all(row[:3])] == []


def test_every_number_is_printed_by_an_example() -> None:
    """By a block of the page, or in the documentation of the row's functions."""
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S))
    missing: list[tuple[str, str]] = []
    for equation, _, functions, number in ROWS:
        shown = printed(blocks)
        for name in re.findall(r"\]\[(phasor\.[\w.]+)\]", functions):
            _, _, examples = (find(name).__doc__ or "").partition(">>>")
            shown |= printed(">>>" + examples)
        missing += [(equation, one) for one in NUMBER.findall(number) if float(one) not in shown]
    assert missing == []
