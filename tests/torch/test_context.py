"""Results depend on arguments alone: not on history, threads, modes, defaults or fresh memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from phasor import QueryFactor, Rope
from phasor.axes import Sectioned
from phasor.scaling import Linear
from phasor.torch import Rotation, rotate, rotate_
from phasor.torch._operator import angles as _angles

from .torch_arrays import DTYPES, assert_rotated, normal
from .torch_cases import HALF, PART, PLACES


def own(base: float, **fields: Any) -> Rope:
    """A Rope that no other test uses, so that its tables are made in the test."""
    return Rope(head_dim=8, pairing="half", base=base, **fields)


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
    Rope(head_dim=8, pairing="half", explicit_inv_freq=(1.0, 0.5, 0.25, 0.125)),
    Rope(head_dim=8, pairing="half", explicit_inv_freq=(1.0, 0.5, 0.25, 0.0625)),
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


@pytest.mark.parametrize("form", ["steps", "log", "power"])
@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16], ids=str)
def test_a_query_factor_of_whole_numbers_is_no_float_by_default(
    form: Any, default: torch.dtype
) -> None:
    """Weights are often made where floats have 16 bits, in which 100 000 is infinite."""
    factor, places = QueryFactor(strength=0.1, length=1, form=form), [0, 1, 300, 100_000, 2**40]
    got = with_default(default, factor, torch.tensor(places), torch)
    logs = {"steps": math.log1p, "log": lambda p: math.log(max(p, 1)), "power": math.log1p}
    grown = [0.1 * logs[form](place) for place in places]
    right = [math.exp(by) if form == "power" else 1 + by for by in grown]
    assert (got.double() / torch.tensor(right).double() - 1).abs().max() < 1e-6


@pytest.mark.parametrize("kind", PLACES_BY_KIND)
@pytest.mark.parametrize("use", FIRST_USES)
def test_constants_serve_whoever_comes_after_their_first_use(use: str, kind: str) -> None:
    """Made in passing by anyone, they train, and give what untouched ones give."""
    axes = Sectioned((2, 1, 1)) if kind == "axes" else None
    places = PLACES_BY_KIND[kind]
    # constants of its own for every test
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
    transformed = grad(lambda t: (rotate(t, places, rope) * x).sum())(x)
    assert_rotated(transformed, x, places, rope, inverse=True)


@pytest.mark.parametrize("use", FIRST_USES)
def test_constants_are_plain_tensors_whoever_made_them(use: str) -> None:
    """Not an inference tensor, and not part of a transformation that is over."""
    rope = own(300.0 + list(FIRST_USES).index(use), axes=Sectioned((2, 1, 1)))
    FIRST_USES[use](normal(4, 2, 8), (PLACES + 0.5)[:, None].expand(4, 3), rope)
    where = torch.device("cpu"), torch.int64, rope.to_json()
    for constants in _angles._words_and_axis(*where):
        assert type(constants) is Tensor
        assert not constants.is_inference()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(constants)


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
        by = Rotation(cos, sin, pairing="half")(x)
        mapped = vmap(lambda t: rotate(t, PLACES, HALF), in_dims=1)(x.detach()[:, None])
        return [y, by, mapped, *torch.autograd.grad(y.sum() + by.sum(), (x, cos))]

    plain = results()
    with torch.autocast("cpu", dtype=dtype):
        cast = results()
    assert [t.dtype for t in cast] == [torch.float32] * 5
    assert all(map(torch.equal, plain, cast))


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
