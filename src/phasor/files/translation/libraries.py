"""Libraries whose functions or classes rotate: MLX, torchtune and rotary-embedding-torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from phasor.axes import Alternating, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.files.translation.target import (
    ProgramSettings,
    Target,
    keyword_lines,
    ntk_as_base,
    per_rope,
    plain_candidates,
)
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, Rule

# MLX: the arguments of ``mx.fast.rope``.


def _write_mlx(rope: Rope, context: int) -> ProgramSettings:
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
        f"mx.fast.rope({x}, dims, traditional=traditional, base=base,\n"
        f"             scale=scale, offset=offset{freqs})",
    )


MLX = Target(
    name="mlx",
    program="the arguments of mlx.core.fast.rope",
    source="https://ml-explore.github.io/mlx/build/html/python/fast.html",
    checked="run",
    write=per_rope(_write_mlx),
    needs_context=False,
    backwards=True,
)


# torchtune: the class of rotary embeddings that has the law, and its arguments.


class _Class(NamedTuple):
    """A class of torchtune: its module, its name, and the only pairing that it rotates."""

    module: str
    name: str
    pairing: Pairing


_PLAIN = _Class("torchtune.modules", "RotaryPositionalEmbeddings", "interleaved")
_PLAIN_HALF = _Class("torchtune.models.phi3", "Phi3RotaryPositionalEmbeddings", "half")
_LLAMA3 = _Class("torchtune.models.llama3_1", "Llama3ScaledRoPE", "interleaved")


def _llama3_arguments(law: Law | Rule | None) -> dict[str, float] | None:
    """The arguments of ``Llama3ScaledRoPE`` for a law; None if it cannot express it."""
    if isinstance(law, Llama3):
        return {
            "scale_factor": law.factor,
            "low_freq_factor": law.low_freq_factor,
            "high_freq_factor": law.high_freq_factor,
            "old_context_len": law.original_max_positions,
        }
    if isinstance(law, Linear):
        # it divides the pairs with wavelengths above old_context_len / low_freq_factor: with 1
        # these are all, as no wavelength is below 2π
        bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 1}
        return {"scale_factor": law.factor, **bounds}
    return None


def _pairings_of_torchtune(rope: Rope) -> tuple[Pairing, ...]:
    needs_llama3 = _llama3_arguments(ntk_as_base(rope).scaling) is not None
    return ("interleaved",) if needs_llama3 else ("half", "interleaved")


def _write_torchtune(rope: Rope, context: int) -> ProgramSettings:
    rope = ntk_as_base(rope)
    scaling = _llama3_arguments(rope.scaling)
    if rope.base is None or (rope.scaling is not None and scaling is None):
        law = f"the law {type(rope.scaling).__name__}"
        feature = "explicit frequencies" if rope.base is None else law
        TORCHTUNE.refuse(feature, rope, context, plain_candidates(rope))
    settings: dict[str, Any] = {"dim": rope.rotary_dim, "max_seq_len": context, "base": rope.base}
    if scaling is None:
        chosen = _PLAIN if rope.pairing == _PLAIN.pairing else _PLAIN_HALF
    else:
        chosen = _LLAMA3
        settings |= scaling
    return ProgramSettings(
        settings,
        f"from {chosen.module} import {chosen.name}\n\n"
        f"rotary = {chosen.name}(\n{keyword_lines(settings)})\n"
        "# x [batch, seq, heads, head_dim]; positions [batch, seq]\n"
        "rotary(x, input_pos=positions)",
    )


TORCHTUNE = Target(
    name="torchtune",
    program="the class and arguments of attention's pos_embeddings",
    source="https://meta-pytorch.org/torchtune/0.6/api_ref_modules.html",
    checked="run",
    write=per_rope(_write_torchtune),
    pairings=_pairings_of_torchtune,
    partial=False,
)


# rotary-embedding-torch: the arguments of its ``RotaryEmbedding``.


def _write_rotary_embedding_torch(rope: Rope, context: int) -> ProgramSettings:
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


ROTARY_EMBEDDING_TORCH = Target(
    name="rotary-embedding-torch",
    program="the arguments of RotaryEmbedding, or angles for apply_rotary_emb",
    source="https://github.com/lucidrains/rotary-embedding-torch",
    checked="run",
    write=per_rope(_write_rotary_embedding_torch),
    needs_context=False,
    pairings=("interleaved",),
    backwards=True,
    axes=(OneAxis, Sectioned, Axial, InterleavedSections, Alternating),
)
