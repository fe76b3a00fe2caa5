"""transformers: keys of a model's ``config.json``, for its versions 5 and 4."""

from __future__ import annotations

from dataclasses import replace

from phasor.axes import Alternating
from phasor.files.dialects.blocks import BLOCK_DIALECT, BLOCK_KEY, is_list
from phasor.files.dialects.by_reading import settings_by_rope
from phasor.files.dialects.config_blocks import THREE_AXES, ConfigTarget, place_notes
from phasor.files.dialects.model_files import keys_for_file, merged_over
from phasor.files.dialects.target import (
    ProgramSettings,
    as_json,
    change_ropes,
    rotating,
)
from phasor.layers import LayerRopes
from phasor.scaling import DynamicNTK, LongRope

# a model's own class scales the softmax; NanoChat's, which turns clockwise, turns only half pairs
_DIALECT = replace(BLOCK_DIALECT, scales_softmax=False)
_CLOCKWISE = replace(_DIALECT, has_both_pairings=False)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    if ropes.in_config.ignores_scaling:
        because = "its class has it in its code and reads none, so there is nothing to give"
        raise TRANSFORMERS.lacks("fixed class", f"the rotation of {ropes.name}", because)
    clockwise = any(rope.direction < 0 for rope in ropes.ropes)
    dialect = _CLOCKWISE if clockwise else _DIALECT
    ropes, settings = settings_by_rope(TRANSFORMERS, dialect, ropes, context, is_list=is_list)
    blocks = {rope: found.keys[BLOCK_KEY] for rope, found in settings.items()}
    # a file is read back with the laws that the settings name
    forms = {rope: found.form.ropes[0] for rope, found in settings.items()}
    blocks |= {forms[rope]: blocks[rope] for rope in settings}
    formed = change_ropes(ropes, forms.__getitem__)
    file_keys = keys_for_file(formed, context, context, lambda rope, _context: blocks[rope])
    notes = (file_keys.readers, *place_notes(ropes))
    if clockwise:
        notes = (*notes, "Its class must turn pairs clockwise: that of nanochat does.")
        ropes = change_ropes(ropes, lambda rope: replace(rope, pairing_out=None))
    return as_json(merged_over(file_keys.keys, ropes), notes, rotating(ropes))


TRANSFORMERS = ConfigTarget(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write,
    other_pairs_out=True,
    backwards=True,
    axes=(*THREE_AXES, Alternating),
    rules=(DynamicNTK, LongRope),
    query_factor=lambda factor, rope: True,
)
