"""The angle of any position: constants, bounds, cos and sin in NumPy; wavelengths and turns.

A frequency in turns per position is kept as a fixed-point number. Its product with a position, in
integers that overflow at a whole turn, leaves the fraction of a turn, exact at every int64
position:

    t = p * F mod 1,   q = the nearest quarter turn,   x = (t - q/4) in eighths of a turn, |x| <= 1
    y = x * x,         cos(pi/4 x) = 1 + y C(y),       sin(pi/4 x) = x S(y)

and ``q`` exchanges and negates the two. A float position is split into its nearest integer, treated
as above, and a remainder in units of 2**-32 (2**-64 in float64). The remainder times the frequency,
which here keeps its whole turns, is shifted by as many bits and added. From 2**63 on there is no
angle. Every implementation computes this with the constants defined here, and is within
`COS_SIN_ERROR` or `COS_SIN_ERROR_FLOAT32` of the real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasor._checks import number, unmasked
from phasor._reals import PI, in_reals
from phasor._tensors import check_coordinates, position_dtype_error
from phasor.errors import PositionError
from phasor.rope import Rope, real_inv_freq, real_terms

#: Largest absolute error of a float64 cosine or sine at an integer position. Derived, in units of
#: 1e-17: the 64 bits of the angle are off by 4 units of the last (0.2), ``x`` in float64 moves the
#: angle by pi/4 * 2**-54 (4.4), the polynomials are off by 2.6, and their evaluation rounds the
#: sum ``S`` (5.6), the last product or sum (5.6) and smaller terms (4): 23 in all.
COS_SIN_ERROR = 1e-15
#: Same for a float32 cosine or sine. Derived, in units of 1e-8, for the sine, which is less exact:
#: 96 bits of the frequency move the angle by 2**-33 turns, two products by 2**-32 (together 0.3),
#: ``x`` in float32 by pi/4 * 2**-25 (2.3), the polynomial is off by 2.4, mostly its first
#: coefficient, and its evaluation rounds ``S`` (3.0), the product with ``x`` (3.0) and smaller
#: terms (1.0): 12.0. With `Mixed` axes, each axis after the first adds 0.6.
COS_SIN_ERROR_FLOAT32 = 1.25e-7
#: What a float position adds to these bounds for every radian per position: half a unit of the
#: remainder.
REST_ERROR, REST_ERROR_FLOAT32 = 2.0**-65, 2.0**-33


class Polynomials(NamedTuple):
    """Coefficients of cos and sin of at most an eighth of a turn, the lowest power first.

    The polynomials ``C`` and ``S`` that agree with ``(cos(pi/4 x) - 1) / y`` and
    ``sin(pi/4 x) / x``, where ``y = x * x``, at the Chebyshev nodes of [0, 1].
    """

    cos: tuple[float, ...]
    sin: tuple[float, ...]


#: Errors 1.9e-10 and 2.4e-9; with the coefficients rounded to float32, 9.1e-9 and 2.4e-8.
FLOAT32 = Polynomials(
    cos=(-0.3084251284599304, 0.01585433818399906, -0.00032596138771623373, 3.541952764862799e-06),
    sin=(0.7853981852531433, -0.08074543625116348, 0.0024900068528950214, -3.595429006963968e-05),
)
#: Errors 1.9e-17 and 2.6e-17.
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

#: Bits of the remainder of a float position, by the itemsize of the result.
_REST_BITS = {4: 32, 8: 64}
# elements computed at a time, so that the temporaries stay in cache
_CHUNK_ELEMENTS = 1 << 16
_LOW_BITS = np.int64(2**32 - 1)


@lru_cache(maxsize=256)
@in_reals
def real_turns(rope: Rope) -> tuple[Decimal, ...]:
    """Turns per position of each pair, with 60 digits."""
    return tuple(f / (2 * PI) for f in real_inv_freq(rope))


def wavelengths(rope: Rope) -> NDArray[np.float64]:
    """Positions per full turn of every pair, ``2 pi / inv_freq``; infinite where a frequency is 0.

    >>> wavelengths(Rope(head_dim=4, pairing="half", base=100.0)).round(3)
    array([ 6.283, 62.832])
    """
    return np.array([float(1 / t) if t else np.inf for t in real_turns(rope)])


def turns(rope: Rope, context: float) -> NDArray[np.float64]:
    """Full turns of every pair over ``context`` positions, ``context * inv_freq / 2 pi``.

    Below 1 a pair completes no turn, so a longer context shows the model new angles.

    >>> turns(Rope(head_dim=4, pairing="half", base=100.0), 128).round(3)
    array([20.372,  2.037])
    """
    length = Decimal(number("context", context, above=0))
    return np.array([float(length * t) for t in real_turns(rope)])


def cos_sin(
    positions: ArrayLike, rope: Rope, dtype: type[np.float64] | type[np.float32] = np.float64
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosine and sine of every pair's angle at every position.

    ``cos(p * inv_freq[k])`` and ``direction * sin(p * inv_freq[k])`` with the real frequencies of
    ``rope``, within `COS_SIN_ERROR` at every int64 position. A float position adds an error of
    `REST_ERROR` for every radian per position, or none if it is a multiple of 2**-64.

    Args:
        rope: The Rope. Each pair uses its axis of ``positions``.
        positions: Integers or floats: any shape ``[...]``, or ``[..., n_axes]`` when
            ``rope.axes`` has several.
        dtype: ``np.float64``; or ``np.float32`` for the values that kernels compute for tensors of
            at most 32 bits, within `COS_SIN_ERROR_FLOAT32` and `REST_ERROR_FLOAT32`.

    Returns:
        Two arrays ``[..., num_pairs]`` of ``dtype``, without the attention factor.

    >>> cos, sin = cos_sin([0, 1, 2**62], Rope(head_dim=4, pairing="half"))
    >>> print(cos.shape, cos[2, 0])
    (3, 2) -0.7112665029764864
    """
    coordinates = as_positions(positions)
    check_coordinates(coordinates.shape, rope)
    coordinates = pair_coordinates(coordinates, axes_of(rope))
    tokens = coordinates.shape[: 1 - turn_words(rope).ndim]
    cos = np.empty((*tokens, rope.num_pairs), dtype)
    sin = np.empty_like(cos)
    flat = coordinates.reshape(-1, *coordinates.shape[len(tokens) :])
    flat_cos, flat_sin = cos.reshape(-1, rope.num_pairs), sin.reshape(-1, rope.num_pairs)
    step = max(1, _CHUNK_ELEMENTS // rope.num_pairs)
    for start in range(0, len(flat), step):
        rows = slice(start, start + step)
        flat_cos[rows], flat_sin[rows] = cos_sin_of_turns(_turns(rope, flat[rows], dtype), dtype)
    return cos, sin


def axes_of(rope: Rope) -> tuple[Any, ...] | None:
    """The axis of each pair, for `pair_coordinates`; None for a single axis."""
    return None if rope.axes.n_axes == 1 else rope.axes.indices(rope.num_pairs)


def pair_coordinates(positions: Any, axes: tuple[Any, ...] | None, xp: Any = np) -> Any:
    """The coordinate that turns each pair: ``[..., 1]`` for one axis, else ``[..., num_pairs]``.

    With `Mixed` axes the result is ``[..., n_axes, num_pairs]``.
    """
    return positions[..., None if axes is None else xp.array(axes)]


def as_positions(positions: ArrayLike) -> NDArray[Any]:
    """``positions`` as an int64 or float64 array."""
    unmasked("positions", positions, PositionError)
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
    raise position_dtype_error(array.dtype)


@lru_cache(maxsize=256)
@in_reals
def turn_limbs(rope: Rope) -> NDArray[np.uint32]:
    """Turns per position of every pair, in fixed point with 192 bits: read-only ``[num_pairs, 6]``.

    The most significant limb is first. Whole turns modulo 2**64 are in two limbs, the fraction is
    in four. With ``direction=-1`` the number is negative, in two's complement. With `Mixed` axes
    the shape is ``[n_axes, num_pairs, 6]``: a pair's angle is the sum over axes.

    >>> turn_limbs(Rope(head_dim=2, pairing="half", explicit_inv_freq=(6.283185307179586,)))
    array([[         0,          0, 4294967295, 4294966576, 3926538566,
            1172470426]], dtype=uint32)
    """
    # the product with |p| < 2**63 still has 66 correct bits after the point
    turns = [rope.direction * f / (2 * PI) for term in real_terms(rope) for f in term]
    units = [int((turn * 2**128).to_integral_value()) for turn in turns]
    limbs = [[(unit >> shift) & 0xFFFFFFFF for shift in range(160, -1, -32)] for unit in units]
    lead = np.shape(rope.axes.indices(rope.num_pairs))
    array = np.array(limbs, dtype=np.uint32).reshape(*lead, 6)
    array.flags.writeable = False  # cached, so all callers share it
    return array


@lru_cache(maxsize=256)
def turn_words(rope: Rope, rest_bits: int = 0) -> NDArray[np.int64]:
    """The multipliers of positions, or of their remainders: read-only ``[3, num_pairs]``.

    64 bits of the frequency, the next 32, and the 32 after those, which only float64 needs.
    ``rest_bits`` is 0 for positions, 32 or 64 for remainders in units of 2**-32 or 2**-64. With
    `Mixed` axes the shape is ``[3, n_axes, num_pairs]``.
    """
    first = 2 - rest_bits // 32
    # [num_pairs, 6] -> [4, num_pairs]
    limbs = np.moveaxis(turn_limbs(rope)[..., first : first + 4], -1, 0).astype(np.int64)
    words = np.stack(((limbs[0] << 32) | limbs[1], limbs[2], limbs[3]))
    words.flags.writeable = False
    return words


def _turns(rope: Rope, positions: NDArray[Any], dtype: Any) -> NDArray[np.int64]:
    """Angles ``[P, num_pairs]`` in units of 2**-64 turns at ``[P, 1]`` or ``[P, num_pairs]``.

    With `Mixed` axes, at ``[P, n_axes, num_pairs]``; integers add up exactly.
    """
    bits = _REST_BITS[np.dtype(dtype).itemsize]
    whole, *rests = integer_parts(positions, bits)
    turns = _multiply(whole, turn_words(rope), bits)
    for rest in rests:
        turns += _multiply(rest, turn_words(rope, bits), bits)
    return turns if turns.ndim == 2 else turns.sum(-2)


def integer_parts(positions: Any, bits: int, xp: Any = np) -> list[Any]:
    """int64 unchanged; floats as the nearest int64 and remainders in units of ``2**-bits``."""
    if positions.dtype == xp.int64:
        return [positions]
    nearest = xp.round(positions)
    # remainders from -1/2 to below 1/2, because 2**63 units do not fit in int64
    nearest = nearest + (positions - nearest == 0.5)
    rests = xp.round((positions - nearest) * 2.0**bits)
    return [nearest.astype(xp.int64), rests.astype(xp.int64)]


def _multiply(numbers: NDArray[np.int64], words: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """The upper 64 bits of the products without whole turns; int64 wraps around."""
    # float32 takes two products; the sum is too small by -1/2 to 3/2 of 2**32 units: half a unit of
    # rounding in the second word, and the bits that the shift drops. float64 takes four, off by
    # less than four units
    upper = numbers >> 32
    turns = numbers * words[0] + upper * words[1]
    if bits == 32:
        return turns
    # without its last bit, the second word times 32 bits fits in int64
    carry = ((numbers & _LOW_BITS) * (words[1] >> 1)) >> 31
    return turns + carry + ((upper * words[2]) >> 32)


def cos_sin_of_turns(turns: Any, dtype: Any, xp: Any = np, factor: Any = None) -> tuple[Any, Any]:
    """Cosine and sine of angles in integers of 32 or 64 bits that overflow at a whole turn.

    Both are multiplied by ``factor``, if given. ``dtype`` is float32 or float64 of ``xp``, the
    library of the arrays: NumPy or JAX.
    """
    even_cos, even_sin = cos_sin_within_eighth(turns, dtype, xp)
    signed, bits = (np.int32, 32) if turns.itemsize == 4 else (np.int64, 64)
    shifted = (turns + (1 << (bits - 3))).astype(signed, copy=False)
    # a quarter turn takes (cos, sin) to (-sin, cos), and half a turn negates both
    is_odd = (shifted << 1) < 0
    sign = xp.sign(shifted | 1).astype(dtype)
    sign = sign if factor is None else sign * factor
    cos, sin = xp.where(is_odd, -even_sin, even_cos), xp.where(is_odd, even_cos, even_sin)
    return cos * sign, sin * sign


def cos_sin_within_eighth(turns: Any, dtype: Any, xp: Any = np) -> tuple[Any, Any]:
    """Cosine and sine of the angles minus their nearest quarter turns."""
    signed, bits = (xp.int32, 32) if turns.itemsize == 4 else (xp.int64, 64)
    # in eighths of a turn, from -1 to 1
    x = (turns << 2).astype(signed).astype(dtype) * 2.0 ** (1 - bits)
    y = x * x
    # both polynomials at once, so that a compiled program has half the steps
    columns = map(xp.array, _columns(x.itemsize, x.ndim))
    cos_value, sin_value = evaluate([*columns], xp.broadcast_to(y, (2, *y.shape)))
    return 1 + y * cos_value, x * sin_value


@lru_cache(maxsize=16)
def _columns(itemsize: int, ndim: int) -> list[NDArray[Any]]:
    """The coefficients of `FLOAT32` or `FLOAT64`, cos and sin stacked, shaped for ``ndim`` axes."""
    pairs = zip(*(FLOAT64 if itemsize == 8 else FLOAT32), strict=True)
    return [np.array(pair, f"f{itemsize}").reshape(2, *[1] * ndim) for pair in pairs]


def evaluate(coefficients: Sequence[Any], y: Any) -> Any:
    """The polynomial at ``y``, an array of any library."""
    value: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = value * y + coefficient
    return value
