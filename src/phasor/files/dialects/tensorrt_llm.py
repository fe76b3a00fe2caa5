"""TensorRT-LLM: the ``config.json`` of a checkpoint, also inside the one of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from phasor.axes import OneAxis, Sectioned
from phasor.files.configs.facts import Architecture, table
from phasor.files.configs.layer_pattern import LayerPattern
from phasor.files.configs.program_model import CONTEXT, ProgramModel, with_sections
from phasor.files.configs.rope_blocks import rope_type
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.blocks import WRITERS, rotated_fraction
from phasor.files.dialects.by_reading import Dialect, settings_or_refusal
from phasor.files.dialects.target import (
    Keys,
    ProgramSettings,
    Target,
    as_json,
    base_and_divisors,
    first_length,
    is_latent,
    layers_with,
    main_and_local,
    mscales,
)
from phasor.layers import LayerRopes
from phasor.pairings import by_pairing
from phasor.rope import Rope
from phasor.scaling import Law, Linear, Llama3, LongRope, PerPair, Rule, Yarn

_ORIGINAL = "original_max_position_embeddings"
_SHORT_LIST, _LONG_LIST = "longrope_scaling_short_factors", "longrope_scaling_long_factors"


# Reading.


def read(model: ProgramModel) -> LayerRopes:
    """The rope of each layer."""
    config, facts = model.config, model.facts
    architecture = config.text("architecture") or ""
    model.defaults |= facts["architectures"].get(architecture, {})
    if (width := model.defaults.get("rotary_dim")) is not None:
        width = config.or_default("rotary_dim", config.whole("rotary_dim"), width, model.assumes)
        model.config = config = config.with_defaults({"rotary_dim": width})
    position_type = model.position_type()
    if position_type in facts["instead"] and not model.latent:
        return model.no_rotation(architecture, position_type)
    # in latent attention it turns pairs that are neighbours in DeepSeek's weights
    rope = model.rope("interleaved" if model.latent or position_type == "rope_gptj" else "half")
    block = config.object("rotary_scaling")
    if position_type == "long_rope":
        rope = _set_lists(model, rope, architecture)
    elif block is not None:
        kind = rope_type(block, Architecture(laws={"none": "default"}))
        if kind == "default" and block.number("factor") not in (None, 1):
            block.refuse("factor", "1 where no law is named")
        if kind == "dynamic":  # its base is that of all lengths
            block.require("alpha", block.value("alpha"))
        rope = model.law(kind, rope, block)
    if position_type == "mrope":
        block = block or JsonObject({}, "rotary_scaling")
        rope = with_sections(rope, block, block.wholes("mrope_section"))
    words, count = config.texts("layer_types"), config.layers()
    if any(map(config.has, facts["with_layer_types"])):
        config.require("layer_types", words)
    turning_none = {*table().files["without_rope"], *facts["without_attention"]}
    attention_free = [word if word in turning_none else "" for word in words or ("",)]
    across = {*(config.wholes("cross_attention_layers") or ())}
    attention_free = [
        "cross_attention" if i in across else attention_free[i % len(attention_free)]
        for i in range(count)
    ]
    if (local_base := config.number("rope_local_base_freq", above=1)) is None:
        return model.ropes({"attention": rope}, attention_free=attention_free)
    key = "sliding_window_pattern"
    interval = config.require(key, config.whole(key))
    local = replace(rope, base=local_base)  # it scales both alike
    kinds = {"full_attention": rope, "sliding_attention": local}
    return model.ropes(kinds, LayerPattern.every(interval, count), attention_free)


def _set_lists(model: ProgramModel, rope: Rope, architecture: str) -> Rope:
    """The rope with two lists of divisors, or with one law if both lists are the same."""
    config, facts = model.config, model.facts
    length, original = config.whole(CONTEXT), config.number(_ORIGINAL, above=1)
    short, long = (config.numbers_per_pair(k, rope.num_pairs) for k in (_SHORT_LIST, _LONG_LIST))
    if length and original and not original.is_integer() and short and short == long:
        # not a real length: it only determines the factor on cos and sin
        gain = math.sqrt(max(1.0, math.log(length) / math.log(original)))
        law = PerPair(factors=short, attention_factor=gain)
        rope = replace(rope, scaling=law, direction=config.sign(_SHORT_LIST))
    else:
        rope = model.law("longrope" if architecture in facts["mscales"] else "su", rope)
    config.ignore(*facts["laws"]["longrope"]["names"].values())
    return rope


# Writing.


def _settings(ropes: LayerRopes, context: int) -> Iterator[Keys]:
    main, local = main_and_local(ropes)
    # the class for latent attention has the other numbers in its code
    takes_law = isinstance(main.scaling, (Yarn, type(None)))
    latent = is_latent(ropes, main) and local is None and takes_law
    if latent and main.scaling is None:  # it has YaRN only; a factor of 1 turns that off
        main = replace(main, scaling=Yarn(factor=1.0, original_max_positions=context))
    keys: Keys = {"qk_rope_head_dim" if latent else "head_size": main.head_dim}
    if main.rotary_dim != main.head_dim:
        keys["rotary_pct"] = rotated_fraction(main.rotary_dim, main.head_dim)
    layer_keys = {} if local is None else _local_keys(ropes, main, local)
    if layer_keys is None:
        return
    law = main.scaling
    if main.direction > 0 and main.base is not None and not isinstance(law, Rule):
        block = _rotary_scaling(main, law)
        if block is not None:
            has_axes = isinstance(main.axes, Sectioned)
            word = by_pairing(main.pairing, half="rope_gpt_neox", interleaved="rope_gptj")
            type_keys = {"position_embedding_type": "mrope" if has_axes else word}
            law_keys = {"rotary_base": main.base, CONTEXT: context, "rotary_scaling": block or None}
            yield keys | ({} if latent else type_keys) | law_keys | layer_keys
    if main.pairing == "half" and isinstance(main.axes, OneAxis) and local is None and not latent:
        lists = _lists(main, context)
        if lists is not None:
            yield keys | lists


def _local_keys(ropes: LayerRopes, main: Rope, local: Rope) -> Keys | None:
    """The keys for local layers with every n-th one global; None for any other order."""
    every = layers_with(ropes, main).interval
    if every is None or {*ropes} != {main, local}:
        return None
    pattern = every or len(ropes) + 1  # an index beyond the last layer if all layers are local
    # a release reads one of the two keys
    keys = dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), pattern)
    return {**keys, "rope_local_base_freq": local.base}


def _rotary_scaling(rope: Rope, law: Law | None) -> Keys | None:
    """``rotary_scaling`` for a law that has a type; None for laws that need a list of divisors."""
    if law is None and isinstance(rope.axes, Sectioned):
        return {"type": "mrope", "mrope_section": list(rope.axes.sections)}
    if law is None:
        return {}
    scales: Keys = {}
    if isinstance(law, Yarn) and law.truncate:
        law, scales = replace(law, attention_factor=None), mscales(law)
    elif not isinstance(law, (Linear, Llama3)):
        return None
    block = WRITERS[type(law)](law)
    return {"type": block.pop("rope_type"), **block, **scales}


def _lists(rope: Rope, context: int) -> Keys | None:
    """Two lists of divisors; two lengths determine the factor on cos and sin."""
    law, length, short, long = rope.scaling, context, rope, rope
    if isinstance(law, LongRope):
        start = law.original_max_positions
        short, long = rope.at(start), rope.at(start + 1)
        # of the larger factor, and below 2**58 where no length gives it
        gain = max(short.attention_factor, long.attention_factor)
        length = round(start ** min(gain**2, 40 / math.log(start)))
    elif isinstance(law, Rule) or rope.attention_factor < 1:
        return None
    else:
        start = first_length(rope.attention_factor, context)
    base, divisors = base_and_divisors(long)
    return {
        "position_embedding_type": "long_rope",
        "rotary_base": base,
        CONTEXT: length,
        _ORIGINAL: start,
        _SHORT_LIST: base_and_divisors(short)[1].tolist(),
        _LONG_LIST: divisors.tolist(),
        "rotary_scaling": None,
    }


def _sizes(ropes: LayerRopes, _context: int) -> Keys:
    count = len(ropes)
    return {"architecture": "", "num_hidden_layers": count, "num_attention_heads": 1}


DIALECT = Dialect(
    read=lambda file: read(ProgramModel("TensorRT-LLM", file)),
    settings=_settings,
    sizes=_sizes,
    has_both_pairings=False,
    states_still_layers=False,
    scales_softmax=False,
)


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    written = settings_or_refusal(TENSORRT_LLM, DIALECT, ropes, context)
    keys = written.keys
    notes = ["Its PyTorch backend reads none of these keys, but those for transformers."]
    if "qk_rope_head_dim" in keys and ropes.ropes[0].scaling is None:
        notes.append("Its latent attention supports only YaRN; a factor of 1 has no effect.")
    if "rope_local_base_freq" in keys:
        notes.append("The architecture has to be Gemma 3's: others have no local layers.")
    if any(isinstance(rope.scaling, LongRope) for rope in ropes.ropes):
        notes.append("Its kernels choose the list for a batch; they were not run.")
    return as_json(keys, notes, written.performed)


TENSORRT_LLM = Target(
    name="tensorrt-llm",
    program="keys of a checkpoint's config.json for TensorRT-LLM",
    source="https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/layers/attention.py",
    checked="description",
    write=_write,
    backwards=True,
    axes=(OneAxis, Sectioned),
    rules=(LongRope,),
    softmax_note="The architecture has to multiply its softmax scale by {factor!r}: that of "
    "DeepSeek does.",
    leaves_layers="The architecture",
)
