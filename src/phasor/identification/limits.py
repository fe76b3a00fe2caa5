"""Where a function stops being one rotation, and what it does there.

At a table's end, at rounded or negative positions, or at another length of the call; and by which
rule it picks its frequencies then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from phasor.identification.calling import RefusedError
from phasor.identification.report import Finding, Identification
from phasor.identification.spectrum import (
    Complex,
    Floats,
    Spectrum,
    around,
    find_spectrum,
    powers_of_two,
    rounded_angles,
)
from phasor.scaling import DynamicNTK, LongRope, Rule

#: Turned unit vectors at positions, ``[P, pairs]``.
Probe = Callable[[Sequence[int]], Complex]
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
# LongRoPE divides the powers of a base; where no base was measured, any has such divisors
_ANY_BASE = 10_000.0
# as exact as float32 frequencies are that were computed by way of logarithms
_FLOAT32 = 1e-6


def first_bad(good: int, bad: int, is_good: Callable[[int], bool]) -> int:
    """The position where good ones end, by halving between one that is good and one that is not."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if is_good(middle) else (good, middle)
    return bad


@dataclass(kw_only=True)
class Lengths:
    """What calls of growing lengths gave.

    Attributes:
        same: Turned unit vectors by position, from the calls that agree with shorter ones.
        changes_at: The highest position of the first call that changed what lower positions gave.
        longer: The vectors of the calls from there on, at `powers_of_two` of the key.
        remembers: The highest position of a call that later gave something else.
    """

    same: dict[int, Complex] = field(default_factory=dict[int, Complex])
    changes_at: int | None = None
    longer: dict[int, Complex] = field(default_factory=dict[int, Complex])
    remembers: int | None = None


def call_with_growing_lengths(probe: Probe, longest: int, rounding: float) -> Lengths:
    """Call with growing lengths, and then again with shrinking ones."""
    found = Lengths()
    answers: dict[int, Complex] = {}
    for top in powers_of_two(longest)[2:]:
        places = powers_of_two(top)
        try:
            answers[top] = z = probe(places)
        except RefusedError:
            break
        if found.same and found.changes_at is None:
            before = np.array([found.same[p] for p in places[:-1]])
            found.changes_at = top if _differ(z[:-1], before, rounding) else None
        if found.changes_at is None:
            found.same |= dict(zip(places, z, strict=True))
        else:
            found.longer[top] = z
    for top in sorted(answers, reverse=True)[1:]:
        if _differ(probe(powers_of_two(top)), answers[top], rounding):
            found.remembers = top
    if found.changes_at is not None and found.remembers is None:
        low = powers_of_two(found.changes_at // 2)
        before = np.array([found.same[p] for p in low])
        found.changes_at = first_bad(
            low[-1],
            found.changes_at,
            lambda highest: not _differ(probe([*low, highest])[:-1], before, rounding),
        )
    return found


def _differ(a: Complex, b: Complex, rounding: float) -> bool:
    size = float(np.max(np.abs(b), where=np.isfinite(b), initial=1.0))
    return not np.allclose(a, b, rtol=0, atol=16 * rounding * size, equal_nan=True)


class _Prediction:
    """What the frequencies say that a position gives, and what it does give."""

    def __init__(self, probe: Probe, spectrum: Spectrum, gain: float, rounding: float) -> None:
        self._probe, self._spectrum, self._gain = probe, spectrum, gain
        self._rounding = rounding
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
        room = np.minimum(64 * self._rounding + lost, 0.5)
        return bool(np.all(np.abs(z - s.at(np.array([float(position)]))[0]) <= room))

    def turns(self, position: int) -> bool:
        """Whether the position is turned as it should be, or as the number it is rounded to."""
        z = self.value(position)
        return self.is_turn_of(z, position) or self.position_dtype(z, position) is not None

    def are_turns_of(
        self,
        values: Sequence[Complex | None],
        positions: Sequence[int],
        source: Callable[[int], int],
    ) -> bool:
        """Whether each position was turned as ``source`` of it is."""
        both = zip(values, positions, strict=True)
        return all(self.is_turn_of(z, source(position)) for z, position in both)

    def position_dtype(
        self, z: Complex | None, position: int, known: Sequence[str] = ()
    ) -> str | None:
        """The dtype that makes another of ``position``: one ``known``, or the finest that does."""
        if z is None or self.is_turn_of(z, position):
            return None
        for name in (*known, *reversed(_SIGNIFICANT_BITS)):
            other = _round_position(position, name)
            if other != position and self.is_turn_of(z, other):
                return name
        return None


def _round_position(position: int, dtype: str) -> int:
    """The number of the dtype that is nearest to ``position``, ties to even."""
    drop = max(position.bit_length() - _SIGNIFICANT_BITS[dtype], 0)
    return round(position / (1 << drop)) << drop


def with_limits(
    report: Identification, probe: Probe, spectrum: Spectrum, *, rounding: float, longest: int
) -> Identification:
    """The report with a table's end, rounded positions, and what negative positions give."""
    predicted = _Prediction(probe, spectrum, report.attention_factor or 1.0, rounding)
    coarse: dict[str, int] = {}
    good, end = 0, None
    places = (p + step for p in powers_of_two(longest)[3:] for step in (-1, 1))
    for position in (p for p in places if p <= longest):
        z = predicted.value(position)
        dtype = predicted.position_dtype(z, position, tuple(coarse))
        if dtype is not None:
            coarse.setdefault(dtype, position)
        elif not predicted.is_turn_of(z, position):
            end = first_bad(good, position, predicted.turns)
            break
        good = position
    findings: list[Finding] = []
    beyond = None
    if end is not None:
        name, beyond = _beyond_the_end(predicted, end)
        says = f"Up to position {end - 1} it turns; from {end} on {beyond}."
        findings.append(Finding(name, says))
    for dtype, position in coarse.items():
        same = _round_position(position, dtype)
        says = f"Positions are held in {dtype}: {position} is turned as if it were {same}."
        findings.append(Finding(f"positions-in-{dtype}", says))
    name, negative = _negative_positions(predicted, end)
    if name is not None:
        findings.append(Finding(name, f"A negative position {negative}."))
    return replace(
        report, table_end=end, beyond=beyond, negative=negative,
        findings=(*report.findings, *findings),
    )  # fmt: skip


def _beyond_the_end(predicted: _Prediction, end: int) -> tuple[str, str]:
    """The name of what happens from ``end`` on, and what it is."""
    if predicted.value(end) is None:
        return "table-end-raises", f"it raises ({predicted.refusal})"
    places = [end, end + 1, end + 2, 2 * end + 3]
    values = [predicted.value(place) for place in places]
    found = [z for z in values if z is not None]
    if any(not np.isfinite(z).all() for z in found):
        return "table-end-nan", "it gives NaN"
    if all(not z.any() for z in found):
        return "table-end-zeros", "it gives zeros"
    if all(np.abs(z - 1).max() < 1e-3 for z in found):
        return "table-end-identity", "it does not turn at all (identity)"
    seen = places[: len(found)]
    if predicted.are_turns_of(found, seen, lambda p: end - 1):
        return "positions-clamped", f"every position is turned as {end - 1} (clamped)"
    if predicted.are_turns_of(found, seen, lambda p: p % end):
        return "positions-wrapped", f"positions start again at 0 (modulo {end})"
    return "table-end-garbage", "it gives something else (memory that is no table, or other rows)"


def _negative_positions(predicted: _Prediction, end: int | None) -> tuple[str | None, str]:
    """The name of what is wrong with negative positions, if anything is, and what they give."""
    places = (-1, -3, -6)
    values = [predicted.value(place) for place in places]
    if any(z is None for z in values):
        return None, f"is refused ({predicted.refusal})"
    if predicted.are_turns_of(values, places, lambda p: p):
        return None, "is turned backwards, as it should be"
    if end is not None and predicted.are_turns_of(values, places, lambda p: end + p):
        return "negative-wraps", f"counts from the table's end (-1 is {end - 1})"
    if predicted.are_turns_of(values, places, abs):
        return "negative-unsigned", "is turned as if it were positive"
    if predicted.are_turns_of(values, places, lambda p: 0):
        return "negative-clamped", "is turned as 0"
    return "negative-garbage", "gives something else (another row of a table, perhaps)"


# The rule that picks a law by the length of the call.


def with_rule(report: Identification, lengths: Lengths, rounding: float) -> Identification:
    """The report of a function whose result depends on the length of the call."""
    longer: list[tuple[int, Spectrum, float]] = []  # tokens, frequencies, attention factor
    for top, z in lengths.longer.items():
        spectrum = find_spectrum(powers_of_two(top), z, rounded_angles(z, rounding))
        if spectrum.reach == top and np.all(spectrum.inv_freq):
            longer.append((top + 1, spectrum, float(np.median(np.abs(z)))))
    rule, sentence = None, ""
    if report.rope is not None and report.rope.num_pairs > 1 and len(longer) > 1:
        found = _dynamic_ntk(report, longer) or _longrope(report, lengths, longer, rounding)
        rule, sentence = found or (None, "")
    says = (
        "The result depends on the length of the call: it changes when one reaches "
        f"{lengths.changes_at}. {sentence}"
    )
    finding = Finding("depends-on-length", says.rstrip())
    return replace(report, rule=rule, findings=(*report.findings, finding))


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
    return (rule, f"The rule is {rule}.") if fits else None


def _longrope(
    report: Identification,
    lengths: Lengths,
    longer: list[tuple[int, Spectrum, float]],
    rounding: float,
) -> tuple[Rule, str] | None:
    """LongRoPE's two lists, if all longer calls turn alike."""
    original, rope = lengths.changes_at, report.rope
    if rope is None or original is None or original < 2 or lengths.remembers is not None:
        return None
    _, last, gain = longer[-1]
    alike = all(
        np.all(np.abs(one.inv_freq - last.inv_freq) <= one.uncertainty + last.uncertainty)
        and abs(factor - gain) <= 16 * rounding * gain
        for _, one, factor in longer
    )
    short = rope.inv_freq
    if not alike or not np.all(short) or len(short) != len(report.pairs):
        return None
    known_base = report.base if report.law is None else None
    base = _ANY_BASE if known_base is None else known_base
    plain = base ** (-np.arange(len(short)) / len(short))
    unsure = np.array([pair.uncertainty for pair in report.pairs])
    short_factors = _divisors(plain / short, _FLOAT32 + unsure / short)
    long = np.abs(last.inv_freq)
    rule = LongRope(
        short_factors=short_factors,
        long_factors=_divisors(plain / long, _FLOAT32 + last.uncertainty / long),
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
        f"The rule is LongRoPE's: the powers of base {base:.15g}{any_base} are "
        f"divided by one list up to {original} tokens and by another beyond, {spans}."
    )


def _divisors(values: Floats, off: Floats) -> tuple[float, ...]:
    """Each in the fewest digits that its measurement allows."""
    pairs = zip(values.tolist(), off.tolist(), strict=True)
    return tuple(around(value, relative).simplest() or value for value, relative in pairs)
