"""Frequencies from turned vectors: one position after another, each refining the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# beyond this the estimate so far did not foresee the next angle: the table ended, or digits did
_SURPRISE = 0.5


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

    inv_freq: NDArray[np.float64]
    uncertainty: NDArray[np.float64]
    phase: NDArray[np.float64]
    phase_uncertainty: NDArray[np.float64]
    reach: int

    def at(self, positions: NDArray[np.float64]) -> NDArray[np.complex128]:
        """``exp(i (phase + p inv_freq))``, ``[P, pairs]``."""
        return np.exp(1j * (self.phase + positions[:, None] * self.inv_freq))


def find_spectrum(positions: Sequence[int], z: NDArray[np.complex128], rounding: float) -> Spectrum:
    """The frequencies behind turned unit vectors.

    The angle between the first two positions gives each frequency modulo a full turn; every
    later angle is known modulo a full turn too, and the estimate so far says which. So the
    uncertainty falls as the positions grow, if they grow by no more than a factor of about two.

    Args:
        positions: ``P`` ascending positions; the first two one apart.
        z: ``[P, pairs]``, of any size.
        rounding: Relative rounding error of the values read.
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
        foreseen = estimate * gaps[i]
        off = np.angle(turned[i] * np.conj(turned[0]) * np.exp(-1j * foreseen))
        if i > 1 and np.abs(off).max() > _SURPRISE:
            break
        totals[i] = foreseen + off
        estimate = totals[i] / gaps[i]
        used = i + 1
    gaps, totals = gaps[1:used, None], totals[1:used]
    inv_freq = (gaps * totals).sum(axis=0) / (gaps**2).sum(axis=0)
    half = slice(len(gaps) // 2, None)
    scatter = (np.abs(totals - gaps * inv_freq) / gaps)[half].max(axis=0)
    # cos and sin rounded relatively move the angle by at most this
    angles = np.angle(turned)
    moved = rounding * (np.abs(np.sin(2 * angles[used - 1])) + np.abs(np.sin(2 * angles[0])))
    floor = moved / gaps[-1] + 2.0**-52 * np.abs(inv_freq)
    phase = np.angle(turned[0] * np.exp(-1j * at[0] * inv_freq))
    uncertainty = np.maximum(scatter, floor)
    return Spectrum(
        inv_freq=inv_freq,
        uncertainty=uncertainty,
        phase=phase,
        phase_uncertainty=2 * rounding + at[0] * uncertainty,
        reach=int(at[used - 1]),
    )
