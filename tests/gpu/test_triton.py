"""The Triton kernel: on a GPU where there is one, else interpreted on the CPU.

Everything is asked of the backend by its name, which is never replaced by another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import BackendError, Rope
from phasor.axes import Alternating, InterleavedSections, Mixed, Sectioned
from phasor.torch import Rotation, rotate, rotate_, rotate_qk

from ..torch.torch_arrays import DTYPES, assert_rotated, excess_by, float64, normal
from ..torch.torch_cases import memory_layouts
from .triton_runs import (
    DEVICE,
    HALF,
    RUN_BY,
    TRITON,
    ask_for_many,
    here,
    runs_kernels,
)

pytestmark = [runs_kernels, pytest.mark.usefixtures("small_tensors")]

PAIRINGS = ["half", "interleaved"]
# from a pairing to another; to itself is read and written as one of these is
PAIRED = [
    ("half", "interleaved"),
    ("interleaved", "half"),
    pytest.param("half", "half", marks=pytest.mark.every_kernel),
    pytest.param("interleaved", "interleaved", marks=pytest.mark.every_kernel),
]
PLACES = [0, 1023, 2**31, 2**62 + 12_345, -1, -(2**35) - 7, -(2**63)]
SLICES = {"whole": {}, "slice": {"rotary_dim": 8, "rotary_start": 6}}
KINDS = [
    (torch.float64, "whole"),
    (torch.float32, "slice"),
    (torch.bfloat16, "whole"),
    (torch.float16, "slice"),
    pytest.param(torch.float64, "slice", marks=pytest.mark.every_kernel),
    pytest.param(torch.float32, "whole", marks=pytest.mark.every_kernel),
    pytest.param(torch.bfloat16, "slice", marks=pytest.mark.every_kernel),
    pytest.param(torch.float16, "whole", marks=pytest.mark.every_kernel),
]
# powers of two, widths that leave lanes idle, and one pair
WIDTHS = {"64": 64, "128": 128, "160": 160, "24": 24, "10": 10, "2": 2}
AXES = {
    "sectioned": Sectioned((3, 3, 2)),
    "interleaved": InterleavedSections((4, 2, 2)),
    "alternating": Alternating((2, 3, 3)),
    "mixed": Mixed([[0.5 * k - 1.9, 0.1 * k, 3.0][axis] for k in range(8)] for axis in range(3)),
}


@pytest.fixture(params=[1, 2**20], ids=["many tokens", "few tokens"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiles."""
    ask_for_many(request.param, monkeypatch)


def assert_right(y: Tensor, x: Tensor, places: Any, rope: Rope, **options: Any) -> None:
    """``y`` is ``x`` rotated, to within the bound of every backend."""
    assert_rotated(y.cpu(), x.cpu(), places, rope, **options)


@pytest.mark.parametrize("pairing_out", PAIRINGS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("dtype", "width"), KINDS)
def test_every_layout_turns_as_complex_numbers_do(
    dtype: torch.dtype, pairing: Any, pairing_out: Any, width: str
) -> None:
    """Near and far, forwards and back with a gain, as a new tensor and in place."""
    rope = Rope(head_dim=16, pairing=pairing, pairing_out=pairing_out, **SLICES[width])
    x = here(len(PLACES), 3, 16, dtype=dtype)
    for options in ({}, {"inverse": True, "gain": 1.3465735902799727}):
        y = rotate(x, PLACES, rope, **options, **TRITON)
        undone = options | ({"gain": 1 / options["gain"]} if options else {})
        assert_right(y, x, PLACES, rope, **undone)
        written = x.clone()
        assert rotate_(written, PLACES, rope, **options, **TRITON) is written
        assert torch.equal(written, y)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("tile")
def test_every_width_is_right(dtype: torch.dtype, pairing: Any, width: int) -> None:
    """Pairs that fill a tile, and pairs that do not; more heads than one tile has."""
    rope = Rope(head_dim=width, pairing=pairing)
    x = here(3, 5, width, dtype=dtype)
    places = [70_001, -3, 2**31 + 7]
    assert_right(rotate(x, places, rope, **TRITON), x, places, rope)


@pytest.mark.parametrize(("pairing", "pairing_out"), PAIRED)
def test_the_tile_makes_no_difference(
    pairing: Any, pairing_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tokens to a program, or few: the same bits, in several programs of each."""
    rope = Rope(head_dim=72, rotary_dim=64, pairing=pairing, pairing_out=pairing_out)
    q, k = here(2, 19, 11, 72), here(2, 19, 2, 72, seed=1)
    places = torch.arange(38).reshape(2, 19).to(DEVICE) * 70_001
    many = rotate_qk(q, k, places, rope, **TRITON)
    ask_for_many(2**20, monkeypatch)
    few = rotate_qk(q, k, places, rope, **TRITON)
    assert all(map(torch.equal, few, many))


@pytest.mark.parametrize(("pairing", "pairing_out"), PAIRED)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.every_kernel)]
)
def test_memory_makes_no_difference(dtype: torch.dtype, pairing: Any, pairing_out: Any) -> None:
    """However the tensor lies in memory, in place or not, the bits are the same."""
    rope = Rope(
        head_dim=20, pairing=pairing, pairing_out=pairing_out, rotary_dim=16, rotary_start=2
    )
    x = here(2, 7, 3, 20, dtype=dtype)
    places = torch.tensor([3, 1, 4, 1024, 5, 9, -26], device=DEVICE)
    plain = rotate(x, places, rope, **TRITON)
    assert_right(plain, x, places, rope)
    for name, laid in memory_layouts(x).items():
        y = rotate(laid, places, rope, **TRITON)
        assert torch.equal(y, plain), name
        assert y.stride() == torch.empty_like(laid).stride(), name
        rotate_(laid, places, rope, **TRITON)
        assert torch.equal(laid, plain), name


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("far", ["tokens", "heads", "coordinates"])
def test_offsets_take_64_bits(far: str, pairing: Any) -> None:
    """What lies more than 2**31 elements further on is found there."""
    if far == "coordinates" and RUN_BY == "interpreter":
        pytest.skip("the interpreter makes 32 bits of an int64 argument that fits in them")
    step = {"tokens": 2**31, "heads": 2**30 + 8, "coordinates": 2**27 + 2**24}[far]
    strides = {"tokens": (step, 64, 1), "heads": (64, step, 1), "coordinates": (64, 16, step)}[far]
    rope, shape = Rope(head_dim=16, pairing=pairing), (2, 3, 16)
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    # memory that is not touched is not there, on a CPU; on a GPU it is 4 GB, or 5
    memory = torch.empty(last + 1, dtype=torch.bfloat16, device=DEVICE)
    assert last >= 2**31
    laid = memory.as_strided(shape, strides).copy_(here(*shape, dtype=torch.bfloat16))
    x = laid.clone()
    assert rotate_(laid, [5, -70_001], rope, **TRITON) is laid
    assert_right(laid.contiguous(), x, [5, -70_001], rope)


def test_what_lies_between_strides_is_not_written() -> None:
    """In place, neither the gaps between heads nor the coordinates that do not turn."""
    rope = Rope(head_dim=16, pairing="half", rotary_dim=8, rotary_start=4)
    memory = here(3, 5, 4, 24)
    kept = memory.clone()
    rotate_(memory[:, 1:4, ::2, 3:19], 5, rope, **TRITON)
    changed = memory != kept
    assert changed[:, 1:4, ::2, 7:15].all()
    changed[:, 1:4, ::2, 7:15] = False
    assert not changed.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_rotated_is_bit_identical(dtype: torch.dtype) -> None:
    """NaN, infinities and signed zeros outside the slice pass through, gain or not."""
    rope = Rope(head_dim=12, pairing="half", rotary_dim=4, rotary_start=4)
    x = here(3, 2, 12, dtype=dtype)
    x[..., 0], x[..., 3], x[..., 8], x[..., 11] = torch.nan, -0.0, torch.inf, -torch.inf
    rest = [0, 1, 2, 3, 8, 9, 10, 11]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    y = rotate(x, 5, rope, gain=3.0, **TRITON)
    assert torch.equal(y.view(bits)[..., rest], x.view(bits)[..., rest])


def test_query_and_key_may_differ_in_dtype() -> None:
    """Each is computed and returned in its own precision."""
    q, k = here(4, 6, 16, dtype=torch.float64), here(4, 2, 16)
    places = [0, 1025, -70_001, 2**39 + 3]
    for x, y in zip((q, k), rotate_qk(q, k, places, HALF, **TRITON), strict=True):
        assert_right(y, x, places, HALF)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["integers", "floats"])
@pytest.mark.parametrize("layout", AXES)
def test_every_pair_follows_its_own_axis(layout: str, kind: str, dtype: torch.dtype) -> None:
    """Time, height and width drive the pairs that the layout gives them, wherever they lie."""
    rope = Rope(head_dim=20, rotary_dim=16, pairing="half", axes=AXES[layout])
    places = torch.tensor([[[5, 1, 70_000], [6, -3, 2]], [[0, 0, 9], [2**33, 4, 4]]])
    if kind == "floats":
        places = places + 0.25
    x = here(2, 2, 3, 20, dtype=dtype)
    y = rotate(x, places.to(DEVICE), rope, **TRITON)
    assert_right(y, x, places, rope)
    axes_first = places.to(DEVICE).movedim(-1, 0).contiguous().movedim(0, -1)
    assert torch.equal(rotate(x, axes_first, rope, **TRITON), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fractions_of_a_position_turn_a_fraction(dtype: torch.dtype) -> None:
    """Float positions mean the real number that they hold."""
    places = [0.0, 0.5, -0.25, 1023.75, -70_000.3, 2.0**31 + 7.5]
    x = here(6, 2, 16, dtype=dtype)
    assert_right(rotate(x, places, HALF, **TRITON), x, places, HALF)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint32]
)
def test_integers_of_every_width_are_read(dtype: torch.dtype) -> None:
    """Strided and broadcast, they give one result."""
    x = here(2, 6, 1, 16)
    places = torch.arange(24).to(DEVICE, dtype).reshape(2, 12)[:, ::2]
    for given in (places, places[:1], places[:, :1]):
        expected = rotate(x, given.long().expand(2, 6).contiguous(), HALF, **TRITON)
        assert torch.equal(rotate(x, given, HALF, **TRITON), expected)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("pairing_out", PAIRINGS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_explicit_rows_turn_as_they_say(
    dtype: torch.dtype, pairing: str, pairing_out: str, inverse: bool
) -> None:
    """Rows are any two numbers per pair, broadcast and strided like positions."""
    rows = float64(normal(2, 1, 4, 4)) + 1j * float64(normal(2, 1, 4, 4, seed=1))
    cos, sin = torch.tensor(rows.real).to(DEVICE), torch.tensor(rows.imag).to(DEVICE)
    sin = sin.repeat_interleave(2, -1)[..., ::2]
    x = here(2, 3, 4, 2, 16, dtype=dtype)
    layout: dict[str, Any] = {"pairing_out": pairing_out, "rotary_start": 5}
    rotation = Rotation(cos, sin, pairing=pairing, **layout)
    rotation = rotation.inverse() if inverse else rotation
    y = rotation(x, **TRITON)
    ways = (pairing_out, pairing) if inverse else (pairing, pairing_out)
    assert excess_by(y.cpu(), x.cpu(), 1 / rows if inverse else rows, ways, 5) <= 1
    written = x.clone()
    rotation.rotate_(written, **TRITON)
    assert torch.equal(written, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 1, 5)], ids=str)
def test_every_head_has_rows_of_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """New, in place and heads first; the gradient is the inverse, and cosines have none here."""
    rows = float64(normal(*shape)) + 1j * float64(normal(*shape, seed=1))
    cos, sin = torch.tensor(rows.real).to(DEVICE), torch.tensor(rows.imag).to(DEVICE)
    x = here(2, 3, 4, 16, dtype=dtype).requires_grad_()
    rotation = Rotation(cos, sin, pairing="half", rotary_start=1)
    y = rotation(x, **TRITON)
    (grad,) = torch.autograd.grad(y, x, y.detach())
    for new, old, turns in ((y, x, rows), (grad, y, rows.conj())):
        flat = (one.detach().cpu().unsqueeze(-2) for one in (new, old))
        assert excess_by(*flat, turns, ("half", "half"), 1) <= 1
    written = x.detach().clone()
    assert torch.equal(rotation.rotate_(written, **TRITON), y)
    first = rotation(x.transpose(1, 2), heads_first=True, **TRITON)
    assert torch.equal(first.transpose(1, 2), y)
    learned = Rotation(cos.requires_grad_(), sin, pairing="half", rotary_start=1)
    with pytest.raises(BackendError, match="'triton' has no gradients for cos and sin"):
        learned(x, **TRITON)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_may_be_of_another_dtype(dtype: torch.dtype) -> None:
    """They are widened, or narrowed to float32, before anything is multiplied."""
    x = here(3, 2, 8, dtype=torch.bfloat16)
    cos, sin = here(3, 4, dtype=dtype, seed=1), here(3, 4, dtype=dtype, seed=2)
    y = Rotation(cos, sin, pairing="half")(x, **TRITON)
    assert torch.equal(y, Rotation(cos.float(), sin.float(), pairing="half")(x, **TRITON))
    rows = float64(cos) + 1j * float64(sin)
    assert excess_by(y.cpu(), x.cpu(), rows, ("half", "half")) <= 1


def test_tokens_may_lie_in_any_number_of_dimensions() -> None:
    """More than a program can walk take several launches, and give the same."""
    x = here(2, 3, 2, 4, 2, 16)
    laid = x.permute(2, 1, 0, 3, 4, 5).contiguous().permute(2, 1, 0, 3, 4, 5)
    places = torch.arange(12).reshape(1, 3, 1, 4).to(DEVICE)
    y = rotate(laid, places, HALF, **TRITON)
    assert_right(y, x, places.expand(2, 3, 2, 4), HALF)
    assert torch.equal(rotate(x, places, HALF, **TRITON), y)
    rotate_(laid, places, HALF, **TRITON)
    assert torch.equal(laid, y)


@pytest.mark.parametrize("pairing_out", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_is_the_inverse_rotation(dtype: torch.dtype, pairing_out: Any) -> None:
    """The same kernel, with the sign of sin flipped."""
    rope = Rope(head_dim=16, pairing="half", pairing_out=pairing_out)
    x, out = here(7, 3, 16, dtype=dtype).requires_grad_(), here(7, 3, 16, dtype=dtype, seed=1)
    (grad,) = torch.autograd.grad(rotate(x, PLACES, rope, gain=1.5, **TRITON), x, out)
    assert_right(grad, out, PLACES, rope, inverse=True, gain=1.5)


def test_every_16_bit_number_survives_the_identity() -> None:
    """Subnormal numbers and infinities included."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.stack((bits, torch.zeros_like(bits)), -1).view(dtype)
        # 0 * inf makes a NaN of an infinity's neighbour: the neighbours are left out
        x = numbers.reshape(32, 1, 4096).to(DEVICE)
        with np.errstate(invalid="ignore"):
            y = rotate(x, 0, Rope(head_dim=4096, pairing="interleaved"), **TRITON)
        given, came = x[..., ::2], y[..., ::2]
        assert torch.equal(came[~given.isnan()], given[~given.isnan()])
        assert came[given.isnan()].isnan().all()
