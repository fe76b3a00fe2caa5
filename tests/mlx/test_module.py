"""`RotaryEmbedding` stands where MLX's models have their rope, and identify knows it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

import phasor
from phasor import Rope
from phasor.mlx import RotaryEmbedding, rotate
from phasor.scaling import Yarn
from phasor.testing import assert_rotates

from ..rotation_cases import THREE
from .mlx_arrays import assert_rotated, float64, normal

HALF = Rope(head_dim=16, pairing="half", base=500_000.0)
YARN = Rope(head_dim=16, pairing="half", scaling=Yarn(factor=4.0, original_max_positions=64))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [16, 8])
def test_it_is_mlx_s_own_where_that_is_exact(traditional: bool, dims: int) -> None:
    """The first positions: float32 angles of p are off by at most p * 2**-23 there, twice over."""
    pairing = "interleaved" if traditional else "half"
    layer = RotaryEmbedding(Rope(head_dim=16, rotary_dim=dims, pairing=pairing))
    own, x = nn.RoPE(dims, traditional=traditional), normal(2, 3, 4, 16)
    for offset in (0, 5):
        room = (offset + 4) * 2.0**-21 * float(mx.abs(x).max())
        assert mx.abs(layer(x, offset=offset) - own(x, offset=offset)).max() <= room


def test_an_offset_is_a_first_position_of_all_or_of_each_row() -> None:
    """Far ones count in full; arrays are of any integers."""
    layer, x = RotaryEmbedding(HALF), normal(2, 3, 4, 16)
    for offset in (0, 2**40 + 1, 2**63 - 4, -(2**63), -3):
        places = [[offset + i for i in range(4)]] * 2
        assert_rotated(layer(x, offset).swapaxes(1, 2), x.swapaxes(1, 2), places, HALF)
        assert mx.array_equal(layer(x, mx.array(offset)), layer(x, offset))
    y = layer(x, offset=mx.array([2**31 - 2, 7]))
    places = [[2**31 - 2 + i for i in range(4)], [7 + i for i in range(4)]]
    assert_rotated(y.swapaxes(1, 2), x.swapaxes(1, 2), places, HALF)


def test_positions_by_token() -> None:
    """Packed texts, and several axes."""
    x = normal(2, 3, 4, 16)
    y = RotaryEmbedding(HALF)(x, positions=[0, 1, 0, 1])
    assert mx.array_equal(y, rotate(x, [0, 1, 0, 1], HALF, heads_first=True))
    places = np.arange(24).reshape(2, 4, 3)
    z = RotaryEmbedding(THREE)(x[..., :8], positions=places)
    assert mx.array_equal(z, rotate(x[..., :8], places, THREE, heads_first=True))


def test_the_gain_is_the_ropes_unless_given() -> None:
    """YaRN's factor on cos and sin."""
    x = normal(3, 4, 16)
    assert YARN.attention_factor != 1
    for layer, gain in (
        (RotaryEmbedding(YARN), YARN.attention_factor),
        (RotaryEmbedding(YARN, gain=1.0), 1.0),
    ):
        y = layer(x).swapaxes(0, 1)
        assert_rotated(y, x.swapaxes(0, 1), range(4), YARN, gain=gain)


def test_no_tokens_are_no_tokens() -> None:
    """An empty prompt stays one."""
    assert RotaryEmbedding(HALF)(mx.zeros((2, 3, 0, 16)), offset=2**63 - 1).shape == (2, 3, 0, 16)


def test_it_has_no_parameters() -> None:
    """Nothing is saved, cast or trained."""
    model: Any = nn.Sequential(RotaryEmbedding(HALF))
    model.set_dtype(mx.bfloat16)
    assert mx.array_equal(model(normal(1, 4, 16)), RotaryEmbedding(HALF)(normal(1, 4, 16)))
    assert model.parameters() == {"layers": [{}]}


def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`rotate` for NumPy's arrays, as identify gives them."""
    return float64(rotate(mx.array(x.astype(np.float32)), positions, HALF)).astype(np.float32)


@pytest.mark.slow
def test_identify_and_diff_know_it() -> None:
    """From its numbers alone: the rope that it was made of."""
    found = phasor.identify(turn, 16)
    assert found.rope == HALF
    assert not found.findings
    assert phasor.diff(turn, HALF) is None


def test_verify_knows_it() -> None:
    """A function, and a recording of MLX's own arrays."""
    assert_rotates(turn, HALF)
    x = normal(40, 2, 16)
    recording = {"positions": mx.arange(40), "q": x, "q_rotated": rotate(x, mx.arange(40), HALF)}
    assert not phasor.verify(HALF, recording)
    assert phasor.verify(Rope(head_dim=16, pairing="interleaved", base=500_000.0), recording)
