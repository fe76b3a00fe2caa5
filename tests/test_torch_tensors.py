"""What the torch verbs do to memory: nothing to inputs, and nothing that depends on history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from phasor import Linear, Rope, Sectioned
from phasor.errors import TensorError
from phasor.torch import _tables, rotate, rotate_, rotate_by, rotate_by_, rotate_qk, rotate_qk_

from .torch_oracle import DTYPES, assert_rotated, normal

HALF = Rope(head_dim=8, pairing="half")
PART = Rope(head_dim=8, pairing="interleaved", rotary_dim=4, rotary_start=2)
PLACES = torch.tensor([3, 70_001, -5, 2**33])
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


def own(base: float, **fields: Any) -> Rope:
    """A Rope that no other test uses, so that its tables are made in the test."""
    return Rope(head_dim=8, pairing="half", base=base, **fields)


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
        rotate_by(inputs[0], rows[0], rows[1], pairing="half"),
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


@pytest.mark.parametrize("rope", [HALF, PART], ids=["whole", "part"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *SHARED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
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
        rotate_by_(x, normal(4, 4), normal(4, 4), pairing="half")
    with pytest.raises(TensorError, match="k must not share memory with itself"):
        rotate_qk_(x.contiguous(), x, PLACES, HALF)
    assert torch.equal(x, before)


def test_one_tensor_is_not_written_twice() -> None:
    """The same object as query and as key would be turned twice."""
    x = normal(4, 2, 8)
    before = x.clone()
    with pytest.raises(TensorError, match=r"q and k must be two tensors .* got one twice"):
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


NEIGHBOURS = [
    Rope(head_dim=8, pairing="half", base=77.0),
    Rope(head_dim=8, pairing="half", base=77.5),
    Rope(head_dim=8, pairing="half", base=77.0, direction=-1),
    Rope(head_dim=8, pairing="half", base=77.0, scaling=Linear(factor=2.0)),
    Rope(head_dim=8, pairing="half", base=77.0, scaling=Linear(factor=3.0)),
    Rope(head_dim=8, pairing="half", base=77.0, rotary_dim=4),
    Rope(head_dim=8, pairing="half", base=77.0, rotary_dim=4, rotary_start=4),
    Rope(head_dim=8, pairing="interleaved", base=77.0),
    Rope(head_dim=8, pairing="half", base=77.0, pairing_out="interleaved"),
    Rope(head_dim=8, pairing="half", inv_freq=(1.0, 0.5, 0.25, 0.125)),
    Rope(head_dim=8, pairing="half", inv_freq=(1.0, 0.5, 0.25, 0.0625)),
]


def test_no_result_depends_on_what_came_before() -> None:
    """Ropes that differ in one field, in two orders, with tables dropped and made again between."""
    x, other = normal(4, 2, 8), normal(4, 2, 8, dtype=torch.float64)
    first = [(rotate(x, PLACES, r), rotate(other, PLACES, r)) for r in NEIGHBOURS]
    for base in range(100, 170):  # more than the cache of tables holds
        rotate(x[:, :, :2], 1, Rope(head_dim=2, pairing="half", base=float(base)))
    for rope, (y, y64) in reversed(list(zip(NEIGHBOURS, first, strict=True))):
        assert torch.equal(rotate(other, PLACES, rope), y64)
        assert torch.equal(rotate(x, PLACES, rope), y)
        assert_rotated(y, x, PLACES, rope)
        assert_rotated(y64, other, PLACES, rope)


def test_the_rounded_frequency_is_another_rope() -> None:
    """inv_freq_dtype reaches the tables."""
    x = normal(4, 2, 8, dtype=torch.float64)
    exact, rounded = own(78.0), own(78.0, inv_freq_dtype="float32")
    assert not torch.equal(rotate(x, PLACES, exact), rotate(x, PLACES, rounded))


FIRST_USES: dict[str, Callable[[Tensor, Tensor, Rope], object]] = {
    "inference mode": torch.inference_mode()(rotate),
    "vmap": lambda x, p, rope: vmap(lambda t: rotate(t, p, rope), in_dims=1)(x[:, None]),
    "grad": lambda x, p, rope: grad(lambda t: rotate(t, p, rope).sum())(x),
    "meta context": lambda x, p, rope: in_meta(rotate, x, p, rope),
    "float64 by default": lambda x, p, rope: with_default(torch.float64, rotate, x, p, rope),
}


def in_meta(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` where torch makes tensors without values."""
    with torch.device("meta"):
        return function(*args)


def with_default(dtype: torch.dtype, function: Callable[..., Any], *args: Any) -> Any:
    """``function`` where torch makes floats of ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return function(*args)
    finally:
        torch.set_default_dtype(before)


PLACES_BY_KIND = {
    "integers": PLACES,
    "floats": PLACES + 0.5,
    "scalar": torch.tensor(7),
    "axes": PLACES[:, None].expand(4, 3),
}


@pytest.mark.parametrize("kind", PLACES_BY_KIND)
@pytest.mark.parametrize("use", FIRST_USES)
def test_tables_serve_whoever_comes_after_their_first_use(use: str, kind: str) -> None:
    """Made in passing by anyone, they train, and give what untouched tables give."""
    axes = Sectioned((2, 1, 1)) if kind == "axes" else None
    places = PLACES_BY_KIND[kind]
    # tables of its own for every test
    rope = own(
        200.0 + 10 * list(FIRST_USES).index(use) + list(PLACES_BY_KIND).index(kind), axes=axes
    )
    x = normal(4, 2, 8)
    FIRST_USES[use](x, places, rope)
    FIRST_USES[use](x.double(), places, rope)
    leaf = x.clone().requires_grad_()
    y = rotate(leaf, places, rope)
    assert_rotated(y, x, places, rope)
    (came,) = torch.autograd.grad(y, leaf, x)
    assert_rotated(came, x, places, rope, inverse=True)
    through_tables = grad(lambda t: (rotate(t, places, rope) * x).sum())(x)
    assert_rotated(through_tables, x, places, rope, inverse=True)


@pytest.mark.parametrize("use", FIRST_USES)
def test_tables_are_plain_tensors_whoever_made_them(use: str) -> None:
    """Not an inference tensor, and not part of a transformation that is over."""
    rope = own(300.0 + list(FIRST_USES).index(use), axes=Sectioned((2, 1, 1)))
    FIRST_USES[use](normal(4, 2, 8), (PLACES + 0.5)[:, None].expand(4, 3), rope)
    where = rope.to_json(), torch.device("cpu")
    tables = _tables.digit_tables(*where, torch.float32), _tables.steps(*where)
    for table in (*tables, _tables.axis_of_pair(*where)):
        assert type(table) is Tensor
        assert not table.is_inference()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(table)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every allocation of torch filled with NaN, on torch's own side."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rope", [HALF, PART], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_uninitialised_memory_is_read(dtype: torch.dtype, rope: Rope) -> None:
    """Results are right although every fresh buffer starts as NaN."""
    x = normal(4, 3, 8, dtype=dtype)
    for places in (PLACES, torch.tensor([2**41, 1, 2, 3]), PLACES + 0.5):
        assert_rotated(rotate(x, places, rope), x, places, rope)
        assert_rotated(rotate_(x.clone(), places, rope), x, places, rope)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Not a dtype and not a bit, of values, of gradients, of learned rows, under a transform."""
    x, cos, sin = normal(4, 2, 8).requires_grad_(), normal(4, 4).requires_grad_(), normal(4, 4)

    def results() -> list[Tensor]:
        y = rotate(x, PLACES + 0.5, HALF)
        by = rotate_by(x, cos, sin, pairing="half")
        mapped = vmap(lambda t: rotate(t, PLACES, HALF), in_dims=1)(x.detach()[:, None])
        return [y, by, mapped, *torch.autograd.grad(y.sum() + by.sum(), (x, cos))]

    plain = results()
    with torch.autocast("cpu", dtype=dtype):
        cast = results()
    assert [t.dtype for t in cast] == [torch.float32] * 5
    assert all(map(torch.equal, plain, cast))


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


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("places", [[3, 70_001, -5, 2**33], [2**41, 0, 1, 2]])
def test_the_default_dtype_is_not_asked(places: list[int], default: torch.dtype) -> None:
    """Nor is the default device."""
    rope = own(92.0)
    for dtype in DTYPES:
        x = normal(4, 2, 8, dtype=dtype)
        y = in_meta(with_default, default, rotate, x, places, rope)
        assert_rotated(y, x, places, rope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    """Large enough that torch would share the work out."""
    x, places = normal(2, 512, 16, 8, dtype=dtype), torch.arange(512) * 1_000_003
    before = torch.get_num_threads()
    results: list[Tensor] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(rotate(x, places, HALF))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], y) for y in results[1:])
