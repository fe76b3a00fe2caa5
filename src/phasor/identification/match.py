"""From what was read to a `Rope`: direction, offset, base and law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phasor.errors import SpecError
from phasor.identification.fit import EXACT, Fit, Grid, best_fit, grid_finding, held_in, placements
from phasor.identification.intervals import around
from phasor.identification.laws import RAMP_INVERTED, spoken
from phasor.identification.reading import Arrangement
from phasor.identification.report import Finding, Identification, PairFound
from phasor.identification.spectrum import Spectrum
from phasor.rope import Rope
from phasor.scaling import Law, PerPair, Yarn, YarnPaper

Floats = NDArray[np.float64]
_TURN = 2 * np.pi


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that was read.

    Attributes:
        head_dim: Width of the head.
        n_axes: Coordinates of a position.
        arrangement: Where pairs stand.
        spectrum: How fast they turn, equal coordinates on all axes.
        drivers: The axes that turn each pair.
        gain: The usual length of a turned unit vector.
        sizes: The length of every one, ``[P, pairs]``.
        rounding: Relative rounding error of what was read.
        is_rotation: Whether both members of every pair turn alike.
    """

    head_dim: int
    n_axes: int
    arrangement: Arrangement
    spectrum: Spectrum
    drivers: tuple[tuple[int, ...], ...]
    gain: float
    sizes: Floats
    rounding: float
    is_rotation: bool


def conclude(evidence: Evidence) -> Identification:
    """The report as far as rotations go."""
    arrangement, spectrum = evidence.arrangement, evidence.spectrum
    found = tuple(
        PairFound(
            read=(int(arrangement.read[0, k]), int(arrangement.read[1, k])),
            written=(int(arrangement.written[0, k]), int(arrangement.written[1, k])),
            inv_freq=float(spectrum.inv_freq[k]),
            uncertainty=float(spectrum.uncertainty[k]),
            axis=evidence.drivers[k][0] if evidence.drivers[k] else None,
        )
        for k in range(arrangement.num_pairs)
    )
    spread = float(np.ptp(evidence.sizes))
    one_gain = spread <= 16 * evidence.rounding * max(evidence.gain, 1)
    gain = around(evidence.gain, 4 * evidence.rounding + 1e-12).simplest() or 0.0
    report = Identification(
        head_dim=evidence.head_dim,
        called=None,
        linear=True,
        is_rotation=evidence.is_rotation and one_gain,
        keeps_norms=evidence.is_rotation and one_gain and gain == 1,
        attention_factor=gain if evidence.is_rotation and one_gain else None,
        pairing=arrangement.pairing,
        pairing_out=arrangement.pairing_out,
        rotary_start=arrangement.rotary_start,
        rotary_dim=arrangement.rotary_dim,
        pairs=found,
    )
    if not evidence.is_rotation:
        return replace(report, why_no_rope="the two members of a pair do not turn together")
    if not one_gain:
        by_pair = float(np.ptp(evidence.sizes, axis=0).max()) <= 16 * evidence.rounding
        says = (
            f"Pairs are multiplied by different factors, from {evidence.sizes.min():.6g} to "
            f"{evidence.sizes.max():.6g}."
            if by_pair
            else "The length of a vector changes with its position, as in xPos."
        )
        return replace(
            report,
            findings=(Finding(name="norm-varies", says=says),),
            why_no_rope="it does not keep the length of vectors, nor multiply it by one factor",
        )
    return _with_rope(report, evidence)


def _with_rope(report: Identification, evidence: Evidence) -> Identification:
    direction, f, odd = _direction(evidence.spectrum)
    offset, findings = _offset(evidence)
    if odd:
        findings.append(odd)
    if direction < 0:
        findings.append(Finding(
            name="sign-reversed",
            says="It turns clockwise: y0 = x0 cos + x1 sin. Scores against keys turned the usual "
            "way are wrong.",
        ))  # fmt: skip
    report = replace(report, direction=direction, position_offset=offset)
    if evidence.arrangement.pairing is None:
        why = "its pairs are neither halves nor interleaved; their coordinates are in pairs"
        return replace(report, why_no_rope=why, findings=tuple(findings))
    if any(len(axes) > 1 for axes in evidence.drivers):
        why = "a pair turns with more than one axis"
        return replace(report, why_no_rope=why, findings=tuple(findings))
    if any(finding.name == "constant-phase" for finding in findings):
        why = "it turns by a constant angle at position 0, which no shift of positions explains"
        return replace(report, why_no_rope=why, findings=tuple(findings))
    fields: dict[str, Any] = {
        "head_dim": evidence.head_dim,
        "pairing": report.pairing,
        "pairing_out": report.pairing_out,
        "rotary_start": report.rotary_start,
        "rotary_dim": report.rotary_dim,
        "direction": direction,
    }
    options = placements(fields, evidence.drivers, evidence.n_axes)
    if not options:
        why = "the axes are dealt to the pairs in an order that has no name here"
        return replace(report, why_no_rope=why, findings=tuple(findings))
    uncertainty = evidence.spectrum.uncertainty
    grid = held_in(f, uncertainty)
    fit = best_fit(options, f, uncertainty, None if grid is None else grid.dtype)
    if fit is not None:
        return _explained(report, fit, grid, findings)
    if grid is not None:
        f = grid.inv_freq
        findings.append(grid_finding(grid))
    resting = np.zeros(options[0]["rotary_dim"] // 2 - len(f))
    rope = Rope(**options[0], explicit_inv_freq=(*f.tolist(), *resting.tolist()))
    return replace(report, rope=rope, findings=tuple(findings))


def _direction(spectrum: Spectrum) -> tuple[Literal[1, -1], Floats, Finding | None]:
    """The sense that most pairs turn in, and frequencies from 0 to a full turn in that sense."""
    unsure = np.abs(spectrum.inv_freq) <= spectrum.uncertainty
    f = np.where(unsure, 0.0, spectrum.inv_freq)
    direction = 1 if np.sign(f).sum() >= 0 else -1
    against = np.flatnonzero(direction * f < 0)
    f = np.where(direction * f < 0, direction * f + _TURN, direction * f)
    odd = None
    if len(against):
        odd = Finding(
            name="beyond-half-a-turn",
            says=f"Pair {against[0]}"
            + (f" and {len(against) - 1} more turn" if len(against) > 1 else " turns")
            + " by more than half a turn per position, or against the others: whole positions "
            "cannot tell which.",
        )
    return direction, f, odd


def _offset(evidence: Evidence) -> tuple[float, list[Finding]]:
    """What is added to positions, from the angles at position 0."""
    spectrum = evidence.spectrum
    f, phase = spectrum.inv_freq, spectrum.phase
    rooms = 16 * spectrum.phase_uncertainty
    if np.all(np.abs(phase) <= rooms):
        return 0.0, []
    room = float(rooms.max())
    # the slowest pair that moved enough to be read has not come round
    sure = np.flatnonzero((np.abs(f) > 1e-12) & (np.abs(phase) > 64 * room * np.abs(f)))
    for k in sure[np.argsort(np.abs(f[sure]))]:
        offset = round(float(phase[k] / f[k]) * 2) / 2
        off = np.abs(np.exp(1j * offset * f) - np.exp(1j * phase))
        if offset and off.max() <= room + 1e-5 * abs(offset):
            shift = f"{offset:+g}"
            return offset, [
                Finding(
                    name="position-offset",
                    says=f"Positions are off by {shift}: position 0 is turned as {offset:g}. "
                    "Scores of distances are right, keys turned elsewhere are not.",
                )
            ]
    return 0.0, [Finding(name="constant-phase", says="Position 0 is turned by a constant angle.")]


def _explained(
    report: Identification, fit: Fit, grid: Grid | None, findings: list[Finding]
) -> Identification:
    best = fit.explanations[0]
    if best.slip is not None:
        findings.append(Finding(name=best.slip.name, says=f"{best.slip.says}."))
    report = replace(report, base=best.base, findings=tuple(findings))
    if best.slip is not None and best.slip.name == RAMP_INVERTED:
        return replace(
            report, rope=Rope(**fit.fields, explicit_inv_freq=tuple(fit.inv_freq.tolist()))
        )
    law = _tempered(best.law, report.attention_factor or 1.0)
    others = [
        f"base {one.base:.15g}" + ("" if one.law is None else f" with {spoken(one.law)}")
        for one in fit.explanations[1:]
        if (one.base, one.law) != (best.base, best.law)
    ]
    rope = Rope(**fit.fields, base=best.base, scaling=law)
    room = fit.uncertainty + EXACT * fit.inv_freq
    if grid is not None and np.any(np.abs(rope.inv_freq - fit.inv_freq) > room):
        rounded = replace(rope, inv_freq_dtype="float32")
        if np.all(np.abs(rounded.inv_freq - fit.inv_freq) <= room):
            rope = rounded
        report = replace(report, findings=(*report.findings, grid_finding(grid)))
    return replace(report, rope=rope, law=law, known_law=True, alternatives=tuple(others[:4]))


def _tempered(law: Law | None, gain: float) -> Law | None:
    """The law with the attention factor that was measured, where it has one to set."""
    if law is None or abs(law.temperature().attention_factor - gain) <= 1e-6:
        return law
    if isinstance(law, (Yarn, YarnPaper, PerPair)):
        try:
            return replace(law, attention_factor=gain)
        except SpecError:
            return law
    return law
