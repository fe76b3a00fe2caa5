"""Keys of a model's config.json: for transformers, and for vLLM and sglang.

The serving engines are given a command that overrides a config, and the arguments of their factory
``get_rope``, of which sglang's began as a copy of vLLM's. Both read the block of transformers.
"""

from __future__ import annotations

from dataclasses import replace

from phasor.axes import Alternating
from phasor.files.dialects.config_blocks import (
    THREE_AXES,
    ConfigTarget,
    in_config_form,
    place_notes,
)
from phasor.files.dialects.model_files import keys_for_file, merged_over
from phasor.files.dialects.target import (
    ProgramSettings,
    TranslationError,
    as_json,
    change_ropes,
    rotating,
)
from phasor.layers import LayerRopes
from phasor.scaling import (
    DynamicNTK,
    LongRope,
)


def _write_transformers(ropes: LayerRopes, context: int) -> ProgramSettings:
    if ropes.in_config.ignores_scaling:
        raise TranslationError(
            f"the class of {ropes.name} in transformers has this rotation in its code and reads "
            "none from a config: there is nothing to give"
        )
    notes = place_notes(ropes)
    for rope in (rope for rope in ropes.ropes if rope.direction < 0):
        if rope.rotary_dim < rope.head_dim or rope.axes.n_axes > 1 or rope.pairing_out:
            feature = "clockwise pairs by several axes, in a part of a head or written as others"
            TRANSFORMERS.refuse(feature, rope, [replace(rope, direction=1)])
        notes = ("Its class must turn pairs clockwise: that of nanochat does.", *notes)
    formed = change_ropes(ropes, lambda rope: in_config_form(TRANSFORMERS, rope))
    written = keys_for_file(formed, context, context)
    notes = (written.readers, *notes)
    return as_json(merged_over(written.keys, formed), notes, rotating(formed))


TRANSFORMERS = ConfigTarget(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write_transformers,
    # no class turns interleaved ones so
    takes=lambda rope: rope.direction > 0 or rope.pairing == "half",
    other_pairs_out=True,
    backwards=True,
    axes=(*THREE_AXES, Alternating),
    rules=(DynamicNTK, LongRope),
    query_factor=lambda factor, rope: True,
)
