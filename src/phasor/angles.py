"""Cosine and sine of any position, correct to float64; and the digit tables that kernels use.

A float64 angle ``p * inv_freq`` loses a digit for every power of ten of ``p`` and has none left at
2**53. So turns are counted in fixed point: the frequency in turns per position is a 128-bit
fraction, whole turns overflow in its product with a position, and the fraction of a turn that
remains has 60 correct bits at every int64 position.

A position is also a number in base 1024, and rotations compose, so

    R(p) = R(d3 * 1024**3) R(d2 * 1024**2) R(d1 * 1024) R(d0)

and four tables of 1024 rows hold every position below 2**40 in 2 MB for 64 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import axes_hint
from phasor._reals import cos_sin_of_turns, in_reals, nearest_float32
from phasor.errors import PositionError
from phasor.frequencies import real_turns
from phasor.rope import Rope

DIGIT_BITS = 10
DIGITS = 4
ROWS = 1 << DIGIT_BITS
#: Positions of this size or larger have no digit rows.
POSITION_LIMIT = 1 << (DIGIT_BITS * DIGITS)
#: Largest absolute error of `cos_sin` at an integer position. Derived: the angle left after
#: taking out quarter turns is at most pi/4 with a relative error of 3.5 * 2**-53, and NumPy's
#: cosine and sine are good to 4 ulp, which together is 7e-16; the fixed point adds 2e-19.
COS_SIN_ERROR = 1e-15
#: Largest error (as a complex number) of a float32 row composed of two digits, |p| < 2**20, and of
#: four, |p| < 2**40. Derived: an entry is off by sqrt(2) * 2**-25 at most, and a complex product
#: in float32 adds sqrt(5) * 2**-24 (Brent, Percival & Zimmermann 2007); the last factor covers
#: errors of errors.
ROW_ERROR_20 = (2**0.5 + 5**0.5) * 2**-24 * (1 + 2**-20)
ROW_ERROR_40 = (2 * 2**0.5 + 3 * 5**0.5) * 2**-24 * (1 + 2**-20)

_CHUNK_ELEMENTS = (
    1 << 16
)  # elements computed at a time, so that the twenty temporaries stay in cache
_LOW_WORD = np.uint64(0xFFFFFFFF)
_32, _62 = np.uint64(32), np.uint64(62)
_EIGHTH = np.uint64(1 << 61)  # of a turn, in units of 2**-64


def cos_sin(rope: Rope, positions: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine and sine of every pair's angle at every position.

    ``cos(p * inv_freq[k])`` and ``direction * sin(p * inv_freq[k])`` with the real frequencies
    of ``rope``, within 1e-15 at every int64 position. A float position is split into an integer
    and a fraction, and adds the float64 error of ``fraction * inv_freq``.

    Args:
        rope: The Rope. Each pair uses its axis of ``positions``.
        positions: Integers or floats: any shape ``[...]``, or ``[..., n_axes]`` when
            ``rope.axes`` has several.

    Returns:
        Two float64 arrays ``[..., num_pairs]``, without the attention factor.

    Raises:
        PositionError: For bools, other dtypes, NaN, infinities, integers beyond int64, or a
            missing axis dimension.
        SpecError: If ``rope.scaling`` is a rule: `Rope.at` picks its law.

    >>> cos, sin = cos_sin(Rope(head_dim=4, pairing="half"), [0, 1, 2**62])
    >>> print(cos.shape, cos[2, 0])
    (3, 2) -0.7112665029764864
    """
    coordinates = checked_positions(positions)
    axis_of_pair = np.array(rope.axes.axis_of_pair(rope.num_pairs))
    n_axes = rope.axes.n_axes
    if n_axes == 1:
        coordinates = coordinates[..., None]
    elif coordinates.ndim == 0 or coordinates.shape[-1] != n_axes:
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(coordinates.shape)}; "
            f"{axes_hint(coordinates.shape, n_axes)}"
        )
    cos = np.empty((*coordinates.shape[:-1], rope.num_pairs))
    sin = np.empty_like(cos)
    flat = coordinates.reshape(-1, n_axes)
    flat_cos, flat_sin = cos.reshape(-1, rope.num_pairs), sin.reshape(-1, rope.num_pairs)
    for rows in _chunks(len(flat), rope.num_pairs):
        per_pair = flat[rows] if n_axes == 1 else flat[rows][:, axis_of_pair]
        flat_cos[rows], flat_sin[rows] = _cos_sin(rope, per_pair)
    return cos, sin


def checked_positions(positions: ArrayLike) -> NDArray[Any]:
    """``positions`` as an int64 or float64 array.

    Raises:
        PositionError: If they are no such numbers.
    """
    try:
        array = np.asarray(positions)
    except (ValueError, OverflowError) as error:
        raise PositionError(f"positions must be an array of numbers: {error}") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # np.asarray([]) is float64
    if array.dtype.kind in "ui":
        if array.dtype == np.uint64 and array.size and array.max() > np.uint64(2**63 - 1):
            raise PositionError(f"positions must be below 2**63, got {array.max()}")
        return array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize in (4, 8):
        finite = np.isfinite(array) & (np.abs(array) < 2.0**63)
        if not finite.all():
            raise PositionError(
                f"positions must be finite and below 2**63, got {array[~finite].flat[0]}"
            )
        return array.astype(np.float64)
    reason = {
        "b": "bools are masks; phasor.positions.padded makes positions of one",
        "f": "a float16 cannot tell 2048 from 2049, and more digits than float64 are not used",
        "O": "they do not fit 64 bits, or the rows differ in length",
    }.get(array.dtype.kind, "")
    raise PositionError(
        f"positions must be integers or float32/float64, got {array.dtype}"
        + (f" ({reason})" if reason else "")
    )


def _chunks(length: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // width)
    return (slice(start, start + step) for start in range(0, length, step))


@lru_cache(maxsize=256)
@in_reals
def turn_words(rope: Rope) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Turns per position of every pair, modulo whole turns: 128 bits as two words."""
    # the product with |p| < 2**63 still has 66 correct bits after the point
    fixed = [int((turn % 1 * 2**128).to_integral_value()) % 2**128 for turn in real_turns(rope)]
    high = np.array([value >> 64 for value in fixed], dtype=np.uint64)
    low = np.array([value & (2**64 - 1) for value in fixed], dtype=np.uint64)
    return high, low


def _cos_sin(rope: Rope, positions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosine and sine at checked ``positions`` ``[P, 1]`` or ``[P, num_pairs]``."""
    if positions.dtype == np.int64:
        integer, fraction = positions, None
    else:
        nearest = np.rint(positions)
        integer, fraction = nearest.astype(np.int64), positions - nearest
    # abs(-2**63) overflows to itself in int64, which read as uint64 is 2**63
    distance = np.abs(integer).astype(np.uint64)
    quarters, turns = _reduce_angles(distance, *turn_words(rope))
    negative = integer < 0
    if fraction is not None:
        turns += np.where(negative, -fraction, fraction) * (rope.inv_freq / (2 * np.pi))
    angle = turns * (2 * np.pi)
    even_cos, even_sin = np.cos(angle), np.sin(angle)
    odd = (quarters & np.uint64(1)).astype(bool)
    cos = np.where(odd, even_sin, even_cos)
    sin = np.where(odd, even_cos, even_sin)
    np.negative(cos, where=(quarters == 1) | (quarters == 2), out=cos)
    np.negative(sin, where=(quarters >= 2) ^ negative ^ (rope.direction < 0), out=sin)
    return cos, sin


def _reduce_angles(
    distance: NDArray[np.uint64], high: NDArray[np.uint64], low: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """``distance * fraction`` modulo one turn: quarter turns, and a rest of at most an eighth.

    ``high`` and ``low`` are the two words of the 128-bit fraction.
    """
    # the upper word of distance * low, from products of 32 bits
    a1, a0, b1, b0 = distance >> _32, distance & _LOW_WORD, low >> _32, low & _LOW_WORD
    cross, crossed = a1 * b0, a0 * b1
    carry = ((a0 * b0) >> _32) + (cross & _LOW_WORD) + (crossed & _LOW_WORD)
    top = distance * high + a1 * b1 + (cross >> _32) + (crossed >> _32) + (carry >> _32)
    shifted = top + _EIGHTH
    quarters = shifted >> _62
    rest = (shifted - (quarters << _62)).astype(np.int64) - np.int64(1 << 61)
    return quarters, rest * 2.0**-64 + (distance * low) * 2.0**-128


@lru_cache(maxsize=32)
def digit_tables(rope: Rope, dtype: type[np.float32] | type[np.float64]) -> NDArray[Any]:
    """``(cos, sin)`` of every digit of a position: the factors of ``R(p)``.

    Row ``v`` of table ``j`` is the rotation of position ``v * 1024**j``. The rotation of ``p`` is
    the product of the rows of its four base-1024 digits, for ``|p| < 2**40``; a negative position
    is the conjugate.

    Args:
        rope: The Rope.
        dtype: ``np.float32`` for correctly rounded entries, whose products in float32 are within
            `ROW_ERROR_20` below 2**20 and `ROW_ERROR_40` below 2**40; or ``np.float64``.

    Returns:
        Read-only array ``[4, 1024, num_pairs, 2]`` of ``dtype``.

    >>> digit_tables(Rope(head_dim=128, pairing="half"), np.float32).nbytes
    2097152
    """
    digits, values = np.divmod(np.arange(DIGITS * ROWS), ROWS)
    table = digit_rows(rope, digits, values, dtype).reshape(DIGITS, ROWS, rope.num_pairs, 2)
    table.flags.writeable = False
    return table


def digit_rows(
    rope: Rope,
    digits: NDArray[np.int64],
    values: NDArray[np.int64],
    dtype: type[np.float32] | type[np.float64],
) -> NDArray[Any]:
    """Row ``values[i]`` of table ``digits[i]`` of `digit_tables`: ``[count, num_pairs, 2]``.

    >>> rope = Rope(head_dim=4, pairing="half", base=100.0)
    >>> row = digit_rows(rope, np.array([0]), np.array([3]), np.float32)
    >>> bool((row[0] == digit_tables(rope, np.float32)[0, 3]).all())
    True
    """
    places = (values << (DIGIT_BITS * digits)).reshape(-1, 1)
    exact = np.empty((len(places), rope.num_pairs, 2))
    for rows in _chunks(len(places), rope.num_pairs):
        exact[rows, :, 0], exact[rows, :, 1] = _cos_sin(rope, places[rows])
    return exact if dtype is np.float64 else _round_to_float32(rope, places, exact)


@in_reals
def _round_to_float32(
    rope: Rope, places: NDArray[np.int64], exact: NDArray[np.float64]
) -> NDArray[np.float32]:
    """``exact`` in float32, each entry the nearest to the real number.

    An entry whose float64 error could change its rounding is computed again with 60 digits (Ziv's
    strategy); a typical rope has no such entry.
    """
    inexact = (places != 0) & np.array([turn != 0 for turn in real_turns(rope)])
    error = np.where(inexact[..., None], np.abs(exact) * 2.0**-49 + 2.0**-85, 0.0)
    rounded = exact.astype(np.float32)
    unsure = (exact - error).astype(np.float32) != (exact + error).astype(np.float32)
    for row, pair in {(int(row), int(pair)) for row, pair, _ in np.argwhere(unsure)}:
        cos, sin = cos_sin_of_turns(Decimal(int(places[row, 0])) * real_turns(rope)[pair])
        rounded[row, pair] = nearest_float32(cos), nearest_float32(rope.direction * sin)
    return rounded


def rows(
    rope: Rope, positions: ArrayLike, dtype: type[np.float32] | type[np.float64]
) -> NDArray[Any]:
    """``(cos, sin)`` as a kernel computes them: products of digit rows, for ``|p| < 2**40``.

    At larger and at float positions they are `cos_sin` rounded to ``dtype``.

    Returns:
        ``[..., num_pairs, 2]`` of ``dtype``.

    Raises:
        PositionError: As `cos_sin`.

    >>> rows(Rope(head_dim=2, pairing="half"), 1, np.float32)
    array([[0.5403023 , 0.84147096]], dtype=float32)
    """
    coordinates = checked_positions(positions)
    exact = np.stack(cos_sin(rope, coordinates), axis=-1).astype(dtype)
    if coordinates.dtype != np.int64:
        return exact
    if rope.axes.n_axes == 1:
        coordinates = coordinates[..., None]
    places = coordinates[..., np.array(rope.axes.axis_of_pair(rope.num_pairs))]
    distances = np.abs(places)
    tables = digit_tables(rope, dtype)
    pairs = np.arange(rope.num_pairs)
    cos, sin = np.moveaxis(tables[0, distances & (ROWS - 1), pairs], -1, 0)
    for digit in range(1, DIGITS):
        row = (distances >> (DIGIT_BITS * digit)) & (ROWS - 1)
        c, s = np.moveaxis(tables[digit, row, pairs], -1, 0)
        cos, sin = cos * c - sin * s, cos * s + sin * c
    np.negative(sin, where=places < 0, out=sin)
    product = np.stack((cos, sin), axis=-1)
    # abs(-2**63) is negative
    has_rows = (distances < POSITION_LIMIT) & (distances >= 0)
    product[~has_rows] = exact[~has_rows]
    return product
