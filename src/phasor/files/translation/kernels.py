"""Kernels whose arguments are cos and sin, or the numbers from which they compute them.

flash-attention, flashinfer, Liger, TransformerEngine and ONNX.
"""

from __future__ import annotations

import math
from functools import partial

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
    slice_width,
)
from phasor.rope import Rope
from phasor.scaling import Llama3

_Kernel = partial(Target, backwards=True, axes=EVERY_AXES)
_POSITIONS_UNCHECKED = "No position may be max_positions or more: the kernel does not check that."


def _tables(
    rope: Rope, context: int, program: str, options: str, form: str = ""
) -> tuple[Keys, str, str]:
    """Variables, imports and code for ``tables`` by position, or for cos and sin by token.

    Tokens with a coordinate on each of several axes have no row in a table of positions: ``cos``
    and ``sin`` ``[seq, pairs]``, in the ``form`` of a call on them, have one for each token.
    """
    if rope.axes.n_axes == 1:
        names = {"rope": rope, "program": program, "max_positions": context}
        return (
            {**names, "gain": rope.attention_factor},
            "from phasor.torch import cos_sin_cache\n",
            "tables = cos_sin_cache(\n"
            f"    rope, max_positions, program=program, gain=gain, {options}\n"
            ")\n",
        )
    return (
        {"rope": rope, "gain": rope.attention_factor},
        ROWS_IMPORTS,
        "# positions, a NumPy array [seq, axes]\n"
        "cos, sin = (\n"
        f"    torch.tensor(gain * part, {options}){form}\n"
        "    for part in cos_sin(positions, rope)\n"
        ")\n",
    )


# flash-attention: cos and sin of its ``apply_rotary_emb``.

_LARGEST_FLASH_ATTN_WIDTH = 256


def _write_flash_attn(rope: Rope, context: int) -> ProgramSettings:
    if slice_width(rope) > _LARGEST_FLASH_ATTN_WIDTH:
        raise FLASH_ATTN.lacks(
            "width",
            f"heads of {slice_width(rope)} coordinates",
            f"its kernel says 'Only support headdim <= {_LARGEST_FLASH_ATTN_WIDTH}'",
            way_out="rotate with flashinfer, liger or phasor.torch.rotate",
        )
    options = "dtype=x.dtype, device=x.device"
    variables, imports, tables = _tables(rope, context, "flash-attn", options)
    shapes, call = "", "apply_rotary_emb(x, cos, sin, interleaved=interleaved)"
    if rope.axes.n_axes == 1:
        shapes = "; offset is the position of the first token"
        call = (
            "apply_rotary_emb(\n"
            '    x, tables["cos"], tables["sin"], interleaved=interleaved, seqlen_offsets=offset\n'
            ")"
        )
    return ProgramSettings(
        variables | {"interleaved": rope.pairing == "interleaved"},
        f"{imports}from flash_attn.layers.rotary import apply_rotary_emb\n\n"
        f"# x [batch, seq, heads, head_dim]{shapes}\n{tables}{call}",
    )


FLASH_ATTN = _Kernel(
    name="flash-attn",
    program="the tables and arguments of flash_attn.layers.rotary.apply_rotary_emb",
    source="https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/layers/rotary.py",
    checked="description",
    write_rope=_write_flash_attn,
)


# flashinfer: the arguments of its ``apply_rope…`` functions, or a table.

# head widths for which the kernels that compute cos and sin are compiled
_COMPILED_WIDTHS = (64, 128, 256, 512)
_DTYPES_NOTE = "q and k have to be float16 or bfloat16."
_PRECISION_NOTE = (
    "This kernel approximates powers, sines and cosines: where that is too coarse, as at the end "
    "of a long context, give apply_rope_with_cos_sin_cache a table "
    '(phasor.torch.cos_sin_cache, program "vllm").'
)


def _write_flashinfer(rope: Rope, context: int) -> ProgramSettings:
    width, law = slice_width(rope), rope.scaling
    # a thread turns several neighbours of 16 bits each, which must lie in one half of half pairs
    per_thread = max(8, width // 32) if width in _COMPILED_WIDTHS else 16
    neighbours = rope.num_pairs if rope.pairing == "half" else rope.rotary_dim
    if neighbours % per_thread or width % 8:
        feature = f"{rope.num_pairs} {rope.pairing} pairs of {width} coordinates"
        because = f"its kernels turn {per_thread} neighbours at once"
        FLASHINFER.refuse("width", feature, rope, [], because=because)
    comment = "# q, k [tokens, heads, head_dim]; positions, whole numbers [tokens]\n"
    function, factor = "", linear_factor(rope)
    arguments: Keys = {"rotary_dim": rope.rotary_dim, "interleave": rope.pairing == "interleaved"}
    if factor is not None:
        function = "apply_rope_pos_ids"
    elif (
        isinstance(law, Llama3)
        and rope.direction == 1
        and law.low_freq_factor < law.high_freq_factor
    ):
        function, factor = "apply_llama31_rope_pos_ids", law.factor
        ends = "low_freq_factor", "high_freq_factor"
        arguments |= law_numbers(law, *ends, original_max_positions="old_context_len")
    if function and rope.axes.n_axes == 1 and width in _COMPILED_WIDTHS:
        arguments |= {"rope_scale": factor, "rope_theta": rope.base}
        call = f"{function}(\n    q, k, positions,\n{keyword_lines(arguments)})"
        code = f"from flashinfer import {function}\n\n{comment}{call}"
        return ProgramSettings(arguments, code, (_DTYPES_NOTE, _PRECISION_NOTE))
    variables, imports, tables = _tables(rope, context, "vllm", "device=q.device", ".float()")
    notes = (_DTYPES_NOTE,)
    shapes, rows = "# q, k [seq, heads, head_dim]\n", "torch.arange(len(q), device=q.device)"
    table = "torch.cat((cos, sin), dim=-1)"
    if rope.axes.n_axes == 1:
        notes += (_POSITIONS_UNCHECKED,)
        shapes, rows, table = comment, "positions", 'tables["cos_sin"]'
    return ProgramSettings(
        variables | {"head_size": width, "is_neox": rope.pairing == "half"},
        f"{imports}from flashinfer import apply_rope_with_cos_sin_cache\n\n{shapes}{tables}"
        f"table = {table}\n"
        "apply_rope_with_cos_sin_cache(\n"
        f"    {rows}, q.flatten(1), k.flatten(1), head_size, table, is_neox=is_neox\n"
        ")",
        notes,
    )


FLASHINFER = _Kernel(
    name="flashinfer",
    program="the arguments of flashinfer's apply_rope functions, or its table",
    source="https://docs.flashinfer.ai/api/rope.html",
    checked="description",
    write_rope=_write_flashinfer,
)


# Liger: cos and sin of its ``liger_rotary_pos_emb``.


def _write_liger(rope: Rope, context: int) -> ProgramSettings:
    # [seq, pairs] -> [1, seq, rotary_dim]
    form = ".float().repeat(1, 2)[None]"
    variables, imports, tables = _tables(rope, context, "transformers", "device=q.device", form)
    notes: tuple[str, ...] = ("It may overwrite q and k.",)
    shapes = ""
    if rope.axes.n_axes == 1:
        notes += (_POSITIONS_UNCHECKED,)
        shapes = "; offset is the position of the first token"
        tables += (
            "rows = slice(offset, offset + q.shape[2])\n"
            'cos, sin = tables["cos"][None, rows], tables["sin"][None, rows]\n'
        )
    if rope.rotary_dim < slice_width(rope):
        notes += ("This rotates a part of a head, which needs liger-kernel 0.8.5 or newer.",)
    return ProgramSettings(
        variables,
        f"{imports}from liger_kernel.transformers.rope import liger_rotary_pos_emb\n\n"
        f"# q, k [batch, heads, seq, head_dim]{shapes}\n"
        f"{tables}liger_rotary_pos_emb(q, k, cos, sin)",
        notes,
    )


LIGER = _Kernel(
    name="liger",
    program="the tables of liger_rotary_pos_emb",
    source="https://github.com/linkedin/Liger-Kernel/blob/main/src/liger_kernel/transformers/rope.py",
    checked="run",
    package="liger-kernel",
    write_rope=_write_liger,
    only_pairs=lambda rope: "half",
)


# TransformerEngine: its ``RotaryPositionEmbedding``, or the angles instead of its result.


def _write_transformer_engine(rope: Rope, context: int) -> ProgramSettings:
    interleaved, factor = rope.pairing == "interleaved", linear_factor(rope)
    imports = ["from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb"]
    start = "start_positions"
    shapes = (
        "# start_positions is the position of the first token of each row, a tensor [batch], or "
        "None\n# for 0\n"
    )
    if rope.axes.n_axes > 1:
        settings: Keys = {"rope": rope, "interleaved": interleaved}
        imports = ["import numpy as np", *ROWS_IMPORTS.splitlines(), *imports]
        start, shapes = "None", "# positions, a NumPy array [seq, axes]\n"
        angles = f"{angles_code('t', interleaved=interleaved)}[:, None, None]"
    elif factor is not None and factor.is_integer():
        settings = {"dim": rope.rotary_dim, "rotary_base": rope.base, "interleaved": interleaved}
        if factor != 1:
            # it needs both or none, and divides the positions further in sequences longer than
            # their product
            settings["seq_len_interpolation_factor"] = int(factor)
            settings["pretrained_max_position_embeddings"] = math.ceil(context / factor)
        imports = [f"{imports[0]}, RotaryPositionEmbedding"]
        angles = f"RotaryPositionEmbedding(\n{keyword_lines(settings)})(max_seq_len)"
        settings["max_seq_len"] = context
    else:
        settings = {"rope": rope, "interleaved": interleaved}
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
        if rope.rotary_dim < slice_width(rope):
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


TRANSFORMER_ENGINE = _Kernel(
    name="transformer-engine",
    program="the arguments of RotaryPositionEmbedding, or the freqs of apply_rotary_pos_emb",
    source="https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html",
    checked="description",
    write_rope=_write_transformer_engine,
)


# ONNX: the caches and attributes of its operator ``RotaryEmbedding``.


def _write_onnx(rope: Rope, context: int) -> ProgramSettings:
    variables, imports, tables = _tables(rope, context, "flash-attn", "dtype=dtype")
    shapes = "# x [batch, heads, seq, head_dim], of dtype; position_ids, int64 [batch, seq]"
    if rope.axes.n_axes == 1:
        tables += (
            '# tables["cos"] and tables["sin"] become the initializers cos_cache and sin_cache\n'
        )
    else:
        shapes += ", are 0 to seq - 1"
        tables += "# cos and sin become the inputs cos_cache and sin_cache\n"
    return ProgramSettings(
        variables
        | {"interleaved": int(rope.pairing == "interleaved")}
        | {"rotary_embedding_dim": rope.rotary_dim},
        f"import onnx\n{imports}\n{shapes}\n{tables}"
        "onnx.helper.make_node(\n"
        '    "RotaryEmbedding", ["x", "cos_cache", "sin_cache", "position_ids"], ["turned"],\n'
        "    interleaved=interleaved, rotary_embedding_dim=rotary_embedding_dim,\n"
        ")",
        ("If x is [batch, seq, heads * head_dim], give num_heads=heads too.",),
    )


ONNX = _Kernel(
    name="onnx",
    program="the caches and attributes of the operator RotaryEmbedding (opset 23)",
    source="https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html",
    checked="run",
    package="onnxruntime",
    write_rope=_write_onnx,
)
