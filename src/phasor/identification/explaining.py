"""From what was measured to a `Rope`: direction, offset, axes, dtype of frequencies, base, law."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from phasor.axes import Alternating, Axes, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.errors import SpecError
from phasor.identification.blocks import Arrangement
from phasor.identification.laws import Explanation, explanations, law_text
from phasor.identification.report import Finding, Identification, PairFound
from phasor.identification.spectrum import Floats, Spectrum, around, log_base
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.scaling import Law

#: How the layouts of `phasor.axes.AXES` are made from the number of pairs that each axis drives;
#: the first that fits is reported.
LAYOUTS: dict[str, Callable[[tuple[int, ...]], Axes]] = {
    "one": lambda sections: OneAxis(),
    "sectioned": Sectioned,
    "axial": Axial,
    "interleaved": InterleavedSections,
    "alternating": Alternating,
}
# fields of a Rope, but for base and scaling, and what explains its frequencies
Fit = tuple[dict[str, Any], list[Explanation]]
#: The axes that turn each pair.
Drivers = Sequence[tuple[int, ...]]
# how far float64 arithmetic may take a program's frequencies from the exact ones, relatively
_EXACT = 1e-14
# the same for float32: one rounding; a power with its roundings; a power by way of logarithms
_FLOAT32 = (2.0**-24, 2e-7, 1e-6)
# significant bits, and the exponent of the smallest number
_DTYPES = {"bfloat16": (8, -133), "float16": (11, -24), "float32": (24, -149)}
# frequencies are said to be numbers of a dtype if chance makes them so once in 2 to this
_CERTAIN_BITS = 24


def explain(
    arrangement: Arrangement,
    spectrum: Spectrum,
    drivers: Drivers,
    sizes: Floats,
    *,
    n_axes: int,
    rounding: float,
    is_rotation: bool = True,
) -> Identification:
    """The report about the rotation: its pairs and factor, and the Rope that does the same.

    Args:
        arrangement: Where pairs are.
        spectrum: How fast they turn, with equal coordinates on all axes.
        drivers: The axes that turn each pair; none if it was not seen to turn.
        sizes: The lengths of turned unit vectors, ``[P, pairs]``.
        n_axes: Coordinates of a position.
        rounding: Relative rounding error of what was measured.
        is_rotation: Whether both members of every pair turn alike.
    """
    middle = float(np.median(sizes))
    one_gain = float(np.ptp(sizes)) <= 16 * rounding * max(middle, 1)
    gain = around(middle, 4 * rounding + 1e-12).simplest() or 0.0
    (read, other), (written, other_written) = (
        arrangement.read.tolist(),
        arrangement.written.tolist(),
    )
    report = Identification(
        head_dim=arrangement.head_dim,
        called=None,
        linear=True,
        is_rotation=is_rotation and one_gain,
        keeps_norms=is_rotation and one_gain and gain == 1,
        attention_factor=gain if is_rotation and one_gain else None,
        pairing=arrangement.pairing,
        pairing_out=arrangement.pairing_out,
        rotary_start=arrangement.rotary_start,
        rotary_dim=arrangement.rotary_dim,
        pairs=tuple(
            PairFound(
                read=(read[k], other[k]),
                written=(written[k], other_written[k]),
                inv_freq=float(spectrum.inv_freq[k]),
                uncertainty=float(spectrum.uncertainty[k]),
                axis=drivers[k][0] if drivers[k] else None,
            )
            for k in range(arrangement.num_pairs)
        ),
    )
    if not is_rotation:
        return replace(report, why_no_rope="the two members of a pair do not turn together")
    if one_gain:
        return _explain_rotation(report, spectrum, drivers, n_axes)
    says = "The length of a vector changes with its position, as in xPos."
    if float(np.ptp(sizes, axis=0).max()) <= 16 * rounding:
        between = f"from {sizes.min():.6g} to {sizes.max():.6g}"
        says = f"Pairs are multiplied by different factors, {between}."
    return replace(
        report,
        findings=(Finding("norm-varies", says),),
        why_no_rope="it does not keep the length of vectors, nor multiply it by one factor",
    )


def _explain_rotation(
    report: Identification, spectrum: Spectrum, drivers: Drivers, n_axes: int
) -> Identification:
    direction, f, findings = _direction(spectrum)
    offset, shifts = _offset(spectrum)
    findings = [*shifts, *findings]
    slices = _possible_slices(report, direction, drivers, n_axes)
    why = None
    if report.pairing is None:
        why = "its pairs are neither halves nor interleaved; their coordinates are in pairs"
    elif any(len(axes) > 1 for axes in drivers):
        why = "a pair turns with more than one axis"
    elif any(finding.name == "constant-phase" for finding in findings):
        why = "it turns by a constant angle at position 0, which no shift of positions explains"
    elif not slices:
        why = "the axes are dealt to the pairs in an order that has no name here"
    report = replace(report, direction=direction, position_offset=offset, findings=tuple(findings))
    if why is not None:
        return replace(report, why_no_rope=why)
    uncertainty = spectrum.uncertainty
    grid = _dtype_of_frequencies(f, uncertainty)
    fit = _best_fit(slices, f, uncertainty, may_be_float64=grid is None)
    if fit is not None:
        return _with_explanation(report, fit, f, uncertainty, grid)
    if grid is not None:
        findings.append(_dtype_finding(*grid))
        f = grid[1]
    rope = Rope(**slices[0], explicit_inv_freq=tuple(_pad(f, slices[0]).tolist()))
    return replace(report, rope=rope, findings=tuple(findings))


def _direction(spectrum: Spectrum) -> tuple[Literal[1, -1], Floats, list[Finding]]:
    """The sense that most pairs turn in, and frequencies from 0 to a full turn in that sense."""
    unsure = np.abs(spectrum.inv_freq) <= spectrum.uncertainty
    f = np.where(unsure, 0.0, spectrum.inv_freq)
    direction = 1 if np.sign(f).sum() >= 0 else -1
    f = direction * f
    against = np.flatnonzero(f < 0)
    findings: list[Finding] = []
    if len(against):
        more = f" and {len(against) - 1} more turn" if len(against) > 1 else " turns"
        says = (
            f"Pair {against[0]}{more} by more than half a turn per position, or against the "
            "others: whole positions cannot tell which."
        )
        findings.append(Finding("beyond-half-a-turn", says))
    if direction < 0:
        says = (
            "It turns clockwise: y0 = x0 cos + x1 sin. Scores against keys turned the usual way "
            "are wrong."
        )
        findings.append(Finding("sign-reversed", says))
    return direction, np.where(f < 0, f + 2 * np.pi, f), findings


def _offset(spectrum: Spectrum) -> tuple[float, list[Finding]]:
    """What is added to positions, from the angles at position 0."""
    f, phase = spectrum.inv_freq, spectrum.phase
    rooms = 16 * spectrum.phase_uncertainty
    if np.all(np.abs(phase) <= rooms):
        return 0.0, []
    room = float(rooms.max())
    # the slowest pair that moved enough to be read has made less than a turn
    sure = np.flatnonzero((np.abs(f) > 1e-12) & (np.abs(phase) > 64 * room * np.abs(f)))
    for k in sure[np.argsort(np.abs(f[sure]))]:
        offset = round(float(phase[k] / f[k]) * 2) / 2
        off = np.abs(np.exp(1j * offset * f) - np.exp(1j * phase))
        if offset and off.max() <= room + 1e-5 * abs(offset):
            says = (
                f"Positions are off by {offset:+g}: position 0 is turned as {offset:g}. "
                "Scores of distances are right, keys turned elsewhere are not."
            )
            return offset, [Finding("position-offset", says)]
    return 0.0, [Finding("constant-phase", "Position 0 is turned by a constant angle.")]


# Which slice and which layout of axes.


def _possible_slices(
    report: Identification, direction: int, drivers: Drivers, n_axes: int
) -> list[dict[str, Any]]:
    """Fields of a Rope, but for its frequencies, with every layout of axes that fits.

    Interleaved pairs that do not turn are not seen, so that the slice may be as wide as the head;
    where axes have a layout in the slice seen, that one is taken.
    """
    if report.pairing is None or report.pairing_out is None:
        return []
    fields: dict[str, Any] = {
        "head_dim": report.head_dim,
        "pairing": report.pairing,
        "pairing_out": report.pairing_out,
        "rotary_start": report.rotary_start,
        "direction": direction,
    }
    whole = (report.head_dim - report.rotary_start) // 2 * 2
    unseen = all(
        by_pairing(one, half=False, interleaved=True)
        for one in (report.pairing, report.pairing_out)
    )
    found: list[dict[str, Any]] = []
    for width in dict.fromkeys([report.rotary_dim, whole if unseen else report.rotary_dim]):
        if not found or n_axes == 1:
            more = ((),) * (width // 2 - len(drivers))
            found += [
                fields | {"rotary_dim": width, "axes": axes}
                for axes in _layouts((*drivers, *more), n_axes)
            ]
    return found


def _layouts(drivers: Drivers, n_axes: int) -> list[Axes]:
    """The layouts in which every pair that turns follows the axis it was seen to follow."""
    counts = [sum(axes == (axis,) for axes in drivers) for axis in range(n_axes)]
    found: list[Axes] = []
    for make in LAYOUTS.values():
        for more in _shares(len(drivers) - sum(counts), n_axes):
            sections = tuple(n + extra for n, extra in zip(counts, more, strict=True))
            try:
                layout = make(sections)
                follows = layout.axis_of_pair(len(drivers))
            except SpecError:
                continue
            # interleaved sections may name other counts than the pairs that they give each axis
            exact = all(follows.count(axis) == n for axis, n in enumerate(sections))
            as_seen = all(a in ((), (b,)) for a, b in zip(drivers, follows, strict=True))
            if layout.n_axes == n_axes and exact and as_seen and layout not in found:
                found.append(layout)
    return found


def _shares(count: int, n_axes: int) -> list[tuple[int, ...]]:
    """The ways to deal ``count`` pairs that do not turn, and so may belong to any axis."""
    if n_axes == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in _shares(count - n, n_axes - 1)]


# Which base and law.


def _best_fit(
    slices: list[dict[str, Any]], f: Floats, uncertainty: Floats, *, may_be_float64: bool
) -> Fit | None:
    """The slice, and the explanations of frequencies ``f`` in it, with the fewest digits.

    An explanation is as exact as the measurement. Only frequencies that may be float32 numbers may
    be off by what float32 loses, and where they certainly are, fewer digits are likelier.
    """

    def best(slack: float) -> Fit | None:
        fits = ((fields, _explanations(fields, f, uncertainty, slack)) for fields in slices)
        return min((fit for fit in fits if fit[1]), key=_digits, default=None)

    exact = best(_EXACT)
    near, _ = _nearest(f, "float32")
    if (exact and may_be_float64) or np.any(np.abs(near - f) > uncertainty):
        return exact
    loose = next(filter(None, map(best, _FLOAT32)), None)
    return min((fit for fit in (exact, loose) if fit), key=_digits, default=None)


def _digits(fit: Fit) -> int:
    return fit[1][0].digits


def _pad(values: Floats, fields: dict[str, Any]) -> Floats:
    """Values of the pairs seen, and 0 for the others that the slice has."""
    return np.pad(values, (0, fields["rotary_dim"] // 2 - len(values)))


def _explanations(
    fields: dict[str, Any], f: Floats, uncertainty: Floats, slack: float
) -> list[Explanation]:
    """What explains the frequencies in one slice with one layout of axes, the likeliest first."""
    f, uncertainty = _pad(f, fields), _pad(uncertainty, fields)
    room = uncertainty + slack * f
    # the widest spectrum is explained alone, and all are checked
    spectra = fields["axes"].spectra(len(f))
    widest = int(np.argmax(spectra))
    part = slice(sum(spectra[:widest]), sum(spectra[: widest + 1]))

    def check(base: float, law: Law | None) -> bool:
        rope = Rope(**fields, base=base, scaling=law)
        # the base was found from rounded logarithms
        return bool(np.all(np.abs(rope.inv_freq - f) <= room + _EXACT * f))

    return explanations(f[part], room[part], head_dim=fields["head_dim"], check=check)


def _with_explanation(
    report: Identification,
    fit: Fit,
    f: Floats,
    uncertainty: Floats,
    grid: tuple[str, Floats] | None,
) -> Identification:
    """The report with the base and law that explain the frequencies ``f`` of the pairs seen."""
    fields, (best, *others) = fit
    f, uncertainty = _pad(f, fields), _pad(uncertainty, fields)
    findings = report.findings
    if best.mistake is not None:
        findings = (*findings, best.mistake)
    if not best.gives_frequencies:
        rope = Rope(**fields, explicit_inv_freq=tuple(f.tolist()))
        return replace(report, base=best.base, rope=rope, findings=findings)
    law = _with_attention_factor(best.law, report.attention_factor or 1.0)
    rope = Rope(**fields, base=best.base, scaling=law)
    room = uncertainty + _EXACT * f
    if grid is not None and np.any(np.abs(rope.inv_freq - f) > room):
        rounded = replace(rope, inv_freq_dtype="float32")
        if np.all(np.abs(rounded.inv_freq - f) <= room):
            rope = rounded
        findings = (*findings, _dtype_finding(*grid))
    alternatives = [
        f"base {one.base:.15g}" + ("" if one.law is None else f" with {law_text(one.law)}")
        for one in others
        if (one.base, one.law) != (best.base, best.law)
    ]
    return replace(
        report, base=best.base, rope=rope, law=law, known_law=True,
        alternatives=tuple(alternatives[:4]), findings=findings,
    )  # fmt: skip


def _with_attention_factor(law: Law | None, gain: float) -> Law | None:
    """The law with the attention factor that was measured, where it has one to set."""
    if law is None or abs(law.temperature().attention_factor - gain) <= 1e-6:
        return law
    settable = "attention_factor" in {field.name for field in dataclasses.fields(law)}
    try:
        return replace(law, attention_factor=gain) if settable else law
    except SpecError:
        return law


# The dtype that frequencies are numbers of.


def _dtype_of_frequencies(f: Floats, uncertainty: Floats) -> tuple[str, Floats] | None:
    """A dtype of which all frequencies are numbers, by more than chance, and the numbers."""
    for dtype, (bits, _) in _DTYPES.items():
        near, unit = _nearest(f, dtype)
        # a number of few bits may be meant, as the powers of two are
        long = np.ldexp(np.frexp(near)[0], bits // 3) % 1 != 0
        evidence = -np.log2(np.clip(2 * uncertainty[long] / unit[long], 1e-300, 1)).sum()
        if evidence >= _CERTAIN_BITS and np.all(np.abs(near - f) <= uncertainty):
            return dtype, near
    return None


def _nearest(f: Floats, dtype: str) -> tuple[Floats, Floats]:
    """The nearest numbers of a dtype, and how far apart its numbers are there."""
    bits, least = _DTYPES[dtype]
    unit = np.ldexp(1.0, np.maximum(np.frexp(f)[1] - bits, least))
    return np.rint(f / unit) * unit, unit


def _dtype_finding(dtype: str, f: Floats) -> Finding:
    says = f"Frequencies are held in {dtype}: each is a {dtype} number"
    if dtype != "float32":
        indices, loose = np.arange(len(f), dtype=np.float64), 2.0 ** (1 - _DTYPES[dtype][0])
        base = log_base(f, np.full(len(f), loose), len(f), indices).exp().simplest()
        says += f", near the powers of base {base:.15g}" if base else ""
        says += ". A buffer of frequencies followed the model's cast, most likely"
    return Finding(f"frequencies-in-{dtype}", f"{says}.")
