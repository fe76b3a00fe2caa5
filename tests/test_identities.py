"""The identities of rotary embeddings, each under every law."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import phasor.numpy
from phasor import Rope
from phasor.angles import COS_SIN_ERROR, cos_sin
from phasor.numpy import change_pairing, pair_indices
from phasor.papers import abel_bound

from . import strategies
from .each import each

# an exact rotation applied twice, or compared with another, in vectors of length 1
ERROR = COS_SIN_ERROR
BIG = 2**62
SHIFTS = [(3, 5), (1000, -7), (131_072, 131_071), (-(2**40), 2**40 + 3), (BIG, BIG - 9), (-BIG, 77)]

# R(p) alone, without the attention factor of a law
matrix, rotate, score = (
    partial(function, gain=1.0)
    for function in (phasor.numpy.matrix, phasor.numpy.rotate, phasor.numpy.score)
)

laws = each("law", strategies.EVERY_LAW.values())
pairings = pytest.mark.parametrize("pairing", ["half", "interleaved"])
bases = pytest.mark.parametrize("base", [10_000.0, 500_000.0])


def unit_vectors(seed: int, count: int, width: int = 64) -> np.ndarray:
    """Gaussian directions of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((count, width))
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


def complex_pairs(x: np.ndarray, rope: Rope) -> np.ndarray:
    """A head's vectors as complex numbers, pair by pair."""
    first, second = pair_indices(rope, rope.pairing)
    return x[..., first] + 1j * x[..., second]


def spin(rope: Rope, positions: Any) -> np.ndarray:
    """exp(i p inv_freq) of every pair."""
    cos, sin = cos_sin(positions, rope)
    return cos + 1j * sin


def each_law(law: Any, pairing: Any) -> Rope:
    """A head of 64 under one law."""
    return Rope(head_dim=64, pairing=pairing, base=5e5, scaling=law)


@laws
@pairings
def test_i1_a_rotation_is_orthogonal(law: Any, pairing: Any) -> None:
    """R^T R is the identity, and lengths are kept, up to 2**62 and the ends of int64."""
    rope = each_law(law, pairing)
    x = unit_vectors(1, 8)
    for place in (1, 4095, 2**31 - 1, 2**53 + 1, BIG, -(2**63)):
        r = matrix(place, rope)
        assert np.abs(r.T @ r - np.eye(64)).max() <= ERROR
        assert np.abs(np.linalg.norm(rotate(x, place, rope), axis=-1) - 1).max() <= ERROR


@laws
@pairings
@pytest.mark.parametrize(("m", "n"), SHIFTS, ids=str)
def test_i2_a_score_sees_only_the_distance(law: Any, pairing: Any, m: int, n: int) -> None:
    """(R_m q)^T (R_n k) = q^T R_{n-m} k, as the score and as the matrix between them."""
    rope = each_law(law, pairing)
    q, k = unit_vectors(2, 6), unit_vectors(3, 6)
    absolute = (rotate(q, m, rope) * rotate(k, n, rope)).sum(-1)
    np.testing.assert_allclose(absolute, score(q, k, n - m, rope), rtol=0, atol=ERROR)
    between = np.einsum("vi,ij,vj->v", q, matrix(n - m, rope), k)
    np.testing.assert_allclose(absolute, between, rtol=0, atol=ERROR)


@laws
@pairings
@pytest.mark.parametrize(("m", "n"), SHIFTS, ids=str)
def test_i3_a_score_is_the_real_part_of_a_complex_product(
    law: Any, pairing: Any, m: int, n: int
) -> None:
    """Re sum q conj(k) exp(i (m - n) inv_freq): RoFormer eq. 35."""
    rope = each_law(law, pairing)
    q, k = unit_vectors(4, 6), unit_vectors(5, 6)
    product = complex_pairs(q, rope) * complex_pairs(k, rope).conj() * spin(rope, m - n)
    expected = product.sum(-1).real
    np.testing.assert_allclose(score(q, k, n - m, rope), expected, rtol=0, atol=ERROR)


@laws
@pairings
def test_i4_the_elementwise_form_is_the_matrix(law: Any, pairing: Any) -> None:
    """RoFormer eq. 34 is eq. 15."""
    rope = each_law(law, pairing)
    x = unit_vectors(6, 6)
    for place in (1, -1000, 2**40, BIG):
        assert np.abs(rotate(x, place, rope) - x @ matrix(place, rope).T).max() <= ERROR


@laws
def test_i5_halves_are_interleaved_pairs_in_another_order(law: Any) -> None:
    """P = [0, 2, 4, ..., 1, 3, 5, ...] on both sides, with no difference at all."""
    interleaved, half = each_law(law, "interleaved"), each_law(law, "half")
    order = [*range(0, 64, 2), *range(1, 64, 2)]
    q, k = unit_vectors(7, 6), unit_vectors(8, 6)
    np.testing.assert_array_equal(change_pairing(q, "interleaved", "half"), q[:, order])
    for place in (1, -1000, 2**40, BIG):
        expected = rotate(q, place, interleaved)[:, order]
        np.testing.assert_array_equal(rotate(q[:, order], place, half), expected)
        scores = score(q[:, order], k[:, order], place, half)
        np.testing.assert_array_equal(scores, score(q, k, place, interleaved))


def test_i5_the_wrong_pairing_keeps_every_other_identity() -> None:
    """So only a comparison of the two can find it: the scores differ, the laws hold."""
    right, wrong = (Rope(head_dim=64, pairing=p) for p in ("half", "interleaved"))
    q, k = unit_vectors(9, 1), unit_vectors(10, 1)
    assert np.abs(score(q, k, 5, right) - score(q, k, 5, wrong)).max() > 0.01


@laws
@pairings
@pytest.mark.parametrize(("a", "b"), SHIFTS, ids=str)
def test_i6_rotations_compose(law: Any, pairing: Any, a: int, b: int) -> None:
    """R_a R_b = R_{a+b}; two errors of a complex entry, sqrt(2) each, against a third."""
    rope = each_law(law, pairing)
    composed = matrix(a, rope) @ matrix(b, rope)
    assert np.abs(composed - matrix(a + b, rope)).max() <= 3 * 2**0.5 * ERROR
    assert np.abs(matrix(-a, rope) - matrix(a, rope).T).max() <= 2 * ERROR


def test_the_sign_is_that_of_roformer() -> None:
    """A key a quarter turn ahead of the query scores sin(m - n), which is odd in the distance."""
    rope = Rope(head_dim=2, pairing="half")
    q, k = [1.0, 0.0], [0.0, 1.0]
    assert f"{score(q, k, -1, rope):.16f}" == "0.8414709848078965"
    assert f"{score(q, k, 1, rope):.16f}" == "-0.8414709848078965"
    assert f"{score(k, q, 1, rope):.16f}" == "0.8414709848078965"


def test_a_query_turned_on_its_own_meets_the_key_from_the_other_side() -> None:
    """(R^w q)^T k = q^T R^{-w} k; with R^w, as Su's ReRoPE post has it, it is another number."""
    rope = Rope(head_dim=64, pairing="half")
    q, k = unit_vectors(15, 8), unit_vectors(16, 8)
    turned = (rotate(q, 7, rope) * k).sum(-1)
    np.testing.assert_allclose(turned, score(q, k, -7, rope), rtol=0, atol=ERROR)
    assert np.abs(turned - score(q, k, 7, rope)).max() > 0.1


def abel(rope: Rope, q: np.ndarray, k: np.ndarray, r: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """The sum of eq. 35, the steps of h with h_{d/2} = 0, and the partial sums |S_{j+1}|."""
    h = complex_pairs(q, rope) * complex_pairs(k, rope).conj()
    steps = np.diff(h, axis=-1, append=0)
    turned = spin(rope, r)
    return (h * turned).sum(-1), steps, np.cumsum(turned, axis=-1)


@bases
def test_i7_a_score_can_be_summed_by_parts(base: float) -> None:
    """Abel's transformation (eq. 36) in 2000 Gaussian draws below 4096."""
    rope = Rope(head_dim=128, pairing="half", base=base)
    rng = np.random.default_rng(12)
    q, k = rng.standard_normal((2, 2000, 128))
    total, steps, partial = abel(rope, q, k, rng.integers(0, 4096, 2000))
    np.testing.assert_allclose(total, -(partial * steps).sum(-1), rtol=0, atol=1e-10)


@bases
def test_i8_a_score_is_bounded_by_the_partial_sums(base: float) -> None:
    """|sum| <= max |h_{j+1} - h_j| * sum |S_{j+1}| (eq. 37), and never close to it.

    64 sums of at most 64 terms are off by as many roundings at most, in either computation.
    """
    rope = Rope(head_dim=128, pairing="half", base=base)
    rng = np.random.default_rng(13)
    q, k = rng.standard_normal((2, 2000, 128))
    distances = rng.integers(0, 4096, 2000)
    total, steps, partial = abel(rope, q, k, distances)
    bound = abel_bound(q, k, distances, rope)
    expected = np.abs(steps).max(-1) * np.abs(partial).sum(-1)
    np.testing.assert_allclose(bound, expected, rtol=64 * 64 * 2**-53)
    assert (np.abs(total) / bound).max() < 0.1


@pytest.mark.parametrize("causal", [True, False])
@pairings
def test_i9_linear_attention_has_a_running_state(pairing: Any, causal: bool) -> None:
    """RoFormer eq. 19: the quadratic sum over scores is the recurrent one over rotated keys."""
    rope = Rope(head_dim=16, pairing=pairing)
    rng = np.random.default_rng(14)
    length = 24
    q, k = rng.standard_normal((2, length, 16))
    v = rng.standard_normal((length, 5))
    q, k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q, k))  # elu + 1
    distance = np.arange(length) - np.arange(length)[:, None]
    seen = distance <= 0 if causal else np.ones_like(distance, dtype=bool)
    weights = score(q[:, None], k[None, :], distance, rope) * seen
    quadratic = weights @ v / ((q @ k.T) * seen).sum(-1, keepdims=True)

    turned = [rotate(x[:, None], np.arange(length), rope)[:, 0] for x in (q, k)]
    outer, plain = turned[1][:, :, None] * v[:, None, :], k
    state = np.cumsum(outer, axis=0) if causal else np.broadcast_to(outer.sum(0), outer.shape)
    norm = np.cumsum(plain, axis=0) if causal else np.broadcast_to(plain.sum(0), plain.shape)
    recurrent = np.einsum("nd,nde->ne", turned[0], state) / (q * norm).sum(-1, keepdims=True)
    np.testing.assert_allclose(recurrent, quadratic, rtol=0, atol=1e-13)
