"""Numbers known within bounds, and the shortest decimal that could be meant."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """All numbers from ``low`` to ``high``; none if they are the wrong way round."""

    low: float
    high: float

    def __bool__(self) -> bool:
        return bool(self.low <= self.high)

    def __and__(self, other: Interval) -> Interval:
        return Interval(max(self.low, other.low), min(self.high, other.high))

    def exp(self) -> Interval:
        """The exponentials of all of them."""
        bounded = (math.exp(min(max(bound, -600.0), 600.0)) for bound in (self.low, self.high))
        return Interval(*bounded)

    def power(self, exponent: float) -> Interval:
        """Every positive number among them to a positive power."""
        bounds = (max(bound, 1e-300) for bound in (self.low, self.high))
        return Interval(*(math.log(bound) * exponent for bound in bounds)).exp()

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
        for digits in range(1, 17):
            short = float(f"{middle:.{digits - 1}e}")
            if self.low <= short <= self.high and short != last:
                yield (last := short)
        if middle != last:
            yield middle

    def simplest(self) -> float | None:
        """The number among them with the fewest decimal digits."""
        return next(self.decimals(), None)


def digits(value: float) -> int:
    """Significant decimal digits of ``value``; a power of two counts as two.

    >>> [digits(x) for x in (10000.0, 8192, 0.125, 123.4)]
    [1, 2, 3, 4]
    """
    mantissa = repr(float(value)).partition("e")[0].replace(".", "").replace("-", "")
    counted = len(mantissa.strip("0"))
    return min(counted, 2) if value >= 1 and math.log2(value).is_integer() else counted


def log_base(inv_freq: Floats, relative: Floats, pairs: int, places: Floats) -> Interval:
    """Logarithms of the bases for which ``base ** (-place / pairs)`` fits all frequencies."""
    known = (places > 0) & (inv_freq > 0) & (relative < 0.5)
    if not known.any():
        return Interval(1e-9, 600.0)
    slopes, room, off = pairs / places[known], np.log(inv_freq[known]), relative[known]
    low = (-slopes * (room + np.log1p(off))).max()
    high = (-slopes * (room + np.log1p(-off))).min()
    return Interval(max(float(low), 1e-9), float(high))


def around(value: float, relative: float) -> Interval:
    """``value`` within a relative error either way."""
    return Interval(float(value * (1 - relative)), float(value * (1 + relative)))
