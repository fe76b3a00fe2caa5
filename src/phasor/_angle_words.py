"""The angle of `phasor.angles` for arrays of any library with NumPy's names.

`partner_rows`, for MLX, computes it in 64-bit integers. `cos_sin_of_words`, for JAX, also works
without them: an angle is a 32-bit word in units of 2**-32 turns, enough for float32; float64 takes
a 64-bit word. A position is split into its magnitude, an unsigned word that also holds 2**31 and
2**63, and its sign, which becomes the sign of the angle. Products overflow at whole turns, as in
`phasor.angles`:

    magnitude = sum of word[i] * 2**(bits * i),   i from 0, or from -1 with the rest of a float
    turns     = sum of word[i] * (frequency * 2**(bits * i) mod 2**bits)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.angles import (
    axes_of,
    cos_sin_of_turns,
    cos_sin_within_eighth,
    integer_parts,
    pair_coordinates,
    turn_limbs,
    turn_words,
)
from phasor.axes import Mixed
from phasor.rope import Rope


class Words(NamedTuple):
    """Positions ``[...]``, split into words."""

    magnitude: Sequence[Any]  # the lowest first
    sign: Any  # a word as well: 1, 0, or the unsigned form of -1
    has_angle: Any  # False where a float is NaN or beyond int64; None for integers

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the positions."""
        return self.sign.shape


def words_of(positions: Any, dtype: np.dtype[Any], xp: Any) -> Words:
    """Integers or floats, split into words as wide as ``dtype``; ``xp`` is their library.

    The fractional part of a float is rounded to a whole number of units; all else is exact.
    """
    bits, word = 8 * dtype.itemsize, f"u{dtype.itemsize}"
    itemsize = max(dtype.itemsize, positions.dtype.itemsize)
    sign = xp.sign(positions).astype(f"i{itemsize}").astype(f"u{itemsize}")
    if positions.dtype.kind in "iu":
        # two's complement: the magnitude of the smallest integer is unsigned
        units = positions.astype(f"u{itemsize}") * sign
        shifted = [units, *(units >> shift for shift in range(bits, 8 * itemsize, bits))]
        return Words([part.astype(word) for part in shifted], sign.astype(word), None)
    magnitude = abs(positions.astype(f"f{itemsize}"))
    has_angle = magnitude < 2.0**63  # False for NaN
    # in units of the fractional part; scaling a float by a power of 2 is exact. If there is no
    # angle, the words do not matter, because the factor is NaN
    scale = xp.full_like(magnitude, 2.0**bits)  # compiled programs would repeat a plain number
    units = xp.rint(magnitude * scale)
    words = []
    for _ in range(64 // bits):
        high = xp.floor(units / scale)
        words.append((units - high * scale).astype(word))
        units = high
    return Words([*words, units.astype(word)], sign.astype(word), has_angle)


def limbs_of(rope: Rope, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The limbs of `turn_limbs` that ``dtype`` needs: one for whole turns, then the fraction.

    ``[num_pairs, 4]`` for float32, ``[num_pairs, 3]`` for float64.
    """
    limbs = turn_limbs(rope)
    if dtype.itemsize == 4:
        return limbs[..., 1:5]
    wide = limbs.astype(np.uint64)
    return (wide[..., ::2] << 32) | wide[..., 1::2]


def fixed_point_product(a: Any, whole: Any, rest: Any, xp: Any) -> Any:
    """The integer part of ``a (whole + rest / 2**bits)``, as a word that wraps around."""
    word, bits = a.dtype.type, 4 * a.dtype.itemsize
    # broadcast once here, or a compiled program broadcasts in every operation
    numbers = a, whole, rest, word(bits), word((1 << bits) - 1)
    a, whole, rest, half, low = xp.broadcast_arrays(*numbers)
    a0, a1, b0, b1 = a & low, a >> half, rest & low, rest >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    return a * whole + a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)


def cos_sin_of_words(
    words: Words,
    limbs: Any,
    dtype: np.dtype[Any],
    xp: Any,
    gain: float = 1.0,
    inverse: bool = False,
    multiply: Callable[..., Any] = fixed_point_product,
) -> tuple[Any, Any]:
    """Cos and sin ``[..., seq, num_pairs]`` of ``dtype`` times the gain.

    ``words`` come from `pair_coordinates`, ``limbs`` from `limbs_of`; ``multiply`` may be a
    compiled `fixed_point_product`.
    """
    # the first word of a float is its fractional part, which integers do not have
    first, products = int(words.has_angle is None), list[Any]()
    columns = [limbs[..., i] for i in range(first, first + len(words.magnitude) + 1)]
    for word, whole, rest in zip(words.magnitude, columns, columns[1:], strict=False):
        # [..., seq, num_pairs], or [..., seq, n_axes, num_pairs] with Mixed axes
        products.append(multiply(word, whole, rest, xp))
    turns = reduce(add, products) * (-words.sign if inverse else words.sign)
    factor = None if gain == 1 else dtype.type(gain)
    if words.has_angle is not None:
        has_angle = words.has_angle.all(-2) if limbs.ndim == 3 else words.has_angle
        factor = xp.where(has_angle, dtype.type(gain), dtype.type(np.nan))
    if limbs.ndim == 3:
        turns = turns.sum(-2, dtype=turns.dtype)
    return cos_sin_of_turns(turns, dtype, xp, factor)


def partner_arguments(positions: Any, rope: Rope, gain: float, xp: Any) -> tuple[Any, Any, Any]:
    """Arguments of `partner_rows` for positions and a gain: parts, words and factor.

    Positions are an array of ``xp``, or an int64 or float64 array of NumPy, whose precision ``xp``
    may not have. The factor is the gain, and NaN where a float of ``xp`` has no angle.
    """
    library: Any = np if isinstance(positions, np.ndarray) else xp
    positions, factor = pair_coordinates(positions, axes_of(rope), library), xp.array(gain)
    if library is xp and xp.issubdtype(positions.dtype, xp.integer):
        positions = positions.astype(xp.int64)
    elif library is xp:
        has_angle = abs(positions) < 2.0**63  # False for NaN
        has_angle = has_angle.all(-2) if isinstance(rope.axes, Mixed) else has_angle
        factor = xp.where(has_angle, factor, xp.nan)
    parts = [xp.array(part) for part in integer_parts(positions, 32, library)]
    return parts, _wide_words(rope, xp), factor


@lru_cache(maxsize=256)
def _wide_words(rope: Rope, xp: Any) -> list[list[Any]]:
    """The multipliers of whole positions, and of fractional parts: two words each, in ``xp``."""
    pairs = (turn_words(rope, bits)[:2].astype(np.uint64) for bits in (0, 32))
    return [[xp.array(word) for word in pair] for pair in pairs]


def partner_rows(
    parts: Sequence[Any],
    words: Sequence[Any],
    factor: Any,
    *,
    axis: int,
    heads_first: bool,
    inverse: bool,
    xp: Any,
) -> Sequence[Any]:
    """Float32 cos, and sin with the sign for each coordinate of a pair, broadcast over heads.

    ``[..., seq, 1, 2, num_pairs]``, or ``[..., 1, seq, 2, num_pairs]`` with ``heads_first``; the 2
    is at ``axis``, -2 or -1: ``(x0, x1) cos + (x1, x0) sin`` turns a pair.
    """
    # in units of 2**-64 turns; unsigned, because signed integers may not wrap around
    turns: Any = sum(
        part.astype(xp.uint64) * first + (part >> 32).astype(xp.uint64) * second
        for part, (first, second) in zip(parts, words, strict=False)
    )
    turns = turns.sum(-2) if words[0][0].ndim > 1 else turns
    rows = [row * factor for row in cos_sin_within_eighth(turns, xp.float32, xp)]
    heads = -4 if heads_first and turns.ndim > 1 else -3
    cos, sin, turns = (xp.expand_dims(x, (heads, axis)) for x in (*rows, turns))
    # cos, cos, -sin and sin are sines of angles shifted by two, two, four and no eighths of a turn;
    # one more eighth makes the shift by 62 bits round to the nearest quarter
    eighths = np.array([3, 3, 1, 5] if inverse else [3, 3, 5, 1], np.uint64) << np.uint64(61)
    shape = [2 if dim in (heads, axis) else 1 for dim in range(heads, 0)]
    quarters = (turns + xp.array(eighths.reshape(shape))) >> 62
    # a quarter turn takes a sine to the cosine, and half a turn negates both
    cos_sin = xp.where((quarters & 1) == 1, cos, sin)
    return xp.split(xp.where(quarters > 1, -cos_sin, cos_sin), 2, heads)
