"""TransformerEngine: its ``RotaryPositionEmbedding``, or the angles that this would return."""

from __future__ import annotations

import math
from typing import Any

from phasor.rope import Rope
from phasor.scaling import Linear
from phasor.translation.target import Target, Written, per_rope


def _write(rope: Rope, context: int) -> Written:
    law, settings = rope.scaling, _embedding(rope, context)
    if settings is not None:
        named = "".join(f"    {name}={name},\n" for name in settings)
        angles = f"transformer_engine.pytorch.RotaryPositionEmbedding(\n{named})(max_seq_len)"
        settings["max_seq_len"] = context
    else:
        settings = {
            "rope": rope,
            "layout": "megatron",
            "max_positions": context,
            "interleaved": rope.pairing == "interleaved",
        }
        angles = (
            "phasor.torch.cos_sin_cache(\n"
            "    rope, max_positions, layout=layout, device=t.device\n"
            ')["angles"]'
        )
    t = "t"
    if law is not None and rope.attention_factor != 1:
        # angles carry no factor; it may come before the rotation as well
        settings |= {"gain": rope.attention_factor, "rotary_dim": rope.rotary_dim}
        t = "gain * t"
        if rope.rotary_start + rope.rotary_dim < rope.head_dim:
            t = "torch.cat((gain * t[..., :rotary_dim], t[..., rotary_dim:]), -1)"
    return Written(
        settings,
        f"freqs = {angles}\n"
        "transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb(\n"
        f"    {t}, freqs, tensor_format=tensor_format,\n"
        "    start_positions=start_positions, interleaved=interleaved\n"
        ")",
    )


def _embedding(rope: Rope, context: int) -> dict[str, Any] | None:
    """The arguments of ``RotaryPositionEmbedding``; None where they do not suffice."""
    law = rope.scaling
    if rope.base is None or rope.direction < 0:
        return None
    arguments: dict[str, Any] = {
        "dim": rope.rotary_dim,
        "rotary_base": rope.base,
        "interleaved": rope.pairing == "interleaved",
    }
    if isinstance(law, Linear) and law.factor.is_integer():
        # both or none; a sequence longer than their product is squeezed further
        return arguments | {
            "seq_len_interpolation_factor": int(law.factor),
            "pretrained_max_position_embeddings": math.ceil(context / law.factor),
        }
    return arguments if law is None else None


TARGET = Target(
    name="transformer-engine",
    program="the arguments of RotaryPositionEmbedding, or the freqs of apply_rotary_pos_emb",
    source="https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html",
    checked="description",
    write=per_rope(_write),
    backwards=True,
)
