"""Where a rotation stops being one: its table's end, its digits, negative positions, its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phasor.identification.calling import RefusedError
from phasor.identification.report import Finding
from phasor.identification.spectrum import Spectrum

Complex = NDArray[np.complex128]
#: Turned unit vectors at positions, ``[P, pairs]``.
Probe = Callable[[Sequence[int]], Complex]
_SIGNIFICANDS = {"bfloat16": 8, "float16": 11, "float32": 24}


@dataclass(kw_only=True)
class Climb:
    """What ever longer calls gave.

    Attributes:
        seen: Turned unit vectors by position, as long as calls agreed.
        changes_at: The highest position of the first call that changed what lower positions gave.
        longer: Turned vectors of the ladder in calls from there on, by highest position.
        remembers: The highest position of a call that later gave something else.
        refused_at: The first position of the ladder that was refused, and what was said.
    """

    seen: dict[int, Complex] = field(default_factory=dict[int, Complex])
    changes_at: int | None = None
    longer: dict[int, Complex] = field(default_factory=dict[int, Complex])
    remembers: int | None = None
    refused_at: tuple[int, str] | None = None


def ladder(highest: int) -> list[int]:
    """0 and the powers of two up to ``highest``."""
    return [0, *(1 << j for j in range(highest.bit_length()))]


def climb(probe: Probe, longest: int, rounding: float) -> Climb:
    """Call with growing lengths and then again with shrinking ones."""
    found = Climb()
    answers: dict[int, Complex] = {}
    for j in range(1, longest.bit_length()):
        top = 1 << j
        try:
            answers[top] = z = probe(ladder(top))
        except RefusedError as error:
            found.refused_at = top, str(error)
            break
        known = [i for i, p in enumerate(ladder(top)) if p in found.seen]
        before = np.array([found.seen[ladder(top)[i]] for i in known])
        if known and _apart(z[known], before, rounding) and found.changes_at is None:
            found.changes_at = top
        if found.changes_at is None:
            found.seen |= dict(zip(ladder(top), z, strict=True))
        else:
            found.longer[top] = z
    for top in sorted(answers, reverse=True)[1:]:
        if _apart(probe(ladder(top)), answers[top], rounding):
            found.remembers = top
    if found.changes_at is not None and found.remembers is None:
        found.changes_at = _first_change(probe, found, rounding)
    return found


def _first_change(probe: Probe, climbed: Climb, rounding: float) -> int:
    """The first highest position of a call that changes what lower positions give."""
    changed = climbed.changes_at or 0
    same = changed // 2
    low = ladder(same)
    before = np.array([climbed.seen[p] for p in low])
    while changed - same > 1:
        middle = (same + changed) // 2
        if _apart(probe([*low, middle])[:-1], before, rounding):
            changed = middle
        else:
            same = middle
    return changed


def _apart(a: Complex, b: Complex, rounding: float) -> bool:
    size = float(np.max(np.abs(b), where=np.isfinite(b), initial=1.0))
    return not np.allclose(a, b, rtol=0, atol=16 * rounding * size, equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What `find_limits` found.

    Attributes:
        table_end: The first position that is not turned as the lower ones are.
        beyond: What happens there.
        position_dtype: What positions are rounded to, where that is seen.
        negative: What happens to negative positions.
        findings: The same as sentences.
    """

    table_end: int | None
    beyond: str | None
    position_dtype: str | None
    negative: str
    findings: tuple[Finding, ...]


class _Judge:
    """Whether what a position gave is what the frequencies say."""

    def __init__(self, probe: Probe, spectrum: Spectrum, gain: float, rounding: float) -> None:
        self._probe, self._spectrum, self._gain = probe, spectrum, gain
        self._rounding = rounding
        self.refusal = ""

    def value(self, position: int) -> Complex | None:
        """What the function gives, over the gain; None if it refuses."""
        try:
            return self._probe([position])[0] / self._gain
        except RefusedError as error:
            self.refusal = str(error)
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


def find_limits(
    probe: Probe, spectrum: Spectrum, *, gain: float, rounding: float, longest: int
) -> Limits:
    """Where rotation ends and digits are lost, up to ``longest``."""
    judge = _Judge(probe, spectrum, gain, rounding)
    findings: list[Finding] = []
    coarse: dict[str, int] = {}
    good, end = 0, None
    places = (p for j in range(2, longest.bit_length()) for p in ((1 << j) - 1, (1 << j) + 1))
    for position in places:
        if position > longest:
            break
        z = judge.value(position)
        dtype = None if z is None else _rounded_position(judge, z, position, tuple(coarse))
        if judge.is_turn_of(z, position):
            good = position
        elif dtype is not None:
            coarse.setdefault(dtype, position)
            good = position
        else:
            end = _first_wrong(judge, good, position)
            break
    beyond = None
    if end is not None:
        name, beyond = _beyond(judge, end)
        findings.append(
            Finding(name=name, says=f"Up to position {end - 1} it turns; from {end} on {beyond}.")
        )
    for dtype, position in coarse.items():
        same = _round_to(position, _SIGNIFICANDS[dtype])
        findings.append(
            Finding(
                name=f"positions-in-{dtype}",
                says=f"Positions are held in {dtype}: {position} is turned as if it were {same}.",
            )
        )
    negative, name = _negative(judge, end)
    if name:
        findings.append(Finding(name=name, says=f"A negative position {negative}."))
    return Limits(
        table_end=end,
        beyond=beyond,
        position_dtype=next(iter(coarse), None),
        negative=negative,
        findings=tuple(findings),
    )


def _round_to(position: int, bits: int) -> int:
    """``position`` with ``bits`` significant bits, ties to even."""
    drop = max(position.bit_length() - bits, 0)
    return round(position / (1 << drop)) << drop


def _rounded_position(
    judge: _Judge, z: Complex, position: int, known: tuple[str, ...]
) -> str | None:
    """The dtype that makes another of ``position``: one ``known``, or the finest that does."""
    for name in (*known, *reversed(_SIGNIFICANDS)):
        other = _round_to(position, _SIGNIFICANDS[name])
        if other != position and judge.is_turn_of(z, other) and not judge.is_turn_of(z, position):
            return name
    return None


def _first_wrong(judge: _Judge, good: int, bad: int) -> int:
    while bad - good > 1:
        middle = (good + bad) // 2
        z = judge.value(middle)
        fine = judge.is_turn_of(z, middle)
        if fine or (z is not None and _rounded_position(judge, z, middle, ())):
            good = middle
        else:
            bad = middle
    return bad


def _beyond(judge: _Judge, end: int) -> tuple[str, str]:
    """What happens from ``end`` on."""
    places = [end, end + 1, end + 2, 2 * end + 3]
    if judge.value(end) is None:
        return "table-end-raises", f"it raises ({' '.join(judge.refusal.split())[:80]})"
    given = [judge.value(place) for place in places]
    found = [z for z in given if z is not None]
    if any(not np.isfinite(z).all() for z in found):
        return "table-end-nan", "it gives NaN"
    if all(not z.any() for z in found):
        return "table-end-zeros", "it gives zeros"
    if all(np.abs(z - 1).max() < 1e-3 for z in found):
        return "table-end-identity", "it does not turn at all (identity)"
    pairs = list(zip(places, found, strict=False))
    if all(judge.is_turn_of(z, end - 1) for _, z in pairs):
        return "positions-clamped", f"every position is turned as {end - 1} (clamped)"
    if all(judge.is_turn_of(z, place % end) for place, z in pairs):
        return "positions-wrapped", f"positions start again at 0 (modulo {end})"
    return "table-end-garbage", "it gives something else (memory that is no table, or other rows)"


def _negative(judge: _Judge, end: int | None) -> tuple[str, str | None]:
    """What happens to negative positions, and the name of what is wrong with it."""
    places = (-1, -3, -6)
    given = [judge.value(place) for place in places]
    if any(z is None for z in given):
        return f"is refused ({' '.join(judge.refusal.split())[:80]})", None
    both = list(zip(places, given, strict=True))
    if all(judge.is_turn_of(z, place) for place, z in both):
        return "is turned backwards, as it should be", None
    if end is not None and all(judge.is_turn_of(z, end + place) for place, z in both):
        return f"counts from the table's end (-1 is {end - 1})", "negative-wraps"
    if all(judge.is_turn_of(z, -place) for place, z in both):
        return "is turned as if it were positive", "negative-unsigned"
    if all(judge.is_turn_of(z, 0) for _, z in both):
        return "is turned as 0", "negative-clamped"
    return "gives something else (another row of a table, perhaps)", "negative-garbage"
