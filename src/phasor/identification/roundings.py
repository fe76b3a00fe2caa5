"""The fourth question of identification: which roundings lose digits of the angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from phasor.angles import axes_of, pair_coordinates
from phasor.axes import Mixed
from phasor.identification.hypotheses import Hypothesis, suppose
from phasor.identification.probes import Measured
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.spectrum import (
    DTYPES,
    ROUNDING,
    Complex,
    Floats,
    coarsest_dtype,
    log_base,
    rounded,
    unit_of,
)
from phasor.identification.turns import ANGLE_ERROR, Turns
from phasor.numpy import phasors

#: The dtypes to which programs round positions and frequencies by mistake.
COARSE = ("bfloat16", "float16")


_FLOAT32_SIDES = (1 - ANGLE_ERROR, 1 + ANGLE_ERROR)


def precisions(hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
    """The hypothesis with positions, frequencies or angles rounded, or all of them."""
    changes, rope, places, _ = hypothesis
    factor = turns.factor(rope)
    for dtype in COARSE:
        yield suppose(rope, rounded(places, dtype), *changes, positions_in(dtype))
        if isinstance(rope.axes, Mixed):
            continue  # a pair has several frequencies
        f = rounded(rope.inv_freq, dtype)
        coordinates = pair_coordinates(places, axes_of(rope))  # [T, 1 or num_pairs]
        every_step = rounded(rounded(coordinates, dtype) * f, dtype)
        # float32 angles next to a tie may be rounded to either side of it
        sides = (rounded(coordinates * rope.inv_freq * slack, dtype) for slack in _FLOAT32_SIDES)
        steps = "Positions, frequencies and angles"
        ways = (
            (make_finding("frequencies-in-{dtype}", dtype=dtype, details=""), [coordinates * f]),
            (make_finding("angles-in-{dtype}", dtype=dtype, what=steps), [every_step]),
            (make_finding("angles-in-{dtype}", dtype=dtype, what="Angles"), [*sides]),
        )
        for finding, angles in ways:
            rows = np.exp(1j * rope.direction * np.array(angles))
            closest = np.abs(factor * rows - turns.z).argmin(axis=0)[None]
            closest_rows = np.take_along_axis(rows, closest, 0)[0]
            yield Hypothesis((*changes, finding), rope, places, closest_rows)


def find_float32(turns: Turns, hypothesis: Hypothesis) -> Changes:
    """Whether turns that a hypothesis explains also show float32 angles or frequencies."""
    factor = turns.factor(hypothesis.rope)
    allowed = turns.allowed(
        hypothesis.rope, 0 * hypothesis.places
    )  # rounded angles are further off

    def distances(rows: Complex) -> Floats:
        return np.abs(turns.z - factor * rows)

    errors = distances(hypothesis.rows)
    if np.all(errors <= allowed):
        return ()
    token = int((errors - allowed).max(axis=1).argmax())
    if not isinstance(hypothesis.rope.axes, Mixed):
        in_float32 = replace(hypothesis.rope, inv_freq_dtype="float32")
        if np.all(distances(suppose(in_float32, hypothesis.places).rows) <= allowed):
            return (make_finding("frequencies-in-{dtype}", dtype="float32", details=""),)
    position = float(np.abs(hypothesis.places[token]).max())
    error = float(errors[token].max()) / factor
    return (make_finding("angles-in-float32", error=error, near=f"{position:.15g}"),)


def positions_in(dtype: str, where: str = "") -> Finding:
    """The change that rounds positions."""
    return make_finding("positions-in-{dtype}", dtype=dtype, where=where)


#: Positions near which errors are measured.
PRECISION_POSITIONS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)


ANGLES_ROUNDED = {f"angles-in-{dtype}" for dtype in COARSE}


# every function is called with these
SMALL_POSITIONS = np.array([1, 2, 3, 5, 8])


# relative error of a float32 frequency, of its product with a position, and of that cosine
_FLOAT32_ROWS = 2.0**-20


def find_table_dtype(values: Floats, rounding: float, dtype: str) -> tuple[float, list[Finding]]:
    """The rounding of cosines and sines, and a finding if all fit a coarser dtype."""
    # 0 and 1 are numbers of every dtype
    distinct = np.unique(np.abs(values[(values != 0) & (np.abs(values) != 1)]))
    name = coarsest_dtype(distinct, rounding) if len(distinct) >= 16 else None
    if name is None:
        return rounding, []
    error = ROUNDING[name]
    details = f": every value of the {dtype} result is, off by up to {error / 2:.1e}"
    return error, [make_finding("table-in-{dtype}", dtype=name, details=details)]


def add_steps(measured: Measured) -> None:
    """Add a finding unless a single rounding at the end explains turned random vectors."""
    probe, spectrum, report = measured.probe, measured.spectrum, measured.report
    gain, names = report.attention_factor, report.names()
    if report.rope is None or not gain or names & {"noise", "remembers", *ANGLES_ROUNDED}:
        return
    x = np.random.default_rng(2).standard_normal((8, report.head_dim))
    x = rounded(x, probe.caller.arrays.dtype)
    positions = measured.start + SMALL_POSITIONS
    y = probe.caller.turn(x, positions)[0]  # [P, m, d]
    results = np.stack([y[..., member] for member in probe.arrangement.written])  # [2, P, m, pairs]
    x0, x1 = (x[:, member] for member in probe.arrangement.read)
    places = positions[:, None] + report.position_offset
    rows: Complex = np.exp(1j * places * spectrum.inv_freq)[:, None]  # [P, 1, pairs]
    products: Complex = rows * (x0 + 1j * x1)
    exact = np.stack((products.real, products.imag))
    has_factor, gain = gain != 1, float((results * exact).sum() / (exact**2).sum())
    # the factors on the two members of a pair, for each member of the result
    factors, sizes = np.abs([[rows.real, rows.imag], [rows.imag, rows.real]]), np.abs([x0, x1])
    dtype, row_dtype = (
        next(name for name, error in ROUNDING.items() if error >= rounding)
        for rounding in (probe.caller.rounding, probe.rounding)
    )

    def half_unit(values: Floats, dtype: str = dtype) -> Floats:
        return unit_of(values, dtype) / 2

    # bounds are half units of the rounded values: of the result; if every step rounds, also of cos
    # and sin, of cos and sin times the factor, and of their products with the vector
    in_rows = gain * half_unit(factors, row_dtype) + has_factor * half_unit(gain * factors)
    in_products = half_unit(sizes[:, None] * (gain * factors + in_rows)).sum(axis=1)
    in_rows = (sizes[:, None] * in_rows).sum(axis=1)
    angle_errors = np.abs(places) * (spectrum.uncertainty + _FLOAT32_ROWS * abs(spectrum.inv_freq))
    once = gain * (angle_errors + _FLOAT32_ROWS)[:, None] * sizes.sum(axis=0) + probe.noise
    once = once + half_unit(results) + (in_rows if row_dtype != dtype else 0)

    def explain(bounds: Floats) -> bool:
        """Whether some factor brings all numbers within their bounds."""
        whole = np.where(exact == 0, 1e-300, exact)
        ratios, widths = results / whole, bounds / np.abs(whole)
        return bool((ratios - widths).max() <= (ratios + widths).min())

    stepwise = once + in_rows + in_products
    is_coarse = ROUNDING[dtype] > ROUNDING["float32"]
    if explain(once if is_coarse else stepwise):
        return
    errors = np.abs(results - gain * exact)
    worst = np.unravel_index(np.argmax(errors - once), errors.shape)
    name = "steps-in-{dtype}" if explain(stepwise) else "noise"
    steps = "Cos and sin, perhaps all steps, are" if explain(once + in_rows) else "All steps are"
    numbers = {"error": errors[worst], "once": once[worst]}
    measured.add(make_finding(name, dtype=dtype, steps=steps, **numbers))


def add_precision(measured: Measured) -> None:
    """Add errors at growing positions, and whether angles are float32."""
    probe, spectrum, report = measured.probe, measured.spectrum, measured.report
    if report.rope is None or not report.attention_factor:
        return
    errors: list[tuple[int, float]] = []
    has_drift, within_float32 = spectrum.has_float32_angles, True
    for top in PRECISION_POSITIONS:
        if top + 12 >= measured.end:
            break
        # frequencies are measured at powers of two, where rounding an angle changes nothing
        positions = top - np.array([1, 2, 5, 9, 11])
        z = probe(positions) / report.attention_factor
        exact = phasors(report.rope, positions + report.position_offset)[:, : z.shape[1]]
        errors.append((top, float(np.abs(z - exact).max())))
        drift = np.abs(np.angle(z * np.conj(spectrum.predict(positions.astype(np.float64)))))
        angles = positions[:, None] * np.abs(spectrum.inv_freq)
        uncertainty = positions[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        tolerance = 2 * (uncertainty + probe.angle_errors(z) + 2.0**-51 * angles)
        has_drift |= bool(np.any(drift > tolerance))
        within_float32 &= bool(np.all(drift <= tolerance + 2.0**-20 * angles))
    findings = report.findings
    has_rounded = any(name.startswith("positions-in") for name in report.names())
    top, error = errors[-1] if errors else (0, 0.0)
    # cos and sin of an exact angle may have such errors, the same at every position
    has_drift &= error > _FLOAT32_ROWS
    if has_drift and within_float32 and not has_rounded:
        # the frequency looks like a float32 number because the angle is one
        remaining = (finding for finding in findings if finding.name != "frequencies-in-float32")
        findings = *remaining, make_finding("angles-in-float32", error=error, near=top)
    measured.add(precision=tuple(errors), findings=findings)


# frequencies are reported as rounded if chance explains them only once in 2 to this power
_CERTAIN_BITS = 24


def find_near_base(f: Floats, dtype: str) -> float | None:
    """The base whose powers may be these frequencies, when they are rounded to the dtype."""
    errors, indices = np.full(len(f), 2 * ROUNDING[dtype]), np.arange(len(f), dtype=np.float64)
    # one frequency is a power of any base
    return log_base(f, errors, len(f), indices).exp().simplest() if len(f) > 1 else None


def find_frequency_dtype(f: Floats, uncertainty: Floats) -> tuple[Floats | None, list[Finding]]:
    """The frequencies as numbers of a coarser dtype, if that is not chance, and the finding."""
    for dtype in ("bfloat16", "float16", "float32"):
        numbers = rounded(f, dtype)
        # every dtype has numbers of few bits, such as powers of two
        telling = np.ldexp(np.frexp(numbers)[0], DTYPES[dtype][0] // 3) % 1 != 0
        chances = 2 * uncertainty[telling] / unit_of(f[telling], dtype)
        evidence = -np.log2(np.clip(chances, 1e-300, 1)).sum()
        if evidence < _CERTAIN_BITS or np.any(np.abs(numbers - f) > uncertainty):
            continue
        details = ""
        if dtype != "float32":
            base = find_near_base(numbers, dtype)
            details = f", near the powers of base {base:.15g}" if base else ""
            details += ". A buffer of frequencies followed the model's cast, most likely"
        return numbers, [make_finding("frequencies-in-{dtype}", dtype=dtype, details=details)]
    return None, []
