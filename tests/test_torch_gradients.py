"""The derivative of a rotation is the inverse rotation, however torch asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from phasor import Rope, Sectioned
from phasor.torch import rotate, rotate_, rotate_by, rotate_by_, rotate_qk, rotate_qk_

from .torch_oracle import DTYPES, assert_rotated, excess, excess_by, float64, normal

HALF = Rope(head_dim=8, pairing="half")
MIXED = Rope(
    head_dim=8,
    rotary_dim=4,
    rotary_start=2,
    pairing="interleaved",
    pairing_out="half",
    direction=-1,
)
THREE = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))
PLACES = torch.tensor([3, 70_001, -5, 2**33])
ROPES = [pytest.param(HALF, id="half"), pytest.param(MIXED, id="mixed")]
CHECKS: dict[str, Any] = {"check_forward_ad": True, "check_batched_grad": True}
AGAIN: dict[str, Any] = {"check_fwd_over_rev": True, "check_batched_grad": True}


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal numbers whose gradient is wanted."""
    return normal(*shape, dtype=dtype, seed=seed).requires_grad_()


def turned(x: Tensor) -> Tensor:
    """The rotation that most of these tests differentiate."""
    return rotate(x, PLACES, HALF)


def cubes(x: Tensor) -> Tensor:
    """A number that depends on the rotation in a way that has second derivatives."""
    return turned(x).pow(3).sum()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rope", ROPES)
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


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("verb", [rotate_by, rotate_by_])
@pytest.mark.parametrize("pairing_out", ["half", "interleaved"])
def test_learned_rows_are_differentiable(
    pairing_out: str, verb: Callable[..., Tensor], inverse: bool
) -> None:
    """With respect to cos and sin, broadcast over a batch, as with respect to x."""

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layout: dict[str, Any] = {"pairing": "half", "pairing_out": pairing_out, "rotary_start": 1}
        return verb(x.clone(), cos, sin, inverse=inverse, **layout)

    inputs = leaf(2, 4, 2, 8), leaf(1, 4, 3, seed=1), leaf(1, 4, 3, seed=2)
    assert gradcheck(function, inputs, **CHECKS)
    assert gradgradcheck(function, inputs, **AGAIN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_learned_rows_get_gradients_in_their_own_dtype(dtype: torch.dtype) -> None:
    """Float32 parameters serve tensors of any dtype; fixed x asks for no gradient."""
    x = normal(4, 1, 8, dtype=dtype)
    cos, sin = (leaf(4, 4, dtype=torch.float32, seed=s) for s in (1, 2))
    rotate_by(x, cos, sin, pairing="half").float().sum().backward()
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
def test_backward_is_the_inverse_rotation(dtype: torch.dtype, rope: Rope, inverse: bool) -> None:
    """In every dtype, to the forward's own bound, with the same gain."""
    x, out = leaf(4, 2, 8, dtype=dtype), normal(4, 2, 8, dtype=dtype, seed=1)
    y = rotate(x, PLACES, rope, inverse=inverse, gain=1.25)
    (came,) = torch.autograd.grad(y, x, out)
    assert_rotated(came, out, PLACES, rope, inverse=not inverse, gain=1.25)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_explicit_rows_is_their_conjugate(dtype: torch.dtype) -> None:
    """Rows that are not unit numbers: the adjoint, which is not the inverse."""
    rows = float64(normal(4, 4)) + 1j * float64(normal(4, 4, seed=1))
    x, out = leaf(4, 2, 8, dtype=dtype), normal(4, 2, 8, dtype=dtype, seed=2)
    y = rotate_by(x, torch.tensor(rows.real), torch.tensor(rows.imag), pairing="half")
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
    with pytest.raises(RuntimeError, match="phasor::rotate_ records no gradient"):
        torch.ops.phasor.rotate_([x], [PLACES], HALF.to_json(), False, 1.0, "eager")
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


@pytest.fixture
def dual_level() -> Iterator[None]:
    """Forward-mode differentiation, for one test."""
    with forward_ad.dual_level():
        yield


@pytest.mark.usefixtures("dual_level")
@pytest.mark.parametrize("verb", [rotate, rotate_])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tangent_turns_with_its_vector(dtype: torch.dtype, verb: Callable[..., Tensor]) -> None:
    """Forward mode: the tangent of R(p) x is R(p) applied to the tangent, in place too."""
    x, tangent = normal(4, 2, 8, dtype=dtype), normal(4, 2, 8, dtype=dtype, seed=1)
    y = verb(forward_ad.make_dual(x.clone(), tangent.clone()), PLACES, MIXED, gain=1.25)
    primal, came = forward_ad.unpack_dual(y)
    assert_rotated(primal, x, PLACES, MIXED, gain=1.25)
    assert_rotated(came, tangent, PLACES, MIXED, gain=1.25)


@pytest.mark.usefixtures("dual_level")
def test_only_what_has_a_tangent_gets_one() -> None:
    """A dual query beside a plain key."""
    q = forward_ad.make_dual(normal(4, 2, 8), normal(4, 2, 8, seed=1))
    turned_q, turned_k = rotate_qk(q, normal(4, 1, 8), PLACES, HALF)
    assert forward_ad.unpack_dual(turned_q).tangent is not None
    assert forward_ad.unpack_dual(turned_k).tangent is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_function_transforms_agree_with_the_rotation(dtype: torch.dtype) -> None:
    """A jvp turns the tangent, a vjp turns the cotangent back, values stay the oracle's."""
    x, other = normal(4, 2, 8, dtype=dtype), normal(4, 2, 8, dtype=dtype, seed=1)
    y, tangent = jvp(turned, (x,), (other,))
    again, pullback = vjp(turned, x)
    for came, given in ((y, x), (again, x), (tangent, other)):
        assert_rotated(came, given, PLACES, HALF)
    assert_rotated(pullback(other)[0], other, PLACES, HALF, inverse=True)


def test_jacobians_are_the_rotation_matrix() -> None:
    """Forwards and backwards, column by column what unit vectors become."""
    place = torch.tensor([77])
    columns = [rotate(unit[None, None], place, MIXED)[0, 0] for unit in torch.eye(8).double()]

    def function(x: Tensor) -> Tensor:
        return rotate(x[None, None], place, MIXED)[0, 0]

    for jacobian in (jacrev, jacfwd):
        assert torch.equal(jacobian(function)(normal(8).double()), torch.stack(columns, -1))


def test_grad_and_hessian_agree_with_autograd() -> None:
    """A cubic of the rotation: gradient, and both orders of second derivative."""
    x = normal(4, 1, 8, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cubes(plain), plain)
    # three roundings of numbers that are at most 3 |y|**2
    atol = 8 * 2**-53 * 3 * float(x.norm()) ** 2
    torch.testing.assert_close(grad(cubes)(x), expected, rtol=0, atol=atol)
    second = torch.autograd.functional.hessian(cubes, x)
    torch.testing.assert_close(hessian(cubes)(x), second, rtol=0, atol=2 * atol)


PLACES_BY_BATCH = torch.tensor([[3, 70_001, -5, 2**33], [0, 1, 2, 3]])
BATCHED = {
    "over x": ((0, None), PLACES, HALF),
    "over positions": ((None, 0), PLACES_BY_BATCH, HALF),
    "over both": ((0, 0), PLACES_BY_BATCH, HALF),
    "over a later dimension": ((1, 1), PLACES_BY_BATCH, HALF),
    "over scalars": ((0, 0), torch.tensor([3, 2**33]), HALF),
    "over axes": ((0, 0), PLACES_BY_BATCH[..., None] * torch.tensor([1, 2, 3]), THREE),
    "axes for all": ((0, None), PLACES[:, None] * torch.tensor([1, 2, 3]), THREE),
}


WAYS = ["rotate", "rotate_", "operator", "mutating operator"]


@pytest.mark.parametrize(
    ("case", "verb"),
    # a write to one tensor for every entry is refused: see the next test
    [(c, v) for c in BATCHED for v in WAYS if (c, v) != ("over positions", "mutating operator")],
)
def test_a_batch_is_its_entries_one_by_one(case: str, verb: str) -> None:
    """Over x, positions or both: through the verbs and through the operators, bit for bit.

    With the eager backend, whose operations are what ``torch.func`` sees of every backend.
    """
    (of_x, of_p), places, rope = BATCHED[case]
    x = normal(2, 3, 4, 2, 8) if of_x is not None else normal(3, 4, 2, 8)
    expected = torch.stack(
        [
            rotate(
                x[i] if of_x is not None else x,
                places[i] if of_p is not None else places,
                rope,
                backend="eager",
            )
            for i in range(2)
        ]
    )
    options = rope.to_json(), False, 1.0, "eager"

    def function(x: Tensor, p: Tensor) -> Tensor:
        if verb == "rotate":
            return rotate(x, p, rope)
        if verb == "operator":
            return torch.ops.phasor.rotate([x], [p], *options)[0]
        written = x + 0 * p.sum()
        if verb == "rotate_":
            return rotate_(written, p, rope)
        torch.ops.phasor.rotate_([written], [p], *options)
        return written

    given = [(x, of_x), (places, of_p)]
    moved = [t if at is None else t.movedim(0, at) for t, at in given]
    assert torch.equal(vmap(function, in_dims=(of_x, of_p))(*moved), expected)


def test_a_batch_of_writes_to_one_tensor_is_refused() -> None:
    """Every entry would write the same memory, so nobody does."""
    x = normal(4, 2, 8)
    before = x.clone()

    def write(p: Tensor) -> Tensor:
        torch.ops.phasor.rotate_([x], [p], HALF.to_json(), False, 1.0, "eager")
        return p

    with pytest.raises(ValueError, match=r"x must be batched to be rotated in place under vmap"):
        vmap(write)(PLACES_BY_BATCH)
    assert torch.equal(x, before)


def test_batches_of_gradients_and_gradients_of_batches() -> None:
    """Both orders of vmap and grad are the gradients one by one."""
    x = normal(2, 4, 2, 8, dtype=torch.float64)

    def number(x: Tensor, p: Tensor) -> Tensor:
        return rotate(x, p, HALF).pow(3).sum()

    expected = torch.stack([grad(number)(x[i], PLACES_BY_BATCH[i]) for i in range(2)])
    together = grad(lambda t: vmap(number)(t, PLACES_BY_BATCH).sum())
    assert torch.equal(vmap(grad(number))(x, PLACES_BY_BATCH), expected)
    assert torch.equal(together(x), expected)


def test_a_transformed_write_has_the_gradient_of_its_copy() -> None:
    """In-place inside torch.func.grad, on a tensor that is not an argument's leaf."""

    def number(x: Tensor) -> Tensor:
        return rotate_(x * 2, PLACES, HALF).pow(3).sum()

    def copied(x: Tensor) -> Tensor:
        return rotate(x * 2, PLACES, HALF).pow(3).sum()

    x = normal(4, 2, 8, dtype=torch.float64)
    assert torch.equal(grad(number)(x), grad(copied)(x))


def test_a_transform_never_invents_a_rotation() -> None:
    """Positions without a digit row are NaN where the data cannot be looked at."""
    far = torch.tensor([2**40 - 1, 2**40, -(2**40), -(2**63)])
    x = normal(4, 2, 8, dtype=torch.float64)
    y = vmap(lambda t: rotate(t, far, HALF), in_dims=1, out_dims=1)(x[:, :, None])[:, :, 0]
    assert excess(y[:1], x[:1], far[:1], HALF) <= 1
    assert bool(y[1:].isnan().all())
