"""MLX: the arguments of ``mlx.core.fast.rope``."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasor.files.translation.target import ProgramSettings, Target, per_rope
from phasor.rope import Rope
from phasor.scaling import Linear


def _write(rope: Rope, context: int) -> ProgramSettings:
    del context
    settings: dict[str, Any] = {
        "dims": rope.rotary_dim,
        "traditional": rope.pairing == "interleaved",
        "base": rope.base,
        "scale": 1.0,
    }
    x, freqs = "x", ""
    if isinstance(rope.scaling, Linear) and rope.direction == 1:
        settings["scale"] = 1 / rope.scaling.factor
    elif rope.scaling is not None or rope.base is None or rope.direction < 0:
        # mlx divides positions by these: infinity for pairs that stand still, negative numbers
        # for pairs that turn clockwise
        with np.errstate(divide="ignore", over="ignore"):
            settings |= {"base": None, "freqs": rope.direction / rope.inv_freq}
        freqs = ", freqs=mx.array(freqs)"
    if rope.attention_factor != 1:
        settings["gain"] = rope.attention_factor
        x = "gain * x"
        if rope.rotary_start + rope.rotary_dim < rope.head_dim:
            x = "mx.concatenate([gain * x[..., :dims], x[..., dims:]], axis=-1)"
    return ProgramSettings(
        settings,
        "import mlx.core as mx\n\n"
        "# x [batch, heads, seq, head_dim]; offset is the position of the first token\n"
        f"mx.fast.rope({x}, dims, traditional=traditional, base=base, scale=scale, "
        f"offset=offset{freqs})",
    )


TARGET = Target(
    name="mlx",
    program="the arguments of mlx.core.fast.rope",
    source="https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.fast.rope.html",
    checked="run",
    write=per_rope(_write),
    backwards=True,
)
