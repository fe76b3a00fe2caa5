"""sglang: ``--json-model-override-args`` of its server, and the arguments of its factory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phasor.files.configs.rope_blocks import LawContext, read_law, rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import named_blocks
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
from phasor.scaling import Law, LongRope, Rule, Yarn, yarn_multiplier

_SCALES, _OF_LISTS = ("mscale", "mscale_all_dim"), ("factor", "mscale")

# Reading.


def _read_law(block: JsonObject, law_context: LawContext, length: int) -> Law | Rule | None:
    kind = rope_type(block, law_context.facts)
    if kind == "longrope":
        if any(block.value(f"short_{name}") != block.value(f"long_{name}") for name in _OF_LISTS):
            raise FaultError("it picks one list by the positions of a whole batch")
        return read_engines_list(block, law_context, long=False)
    if kind == "yarn":
        return _read_yarn(block, law_context)
    return read_engines_law(block, law_context, length)


def _read_yarn(block: JsonObject, law_context: LawContext) -> Law:
    """YaRN; with sections, the class ignores the mscale keys for the factor on cos and sin."""
    has_scales = all(map(block.has, _SCALES))
    if law_context.facts.axes is not None and has_scales:
        raise FaultError("its class with sections takes neither mscale nor mscale_all_dim")
    ignored_keys = {"attention_factor", *(() if has_scales else _SCALES)}
    numbers = block.with_values({k: v for k, v in block.values.items() if k not in ignored_keys})
    law = read_law(numbers, replace(law_context, single_mscale=True))
    assert isinstance(law, Yarn), "a block of this type"
    gain = law.temperature().attention_factor * (block.number("attn_factor", above=0) or 1.0)
    return replace(law, attention_factor=gain)


# Writing.


def _settings(rope: Rope) -> Iterator[Keys]:
    law = rope.scaling
    for block in named_blocks(rope):
        if isinstance(law, Yarn):
            ignored_keys = ("attention_factor", *_SCALES)
            block = {key: block[key] for key in block if key not in ignored_keys}
            yield block | mscales(law)
            block["attn_factor"] = rope.attention_factor / yarn_multiplier(law.factor, 1.0)
        yield block


_DIALECT = engine_dialect(_read_law, _settings)


def _arguments(rope: Rope, block: Keys) -> Keys:
    rotary_dim = rope.rotary_dim
    if block["rope_type"] == "proportional":
        rotary_dim = 2 * int(block["partial_rotary_factor"] * rotary_dim // 2)
    return {"rotary_dim": rotary_dim, "base": block["rope_theta"], "rope_scaling": block}


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    if "." in ropes.in_config.path:
        feature, because = f"keys in {ropes.in_config.path}", "it overrides keys one level deep"
        raise SGLANG.lacks("path", feature, because, way_out="change the file")
    command = f"python -m sglang.launch_server --model-path MODEL --context-length {context}"
    return write_for_engine(
        SGLANG,
        _DIALECT,
        ropes,
        context,
        arguments=_arguments,
        module="sglang.srt",
        command=f"{command} --json-model-override-args",
    )


SGLANG = Engine(
    name="sglang",
    program="--json-model-override-args of its server, and the arguments of its get_rope",
    source="https://docs.sglang.ai/advanced_features/server_arguments.html",
    checked="engine",
    write=_write,
    rules=(LongRope,),
)
