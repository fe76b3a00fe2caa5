"""Meta's llama-models: the keys of a ``params.json``."""

from __future__ import annotations

import json
from typing import Any

from phasor.files.translation.target import (
    ProgramSettings,
    Target,
    TranslationError,
    ntk_as_base,
    plain_candidates,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Llama3

#: Constants in the code of ``apply_scaling``.
_LOW_FREQ_FACTOR, _ORIGINAL_LENGTH = 1.0, 8192
#: Keys that only the code of Llama 4 reads, with the constants in the code of Llama 3.
_LLAMA3_CONSTANTS = {"rope_scaling_factor": 8.0, "rope_high_freq_factor": 4.0}


def _write(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    rope = ntk_as_base(TARGET.only_rope(ropes, context))
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
    return (
        ProgramSettings(
            ropes={kind: rope for kind, other in ropes.kinds.items() if other is not None},
            settings=settings,
            code=json.dumps(settings, indent=2),
            notes=tuple(notes),
        ),
    )


def _scaling_keys(rope: Rope, context: int) -> dict[str, Any]:
    law = rope.scaling
    if (
        not isinstance(law, Llama3)
        or law.low_freq_factor != _LOW_FREQ_FACTOR
        or law.original_max_positions != _ORIGINAL_LENGTH
    ):
        TARGET.refuse(
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


TARGET = Target(
    name="meta",
    program="keys of a params.json for llama-models",
    source="https://github.com/meta-llama/llama-models/tree/main/models",
    checked="run",
    package="llama-models",
    write=_write,
    pairings=("interleaved",),
    partial=False,
)
