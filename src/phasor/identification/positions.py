"""The second question: as which positions tokens are turned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.axes import Mixed
from phasor.identification.probes import Measured
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.spectrum import (
    DTYPES,
    Floats,
    Spectrum,
    find_first_bad,
    powers_of_two,
    rounded,
)
from phasor.identification.turns import ANGLE_ERROR, Turns, rows_of
from phasor.rope import Rope

# the name of a finding, empty if it is none, and what happens
_Said = tuple[str, str]


def add_limits(measured: Measured, max_position: int) -> None:
    """Add a table's end, rounded positions, and the results of negative positions."""
    first_rounded: dict[str, int] = {}
    near = (p + step for p in powers_of_two(max_position)[3:] for step in (-1, 1))
    positions = [p for p in near if p <= max_position]
    # most functions turn all in one call; a position that comes out otherwise is asked alone
    together = measured.results(*positions, in_one_call=True)

    def dtype_of(position: int) -> str | None:
        """The dtype to which the position was rounded: float64, one found before, or the finest."""
        dtypes = ("float64", *first_rounded, *DTYPES)
        sources = {name: partial(rounded, dtype=name) for name in dtypes}
        known = {position: together[position]} if position in together else {}
        dtype = measured.find_source(known, sources)
        return dtype or measured.find_source(measured.results(position), sources)

    last_good, end = 0, None
    for position in positions:
        dtype = dtype_of(position)
        if dtype is None:
            end = find_first_bad(last_good, position, lambda p: dtype_of(p) is not None)
            break
        first_rounded.setdefault(dtype, position)
        last_good = position
    if end is not None:
        name, beyond = _describe_table_end(measured, end)
        sentence = f"Up to position {end - 1} it turns; from {end} on {beyond}."
        measured.add(Finding(name, sentence), table_end=end, beyond=beyond)
    first_rounded.pop("float64", None)
    for dtype, position in first_rounded.items():
        where = f": {position} is turned as if it were {int(rounded(position, dtype))}"
        measured.add(make_finding("positions-in-{dtype}", dtype=dtype, where=where))
    name, negative = _describe_negative_positions(measured, end)
    said = [Finding(name, f"A negative position {negative}.")] if name else []
    measured.add(*said, negative=negative)


def _describe_table_end(measured: Measured, end: int) -> _Said:
    if not measured.results(end):
        return "table-end-raises", f"it raises ({measured.refusal})"
    results = measured.results(end, end + 1, end + 2, 2 * end + 3)
    values = np.array(list(results.values()))
    if not np.isfinite(values).all():
        return "table-end-nan", "it gives NaN"
    if not values.any():
        return "table-end-zeros", "it gives zeros"
    if np.abs(values - 1).max() < 1e-3:
        return "table-end-identity", "it does not turn at all (identity)"
    sources: dict[_Said, Callable[[int], int]] = {
        ("clamped", f"every position is turned as {end - 1} (clamped)"): lambda p: end - 1,
        ("wrapped", f"positions start again at 0 (modulo {end})"): lambda p: p % end,
    }
    other = "it gives something else (memory that is no table, or other rows)"
    return measured.find_source(results, sources) or ("table-end-garbage", other)


def _describe_negative_positions(measured: Measured, end: int | None) -> _Said:
    results = measured.results(-1, -3, -6)
    if len(results) < 3:
        return "", f"is refused ({measured.refusal})"
    rows = end or 0  # of the table; without one, -1 is the source of -1
    sources: dict[_Said, Callable[[int], int]] = {
        ("", "is turned backwards, as it should be"): lambda p: p,
        ("negative-wraps", f"counts from the table's end (-1 is {rows - 1})"): lambda p: rows + p,
        ("negative-unsigned", "is turned as if it were positive"): abs,
        ("negative-clamped", "is turned as 0"): lambda p: 0,
    }
    other = "gives something else (another row of a table, perhaps)"
    return measured.find_source(results, sources) or ("negative-garbage", other)


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


def offset_changes(by: float) -> Changes:
    """That positions are off by a number, unless it is 0."""
    return (make_finding("offset", offset=by, more=""),) if by else ()


# how far positions are looked for, and pairs of an axis of which fewer fit somewhere by chance
_FAR, _LEAST_PAIRS = 1 << 17, 4


_MAX_ROWS = 4


_Offsets = NDArray[np.int64]


def find_far_positions(
    rope: Rope, turns: Turns, tokens: NDArray[np.intp], row_length: int
) -> Changes:
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
            _name_offsets(fitting, column, tokens, row_length, on)
            for on in ("", f" on axis {axis}")
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


def _name_offsets(
    fitting: list[_Offsets], places: Floats, tokens: NDArray[np.intp], row_length: int, on: str
) -> Changes:
    """One offset of all, of rows of the batch, or where the first wrong token is turned.

    ``on`` says the axis, where there are several.
    """
    rows = tokens // row_length

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
    if len(of_rows) > 1 and len(of_rows) < len(tokens) and all(map(len, of_rows.values())):
        wrong = [(row, by) for row, one in of_rows.items() if (by := likely(one))]
        first_row, first_by = wrong[0]
        listed = "".join(f", {by:+d} in row {row}" for row, by in wrong[1:_MAX_ROWS])
        more = ", and so are others" if len(wrong) > _MAX_ROWS else ""
        return offset(first_by, f" in row {first_row}{listed} of the batch{more}")
    first = next(i for i, offsets in enumerate(fitting) if 0 not in offsets)
    place, turned_as = places[first], places[first] + likely(fitting[first])
    where = f"token {tokens[first]} (position {place:.15g}) is turned as {turned_as:.15g}"
    return (make_finding("restart", how=f"{on} are others".strip(), where=where),)
