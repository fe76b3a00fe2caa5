"""The third question: which frequencies, and how their base and law differ from the expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import chain, combinations, product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phasor.angles import axes_of, pair_coordinates
from phasor.axes import Mixed, OneAxis
from phasor.describe import by_axis, ranges, without_law
from phasor.errors import PhasorError
from phasor.identification.hypotheses import Change, ExpectedRope, Hypothesis, Positions, suppose
from phasor.identification.laws import USUAL_BASES, apply_twice, law_text
from phasor.identification.layout import narrower, other_axes
from phasor.identification.positions import OFFSETS, offset_changes
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.shifts import Shifts
from phasor.identification.spectrum import Floats, Interval, count_digits, simplest_near
from phasor.identification.turns import Turns
from phasor.rope import (
    Rope,
    base_of_axis,
    law_of_axis,
    plain_axes,
    values_by_axis,
    with_frequencies,
)
from phasor.scaling import NTK, DynamicNTK, Law, Linear, Llama3, LongRope, Rule, Yarn

_ORIGINALS = (8192, 4096, 32768, 2048)


#: The factors that published laws use.
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)


# numbers by which programs may multiply the positions of an axis
_FRACTIONS = sorted({a / b for a in range(1, 9) for b in range(1, 9) if a != b}, key=count_digits)
# the relative error allowed between a measured factor and the number in a program
_FACTOR_ERROR = 1e-3
# offsets that are tried together with such a number, if slow pairs cannot tell the offset
_MOST_OFFSETS = 4
# the relative error allowed in the exponent when another width explains a measured base
_EXPONENT_ERROR = 1e-4


def compare(expected: Rope, actual: Rope, unresolved: Rope | None = None) -> Changes:
    """How direction, base, law and axes differ; ``unresolved`` is the rope before its rule."""
    changes: list[Finding] = []
    if actual.direction != expected.direction:
        changes.append(make_finding("direction", way="the other way, R(-p) instead of R(p)"))
    if plain_axes(actual.axes) != actual.axes or plain_axes(expected.axes) != expected.axes:
        changes += _compare_by_axis(actual, expected)
    else:
        changes += _compare_base_and_law(actual, expected, unresolved or expected)
    if plain_axes(actual.axes) != plain_axes(expected.axes):
        text_of_one_axis = "every pair is turned by the first coordinate"
        axes_text = f"{plain_axes(actual.axes)!r} instead of {plain_axes(expected.axes)!r}"
        changes.append(
            make_finding("axes", found=text_of_one_axis if actual.axes == OneAxis() else axes_text)
        )
    return (*changes,)


def _compare_base_and_law(actual: Rope, expected: Rope, unresolved: Rope) -> Iterator[Finding]:
    # explicit frequencies have no base
    if actual.base not in (None, expected.base) and expected.base is not None:
        width = _find_width(expected, actual.base)
        numbers = {"found": _short(actual.base), "expected": _short(expected.base)}
        widths = {"width": width, "rotary_dim": expected.rotary_dim, "intended": expected.base}
        yield make_finding("base" if width is None else "exponent-width", **numbers, **widths)
    if actual.scaling != expected.scaling:
        yield _compare_laws(actual.scaling, expected, unresolved)


def _compare_by_axis(actual: Rope, expected: Rope) -> Iterator[Finding]:
    """How bases and laws differ where each axis has its own; nothing of listed frequencies."""
    n_axes = expected.axes.n_axes
    is_listed = any(rope.explicit_inv_freq is not None for rope in (actual, expected))
    if is_listed or actual.axes.n_axes != n_axes:
        return
    ropes = actual, expected
    bases = [[base_of_axis(rope, axis) for axis in range(n_axes)] for rope in ropes]
    laws = [[law_of_axis(rope, axis) for axis in range(n_axes)] for rope in ropes]
    if bases[0] != bases[1]:
        actual_text, expected_text = (
            by_axis([_short(base) for base in values]) for values in bases
        )
        yield make_finding("base", found=actual_text, expected=expected_text)
    if laws[0] != laws[1]:
        texts = [["no law" if law is None else law_text(law) for law in values] for values in laws]
        if set(laws[0]) == {None}:
            yield make_finding("law-missing", law=by_axis(texts[1], leaving_out="no law"))
        else:
            yield make_finding("law", found=by_axis(texts[0]), expected=by_axis(texts[1]))


def _find_width(expected: Rope, base: float) -> int | None:
    """The width that would make powers of the expected base look like powers of this base."""
    exponent = 0.0 if base in USUAL_BASES else math.log(base, cast(float, expected.base))
    width = expected.rotary_dim
    widths = dict.fromkeys((expected.head_dim, width // 2, 2 * width, width - 2, width + 2))
    for candidate in widths:
        fits = abs(exponent * candidate / width - 1) < _EXPONENT_ERROR
        if candidate not in (0, width) and fits:
            return candidate
    return None


def compare_factors(rope: Rope, turns: Turns) -> Changes:
    """How the measured factor on cos and sin differs from the rope's."""
    expected, actual = rope.attention_factor, turns.factor(rope)
    if actual == expected:
        return ()
    if actual == 1:
        return (make_finding("factor-missing", factor=expected),)
    if actual == expected**2:
        return (make_finding("factor-twice", factor=expected),)
    return (make_finding("factor", found=actual, factor=expected),)


def _compare_laws(actual: Law | Rule | None, rope: Rope, unresolved: Rope) -> Finding:
    expected = rope.scaling
    if isinstance(expected, Yarn) and actual == replace(expected, attention_factor=1.0):
        return make_finding("factor-missing", factor=rope.attention_factor)
    if actual is None:
        return make_finding("law-missing", law=type(unresolved.scaling).__name__)
    if type(actual) is not type(expected):
        actual_text, expected_text = (
            "no law" if law is None else law_text(cast(Law, law)) for law in (actual, expected)
        )
        return make_finding("law", found=actual_text, expected=expected_text)
    names = (field.name for field in fields(actual))
    parameters = ((name, getattr(actual, name), getattr(expected, name)) for name in names)
    texts = [f"{name} {_short(a)} instead of {_short(b)}" for name, a, b in parameters if a != b]
    return make_finding("law-parameter", law=type(actual).__name__, parameters=", ".join(texts))


def _short(value: Any) -> str:
    return f"{value:.9g}" if type(value) in (int, float) else f"{value}"


def alternatives(expected: ExpectedRope, places: Positions, name: str) -> Iterator[Hypothesis]:
    """Ropes that differ from the expected one in a single property, a name of `ROPES`."""
    for changes, rope in ROPES[name](expected):
        if rope != expected.rope and rope.num_pairs == expected.rope.num_pairs:
            with suppress(PhasorError):  # a law may need two pairs
                yield suppose(rope, places, *changes)


def other_ropes(expected: ExpectedRope, places: Positions) -> Iterator[Hypothesis]:
    """Ropes that differ from the expected one in a single property."""
    return chain.from_iterable(alternatives(expected, places, name) for name in ROPES)


def twice_other_ropes(expected: ExpectedRope, places: Positions) -> Iterator[Hypothesis]:
    """Ropes that differ from the expected one in two properties."""
    for first, second in combinations(ROPES, 2):
        for changed_once in alternatives(expected, places, first):
            # the rule belongs to the layer that the first change has chosen
            changed_expected = ExpectedRope(
                changed_once.rope, None if first == "layer" else expected.unresolved
            )
            for changed_twice in alternatives(changed_expected, places, second):
                yield changed_twice._replace(changes=changed_once.changes + changed_twice.changes)


def _compare_each(expected: ExpectedRope, ropes: Iterable[Rope]) -> Iterator[Change]:
    """Each rope, and how it differs from the expected one."""
    return ((compare(expected.rope, rope, expected.unresolved), rope) for rope in ropes)


def _reversed(expected: ExpectedRope) -> Iterator[Change]:
    rope = expected.rope
    return _compare_each(expected, [replace(rope, direction=-rope.direction)])


def _other_layers(expected: ExpectedRope) -> Iterator[Change]:
    return (((make_finding("layer", kind=kind),), rope) for kind, rope in expected.other_kinds)


def _other_bases(expected: ExpectedRope) -> Iterator[Change]:
    bases = dict.fromkeys((*(rope.base for _, rope in expected.other_kinds), *USUAL_BASES))
    likely = [base for base in bases if base and expected.rope.base]
    ropes = chain(
        _vary_axes(expected.rope, "base"), (replace(expected.rope, base=base) for base in likely)
    )
    return _compare_each(expected, ropes)


def _vary_axes(rope: Rope, name: str) -> Iterator[Rope]:
    """All axes with the ``base`` or ``scaling`` of one axis, or one axis with that of another."""
    values = values_by_axis(rope.axes, name)
    if values is None:
        return
    axes: Any = rope.axes
    for value in dict.fromkeys(values):
        for_all: dict[str, Any] = {"axes": replace(axes, **{name: None}), name: value}
        yield replace(rope, **for_all)
        for axis in range(len(values)):
            changed = (*values[:axis], value, *values[axis + 1 :])
            if any(axis_value != value for axis_value in changed):
                yield replace(rope, axes=replace(axes, **{name: changed}))


def _applied_twice(expected: ExpectedRope) -> Iterator[Change]:
    rope = expected.rope
    with suppress(PhasorError):
        f = apply_twice(rope)
        law = make_finding("law-twice", law=law_text(cast(Law, rope.scaling)))
        yield (law,), with_frequencies(rope, explicit_inv_freq=f)


def find_scaled_axes(
    rope: Rope, turns: Turns, inv_freq: Floats | None = None
) -> Iterator[Hypothesis]:
    """Hypotheses that multiply one axis's positions by a number, after adding an offset to all.

    The other axes determine the offset. The number is solved for if frequencies were measured;
    otherwise simple fractions are tried, and then every number that the turns allow.
    """
    n_axes = rope.axes.n_axes
    if n_axes == 1 or isinstance(rope.axes, Mixed):
        return
    shifts = Shifts.from_hypothesis(suppose(rope, turns.positions), turns)
    for axis in range(n_axes):
        name, factors = f"axis {axis}", list[float]()
        on_axis = np.equal(rope.axes.axis_of_pair(rope.num_pairs), axis)
        if inv_freq is None:
            factors = _FRACTIONS
        elif on_axis.any():
            ratio = float(np.median(inv_freq[on_axis] / rope.inv_freq[on_axis]))
            factors = [factor for factor in _FRACTIONS if abs(ratio / factor - 1) <= _FACTOR_ERROR]
            factors += [simplest_near(ratio, _FACTOR_ERROR) or 1.0]
        other_pairs = np.flatnonzero(~on_axis).tolist()
        # if all pairs follow this axis, no other axis determines the offset
        offsets = shifts.shared(OFFSETS, other_pairs) if other_pairs else OFFSETS[:1]
        for offset in offsets[:_MOST_OFFSETS].tolist():
            places = turns.positions + offset
            likely = ((factor, _set_value(rope, name, factor)) for factor in factors if factor != 1)
            allowed = _find_values(rope, name, turns, places) if inv_freq is None else ()
            for factor, scaled in chain(likely, allowed):
                finding = make_finding("axis-scaled", axis=axis, factor=factor)
                yield suppose(scaled, places, finding, *offset_changes(offset))


def _other_lengths(expected: ExpectedRope) -> Iterator[Change]:
    rope, unresolved, _, chosen = expected
    rule = None if unresolved is None else unresolved.scaling
    if rope.base is None or not isinstance(rule, Rule):
        return
    original = cast(int, getattr(rule, "original_max_positions", 4096))
    # vLLM computes one table, whose length is the factor times the original length
    table = int(original * cast(float, getattr(rule, "factor", 1.0)))
    off_by_one = () if chosen is None else ((chosen + 1, "more"), (chosen - 1, "fewer"))
    for length, how in off_by_one if isinstance(rule, DynamicNTK) else ():
        if length > original:
            finding = make_finding("length-off-by-one", how=how)
            yield (finding,), replace(rope, scaling=rule.at(length))
    for length in dict.fromkeys((original, original + 1, table, 4 * original, 16 * original)):
        choice = f"as for a length of {length}"
        if isinstance(rule, LongRope):
            choice = f"by its {'short' if length <= original else 'long'} list"
        with suppress(PhasorError):  # the rule's lists may be for another number of pairs
            yield (make_finding("length", which=choice),), replace(rope, scaling=rule.at(length))


def _other_laws(rope: Rope) -> Iterator[Rope]:
    """The law with other parameters, and other laws with its numbers, as in a misread config."""
    law = rope.scaling
    yield from _vary_axes(rope, "scaling")
    if (
        rope.base is None
        or isinstance(law, Rule)
        or without_law(rope) != replace(rope, scaling=None)
    ):
        return
    factor, length = getattr(law, "factor", None), getattr(law, "original_max_positions", None)
    factors = FACTORS if law is None else () if factor is None else (factor,)
    lengths = _ORIGINALS if law is None else () if length is None else (length,)
    likely: list[tuple[Callable[..., Any], dict[str, Any]]] = []
    likely += [(partial(replace, cast(Law, law)), changed) for changed in _other_parameters(law)]
    likely += [(make, {"factor": factor}) for factor, make in product(factors, (Linear, NTK))]
    for factor, length in product(factors, lengths):
        numbers = {"factor": factor, "original_max_positions": length}
        likely += [(make, numbers) for make in (Yarn, Llama3)]
    for make, numbers in likely:
        if make is not type(law):
            with suppress(PhasorError):
                yield replace(rope, scaling=make(**numbers))


def _other_parameters(law: Law | None) -> Iterator[dict[str, Any]]:
    # other published values, half and twice the value, and the default
    for field in () if law is None else fields(law):
        value: Any = getattr(law, field.name)
        values: list[Any] = []
        if isinstance(value, bool):
            values = [not value]
        elif field.name == "factor":
            values = [*FACTORS]
        elif isinstance(value, int):
            values = [int(value * 2.0**n) for n in range(-5, 6) if value * 2.0**n >= 1]
        elif isinstance(value, float) and not re.search("attention|mscale", field.name):
            values = [value / 2, value * 2, 1.0, 32.0, 4.0]
            values += [field.default] if isinstance(field.default, float) else []
        yield from ({field.name: candidate} for candidate in dict.fromkeys(values))


#: The properties of a rope that may differ, each with a function that gives changes and ropes. They
#: are tried in this order, and the first of equally good fits is reported. Where two properties
#: differ, the earlier one is changed first.
ROPES: dict[str, Callable[[ExpectedRope], Iterator[Change]]] = {
    "direction": _reversed,
    "layer": _other_layers,
    "length": _other_lengths,
    "base": _other_bases,
    "law-missing": lambda expected: _compare_each(expected, [without_law(expected.rope)]),
    "law": lambda expected: _compare_each(expected, _other_laws(expected.rope)),
    "law-twice": _applied_twice,
    "axes": lambda expected: _compare_each(expected, other_axes(expected.rope)),
    "slice": lambda expected: narrower(expected.rope),
}


# logarithms of the smallest and the largest value that is searched
_LOGS = {"base": (math.log(20), math.log(1e10)), "factor": (math.log(1.01), math.log(1000)),
         "axis": (math.log(1 / 64), math.log(64))}  # fmt: skip


_FEW_VALUES = 65  # how many values a law is computed at


_GRID = 129


_MOST_AT_ONCE = 1 << 20  # grid values times tokens in one step, which bounds memory


def find_ropes(
    expected: Rope | None, turns: Turns, places: NDArray[Any], *, base_only: bool = False
) -> Iterator[Rope]:
    """The expected rope with the bases and factors that tokens allow, in either direction.

    The law is the rope's, linear or none; with ``base_only`` it is the rope's or none.
    """
    if expected is None or expected.base is None:
        return
    linear = () if base_only else (Linear(factor=factor) for factor in FACTORS)
    for law, direction in product(dict.fromkeys((expected.scaling, None, *linear)), (1, -1)):
        rope = (
            expected
            if law == expected.scaling
            else with_frequencies(expected, base=expected.base, scaling=law)
        )
        rope = replace(rope, direction=direction)
        yield from (candidate for _, candidate in _find_values(rope, "base", turns, places))
    for law in () if base_only else dict.fromkeys((expected.scaling, Linear(factor=2.0))):
        if hasattr(law, "factor"):
            scaled = with_frequencies(expected, base=expected.base, scaling=law)
            values = _find_values(scaled, "factor", turns, places)
            yield from (candidate for _, candidate in values)


def _set_value(rope: Rope, name: str, value: float) -> Rope:
    """The rope with another base, another factor in its law, or the positions of an axis scaled."""
    if name.startswith("axis"):
        on_axis = np.equal(rope.axes.axis_of_pair(rope.num_pairs), int(name.split()[1]))
        f = tuple(np.where(on_axis, value * rope.inv_freq, rope.inv_freq).tolist())
        return with_frequencies(rope, explicit_inv_freq=f)
    if name == "base":
        return replace(rope, base=value)
    return replace(rope, scaling=replace(cast(Any, rope.scaling), factor=value))


def _find_values(
    rope: Rope, name: str, turns: Turns, places: NDArray[Any]
) -> Iterator[tuple[float, Rope]]:
    """The bases or factors that tokens allow, fewest digits first, each with its rope.

    A grid gives the values that a few tokens allow; finer grids narrow them with more tokens, until
    no value fits: if positions restart later, the first tokens are still right.
    """
    least, most = _LOGS[name.partition(" ")[0]]
    low, high, values = least, most, Interval(1, 0)
    coordinates = pair_coordinates(places, axes_of(rope))  # [T, 1 or num_pairs]
    # near position 0 all bases look alike, and far away a coarse grid misses the right one
    order = np.argsort(np.abs(coordinates).max(axis=1), kind="stable")
    allowing, num_tokens, limit, refinements = 0, min(4, len(order)), len(order), 3
    while refinements:
        tokens = order[:num_tokens]
        count = _GRID + int((high - low) * float(np.abs(coordinates[tokens]).max()) / 8)
        grid = np.linspace(low, high, count)
        allowed = _allowed_values(rope, name, grid, coordinates[tokens], turns, tokens)
        if len(allowed):
            step = float(grid[1] - grid[0])
            low, high = max(float(allowed[0]) - step, least), float(allowed[-1]) + step
            values = Interval(low, high).exp()
            refinements -= num_tokens == limit
            allowing, num_tokens = num_tokens, min(2 * num_tokens, limit)
        elif allowing in (0, num_tokens):
            break
        else:
            limit = num_tokens - 1
            num_tokens = (allowing + num_tokens) // 2
    for value in values.decimals():
        candidate = _set_value(rope, name, value)
        yield value, candidate
        if turns.misfit(*suppose(candidate, places)[1:]).max() <= 1:
            break  # the remaining values have more digits


def _allowed_values(
    rope: Rope, name: str, logs: Floats, coordinates: NDArray[Any], turns: Turns,
    tokens: NDArray[np.intp],
) -> Floats:  # fmt: skip
    """The logarithms on an even grid whose values these tokens allow.

    The positions that turn the pairs are ``[T, 1 or num_pairs]``.
    """
    z, (low, high) = turns.z[tokens], turns.gain
    allowed, gain = turns.errors[tokens] + (high - low) / 2, (low + high) / 2
    # logarithms of frequencies, interpolated linearly between a few values: [values, pairs]
    is_linear = rope.scaling is None or isinstance(rope.scaling, Linear) or "axis" in name
    knots: Floats = np.linspace(float(logs[0]), float(logs[-1]), 4 if is_linear else _FEW_VALUES)
    lawful = np.array([_set_value(rope, name, math.exp(log)).inv_freq for log in knots.tolist()])
    log_freqs = np.log(np.maximum(lawful, 1e-300))
    slopes = np.abs(np.gradient(log_freqs, knots, axis=0))
    bends = np.pad(np.abs(np.diff(log_freqs, 2, axis=0)), ((1, 1), (0, 0)), "edge")
    # next to a bend or a jump the interpolation is this far off
    bends = np.maximum(bends, np.maximum(np.roll(bends, 1, axis=0), np.roll(bends, -1, axis=0)))
    errors: Floats = slopes * (logs[1] - logs[0]) + bends
    places = rope.direction * np.broadcast_to(coordinates, z.shape)
    remaining: list[Floats] = []
    for part in np.array_split(logs, 1 + len(logs) * len(tokens) // _MOST_AT_ONCE):
        # slow pairs make the fewest turns, so that they exclude the most values: they come first
        for pair in reversed(range(z.shape[1])):
            inv_freq = np.exp(np.interp(part, knots, log_freqs[:, pair]))
            # allow for the distance of neighbours on the grid, and for rounded float32 angles
            unsure = np.interp(part, knots, errors[:, pair]) + 2.0**-20
            angles = np.outer(inv_freq, places[:, pair])  # [values, T]
            slack = gain * np.minimum(np.abs(angles) * unsure[:, None], 2)
            distances = np.abs(z[:, pair] - gain * np.exp(1j * angles))
            part = part[np.all(distances <= allowed[:, pair] + slack, axis=1)]
            if not len(part):
                break
        remaining.append(part)
    return np.concatenate(remaining)


def name_pairs(rope: Rope | None, turns: Turns) -> Changes:
    """The finding about the first pair from which the frequencies differ."""
    if rope is None:
        return (make_finding("frequencies", where=""),)
    misfit = turns.misfit(*suppose(rope, turns.positions)[1:]).max(axis=0)
    pairs: list[int] = np.flatnonzero(misfit > 1).tolist()
    finding = make_finding("angles")
    if pairs:
        where = f" from pair {pairs[0]} on: pairs {ranges(pairs)}"
        finding = make_finding("frequencies", where=where)
    return finding, *compare_factors(rope, turns)
