"""Keys of a model's config.json: for transformers, and for vLLM and sglang.

The serving engines are given a command that overrides a config, and the arguments of their factory
``get_rope``, of which sglang's began as a copy of vLLM's. Both read the block of transformers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from phasor.axes import Alternating, InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.file_keys import keys_for_file, keys_over_file, merged_over
from phasor.files.configs.writing import CONTEXT_KEY
from phasor.files.dialects.config_blocks import (
    THREE_AXES,
    ConfigTarget,
    blocks_of,
    in_config_form,
    place_notes,
    slice_block,
    with_divisors,
)
from phasor.files.dialects.target import (
    PICK_LAW,
    Keys,
    ProgramSettings,
    Target,
    TranslationError,
    as_json,
    change_ropes,
    has_steps,
    mscales,
    plain_candidates,
    rotating,
    slice_width,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import (
    DynamicNTK,
    Law,
    Linear,
    LongRope,
    NTKMixed,
    PerPair,
    Proportional,
    Rule,
    Yarn,
    yarn_multiplier,
)

#: A serving engine, whose class for Ernie 4.5 VL turns interleaved pairs.
_Engine = partial(
    ConfigTarget,
    axes=(*THREE_AXES, Alternating),
    takes=lambda rope: rope.pairing == "interleaved" or not isinstance(rope.axes, Alternating),
)


def _write_transformers(ropes: LayerRopes, context: int) -> ProgramSettings:
    if ropes.in_config.ignores_scaling:
        raise TranslationError(
            f"the class of {ropes.name} in transformers has this rotation in its code and reads "
            "none from a config: there is nothing to give"
        )
    notes = place_notes(ropes)
    for rope in (rope for rope in ropes.ropes if rope.direction < 0):
        if rope.rotary_dim < rope.head_dim or rope.axes.n_axes > 1 or rope.pairing_out:
            feature = "clockwise pairs by several axes, in a part of a head or written as others"
            TRANSFORMERS.refuse(feature, rope, [replace(rope, direction=1)])
        notes = ("Its class must turn pairs clockwise: that of nanochat does.", *notes)
    formed = change_ropes(ropes, lambda rope: in_config_form(TRANSFORMERS, rope))
    written = keys_for_file(formed, context, context)
    notes = (written.readers, *notes)
    return as_json(merged_over(written.keys, formed), notes, rotating(formed))


TRANSFORMERS = ConfigTarget(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write_transformers,
    # no class turns interleaved ones so
    takes=lambda rope: rope.direction > 0 or rope.pairing == "half",
    other_pairs_out=True,
    backwards=True,
    axes=(*THREE_AXES, Alternating),
    rules=(DynamicNTK, LongRope),
    query_factor=lambda factor, rope: True,
)


# vLLM and sglang.


def _engine_block(target: Target, rope: Rope, context: int, *laws_with_axes: type) -> Keys:
    """``rope_parameters`` for the factories; they combine some laws with sections."""
    with_one_axis = replace(rope, axes=OneAxis())
    if rope.axes.n_axes not in (1, 3):
        target.refuse(f"positions of {rope.axes.n_axes} axes", rope, [with_one_axis])
    alternating = isinstance(rope.axes, Alternating)
    if alternating and rope.rotary_dim < rope.head_dim:
        target.refuse("such axes in a part of a head", rope, [with_one_axis])
    form = in_config_form(target, rope)
    if isinstance(form.scaling, Linear) and form.scaling.factor < 1:
        # the factories' tables of a linear law end at the factor times the context
        form = with_divisors(target, form)
    law, name = form.scaling, _law_name(rope.scaling)
    unsupported, nearer = "", list[Rope]()
    if isinstance(law, Proportional) and law.factor != 1:
        unsupported = f"pairs that stand still beside pairs divided by {law.factor:g}"
    elif isinstance(law, PerPair) and rope.pairing == "interleaved":
        unsupported = f"the law {name} for interleaved pairs"
    elif rope.axes.n_axes > 1 and law and (alternating or not isinstance(law, laws_with_axes)):
        unsupported = f"the law {name} with positions of three axes"
        nearer.append(with_one_axis)
    if unsupported:
        target.refuse(unsupported, rope, [*plain_candidates(with_one_axis), *nearer])
    keys = slice_block(form, context)
    if isinstance(law, PerPair):
        # both lists are the same, so the factor must not depend on the length either
        del keys["attention_factor"]
        keys |= dict.fromkeys(("short_mscale", "long_mscale"), law.attention_factor)
    if "mrope_section" in keys and not alternating:
        # interleaved sections may count more pairs than there are; the factories check the sum
        keys["mrope_section"] = list(rope.axes.counts(rope.num_pairs))
    return keys


def _law_name(law: Law | Rule | None) -> str:
    if law is None:
        return "of explicit frequencies"
    name = type(law).__name__
    # `with_simplest_law` also gives a linear law for others, such as the resonance of a single pair
    return f"{name} with a factor below 1" if isinstance(law, Linear) and law.factor < 1 else name


def _write_engine(
    target: Target,
    ropes: LayerRopes,
    context: int,
    *,
    block: Callable[[Rope, int], Keys],
    others: Callable[[Rope, Keys], Keys],
    module: str,
    command: str,
) -> ProgramSettings:
    """The settings of a whole model: ``command`` with its override, or calls of ``get_rope``.

    ``others`` returns the arguments that the other factory lacks, for a rope and its ``block``.
    """
    calls = {
        kind: {
            "head_size": slice_width(rope),
            "max_position": context,
            "is_neox_style": rope.pairing == "half",
            **others(rope, block(rope, context)),
        }
        for kind, rope in rotating(ropes).items()
        if not isinstance(rope.axes, Alternating)
    }
    if ropes.in_config.ignores_scaling:
        # the class reads no law from a config: the code of the model calls the factory
        lines = [f"get_rope(**{arguments})  # {kind} layers" for kind, arguments in calls.items()]
        code = "\n".join([f"from {module}.layers.rotary_embedding import get_rope", "", *lines])
        return ProgramSettings({"get_rope": calls}, code)
    parameters, blocks = blocks_of(ropes, lambda rope: block(rope, context))
    override: Keys = {CONTEXT_KEY: context}
    bases = {found["rope_theta"] for found in blocks}
    if len(bases) == 1:
        override["rope_theta"] = bases.pop()  # some classes read it here alone
    override = keys_over_file({**override, "rope_parameters": parameters}, ropes)
    given_too = ", which is given too" if override.get("rope_theta") else ""
    notes = (
        f"The class for the model in {target.name} must read rope_parameters: some read "
        f"rope_theta alone{given_too}.",
    )
    for axes in (rope.axes for rope in ropes.ropes if isinstance(rope.axes, Alternating)):
        override["freq_allocation"] = axes.sections[0]
        notes = (f"Ernie 4.5 VL's class in {target.name} has these axes: its factory has not.",)
    for name in reversed(ropes.in_config.path.split(".") if ropes.in_config.path else ()):
        override = {name: override}
    code = f"{command} {shlex.quote(json.dumps(override))}"
    settings = {"get_rope": calls, "override": override}
    return ProgramSettings({k: v for k, v in settings.items() if v}, code, notes)


# vLLM


def _vllm_block(rope: Rope, context: int) -> Keys:
    law = rope.scaling
    if isinstance(law, NTKMixed) and isinstance(rope.axes, OneAxis):
        keys = _engine_block(VLLM, replace(rope, scaling=None), context)
        return keys | {"rope_type": "ntk", "factor": law.factor, "mixed_b": law.exponent}
    if isinstance(law, Yarn) and isinstance(rope.axes, (Sectioned, InterleavedSections)):
        feature = "YaRN by three axes, whose ramp some of its classes make of four times the length"
        VLLM.refuse(feature, rope, [replace(rope, axes=OneAxis())])
    if isinstance(law, Yarn) and context > (end := law.factor * law.original_max_positions):
        if rope.pairing == "interleaved":
            VLLM.refuse(f"YaRN from position {end:g} on, where its table ends", rope)
        # the table of divisors does not end there
        return _engine_block(VLLM, with_divisors(VLLM, rope), context)
    keys = _engine_block(VLLM, rope, context)
    if isinstance(law, Yarn):
        # DeepSeek's classes read these two, and leave the softmax scale alone if there is an
        # attention_factor of 1; all other classes prefer the attention_factor
        keys |= mscales(law)
        if keys["mscale"] and keys["mscale_all_dim"]:
            keys.pop("attention_factor", None)
        else:
            keys["attention_factor"] = rope.attention_factor
    return keys


def _write_vllm(ropes: LayerRopes, context: int) -> ProgramSettings:
    return _write_engine(
        VLLM,
        ropes,
        context,
        block=_vllm_block,
        others=lambda rope, block: {"rope_parameters": block},
        module="vllm.model_executor",
        command=f"vllm serve MODEL --max-model-len {context} --hf-overrides",
    )


VLLM = _Engine(
    name="vllm",
    program="--hf-overrides of vllm serve, and the arguments of its get_rope",
    source="https://docs.vllm.ai/en/latest/api/vllm/model_executor/layers/rotary_embedding",
    checked="engine",
    write=_write_vllm,
    query_factor=has_steps,
)


# sglang


def _sglang_block(rope: Rope, context: int) -> Keys:
    law = rope.scaling
    if isinstance(law, LongRope):
        raise TranslationError(
            "sglang picks one list of divisors by the positions of a whole batch, and LongRope "
            f"picks one by the length of the sequence; {PICK_LAW}"
        )
    keys = _engine_block(SGLANG, rope, context, Yarn)
    if isinstance(law, Yarn):
        for name in ("attention_factor", "mscale", "mscale_all_dim"):  # read otherwise or not
            keys.pop(name, None)
        if isinstance(rope.axes, OneAxis):
            keys |= mscales(law)
        else:
            keys["attn_factor"] = rope.attention_factor / yarn_multiplier(law.factor, 1.0)
    return keys


def _sglang_arguments(rope: Rope, block: Keys) -> Keys:
    law, rotary_dim = rope.scaling, rope.rotary_dim
    if isinstance(law, Proportional):
        rotary_dim = 2 * int(law.fraction * rotary_dim // 2)
    return {"rotary_dim": rotary_dim, "base": block["rope_theta"], "rope_scaling": block}


def _write_sglang(ropes: LayerRopes, context: int) -> ProgramSettings:
    if "." in ropes.in_config.path:
        raise TranslationError(
            f"sglang overrides keys one level deep, and {ropes.name} has them in "
            f"{ropes.in_config.path}: change the file"
        )
    command = f"python -m sglang.launch_server --model-path MODEL --context-length {context}"
    return _write_engine(
        SGLANG,
        ropes,
        context,
        block=_sglang_block,
        others=_sglang_arguments,
        module="sglang.srt",
        command=f"{command} --json-model-override-args",
    )


SGLANG = _Engine(
    name="sglang",
    program="--json-model-override-args of its server, and the arguments of its get_rope",
    source="https://docs.sglang.ai/advanced_features/server_arguments.html",
    checked="engine",
    write=_write_sglang,
    rules=(LongRope,),
    query_factor=has_steps,
)
