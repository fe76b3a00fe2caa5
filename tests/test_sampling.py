"""A sample of cases shows every value, and CI and the weekly run share all tests out."""

from __future__ import annotations

import re
import tomllib
from itertools import combinations, product
from pathlib import Path

import pytest

from .sampling import sample

ROOT = Path(__file__).parents[1]
GRID = list(product(range(7), "abc", (True, False)))


@pytest.mark.parametrize("size", [7, 21, 30])
def test_every_value_comes_before_any_comes_twice(size: int) -> None:
    """And every pair of values; each as often as the others, but for one time."""
    chosen = [GRID[index] for index in sample(GRID, size)]
    assert len(chosen) == size
    for values in zip(*chosen, strict=True):
        uses = [values.count(value) for value in set(values)]
        assert max(uses) - min(uses) <= 1
    for place, values in enumerate(zip(*GRID, strict=True)):
        assert {case[place] for case in chosen} == set(values)
    if size >= 21:
        assert len({(number, letter) for number, letter, _ in chosen}) == 21


def test_a_single_parameter_is_sampled_from_end_to_end() -> None:
    """Not its first values."""
    chosen = sorted(sample([(value,) for value in range(100)], 5))
    gaps = [after - before for before, after in zip([0, *chosen], [*chosen, 99], strict=True)]
    assert max(gaps) <= 40


def test_equal_values_of_two_types_are_two() -> None:
    """1 and True."""
    assert sample([(1,), (True,), (1,)], 2) == {0, 1}


def test_a_sample_of_more_than_all_is_all() -> None:
    """And of none is none."""
    assert sample(GRID, 1000) == set(range(len(GRID)))
    assert sample([], 3) == set()


def test_every_test_is_run_by_ci_or_every_week() -> None:
    """Whatever its kinds: `make check` runs it, or a target that the weekly workflow calls."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text("utf-8")
    run = r'^{}:.*\n(?:[\t#].*\n)*?\t\$\(PYTEST\) -m "?([a-z_ ]+)'
    targets = ["check", *re.findall(r"run: make (test\S*)", weekly)]
    found = [re.search(run.format(target), makefile, re.M) for target in targets]
    expressions = [one[1].removesuffix(" tests") for one in found if one is not None]
    assert len(expressions) >= 3
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    kinds = [marker.partition(":")[0] for marker in markers]
    assert kinds[0] == "slow"  # which every other is too
    for count in range(len(kinds)):
        for some in combinations(kinds[1:], count):
            marked = {kind: kind in some for kind in kinds} | {"slow": bool(some)}
            assert any(eval(one, {}, marked) for one in expressions), some
