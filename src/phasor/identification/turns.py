"""Which coordinates turn together, and by which angles: in linear maps and in recorded vectors.

A recorded number may be off by the roundings of every step of ``x0 cos - x1 sin``. Angles, cos and
sin may be off by a float32 computation's error: programs use float32 for them at any dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.identification.spectrum import (
    DTYPES,
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    doubling,
    find_spectrum,
)
from phasor.numpy import pair_indices
from phasor.rope import Rope

_NOTHING = 1e-300


#: The relative error of an angle that is computed in float32.
ANGLE_ERROR = 2.0**-21


# the error of a cos or sin that is computed in float32
_ROW_ERROR = 2.0**-22


class Arrangement(NamedTuple):
    """The coordinates of pairs: pair ``k`` is ``read[:, k]`` before and ``written[:, k]`` after."""

    layout: Rope  # with the slice and the pairings
    read: NDArray[np.intp]  # [2, pairs]
    written: NDArray[np.intp]  # [2, pairs]
    is_named: bool = True  # whether pairs are those of the layout's pairings

    @property
    def num_pairs(self) -> int:
        """How many pairs there are, those that do not turn included."""
        return self.read.shape[1]

    def factors(self, maps: Floats) -> Complex:
        """``gain * exp(i angle)`` of pairs, by each row: ``[..., d, d]`` to ``[2, ..., pairs]``."""
        # both factors of a rotation are equal; otherwise their mean is the nearest rotation
        (first, second), (to_first, to_second) = self.read, self.written
        first_factors = maps[..., to_first, first] - 1j * maps[..., to_first, second]
        return np.stack(
            (first_factors, maps[..., to_second, second] + 1j * maps[..., to_second, first])
        )


def arrangement_of(rope: Rope) -> Arrangement:
    """The pairs of a Rope."""
    read, written = (np.stack(pair_indices(rope, p)) for p in (rope.pairing, rope.output_pairing))
    return Arrangement(rope, read, written)


class Sample(NamedTuple):
    """Tokens of a recording: ``[T, heads, head_dim]`` before and after, and their positions."""

    x: Floats
    y: Floats
    positions: NDArray[Any]  # [T] or [T, n_axes]
    dtype: str
    is_table: bool = False  # a table: x is 1 in each pair, y the table's cos and sin

    def select(self, tokens: NDArray[np.bool_]) -> Sample:
        """The sample with only some of its tokens."""
        x, y, positions = (part[tokens] for part in self[:3])
        return self._replace(x=x, y=y, positions=positions)

    def pairs(self, arrangement: Arrangement) -> tuple[Complex, Complex]:
        """The pairs before and after as complex numbers, ``[T, heads, num_pairs]``."""
        (first, second), (to_first, to_second) = arrangement.read, arrangement.written
        u = self.x[..., first] + 1j * self.x[..., second]
        return u, self.y[..., to_first] + 1j * self.y[..., to_second]

    def is_kept(self) -> NDArray[np.bool_]:
        """Which numbers are unchanged, ``[T, heads, head_dim]``."""
        return np.asarray(np.abs(self.y - self.x) <= self.bounds(np.abs(self.x), self.y))

    def bounds(self, products: Floats, y: Floats) -> Floats:
        """Error bounds of sums ``y`` of two products; their sizes add up to ``products``."""
        bits, least = DTYPES[self.dtype]
        # processors may replace subnormal numbers by 0
        floor = 4 * 2.0 ** (least + (0 if self.dtype == "float16" else bits))
        # cos, the product and the sum are rounded; in a table, only cos
        in_products = 0.0 if self.is_table else 2.01
        return ROUNDING[self.dtype] * (in_products * products + 1.01 * np.abs(y)) + floor


class Turns(NamedTuple):
    """The complex factor of each pair, and its error bound: ``[T, num_pairs]`` each."""

    arrangement: Arrangement
    z: Complex
    errors: Floats
    gain: tuple[float, float]  # the factor of all pairs is between these
    positions: NDArray[Any]  # [T] or [T, n_axes]
    row_dtype: str | None  # the dtype of cos and sin if only rounding explains one factor

    def misfit(self, rope: Rope, places: NDArray[Any], rows: Complex) -> Floats:
        """The distance from ``rows`` ``[T, num_pairs]``, in units of the allowed error."""
        distances: Floats = np.abs(self.z - self.factor(rope) * rows)
        return distances / self.allowed(rope, places)

    def allowed(self, rope: Rope, places: NDArray[Any]) -> Floats:
        """The allowed error of the rope's rows at these positions, ``[T, num_pairs]``."""
        low, high = self.gain
        factor = self.factor(rope)
        unsure = (high - low) / 2 if factor == (low + high) / 2 else 0.0
        return self.errors + unsure + factor * angle_errors(places, rope.inv_freq)

    def factor(self, rope: Rope) -> float:
        """The measured factor, replaced by the rope's, 1 or its square if one of these fits."""
        (low, high), expected = self.gain, rope.attention_factor
        likely = (factor for factor in (expected, 1.0, expected**2) if low <= factor <= high)
        return next(likely, (low + high) / 2)

    def find_spectrum(self) -> Spectrum | None:
        """The frequencies, if positions are whole and two of them are one apart."""
        return None if self.positions.ndim > 1 else self._find_spectrum(self.positions, slice(None))

    def find_spectrum_of_axis(self, axis: int, pairs: NDArray[np.intp]) -> Spectrum | None:
        """The frequencies of the pairs that one axis of several turns."""
        return self._find_spectrum(self.positions[:, axis], pairs)

    def _find_spectrum(
        self, places: NDArray[Any], pairs: slice | NDArray[np.intp]
    ) -> Spectrum | None:
        index = None if np.any(places % 1) else doubling(places)
        if index is None or sum(self.gain) <= 0:
            return None
        errors = np.minimum(self.errors[index] * 2 / sum(self.gain), np.pi)[:, pairs]
        return find_spectrum(places[index].astype(int).tolist(), self.z[index][:, pairs], errors)


def turns_of_pairs(
    arrangement: Arrangement, z: Complex, errors: Floats, positions: NDArray[Any]
) -> Turns:
    """The turns of pairs that were measured one by one, ``[T, num_pairs]``."""
    sizes = np.abs(z)
    gain = float((sizes - errors).max()), float((sizes + errors).min())
    return Turns(arrangement, z, errors, gain, positions, None)


def rows_of(rope: Rope, places: NDArray[Any]) -> Complex:
    """``exp(i angle)``, ``[T, num_pairs]``."""
    cos, sin = cos_sin(places, rope)
    return cos + 1j * sin


def angle_errors(positions: NDArray[Any], inv_freq: Floats) -> Floats:
    """The error of angles that are computed in float32, ``[T, num_pairs]``."""
    places = np.abs(positions.astype(np.float64)).reshape(len(positions), -1).max(axis=1)
    return np.minimum(places[:, None] * inv_freq * ANGLE_ERROR, 2.0)


def rotates_as(sample: Sample, rope: Rope | None) -> NDArray[np.bool_]:
    """Which heads turn like the rope, or do not turn if there is none: ``[T, heads]``."""
    is_right = sample.is_kept()
    if rope is None:
        return np.asarray(is_right.all(axis=-1))
    arrangement = arrangement_of(rope)
    rows = rope.attention_factor * rows_of(rope, sample.positions)[:, None]  # [T, 1, num_pairs]
    u, v = sample.pairs(arrangement)
    angles = angle_errors(sample.positions, rope.inv_freq)[:, None]
    slack = np.abs(u) * (np.abs(rows) * angles + _ROW_ERROR)
    x0, x1, cos, sin = np.abs([u.real, u.imag, rows.real + 0 * u.real, rows.imag + 0 * u.real])
    errors = v - rows * u
    first = sample.bounds(x0 * cos + x1 * sin, v.real) + slack - np.abs(errors.real)
    second = sample.bounds(x0 * sin + x1 * cos, v.imag) + slack - np.abs(errors.imag)
    is_right[..., arrangement.written] = True
    return np.asarray((np.minimum(first, second) >= 0).all(axis=-1) & is_right.all(axis=-1))


def least_squares(u: Complex, v: Complex) -> Complex:
    """The factors ``[T, num_pairs]`` that bring ``u`` ``[T, heads, num_pairs]`` near ``v``."""
    return (np.conj(u) * v).sum(axis=1) / np.maximum((np.abs(u) ** 2).sum(axis=1), _NOTHING)


def measure_turns(
    sample: Sample,
    arrangement: Arrangement,
    row_dtype: str | None = None,
    *,
    common_gain: bool = True,
) -> Turns | None:
    """The turns of a sample's pairs; None unless heads agree, and pairs have one factor.

    The lengths of pairs tell pairings apart at any positions, and one head is enough.
    With a ``row_dtype`` cos and sin may be rounded to it, which changes the lengths.
    """
    is_right = sample.is_kept()
    is_right[..., arrangement.written] = True
    u, v = sample.pairs(arrangement)
    sizes, turned = np.abs(u), np.abs(v)
    telling = sizes > 0
    if not is_right.all() or not telling.any():
        return None
    # |x0 cos| + |x1 sin| is at most the length; the square root of 2 is for both members
    errors = np.sqrt(2) * sample.bounds(turned, turned) + _ROW_ERROR * turned
    in_rows = 0.0 if row_dtype is None else 1.5 * turned.sum() / sizes.sum() * ROUNDING[row_dtype]
    low = float(((turned - errors)[telling] / sizes[telling]).max()) - in_rows
    high = float(((turned + errors)[telling] / sizes[telling]).min()) + in_rows
    if (common_gain and low > high) or np.any(turned[~telling] > errors[~telling]):
        return None
    z, weights = least_squares(u, v), np.maximum((sizes**2).sum(axis=1), _NOTHING)
    z_errors = np.minimum((sizes * errors).sum(axis=1) / weights, 1e300)
    z_errors[weights == _NOTHING] = 1e300  # zeros show nothing
    if np.any(np.abs(v - z[:, None] * u) > errors + sizes * z_errors[:, None]):
        return None
    z_errors += in_rows
    return Turns(arrangement, z, z_errors, (low, high), sample.positions, row_dtype)


def drop_repeats(z: Complex) -> Complex:
    """One column per pair, of rows that repeat each cos and sin for both coordinates."""
    # rows for halves repeat the whole row, rows for interleaved pairs repeat neighbours
    half = z.shape[1] // 2
    for first, second in ((z[:, :half], z[:, half:]), (z[:, ::2], z[:, 1::2])):
        if np.array_equal(first, second):
            return first
    return z
