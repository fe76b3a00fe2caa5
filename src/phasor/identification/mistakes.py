"""Mistakes of a rotation, and the positions from which it is none.

Mistakes in the map itself: members of a pair, queries and keys. Then those at a table's end, at
rounded or negative positions, and at another length of the call, with the rule that picks its
frequencies there. At last the digits that it loses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from phasor.identification.calling import Caller, RefusedError
from phasor.identification.hypotheses import COARSE
from phasor.identification.report import Finding, Identification, add_findings, make_finding
from phasor.identification.spectrum import (
    DTYPES,
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    bound_angle_errors,
    coarsest_dtype,
    find_first_bad,
    find_spectrum,
    interval_around,
    powers_of_two,
    rounded,
    simplest_near,
    unit_of,
)
from phasor.identification.turns import Arrangement
from phasor.numpy import phasors
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, Rule

# LongRoPE divides the powers of a base; if no base was measured, there are divisors for any base
_ANY_BASE = 10_000.0
# relative error of float32 frequencies that were computed by way of logarithms
_FLOAT32_ERROR = 1e-6
#: Positions near which errors are measured.
PRECISION_POSITIONS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)
ANGLES_ROUNDED = {f"angles-in-{dtype}" for dtype in COARSE}
# every function is asked to turn these
_SMALL_POSITIONS = np.array([1, 2, 3, 5, 8])
# relative error of a float32 frequency, its product with a position, and the cosine of that
_FLOAT32_ROWS = 2.0**-20


@dataclass(frozen=True)
class Probe:
    """Measures how far every pair turns, with one vector per position."""

    caller: Caller
    arrangement: Arrangement
    rounding: float  # relative rounding error of the results
    noise: float = 0.0  # how far they are off for other reasons than rounding

    def __call__(self, positions: Sequence[Any] | NDArray[Any]) -> Complex:
        """At positions ``[P]``, equal on all axes, or ``[P, n_axes]``: ``[P, pairs]``."""
        vector = np.zeros((1, self.caller.head_dim))
        vector[0, self.arrangement.read[0]] = 1
        turned = self.caller.turn(vector, positions)[0, :, 0]  # [P, head_dim]
        # [P, pairs, 2] is a complex array; a product would warn of infinities
        return np.ascontiguousarray(turned[:, self.arrangement.written.T]).view(complex)[..., 0]

    def angle_errors(self, z: Complex) -> Floats:
        """How far angles of such results may be off."""
        return bound_angle_errors(z, self.rounding, self.noise)

    def differ(self, a: Complex, b: Complex) -> bool:
        """Whether two results differ by more than rounding explains."""
        size = float(np.max(np.abs(b), where=np.isfinite(b), initial=1.0))
        return not np.allclose(a, b, rtol=0, atol=16 * self.rounding * size, equal_nan=True)


# Mistakes in the map itself.


def compare_members(probe: Probe, factors: Complex) -> list[Finding]:
    """The mistake, if the two members of a pair do not turn by the same angle."""
    # ``factors`` are at small positions with equal coordinates, and then at others
    arrangement, tolerance = probe.arrangement, 32 * probe.rounding
    size = np.maximum(np.maximum(np.abs(factors.real), np.abs(factors.imag)).max(axis=0), 1e-30)
    skew = (np.abs(factors[0] - factors[1]) / size).max(axis=0)  # [2, P, pairs] to [pairs]
    if not (skew > tolerance).any():
        return []

    def are_equal(a: Complex, b: Complex) -> bool:
        return bool(a.shape == b.shape and np.abs(a - b).max() <= tolerance * np.abs(a).max())

    pairs = arrangement.num_pairs
    if arrangement.is_named:
        # what each coordinate is multiplied by, which a row of cos and sin holds: [P, rotary_dim]
        rows = np.empty((factors.shape[1], 2 * pairs), dtype=np.complex128)
        rows[:, arrangement.written - arrangement.layout.rotary_start] = factors.swapaxes(0, 1)
        # if rows for the other pairing were used, its pairs have equal multipliers
        name, *members = by_pairing(
            arrangement.layout.pairing,
            half=("interleaved-rows-on-halves", rows[:, ::2], rows[:, 1::2]),
            interleaved=("half-rows-on-interleaved", rows[:, :pairs], rows[:, pairs:]),
        )
        if are_equal(*members):
            return [make_finding(name)]
    worst = int(np.argmax(skew))
    coordinates = tuple(arrangement.read[:, worst].tolist())
    # of a reflection the second row is minus the first
    sums = factors.sum(axis=0)
    reflected = ((np.abs(sums.real) + np.abs(sums.imag)) / size).max(axis=0) < 1e-3
    if reflected[worst]:
        which, count = f"Coordinates {coordinates} are", int(reflected.sum())
        if count > 1:
            which = f"{count} of {pairs} pairs, such as coordinates {coordinates}, are"
        return [make_finding("reflection", which=which)]
    count, names = int((skew > tolerance).sum()), ("members-differ", "members-on-different-axes")
    follow_axes = probe.caller.n_axes > 1 and are_equal(factors[0, :6], factors[1, :6])
    return [make_finding(names[follow_axes], count=count, coordinates=coordinates)]


def compare_queries_and_keys(probe: Probe, maps: Floats) -> tuple[float | None, list[Finding]]:
    """The factor on keys if it differs, and a finding if keys are not turned as queries are."""
    # the second of the maps [outputs, P, out, in] is that of the keys
    tolerance = 32 * probe.rounding
    if len(maps) < 2 or np.abs(maps[0] - maps[1]).max() <= tolerance * max(1.0, np.abs(maps).max()):
        return None, []
    q, k = (probe.arrangement.factors(side).mean(axis=0) for side in maps[:2])
    queries, keys = (float(np.median(np.abs(z))) for z in (q, k))
    ratio = keys / queries
    if np.abs(k - ratio * q).max() <= tolerance * max(1.0, ratio):
        return keys, [make_finding("factor-on-one-side", queries=queries, keys=keys)]
    if np.abs(k - np.conj(q)).max() <= tolerance:
        return None, [make_finding("keys-turn-backwards")]
    worst = int(np.argmax(np.abs(q - k).max(axis=0)))
    return None, [make_finding("queries-and-keys-differ", pair=worst)]


# Mistakes at a table's end, at rounded and at negative positions.

# the name of a finding, empty if it is none, and what happens
_Said = tuple[str, str]
_Source = TypeVar("_Source")


@dataclass
class Measured:
    """A rotation whose frequencies are known, and the report about it, which grows."""

    probe: Probe
    spectrum: Spectrum
    report: Identification
    refusal: str = ""  # the last one

    def add(self, *findings: Finding, **changed_fields: Any) -> None:
        """Add findings to the report, and change other fields."""
        self.report = add_findings(self.report, *findings, **changed_fields)

    def results(self, *positions: int, in_one_call: bool = False) -> dict[int, Complex]:
        """The function's results divided by the factor, at positions that it does not refuse."""
        results: dict[int, Complex] = {}
        for call in [positions] if in_one_call else [(position,) for position in positions]:
            try:
                z = self.probe(call) / (self.report.attention_factor or 1.0)
                results.update(zip(call, z, strict=True))
            except RefusedError as error:
                self.refusal = " ".join(str(error).split())[:80]
        return results

    def find_source(
        self, results: Mapping[int, Complex], sources: Mapping[_Source, Callable[[int], Any]]
    ) -> _Source | None:
        """The first source as whose positions all of them were turned."""
        # float32 angles and positions lose 2**-22 of the angle, which is no table's end
        relative = 3 * self.spectrum.uncertainty + 2.0**-21 * np.abs(self.spectrum.inv_freq)
        for name, source in sources.items() if results else ():
            places = np.array([float(source(position)) for position in results])
            errors = np.abs(np.array([*results.values()]) - self.spectrum.predict(places))
            angles_off = (np.abs(places) + abs(self.report.position_offset))[:, None] * relative
            if np.all(errors <= np.minimum(64 * self.probe.rounding + angles_off, 0.5)):
                return name
        return None


def add_limits(measured: Measured, max_position: int) -> None:
    """Add a table's end, rounded positions, and the results of negative positions."""
    first_rounded: dict[str, int] = {}
    near = (p + step for p in powers_of_two(max_position)[3:] for step in (-1, 1))
    positions = [p for p in near if p <= max_position]
    # most functions turn all in one call; a position that comes out otherwise is asked alone
    together = measured.results(*positions, in_one_call=True)

    def dtype_of(position: int) -> str | None:
        """The dtype to which the position was rounded: float64, one found before, or the finest."""
        dtypes = ("float64", *first_rounded, *DTYPES)
        sources = {name: partial(rounded, dtype=name) for name in dtypes}
        known = {position: together[position]} if position in together else {}
        dtype = measured.find_source(known, sources)
        return dtype or measured.find_source(measured.results(position), sources)

    last_good, end = 0, None
    for position in positions:
        dtype = dtype_of(position)
        if dtype is None:
            end = find_first_bad(last_good, position, lambda p: dtype_of(p) is not None)
            break
        first_rounded.setdefault(dtype, position)
        last_good = position
    if end is not None:
        name, beyond = _describe_table_end(measured, end)
        sentence = f"Up to position {end - 1} it turns; from {end} on {beyond}."
        measured.add(Finding(name, sentence), table_end=end, beyond=beyond)
    first_rounded.pop("float64", None)
    for dtype, position in first_rounded.items():
        where = f": {position} is turned as if it were {int(rounded(position, dtype))}"
        measured.add(make_finding("positions-in-{dtype}", dtype=dtype, where=where))
    name, negative = _describe_negative_positions(measured, end)
    said = [Finding(name, f"A negative position {negative}.")] if name else []
    measured.add(*said, negative=negative)


def _describe_table_end(measured: Measured, end: int) -> _Said:
    if not measured.results(end):
        return "table-end-raises", f"it raises ({measured.refusal})"
    results = measured.results(end, end + 1, end + 2, 2 * end + 3)
    values = np.array(list(results.values()))
    if not np.isfinite(values).all():
        return "table-end-nan", "it gives NaN"
    if not values.any():
        return "table-end-zeros", "it gives zeros"
    if np.abs(values - 1).max() < 1e-3:
        return "table-end-identity", "it does not turn at all (identity)"
    sources: dict[_Said, Callable[[int], int]] = {
        ("clamped", f"every position is turned as {end - 1} (clamped)"): lambda p: end - 1,
        ("wrapped", f"positions start again at 0 (modulo {end})"): lambda p: p % end,
    }
    other = "it gives something else (memory that is no table, or other rows)"
    return measured.find_source(results, sources) or ("table-end-garbage", other)


def _describe_negative_positions(measured: Measured, end: int | None) -> _Said:
    results = measured.results(-1, -3, -6)
    if len(results) < 3:
        return "", f"is refused ({measured.refusal})"
    rows = end or 0  # of the table; without one, -1 is the source of -1
    sources: dict[_Said, Callable[[int], int]] = {
        ("", "is turned backwards, as it should be"): lambda p: p,
        ("negative-wraps", f"counts from the table's end (-1 is {rows - 1})"): lambda p: rows + p,
        ("negative-unsigned", "is turned as if it were positive"): abs,
        ("negative-clamped", "is turned as 0"): lambda p: 0,
    }
    other = "gives something else (another row of a table, perhaps)"
    return measured.find_source(results, sources) or ("negative-garbage", other)


# Results that depend on the length of the call.


class Lengths(NamedTuple):
    """The results of calls of growing lengths."""

    # by a call's highest position: unit vectors turned to the `powers_of_two` up to it
    answers: dict[int, Complex]
    # the highest position of the longest call that agrees with all shorter ones
    longest_consistent: int
    # the highest position of the shortest call that contradicts shorter ones
    changes_at: int | None
    # the highest position of a call that gave something else when it was repeated
    irreproducible_at: int | None


def call_with_growing_lengths(probe: Probe, max_position: int) -> Lengths:
    """Call the function with growing lengths, and then again with shrinking ones."""
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


# (tokens, spectrum, factor) of a call so long that the function uses other frequencies
_LongerCall = tuple[int, Spectrum, float]


def add_rule(measured: Measured, lengths: Lengths) -> None:
    """Add that the result depends on the length of the call, and the rule that says how."""
    probe, rope = measured.probe, measured.report.rope
    longer_calls: list[_LongerCall] = []
    for top in (top for top in lengths.answers if top > lengths.longest_consistent):
        z = lengths.answers[top]
        spectrum = find_spectrum(powers_of_two(top), z, probe.angle_errors(z))
        if spectrum.last_position == top and np.all(spectrum.inv_freq):
            longer_calls.append((top + 1, spectrum, float(np.median(np.abs(z)))))
    rule, sentence = None, ""
    if rope is not None and rope.num_pairs > 1 and len(longer_calls) > 1:
        rule = _fit_dynamic_ntk(measured.report, longer_calls)
        sentence = f" The rule is {rule}." if rule else ""
        if rule is None and lengths.irreproducible_at is None:
            rule, sentence = _fit_longrope(measured, rope, lengths.changes_at or 0, longer_calls)
    finding = make_finding("depends-on-length", length=lengths.changes_at, rule=sentence)
    measured.add(finding, rule=rule)


def _fit_dynamic_ntk(report: Identification, longer_calls: list[_LongerCall]) -> Rule | None:
    """Dynamic NTK, if it gives the factors measured at all lengths."""
    if report.base is None or report.law is not None:
        return None
    slowest = report.base ** (-(len(report.pairs) - 1) / len(report.pairs))
    factors = [(n, slowest / abs(float(long.inv_freq[-1]))) for n, long, _ in longer_calls]
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
    """LongRoPE and its sentence, if all calls longer than ``original`` have equal frequencies."""
    report, short, rounding = measured.report, rope.inv_freq, measured.probe.rounding
    _, last, gain = longer_calls[-1]
    all_equal = all(
        np.all(np.abs(spectrum.inv_freq - last.inv_freq) <= spectrum.uncertainty + last.uncertainty)
        and abs(factor - gain) <= 16 * rounding * gain
        for _, spectrum, factor in longer_calls
    )
    if original < 2 or not all_equal or not np.all(short) or len(short) != len(report.pairs):
        return None, ""
    known_base = report.base if report.law is None else None
    base = known_base or _ANY_BASE
    plain = base ** (-np.arange(len(short)) / len(short))

    def shortest_divisors(inv_freq: Floats, uncertainty: Floats) -> tuple[float, ...]:
        """Each with the fewest digits that its measurement allows."""
        values, errors = plain / inv_freq, _FLOAT32_ERROR + uncertainty / inv_freq
        near = zip(values.tolist(), errors, strict=True)
        return tuple(simplest_near(value, error) or value for value, error in near)

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
    any_base = "" if known_base else " (any would do)"
    return rule, (
        f" The rule is LongRoPE's: the powers of base {base:.15g}{any_base} are "
        f"divided by one list up to {original} tokens and by another beyond, {spans}."
    )


# Digits that are lost: in cosines and sines, at every step, in angles, by noise.


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


def add_steps(measured: Measured) -> None:
    """Add a finding unless one rounding, at the end, explains turned random vectors."""
    probe, spectrum, report = measured.probe, measured.spectrum, measured.report
    gain, names = report.attention_factor, report.names()
    if report.rope is None or not gain or names & {"noise", "remembers", *ANGLES_ROUNDED}:
        return
    x = np.random.default_rng(2).standard_normal((8, report.head_dim))
    x = rounded(x, probe.caller.arrays.dtype)
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
        return unit_of(values, dtype) / 2

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
        return
    errors = np.abs(turned - gain * exact)
    worst = np.unravel_index(np.argmax(errors - once), errors.shape)
    name = "steps-in-{dtype}" if explain(stepwise) else "noise"
    steps = "Cos and sin, perhaps all steps, are" if explain(once + in_rows) else "All steps are"
    numbers = {"error": errors[worst], "once": once[worst]}
    measured.add(make_finding(name, dtype=dtype, steps=steps, **numbers))


def add_precision(measured: Measured, end: int) -> None:
    """Add errors at growing positions below ``end``, and whether angles are float32."""
    probe, spectrum, report = measured.probe, measured.spectrum, measured.report
    if report.rope is None or not report.attention_factor:
        return
    errors: list[tuple[int, float]] = []
    has_drift, within_float32 = spectrum.has_float32_angles, True
    for near in PRECISION_POSITIONS:
        if near + 12 >= end:
            break
        # frequencies are measured at powers of two, where rounding an angle changes nothing
        positions = near - np.array([1, 2, 5, 9, 11])
        z = probe(positions) / report.attention_factor
        exact = phasors(report.rope, positions + report.position_offset)[:, : z.shape[1]]
        errors.append((near, float(np.abs(z - exact).max())))
        drift = np.abs(np.angle(z * np.conj(spectrum.predict(positions.astype(np.float64)))))
        angles = positions[:, None] * np.abs(spectrum.inv_freq)
        uncertainty = positions[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        tolerance = 2 * (uncertainty + probe.angle_errors(z) + 2.0**-51 * angles)
        has_drift |= bool(np.any(drift > tolerance))
        within_float32 &= bool(np.all(drift <= tolerance + 2.0**-20 * angles))
    findings = report.findings
    has_rounded = any(name.startswith("positions-in") for name in report.names())
    if errors and has_drift and within_float32 and not has_rounded:
        near, error = errors[-1]
        # the frequency of an angle that is a float32 number seems to be one
        kept = (finding for finding in findings if finding.name != "frequencies-in-float32")
        findings = *kept, make_finding("angles-in-float32", error=error, near=near)
    measured.add(precision=tuple(errors), findings=findings)
