"""Frequencies from turned vectors, how far off they may be, and numbers known within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.rope import Rope

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]
#: Significant bits of a dtype, and the exponent of its smallest number.
DTYPES = {
    "float64": (53, -1074),
    "float32": (24, -149),
    "float16": (11, -24),
    "bfloat16": (8, -133),
}
#: Largest relative error of rounding to a dtype.
ROUNDING = {dtype: 2.0**-bits for dtype, (bits, _) in DTYPES.items()}
# an angle this far from its prediction is of no use: the table has ended, or the precision
_SURPRISE = 0.5
# float16's smallest number, which is also its step size near 0
_LEAST = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """How fast each pair turns, counter-clockwise, as far as whole positions can say.

    Attributes:
        inv_freq: Radians per position, from ``-pi`` to ``pi``: whole positions see no more.
        uncertainty: How far off each may be.
        phase: The angle at position 0.
        phase_uncertainty: How far off that may be.
        reach: The highest position that was of use.
    """

    inv_freq: Floats
    uncertainty: Floats
    phase: Floats
    phase_uncertainty: Floats
    reach: int

    def at(self, positions: Floats) -> Complex:
        """``exp(i (phase + p inv_freq))``, ``[P, pairs]``."""
        return np.exp(1j * (self.phase + positions[:, None] * self.inv_freq))


def nearest(values: Floats, dtype: str) -> tuple[Floats, Floats]:
    """The nearest numbers of a dtype, ties to even, and how far apart its numbers are there."""
    bits, least = DTYPES[dtype]
    unit = np.ldexp(1.0, np.maximum(np.frexp(values)[1] - bits, least))
    return np.rint(values / unit) * unit, unit


def powers_of_two(highest: int) -> list[int]:
    """0 and the powers of two up to ``highest``: positions from which frequencies can be read."""
    return [0, *(1 << j for j in range(highest.bit_length()))]


def first_bad(good: int, bad: int, is_good: Callable[[int], bool]) -> int:
    """The position where good ones end, by halving between one that is good and one that is not."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if is_good(middle) else (good, middle)
    return bad


def on_every_axis(positions: Any, rope: Rope) -> Any:
    """A position, or an array of them, as the coordinates on each of the Rope's axes."""
    n = rope.axes.n_axes
    return positions if n == 1 else np.stack([positions] * n, axis=-1)


def exact_turns(rope: Rope, positions: NDArray[np.int64], offset: float = 0.0) -> Complex:
    """``exp(i angle)`` at positions plus an offset, on every axis: ``[P, pairs]``.

    A Rope that is wider than what was measured has more pairs there, which do not turn.
    """
    at = positions + int(offset) if offset.is_integer() else positions + offset
    cos, sin = cos_sin(rope, on_every_axis(at, rope))
    return cos + 1j * sin


def rounded_angles(z: Complex, rounding: float) -> Floats:
    """How far the angles of ``z`` may be off where its cosines and sines are off by an ulp each.

    Args:
        z: ``[P, pairs]``.
        rounding: The largest relative error of rounding to their dtype.
    """
    off = 2 * rounding * np.abs(np.sin(2 * np.angle(z)))
    return off + (_LEAST if rounding > 2.0**-12 else 0)


def find_spectrum(
    positions: Sequence[int], z: Complex, moved: Floats, angle_rounding: float = 2.0**-52
) -> Spectrum:
    """The frequencies behind turned unit vectors.

    The angle between the first two positions gives each frequency modulo a full turn; every
    later angle is known modulo a full turn too, and the estimate so far says which. So the
    uncertainty falls as the positions grow, if they grow by no more than a factor of about two.

    The frequency is the slope that fits the angles best. It is off by no more than the weighted sum
    of what rounding moves each angle by; what the angles are off by beyond that is added, for a
    function whose arithmetic is coarser than its results.

    Args:
        positions: ``P`` ascending positions; the first two one apart.
        z: ``[P, pairs]``, of any size.
        moved: ``[P, pairs]``: how far rounded cosines and sines may move each angle.
        angle_rounding: How far, relatively, the angle itself may have been off.
    """
    finite = np.isfinite(z).all(axis=1)
    usable = len(z) if finite.all() else int(np.argmin(finite))
    at, z = np.asarray(positions, dtype=np.float64)[:usable], z[:usable]
    turned = z / np.maximum(np.abs(z), 1e-300)
    gaps = at - at[0]
    totals = np.zeros(z.shape)
    estimate = np.zeros(z.shape[1])
    used = 1
    for i in range(1, len(at)):
        predicted = estimate * gaps[i]
        off = np.angle(turned[i] * np.conj(turned[0]) * np.exp(-1j * predicted))
        if i > 1 and np.abs(off).max() > _SURPRISE:
            break
        totals[i] = predicted + off
        estimate = totals[i] / gaps[i]
        used = i + 1
    gaps, totals = gaps[1:used, None], totals[1:used]
    weights = gaps / (gaps**2).sum(axis=0)
    inv_freq = (weights * totals).sum(axis=0)
    noise = moved[1:used] + moved[0] + angle_rounding * np.abs(totals)
    residues = np.abs(totals - gaps * inv_freq)
    uncertainty = (weights * (noise + residues)).sum(axis=0)
    return Spectrum(
        inv_freq=inv_freq,
        uncertainty=uncertainty,
        phase=np.angle(turned[0] * np.exp(-1j * at[0] * inv_freq)),
        phase_uncertainty=moved[:used].max(axis=0) + at[0] * uncertainty,
        reach=int(at[used - 1]),
    )


@dataclass(frozen=True)
class Interval:
    """All numbers from ``low`` to ``high``; none, and false, if ``low`` is above ``high``."""

    low: float
    high: float

    def __bool__(self) -> bool:
        return bool(self.low <= self.high)

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high))

    def times(self, factor: float) -> Interval:
        """All of them times a positive number."""
        return Interval(self.low * factor, self.high * factor)

    def exp(self) -> Interval:
        """The exponentials of all of them."""
        return Interval(*(math.exp(min(max(x, -600.0), 600.0)) for x in (self.low, self.high)))

    def power(self, exponent: float) -> Interval:
        """Every positive number among them to a positive power."""
        bounds = (math.log(max(x, 1e-300)) * exponent for x in (self.low, self.high))
        return Interval(*bounds).exp()

    def power_of_two(self) -> int | None:
        """The smallest power of two that is among them."""
        if not self or self.high < 1:
            return None
        candidate = 1 << max(0, math.ceil(math.log2(max(self.low, 1.0)) - 1e-12))
        return candidate if self.low <= candidate <= self.high else None

    def decimals(self) -> Iterator[float]:
        """Numbers among them with ever more decimal digits, and at last the middle."""
        middle = (self.low + self.high) / 2
        if not self or not math.isfinite(middle):
            return
        last = None
        for count in range(1, 17):
            short = float(f"{middle:.{count - 1}e}")
            if self.low <= short <= self.high and short != last:
                yield (last := short)
        if middle != last:
            yield middle

    def simplest(self) -> float | None:
        """The number among them with the fewest decimal digits."""
        return next(self.decimals(), None)


def around(value: float, relative: float) -> Interval:
    """``value`` within a relative error either way."""
    return Interval(float(value * (1 - relative)), float(value * (1 + relative)))


def count_digits(value: float) -> int:
    """Significant decimal digits of ``value``; a power of two counts as two.

    >>> [count_digits(x) for x in (10000.0, 8192, 0.125, 123.4)]
    [1, 2, 3, 4]
    """
    mantissa = repr(float(value)).partition("e")[0].replace(".", "").replace("-", "")
    counted = len(mantissa.strip("0"))
    return min(counted, 2) if value >= 1 and math.log2(value).is_integer() else counted


def log_base(inv_freq: Floats, relative: Floats, num_pairs: int, indices: Floats) -> Interval:
    """Logarithms of the bases for which ``base ** (-index / num_pairs)`` fits all frequencies.

    Args:
        inv_freq: Frequencies, ``[n]``; those that are 0 say nothing.
        relative: How far off each may be, relatively, ``[n]``.
        num_pairs: Pairs of the whole spectrum.
        indices: The index of each among them, ``[n]``.
    """
    known = (indices > 0) & (inv_freq > 0) & (relative < 0.5)
    if not known.any():
        return Interval(1e-9, 600.0)
    slopes, logs, off = num_pairs / indices[known], np.log(inv_freq[known]), relative[known]
    low = (-slopes * (logs + np.log1p(off))).max()
    high = (-slopes * (logs + np.log1p(-off))).min()
    return Interval(max(float(low), 1e-9), float(high))
