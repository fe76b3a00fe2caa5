"""What no other rope does: tokens turned as at far positions, and members of a pair that differ."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasor.axes import Mixed
from phasor.identification.report import Changes, make_finding
from phasor.identification.spectrum import Floats
from phasor.identification.turns import (
    ANGLE_ERROR,
    Sample,
    Turns,
    angle_errors,
    arrangement_of,
    rows_of,
)
from phasor.pairings import PAIRINGS
from phasor.rope import Rope

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


def find_mixed_members(rope: Rope, sample: Sample) -> Changes:
    """Members of a pair with cos and sin of different pairs, or with the same sign of sin."""
    if sample.is_table:
        return ()
    kept, rows = sample.is_kept(), rope.attention_factor * rows_of(rope, sample.positions)
    unsure = angle_errors(sample.positions, rope.inv_freq)
    readings = {one: arrangement_of(replace(rope, pairing=one, pairing_out=None)).read
                for one in PAIRINGS}  # fmt: skip
    ways = {"": (-1, 1), "subtract": (-1, -1), "add": (1, 1)}
    for (pairing, members), (other, read) in product(readings.items(), repeat=2):
        pair_of = np.empty(rope.head_dim, np.intp)
        pair_of[read] = np.arange(rope.num_pairs)
        rows_name = f"{other}-rows-on-{'halves' if pairing == 'half' else pairing}"
        for how, signs in ways.items():
            if pairing == other and not how:
                continue
            fits = kept.copy()
            for sign, to, beside in zip(signs, members, members[::-1], strict=True):
                one, x, by = rows[:, None, pair_of[to]], sample.x[..., to], sample.x[..., beside]
                products = np.abs(x * one.real) + np.abs(by * one.imag)
                slack = np.hypot(x, by) * (unsure[:, None, pair_of[to]] + 2.0**-22)
                y = sample.y[..., to]
                off = np.abs(y - x * one.real - sign * by * one.imag)
                fits[..., to] = off <= sample.bounds(products, y) + slack
            if fits.all():
                names = () if pairing == other else (make_finding(rows_name),)
                return *names, *((make_finding("one-sign", how=how),) if how else ())
    return ()
