"""What a rotation could be instead of the one that was meant."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.axes import AXES, OneAxis
from phasor.errors import PhasorError
from phasor.identification.laws import law_text
from phasor.identification.spectrum import Complex, Floats, round_to_dtype
from phasor.rope import Rope
from phasor.scaling import NTK, Law, Linear, Llama3, LongRope, Rule, Yarn

Positions = NDArray[Any]  # [T] or [T, n_axes]
_BASES = (1e4, 5e5, 1e6, 1e5, 1.5e5, 1.6e5, 5e6, 1e7, 2e6, 8e6)
_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
_ORIGINALS = (8192, 4096, 32768, 2048)
#: The dtypes to which programs round positions and frequencies by mistake.
COARSE = ("bfloat16", "float16")


class Change(NamedTuple):
    """One difference: a name for programs, a sentence for people."""

    name: str
    sentence: str


class Hypothesis(NamedTuple):
    """A rotation of some tokens, by what it changes in the one that was meant."""

    changes: tuple[Change, ...]
    rope: Rope
    places: Positions  # where the tokens are turned as if they stood
    rows: Complex  # gain * exp(i angle) of every token, [T, num_pairs]


def rows_of(rope: Rope, places: Positions) -> Complex:
    """``gain * exp(i angle)``, ``[T, num_pairs]``."""
    cos, sin = cos_sin(rope, places)
    return rope.attention_factor * (cos + 1j * sin)


def suppose(rope: Rope, places: Positions, *changes: Change) -> Hypothesis:
    """The hypothesis that the rope turns tokens as if they stood there."""
    if rope.axes.n_axes == 1 and places.ndim > 1:
        places = places[:, 0]
    return Hypothesis(changes, rope, places, rows_of(rope, places))


def alternatives(
    rope: Rope,
    places: Positions,
    unresolved: Rope | None = None,
    others: Sequence[tuple[str, Rope]] = (),
    names: Collection[str] | None = None,
) -> Iterator[Hypothesis]:
    """Ropes that differ from ``rope`` in one thing; with ``names`` in one of these.

    ``unresolved`` is the rope before a rule chose its law, ``others`` are those of other layers.
    """
    found = {
        "direction": _other_direction(rope),
        "slice": _narrower(rope),
        "layer": _other_layers(others),
        "length": _other_lengths(unresolved),
        "base": _other_bases(rope, [other.base for _, other in others]),
        "law-missing": _without_law(rope),
        "law": _other_laws(rope),
        "axes": _other_axes(rope),
    }
    for name, changed in found.items():
        for change, other in changed if names is None or name in names else ():
            if other != rope and other.num_pairs == rope.num_pairs:
                yield suppose(other, places, change)


Changed = Iterator[tuple[Change, Rope]]


def direction_change() -> Change:
    """That it turns the other way."""
    return Change("direction", "Sign: it turns the other way, R(-p) in place of R(p).")


def _other_direction(rope: Rope) -> Changed:
    yield direction_change(), replace(rope, direction=-rope.direction)


def slice_change(found: str, meant: str) -> Change:
    """That other coordinates turn."""
    return Change("slice", f"Slice: coordinates {found} turn, in place of {meant}.")


def _narrower(rope: Rope) -> Changed:
    """A part of the slice, which interleaved pairs do not show."""
    if "interleaved" not in (rope.pairing, rope.output_pairing):
        return
    start, end = rope.rotary_start, rope.rotary_start + rope.rotary_dim
    for width in (rope.rotary_dim * eighths // 16 * 2 for eighths in (4, 2, 1, 6, 3, 5, 7)):
        with suppress(PhasorError):
            some = replace(rope, rotary_dim=width).inv_freq.tolist()
            all_pairs = (*some, *[0.0] * (rope.num_pairs - len(some)))
            other = replace(rope, base=None, scaling=None, explicit_inv_freq=all_pairs)
            yield slice_change(f"{start} to {start + width - 1}", f"{start} to {end - 1}"), other


def _other_layers(others: Sequence[tuple[str, Rope]]) -> Changed:
    for kind, other in others:
        text = f"Layer: it is turned as layers of the kind {kind!r} are to be."
        yield Change("layer", text), other


def _other_lengths(rope: Rope | None) -> Changed:
    if rope is None or not isinstance(rope.scaling, Rule):
        return
    original = cast(int, getattr(rope.scaling, "original_max_positions", 4096))
    for length in (original, original + 1, 4 * original, 16 * original):
        which = f"as for a length of {length}"
        if isinstance(rope.scaling, LongRope):
            which = f"by its {'short' if length <= original else 'long'} list"
        yield Change("length", f"Length: its frequencies are chosen {which}."), rope.at(length)


def base_change(rope: Rope, base: float) -> Change:
    """That the base is another."""
    return Change("base", f"Base: {base:.9g} in place of {rope.base:.9g}.")


def _other_bases(rope: Rope, others: Sequence[float | None]) -> Changed:
    if rope.base is not None:
        for base in dict.fromkeys((*others, *_BASES)):
            if base is not None and base != rope.base:
                yield base_change(rope, base), replace(rope, base=base)


def law_change(rope: Rope, law: Law | Rule | None) -> Change:
    """That the law is another."""
    laws = (law, rope.scaling)
    found, meant = ("no law" if one is None else law_text(cast(Law, one)) for one in laws)
    return Change("law", f"Law: {found} in place of {meant}.")


def _without_law(rope: Rope) -> Changed:
    if rope.scaling is not None:
        text = f"{type(rope.scaling).__name__} is not applied, frequencies are the plain powers"
        yield Change("law-missing", f"Law: {text}."), replace(rope, scaling=None)


def _other_laws(rope: Rope) -> Changed:
    law, laws = rope.scaling, list[Law]()
    if rope.base is None or isinstance(law, Rule):
        return
    if law is None:
        laws += [make(factor=factor) for factor in _FACTORS for make in (Linear, NTK)]
        for factor, length in ((factor, length) for factor in _FACTORS for length in _ORIGINALS):
            laws += [make(factor=factor, original_max_positions=length) for make in (Yarn, Llama3)]
    else:
        yield from _other_parameters(rope, law)
        factor, length = getattr(law, "factor", None), getattr(law, "original_max_positions", None)
        if factor is not None:
            laws += [make(factor=factor) for make in (Linear, NTK)]
        if factor is not None and length is not None:
            laws += [make(factor=factor, original_max_positions=length) for make in (Yarn, Llama3)]
    for other in laws:
        if type(other) is not type(law):
            with suppress(PhasorError):
                yield law_change(rope, other), replace(rope, scaling=other)


def _other_parameters(rope: Rope, law: Law) -> Changed:
    for field in fields(law):
        value: Any = getattr(law, field.name)
        values: list[Any] = []
        if isinstance(value, bool):
            values = [not value]
        elif field.name == "factor":
            values = [*_FACTORS]
        elif isinstance(value, int):
            values = [int(value * 2.0**n) for n in range(-5, 6) if value * 2.0**n >= 1]
        elif isinstance(value, float) and "attention" not in field.name:
            values = [value / 2, value * 2, 1.0, 32.0, 4.0]
            values += [field.default] if isinstance(field.default, float) else []
        for other in dict.fromkeys(values):
            with suppress(PhasorError):
                texts = [
                    f"{one}" if isinstance(one, bool) else f"{one:.9g}" for one in (other, value)
                ]
                text = f"{type(law).__name__} with {field.name} {' in place of '.join(texts)}"
                changed: Law = replace(law, **{field.name: other})
                yield Change("law-parameter", f"Law: {text}."), replace(rope, scaling=changed)


def _other_axes(rope: Rope) -> Changed:
    """Pairs dealt to the axes otherwise, or all to the first."""
    if rope.axes.n_axes == 1:
        return
    text = "Axes: every pair is turned by the first coordinate."
    yield Change("axes", text), replace(rope, axes=OneAxis())
    kinds: list[Any] = [kind for kind in AXES.values() if kind is not OneAxis]
    for kind, sections in product(kinds, permutations(rope.axes.counts(rope.num_pairs))):
        with suppress(PhasorError):
            other = replace(rope, axes=kind(sections))
            yield Change("axes", f"Axes: {other.axes!r} in place of {rope.axes!r}."), other


def exchanged_axes(rope: Rope, places: Positions) -> Iterator[Hypothesis]:
    """The rotation by coordinates in another order."""
    same = tuple(range(rope.axes.n_axes))
    for order in permutations(same):
        if order != same:
            change = Change("axes", f"Axes: coordinates {order} are taken as {same}.")
            yield suppose(rope, places[:, list(order)], change)


def rounded(values: Any, dtype: str) -> Floats:
    """The nearest numbers of a dtype."""
    return round_to_dtype(np.asarray(values, np.float64), dtype)[0]


def precisions(rope: Rope, places: Positions) -> Iterator[Hypothesis]:
    """The rotation with positions, frequencies and angles rounded."""
    for dtype in COARSE:
        change = Change(f"positions-in-{dtype}", f"Positions are rounded to {dtype}.")
        yield suppose(rope, rounded(places, dtype), change)
        f = rounded(rope.inv_freq, dtype)
        # [T] -> [T, 1]; [T, n_axes] -> [T, num_pairs]
        axis_of_pair = list(rope.axes.axis_of_pair(rope.num_pairs))
        coordinates = places[:, None] if places.ndim == 1 else places[:, axis_of_pair]
        for name, what, angles in (
            ("frequencies", "Frequencies", coordinates * f),
            ("angles", "Positions, frequencies and angles",
             rounded(rounded(coordinates, dtype) * f, dtype)),
        ):  # fmt: skip
            change = Change(f"{name}-in-{dtype}", f"{what} are rounded to {dtype}.")
            rows = rope.attention_factor * np.exp(1j * rope.direction * angles)
            yield Hypothesis((change,), rope, places, rows.astype(np.complex128))
