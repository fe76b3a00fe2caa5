"""How a function differs from a Rope, or from another function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from phasor.errors import SpecError, TensorError
from phasor.identification.calling import Caller, Calling, RefusedError, find_caller
from phasor.identification.expecting import (
    Reference,
    find_differences,
    is_among,
    superseded_by,
)
from phasor.identification.functions import Measurement, measure
from phasor.identification.laws import MISTAKES
from phasor.identification.report import (
    NAMES,
    Changes,
    Difference,
    Finding,
    is_rounding,
    make_finding,
)
from phasor.identification.spectrum import Floats, find_first_bad, near_powers_of_two
from phasor.numpy import matrix, pair_indices
from phasor.rope import Rope

Function = Callable[..., Any]
# positions up to this far beyond the first difference are searched for causes
_FAR = 1 << 12


@dataclass(frozen=True, kw_only=True)
class MapDifference(Difference):
    """How two linear maps differ, and the first position where they do.

    ``size`` and ``score`` are None where a function returns NaN or infinity.
    """

    # the first position found where they differ; None if they agree wherever they were compared
    position: int | None = None
    # the axis with this position, if the other axes have 0; None if every axis has this position
    axis: int | None = None
    # the input and the output coordinate with the largest difference there
    coordinates: tuple[int, int] | None = None
    pair: int | None = None  # the pair that reads the input, in the first side that is a Rope
    size: float | None = None  # the largest distance between two images of a unit vector there
    # the largest change of a score of unit vectors, with the query there and the key at 0
    score: float | None = None
    # how a function differs from the other side, the most important first; empty if unknown
    causes: Changes = ()
    # the message of the function that refused the position; other fields are None then
    refused: str | None = None
    context: int = 0  # positions 0 to ``context - 1`` were compared

    def lines(self) -> list[str]:
        return [*(cause.sentence for cause in self.causes), self._where()]

    def _where(self) -> str:
        if self.position is None:
            return f"They agree wherever they were compared, positions 0 to {self.context - 1}."
        where = "" if self.axis is None else f" on axis {self.axis}, 0 on the others"
        text = f"They differ at position {self.position}{where}"
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


# Where the two sides differ.


def _find_parting(
    first: Rope | Caller, second: Rope | Caller, context: int, tolerance: float
) -> MapDifference | None:
    """The first position found where two functions, or a function and a Rope, differ."""
    n_axes = next((side.axes.n_axes for side in (first, second) if isinstance(side, Rope)), 1)
    # the same position on all axes, as in text, and then on each axis alone
    ways = (None, *range(n_axes)) if n_axes > 1 else (None,)

    def compare_at(position: int) -> MapDifference | None:
        images = (compare_on(axis, position) for axis in ways)
        return next((image for image in images if image is not None), None)

    def compare_on(axis: int | None, position: int) -> MapDifference | None:
        maps = [_try_to_find_map(side, position, axis) for side in (first, second)]
        refusals = [image for image in maps if isinstance(image, RefusedError)]
        if refusals:
            if len(refusals) == 2:  # two functions that refuse the same position agree
                return None
            message = str(refusals[0])
            return MapDifference(position=position, axis=axis, refused=message, context=context)
        first_map, second_map = (cast(Floats, image) for image in maps)
        origins = [_find_map(side, 0) for side in (first, second)]
        are_alike = ~np.isfinite(first_map) & ~np.isfinite(second_map)
        distances = np.linalg.norm(np.where(are_alike, 0, first_map - second_map), axis=0)
        if np.all(distances <= tolerance):
            return None
        column = int(np.argmax(np.where(np.isfinite(distances), distances, np.inf)))
        # [d, d]: how the scores of every two unit vectors change, with the key at position 0
        scores = first_map.T @ origins[0] - second_map.T @ origins[1]
        pairs = (_pair_of(side, column) for side in (first, second) if isinstance(side, Rope))
        return MapDifference(
            position=position,
            context=context,
            axis=axis,
            coordinates=(column, int(np.argmax(np.abs(first_map - second_map)[:, column]))),
            pair=next(pairs, None),
            size=float(distances[column]) if np.isfinite(distances[column]) else None,
            score=float(np.linalg.norm(scores, 2)) if np.isfinite(scores).all() else None,
        )

    last_equal = -1
    for position in near_powers_of_two(context):
        if compare_at(position) is not None:
            return compare_at(find_first_bad(last_equal, position, lambda p: compare_at(p) is None))
        last_equal = position
    return None


def _try_to_find_map(side: Rope | Caller, position: int, axis: int | None) -> Floats | RefusedError:
    try:
        return _find_map(side, position, axis)
    except RefusedError as error:
        return error


def _find_map(side: Rope | Caller, position: int, axis: int | None = None) -> Floats:
    """The linear map ``[out, in]``; the map of queries if keys have a different map."""
    n_axes = side.n_axes if isinstance(side, Caller) else side.axes.n_axes
    place = position * (np.ones(n_axes, int) if axis is None else np.eye(n_axes, dtype=int)[axis])
    if isinstance(side, Caller):
        return side.turn(np.eye(side.head_dim), place[None] if n_axes > 1 else place)[0, 0].T
    return matrix(place if n_axes > 1 else position, side)


def _pair_of(rope: Rope, coordinate: int) -> int | None:
    pairs = np.flatnonzero(np.equal(pair_indices(rope, rope.pairing), coordinate).any(axis=0))
    return int(pairs[0]) if len(pairs) else None


# Why the two sides differ.


def _compare_functions(
    callers: Sequence[Caller], measured: Sequence[Measurement], max_position: int
) -> Changes:
    """The findings that only one of two functions has, those of the first function first."""
    reports = [measurement.report for measurement in measured]
    references = [Reference.from_report(report) for report in reports]
    # the reference is the first function, or the second if only the second performs a Rope
    index = 0 if references[0] is not None else 1
    reference, compared = references[index], 1 - index
    unshared = [
        [finding for finding in report.findings if not is_among(finding, counterpart.findings)]
        for report, counterpart in (reports, reports[::-1])
    ]
    reference_only = [
        finding for finding in unshared[index] if finding.name != "beyond-half-a-turn"
    ]
    findings = unshared[compared]
    if reference is not None and callers[0].head_dim == callers[1].head_dim:
        names = {finding.name for finding in reference_only}
        # a finding about the reference is reported for it, and not reversed for the other function
        superseded = superseded_by(names) | (names - {finding.name for finding in findings})
        if names & MISTAKES or any(name.startswith("frequencies-in") for name in names):
            superseded |= {*NAMES["frequencies"], "angles"}
        differences = find_differences(
            callers[compared], measured[compared], reference, max_position
        )
        findings = [finding for finding in differences if finding.name not in superseded]
        factors = reports[compared].attention_factor, reports[index].attention_factor
        measured_factor = make_finding("factor", found=factors[0] or 1, factor=factors[1] or 1)
        findings = [
            measured_factor if finding.name == "factor" else finding for finding in findings
        ]
    sides = {index: reference_only, compared: findings}
    return tuple(
        Finding(finding.name, f"The {order}: {finding.sentence}")
        for side, order in enumerate(("first", "second"))
        for finding in sides[side]
    )


def diff_functions(
    a: Rope | Function, b: Rope | Function, context: int, tolerance: float | None,
    head_dim: int | None, calling: dict[str, Any],
) -> MapDifference | None:  # fmt: skip
    """How two functions, or a function and a Rope, differ; None if they agree."""
    rope = next((side for side in (a, b) if isinstance(side, Rope)), None)
    width = head_dim if rope is None else rope.head_dim
    if width is None:
        raise SpecError("functions need the width of a head: give head_dim (--head-dim)")
    if head_dim not in (None, width):
        raise SpecError(
            f"head_dim (--head-dim) must be as wide as the model's, {width}, got {head_dim}"
        )
    if rope is not None:
        calling.setdefault("n_axes", rope.axes.n_axes)
    options = Calling(**calling)
    functions = [side for side in (a, b) if not isinstance(side, Rope)]
    found_callers = iter(_find_callers(functions, width, options))
    sides = [side if isinstance(side, Rope) else next(found_callers) for side in (a, b)]
    callers = [side for side in sides if isinstance(side, Caller)]
    # measured before any other call, because a function may remember calls
    measured = [_try_to_measure(caller, context - 1) for caller in callers]
    are_equally_wide = len({side.head_dim for side in sides}) == 1
    difference = None
    if are_equally_wide:
        difference = _find_parting(sides[0], sides[1], context, tolerance or 1e-3)
    max_position = _FAR + (0 if difference is None else difference.position or 0)
    causes: Changes = ()
    measurements = [measurement for measurement in measured if measurement is not None]
    if rope is None and len(measurements) == 2:
        causes = _compare_functions(callers, measurements, max_position)
    elif rope is not None and measurements:
        # joined heads turn as one head, which is wider than the expected head
        reference = Reference(rope) if are_equally_wide else None
        causes = find_differences(callers[0], measurements[0], reference, max_position)
    if difference is None:
        # a tolerance that the caller gave covers roundings
        causes = tuple(cause for cause in causes if tolerance is None or not is_rounding(cause))
        difference = MapDifference(context=context) if causes or not are_equally_wide else None
    return None if difference is None else replace(difference, causes=causes)


def _find_callers(functions: Sequence[Function], width: int, options: Calling) -> list[Caller]:
    """How to call each function; one of them may not need the table that the other takes."""
    callers: list[Caller] = []
    for function in functions:
        try:
            callers.append(find_caller(function, width, options))
        except TensorError:
            if options.table is None or len(functions) == 1:
                raise
            callers.append(find_caller(function, width, options._replace(table=None)))
    return callers


def _try_to_measure(caller: Caller, max_position: int) -> Measurement | None:
    try:
        return measure(caller, max_position)
    except RefusedError:  # a function need not rotate every position that is measured
        return None
