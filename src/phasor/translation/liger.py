"""Liger: cos and sin of its ``liger_rotary_pos_emb``."""

from __future__ import annotations

from typing import Any

from phasor.axes import Alternating, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.rope import Rope
from phasor.translation.target import POSITIONS_UNCHECKED, Part, Target, per_rope


def _write(rope: Rope, context: int) -> Part:
    notes: tuple[str, ...] = ("It may overwrite q and k.",)
    settings: dict[str, Any] = {"rope": rope, "gain": rope.attention_factor}
    if rope.axes.n_axes == 1:
        settings |= {"layout": "transformers", "max_positions": context}
        notes += (POSITIONS_UNCHECKED,)
        imports, rows = (
            "from phasor.torch import cos_sin_cache",
            "# q, k [batch, heads, seq, head_dim]; offset is the position of the first token\n"
            "tables = cos_sin_cache(\n"
            "    rope, max_positions, layout=layout, gain=gain, device=q.device\n"
            ")\n"
            "rows = slice(offset, offset + q.shape[2])\n"
            'cos, sin = tables["cos"][None, rows], tables["sin"][None, rows]\n',
        )
    else:
        # [seq, pairs] -> [1, seq, rotary_dim]
        imports, rows = (
            "import torch\nfrom phasor.angles import cos_sin",
            "# q, k [batch, heads, seq, head_dim]; positions, a NumPy array [seq, axes]\n"
            "cos, sin = (\n"
            "    gain * torch.tensor(part).float().to(q.device).repeat(1, 2)[None]\n"
            "    for part in cos_sin(rope, positions)\n"
            ")\n",
        )
    if rope.rotary_dim < rope.head_dim - rope.rotary_start:
        notes += ("This rotates a part of a head, which needs liger-kernel 0.8.5 or newer.",)
    return Part(
        settings,
        f"{imports}\nfrom liger_kernel.transformers.rope import liger_rotary_pos_emb\n\n"
        f"{rows}liger_rotary_pos_emb(q, k, cos, sin)",
        notes,
    )


TARGET = Target(
    name="liger",
    program="the tables of liger_rotary_pos_emb",
    source="https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/transformers/rope.py",
    checked="run",
    package="liger-kernel",
    write=per_rope(_write),
    pairings=("half",),
    backwards=True,
    axes=(OneAxis, Sectioned, Axial, InterleavedSections, Alternating),
)
