"""Why recorded turns differ from those of a rope, and in which tokens and heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from phasor.describe import ranges
from phasor.errors import PhasorError
from phasor.identification.hypotheses import ExpectedRope, Hypothesis, is_vague
from phasor.identification.layout import arrangements, compare_layouts
from phasor.identification.members import find_mixed_members, name_norms
from phasor.identification.positions import Tokens
from phasor.identification.report import Changes, in_order, make_finding
from phasor.identification.search import Diagnosis, Reading, choose
from phasor.identification.spectrum import ROUNDING, coarser
from phasor.identification.turns import Sample, arrangement_of, measure_turns, rotates_as


@dataclass(frozen=True)
class Finder:
    """Finds how some tokens of a recording differ from a rope, and why."""

    expected: ExpectedRope
    sample: Sample  # of these tokens
    tokens: Tokens

    def find(self) -> Diagnosis:
        """The differences, the most important first; empty if nothing explains the tokens.

        If no explanation fits all tokens together, only the heads or tokens that are turned wrongly
        are explained.
        """
        is_lost = np.asarray(~np.isfinite(self.sample.y).all(axis=(1, 2)))
        if is_lost.any():
            return self._find_below(is_lost, "table-end-nan", "it gives NaN")
        whole = self._explain()
        if whole and not is_vague(whole.changes):
            return whole
        if changes := self._name_width() or find_mixed_members(self.expected.rope, self.sample):
            return Diagnosis(changes)
        if silent := self._name_silent():
            return silent
        # for example the heads of keys, or the tokens beyond a table's end: [T, heads]
        is_right = rotates_as(self.sample, self.expected.rope)
        heads, is_bad = (np.logical_not(is_right.all(axis=axis)) for axis in (0, 1))
        if heads.any() and not heads.all():
            x, y = (partial[:, heads] for partial in (self.sample.x, self.sample.y))
            diagnosis = replace(self, sample=self.sample._replace(x=x, y=y)).find()
            if diagnosis.changes and not is_vague(diagnosis.changes):
                listed = ranges(np.flatnonzero(heads).tolist())
                return diagnosis.prepend(make_finding("heads", which=listed))
        if is_bad.all() or not is_bad.any():
            return whole or self._name_norms()
        wrong_tokens = replace(
            self, sample=self.sample.select(is_bad), tokens=self.tokens.select(is_bad)
        )
        partial = wrong_tokens._explain()
        if whole and (partial is None or is_vague(partial.changes)):
            return whole
        if partial is None and not self.sample.positions[~is_bad].any():
            return self._name_norms()  # position 0 is right in any case
        partial = partial or Diagnosis()
        more = "" if partial.changes else ", and turned by no position"
        listed = self.tokens.name_some(is_bad, self.sample.positions)
        return partial.prepend(make_finding("tokens", which=listed, more=more))

    def _explain(self) -> Diagnosis | None:
        """The explanation of all tokens with the fewest differences; None if no pairs turn.

        Rounding of cos and sin is assumed only if no pairs turn by one factor without it.
        """
        # cos and sin in float32 are no difference
        coarse = coarser(max(ROUNDING[self.sample.dtype], ROUNDING["float32"]))
        diagnoses = (self._explain_by_rows(row_dtype) for row_dtype in (None, *coarse))
        return next((diagnosis for diagnosis in diagnoses if diagnosis is not None), None)

    def _explain_by_rows(self, row_dtype: str | None) -> Diagnosis | None:
        """The explanation with cos and sin unrounded, or rounded to a dtype.

        Levels of hypotheses are tried in order. A reading that already contains ``n`` differences
        from the rope starts ``n`` steps later, so that fewer differences are found first.
        """
        rounded_rows: Changes = ()
        if row_dtype is not None:
            rounded_rows = (make_finding("table-in-{dtype}", dtype=row_dtype, details=""),)
        waiting = [
            (compare_layouts(self.expected.rope, arrangement.layout) + rounded_rows, arrangement)
            for arrangement in arrangements(self.expected.rope, self.sample)
        ]
        waiting.sort(key=lambda entry: len(entry[0]))
        readings: list[tuple[Reading, Iterator[Iterable[Hypothesis]]]] = []
        for step in count(len(rounded_rows)):
            while waiting and len(waiting[0][0]) == step:
                changes, arrangement = waiting.pop(0)
                turns = measure_turns(self.sample, arrangement, row_dtype)
                if turns is not None:
                    reading = Reading(changes, self.expected, turns, self.tokens, self.sample.dtype)
                    readings.append((reading, reading.levels()))
            levels = [
                (reading, level)
                for reading, remaining in readings
                if (level := next(remaining, None)) is not None
            ]
            diagnosis = choose(fit for reading, level in levels for fit in reading.fitting(level))
            if diagnosis is not None:
                return diagnosis
            if not levels and not waiting:
                break
        vague = [reading.vague_changes() for reading, _ in readings]
        return Diagnosis(in_order(min(vague, key=len))) if vague else None

    def _name_silent(self) -> Diagnosis | None:
        """Report that results are 0 from some position on, and what else differs below it."""
        is_silent = np.asarray(self.sample.x.any(axis=(1, 2)) & ~self.sample.y.any(axis=(1, 2)))
        if not is_silent.any() or is_silent.all():
            return None
        places = self.sample.positions.reshape(len(is_silent), -1).max(axis=1)
        if not np.array_equal(is_silent, places >= places[is_silent].min()):
            return None
        return self._find_below(is_silent, "table-end-zeros", "it gives zeros")

    def _find_below(self, is_beyond: NDArray[np.bool_], name: str, beyond: str) -> Diagnosis:
        """Report that a table ends before these tokens, and what else differs below its end."""
        end = self.sample.positions[is_beyond].min()
        tokens_below = replace(
            self, sample=self.sample.select(~is_beyond), tokens=self.tokens.select(~is_beyond)
        )
        below = Diagnosis()
        if (
            len(tokens_below.sample.x)
            and not rotates_as(tokens_below.sample, self.expected.rope).all()
        ):
            below = tokens_below.find()
        return below.prepend(make_finding(name, end=end, last=end - 1, beyond=beyond))

    def _name_norms(self) -> Diagnosis:
        """Report that lengths change, if several heads show that the pairs of a token turn."""
        loose = measure_turns(self.sample, arrangement_of(self.expected.rope), common_gain=False)
        if loose is None or self.sample.x.shape[1] < 2:
            return Diagnosis()
        return Diagnosis((name_norms(np.abs(loose.z), 2 * float(loose.errors.max())),))

    def _name_width(self) -> Changes:
        """Report that heads have another width, if all coordinates are turned as that explains."""
        rope, (tokens, heads, head_dim) = self.expected.rope, self.sample.x.shape
        if rope.rotary_dim == head_dim:
            for width in (head_dim // 4, head_dim // 2, 2 * head_dim, 4 * head_dim):
                if not width or width % 2 or heads * head_dim % width:
                    continue
                x, y = (vectors.reshape(tokens, -1, width) for vectors in self.sample[:2])
                with suppress(PhasorError):  # a law may hold a list with one number for each pair
                    other_rope = replace(rope, head_dim=width, rotary_dim=width)
                    if rotates_as(self.sample._replace(x=x, y=y), other_rope).all():
                        return (make_finding("head-width", found=width, expected=head_dim),)
        return ()
