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
from phasor.papers import (
    critical_base,
    critical_bases,
    critical_dimension,
    decay,
    extrapolation_limit,
    extrapolation_ratio,
    feasible_bases,
    interpolation_bound,
    interpolation_error,
    negative_distances,
    printed_interpolation_bound,
)
from phasor.scaling import DynamicNTK, Linear

from .. import oracle, strategies
from ..oracle import cosines
from ..ropes import METHOD_2, head

ONES = np.ones(128)


# from Liu et al. 2310.05209 and LongRoPE2 2502.20082
@pytest.mark.parametrize(
    ("width", "base", "context", "expected"),
    [
        (128, 1e4, 4096, 92),
        (128, 1e4, 2048, 82),
        (96, 1e4, 2048, 62),
        (128, 5e5, 8192, 70),
    ],
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


@pytest.mark.parametrize(
    ("base", "expected"),
    [(2e4, 7754), (4e4, 12762), (8e4, 21003), (5e5, 78400), (1e6, 129027)],
    ids=lambda value: f"{value:g}",
)
def test_extrapolation_limits_are_the_published_ones(base: float, expected: int) -> None:
    """Llama 2 tuned at 4096 tokens with other bases."""
    assert round(extrapolation_limit(head(), 4096, head(base=base))) == expected


def test_a_head_trained_all_the_way_round_has_no_limit() -> None:
    """Every pair of base 100 comes round within 4096 tokens."""
    assert critical_dimension(head(base=100.0), 4096) == 128
    assert extrapolation_limit(head(base=100.0), 4096, head()) == math.inf


def test_critical_bases_are_the_published_ones() -> None:
    """2608, 1304 and 652 at 4096 tokens, to the digits of the appendix."""
    assert [f"{base:.2f}" for base in critical_bases(4096)] == ["2607.59", "1303.80", "651.90"]


def test_the_exact_critical_bases_are_a_power_of_the_published_ones() -> None:
    """With it, the slowest of 64 pairs makes a quarter, a half and a whole turn."""
    for base, expected in zip(critical_bases(4096), (0.25, 0.5, 1), strict=True):
        slowest = oracle.frequencies(head(base=base ** (128 / 126)))[-1]
        assert float(4096 * slowest / (2 * mpmath.pi)) == pytest.approx(expected, rel=1e-12)


def test_the_critical_base_of_llama_2_is_the_published_one() -> None:
    """71738 for tuning at 16384 tokens, where as many pairs come round as in training."""
    assert round(critical_base(1e4, 4096, 16_384)) == 71_738
    tuned = head(base=critical_base(1e4, 4096, 16_384))
    assert critical_dimension(tuned, 16_384) == critical_dimension(head(), 4096)


@pytest.mark.parametrize(
    ("width", "correct"), [(128, 256.108), (64, 224.08), (256, 274.5)], ids=["128", "64", "256"]
)
def test_interpolation_constants_are_the_known_ones(width: int, correct: float) -> None:
    """The width over 294.73 as printed, at every width; over 256.108 at 128 where it holds."""
    ones = np.ones(width)
    halfway = [
        2 * width / bound(ones, ones, 17.5, head(width))  # products of ones are 2
        for bound in (printed_interpolation_bound, interpolation_bound)
    ]
    assert halfway[0] == pytest.approx(294.73, abs=5e-3)
    assert halfway[1] == pytest.approx(correct, rel=2e-4)


def test_the_sum_of_squares_is_a_geometric_series() -> None:
    """3.99831 where the printed bound has 3.47436: 1.1508 times."""
    printed, correct = (
        4 * bound(ONES, ONES, 0.5, head())
        for bound in (printed_interpolation_bound, interpolation_bound)
    )
    assert f"{correct:.5f} {printed:.5f} {correct / printed:.4f}" == "3.99831 3.47436 1.1508"
    series = (1 - 1e4**-2.0) / (1 - 1e4 ** (-4 / 128))
    assert correct == pytest.approx(series, rel=1e-13)


def test_the_printed_bound_is_broken() -> None:
    """By ones of width 128 half way between 0 and 1: 1.0575 times."""
    error = interpolation_error(ONES, ONES, 0.5, head())
    line = (cosines(head(), 0) + cosines(head(), 1)) / 2
    exact = float(mpmath.fsum(oracle.cos_sin(head(), 0.5)[0]))
    assert float(error) == pytest.approx(2 * (exact - line), rel=1e-13)
    assert f"{error / printed_interpolation_bound(ONES, ONES, 0.5, head()):.4f}" == "1.0575"
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


def test_a_whole_distance_is_not_interpolated() -> None:
    """Error and bounds are 0."""
    for what in (interpolation_error, interpolation_bound, printed_interpolation_bound):
        assert what(ONES, ONES, [-3, 0, 7], head()).tolist() == [0, 0, 0]


def test_600_times_is_571_and_309() -> None:
    """B(r) >= d holds up to 4860, where the least ratio is 571 and not 2 * 294.73."""
    assert round(2 * 128 * 2 / float(printed_interpolation_bound(ONES, ONES, 0.5, head()))) == 589
    ratio = extrapolation_ratio(head(), np.arange(65_537))
    share = decay(head(), np.arange(65_537)) / 2  # B(r) / d
    np.testing.assert_allclose(ratio, 2 * 256.108 * share, rtol=2e-6)
    assert int(ratio[:4097].min()) == 571
    assert round(ratio.min()) == 309
    assert f"{share[:4097].min():.4f}" == "1.1159"
    assert int((share < 1).argmax()) == 4861
    assert f"{share[4861]:.3f}" == "0.996"
    assert int(share.argmin()) == 61_061
    assert f"{share.min():.3f}" == "0.603"


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
        (lambda: extrapolation_limit(head(), 4096, head(64)), SpecError, "tuned must have as many"),
        (lambda: critical_bases(-1), SpecError, "context must be"),
        (lambda: critical_base(1e4, 6, 100), SpecError, "context must be a finite number > 6.28"),
        (lambda: critical_base(1e4, 100, 6), SpecError, "tuned_context must be"),
        (lambda: negative_distances(head(), 1.5), SpecError, "context must be a whole number"),
        (lambda: feasible_bases(head(), 10, [3.0, 2.0]), SpecError, "bases must ascend"),
        (lambda: feasible_bases(head(), 10, [1.0]), SpecError, r"bases\[0\] must be"),
        (
            lambda: feasible_bases(head(base=None, explicit_inv_freq=METHOD_2), 10, [2.0]),
            SpecError,
            "rope must have a base to be swept",
        ),
        (
            lambda: printed_interpolation_bound(ONES, ONES, 1, head(scaling=Linear(factor=2.0))),
            SpecError,
            "rope must have plain frequencies",
        ),
        (
            lambda: printed_interpolation_bound(
                ONES, ONES, 1, head(base=None, explicit_inv_freq=METHOD_2)
            ),
            SpecError,
            "got explicit inv_freq",
        ),
        (
            lambda: interpolation_error(ONES, ONES, 1, head(axes=Axial((32, 32)))),
            SpecError,
            "rope must have one axis",
        ),
        (lambda: interpolation_bound([1.0], ONES, 1, head()), TensorError, "q must be real"),
        (
            lambda: extrapolation_ratio(head(2, None, explicit_inv_freq=(0.0,)), 1),
            SpecError,
            "rope must have a pair that turns",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(call: Any, error: type, message: str) -> None:
    """With the argument and the way out in the message."""
    with pytest.raises(error, match=message):
        call()
