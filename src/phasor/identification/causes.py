"""What makes recorded turns differ from those of a rope: positions, frequencies, roundings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.describe import ranges
from phasor.errors import PhasorError
from phasor.identification.explaining import explain
from phasor.identification.frequencies import (
    MAX_CANDIDATES,
    alternatives,
    compare,
    compare_factors,
    find_ropes,
    name_pairs,
)
from phasor.identification.hypotheses import (
    Hypothesis,
    Meant,
    is_idle,
    is_vague,
    suppose,
    turn_alike,
)
from phasor.identification.layout import arranged, arrangements, compare_layouts, exchanged_axes
from phasor.identification.members import find_mixed_members
from phasor.identification.positions import find_far_positions, offset_changes
from phasor.identification.report import SENTENCES, Changes, Finding, make_finding
from phasor.identification.roundings import COARSE, positions_in, precisions
from phasor.identification.spectrum import ROUNDING, Complex, Floats, coarser, rounded
from phasor.identification.turns import (
    Sample,
    Turns,
    angle_errors,
    arrangement_of,
    measure_turns,
    rotates_as,
)
from phasor.numpy import every_axis_of, phasors
from phasor.rope import Rope

#: What differs, and texts of what that cannot be told from.
Found = tuple[Changes, tuple[str, ...]]


# of two differences, one is mostly one of these
_OFTEN = {"direction", "slice", "layer", "base", "law-missing", "length"}


# offsets of positions that are tried
_OFFSETS = np.array(sorted({*range(-64, 65)} - {0}, key=abs))


_FEW = 6  # tokens on which they are, and that are more than chance


_STEPS = sorted(range(-3, 4), key=abs)


_UNSURE_BASE = 0.02  # of the logarithm, that a few tokens leave


@dataclass(frozen=True)
class Finder:
    """Looks for what differs in some tokens of a recording."""

    meant: Meant
    sample: Sample  # of these tokens
    tokens: NDArray[np.intp]
    positions: NDArray[Any]  # of the whole recording, [batch, seq] or [batch, seq, n_axes]

    def find(self) -> Found:
        """What differs, the most important first; nothing if nothing explains it."""
        changes, undecided = self._find()
        if any(change.name == "frequencies" for change in changes):
            rope, length = self.meant.rope, self.positions.shape[1]
            turns = measure_turns(self.sample, arrangement_of(rope))
            if turns and (far := find_far_positions(rope, turns, self.tokens, length)):
                return (*far, *compare_factors(rope, turns)), ()
        return changes, undecided

    def _find(self) -> Found:
        """If nothing explains all tokens, heads or tokens that are turned wrongly are explained."""
        whole = self._explain_best()
        if whole and not is_vague(whole[0]):
            return whole
        if changes := self._name_width() or find_mixed_members(self.meant.rope, self.sample):
            return changes, ()
        # keys beside queries, or tokens behind a table's end: [T, heads]
        good = rotates_as(self.sample, self.meant.rope)
        heads, is_bad = (np.logical_not(good.all(axis=axis)) for axis in (0, 1))
        if heads.any() and not heads.all():
            x, y = (part[:, heads] for part in (self.sample.x, self.sample.y))
            changes, undecided = replace(self, sample=self.sample._replace(x=x, y=y)).find()
            if changes and not is_vague(changes):
                which = ranges(np.flatnonzero(heads).tolist())
                return (make_finding("heads", which=which), *changes), undecided
        if is_bad.all() or not is_bad.any():
            return whole or ((), ())
        bad = replace(self, sample=self.sample.of(is_bad), tokens=self.tokens[is_bad])
        part = bad._explain_best()
        if whole and (part is None or is_vague(part[0])):
            return whole
        if part is None and not self.sample.positions[~is_bad].any():
            return (), ()  # position 0 is right whatever is done
        changes, undecided = part or ((), ())
        more = "" if changes else ", and turned by no position"
        which = self._name_tokens(is_bad)
        return (make_finding("tokens", which=which, more=more), *changes), undecided

    def _explain_best(self) -> Found | None:
        """The explanation of all tokens: by the slice meant, or by others that turn them.

        If none does, one may if cos and sin are rounded.
        """
        results: list[Found] = []
        # float32 ones are no difference
        dtypes = (None, *coarser(max(ROUNDING[self.sample.dtype], ROUNDING["float32"])))
        for row_dtype, (first, last) in product(dtypes, ((0, 4), (4, None))):
            # interleaved pairs that stand still may be of the slice or not
            if (results and first == 0) or any(not is_vague(changes) for changes, _ in results):
                break
            candidates = islice(arrangements(self.meant.rope, self.sample), first, last)
            measured = (measure_turns(self.sample, one, row_dtype) for one in candidates)
            fitting = (turns for turns in measured if turns is not None)
            for turns in islice(fitting, 4 if results else 16):
                # of equally many changes the first are named, so others need not be looked for
                fewest = min((len(one) for one, _ in results if not is_vague(one)), default=16)
                if (count := len(self._compare_layouts(turns))) < fewest:
                    # nor one change beside those of the layout, if that makes as many
                    results.append(self._explain(turns, 1 if count + 1 == fewest else None))
        if not results:
            return None
        changes, undecided = min(results, key=lambda one: (is_vague(one[0]), len(one[0])))
        # roundings are in no order, and come last
        order = {name: place for place, name in enumerate(SENTENCES)}
        return tuple(sorted(changes, key=lambda one: order.get(one.name, len(order)))), undecided

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

    def _name_tokens(self, is_bad: NDArray[np.bool_]) -> str:
        places = self.sample.positions.reshape(len(is_bad), -1).max(axis=1)
        good, bad = places[~is_bad], places[is_bad]
        if good.max() < bad.min():
            return f"tokens from position {bad.min():.15g} on"
        if bad.max() < good.min():
            return f"tokens up to position {bad.max():.15g}"
        return f"some tokens, such as {self.tokens[is_bad][0]} at position {bad[0]:.15g},"

    def _compare_layouts(self, turns: Turns) -> Changes:
        changes = compare_layouts(self.meant.rope, turns.arrangement.layout)
        if turns.row_dtype is None:
            return changes
        return *changes, make_finding("table-in-{dtype}", dtype=turns.row_dtype, details="")

    def _explain(self, turns: Turns, num_levels: int | None) -> Found:
        layout, meant = self._compare_layouts(turns), self.meant.rope
        own = arranged(meant, turns.arrangement)
        for level in islice(self._levels(own, turns), num_levels):
            fitting: list[tuple[int, float, Changes, Complex]] = []
            for hypothesis in level:
                worst = float(turns.misfit(*hypothesis[1:]).max())
                if worst > 1 or (own and is_idle(hypothesis, own, turns.positions)):
                    continue
                # a program may apply the factor that was meant beside another law
                factors = [compare_factors(rope, turns) for rope in (hypothesis.rope, meant)]
                gain = factors[0] and factors[1]
                if changes := (*layout, *hypothesis.changes, *gain):
                    fitting.append((len(changes), round(worst, 1), changes, hypothesis.rows))
            if fitting:
                # fewer changes are likelier, then what fits better; the order of equals stays
                fitting.sort(key=lambda one: one[:2])
                (count, _, best, rows), *others = fitting
                names = {change.name for change in best}
                texts = dict.fromkeys(
                    " ".join(change.sentence for change in other)
                    for size, _, other, turned in others
                    # causes of the same names have to turn otherwise
                    if not names <= {change.name for change in other}
                    or (size == count and not turn_alike(turned, rows))
                )
                return best, (*islice(texts, 3),)
        return (*layout, *name_pairs(own, turns)), ()

    def _levels(self, rope: Rope | None, turns: Turns) -> Iterator[Iterator[Hypothesis]]:
        """Hypotheses of no change, of one, and of two, the likelier before the others."""
        if rope is None:
            yield from self._measured(None, turns)
            return
        places = turns.positions
        same = suppose(rope, places)
        if not compare_factors(rope, turns):
            yield iter([same])
        single = [*alternatives(self.meant._replace(rope=rope), places)]

        def one() -> Iterator[Hypothesis]:
            yield suppose(rope, 0 * places, make_finding("not-turned"))
            yield from (same, *single, suppose(rope, 2 * places, make_finding("twice")))
            yield from self._moved(same, turns)
            yield from precisions(rope, turns)
            exchanged = rope.direction * 1j * np.conj(same.rows)
            yield same._replace(changes=(make_finding("swapped"),), rows=exchanged)
            yield from exchanged_axes(rope, places)

        def two(names: set[str]) -> Iterator[Hypothesis]:
            for first in single:
                name = first.changes[0].name
                # rare ones are tried beside a few only, for their number multiplies
                if (name in _OFTEN) == (names == _OFTEN):
                    rest = None if name == "direction" else names - {name}
                    other = Meant(first.rope, None if name == "layer" else self.meant.unresolved)
                    for second in alternatives(other, places, rest):
                        yield second._replace(changes=first.changes + second.changes)

        yield one()
        yield two(_OFTEN)
        yield (moved for first in single for moved in self._moved(first, turns))
        yield two({"slice", "base"})
        yield from self._measured(rope, turns)

    # ---- positions ----

    def _moved(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """The hypothesis at other positions, which explain every token."""
        changes, rope, places, rows = hypothesis
        # R(p + offset) = R(p) R(offset): [offsets, T, num_pairs]
        moved = rows[:_FEW] * phasors(rope, _OFFSETS)[:, None]
        off = np.abs(turns.z[:_FEW] - turns.factor(rope) * moved)
        fits = np.all(off <= turns.allowed(rope, places)[:_FEW], axis=(1, 2))
        for offset in _OFFSETS[fits][:3].tolist():
            yield suppose(rope, places + offset, *changes, *offset_changes(offset))
        every = places if places.ndim == 1 else places[:, 0]
        if places.ndim > 1 and np.any(places != every[:, None]):
            return  # of text all coordinates are one number
        mapped = self._map_positions(rope, turns, every)
        if mapped is not None:
            names = self._name_positions(mapped, every)
            yield suppose(rope, every_axis_of(rope, mapped), *changes, *names)

    @cached_property
    def _candidates(self) -> NDArray[np.int64]:
        """Positions that a program may take for those recorded."""
        # a program may shift positions, round them, or count the tokens of a row
        recorded = np.rint(self.positions.reshape(-1)[:MAX_CANDIDATES])
        counted = np.arange(min(int(self.positions.shape[1]), MAX_CANDIDATES), dtype=np.float64)
        known: Floats = np.concatenate([recorded, counted])
        shifted = np.unique(np.add.outer(_STEPS, known))
        coarse = [rounded(shifted, dtype) for dtype in COARSE]
        coarse += [np.add.outer(_STEPS, rounded(known, dtype)).ravel() for dtype in COARSE]
        return np.unique(np.concatenate([shifted, *coarse])).astype(np.int64)

    def _map_positions(
        self, rope: Rope, turns: Turns, places: NDArray[Any], unsure: float = 0.0
    ) -> NDArray[np.int64] | None:
        """The position in or near the recording as which each token is turned, if there is one.

        The logarithm of the base may be off by ``unsure``.
        """
        candidates = self._candidates
        size = turns.factor(rope)
        rows = size * phasors(rope, candidates)
        slack = size * angle_errors(candidates, rope.inv_freq)
        # an error of the base's logarithm moves the frequency of pair k by k / n of it
        moves: Floats = np.arange(rope.num_pairs) / rope.num_pairs * rope.inv_freq * unsure
        slack += size * np.abs(candidates)[:, None] * moves
        mapped = np.empty(len(turns.z), np.int64)
        for token, place in enumerate(places):
            fits = np.abs(turns.z[token] - rows) <= turns.errors[token] + slack
            # of turns that the noise cannot tell apart the nearest
            fitting = candidates[fits.all(axis=1)]
            if not len(fitting):
                return None
            mapped[token] = fitting[np.argmin(np.abs(fitting - place))]
        return mapped

    def _name_positions(self, mapped: NDArray[np.int64], places: NDArray[Any]) -> Changes:
        if not mapped.any():
            return (make_finding("not-turned"),)
        column = self.tokens % self.positions.shape[1]
        # the first tokens show an offset alone, where others restart
        off = mapped - places
        by = off[0] if np.all(off[:3] == off[0]) else 0
        offset, wrong = offset_changes(by), off != by
        if not wrong.any():
            return offset
        first, last = int(np.argmax(wrong)), int(mapped.max())
        at = f"token {self.tokens[first]} (position {places[first]:.15g})"
        where = f"{at} is turned as {mapped[first]}"
        coarse = {dtype: positions_in(dtype, f": {where}") for dtype in COARSE}
        # what positions would be, and what is then said; of one row the first's are the token's own
        known: list[tuple[NDArray[Any], Changes]] = [
            (self.positions[0, column], (make_finding("first-row", where=where),))
        ]
        for dtype, step in product(COARSE, _STEPS):
            names = (*offset_changes(step), coarse[dtype])
            shifted = rounded(places + step, dtype), rounded(places, dtype) + step
            known += [(expected, names) for expected in shifted]
        for dtype in COARSE:
            far = np.abs(mapped) > 1 / ROUNDING[dtype]
            # what tokens are turned as, and what they would be without a restart
            is_rounded, *others = (
                np.array_equal(rounded(some[far], dtype), some[far])
                for some in (mapped, column, places)
            )
            if far.sum() >= _FEW and is_rounded and not all(others):
                offset += (coarse[dtype],)
        if not by and not wrong.all() and np.array_equal(mapped, (1 + wrong) * places):
            which = self._name_tokens(wrong)
            return make_finding("tokens", which=which, more=""), make_finding("twice")
        clamped = make_finding("clamped", end=last - by + 1, last=last)
        counted = "are counted through and do not restart"
        known += [
            (np.minimum(places + by, last), (*offset, clamped)),
            (np.where(wrong, 0, mapped), (*offset, make_finding("table-end", where=where))),
            (column, (*offset, make_finding("restart", how=counted, where=where))),
            (mapped, (*offset, make_finding("restart", how="restart elsewhere", where=where))),
        ]
        return next(names for expected, names in known if np.array_equal(mapped, expected))

    # ---- frequencies ----

    def _compare(self, found: Rope) -> Changes:
        return compare(self.meant.rope, found, self.meant.unresolved)

    def _measured(self, rope: Rope | None, turns: Turns) -> Iterator[Iterator[Hypothesis]]:
        """Frequencies that were measured, at positions that are off by little, or rounded."""
        places, offset, pairs, known = turns.positions, 0, turns.z.shape[1], list[Rope]()
        if (spectrum := turns.find_spectrum()) is not None:
            drivers, sizes = np.ones((1, pairs), bool), np.full((1, pairs), sum(turns.gain) / 2)
            rounding = ROUNDING[self.sample.dtype]
            report = explain(turns.arrangement, spectrum, drivers, sizes, rounding=rounding)
            offset = 0 if report.position_offset % 1 else int(report.position_offset)
            if report.rope is not None and report.known_law:
                known.append(replace(report.rope, inv_freq_dtype="exact"))

        coarse: list[Hypothesis] = []  # of bases that tokens before a restart leave

        def found_at(at: NDArray[Any], *changes: Finding) -> Iterator[Hypothesis]:
            likely: list[Hypothesis] = []
            for one in (*known, *find_ropes(rope, turns, at, by_base_alone=bool(changes))):
                others = (other.inv_freq for _, other, *_ in likely)
                if one.num_pairs != pairs or any(
                    np.allclose(one.inv_freq, f, 1e-3, 0) for f in others
                ):
                    continue  # such as another decimal of one
                named, meant = self._compare(one), self.meant.rope.inv_freq
                # frequencies without a name would leave what is said of positions as the only cause
                if named or np.allclose(one.inv_freq, meant, 1e-6, 0):
                    likely.append(suppose(one, at, *changes, *named))
            yield from likely
            for one in () if changes else likely[:4]:
                coarse.append(one)
                yield from self._moved(one, turns)

        def refined() -> Iterator[Hypothesis]:
            for _, one, *_ in coarse:
                mapped = self._map_positions(one, turns, places, _UNSURE_BASE)
                if mapped is not None:
                    for other in find_ropes(one, turns, mapped, by_base_alone=True):
                        yield from self._moved(suppose(other, places, *self._compare(other)), turns)

        for by in dict.fromkeys((offset, *_STEPS)):
            yield found_at(places + by, *offset_changes(by))
        for dtype in COARSE:
            yield found_at(rounded(places, dtype), positions_in(dtype))
        if places.ndim == 1:
            yield refined()
