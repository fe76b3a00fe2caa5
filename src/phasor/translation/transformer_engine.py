"""TransformerEngine: its ``RotaryPositionEmbedding``, or the angles that this would return."""

from __future__ import annotations

import math
from typing import Any

from phasor.rope import Rope
from phasor.scaling import Linear
from phasor.translation.target import Part, Target, per_rope


def _write(rope: Rope, context: int) -> Part:
    embedding = _embedding(rope, context)
    settings: dict[str, Any]
    imports = ["from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb"]
    if embedding is not None:
        named = "".join(f"    {name}={name},\n" for name in embedding)
        imports = [f"{imports[0]}, RotaryPositionEmbedding"]
        angles = f"RotaryPositionEmbedding(\n{named})(max_seq_len)"
        settings = {**embedding, "max_seq_len": context}
    else:
        settings = {
            "rope": rope,
            "layout": "megatron",
            "max_positions": context,
            "interleaved": rope.pairing == "interleaved",
        }
        imports.insert(0, "from phasor.torch import cos_sin_cache")
        angles = (
            'cos_sin_cache(\n    rope, max_positions, layout=layout, device=t.device\n)["angles"]'
        )
    t = "t"
    if rope.attention_factor != 1:
        # angles carry no factor; it may come before the rotation as well
        settings["gain"] = rope.attention_factor
        t = "gain * t"
        if rope.rotary_start + rope.rotary_dim < rope.head_dim:
            imports.insert(0, "import torch")
            settings["rotary_dim"] = rope.rotary_dim
            t = "torch.cat((gain * t[..., :rotary_dim], t[..., rotary_dim:]), -1)"
    return Part(
        settings,
        "\n".join(imports) + "\n\n"
        '# t [seq, batch, heads, head_dim] for tensor_format="sbhd", or\n'
        '# [batch, seq, heads, head_dim] for "bshd"; start_positions is the position of the first\n'
        "# token of each row, a tensor [batch], or None for 0\n"
        f"freqs = {angles}\n"
        "apply_rotary_pos_emb(\n"
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
