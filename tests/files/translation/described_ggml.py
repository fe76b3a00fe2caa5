"""ggml's rotation and what llama.cpp calls it with, written from their documentation.

``ggml_rope_ext`` and ``ggml_rope_multi`` as in the comments of ``ggml.h``; the keys as in
``docs/gguf.md``; the flags as in the help of ``llama-server``. In float64, with arguments in
float32 as files and flags keep them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class RopeArguments:
    """The arguments of ``ggml_rope_ext`` without the arrays, by their names in ``ggml.h``."""

    n_dims: int
    mode: str
    freq_base: float
    sections: Sequence[int] = (0, 0, 0, 0)
    n_ctx_orig: int = 0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: np.ndarray | None = None


def single(value: float) -> float:
    """Rounded to float32."""
    return float(np.float32(value))


def text_positions(start: int, count: int) -> list[tuple[int, ...]]:
    """Of text: three coordinates are the position, a fourth is 0."""
    return [(p, p, p, 0) for p in range(start, start + count)]


def ggml_rope(x: np.ndarray, positions: Sequence[Sequence[int]], to: RopeArguments) -> np.ndarray:
    """``x`` ``[seq, head_dim]`` turned; modes NORM, NEOX, MROPE and IMROPE."""
    n = to.n_dims // 2
    turned = x.astype(np.float64)
    for token, position in enumerate(positions):
        for i in range(n):
            theta = position[axis_of(i, to)] * to.freq_base ** (-2 * i / to.n_dims)
            if to.freq_factors is not None:
                theta /= single(to.freq_factors[i])
            theta, mscale = rope_yarn(theta, i, to)
            first, second = (2 * i, 2 * i + 1) if to.mode == "NORM" else (i, i + n)
            z = complex(x[token, first], x[token, second])
            z *= mscale * complex(math.cos(theta), math.sin(theta))
            turned[token, first], turned[token, second] = z.real, z.imag
    return turned


def rope_yarn(theta: float, i: int, to: RopeArguments) -> tuple[float, float]:
    """The scaled angle, and what cos and sin are multiplied by."""
    scaled = to.freq_scale * theta
    if to.ext_factor == 0:
        return scaled, to.attn_factor

    def corr_dim(turns: float) -> float:
        # the pair that makes so many turns over the original context
        turned = to.n_ctx_orig / (turns * 2 * math.pi)
        return to.n_dims * math.log(turned) / (2 * math.log(to.freq_base))

    low = max(0, math.floor(corr_dim(to.beta_fast)))
    high = min(to.n_dims - 1, math.ceil(corr_dim(to.beta_slow)))
    ramp = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
    mix = ramp * to.ext_factor
    mscale = to.attn_factor * (1 + 0.1 * math.log(1 / to.freq_scale))
    return scaled * (1 - mix) + theta * mix, mscale


def axis_of(i: int, to: RopeArguments) -> int:
    """The coordinate that turns pair ``i``."""
    if to.mode in ("NORM", "NEOX"):
        return 0
    if to.mode == "MROPE":
        ends = [sum(to.sections[: axis + 1]) for axis in range(3)]
        return sum(i >= end for end in ends)
    return i % 3 if i < 3 * to.sections[i % 3] else 3


def llama_rope(
    keys: Mapping[str, Any],
    flags: Mapping[str, Any],
    *,
    mode: str,
    n_ctx: int,
    swa: bool = False,
    scale_swa: bool = True,
) -> RopeArguments:
    """What llama.cpp gives ggml in a layer.

    Args:
        keys: A file's, without the architecture's prefix, and its tensors.
        flags: They replace keys.
        mode: The architecture's type of rotation.
        n_ctx: Tokens that it is started for.
        swa: Whether the layer has a sliding window.
        scale_swa: Whether the architecture scales those too.
    """
    kind = flags.get("--rope-scaling", keys.get("rope.scaling.type", "linear"))
    original = keys.get("rope.scaling.original_context_length", n_ctx)
    original = flags.get("--yarn-orig-ctx", original)
    factor = single(flags.get("--rope-scale", keys.get("rope.scaling.factor", 1.0)))
    freq_scale = 1.0 if kind == "none" else single(1 / factor)
    ext_factor = 1.0 if kind == "yarn" else 0.0
    attn_factor = single(keys.get("rope.scaling.attn_factor", 1.0))
    if kind == "yarn":
        # what ggml multiplies by is taken out again: cos and sin get m(1) / m(multiplier)
        multiplier = keys.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        if multiplier == 0:
            attn_factor *= log_scale(factor, 1.0)
        attn_factor /= 1 + 0.1 * math.log(factor)
    base, width = keys["rope.freq_base"], keys["rope.dimension_count"]
    tensors = [keys.get(f"rope_{name}.weight") for name in ("freqs", "factors_short")]
    if n_ctx > original:
        tensors[1] = keys.get("rope_factors_long.weight")
    compressed = keys.get("attention.compress_rope_freq_base")
    if swa and compressed is None:
        base = keys.get("rope.freq_base_swa", base)
        width = keys.get("rope.dimension_count_swa", width)
    elif compressed is not None and not swa:
        base = compressed
    if swa and not scale_swa:
        return RopeArguments(n_dims=width, mode=mode, freq_base=single(base))
    return RopeArguments(
        n_dims=width,
        mode=mode,
        freq_base=single(flags.get("--rope-freq-base", base)),
        sections=keys.get("rope.dimension_sections", (0, 0, 0, 0)),
        n_ctx_orig=original,
        freq_scale=freq_scale,
        ext_factor=ext_factor,
        attn_factor=attn_factor,
        beta_fast=flags.get("--yarn-beta-fast", keys.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=flags.get("--yarn-beta-slow", keys.get("rope.scaling.yarn_beta_slow", 1.0)),
        freq_factors=next((tensor for tensor in tensors if tensor is not None), None),
    )


def log_scale(factor: float, multiplier: float) -> float:
    """YaRN's ``0.1 m ln(s) + 1``."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def deepseek_softmax(keys: Mapping[str, Any]) -> float:
    """What the architecture deepseek2 multiplies its softmax scale by."""
    multiplier = keys.get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    return log_scale(keys.get("rope.scaling.factor", 1.0), multiplier) ** 2
