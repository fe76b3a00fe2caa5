"""transformers: the keys of a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from phasor.axes import Alternating, InterleavedSections, OneAxis, Sectioned
from phasor.configs import config_keys
from phasor.configs.writing import WRITERS
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, PerPair
from phasor.translation.target import Part, Target, TranslationError, ntk_as_base, plain_candidates


def in_config_form(rope: Rope, context: int) -> Rope:
    """The rope with a law that has a ``rope_type``: a raised base, or a divisor for each pair.

    Raises:
        TranslationError: If a pair stands still, which no divisor says.
    """
    # its classes round each frequency to float32
    given = ntk_as_base(replace(rope, inv_freq_dtype="exact"))
    if given.explicit_inv_freq is None and type(given.scaling) in WRITERS:
        return given
    plain = replace(given, scaling=None, explicit_inv_freq=None, base=given.base or 10_000.0)
    with np.errstate(divide="ignore", over="ignore"):
        factors = plain.inv_freq / rope.inv_freq
    if not np.isfinite(factors).all():
        TARGET.refuse("pairs that stand still, but for those of p-RoPE", rope, context,
                      plain_candidates(rope))  # fmt: skip
    law = PerPair(factors=tuple(factors.tolist()), attention_factor=rope.attention_factor)
    return replace(plain, scaling=law)


def _write(ropes: LayerRopes, context: int) -> tuple[Part, ...]:
    if ropes.in_config.fixed:
        raise TranslationError(
            f"the class of {ropes.name} in transformers has this rotation in its code and reads "
            "none from a config: there is nothing to give"
        )
    kinds = {
        kind: None if rope is None else in_config_form(rope, context)
        for kind, rope in ropes.kinds.items()
    }
    readable = replace(ropes, kinds=kinds)
    try:
        keys = config_keys(readable.config_blocks(), context, context)
    except ConfigError as error:
        raise TranslationError(f"transformers cannot express it: {error}") from None
    return (
        Part(
            ropes={kind: rope for kind, rope in kinds.items() if rope is not None},
            settings=keys,
            code=json.dumps(keys, indent=2),
            notes=tuple(dict.fromkeys(_of_the_class(ropes))),
        ),
    )


def _of_the_class(ropes: LayerRopes) -> Iterator[str]:
    """What a config does not say and the class of the model has to do."""
    if ropes.in_config.inside:
        yield f"These keys stand in {ropes.in_config.inside}."
    for rope in ropes.ropes:
        yield f"The class of the model has to turn {rope.pairing} pairs."
        if rope.rotary_start:
            yield f"The class of the model has to turn from coordinate {rope.rotary_start} on."


TARGET = Target(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write,
    axes=(OneAxis, Sectioned, InterleavedSections, Alternating),
    rules=(DynamicNTK, LongRope),
)
