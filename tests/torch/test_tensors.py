"""What the torch verbs do to memory: nothing to inputs, and nothing outside the view they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from phasor import Rope
from phasor.errors import TensorError
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from ..each import each
from .torch_arrays import DTYPES, assert_rotated, normal
from .torch_cases import HALF, PART, PLACES

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dimensions reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "a slice of heads": lambda x: torch.cat((x, x), 2)[:, :, 1:4],
    "a slice of a wider head": lambda x: torch.cat((x, x), 3)[..., 3:11],
    "every second coordinate": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "every second token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "off by one element": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "fused qkv": lambda x: torch.stack((x, x, x), 2)[:, :, 1],
}
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads expanded": lambda x: x[:, :, :1].expand(-1, -1, 3, -1),
    "batch expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "one coordinate expanded": lambda x: x[..., :1].expand(-1, -1, -1, 8),
}


@pytest.mark.parametrize("options", [{}, {"inverse": True, "gain": 2.0}], ids=["plain", "options"])
@pytest.mark.parametrize("places", [PLACES, PLACES + 0.5, torch.zeros(4, dtype=torch.int64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_stay_as_they_were(dtype: torch.dtype, places: Tensor, options: Any) -> None:
    """Bit for bit and version for version, and no output shares their memory."""
    inputs = [normal(2, 4, h, 8, dtype=dtype, seed=h) for h in (3, 2)] + [places.clone()]
    rows = [normal(4, 4), normal(4, 4, seed=1)]
    before = [t.clone() for t in (*inputs, *rows)]
    outs = [
        rotate(inputs[0], inputs[2], HALF, **options),
        rotate(inputs[0], inputs[2], PART, **options),
        *rotate_qk(inputs[0], inputs[1], inputs[2], HALF, **options),
        Rotation(rows[0], rows[1], pairing="half")(inputs[0]),
    ]
    assert all(map(torch.equal, (*inputs, *rows), before))
    assert [t._version for t in (*inputs, *rows)] == [0] * 5
    storages = {t.untyped_storage().data_ptr() for t in (*inputs, *rows, *outs)}
    assert len(storages) == 10


def test_writing_in_place_moves_the_version() -> None:
    """A graph that saved the old values finds out."""
    x = normal(4, 2, 8)
    weight = normal(4, 2, 8, seed=1).requires_grad_()
    product = weight * x
    rotate_(x, PLACES, HALF)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@each("rope", [HALF, PART])
@pytest.mark.parametrize("layout", [*LAYOUTS, *SHARED])
@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_have_the_strides_of_their_input(
    dtype: torch.dtype, layout: str, rope: Rope
) -> None:
    """As torch.empty_like lays them out; the values do not depend on it."""
    x = (LAYOUTS | SHARED)[layout](normal(2, 4, 3, 8, dtype=dtype))
    y = rotate(x, PLACES, rope)
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(y, rotate(x.contiguous(), PLACES, rope))
    assert_rotated(y, x, PLACES, rope)


@pytest.mark.parametrize("rope", [HALF, PART], ids=["whole", "part"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_writing_touches_its_view_alone(dtype: torch.dtype, layout: str, rope: Rope) -> None:
    """Everything else in the storage is bit-identical afterwards."""
    x = LAYOUTS[layout](normal(2, 4, 3, 8, dtype=dtype))
    storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    expected, before = rotate(x, PLACES, rope), storage.clone()
    rotate_(x, PLACES, rope)
    assert torch.equal(x, expected)
    same_view = torch.as_strided(before, x.shape, x.stride(), x.storage_offset())
    same_view.copy_(expected)
    assert torch.equal(storage, before)


@pytest.mark.parametrize("layout", SHARED)
def test_shared_memory_is_not_written(layout: str) -> None:
    """One element of memory cannot hold two results."""
    x = SHARED[layout](normal(2, 4, 3, 8))
    before = x.clone()
    with pytest.raises(TensorError, match=r"x must not share memory with itself .* got strides"):
        rotate_(x, PLACES, HALF)
    with pytest.raises(TensorError, match=r"x\.contiguous\(\)"):
        Rotation(normal(4, 4), normal(4, 4), pairing="half").rotate_(x)
    with pytest.raises(TensorError, match="k must not share memory with itself"):
        rotate_qk_(x.contiguous(), x, PLACES, HALF)
    assert torch.equal(x, before)


def test_one_tensor_is_not_written_twice() -> None:
    """The same object as query and as key would be turned twice."""
    x = normal(4, 2, 8)
    before = x.clone()
    with pytest.raises(
        TensorError, match=r"q and k must be two different tensors .* got the same twice"
    ):
        rotate_qk_(x, x, PLACES, HALF)
    assert torch.equal(x, before)


def test_a_dimension_of_one_may_have_any_stride() -> None:
    """Stride 0 shares nothing when there is one entry."""
    x = normal(4, 2, 8)
    view = x.as_strided((1, 4, 2, 8), (0, 16, 8, 1))
    expected = rotate(view, PLACES, HALF)
    assert torch.equal(rotate_(view, PLACES, HALF), expected)


@pytest.mark.parametrize("shape", [(2, 0, 3, 8), (0, 4, 3, 8), (2, 4, 0, 8), (0, 0, 0, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_rotates_to_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """No batch, no token, no head: shape and gradient survive, with and without positions."""
    x = torch.empty(shape, dtype=dtype).requires_grad_()
    for places in (torch.arange(shape[1]), 5, torch.arange(shape[1]) + 0.5):
        y = rotate(x, places, PART)
        assert y.shape == shape
        (came,) = torch.autograd.grad(y.sum(), x)
        assert came.shape == shape
        written = x.detach().clone()
        assert rotate_(written, places, PART) is written


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_is_a_sequence(dtype: torch.dtype) -> None:
    """A decode step: length one, far along."""
    x = normal(2, 1, 3, 8, dtype=dtype)
    assert_rotated(rotate(x, [123_456], HALF), x, [123_456], HALF)


def test_offsets_beyond_two_to_the_31() -> None:
    """Rows at both ends of a buffer of 4 GiB, of which only two pages are ever touched."""
    buffer = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    x = buffer.as_strided((2, 1, 8), (2**31 + 32, 8, 1))
    x.copy_(normal(2, 1, 8))
    near = x.clone()
    expected = rotate(near, PLACES[:2], HALF)
    assert_rotated(expected, near, PLACES[:2], HALF)
    assert torch.equal(rotate(x, PLACES[:2], HALF), expected)
    assert torch.equal(rotate_(x, PLACES[:2], HALF), expected)


@pytest.mark.parametrize("places", [[1, 2, 3, 4], 7, 0.5], ids=["list", "scalar", "float"])
def test_meta_tensors_rotate_to_meta_tensors(places: Any) -> None:
    """Shape, dtype and strides without a value, out of place and in place."""
    x = torch.empty(2, 3, 4, 8, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    y = rotate(x, places, HALF)
    assert (y.device.type, y.shape, y.stride(), y.dtype) == ("meta", x.shape, x.stride(), x.dtype)
    assert rotate_(x, places, HALF) is x


def test_a_scalar_position_is_not_looked_at() -> None:
    """Plain torch operations look its row up on the device, which would otherwise have to stop."""
    x = torch.empty(2, 4, 3, 8, device="meta")
    assert vmap(lambda t: rotate(t, 7, HALF))(x).shape == x.shape


def test_inference_mode_rotates_its_own_tensors() -> None:
    """Out of place and in place, on tensors that can never be trained."""
    x = normal(4, 2, 8)
    with torch.inference_mode():
        inside = x.clone()
        y = rotate(inside, PLACES, HALF)
        assert rotate_(inside, PLACES, HALF) is inside
    assert torch.equal(y, rotate(x, PLACES, HALF))
    assert torch.equal(inside, y)
