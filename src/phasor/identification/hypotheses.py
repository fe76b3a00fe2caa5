"""What a rotation could be instead of the one that was meant, and what is then different."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from phasor.angles import axes_of, of_each_pair
from phasor.axes import AXES, Mixed, OneAxis
from phasor.errors import PhasorError
from phasor.identification.laws import USUAL_BASES, law_text
from phasor.identification.report import Changes, Finding, make_finding
from phasor.identification.spectrum import Complex, rounded
from phasor.identification.turns import ANGLE_ERROR, Turns, rows_of
from phasor.rope import Rope
from phasor.scaling import NTK, Law, Linear, Llama3, LongRope, Rule, Yarn

Positions = NDArray[Any]  # [T] or [T, n_axes]
_ORIGINALS = (8192, 4096, 32768, 2048)
#: Factors of laws in use.
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
#: The dtypes to which programs round positions and frequencies by mistake.
COARSE = ("bfloat16", "float16")
# how far the exponent of a measured base may be off, relatively, from that of another width
_EXPONENT_ERROR = 1e-4
_FLOAT32_SIDES = (1 - ANGLE_ERROR, 1 + ANGLE_ERROR)


class Meant(NamedTuple):
    """The rope of a kind of layers."""

    rope: Rope
    unresolved: Rope | None = None  # before a rule chose its law
    others: Sequence[tuple[str, Rope]] = ()  # of the other kinds


class Hypothesis(NamedTuple):
    """A rotation of some tokens, by what it changes in the one that was meant."""

    changes: Changes
    rope: Rope
    places: Positions  # where the tokens are turned as if they stood
    rows: Complex  # exp(i angle) of every token, [T, num_pairs]


def suppose(rope: Rope, places: Positions, *changes: Finding) -> Hypothesis:
    """The hypothesis that the rope turns tokens as if they stood there."""
    if rope.axes.n_axes == 1 and places.ndim > 1:
        places = places[:, 0]
    return Hypothesis(changes, rope, places, rows_of(rope, places))


def is_idle(one: Hypothesis, meant: Rope, places: Positions) -> bool:
    """Whether it names changes and turns these tokens as the rope that was meant."""
    if not one.changes or one.rope.attention_factor != meant.attention_factor:
        return False
    return turn_alike(one.rows, rows_of(meant, places))


def turn_alike(rows: Complex, others: Complex) -> bool:
    """Whether both rows of cos and sin are of one rotation, but for float64's roundings."""
    return np.allclose(rows, others, 0, 1e-9)


# What is different.


def compare_layouts(meant: Rope, found: Rope) -> Changes:
    """How the coordinates of pairs differ."""

    def texts(one: Rope) -> tuple[str, str]:
        written = "" if one.pairing_out is None else f" read and {one.pairing_out} written"
        last = one.rotary_start + one.rotary_dim - 1
        return f"{one.pairing}{written}", f"{one.rotary_start} to {last}"

    (pairing, part), (meant_pairing, meant_part) = texts(found), texts(meant)
    changes: list[Finding] = []
    if pairing != meant_pairing:
        changes.append(make_finding("pairing", found=pairing, meant=meant_pairing))
    if part != meant_part:
        changes.append(make_finding("slice", found=part, meant=meant_part))
    return (*changes,)


def compare(meant: Rope, found: Rope, unresolved: Rope | None = None) -> Changes:
    """How direction, base, law and axes differ; ``unresolved`` has the rule that chose the law."""
    changes: list[Finding] = []
    if found.direction != meant.direction:
        changes.append(make_finding("direction", way="the other way, R(-p) in place of R(p)"))
    # explicit frequencies have no base
    if found.base not in (None, meant.base) and meant.base is not None:
        text = f"{_short(meant.base)}{_by_width(meant, found.base)}"
        changes.append(make_finding("base", found=_short(found.base), meant=text))
    if found.scaling != meant.scaling:
        changes.append(_compare_laws(found.scaling, meant, unresolved or meant))
    if found.axes != meant.axes:
        by_first = "every pair is turned by the first coordinate"
        other = f"{found.axes!r} in place of {meant.axes!r}"
        changes.append(make_finding("axes", found=by_first if found.axes == OneAxis() else other))
    return (*changes,)


def _by_width(meant: Rope, base: float) -> str:
    """Which exponents make another base of the one that was meant."""
    exponent = 0.0 if base in USUAL_BASES else math.log(base, cast(float, meant.base))
    width = meant.rotary_dim
    for other in dict.fromkeys((meant.head_dim, width // 2, 2 * width, width - 2, width + 2)):
        if other != width and other > 0 and abs(exponent * other / width - 1) < _EXPONENT_ERROR:
            return f", as if exponents ran over {other} coordinates and not over {width}"
    return ""


def compare_factors(rope: Rope, turns: Turns) -> Changes:
    """How the factor of cos and sin differs from the rope's."""
    meant, found = rope.attention_factor, turns.factor(rope)
    if found == meant:
        return ()
    if found == 1:
        return (make_finding("factor-missing", factor=meant),)
    if found == meant**2:
        return (make_finding("factor-twice", factor=meant),)
    return (make_finding("factor", found=found, factor=meant),)


def _compare_laws(found: Law | Rule | None, rope: Rope, unresolved: Rope) -> Finding:
    meant = rope.scaling
    if isinstance(meant, Yarn) and found == replace(meant, attention_factor=1.0):
        return make_finding("factor-missing", factor=rope.attention_factor)
    if found is None:
        return make_finding("law-missing", law=type(unresolved.scaling).__name__)
    if type(found) is not type(meant):
        one, other = (
            "no law" if law is None else law_text(cast(Law, law)) for law in (found, meant)
        )
        return make_finding("law", found=one, meant=other)
    names = (field.name for field in fields(found))
    both = ((name, getattr(found, name), getattr(meant, name)) for name in names)
    texts = [f"{name} {_short(a)} in place of {_short(b)}" for name, a, b in both if a != b]
    return make_finding("law-parameter", law=type(found).__name__, parameters=", ".join(texts))


def _short(value: Any) -> str:
    return f"{value:.9g}" if type(value) in (int, float) else f"{value}"


# What it could be.

# the changes that a rope has, and the rope
_Change = tuple[Changes, Rope]


def alternatives(
    meant: Meant, places: Positions, names: Collection[str] | None = None
) -> Iterator[Hypothesis]:
    """Ropes that differ from what was meant in one thing; with ``names`` in one of these."""
    rope, unresolved, others = meant

    def compared(ropes: Iterable[Rope]) -> Iterator[_Change]:
        return ((compare(rope, one, unresolved), one) for one in ropes)

    bases = dict.fromkeys((*(other.base for _, other in others), *USUAL_BASES))
    # of equal fits the first is named
    found: dict[str, Iterable[_Change]] = {
        "direction": compared([replace(rope, direction=-rope.direction)]),
        "slice": _narrower(rope),
        "layer": (((make_finding("layer", kind=kind),), other) for kind, other in others),
        "length": _other_lengths(rope, unresolved),
        "base": compared(replace(rope, base=base) for base in bases if base and rope.base),
        "law-missing": compared([replace(rope, scaling=None)]),
        "law": compared(_other_laws(rope)),
        "axes": compared(_other_axes(rope)),
    }
    for name, changed in found.items():
        for changes, other in changed if names is None or name in names else ():
            if other != rope and other.num_pairs == rope.num_pairs:
                with suppress(PhasorError):  # a law may need two pairs
                    yield suppose(other, places, *changes)


def _narrower(rope: Rope) -> Iterator[_Change]:
    """A part of the slice, which interleaved pairs do not show."""
    if "interleaved" not in (rope.pairing, rope.output_pairing):
        return
    for width in (rope.rotary_dim * eighths // 16 * 2 for eighths in (4, 2, 1, 6, 3, 5, 7)):
        with suppress(PhasorError):
            part = replace(rope, rotary_dim=width)
            all_pairs = (*part.inv_freq.tolist(), *[0.0] * (rope.num_pairs - part.num_pairs))
            changes = compare_layouts(rope, part)
            if (factor := rope.attention_factor) != 1:  # what does not turn has none
                changes += (make_finding("factor-missing", factor=factor),)
            yield changes, replace(rope, base=None, scaling=None, explicit_inv_freq=all_pairs)


def _other_lengths(rope: Rope, unresolved: Rope | None) -> Iterator[_Change]:
    rule = None if unresolved is None else unresolved.scaling
    if rope.base is None or not isinstance(rule, Rule):
        return
    original = cast(int, getattr(rule, "original_max_positions", 4096))
    # vLLM computes one table, for as many times the original length as the factor says
    table = int(original * cast(float, getattr(rule, "factor", 1.0)))
    for length in dict.fromkeys((original, original + 1, table, 4 * original, 16 * original)):
        which = f"as for a length of {length}"
        if isinstance(rule, LongRope):
            which = f"by its {'short' if length <= original else 'long'} list"
        with suppress(PhasorError):  # its lists are for other pairs
            yield (make_finding("length", which=which),), replace(rope, scaling=rule.at(length))


def _other_laws(rope: Rope) -> Iterator[Rope]:
    """The law with other parameters, and others with its numbers, as a config that is misread."""
    law = rope.scaling
    if rope.base is None or isinstance(law, Rule):
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
    # other published values, halves and doubles, the default
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
        yield from ({field.name: other} for other in dict.fromkeys(values))


def _other_axes(rope: Rope) -> Iterator[Rope]:
    """Pairs dealt to the axes otherwise, or all to the first."""
    if rope.axes.n_axes == 1 or isinstance(rope.axes, Mixed):
        return
    yield replace(rope, axes=OneAxis())
    kinds: list[Any] = [kind for kind in AXES.values() if kind is not OneAxis]
    orders = dict.fromkeys(permutations(rope.axes.counts(rope.num_pairs)))
    for kind, sections in product(kinds, orders):
        with suppress(PhasorError):
            yield replace(rope, axes=kind(sections))


def exchanged_axes(rope: Rope, places: Positions) -> Iterator[Hypothesis]:
    """The rotation by coordinates in another order."""
    n_axes = rope.axes.n_axes
    same, *orders = permutations(range(n_axes))
    taken = [(order, f"coordinates {order} are taken as {same}") for order in orders]
    alone = [((k,) * n_axes, f"every pair is turned by coordinate {k}") for k in range(1, n_axes)]
    for order, how in taken + alone:
        yield suppose(rope, places[:, order], make_finding("axes", found=how))


def precisions(rope: Rope, turns: Turns) -> Iterator[Hypothesis]:
    """The rotation with positions, frequencies or angles rounded, or all of them."""
    places, factor = turns.positions, turns.factor(rope)
    for dtype in COARSE:
        yield suppose(rope, rounded(places, dtype), positions_in(dtype))
        if isinstance(rope.axes, Mixed):
            continue  # a pair has several frequencies
        f = rounded(rope.inv_freq, dtype)
        coordinates = of_each_pair(places, axes_of(rope))  # [T, 1 or num_pairs]
        every_step = rounded(rounded(coordinates, dtype) * f, dtype)
        # float32 angles beside a tie may be rounded to either side of it
        sides = (rounded(coordinates * rope.inv_freq * by, dtype) for by in _FLOAT32_SIDES)
        steps = "Positions, frequencies and angles"
        ways = (
            (make_finding("frequencies-in-{dtype}", dtype=dtype, details=""), [coordinates * f]),
            (make_finding("angles-in-{dtype}", dtype=dtype, what=steps), [every_step]),
            (make_finding("angles-in-{dtype}", dtype=dtype, what="Angles"), [*sides]),
        )
        for finding, angles in ways:
            rows = np.exp(1j * rope.direction * np.array(angles))
            closest = np.abs(factor * rows - turns.z).argmin(axis=0)[None]
            yield Hypothesis((finding,), rope, places, np.take_along_axis(rows, closest, 0)[0])


def positions_in(dtype: str, where: str = "") -> Finding:
    """That positions are rounded."""
    return make_finding("positions-in-{dtype}", dtype=dtype, where=where)
