"""flash-attention: cos and sin of its ``apply_rotary_emb``."""

from __future__ import annotations

from phasor.rope import Rope
from phasor.translation.target import Part, Target, per_rope


def _write(rope: Rope, context: int) -> Part:
    return Part(
        {
            "rope": rope,
            "layout": "flash-attn",
            "max_positions": context,
            "gain": rope.attention_factor,
            "interleaved": rope.pairing == "interleaved",
        },
        "from flash_attn.layers.rotary import apply_rotary_emb\n"
        "from phasor.torch import cos_sin_cache\n\n"
        "# x [batch, seq, heads, head_dim]; offset is the position of the first token\n"
        "tables = cos_sin_cache(\n"
        "    rope, max_positions, layout=layout, gain=gain, dtype=x.dtype, device=x.device\n"
        ")\n"
        "apply_rotary_emb(\n"
        '    x, tables["cos"], tables["sin"], interleaved=interleaved, seqlen_offsets=offset\n'
        ")",
    )


TARGET = Target(
    name="flash-attn",
    program="the tables and arguments of flash_attn.layers.rotary.apply_rotary_emb",
    source="https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/layers/rotary.py",
    checked="description",
    write=per_rope(_write),
    backwards=True,
)
