"""`Rotation.from_angles`: a pair times ``exp(i angle)``, however large the angle is."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from phasor.errors import SpecError, TensorError
from phasor.torch import Rotation

from .torch_arrays import normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cos_and_sin_are_those_of_the_angles_given(dtype: torch.dtype) -> None:
    """Within 6e-8, or an ulp of float64: compared with 60 digits, up to 1e15 radians."""
    sizes = (1.0, 100.0, 1e5, 1e9, 1e15)
    for given in (torch.float32, torch.float64):
        angles = torch.cat([size * normal(40, seed=3, dtype=torch.float64) for size in sizes])
        angles = angles.to(given)[:, None]
        rotation = Rotation.from_angles(angles, pairing="half", dtype=dtype)
        assert rotation.cos.dtype == rotation.sin.dtype == dtype
        room = 6e-8 if dtype == torch.float32 else 2.0**-52
        with mpmath.workdps(60):
            for row, function in ((rotation.cos, mpmath.cos), (rotation.sin, mpmath.sin)):
                right = [float(function(mpmath.mpf(a))) for a in angles.flatten().tolist()]
                assert np.abs(row.flatten().double().numpy() - right).max() <= room


def test_tokens_and_heads_are_turned_by_their_angles() -> None:
    """In every layout that a Rotation has: the same as its cos and sin."""
    x, angles = normal(2, 5, 3, 10, dtype=torch.float64), normal(2, 5, 3, 4, dtype=torch.float64)
    layout: dict[str, Any] = {"pairing": "interleaved", "pairing_out": "half", "rotary_start": 2}
    y = Rotation.from_angles(angles, **layout, dtype=torch.float64)(x)
    pairs = torch.view_as_complex(x[..., 2:].unflatten(-1, (4, 2)))
    turned = pairs * torch.exp(1j * angles)
    expected = torch.cat((x[..., :2], turned.real, turned.imag), -1)
    assert torch.allclose(y, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_gradients_reach_the_angles(given: torch.dtype) -> None:
    """Numerically in float64; in the dtype of the angles."""
    x = normal(5, 2, 8, dtype=torch.float64)

    def function(angles: Tensor) -> Tensor:
        return Rotation.from_angles(angles, pairing="half", dtype=torch.float64)(x)

    angles = normal(5, 2, 4, dtype=torch.float64).requires_grad_()
    assert gradcheck(function, angles, check_forward_ad=True)
    leaf = angles.detach().to(given).requires_grad_()
    function(leaf).square().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == given


def test_frequencies_can_depend_on_the_input() -> None:
    """By token and head, each angle from the token's own vector: with the gradient of its layer."""
    hidden, positions = normal(2, 5, 16), torch.arange(5)
    layer = torch.nn.Linear(16, 3 * 4)
    rates = torch.nn.functional.softplus(layer(hidden)).unflatten(-1, (3, 4)).double()
    angles = positions[:, None, None] * rates  # [batch, seq, heads, num_pairs]
    q = normal(2, 5, 3, 8)
    y = Rotation.from_angles(angles, pairing="half")(q)
    turned = torch.complex(*q.double().chunk(2, -1)) * torch.exp(1j * angles)
    assert torch.allclose(y, torch.cat((turned.real, turned.imag), -1).float(), atol=2e-6)
    y.sum().backward()
    assert layer.weight.grad is not None
    assert float(layer.weight.grad.abs().min()) > 0


@pytest.mark.compile
def test_it_compiles_and_is_not_rounded_by_autocast(one_graph: None) -> None:
    """Angles of a hundred thousand radians, to the bound of cos and sin."""
    angles, x = 1e5 * normal(5, 4, dtype=torch.float64), normal(5, 2, 8)

    def function(angles: Tensor) -> Tensor:
        return Rotation.from_angles(angles, pairing="half")(x)

    plain, compiled = function(angles), torch.compile(function, fullgraph=True)(angles)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(function(angles), plain)
    assert torch.allclose(plain, compiled, atol=1e-6, rtol=0)


def test_wrong_angles_are_refused() -> None:
    """16 bits hold no angle of a few turns; and the layout is checked as ever."""
    with pytest.raises(TensorError, match=r"float32 or float64, got torch\.bfloat16"):
        Rotation.from_angles(normal(5, 4).bfloat16(), pairing="half")
    with pytest.raises(TensorError, match="angles must be"):
        Rotation.from_angles(torch.arange(4), pairing="half")
    with pytest.raises(TensorError, match="angles must be"):
        Rotation.from_angles([1.0], pairing="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SpecError, match="pairing must be"):
        Rotation.from_angles(normal(5, 4), pairing="halves")
    with pytest.raises(SpecError, match="dtype must be"):
        Rotation.from_angles(normal(5, 4), pairing="half", dtype=torch.float16)
