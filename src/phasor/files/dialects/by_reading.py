"""Find settings by reading: the first that a program's own reader reads as the ropes.

A `Dialect` has a program's reader, and the words with which it may say ropes. The reader is the
judge: each choice of words is read back, and the first by which every layer turns alike is written.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from phasor.axes import OneAxis
from phasor.errors import ConfigError, PhasorWarning, SpecError
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.target import (
    PICK_LAW,
    Keys,
    Target,
    TranslationError,
    change_ropes,
    in_pairs,
    ntk_as_base,
    plain_candidates,
    rotating,
    whole_base,
    with_whole_base,
)
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import PAIRINGS
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, PerPair, Rule, SteppedNTK, Yarn

# of the frequencies that a reader computes from other numbers, relative
_ROUNDING = 2.0**-40
# of factors on cos and sin and on the softmax, which programs keep in float32
_OF_FLOAT32 = 2.0**-24
# a pair that stands still is one that is divided by 1e30
_STILL = 1e-29


class FaultError(ConfigError):
    """A fault of a program's code, in a sentence that gives the reason of a refusal."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A program's reader, and the words with which its files may express ropes."""

    # what the program makes of a file; refused with a ConfigError or SpecError
    read: Callable[[JsonObject], LayerRopes]
    # choices of words for ropes, with a context in tokens, the plainest first
    words: Callable[[LayerRopes, int], Iterator[Keys]]
    # what else a file of the program says, so that it can be read
    sizes: Callable[[LayerRopes, int], Keys]
    # ropes near one that has no words, with numbers that the program has in its code
    near: Callable[[Rope], Iterable[Rope]] = lambda rope: ()
    # whether it has words for both pairings; if not, weights may have to be reordered
    says_all_pairs: bool = True
    # whether a file says which layers do not rotate; if not, the model's class decides
    says_still_layers: bool = True
    # whether the program multiplies the softmax as the rope does; if not, a note has the factor
    says_softmax: bool = True


@dataclass(frozen=True, kw_only=True)
class Written:
    """Words that a program's reader reads as the ropes of a model."""

    keys: Keys
    form: LayerRopes  # the ropes, in the laws that the words say
    performed: Mapping[str, Rope]  # by kind of layer, what the program performs


def find_words(dialect: Dialect, ropes: LayerRopes, context: int) -> Written | None:
    """The first words that the program reads as these ropes; None if there are none."""
    if not dialect.says_still_layers and len(ropes.ropes) == 1:
        ropes = _without_still_layers(ropes)
    reads: dict[str, LayerRopes | None] = {}  # by file: another form often has the same words
    for model in _in_each_pairing(dialect, ropes):
        for form in _forms(model):
            for keys in dialect.words(form, context):
                file = {**dialect.sizes(form, context), **keys}
                text = json.dumps(file, default=np.ndarray.tolist)
                if text not in reads:
                    reads[text] = _read_if_taken(dialect, file)
                read = reads[text]
                if read is not None and _turn_alike(dialect, form, read, context):
                    return Written(keys=keys, form=form, performed=_performed(model, read))
    return None


def _in_each_pairing(dialect: Dialect, ropes: LayerRopes) -> Iterator[LayerRopes]:
    """The model, and if the program may need it, the model with reordered weights."""
    yield ropes
    for pairing in () if dialect.says_all_pairs else PAIRINGS:
        other = change_ropes(ropes, partial(in_pairs, pairing=pairing))
        if other != ropes:
            yield other


def _forms(ropes: LayerRopes) -> Iterator[LayerRopes]:
    """Equivalent forms of the ropes, the simplest first."""
    raised = change_ropes(ropes, ntk_as_base)
    yield raised
    # programs round each frequency to float32 themselves
    if any(rope.inv_freq_dtype != "exact" for rope in raised.ropes):
        yield change_ropes(raised, _in_exact)


def _in_exact(rope: Rope) -> Rope:
    """The rope before its frequencies are rounded."""
    return rope if rope.inv_freq_dtype == "exact" else replace(rope, inv_freq_dtype="exact")


def _performed(ropes: LayerRopes, read: LayerRopes) -> dict[str, Rope]:
    """The ropes, with the output pairing of the reader."""
    read_kinds = dict(zip(ropes.layer_kinds, read, strict=True))
    performed: dict[str, Rope] = {}
    for kind, rope in rotating(ropes).items():
        other = read_kinds[kind]
        assert other is not None, "both turn alike"
        performed[kind] = rope
        if rope.pairing_out != other.pairing_out:
            performed[kind] = replace(rope, pairing_out=other.pairing_out)
    return performed


def read_as(dialect: Dialect, keys: Keys, ropes: LayerRopes, context: int) -> LayerRopes | None:
    """What the program reads in the words, if it rotates like the ropes; else None."""
    read = _read_if_taken(dialect, {**dialect.sizes(ropes, context), **keys})
    return read if read is not None and _turn_alike(dialect, ropes, read, context) else None


def _read_if_taken(dialect: Dialect, file: Keys) -> LayerRopes | None:
    """What the program reads in a file; None if it refuses the file."""
    try:
        return _read_back(dialect, file)
    except (ConfigError, SpecError):
        return None


def _read_back(dialect: Dialect, file: Keys) -> LayerRopes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)  # of words that nobody wrote
        return dialect.read(JsonObject(file))


def _turn_alike(dialect: Dialect, ropes: LayerRopes, read: LayerRopes, context: int) -> bool:
    """Whether every layer turns by the same angles, whatever the laws are called."""
    kinds = dict.fromkeys(zip(ropes.layer_kinds, read.layer_kinds, strict=True))
    pairs = dict.fromkeys((ropes.kinds[kind], read.kinds[other]) for kind, other in kinds)
    return all(_ropes_alike(dialect, rope, other, context) for rope, other in pairs)


def _ropes_alike(dialect: Dialect, a: Rope | None, b: Rope | None, context: int) -> bool:
    if a == b or a is None or b is None:
        return a == b
    if _layout(a) != _layout(b):
        return False
    return all(_laws_alike(dialect, a.at(n), b.at(n)) for n in _lengths(a, b, context))


def _layout(rope: Rope) -> tuple[Any, ...]:
    slice_ = rope.head_dim, rope.rotary_start, rope.rotary_dim
    axes = rope.axes.n_axes, rope.axes.indices(rope.num_pairs), rope.axes.spectra(rope.num_pairs)
    return *slice_, rope.pairing, axes, rope.direction


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
        bool(np.all(np.abs(a.inv_freq - b.inv_freq) <= _STILL + _ROUNDING * b.inv_freq))
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
        if not _is_said(dialect, rope, context):
            _refuse(target, dialect, rope, context)
    if None in ropes.kinds.values() and find_words(dialect, _without_still_layers(ropes), context):
        raise TranslationError(
            f"{target.name} rotates in every layer, but {ropes.name} has layers without a rotation",
            "still layers",
        )
    target.only_rope(ropes)
    raise AssertionError("each rope is expressed alone, so there are several")


def words_for_rope(
    target: Target,
    dialect: Dialect,
    rope: Rope,
    context: int,
    *,
    is_list: Callable[[Keys], bool],
) -> Keys:
    """`find_named_words` for one rope.

    Raises:
        RefusalError: If there are none, with what it is that the program cannot say.
    """
    ropes = one_layer(rope)
    found = find_named_words(dialect, ropes, context, is_list=is_list)
    return (found or words_or_refusal(target, dialect, ropes, context)).keys


def words_by_rope(
    target: Target,
    dialect: Dialect,
    ropes: LayerRopes,
    context: int,
    *,
    is_list: Callable[[Keys], bool],
) -> tuple[LayerRopes, Mapping[Rope, Written]]:
    """The model in a pairing that the program has, and the words for each rope alone.

    Raises:
        RefusalError: As `words_for_rope`, or if no pairing is that of all its ropes.
    """
    in_its_pairs = replace(dialect, says_all_pairs=True)
    unused = ropes.in_config.unused_blocks.values()
    for model in _in_each_pairing(dialect, ropes):
        words: dict[Rope, Written] = {}
        for rope in (*model.ropes, *unused):
            ropes_of_layer = one_layer(rope)
            found = find_named_words(in_its_pairs, ropes_of_layer, context, is_list=is_list)
            if found is None:
                break
            words[rope] = found
        else:
            return model, words
    for rope in (*ropes.ropes, *unused):
        words_or_refusal(target, dialect, one_layer(rope), context)
    target.only_rope(ropes)
    raise AssertionError("each rope is expressed alone, so there are several")


def find_named_words(
    dialect: Dialect, ropes: LayerRopes, context: int, *, is_list: Callable[[Keys], bool]
) -> Written | None:
    """The words for a law by its name, else a list with the frequencies' own rounding; or None.

    Programs round frequencies themselves, unless they are given as a list.
    """
    exact = change_ropes(ropes, _in_exact)
    found = find_words(dialect, exact, context)
    if found is not None and is_list(found.keys) and ropes != exact:
        found = find_words(dialect, ropes, context)
    return found


def _without_still_layers(ropes: LayerRopes) -> LayerRopes:
    """The layers that rotate."""
    if None not in ropes.kinds.values():
        return ropes
    kinds = tuple(kind for kind in ropes.layer_kinds if ropes.kinds[kind] is not None)
    return replace(ropes, layer_kinds=kinds, kinds=rotating(ropes), query_factors={})


@lru_cache(maxsize=1024)  # of refusals of ropes that are near each other
def _is_said(dialect: Dialect, rope: Rope, context: int) -> bool:
    """Whether the program can express one rope for all layers."""
    return find_words(dialect, one_layer(rope), context) is not None


def _refuse(target: Target, dialect: Dialect, rope: Rope, context: int) -> NoReturn:
    """Refuse a rope, and name the property that the program has no words for."""
    form = ntk_as_base(rope)
    form = form if form.scaling is None else rope
    because = find_fault(dialect, one_layer(form), context) or ""
    forwards = replace(rope, direction=1)
    if rope.direction < 0 and _is_said(dialect, forwards, context):
        if isinstance(rope.scaling, Rule) and _is_said(dialect, rope.at(context), context):
            law = type(rope.scaling).__name__
            raise TranslationError(
                f"{target.name} cannot express {law} of pairs that turn clockwise; {PICK_LAW}",
                "rule and clockwise",
            )
        target.refuse("clockwise", "pairs that turn clockwise", rope, [forwards], because=because)
    reason, feature = _lacking(dialect, form, context)
    if reason == "law" and (of_gain := _lacking_gain(dialect, rope, context)):
        reason, feature, because = "gain", of_gain, ""
    if reason == "law" and isinstance(rope.scaling, Rule):
        feature = f"{feature}{because and f': {because}'}; {PICK_LAW}"
        if isinstance(rope.scaling, LongRope):  # the list for longer sequences, at the shorter
            start = rope.scaling.original_max_positions
            short, long = rope.at(start), rope.at(start + 1)
            if _is_said(dialect, long, context):
                target.refuse(reason, feature, short, [long], start)
        raise TranslationError(f"{target.name} cannot express {feature}", reason, because)
    if reason == "start" or isinstance(rope.scaling, Rule):
        target.refuse(reason, feature, rope, [], because=because)
    one_axis = replace(rope, axes=OneAxis())
    near = [replace(other, axes=OneAxis()) for other in plain_candidates(rope)]
    near += [*map(with_whole_base, near), *dialect.near(rope)]
    near = [one_axis, *near] if one_axis != rope else near
    target.refuse(reason, feature, rope, near, because=because)


def _lacking_gain(dialect: Dialect, rope: Rope, context: int) -> str | None:
    """The rope's factor on cos and sin, if the program can express the rope with another factor."""
    law = rope.scaling
    if isinstance(law, (PerPair, Yarn)):
        without_gain = replace(rope, scaling=replace(law, attention_factor=1.0))
        if _is_said(dialect, without_gain, context):
            return f"cos and sin multiplied by {rope.attention_factor:g}"
    if isinstance(law, Yarn):
        own_gain = replace(law, attention_factor=None, mscale=1.0, mscale_all_dim=0.0)
        if _is_said(dialect, replace(rope, scaling=own_gain), context):
            return f"YaRN with cos and sin multiplied by {rope.attention_factor:g}"
    return None


def find_fault(dialect: Dialect, ropes: LayerRopes, context: int) -> str | None:
    """What the program's code does wrong for the first words with a fault; else None."""
    for keys in dialect.words(ropes, context):
        try:
            _read_back(dialect, {**dialect.sizes(ropes, context), **keys})
        except FaultError as fault:
            return str(fault)
        except (ConfigError, SpecError):
            pass
    return None


class _Property(NamedTuple):
    """A property of a rope, and the field values of a rope without it."""

    reason: str
    feature: str
    plain: Keys


def _lacking(dialect: Dialect, rope: Rope, context: int) -> tuple[str, str]:
    """The property refused alone; else each one without which the rest is accepted; else all."""
    is_said = partial(_is_said, dialect, context=context)
    properties = _properties(rope)
    # one pairing or the other, so that it is none of the properties that may be plain
    if not is_said(plain_rope := _with(rope, *(one.plain for one in properties))):
        return "pairs", f"{rope.pairing} pairs"
    for one in properties:
        alone = _with(rope, *(other.plain for other in properties if other != one))
        if alone != plain_rope and not is_said(alone):
            return one.reason, one.feature
    with_plain = [(one, _with(rope, one.plain)) for one in properties]
    lacking = [(one, other) for one, other in with_plain if other != rope]
    # where the rest is not said without any of them, it is all of them
    together = [(one, other) for one, other in lacking if is_said(other)] or lacking
    reason = " and ".join(one.reason for one, _ in together)
    features = [one.feature for one, _ in together] or [f"the rotation {rope}"]
    if len(features) > 1:
        return reason, f"{' and '.join(features)} together"
    return reason or "rotation", features[0]


def _properties(rope: Rope) -> list[_Property]:
    """The properties that a program may lack."""
    base, law = "frequencies without a base", f"the law {type(rope.scaling).__name__}"
    if rope.base is not None:
        base = f"a base of {rope.base!r}, which is not a whole number"
    plain_base = whole_base(rope) if rope.base else 1e4
    start = f"a rotation from coordinate {rope.rotary_start} on"
    return [
        _Property("start", start, {"rotary_start": 0}),
        _Property("axes", f"positions of {rope.axes.n_axes} axes", {"axes": OneAxis()}),
        _Property("law", f"{law} with these numbers", {"scaling": None}),
        _Property("base", base, {"base": plain_base}),
        _Property("part", "a part of the head", {"rotary_dim": rope.head_dim // 2 * 2}),
    ]


def _with(rope: Rope, *values: Keys) -> Rope:
    """The rope with other values of some fields, and all other fields as close as possible."""
    changes = {field: value for some in values for field, value in some.items()}
    if "base" in changes:
        changes["explicit_inv_freq"] = None
    ends = changes.get("rotary_start", rope.rotary_start) + changes.get(
        "rotary_dim", rope.rotary_dim
    )
    if "rotary_dim" in changes and ends > rope.head_dim:  # all from the first coordinate on
        changes["rotary_dim"] = (rope.head_dim - rope.rotary_start) // 2 * 2
    with suppress(SpecError):  # axes, lists of a law, or frequencies, of other numbers of pairs
        changed = replace(rope, **changes)
        return changed if len(changed.at(1).inv_freq) else rope
    return rope
