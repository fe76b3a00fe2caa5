"""By how many positions turns are shifted: one test for functions and for recordings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.angles import axes_of, pair_coordinates
from phasor.axes import Mixed
from phasor.identification.hypotheses import Hypothesis
from phasor.identification.spectrum import Complex, Floats, Spectrum
from phasor.identification.turns import ANGLE_ERROR, Turns

_Places = NDArray[Any]  # whole numbers, [T]


class Shifts(NamedTuple):
    """Turns of tokens relative to a hypothesis: by how many positions are they moved?"""

    z: Complex  # the remaining turn of each pair, times the factor: [T, num_pairs]
    size: float  # the factor
    errors: Floats  # how far ``z`` may be off, [T, num_pairs]
    places: Floats  # the coordinates that turn pairs, [T, num_pairs]
    f: Floats  # radians for each position, [num_pairs]
    f_errors: Floats  # how far ``f`` may be off, [num_pairs]
    max_error: float = math.inf  # the largest error that is ever allowed

    @classmethod
    def from_hypothesis(cls, hypothesis: Hypothesis, turns: Turns, unsure: float = 0.0) -> Shifts:
        """Turns relative to ``hypothesis``; the logarithm of its base may be off by ``unsure``."""
        _, rope, places, rows = hypothesis
        factor, shape = turns.factor(rope), turns.z.shape
        if isinstance(rope.axes, Mixed):
            f, places = np.sum(rope.axes.inv_freq, axis=0), np.abs(places).max(axis=1)[:, None]
        else:
            f, places = rope.inv_freq, pair_coordinates(places, axes_of(rope))
        # an error of the base's logarithm moves the frequency of pair k by k / n of it
        moves: Floats = np.arange(rope.num_pairs) / rope.num_pairs * unsure
        return cls(
            z=turns.z * np.conj(rows),
            size=factor,
            errors=turns.allowed(rope, 0 * turns.positions),
            places=np.broadcast_to(places.astype(np.float64), shape),
            f=rope.direction * f,
            f_errors=np.abs(f) * (ANGLE_ERROR + moves),
        )

    @classmethod
    def from_spectrum(
        cls, spectrum: Spectrum, positions: Floats, z: Complex, error: float, offset: float
    ) -> Shifts:
        """Relative to a spectrum: unit vectors ``z`` ``[P, num_pairs]``, off by up to ``error``.

        Positions are off by an ``offset`` already.
        """
        # float32 angles and positions lose 2**-22 of the angle, which is no table's end
        f_errors = 3 * spectrum.uncertainty + ANGLE_ERROR * np.abs(spectrum.inv_freq)
        with np.errstate(invalid="ignore"):  # numbers that are not finite fit nothing
            turned_further = z * np.conj(spectrum.predict(positions))
        return cls(
            z=turned_further,
            size=1.0,
            errors=np.broadcast_to(error + abs(offset) * f_errors, z.shape),
            places=np.broadcast_to(positions[:, None], z.shape),
            f=spectrum.inv_freq,
            f_errors=f_errors,
            max_error=0.5,
        )

    def fit_each(self, offsets: _Places) -> NDArray[np.bool_]:
        """Which tokens the offsets ``[T]`` explain, one offset for each token."""
        rows = self.size * np.exp(1j * offsets[:, None] * self.f)
        unsure = np.abs(self.places + offsets[:, None]) * self.f_errors
        allowed = np.minimum(self.errors + self.size * unsure, self.max_error)
        return np.asarray(np.all(np.abs(self.z - rows) <= allowed, axis=1))

    def fit(
        self, token: int, offsets: _Places, pairs: Sequence[int] | None = None
    ) -> NDArray[np.bool_]:
        """Which of the offsets explain the turn of a token, tried pair by pair."""
        fits = np.ones(len(offsets), bool)
        for pair in range(len(self.f)) if pairs is None else pairs:
            remaining = offsets[fits]
            unsure = np.abs(self.places[token, pair] + remaining) * self.f_errors[pair]
            allowed = np.minimum(self.errors[token, pair] + self.size * unsure, self.max_error)
            rows = self.size * np.exp(1j * remaining * self.f[pair])
            fits[fits] = np.abs(self.z[token, pair] - rows) <= allowed
            if not fits.any():
                break
        return fits

    def shared(self, offsets: _Places, pairs: Sequence[int] | None = None) -> _Places:
        """The offsets that explain the turns of every token."""
        for token in range(len(self.z)):
            if not len(offsets):
                break
            offsets = offsets[self.fit(token, offsets, pairs)]
        return offsets
