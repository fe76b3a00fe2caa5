"""Keys of a model's config: the ``config.json`` of transformers, the ``params.json`` of Meta."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from phasor.axes import Alternating, InterleavedSections, OneAxis, Sectioned
from phasor.errors import ConfigError
from phasor.files.configs.writing import WRITERS, config_keys, keys_over_file
from phasor.files.translation.target import (
    ProgramSettings,
    Target,
    TranslationError,
    ntk_as_base,
    plain_candidates,
    whole_model,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, Llama3, LongRope, PerPair, Rule, Yarn


def in_config_form(target: Target, rope: Rope, context: int) -> Rope:
    """The rope with a law that has a ``rope_type``: a raised base, or a divisor for each pair."""
    # the classes of transformers round each frequency to float32
    form = ntk_as_base(replace(rope, inv_freq_dtype="exact"))
    law = form.scaling
    if isinstance(law, Yarn) and law.mscale != 1 and not (law.mscale and law.mscale_all_dim):
        # a block's mscale is only read beside a mscale_all_dim, and neither may be 0
        law = replace(law, mscale=1.0, attention_factor=rope.attention_factor)
        return replace(form, scaling=law)
    if form.explicit_inv_freq is None and type(law) in WRITERS:
        return form
    return with_divisors(target, replace(form, inv_freq_dtype=rope.inv_freq_dtype), context)


def with_divisors(target: Target, rope: Rope, context: int) -> Rope:
    """The same rotation by a base and a divisor for each pair; refused if a pair stands still."""
    base = rope.base or 10_000.0
    plain = replace(rope, inv_freq_dtype="exact", base=base, explicit_inv_freq=None, scaling=None)
    with np.errstate(divide="ignore", over="ignore"):
        factors = plain.inv_freq / rope.inv_freq
    if not np.isfinite(factors).all():
        target.refuse(
            "pairs that stand still, but for those of p-RoPE", rope, context, plain_candidates(rope)
        )
    law = PerPair(factors=tuple(factors.tolist()), attention_factor=rope.attention_factor)
    return replace(plain, scaling=law)


def _write_transformers(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    if ropes.in_config.ignores_scaling:
        raise TranslationError(
            f"the class of {ropes.name} in transformers has this rotation in its code and reads "
            "none from a config: there is nothing to give"
        )
    kinds = {
        kind: None if rope is None else in_config_form(TRANSFORMERS, rope, context)
        for kind, rope in ropes.kinds.items()
    }
    try:
        keys = config_keys(replace(ropes, kinds=kinds).config_blocks(), context, context)
        keys = keys_over_file(keys, ropes)
    except ConfigError as error:
        raise TranslationError(f"transformers cannot express it: {error}") from None
    path = ropes.in_config.path
    place = (f"These keys belong inside {path} of the config.",) if path else ()
    return (
        ProgramSettings(
            ropes={kind: rope for kind, rope in kinds.items() if rope is not None},
            settings=keys,
            code=json.dumps(keys, indent=2),
            notes=place + class_notes(TRANSFORMERS, ropes.ropes),
        ),
    )


def class_notes(target: Target, ropes: Iterable[Rope]) -> tuple[str, ...]:
    """Notes about properties that no config states: the code of the model's class has them."""
    notes: list[str] = []
    its_class = f"The class for the model in {target.name}"
    for rope in ropes:
        written = f" and write {rope.pairing_out} pairs" if rope.pairing_out else ""
        notes.append(
            f"{its_class} must rotate {rope.pairing} pairs{written}: no config says which."
        )
        if rope.rotary_start:
            notes.append(f"{its_class} must rotate from coordinate {rope.rotary_start} on.")
        if not isinstance(rope.scaling, Rule) and rope.softmax_factor != 1:
            notes.append(
                f"{its_class} must multiply its softmax scale by {rope.softmax_factor!r}: the "
                "classes of DeepSeek models do that themselves."
            )
    return tuple(dict.fromkeys(notes))


TRANSFORMERS = Target(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write_transformers,
    axes=(OneAxis, Sectioned, InterleavedSections, Alternating),
    rules=(DynamicNTK, LongRope),
    softmax=True,
    other_pairs_out=True,
)


# llama-models: the keys of Meta's ``params.json``.


#: Constants in the code of ``apply_scaling``.
_LOW_FREQ_FACTOR, _ORIGINAL_LENGTH = 1.0, 8192
#: Keys that only the code of Llama 4 reads, with the constants in the code of Llama 3.
_LLAMA3_CONSTANTS = {"rope_scaling_factor": 8.0, "rope_high_freq_factor": 4.0}


def _write_meta(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    rope = ntk_as_base(META.only_rope(ropes, context))
    settings: dict[str, Any] = {"rope_theta": rope.base, "use_scaled_rope": False}
    if rope.scaling is not None or rope.base is None:
        settings |= _scaling_keys(rope, context)
    settings |= _interval_key(ropes)
    notes = [f"The code computes head_dim as dim / n_heads, which has to be {rope.head_dim}."]
    needs_llama4 = {key: settings[key] for key in _LLAMA3_CONSTANTS if key in settings} not in (
        {},
        _LLAMA3_CONSTANTS,
    )
    if needs_llama4 or "nope_layer_interval" in settings:
        notes.append("llama_models.llama4 reads all these keys, llama_models.llama3 does not.")
    return whole_model(ropes, rope, settings, json.dumps(settings, indent=2), notes)


def _scaling_keys(rope: Rope, context: int) -> dict[str, Any]:
    law = rope.scaling
    if (
        not isinstance(law, Llama3)
        or law.low_freq_factor != _LOW_FREQ_FACTOR
        or law.original_max_positions != _ORIGINAL_LENGTH
    ):
        META.refuse(
            "frequencies other than base ** (-2k / d), or these scaled by Llama3 with "
            f"low_freq_factor={_LOW_FREQ_FACTOR:g} and original_max_positions={_ORIGINAL_LENGTH}",
            rope, context, (plain for plain in plain_candidates(rope) if plain.scaling is None),
        )  # fmt: skip
    return {
        "use_scaled_rope": True,
        "rope_scaling_factor": law.factor,
        "rope_high_freq_factor": law.high_freq_factor,
    }


def _interval_key(ropes: LayerRopes) -> dict[str, Any]:
    """The key for every n-th layer without a rotation."""
    unrotated = [i for i, kind in enumerate(ropes.layer_kinds, 1) if ropes.kinds[kind] is None]
    if not unrotated:
        return {}
    interval = unrotated[0]
    if unrotated != list(range(interval, len(ropes) + 1, interval)):
        raise TranslationError(
            "meta cannot express layers without a rotation that are not every n-th, and nothing "
            "that it can is near"
        )
    return {"nope_layer_interval": interval}


META = Target(
    name="meta",
    program="keys of a params.json for llama-models",
    source="https://github.com/meta-llama/llama-models/tree/main/models",
    checked="run",
    package="llama-models",
    write=_write_meta,
    needs_context=False,
    pairings=("interleaved",),
    partial=False,
)
