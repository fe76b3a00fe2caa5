"""What is wrong with a rotation, and where it stops being one.

In the map itself: members of a pair, queries and keys, lost digits. Then at a table's end, at
rounded or negative positions, and at another length of the call, with the rule that picks its
frequencies there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.identification.blocks import Arrangement, read_rows
from phasor.identification.calling import Caller, RefusedError
from phasor.identification.report import Finding, Identification, make_finding
from phasor.identification.spectrum import (
    DTYPES,
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    around,
    exact_turns,
    find_spectrum,
    first_bad,
    nearest,
    powers_of_two,
    rounded_angles,
)
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, Rule

#: Positions near which errors are measured.
PRECISION_POSITIONS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)
# LongRoPE divides the powers of a base; where no base was measured, any has such divisors
_ANY_BASE = 10_000.0
# as exact as float32 frequencies are that were computed by way of logarithms
_FLOAT32 = 1e-6


@dataclass(frozen=True)
class Probe:
    """One vector per call shows how far every pair turns.

    Attributes:
        caller: Calls the function.
        arrangement: Where pairs are.
        rounding: Relative rounding error of the results.
    """

    caller: Caller
    arrangement: Arrangement
    rounding: float

    def __call__(self, positions: Sequence[Any] | NDArray[Any]) -> Complex:
        """At positions ``[P]``, equal on all axes, or ``[P, n_axes]``: ``[P, pairs]``."""
        vector = np.zeros((1, self.caller.head_dim))
        vector[0, self.arrangement.read[0]] = 1
        turned = self.caller.turn(vector, positions)[0, :, 0]
        first, second = self.arrangement.written
        z = np.empty((len(turned), len(first)), dtype=np.complex128)
        z.real, z.imag = turned[:, first], turned[:, second]  # a product would warn of infinities
        return z

    def differ(self, a: Complex, b: Complex) -> bool:
        """Whether two results differ by more than rounding explains."""
        size = float(np.max(np.abs(b), where=np.isfinite(b), initial=1.0))
        return not np.allclose(a, b, rtol=0, atol=16 * self.rounding * size, equal_nan=True)


# In the map itself.


def coarse_table(values: Floats, rounding: float, dtype: str) -> tuple[float, list[Finding]]:
    """The rounding that cosines and sines show, and the coarser dtype that they are numbers of.

    Args:
        values: Cosines and sines, any shape.
        rounding: The largest relative error of rounding to ``dtype``.
        dtype: Of the values as they came.
    """
    different = np.unique(np.abs(values[(values != 0) & (np.abs(values) != 1)]))
    coarser = [name for name in reversed(DTYPES) if ROUNDING[name] > rounding]
    for name in coarser if len(different) >= 16 else ():
        if np.array_equal(nearest(different, name)[0], different):
            off = ROUNDING[name]
            return off, [make_finding("table-in-{dtype}", dtype=name, of=dtype, off=off / 2)]
    return rounding, []


def compare_members(probe: Probe, rows: Complex) -> list[Finding]:
    """What is wrong where the two members of a pair do not turn by the same angle.

    Args:
        probe: What calls the function.
        rows: `read_rows` at small positions with equal coordinates; with several axes, at others
            behind them.
    """
    arrangement, room = probe.arrangement, 32 * probe.rounding
    size = np.maximum(np.maximum(np.abs(rows.real), np.abs(rows.imag)).max(axis=0), 1e-30)
    skew = (np.abs(rows[0] - rows[1]) / size).max(axis=0)
    wrong = skew > room
    if not wrong.any():
        return []

    def equal(a: Complex, b: Complex) -> bool:
        return bool(a.shape == b.shape and np.abs(a - b).max() <= room * np.abs(a).max())

    pairs = arrangement.num_pairs
    local = arrangement.written - arrangement.rotary_start
    if arrangement.pairing and local.min() >= 0 and local.max() < arrangement.rotary_dim:
        # the rows of cos and sin that each coordinate is multiplied with
        row = np.empty((rows.shape[1], arrangement.rotary_dim), dtype=np.complex128)
        row[:, local[0]], row[:, local[1]] = rows
        halves = row[:, :pairs], row[:, pairs:]
        neighbours = row[:, ::2], row[:, 1::2]
        if equal(*by_pairing(arrangement.pairing, half=neighbours, interleaved=halves)):
            name = by_pairing(
                arrangement.pairing,
                half="interleaved-rows-on-halves",
                interleaved="half-rows-on-interleaved",
            )
            return [make_finding(name)]
    worst = int(np.argmax(skew))
    at = tuple(arrangement.read[:, worst].tolist())
    # of a reflection the second row is minus the first
    both = rows.sum(axis=0)
    reflected = ((np.abs(both.real) + np.abs(both.imag)) / size).max(axis=0) < 1e-3
    if reflected[worst]:
        count = int(reflected.sum())
        some = f"{count} of {pairs} pairs, such as coordinates {at}, are"
        return [make_finding("reflection", which=some if count > 1 else f"Coordinates {at} are")]
    apart = probe.caller.n_axes > 1 and equal(rows[0, :6], rows[1, :6])
    name = "members-on-different-axes" if apart else "members-differ"
    return [make_finding(name, count=int(wrong.sum()), at=at)]


def compare_queries_and_keys(probe: Probe, maps: Floats) -> tuple[float | None, list[Finding]]:
    """The factor on keys where it differs, and how keys are turned otherwise than queries.

    Args:
        probe: What calls the function.
        maps: ``[outputs, P, out, in]``; keys' are the second.
    """
    room = 32 * probe.rounding
    if len(maps) < 2 or np.abs(maps[0] - maps[1]).max() <= room * max(1.0, np.abs(maps).max()):
        return None, []
    q, k = (read_rows(probe.arrangement.blocks(one)).mean(axis=0) for one in maps[:2])
    queries, keys = (float(np.median(np.abs(z))) for z in (q, k))
    ratio = keys / queries
    if np.abs(k - ratio * q).max() <= room * max(1.0, ratio):
        return keys, [make_finding("factor-on-one-side", queries=queries, keys=keys)]
    if np.abs(k - np.conj(q)).max() <= room:
        return None, [make_finding("keys-turn-backwards")]
    worst = int(np.argmax(np.abs(q - k).max(axis=0)))
    return None, [make_finding("queries-and-keys-differ", pair=worst)]


def with_precision(
    report: Identification, spectrum: Spectrum, probe: Probe, end: int
) -> Identification:
    """The report with errors at growing positions below ``end``, and whether angles are float32."""
    if report.rope is None or not report.attention_factor:
        return report
    found: list[tuple[int, float]] = []
    drifts, like_float32 = False, True
    for near in PRECISION_POSITIONS:
        if near + 12 >= end:
            break
        # at powers of two, where frequencies are read, the rounding of an angle is not seen
        at = near - np.array([1, 2, 5, 9, 11])
        z = probe(at) / report.attention_factor
        exact = exact_turns(report.rope, at, report.position_offset)[:, : z.shape[1]]
        found.append((near, float(np.abs(z - exact).max())))
        drift = np.abs(np.angle(z * np.conj(spectrum.at(at.astype(np.float64)))))
        angles = at[:, None] * np.abs(spectrum.inv_freq)
        known = at[:, None] * spectrum.uncertainty + spectrum.phase_uncertainty
        room = 2 * (known + rounded_angles(z, probe.rounding) + 2.0**-51 * angles)
        drifts |= bool(np.any(drift > room))
        like_float32 &= bool(np.all(drift <= room + 2.0**-20 * angles))
    report = replace(report, precision=tuple(found))
    rounded = any(name.startswith("positions-in") for name in report.names())
    if not (drifts and like_float32) or rounded:
        return report
    near, error = found[-1]
    threshold = next((p for p, e in found if e > 1e-4), near)
    about = f" (above 1e-4 from about {threshold})" if error > 1e-4 else ""
    # an angle that is a float32 number makes its frequency look like one
    others = [one for one in report.findings if one.name != "frequencies-in-float32"]
    float32 = make_finding("angles-in-float32", error=error, near=near, about=about)
    return replace(report, findings=(*others, float32))


# At a table's end, at rounded and at negative positions.


class _Prediction:
    """What the frequencies say that a position gives, and what it does give."""

    def __init__(self, probe: Probe, spectrum: Spectrum, gain: float) -> None:
        self._probe, self._spectrum, self._gain = probe, spectrum, gain
        self.refusal = ""

    def value(self, position: int) -> Complex | None:
        """What the function gives, over the gain; None if it refuses."""
        try:
            return self._probe([position])[0] / self._gain
        except RefusedError as error:
            self.refusal = " ".join(str(error).split())[:80]
            return None

    def is_turn_of(self, z: Complex | None, position: int) -> bool:
        """Whether ``z`` is the rotation of ``position``."""
        if z is None or not np.isfinite(z).all():
            return False
        s = self._spectrum
        # float32 angles and positions lose 2**-22 of the angle and that is not a table's end
        lost = abs(position) * (3 * s.uncertainty + 2.0**-21 * np.abs(s.inv_freq))
        room = np.minimum(64 * self._probe.rounding + lost, 0.5)
        return bool(np.all(np.abs(z - s.at(np.array([float(position)]))[0]) <= room))

    def are_turns_of(
        self, values: Mapping[int, Complex | None], source: Callable[[int], int]
    ) -> bool:
        """Whether each position was turned as ``source`` of it is."""
        return all(self.is_turn_of(z, source(position)) for position, z in values.items())


def with_limits(
    report: Identification, probe: Probe, spectrum: Spectrum, longest: int
) -> Identification:
    """The report with a table's end, rounded positions, and what negative positions give."""
    predicted = _Prediction(probe, spectrum, report.attention_factor or 1.0)
    coarse: dict[str, int] = {}

    def dtype_of(position: int) -> str | None:
        """The dtype that the position was rounded to: float64, one known, or the finest."""
        z, names = predicted.value(position), dict.fromkeys(["float64", *coarse, *DTYPES])
        fits = (n for n in names if predicted.is_turn_of(z, _round_position(position, n)))
        return next(fits, None)

    good, end = 0, None
    places = (p + step for p in powers_of_two(longest)[3:] for step in (-1, 1))
    for position in (p for p in places if p <= longest):
        dtype = dtype_of(position)
        if dtype is None:
            end = first_bad(good, position, lambda p: dtype_of(p) is not None)
            break
        coarse.setdefault(dtype, position)
        good = position
    coarse.pop("float64", None)
    findings: list[Finding] = []
    beyond = None
    if end is not None:
        name, beyond = _beyond_the_end(predicted, end)
        says = f"Up to position {end - 1} it turns; from {end} on {beyond}."
        findings.append(Finding(name, says))
    for dtype, position in coarse.items():
        same = _round_position(position, dtype)
        findings.append(
            make_finding("positions-in-{dtype}", dtype=dtype, position=position, same=same)
        )
    name, negative = _negative_positions(predicted, end)
    if name is not None:
        findings.append(Finding(name, f"A negative position {negative}."))
    return replace(
        report, table_end=end, beyond=beyond, negative=negative,
        findings=(*report.findings, *findings),
    )  # fmt: skip


def _round_position(position: int, dtype: str) -> int:
    return int(nearest(np.array(float(position)), dtype)[0])


def _beyond_the_end(predicted: _Prediction, end: int) -> tuple[str, str]:
    """The name of what happens from ``end`` on, and what it is."""
    if predicted.value(end) is None:
        return "table-end-raises", f"it raises ({predicted.refusal})"
    places = (end, end + 1, end + 2, 2 * end + 3)
    found = {p: z for p in places if (z := predicted.value(p)) is not None}
    values = np.array(list(found.values()))
    if not np.isfinite(values).all():
        return "table-end-nan", "it gives NaN"
    if not values.any():
        return "table-end-zeros", "it gives zeros"
    if np.abs(values - 1).max() < 1e-3:
        return "table-end-identity", "it does not turn at all (identity)"
    if predicted.are_turns_of(found, lambda p: end - 1):
        return "positions-clamped", f"every position is turned as {end - 1} (clamped)"
    if predicted.are_turns_of(found, lambda p: p % end):
        return "positions-wrapped", f"positions start again at 0 (modulo {end})"
    return "table-end-garbage", "it gives something else (memory that is no table, or other rows)"


def _negative_positions(predicted: _Prediction, end: int | None) -> tuple[str | None, str]:
    """The name of what is wrong with negative positions, if anything is, and what they give."""
    found = {p: predicted.value(p) for p in (-1, -3, -6)}
    if any(z is None for z in found.values()):
        return None, f"is refused ({predicted.refusal})"
    if predicted.are_turns_of(found, lambda p: p):
        return None, "is turned backwards, as it should be"
    if end is not None and predicted.are_turns_of(found, lambda p: end + p):
        return "negative-wraps", f"counts from the table's end (-1 is {end - 1})"
    if predicted.are_turns_of(found, abs):
        return "negative-unsigned", "is turned as if it were positive"
    if predicted.are_turns_of(found, lambda p: 0):
        return "negative-clamped", "is turned as 0"
    return "negative-garbage", "gives something else (another row of a table, perhaps)"


# At another length of the call.


@dataclass(kw_only=True)
class Lengths:
    """What calls of growing lengths gave.

    Attributes:
        answers: Turned unit vectors at `powers_of_two` of the key, for each call.
        changes_at: The highest position of the shortest call that changed what lower ones gave.
        remembers: The highest position of a call that later gave something else.
    """

    answers: dict[int, Complex] = field(default_factory=dict[int, Complex])
    changes_at: int | None = None
    remembers: int | None = None

    @property
    def agreed(self) -> int:
        """The highest position of the longest call that agrees with all shorter ones."""
        return max(top for top in self.answers if self.changes_at is None or top < self.changes_at)


def call_with_growing_lengths(probe: Probe, longest: int) -> Lengths:
    """Call with growing lengths, and then again with shrinking ones."""
    found = Lengths()
    for top in powers_of_two(longest)[2:]:
        try:
            z = found.answers[top] = probe(powers_of_two(top))
        except RefusedError:
            if not found.answers:
                raise
            break
        before = found.answers.get(top // 2, z[:-1])
        if found.changes_at is None and probe.differ(z[:-1], before):
            found.changes_at = top
    for top in sorted(found.answers, reverse=True)[1:]:
        if probe.differ(probe(powers_of_two(top)), found.answers[top]):
            found.remembers = top
    if found.changes_at is not None and found.remembers is None:
        low, same = powers_of_two(found.agreed), found.answers[found.agreed]
        found.changes_at = first_bad(
            found.agreed,
            found.changes_at,
            lambda highest: not probe.differ(probe([*low, highest])[:-1], same),
        )
    return found


def with_rule(report: Identification, lengths: Lengths, rounding: float) -> Identification:
    """The report of a function whose result depends on the length of the call."""
    longer: list[tuple[int, Spectrum, float]] = []  # tokens, frequencies, attention factor
    for top in (top for top in lengths.answers if top > lengths.agreed):
        z = lengths.answers[top]
        spectrum = find_spectrum(powers_of_two(top), z, rounded_angles(z, rounding))
        if spectrum.reach == top and np.all(spectrum.inv_freq):
            longer.append((top + 1, spectrum, float(np.median(np.abs(z)))))
    rule, sentence = None, ""
    if report.rope is not None and report.rope.num_pairs > 1 and len(longer) > 1:
        found = _dynamic_ntk(report, longer)
        if found is None and lengths.remembers is None:
            found = _longrope(report, report.rope, lengths.changes_at or 0, longer, rounding)
        rule, sentence = found or (None, "")
    says = make_finding("depends-on-length", length=lengths.changes_at, rule=sentence)
    return replace(report, rule=rule, findings=(*report.findings, says))


def _dynamic_ntk(
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
    original = around(factor / slope, 1e-3).power_of_two() or round(factor / slope)
    rule = DynamicNTK(factor=factor, original_max_positions=original)
    fits = all(np.isclose(rule.at(tokens).factor, one, rtol=1e-3) for tokens, one in factors)
    return (rule, f" The rule is {rule}.") if fits else None


def _longrope(
    report: Identification,
    rope: Rope,
    original: int,
    longer: list[tuple[int, Spectrum, float]],
    rounding: float,
) -> tuple[Rule, str] | None:
    """LongRoPE's two lists, if all calls longer than ``original`` turn alike."""
    _, last, gain = longer[-1]
    alike = all(
        np.all(np.abs(one.inv_freq - last.inv_freq) <= one.uncertainty + last.uncertainty)
        and abs(factor - gain) <= 16 * rounding * gain
        for _, one, factor in longer
    )
    short = rope.inv_freq
    if original < 2 or not alike or not np.all(short) or len(short) != len(report.pairs):
        return None
    known_base = report.base if report.law is None else None
    base = _ANY_BASE if known_base is None else known_base
    plain = base ** (-np.arange(len(short)) / len(short))

    def divisors(inv_freq: Floats, uncertainty: Floats) -> tuple[float, ...]:
        """Each in the fewest digits that its measurement allows."""
        values, off = plain / inv_freq, _FLOAT32 + uncertainty / inv_freq
        return tuple(around(v, o).simplest() or float(v) for v, o in zip(values, off, strict=True))

    rule = LongRope(
        short_factors=divisors(short, np.array([pair.uncertainty for pair in report.pairs])),
        long_factors=divisors(np.abs(last.inv_freq), last.uncertainty),
        original_max_positions=original,
        factor=around(math.exp((gain**2 - 1) * math.log(original)), 1e-4).simplest() or 1.0,
    )
    gains = report.attention_factor or 1.0, gain
    derived = rule.at(original).temperature().attention_factor
    if not np.allclose(gains, derived, rtol=64 * rounding, atol=0):
        short_gain, long_gain = gains
        rule = replace(
            rule, factor=1.0, short_attention_factor=short_gain, long_attention_factor=long_gain
        )
    lists = (rule.short_factors, rule.long_factors)
    spans = " and ".join(f"by {min(one):g} to {max(one):g}" for one in lists)
    any_base = " (any would do)" if known_base is None else ""
    return rule, (
        f" The rule is LongRoPE's: the powers of base {base:.15g}{any_base} are "
        f"divided by one list up to {original} tokens and by another beyond, {spans}."
    )
