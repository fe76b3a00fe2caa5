"""rotary-embedding-torch: the arguments of its ``RotaryEmbedding``."""

from __future__ import annotations

from typing import Any

from phasor.axes import Alternating, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.files.translation.target import ProgramSettings, Target, per_rope
from phasor.rope import Rope
from phasor.scaling import Linear


def _write(rope: Rope, context: int) -> ProgramSettings:
    del context
    gain = {} if rope.attention_factor == 1 else {"gain": rope.attention_factor}
    scale = ", scale=gain" if gain else ""
    # the class divides by dim - 2 and has positions of one axis only
    if rope.axes.n_axes > 1 or rope.rotary_dim == 2:
        axis_of_pair = list(rope.axes.axis_of_pair(rope.num_pairs))
        return ProgramSettings(
            {"freqs": rope.direction * rope.inv_freq, "axis_of_pair": axis_of_pair, **gain},
            "import torch\nfrom rotary_embedding_torch import apply_rotary_emb\n\n"
            "# x [..., seq, head_dim]; positions, a tensor [seq, axes]\n"
            "freqs = torch.tensor(freqs, dtype=torch.float64, device=positions.device)\n"
            "angles = positions[:, axis_of_pair] * freqs\n"
            f"apply_rotary_emb(angles.float().repeat_interleave(2, dim=-1), x{scale})",
        )
    imports = ""
    settings: dict[str, Any] = {"dim": rope.rotary_dim}
    linear = isinstance(rope.scaling, Linear) and rope.scaling.factor >= 1
    if rope.base is None or rope.direction < 0 or not (rope.scaling is None or linear):
        imports = "import torch\n"
        settings["freqs"] = rope.direction * rope.inv_freq
        law = "custom_freqs=torch.tensor(freqs, dtype=torch.float32)"
    else:
        settings["theta"] = rope.base
        law = "theta=theta"
        if isinstance(rope.scaling, Linear):
            settings["interpolate_factor"] = rope.scaling.factor
            law += ", interpolate_factor=interpolate_factor"
    return ProgramSettings(
        settings | gain,
        f"{imports}from rotary_embedding_torch import RotaryEmbedding\n\n"
        "# x [batch, heads, seq, head_dim]; offset is the position of the first token\n"
        f"rotary = RotaryEmbedding(dim, {law})\n"
        f"rotary.rotate_queries_or_keys(x, offset=offset{scale})",
        (
            "x has to be float32: positions are counted in its dtype, in bfloat16 exactly up to "
            "256 only.",
        ),
    )


TARGET = Target(
    name="rotary-embedding-torch",
    program="the arguments of RotaryEmbedding, or angles for apply_rotary_emb",
    source="https://github.com/lucidrains/rotary-embedding-torch",
    checked="run",
    write=per_rope(_write),
    pairings=("interleaved",),
    backwards=True,
    axes=(OneAxis, Sectioned, Axial, InterleavedSections, Alternating),
)
