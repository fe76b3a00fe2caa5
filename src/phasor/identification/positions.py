"""The second question: as which positions tokens are turned.

`BEYOND` and `NEGATIVE` are the ways in which programs take a position for another, in the order in
which they are tried. `add_limits` asks a function at the positions where they show;
`Tokens.moved` finds them in what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasor.axes import Mixed
from phasor.identification.hypotheses import Hypothesis, suppose
from phasor.identification.probes import Measured
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.roundings import COARSE, positions_in
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
from phasor.identification.turns import ANGLE_ERROR, Turns, angle_errors, rows_of
from phasor.numpy import every_axis_of, phasors
from phasor.rope import Rope

_Places = NDArray[Any]  # whole numbers, [T]
# as which position another is turned
_Source = Callable[[int], Any]
# as which positions others are turned, by the table's end
_Map = Callable[[Any, Any], Any]
# offsets of positions that are tried, the nearest first
_OFFSETS = np.array(sorted({*range(-64, 65)} - {0}, key=abs))
#: Small offsets, the nearest first.
STEPS = sorted(range(-3, 4), key=abs)
_FEW = 6  # tokens on which they are, and that are more than chance
_MAX_CANDIDATES = 4096  # recorded positions that tokens may be turned as
# how far positions are looked for, and pairs of an axis of which fewer fit somewhere by chance
_FAR, _LEAST_PAIRS = 1 << 17, 4
_MAX_ROWS = 4  # of a batch that are listed


class PositionMap(NamedTuple):
    """One way in which a program takes positions for others."""

    name: str  # of the finding; empty where it is right
    says: str  # what happens, by the table's ``{end}`` and its ``{last}`` row
    turned_as: _Map

    def finding(self, end: int) -> Finding:
        """The finding about a table with this many rows."""
        text = self.text(end)
        return make_finding(self.name, last=end - 1, end=end, beyond=text, negative=text)

    def text(self, end: int) -> str:
        """What happens, of a table with so many rows."""
        return self.says.format(end=end, last=end - 1)


def _by_end(turned_as: Callable[[Any, Any], Any]) -> _Map:
    return turned_as


#: What becomes of positions ``p`` from a table's end on, the likeliest first.
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
#: What becomes of negative positions; without a table its end is 0.
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
_GARBAGE = "it gives something else (memory that is no table, or other rows)"
_NOT_TURNED, _CLAMPED, _WRAPPED = BEYOND


# Of functions, which are asked.


def add_limits(measured: Measured, max_position: int) -> None:
    """Add a table's end, rounded positions, and the results of negative positions."""
    first_rounded: dict[str, int] = {}
    near = (p + step for p in powers_of_two(max_position)[3:] for step in (-1, 1))
    positions = [p for p in near if p <= max_position]
    # most functions turn all in one call; a position that comes out otherwise is asked alone
    together = measured.results(*positions, in_one_call=True)

    def dtype_of(position: int, others: Iterable[str] = ()) -> str | None:
        """The dtype to which the position was rounded: float64, one found before, or another."""
        dtypes = ("float64", *first_rounded, *others)
        sources = {name: partial(rounded, dtype=name) for name in dtypes}
        known = {position: together[position]} if position in together else {}
        dtype = measured.find_source(known, sources)
        return dtype or measured.find_source(measured.results(position), sources)

    last_good, end = 0, None
    for position in positions:
        # rounding to a dtype begins behind a power of two, and is seen there first
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


def _describe_table_end(measured: Measured, end: int) -> tuple[str, str]:
    """The name of what happens beyond a table's end, and what it is."""
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
    """The name of what happens to negative positions, empty if it is right, and what it is."""
    results = measured.results(-1, -3, -6)
    if len(results) < 3:
        return "", f"is refused ({measured.refusal})"
    garbage = "negative-garbage", "gives something else (another row of a table, perhaps)"
    return _find_map(measured, results, NEGATIVE, end or 0) or garbage


def _find_map(
    measured: Measured, results: Mapping[int, Complex], maps: Sequence[PositionMap], end: int
) -> tuple[str, str] | None:
    """The name and text of the first map as which all of these positions were turned."""
    offset = measured.report.position_offset
    # an offset is added to a position before the table is asked, or to the row that it is
    for before in dict.fromkeys((int(offset) if offset % 1 == 0 else 0, 0)):
        rows = end + before if end else 0

        def source(one: PositionMap, before: int = before, rows: int = rows) -> _Source:
            def turned_as(position: int) -> Any:
                return one.turned_as(position + before, rows) - before

            return turned_as

        found = measured.find_source(results, {one: source(one) for one in maps})
        if found is not None:
            return found.name, found.text(rows)
    return None


def find_offset(spectrum: Spectrum) -> tuple[float | None, list[Finding]]:
    """The number added to positions, from the angles at position 0; None if none explains them."""
    f, phase = spectrum.inv_freq, spectrum.phase
    turning = np.abs(f) > spectrum.uncertainty
    # of a pair that has made less than a turn, the angle is the offset times the frequency
    candidates = np.unique([0.0, *(np.rint(2 * phase[turning] / f[turning]) / 2)])
    errors = np.abs(np.exp(1j * candidates[:, None] * f) - np.exp(1j * phase))
    # cos, sin, their factor and the result are rounded, which is twice an ulp
    tolerances = spectrum.phase_uncertainty + np.abs(candidates)[:, None] * spectrum.uncertainty
    fits = np.all(errors <= 2 * tolerances, axis=1)  # [candidates]
    if not fits.any():
        return None, [make_finding("constant-phase")]
    order = np.lexsort((errors.max(axis=1), candidates != 0))
    offset, *others = candidates[order][fits[order]].tolist()
    more = f" ({', '.join(f'{p:+g}' for p in others)} within rounding)" if others else ""
    more += f": position 0 is turned as {offset:g}. Scores of distances are right, keys turned "
    finding = make_finding("offset", offset=offset, more=f"{more}elsewhere are not")
    return offset, [finding] if offset else []


# Of tokens, which were recorded.


@dataclass(frozen=True)
class Tokens:
    """Tokens that are looked at, beside the positions of the whole recording."""

    index: NDArray[np.intp]  # counted through the batch
    positions: NDArray[Any]  # of the whole recording, [batch, seq] or [batch, seq, n_axes]

    def of(self, some: NDArray[np.bool_]) -> Tokens:
        """Some of them."""
        return Tokens(self.index[some], self.positions)

    def moved(self, hypothesis: Hypothesis, turns: Turns) -> Iterator[Hypothesis]:
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
        for finding, mapped in find_maps(rope, turns, every, rows):
            yield suppose(rope, every_axis_of(rope, mapped), *changes, finding)
        mapped = self.map_positions(rope, turns, every)
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
        shifted = np.unique(np.add.outer(STEPS, known))
        coarse = [rounded(shifted, dtype) for dtype in COARSE]
        coarse += [np.add.outer(STEPS, rounded(known, dtype)).ravel() for dtype in COARSE]
        return np.unique(np.concatenate([shifted, *coarse])).astype(np.int64)

    def map_positions(
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
        column = self.index % self.positions.shape[1]
        # the first tokens show an offset alone, where others restart
        off = mapped - places
        by = off[0] if np.all(off[:3] == off[0]) else 0
        offset, wrong = offset_changes(by), off != by
        if not wrong.any():
            return offset
        first = int(np.argmax(wrong))
        at = f"token {self.index[first]} (position {places[first]:.15g})"
        where = f"{at} is turned as {mapped[first]}"
        coarse = {dtype: positions_in(dtype, f": {where}") for dtype in COARSE}
        # what positions would be, and what is then said; of one row the first's are the token's own
        known: list[tuple[NDArray[Any], Changes]] = [
            (self.positions[0, column], (make_finding("first-row", where=where),))
        ]
        for dtype, step in product(COARSE, STEPS):
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
            which = self.name_some(wrong, places)
            return make_finding("tokens", which=which, more=""), make_finding("twice")
        # a table ends before the first wrong one; the map is of positions, and the offset follows
        shifted = mapped - by
        ends = {_NOT_TURNED: places[first], _CLAMPED: shifted.max() + 1}
        ends[_WRAPPED] = places[first] - shifted[first]
        for one, end in ends.items():
            if end > 0:
                expected = one.turned_as(places, end) + by
                known.append((expected, (*offset, one.finding(int(end)))))
        restart = make_finding("restart", how="restart elsewhere", where=where)
        is_garbage = _is_garbage(mapped, places, wrong)
        counted = "are counted through and do not restart"
        known += [
            (column, (*offset, make_finding("restart", how=counted, where=where))),
            (mapped, (*offset, _garbage_from(int(places[first])) if is_garbage else restart)),
        ]
        return next(names for expected, names in known if np.array_equal(mapped, expected))

    def name_some(self, is_bad: NDArray[np.bool_], places: NDArray[Any]) -> str:
        """Which of them are wrong, by their positions ``[T]`` or ``[T, n_axes]``."""
        places = places.reshape(len(is_bad), -1).max(axis=1)
        good, bad = places[~is_bad], places[is_bad]
        if good.max() < bad.min():
            return f"tokens from position {bad.min():.15g} on"
        if bad.max() < good.min():
            return f"tokens up to position {bad.max():.15g}"
        return f"some tokens, such as {self.index[is_bad][0]} at position {bad[0]:.15g},"


def offset_changes(by: float) -> Changes:
    """That positions are off by a number, unless it is 0."""
    return (make_finding("offset", offset=by, more=""),) if by else ()


def _is_garbage(mapped: _Places, places: _Places, wrong: NDArray[np.bool_]) -> bool:
    """Whether all tokens beyond a table's end, and no others, are turned as anything."""
    if places[~wrong].max(initial=-1) >= places[wrong].min():
        return False
    are_neighbours = wrong[1:] & (np.diff(places) == 1)
    return bool(are_neighbours.any() and not np.any(np.diff(mapped)[are_neighbours] == 1))


def _garbage_from(end: int) -> Finding:
    return make_finding("table-end-garbage", last=end - 1, end=end, beyond=_GARBAGE)


def find_maps(
    rope: Rope, turns: Turns, places: _Places, rows: Complex
) -> Iterator[tuple[Finding, _Places]]:
    """Maps of positions beyond a table's end, or below 0, that explain every wrong token."""
    is_right = turns.misfit(rope, places, rows).max(axis=1) <= 1
    wrong = places[~is_right]
    if not len(wrong) or not is_right.any() or np.any(places % 1):
        return
    maps, ends = NEGATIVE[1:], np.arange(_FAR)
    if wrong.min() >= 0:
        # a table ends behind the last token before them that is right
        first = int(wrong.min())
        last_right = int(places[is_right & (places < first)].max(initial=0))
        maps, ends = BEYOND, np.arange(max(last_right + 1, first - _MAX_CANDIDATES), first + 1)
    elif wrong.max() >= 0:
        return
    for one in maps:
        fitting = ends
        for token in np.flatnonzero(~is_right).tolist():
            candidates = one.turned_as(places[token], fitting) + 0 * fitting
            fitting = fitting[_are_turned_as(rope, turns, token, candidates)]
            if not len(fitting):
                break
        if len(fitting):
            # of ends that all fit the first wrong token's, which was seen
            end = int(fitting[-1])
            yield one.finding(end), one.turned_as(places, end)


def _are_turned_as(rope: Rope, turns: Turns, token: int, candidates: _Places) -> NDArray[np.bool_]:
    """As which of these positions a token may be turned, tried pair by pair."""
    fits, size = np.ones(len(candidates), bool), turns.factor(rope)
    for pair, f in enumerate((rope.direction * rope.inv_freq).tolist()):
        angles = candidates[fits] * f
        slack = turns.errors[token, pair] + size * np.minimum(np.abs(angles) * ANGLE_ERROR, 2)
        fits[fits] = np.abs(turns.z[token, pair] - size * np.exp(1j * angles)) <= slack
    return fits


_Offsets = NDArray[np.int64]


def find_far_positions(rope: Rope, turns: Turns, tokens: Tokens) -> Changes:
    """Where tokens are turned as if they stood, on each axis alone; nothing if nowhere."""
    if isinstance(rope.axes, Mixed):
        return ()
    places = turns.positions.reshape(len(turns.z), -1)
    turned = turns.z * np.conj(rows_of(rope, turns.positions)) / turns.factor(rope)
    allowed = turns.allowed(rope, turns.positions) / turns.factor(rope)
    axis_of_pair = np.array(rope.axes.axis_of_pair(rope.num_pairs))
    named: list[tuple[Changes, Changes]] = []  # without the axis and with it
    for axis in range(rope.axes.n_axes):
        pairs = np.flatnonzero(axis_of_pair == axis)
        f, column = rope.direction * rope.inv_freq[pairs], places[:, axis % places.shape[1]]
        if not len(pairs):
            continue
        fitting = _offsets(turned[:, pairs], allowed[:, pairs], f)
        if not all(map(len, fitting)):
            return ()
        plain, with_axis = (
            _name_offsets(fitting, column, tokens, on) for on in ("", f" on axis {axis}")
        )
        if plain and len(pairs) < _LEAST_PAIRS:
            return ()
        named.append((plain, with_axis))
    if len({plain for plain, _ in named}) == 1:  # as text has it
        return named[0][0]
    return tuple(change for _, with_axis in named for change in with_axis)


def _offsets(turned: Any, allowed: Floats, f: Floats) -> list[_Offsets]:
    """The offsets that turn each token's pairs further as they are turned, the nearest first."""
    every = np.array(sorted(range(-_FAR, _FAR + 1), key=abs))
    by_first, fitting = np.exp(1j * every * f[0]), list[_Offsets]()
    for z, error in zip(turned, allowed, strict=True):
        offsets = every[np.abs(z[0] - by_first) <= error[0] + np.abs(every * f[0]) * ANGLE_ERROR]
        for k in range(1, len(f)):
            angles = offsets * f[k]
            slack = error[k] + np.abs(angles) * ANGLE_ERROR
            offsets = offsets[np.abs(z[k] - np.exp(1j * angles)) <= slack]
        fitting.append(offsets)
    return fitting


def _name_offsets(fitting: list[_Offsets], places: Floats, tokens: Tokens, on: str) -> Changes:
    """One offset of all, of rows of the batch, or where the first wrong token is turned.

    ``on`` says the axis, where there are several.
    """
    rows = tokens.index // tokens.positions.shape[1]

    def shared(row: int | None) -> _Offsets:
        some = (one for one, at in zip(fitting, rows, strict=True) if row in (None, at))
        return reduce(np.intersect1d, some)

    def likely(offsets: _Offsets) -> int:
        return 0 if 0 in offsets else int(np.sort(offsets)[len(offsets) // 2])

    def offset(by: int, rows: str = "") -> Changes:
        return (make_finding("offset", offset=by, more=f"{on}{rows}"),)

    if len(common := shared(None)):
        return offset(by) if (by := likely(common)) else ()
    of_rows = {row: shared(row) for row in np.unique(rows).tolist()}
    if len(of_rows) > 1 and len(of_rows) < len(tokens.index) and all(map(len, of_rows.values())):
        wrong = [(row, by) for row, one in of_rows.items() if (by := likely(one))]
        first_row, first_by = wrong[0]
        listed = "".join(f", {by:+d} in row {row}" for row, by in wrong[1:_MAX_ROWS])
        more = ", and so are others" if len(wrong) > _MAX_ROWS else ""
        return offset(first_by, f" in row {first_row}{listed} of the batch{more}")
    first = next(i for i, offsets in enumerate(fitting) if 0 not in offsets)
    place, turned_as = places[first], places[first] + likely(fitting[first])
    where = f"token {tokens.index[first]} (position {place:.15g}) is turned as {turned_as:.15g}"
    return (make_finding("restart", how=f"{on} are others".strip(), where=where),)
