"""For a law that divides slow pairs, the share of each frequency that it keeps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.identification.spectrum import Floats, Frequencies

# the error allowed in the share that a ramp keeps of a frequency
_SHARE_ROUNDING = 1e-4


class Ramp(NamedTuple):
    """The share of each frequency that a law keeps: 1 for fast pairs, 0 for fully divided pairs."""

    base: float
    factor: float
    shares: Floats  # [num_pairs]
    plain: Floats  # [num_pairs], the powers of the base

    @property
    def partial_pairs(self) -> NDArray[np.intp]:
        """The pairs that are partly divided: neither kept nor divided by the whole factor."""
        return np.flatnonzero((self.shares > 0) & (self.shares < 1))

    @property
    def last_kept(self) -> int:
        """The slowest pair that is kept."""
        return int(np.flatnonzero(self.shares >= 1)[-1])

    def fit(self, coordinates: Floats) -> tuple[float, float] | None:
        """Where a share linear in the coordinates leaves 1 and reaches 0; None if it jumps."""
        if len(self.partial_pairs) < 2:
            return None
        ends = self.partial_pairs[[0, -1]]
        (x0, x1), (share0, share1) = coordinates[ends], self.shares[ends]
        # a ramp that does not fall ends far beyond all pairs
        slope = max(float((share0 - share1) / (x1 - x0)), 1e-9)
        return float(x0 - (1 - share0) / slope), float(x1 + share1 / slope)


def make_ramp(measured: Frequencies, base: float, factor: float) -> Ramp:
    """The share of each power of the base that remains, set to 1 or 0 if the error allows."""
    plain, keepable = base ** (-measured.indices / measured.num_pairs), 1 - 1 / factor
    remaining = measured.inv_freq / plain
    shares = (remaining - 1 / factor) / keepable
    errors = _SHARE_ROUNDING + measured.relative_errors * remaining / keepable
    ends = np.clip(np.rint(shares), 0, 1)
    return Ramp(base, factor, np.where(np.abs(shares - ends) <= errors, ends, shares), plain)
