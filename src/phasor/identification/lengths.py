"""Results that depend on the length of a call, and the rule that picks frequencies by length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from phasor.identification.calling import RefusedError
from phasor.identification.probes import Lengths, Measured, Probe
from phasor.identification.report import Identification, make_finding
from phasor.identification.spectrum import (
    Complex,
    Floats,
    Spectrum,
    count_digits,
    find_first_bad,
    find_spectrum,
    interval_around,
    powers_of_two,
    simplest_near,
)
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, Rule

# LongRoPE divides the powers of a base; any base will do, as the divisors make up for it
_ANY_BASE = 10_000.0


# the relative error of float32 frequencies that were computed by way of logarithms
_FLOAT32_ERROR = 1e-6


def call_with_growing_lengths(probe: Probe, max_position: int) -> Lengths:
    """Call the function with growing lengths, and then with shrinking lengths."""
    answers: dict[int, Complex] = {}
    changes_at = irreproducible_at = None
    for top in powers_of_two(max_position)[2:]:
        try:
            z = answers[top] = probe(powers_of_two(top))
        except RefusedError:
            if not answers:
                raise
            break
        if changes_at is None and probe.differ(z[:-1], answers.get(top // 2, z[:-1])):
            changes_at = top
    for top in sorted(answers, reverse=True)[1:]:
        if probe.differ(probe(powers_of_two(top)), answers[top]):
            irreproducible_at = top
    consistent = max(top for top in answers if changes_at is None or top < changes_at)
    if changes_at is not None and irreproducible_at is None:
        positions, expected = powers_of_two(consistent), answers[consistent]
        changes_at = find_first_bad(
            consistent,
            changes_at,
            lambda highest: not probe.differ(probe([*positions, highest])[:-1], expected),
        )
    return Lengths(answers, consistent, changes_at, irreproducible_at)


# (tokens, spectrum, factor) for a call so long that the function uses other frequencies
_LongerCall = tuple[int, Spectrum, float]


def add_rule(measured: Measured) -> None:
    """Add the finding that results depend on the length of the call, and the rule behind it."""
    probe, lengths, rope = measured.probe, measured.lengths, measured.report.rope
    longer_calls: list[_LongerCall] = []
    for top in (top for top in lengths.answers if top > lengths.longest_consistent):
        z = lengths.answers[top]
        spectrum = find_spectrum(powers_of_two(top), z, probe.angle_errors(z))
        if spectrum.last_position == top and np.all(spectrum.inv_freq):
            longer_calls.append((top + 1, spectrum, float(np.median(np.abs(z)))))
    rule, sentence, offset = None, "", 0
    if rope is not None and rope.num_pairs > 1 and len(longer_calls) > 1:
        rule, offset = _fit_dynamic_ntk(measured.report, longer_calls)
        sentence = f" The rule is {rule}." if rule else ""
        if rule is None and lengths.irreproducible_at is None:
            rule, sentence = _fit_longrope(measured, rope, lengths.changes_at or 0, longer_calls)
    finding = make_finding("depends-on-length", length=lengths.changes_at, rule=sentence)
    measured.add(finding, rule=rule)
    if offset:
        measured.add(make_finding("length-off-by-one", how="more" if offset > 0 else "fewer"))


def _fit_dynamic_ntk(
    report: Identification, longer_calls: list[_LongerCall]
) -> tuple[Rule | None, int]:
    """Dynamic NTK, if it explains all measured factors, perhaps with lengths one token off."""
    fits: list[tuple[int, Rule, int]] = []
    if report.base is None or report.law is not None:
        return None, 0
    slowest = report.base ** (-(len(report.pairs) - 1) / len(report.pairs))
    for offset in (0, -1, 1):
        factors = [(n + offset, slowest / abs(float(f.inv_freq[-1]))) for n, f, _ in longer_calls]
        if (rule := _fit_factors(factors)) is not None:
            original = float(rule.original_max_positions)
            fits.append((count_digits(rule.factor) + count_digits(original), rule, offset))
    # people write numbers with few digits; the right length comes first
    _, rule, offset = min(fits, key=lambda fit: fit[0], default=(0, None, 0))
    return rule, offset


def _fit_factors(factors: list[tuple[int, float]]) -> DynamicNTK | None:
    """Dynamic NTK that explains these pairs of length and factor."""
    (short, low), (long, high) = factors[0], factors[-1]
    slope = (high - low) / (long - short)
    factor = simplest_near(1 - (low - slope * short), 1e-3)
    if slope <= 0 or factor is None or factor < 1:
        return None
    original = interval_around(factor / slope, 1e-3).power_of_two() or round(factor / slope)
    rule = DynamicNTK(factor=factor, original_max_positions=original)
    fits = all(np.isclose(rule.at(n).factor, measured, rtol=1e-3) for n, measured in factors)
    return rule if fits else None


def _fit_longrope(
    measured: Measured, rope: Rope, original: int, longer_calls: list[_LongerCall]
) -> tuple[Rule | None, str]:
    """LongRoPE and its sentence, if all calls longer than ``original`` use equal frequencies."""
    report, short, rounding = measured.report, rope.inv_freq, measured.probe.rounding
    _, last, gain = longer_calls[-1]
    all_equal = all(
        np.all(np.abs(spectrum.inv_freq - last.inv_freq) <= spectrum.uncertainty + last.uncertainty)
        and abs(factor - gain) <= 16 * rounding * gain
        for _, spectrum, factor in longer_calls
    )
    if original < 2 or not all_equal or not np.all(short) or len(short) != len(report.pairs):
        return None, ""
    plain_base = report.base if report.law is None else None
    base = plain_base or _ANY_BASE
    plain = base ** (-np.arange(len(short)) / len(short))

    def shortest_divisors(inv_freq: Floats, uncertainty: Floats) -> tuple[float, ...]:
        """The divisors, each with the fewest digits that its measurement allows."""
        values, errors = plain / inv_freq, _FLOAT32_ERROR + uncertainty / inv_freq
        measurements = zip(values.tolist(), errors, strict=True)
        return tuple(simplest_near(value, error) or value for value, error in measurements)

    rule = LongRope(
        short_factors=shortest_divisors(short, np.array([p.uncertainty for p in report.pairs])),
        long_factors=shortest_divisors(np.abs(last.inv_freq), last.uncertainty),
        original_max_positions=original,
        factor=simplest_near(math.exp((gain**2 - 1) * math.log(original)), 1e-4) or 1.0,
    )
    short_gain = report.attention_factor or 1.0
    derived_gain = rule.at(original).temperature().attention_factor
    if not np.allclose((short_gain, gain), derived_gain, rtol=64 * rounding, atol=0):
        gains = {"short_attention_factor": short_gain, "long_attention_factor": gain}
        rule = replace(rule, factor=1.0, **gains)
    lists = (rule.short_factors, rule.long_factors)
    spans = " and ".join(f"by {min(factors):g} to {max(factors):g}" for factors in lists)
    any_base = "" if plain_base else " (any would do)"
    return rule, (
        f" The rule is LongRoPE's: the powers of base {base:.15g}{any_base} are "
        f"divided by one list up to {original} tokens and by another beyond, {spans}."
    )
