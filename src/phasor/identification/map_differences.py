"""How a function differs from a Rope, or from another function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phasor.errors import SpecError
from phasor.identification.calling import Caller, Calling, RefusedError, find_caller
from phasor.identification.functions import find_differences, measure
from phasor.identification.report import Changes, Difference, is_rounding
from phasor.identification.spectrum import Floats, find_first_bad, near_powers_of_two
from phasor.numpy import matrix, pair_indices
from phasor.rope import Rope

Function = Callable[..., Any]
# positions beyond where two part that are asked for why
_FAR = 1 << 12


@dataclass(frozen=True, kw_only=True)
class MapDifference(Difference):
    """How two linear maps differ, and the position where they part; what is not finite is None."""

    # the first found at which they differ, None if they do not where they were compared
    position: int | None = None
    # of several axes the one on which it is, with 0 on the others; None if it is on all of them
    axis: int | None = None
    # the one read and the one written that differ most there
    coordinates: tuple[int, int] | None = None
    pair: int | None = None  # the pair that reads it, in the first side that is a Rope
    size: float | None = None  # how far apart the images of a unit vector are there, at most
    # the largest change of a score of unit vectors, the query there and the key at 0
    score: float | None = None
    # what a function does otherwise than a Rope, the most important first; none if unknown
    causes: Changes = ()
    # the message of the function that refused the position; all else is None then
    refused: str | None = None
    context: int = 0  # positions 0 to ``context - 1`` were compared

    def lines(self) -> list[str]:
        return [*(cause.sentence for cause in self.causes), self._where()]

    def _where(self) -> str:
        if self.position is None:
            return f"They agree wherever they were compared, positions 0 to {self.context - 1}."
        where = "" if self.axis is None else f" on axis {self.axis}, 0 on the others"
        text = f"They part at position {self.position}{where}"
        if self.refused is not None:
            return f"{text}, which one refuses: {self.refused}."
        if self.pair is not None:
            text += f"{',' if where else ''} in pair {self.pair}"
        if self.size is None or self.score is None:
            return f"{text}: one gives no finite numbers."
        return (
            f"{text}: a unit vector comes out {self.size:.3g} apart, and a score of unit vectors "
            f"changes by up to {self.score:.3g}."
        )


def _find_parting(
    first: Rope | Caller, second: Rope | Caller, context: int, tolerance: float
) -> MapDifference | None:
    """The first position found where two functions, or a function and a Rope, differ."""
    n_axes = next((side.axes.n_axes for side in (first, second) if isinstance(side, Rope)), 1)
    # on all axes, where images and text are alike, and on each alone
    ways = (None, *range(n_axes)) if n_axes > 1 else (None,)

    def compare_at(position: int) -> MapDifference | None:
        found = (compare_on(axis, position) for axis in ways)
        return next((one for one in found if one is not None), None)

    def compare_on(axis: int | None, position: int) -> MapDifference | None:
        try:
            first_map, second_map = (_find_map(side, position, axis) for side in (first, second))
            origins = [_find_map(side, 0) for side in (first, second)]
        except RefusedError as error:
            return MapDifference(position=position, axis=axis, refused=str(error), context=context)
        distances = np.linalg.norm(first_map - second_map, axis=0)
        if np.all(distances <= tolerance):
            return None
        read = int(np.argmax(np.where(np.isfinite(distances), distances, np.inf)))
        # [d, d]: how the scores of all pairs of unit vectors change, the key at position 0
        scores = first_map.T @ origins[0] - second_map.T @ origins[1]
        pairs = (_pair_of(side, read) for side in (first, second) if isinstance(side, Rope))
        return MapDifference(
            position=position,
            context=context,
            axis=axis,
            coordinates=(read, int(np.argmax(np.abs(first_map - second_map)[:, read]))),
            pair=next(pairs, None),
            size=float(distances[read]) if np.isfinite(distances[read]) else None,
            score=float(np.linalg.norm(scores, 2)) if np.isfinite(scores).all() else None,
        )

    last_equal = -1
    for position in near_powers_of_two(context):
        if compare_at(position) is not None:
            return compare_at(find_first_bad(last_equal, position, lambda p: compare_at(p) is None))
        last_equal = position
    return None


def _find_map(side: Rope | Caller, position: int, axis: int | None = None) -> Floats:
    """The linear map ``[out, in]``; the queries' if there is one for keys."""
    n_axes = side.n_axes if isinstance(side, Caller) else side.axes.n_axes
    place = position * (np.ones(n_axes, int) if axis is None else np.eye(n_axes, dtype=int)[axis])
    if isinstance(side, Caller):
        return side.turn(np.eye(side.head_dim), place[None] if n_axes > 1 else place)[0, 0].T
    return matrix(place if n_axes > 1 else position, side)


def _pair_of(rope: Rope, coordinate: int) -> int | None:
    pairs = np.flatnonzero(np.equal(pair_indices(rope, rope.pairing), coordinate).any(axis=0))
    return int(pairs[0]) if len(pairs) else None


def diff_functions(
    a: Rope | Function, b: Rope | Function, context: int, tolerance: float | None,
    head_dim: int | None, calling: dict[str, Any],
) -> MapDifference | None:  # fmt: skip
    """How two functions, or a function and a Rope, differ; None if they agree."""
    rope = next((side for side in (a, b) if isinstance(side, Rope)), None)
    width = head_dim if rope is None else rope.head_dim
    if width is None:
        raise SpecError("functions are called with heads of one width: give head_dim (--head-dim)")
    if head_dim not in (None, width):
        raise SpecError(
            f"head_dim (--head-dim) must be as wide as the model's, {width}, got {head_dim}"
        )
    if rope is not None:
        calling.setdefault("n_axes", rope.axes.n_axes)
    how = Calling(**calling)
    sides = [side if isinstance(side, Rope) else find_caller(side, width, how) for side in (a, b)]
    for side in sides:
        if isinstance(side, Caller) and side.joined_heads > 1:  # whose maps are wider
            findings = measure(side, context - 1).report.findings
            return MapDifference(context=context, causes=findings)
    if rope is None:
        return _find_parting(sides[0], sides[1], context, tolerance or 1e-3)
    caller = next(side for side in sides if isinstance(side, Caller))
    # first of all: a function may remember the calls below
    try:
        measured = measure(caller, context - 1)
    except RefusedError:  # of positions that every function is to turn
        measured = None
    found = _find_parting(sides[0], sides[1], context, tolerance or 1e-3)
    near = _FAR + (0 if found is None else found.position or 0)
    causes = () if measured is None else find_differences(rope, caller, measured, near)
    if found is None:
        # roundings are within a tolerance that was given
        causes = tuple(one for one in causes if tolerance is None or not is_rounding(one))
        found = MapDifference(context=context) if causes else None
    return None if found is None else replace(found, causes=causes)
