"""vLLM: ``--hf-overrides`` of its serve command, and the arguments of ``get_rope``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import NTKMixed, Yarn
from phasor.translation import serving
from phasor.translation.target import Part, Target, plain_candidates, yarn_mscale
from phasor.translation.transformers import with_divisors


def _block(rope: Rope, context: int) -> serving.Block:
    law = rope.scaling
    if isinstance(law, NTKMixed) and isinstance(rope.axes, OneAxis):
        keys = serving.block(TARGET, replace(rope, scaling=None), context)
        return keys | {"rope_type": "ntk", "factor": law.factor, "mixed_b": law.exponent}
    if isinstance(law, Yarn) and context > (end := law.factor * law.original_max_positions):
        if rope.pairing == "interleaved":
            TARGET.refuse(f"YaRN from position {end:g} on, where its table ends",
                          rope, context, plain_candidates(rope))  # fmt: skip
        # the table of divisors does not end there
        return serving.block(TARGET, with_divisors(TARGET, rope, context), context)
    keys = serving.block(TARGET, rope, context)
    if isinstance(law, Yarn):
        # DeepSeek's classes read these two, and take an attention_factor of 1 for a wish to leave
        # the softmax scale alone; all others prefer the attention_factor
        keys |= {"mscale": yarn_mscale(law), "mscale_all_dim": law.mscale_all_dim}
        if keys["mscale"] and keys["mscale_all_dim"]:
            keys.pop("attention_factor", None)
        else:
            keys["attention_factor"] = rope.attention_factor
    return keys


def _get_rope(rope: Rope, context: int, block: serving.Block) -> dict[str, Any]:
    return {
        "head_size": rope.head_dim - rope.rotary_start,
        "max_position": context,
        "is_neox_style": rope.pairing == "half",
        "rope_parameters": block,
    }


def _write(ropes: LayerRopes, context: int) -> tuple[Part, ...]:
    return serving.parts(
        TARGET,
        ropes,
        context,
        block=_block,
        get_rope=_get_rope,
        module="vllm.model_executor.layers.rotary_embedding",
        command="vllm serve MODEL --max-model-len {} --hf-overrides",
    )


TARGET = Target(
    name="vllm",
    program="--hf-overrides of vllm serve, and the arguments of its get_rope",
    source="https://docs.vllm.ai/en/latest/api/vllm/model_executor/layers/rotary_embedding",
    checked="description",
    write=_write,
    axes=(OneAxis, Sectioned, InterleavedSections),
    softmax=True,
)
