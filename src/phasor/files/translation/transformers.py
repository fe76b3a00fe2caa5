"""transformers: the keys of a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from phasor.axes import Alternating, InterleavedSections, OneAxis, Sectioned
from phasor.errors import ConfigError
from phasor.files.configs.writing import WRITERS, config_keys
from phasor.files.translation.target import (
    ProgramSettings,
    Target,
    TranslationError,
    ntk_as_base,
    plain_candidates,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, PerPair, Rule, Yarn


def in_config_form(target: Target, rope: Rope, context: int) -> Rope:
    """The rope with a law that has a ``rope_type``: a raised base, or a divisor for each pair.

    Raises:
        TranslationError: If a pair stands still, for which there is no divisor.
    """
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
    """The same rotation by a base and a divisor for each pair.

    Raises:
        TranslationError: As `in_config_form`.
    """
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


def _write(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    if ropes.in_config.fixed:
        raise TranslationError(
            f"the class of {ropes.name} in transformers has this rotation in its code and reads "
            "none from a config: there is nothing to give"
        )
    kinds = {
        kind: None if rope is None else in_config_form(TARGET, rope, context)
        for kind, rope in ropes.kinds.items()
    }
    try:
        keys = config_keys(replace(ropes, kinds=kinds).config_blocks(), context, context)
    except ConfigError as error:
        raise TranslationError(f"transformers cannot express it: {error}") from None
    path = ropes.in_config.inside
    place = (f"These keys belong inside {path} of the config.",) if path else ()
    return (
        ProgramSettings(
            ropes={kind: rope for kind, rope in kinds.items() if rope is not None},
            settings=keys,
            code=json.dumps(keys, indent=2),
            notes=place + class_notes(TARGET, ropes.ropes),
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


TARGET = Target(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write,
    axes=(OneAxis, Sectioned, InterleavedSections, Alternating),
    rules=(DynamicNTK, LongRope),
    softmax=True,
    other_pairs_out=True,
)
