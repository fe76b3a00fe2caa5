"""Which rotation turned tokens: the hypotheses that are tried, in a stated order.

A stage makes the hypotheses of one kind of cause, in levels: it solves for a value if the turns
determine it, and tries likely values otherwise. `EXPECTED` and `NOTHING_EXPECTED` list the stages.
Which coordinates make a pair comes first: there is a `Reading` for each way that `layout` leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.identification.explaining import explain
from phasor.identification.frequencies import (
    compare,
    compare_factors,
    find_ropes,
    find_scaled_axes,
    name_pairs,
    other_ropes,
    twice_other_ropes,
)
from phasor.identification.hypotheses import ExpectedRope, Hypothesis, is_idle, suppose, turn_alike
from phasor.identification.laws import FLOAT64_SLACK, MISTAKES
from phasor.identification.laws_by_axis import LawsByAxis, find_laws_by_axis
from phasor.identification.layout import arranged, exchanged_axes
from phasor.identification.positions import STEPS, Tokens, offset_changes
from phasor.identification.report import (
    Changes,
    Finding,
    Identification,
    in_order,
    is_rounding,
    make_finding,
)
from phasor.identification.roundings import COARSE, find_float32, positions_in, precisions
from phasor.identification.shifts import Shifts
from phasor.identification.spectrum import ROUNDING, rounded
from phasor.identification.turns import Turns
from phasor.rope import Rope, base_of_axis


class Diagnosis(NamedTuple):
    """What differs, other causes that the data allow, and float32 roundings that show."""

    changes: Changes = ()
    undecided: tuple[str, ...] = ()  # the sentences of other causes
    roundings: Changes = ()

    def prepend(self, *changes: Finding) -> Diagnosis:
        """The same with further changes before its own."""
        return self._replace(changes=changes + self.changes)


# causes with measured values, which are too coarse to show float32 roundings
_MEASURED = MISTAKES | {"base", "law", "law-parameter", "axis-scaled"}
_FLOAT32_SLACK = 1e-6  # relative error of frequencies that a program computed in float32
_UNSURE_BASE = 0.02  # error of the logarithm of a base that a few tokens show


@dataclass(frozen=True)
class Reading:
    """One arrangement of coordinates in pairs, and hypotheses of what turned them."""

    changes: Changes  # differences in the pairs, and in the rows of cos and sin
    expected: ExpectedRope
    turns: Turns
    tokens: Tokens
    dtype: str

    @cached_property
    def rope(self) -> Rope | None:
        """The expected rope, with these pairs; None if its law or axes do not fit them."""
        return arranged(self.expected.rope, self.turns.arrangement)

    def levels(self) -> Iterator[Iterable[Hypothesis]]:
        """Hypotheses, the likelier levels first."""
        stages = NOTHING_EXPECTED if self.rope is None else EXPECTED
        return chain.from_iterable(stage(self) for stage in stages)

    @cached_property
    def baseline(self) -> Hypothesis:
        """The expected rope, as the only hypothesis."""
        return suppose(self._arranged_rope, self.turns.positions)

    @cached_property
    def variants(self) -> list[Hypothesis]:
        """Ropes that differ from the expected one in one property."""
        return [
            *other_ropes(self.expected._replace(rope=self._arranged_rope), self.turns.positions)
        ]

    @property
    def _arranged_rope(self) -> Rope:
        assert self.rope is not None  # as in every stage of `EXPECTED`
        return self.rope

    @cached_property
    def report(self) -> Identification:
        """The report that the turns alone give; empty if they show no frequencies."""
        turns, spectrum = self.turns, self.turns.find_spectrum()
        if spectrum is None:
            return Identification(head_dim=turns.arrangement.layout.head_dim)
        sizes = np.full((1, turns.z.shape[1]), sum(turns.gain) / 2)
        return explain(turns.arrangement, spectrum, sizes, rounding=ROUNDING[self.dtype])

    @property
    def offset(self) -> int:
        """The whole number that the report adds to positions."""
        return 0 if self.report.position_offset % 1 else int(self.report.position_offset)

    def compare(self, actual: Rope) -> Changes:
        """How another rope differs from the expected one."""
        return compare(self.expected.rope, actual, self.expected.unresolved)

    def vague_changes(self) -> Changes:
        """The change that frequencies differ, from which pair on."""
        return self.changes + name_pairs(self.rope, self.turns)

    def fitting(self, level: Iterable[Hypothesis]) -> Iterator[Fit]:
        """The hypotheses of a level that explain the turns of all tokens."""
        turns, expected = self.turns, self.expected.rope
        for hypothesis in level:
            worst = float(turns.misfit(*hypothesis[1:]).max())
            if worst > 1 or (self.rope and is_idle(hypothesis, self.rope, turns.positions)):
                continue
            # a program may apply the expected factor and another law
            factors = [compare_factors(rope, turns) for rope in (hypothesis.rope, expected)]
            gain = factors[0] and factors[1]
            if changes := (*self.changes, *hypothesis.changes, *gain):
                yield Fit(changes, round(worst, 1), hypothesis, turns)


class Fit(NamedTuple):
    """A hypothesis that explains the turns of all tokens."""

    changes: Changes
    misfit: float
    hypothesis: Hypothesis
    turns: Turns

    @property
    def text(self) -> str:
        """A sentence about the differences."""
        return " ".join(change.sentence for change in self.changes)

    def names(self) -> set[str]:
        """The names of the differences."""
        return {change.name for change in self.changes}


def choose(fits: Iterable[Fit]) -> Diagnosis | None:
    """The best hypothesis that fits, and sentences about others that the tokens allow."""
    # fewer changes are likelier, then what fits better; the order of equals stays
    ordered = sorted(fits, key=lambda fit: (len(fit.changes), fit.misfit))
    if not ordered:
        return None
    best, names, rows = ordered[0], ordered[0].names(), ordered[0].hypothesis.rows

    def is_told_apart(other: Fit) -> bool:
        """Whether it has other names, or as many changes and other turns."""
        other_rows = other.hypothesis.rows
        are_as_many = len(other.changes) == len(best.changes)
        turns_otherwise = other_rows.shape == rows.shape and not turn_alike(other_rows, rows)
        return not names <= other.names() or (are_as_many and turns_otherwise)

    texts = dict.fromkeys(fit.text for fit in ordered[1:] if is_told_apart(fit))
    texts.pop(best.text, None)  # the same sentence from other digits
    is_told = not names & _MEASURED and not any(is_rounding(change) for change in best.changes)
    roundings = find_float32(best.turns, best.hypothesis) if is_told else ()
    return Diagnosis(in_order(best.changes), (*texts,), roundings)


# What is tried.

Stage = Callable[[Reading], Iterator[Iterable[Hypothesis]]]


def _as_expected(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """No difference, if the factor is right."""
    if not compare_factors(reading.baseline.rope, reading.turns):
        yield (reading.baseline,)


def _one_difference(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """One difference: in the factor, the rope, the positions, the roundings, or the rows."""
    same, (_, rope, places, rows) = reading.baseline, reading.baseline
    exchanged = rope.direction * 1j * np.conj(rows)
    yield chain(
        (same,),
        reading.variants,
        (suppose(rope, 0 * places, make_finding("not-turned")),),
        (suppose(rope, 2 * places, make_finding("twice")),),
        _elsewhere_or_rounded(reading, same),
        (same._replace(changes=(make_finding("swapped"),), rows=exchanged),),
        exchanged_axes(rope, places),
    )


def _wrong_formula(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """A mistake in the formula of frequencies, or a multiplied axis; both also at an offset."""
    report, turns = reading.report, reading.turns
    mistakes = [finding for finding in report.findings if finding.name in MISTAKES]
    likely: list[Hypothesis] = []
    if mistakes and report.rope is not None and report.rope.num_pairs == turns.z.shape[1]:
        findings = (*offset_changes(reading.offset), *mistakes)
        likely.append(suppose(report.rope, turns.positions + reading.offset, *findings))
    scaled = () if reading.rope is None else find_scaled_axes(reading.rope, turns)
    yield chain(likely, scaled)


def _laws_by_axis(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """A base and a law for each axis, as its own pairs show them."""
    rope, turns = reading.baseline.rope, reading.turns
    if not hasattr(rope.axes, "sections"):
        return
    f, uncertainty = np.zeros(rope.num_pairs), np.full(rope.num_pairs, np.inf)
    for axis in range(rope.axes.n_axes):
        pairs = np.flatnonzero(np.equal(rope.axes.axis_of_pair(rope.num_pairs), axis))
        spectrum = turns.find_spectrum_of_axis(axis, pairs) if len(pairs) else None
        if spectrum is None and len(pairs):
            return
        if spectrum is not None:
            f[pairs] = np.maximum(rope.direction * spectrum.inv_freq, 0)
            uncertainty[pairs] = spectrum.uncertainty
    base_by_axis = {base_of_axis(rope, axis): None for axis in range(rope.axes.n_axes)}
    expected_bases = [base for base in base_by_axis if base is not None]
    candidates: list[LawsByAxis] = []
    for bases, slack in product((expected_bases, ()), (FLOAT64_SLACK, _FLOAT32_SLACK)):
        candidates += find_laws_by_axis(rope, f, uncertainty, slack, bases)
    ropes = [
        bases_and_laws.apply_to(rope)
        for bases_and_laws in sorted(candidates, key=lambda bases_and_laws: bases_and_laws.digits)
    ]
    yield [suppose(candidate, turns.positions, *reading.compare(candidate)) for candidate in ropes]


def _two_of_the_rope(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """Two differences in the rope."""
    expected = reading.expected._replace(rope=reading.baseline.rope)
    yield twice_other_ropes(expected, reading.turns.positions)


def _another_rope_elsewhere(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """Two differences: one in the rope, and one in positions or roundings."""
    yield chain.from_iterable(
        _elsewhere_or_rounded(reading, hypothesis) for hypothesis in reading.variants
    )


def _elsewhere_or_rounded(reading: Reading, hypothesis: Hypothesis) -> Iterator[Hypothesis]:
    yield from reading.tokens.find_moves(hypothesis, reading.turns)
    yield from precisions(hypothesis, reading.turns)


def _measured_frequencies(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """Measured frequencies, at positions with a small offset, or rounded."""
    turns, places, report = reading.turns, reading.turns.positions, reading.report
    solved: list[Rope] = []
    if report.rope is not None and report.known_law:
        solved.append(replace(report.rope, inv_freq_dtype="exact"))
    unmoved: list[Hypothesis] = []  # at the expected positions

    def search_at(positions: NDArray[Any], *changes: Finding) -> Iterator[Hypothesis]:
        likely: list[Hypothesis] = []
        allowed = find_ropes(reading.rope, turns, positions, base_only=bool(changes))
        for rope in chain(solved, allowed):
            earlier = (supposed.rope.inv_freq for supposed in likely)
            if rope.num_pairs != turns.z.shape[1] or any(
                np.allclose(rope.inv_freq, f, 1e-3, 0) for f in earlier
            ):
                continue  # such as another decimal of one
            differences = reading.compare(rope)
            # unnamed frequencies would leave the finding about positions as the only cause
            if differences or np.allclose(rope.inv_freq, reading.expected.rope.inv_freq, 1e-6, 0):
                likely.append(suppose(rope, positions, *changes, *differences))
        yield from likely
        for hypothesis in () if changes else likely:
            unmoved.append(hypothesis)
            yield from reading.tokens.find_moves(hypothesis, turns)

    def refined() -> Iterator[Hypothesis]:
        """Bases near those of the tokens before a restart, if they fit all tokens."""
        for hypothesis in unmoved:
            mapped = reading.tokens.map_positions(
                Shifts.from_hypothesis(hypothesis, turns, _UNSURE_BASE), places
            )
            if mapped is not None:
                for candidate in find_ropes(hypothesis.rope, turns, mapped, base_only=True):
                    supposed = suppose(candidate, places, *reading.compare(candidate))
                    yield from reading.tokens.find_moves(supposed, turns)

    for step in dict.fromkeys((reading.offset, *STEPS)):
        yield search_at(places + step, *offset_changes(step))
    for dtype in COARSE:
        yield search_at(rounded(places, dtype), positions_in(dtype))
    if places.ndim == 1:
        yield refined()


def _far_positions(reading: Reading) -> Iterator[Iterable[Hypothesis]]:
    """Positions far from those recorded."""
    yield reading.tokens.find_far_moves(reading.baseline, reading.turns)


#: Stages if the expected rope fits these pairs; fewest differences first.
EXPECTED: tuple[Stage, ...] = (
    _as_expected,
    _one_difference,
    _wrong_formula,
    _laws_by_axis,
    _two_of_the_rope,
    _another_rope_elsewhere,
    _measured_frequencies,
    _far_positions,
)
#: Stages if the expected rope does not fit these pairs.
NOTHING_EXPECTED: tuple[Stage, ...] = (_wrong_formula, _measured_frequencies)
