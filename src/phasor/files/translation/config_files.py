"""Keys of a model's config: for transformers, for Meta's code, and for vLLM and sglang.

The serving engines are given a command that overrides a config, and the arguments of their factory
``get_rope``, of which sglang's began as a copy of vLLM's. Both read the block of transformers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from phasor.axes import Alternating, InterleavedSections, OneAxis, Sectioned
from phasor.errors import ConfigError
from phasor.files.configs.writing import WRITERS, config_keys, keys_over_file, rope_parameters
from phasor.files.translation.target import (
    PICK_LAW,
    ProgramSettings,
    Target,
    TranslationError,
    has_steps,
    ntk_as_base,
    plain_candidates,
    whole_model,
    yarn_mscale,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import (
    DynamicNTK,
    Law,
    Linear,
    Llama3,
    LongRope,
    NTKMixed,
    PerPair,
    Proportional,
    Rule,
    Yarn,
    yarn_multiplier,
)

Block = dict[str, Any]


def in_config_form(target: Target, rope: Rope, context: int) -> Rope:
    """The rope with a law that has a ``rope_type``: a raised base, or a divisor for each pair."""
    # the classes of transformers round each frequency to float32
    form = ntk_as_base(replace(rope, inv_freq_dtype="exact"))
    law = form.scaling
    if isinstance(law, Yarn) and law.mscale != 1 and not (law.mscale and law.mscale_all_dim):
        # a block's mscale is only read beside a mscale_all_dim, and neither may be 0
        law = replace(law, mscale=1.0, attention_factor=rope.attention_factor)
        return replace(form, scaling=law)
    if form.explicit_inv_freq is None and type(law) in WRITERS:
        return form
    return with_divisors(target, replace(form, inv_freq_dtype=rope.inv_freq_dtype), context)


def with_divisors(target: Target, rope: Rope, context: int) -> Rope:
    """The same rotation by a base and a divisor for each pair; refused if a pair stands still."""
    base = rope.base or 10_000.0
    plain = replace(rope, inv_freq_dtype="exact", base=base, explicit_inv_freq=None, scaling=None)
    with np.errstate(divide="ignore", over="ignore"):
        factors = plain.inv_freq / rope.inv_freq
    if not np.isfinite(factors).all():
        target.refuse(
            "pairs that stand still, but for those of p-RoPE", rope, context, plain_candidates(rope)
        )
    law = PerPair(factors=tuple(factors.tolist()), attention_factor=rope.attention_factor)
    return replace(plain, scaling=law)


@contextmanager
def refusing(target: Target) -> Generator[None]:
    """Say of the target what a config cannot say."""
    try:
        yield
    except ConfigError as error:
        raise TranslationError(f"{target.name} cannot express it: {error}") from None


def _write_transformers(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    if ropes.in_config.ignores_scaling:
        raise TranslationError(
            f"the class of {ropes.name} in transformers has this rotation in its code and reads "
            "none from a config: there is nothing to give"
        )
    kinds = {
        kind: None if rope is None else in_config_form(TRANSFORMERS, rope, context)
        for kind, rope in ropes.kinds.items()
    }
    with refusing(TRANSFORMERS):
        keys = config_keys(replace(ropes, kinds=kinds).config_blocks(), context, context)
    keys = keys_over_file(keys, ropes)
    path = ropes.in_config.path
    place = (f"These keys belong inside {path} of the config.",) if path else ()
    return (
        ProgramSettings(
            ropes={kind: rope for kind, rope in kinds.items() if rope is not None},
            settings=keys,
            code=json.dumps(keys, indent=2),
            notes=place + class_notes(TRANSFORMERS, ropes.ropes),
        ),
    )


def class_notes(
    target: Target, ropes: Iterable[Rope], why: str = "no config says which"
) -> tuple[str, ...]:
    """Notes about properties that no config states: the code of the model's class has them."""
    notes: list[str] = []
    its_class = f"The class for the model in {target.name}"
    for rope in ropes:
        written = f" and write {rope.pairing_out} pairs" if rope.pairing_out else ""
        notes.append(f"{its_class} must rotate {rope.pairing} pairs{written}: {why}.")
        if rope.rotary_start:
            notes.append(f"{its_class} must rotate from coordinate {rope.rotary_start} on.")
        if not isinstance(rope.scaling, Rule) and rope.softmax_factor != 1:
            notes.append(
                f"{its_class} must multiply its softmax scale by {rope.softmax_factor!r}: the "
                "classes of DeepSeek models do that themselves."
            )
    return tuple(dict.fromkeys(notes))


TRANSFORMERS = Target(
    name="transformers",
    program="keys of a model's config.json",
    source="https://huggingface.co/docs/transformers/internal/rope_utils",
    checked="run",
    write=_write_transformers,
    axes=(OneAxis, Sectioned, InterleavedSections, Alternating),
    rules=(DynamicNTK, LongRope),
    softmax=True,
    query_factor=lambda factor: True,
    other_pairs_out=True,
)


# llama-models: the keys of Meta's ``params.json``.


#: Constants in the code of ``apply_scaling``.
_LOW_FREQ_FACTOR, _ORIGINAL_LENGTH = 1.0, 8192
#: Keys that only the code of Llama 4 reads, with the constants in the code of Llama 3.
_LLAMA3_CONSTANTS = {"rope_scaling_factor": 8.0, "rope_high_freq_factor": 4.0}


def _write_meta(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    rope = ntk_as_base(META.only_rope(ropes, context))
    settings: dict[str, Any] = {"rope_theta": rope.base, "use_scaled_rope": False}
    if rope.scaling is not None or rope.base is None:
        settings |= _scaling_keys(rope, context)
    settings |= _interval_key(ropes)
    for factor in ropes.query_factors.values():
        if META.query_factor(factor):
            numbers = {"floor_scale": factor.length, "attn_scale": factor.strength}
            settings |= {"attn_temperature_tuning": True} | numbers
    notes = [f"The code computes head_dim as dim / n_heads, which has to be {rope.head_dim}."]
    needs_llama4 = {key: settings[key] for key in _LLAMA3_CONSTANTS if key in settings} not in (
        {},
        _LLAMA3_CONSTANTS,
    )
    if needs_llama4 or "nope_layer_interval" in settings:
        notes.append("llama_models.llama4 reads all these keys, llama_models.llama3 does not.")
    return whole_model(ropes, rope, settings, json.dumps(settings, indent=2), notes)


def _scaling_keys(rope: Rope, context: int) -> dict[str, Any]:
    law = rope.scaling
    if (
        not isinstance(law, Llama3)
        or law.low_freq_factor != _LOW_FREQ_FACTOR
        or law.original_max_positions != _ORIGINAL_LENGTH
    ):
        META.refuse(
            "frequencies other than base ** (-2k / d), or these scaled by Llama3 with "
            f"low_freq_factor={_LOW_FREQ_FACTOR:g} and original_max_positions={_ORIGINAL_LENGTH}",
            rope, context, (plain for plain in plain_candidates(rope) if plain.scaling is None),
        )  # fmt: skip
    return {
        "use_scaled_rope": True,
        "rope_scaling_factor": law.factor,
        "rope_high_freq_factor": law.high_freq_factor,
    }


def _interval_key(ropes: LayerRopes) -> dict[str, Any]:
    """The key for every n-th layer without a rotation."""
    unrotated = [i for i, kind in enumerate(ropes.layer_kinds, 1) if ropes.kinds[kind] is None]
    if not unrotated:
        return {}
    interval = unrotated[0]
    if unrotated != list(range(interval, len(ropes) + 1, interval)):
        raise TranslationError(
            "meta cannot express layers without a rotation that are not every n-th, and nothing "
            "that it can is near"
        )
    return {"nope_layer_interval": interval}


META = Target(
    name="meta",
    program="keys of a params.json for llama-models",
    source="https://github.com/meta-llama/llama-models/tree/main/models",
    checked="run",
    package="llama-models",
    write=_write_meta,
    needs_context=False,
    pairings=("interleaved",),
    partial=False,
    query_factor=lambda factor: has_steps(factor) and factor.first == 1,
)


# vLLM and sglang.


def _engine_block(
    target: Target, rope: Rope, context: int, *, laws_with_axes: tuple[type, ...] = (type(None),)
) -> Block:
    """``rope_parameters`` of the slice of a head from ``rope.rotary_start`` on, for the factories.

    ``laws_with_axes`` are the laws that the factory combines with sections.
    """
    rope = replace(rope, head_dim=rope.head_dim - rope.rotary_start, rotary_start=0)
    with_one_axis = replace(rope, axes=OneAxis())
    if rope.axes.n_axes not in (1, 3):
        target.refuse(f"positions of {rope.axes.n_axes} axes", rope, context, [with_one_axis])
    form = in_config_form(target, rope, context)
    if isinstance(form.scaling, Linear) and form.scaling.factor < 1:
        # the factories' tables of a linear law end at the factor times the context
        form = with_divisors(target, form, context)
    law, name = form.scaling, _law_name(rope.scaling)
    unsupported, candidates = "", plain_candidates(with_one_axis)
    if isinstance(law, Proportional) and law.factor != 1:
        unsupported = f"pairs that stand still beside pairs divided by {law.factor:g}"
    elif isinstance(law, PerPair) and rope.pairing == "interleaved":
        unsupported = f"the law {name} for interleaved pairs"
    elif rope.axes.n_axes > 1 and not isinstance(law, laws_with_axes):
        unsupported = f"the law {name} with positions of three axes"
        candidates.append(with_one_axis)
    if unsupported:
        target.refuse(unsupported, rope, context, candidates)
    with refusing(target):
        keys = rope_parameters(form, context)
    if isinstance(law, PerPair):
        # both lists are the same, so the factor must not depend on the length either
        del keys["attention_factor"]
        keys |= dict.fromkeys(("short_mscale", "long_mscale"), law.attention_factor)
    if "mrope_section" in keys:
        # interleaved sections may count more pairs than there are; the factories check the sum
        axes = rope.axes.axis_of_pair(rope.num_pairs)
        keys["mrope_section"] = [axes.count(axis) for axis in range(3)]
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
    block: Callable[[Rope, int], Block],
    get_rope: Callable[[Rope, int, Block], Block],
    module: str,
    command: str,
) -> tuple[ProgramSettings, ...]:
    """The settings of a whole model: ``command`` with its override, or calls of ``get_rope``.

    ``{}`` in the command stands for the context. ``get_rope`` returns the arguments of the factory
    in ``module`` for a rope and its ``block``.
    """
    kinds = {kind: rope for kind, rope in ropes.kinds.items() if rope is not None}
    calls = {kind: get_rope(rope, context, block(rope, context)) for kind, rope in kinds.items()}
    settings: dict[str, Any] = {"get_rope": calls}
    notes = class_notes(target, kinds.values())
    if ropes.in_config.ignores_scaling:
        # the class reads no law from a config: the code of the model calls the factory
        lines = [f"get_rope(**{arguments})  # {kind} layers" for kind, arguments in calls.items()]
        code = "\n".join([f"from {module} import get_rope", "", *lines])
    else:
        override = _override(target, ropes, context, block)
        given_too = ", which is given too" if override.get("rope_theta") else ""
        for name in reversed(ropes.in_config.path.split(".") if ropes.in_config.path else ()):
            override = {name: override}
        settings["override"] = override
        code = f"{command.format(context)} {shlex.quote(json.dumps(override))}"
        notes += (
            f"The class for the model in {target.name} must read rope_parameters: some read "
            f"rope_theta alone{given_too}.",
        )
    return (ProgramSettings(ropes=kinds, settings=settings, code=code, notes=notes),)


def _override(
    target: Target, ropes: LayerRopes, context: int, block: Callable[[Rope, int], Block]
) -> Block:
    """The keys of the config, or of the one inside it."""
    with refusing(target):
        blocks = ropes.config_blocks()
    keys: Block = {"max_position_embeddings": context}
    if isinstance(blocks, Rope):
        parameters = block(blocks, context)
        bases = {parameters["rope_theta"]}
    else:
        parameters = {label: rope and block(rope, context) for label, rope in blocks.items()}
        bases = {keys["rope_theta"] for keys in parameters.values() if keys}
    if len(bases) == 1:
        keys["rope_theta"] = bases.pop()  # some classes read it here alone
    return keys_over_file({**keys, "rope_parameters": parameters}, ropes)


# vLLM


def _vllm_block(rope: Rope, context: int) -> Block:
    law = rope.scaling
    if isinstance(law, NTKMixed) and isinstance(rope.axes, OneAxis):
        keys = _engine_block(VLLM, replace(rope, scaling=None), context)
        return keys | {"rope_type": "ntk", "factor": law.factor, "mixed_b": law.exponent}
    if isinstance(law, Yarn) and context > (end := law.factor * law.original_max_positions):
        if rope.pairing == "interleaved":
            VLLM.refuse(f"YaRN from position {end:g} on, where its table ends",
                          rope, context, plain_candidates(rope))  # fmt: skip
        # the table of divisors does not end there
        return _engine_block(VLLM, with_divisors(VLLM, rope, context), context)
    keys = _engine_block(VLLM, rope, context)
    if isinstance(law, Yarn):
        # DeepSeek's classes read these two, and leave the softmax scale alone if there is an
        # attention_factor of 1; all other classes prefer the attention_factor
        keys |= {"mscale": yarn_mscale(law), "mscale_all_dim": law.mscale_all_dim}
        if keys["mscale"] and keys["mscale_all_dim"]:
            keys.pop("attention_factor", None)
        else:
            keys["attention_factor"] = rope.attention_factor
    return keys


def _vllm_arguments(rope: Rope, context: int, block: Block) -> dict[str, Any]:
    return {
        "head_size": rope.head_dim - rope.rotary_start,
        "max_position": context,
        "is_neox_style": rope.pairing == "half",
        "rope_parameters": block,
    }


def _write_vllm(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    return _write_engine(
        VLLM,
        ropes,
        context,
        block=_vllm_block,
        get_rope=_vllm_arguments,
        module="vllm.model_executor.layers.rotary_embedding",
        command="vllm serve MODEL --max-model-len {} --hf-overrides",
    )


VLLM = Target(
    name="vllm",
    program="--hf-overrides of vllm serve, and the arguments of its get_rope",
    source="https://docs.vllm.ai/en/latest/api/vllm/model_executor/layers/rotary_embedding",
    checked="engine",
    write=_write_vllm,
    axes=(OneAxis, Sectioned, InterleavedSections),
    softmax=True,
    query_factor=has_steps,
)


# sglang


def _sglang_block(rope: Rope, context: int) -> Block:
    law = rope.scaling
    if isinstance(law, LongRope):
        raise TranslationError(
            "sglang picks one list of divisors by the positions of a whole batch, and LongRope "
            f"picks one by the length of the sequence; {PICK_LAW}"
        )
    keys = _engine_block(SGLANG, rope, context, laws_with_axes=(type(None), Yarn))
    if isinstance(law, Yarn):
        keys.pop("attention_factor", None)  # not read
        if isinstance(rope.axes, OneAxis):
            keys |= {"mscale": yarn_mscale(law), "mscale_all_dim": law.mscale_all_dim}
        else:
            for name in ("mscale", "mscale_all_dim"):  # the factory takes neither
                keys.pop(name, None)
            keys["attn_factor"] = rope.attention_factor / yarn_multiplier(law.factor, 1.0)
    return keys


def _sglang_arguments(rope: Rope, context: int, block: Block) -> dict[str, Any]:
    law, rotary_dim = rope.scaling, rope.rotary_dim
    if isinstance(law, Proportional):
        rotary_dim = 2 * int(law.fraction * rotary_dim // 2)
    return {
        "head_size": rope.head_dim - rope.rotary_start,
        "rotary_dim": rotary_dim,
        "max_position": context,
        "base": block["rope_theta"],
        "is_neox_style": rope.pairing == "half",
        "rope_scaling": block,
    }


def _write_sglang(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    if "." in ropes.in_config.path:
        raise TranslationError(
            f"sglang overrides keys one level deep, and {ropes.name} has them in "
            f"{ropes.in_config.path}: change the file"
        )
    return _write_engine(
        SGLANG,
        ropes,
        context,
        block=_sglang_block,
        get_rope=_sglang_arguments,
        module="sglang.srt.layers.rotary_embedding",
        command="python -m sglang.launch_server --model-path MODEL --context-length {} "
        "--json-model-override-args",
    )


SGLANG = Target(
    name="sglang",
    program="--json-model-override-args of its server, and the arguments of its get_rope",
    source="https://docs.sglang.ai/advanced_features/server_arguments.html",
    checked="engine",
    write=_write_sglang,
    axes=(OneAxis, Sectioned, InterleavedSections),
    rules=(LongRope,),
    softmax=True,
    query_factor=has_steps,
)
