"""From what was measured to a `Rope`: direction, offset, axes, dtype of frequencies, base, law."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phasor.axes import Alternating, Axes, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.errors import SpecError
from phasor.identification.blocks import Arrangement
from phasor.identification.laws import Explanation, explanations, law_text
from phasor.identification.report import Finding, Identification, PairFound, make_finding
from phasor.identification.spectrum import (
    DTYPES,
    ROUNDING,
    Floats,
    Spectrum,
    around,
    log_base,
    nearest,
)
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
# a Rope but for base and scaling, and what explains its frequencies
Fit = tuple[Rope, list[Explanation]]
#: Whether an axis turns a pair, ``[n_axes, pairs]``.
Drivers = NDArray[np.bool_]
# how far float64 arithmetic may take a program's frequencies from the exact ones, relatively
_EXACT = 1e-14
# the same for float32: one rounding; a power with its roundings; a power by way of logarithms
_FLOAT32 = (2.0**-24, 2e-7, 1e-6)
# frequencies are said to be numbers of a dtype if chance makes them so once in 2 to this
_CERTAIN_BITS = 24


def explain(
    arrangement: Arrangement,
    spectrum: Spectrum,
    drivers: Drivers,
    sizes: Floats,
    *,
    rounding: float,
    is_rotation: bool = True,
) -> Identification:
    """The report about the rotation: its pairs and factor, and the Rope that does the same.

    Args:
        arrangement: Where pairs are.
        spectrum: How fast they turn, with equal coordinates on all axes.
        drivers: Which axes turn which pair; none where it was not seen to turn.
        sizes: The lengths of turned unit vectors, ``[P, pairs]``.
        rounding: Relative rounding error of what was measured.
        is_rotation: Whether both members of every pair turn alike.
    """
    middle = float(np.median(sizes))
    one_gain = is_rotation and float(np.ptp(sizes)) <= 16 * rounding * max(middle, 1)
    gain = around(middle, 4 * rounding + 1e-12).simplest() or 0.0
    axis = np.where(drivers.any(axis=0), drivers.argmax(axis=0), -1).tolist()
    report = Identification(
        head_dim=arrangement.head_dim,
        called=None,
        linear=True,
        is_rotation=one_gain,
        keeps_norms=one_gain and gain == 1,
        attention_factor=gain if one_gain else None,
        pairing=arrangement.pairing,
        pairing_out=arrangement.pairing_out,
        rotary_start=arrangement.rotary_start,
        rotary_dim=arrangement.rotary_dim,
        pairs=tuple(
            PairFound(
                read=(read[0], read[1]),
                written=(written[0], written[1]),
                inv_freq=float(spectrum.inv_freq[k]),
                uncertainty=float(spectrum.uncertainty[k]),
                axis=None if axis[k] < 0 else axis[k],
            )
            for k, (read, written) in enumerate(
                zip(arrangement.read.T.tolist(), arrangement.written.T.tolist(), strict=True)
            )
        ),
    )
    if not is_rotation:
        return replace(report, why_no_rope="the two members of a pair do not turn together")
    if one_gain:
        return _explain_rotation(report, spectrum, drivers)
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
    report: Identification, spectrum: Spectrum, drivers: Drivers
) -> Identification:
    direction, f, turning = _direction(spectrum)
    offset, shifts = _offset(spectrum)
    findings = [*shifts, *turning]
    slices = _possible_slices(report, direction, drivers)
    why = None
    if report.pairing is None:
        why = "its pairs are neither halves nor interleaved; their coordinates are in pairs"
    elif np.any(drivers.sum(axis=0) > 1):
        why = "a pair turns with more than one axis"
    elif any(one.name == "constant-phase" for one in shifts):
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
    return replace(report, rope=_with_frequencies(slices[0], f), findings=tuple(findings))


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
        findings.append(make_finding("beyond-half-a-turn", pairs=f"{against[0]}{more}"))
    if direction < 0:
        findings.append(make_finding("sign-reversed"))
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
            return offset, [make_finding("position-offset", offset=offset)]
    return 0.0, [make_finding("constant-phase")]


# Which slice and which layout of axes.


def _possible_slices(
    report: Identification, direction: Literal[1, -1], drivers: Drivers
) -> list[Rope]:
    """Ropes, but for their frequencies, with every layout of axes that fits.

    Interleaved pairs that do not turn are not seen, so that the slice may be as wide as the head;
    where axes have a layout in the slice seen, that one is taken.
    """
    pairing, pairing_out, start = report.pairing, report.pairing_out, report.rotary_start
    if pairing is None or pairing_out is None:
        return []
    n_axes, seen = drivers.shape
    widths = [report.rotary_dim]
    if all(by_pairing(one, half=False, interleaved=True) for one in (pairing, pairing_out)):
        widths.append((report.head_dim - start) // 2 * 2)
    found: list[Rope] = []
    for width in dict.fromkeys(widths):
        if not found or n_axes == 1:
            found += [
                Rope(
                    head_dim=report.head_dim, pairing=pairing, pairing_out=pairing_out,
                    rotary_start=start, rotary_dim=width, direction=direction, axes=axes,
                )
                for axes in _layouts(np.pad(drivers, ((0, 0), (0, width // 2 - seen))))
            ]  # fmt: skip
    return found


def _layouts(drivers: Drivers) -> list[Axes]:
    """The layouts in which every pair that turns follows the axis it was seen to follow."""
    n_axes, pairs = drivers.shape
    counts, unseen = drivers.sum(axis=1).tolist(), ~drivers.any(axis=0)
    found: list[Axes] = []
    for make in LAYOUTS.values():
        for more in _shares(int(unseen.sum()), n_axes):
            sections = tuple(n + extra for n, extra in zip(counts, more, strict=True))
            try:
                layout = make(sections)
                follows = layout.axis_of_pair(pairs)
            except SpecError:
                continue
            # interleaved sections may name other counts than the pairs that they give each axis
            exact = layout.n_axes == n_axes and sections == tuple(map(follows.count, range(n_axes)))
            if exact and np.all(unseen | drivers[follows, range(pairs)]) and layout not in found:
                found.append(layout)
    return found


def _shares(count: int, n_axes: int) -> list[tuple[int, ...]]:
    """The ways to deal ``count`` pairs that do not turn, and so may belong to any axis."""
    if n_axes == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in _shares(count - n, n_axes - 1)]


# Which base and law.


def _best_fit(
    slices: list[Rope], f: Floats, uncertainty: Floats, *, may_be_float64: bool
) -> Fit | None:
    """The slice, and the explanations of frequencies ``f`` in it, with the fewest digits.

    An explanation is as exact as the measurement. Only frequencies that may be float32 numbers may
    be off by what float32 loses, and where they certainly are, fewer digits are likelier.
    """

    def likeliest(fits: Iterable[Fit | None]) -> Fit | None:
        return min((fit for fit in fits if fit), key=lambda fit: fit[1][0].digits, default=None)

    def best(slack: float) -> Fit | None:
        fits = ((rope, _explanations(rope, f, uncertainty, slack)) for rope in slices)
        return likeliest(fit for fit in fits if fit[1])

    exact = best(_EXACT)
    if (exact and may_be_float64) or np.any(np.abs(nearest(f, "float32")[0] - f) > uncertainty):
        return exact
    return likeliest([exact, next(filter(None, map(best, _FLOAT32)), None)])


def _pad(values: Floats, rope: Rope) -> Floats:
    """Values of the pairs seen, and 0 for the others that the slice has."""
    return np.pad(values, (0, rope.num_pairs - len(values)))


def _with_frequencies(rope: Rope, f: Floats) -> Rope:
    return replace(rope, base=None, explicit_inv_freq=tuple(_pad(f, rope).tolist()))


def _explanations(rope: Rope, f: Floats, uncertainty: Floats, slack: float) -> list[Explanation]:
    """What explains the frequencies in one slice with one layout of axes, the likeliest first."""
    f, uncertainty = _pad(f, rope), _pad(uncertainty, rope)
    room = uncertainty + slack * f
    # the widest spectrum is explained alone, and all are checked
    spectra = rope.axes.spectra(len(f))
    widest = int(np.argmax(spectra))
    part = slice(sum(spectra[:widest]), sum(spectra[: widest + 1]))

    def check(base: float, law: Law | None) -> bool:
        lawful = replace(rope, base=base, scaling=law)
        # the base was found from rounded logarithms
        return bool(np.all(np.abs(lawful.inv_freq - f) <= room + _EXACT * f))

    return explanations(f[part], room[part], head_dim=rope.head_dim, check=check)


def _with_explanation(
    report: Identification,
    fit: Fit,
    f: Floats,
    uncertainty: Floats,
    grid: tuple[str, Floats] | None,
) -> Identification:
    """The report with the base and law that explain the frequencies ``f`` of the pairs seen."""
    rope, (best, *others) = fit
    findings = report.findings
    if best.mistake is not None:
        findings = (*findings, best.mistake)
    if not best.gives_frequencies:
        rope = _with_frequencies(rope, f)
        return replace(report, base=best.base, rope=rope, findings=findings)
    law, gain = best.law, report.attention_factor or 1.0
    settable = law is not None and "attention_factor" in {one.name for one in fields(law)}
    if law is not None and settable and abs(law.temperature().attention_factor - gain) > 1e-6:
        law = replace(law, attention_factor=gain)
    rope = replace(rope, base=best.base, scaling=law)
    f, room = _pad(f, rope), _pad(uncertainty + _EXACT * f, rope)
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


# The dtype that frequencies are numbers of.


def _dtype_of_frequencies(f: Floats, uncertainty: Floats) -> tuple[str, Floats] | None:
    """A dtype of which all frequencies are numbers, by more than chance, and the numbers."""
    for dtype in ("bfloat16", "float16", "float32"):
        near, unit = nearest(f, dtype)
        # a number of few bits may be meant, as the powers of two are
        long = np.ldexp(np.frexp(near)[0], DTYPES[dtype][0] // 3) % 1 != 0
        evidence = -np.log2(np.clip(2 * uncertainty[long] / unit[long], 1e-300, 1)).sum()
        if evidence >= _CERTAIN_BITS and np.all(np.abs(near - f) <= uncertainty):
            return dtype, near
    return None


def _dtype_finding(dtype: str, f: Floats) -> Finding:
    more = ""
    if dtype != "float32":
        indices, loose = np.arange(len(f), dtype=np.float64), 2 * ROUNDING[dtype]
        base = log_base(f, np.full(len(f), loose), len(f), indices).exp().simplest()
        more = f", near the powers of base {base:.15g}" if base else ""
        more += ". A buffer of frequencies followed the model's cast, most likely"
    return make_finding("frequencies-in-{dtype}", dtype=dtype, more=more)
