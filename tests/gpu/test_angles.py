"""Cos and sin in the Triton kernel, against mpmath: on a GPU, else interpreted on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from phasor import Rope
from phasor.angles import COS_SIN_ERROR, COS_SIN_ERROR_FLOAT32, REST_ERROR, REST_ERROR_FLOAT32
from phasor.axes import Sectioned
from phasor.torch import rotate
from phasor.torch._operator import triton as triton_backend

from .. import oracle, strategies
from ..oracle import pair_places
from ..torch.torch_arrays import float64
from .triton_runs import DEVICE, TRITON, runs_kernels

pytestmark = runs_kernels

#: What is promised, and what a radian per position adds to it where the position is no integer.
ERRORS = {
    torch.float32: (COS_SIN_ERROR_FLOAT32, REST_ERROR_FLOAT32),
    torch.float64: (COS_SIN_ERROR, REST_ERROR),
}
ENDS = [
    *(0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, -(2**32), -(2**32) - 1),
    *(3 * 2**32, -5 * 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63), 1 - 2**63),
]
BETWEEN = [0.5, -0.5, 1.5, -2.5, 1e-30, -1e-30, 0.49999997, -0.49999997, 12.3, -70_000.3, 2.0**33]
# limbs from powers, a rule, two lists, and a number for each pair: the kernel sees no more of a law
SOME_LAWS = ("plain", "dynamic_ntk", "longrope", "per_pair")
ACROSS = Rope(head_dim=16, pairing="half", axes=Sectioned((3, 3, 2)))


def made(rope: Rope, places: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel multiplies by: pairs (1, 0) turn into cosines and sines."""
    x = torch.zeros(len(places), 1, rope.head_dim, dtype=dtype, device=DEVICE)
    first, second = pair_places(rope.pairing, rope.rotary_start, rope.num_pairs)
    x[..., first] = 1.0
    y = float64(rotate(x, places.to(DEVICE), rope, gain=1.0, **TRITON))[:, 0]
    first, second = pair_places(rope.output_pairing, rope.rotary_start, rope.num_pairs)
    return y[:, first], y[:, second]


def assert_exact(rope: Rope, places: Tensor, fastest: float = 0.0) -> None:
    """Within what is promised in each dtype, with ``fastest`` radians a position."""
    expected = oracle.rows(rope, places.tolist())
    for dtype, (error, rest_error) in ERRORS.items():
        for found, right in zip(made(rope, places, dtype), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=error + fastest * rest_error)


@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param(name, law, marks=[] if name in SOME_LAWS else pytest.mark.every_kernel)
        for name, law in strategies.EVERY_LAW.items()
    ],
    ids=strategies.EVERY_LAW,
)
def test_every_law_is_exact_at_every_int64(name: str, law: Any) -> None:
    """Positions of any size, half of them negative, and those at which a product could break."""
    rope = Rope(head_dim=64, pairing="half", base=5e5, scaling=law, direction=-1)
    drawn = np.random.default_rng(len(name)).integers(0, 2**63 - 1, 12)
    some = drawn >> np.arange(0, 60, 5)
    assert_exact(rope, torch.tensor([*some.tolist(), *(-some).tolist(), *ENDS]))


@settings(max_examples=25)
@given(strategies.placed_ropes())
def test_any_rope_is_exact_at_any_int64(placed: tuple[Rope, Any]) -> None:
    """Every layout, slice, direction and pairing, and explicit frequencies."""
    rope, place = placed
    assert_exact(rope, torch.tensor([place]))


def test_angles_beside_an_eighth_of_a_turn_are_exact() -> None:
    """On either side, where the quarter turn changes and polynomials are worst."""
    eighth = math.pi / 4
    steps = [math.nextafter(eighth, 0), eighth, math.nextafter(eighth, 1), 2 * eighth]
    steps += [eighth * (1 + e) for e in (2.0**-25, -(2.0**-25), 2.0**-31, -(2.0**-31))]
    rope = Rope(head_dim=16, pairing="half", explicit_inv_freq=tuple(steps))
    assert_exact(rope, torch.arange(-17, 18))


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_floats_are_the_numbers_that_they_hold(given: torch.dtype) -> None:
    """Ties, and the smallest and largest numbers, at frequencies of up to many turns a position."""
    edge = 2.0**63
    largest = torch.nextafter(torch.tensor(edge, dtype=given), torch.tensor(0.0)).item()
    places = torch.tensor([*BETWEEN, 2.0**52 + 1, 2.0**51 + 0.5, largest, -largest], dtype=given)
    for fastest in (1.0, 1e4, 1e15):
        steps = tuple(fastest / 10**k for k in range(6))
        rope = Rope(head_dim=12, pairing="interleaved", explicit_inv_freq=steps)
        assert_exact(rope, places, fastest)


def test_quarters_of_a_position_are_exact_at_every_frequency() -> None:
    """They are whole numbers of units, however many turns a position makes."""
    rope = Rope(head_dim=4, pairing="half", explicit_inv_freq=(1e15, 123456.789))
    places = torch.tensor([0.25, -0.25, 0.5, 7.75, -1e6 - 0.5], dtype=torch.float64)
    assert_exact(rope, places)


@settings(max_examples=25)
@given(strategies.placed_ropes(strategies.FLOAT_POSITIONS))
def test_any_rope_is_exact_at_any_float(placed: tuple[Rope, Any]) -> None:
    """As many units off as the fastest pair has radians."""
    rope, place = placed
    fastest = float(max(oracle.frequencies(rope)))
    places = torch.tensor([place], dtype=torch.float64)
    assert_exact(rope, places, fastest)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_floats_without_an_angle_are_nan(given: torch.dtype, dtype: torch.dtype) -> None:
    """Never a plausible rotation; neighbours, and pairs of other axes, do not suffer."""
    rows = [[5.5, bad, -7.25] for bad in (math.nan, math.inf, -math.inf, 2.0**63, -(2.0**63))]
    places = torch.tensor([*rows, [5.5, 2.0**62, -7.25]], dtype=given, device=DEVICE)
    for row in triton_backend.cos_sin(places, ACROSS.to_json(), 1.0, dtype):
        kept = [0, 1, 2, 6, 7]
        assert row[:5, 3:6].isnan().all()
        assert not row[5:].isnan().any()
        assert (row[:, kept] == row[5:, kept]).all()


def test_a_position_has_one_result() -> None:
    """Whatever stands beside it, and in whatever dtype it is given."""
    rope = Rope(head_dim=64, pairing="half")
    places = torch.tensor([5, 2**40, -3, 70_001, -(2**31)])
    alone = [np.hstack(made(rope, places[i : i + 1], torch.float32)) for i in range(5)]
    together = np.hstack(made(rope, places, torch.float32))
    np.testing.assert_array_equal(np.vstack(alone), together)
    near = places[[0, 2, 3, 4]]
    for kind in (torch.int32, torch.float32, torch.float64):
        same = np.hstack(made(rope, near.to(kind), torch.float32))
        np.testing.assert_array_equal(same, together[[0, 2, 3, 4]])
