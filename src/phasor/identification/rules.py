"""Which rule picks the law, where the result depends on the length of the call."""

from __future__ import annotations

import math

import numpy as np

from phasor.identification.intervals import Floats, around
from phasor.identification.limits import Climb, ladder
from phasor.identification.report import Identification
from phasor.identification.spectrum import Spectrum, find_spectrum, rounded_angles
from phasor.scaling import DynamicNTK, LongRope, Rule

# LongRoPE's divisors divide the powers of a base, and any base does where none is measured
_ANY_BASE = 10_000.0
# as exact as float32 frequencies are that were computed by way of logarithms
_FLOAT32 = 1e-6


def find_rule(report: Identification, climbed: Climb, rounding: float) -> tuple[Rule, str] | None:
    """The rule that all lengths agree with, and a sentence about it."""
    if report.rope is None or report.rope.num_pairs < 2:
        return None
    longer: list[tuple[int, Spectrum, float]] = []
    for top, z in climbed.longer.items():
        spectrum = find_spectrum(ladder(top), z, rounded_angles(z, rounding))
        if spectrum.reach == top and np.all(spectrum.inv_freq):
            longer.append((top + 1, spectrum, float(np.median(np.abs(z)))))
    if len(longer) < 2:
        return None
    return _dynamic(report, longer) or _longrope(report, climbed, longer, rounding)


def _dynamic(
    report: Identification, longer: list[tuple[int, Spectrum, float]]
) -> tuple[Rule, str] | None:
    """Dynamic NTK's parameters, if the factors at all lengths agree with it."""
    if report.base is None or report.law is not None:
        return None
    pairs = len(report.pairs)
    slowest = report.base ** (-(pairs - 1) / pairs)
    factors = [(tokens, slowest / abs(float(s.inv_freq[-1]))) for tokens, s, _ in longer]
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
    return (rule, f"The rule is {rule}.") if fits else None


def _longrope(
    report: Identification,
    climbed: Climb,
    longer: list[tuple[int, Spectrum, float]],
    rounding: float,
) -> tuple[Rule, str] | None:
    """LongRoPE's two lists, if all longer calls turn alike."""
    original, rope = climbed.changes_at, report.rope
    if rope is None or original is None or original < 2 or climbed.remembers is not None:
        return None
    _, last, gain = longer[-1]
    short = rope.inv_freq
    alike = all(
        np.all(np.abs(one.inv_freq - last.inv_freq) <= one.uncertainty + last.uncertainty)
        and abs(factor - gain) <= 16 * rounding * gain
        for _, one, factor in longer
    )
    if not alike or not np.all(short) or len(short) != len(report.pairs):
        return None
    known = report.base is not None and report.law is None
    base = report.base if known and report.base is not None else _ANY_BASE
    plain = base ** (-np.arange(len(short)) / len(short))
    unsure = np.array([pair.uncertainty for pair in report.pairs])
    lists = tuple(
        _divisors(plain / f, _FLOAT32 + off / f)
        for f, off in ((short, unsure), (np.abs(last.inv_freq), last.uncertainty))
    )
    gains = report.attention_factor or 1.0, gain
    factor = around(math.exp((gain**2 - 1) * math.log(original)), 1e-4).simplest() or 1.0
    rule = LongRope(
        short_factors=lists[0], long_factors=lists[1], original_max_positions=original,
        factor=factor,
    )  # fmt: skip
    derived = rule.at(original).temperature().attention_factor
    if not np.allclose(gains, derived, rtol=64 * rounding, atol=0):
        rule = LongRope(
            short_factors=lists[0], long_factors=lists[1], original_max_positions=original,
            factor=1.0, short_attention_factor=gains[0], long_attention_factor=gains[1],
        )  # fmt: skip
    spans = " and ".join(f"by {min(one):g} to {max(one):g}" for one in lists)
    any_base = "" if known else " (any would do)"
    return rule, (
        f"The rule is LongRoPE's: the powers of base {base:.15g}{any_base} are "
        f"divided by one list up to {original} tokens and by another beyond, {spans}."
    )


def _divisors(values: Floats, off: Floats) -> tuple[float, ...]:
    """Each in the fewest digits that its measurement allows."""
    pairs = zip(values.tolist(), off.tolist(), strict=True)
    return tuple(around(value, relative).simplest() or value for value, relative in pairs)
