"""The angle of `phasor.angles` in unsigned words, for arrays of any library with NumPy's names.

Without words of 64 bits an angle is a word of 32, in units of 2**-32 turns, which is enough for
float32; for float64 it is a word of 64. A position is its magnitude, so that -2**31 and -2**63 have
one too, and its sign is the sine's. Products overflow at whole turns, as there:

    magnitude = sum of word[i] * 2**(bits * i),   i from 0, or from -1 with the rest of a float
    turns     = sum of word[i] * (frequency * 2**(bits * i) mod 2**bits)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from phasor._tensors import check_coordinates
from phasor.angles import FLOAT32, FLOAT64, as_positions
from phasor.errors import PositionError
from phasor.rope import Rope


class Words(NamedTuple):
    """Positions ``[...]``, split into words."""

    magnitude: Any  # [..., words], the lowest first
    is_negative: Any
    has_angle: Any  # False where a float is NaN or beyond int64; None of integers

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the positions."""
        return self.is_negative.shape


def read_host_positions(positions: ArrayLike, rope: Rope, itemsize: int) -> Any:
    """An array of NumPy that the library does not cut; words of floats that it would.

    ``itemsize`` is what it has for integers and floats: 8, or 4, to which it cuts those of 8.
    """
    host = as_positions(positions)
    check_coordinates(host.shape, rope)
    if itemsize == 8:
        return host
    if host.dtype.kind == "f":
        return split(host, np.dtype(np.float32), np)
    far = host[host != host.astype(np.int32)]
    if far.size:
        raise PositionError(
            f"positions must fit int32, got {far[0]}, which JAX cuts: jax_enable_x64 is off; "
            'call jax.config.update("jax_enable_x64", True) first'
        )
    return host.astype(np.int32)


def split(positions: Any, dtype: np.dtype[Any], xp: Any) -> Words:
    """Integers or floats in words as wide as ``dtype``, by the functions of ``xp``.

    The rest of a float is rounded to a whole number of units; all else is exact.
    """
    bits, word = 8 * dtype.itemsize, f"u{dtype.itemsize}"
    itemsize = max(dtype.itemsize, positions.dtype.itemsize)
    is_negative = positions < 0
    if positions.dtype.kind in "iu":
        # two's complement: the magnitude of the least integer is an unsigned one
        units = positions.astype(f"u{itemsize}")
        units = xp.where(is_negative, -units, units)
        words = [(units >> shift).astype(word) for shift in range(0, 8 * itemsize, bits)]
        return Words(xp.stack(words, -1), is_negative, None)
    magnitude = abs(positions.astype(f"f{itemsize}"))
    has_angle = magnitude < 2.0**63  # false of NaN
    # in units of the rest; a float that is scaled by a power of 2 stays exact
    units = xp.rint(xp.where(has_angle, magnitude, 0) * 2.0**bits)
    words = []
    for _ in range(1 + 64 // bits):
        above = xp.floor(units * 2.0**-bits)
        words.append((units - above * 2.0**bits).astype(word))
        units = above
    return Words(xp.stack(words, -1), is_negative, has_angle)


def axes_of(rope: Rope) -> tuple[Any, ...] | None:
    """The axis of each pair, for `cos_sin_of_words`; None where there is one."""
    return None if rope.axes.n_axes == 1 else rope.axes.indices(rope.num_pairs)


def cos_sin_of_words(
    words: Words,
    limbs: Any,
    dtype: np.dtype[Any],
    xp: Any,
    axis_of_pair: tuple[Any, ...] | None,
    gain: float = 1.0,
    inverse: bool = False,
) -> tuple[Any, Any]:
    """Cos and sin ``[..., seq, num_pairs]`` of ``dtype`` times the gain; limbs are `turn_limbs`."""
    number, bits = dtype.type, 8 * dtype.itemsize
    # [..., seq] -> [..., seq, 1], or [..., seq, n_axes] -> [..., seq, num_pairs]
    axes = None if axis_of_pair is None else np.array(axis_of_pair)
    magnitude, is_negative = words.magnitude[..., axes, :], words.is_negative[..., axes]
    # whole turns, and the words of the fraction that follow: [num_pairs, 5 or 3]
    if bits == 64:
        wide = limbs.astype(np.uint64)
        limbs = (wide[..., ::2] << 32) | wide[..., 1::2]
    else:
        limbs = limbs[..., 1:]
    turns = _turns(magnitude, limbs, words.has_angle is None)
    has_angle = None if words.has_angle is None else words.has_angle[..., axes]
    if limbs.ndim == 3:  # axes mix: [..., seq, n_axes, num_pairs]
        turns = xp.where(is_negative, -turns, turns).sum(-2, dtype=turns.dtype)
        is_negative = False
        has_angle = None if has_angle is None else has_angle.all(-2)
    # without quarter turns, in eighths of a turn, from -1 to 1
    x = (turns << 2).astype(f"i{dtype.itemsize}").astype(dtype) * number(2.0 ** (1 - bits))
    y = x * x
    of_cos, of_sin = FLOAT64 if bits == 64 else FLOAT32
    even_cos, even_sin = 1 + y * _evaluate(of_cos, y, number), x * _evaluate(of_sin, y, number)
    # a quarter turn takes (cos, sin) to (-sin, cos), and half a turn negates both
    quarters = (turns + turns.dtype.type(1 << (bits - 3))) >> (bits - 2)
    is_odd, is_negated = (quarters & 1) == 1, quarters > 1
    factor = number(gain)
    if has_angle is not None:
        factor = xp.where(has_angle, factor, number(np.nan))
    is_sin_negated = is_negated ^ is_negative ^ inverse
    cos = xp.where(is_odd, -even_sin, even_cos) * xp.where(is_negated, -factor, factor)
    sin = xp.where(is_odd, even_cos, even_sin) * xp.where(is_sin_negated, -factor, factor)
    return cos, sin


def _turns(magnitude: Any, limbs: Any, is_integer: bool) -> Any:
    """Angles ``[..., seq, num_pairs]``, of magnitudes ``[..., seq, 1 or num_pairs, words]``.

    Three words of a float32 are less than four units too small, one of an integer less than two.
    """
    first, count = int(is_integer), magnitude.shape[-1]
    following = limbs[..., first + 1 : first + 1 + count]
    products = magnitude * limbs[..., first : first + count]
    products = products + _upper_product(magnitude, following, magnitude.dtype.itemsize * 4)
    return products.sum(-1, dtype=products.dtype)


def _upper_product(a: Any, b: Any, half: int) -> Any:
    """The upper word of the product of two, from products of their halves, which are exact."""
    mask = (1 << half) - 1
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    return a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & mask)) >> half)


def _evaluate(coefficients: tuple[float, ...], y: Any, number: Any) -> Any:
    value = number(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * y + number(coefficient)
    return value
