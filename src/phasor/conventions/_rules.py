"""Which rule picks the law, where the result depends on the length of the call."""

from __future__ import annotations

import numpy as np

from phasor.conventions._intervals import around
from phasor.conventions._limits import Climb, ladder
from phasor.conventions._report import Identification
from phasor.conventions._spectrum import find_spectrum, rounded_angles
from phasor.scaling import DynamicNTK


def find_rule(report: Identification, climbed: Climb, rounding: float) -> DynamicNTK | None:
    """Dynamic NTK's parameters, if the factors at two lengths and all pairs agree with it."""
    if report.rope is None or report.base is None or report.law is not None:
        return None
    pairs = report.rope.num_pairs
    if pairs < 2 or len(climbed.longer) < 2:
        return None
    factors: list[tuple[int, float]] = []
    for top, z in climbed.longer.items():
        spectrum = find_spectrum(ladder(top), z, rounded_angles(z, rounding))
        slowest = abs(float(spectrum.inv_freq[-1]))
        if spectrum.reach == top and slowest > 0:
            factors.append((top + 1, report.base ** (-(pairs - 1) / pairs) / slowest))
    if len(factors) < 2:
        return None
    (short, low), (long, high) = factors[0], factors[-1]
    slope = (high - low) / (long - short)
    factor = around(1 - (low - slope * short), 1e-3).simplest()
    if slope <= 0 or factor is None or factor < 1:
        return None
    length = around(factor / slope, 1e-3)
    original = length.power_of_two() or round(factor / slope)
    rule = DynamicNTK(factor=factor, original_max_positions=original)
    fits = all(
        np.isclose(rule.at(tokens).factor, measured, rtol=1e-3) for tokens, measured in factors
    )
    return rule if fits else None
