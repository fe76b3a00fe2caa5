"""Frequencies measured from turned vectors with their uncertainty, and intervals of numbers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
# an angle further from its prediction is not used: a table or the precision ends there
_MAX_PREDICTION_ERROR = 0.5
# the smallest number of float16, which is also the distance of its numbers near 0
_FLOAT16_STEP = 2.0**-24
# relative error of an angle, in the dtypes in which angles are computed: a quotient and a product
_ANGLE_ERRORS = (2 * ROUNDING["float64"], 2 * ROUNDING["float32"])


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """How fast each pair turns counter-clockwise, measured at whole positions."""

    inv_freq: Floats  # radians per position, from -pi to pi: whole positions cannot tell more
    uncertainty: Floats  # how far off each ``inv_freq`` may be
    phase: Floats  # the angle at position 0
    phase_uncertainty: Floats
    last_position: int  # the highest position whose angles were used
    has_float32_angles: bool  # whether angles have larger errors than float64 explains

    def predict(self, positions: Floats) -> Complex:
        """The unit vectors ``exp(i (phase + p inv_freq))`` at positions ``[P]``: ``[P, pairs]``."""
        return np.exp(1j * (self.phase + positions[:, None] * self.inv_freq))


def rounded(values: ArrayLike, dtype: str) -> Floats:
    """The nearest numbers of a dtype, ties to even."""
    numbers = np.asarray(values, np.float64)
    unit = unit_of(numbers, dtype)
    return np.rint(numbers / unit) * unit


def unit_of(values: Floats, dtype: str) -> Floats:
    """The distance between neighbouring numbers of a dtype, near these numbers."""
    bits, least = DTYPES[dtype]
    return np.ldexp(1.0, np.maximum(np.frexp(values)[1] - bits, least))


def coarser(rounding: float) -> list[str]:
    """The dtypes with a larger rounding error, the nearest first."""
    return [name for name in DTYPES if ROUNDING[name] > rounding]


def coarsest_dtype(numbers: Floats, rounding: float) -> str | None:
    """The coarsest dtype, coarser than ``rounding``, that holds all numbers exactly."""
    names = reversed(coarser(rounding))
    return next((n for n in names if np.array_equal(rounded(numbers, n), numbers)), None)


def powers_of_two(highest: int) -> list[int]:
    """0 and the powers of two up to ``highest``: positions from which frequencies can be read."""
    return [0, *(1 << j for j in range(highest.bit_length()))]


def near_powers_of_two(end: int) -> list[int]:
    """0 to 16, and the powers of two with their neighbours, below ``end``."""
    # tables end and precisions fail around powers of two
    positions = {(1 << j) + step for j in range(4, end.bit_length()) for step in (-1, 0, 1)}
    return sorted(p for p in positions | set(range(17)) if p < end)


def doubling(positions: Floats) -> NDArray[np.intp] | None:
    """Indices of two neighbours, and of later positions whose distances at most double."""
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    neighbours = np.flatnonzero(np.diff(ordered) == 1)
    if not len(neighbours):
        return None
    start = int(neighbours[0])
    indices, gap = [start, start + 1], 1
    gaps = ordered - ordered[start]
    while len(reachable := np.flatnonzero((gaps > gap) & (gaps <= 2 * gap))):
        indices.append(int(reachable[-1]))
        gap = int(gaps[reachable[-1]])
    return order[indices]


def find_first_bad(good: int, bad: int, is_good: Callable[[int], bool]) -> int:
    """The first bad position after the good ones, by bisection between a good and a bad one."""
    between = range(good + 1, bad)
    return good + 1 + bisect_left(between, True, key=lambda position: not is_good(position))


def bound_angle_errors(z: Complex, rounding: float, noise: float = 0.0) -> Floats:
    """How far the angles of ``z`` may be off if its cosines and sines are each off by an ulp."""
    # in addition, cosines and sines of any size may be off by ``noise``
    errors = 2 * rounding * np.abs(np.sin(2 * np.angle(z)))
    return errors + max(noise, _FLOAT16_STEP if rounding > 2.0**-12 else 0)


def find_spectrum(positions: Sequence[int], z: Complex, angle_errors: Floats) -> Spectrum:
    """The frequencies with which vectors ``z`` ``[P, pairs]`` turn from position to position."""
    # positions ascend, and the first two are one apart
    finite = np.isfinite(z).all(axis=1)
    usable = len(z) if finite.all() else int(np.argmin(finite))
    places, z = np.asarray(positions, dtype=np.float64)[:usable], z[:usable]
    units = z / np.maximum(np.abs(z), 1e-300)
    gaps, totals, num_used = places - places[0], np.zeros(z.shape), 1
    # the angle between the first two gives each frequency modulo a full turn. Every later angle is
    # known modulo a full turn too, and the estimate so far says how many turns to add: the
    # uncertainty falls as positions grow, if they grow by a factor of about two at most
    estimate = np.zeros(z.shape[1])
    for i in range(1, len(places)):
        predicted = estimate * gaps[i]
        deviation = np.angle(units[i] * np.conj(units[0]) * np.exp(-1j * predicted))
        if i > 1 and np.abs(deviation).max() > _MAX_PREDICTION_ERROR:
            break
        totals[i] = predicted + deviation
        estimate = totals[i] / gaps[i]
        num_used = i + 1
    # the frequency is the slope that fits the angles best
    gaps, totals = gaps[1:num_used, None], totals[1:num_used]
    weights = gaps / (gaps**2).sum(axis=0)
    inv_freq = (weights * totals).sum(axis=0)
    residues = np.abs(totals - gaps * inv_freq)
    noise, relative_error = np.zeros(residues.shape), 0.0
    # its error is at most the weighted sum of the errors of all angles: float64's, or float32's if
    # the residues are larger. The residues are added, because arithmetic may be coarser still
    for relative_error in _ANGLE_ERRORS:
        noise = angle_errors[1:num_used] + angle_errors[0] + relative_error * np.abs(totals)
        # the same error in radians is added: an angle may be rounded as a fraction of a turn
        bound = noise + relative_error
        if np.all(residues <= bound + gaps * (weights * bound).sum(axis=0)):
            break
    uncertainty = (weights * (noise + residues)).sum(axis=0)
    return Spectrum(
        inv_freq=inv_freq,
        uncertainty=uncertainty,
        phase=np.angle(units[0] * np.exp(-1j * places[0] * inv_freq)),
        phase_uncertainty=angle_errors[0] + places[0] * uncertainty,
        last_position=int(places[num_used - 1]),
        has_float32_angles=relative_error > _ANGLE_ERRORS[0],
    )


@dataclass(frozen=True)
class Interval:
    """All numbers from ``low`` to ``high``; empty, and false, if ``low`` is above ``high``."""

    low: float
    high: float

    def __bool__(self) -> bool:
        return bool(self.low <= self.high)

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high))

    def times(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.high * factor)

    def exp(self) -> Interval:
        return Interval(*(math.exp(min(max(x, -600.0), 600.0)) for x in (self.low, self.high)))

    def power(self, exponent: float) -> Interval:
        """The interval of every positive number to a positive power."""
        bounds = (math.log(max(x, 1e-300)) * exponent for x in (self.low, self.high))
        return Interval(*bounds).exp()

    def power_of_two(self) -> int | None:
        """The smallest power of two in the interval."""
        candidate = 1 << max(0, math.ceil(math.log2(max(self.low, 1.0)) - 1e-12))
        return candidate if self.low <= candidate <= self.high else None

    def decimals(self) -> Iterator[float]:
        """Numbers in the interval with more and more decimal digits, and finally its middle."""
        middle = (self.low + self.high) / 2
        if not self or not math.isfinite(middle):
            return
        previous = None
        for count in range(1, 17):
            short = float(f"{middle:.{count - 1}e}")
            if self.low <= short <= self.high and short != previous:
                yield (previous := short)
        if middle != previous:
            yield middle

    def simplest(self) -> float | None:
        """The number in the interval with the fewest decimal digits."""
        return next(self.decimals(), None)


def interval_around(value: float, relative_error: float) -> Interval:
    """All numbers within a relative error of ``value``."""
    return Interval(float(value * (1 - relative_error)), float(value * (1 + relative_error)))


#: How far the simplest number may be from a measured factor, in addition to rounding.
FACTOR_ROOM = 1e-12


def simplest_near(value: float, relative_error: float) -> float | None:
    """The number with the fewest decimal digits within a relative error of ``value``."""
    return interval_around(value, relative_error).simplest()


def count_digits(value: float) -> int:
    """The number of significant decimal digits: 0.125 has 3, 10000 has 1; a power of two has 2."""
    mantissa = repr(float(value)).partition("e")[0].replace(".", "").replace("-", "")
    counted = len(mantissa.strip("0"))
    return min(counted, 2) if value >= 1 and math.log2(value).is_integer() else counted


def log_base(
    inv_freq: Floats, relative_errors: Floats, num_pairs: int, indices: Floats
) -> Interval:
    """Logarithms of the bases whose powers ``base ** (-index / num_pairs)`` fit all frequencies."""
    # indices and ``num_pairs`` are those of the whole spectrum; 0 has no logarithm
    is_usable = (indices > 0) & (inv_freq > 0) & (relative_errors < 0.5)
    if not is_usable.any():
        return Interval(1e-9, 600.0)
    slopes, errors = num_pairs / indices[is_usable], relative_errors[is_usable]
    logs = np.log(inv_freq[is_usable])
    low = (-slopes * (logs + np.log1p(errors))).max()
    high = (-slopes * (logs + np.log1p(-errors))).min()
    return Interval(max(float(low), 1e-9), float(high))


class Frequencies:
    """Measured frequencies of one spectrum: all of them, or those at the given indices."""

    def __init__(
        self, inv_freq: Floats, relative_errors: Floats, head_dim: int, *,
        indices: ArrayLike | None = None, num_pairs: int | None = None,
    ) -> None:  # fmt: skip
        # no frequency is negative, the first is not 0; a wrong exponent may have the head's width
        self.inv_freq, self.relative_errors, self.head_dim = inv_freq, relative_errors, head_dim
        self.num_turning = int(np.count_nonzero(inv_freq))
        # the places of these pairs in the spectrum, and how many pairs the spectrum has
        self.num_pairs = len(inv_freq) if num_pairs is None else num_pairs
        self.indices = np.asarray(
            np.arange(len(inv_freq)) if indices is None else indices, dtype=np.float64
        )
        # the divisor of the first frequency, which is 1 without a law
        self.factor = interval_around(1 / float(inv_freq[0]), float(relative_errors[0]))

    @property
    def begin_with_one(self) -> bool:
        """Whether the first frequency may be 1, as without a law."""
        return bool(abs(self.inv_freq[0] - 1) <= self.relative_errors[0])

    def find_bases(
        self, part: slice = slice(None), multiplier: Floats | float = 1.0, shift: int = 0
    ) -> Interval:
        """The bases whose powers, times a multiplier, are some of the frequencies."""
        f, indices = self.inv_freq * multiplier, self.indices + shift
        logs = log_base(f[part], self.relative_errors[part], self.num_pairs, indices[part])
        return logs.exp() if logs else Interval(1.0, 0.0)

    def base_of_longest_run(self, *, slow: bool = False) -> tuple[float, int] | None:
        """The base of the longest run of pairs from the first, or the last, and its length."""
        longest_run = None
        for count in range(2, self.num_pairs):
            bases = self.find_bases(slice(-count, None) if slow else slice(count))
            base = bases.simplest()
            if base is None:
                break
            if bases.high / bases.low < 1.1:
                longest_run = base, count
        return longest_run
