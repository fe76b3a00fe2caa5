"""What a rotation could be instead of the one that was meant, and what is then different."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from phasor.angles import cos_sin
from phasor.axes import AXES, OneAxis
from phasor.errors import PhasorError
from phasor.identification.blocks import Arrangement
from phasor.identification.laws import law_text
from phasor.identification.report import Finding
from phasor.identification.spectrum import Complex, Floats, round_to_dtype
from phasor.rope import Rope
from phasor.scaling import NTK, Law, Linear, Llama3, LongRope, Rule, Yarn

Positions = NDArray[Any]  # [T] or [T, n_axes]
Changes = tuple[Finding, ...]
_BASES = (1e4, 5e5, 1e6, 1e5, 1.5e5, 1.6e5, 5e6, 1e7, 2e6, 8e6)
_ORIGINALS = (8192, 4096, 32768, 2048)
#: Factors of laws in use.
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
#: The dtypes to which programs round positions and frequencies by mistake.
COARSE = ("bfloat16", "float16")


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
    rows: Complex  # gain * exp(i angle) of every token, [T, num_pairs]


def rows_of(rope: Rope, places: Positions) -> Complex:
    """``gain * exp(i angle)``, ``[T, num_pairs]``."""
    cos, sin = cos_sin(rope, places)
    return rope.attention_factor * (cos + 1j * sin)


def suppose(rope: Rope, places: Positions, *changes: Finding) -> Hypothesis:
    """The hypothesis that the rope turns tokens as if they stood there."""
    if rope.axes.n_axes == 1 and places.ndim > 1:
        places = places[:, 0]
    return Hypothesis(changes, rope, places, rows_of(rope, places))


def compare_layouts(meant: Rope, found: Rope | Arrangement) -> Changes:
    """How the coordinates of pairs differ."""
    changes: list[Finding] = []
    pairings = [(one.pairing, one.pairing_out or one.pairing) for one in (found, meant)]
    if pairings[0] != pairings[1]:
        words = (f"{a}" if a == b else f"{a} read and {b} written" for a, b in pairings)
        changes.append(Finding("pairing", f"Pairing: {' in place of '.join(words)}."))
    slices = [
        f"{one.rotary_start} to {one.rotary_start + one.rotary_dim - 1}" for one in (found, meant)
    ]
    if slices[0] != slices[1]:
        text = f"Slice: coordinates {slices[0]} turn, in place of {slices[1]}."
        changes.append(Finding("slice", text))
    return (*changes,)


def compare(meant: Rope, found: Rope) -> Changes:
    """How direction, base, law and axes differ."""
    changes: list[Finding] = []
    if found.direction != meant.direction:
        text = "Sign: it turns the other way, R(-p) in place of R(p)."
        changes.append(Finding("direction", text))
    if found.base != meant.base and found.base is not None and meant.base is not None:
        text = f"Base: {found.base:.9g} in place of {meant.base:.9g}."
        changes.append(Finding("base", text))
    if isinstance(found.scaling, Yarn) and found.scaling == _without_factor(meant.scaling):
        changes.append(factor_missing(meant.attention_factor))
    elif found.scaling != meant.scaling:
        changes.append(_compare_laws(found.scaling, meant.scaling))
    if found.axes != meant.axes:
        text = f"{found.axes!r} in place of {meant.axes!r}"
        if found.axes == OneAxis():
            text = "every pair is turned by the first coordinate"
        changes.append(Finding("axes", f"Axes: {text}."))
    return (*changes,)


def _without_factor(law: Law | Rule | None) -> Law | Rule | None:
    return replace(law, attention_factor=1.0) if isinstance(law, Yarn) else law


def _compare_laws(found: Law | Rule | None, meant: Law | Rule | None) -> Finding:
    if found is None:
        text = f"{type(meant).__name__} is not applied, frequencies are the plain powers"
        return Finding("law-missing", f"Law: {text}.")
    if type(found) is type(meant):
        names = (field.name for field in fields(found))
        both = {name: (getattr(found, name), getattr(meant, name)) for name in names}
        texts = (
            f"{name} {_short(one)} in place of {_short(other)}"
            for name, (one, other) in both.items()
            if one != other
        )
        return Finding("law-parameter", f"Law: {type(found).__name__} with {', '.join(texts)}.")
    texts = ("no law" if law is None else law_text(cast(Law, law)) for law in (found, meant))
    return Finding("law", f"Law: {' in place of '.join(texts)}.")


def _short(value: Any) -> str:
    return f"{value:.9g}" if type(value) in (int, float) else f"{value}"


def alternatives(
    meant: Meant, places: Positions, names: Collection[str] | None = None
) -> Iterator[Hypothesis]:
    """Ropes that differ from what was meant in one thing; with ``names`` in one of these."""
    rope, unresolved, others = meant
    bases = () if rope.base is None else (*(other.base for _, other in others), *_BASES)
    found: dict[str, Iterable[Rope | tuple[Finding | Rope, ...]]] = {
        "direction": [replace(rope, direction=-rope.direction)],
        "slice": _narrower(rope),
        "layer": _other_layers(others),
        "length": _other_lengths(unresolved),
        "base": (replace(rope, base=base) for base in dict.fromkeys(bases) if base is not None),
        "law-missing": [replace(rope, scaling=None)] if rope.scaling is not None else [],
        "law": _other_laws(rope),
        "axes": _other_axes(rope),
    }
    for name, ropes in found.items():
        for one in ropes if names is None or name in names else ():
            *changes, last = one if isinstance(one, tuple) else (*compare(rope, one), one)
            other = cast(Rope, last)
            if other != rope and other.num_pairs == rope.num_pairs:
                yield suppose(other, places, *cast(list[Finding], changes))


def factor_missing(factor: float) -> Finding:
    """That cos and sin are not multiplied."""
    text = f"Factor: missing, cos and sin are to be multiplied by {factor:.7g}."
    return Finding("factor-missing", text)


def _narrower(rope: Rope) -> Iterator[tuple[Finding | Rope, ...]]:
    """A part of the slice, which interleaved pairs do not show."""
    if "interleaved" not in (rope.pairing, rope.output_pairing):
        return
    for width in (rope.rotary_dim * eighths // 16 * 2 for eighths in (4, 2, 1, 6, 3, 5, 7)):
        with suppress(PhasorError):
            part = replace(rope, rotary_dim=width)
            all_pairs = (*part.inv_freq.tolist(), *[0.0] * (rope.num_pairs - part.num_pairs))
            changes = compare_layouts(rope, part)
            if rope.attention_factor != 1:  # what does not turn has none
                changes += (factor_missing(rope.attention_factor),)
            yield *changes, replace(rope, base=None, scaling=None, explicit_inv_freq=all_pairs)


def _other_layers(others: Sequence[tuple[str, Rope]]) -> Iterator[tuple[Finding, Rope]]:
    for kind, other in others:
        text = f"Layer: it is turned as layers of the kind {kind!r} are to be."
        yield Finding("layer", text), other


def _other_lengths(rope: Rope | None) -> Iterator[tuple[Finding, Rope]]:
    if rope is None or not isinstance(rope.scaling, Rule):
        return
    original = cast(int, getattr(rope.scaling, "original_max_positions", 4096))
    for length in (original, original + 1, 4 * original, 16 * original):
        which = f"as for a length of {length}"
        if isinstance(rope.scaling, LongRope):
            which = f"by its {'short' if length <= original else 'long'} list"
        yield Finding("length", f"Length: its frequencies are chosen {which}."), rope.at(length)


def _other_laws(rope: Rope) -> Iterator[Rope]:
    law, laws = rope.scaling, list[Law]()
    if rope.base is None or isinstance(law, Rule):
        return
    factor, length = getattr(law, "factor", None), getattr(law, "original_max_positions", None)
    factors = FACTORS if law is None else () if factor is None else (factor,)
    lengths = _ORIGINALS if law is None else () if length is None else (length,)
    laws += [make(factor=factor) for factor in factors for make in (Linear, NTK)]
    for factor, length in product(factors, lengths):
        laws += [make(factor=factor, original_max_positions=length) for make in (Yarn, Llama3)]
    if law is not None:
        for changed in _other_parameters(law):
            with suppress(PhasorError):
                yield replace(rope, scaling=replace(law, **changed))
    for other in laws:
        if type(other) is not type(law):
            with suppress(PhasorError):
                yield replace(rope, scaling=other)


def _other_parameters(law: Law) -> Iterator[dict[str, Any]]:
    for field in fields(law):
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
    if rope.axes.n_axes == 1:
        return
    yield replace(rope, axes=OneAxis())
    kinds: list[Any] = [kind for kind in AXES.values() if kind is not OneAxis]
    orders = dict.fromkeys(permutations(rope.axes.counts(rope.num_pairs)))
    for kind, sections in product(kinds, orders):
        with suppress(PhasorError):
            yield replace(rope, axes=kind(sections))


def exchanged_axes(rope: Rope, places: Positions) -> Iterator[Hypothesis]:
    """The rotation by coordinates in another order."""
    same = tuple(range(rope.axes.n_axes))
    for order in permutations(same):
        if order != same:
            change = Finding("axes", f"Axes: coordinates {order} are taken as {same}.")
            yield suppose(rope, places[:, list(order)], change)


def rounded(values: Any, dtype: str) -> Floats:
    """The nearest numbers of a dtype."""
    return round_to_dtype(np.asarray(values, np.float64), dtype)[0]


def precisions(rope: Rope, places: Positions) -> Iterator[Hypothesis]:
    """The rotation with positions, frequencies and angles rounded."""
    for dtype in COARSE:
        change = Finding(f"positions-in-{dtype}", f"Positions are rounded to {dtype}.")
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
            change = Finding(f"{name}-in-{dtype}", f"{what} are rounded to {dtype}.")
            rows = rope.attention_factor * np.exp(1j * rope.direction * angles)
            yield Hypothesis((change,), rope, places, rows.astype(np.complex128))
