"""What makes recorded turns differ from those of a rope: positions, frequencies, roundings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.describe import ranges
from phasor.errors import PhasorError
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
from phasor.identification.hypotheses import (
    Hypothesis,
    Meant,
    is_idle,
    is_vague,
    suppose,
    turn_alike,
)
from phasor.identification.laws import MISTAKES
from phasor.identification.layout import arranged, arrangements, compare_layouts, exchanged_axes
from phasor.identification.members import find_mixed_members, name_norms
from phasor.identification.positions import STEPS, Shifts, Tokens, offset_changes
from phasor.identification.report import (
    Changes,
    Finding,
    Identification,
    in_order,
    is_rounding,
    make_finding,
)
from phasor.identification.roundings import COARSE, find_float32, positions_in, precisions
from phasor.identification.spectrum import ROUNDING, coarser, rounded
from phasor.identification.turns import (
    Sample,
    Turns,
    arrangement_of,
    measure_turns,
    rotates_as,
)
from phasor.rope import Rope


class Found(NamedTuple):
    """What differs, what that cannot be told from, and float32 roundings that show besides."""

    changes: Changes = ()
    undecided: tuple[str, ...] = ()  # texts
    roundings: Changes = ()

    def behind(self, *changes: Finding) -> Found:
        """The same with changes that come before the others."""
        return self._replace(changes=changes + self.changes)


# frequencies of which are measured, and not so well that float32 ones show
_MEASURED = MISTAKES | {"base", "law", "law-parameter", "axis-scaled"}


def _whole_offset(report: Identification) -> int:
    return 0 if report.position_offset % 1 else int(report.position_offset)


_UNSURE_BASE = 0.02  # of the logarithm, that a few tokens leave


class Reading(NamedTuple):
    """One way in which coordinates make pairs that turn, and what may have turned them."""

    changes: Changes  # that the pairs and the rows of cos and sin name themselves
    turns: Turns
    own: Rope | None  # the rope that was meant, with these pairs
    levels: Iterator[Iterator[Hypothesis]]  # the likelier first


@dataclass(frozen=True)
class Finder:
    """Looks for what differs in some tokens of a recording."""

    meant: Meant
    sample: Sample  # of these tokens
    tokens: Tokens

    def find(self) -> Found:
        """What differs, the most important first; nothing if nothing explains it.

        If nothing explains all tokens, heads or tokens that are turned wrongly are explained.
        """
        is_lost = np.asarray(~np.isfinite(self.sample.y).all(axis=(1, 2)))
        if is_lost.any():
            return self._find_below(is_lost, "table-end-nan", "it gives NaN")
        whole = self._explain()
        if whole and not is_vague(whole.changes):
            return whole
        if changes := self._name_width() or find_mixed_members(self.meant.rope, self.sample):
            return Found(changes)
        if silent := self._name_silent():
            return silent
        # keys beside queries, or tokens behind a table's end: [T, heads]
        good = rotates_as(self.sample, self.meant.rope)
        heads, is_bad = (np.logical_not(good.all(axis=axis)) for axis in (0, 1))
        if heads.any() and not heads.all():
            x, y = (part[:, heads] for part in (self.sample.x, self.sample.y))
            of_heads = replace(self, sample=self.sample._replace(x=x, y=y)).find()
            if of_heads.changes and not is_vague(of_heads.changes):
                which = ranges(np.flatnonzero(heads).tolist())
                return of_heads.behind(make_finding("heads", which=which))
        if is_bad.all() or not is_bad.any():
            return whole or self._name_norms()
        bad = replace(self, sample=self.sample.of(is_bad), tokens=self.tokens.of(is_bad))
        part = bad._explain()
        if whole and (part is None or is_vague(part.changes)):
            return whole
        if part is None and not self.sample.positions[~is_bad].any():
            return self._name_norms()  # position 0 is right whatever is done
        part = part or Found()
        more = "" if part.changes else ", and turned by no position"
        which = self.tokens.name_some(is_bad, self.sample.positions)
        return part.behind(make_finding("tokens", which=which, more=more))

    def _explain(self) -> Found | None:
        """The explanation of all tokens with the fewest differences; none if no pairs turn so.

        Cos and sin are supposed to be rounded only where no pairs turn by one factor otherwise.
        """
        # float32 ones are no difference
        coarse = coarser(max(ROUNDING[self.sample.dtype], ROUNDING["float32"]))
        found = (self._explain_by_rows(row_dtype) for row_dtype in (None, *coarse))
        return next((one for one in found if one is not None), None)

    def _explain_by_rows(self, row_dtype: str | None) -> Found | None:
        """The explanation with cos and sin as they are, or as numbers of a dtype.

        Levels of hypotheses are tried in their order, those of a reading that names itself some
        differences so many steps later than those of the reading that was meant.
        """
        rounded_rows: Changes = ()
        if row_dtype is not None:
            rounded_rows = (make_finding("table-in-{dtype}", dtype=row_dtype, details=""),)
        waiting = [
            (compare_layouts(self.meant.rope, one.layout) + rounded_rows, one)
            for one in arrangements(self.meant.rope, self.sample)
        ]
        waiting.sort(key=lambda one: len(one[0]))
        readings: list[Reading] = []
        for step in count(len(rounded_rows)):
            while waiting and len(waiting[0][0]) == step:
                changes, arrangement = waiting.pop(0)
                turns = measure_turns(self.sample, arrangement, row_dtype)
                if turns is not None:
                    own = arranged(self.meant.rope, arrangement)
                    readings.append(Reading(changes, turns, own, self._levels(own, turns)))
            levels = [(one, level) for one in readings if (level := next(one.levels, None))]
            if found := self._find_fitting(levels):
                return found
            if not levels and not waiting:
                break
        vague = [one.changes + name_pairs(one.own, one.turns) for one in readings]
        return Found(in_order(min(vague, key=len))) if vague else None

    def _find_fitting(self, levels: Iterable[tuple[Reading, Iterator[Hypothesis]]]) -> Found | None:
        """The best hypothesis of these levels, and texts of what else the tokens allow."""
        meant = self.meant.rope
        fitting: list[tuple[int, float, Changes, Hypothesis, Turns]] = []
        for reading, level in levels:
            turns, own = reading.turns, reading.own
            for hypothesis in level:
                worst = float(turns.misfit(*hypothesis[1:]).max())
                if worst > 1 or (own and is_idle(hypothesis, own, turns.positions)):
                    continue
                # a program may apply the factor that was meant beside another law
                factors = [compare_factors(rope, turns) for rope in (hypothesis.rope, meant)]
                gain = factors[0] and factors[1]
                if changes := (*reading.changes, *hypothesis.changes, *gain):
                    fitting.append((len(changes), round(worst, 1), changes, hypothesis, turns))
        if not fitting:
            return None
        # fewer changes are likelier, then what fits better; the order of equals stays
        fitting.sort(key=lambda one: one[:2])
        (least, _, best, likeliest, turns), *others = fitting
        rows = likeliest.rows
        names = {change.name for change in best}
        texts = dict.fromkeys(
            " ".join(change.sentence for change in other)
            for size, _, other, (*_, turned), _ in others
            # causes of the same names have to turn otherwise
            if not names <= {change.name for change in other}
            or (size == least and turned.shape == rows.shape and not turn_alike(turned, rows))
        )
        texts.pop(" ".join(change.sentence for change in best), None)  # the same by other digits
        is_told = not names & _MEASURED and not any(is_rounding(change) for change in best)
        roundings = find_float32(turns, likeliest) if is_told else ()
        return Found(in_order(best), (*texts,), roundings)

    def _name_silent(self) -> Found | None:
        """That results are 0 from some position on, and what else differs below it."""
        is_silent = np.asarray(self.sample.x.any(axis=(1, 2)) & ~self.sample.y.any(axis=(1, 2)))
        if not is_silent.any() or is_silent.all():
            return None
        places = self.sample.positions.reshape(len(is_silent), -1).max(axis=1)
        if not np.array_equal(is_silent, places >= places[is_silent].min()):
            return None
        return self._find_below(is_silent, "table-end-zeros", "it gives zeros")

    def _find_below(self, is_beyond: NDArray[np.bool_], name: str, beyond: str) -> Found:
        """The end of a table, beyond which are these tokens, and what else differs below it."""
        end = self.sample.positions[is_beyond].min()
        others = replace(self, sample=self.sample.of(~is_beyond), tokens=self.tokens.of(~is_beyond))
        below = Found()
        if len(others.sample.x) and not rotates_as(others.sample, self.meant.rope).all():
            below = others.find()
        return below.behind(make_finding(name, end=end, last=end - 1, beyond=beyond))

    def _name_norms(self) -> Found:
        """That lengths change, where the heads of a token tell that its pairs turn."""
        loose = measure_turns(self.sample, arrangement_of(self.meant.rope), one_gain=False)
        if loose is None or self.sample.x.shape[1] < 2:
            return Found()
        return Found((name_norms(np.abs(loose.z), 2 * float(loose.errors.max())),))

    def _name_width(self) -> Changes:
        """The width of other heads, as which all coordinates of a token are turned."""
        rope, (tokens, heads, head_dim) = self.meant.rope, self.sample.x.shape
        if rope.rotary_dim == head_dim:
            for width in (head_dim // 4, head_dim // 2, 2 * head_dim, 4 * head_dim):
                if not width or width % 2 or heads * head_dim % width:
                    continue
                x, y = (part.reshape(tokens, -1, width) for part in self.sample[:2])
                with suppress(PhasorError):  # a law's list has a number for each pair
                    other = replace(rope, head_dim=width, rotary_dim=width)
                    if rotates_as(self.sample._replace(x=x, y=y), other).all():
                        return (make_finding("head-width", found=width, meant=head_dim),)
        return ()

    def _levels(self, rope: Rope | None, turns: Turns) -> Iterator[Iterator[Hypothesis]]:
        """Hypotheses in the order in which they are tried, fewest differences first.

        No difference; one; a formula with a mistake, or an axis that is multiplied; two of the
        rope; one of the rope and one of positions or roundings; frequencies that were measured;
        positions far from those recorded.
        """
        if rope is None:
            yield from self._measured(None, turns)
            return
        places = turns.positions
        meant = self.meant._replace(rope=rope)
        same = suppose(rope, places)
        if not compare_factors(rope, turns):
            yield iter([same])
        others = [*other_ropes(meant, places)]
        yield chain((same,), others, self._turned_otherwise(same, turns))
        yield chain(self._mistaken(turns), find_scaled_axes(rope, turns))
        yield twice_other_ropes(meant, places)
        yield chain.from_iterable(self._turned_elsewhere(other, turns) for other in others)
        yield from self._measured(rope, turns)
        yield self.tokens.moved_far(same, turns)

    def _turned_otherwise(self, same: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """What was meant at other positions, by rounded numbers or by exchanged rows."""
        _, rope, places, rows = same
        yield suppose(rope, 0 * places, make_finding("not-turned"))
        yield suppose(rope, 2 * places, make_finding("twice"))
        yield from self._turned_elsewhere(same, turns)
        exchanged = rope.direction * 1j * np.conj(rows)
        yield same._replace(changes=(make_finding("swapped"),), rows=exchanged)
        yield from exchanged_axes(rope, places)

    def _turned_elsewhere(self, one: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """A hypothesis at other positions, or by rounded numbers."""
        yield from self.tokens.moved(one, turns)
        yield from precisions(one, turns)

    # ---- frequencies ----

    def _compare(self, found: Rope) -> Changes:
        return compare(self.meant.rope, found, self.meant.unresolved)

    def _explain_spectrum(self, turns: Turns) -> Identification:
        """What is found of the turns with nothing expected, if frequencies can be measured."""
        spectrum, pairs = turns.find_spectrum(), turns.z.shape[1]
        if spectrum is None:
            return Identification(head_dim=turns.arrangement.layout.head_dim)
        sizes, rounding = np.full((1, pairs), sum(turns.gain) / 2), ROUNDING[self.sample.dtype]
        return explain(turns.arrangement, spectrum, sizes, rounding=rounding)

    def _mistaken(self, turns: Turns) -> Iterator[Hypothesis]:
        """Frequencies of a formula with a mistake, which show with nothing expected."""
        report = self._explain_spectrum(turns)
        mistakes = [one for one in report.findings if one.name in MISTAKES]
        if mistakes and report.rope is not None and report.rope.num_pairs == turns.z.shape[1]:
            offset = _whole_offset(report)
            named = (*offset_changes(offset), *mistakes)
            yield suppose(report.rope, turns.positions + offset, *named)

    def _measured(self, rope: Rope | None, turns: Turns) -> Iterator[Iterator[Hypothesis]]:
        """Frequencies that were measured, at positions that are off by little, or rounded."""
        places, pairs, known = turns.positions, turns.z.shape[1], list[Rope]()
        report = self._explain_spectrum(turns)
        if report.rope is not None and report.known_law:
            known.append(replace(report.rope, inv_freq_dtype="exact"))
        if rope is None:
            yield self._mistaken(turns)
        tried: list[Hypothesis] = []  # at the positions that were meant

        def found_at(at: NDArray[Any], *changes: Finding) -> Iterator[Hypothesis]:
            likely: list[Hypothesis] = []
            for one in (*known, *find_ropes(rope, turns, at, by_base_alone=bool(changes))):
                others = (other.inv_freq for _, other, *_ in likely)
                if one.num_pairs != pairs or any(
                    np.allclose(one.inv_freq, f, 1e-3, 0) for f in others
                ):
                    continue  # such as another decimal of one
                named, meant = self._compare(one), self.meant.rope.inv_freq
                # unnamed frequencies would leave the finding about positions as the only cause
                if named or np.allclose(one.inv_freq, meant, 1e-6, 0):
                    likely.append(suppose(one, at, *changes, *named))
            yield from likely
            for one in () if changes else likely:
                tried.append(one)
                yield from self.tokens.moved(one, turns)

        def refined() -> Iterator[Hypothesis]:
            """Bases that fit all tokens, near those that fit the tokens before a restart."""
            for one in tried:
                mapped = self.tokens.map_positions(Shifts.of(one, turns, _UNSURE_BASE), places)
                if mapped is not None:
                    for other in find_ropes(one.rope, turns, mapped, by_base_alone=True):
                        found = suppose(other, places, *self._compare(other))
                        yield from self.tokens.moved(found, turns)

        for by in dict.fromkeys((_whole_offset(report), *STEPS)):
            yield found_at(places + by, *offset_changes(by))
        for dtype in COARSE:
            yield found_at(rounded(places, dtype), positions_in(dtype))
        if places.ndim == 1:
            yield refined()
