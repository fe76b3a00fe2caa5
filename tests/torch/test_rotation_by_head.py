"""Cosines of one's own for every head: by as many dimensions as the tensor has, never by sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, vmap

from phasor import TensorError
from phasor.torch import Rotation
from phasor.torch._operator import cpu

from ..each import each
from ..oracle import pair_places
from .torch_arrays import normal

BACKENDS = ("auto", "eager", *(["cpu"] if cpu.paths() else []))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# of cos and sin for a tensor [2, 5, 3, 12] with five pairs from coordinate 1 on
SHAPES = ((2, 5, 3, 5), (2, 5, 1, 5), (1, 5, 3, 5), (2, 1, 3, 5), (1, 1, 3, 5), (1, 1, 1, 5))
START, PAIRS = 1, 5


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> np.ndarray:
    """Every pair as one complex number, times ``cos + i sin``, in complex128."""
    y = x.double().numpy().copy()
    factors = cos.double().numpy() + 1j * sin.double().numpy()
    for k, (one, other) in enumerate(zip(*pair_places(pairing, START, PAIRS), strict=True)):
        z = (y[..., one] + 1j * y[..., other]) * factors[..., k]
        y[..., one], y[..., other] = z.real, z.imag
    return y


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor, and cos and sin of random angles; 16 bits only for the tensor."""
    angles = normal(*shape, seed=3, dtype=torch.float64) * 5
    width = torch.float64 if dtype == torch.float64 else torch.float32
    return normal(2, 5, 3, 12, dtype=dtype), angles.cos().to(width), angles.sin().to(width)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` by cosines in halves of its heads."""
    return Rotation(cos, sin, pairing="half", rotary_start=START)(x)


def room(x: Tensor) -> float:
    """Two products and a sum in the dtype that is computed in, and a rounding of the result."""
    computed = 2.0**-53 if x.dtype == torch.float64 else 2.0**-24
    return 2 * float(x.abs().max()) * (3 * computed + torch.finfo(x.dtype).eps / 2)


@pytest.mark.parametrize("backend", BACKENDS)
@each("dtype", DTYPES)
@each("shape", SHAPES)
@each("pairing", ["half", "interleaved"])
def test_every_head_is_turned_by_its_own(
    pairing: str, shape: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    """Out of place and in place, heads before tokens and after."""
    x, cos, sin = drawn(shape, dtype)
    expected = turned(x, cos, sin, pairing)
    rotation = Rotation(cos, sin, pairing=pairing, rotary_start=START)
    made = rotation(x, backend=backend)
    written = x.clone()
    assert rotation.rotate_(written, backend=backend) is written
    heads_first = rotation(x.transpose(1, 2), heads_first=True, backend=backend)
    for y in (made, written, heads_first.transpose(1, 2)):
        assert y.shape == x.shape
        assert np.abs(y.double().numpy() - expected).max() <= room(x)
    back = rotation.inverse()(made, backend=backend)
    assert float((back - x).abs().max()) <= 4 * room(x)


def test_gradients_reach_the_cosines_of_every_head() -> None:
    """Of a whole shape, and summed where one is shared."""
    for shape in SHAPES:
        x, cos, sin = (one.requires_grad_() for one in drawn(shape, torch.float64))
        assert torch.autograd.gradcheck(
            turn,
            (x, cos, sin),
            fast_mode=True,
        )


@pytest.mark.parametrize("shape", [(2, 5, 3, 5), (5, 5)], ids=["by head", "by token"])
def test_gradients_reach_cosines_through_a_view_that_is_written(shape: tuple[int, ...]) -> None:
    """In place, into a slice of a tensor without history."""
    x, *rows = drawn(shape, torch.float64)
    memory = torch.cat((x, x), dim=2)
    rotation = Rotation(*(one.requires_grad_() for one in rows), pairing="half", rotary_start=START)
    new = rotation(x)
    written = rotation.rotate_(memory[:, :, 3:])
    assert torch.equal(written, new)
    assert torch.equal(memory[:, :, :3], x)
    expected = torch.autograd.grad(new.sum(), rows)
    assert all(map(torch.equal, torch.autograd.grad(memory.sum(), rows), expected))


def test_a_batch_of_cosines_is_mapped() -> None:
    """Under vmap, over the rows' first dimension and over the tensor's."""
    x, cos, sin = drawn((2, 5, 3, 5), torch.float64)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return turn(x, cos, sin)

    np.testing.assert_allclose(
        vmap(rotated)(x, cos, sin).numpy(), turned(x, cos, sin, "half"), rtol=0, atol=room(x)
    )


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_heads_are_turned_by_their_own(backend: str) -> None:
    """With a length that changes."""
    torch._dynamo.reset()
    compiled = torch.compile(turn, fullgraph=True, backend=backend)
    x, cos, sin = drawn((2, 5, 3, 5), torch.float32)
    for tokens in (5, 4, 3):
        given = (one[:, :tokens] for one in (x, cos, sin))
        y = compiled(*given)
        expected = turned(x, cos, sin, "half")[:, :tokens]
        assert np.abs(y.double().numpy() - expected).max() <= room(x)


def test_heads_that_do_not_fit_are_named() -> None:
    """Fewer heads are not repeated, and a lower rank is never by head."""
    x, cos, sin = drawn((2, 5, 3, 5), torch.float32)
    with pytest.raises(TensorError, match=r"by head must .* \[2, 5, 3\] of x .*got \[2, 5, 2\]"):
        Rotation(cos[:, :, :2], sin[:, :, :2], pairing="half")(x)
    with pytest.raises(TensorError, match=r"leading dimensions \[2, 5\] of x .*got \[5, 3\]"):
        Rotation(cos[0], sin[0], pairing="half")(x)
