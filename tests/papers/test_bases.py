"""Distances where cosines sum to less than 0, and bases without any: tables, real numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from phasor import Rope
from phasor.extending.cosines import find_first_negative
from phasor.papers import cosine, feasible_bases
from phasor.scaling import Linear

from .. import strategies
from ..oracle import cosines
from ..ropes import METHOD_2, head


def negative_distances(rope: Rope, context: int) -> np.ndarray:
    """Distances where a key like the query is expected to score less than any other."""
    return np.flatnonzero(cosine(rope, np.arange(context + 1), "aligned") < 0)


def passes_at(base: float, context: int) -> bool:
    """Whether a base alone is feasible."""
    return feasible_bases(head(), context, [base]).size > 0


def grid(low: float, high: float, step: float) -> np.ndarray:
    """Bases from ``low`` to ``high`` in steps of ``step`` of themselves."""
    return np.geomspace(low, high, 2 + int(math.log(high / low) / step))


@pytest.mark.parametrize(
    ("width", "base", "first"),
    [
        (128, 1e2, 59),
        (128, 5e2, 171),
        (128, 1e3, 361),
        (128, 1e4, 1707),
        (128, 1e5, 7757),
        (128, 5e5, 18_438),
        (128, 1e6, 27_115),
        (128, 5e6, 82_999),
        (64, 1e4, 725),
        (256, 1e4, 2653),
    ],
    ids=lambda value: f"{value:g}",
)
def test_the_first_negative_distance_is_the_known_one(width: int, base: float, first: int) -> None:
    """C(r) < 0 there, and not one before, by real numbers."""
    rope = head(width, base)
    assert (find_first_negative(rope, first), find_first_negative(rope, first + 1)) == (None, first)
    assert cosines(rope, first) < 0 <= cosines(rope, first - 1)


@pytest.mark.parametrize(
    ("rope", "context", "count"),
    [
        (head(base=5e6), 15, 0),
        (head(base=5e6), 30, 0),
        (head(base=None, explicit_inv_freq=METHOD_2), 15, 97),
        (head(base=None, explicit_inv_freq=METHOD_2), 30, 2554),
    ],
    ids=["1 at 15k", "1 at 30k", "2 at 15k", "2 at 30k"],
)
def test_table_4_counts_negative_cosines(rope: Rope, context: int, count: int) -> None:
    """97 and 2554 for the second method of Men et al.; its header says the opposite sign."""
    assert len(negative_distances(rope, context * 1024)) == count


@given(strategies.resolved_ropes().filter(lambda rope: rope.axes.n_axes == 1))
def test_the_first_negative_distance_is_that_of_a_negative_trace(rope: Rope) -> None:
    """By real numbers, coordinates that stay counted; nearly zero may go either way."""
    still = (rope.head_dim - rope.rotary_dim) / 2
    found = find_first_negative(rope, 26, still)
    for r in range(26 if found is None else found):
        assert cosines(rope, r) + still > -1e-12
    if found is not None:
        assert cosines(rope, found) + still < 1e-12


@pytest.mark.parametrize("first", [1, 1024, 65_535, 65_536, 65_537, 200_000])
def test_a_first_negative_distance_may_stand_anywhere_in_a_scan(first: int) -> None:
    """A quarter turn by half a token before it: also where a block of the scan begins."""
    rope = head(2, None, explicit_inv_freq=(math.pi / 2 / (first - 0.5),))
    assert find_first_negative(rope, 1 << 20) == first
    assert find_first_negative(rope, first) is None


def test_the_last_distance_of_a_context_is_the_context_itself() -> None:
    """Base 1e4 fails at 1707 for the first time."""
    assert passes_at(1e4, 1706)
    assert not passes_at(1e4, 1707)


def test_a_head_rotated_by_half_has_no_negative_distance() -> None:
    """1 + cos is never negative, so base and context are free (Su, spaces.ac.cn 10122)."""
    assert feasible_bases(head(64, rotary_dim=32), 20_000, [2.0]).tolist() == [[2.0, 2.0]]
    assert feasible_bases(head(64, rotary_dim=40), 20_000, [2.0]).size == 0


@pytest.mark.parametrize(
    ("tokens", "least"),
    [
        (1, 4294),
        pytest.param(4, 26_950, marks=pytest.mark.slow),
        pytest.param(64, 2.0914e6, marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{value:g}",
)
def test_least_bases_are_the_known_ones(tokens: int, least: float) -> None:
    """To 0.2 %, with nothing feasible from 2 % below; in agreement with Su's finer search."""
    found = feasible_bases(head(), tokens * 1024, grid(0.98 * least, 1.005 * least, 4e-4))
    assert found[0, 0] == pytest.approx(least, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "low", "least"), [(1, 2000, 4294), (4, 11_000, 26_950)])
def test_nothing_feasible_is_far_below_the_least_base(
    tokens: int, low: float, least: float
) -> None:
    """On a grid of 0.5 % from a base that is feasible for half the context."""
    assert feasible_bases(head(), tokens * 1024, grid(low, 0.98 * least, 5e-3)).size == 0


def test_the_first_kilotoken_is_1024() -> None:
    """At 1000 tokens the least base is 4206, which is not the 4.3e3 of table 2."""
    found = feasible_bases(head(), 1000, grid(4150, 4250, 1e-3))
    assert found[0, 0] == pytest.approx(4206, rel=1e-3)


@pytest.mark.slow
def test_feasible_bases_are_no_interval() -> None:
    """At 1024 tokens there are three stretches on this grid, and the last starts at 6.02e3."""
    found = feasible_bases(head(), 1024, grid(4200, 8000, 4e-3))
    assert len(found) >= 3
    assert found[-1, 1] == 8000
    assert found[-1, 0] == pytest.approx(6.03e3, rel=5e-3)
    for low, high in found.tolist():
        assert not negative_distances(head(base=low), 1024).size
        assert not negative_distances(head(base=high), 1024).size
        assert negative_distances(head(base=low * (1 - 3e-6)), 1024).size
    for _, high in found[:-1].tolist():
        assert negative_distances(head(base=high * (1 + 3e-6)), 1024).size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "safe", "most"),
    [(2, 2.28e4, 1e5), (16, 1.321e6, 2e6), (32, 3.192e6, 4e6)],
    ids=lambda value: f"{value:g}",
)
def test_safe_bases_are_the_known_ones(tokens: int, safe: float, most: float) -> None:
    """To 1 %, on a grid fine enough to see the last gap."""
    found = feasible_bases(head(), tokens * 1024, grid(0.9 * safe, most, 1.5e-3))
    assert found[-1, 1] == most
    assert found[-1, 0] == pytest.approx(safe, rel=1e-2)


@pytest.mark.parametrize(
    ("tokens", "base", "distance"),
    [(16, 1.3205e6, 16_333), (32, 2.786e6, 27_568)],
    ids=["16k", "32k"],
)
def test_a_coarse_grid_calls_bases_safe_that_are_not(
    tokens: int, base: float, distance: int
) -> None:
    """Steps of 1 % end at 1.26e6 and 1.98e6; real numbers say that these larger bases fail."""
    assert negative_distances(head(base=base), tokens * 1024).tolist() == [distance]
    assert find_first_negative(head(base=base), tokens * 1024 + 1) == distance
    assert cosines(head(base=base), distance) < -0.3


@pytest.mark.parametrize(
    ("tokens", "base", "passes"),
    [
        (64, 1.02 * 2.1e6, False),
        (64, 1.05 * 2.1e6, False),
        (128, 4.8722e6, True),
        # table 2 of Men et al.
        (1, 4.3e3, True),
        (2, 1.6e4, True),
        (4, 2.7e4, False),
        (8, 8.4e4, True),
        (16, 3.1e5, False),
        (32, 6.4e5, False),
        (64, 2.1e6, True),
        (128, 7.8e6, False),
        (256, 3.6e7, False),
        (512, 6.4e7, False),
        (1024, 5.1e8, False),
        # Su's finer search, where it has another number
        (2, 1.2e4, False),
        (16, 2.3e5, False),
        (32, 6.3e5, True),
        (128, 4.9e6, False),
        (256, 2.4e7, False),
        (512, 5.8e7, False),
        (1024, 6.5e7, False),
    ],
    ids=lambda value: f"{value:g}",
)
def test_two_digits_of_a_base_are_too_few(tokens: int, base: float, passes: bool) -> None:
    """Published lower bounds fail as printed, and larger bases than a feasible one fail."""
    assert passes_at(base, tokens * 1024) == passes


@pytest.mark.parametrize(("tokens", "passes"), [(2**n, n == 3) for n in range(7)])
def test_the_printed_fit_gives_bases_that_fail(tokens: int, passes: bool) -> None:
    """``0.0424 x**1.628`` passes at 8192 tokens, and at no other of the first seven lengths."""
    assert passes_at(0.0424 * (1024 * tokens) ** 1.628, 1024 * tokens) == passes


def test_llama_3_stands_just_above_the_safe_base() -> None:
    """5e5 at 8192 tokens: six times the least feasible base, and 1.27 times the safe one."""
    assert passes_at(5e5, 8192)
    assert f"{5e5 / 83_770:.1f} {5e5 / 3.95e5:.2f}" == "6.0 1.27"


@pytest.mark.parametrize(
    ("base", "passes"),
    [(0.99e5, True), (1e5, False), (1.005e5, True), (1.01e5, False), (1.02e5, True)],
    ids=lambda value: f"{value:g}",
)
def test_the_third_digit_of_a_base_decides(base: float, passes: bool) -> None:
    """Around 1e5 at 8192 tokens, half a percent turns yes into no and back."""
    assert passes_at(base, 8192) == passes


def test_a_law_stays_while_the_base_is_swept() -> None:
    """Frequencies divided by 4 bear four times the context, with distances four times finer."""
    bases = grid(4250, 4350, 4e-3)
    slower = feasible_bases(head(scaling=Linear(factor=4.0)), 4096, bases)
    assert slower[0, 0] >= feasible_bases(head(), 1024, bases)[0, 0] * (1 - 1e-6)
