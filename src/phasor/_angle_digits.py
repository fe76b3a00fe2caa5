"""The angle of `phasor.angles` in numbers of at most 2**24, for graphs that other engines run.

Engines narrow or refuse integers that wrap around, shifts and unsigned numbers, or compute them in
float32. Here a position is a sum of digits, and no product or sum exceeds 2**24, so int32 and
float32 hold each exactly, whichever an engine uses:

    p = sum of digit[i] * 256**i,                     |digit| <= 128
    p * F mod 1 = sum of digit[i] * F[i] mod 1,       F[i] = F * 256**i mod 1, from -1/2 to 1/2
    F[i] = f1[i] / 2**13 + (f2[i] + f3[i]) / 2**27    f1, f2 integers, |f3| <= 1/2 in float32

A float position is split into its nearest integer and a remainder, whose digits have i = -1 to -4.
The bound `COS_SIN_ERROR_FLOAT32` holds: its term for the bits of the frequency and the products,
0.3, becomes 0.01, because f3, its sum and the sum with the integers are rounded at 2**-37 turns or
below; the terms for the rounding of ``x`` and for the polynomials do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phasor.angles import FLOAT32, evaluate, turn_limbs
from phasor.rope import Rope

#: Digits of a 32-bit and a 64-bit integer, and of the remainder of a float.
DIGITS_32, DIGITS_64, DIGITS_REST = 4, 8, 4
_BASE = 256
_UPPER_BITS, _LOWER_BITS = 13, 14
# of `turn_limbs`, with 64 bits of whole turns before the point and 128 after it
_WHOLE_BITS, _ALL_BITS = 64, 192


class Operations(Protocol):
    """The operations of a library for which its arrays have no operator."""

    def number(self, value: float, like: Any) -> Any:
        """A number in the dtype of ``like``, or a plain number where the library takes one."""
        ...

    def divide(self, numbers: Any, divisor: Any) -> Any:
        """The integer quotient; for negative numbers it may be floored or truncated."""
        ...

    def as_int32(self, numbers: Any) -> Any:
        """The numbers cast to int32."""
        ...

    def as_float32(self, numbers: Any) -> Any:
        """The numbers cast to float32."""
        ...

    def absolute(self, numbers: Any) -> Any:
        """The absolute value."""
        ...

    def nearest(self, numbers: Any) -> Any:
        """Floats rounded to whole numbers."""
        ...

    def select_axis(self, numbers: Any, axis: int) -> Any:
        """``[..., n_axes, num_pairs]`` as ``[..., num_pairs]`` of one axis."""
        ...

    def nan_unless(self, condition: Any, numbers: Any) -> Any:
        """The floats, with NaN where the condition is false."""
        ...

    def constant(self, values: NDArray[Any]) -> Any:
        """The rows as an array of the library, or as a list of arrays."""
        ...


class DigitTables(NamedTuple):
    """The multiplier of each digit: ``[digits, num_pairs]``, the lowest digit first.

    With `Mixed` axes, ``[digits, n_axes, num_pairs]``.
    """

    upper: NDArray[np.int32]  # f1, in units of 2**-13 turns
    lower: NDArray[np.int32]  # f2, in units of 2**-27 turns
    rest: NDArray[np.float32]  # f3, in units of 2**-27 turns


@lru_cache(maxsize=256)
def digit_tables(rope: Rope, first: int, count: int) -> DigitTables:
    """The tables for ``count`` digits, the first with the weight ``256**first``.

    >>> tables = digit_tables(Rope(head_dim=2, pairing="half"), 0, 4)
    >>> [table.shape for table in tables]
    [(4, 1), (4, 1), (4, 1)]
    """
    limbs = turn_limbs(rope)
    tables = np.empty((3, count, *limbs.shape[:-1]), object)
    for digit in range(count):
        for pair in np.ndindex(limbs.shape[:-1]):
            tables[:, digit, *pair] = _split_turns(limbs[pair], 8 * (first + digit))
    upper, lower, rest = tables
    return DigitTables(upper.astype(np.int32), lower.astype(np.int32), rest.astype(np.float32))


def _split_turns(limbs: NDArray[np.uint32], bits: int) -> tuple[int, int, float]:
    """``turns * 2**bits`` without whole turns, as f1, f2 and f3."""
    units = int.from_bytes(limbs.astype(">u4").tobytes(), "big", signed=True)
    # in units of 2**-192 turns, so that up to 64 bits of whole turns can come after the point
    rest_units = (units << (_WHOLE_BITS + bits)) % (1 << _ALL_BITS)
    rest_units -= (rest_units >> (_ALL_BITS - 1)) << _ALL_BITS  # from -1/2 to 1/2 turns
    unit = _ALL_BITS - _UPPER_BITS
    upper = (rest_units + (1 << (unit - 1))) >> unit
    rest_units -= upper << unit
    unit -= _LOWER_BITS
    lower = (rest_units + (1 << (unit - 1))) >> unit
    rest_units -= lower << unit
    return upper, lower, rest_units / (1 << unit)


def cos_sin_of_positions(
    positions: Any, rope: Rope, ops: Operations, *, fractional: bool, count: int
) -> tuple[Any, Any]:
    """Float32 cos and sin ``[..., seq, num_pairs]`` without the attention factor.

    Args:
        positions: int32, int64 or floats ``[..., seq, 1]``; ``[..., seq, num_pairs]`` where pairs
            differ in their axis, ``[..., seq, n_axes, num_pairs]`` with `Mixed` axes.
        rope: The Rope.
        ops: The library of ``positions``.
        fractional: Whether they are floats. Those beyond int64 and NaN become NaN.
        count: `DIGITS_32` or `DIGITS_64`.
    """
    if fractional:
        nearest, base = ops.nearest(positions), ops.number(float(_BASE), positions)
        groups = [
            (0, _digits_of_floats(positions, count, ops)),
            (-DIGITS_REST, _digits_of_rest(positions - nearest, base, ops)),
        ]
    else:
        groups = [(0, _digits_of_integers(positions, count, ops))]
    angles: list[Angle] = []
    like = groups[0][1][0]  # an int32
    for first, digits in groups:
        angles += _angles_of_digits(digits, digit_tables(rope, first, len(digits)), ops)
    cos, sin = _cos_sin_of_angle(_sum_of_angles(angles, like, ops), like, ops)
    if not fractional:
        return cos, sin
    mixes = digit_tables(rope, 0, count).upper.ndim == 3
    for axis in range(rope.axes.n_axes) if mixes else [None]:
        coordinates = positions if axis is None else ops.select_axis(positions, axis)
        has_angle = ops.absolute(coordinates) < ops.number(2.0**63, positions)  # False for NaN
        cos, sin = (ops.nan_unless(has_angle, row) for row in (cos, sin))
    return cos, sin


def _digits_of_integers(positions: Any, count: int, ops: Operations) -> list[Any]:
    """Digits from -128 to 128 of int32 or int64, in int32, the lowest first.

    They are correct whether quotients are floored or truncated. No constant exceeds 256, so nothing
    overflows, and if an engine narrows int64 to int32 they stay correct below 2**31.
    """
    base, half = ops.number(_BASE, positions), ops.number(_BASE // 2, positions)
    digits: list[Any] = []
    quotient = positions
    for _ in range(count - 1):
        higher = ops.divide(quotient, base)
        remainder = quotient - higher * base
        carry = ops.divide(remainder, half)  # -1, 0 or 1
        digits.append(ops.as_int32(remainder - carry * base))
        quotient = higher + carry
    return [*digits, ops.as_int32(quotient)]


def _digits_of_floats(positions: Any, count: int, ops: Operations) -> list[Any]:
    """Digits of the whole numbers nearest to floats; every step is exact."""
    base, inverse_base = ops.number(float(_BASE), positions), ops.number(1 / _BASE, positions)
    digits: list[Any] = []
    quotient = ops.nearest(positions)
    for _ in range(count - 1):
        carry = ops.nearest(quotient * inverse_base)
        digits.append(ops.as_int32(quotient - carry * base))
        quotient = carry
    return [*digits, ops.as_int32(quotient)]


def _digits_of_rest(rest: Any, base: Any, ops: Operations) -> list[Any]:
    """Digits of floats from -1/2 to 1/2, rounded at 2**-33."""
    digits: list[Any] = []
    for _ in range(DIGITS_REST):
        rest = rest * base
        digit = ops.nearest(rest)
        digits.append(ops.as_int32(digit))
        rest = rest - digit
    return digits[::-1]


class Angle(NamedTuple):
    """A sum of digits times frequencies, without whole turns."""

    upper: Any  # int32, units of 2**-13 turns, from 0 to below 2**13
    lower: Any  # int32, units of 2**-27 turns, from 0 to below 2**14
    rest: Any  # float32, in units of 2**-27 turns


def _angles_of_digits(digits: Sequence[Any], tables: DigitTables, ops: Operations) -> list[Angle]:
    """The angle of at most eight digits; with `Mixed` axes, one angle per axis."""
    uppers, lowers, rests = (ops.constant(table) for table in tables)
    upper, lower = digits[0] * uppers[0], digits[0] * lowers[0]
    rest = ops.as_float32(digits[-1]) * rests[len(digits) - 1]
    for i in range(1, len(digits)):
        upper = upper + digits[i] * uppers[i]  # at most 2**22
        lower = lower + digits[i] * lowers[i]  # at most 2**23
    for i in range(len(digits) - 2, -1, -1):
        rest = rest + ops.as_float32(digits[i]) * rests[i]  # at most 2**9
    # for positive numbers every engine computes the same quotient
    sums = Angle(upper + ops.number(2**22, digits[0]), lower + ops.number(2**23, digits[0]), rest)
    angle = _drop_whole_turns(sums, digits[0], ops, surplus=2**9)
    if tables.upper.ndim == 2:
        return [angle]
    return [
        Angle(*(ops.select_axis(n, axis) for n in angle)) for axis in range(tables.upper.shape[1])
    ]


def _sum_of_angles(angles: Sequence[Angle], like: Any, ops: Operations) -> Angle:
    """The sum of up to 512 angles: of several axes, or of a whole number and a remainder."""
    if len(angles) == 1:
        return angles[0]
    sums = (reduce(add, parts) for parts in zip(*angles, strict=True))
    return _drop_whole_turns(Angle(*sums), like, ops)


def _drop_whole_turns(sums: Angle, like: Any, ops: Operations, surplus: int = 0) -> Angle:
    """Positive sums as an angle; ``lower`` holds ``surplus`` units of ``upper`` too many."""
    turn, unit = ops.number(2**_UPPER_BITS, like), ops.number(2**_LOWER_BITS, like)
    carry = ops.divide(sums.lower, unit)
    upper = sums.upper + carry + ops.number(2**_UPPER_BITS - surplus, like)
    upper = upper - ops.divide(upper, turn) * turn
    return Angle(upper, sums.lower - carry * unit, sums.rest)


def _cos_sin_of_angle(angle: Angle, like: Any, ops: Operations) -> tuple[Any, Any]:
    """Float32 cos and sin."""
    quarter_turn, eighth = (ops.number(2 ** (_UPPER_BITS - bits), like) for bits in (2, 3))
    # an eighth of a turn is added, so that the remainder after whole quarters is centred
    shifted = angle.upper + eighth
    quarter = ops.divide(shifted, quarter_turn)  # 0 to 4
    upper = shifted - quarter * quarter_turn - eighth
    # in eighths of a turn, from -1 to 1 + 2**-15, rounded once
    lower = (ops.as_float32(angle.lower) + angle.rest) * 2.0**-_LOWER_BITS
    x = (lower + ops.as_float32(upper)) * 2.0 ** (3 - _UPPER_BITS)
    y = x * x
    even_cos, even_sin = evaluate((1.0, *FLOAT32.cos), y), evaluate(FLOAT32.sin, y) * x
    # for quarters 0 to 4 the cosine is 1, 0, -1, 0, 1 and the sine 0, 1, 0, -1, 0: one product in
    # each sum is 0, so an engine may fuse multiplication and addition
    number = ops.as_float32(quarter)
    cos_of_quarter = ops.absolute(number - 2.0) - 1.0
    sin_of_quarter = ops.absolute(ops.absolute(number - 1.0) - 2.0) - 1.0
    cos = even_cos * cos_of_quarter - even_sin * sin_of_quarter
    sin = even_sin * cos_of_quarter + even_cos * sin_of_quarter
    return cos, sin
