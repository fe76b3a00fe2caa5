"""The angle of any position: constants, bounds, and cos and sin in NumPy.

A frequency in turns per position is kept as a fixed-point number. Its product with a position, in
integers that overflow at a whole turn, leaves the fraction of a turn, exact at every int64
position:

    t = p * F mod 1,   q = the nearest quarter turn,   x = (t - q/4) in eighths of a turn, |x| <= 1
    y = x * x,         cos(pi/4 x) = 1 + y C(y),       sin(pi/4 x) = x S(y)

and ``q`` exchanges and negates the two. A float position is its nearest integer, as above, and the
rest: an integer number of units of 2**-32 (2**-64 in float64), whose product with the same
frequency, moved by as many bits, whole turns included, is added. From 2**63 on there is no angle.

Every implementation computes this, from the constants defined here, and is within `COS_SIN_ERROR`
or `COS_SIN_ERROR_FLOAT32` of the real numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import axes_hint
from phasor._reals import cos_sin_of_turns, in_reals, nearest_float32
from phasor.errors import PositionError
from phasor.frequencies import real_turns
from phasor.rope import Rope

#: Largest absolute error of a float64 cosine or sine at an integer position. Derived, in units of
#: 1e-17: the 64 bits of the angle are off by 4 units of the last (0.2), ``x`` in float64 moves the
#: angle by pi/4 * 2**-54 (4.4), the polynomials are off by 2.6, and their evaluation rounds the
#: sum ``S`` (5.6), the last product or sum (5.6) and smaller terms (4): 23 in all.
COS_SIN_ERROR = 1e-15
#: The same of a float32 cosine or sine. Derived, in units of 1e-8, for the sine, which is worse:
#: 96 bits of the frequency move the angle by 2**-33 turns, two products by 2**-32 (together 0.3),
#: ``x`` in float32 by pi/4 * 2**-25 (2.3), the polynomial is off by 2.4, mostly its first
#: coefficient, and its evaluation rounds ``S`` (3.0), the product with ``x`` (3.0) and smaller
#: terms (1.0): 12.0.
COS_SIN_ERROR_FLOAT32 = 1.25e-7
#: At a float position, what these bounds grow by for every radian per position: half a unit of the
#: rest.
REST_ERROR, REST_ERROR_FLOAT32 = 2.0**-65, 2.0**-33


class Polynomials(NamedTuple):
    """Coefficients of cos and sin of at most an eighth of a turn, the lowest power first.

    The polynomials ``C`` and ``S`` that agree with ``(cos(pi/4 x) - 1) / y`` and
    ``sin(pi/4 x) / x``, where ``y = x * x``, at the Chebyshev nodes of [0, 1].
    """

    cos: tuple[float, ...]
    sin: tuple[float, ...]


#: Off by 1.9e-10 and 2.4e-9, and by 9.1e-9 and 2.4e-8 with coefficients that are float32.
FLOAT32 = Polynomials(
    cos=(
        -0.3084251284599304,
        0.01585433818399906,
        -0.00032596138771623373,
        3.541952764862799e-06,
    ),
    sin=(
        0.7853981852531433,
        -0.08074543625116348,
        0.0024900068528950214,
        -3.595429006963968e-05,
    ),
)
#: Off by 1.9e-17 and 2.6e-17.
FLOAT64 = Polynomials(
    cos=(
        -0.30842513753404244,
        0.015854344243815488,
        -0.0003259918869271996,
        3.590860447448612e-06,
        -2.4611366238309744e-08,
        1.1500679700940496e-10,
        -3.863156948832656e-13,
    ),
    sin=(
        0.7853981633974483,
        -0.08074551218828054,
        0.002490394570188844,
        -3.657620415891387e-05,
        3.133616225433416e-07,
        -1.7571500746983935e-09,
        6.877360573166326e-12,
    ),
)

#: Bits of a unit of the rest of a float position, by the itemsize of what is computed.
_REST_BITS = {4: 32, 8: 64}
# elements computed at a time, so that the temporaries stay in cache
_CHUNK_ELEMENTS = 1 << 16
_LOW_BITS = np.int64(2**32 - 1)
_EIGHTH = np.int64(1 << 61)  # of a turn, in units of 2**-64


def cos_sin(
    rope: Rope, positions: ArrayLike, dtype: type[np.float64] | type[np.float32] = np.float64
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosine and sine of every pair's angle at every position.

    ``cos(p * inv_freq[k])`` and ``direction * sin(p * inv_freq[k])`` with the real frequencies of
    ``rope``, within `COS_SIN_ERROR` at every int64 position. A float position adds `REST_ERROR` for
    every radian per position, and nothing if it is a whole number of units of 2**-64.

    Args:
        rope: The Rope. Each pair uses its axis of ``positions``.
        positions: Integers or floats: any shape ``[...]``, or ``[..., n_axes]`` when
            ``rope.axes`` has several.
        dtype: ``np.float64``; or ``np.float32`` for what kernels compute for tensors of at most 32
            bits, within `COS_SIN_ERROR_FLOAT32` and `REST_ERROR_FLOAT32`.

    Returns:
        Two arrays ``[..., num_pairs]`` of ``dtype``, without the attention factor.

    Raises:
        PositionError: For bools, other dtypes, NaN, infinities, integers beyond int64, or a
            missing axis dimension.
        SpecError: If ``rope.scaling`` is a rule: `Rope.at` picks its law.

    >>> cos, sin = cos_sin(Rope(head_dim=4, pairing="half"), [0, 1, 2**62])
    >>> print(cos.shape, cos[2, 0])
    (3, 2) -0.7112665029764864
    """
    coordinates = checked_positions(positions)
    n_axes = rope.axes.n_axes
    if n_axes == 1:
        coordinates = coordinates[..., None]
    elif coordinates.ndim == 0 or coordinates.shape[-1] != n_axes:
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(coordinates.shape)}; "
            f"{axes_hint(coordinates.shape, n_axes)}"
        )
    else:
        # [..., n_axes] -> [..., num_pairs]
        coordinates = coordinates[..., np.array(rope.axes.axis_of_pair(rope.num_pairs))]
    cos = np.empty((*coordinates.shape[:-1], rope.num_pairs), dtype)
    sin = np.empty_like(cos)
    flat = coordinates.reshape(-1, coordinates.shape[-1])
    flat_cos, flat_sin = cos.reshape(-1, rope.num_pairs), sin.reshape(-1, rope.num_pairs)
    step = max(1, _CHUNK_ELEMENTS // rope.num_pairs)
    for start in range(0, len(flat), step):
        rows = slice(start, start + step)
        flat_cos[rows], flat_sin[rows] = _cos_sin_of_turns(_turns(rope, flat[rows], dtype), dtype)
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


@lru_cache(maxsize=256)
@in_reals
def turn_limbs(rope: Rope) -> NDArray[np.uint32]:
    """Turns per position of every pair, in fixed point with 192 bits.

    Whole turns modulo 2**64 are in two limbs, the fraction is in four. Of a Rope that turns the
    other way it is the negative number, in two's complement.

    Returns:
        Read-only ``[num_pairs, 6]``, the most significant limb first.

    >>> turn_limbs(Rope(head_dim=2, pairing="half", explicit_inv_freq=(6.283185307179586,)))
    array([[         0,          0, 4294967295, 4294967295, 2848034561,
            1152018303]], dtype=uint32)
    """
    # the product with |p| < 2**63 still has 66 correct bits after the point
    units = [int((rope.direction * t * 2**128).to_integral_value()) for t in real_turns(rope)]
    limbs = [[(unit >> shift) & 0xFFFFFFFF for shift in range(160, -1, -32)] for unit in units]
    array = np.array(limbs, dtype=np.uint32)
    array.flags.writeable = False  # cached, so all callers share it
    return array


@lru_cache(maxsize=256)
def turn_words(rope: Rope, rest_bits: int = 0) -> NDArray[np.int64]:
    """The numbers that a position is multiplied by, or the rest of one.

    Args:
        rope: The Rope.
        rest_bits: 0 for whole positions; 32 or 64 for rests in units of 2**-32 or 2**-64.

    Returns:
        Read-only ``[3, num_pairs]``: 64 bits of the frequency as they are in an int64, the 32 bits
        that follow, and the 32 after those, which only float64 needs.
    """
    first = 2 - rest_bits // 32
    # [num_pairs, 6] -> [4, num_pairs]
    limbs = turn_limbs(rope)[:, first : first + 4].T.astype(np.int64)
    words = np.stack(((limbs[0] << 32) | limbs[1], limbs[2], limbs[3]))
    words.flags.writeable = False
    return words


def _turns(rope: Rope, positions: NDArray[Any], dtype: Any) -> NDArray[np.int64]:
    """Angles ``[P, num_pairs]`` in units of 2**-64 turns at ``[P, 1]`` or ``[P, num_pairs]``."""
    bits = _REST_BITS[np.dtype(dtype).itemsize]
    if positions.dtype == np.int64:
        return _multiply(positions, turn_words(rope), bits)
    nearest = np.rint(positions)
    # from -1/2 to below 1/2, because 2**63 units are no int64
    nearest += positions - nearest == 0.5
    rest = np.rint((positions - nearest) * 2.0**bits).astype(np.int64)
    whole_turns = _multiply(nearest.astype(np.int64), turn_words(rope), bits)
    return whole_turns + _multiply(rest, turn_words(rope, bits), bits)


def _multiply(numbers: NDArray[np.int64], words: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """The upper 64 bits of the products without whole turns; int64 wraps around.

    Two products, for float32, are less than 2**32 units too small. Four, for float64, are less than
    four units too small.
    """
    upper = numbers >> 32
    turns = numbers * words[0] + upper * words[1]
    if bits == 32:
        return turns
    # without its last bit the second word's product with 32 bits is an int64
    carried = ((numbers & _LOW_BITS) * (words[1] >> 1)) >> 31
    return turns + carried + ((upper * words[2]) >> 32)


def _cos_sin_of_turns(turns: NDArray[np.int64], dtype: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosine and sine of angles in units of 2**-64 turns."""
    shifted = turns + _EIGHTH
    # without quarter turns, in eighths of a turn, from -1 to 1
    x: NDArray[Any] = (turns << 2).astype(dtype) * dtype(2.0**-63)
    y = x * x
    of_cos, of_sin = FLOAT64 if dtype is np.float64 else FLOAT32
    even_cos = 1 + y * _evaluate(of_cos, y)
    even_sin = x * _evaluate(of_sin, y)
    # a quarter turn takes (cos, sin) to (-sin, cos), and half a turn negates both
    is_odd = (shifted << 1) < 0
    sign = np.copysign(dtype(1), shifted.astype(dtype))
    cos: NDArray[Any] = np.where(is_odd, -even_sin, even_cos)
    sin: NDArray[Any] = np.where(is_odd, even_cos, even_sin)
    return cos * sign, sin * sign


def _evaluate(coefficients: tuple[float, ...], y: NDArray[Any]) -> NDArray[Any]:
    value = np.full_like(y, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * y + y.dtype.type(coefficient)
    return value


# Digit tables, which go when no kernel reads them

DIGIT_BITS = 10
DIGITS = 4
ROWS = 1 << DIGIT_BITS
#: Positions of this size or larger have no digit rows.
POSITION_LIMIT = 1 << (DIGIT_BITS * DIGITS)
#: Largest error (as a complex number) of a float32 row composed of two digits, |p| < 2**20, and of
#: four, |p| < 2**40. Derived: an entry is off by sqrt(2) * 2**-25 at most, and a complex product
#: in float32 adds sqrt(5) * 2**-24 (Brent, Percival & Zimmermann 2007); the last factor covers
#: errors of errors.
ROW_ERROR_20 = (2**0.5 + 5**0.5) * 2**-24 * (1 + 2**-20)
ROW_ERROR_40 = (2 * 2**0.5 + 3 * 5**0.5) * 2**-24 * (1 + 2**-20)

_LOW_WORD = np.uint64(0xFFFFFFFF)
_32, _62 = np.uint64(32), np.uint64(62)
_OLD_EIGHTH = np.uint64(1 << 61)


def _chunks(length: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // width)
    return (slice(start, start + step) for start in range(0, length, step))


@lru_cache(maxsize=256)
@in_reals
def old_turn_words(rope: Rope) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Turns per position of every pair, modulo whole turns: 128 bits as two words."""
    # the product with |p| < 2**63 still has 66 correct bits after the point
    fixed = [int((turn % 1 * 2**128).to_integral_value()) % 2**128 for turn in real_turns(rope)]
    high = np.array([value >> 64 for value in fixed], dtype=np.uint64)
    low = np.array([value & (2**64 - 1) for value in fixed], dtype=np.uint64)
    return high, low


def _old_cos_sin(rope: Rope, positions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosine and sine at checked ``positions`` ``[P, 1]`` or ``[P, num_pairs]``."""
    if positions.dtype == np.int64:
        integer, fraction = positions, None
    else:
        nearest = np.rint(positions)
        integer, fraction = nearest.astype(np.int64), positions - nearest
    # abs(-2**63) overflows to itself in int64, which read as uint64 is 2**63
    distance = np.abs(integer).astype(np.uint64)
    quarters, turns = _reduce_angles(distance, *old_turn_words(rope))
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
    shifted = top + _OLD_EIGHTH
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
        exact[rows, :, 0], exact[rows, :, 1] = _old_cos_sin(rope, places[rows])
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
