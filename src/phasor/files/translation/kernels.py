"""Kernels whose arguments are cos and sin, or the numbers from which they compute them.

flash-attention, flashinfer, Liger, TransformerEngine and ONNX.
"""

from __future__ import annotations

import math
from typing import Any

from phasor.axes import Alternating, Axial, InterleavedSections, OneAxis, Sectioned
from phasor.files.translation.target import (
    POSITIONS_UNCHECKED,
    ProgramSettings,
    Target,
    TranslationError,
    keyword_lines,
    per_rope,
    table_settings,
    with_simplest_law,
)
from phasor.rope import Rope
from phasor.scaling import Linear, Llama3

# Tokens with a coordinate on each of several axes have no row in a table of positions: a table has
# a row for each of them instead, in their order.

_ALL_AXES = (OneAxis, Sectioned, Axial, InterleavedSections, Alternating)
_ROWS_IMPORTS = "import torch\nfrom phasor.angles import cos_sin\n"


def _table_variables(program: str, rope: Rope, context: int) -> dict[str, Any]:
    if _has_positions_table(rope):
        return table_settings(program, rope, context)
    return {"rope": rope, "gain": rope.attention_factor}


def _has_positions_table(rope: Rope) -> bool:
    return rope.axes.n_axes == 1


def _rows_code(dtype: str, device: str = "", form: str = "") -> str:
    """Code that sets cos and sin ``[seq, pairs]``, then in the ``form`` of a call on them."""
    on_device = f", device={device}" if device else ""
    return (
        "# positions, a NumPy array [seq, axes]\n"
        "cos, sin = (\n"
        f"    torch.tensor(gain * part, dtype={dtype}{on_device}){form}\n"
        "    for part in cos_sin(rope, positions)\n"
        ")\n"
    )


# flash-attention: cos and sin of its ``apply_rotary_emb``.

_LARGEST_FLASH_ATTN_WIDTH = 256


def _write_flash_attn(rope: Rope, context: int) -> ProgramSettings:
    if _width(rope) > _LARGEST_FLASH_ATTN_WIDTH:
        raise TranslationError(
            f"flash-attn cannot express heads of {_width(rope)} coordinates: its kernel says "
            f"'Only support headdim <= {_LARGEST_FLASH_ATTN_WIDTH}'; rotate with flashinfer, "
            "liger or phasor.torch.rotate"
        )
    settings = _table_variables("flash-attn", rope, context)
    settings["interleaved"] = rope.pairing == "interleaved"
    if not _has_positions_table(rope):
        return ProgramSettings(
            settings,
            f"{_ROWS_IMPORTS}from flash_attn.layers.rotary import apply_rotary_emb\n\n"
            "# x [batch, seq, heads, head_dim]\n"
            f"{_rows_code('x.dtype', 'x.device')}"
            "apply_rotary_emb(x, cos, sin, interleaved=interleaved)",
        )
    return ProgramSettings(
        settings,
        "from flash_attn.layers.rotary import apply_rotary_emb\n"
        "from phasor.torch import cos_sin_cache\n\n"
        "# x [batch, seq, heads, head_dim]; offset is the position of the first token\n"
        "tables = cos_sin_cache(\n"
        "    rope, max_positions, program=program, gain=gain, dtype=x.dtype, device=x.device\n"
        ")\n"
        "apply_rotary_emb(\n"
        '    x, tables["cos"], tables["sin"], interleaved=interleaved, seqlen_offsets=offset\n'
        ")",
    )


FLASH_ATTN = Target(
    name="flash-attn",
    program="the tables and arguments of flash_attn.layers.rotary.apply_rotary_emb",
    source="https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/layers/rotary.py",
    checked="description",
    write=per_rope(_write_flash_attn),
    needs_context=_has_positions_table,
    backwards=True,
    axes=_ALL_AXES,
)


# flashinfer: the arguments of its ``apply_rope…`` functions, or a table.

_SHAPES = "# q, k [tokens, heads, head_dim]; positions, whole numbers [tokens]\n"
# head widths for which the kernels that compute cos and sin are compiled
_COMPILED_WIDTHS = (64, 128, 256, 512)
_DTYPES_NOTE = "q and k have to be float16 or bfloat16."
_PRECISION_NOTE = (
    "This kernel approximates powers, sines and cosines: where that is too coarse, as at the end "
    "of a long context, give apply_rope_with_cos_sin_cache a table "
    '(phasor.torch.cos_sin_cache, program "vllm").'
)


def _write_flashinfer(rope: Rope, context: int) -> ProgramSettings:
    _check_alignment(rope, context)
    computed = _computed_call(rope)
    return _write_table(rope, context) if computed is None else computed


def _computed_call(rope: Rope) -> ProgramSettings | None:
    """The call of the kernel that computes cos and sin; None if none has the law and the axes."""
    law = rope.scaling
    can_compute = rope.direction == 1 and rope.axes.n_axes == 1 and _width(rope) in _COMPILED_WIDTHS
    arguments: dict[str, Any] = {
        "rotary_dim": rope.rotary_dim,
        "interleave": rope.pairing == "interleaved",
        "rope_scale": law.factor if isinstance(law, (Linear, Llama3)) else 1.0,
        "rope_theta": rope.base,
    }
    if can_compute and rope.base is not None and (law is None or isinstance(law, Linear)):
        return _write_call("apply_rope_pos_ids", arguments)
    if can_compute and isinstance(law, Llama3) and law.low_freq_factor < law.high_freq_factor:
        arguments |= {
            "low_freq_factor": law.low_freq_factor,
            "high_freq_factor": law.high_freq_factor,
            "old_context_len": law.original_max_positions,
        }
        return _write_call("apply_llama31_rope_pos_ids", arguments)
    return None


def _write_call(function: str, arguments: dict[str, Any]) -> ProgramSettings:
    lines = keyword_lines(arguments)
    code = (
        f"from flashinfer import {function}\n\n{_SHAPES}{function}(\n    q, k, positions,\n{lines})"
    )
    return ProgramSettings(arguments, code, (_DTYPES_NOTE, _PRECISION_NOTE))


def _write_table(rope: Rope, context: int) -> ProgramSettings:
    settings = _table_variables("vllm", rope, context)
    settings |= {"head_size": _width(rope), "is_neox": rope.pairing == "half"}
    if not _has_positions_table(rope):
        return ProgramSettings(
            settings,
            f"{_ROWS_IMPORTS}from flashinfer import apply_rope_with_cos_sin_cache\n\n"
            "# q, k [seq, heads, head_dim]\n"
            f"{_rows_code('torch.float32', 'q.device')}"
            "table = torch.cat((cos, sin), dim=-1)\n"
            f"{_turn_by_rows('torch.arange(len(q), device=q.device)')}",
            (_DTYPES_NOTE,),
        )
    return ProgramSettings(
        settings,
        "from flashinfer import apply_rope_with_cos_sin_cache\n"
        "from phasor.torch import cos_sin_cache\n\n"
        f"{_SHAPES}table = cos_sin_cache(\n"
        "    rope, max_positions, program=program, gain=gain, device=q.device\n"
        f')["cos_sin"]\n{_turn_by_rows("positions")}',
        (_DTYPES_NOTE, POSITIONS_UNCHECKED),
    )


def _turn_by_rows(rows: str) -> str:
    return (
        "apply_rope_with_cos_sin_cache(\n"
        f"    {rows}, q.flatten(1), k.flatten(1), head_size, table, is_neox=is_neox\n"
        ")"
    )


def _check_alignment(rope: Rope, context: int) -> None:
    """Refuse a rope whose coordinates the threads of the kernels cannot share.

    A thread rotates several neighbours of 16 bits each, which must lie in one half of half pairs.
    """
    width = _width(rope)
    per_thread = max(8, width // 32) if width in _COMPILED_WIDTHS else 16
    neighbours = rope.num_pairs if rope.pairing == "half" else rope.rotary_dim
    if neighbours % per_thread or width % 8:
        FLASHINFER.refuse(
            f"{rope.num_pairs} {rope.pairing} pairs of {width} coordinates: its kernels turn "
            f"{per_thread} neighbours at once", rope, context,
        )  # fmt: skip


def _width(rope: Rope) -> int:
    """Coordinates from the first rotated one to the end of the head."""
    return rope.head_dim - rope.rotary_start


FLASHINFER = Target(
    name="flashinfer",
    program="the arguments of flashinfer's apply_rope functions, or its table",
    source="https://docs.flashinfer.ai/api/rope.html",
    checked="description",
    write=per_rope(_write_flashinfer),
    needs_context=lambda rope: (
        _has_positions_table(rope) and _computed_call(with_simplest_law(rope)) is None
    ),
    backwards=True,
    axes=_ALL_AXES,
)


# Liger: cos and sin of its ``liger_rotary_pos_emb``.


def _write_liger(rope: Rope, context: int) -> ProgramSettings:
    notes: tuple[str, ...] = ("It may overwrite q and k.",)
    if _has_positions_table(rope):
        notes += (POSITIONS_UNCHECKED,)
        imports, rows = (
            "from phasor.torch import cos_sin_cache",
            "# q, k [batch, heads, seq, head_dim]; offset is the position of the first token\n"
            "tables = cos_sin_cache(\n"
            "    rope, max_positions, program=program, gain=gain, device=q.device\n"
            ")\n"
            "rows = slice(offset, offset + q.shape[2])\n"
            'cos, sin = tables["cos"][None, rows], tables["sin"][None, rows]\n',
        )
    else:
        # [seq, pairs] -> [1, seq, rotary_dim]
        imports, rows = (
            _ROWS_IMPORTS.rstrip(),
            "# q, k [batch, heads, seq, head_dim]\n"
            + _rows_code("torch.float32", "q.device", ".repeat(1, 2)[None]"),
        )
    if rope.rotary_dim < rope.head_dim - rope.rotary_start:
        notes += ("This rotates a part of a head, which needs liger-kernel 0.8.5 or newer.",)
    return ProgramSettings(
        _table_variables("transformers", rope, context),
        f"{imports}\nfrom liger_kernel.transformers.rope import liger_rotary_pos_emb\n\n"
        f"{rows}liger_rotary_pos_emb(q, k, cos, sin)",
        notes,
    )


LIGER = Target(
    name="liger",
    program="the tables of liger_rotary_pos_emb",
    source="https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/transformers/rope.py",
    checked="run",
    package="liger-kernel",
    write=per_rope(_write_liger),
    needs_context=_has_positions_table,
    pairings=("half",),
    backwards=True,
    axes=_ALL_AXES,
)


# TransformerEngine: its ``RotaryPositionEmbedding``, or the angles in place of its result.


def _write_transformer_engine(rope: Rope, context: int) -> ProgramSettings:
    embedding = _embedding_arguments(rope, context)
    settings: dict[str, Any] = {"rope": rope, "interleaved": rope.pairing == "interleaved"}
    start = "start_positions"
    shapes = (
        "# start_positions is the position of the first token of each row, a tensor [batch], or "
        "None\n# for 0\n"
    )
    imports = ["from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb"]
    if embedding is not None:
        imports = [f"{imports[0]}, RotaryPositionEmbedding"]
        angles = f"RotaryPositionEmbedding(\n{keyword_lines(embedding)})(max_seq_len)"
        settings = {**embedding, "max_seq_len": context}
    elif not _has_positions_table(rope):
        imports = ["import numpy as np", _ROWS_IMPORTS.rstrip(), *imports]
        start, shapes = "None", "# positions, a NumPy array [seq, axes]\n"
        # [seq, pairs] -> [seq, 1, 1, rotary_dim]
        repeat = "repeat_interleave(2, dim=1)" if settings["interleaved"] else "repeat(1, 2)"
        angles = (
            "torch.tensor(\n    np.arctan2(*cos_sin(rope, positions)[::-1]), "
            f"dtype=torch.float32, device=t.device\n).{repeat}[:, None, None]"
        )
    else:
        settings |= {"program": "megatron", "max_positions": context}
        imports.insert(0, "from phasor.torch import cos_sin_cache")
        angles = (
            'cos_sin_cache(\n    rope, max_positions, program=program, device=t.device\n)["angles"]'
        )
    t = "t"
    if rope.attention_factor != 1:
        # angles cannot contain the factor, so it is applied before the rotation
        settings["gain"] = rope.attention_factor
        t = "gain * t"
        if rope.rotary_start + rope.rotary_dim < rope.head_dim:
            imports = list(dict.fromkeys(("import torch", *imports)))
            settings["rotary_dim"] = rope.rotary_dim
            t = "torch.cat((gain * t[..., :rotary_dim], t[..., rotary_dim:]), -1)"
    return ProgramSettings(
        settings,
        "\n".join(imports) + "\n\n"
        '# t [seq, batch, heads, head_dim] for tensor_format="sbhd", or\n'
        '# [batch, seq, heads, head_dim] for "bshd"\n'
        f"{shapes}freqs = {angles}\n"
        "apply_rotary_pos_emb(\n"
        f"    {t}, freqs, tensor_format=tensor_format,\n"
        f"    start_positions={start}, interleaved=interleaved\n"
        ")",
    )


def _embedding_arguments(rope: Rope, context: int) -> dict[str, Any] | None:
    """The arguments of ``RotaryPositionEmbedding``; None if it cannot express the rope."""
    law = rope.scaling
    if rope.base is None or rope.direction < 0 or rope.axes.n_axes > 1:
        return None
    arguments: dict[str, Any] = {
        "dim": rope.rotary_dim,
        "rotary_base": rope.base,
        "interleaved": rope.pairing == "interleaved",
    }
    if isinstance(law, Linear) and law.factor.is_integer():
        # it needs both or none, and divides the positions further in sequences longer than their
        # product
        return arguments | {
            "seq_len_interpolation_factor": int(law.factor),
            "pretrained_max_position_embeddings": math.ceil(context / law.factor),
        }
    return arguments if law is None else None


TRANSFORMER_ENGINE = Target(
    name="transformer-engine",
    program="the arguments of RotaryPositionEmbedding, or the freqs of apply_rotary_pos_emb",
    source="https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html",
    checked="description",
    write=per_rope(_write_transformer_engine),
    needs_context=_has_positions_table,
    backwards=True,
    axes=_ALL_AXES,
)


# ONNX: the caches and attributes of its operator ``RotaryEmbedding``.


def _write_onnx(rope: Rope, context: int) -> ProgramSettings:
    settings = _table_variables("flash-attn", rope, context) | {
        "interleaved": int(rope.pairing == "interleaved"),
        "rotary_embedding_dim": rope.rotary_dim,
    }
    if _has_positions_table(rope):
        imports, tables = (
            "from phasor.torch import cos_sin_cache\n",
            "# x [batch, heads, seq, head_dim]; position_ids, int64 [batch, seq]\n"
            "tables = cos_sin_cache(\n"
            "    rope, max_positions, program=program, gain=gain, dtype=dtype  # of x: "
            "torch.float32\n"
            ')  # "cos" and "sin" become the initializers cos_cache and sin_cache\n',
        )
    else:
        imports, tables = (
            _ROWS_IMPORTS,
            "# x [batch, heads, seq, head_dim], of dtype; position_ids, int64 [batch, seq], are 0 "
            "to seq - 1\n"
            f"{_rows_code('dtype')}"
            "# cos and sin become the inputs cos_cache and sin_cache\n",
        )
    return ProgramSettings(
        settings,
        f"import onnx\n{imports}\n{tables}"
        "onnx.helper.make_node(\n"
        '    "RotaryEmbedding", ["x", "cos_cache", "sin_cache", "position_ids"], ["turned"],\n'
        "    interleaved=interleaved, rotary_embedding_dim=rotary_embedding_dim,\n"
        ")",
        ("If x is [batch, seq, heads * head_dim], give num_heads=heads too.",),
    )


ONNX = Target(
    name="onnx",
    program="the caches and attributes of the operator RotaryEmbedding (opset 23)",
    source="https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html",
    checked="run",
    package="onnxruntime",
    write=per_rope(_write_onnx),
    needs_context=_has_positions_table,
    backwards=True,
    axes=_ALL_AXES,
)
