"""Settings found by reading: the first words of a program that its own reader takes for the ropes.

A `Dialect` has a program's reader, and the words with which it may say ropes. The reader is the
judge: each choice of words is read back, and the first by which every layer turns alike is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from phasor.axes import OneAxis
from phasor.errors import ConfigError, SpecError
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.target import (
    PICK_LAW,
    Keys,
    Target,
    TranslationError,
    change_ropes,
    ntk_as_base,
    plain_candidates,
    rotating,
    whole_base,
    with_whole_base,
)
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import PAIRINGS, Pairing
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, Rule, SteppedNTK

# of the frequencies that a reader computes from other numbers, relative
_ROUNDING = 2.0**-40
# of factors on cos and sin and on the softmax, which programs keep in float32
_OF_FLOAT32 = 2.0**-24
# a pair that stands still is one that is divided by 1e30
_STILL = 1e-29


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a program's files say what turns, in both directions."""

    # what the program makes of a file; refused with a ConfigError or SpecError
    read: Callable[[JsonObject], LayerRopes]
    # choices of words for ropes, with a context in tokens, the plainest first
    words: Callable[[LayerRopes, int], Iterator[Keys]]
    # what else a file of the program says, so that it can be read
    sizes: Callable[[LayerRopes, int], Keys]
    # whether it says both pairings of all that it says; otherwise weights may have to be reordered
    says_all_pairs: bool = True
    # whether it says which layers do not rotate; otherwise the model's class decides
    says_still_layers: bool = True
    # whether what it says multiplies the softmax as the rope does; otherwise a note has the factor
    says_softmax: bool = True


@dataclass(frozen=True, kw_only=True)
class Written:
    """Words that a program's reader takes for the ropes of a model."""

    keys: Keys
    form: LayerRopes  # the ropes, in the laws that the words say
    performed: Mapping[str, Rope]  # by kind of layer, what the program performs


def find_words(dialect: Dialect, ropes: LayerRopes, context: int) -> Written | None:
    """The first words that the program's reader takes for these ropes; None if there are none."""
    if not dialect.says_still_layers and len(ropes.ropes) == 1:
        ropes = _without_still_layers(ropes)
    models = [ropes]
    if not dialect.says_all_pairs:
        models += [change_ropes(ropes, partial(_in_pairs, pairing=pairing)) for pairing in PAIRINGS]
    for model in models:
        for form in _forms(model):
            for keys in dialect.words(form, context):
                read = _read_back(dialect, keys, form, context)
                if read is not None and _turn_alike(dialect, form, read, context):
                    return Written(keys=keys, form=form, performed=_performed(model, read))
    return None


def _in_pairs(rope: Rope, pairing: Pairing) -> Rope:
    """The rope in this pairing, for which the rows of the weights are reordered."""
    return replace(rope, pairing=pairing, pairing_out=None)


def _forms(ropes: LayerRopes) -> Iterator[LayerRopes]:
    """The same ropes in other words, the plainest first."""
    raised = change_ropes(ropes, ntk_as_base)
    yield raised
    # programs round each frequency to float32 themselves
    exact = change_ropes(raised, lambda rope: replace(rope, inv_freq_dtype="exact"))
    if exact != raised:
        yield exact


def _performed(ropes: LayerRopes, read: LayerRopes) -> dict[str, Rope]:
    """The ropes, which write the pairs that the reader says."""
    read_kinds = dict(zip(ropes.layer_kinds, read, strict=True))
    performed: dict[str, Rope] = {}
    for kind, rope in rotating(ropes).items():
        other = read_kinds[kind]
        assert other is not None, "both turn alike"
        performed[kind] = replace(rope, pairing_out=other.pairing_out)
    return performed


def _read_back(dialect: Dialect, keys: Keys, ropes: LayerRopes, context: int) -> LayerRopes | None:
    """What the program makes of the words; None if it refuses them."""
    file = JsonObject({**dialect.sizes(ropes, context), **keys})
    try:
        return dialect.read(file)
    except (ConfigError, SpecError):
        return None


def _turn_alike(dialect: Dialect, ropes: LayerRopes, others: LayerRopes, context: int) -> bool:
    """Whether every layer turns by the same angles, whatever the laws are called."""
    pairs = dict.fromkeys(zip(ropes, others, strict=True))
    return all(_ropes_alike(dialect, rope, other, context) for rope, other in pairs)


def _ropes_alike(dialect: Dialect, a: Rope | None, b: Rope | None, context: int) -> bool:
    if a is None or b is None:
        return a is b
    if _layout(a) != _layout(b):
        return False
    return all(_laws_alike(dialect, a.at(n), b.at(n)) for n in _lengths(a, b, context))


def _layout(rope: Rope) -> tuple[Any, ...]:
    slice_ = rope.head_dim, rope.rotary_start, rope.rotary_dim
    return *slice_, rope.pairing, rope.axes, rope.direction


def _lengths(a: Rope, b: Rope, context: int) -> set[int]:
    """Lengths at which rules that pick the same laws are the same rule."""
    lengths = {context}
    for law in (a.scaling, b.scaling):
        if isinstance(law, LongRope):
            lengths |= {law.original_max_positions, law.original_max_positions + 1}
        elif isinstance(law, (DynamicNTK, SteppedNTK)):
            lengths |= {law.original_max_positions << doublings for doublings in range(8)}
    return lengths


def _laws_alike(dialect: Dialect, a: Rope, b: Rope) -> bool:
    softmax_alike = math.isclose(a.softmax_factor, b.softmax_factor, rel_tol=_OF_FLOAT32)
    return (
        np.allclose(a.inv_freq, b.inv_freq, rtol=_ROUNDING, atol=_STILL)
        and math.isclose(a.attention_factor, b.attention_factor, rel_tol=_OF_FLOAT32)
        and (softmax_alike or not dialect.says_softmax)
    )


# Refusals.


def words_or_refusal(target: Target, dialect: Dialect, ropes: LayerRopes, context: int) -> Written:
    """The words for the ropes.

    Raises:
        RefusalError: If there are none, with what it is that the program cannot say.
    """
    if (found := find_words(dialect, ropes, context)) is not None:
        return found
    for rope in ropes.ropes:
        if find_words(dialect, one_layer(rope), context) is None:
            _refuse(target, dialect, rope, context)
    if None in ropes.kinds.values() and find_words(dialect, _without_still_layers(ropes), context):
        raise TranslationError(
            f"{target.name} rotates in every layer, and {ropes.name} has layers without a rotation"
        )
    target.only_rope(ropes)
    raise AssertionError("each rope is expressed alone, so there are several")


def _without_still_layers(ropes: LayerRopes) -> LayerRopes:
    """The layers that rotate."""
    kinds = tuple(kind for kind in ropes.layer_kinds if ropes.kinds[kind] is not None)
    return replace(ropes, layer_kinds=kinds, kinds=rotating(ropes), query_factors={})


def _refuse(target: Target, dialect: Dialect, rope: Rope, context: int) -> NoReturn:
    """Refuse a rope, by the first of its properties that the program cannot say by itself."""
    if isinstance(rope.scaling, Rule):
        law = type(rope.scaling).__name__
        feature = f"the law {law} with these numbers; {PICK_LAW}"
        raise TranslationError(f"{target.name} cannot express {feature}")
    by_itself = _properties(rope).items()
    lacks = (
        name for name, alone in by_itself if not find_words(dialect, one_layer(alone), context)
    )
    feature = next(lacks, f"the rotation {rope}")
    one_axis = replace(rope, axes=OneAxis())
    near = [replace(other, axes=OneAxis()) for other in plain_candidates(rope)]
    near += [*map(with_whole_base, near)]
    target.refuse(feature, rope, [one_axis, *near] if one_axis != rope else near)


def _properties(rope: Rope) -> dict[str, Rope]:
    """What may be refused of a rope, with the rope of which all else is plain."""
    start = f"a rotation from coordinate {rope.rotary_start} on"
    part = "a part of the head"
    # what makes each plain; a pairing is none that can be left out, and has all else plain
    plain: dict[str, Keys] = {
        f"{rope.pairing} pairs": {},
        start: {"rotary_start": 0},
        f"positions of {rope.axes.n_axes} axes with this law": {"axes": OneAxis()},
        f"the law {type(rope.scaling).__name__} with these numbers": {"scaling": None},
    }
    if rope.base is None:  # and one frequency for each pair of the part
        plain["frequencies without a base"] = {"base": 1e4, "explicit_inv_freq": None}
    else:
        plain["such a base here"] = {"base": whole_base(rope)}
        plain[part] = {"rotary_dim": rope.head_dim // 2 * 2}
    found: dict[str, Rope] = {}
    for name, own in plain.items():
        others = [changes for other, changes in plain.items() if other != name]
        all_plain = {field: value for changes in others for field, value in changes.items()}
        if name == start and part in plain:
            all_plain["rotary_dim"] = (rope.head_dim - rope.rotary_start) // 2 * 2
        with suppress(SpecError):
            alone = replace(rope, **all_plain)
            if not own or replace(alone, **own) != alone:
                found[name] = alone
    return found
