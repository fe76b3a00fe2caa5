"""Measured errors of angle recipes, against the published ones."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope, SpecError
from phasor.angles import COS_SIN_ERROR_FLOAT32, cos_sin
from phasor.axes import Sectioned
from phasor.numpy import score
from phasor.papers import angle_errors, cosine, linear_weights
from phasor.papers.precision import _round_to_bfloat16
from phasor.torch import rotate

from .. import oracle, strategies

ROPE = Rope(head_dim=128, pairing="half", base=10_000.0)


def test_each_pair_is_turned_by_the_coordinate_of_its_axis():
    """By another one it would be off by a length of its own order; 1e-12 is a float64 angle."""
    video = Rope(head_dim=16, pairing="half", direction=-1, axes=Sectioned((4, 2, 2)))
    errors = angle_errors(video, [[5, 70, 900], [-3, 0, 12]], "float64 angle")
    assert errors.shape == (2,)
    assert errors.max() < 1e-12


@pytest.mark.parametrize("bits", [20, 40, 63])
def test_float32_rows_stay_within_their_bound(bits):
    """Of cos and of sin, at every size of position; and the bound is not a generous one."""
    positions = np.random.default_rng(0).integers(-(2**bits), 2**bits - 1, 5000)
    worst = angle_errors(ROPE, positions, "float32 rows").max()
    assert COS_SIN_ERROR_FLOAT32 / 2 < worst <= 2**0.5 * COS_SIN_ERROR_FLOAT32


def test_an_unknown_recipe_is_refused():
    """The error lists the recipes."""
    with pytest.raises(SpecError, match="recipe must be one of 'float32 angle'"):
        angle_errors(ROPE, 1, "float16 angle")


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest numbers of eight significant bits, ties to even, in plain arithmetic."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.rint(fraction * 256) / 256, exponent)


# positions, then the largest error published for each recipe at base 10000 and 128 dimensions
PUBLISHED = {
    1000: (5.2e-5, 6.8e-14),
    4000: (1.8e-4, 3.4e-13),
    32_000: (1.4e-3, 2.0e-12),
    128_000: (6.2e-3, 7.7e-12),
    1_000_000: (2.7e-2, 9.1e-11),
    2**24: (0.45, 1.1e-9),
    2**27: (1.96, 8.4e-9),
    2**31: (1.99, 1.6e-7),
    2**40: (2.0, 8.2e-5),
    2**53: (2.0, 1.25),
    2**62: (2.0, 2.0),
}


def below(start: int) -> np.ndarray:
    """Just below, for from 2**24 on float32 has no odd positions."""
    return start - np.random.default_rng(0).integers(0, start // 8, 300)


@pytest.mark.parametrize("start", PUBLISHED, ids=str)
def test_recipes_lose_the_published_orders_of_magnitude(start):
    """Float32 and complex64 alike, float64 nine digits later; other draws differ threefold."""
    single, double = PUBLISHED[start]
    recipes = {"float32 angle": single, "complex64": single, "float64 angle": double}
    for recipe, published in recipes.items():
        worst = angle_errors(ROPE, below(start), recipe).max()
        assert published / 3 < worst < 3 * published, recipe


@pytest.mark.parametrize(
    ("start", "published"),
    [(32_000, 2.1e-3), (128_000, 6.9e-3), (1_000_000, 5.3e-2), (2**24, 0.72)],
)
def test_a_larger_base_loses_no_less(start, published):
    """At base 500000, as published for Llama 3."""
    rope = dataclasses.replace(ROPE, base=500_000.0)
    worst = angle_errors(rope, below(start), "float32 angle").max()
    assert published / 3 < worst < 3 * published


@pytest.mark.parametrize(
    ("start", "published"),
    [(1000, 2.6e-5), (4000, 1e-4), (32_000, 7.6e-4), (128_000, 3.7e-3), (1_000_000, 2.4e-2)],
)
def test_float32_frequencies_alone_lose_half_of_it(start, published):
    """With perfect angles; the published ones are torch's, which are not all nearest."""
    positions = below(start)
    rounded = dataclasses.replace(ROPE, inv_freq_dtype="float32")
    cos, sin = cos_sin(positions, ROPE)
    other_cos, other_sin = cos_sin(positions, rounded)
    worst = np.hypot(other_cos - cos, other_sin - sin).max()
    assert published / 3 < worst < 3 * published


def test_complex64_is_the_float32_angle_again():
    """The exponential of an imaginary number is its cosine and sine, so the errors are the same
    to two roundings of each.
    """
    positions = np.random.default_rng(0).integers(0, 2**20, 500)
    single = angle_errors(ROPE, positions, "float32 angle")
    np.testing.assert_allclose(
        angle_errors(ROPE, positions, "complex64"), single, rtol=0, atol=2**0.5 * 2**-23
    )


def test_a_bfloat16_table_is_off_by_half_a_unit_from_the_first_positions_on():
    """2**-9 in cos and in sin (published: 1.953e-3), and what the float32 angle loses."""
    worst = angle_errors(ROPE, np.arange(1000), "bfloat16 table").max()
    assert 2**-9 < worst < 2**0.5 * 2**-9 + 1e-4


def test_a_bfloat16_table_is_the_nearest():
    """Every entry, by arithmetic that looks at no bits."""
    positions = np.arange(3000)
    cos, sin = cos_sin(positions, ROPE)
    angle = positions[:, None].astype(np.float32) * ROPE.inv_freq.astype(np.float32)
    off = np.hypot(bfloat16(np.cos(angle)) - cos, bfloat16(np.sin(angle)) - sin)
    np.testing.assert_array_equal(angle_errors(ROPE, positions, "bfloat16 table"), off.max(-1))


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (1 + 2.0**-8, 1.0),
        (1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (1 + 2.0**-8 + 2.0**-23, 1 + 2.0**-7),
        (1 + 2.0**-8 - 2.0**-23, 1.0),
        (2 - 2.0**-23, 2.0),
        (-(1 + 3 * 2.0**-8), -(1 + 2.0**-6)),
        (2.0**-140, 0.0),
    ],
    ids=["tie down", "tie up", "above a tie", "below a tie", "carry", "negative", "subnormal"],
)
def test_rounding_to_bfloat16_goes_to_the_nearest(value, nearest):
    """And a tie to the even one, which is what torch does as well."""
    found = _round_to_bfloat16(np.array([value], dtype=np.float32))
    assert found.item() == nearest
    assert torch.tensor(value).bfloat16().item() == nearest


@pytest.mark.parametrize(
    ("position", "published"), [(256, 0.29), (512, 0.46), (4095, 1.68)], ids=str
)
def test_frequencies_in_bfloat16_turn_the_wrong_way_soon(position, published):
    """What ``model.bfloat16()`` does to a stored ``inv_freq``; published per coordinate."""
    spoilt = Rope(head_dim=128, pairing="half", explicit_inv_freq=tuple(bfloat16(ROPE.inv_freq)))
    off = np.abs(np.stack(cos_sin(position, spoilt)) - np.stack(cos_sin(position, ROPE)))
    assert off.max() == pytest.approx(published, abs=0.005)


def test_a_position_in_bfloat16_is_another_position():
    """4095 becomes 4096, which moves a coordinate by 0.87."""
    assert bfloat16(np.array(4095.0)) == 4096
    off = np.abs(np.stack(cos_sin(4096, ROPE)) - np.stack(cos_sin(4095, ROPE)))
    assert off.max() == pytest.approx(0.87, abs=0.005)


@pytest.mark.parametrize("reach", [1000, 4000, 32_000, 128_000, 1_000_000, 16_000_000])
@pytest.mark.parametrize(
    ("dtype", "published"), [(torch.float32, 5.9e-9), (torch.bfloat16, 2.1e-4)], ids=str
)
def test_scores_of_exact_rows_lose_only_the_dtype(reach, dtype, published):
    """At distance 1, relative to the norms: at least the last rounding, at most every one there is.

    A rounding is an error spread evenly over a unit in the last place: its mean square is a twelfth
    of the unit's. With u = 2**-24 that is at most 2/12 u**2 for an entry of a table, 6/12 u**2 for
    a complex product of entries, and 2 (2u)**2/12 each for the products and for the sums that turn
    a pair of length 1. Half of it lies along the other vector, and there are two vectors.
    The error of a score is a sum of hundreds, so nearly normal: the root mean square of n is off by
    1 / sqrt(2 n) of itself. This allows four times as much.
    """
    draw = np.random.default_rng(0)
    q, k = (torch.tensor(draw.standard_normal((200, 1, 128))).to(dtype) for _ in range(2))
    positions = torch.tensor(draw.integers(0, reach, 200))
    turned = rotate(q, positions, ROPE).double(), rotate(k, positions + 1, ROPE).double()
    q, k = q.double(), k.double()
    exact = torch.tensor(score(q.numpy(), k.numpy(), np.ones((200, 1), dtype=int), ROPE))
    squares = q.square().sum(-1) * k.square().sum(-1)
    off = (((turned[0] * turned[1]).sum(-1) - exact).square() / squares).mean().sqrt()

    q_unit, k_unit = (torch.finfo(dtype).eps * 2.0 ** (torch.frexp(x)[1] - 1) for x in turned)
    last = ((q_unit * turned[1]).square() + (k_unit * turned[0]).square()).sum(-1) / 12
    digits = 2 if reach <= 2**20 else 4
    rows, turning = digits * 2 / 12 + (digits - 1) * 6 / 12, 2 * 2 * 4 / 12
    q_pairs, k_pairs = (x.unflatten(-1, (2, 64)).square().sum(-2) for x in (q, k))
    earlier = (rows + turning) * 2.0**-48 * (q_pairs * k_pairs).sum(-1)
    least, most = (x.mean().sqrt() for x in (last / squares, (last + earlier) / squares))
    slack = 4 / np.sqrt(2 * 200)
    for found in (off, published):
        assert (1 - slack) * least <= found <= (1 + slack) * most


@pytest.mark.parametrize(
    ("keys", "negative", "total"),
    [
        (96, 0.0, 0.491),
        (1024, 0.097, 0.256),
        pytest.param(4096, 0.242, 0.139, marks=pytest.mark.slow),
    ],
    ids=["96", "1024", "4096"],
)
def test_weights_of_linear_attention_turn_negative_and_shrink(keys, negative, total):
    """One published draw is within two deviations of 40."""
    rope = Rope(head_dim=64, pairing="half", base=10_000.0)
    draws = [np.random.default_rng(seed).standard_normal((keys + 1, 64)) for seed in range(40)]
    weights = np.array([linear_weights(draw[0], draw[1:], rope) for draw in draws])
    shares, sums = (weights < 0).mean(-1), weights.sum(-1)
    assert abs(negative - shares.mean()) <= 2 * shares.std()
    assert abs(total - sums.mean()) <= 2 * sums.std()


@given(strategies.resolved_ropes(), st.integers(1, 40))
def test_the_expected_sum_of_linear_weights_is_that_of_equal_entries(rope, length):
    """What vectors of one distribution have in common, turned by the oracle.

    A sum of cosines is off by what a product of two of them allows, a mean of 40 by as many
    roundings more.
    """
    ones, axes = np.ones(rope.head_dim), rope.axes.n_axes
    places = [r if axes == 1 else [r] * axes for r in range(length)]
    exact = math.fsum(ones @ oracle.turned(ones, place, rope) for place in places)
    found = cosine(rope, places, "aligned").mean()
    rounding = 4e-15 + (4 * rope.num_pairs + 40 + 2) * 2**-53
    assert abs(found - exact / length / rope.head_dim) <= rounding
