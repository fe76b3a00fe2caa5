"""The digits that a rotation loses: in cosines and sines, at every step, in angles, by noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phasor.identification.mistakes import Probe
from phasor.identification.report import Finding, Identification, add_findings, make_finding
from phasor.identification.spectrum import (
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    coarsest_dtype,
    exact_phasors,
    round_to_dtype,
)
from phasor.identification.turns import Arrangement, pair_factors

#: Positions near which errors are measured.
PRECISION_POSITIONS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)
# every function is asked to turn these
_SMALL_POSITIONS = np.array([1, 2, 3, 5, 8])
# relative error of a float32 frequency, its product with a position, and the cosine of that
_FLOAT32_ROWS = 2.0**-20


def find_table_dtype(values: Floats, rounding: float, dtype: str) -> tuple[float, list[Finding]]:
    """The rounding of cosines and sines, and a finding if they are numbers of a coarser dtype."""
    # 0 and 1 are numbers of every dtype
    distinct = np.unique(np.abs(values[(values != 0) & (np.abs(values) != 1)]))
    name = coarsest_dtype(distinct, rounding) if len(distinct) >= 16 else None
    if name is None:
        return rounding, []
    error = ROUNDING[name]
    details = f": every value of the {dtype} result is, off by up to {error / 2:.1e}"
    return error, [make_finding("table-in-{dtype}", dtype=name, details=details)]


def measure_noise(arrangement: Arrangement, maps: Floats, rounding: float) -> float:
    """How far maps ``[..., out, in]`` are from turning each pair as one and keeping the rest."""
    # rounding, once or at every step, leaves a 0 and the equality of two cosines as they are
    first, second = pair_factors(arrangement.blocks(maps).reshape(-1, arrangement.num_pairs, 2, 2))
    others = maps * (1 - np.eye(arrangement.head_dim))
    others[..., arrangement.written.T[:, :, None], arrangement.read.T[:, None, :]] = 0
    noise = float(max(np.abs(first - second).max(), np.abs(others).max()))
    # what is far larger than rounding is a mistake
    return noise if noise <= 32 * rounding * np.abs(maps).max() else 0.0


def add_steps(report: Identification, spectrum: Spectrum, probe: Probe) -> Identification:
    """The report with a finding unless one rounding, at the end, explains turned random vectors."""
    gain, names = report.attention_factor, report.names()
    if report.rope is None or not gain or names & {"noise", "remembers"}:
        return report
    x = np.random.default_rng(2).standard_normal((8, report.head_dim))
    x = round_to_dtype(x, probe.caller.arrays.dtype)[0]
    y = probe.caller.turn(x, _SMALL_POSITIONS)[0]  # [P, m, d]
    turned = np.stack([y[..., member] for member in probe.arrangement.written])  # [2, P, m, pairs]
    x0, x1 = (x[:, member] for member in probe.arrangement.read)
    places = _SMALL_POSITIONS[:, None] + report.position_offset
    rows: Complex = np.exp(1j * places * spectrum.inv_freq)[:, None]  # [P, 1, pairs]
    products: Complex = rows * (x0 + 1j * x1)
    exact = np.stack((products.real, products.imag))
    has_factor, gain = gain != 1, float((turned * exact).sum() / (exact**2).sum())
    # what each of the two members of a vector is multiplied by, for each that is written
    factors, sizes = np.abs([[rows.real, rows.imag], [rows.imag, rows.real]]), np.abs([x0, x1])
    dtype, row_dtype = (
        next(name for name, error in ROUNDING.items() if error >= rounding)
        for rounding in (probe.caller.rounding, probe.rounding)
    )

    def half_unit(values: Floats, dtype: str = dtype) -> Floats:
        return round_to_dtype(values, dtype)[1] / 2

    # bounds are half units of what is rounded: of the result; at every step, also of cos and sin,
    # of these times the factor, and of their products with the vector
    in_rows = gain * half_unit(factors, row_dtype) + has_factor * half_unit(gain * factors)
    in_products = half_unit(sizes[:, None] * (gain * factors + in_rows)).sum(axis=1)
    in_rows = (sizes[:, None] * in_rows).sum(axis=1)
    angle_errors = np.abs(places) * (spectrum.uncertainty + _FLOAT32_ROWS * abs(spectrum.inv_freq))
    once = gain * (angle_errors + _FLOAT32_ROWS)[:, None] * sizes.sum(axis=0) + probe.noise
    once = once + half_unit(turned) + (in_rows if row_dtype != dtype else 0)

    def explain(bounds: Floats) -> bool:
        """Whether there is a factor with which all numbers are within their bounds."""
        whole = np.where(exact == 0, 1e-300, exact)
        ratios, widths = turned / whole, bounds / np.abs(whole)
        return bool((ratios - widths).max() <= (ratios + widths).min())

    stepwise = once + in_rows + in_products
    is_coarse = ROUNDING[dtype] > ROUNDING["float32"]
    if explain(once if is_coarse else stepwise):
        return report
    errors = np.abs(turned - gain * exact)
    worst = np.unravel_index(np.argmax(errors - once), errors.shape)
    name = "steps-in-{dtype}" if explain(stepwise) else "noise"
    steps = "Cos and sin, perhaps all steps, are" if explain(once + in_rows) else "All steps are"
    measured = {"steps": steps, "error": errors[worst], "once": once[worst]}
    return add_findings(report, make_finding(name, dtype=dtype, **measured))


def add_precision(
    report: Identification, spectrum: Spectrum, probe: Probe, end: int
) -> Identification:
    """The report with errors at growing positions below ``end``, and whether angles are float32."""
    if report.rope is None or not report.attention_factor:
        return report
    errors: list[tuple[int, float]] = []
    has_drift, within_float32 = spectrum.has_float32_angles, True
    for near in PRECISION_POSITIONS:
        if near + 12 >= end:
            break
        # frequencies are measured at powers of two, where rounding an angle changes nothing
        positions = near - np.array([1, 2, 5, 9, 11])
        z = probe(positions) / report.attention_factor
        exact = exact_phasors(report.rope, positions, report.position_offset)[:, : z.shape[1]]
        errors.append((near, float(np.abs(z - exact).max())))
        drift = np.abs(np.angle(z * np.conj(spectrum.predict(positions.astype(np.float64)))))
        angles = positions[:, None] * np.abs(spectrum.inv_freq)
        uncertainty = positions[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        tolerance = 2 * (uncertainty + probe.angle_errors(z) + 2.0**-51 * angles)
        has_drift |= bool(np.any(drift > tolerance))
        within_float32 &= bool(np.all(drift <= tolerance + 2.0**-20 * angles))
    report = replace(report, precision=tuple(errors))
    rounded = any(name.startswith("positions-in") for name in report.names())
    if not (has_drift and within_float32) or rounded:
        return report
    near, error = errors[-1]
    # the frequency of an angle that is a float32 number seems to be one
    findings = [finding for finding in report.findings if finding.name != "frequencies-in-float32"]
    findings.append(make_finding("angles-in-float32", error=error, near=near))
    return replace(report, findings=tuple(findings))
