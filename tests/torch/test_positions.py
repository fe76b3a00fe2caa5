"""Positions of every kind, form and size turn tokens as complex numbers do, along every axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phasor import Rope
from phasor.axes import Alternating, Axial, InterleavedSections, Sectioned
from phasor.torch import rotate, rotate_

from ..each import each
from .torch_arrays import DTYPES, assert_rotated, normal
from .torch_cases import HALF_16 as HALF

pytestmark = pytest.mark.usefixtures("implementation")
LAYOUTS = {
    "sectioned": Sectioned((3, 3, 2)),
    "interleaved": InterleavedSections((4, 2, 2)),
    "alternating": Alternating((2, 3, 3)),
    "axial": Axial((2, 3, 3)),
}


@each("dtype", DTYPES)
@pytest.mark.parametrize(
    "places",
    [
        pytest.param([2**40, 2**40 + 12345, 3, 2**53 + 1, 2**62, 2**63 - 1], id="integers"),
        pytest.param([-(2**40), -(2**53) - 1, -(2**63)], id="negative integers"),
        pytest.param([-1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1], id="ends of 32 bits"),
        pytest.param([2**32, -(2**32), 3 * 2**32, -5 * 2**40], id="multiples of 2**32"),
        pytest.param(np.array([2.0**40 + 0.25, 0.5, 1e15 + 0.125, -(2.0**62)]), id="floats"),
        pytest.param(np.array([1e-30, -0.5, 1.5, np.nextafter(0.5, 0)]), id="ties and a trace"),
        pytest.param(np.array([np.nextafter(2.0**63, 0), -(2.0**62)]), id="the last float"),
    ],
)
def test_positions_of_every_size_are_exact(dtype: torch.dtype, places: Any) -> None:
    """To the ends of int64, both ways, and floats beside them."""
    x = normal(len(places), 2, 16, dtype=dtype)
    assert_rotated(rotate(x, places, HALF), x, places, HALF)
    written = x.clone()
    assert torch.equal(rotate_(written, places, HALF), rotate(x, places, HALF))


@each("direction", [1, -1])
@each("kind", [torch.float64, torch.float32])
@each("dtype", DTYPES)
def test_fractions_of_a_position_turn_a_fraction(
    dtype: torch.dtype, kind: torch.dtype, direction: Any
) -> None:
    """Float positions mean the real number that they hold, in float32 and in float64."""
    places = torch.tensor([0.0, 0.5, -0.25, 1e-3, 1023.75, -70_000.3, 2.0**31 + 7.5], dtype=kind)
    x = normal(7, 2, 16, dtype=dtype)
    rope = Rope(head_dim=16, pairing="half", direction=direction)
    for inverse in (False, True):
        y = rotate(x, places, rope, inverse=inverse)
        assert_rotated(y, x, places, rope, inverse=inverse)


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_python_floats_are_float64(default: torch.dtype) -> None:
    """A number written down means that number, whatever torch's default dtype is."""
    x = normal(1, 2, 16, dtype=torch.float64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        y, scalar = rotate(x, [70_000.3], HALF), rotate(x, 70_000.3, HALF)
    finally:
        torch.set_default_dtype(before)
    assert_rotated(y, x, [70_000.3], HALF)
    assert torch.equal(scalar, y)


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32]


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([5, 0, 97, 3], id="list"),
        pytest.param((5, 0, 97, 3), id="tuple"),
        pytest.param(np.array([5, 0, 97, 3]), id="numpy"),
        pytest.param(np.array([5, 0, 97, 3], dtype=np.int32), id="numpy int32"),
        pytest.param(np.array([3, 97, 0, 5])[::-1], id="numpy reversed"),
        pytest.param(np.broadcast_to(np.array([5, 0, 97, 3]), (4,)), id="numpy read-only"),
        pytest.param(np.array([5, 0, 97, 3]).astype(">i4"), id="numpy big-endian"),
        *[pytest.param(torch.tensor([5, 0, 97, 3], dtype=t), id=str(t)) for t in INTEGERS],
        pytest.param(torch.tensor([5, 9, 0, 9, 97, 9, 3, 9])[::2], id="strided"),
        pytest.param(torch.tensor([[5, 0, 97, 3]]), id="a batch of one"),
    ],
)
def test_positions_of_every_kind_mean_the_same(positions: Any) -> None:
    """Integers give one result to the bit, whatever they came in."""
    x = normal(2, 4, 2, 16)
    assert torch.equal(rotate(x, positions, HALF), rotate(x, torch.tensor([5, 0, 97, 3]), HALF))


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(7, id="scalar"),
        pytest.param(torch.tensor(7), id="scalar tensor"),
        pytest.param(0.75, id="scalar float"),
        pytest.param([3, 1, 4, 1], id="seq"),
        pytest.param([[3, 1, 4, 1]], id="one row for both batches"),
        pytest.param([[3, 1, 4, 1], [5, 9, 2, 6]], id="batch and seq"),
        pytest.param([[7], [2000]], id="one position per batch"),
        pytest.param([[0, 1, 0, 1], [0, 0, 1, 2]], id="packed"),
        pytest.param([[[3, 1, 4, 1]], [[5, 9, 2, 6]], [[5, 3, 5, 8]]], id="two batch dimensions"),
    ],
)
def test_positions_broadcast_against_the_leading_dimensions(positions: Any) -> None:
    """Every token turns by its own position: shown token by token."""
    x = normal(3, 2, 4, 5, 16)
    y = rotate(x, positions, HALF)
    given = torch.as_tensor(positions).expand(3, 2, 4)
    for token in np.ndindex(3, 2, 4):
        alone = x[token][None]
        place = [given[token].item()]
        assert_rotated(y[token][None], alone, place, HALF)


@each("dtype", DTYPES)
@each("kind", ["integers", "floats"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_follows_its_own_axis(layout: str, kind: str, dtype: torch.dtype) -> None:
    """Time, height and width drive the pairs that the layout gives them."""
    rope = Rope(head_dim=20, rotary_dim=16, pairing="half", axes=LAYOUTS[layout])
    places = np.array([[[5, 1, 70_000], [6, -3, 2]], [[0, 0, 9], [2**33, 4, 4]]])
    if kind == "floats":
        places = places + 0.25
    x = normal(2, 2, 3, 20, dtype=dtype)
    assert_rotated(rotate(x, places, rope), x, places, rope)


@pytest.mark.parametrize("layout", ["sectioned", "interleaved", "alternating"])
def test_text_on_several_axes_is_text_on_one(layout: str) -> None:
    """Equal coordinates give the one-axis result to the bit."""
    rope = Rope(head_dim=16, pairing="half", axes=LAYOUTS[layout])
    x, places = normal(5, 2, 16), torch.tensor([0, 1, -77, 5000, 2**35])
    everywhere = places[:, None].expand(5, 3)
    assert torch.equal(rotate(x, everywhere, rope), rotate(x, places, HALF))
    halves = places + 0.5
    assert torch.equal(rotate(x, halves[:, None].expand(5, 3), rope), rotate(x, halves, HALF))
