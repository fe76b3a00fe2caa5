"""sglang: ``--json-model-override-args`` of its server, and the arguments of ``get_rope``."""

from __future__ import annotations

from typing import Any

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import LongRope, Proportional, Yarn
from phasor.scaling.laws import yarn_multiplier
from phasor.translation import serving
from phasor.translation.target import Part, Target, TranslationError, yarn_mscale


def _block(rope: Rope, context: int) -> serving.Block:
    law = rope.scaling
    if isinstance(law, LongRope):
        raise TranslationError(
            "sglang picks one list of divisors by the positions of a whole batch, and LongRope "
            "picks one by the length of the sequence; translate rope.at(seq_len), or give "
            "--at TOKENS"
        )
    keys = serving.block(TARGET, rope, context, with_axes=(type(None), Yarn))
    if isinstance(law, Yarn):
        keys.pop("attention_factor", None)  # not read
        if isinstance(rope.axes, OneAxis):
            keys |= {"mscale": yarn_mscale(law), "mscale_all_dim": law.mscale_all_dim}
        else:
            for name in ("mscale", "mscale_all_dim"):  # not taken
                keys.pop(name, None)
            keys["attn_factor"] = rope.attention_factor / yarn_multiplier(law.factor, 1.0)
    return keys


def _get_rope(rope: Rope, context: int, block: serving.Block) -> dict[str, Any]:
    law = rope.scaling
    turning = rope.rotary_dim
    if isinstance(law, Proportional):
        turning = 2 * int(law.fraction * rope.rotary_dim // 2)
    return {
        "head_size": rope.head_dim - rope.rotary_start,
        "rotary_dim": turning,
        "max_position": context,
        "base": block["rope_theta"],
        "is_neox_style": rope.pairing == "half",
        "rope_scaling": block,
    }


def _write(ropes: LayerRopes, context: int) -> tuple[Part, ...]:
    if "." in ropes.in_config.inside:
        raise TranslationError(
            f"sglang overrides keys one level deep, and {ropes.name} has them in "
            f"{ropes.in_config.inside}: change the file"
        )
    return serving.parts(
        TARGET,
        ropes,
        context,
        block=_block,
        get_rope=_get_rope,
        module="sglang.srt.layers.rotary_embedding",
        command="python -m sglang.launch_server --model-path MODEL --context-length {} "
        "--json-model-override-args",
    )


TARGET = Target(
    name="sglang",
    program="--json-model-override-args of its server, and the arguments of its get_rope",
    source="https://docs.sglang.ai/advanced_features/server_arguments.html",
    checked="description",
    write=_write,
    axes=(OneAxis, Sectioned, InterleavedSections),
    rules=(LongRope,),
    softmax=True,
)
