"""Angles from digits are within the published bound in every kind of integer arithmetic."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasor import Rope
from phasor._angle_digits import DIGITS_32, DIGITS_64, cos_sin_of_positions, digit_tables
from phasor.angles import axes_of, pair_coordinates

from . import oracle, strategies
from .oracle import exact_rows, row_error
from .rotation_cases import FLOATS, POSITIONS, POSITIONS_32, ROPES

FARTHEST = [2**63 - 1, -(2**63), 2**62 + 1, -(2**32) - 1, 2**32, 2**31, -(2**31)]
BYTES = [s * b * 256**i for i in range(8) for b in (1, 127, 128, 129, 255) for s in (1, -1)]
FAR = [p for p in {*POSITIONS, *FARTHEST, *BYTES} if -(2**63) <= p < 2**63]


class Numbers:
    """NumPy, with quotients floored or truncated, or with int32 computed in float32."""

    def __init__(self, kind: str) -> None:
        self.kind, self.int32 = kind, np.float32 if kind == "float" else np.int32
        self.largest = 0.0

    def number(self, value: float, like: Any) -> Any:
        return np.asarray(value).astype(like.dtype)

    def divide(self, numbers: Any, divisor: Any) -> Any:
        self.see(numbers)
        if numbers.dtype.kind == "f":
            return np.floor(numbers / divisor)
        floored = numbers // divisor
        return floored + (self.kind == "truncate") * (
            (numbers < 0) & (floored * divisor != numbers)
        )

    def as_int32(self, numbers: Any) -> Any:
        return numbers.astype(self.int32)

    def as_float32(self, numbers: Any) -> Any:
        self.see(numbers)
        return numbers.astype(np.float32)

    def absolute(self, numbers: Any) -> Any:
        return np.abs(numbers)

    def nearest(self, numbers: Any) -> Any:
        return np.round(numbers)

    def select_axis(self, numbers: Any, axis: int) -> Any:
        return numbers[..., axis, :]

    def nan_unless(self, condition: Any, numbers: Any) -> Any:
        return np.where(condition, numbers, np.float32(np.nan))

    def constant(self, values: Any) -> Any:
        return values.astype(self.int32) if values.dtype == np.int32 else values

    def see(self, numbers: Any) -> None:
        """Keep the largest number of 32 bits."""
        if numbers.dtype.itemsize == 4:
            self.largest = max(self.largest, float(np.abs(numbers).max(initial=0)))


KINDS = ["floor", "truncate", "float"]


def excess(positions: Any, rope: Rope, numbers: Numbers, count: int = DIGITS_64) -> float:
    """The largest error of cos and sin in units of what is allowed."""
    places = np.asarray(positions)
    fractional = places.dtype.kind == "f"
    each = pair_coordinates(places, axes_of(rope))
    cos, sin = cos_sin_of_positions(each, rope, numbers, fractional=fractional, count=count)
    assert cos.dtype == sin.dtype == np.float32
    right = exact_rows(rope, positions)
    fastest = float(max(oracle.frequencies(rope)))
    error = np.abs((cos - right.real, sin - right.imag)).max(initial=0.0)
    return float(error) / row_error("float32", positions, fastest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_position_is_within_the_bound(rope: Rope, kind: str) -> None:
    """Integers of 32 and 64 bits, the least among them, and floats; no number is above 2**24."""
    numbers = Numbers(kind)
    assert excess(np.array(POSITIONS_32, np.int32), rope, Numbers(kind), DIGITS_32) <= 1
    assert excess(np.array(FAR), rope, numbers) <= 1
    assert excess(np.array(FLOATS), rope, numbers) <= 1
    assert excess(np.array(FLOATS, np.float32), rope, numbers) <= 1
    assert 2**20 < numbers.largest <= 2**24


@pytest.mark.parametrize("kind", KINDS)
@given(rope=strategies.resolved_ropes(), data=st.data())
def test_every_rope_is_within_the_bound(kind: str, rope: Rope, data: st.DataObject) -> None:
    """Of every law, axes, direction and slice, at any position."""
    n_axes = rope.axes.n_axes
    for position in (strategies.INT64, strategies.FLOAT_POSITIONS):
        row = st.lists(position, min_size=n_axes, max_size=n_axes) if n_axes > 1 else position
        positions = np.array(data.draw(st.lists(row, min_size=1, max_size=3)))
        assert excess(positions, rope, Numbers(kind)) <= 1


def test_tables_are_what_they_are_said_to_be() -> None:
    """The frequencies with 60 digits, times powers of 256, without whole turns."""
    rope = ROPES["64 pairs"]
    with mpmath.workdps(60):
        for first, count in ((0, DIGITS_64), (-4, 4)):
            tables = digit_tables(rope, first, count)
            for pair, frequency in enumerate(oracle.frequencies(rope)):
                for i in range(count):
                    turns = frequency / (2 * mpmath.pi) * mpmath.mpf(256) ** (first + i)
                    parts = (float(each[i, pair]) for each in tables)
                    f1, f2, f3 = parts
                    assert abs(f1) <= 2**12
                    assert abs(f2) <= 2**13
                    assert abs(f3) <= 0.5
                    left = (
                        turns - (f1 + mpmath.mpf(f2 + 0) / 2**14) / 2**13 - f3 / mpmath.mpf(2**27)
                    )
                    # f3 is a float32 of at most 1/2, and turn_limbs has 128 bits
                    assert abs(left - mpmath.nint(left)) <= mpmath.mpf(2) ** -(27 + 26)


@pytest.mark.parametrize("digit", range(DIGITS_64))
@pytest.mark.parametrize("table", range(3))
def test_every_digit_counts(digit: int, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one entry that is off by a unit, some position is off by more than is allowed."""
    rope = ROPES["64 pairs"]
    right = digit_tables(rope, 0, DIGITS_64)
    wrong = [each.copy() for each in right]
    # a unit of f3 is 2**-27 turns, of which the largest digit makes 2**-20
    wrong[table][digit] += 1
    monkeypatch.setattr("phasor._angle_digits.digit_tables", lambda *_: type(right)(*wrong))
    assert excess(np.array(FAR), rope, Numbers("floor")) > 1


def test_floats_without_an_angle_become_nan_alone() -> None:
    """NaN, infinities and what int64 does not hold; their neighbours stay right."""
    rope = ROPES["64 pairs"]
    places = np.array([1.5, np.nan, np.inf, -np.inf, 2.0**63, -(2.0**63)])
    with np.errstate(invalid="ignore"):  # NumPy says that such a float is no integer
        cos, sin = cos_sin_of_positions(
            places[:, None], rope, Numbers("floor"), fractional=True, count=DIGITS_64
        )
    assert np.isnan(cos[1:]).all()
    assert np.isnan(sin[1:]).all()
    assert np.isfinite(cos[0]).all()
    assert np.isfinite(sin[0]).all()
