"""The MLX functions give what the complex numbers say, in every layout, at every position."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phasor
from phasor import Rope
from phasor.angles import COS_SIN_ERROR_FLOAT32
from phasor.errors import PositionError
from phasor.mlx import Rotation, rotate, rotate_qk

from .. import oracle, strategies
from ..rotation_cases import FLOATS, POSITIONS, POSITIONS_32, ROPES, THREE, layouts
from .mlx_arrays import DTYPES, assert_rotated, float64, normal

HALF = Rope(head_dim=16, pairing="half")
EXTREMES = [-(2**63), 2**63 - 1, -(2**31), 2**31 - 1, 2**32, -1]
UNSIGNED = [0, 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("rope", layouts().values(), ids=layouts())
def test_every_layout_turns_as_complex_numbers_do(rope: Rope) -> None:
    """From 0 to 2**39 both ways, forwards, and back with a gain."""
    x = normal(len(POSITIONS), 3, 16)
    assert_rotated(rotate(x, POSITIONS, rope), x, POSITIONS, rope)
    options: dict[str, Any] = {"inverse": True, "gain": 1.3465735902799727}
    undone = options | {"gain": 1 / options["gain"]}
    assert_rotated(rotate(x, POSITIONS, rope, **options), x, POSITIONS, rope, **undone)


@pytest.mark.compile
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("rope", layouts().values(), ids=layouts())
def test_what_is_fused_turns_as_complex_numbers_do(rope: Rope, heads_first: bool) -> None:
    """Compiled by phasor alone, and inside a function that the user compiles."""
    x = normal(len(POSITIONS), 3, 16)
    arranged = x.swapaxes(0, 1) if heads_first else x
    places = mx.array(np.array(POSITIONS))

    def turn(x: mx.array, places: mx.array) -> mx.array:
        return rotate(x, places, rope, inverse=True, gain=1.25, heads_first=heads_first)

    for y in (turn(arranged, places), mx.compile(turn)(arranged, places)):
        y = y.swapaxes(0, 1) if heads_first else y
        assert_rotated(y, x, POSITIONS, rope, inverse=True, gain=1 / 1.25)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_frequency_turns_at_its_own_rate(rope: Rope) -> None:
    """Laws and explicit frequencies, above a turn too, at whole positions and between them."""
    for places in (POSITIONS, EXTREMES, FLOATS):
        x = normal(len(places), 2, rope.head_dim)
        assert_rotated(rotate(x, places, rope), x, places, rope)


@pytest.mark.parametrize(
    ("dtype", "places"),
    [
        (mx.int64, EXTREMES),
        (mx.int32, POSITIONS_32),
        (mx.int8, [-128, 127, 0]),
        (mx.uint32, UNSIGNED),
        (mx.uint16, [0, 65535]),
        (mx.float32, [0.0, 0.5, -0.25, 1.5, -(2.0**33), 2.0**62, 70_001.125]),
        (mx.float64, FLOATS),
    ],
)
def test_positions_of_every_dtype_count_in_full(dtype: mx.Dtype, places: list[Any]) -> None:
    """The least integers too, which have no positive."""
    with mx.stream(mx.cpu):  # no other device has float64
        x = normal(len(places), 2, 16)
        assert_rotated(rotate(x, mx.array(np.array(places), dtype), HALF), x, places, HALF)


@given(
    strategies.placed_ropes() | strategies.placed_ropes(strategies.FLOAT_POSITIONS),
    st.sampled_from(DTYPES),
)
def test_any_rope_turns_as_the_oracle_does(placed: tuple[Rope, Any], dtype: mx.Dtype) -> None:
    """Every law, slice, pairing and axes, at whole positions and between."""
    rope, place = placed
    x = normal(1, 2, rope.head_dim, dtype=dtype)
    y, back = rotate(x, [place], rope, gain=1.0), rotate(x, [place], rope, inverse=True, gain=1.0)
    assert_rotated(y, x, [place], rope)
    assert_rotated(back, x, [place], rope, inverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", phasor.preset_names())
def test_every_preset_is_within_the_bound(name: str) -> None:
    """At both ends of 64 bits, and at positions of long texts."""
    ropes = phasor.preset(name)
    for rope in {rope.at(1 << 17) for rope in ropes if rope is not None}:
        places = [0, 131_071, 1_000_000, *EXTREMES]
        if rope.axes.n_axes > 1:
            places = [[p + axis * (p < 0) for axis in range(rope.axes.n_axes)] for p in places]
        x = normal(len(places), 2, rope.head_dim)
        assert_rotated(rotate(x, places, rope, gain=1.0), x, places, rope)


def test_rows_are_within_the_bound() -> None:
    """They have the shape of the positions, and the sign of the direction."""
    rope = Rope(head_dim=16, pairing="interleaved", direction=-1)
    made = Rotation.at([POSITIONS], rope)
    rows = [float64(row) for row in (made.cos, made.sin)]
    right = oracle.rows(rope, POSITIONS)
    for row, exact in zip(rows, right, strict=True):
        assert row.shape == (1, len(POSITIONS), 8)
        assert np.abs(row[0] - exact).max() <= COS_SIN_ERROR_FLOAT32
    assert Rotation.at(7, rope).cos.shape == (8,)


def test_each_pair_uses_its_axis() -> None:
    """Positions of several axes, of NumPy and of MLX."""
    places = [[3, -5, 2**40], [2**33, 70_001, 0]]
    x = normal(2, 3, 8)
    for read in (places, mx.array(np.array(places))):
        assert_rotated(rotate(x, read, THREE), x, places, THREE)


@pytest.mark.parametrize("shape", [(), (4,), (1,), (2, 4), (2, 1), (1, 4)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_positions_broadcast_to_tokens(shape: tuple[int, ...], heads_first: bool) -> None:
    """A token of every head turns by its own position, in both layouts."""
    places = np.arange(np.prod(shape, dtype=int)).reshape(shape) + 70_001
    x = normal(2, 4, 3, 16)
    y = rotate(x.swapaxes(1, 2) if heads_first else x, places, HALF, heads_first=heads_first)
    y = y.swapaxes(1, 2) if heads_first else y
    assert_rotated(y, x, np.broadcast_to(places, (2, 4)), HALF)


def test_query_and_key_together_are_each_alone() -> None:
    """`rotate_qk` is `rotate` twice, to the bit, with other heads and dtypes."""
    q, k = normal(2, 4, 6, 16), normal(2, 4, 2, 16, dtype=mx.bfloat16)
    options: dict[str, Any] = {"inverse": True, "gain": 1.25}
    both = rotate_qk(q, k, POSITIONS[:4], HALF, **options)
    for x, y in zip((q, k), both, strict=True):
        assert mx.array_equal(y, rotate(x, POSITIONS[:4], HALF, **options))


def test_digits_that_mlx_would_cut_count() -> None:
    """1e6 + 0.3 is a float64 of Python; an array of MLX would hold 1000000.3125."""
    x = normal(1, 1, 16)
    assert_rotated(rotate(x, [1e6 + 0.3], HALF), x, [1e6 + 0.3], HALF)
    assert not mx.array_equal(rotate(x, [1e6 + 0.3], HALF), rotate(x, mx.array([1e6 + 0.3]), HALF))


@pytest.mark.parametrize("far", [float("nan"), float("inf"), 2.0**63, -(2.0**63)])
def test_a_float_without_an_angle_is_refused_or_spoils_its_token_alone(far: float) -> None:
    """An array of MLX may not be read while it is traced."""
    x = normal(2, 1, 16)
    with pytest.raises(PositionError, match="finite and below 2"):
        rotate(x, [0.5, far], HALF)
    y = rotate(x, mx.array([0.5, far]), HALF)
    assert mx.isnan(y[1]).all().item()
    assert_rotated(y[:1], x[:1], [0.5], HALF)


@pytest.mark.parametrize("rope", layouts().values(), ids=layouts())
def test_a_gradient_is_the_inverse_rotation(rope: Rope) -> None:
    """Of the transpose, which is what the inverse is."""
    x, w = normal(len(POSITIONS), 2, 16), normal(len(POSITIONS), 2, 16, seed=1)
    got = mx.grad(lambda x: (rotate(x, POSITIONS, rope, gain=1.25) * w).sum())(x)
    assert_rotated(got, w, POSITIONS, rope, inverse=True, gain=1.25)
    tangents = mx.jvp(lambda x: rotate(x, POSITIONS, rope), [x], [w])[1]
    assert_rotated(tangents[0], w, POSITIONS, rope)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_transformations_compose(compiled: bool) -> None:
    """A gradient by rows, each at positions of its own, with an exchange of pairings."""
    rope = layouts()["interleaved to half, slice, -1"]
    places = np.array([POSITIONS[:4], POSITIONS[4:8]])
    x, w = normal(2, 4, 3, 16), normal(2, 4, 3, 16, seed=1)

    def loss(x: mx.array, places: mx.array, w: mx.array) -> mx.array:
        return (rotate(x, places, rope) * w).sum()

    gradient = mx.vmap(mx.grad(loss))
    got = (mx.compile(gradient) if compiled else gradient)(x, mx.array(places), w)
    assert_rotated(got, w, places, rope, inverse=True)


def test_positions_have_no_gradient() -> None:
    """MLX would say 0, which it is not."""
    x = normal(2, 1, 16)
    with pytest.raises(PositionError, match="positions must not require a gradient"):
        mx.grad(lambda p: rotate(x, p, HALF).sum())(mx.array([0.5, 1.0]))
