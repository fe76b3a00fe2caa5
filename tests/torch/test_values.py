"""The torch functions give what the complex numbers say, in every layout, in place and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasor import Rope
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_

from ..each import each
from ..oracle import exact_rows
from ..rotation_cases import PAIRINGS, POSITIONS, ROPES, SLICES, layouts
from .torch_arrays import DTYPES, assert_rotated, excess_by, float64, normal
from .torch_cases import HALF_16 as HALF

pytestmark = pytest.mark.usefixtures("implementation")


@each("rope", layouts().values())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_turns_as_complex_numbers_do(dtype: torch.dtype, rope: Rope) -> None:
    """From 0 to 2**39 both ways, forwards and back, with and without a gain."""
    x = normal(len(POSITIONS), 3, 16, dtype=dtype)
    for inverse in (False, True):
        for gain in (1.0, 1.3465735902799727):
            y = rotate(x, POSITIONS, rope, inverse=inverse, gain=gain)
            undone = 1 / gain if inverse else gain
            assert_rotated(y, x, POSITIONS, rope, inverse=inverse, gain=undone)


@pytest.mark.parametrize("dtype", DTYPES)
@each("rope", ROPES.values())
def test_every_frequency_turns_at_its_own_rate(dtype: torch.dtype, rope: Rope) -> None:
    """Laws and explicit frequencies reach every pair, at near and far positions alone."""
    for places in ([1, 31, 1023, 1024, 1025, 2**20 - 1], [2**20, -(2**30) + 1, 2**40 - 1]):
        x = normal(len(places), 2, rope.head_dim, dtype=dtype)
        assert_rotated(rotate(x, places, rope), x, places, rope)


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_key_together_are_each_alone(dtype: torch.dtype) -> None:
    """`rotate_qk` is `rotate` twice, to the bit, with different numbers of heads."""
    q, k = normal(2, 4, 6, 16, dtype=dtype), normal(2, 4, 2, 16, dtype=dtype, seed=1)
    options: dict[str, Any] = {"inverse": True, "gain": 1.25}
    alone = [rotate(t, POSITIONS[:4], HALF, **options) for t in (q, k)]
    together = rotate_qk(q, k, POSITIONS[:4], HALF, **options)
    assert all(map(torch.equal, alone, together))


def test_query_and_key_may_differ_in_dtype() -> None:
    """Each is computed and returned in its own precision, as if it were alone."""
    q, k = normal(4, 6, 16, dtype=torch.float64), normal(4, 2, 16)
    places = [0, 1025, -70_001, 2**40 + 3]
    for x, y in zip((q, k), rotate_qk(q, k, places, HALF), strict=True):
        assert torch.equal(y, rotate(x, places, HALF))
        assert_rotated(y, x, places, HALF)


def test_a_far_neighbour_changes_no_bit() -> None:
    """A token's result is its own, whoever else is in the batch."""
    x, near = normal(4, 2, 16), [0, 1025, -70_001]
    assert torch.equal(rotate(x, [*near, 2**41], HALF)[:3], rotate(x[:3], near, HALF))


@each("inverse", [False, True])
@each("pairing_out", PAIRINGS)
@each("width", SLICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_is_out_of_place(
    dtype: torch.dtype, width: str, pairing_out: Any, inverse: bool
) -> None:
    """The verbs with an underscore write the same bits and return their argument."""
    rope = Rope(head_dim=16, pairing="half", pairing_out=pairing_out, **SLICES[width])
    options: dict[str, Any] = {"inverse": inverse, "gain": 1.25}
    q = normal(len(POSITIONS), 3, 16, dtype=dtype)
    k = normal(len(POSITIONS), 2, 16, dtype=dtype, seed=1)
    expected = rotate_qk(q, k, POSITIONS, rope, **options)
    one, query, key = q.clone(), q.clone(), k.clone()
    assert rotate_(one, POSITIONS, rope, **options) is one
    assert torch.equal(one, expected[0])
    written = rotate_qk_(query, key, POSITIONS, rope, **options)
    assert written[0] is query
    assert written[1] is key
    assert all(map(torch.equal, written, expected))


@each("inverse", [False, True])
@each("start", [0, 5])
@each("pairing_out", PAIRINGS)
@each("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_explicit_rows_turn_as_they_say(
    dtype: torch.dtype, pairing: str, pairing_out: str, start: int, inverse: bool
) -> None:
    """Rows are any two numbers per pair: here not even of length one."""
    rows = float64(normal(2, 1, 4, 4)) + 1j * float64(normal(2, 1, 4, 4, seed=1))
    cos, sin = torch.tensor(rows.real), torch.tensor(rows.imag)
    x = normal(2, 3, 4, 2, 16, dtype=dtype)
    layout: dict[str, Any] = {"pairing_out": pairing_out, "rotary_start": start}
    rotation = Rotation(cos, sin, pairing=pairing, **layout)
    rotation = rotation.inverse() if inverse else rotation
    y = rotation(x)
    ways = (pairing_out, pairing) if inverse else (pairing, pairing_out)
    assert excess_by(y, x, 1 / rows if inverse else rows, ways, start) <= 1
    written = x.clone()
    assert rotation.rotate_(written) is written
    assert torch.equal(written, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_wide_rows_are_rounded_to_float32_first(pairing: str, dtype: torch.dtype) -> None:
    """The same bits come of rows rounded by hand; but float64 tensors are turned by all of them."""
    rows = exact_rows(HALF, range(40))
    x, wide = normal(40, 3, 16, dtype=dtype), [torch.tensor(r) for r in (rows.real, rows.imag)]
    narrow = [row.float() for row in wide]
    assert not torch.equal(wide[0], narrow[0].double())
    y = Rotation(*wide, pairing=pairing)(x)
    assert torch.equal(y, Rotation(*narrow, pairing=pairing)(x))
    exact = Rotation(*wide, pairing=pairing)(x.double())
    assert not torch.equal(exact, Rotation(*narrow, pairing=pairing)(x.double()))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_one_row_serves_every_token(pairing: str) -> None:
    """Rows without leading dimensions broadcast, and pairing_out follows pairing."""
    rows = exact_rows(HALF, 12)
    x = normal(2, 5, 3, 16)
    y = Rotation(torch.tensor(rows.real), torch.tensor(rows.imag), pairing=pairing)(x)
    assert excess_by(y, x, rows, (pairing, pairing)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairing_is_a_permutation(dtype: torch.dtype) -> None:
    """Permute, turn by halves, permute back is turning by neighbours: to the bit."""
    x = normal(len(POSITIONS), 3, 16, dtype=dtype)
    to_half = [*range(0, 16, 2), *range(1, 16, 2)]
    back = [to_half.index(i) for i in range(16)]
    neighbours = Rope(head_dim=16, pairing="interleaved")
    mixed = Rope(head_dim=16, pairing="interleaved", pairing_out="half")
    expected = rotate(x[..., to_half], POSITIONS, HALF)
    assert torch.equal(rotate(x, POSITIONS, neighbours), expected[..., back])
    assert torch.equal(rotate(x, POSITIONS, mixed), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_rotated_is_bit_identical(dtype: torch.dtype) -> None:
    """NaN, infinities and signed zeros outside the slice pass through, gain or not."""
    rope = Rope(head_dim=12, pairing="half", rotary_dim=4, rotary_start=4)
    x = normal(3, 2, 12, dtype=dtype)
    x[..., 0], x[..., 3], x[..., 8], x[..., 11] = torch.nan, -0.0, torch.inf, -torch.inf
    rest = [0, 1, 2, 3, 8, 9, 10, 11]
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    bits = torch.int16 if dtype.itemsize == 2 else bits
    for y in (rotate(x, 5, rope, gain=3.0), rotate_(x.clone(), 5, rope, gain=3.0)):
        assert torch.equal(y.view(bits)[..., rest], x.view(bits)[..., rest])


@pytest.mark.parametrize("dtype", DTYPES)
def test_position_zero_changes_nothing(dtype: torch.dtype) -> None:
    """R(0) is the identity, to the bit."""
    x = normal(4, 3, 16, dtype=dtype)
    assert torch.equal(rotate(x, [0, 0, 0, 0], HALF), x)
    assert torch.equal(rotate(x, 0.0, HALF, inverse=True), x)
