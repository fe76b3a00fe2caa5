"""Decay curves and their bound: published tables, loops over real numbers."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import PositionError, Rope, SpecError, TensorError
from phasor.angles import COS_SIN_ERROR
from phasor.axes import Axial
from phasor.numpy import score
from phasor.papers import abel_bound, cosine, decay
from phasor.papers.distances import _BATCH, _CHUNK
from phasor.scaling import DynamicNTK

from .. import oracle, strategies
from ..ropes import at_0, head

# a product of two exact factors: two errors and a rounding, for one pair
PAIR = 4 * COS_SIN_ERROR
# r, RoFormer's figure 2 at base 1e4, the same with frequencies read from 1, at base 5e5
FIGURE = [
    (0, 32.5, 32.5, 32.5),
    (1, 31.5381661427, 31.7738897474, 31.6468517315),
    (2, 28.9559884736, 29.7674900038, 29.4061971810),
    (4, 22.6040431214, 24.0971382609, 24.3887195072),
    (8, 19.8173951304, 20.2298990147, 22.4998231858),
    (16, 15.7749514510, 16.9562883550, 19.1375493702),
    (32, 13.3843140395, 13.4402548797, 18.2014538984),
    (64, 10.0899415450, 10.5073255682, 14.2638577777),
    (128, 9.2729027246, 9.1003637355, 13.6019054572),
    (256, 6.5430973230, 7.3989037216, 12.1642032553),
    (1024, 4.0241133805, 4.0960364851, 9.9188957942),
    (4096, 4.8827921912, 5.2408337531, 7.1645437792),
    (8192, 4.9018775731, 4.1911437106, 5.1485779667),
]


@pytest.mark.parametrize(
    ("column", "rope"),
    [
        (1, head()),
        (2, head(128, None, explicit_inv_freq=tuple(10_000.0 ** (-i / 64) for i in range(1, 65)))),
        (3, head(base=500_000.0)),
    ],
    ids=["the figure", "read from 1", "base 5e5"],
)
def test_figure_2_comes_out_to_ten_digits(column: int, rope: Rope) -> None:
    """The three columns of the table, from the exact generator of the figure."""
    table = np.array(FIGURE)
    got = decay(rope, table[:, 0].astype(int))
    np.testing.assert_allclose(got, table[:, column], rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", [10_000, 500_000])
def test_the_stored_decay_comes_out(base: int) -> None:
    """16 stored digits, at whole distances and at the same ones as floats."""
    stored = oracle.GOLDEN[f"decay d=128 base={base}"]
    distances = [int(r) for r in stored]
    expected = [float(row["fig2"]) for row in stored.values()]
    for kind in (np.int64, np.float64):
        got = decay(head(base=float(base)), np.array(distances, dtype=kind))
        np.testing.assert_allclose(got, expected, rtol=0, atol=64 * PAIR)


def test_figure_2_is_cut_and_bumpy() -> None:
    """It starts at 32.5 and not at 20, and up to 256 has its minimum of 6.41500 at 236."""
    curve = decay(head(), np.arange(257))
    assert f"{curve[0]:.1f} {curve[8]:.1f}" == "32.5 19.8"
    assert int(curve[:257].argmin()) == 236
    assert f"{curve[236]:.5f}" == "6.41500"
    steps = np.diff(curve[:257])
    assert (steps > 0).sum() == 115
    dips = 1 + np.flatnonzero((steps[:-1] < 0) & (steps[1:] > 0))
    assert dips[:7].tolist() == [18, 23, 29, 35, 41, 48, 55]


def test_far_away_the_curve_of_figure_2_is_level() -> None:
    """Octave by octave, as sums of float64 angles give it; neither falling nor rising."""
    frequencies = 10_000.0 ** (-np.arange(64) / 64)
    for first, mean in zip(
        2 ** np.arange(10, 16), (5.30, 4.88, 4.67, 4.66, 4.70, 4.72), strict=True
    ):
        distances = np.arange(first, 2 * first)
        curve = decay(head(), distances)
        # an angle below 65536 is off by half a spacing of 65536, 2**-37, in each of its roundings
        sums = np.cumsum(np.exp(1j * distances[:, None] * frequencies), axis=-1)
        np.testing.assert_allclose(curve, np.abs(sums).mean(-1), rtol=0, atol=64 * 2.0**-35)
        assert f"{curve.mean():.2f}" == f"{mean:.2f}"
        assert 1.20 < curve.min() < curve.max() < 14.42


@given(strategies.placed_ropes() | strategies.placed_ropes(strategies.FLOAT_POSITIONS))
def test_decay_is_the_mean_of_partial_sums_for_any_rope(placed: tuple[Rope, Any]) -> None:
    """Every law, layout, direction and distance, against sums made one pair at a time."""
    rope, distance = placed
    partial, lengths = mpmath.mpc(0), []
    for cos, sin in zip(*oracle.cos_sin(rope, distance), strict=True):
        partial += mpmath.mpc(cos, sin)
        lengths.append(abs(partial))
    rest = 0.5 * float(max(oracle.frequencies(rope)))  # of a float distance, times a rounding
    expected = float(mpmath.fsum(lengths) / len(lengths))
    assert abs(decay(rope, distance) - expected) <= rope.num_pairs * (PAIR + rest * 2.0**-50)


def test_a_long_scan_is_its_distances_one_by_one() -> None:
    """Also where chunks and tables of it meet, and in any order."""
    rope, count = head(16), 2 * _BATCH + _CHUNK + 3
    curve = decay(rope, np.arange(count))
    meets = [0, _CHUNK - 1, _BATCH, _CHUNK - 1, _BATCH, 2 * _BATCH, count - 1]
    np.testing.assert_allclose(curve[meets], [decay(rope, r) for r in meets], rtol=0, atol=8 * PAIR)
    order = np.random.default_rng(0).permutation(count)
    np.testing.assert_array_equal(decay(rope, order.reshape(1, -1)), curve[None, order])


def test_no_distances_have_no_decay() -> None:
    """An empty list is not an error."""
    assert decay(head(), []).shape == (0,)
    assert decay(head(axes=Axial((32, 32))), np.zeros((3, 0, 2))).shape == (3, 0)


def test_abels_bound_of_ones_rests_on_the_last_step() -> None:
    """Every product is 2, so only the step to 0 is not 0: 2668 over a score of 94.4."""
    ones = np.ones(128)
    assert round(float(abel_bound(ones, ones, 5, head()))) == 2668
    assert round(float(score(ones, ones, 5, head())), 1) == 94.4


@given(strategies.placed_ropes(), st.integers(0, 2**32))
def test_abels_bound_is_eq_37_and_holds_for_any_rope(placed: tuple[Rope, Any], seed: int) -> None:
    """Both by complex numbers of the oracle, coordinates that stay and all."""
    rope, distance = placed
    q, k = np.random.default_rng(seed).standard_normal((2, rope.head_dim))
    bound = abel_bound(q, k, distance, rope)
    pairs = [oracle.pair_of(rope, i, rope.pairing) for i in range(rope.num_pairs)]
    for vector in (q, k):
        vector[np.ravel(pairs)] *= rope.attention_factor
    exact = oracle.turned(q, at_0(rope), rope) @ oracle.turned(k, distance, rope)
    rounding = 1e-14 * np.linalg.norm(q) * np.linalg.norm(k) * rope.num_pairs
    assert abs(exact) <= bound + rounding
    turned = [complex(c, s) for c, s in zip(*oracle.cos_sin(rope, distance), strict=True)]
    products = [complex(q[a], q[b]) * complex(k[a], -k[b]) for a, b in pairs]
    steps = [abs(y - x) for x, y in pairwise([*products, 0])]
    sums = sum(map(abs, accumulate(turned)))
    stays = set(range(rope.head_dim)).difference(*pairs)
    expected = max(steps) * sums + abs(sum(q[i] * k[i] for i in stays))
    assert abs(bound - expected) <= rounding * rope.num_pairs


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cosine(head(), 1, "near"), SpecError, "kind must be one of 'aligned'"),
        (lambda: cosine(head(), 1, "random"), SpecError, "seed must be a whole number for random"),
        (lambda: cosine(head(), 1, "random", seed=-1), SpecError, "seed must be a whole number >="),
        (lambda: cosine(head(), 1, "aligned", seed=1), SpecError, "seed must be left out"),
        (lambda: decay(head(), "far"), PositionError, "positions must be"),
        (lambda: decay(head(axes=Axial((32, 32))), 5), PositionError, "one coordinate per axis"),
        (lambda: abel_bound([1.0], np.ones(128), 1, head()), TensorError, "q must end in head_dim"),
        (lambda: abel_bound(np.ones(128), 1j, 1, head()), TensorError, "k must hold real numbers"),
        (
            lambda: decay(
                head(scaling=DynamicNTK(factor=2.0, original_max_positions=4096)), [1, 2]
            ),
            SpecError,
            r"rope\.at\(seq_len\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(call: Any, error: type, message: str) -> None:
    """With the argument and the way out in the message."""
    with pytest.raises(error, match=message):
        call()
