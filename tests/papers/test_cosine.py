"""Cosines and what they say of expected scores: published tables, and vectors turned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope
from phasor.numpy import score
from phasor.papers import KINDS, cosine

from .. import oracle, strategies
from ..ropes import at_0, head

# r, ones at 1e4, ones at 5e5, random q = k at 1e4 and at 5e5
COSINES = [
    (0, 1.0, 1.0, 1.0, 1.0),
    (1, 0.970214, 0.977909, 0.9821, 0.9869),
    (2, 0.896592, 0.923873, 0.9382, 0.9553),
    (5, 0.737266, 0.814592, 0.8431, 0.9047),
    (10, 0.669063, 0.764205, 0.6842, 0.8670),
    (20, 0.608344, 0.720080, 0.4938, 0.7338),
    (50, 0.546172, 0.632554, 0.5392, 0.5800),
    (100, 0.477241, 0.610989, 0.5857, 0.5000),
    (200, 0.305688, 0.591715, 0.3236, 0.5612),
    (500, 0.298480, 0.442127, 0.4648, 0.5945),
    (1000, 0.159027, 0.492264, 0.3005, 0.4457),
    (2000, 0.029098, 0.429550, 0.1269, 0.5345),
    (5000, -0.006956, 0.293053, 0.0629, 0.5256),
    (10000, -0.027894, 0.186995, 0.0782, 0.3574),
    (50000, 0.055864, 0.089546, 0.1823, 0.0292),
    (100000, 0.056119, 0.001479, -0.0123, 0.1729),
]


@pytest.mark.parametrize(("column", "base"), [(1, 1e4), (2, 5e5)], ids=["1e4", "5e5"])
@pytest.mark.parametrize(("kind", "sign"), [("aligned", 1), ("opposite", -1)])
def test_ones_turn_away_as_published(column: int, base: float, kind: Any, sign: int) -> None:
    """To the six digits printed; opposite vectors draw near instead."""
    table = np.array(COSINES)
    got = cosine(head(base=base), table[:, 0].astype(int), kind)
    np.testing.assert_allclose(got, sign * table[:, column], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("column", "base"), [(3, 1e4), (4, 5e5)], ids=["1e4", "5e5"])
def test_one_random_vector_turns_away_as_published(column: int, base: float) -> None:
    """To the four digits printed, from the same draw in interleaved pairs."""
    table = np.array(COSINES)
    rope = Rope(head_dim=128, pairing="interleaved", base=base)
    got = cosine(rope, table[:, 0].astype(int), "random", seed=1)
    np.testing.assert_allclose(got, table[:, column], rtol=0, atol=5.1e-5)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (1e4, [0.972128, 0.675466, 0.456183, 0.192524, -0.029469, -0.017876]),
        (5e5, [0.979873, 0.770261, 0.591909, 0.451239, 0.309237, 0.211133]),
    ],
    ids=["1e4", "5e5"],
)
def test_ones_of_width_256_turn_away_as_published(base: float, expected: list[float]) -> None:
    """The width that Barbero et al. draw in their figure 2."""
    got = cosine(head(256, base), [1, 10, 100, 1000, 5000, 10_000], "aligned")
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_independent_vectors_have_no_trend() -> None:
    """Mean within 4 / sqrt(N d) of 0, deviation within 15 % of 1 / sqrt(d), at every distance.

    The deviation of a deviation over 400 draws is 1 / sqrt(800) = 3.5 %; this allows four.
    """
    distances = [row[0] for row in COSINES]
    drawn = np.array([cosine(head(), distances, "independent", seed=s) for s in range(400)])
    assert np.abs(drawn.mean(0)).max() < 4 / np.sqrt(400 * 128)
    np.testing.assert_allclose(drawn.std(0), 128**-0.5, rtol=0.15)


@given(strategies.placed_ropes(), st.sampled_from(KINDS))
def test_cosines_are_those_of_turned_vectors(placed: tuple[Rope, Any], kind: Any) -> None:
    """Any rope and kind, in the sign of a key that stands after its query."""
    rope, distance = placed
    draw = np.random.default_rng(5)
    q, k = np.ones((2, rope.head_dim))
    seed = None
    if kind in ("random", "independent"):
        seed = 5
        q = k = draw.standard_normal(rope.head_dim)
    if kind == "independent":
        k = draw.standard_normal(rope.head_dim)
    if kind == "opposite":
        k = -q
    turned = oracle.turned(q, at_0(rope), rope) @ oracle.turned(k, distance, rope)
    expected = turned / np.linalg.norm(q) / np.linalg.norm(k)
    assert abs(cosine(rope, distance, kind, seed=seed) - expected) <= 1e-14 * rope.num_pairs


def test_a_key_like_its_query_scores_a_trace_more_on_average() -> None:
    """Uniform, not Gaussian, coordinates: within five standard errors of 20000 draws."""
    rope, draws = head(16, 100.0), 20_000
    draw = np.random.default_rng(3)
    mean = draw.standard_normal(16)
    q, other, noise = mean + np.sqrt(3) * draw.uniform(-1, 1, (3, draws, 16))
    noise = noise - mean
    unrelated = score(mean, mean, 7, rope)
    similar = unrelated + 16 * cosine(rope, 7, "aligned")
    for keys, expected in ((q + noise, similar), (other, unrelated)):
        scores = score(q, keys, 7, rope)
        assert abs(scores.mean() - expected) <= 5 * scores.std() / np.sqrt(draws)
