"""Critical dimensions and bases, and interpolation bounds: the papers' numbers, and theirs."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope, SpecError, TensorError
from phasor.axes import Axial
from phasor.numpy import score
from phasor.papers import critical_base, critical_dimension, feasible_bases, interpolation_bound
from phasor.scaling import DynamicNTK

from .. import oracle, strategies
from ..oracle import cosines
from ..ropes import METHOD_2, head

ONES = np.ones(128)


def interpolation_error(q: np.ndarray, k: np.ndarray, distance: float, rope: Rope) -> float:
    """How far the score is from the line through those at the whole distances around it."""
    low = math.floor(distance)
    at_low, between, at_high = score(q, k, [low, distance, low + 1], rope)
    return abs(between - at_low - (distance - low) * (at_high - at_low))


# from Liu et al. 2310.05209 and LongRoPE2 2502.20082
@pytest.mark.parametrize(
    ("width", "base", "context", "expected"),
    [(128, 1e4, 4096, 92), (128, 1e4, 2048, 82), (96, 1e4, 2048, 62), (128, 5e5, 8192, 70)],
    ids=["Llama 2", "half of it", "Phi 3 mini", "Llama 3"],
)
def test_critical_dimensions_are_the_published_ones(
    width: int, base: float, context: int, expected: int
) -> None:
    """And they are the formula that was published: 31 and 35 are halves of the last two."""
    assert critical_dimension(head(width, base), context) == expected
    assert expected == 2 * math.ceil(width / 2 * math.log(context / (2 * math.pi), base))


@pytest.mark.parametrize(("width", "slow"), [(64, 2), (128, 4)])
def test_two_pairs_of_64_are_slower_than_32000_tokens(width: int, slow: int) -> None:
    """Where a paper on dropping positions (DroPE) counts at least five at width 64."""
    assert width // 2 - critical_dimension(head(width), 32_000) // 2 == slow


@given(strategies.resolved_ropes(), st.integers(1, 2**30))
def test_a_critical_dimension_counts_pairs_that_come_round(rope: Rope, context: int) -> None:
    """For any law, layout and frequencies."""
    round_trips = [f for f in oracle.frequencies(rope) if f * context > 2 * mpmath.pi]
    assert critical_dimension(rope, context) == 2 * len(round_trips)


def test_the_critical_base_of_llama_2_is_the_published_one() -> None:
    """71738 for tuning at 16384 tokens, where as many pairs come round as in training."""
    assert round(critical_base(1e4, 4096, 16_384)) == 71_738
    tuned = head(base=critical_base(1e4, 4096, 16_384))
    assert critical_dimension(tuned, 16_384) == critical_dimension(head(), 4096)


@pytest.mark.parametrize(
    ("width", "correct"), [(128, 256.108), (64, 224.08), (256, 274.5)], ids=["128", "64", "256"]
)
def test_interpolation_constants_are_the_known_ones(width: int, correct: float) -> None:
    """The width over 256.108 at 128 where 294.73 is printed for every width."""
    ones = np.ones(width)
    halfway = 2 * width / interpolation_bound(ones, ones, 17.5, head(width))  # products are 2
    assert halfway == pytest.approx(correct, rel=2e-4)


def test_the_bound_follows_the_place_between_whole_distances() -> None:
    """0 at whole ones, w (1 - w) between them, below 0 as well."""
    assert interpolation_bound(ONES, ONES, [-3, 0, 7], head()).tolist() == [0, 0, 0]
    half, *quarters = interpolation_bound(ONES, ONES, [0.5, 0.25, -0.25, 0.75], head())
    np.testing.assert_allclose(quarters, 0.75 * half, rtol=1e-15)


def test_the_sum_of_squares_is_a_geometric_series() -> None:
    """3.99831, where the printed bound has 3.47436."""
    correct = 4 * interpolation_bound(ONES, ONES, 0.5, head())
    assert f"{correct:.5f} {128 / (4 * math.log(1e4)):.5f}" == "3.99831 3.47436"
    series = (1 - 1e4**-2.0) / (1 - 1e4 ** (-4 / 128))
    assert correct == pytest.approx(series, rel=1e-13)


def test_the_printed_bound_is_broken() -> None:
    """By ones of width 128 half way between 0 and 1: 1.0575 times."""
    error = interpolation_error(ONES, ONES, 0.5, head())
    line = (cosines(head(), 0) + cosines(head(), 1)) / 2
    exact = float(mpmath.fsum(oracle.cos_sin(head(), 0.5)[0]))
    assert float(error) == pytest.approx(2 * (exact - line), rel=1e-13)
    assert f"{error / (2 * 128 / (8 * math.log(1e4)) / 4):.4f}" == "1.0575"
    assert error <= interpolation_bound(ONES, ONES, 0.5, head())


@given(
    strategies.resolved_ropes().filter(lambda rope: rope.axes.n_axes == 1),
    st.floats(-5000, 5000),
    st.integers(0, 2**32),
)
def test_the_correct_bound_is_never_broken(rope: Rope, distance: float, seed: int) -> None:
    """Any rope and Gaussian vectors; a float64 angle below 5000 * 8 is good to 1e-11."""
    q, k = np.random.default_rng(seed).standard_normal((2, rope.head_dim))
    bound = interpolation_bound(q, k, distance, rope)
    rounding = 1e-10 * np.linalg.norm(q) * np.linalg.norm(k)
    assert interpolation_error(q, k, distance, rope) <= bound + rounding


def test_the_correct_bound_is_nearly_reached() -> None:
    """Ones from 0 on use 92 % of it, so no constant much better can be right."""
    share = interpolation_error(ONES, ONES, 0.5, head()) / interpolation_bound(
        ONES, ONES, 0.5, head()
    )
    assert 0.91 < share < 0.93


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: critical_dimension(head(), 0), SpecError, "context must be a finite number > 0"),
        (
            lambda: critical_dimension(
                head(scaling=DynamicNTK(factor=2.0, original_max_positions=4096)), 4096
            ),
            SpecError,
            r"rope\.at\(seq_len\)",
        ),
        (lambda: critical_base(1e4, 6, 100), SpecError, "context must be a finite number > 6.28"),
        (lambda: critical_base(1e4, 100, 6), SpecError, "tuned_context must be"),
        (lambda: feasible_bases(head(), 1.5, [2.0]), SpecError, "context must be a whole number"),
        (lambda: feasible_bases(head(), 10, [3.0, 2.0]), SpecError, "bases must ascend"),
        (lambda: feasible_bases(head(), 10, [1.0]), SpecError, r"bases\[0\] must be"),
        (
            lambda: feasible_bases(head(base=None, explicit_inv_freq=METHOD_2), 10, [2.0]),
            SpecError,
            "rope must have a base",
        ),
        (
            lambda: interpolation_bound(ONES, ONES, 1, head(axes=Axial((32, 32)))),
            SpecError,
            "rope must have one axis",
        ),
        (lambda: interpolation_bound([1.0], ONES, 1, head()), TensorError, "q must end in"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(call: Any, error: type, message: str) -> None:
    """With the argument and the way out in the message."""
    with pytest.raises(error, match=message):
        call()
