"""Frequencies from turned vectors: one position after another, each refining the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# beyond this the estimate so far did not foresee the next angle: the table ended, or digits did
_SURPRISE = 0.5
# float16's smallest number: below it there is nothing, and above it steps of as much
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

    inv_freq: NDArray[np.float64]
    uncertainty: NDArray[np.float64]
    phase: NDArray[np.float64]
    phase_uncertainty: NDArray[np.float64]
    reach: int

    def at(self, positions: NDArray[np.float64]) -> NDArray[np.complex128]:
        """``exp(i (phase + p inv_freq))``, ``[P, pairs]``."""
        return np.exp(1j * (self.phase + positions[:, None] * self.inv_freq))


def rounded_angles(z: NDArray[np.complex128], rounding: float) -> NDArray[np.float64]:
    """How far the angles of ``z`` may be off where its cosines and sines are off by an ulp each.

    Args:
        z: ``[P, pairs]``.
        rounding: The largest relative error of rounding to their dtype.
    """
    off = 2 * rounding * np.abs(np.sin(2 * np.angle(z)))
    return off + (_LEAST if rounding > 2.0**-12 else 0)


def find_spectrum(
    positions: Sequence[int],
    z: NDArray[np.complex128],
    moved: NDArray[np.float64],
    angle_rounding: float = 2.0**-52,
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
        foreseen = estimate * gaps[i]
        off = np.angle(turned[i] * np.conj(turned[0]) * np.exp(-1j * foreseen))
        if i > 1 and np.abs(off).max() > _SURPRISE:
            break
        totals[i] = foreseen + off
        estimate = totals[i] / gaps[i]
        used = i + 1
    gaps, totals = gaps[1:used, None], totals[1:used]
    weights = gaps / (gaps**2).sum(axis=0)
    inv_freq = (weights * totals).sum(axis=0)
    noise = moved[1:used] + moved[0] + angle_rounding * np.abs(totals)
    residues = np.abs(totals - gaps * inv_freq)
    uncertainty = (weights * (noise + residues)).sum(axis=0)
    phase = np.angle(turned[0] * np.exp(-1j * at[0] * inv_freq))
    return Spectrum(
        inv_freq=inv_freq,
        uncertainty=uncertainty,
        phase=phase,
        phase_uncertainty=moved[:used].max(axis=0) + at[0] * uncertainty,
        reach=int(at[used - 1]),
    )
