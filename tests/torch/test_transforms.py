"""Forward mode and the transforms of ``torch.func`` see a rotation as what it is: linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from phasor import Rope
from phasor.axes import Sectioned
from phasor.torch import rotate, rotate_, rotate_qk

from .torch_arrays import DTYPES, assert_rotated, normal
from .torch_cases import HALF, MIXED, PLACES

THREE = Rope(head_dim=8, pairing="half", axes=Sectioned((2, 1, 1)))


def turned(x: Tensor) -> Tensor:
    """The rotation that most of these tests differentiate."""
    return rotate(x, PLACES, HALF)


def cubes(x: Tensor) -> Tensor:
    """A number that depends on the rotation in a way that has second derivatives."""
    return turned(x).pow(3).sum()


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
    layout = rope.pairing, rope.output_pairing, rope.rotary_start, False, "eager"

    def function(x: Tensor, p: Tensor) -> Tensor:
        if verb == "rotate":
            return rotate(x, p, rope)
        if verb == "operator":
            rows = torch.ops.phasor.cos_sin(p, rope.to_json(), 1.0, torch.float32, "eager")
            return torch.ops.phasor.turn([x], *rows, *layout)[0]
        written = x + 0 * p.sum()
        if verb == "rotate_":
            return rotate_(written, p, rope)
        rows = torch.ops.phasor.cos_sin(p, rope.to_json(), 1.0, torch.float32, "eager")
        torch.ops.phasor.turn_([written], *rows, *layout)
        return written

    given = [(x, of_x), (places, of_p)]
    moved = [t if at is None else t.movedim(0, at) for t, at in given]
    assert torch.equal(vmap(function, in_dims=(of_x, of_p))(*moved), expected)


def write_by_operator(x: Tensor, p: Tensor) -> None:
    """The operator that the functions call."""
    rows = torch.ops.phasor.cos_sin(p, HALF.to_json(), 1.0, torch.float32, "eager")
    torch.ops.phasor.turn_([x], *rows, "half", "half", 0, False, "eager")


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "operator": write_by_operator,
    "rotate_": lambda x, p: rotate_(x, p, HALF),
    "a clone": lambda x, p: rotate_(x.clone(), p, HALF),
    "inside another": lambda x, p: vmap(lambda _: rotate_(x, p, HALF))(torch.ones(3)),
    "of gradients": lambda x, p: grad(lambda p: rotate_(x, p.detach(), HALF).sum())(p + 0.0),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_batch_of_writes_to_one_tensor_is_refused(way: str) -> None:
    """Every entry would write the same memory, so nobody does."""
    x = normal(4, 2, 8)
    before = x.clone()

    def write(p: Tensor) -> Tensor:
        WRITES[way](x, p)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transform_reaches_every_position(dtype: torch.dtype) -> None:
    """To the ends of int64; what has no angle is NaN, for its value cannot be looked at."""
    far = torch.tensor([2**63 - 1, 2**40, -1, -(2**63)])
    x = normal(4, 2, 8, dtype=dtype)
    y = vmap(lambda t: rotate(t, far, HALF), in_dims=1, out_dims=1)(x[:, :, None])[:, :, 0]
    assert_rotated(y, x, far, HALF)
    pulled = grad(lambda t: (rotate(t, far, HALF) * x).sum())(x)
    assert_rotated(pulled, x, far, HALF, inverse=True)
    none = torch.tensor([torch.nan, torch.inf, 2.0**63, 7.5], dtype=torch.float64)
    y = vmap(lambda t: rotate(t, none, HALF), in_dims=1, out_dims=1)(x[:, :, None])[:, :, 0]
    assert y.isnan().all((1, 2)).tolist() == [True, True, True, False]
