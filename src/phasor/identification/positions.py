"""The second question: which positions turn the tokens.

`BEYOND` and `NEGATIVE` list how programs confuse positions, in the order in which they are tried.
`add_limits` calls a function at the positions where confusions show; `Tokens.moved` finds them in
recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import compress, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.axes import Mixed
from phasor.identification.hypotheses import Hypothesis, suppose
from phasor.identification.probes import Measured
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.roundings import COARSE, positions_in
from phasor.identification.shifts import Shifts
from phasor.identification.spectrum import (
    DTYPES,
    ROUNDING,
    Complex,
    Floats,
    Spectrum,
    find_first_bad,
    powers_of_two,
    rounded,
)
from phasor.identification.turns import Turns
from phasor.numpy import every_axis_of
from phasor.rope import Rope

_Places = NDArray[Any]  # whole numbers, [T]
# from positions and the end of a table to the positions that a program uses instead
_Map = Callable[[Any, Any], Any]


def _nearest(reach: int) -> NDArray[np.int64]:
    """The whole numbers from ``-reach`` to ``reach``, those nearest to 0 first."""
    return np.array(sorted(range(-reach, reach + 1), key=abs))


#: Small offsets, the smallest first.
STEPS: list[int] = _nearest(3).tolist()
#: Offsets that are tried together with other differences, 0 first.
OFFSETS = _nearest(64)
_FAR = 1 << 17  # the largest offset in a search for far positions
_FEW = 6  # if this many tokens agree, it is not by chance
_LEAST_PAIRS = 4  # an axis with fewer pairs fits some position by chance
_MAX_ROWS = 4  # a sentence lists this many rows of a batch at most


class PositionMap(NamedTuple):
    """One way in which a program uses other positions than it is given."""

    name: str  # the name of the finding; empty if this way is right
    effect: str  # a description with the table's ``{end}`` and its ``{last}`` row
    turned_as: _Map

    def finding(self, end: int, before: int = 0) -> Finding:
        """The finding for a table of ``end`` rows, when ``before`` is first added to positions."""
        text, first = self.text(end), end - before
        return make_finding(self.name, last=first - 1, end=first, beyond=text, negative=text)

    def text(self, end: int) -> str:
        """The effect with a table of ``end`` rows."""
        return self.effect.format(end=end, last=end - 1)


def _by_end(turned_as: Callable[[Any, Any], Any]) -> _Map:
    return turned_as


#: What programs do with positions beyond a table's end, the likeliest first.
BEYOND = (
    PositionMap(
        "table-end-identity",
        "it does not turn at all (identity)",
        _by_end(lambda p, end: np.where(p < end, p, 0)),
    ),
    PositionMap(
        "clamped",
        "every position is turned as {last} (clamped)",
        _by_end(lambda p, end: np.minimum(p, end - 1)),
    ),
    PositionMap(
        "wrapped", "positions start again at 0 (modulo {end})", _by_end(lambda p, end: p % end)
    ),
)
#: What programs do with negative positions; without a table, ``end`` is 0.
NEGATIVE = (
    PositionMap("", "is turned backwards, as it should be", _by_end(lambda p, end: p)),
    PositionMap(
        "negative-wraps",
        "counts from the table's end (-1 is {last})",
        _by_end(lambda p, end: p + end * (p < 0)),
    ),
    PositionMap(
        "negative-unsigned",
        "is turned as if it were positive",
        _by_end(lambda p, end: p * np.sign(p)),
    ),
    PositionMap("negative-clamped", "is turned as 0", _by_end(lambda p, end: np.maximum(p, 0))),
)
_GARBAGE = "it gives something else (memory outside the table, or other rows)"


def _maps_by_row(asked: int, row: int, last: int) -> Iterator[tuple[PositionMap, int]]:
    """Maps that give ``row`` for the position ``asked``, each with the length of its table.

    ``last`` is the highest row that any token was given.
    """
    not_turned, clamped, wrapped = BEYOND
    length = abs(int(asked) - int(row))
    if asked < 0:  # a negative position may also wrap from the other end
        yield from ((position_map, length) for position_map in (*reversed(NEGATIVE[1:]), wrapped))
    elif asked > 0:
        yield from ((not_turned, int(asked)), (clamped, int(last) + 1))
        yield from [(wrapped, length)] * (length > 0)


# Positions of a function, which is called.


def add_limits(measured: Measured) -> None:
    """Add findings about a table's end, rounded positions and negative positions."""
    first_rounded: dict[str, int] = {}
    max_position = measured.max_position
    near = (p + step for p in powers_of_two(max_position)[3:] for step in (-1, 1))
    positions = [p for p in near if p <= max_position]
    # most functions take all positions in one call; a position with a wrong result is tried alone
    together = _find_dtypes(measured, measured.results(*positions, in_one_call=True))

    def dtype_of(position: int, others: Iterable[str] = ()) -> str | None:
        """The dtype that the position was rounded to: float64, one found before, or another one."""
        likely = ("float64", *first_rounded, *others)
        for dtype in likely:
            if dtype in together.get(position, ()):
                return dtype
        alone = _find_dtypes(measured, measured.results(position)).get(position, ())
        return next((dtype for dtype in likely if dtype in alone), None)

    last_good, end = 0, None
    for position in positions:
        # rounding to a dtype begins above a power of two, and shows there first
        dtype = dtype_of(position, DTYPES)
        if dtype is None:
            end = find_first_bad(last_good, position, lambda p: dtype_of(p) is not None)
            break
        first_rounded.setdefault(dtype, position)
        last_good = position
    if end is not None:
        name, beyond = _describe_table_end(measured, end)
        measured.add(
            make_finding(name, last=end - 1, end=end, beyond=beyond), table_end=end, beyond=beyond
        )
    first_rounded.pop("float64", None)
    for dtype, position in first_rounded.items():
        where = f": {position} is turned as if it were {int(rounded(position, dtype))}"
        measured.add(positions_in(dtype, where))
    name, negative = _describe_negative_positions(measured, end)
    said = [make_finding(name, negative=negative)] if name else []
    measured.add(*said, negative=negative)


def _find_dtypes(measured: Measured, results: Mapping[int, Complex]) -> dict[int, list[str]]:
    """The dtypes that each of these positions may have been rounded to, the finest first."""
    places, shifts = np.array([*results], np.float64), measured.shifts(results)
    fitting = [shifts.fit_each(rounded(places, dtype) - places).tolist() for dtype in DTYPES]
    of_each = zip(*fitting, strict=True)  # for each position, whether each dtype fits
    return {
        position: [*compress(DTYPES, fits)] for position, fits in zip(results, of_each, strict=True)
    }


def _describe_table_end(measured: Measured, end: int) -> tuple[str, str]:
    """The finding's name and a description of what happens beyond a table's end."""
    if not measured.results(end):
        return "table-end-raises", f"it raises ({measured.refusal})"
    results = measured.results(end, end + 1, end + 2, 2 * end + 3)
    values = np.array(list(results.values()))
    if not np.isfinite(values).all():
        return "table-end-nan", "it gives NaN"
    if not values.any():
        return "table-end-zeros", "it gives zeros"
    return _find_map(measured, results, BEYOND, end) or ("table-end-garbage", _GARBAGE)


def _describe_negative_positions(measured: Measured, end: int | None) -> tuple[str, str]:
    """The finding's name (empty if all is right) and what happens to negative positions."""
    results = measured.results(-1, -3, -6)
    if len(results) < 3:
        return "", f"is refused ({measured.refusal})"
    garbage = "negative-garbage", "gives something else (another row of a table, perhaps)"
    return _find_map(measured, results, NEGATIVE, end or 0) or garbage


def _find_map(
    measured: Measured, results: Mapping[int, Complex], maps: Sequence[PositionMap], end: int
) -> tuple[str, str] | None:
    """The name and text of the first map that explains the turns at all these positions."""
    offset, places = measured.report.position_offset, np.array([*results])
    shifts = measured.shifts(results)
    # a program adds an offset before it looks the position up in the table, or afterwards
    for before in dict.fromkeys((int(offset) if offset % 1 == 0 else 0, 0)):
        rows = end + before if end else 0
        for position_map in maps:
            turned_as = position_map.turned_as(places + before, rows) - before
            if shifts.fit_each(turned_as - places).all():
                return position_map.name, position_map.text(rows)
    return None


def _fitting_maps(
    shifts: Shifts, places: _Places, tokens: Iterable[int], maps: Sequence[PositionMap],
    ends: _Places,
) -> Iterator[tuple[PositionMap, int]]:  # fmt: skip
    """The maps that explain these tokens, each with the last end of a table that fits."""
    for position_map in maps:
        fitting = ends
        for token in tokens:
            # many ends may lead to the same position
            rows = position_map.turned_as(places[token], fitting) + 0 * fitting
            turned_as, of_end = np.unique(rows, return_inverse=True)
            fitting = fitting[shifts.fit(token, turned_as - places[token])[of_end]]
            if not len(fitting):
                break
        if len(fitting):
            yield position_map, int(fitting[-1])


def find_offset(spectrum: Spectrum) -> tuple[float | None, list[Finding]]:
    """The number added to positions, from the angles at position 0; None if no number fits."""
    f, phase = spectrum.inv_freq, spectrum.phase
    turning = np.abs(f) > spectrum.uncertainty
    # while a pair has made less than a turn, its angle is the offset times its frequency
    candidates = np.unique([0.0, *(np.rint(2 * phase[turning] / f[turning]) / 2)])
    errors = np.abs(np.exp(1j * candidates[:, None] * f) - np.exp(1j * phase))
    # cos, sin, their factor and the result are rounded: together two ulps
    tolerances = spectrum.phase_uncertainty + np.abs(candidates)[:, None] * spectrum.uncertainty
    fits = np.all(errors <= 2 * tolerances, axis=1)  # [candidates]
    if not fits.any():
        return None, [make_finding("constant-phase")]
    order = np.lexsort((errors.max(axis=1), candidates != 0))
    offset, *others = candidates[order][fits[order]].tolist()
    more = f" ({', '.join(f'{p:+g}' for p in others)} within rounding)" if others else ""
    more += f": position 0 is turned as {offset:g}. Scores are right, but keys that other code "
    finding = make_finding("offset", offset=offset, more=f"{more}has turned do not match")
    return offset, [finding] if offset else []


# Positions of tokens, which were recorded.


@dataclass(frozen=True)
class Tokens:
    """The tokens to explain, and the positions of the whole recording."""

    index: NDArray[np.intp]  # the index of each token, counted through the whole batch
    positions: NDArray[Any]  # all recorded positions, [batch, seq] or [batch, seq, n_axes]

    def of(self, some: NDArray[np.bool_]) -> Tokens:
        """The tokens for which ``some`` is true."""
        return Tokens(self.index[some], self.positions)

    def moved(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """The hypothesis at other positions, if these explain every token."""
        changes, rope, places, rows = hypothesis
        shifts = Shifts.of(hypothesis, turns)
        for offset in shifts.shared(OFFSETS[1:]).tolist():
            yield suppose(rope, places + offset, *changes, *offset_changes(offset))
        every = places if places.ndim == 1 else places[:, 0]
        if places.ndim > 1 and np.any(places != every[:, None]):
            return  # the coordinates of text are all equal
        is_right = turns.misfit(rope, places, rows).max(axis=1) <= 1
        for finding, mapped in find_maps(shifts, every, is_right):
            yield suppose(rope, every_axis_of(rope, mapped), *changes, finding)
        mapped = self.map_positions(shifts, every)
        if mapped is not None:
            names = self.name_positions(mapped, every)
            yield suppose(rope, every_axis_of(rope, mapped), *changes, *names)

    def moved_far(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """The hypothesis at positions far from those recorded, on each axis alone."""
        changes, rope, places, _ = hypothesis
        if not isinstance(rope.axes, Mixed):
            names, mapped = find_far_positions(Shifts.of(hypothesis, turns), rope, places, self)
            if names:
                yield suppose(rope, mapped, *changes, *names)

    @cached_property
    def _candidates(self) -> NDArray[np.int64]:
        """Positions that a program may use for the recorded ones."""
        # a program may shift positions, round them, or count the tokens of a row
        counted = np.arange(int(self.positions.shape[1]), dtype=np.float64)
        known: Floats = np.union1d(np.rint(self.positions), counted)
        shifted = np.unique(np.add.outer(STEPS, known))
        coarse = [rounded(shifted, dtype) for dtype in COARSE]
        coarse += [
            np.add.outer(STEPS, np.unique(rounded(known, dtype))).ravel() for dtype in COARSE
        ]
        return np.unique(np.concatenate([shifted, *coarse])).astype(np.int64)

    def map_positions(self, shifts: Shifts, places: _Places) -> NDArray[np.int64] | None:
        """The position that turns each token, near the recorded ones; None if one has none."""
        mapped = np.empty(len(places), np.int64)
        for token, place in enumerate(places):
            fitting = self._candidates[shifts.fit(token, self._candidates - place)]
            if not len(fitting):
                return None
            # the nearest of the positions that noise cannot tell apart
            mapped[token] = fitting[np.argmin(np.abs(fitting - place))]
        return mapped

    def name_positions(self, mapped: _Places, places: NDArray[Any]) -> Changes:
        if not mapped.any():
            return (make_finding("not-turned"),)
        column = self.index % self.positions.shape[1]
        # the first few tokens show an offset even if later positions restart
        off = mapped - places
        offsets, counts = np.unique(off[:_FEW], return_counts=True)
        by = offsets[counts.argmax()] if counts.max() >= min(3, len(off)) else 0
        offset, wrong = offset_changes(by), off != by
        if not wrong.any():
            return offset
        first = int(np.argmax(wrong))
        at = f"token {self.index[first]} (position {places[first]:.15g})"
        where = f"{at} is turned as {mapped[first]}"
        coarse = {dtype: positions_in(dtype, f": {where}") for dtype in COARSE}
        # positions that would explain the tokens, with the findings; a single row is the first row
        likely: list[tuple[NDArray[Any], Changes]] = [
            (self.positions[0, column], (make_finding("first-row", where=where),))
        ]
        for dtype, step in product(COARSE, STEPS):
            names = (*offset_changes(step), coarse[dtype])
            shifted = rounded(places + step, dtype), rounded(places, dtype) + step
            likely += [(expected, names) for expected in shifted]
        for dtype in COARSE:
            far = np.abs(mapped) > 1 / ROUNDING[dtype]
            # rounding is evident if the positions used are rounded, and the recorded ones are not
            is_rounded, *others = (
                np.array_equal(rounded(some[far], dtype), some[far])
                for some in (mapped, column, places)
            )
            if far.sum() >= _FEW and is_rounded and not all(others):
                offset += (coarse[dtype],)
        if not by and not wrong.all() and np.array_equal(mapped, (1 + wrong) * places):
            which = self.name_some(wrong, places)
            return make_finding("tokens", which=which, more=""), make_finding("twice")
        # a program adds an offset before it looks the position up in a table, or afterwards
        for before in dict.fromkeys((by, 0)):
            asked, rows = places + before, mapped - (by - before)
            named = _maps_by_row(asked[first], rows[first], rows.max())
            likely += [
                (
                    position_map.turned_as(asked, end) + by - before,
                    (*offset, position_map.finding(end, int(before))),
                )
                for position_map, end in named
            ]
        restart = make_finding("restart", how="restart elsewhere", where=where)
        is_garbage = _is_garbage(mapped, places, wrong)
        counted = "count on through the recording and do not restart"
        likely += [
            (column, (*offset, make_finding("restart", how=counted, where=where))),
            (mapped, (*offset, _garbage_from(int(places[first])) if is_garbage else restart)),
        ]
        return next(names for expected, names in likely if np.array_equal(mapped, expected))

    def name_some(self, is_bad: NDArray[np.bool_], places: NDArray[Any]) -> str:
        """A text that lists the wrong tokens; ``places`` are ``[T]`` or ``[T, n_axes]``."""
        places = places.reshape(len(is_bad), -1).max(axis=1)
        good, bad = places[~is_bad], places[is_bad]
        if good.max() < bad.min():
            return f"tokens from position {bad.min():.15g} on"
        if bad.max() < good.min():
            return f"tokens up to position {bad.max():.15g}"
        return f"some tokens, such as {self.index[is_bad][0]} at position {bad[0]:.15g},"


def offset_changes(by: float) -> Changes:
    """The finding that positions are off by a number; empty if the number is 0."""
    return (make_finding("offset", offset=by, more=""),) if by else ()


def _is_garbage(mapped: _Places, places: _Places, wrong: NDArray[np.bool_]) -> bool:
    """Whether all tokens beyond a table's end, and only these, are turned at random."""
    if places[~wrong].max(initial=-1) >= places[wrong].min():
        return False
    are_neighbours = wrong[1:] & (np.diff(places) == 1)
    return bool(are_neighbours.any() and not np.any(np.diff(mapped)[are_neighbours] == 1))


def _garbage_from(end: int) -> Finding:
    return make_finding("table-end-garbage", last=end - 1, end=end, beyond=_GARBAGE)


def find_maps(
    shifts: Shifts, places: _Places, is_right: NDArray[np.bool_]
) -> Iterator[tuple[Finding, _Places]]:
    """Maps for positions beyond a table's end, or below 0, that explain every wrong token."""
    wrong = places[~is_right]
    if not len(wrong) or not is_right.any() or np.any(places % 1):
        return
    maps, ends = NEGATIVE[1:], np.arange(_FAR)
    if wrong.min() >= 0:
        # the table ends after the last right token before the wrong ones
        first = int(wrong.min())
        last_right = int(places[is_right & (places < first)].max(initial=0))
        maps, ends = BEYOND, np.arange(max(last_right + 1, first - _FAR), first + 1)
    elif wrong.max() >= 0:
        return
    # if several ends fit, report the position of the first wrong token, which was seen
    for position_map, end in _fitting_maps(
        shifts, places, np.flatnonzero(~is_right).tolist(), maps, ends
    ):
        yield position_map.finding(end), position_map.turned_as(places, end)


def find_far_positions(
    shifts: Shifts, rope: Rope, places: _Places, tokens: Tokens
) -> tuple[Changes, _Places]:
    """The positions that turn the tokens, found on each axis alone; no findings if none fit."""
    mapped = np.array(places).reshape(len(places), -1)
    axis_of_pair = np.array(rope.axes.axis_of_pair(rope.num_pairs))
    every = _nearest(_FAR)
    named: list[tuple[Changes, Changes]] = []  # findings without the axis, and with it
    for axis in range(rope.axes.n_axes):
        pairs = np.flatnonzero(axis_of_pair == axis).tolist()
        if not pairs:
            continue
        fitting = [every[shifts.fit(token, every, pairs)] for token in range(len(places))]
        if not all(map(len, fitting)):
            return (), places
        column = mapped[:, axis].copy()
        (plain, _), (with_axis, by) = (
            _name_offsets(fitting, column, tokens, on) for on in ("", f" on axis {axis}")
        )
        if plain and len(pairs) < _LEAST_PAIRS:
            return (), places
        mapped[:, axis] += by
        named.append((plain, with_axis))
    changes = tuple(change for _, with_axis in named for change in with_axis)
    if len({plain for plain, _ in named}) == 1:  # the same on every axis, as for text
        changes = named[0][0]
    return changes, mapped.reshape(np.shape(places))


def _name_offsets(
    fitting: list[_Places], places: Floats, tokens: Tokens, on: str
) -> tuple[Changes, _Places]:
    """A common offset, an offset for each row of the batch, or the position of one wrong token.

    ``on`` names the axis if there are several. Returns the findings and each token's offset.
    """
    rows = tokens.index // tokens.positions.shape[1]

    def shared(row: int | None) -> _Places:
        some = (offsets for offsets, at in zip(fitting, rows, strict=True) if row in (None, at))
        return reduce(np.intersect1d, some)

    def likely(offsets: _Places) -> int:
        return 0 if 0 in offsets else int(np.sort(offsets)[len(offsets) // 2])

    def offset(by: int, rows: str = "") -> Changes:
        return (make_finding("offset", offset=by, more=f"{on}{rows}"),) if by else ()

    if len(common := shared(None)):
        by = likely(common)
        return offset(by), np.full(len(places), by)
    of_rows = {row: shared(row) for row in np.unique(rows).tolist()}
    if len(of_rows) > 1 and len(of_rows) < len(tokens.index) and all(map(len, of_rows.values())):
        by_row = {row: likely(offsets) for row, offsets in of_rows.items()}
        (first_row, first_by), *others = ((row, by) for row, by in by_row.items() if by)
        listed = "".join(f", {by:+d} in row {row}" for row, by in others[: _MAX_ROWS - 1])
        more = ", and so are others" if len(others) >= _MAX_ROWS else ""
        where = f" in row {first_row}{listed} of the batch{more}"
        return offset(first_by, where), np.array([by_row[row] for row in rows.tolist()])
    by_token = np.array([likely(offsets) for offsets in fitting])
    if not on:
        return tokens.name_positions(places + by_token, places), by_token
    first = int(np.flatnonzero(by_token)[0])
    place, turned_as = places[first], places[first] + by_token[first]
    where = f"token {tokens.index[first]} (position {place:.15g}) is turned as {turned_as:.15g}"
    return (make_finding("restart", how=f"{on} differ".strip(), where=where),), by_token
