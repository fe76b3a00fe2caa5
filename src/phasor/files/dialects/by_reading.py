"""Find a program's settings by reading: the first that its own reader reads as the ropes.

A `Dialect` has a program's reader and proposes settings for ropes. Each proposal is read back, and
the first proposal that rotates every layer in the same way is written.
"""

from __future__ import annotations

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
    change_ropes,
    drop_axes,
    ntk_as_base,
    plain_candidates,
    rotating,
    round_base,
    set_pairing,
    whole_base,
)
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import PAIRINGS
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, PerPair, Rule, SteppedNTK, Yarn
from phasor.scaling.laws import scale_alike

# relative rounding of frequencies that a reader computes from other numbers
_ROUNDING = 2.0**-40
# relative rounding of the factors on cos and sin and on the softmax, which programs keep in float32
_OF_FLOAT32 = 2.0**-24
# programs divide by 1e30 instead of stopping a pair
_STILL = 1e-29


class FaultError(ConfigError):
    """A fault in a program's code, in a sentence that explains the refusal."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A program's reader, and the settings with which its files may express ropes."""

    # the ropes that the program reads in a file; it refuses with a ConfigError or SpecError
    read: Callable[[JsonObject], LayerRopes]
    # proposals of settings for ropes and a context in tokens, the plainest first
    settings: Callable[[LayerRopes, int], Iterator[Keys]]
    # other keys without which the program cannot read a file
    sizes: Callable[[LayerRopes, int], Keys]
    # for a rope without settings: similar ropes, with the numbers that the program's code contains
    near: Callable[[Rope], Iterable[Rope]] = lambda rope: ()
    # whether it has settings for both pairings; if not, weights may have to be reordered
    has_both_pairings: bool = True
    # whether a file lists the layers that do not rotate; if not, the model's class decides
    states_still_layers: bool = True
    # whether the program multiplies the softmax as the rope does; if not, a note has the factor
    scales_softmax: bool = True


@dataclass(frozen=True, kw_only=True)
class Written:
    """Settings that a program's reader reads as the ropes of a model."""

    keys: Keys
    form: LayerRopes  # the ropes, with the laws that the settings name
    performed: Mapping[str, Rope]  # the rope that the program performs, by kind of layer


def find_settings(dialect: Dialect, ropes: LayerRopes, context: int) -> Written | None:
    """The first settings that the program reads as these ropes; None if there are none."""
    if not dialect.states_still_layers and len(ropes.ropes) == 1:
        ropes = _rotating_layers(ropes)
    # by the repr of a file, because another form often has the same settings; arrays are lists here
    reads: dict[str, LayerRopes | None] = {}
    for model in _model_in_pairings(dialect, ropes):
        for form in _forms(model):
            for keys in dialect.settings(form, context):
                file = {**dialect.sizes(form, context), **keys}
                text = repr(file)
                if text not in reads:
                    reads[text] = _read_if_taken(dialect, file)
                read_ropes = reads[text]
                if read_ropes is not None and _turn_alike(dialect, form, read_ropes, context):
                    return Written(keys=keys, form=form, performed=_performed(model, read_ropes))
    return None


def _model_in_pairings(dialect: Dialect, ropes: LayerRopes) -> Iterator[LayerRopes]:
    """The model; then, if the program may need it, the model with reordered weights."""
    yield ropes
    for pairing in () if dialect.has_both_pairings else PAIRINGS:
        reordered = change_ropes(ropes, partial(set_pairing, pairing=pairing))
        if reordered != ropes:
            yield reordered


def _forms(ropes: LayerRopes) -> Iterator[LayerRopes]:
    """Equivalent forms of the ropes, the simplest first."""
    raised = change_ropes(ropes, ntk_as_base)
    yield raised
    # programs round each frequency to float32 themselves
    if any(rope.inv_freq_dtype != "exact" for rope in raised.ropes):
        yield change_ropes(raised, _exact_frequencies)


def _exact_frequencies(rope: Rope) -> Rope:
    """The rope without the rounding of its frequencies."""
    return rope if rope.inv_freq_dtype == "exact" else replace(rope, inv_freq_dtype="exact")


def _performed(ropes: LayerRopes, read_ropes: LayerRopes) -> dict[str, Rope]:
    """The ropes, with the output pairing of the reader."""
    read_kinds = dict(zip(ropes.layer_kinds, read_ropes, strict=True))
    performed: dict[str, Rope] = {}
    for kind, rope in rotating(ropes).items():
        read_rope = read_kinds[kind]
        assert read_rope is not None, "both turn alike"
        performed[kind] = rope
        if rope.pairing_out != read_rope.pairing_out:
            performed[kind] = replace(rope, pairing_out=read_rope.pairing_out)
    return performed


def read_as(dialect: Dialect, keys: Keys, ropes: LayerRopes, context: int) -> LayerRopes | None:
    """The ropes that the program reads in ``keys``, if they rotate like these; else None."""
    read_ropes = _read_if_taken(dialect, {**dialect.sizes(ropes, context), **keys})
    if read_ropes is None or not _turn_alike(dialect, ropes, read_ropes, context):
        return None
    return read_ropes


def _read_if_taken(dialect: Dialect, file: Keys) -> LayerRopes | None:
    """The ropes that the program reads in a file; None if it refuses the file."""
    try:
        return _read_back(dialect, file)
    except (ConfigError, SpecError):
        return None


def _read_back(dialect: Dialect, file: Keys) -> LayerRopes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)  # no user wrote this file
        return dialect.read(JsonObject(file))


def _turn_alike(dialect: Dialect, ropes: LayerRopes, read_ropes: LayerRopes, context: int) -> bool:
    """Whether every layer turns by the same angles, even if the laws have other names."""
    kinds = dict.fromkeys(zip(ropes.layer_kinds, read_ropes.layer_kinds, strict=True))
    pairs = ((ropes.kinds[kind], read_ropes.kinds[read_kind]) for kind, read_kind in kinds)
    return all(_ropes_alike(dialect, rope, read_rope, context) for rope, read_rope in pairs)


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
    """The lengths to compare rules at: rules with the same laws there are the same rule."""
    lengths = {context}
    for law in (a.scaling, b.scaling):
        if isinstance(law, LongRope):
            lengths |= {law.original_max_positions, law.original_max_positions + 1}
        elif isinstance(law, (DynamicNTK, SteppedNTK)):
            lengths |= {law.original_max_positions << doublings for doublings in range(8)}
    return lengths


def _laws_alike(dialect: Dialect, a: Rope, b: Rope) -> bool:
    if not math.isclose(a.attention_factor, b.attention_factor, rel_tol=_OF_FLOAT32):
        return False
    if dialect.scales_softmax and not math.isclose(
        a.softmax_factor, b.softmax_factor, rel_tol=_OF_FLOAT32
    ):
        return False
    others = [(r.base, r.axes, r.explicit_inv_freq, r.inv_freq_dtype) for r in (a, b)]
    if others[0] == others[1] and scale_alike(a.law(), b.law()):
        return True  # without the frequencies, which take longer than all the reading
    ours, theirs = a.inv_freq, b.inv_freq
    return bool((np.abs(ours - theirs) <= _STILL + _ROUNDING * theirs).all())


# Refusals.


def settings_or_refusal(
    target: Target, dialect: Dialect, ropes: LayerRopes, context: int
) -> Written:
    """The settings for the ropes.

    Raises:
        RefusalError: If there are none; it names the property that the program cannot express.
    """
    if (written := find_settings(dialect, ropes, context)) is not None:
        return written
    for rope in ropes.ropes:
        if not _is_expressible(dialect, rope, context):
            _refuse(target, dialect, rope, context)
    if None in ropes.kinds.values() and find_settings(dialect, _rotating_layers(ropes), context):
        raise target.lacks("still layers", "layers without a rotation", "it rotates in every layer")
    target.only_rope(ropes)
    raise AssertionError("each rope is expressed alone, so there are several")


def settings_for_rope(
    target: Target,
    dialect: Dialect,
    rope: Rope,
    context: int,
    *,
    is_list: Callable[[Keys], bool],
) -> Keys:
    """`find_named_settings` for one rope.

    Raises:
        RefusalError: If there are none; it names the property that the program cannot express.
    """
    ropes = one_layer(rope)
    written = find_named_settings(dialect, ropes, context, is_list=is_list)
    return (written or settings_or_refusal(target, dialect, ropes, context)).keys


def settings_by_rope(
    target: Target,
    dialect: Dialect,
    ropes: LayerRopes,
    context: int,
    *,
    is_list: Callable[[Keys], bool],
) -> tuple[LayerRopes, Mapping[Rope, Written]]:
    """The model in a pairing that the program has, and the settings for each rope by itself.

    Raises:
        RefusalError: As for `settings_for_rope`, or if the program has no pairing for all ropes.
    """
    paired_dialect = replace(dialect, has_both_pairings=True)
    unused = ropes.in_config.unused_blocks.values()
    for model in _model_in_pairings(dialect, ropes):
        settings: dict[Rope, Written] = {}
        for rope in (*model.ropes, *unused):
            ropes_of_layer = one_layer(rope)
            written = find_named_settings(paired_dialect, ropes_of_layer, context, is_list=is_list)
            if written is None:
                break
            settings[rope] = written
        else:
            return model, settings
    for rope in (*ropes.ropes, *unused):
        settings_or_refusal(target, dialect, one_layer(rope), context)
    target.only_rope(ropes)
    raise AssertionError("each rope is expressed alone, so there are several")


def find_named_settings(
    dialect: Dialect, ropes: LayerRopes, context: int, *, is_list: Callable[[Keys], bool]
) -> Written | None:
    """Settings that name the law, else those with a list of frequencies; None if there are none.

    Programs round the frequencies of a named law themselves. A list contains them as the rope
    rounds them.
    """
    exact = change_ropes(ropes, _exact_frequencies)
    written = find_settings(dialect, exact, context)
    if written is not None and is_list(written.keys) and ropes != exact:
        written = find_settings(dialect, ropes, context)
    return written


def _rotating_layers(ropes: LayerRopes) -> LayerRopes:
    """The model without its layers that do not rotate."""
    if None not in ropes.kinds.values():
        return ropes
    kinds = tuple(kind for kind in ropes.layer_kinds if ropes.kinds[kind] is not None)
    return replace(ropes, layer_kinds=kinds, kinds=rotating(ropes), query_factors={})


@lru_cache(maxsize=1024)  # refusals try the same similar ropes again
def _is_expressible(dialect: Dialect, rope: Rope, context: int) -> bool:
    """Whether the program can express one rope for all layers."""
    return find_settings(dialect, one_layer(rope), context) is not None


def _refuse(target: Target, dialect: Dialect, rope: Rope, context: int) -> NoReturn:
    """Refuse a rope, and name the property that the program cannot express."""
    form = ntk_as_base(rope)
    form = form if form.scaling is None else rope
    because = find_fault(dialect, one_layer(form), context) or ""
    forwards = replace(rope, direction=1)
    if rope.direction < 0 and _is_expressible(dialect, forwards, context):
        if isinstance(rope.scaling, Rule) and _is_expressible(dialect, rope.at(context), context):
            law = type(rope.scaling).__name__
            feature = f"{law} of pairs that turn clockwise"
            raise target.lacks("rule and clockwise", feature, way_out=PICK_LAW)
        target.refuse("clockwise", "pairs that turn clockwise", rope, [forwards], because=because)
    reason, feature = _missing_feature(dialect, form, context)
    if reason == "law" and (gain_feature := _missing_gain(dialect, rope, context)):
        reason, feature, because = "gain", gain_feature, ""
    if reason == "law" and isinstance(rope.scaling, Rule):
        # at short lengths a program may have only the list for longer sequences
        if isinstance(rope.scaling, LongRope):
            start = rope.scaling.original_max_positions
            short, long = rope.at(start), rope.at(start + 1)
            if _is_expressible(dialect, long, context):
                target.refuse(
                    reason, feature, short, [long], start, because=because, way_out=PICK_LAW
                )
        raise target.lacks(reason, feature, because, way_out=PICK_LAW)
    if reason == "start" or isinstance(rope.scaling, Rule):
        target.refuse(reason, feature, rope, [], because=because)
    axis_rope = drop_axes(rope)
    candidates = [replace(candidate, axes=OneAxis()) for candidate in plain_candidates(rope)]
    candidates += [*map(round_base, candidates), *dialect.near(rope)]
    candidates = [axis_rope, *candidates] if axis_rope != rope else candidates
    target.refuse(reason, feature, rope, candidates, because=because)


def _missing_gain(dialect: Dialect, rope: Rope, context: int) -> str | None:
    """The rope's factor on cos and sin, if that is what the program cannot express."""
    law = rope.scaling
    if isinstance(law, (PerPair, Yarn)):
        gainless = replace(rope, scaling=replace(law, attention_factor=1.0))
        if _is_expressible(dialect, gainless, context):
            return f"cos and sin multiplied by {rope.attention_factor:g}"
    if isinstance(law, Yarn):
        yarn_gain = replace(law, attention_factor=None, mscale=1.0, mscale_all_dim=0.0)
        if _is_expressible(dialect, replace(rope, scaling=yarn_gain), context):
            return f"YaRN with cos and sin multiplied by {rope.attention_factor:g}"
    return None


def find_fault(dialect: Dialect, ropes: LayerRopes, context: int) -> str | None:
    """The program's fault with the first proposed settings that have one; else None."""
    for keys in dialect.settings(ropes, context):
        try:
            _read_back(dialect, {**dialect.sizes(ropes, context), **keys})
        except FaultError as fault:
            return str(fault)
        except (ConfigError, SpecError):
            pass
    return None


class _Property(NamedTuple):
    """A property of a rope, and the field values that remove it."""

    reason: str
    feature: str
    plain: Keys


def _missing_feature(dialect: Dialect, rope: Rope, context: int) -> tuple[str, str]:
    """The reason of a refusal, and its feature in words.

    It is the first property that is refused by itself. Otherwise it is every property whose removal
    makes the rope acceptable, or all of them together if there is none.
    """
    is_expressible = partial(_is_expressible, dialect, context=context)
    properties = _properties(rope)
    plain_rope = _replace_fields(rope, *(item.plain for item in properties))
    # no pairing is plainer than the other, so it is not one of the properties
    if not is_expressible(plain_rope):
        return "pairs", f"{rope.pairing} pairs"
    for item in properties:
        rest = (other.plain for other in properties if other != item)
        rope_with_item = _replace_fields(rope, *rest)
        if rope_with_item != plain_rope and not is_expressible(rope_with_item):
            return item.reason, item.feature
    simpler = [(item, _replace_fields(rope, item.plain)) for item in properties]
    lacking = [(item, simple_rope) for item, simple_rope in simpler if simple_rope != rope]
    # if no single property makes the rest expressible, the feature is all of them
    causes = [(item, simple_rope) for item, simple_rope in lacking if is_expressible(simple_rope)]
    causes = causes or lacking
    reason = " and ".join(item.reason for item, _ in causes)
    features = [item.feature for item, _ in causes] or [f"the rotation {rope}"]
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


def _replace_fields(rope: Rope, *values: Keys) -> Rope:
    """The rope with other values of some fields, and all other fields as close as possible."""
    changes = {field: value for fields in values for field, value in fields.items()}
    if "base" in changes:
        changes["explicit_inv_freq"] = None
    ends = changes.get("rotary_start", rope.rotary_start) + changes.get(
        "rotary_dim", rope.rotary_dim
    )
    if "rotary_dim" in changes and ends > rope.head_dim:  # rotate all that follow the start
        changes["rotary_dim"] = (rope.head_dim - rope.rotary_start) // 2 * 2
    # axes, a law's lists or explicit frequencies may be for another number of pairs
    with suppress(SpecError):
        result = replace(rope, **changes)
        return result if len(result.at(1).inv_freq) else rope
    return rope
