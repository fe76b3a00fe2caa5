"""What makes recorded turns differ from those of a rope: positions, frequencies, roundings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phasor.angles import axes_of, of_each_pair
from phasor.describe import ranges
from phasor.errors import PhasorError
from phasor.identification import hypotheses
from phasor.identification.explaining import explain
from phasor.identification.hypotheses import COARSE, Hypothesis, Meant, compare_factors, suppose
from phasor.identification.misplaced import find_far_positions, find_mixed_members
from phasor.identification.report import SENTENCES, Changes, Finding, make_finding
from phasor.identification.spectrum import ROUNDING, Complex, Floats, Interval, coarser, rounded
from phasor.identification.turns import (
    Arrangement,
    Sample,
    Turns,
    angle_errors,
    arrangement_of,
    arrangements,
    measure_turns,
    rotates_as,
)
from phasor.numpy import every_axis_of, phasors
from phasor.rope import Rope
from phasor.scaling import Linear

#: What differs, and texts of what that cannot be told from.
Found = tuple[Changes, tuple[str, ...]]
# of two differences, one is mostly one of these
_OFTEN = {"direction", "slice", "layer", "base", "law-missing", "length"}
# offsets of positions that are tried
_OFFSETS = np.array(sorted({*range(-64, 65)} - {0}, key=abs))
_FEW = 6  # tokens on which they are, and that are more than chance
_STEPS = sorted(range(-3, 4), key=abs)
_MAX_CANDIDATES = 4096
# logarithms of the least and the largest that are looked for
_LOGS = {"base": (math.log(20), math.log(1e10)), "factor": (math.log(1.01), math.log(1000))}
_FEW_VALUES = 65  # at which a law is computed
_GRID = 129
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
        changes = hypotheses.compare_layouts(self.meant.rope, turns.arrangement.layout)
        if turns.row_dtype is None:
            return changes
        return *changes, make_finding("table-in-{dtype}", dtype=turns.row_dtype, details="")

    def _explain(self, turns: Turns, num_levels: int | None) -> Found:
        layout, meant = self._compare_layouts(turns), self.meant.rope
        own = _arranged(meant, turns.arrangement)
        for level in islice(self._levels(own, turns), num_levels):
            fitting: list[tuple[int, float, Changes, Complex]] = []
            for hypothesis in level:
                worst = float(turns.misfit(*hypothesis[1:]).max())
                if worst > 1 or (own and hypotheses.is_idle(hypothesis, own, turns.positions)):
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
                    or (size == count and not hypotheses.turn_alike(turned, rows))
                )
                return best, (*islice(texts, 3),)
        return (*layout, *_name_pairs(own, turns)), ()

    def _levels(self, rope: Rope | None, turns: Turns) -> Iterator[Iterator[Hypothesis]]:
        """Hypotheses of no change, of one, and of two, the likelier before the others."""
        if rope is None:
            yield from self._measured(None, turns)
            return
        places = turns.positions
        same = suppose(rope, places)
        if not compare_factors(rope, turns):
            yield iter([same])
        single = [*hypotheses.alternatives(self.meant._replace(rope=rope), places)]

        def one() -> Iterator[Hypothesis]:
            yield suppose(rope, 0 * places, make_finding("not-turned"))
            yield from (same, *single, suppose(rope, 2 * places, make_finding("twice")))
            yield from self._moved(same, turns)
            yield from hypotheses.precisions(rope, turns)
            exchanged = rope.direction * 1j * np.conj(same.rows)
            yield same._replace(changes=(make_finding("swapped"),), rows=exchanged)
            yield from hypotheses.exchanged_axes(rope, places)

        def two(names: set[str]) -> Iterator[Hypothesis]:
            for first in single:
                name = first.changes[0].name
                # rare ones are tried beside a few only, for their number multiplies
                if (name in _OFTEN) == (names == _OFTEN):
                    rest = None if name == "direction" else names - {name}
                    other = Meant(first.rope, None if name == "layer" else self.meant.unresolved)
                    for second in hypotheses.alternatives(other, places, rest):
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
            yield suppose(rope, places + offset, *changes, *_offset_changes(offset))
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
        recorded = np.rint(self.positions.reshape(-1)[:_MAX_CANDIDATES])
        counted = np.arange(min(int(self.positions.shape[1]), _MAX_CANDIDATES), dtype=np.float64)
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
        offset, wrong = _offset_changes(by), off != by
        if not wrong.any():
            return offset
        first, last = int(np.argmax(wrong)), int(mapped.max())
        at = f"token {self.tokens[first]} (position {places[first]:.15g})"
        where = f"{at} is turned as {mapped[first]}"
        coarse = {dtype: hypotheses.positions_in(dtype, f": {where}") for dtype in COARSE}
        # what positions would be, and what is then said; of one row the first's are the token's own
        known: list[tuple[NDArray[Any], Changes]] = [
            (self.positions[0, column], (make_finding("first-row", where=where),))
        ]
        for dtype, step in product(COARSE, _STEPS):
            names = (*_offset_changes(step), coarse[dtype])
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
        return hypotheses.compare(self.meant.rope, found, self.meant.unresolved)

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
            for one in (*known, *_find_ropes(rope, turns, at, by_base_alone=bool(changes))):
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
                    for other in _find_ropes(one, turns, mapped, by_base_alone=True):
                        yield from self._moved(suppose(other, places, *self._compare(other)), turns)

        for by in dict.fromkeys((offset, *_STEPS)):
            yield found_at(places + by, *_offset_changes(by))
        for dtype in COARSE:
            yield found_at(rounded(places, dtype), hypotheses.positions_in(dtype))
        if places.ndim == 1:
            yield refined()


def _find_ropes(
    meant: Rope | None, turns: Turns, places: NDArray[Any], *, by_base_alone: bool = False
) -> Iterator[Rope]:
    """The rope with bases that tokens allow, either direction, and with factors of a law.

    The law is its own, none or a linear one; its own or none with another base alone.
    """
    if meant is None or meant.base is None:
        return
    linear = () if by_base_alone else (Linear(factor=factor) for factor in hypotheses.FACTORS)
    for law, direction in product(dict.fromkeys((meant.scaling, None, *linear)), (1, -1)):
        rope = replace(meant, scaling=law, direction=direction)
        yield from _find_values(rope, "base", turns, places)
    for law in () if by_base_alone else dict.fromkeys((meant.scaling, Linear(factor=2.0))):
        if hasattr(law, "factor"):
            yield from _find_values(replace(meant, scaling=law), "factor", turns, places)


def _with_value(rope: Rope, name: str, value: float) -> Rope:
    """The rope with another base, or another factor of its law."""
    if name == "base":
        return replace(rope, base=value)
    return replace(rope, scaling=replace(cast(Any, rope.scaling), factor=value))


def _find_values(rope: Rope, name: str, turns: Turns, places: NDArray[Any]) -> Iterator[Rope]:
    """The rope with each base or factor that tokens allow, those with few digits first.

    The values that a few tokens allow are found on a grid, then on finer ones for more tokens, up
    to as many as allow any: where positions restart, the first may be right all the same.
    """
    (low, high), values = _LOGS[name], Interval(1, 0)
    of_pairs = of_each_pair(places, axes_of(rope))  # [T, 1 or num_pairs]
    # near 0 all bases are alike, and far away a coarse grid misses the right one
    order = np.argsort(np.abs(of_pairs).max(axis=1), kind="stable")
    allowing, tried, limit, refinements = 0, min(4, len(order)), len(order), 3
    while refinements:
        some = order[:tried]
        count = _GRID + int((high - low) * float(np.abs(of_pairs[some]).max()) / 8)
        grid = np.linspace(low, high, min(count, 4 * _MAX_CANDIDATES))
        kept = _allowed_values(rope, name, grid, of_pairs[some], turns, some)
        if len(kept):
            step = float(grid[1] - grid[0])
            low, high = max(float(kept[0]) - step, _LOGS[name][0]), float(kept[-1]) + step
            values = Interval(low, high).exp()
            refinements -= tried == limit
            allowing, tried = tried, min(2 * tried, limit)
        elif allowing in (0, tried):
            break
        else:
            limit = tried - 1
            tried = (allowing + tried) // 2
    for value in values.decimals():
        yield (found := _with_value(rope, name, value))
        if turns.misfit(*suppose(found, places)[1:]).max() <= 1:
            break  # others have more digits


def _allowed_values(
    rope: Rope, name: str, logs: Floats, of_pairs: NDArray[Any], turns: Turns,
    some: NDArray[np.intp],
) -> Floats:  # fmt: skip
    """The logarithms of values, of those on an even grid, that some tokens allow.

    Their positions are ``[T, 1 or num_pairs]``.
    """
    z, (low, high) = turns.z[some], turns.gain
    allowed, gain = turns.errors[some] + (high - low) / 2, (low + high) / 2
    # logarithms of frequencies are nearly linear: known at some values, [values, pairs]
    is_linear = rope.scaling is None or isinstance(rope.scaling, Linear)
    few: Floats = np.linspace(float(logs[0]), float(logs[-1]), 4 if is_linear else _FEW_VALUES)
    lawful = np.array([_with_value(rope, name, math.exp(log)).inv_freq for log in few.tolist()])
    known = np.log(np.maximum(lawful, 1e-300))
    slopes = np.abs(np.gradient(known, few, axis=0))
    bends = np.pad(np.abs(np.diff(known, 2, axis=0)), ((1, 1), (0, 0)), "edge")
    # beside a bend or a jump it is that far off
    bends = np.maximum(bends, np.maximum(np.roll(bends, 1, axis=0), np.roll(bends, -1, axis=0)))
    columns = np.concatenate([known, slopes * (logs[1] - logs[0]) + bends], axis=1).T
    kept: list[float] = []
    for part in np.array_split(logs, 1 + len(logs) * z.size // 4_000_000):
        between: list[Floats] = [np.interp(part, few, column) for column in columns]
        log_f, unsure = np.split(np.stack(between, axis=1), 2, axis=1)  # [values, pairs] each
        # [values, T, pairs]
        angles = rope.direction * of_pairs * np.exp(log_f)[:, None]
        # neighbours on the grid are a step apart, and float32 angles rounded
        slack = gain * np.minimum(np.abs(angles) * (unsure[:, None] + 2.0**-20), 2)
        fits = np.abs(z - gain * np.exp(1j * angles)) <= allowed + slack
        kept += part[fits.all(axis=(1, 2))].tolist()
    return np.array(kept)


def _name_pairs(rope: Rope | None, turns: Turns) -> Changes:
    """From which pair on the frequencies differ."""
    if rope is None:
        return (make_finding("frequencies", where=""),)
    misfit = turns.misfit(*suppose(rope, turns.positions)[1:]).max(axis=0)
    pairs: list[int] = np.flatnonzero(misfit > 1).tolist()
    found = make_finding("angles")
    if pairs:
        where = f" from pair {pairs[0]} on: pairs {ranges(pairs)}"
        found = make_finding("frequencies", where=where)
    return found, *compare_factors(rope, turns)


def is_vague(changes: Changes) -> bool:
    """Whether it is said that something differs, and not why."""
    return any(change.name in ("frequencies", "angles", "tokens") for change in changes)


def _offset_changes(by: float) -> Changes:
    return (make_finding("offset", offset=by, more=""),) if by else ()


def _arranged(rope: Rope, arrangement: Arrangement) -> Rope | None:
    """The rope with the pairs of an arrangement; None if its law or axes do not fit them."""
    fields = ("pairing", "pairing_out", "rotary_dim", "rotary_start")
    with suppress(PhasorError):
        return replace(rope, **{name: getattr(arrangement.layout, name) for name in fields})
    return None
