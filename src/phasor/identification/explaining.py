"""The `Rope` behind measured frequencies: direction, offset, axes, base and law."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import numpy as np

from phasor.identification import laws
from phasor.identification.frequencies import find_scaled_axes
from phasor.identification.laws_by_axis import LawsByAxis, find_laws_by_axis
from phasor.identification.layout import Drivers, find_drivers, possible_slices
from phasor.identification.members import name_norms
from phasor.identification.positions import find_offset
from phasor.identification.report import (
    Finding,
    Identification,
    PairFound,
    add_findings,
    make_finding,
)
from phasor.identification.roundings import find_frequency_dtype
from phasor.identification.spectrum import (
    FACTOR_ROOM,
    ROUNDING,
    Floats,
    Spectrum,
    log_base,
    rounded,
    simplest_near,
)
from phasor.identification.turns import Arrangement, Turns
from phasor.rope import Rope, with_frequencies

# the counterparts of `FLOAT64_SLACK` for frequencies that were computed in float32: one rounding, a
# power with its roundings, and a power by way of logarithms
_FLOAT32_SLACKS = (2.0**-24, 2e-7, 1e-6)


# a fit that needs so many digits fewer is chance only once in 10 to this power
_CERTAIN_DIGITS = 4


def explain(
    arrangement: Arrangement,
    spectrum: Spectrum,
    sizes: Floats,
    axis_turns: Turns | None = None,
    *,
    rounding: float,
    is_rotation: bool = True,
) -> Identification:
    """The report about the rotation: its pairs and factor, and the Rope with the same rotation.

    ``sizes`` ``[P, pairs]`` are the lengths of turned unit vectors. ``axis_turns`` are the turns at
    unequal coordinates, if there are several axes. ``is_rotation`` is false if the two members of
    some pair do not turn alike.
    """
    drivers = find_drivers(spectrum, axis_turns, rounding)
    layout, median = arrangement.layout, float(np.median(sizes))
    has_one_gain = is_rotation and float(np.ptp(sizes)) <= 16 * rounding * max(median, 1)
    gain = simplest_near(median, 4 * rounding + FACTOR_ROOM) or 0.0
    axes = [int(axis.argmax()) if axis.any() else None for axis in drivers.T]
    columns = (
        zip(*members.tolist(), strict=True) for members in (arrangement.read, arrangement.written)
    )
    measured = spectrum.inv_freq.tolist(), spectrum.uncertainty.tolist()
    report = Identification(
        head_dim=layout.head_dim,
        is_rotation=has_one_gain,
        keeps_norms=has_one_gain and gain == 1,
        attention_factor=gain if has_one_gain else None,
        pairing=layout.pairing if arrangement.is_named else None,
        pairing_out=layout.output_pairing if arrangement.is_named else None,
        rotary_start=layout.rotary_start,
        rotary_dim=layout.rotary_dim,
        pairs=tuple(map(PairFound, *columns, *measured, axes)),
    )
    if has_one_gain:
        return _explain_rotation(report, arrangement, spectrum, drivers, axis_turns)
    if not is_rotation:
        return replace(report, why_no_rope="the two members of a pair do not turn together")
    reason = "it does not keep the length of vectors, nor multiply it by one factor"
    return add_findings(report, name_norms(sizes, 16 * rounding), why_no_rope=reason)


def _explain_rotation(
    report: Identification, arrangement: Arrangement, spectrum: Spectrum, drivers: Drivers,
    axis_turns: Turns | None,
) -> Identification:  # fmt: skip
    direction, f, findings = _find_direction(spectrum)
    offset, offset_findings = find_offset(spectrum)
    plain = replace(
        arrangement.layout, direction=direction, base=None, scaling=None, explicit_inv_freq=None
    )
    slices = possible_slices(plain, drivers) if arrangement.is_named else []
    reason = None
    if not arrangement.is_named:
        reason = "its pairs are neither halves nor interleaved; their coordinates are in pairs"
    elif np.any(drivers.sum(axis=0) > 1):
        reason = "a pair turns with more than one axis, as with axes.Mixed, whose numbers are data"
    elif offset is None:
        reason = "it turns by a constant angle at position 0, which no shift of positions explains"
    elif not slices:
        reason = "the axes are assigned to the pairs in an order that has no name here"
    report = add_findings(
        report, *offset_findings, *findings, direction=direction, position_offset=offset or 0.0,
        why_no_rope=reason,
    )  # fmt: skip
    if reason or offset is None:
        return report
    if axis_turns is not None:
        axis_turns = axis_turns._replace(positions=axis_turns.positions + offset)
    return _explain_frequencies(report, slices, f, spectrum.uncertainty, axis_turns)


def _explain_frequencies(
    report: Identification, slices: list[Rope], f: Floats, uncertainty: Floats,
    axis_turns: Turns | None,
) -> Identification:  # fmt: skip
    """The report with the Rope of frequencies ``f``, by base and law if these explain them."""
    numbers, findings = find_frequency_dtype(f, uncertainty)
    rope, explanations = _find_best_fit(
        slices, f, uncertainty, laws.find_explanations, may_be_float64=numbers is None
    )
    if not explanations:
        changes, base = findings, None
        scaled = (
            None if axis_turns is None else _find_scaled_axis(slices, f, uncertainty, axis_turns)
        )
        if scaled is not None:
            base, finding = scaled
            changes = [finding]
        rope, explanations_by_axis = _find_best_fit(
            slices, f, uncertainty, find_laws_by_axis, may_be_float64=numbers is None
        )
        if explanations_by_axis:
            rope = explanations_by_axis[0].apply_to(rope)
            return add_findings(report, *changes, base=rope.base, rope=rope, known_law=True)
        rope = _set_frequencies(slices[0], f if numbers is None else numbers)
        return add_findings(report, *changes, base=base, rope=rope)
    best, *other_explanations = explanations
    mistakes = [] if best.mistake is None else [best.mistake]
    if not best.gives_frequencies:
        return add_findings(report, *mistakes, base=best.base, rope=_set_frequencies(rope, f))
    law, gain = best.law, report.attention_factor or 1.0
    if law is not None and hasattr(law, "attention_factor"):
        differs = abs(law.temperature().attention_factor - gain) > 1e-6
        law = replace(cast(Any, law), attention_factor=gain) if differs else law
    rope = replace(rope, base=best.base, scaling=law)
    f, uncertainty = laws.pad_to_rope(f, rope), laws.pad_to_rope(uncertainty, rope)
    tolerance = uncertainty + laws.FLOAT64_SLACK * f
    if numbers is not None and np.any(np.abs(rope.inv_freq - f) > tolerance):
        in_float32 = replace(rope, inv_freq_dtype="float32")
        rope = in_float32 if np.all(np.abs(in_float32.inv_freq - f) <= tolerance) else rope
        mistakes += findings
    same = best.base, best.law
    alternatives = tuple(
        str(explanation)
        for explanation in other_explanations
        if (explanation.base, explanation.law) != same
    )
    fields = {"base": best.base, "law": law, "known_law": True, "alternatives": alternatives}
    return add_findings(report, *mistakes, rope=rope, **fields)


def _find_direction(spectrum: Spectrum) -> tuple[Literal[1, -1], Floats, list[Finding]]:
    """The direction in which most pairs turn, and frequencies from 0 to a full turn in it."""
    unmeasured = np.abs(spectrum.inv_freq) <= spectrum.uncertainty
    f = np.where(unmeasured, 0.0, spectrum.inv_freq)
    direction = 1 if np.sign(f).sum() >= 0 else -1
    f = direction * f
    backwards = np.flatnonzero(f < 0)
    findings: list[Finding] = []
    if count := len(backwards):
        rest = f" and {count - 1} more turn" if count > 1 else " turns"
        findings.append(make_finding("beyond-half-a-turn", pairs=f"{backwards[0]}{rest}"))
    if direction < 0:
        way = "clockwise: y0 = x0 cos + x1 sin. Scores against keys turned the usual way are wrong"
        findings.append(make_finding("direction", way=way))
    return direction, np.where(f < 0, f + 2 * np.pi, f), findings


_Explained = TypeVar("_Explained", laws.Explanation, LawsByAxis)


def _find_best_fit(
    slices: list[Rope], f: Floats, uncertainty: Floats,
    find: Callable[[Rope, Floats, Floats, float], list[_Explained]], *, may_be_float64: bool,
) -> tuple[Rope, list[_Explained]]:  # fmt: skip
    """The slice, and the explanations of frequencies ``f`` in it, with the fewest digits."""

    def digits(explanations: list[_Explained]) -> float:
        return explanations[0].digits if explanations else math.inf

    def find_fit(slack: float) -> tuple[Rope, list[_Explained]]:
        fits = [(rope, find(rope, f, uncertainty, slack)) for rope in slices]
        return min(fits, key=lambda fit: digits(fit[1]))

    exact = find_fit(laws.FLOAT64_SLACK)
    # a frequency measured hardly better than float32 angles allow is no evidence against them
    is_sharp = uncertainty < ROUNDING["float32"] / 32 * f
    if np.any(is_sharp & (np.abs(rounded(f, "float32") - f) > uncertainty)):
        return exact
    for slack in _FLOAT32_SLACKS:
        loose = find_fit(slack)
        if loose[1]:
            # a tolerance that is ten times as loose already saves one digit
            exactness = float((uncertainty[f > 0] / f[f > 0]).min(initial=1.0)) + laws.FLOAT64_SLACK
            looseness = math.log10(1 + slack / exactness) + _CERTAIN_DIGITS * may_be_float64
            return loose if digits(loose[1]) + looseness < digits(exact[1]) else exact
    return exact


def _find_scaled_axis(
    slices: list[Rope], f: Floats, uncertainty: Floats, turns: Turns
) -> tuple[float, Finding] | None:
    """The base of all axes but one, and the number that multiplies the positions of that axis."""
    for layout in slices:
        rope = _set_frequencies(layout, f)
        errors = laws.pad_to_rope(uncertainty, rope) + _FLOAT32_SLACKS[0] * rope.inv_freq
        # the logarithm of a frequency falls linearly along the pairs of one axis
        places = np.concatenate([np.arange(n) / n for n in rope.axes.spectra(rope.num_pairs)])
        axis_of_pair = np.array(rope.axes.axis_of_pair(rope.num_pairs))
        for axis in range(rope.axes.n_axes):
            rest = (axis_of_pair != axis) & (rope.inv_freq > 0)
            relative_errors = errors[rest] / rope.inv_freq[rest]
            logs = log_base(rope.inv_freq[rest], relative_errors, 1, places[rest])
            base = logs.exp().simplest()
            if base is None or rest.sum() < 2:
                continue
            expected = replace(layout, base=base)
            for scaled in find_scaled_axes(expected, turns, rope.inv_freq):
                if turns.misfit(scaled.rope, scaled.places, scaled.rows).max() <= 1:
                    return base, scaled.changes[0]
    return None


def _set_frequencies(rope: Rope, f: Floats) -> Rope:
    inv_freq = tuple(laws.pad_to_rope(f, rope).tolist())
    return with_frequencies(rope, explicit_inv_freq=inv_freq)
