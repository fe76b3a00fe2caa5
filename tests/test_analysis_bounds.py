"""Critical dimensions, feasible bases and interpolation bounds: the papers' numbers, and theirs."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasor import Axial, DynamicNTK, Linear, Rope, SpecError, TensorError
from phasor.analysis import (
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
    phase_bounds,
    printed_interpolation_bound,
)

from . import oracle, strategies

ONES = np.ones(128)


def head(width: int = 128, base: float | None = 10_000.0, **fields: Any) -> Rope:
    """A plain head."""
    return Rope(head_dim=width, pairing="half", base=base, **fields)


def grid(low: float, high: float, step: float) -> np.ndarray:
    """Bases from ``low`` to ``high`` in steps of ``step`` of themselves."""
    return np.geomspace(low, high, 2 + int(math.log(high / low) / step))


def cosines(rope: Rope, distance: int) -> float:
    """C(r), from real numbers."""
    return float(mpmath.fsum(oracle.cos_sin(rope, distance)[0]))


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
@settings(deadline=None, max_examples=60)
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
    assert negative_distances(rope, first).tolist() == [first]
    assert cosines(rope, first) < 0 <= cosines(rope, first - 1)


METHOD_2 = tuple(
    1e4 ** (-k / 64) / 8 if k >= 44 else (1e4 * 8 ** (128 / 88)) ** (-k / 64) for k in range(64)
)


@pytest.mark.parametrize(
    ("rope", "context", "count"),
    [
        (head(base=5e6), 15, 0),
        (head(base=5e6), 30, 0),
        (head(base=None, inv_freq=METHOD_2), 15, 97),
        (head(base=None, inv_freq=METHOD_2), 30, 2554),
    ],
    ids=["1 at 15k", "1 at 30k", "2 at 15k", "2 at 30k"],
)
def test_table_4_counts_negative_cosines(rope: Rope, context: int, count: int) -> None:
    """97 and 2554 for the second method of Men et al.; its header says the opposite sign."""
    assert len(negative_distances(rope, context * 1024)) == count


@given(strategies.resolved_ropes().filter(lambda rope: rope.axes.n_axes == 1))
@settings(deadline=None, max_examples=30)
def test_negative_distances_are_those_with_a_negative_trace(rope: Rope) -> None:
    """By real numbers, coordinates that stay counted; nearly zero may go either way."""
    found = set(negative_distances(rope, 25).tolist())
    for r in range(26):
        half_trace = cosines(rope, r) + (rope.head_dim - rope.rotary_dim) / 2
        if abs(half_trace) > 1e-12:
            assert (half_trace < 0) == (r in found)


def test_distances_beyond_one_block_are_counted_on() -> None:
    """A scan to 200000 continues as one to 70000 begins, and each distance stands once."""
    longer, shorter = (negative_distances(head(), end) for end in (200_000, 70_000))
    np.testing.assert_array_equal(longer[longer <= 70_000], shorter)
    assert (np.diff(longer) > 0).all()
    assert longer[-1] > 2 * 65_536
    assert cosines(head(), int(longer[-1])) < 0


def test_the_last_distance_is_the_context_itself() -> None:
    """Where a block of the scan begins with it too: half a turn by 65536, none by 0."""
    rope = head(2, None, inv_freq=(math.pi / 65_536,))
    assert negative_distances(rope, 65_536).tolist() == list(range(32_769, 65_537))
    assert negative_distances(rope, 0).size == 0


def test_a_head_rotated_by_half_has_no_negative_distance() -> None:
    """1 + cos is never negative, so base and context are free (Su, spaces.ac.cn 10122)."""
    assert negative_distances(head(64, base=2.0, rotary_dim=32), 20_000).size == 0
    assert negative_distances(head(64, base=2.0, rotary_dim=40), 20_000).size > 0


@pytest.mark.parametrize(
    ("tokens", "least"),
    [
        (1, 4294),
        (2, 11_590),
        (4, 26_950),
        (8, 83_770),
        (16, 2.341e5),
        (32, 6.301e5),
        (64, 2.0914e6),
    ],
    ids=lambda value: f"{value:g}",
)
def test_least_bases_are_the_known_ones(tokens: int, least: float) -> None:
    """To 0.2 %, with nothing feasible from 2 % below; in agreement with Su's finer search."""
    found = feasible_bases(head(), tokens * 1024, grid(0.98 * least, 1.005 * least, 4e-4))
    assert found[0, 0] == pytest.approx(least, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "low", "least"), [(1, 2000, 4294), (2, 4294, 11_590), (4, 11_000, 26_950)]
)
def test_nothing_feasible_is_far_below_the_least_base(
    tokens: int, low: float, least: float
) -> None:
    """On a grid of 0.5 % from a base that is feasible for half the context."""
    assert feasible_bases(head(), tokens * 1024, grid(low, 0.98 * least, 5e-3)).size == 0


def test_the_first_kilotoken_is_1024() -> None:
    """At 1000 tokens the least base is 4206, which is not the 4.3e3 of table 2."""
    found = feasible_bases(head(), 1000, grid(4150, 4250, 1e-3))
    assert found[0, 0] == pytest.approx(4206, rel=1e-3)


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
    [(2, 2.28e4, 1e5), (4, 5.89e4, 2e5), (8, 3.95e5, 1e6), (16, 1.321e6, 2e6), (32, 3.192e6, 4e6)],
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
    assert (negative_distances(head(base=base), tokens * 1024).size == 0) == passes


@pytest.mark.parametrize(("tokens", "passes"), [(2**n, n == 3) for n in range(7)])
def test_the_printed_fit_gives_bases_that_fail(tokens: int, passes: bool) -> None:
    """``0.0424 x**1.628`` passes at 8192 tokens, and at no other of the first seven lengths."""
    rope = head(base=0.0424 * (1024 * tokens) ** 1.628)
    assert (negative_distances(rope, 1024 * tokens).size == 0) == passes


def test_llama_3_stands_just_above_the_safe_base() -> None:
    """5e5 at 8192 tokens: six times the least feasible base, and 1.27 times the safe one."""
    assert negative_distances(head(base=5e5), 8192).size == 0
    assert f"{5e5 / 83_770:.1f} {5e5 / 3.95e5:.2f}" == "6.0 1.27"


@pytest.mark.parametrize(
    ("base", "passes"),
    [(0.99e5, True), (1e5, False), (1.005e5, True), (1.01e5, False), (1.02e5, True)],
    ids=lambda value: f"{value:g}",
)
def test_the_third_digit_of_a_base_decides(base: float, passes: bool) -> None:
    """Around 1e5 at 8192 tokens, half a percent turns yes into no and back."""
    assert (negative_distances(head(base=base), 8192).size == 0) == passes


def test_progress_is_told_after_every_base() -> None:
    """How many are done, of how many."""
    told: list[tuple[int, int]] = []
    feasible_bases(head(8), 10, [2.0, 3.0, 4.0], lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_law_stays_while_the_base_is_swept() -> None:
    """Frequencies divided by 4 bear four times the context, with distances four times finer."""
    bases = grid(4250, 4350, 4e-3)
    slower = feasible_bases(head(scaling=Linear(factor=4.0)), 4096, bases)
    assert slower[0, 0] >= feasible_bases(head(), 1024, bases)[0, 0] * (1 - 1e-6)


def test_phase_bounds_are_their_formulas() -> None:
    """The slowest pair's cosine to the power of the layers is what was to be kept."""
    bounds = phase_bounds(32_768, layers=24, kept=0.8, epsilon=2.0**-10)
    assert bounds.aliasing == pytest.approx(critical_bases(32_768)[2], rel=1e-15)
    assert math.cos(32_768 / bounds.stability) ** 24 == pytest.approx(0.8, rel=1e-12)
    assert bounds.precision == 1024


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
@settings(deadline=None, max_examples=150)
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
            lambda: feasible_bases(head(base=None, inv_freq=METHOD_2), 10, [2.0]),
            SpecError,
            "rope must have a base to be swept",
        ),
        (
            lambda: phase_bounds(10, layers=1, kept=1.0, epsilon=0.1),
            SpecError,
            "kept must be below 1",
        ),
        (
            lambda: phase_bounds(10, layers=0, kept=0.5, epsilon=0.1),
            SpecError,
            "layers must be a whole number >= 1",
        ),
        (
            lambda: printed_interpolation_bound(ONES, ONES, 1, head(scaling=Linear(factor=2.0))),
            SpecError,
            "rope must have plain frequencies",
        ),
        (
            lambda: printed_interpolation_bound(ONES, ONES, 1, head(base=None, inv_freq=METHOD_2)),
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
            lambda: extrapolation_ratio(head(2, None, inv_freq=(0.0,)), 1),
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
