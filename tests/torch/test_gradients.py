"""The derivative of a rotation is the inverse rotation, in every dtype, in place or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from phasor import Rope
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from .torch_arrays import DTYPES, assert_rotated, excess_by, float64, normal
from .torch_cases import HALF, MIXED, PLACES

ROPES = [pytest.param(HALF, id="half"), pytest.param(MIXED, id="mixed", marks=pytest.mark.slow)]
CHECKS: dict[str, Any] = {"check_forward_ad": True, "check_batched_grad": True}
AGAIN: dict[str, Any] = {"check_fwd_over_rev": True, "check_batched_grad": True}


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers whose gradient is wanted."""
    return normal(*shape, dtype=dtype, seed=seed).requires_grad_()


@pytest.mark.parametrize(
    ("rope", "inverse"),
    [
        pytest.param(HALF, False, id="half"),
        pytest.param(MIXED, True, id="mixed, inverse", marks=pytest.mark.slow),
        pytest.param(HALF, True, id="half, inverse", marks=pytest.mark.slow),
        pytest.param(MIXED, False, id="mixed", marks=pytest.mark.slow),
    ],
)
def test_first_and_second_derivatives_are_numerically_right(rope: Rope, inverse: bool) -> None:
    """Backward, forward mode, batched gradients, and the derivative of the backward."""

    def function(x: Tensor) -> Tensor:
        return rotate(x, PLACES, rope, inverse=inverse, gain=1.5)

    assert gradcheck(function, leaf(4, 2, 8), check_batched_forward_grad=True, **CHECKS)
    assert gradgradcheck(function, leaf(4, 2, 8), **AGAIN)


def test_derivatives_are_right_for_query_and_key() -> None:
    """Both tensors, with different numbers of heads."""

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_qk(q, k, PLACES, HALF)

    assert gradcheck(function, (leaf(4, 3, 8), leaf(4, 1, 8, seed=1)), **CHECKS)


@pytest.mark.parametrize("rope", ROPES)
def test_derivatives_are_right_in_place(rope: Rope) -> None:
    """Writing into a copy that autograd follows."""

    def function(x: Tensor) -> Tensor:
        return rotate_(x.clone(), PLACES, rope)

    assert gradcheck(function, leaf(4, 2, 8), **CHECKS)
    assert gradgradcheck(function, leaf(4, 2, 8), **AGAIN)


@pytest.mark.parametrize(
    ("pairing_out", "function", "inverse"),
    [
        ("interleaved", Rotation.__call__, True),
        pytest.param("half", Rotation.__call__, False, marks=pytest.mark.slow),
        pytest.param("half", Rotation.rotate_, True, marks=pytest.mark.slow),
    ],
)
def test_learned_rows_are_differentiable(
    pairing_out: str, function: Callable[..., Tensor], inverse: bool
) -> None:
    """With respect to cos and sin, broadcast over a batch, as with respect to x."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layout: dict[str, Any] = {"pairing": "half", "pairing_out": pairing_out, "rotary_start": 1}
        rotation = Rotation(cos, sin, **layout)
        return function(rotation.inverse() if inverse else rotation, x.clone())

    inputs = leaf(2, 2, 2, 8), leaf(1, 2, 3, seed=1), leaf(1, 2, 3, seed=2)
    assert gradcheck(turned, inputs, **CHECKS)
    assert gradgradcheck(turned, inputs, **AGAIN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_learned_rows_get_gradients_in_their_own_dtype(dtype: torch.dtype) -> None:
    """Float32 parameters serve tensors of any dtype; fixed x asks for no gradient."""
    x = normal(4, 1, 8, dtype=dtype)
    cos, sin = (leaf(4, 4, dtype=torch.float32, seed=s) for s in (1, 2))
    Rotation(cos, sin, pairing="half")(x).float().sum().backward()
    first, second = float64(x)[:, 0, :4], float64(x)[:, 0, 4:]
    for row, right in ((cos, first + second), (sin, first - second)):
        assert row.grad is not None
        assert row.grad.dtype == torch.float32
        # one float32 sum of two numbers that are exact
        torch.testing.assert_close(
            row.grad.double(), torch.from_numpy(right), rtol=2**-23, atol=2**-23
        )


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_the_transpose(dtype: torch.dtype, rope: Rope, inverse: bool) -> None:
    """In every dtype, to the forward's own bound, with the gain of the forward."""
    x, out = leaf(4, 2, 8, dtype=dtype), normal(4, 2, 8, dtype=dtype, seed=1)
    y = rotate(x, PLACES, rope, inverse=inverse, gain=1.25)
    (came,) = torch.autograd.grad(y, x, out)
    gain = 1 / 1.25 if inverse else 1.25
    assert_rotated(came, out, PLACES, rope, inverse=not inverse, gain=gain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_explicit_rows_is_their_conjugate(dtype: torch.dtype) -> None:
    """Rows that are not unit numbers: the adjoint, which is not the inverse."""
    rows = float64(normal(4, 4)) + 1j * float64(normal(4, 4, seed=1))
    x, out = leaf(4, 2, 8, dtype=dtype), normal(4, 2, 8, dtype=dtype, seed=2)
    y = Rotation(torch.tensor(rows.real), torch.tensor(rows.imag), pairing="half")(x)
    (came,) = torch.autograd.grad(y, x, out)
    assert excess_by(came, out, rows.conj(), ("half", "half")) <= 1


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_one_of_two_may_want_a_gradient(wanted: str) -> None:
    """The other's result is detached, and the gradient is what it would be alone."""
    tensors = {"q": normal(4, 3, 8), "k": normal(4, 2, 8, seed=1)}
    tensors[wanted].requires_grad_()
    y = dict(zip("qk", rotate_qk(tensors["q"], tensors["k"], PLACES, HALF), strict=True))
    assert {name for name in "qk" if y[name].requires_grad} == {wanted}
    out = normal(*y[wanted].shape, seed=2)
    y[wanted].backward(out)
    came = tensors[wanted].grad
    assert came is not None
    assert_rotated(came, out, PLACES, HALF, inverse=True)


def test_a_result_that_is_not_used_costs_no_gradient() -> None:
    """A backward through the query alone leaves the key's gradient empty."""
    q, k = leaf(4, 3, 8), leaf(4, 2, 8, seed=1)
    rotate_qk(q, k, PLACES, HALF)[0].sum().backward()
    assert q.grad is not None
    assert k.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_on_a_result_records_the_right_gradient(dtype: torch.dtype) -> None:
    """A doubled leaf, rotated in place, gives twice the inverse rotation of the gradient."""
    q, k = leaf(4, 2, 8, dtype=dtype), leaf(4, 1, 8, dtype=dtype, seed=1)
    outs = normal(4, 2, 8, dtype=dtype, seed=2), normal(4, 1, 8, dtype=dtype, seed=3)
    y = rotate_qk_(q * 2, k * 2, PLACES, MIXED)
    came = torch.autograd.grad(y, (q, k), outs)
    for g, out in zip(came, outs, strict=True):
        assert_rotated(g / 2, out, PLACES, MIXED, inverse=True)


def test_in_place_on_a_leaf_is_refused_by_torch() -> None:
    """As by torch's own in-place operations, and nothing is written."""
    x = leaf(4, 2, 8)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        rotate_(x, PLACES, HALF)
    assert torch.equal(x.detach(), before)
    with torch.no_grad():
        assert_rotated(rotate_(x, PLACES, HALF), before, PLACES, HALF)


def test_the_mutating_operator_refuses_to_record() -> None:
    """Called past the verbs, it raises rather than lose a gradient."""
    x = leaf(4, 2, 8) * 1
    before = x.detach().clone()
    row = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="phasor::turn_ cannot record a gradient"):
        torch.ops.phasor.turn_([x], row, row, "half", "half", 0, False, "eager")
    assert torch.equal(x.detach(), before)


def test_autograd_keeps_the_positions_alone() -> None:
    """Eight bytes a token, whatever the width and number of heads."""
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    q, k = leaf(2, 4, 32, 8), leaf(2, 4, 8, 8, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        rotate_qk(q, k, PLACES, HALF)
        rotate_qk_(q * 1, k * 1, PLACES, HALF)
    assert [t.data_ptr() for t in kept] == [PLACES.data_ptr()] * 2
    assert sum(t.nbytes for t in kept) == 2 * 4 * 8


def test_positions_written_after_the_forward_are_noticed() -> None:
    """Torch's version check guards what is saved."""
    places = PLACES.clone()
    y = rotate(leaf(4, 2, 8), places, HALF)
    places += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
