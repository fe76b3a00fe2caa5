"""flashinfer: the arguments of its ``apply_rope…`` functions, or a table."""

from __future__ import annotations

from typing import Any

from phasor.rope import Rope
from phasor.scaling import Linear, Llama3
from phasor.translation.target import POSITIONS_UNCHECKED, Part, Target, per_rope

_SHAPES = "# q, k [tokens, heads, head_dim]; positions, whole numbers [tokens]\n"
# widths of a head for which the kernels that compute cos and sin are compiled
_WIDTHS = (64, 128, 256, 512)
_NOTE = (
    "This kernel approximates powers, sines and cosines: where that is too coarse, as at the end "
    "of a long context, give apply_rope_with_cos_sin_cache a table "
    '(phasor.torch.cos_sin_cache, layout "vllm").'
)


def _write(rope: Rope, context: int) -> Part:
    _check_alignment(rope, context)
    law, computed = rope.scaling, rope.direction == 1 and _width(rope) in _WIDTHS
    arguments: dict[str, Any] = {
        "rotary_dim": rope.rotary_dim,
        "interleave": rope.pairing == "interleaved",
        "rope_scale": law.factor if isinstance(law, (Linear, Llama3)) else 1.0,
        "rope_theta": rope.base,
    }
    if computed and rope.base is not None and (law is None or isinstance(law, Linear)):
        return _call("apply_rope_pos_ids", arguments)
    if computed and isinstance(law, Llama3) and law.low_freq_factor < law.high_freq_factor:
        arguments |= {
            "low_freq_factor": law.low_freq_factor,
            "high_freq_factor": law.high_freq_factor,
            "old_context_len": law.original_max_positions,
        }
        return _call("apply_llama31_rope_pos_ids", arguments)
    return _table(rope, context)


def _call(function: str, arguments: dict[str, Any]) -> Part:
    named = "".join(f"    {name}={name},\n" for name in arguments)
    code = (
        f"from flashinfer import {function}\n\n{_SHAPES}{function}(\n    q, k, positions,\n{named})"
    )
    return Part(arguments, code, (_NOTE,))


def _table(rope: Rope, context: int) -> Part:
    settings = {
        "rope": rope,
        "layout": "vllm",
        "max_positions": context,
        "gain": rope.attention_factor,
        "head_size": _width(rope),
        "is_neox": rope.pairing == "half",
    }
    return Part(
        settings,
        "from flashinfer import apply_rope_with_cos_sin_cache\n"
        "from phasor.torch import cos_sin_cache\n\n"
        f"{_SHAPES}table = cos_sin_cache(\n"
        "    rope, max_positions, layout=layout, gain=gain, device=q.device\n"
        ')["cos_sin"]\n'
        "apply_rope_with_cos_sin_cache(\n"
        "    positions, q.flatten(1), k.flatten(1), head_size, table, is_neox=is_neox\n"
        ")",
        (POSITIONS_UNCHECKED,),
    )


def _check_alignment(rope: Rope, context: int) -> None:
    """A thread turns so many neighbours at once, of 16 bits each, all in one half of the pairs."""
    width = _width(rope)
    at_once = max(8, width // 32) if width in _WIDTHS else 16
    together = rope.num_pairs if rope.pairing == "half" else rope.rotary_dim
    if together % at_once or width % 8:
        TARGET.refuse(
            f"{rope.num_pairs} {rope.pairing} pairs of {width} coordinates: its kernels turn "
            f"{at_once} neighbours at once", rope, context,
        )  # fmt: skip


def _width(rope: Rope) -> int:
    """Coordinates from the first rotated one to the end of the head."""
    return rope.head_dim - rope.rotary_start


TARGET = Target(
    name="flashinfer",
    program="the arguments of flashinfer's apply_rope functions, or its table",
    source="https://docs.flashinfer.ai/api/rope.html",
    checked="description",
    write=per_rope(_write),
    backwards=True,
)
