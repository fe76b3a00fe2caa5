"""Libraries whose functions or classes rotate: MLX, torchtune and rotary-embedding-torch."""

from __future__ import annotations

import numpy as np

from phasor.files.dialects.target import (
    EVERY_AXES,
    ROWS_IMPORTS,
    Keys,
    ProgramSettings,
    Target,
    angles_code,
    keyword_lines,
    law_numbers,
    linear_factor,
    ntk_as_base,
)
from phasor.rope import Rope
from phasor.scaling import Linear, Llama3

# MLX: the arguments of ``mx.fast.rope``.


def _write_mlx(rope: Rope, _context: int) -> ProgramSettings:
    factor = linear_factor(rope)
    settings: Keys = {
        "dims": rope.rotary_dim,
        "traditional": rope.pairing == "interleaved",
        "base": rope.base,
        "scale": 1 / (factor or 1.0),
    }
    x, freqs = "x", ""
    if factor is None:
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
    write_rope=_write_mlx,
    backwards=True,
)


# torchtune: the class that has the law, and its arguments.

#: For each pairing, the module and the name of the class without a law.
_PLAIN = {
    "interleaved": ("torchtune.modules", "RotaryPositionalEmbeddings"),
    "half": ("torchtune.models.phi3", "Phi3RotaryPositionalEmbeddings"),
}


def _llama3_arguments(rope: Rope) -> Keys:
    """The arguments of ``Llama3ScaledRoPE``, for interleaved pairs; None if it lacks the law."""
    law = ntk_as_base(rope).scaling
    if isinstance(law, Linear):
        # it divides the pairs with wavelengths above old_context_len / low_freq_factor: with 1
        # these are all, as no wavelength is below 2π
        law = Llama3(factor=law.factor, original_max_positions=1)
    if not isinstance(law, Llama3):
        return {}
    ends = "low_freq_factor", "high_freq_factor"
    numbers = law_numbers(law, *ends, original_max_positions="old_context_len")
    return {"scale_factor": law.factor, **numbers}


def _write_torchtune(rope: Rope, context: int) -> ProgramSettings:
    form, scaling = ntk_as_base(rope), _llama3_arguments(rope)
    if form.base is None:
        TORCHTUNE.refuse("base", "explicit frequencies", rope)
    if form.scaling is not None and not scaling:
        TORCHTUNE.refuse("law", f"the law {type(form.scaling).__name__}", rope)
    module, name = _PLAIN[rope.pairing]
    if scaling:
        module, name = "torchtune.models.llama3_1", "Llama3ScaledRoPE"
    settings = {"dim": rope.rotary_dim, "max_seq_len": context, "base": form.base, **scaling}
    return ProgramSettings(
        settings,
        f"from {module} import {name}\n\n"
        f"rotary = {name}(\n{keyword_lines(settings)})\n"
        "# x [batch, seq, heads, head_dim]; positions [batch, seq]\n"
        "rotary(x, input_pos=positions)",
    )


TORCHTUNE = Target(
    name="torchtune",
    program="the class and arguments of attention's pos_embeddings",
    source="https://meta-pytorch.org/torchtune/0.6/api_ref_modules.html",
    checked="run",
    write_rope=_write_torchtune,
    only_pairs=lambda rope: "interleaved" if _llama3_arguments(rope) else None,
    partial=False,
)


# rotary-embedding-torch: the arguments of its ``RotaryEmbedding``.


def _write_rotary_embedding_torch(rope: Rope, _context: int) -> ProgramSettings:
    gain = {} if rope.attention_factor == 1 else {"gain": rope.attention_factor}
    scale = ", scale=gain" if gain else ""
    # the class divides by dim - 2 and has positions of one axis only
    if rope.axes.n_axes > 1 or rope.rotary_dim == 2:
        shape = "[seq, axes]" if rope.axes.n_axes > 1 else "[seq]"
        return ProgramSettings(
            {"rope": rope, **gain},
            f"import numpy as np\n{ROWS_IMPORTS}"
            "from rotary_embedding_torch import apply_rotary_emb\n\n"
            f"# x [..., seq, head_dim]; positions, a NumPy array {shape}\n"
            f"angles = {angles_code('x', interleaved=True)}\n"
            f"apply_rotary_emb(angles, x{scale})",
        )
    imports, factor = "", linear_factor(rope)
    settings: Keys = {"dim": rope.rotary_dim}
    if factor is None or factor < 1:
        imports = "import torch\n"
        settings["freqs"] = rope.direction * rope.inv_freq
        law = "custom_freqs=torch.tensor(freqs, dtype=torch.float32)"
    else:
        settings["theta"] = rope.base
        law = "theta=theta"
        if factor != 1:
            settings["interpolate_factor"] = factor
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
    write_rope=_write_rotary_embedding_torch,
    only_pairs=lambda rope: "interleaved",
    backwards=True,
    axes=EVERY_AXES,
)
