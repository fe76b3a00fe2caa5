"""vLLM: ``--hf-overrides`` of its server, and the arguments of its factory ``get_rope``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phasor.files.configs.rope_blocks import LawContext, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import ORIGINAL_KEY, named_blocks
from phasor.files.dialects.by_reading import FaultError
from phasor.files.dialects.serving import (
    Engine,
    engine_dialect,
    read_engines_law,
    read_engines_list,
    write_for_engine,
)
from phasor.files.dialects.target import Keys, ProgramSettings, mscales
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Law, NTKMixed, Rule, Yarn

# Reading.


def _read_law(block: JsonObject, law_context: LawContext, length: int) -> Law | Rule | None:
    kind = rope_type(block, law_context.facts)
    if kind == "ntk_mixed":
        factor, exponent = (block.number(key, above=0) for key in ("factor", "mixed_b"))
        return NTKMixed(
            factor=block.require("factor", factor), exponent=block.require("mixed_b", exponent)
        )
    if kind == "longrope":  # the server's length selects one list
        original = block.require(ORIGINAL_KEY, block.whole(ORIGINAL_KEY))
        return read_engines_list(block, law_context, long=length > original)
    if kind == "yarn":
        return _read_yarn(block, law_context, length)
    return read_engines_law(block, law_context, length)


def _read_yarn(block: JsonObject, law_context: LawContext, length: int) -> Law | Rule | None:
    law = read_engines_law(block, law_context, length)
    assert isinstance(law, Yarn), "a block of this type"
    if law_context.facts.axes is not None:
        raise FaultError("some of its classes make YaRN's ramp of four times the length there")
    if length > (end := law.factor * law.original_max_positions):
        raise FaultError(f"its table of YaRN ends at position {end:g}")
    if block.number("mscale") and block.number("mscale_all_dim") and block.has("attention_factor"):
        raise FaultError("DeepSeek's classes leave the softmax as it is with an attention_factor")
    return law


# Writing.


def _settings(rope: Rope) -> Iterator[Keys]:
    law = rope.scaling
    if isinstance(law, NTKMixed):
        numbers = {"rope_type": "ntk", "factor": law.factor, "mixed_b": law.exponent}
        yield from (block | numbers for block in named_blocks(replace(rope, scaling=None)))
    for block in named_blocks(rope):
        if isinstance(law, Yarn):
            # DeepSeek's classes read the first two keys, and all other classes prefer the last
            yield block | mscales(law) | {"attention_factor": rope.attention_factor}
            block = {key: block[key] for key in block if key != "attention_factor"} | mscales(law)
        yield block


_DIALECT = engine_dialect(_read_law, _settings)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    return write_for_engine(
        VLLM,
        _DIALECT,
        ropes,
        context,
        arguments=lambda rope, block: {"rope_parameters": block},
        module="vllm.model_executor",
        command=f"vllm serve MODEL --max-model-len {context} --hf-overrides",
    )


VLLM = Engine(
    name="vllm",
    program="--hf-overrides of vllm serve, and the arguments of its get_rope",
    source="https://docs.vllm.ai/en/latest/api/vllm/model_executor/layers/rotary_embedding",
    checked="engine",
    write=_write,
)
