"""The second question: at which positions the tokens are turned.

`BEYOND` and `NEGATIVE` list how programs confuse positions, in the order in which they are tried.
`add_limits` calls a function at the positions where confusions show; `Tokens.find_moves` finds
confused positions in recordings.
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
    function: _Map

    def finding(self, end: int, before: int = 0) -> Finding:
        """The finding for a table of ``end`` rows, when ``before`` is first added to positions."""
        text, first = self.text(end), end - before
        return make_finding(self.name, last=first - 1, end=first, beyond=text, negative=text)

    def text(self, end: int) -> str:
        """The effect with a table of ``end`` rows."""
        return self.effect.format(end=end, last=end - 1)


def _end_map(function: Callable[[Any, Any], Any]) -> _Map:
    return function


#: What programs do with positions beyond a table's end, the likeliest first.
BEYOND = (
    PositionMap(
        "table-end-identity",
        "it does not turn at all (identity)",
        _end_map(lambda p, end: np.where(p < end, p, 0)),
    ),
    PositionMap(
        "clamped",
        "every position is turned as {last} (clamped)",
        _end_map(lambda p, end: np.minimum(p, end - 1)),
    ),
    PositionMap(
        "wrapped", "positions start again at 0 (modulo {end})", _end_map(lambda p, end: p % end)
    ),
)
#: What programs do with negative positions; without a table, ``end`` is 0.
NEGATIVE = (
    PositionMap("", "is turned backwards, as it should be", _end_map(lambda p, end: p)),
    PositionMap(
        "negative-wraps",
        "counts from the table's end (-1 is {last})",
        _end_map(lambda p, end: p + end * (p < 0)),
    ),
    PositionMap(
        "negative-unsigned",
        "is turned as if it were positive",
        _end_map(lambda p, end: p * np.sign(p)),
    ),
    PositionMap("negative-clamped", "is turned as 0", _end_map(lambda p, end: np.maximum(p, 0))),
)
_GARBAGE = "it gives something else (memory outside the table, or other rows)"


def _maps_by_row(position: int, row: int, last: int) -> Iterator[tuple[PositionMap, int]]:
    """Maps that give ``row`` for a position, each with the length of its table.

    ``last`` is the highest row that any token was given.
    """
    not_turned, clamped, wrapped = BEYOND
    length = abs(int(position) - int(row))
    if position < 0:  # a negative position may also wrap from the other end
        yield from ((position_map, length) for position_map in (*reversed(NEGATIVE[1:]), wrapped))
    elif position > 0:
        yield from ((not_turned, int(position)), (clamped, int(last) + 1))
        yield from [(wrapped, length)] * (length > 0)


# Positions of a function, which is called.


def add_limits(measured: Measured) -> None:
    """Add findings about a table's end, rounded positions and negative positions."""
    first_rounded: dict[str, int] = {}
    max_position = measured.max_position
    neighbours = (p + step for p in powers_of_two(max_position)[3:] for step in (-1, 1))
    positions = [p for p in neighbours if p <= max_position]
    # most functions take all positions in one call; a position with a wrong result is tried alone
    dtypes = _find_dtypes(measured, measured.results(*positions, single_call=True))

    def dtype_of(position: int, further: Iterable[str] = ()) -> str | None:
        """The dtype that the position was rounded to: float64, one found before, or another one."""
        likely = ("float64", *first_rounded, *further)
        for dtype in likely:
            if dtype in dtypes.get(position, ()):
                return dtype
        dtypes_alone = _find_dtypes(measured, measured.results(position)).get(position, ())
        return next((dtype for dtype in likely if dtype in dtypes_alone), None)

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
    findings = [make_finding(name, negative=negative)] if name else []
    measured.add(*findings, negative=negative)


def _find_dtypes(measured: Measured, results: Mapping[int, Complex]) -> dict[int, list[str]]:
    """The dtypes that each of these positions may have been rounded to, the finest first."""
    places, shifts = np.array([*results], np.float64), measured.shifts(results)
    fitting = [shifts.fit_each(rounded(places, dtype) - places).tolist() for dtype in DTYPES]
    fits_by_position = zip(*fitting, strict=True)  # for each position, whether each dtype fits
    return {
        position: [*compress(DTYPES, fits)]
        for position, fits in zip(results, fits_by_position, strict=True)
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
            mapped = position_map.function(places + before, rows) - before
            if shifts.fit_each(mapped - places).all():
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
            rows = position_map.function(places[token], fitting) + 0 * fitting
            mapped, index = np.unique(rows, return_inverse=True)
            fitting = fitting[shifts.fit(token, mapped - places[token])[index]]
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
    offset, *other_offsets = candidates[order][fits[order]].tolist()
    details = (
        f" ({', '.join(f'{p:+g}' for p in other_offsets)} within rounding)" if other_offsets else ""
    )
    details += f": position 0 is turned as {offset:g}. Scores are right, but keys that other code "
    finding = make_finding("offset", offset=offset, more=f"{details}has turned do not match")
    return offset, [finding] if offset else []


# Positions of tokens, which were recorded.


@dataclass(frozen=True)
class Tokens:
    """The tokens to explain, and the positions of the whole recording."""

    index: NDArray[np.intp]  # the index of each token, counted through the whole batch
    positions: NDArray[Any]  # all recorded positions, [batch, seq] or [batch, seq, n_axes]

    def select(self, is_chosen: NDArray[np.bool_]) -> Tokens:
        """The tokens for which ``is_chosen`` is true."""
        return Tokens(self.index[is_chosen], self.positions)

    def find_moves(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """The hypothesis at other positions, if they explain every token."""
        changes, rope, places, rows = hypothesis
        shifts = Shifts.from_hypothesis(hypothesis, turns)
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

    def find_far_moves(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
        """The hypothesis at positions far from those recorded, on each axis alone."""
        changes, rope, places, _ = hypothesis
        if not isinstance(rope.axes, Mixed):
            names, mapped = find_far_positions(
                Shifts.from_hypothesis(hypothesis, turns), rope, places, self
            )
            if names:
                yield suppose(rope, mapped, *changes, *names)

    @cached_property
    def _candidates(self) -> NDArray[np.int64]:
        """Positions that a program may use for the recorded ones."""
        # a program may shift positions, round them, or count the tokens of a row
        counted = np.arange(int(self.positions.shape[1]), dtype=np.float64)
        unshifted: Floats = np.union1d(np.rint(self.positions), counted)
        shifted = np.unique(np.add.outer(STEPS, unshifted))
        coarse = [rounded(shifted, dtype) for dtype in COARSE]
        coarse += [
            np.add.outer(STEPS, np.unique(rounded(unshifted, dtype))).ravel() for dtype in COARSE
        ]
        return np.unique(np.concatenate([shifted, *coarse])).astype(np.int64)

    def map_positions(self, shifts: Shifts, places: _Places) -> NDArray[np.int64] | None:
        """The position that explains each token, near the recorded one; None if one has none."""
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
        moves = mapped - places
        offsets, counts = np.unique(moves[:_FEW], return_counts=True)
        shift = offsets[counts.argmax()] if counts.max() >= min(3, len(moves)) else 0
        offset, is_wrong = offset_changes(shift), moves != shift
        if not is_wrong.any():
            return offset
        first = int(np.argmax(is_wrong))
        token_text = f"token {self.index[first]} (position {places[first]:.15g})"
        where = f"{token_text} is turned as {mapped[first]}"
        coarse = {dtype: positions_in(dtype, f": {where}") for dtype in COARSE}
        # positions that would explain the tokens, with the findings; a single row is the first row
        likely: list[tuple[NDArray[Any], Changes]] = [
            (self.positions[0, column], (make_finding("first-row", where=where),))
        ]
        for dtype, step in product(COARSE, STEPS):
            names = (*offset_changes(step), coarse[dtype])
            shifted = rounded(places + step, dtype), rounded(places, dtype) + step
            likely += [(explained, names) for explained in shifted]
        for dtype in COARSE:
            far = np.abs(mapped) > 1 / ROUNDING[dtype]
            # rounding is evident if the positions used are rounded, and the recorded ones are not
            is_rounded, *are_rounded = (
                np.array_equal(rounded(numbers[far], dtype), numbers[far])
                for numbers in (mapped, column, places)
            )
            if far.sum() >= _FEW and is_rounded and not all(are_rounded):
                offset += (coarse[dtype],)
        if not shift and not is_wrong.all() and np.array_equal(mapped, (1 + is_wrong) * places):
            listed = self.name_some(is_wrong, places)
            return make_finding("tokens", which=listed, more=""), make_finding("twice")
        # a program adds an offset before it looks the position up in a table, or afterwards
        for before in dict.fromkeys((shift, 0)):
            shifted_places, rows = places + before, mapped - (shift - before)
            position_maps = _maps_by_row(shifted_places[first], rows[first], rows.max())
            likely += [
                (
                    position_map.function(shifted_places, end) + shift - before,
                    (*offset, position_map.finding(end, int(before))),
                )
                for position_map, end in position_maps
            ]
        restart = make_finding("restart", how="restart elsewhere", where=where)
        is_garbage = _is_garbage(mapped, places, is_wrong)
        counted = "count on through the recording and do not restart"
        likely += [
            (column, (*offset, make_finding("restart", how=counted, where=where))),
            (mapped, (*offset, _garbage_from(int(places[first])) if is_garbage else restart)),
        ]
        return next(names for explained, names in likely if np.array_equal(mapped, explained))

    def name_some(self, is_bad: NDArray[np.bool_], places: NDArray[Any]) -> str:
        """A text that lists the wrong tokens; ``places`` are ``[T]`` or ``[T, n_axes]``."""
        places = places.reshape(len(is_bad), -1).max(axis=1)
        right_places, wrong_places = places[~is_bad], places[is_bad]
        if right_places.max() < wrong_places.min():
            return f"tokens from position {wrong_places.min():.15g} on"
        if wrong_places.max() < right_places.min():
            return f"tokens up to position {wrong_places.max():.15g}"
        return f"some tokens, such as {self.index[is_bad][0]} at position {wrong_places[0]:.15g},"


def offset_changes(offset: float) -> Changes:
    """The finding that positions are off by a number; empty if the number is 0."""
    return (make_finding("offset", offset=offset, more=""),) if offset else ()


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
    wrong_places = places[~is_right]
    if not len(wrong_places) or not is_right.any() or np.any(places % 1):
        return
    maps, ends = NEGATIVE[1:], np.arange(_FAR)
    if wrong_places.min() >= 0:
        # the table ends after the last right token before the wrong ones
        first = int(wrong_places.min())
        last_right = int(places[is_right & (places < first)].max(initial=0))
        maps, ends = BEYOND, np.arange(max(last_right + 1, first - _FAR), first + 1)
    elif wrong_places.max() >= 0:
        return
    # if several ends fit, report the position of the first wrong token, which was seen
    for position_map, end in _fitting_maps(
        shifts, places, np.flatnonzero(~is_right).tolist(), maps, ends
    ):
        yield position_map.finding(end), position_map.function(places, end)


def find_far_positions(
    shifts: Shifts, rope: Rope, places: _Places, tokens: Tokens
) -> tuple[Changes, _Places]:
    """The positions that turn the tokens, found on each axis alone; no findings if none fit."""
    mapped = np.array(places).reshape(len(places), -1)
    axis_of_pair = np.array(rope.axes.axis_of_pair(rope.num_pairs))
    every = _nearest(_FAR)
    found_changes: list[tuple[Changes, Changes]] = []  # findings without the axis, and with it
    for axis in range(rope.axes.n_axes):
        pairs = np.flatnonzero(axis_of_pair == axis).tolist()
        if not pairs:
            continue
        fitting = [every[shifts.fit(token, every, pairs)] for token in range(len(places))]
        if not all(map(len, fitting)):
            return (), places
        column = mapped[:, axis].copy()
        (unplaced, _), (placed, offsets) = (
            _name_offsets(fitting, column, tokens, on) for on in ("", f" on axis {axis}")
        )
        if unplaced and len(pairs) < _LEAST_PAIRS:
            return (), places
        mapped[:, axis] += offsets
        found_changes.append((unplaced, placed))
    changes = tuple(change for _, placed in found_changes for change in placed)
    if len({unplaced for unplaced, _ in found_changes}) == 1:  # alike on every axis, as for text
        changes = found_changes[0][0]
    return changes, mapped.reshape(np.shape(places))


def _name_offsets(
    fitting: list[_Places], places: Floats, tokens: Tokens, on: str
) -> tuple[Changes, _Places]:
    """A common offset, an offset for each row of the batch, or the position of one wrong token.

    ``on`` names the axis if there are several. Returns the findings and each token's offset.
    """
    rows = tokens.index // tokens.positions.shape[1]

    def shared(row: int | None) -> _Places:
        pairs = zip(fitting, rows.tolist(), strict=True)
        return reduce(np.intersect1d, (offsets for offsets, r in pairs if row in (None, r)))

    def likely(offsets: _Places) -> int:
        return 0 if 0 in offsets else int(np.sort(offsets)[len(offsets) // 2])

    def offset(shift: int, rows: str = "") -> Changes:
        return (make_finding("offset", offset=shift, more=f"{on}{rows}"),) if shift else ()

    if len(common := shared(None)):
        shift = likely(common)
        return offset(shift), np.full(len(places), shift)
    row_offsets = {row: shared(row) for row in np.unique(rows).tolist()}
    if 1 < len(row_offsets) < len(tokens.index) and all(map(len, row_offsets.values())):
        row_shifts = {row: likely(offsets) for row, offsets in row_offsets.items()}
        (first_row, first_shift), *further = (
            (row, step) for row, step in row_shifts.items() if step
        )
        listed = "".join(f", {step:+d} in row {row}" for row, step in further[: _MAX_ROWS - 1])
        rest = ", and so are others" if len(further) >= _MAX_ROWS else ""
        where = f" in row {first_row}{listed} of the batch{rest}"
        return offset(first_shift, where), np.array([row_shifts[row] for row in rows.tolist()])
    token_shifts = np.array([likely(offsets) for offsets in fitting])
    if not on:
        return tokens.name_positions(places + token_shifts, places), token_shifts
    first = int(np.flatnonzero(token_shifts)[0])
    place, mapped = places[first], places[first] + token_shifts[first]
    where = f"token {tokens.index[first]} (position {place:.15g}) is turned as {mapped:.15g}"
    return (make_finding("restart", how=f"{on} differ".strip(), where=where),), token_shifts
