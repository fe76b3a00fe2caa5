"""Reads the scaling law and the axes from the rope block of a Hugging Face config.

Formulas of the ``rope_type`` names are those of transformers' ``modeling_rope_utils``; YaRN is
2309.00071, LongRoPE 2402.13753, Llama 3 2407.21783.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from phasor.axes import AXES, Axes
from phasor.errors import ConfigError
from phasor.files.configs.block import Block, renamed_keys, require, single_value
from phasor.files.configs.facts import Architecture, table
from phasor.scaling import (
    NTK,
    DynamicNTK,
    Law,
    Linear,
    Llama3,
    LongRope,
    NTKFixed,
    NTKOld,
    Proportional,
    Rule,
    SteppedNTK,
    Yarn,
    yarn_multiplier,
)

_OLD_NAMES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
_CONTEXT = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a law depends on outside its block; ``config`` is the one that the block is in."""

    architecture: Architecture
    rotary_dim: int
    config: Block

    @property
    def context(self) -> int | None:
        """The context, for laws that depend on it: all keys for it must agree."""
        keys = table().files["contexts"]
        return single_value((self.config.name(key), self.config.whole(key)) for key in keys)


def rope_type(block: Block, facts: Architecture | None = None) -> str:
    """The block's ``rope_type`` in the spelling of transformers 5.

    A model class may have other names for a type: ``facts.laws``.
    """
    synonyms = {**_OLD_NAMES, **({} if facts is None else facts.laws)}
    if facts is None or facts.positions:
        # transformers 5 writes "axial" for vision towers, which have no scaling law
        synonyms["axial"] = "default"
    names = [(block.name(key), block.text(key)) for key in ("rope_type", "type")]
    name = single_value((key, word and synonyms.get(word, word)) for key, word in names)
    name = name or "default"
    if name not in {*_LAWS, *synonyms.values()}:
        key = "rope_type" if block.has("rope_type") else "type"
        known = ", ".join(sorted({*_LAWS, *synonyms}))
        block.refuse(key, f"one of {known} (or describe the embedding with Rope(...) directly)")
    return name


def laws_of_untyped(block: Block, key: str) -> str:
    """The laws that a block without a type may mean, if ``key`` is a number of a law."""
    numbers = {law: set[str](keys) for law, keys in table().files["law_numbers"].items()}
    known = set[str]().union(*numbers.values())
    if block.values.get("rope_type") or block.values.get("type") or key not in known:
        return ""
    given = known & {k for k in block.values if block.has(k)}
    return " or ".join(law for law, keys in numbers.items() if given <= keys) or "any"


def normalize(value: Any) -> Any:
    """A rope block in the spelling of transformers 5, for comparison; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    block = Block(cast(Mapping[str, Any], value))
    plain = {k: v for k, v in block.values.items() if v is not None and k != "type"}
    if plain and not any(isinstance(v, Mapping) for v in plain.values()):
        plain["rope_type"] = rope_type(block)
    return plain


def scaling(block: Block, model: Model) -> Law | Rule | None:
    """The law or rule that ``block`` names."""
    return {**_LAWS, **_INTERNAL_LAWS}[rope_type(block, model.architecture)](block, model)


def axes(block: Block, model: Model) -> Axes | None:
    """The layout of a multimodal rope; None for the one axis of text."""
    facts = model.architecture
    if facts.axes is None:
        return None
    key = "mrope_section" if not block.has("xdrope_section") else "xdrope_section"
    file_sections = block.wholes(key)
    sections = require(block, key, file_sections or facts.sections or None)
    if facts.sections and len(sections) != len(facts.sections):
        block.refuse(key, f"a list of {len(facts.sections)} pair counts, one per axis")
    # interleaved sections need not add up: the first axis gets the remaining pairs
    if facts.axes != "interleaved" and sum(sections) != model.rotary_dim // 2:
        raise ConfigError(
            f"{block.name(key)} must add up to the number of pairs ({model.rotary_dim // 2}), "
            f"got {list(sections)}" + ("" if file_sections else ", which is the class default")
        )
    ordered = tuple(sections[i] for i in facts.axis_order) if facts.axis_order else sections
    with renamed_keys(block, {"sections": key}):
        layout: Axes = cast(Any, AXES[facts.axes])(ordered)
        layout.axis_of_pair(model.rotary_dim // 2)  # checked here, where an error names the key
        return layout


def _read_factor_law(law: Callable[..., Law], block: Block, _model: Model) -> Law:
    return law(factor=require(block, "factor", block.number("factor", above=0)))


def _read_dynamic(block: Block, model: Model) -> NTK | DynamicNTK:
    if model.rotary_dim < 4:
        raise ConfigError(
            f"{block.name('rope_type')} needs at least 4 rotated coordinates, the head has "
            f"{model.rotary_dim}"
        )
    if model.architecture.ntk_alpha and block.has("alpha"):
        block.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        return NTK(factor=require(block, "alpha", block.number("alpha", above=0)))
    length = single_value(
        [(block.name(_ORIGINAL), block.whole(_ORIGINAL)), (_CONTEXT, model.context)]
    )
    factor = block.number("factor", above=0) or model.architecture.factor
    factor, length = require(block, "factor", factor), require(block, _ORIGINAL, length)
    with renamed_keys(block, {"factor": "factor"}):
        return DynamicNTK(factor=factor, original_max_positions=length)


def _read_llama3(block: Block, model: Model) -> Llama3:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    numbers = {key: require(block, key, block.number(key, above=0)) for key in names}
    original = _original_length(block, model, or_context=False)
    with renamed_keys(block, {name: name for name in names}):
        return Llama3(original_max_positions=original, **numbers)


def _read_proportional(block: Block, model: Model) -> Proportional:
    key = "partial_rotary_factor"
    fraction = single_value(
        (place.name(key), place.number(key, least=0)) for place in (block, model.config)
    )
    factor = block.number("factor", above=0) or 1.0
    with renamed_keys(block if block.has(key) else model.config, {"fraction": key}):
        return Proportional(fraction=1.0 if fraction is None else fraction, factor=factor)


def _read_longrope(block: Block, model: Model) -> LongRope:
    pairs = model.rotary_dim // 2
    short_factors, long_factors = (
        require(block, key, block.numbers_per_pair(key, pairs))
        for key in ("short_factor", "long_factor")
    )
    short_gain, long_gain = (
        single_value((block.name(k), block.number(k, above=0)) for k in ("attention_factor", key))
        for key in ("short_mscale", "long_mscale")
    )
    original = _original_length(block, model, or_context=False)
    with renamed_keys(block, {"original_max_positions": _ORIGINAL}):
        return LongRope(
            short_factors=short_factors,
            long_factors=long_factors,
            original_max_positions=original,
            factor=_extension_factor(block, model, original),
            short_attention_factor=short_gain,
            long_attention_factor=long_gain,
        )


def _read_yarn(block: Block, model: Model) -> Yarn:
    """The law of a ``yarn`` block, with transformers' defaults for absent keys."""
    original = _original_length(block, model, or_context=True)
    factor = _extension_factor(block, model, original)
    betas = {key: block.number(key, above=0) for key in ("beta_fast", "beta_slow")}
    # Ministral repeats the context inside the block: refuse two values
    single_value([(block.name(_CONTEXT), block.whole(_CONTEXT)), (_CONTEXT, model.context)])
    with renamed_keys(block, {name: name for name in betas}):
        return Yarn(
            factor=factor,
            original_max_positions=original,
            truncate=block.flag("truncate") is not False,
            **{key: beta for key, beta in betas.items() if beta is not None},
            **_read_temperature(block, model, factor),
        )


def _read_temperature(block: Block, model: Model, factor: float) -> dict[str, float]:
    """YaRN's temperature as the model applies it, on cos and sin or on the softmax scale."""
    multiplier = partial(yarn_multiplier, factor)
    mscale = block.number("mscale", least=0)
    all_dim = block.number("mscale_all_dim", least=0)
    class_factor = model.architecture.yarn_attention_factor
    attention_factor = block.number("attention_factor", above=0) or class_factor
    if attention_factor is None and mscale and all_dim:
        attention_factor = multiplier(mscale) / multiplier(all_dim)
        if model.architecture.softmax:
            # Yarn derives both factors from these two
            return {"mscale": mscale, "mscale_all_dim": all_dim}
    elif attention_factor is None:
        by_transformers = multiplier(1)
        by_deepseek = multiplier(1 if mscale is None else mscale) / multiplier(all_dim or 0)
        if not math.isclose(by_transformers, by_deepseek, rel_tol=1e-12):
            raise ConfigError(
                f"{block.name('mscale')} and {block.name('mscale_all_dim')} must both be given and "
                f"not zero: with one of them transformers multiplies cos and sin by "
                f"{by_transformers:g}, DeepSeek's own code by {by_deepseek:g}; "
                "give both, or attention_factor"
            )
    temperature = {} if attention_factor is None else {"attention_factor": attention_factor}
    if model.architecture.softmax and all_dim:
        temperature["mscale_all_dim"] = all_dim
    return temperature


def _original_length(block: Block, model: Model, *, or_context: bool) -> int:
    """The context before the extension, from the block or from the config that it is in."""
    length = single_value(
        (place.name(_ORIGINAL), place.whole(_ORIGINAL)) for place in (block, model.config)
    )
    return require(block, _ORIGINAL, length or (model.context if or_context else None))


def _extension_factor(block: Block, model: Model, original: int) -> float:
    """The block's factor, or the ratio of the two contexts if it has none."""
    if (factor := block.number("factor", above=0)) is not None:
        return factor
    has_original = block.has(_ORIGINAL) or model.config.has(_ORIGINAL)
    if not has_original or model.context is None:
        raise ConfigError(
            f"{block.name('factor')} is absent and cannot be derived; add it, or both "
            "original_max_position_embeddings and max_position_embeddings"
        )
    return model.context / original


_LAWS: Mapping[str, Callable[[Block, Model], Law | Rule | None]] = {
    "default": lambda _block, _model: None,
    "linear": partial(_read_factor_law, Linear),
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "proportional": _read_proportional,
    "longrope": _read_longrope,
    "yarn": _read_yarn,
}
# values of `Architecture.laws`; files do not use these names
_INTERNAL_LAWS: Mapping[str, Callable[[Block, Model], Law | Rule | None]] = {
    # Su's scaling, which some model types call "ntk"
    "ntk_fixed": partial(_read_factor_law, NTKFixed),
    # the base times the factor, which Skywork calls "ntk"
    "ntk_old": partial(_read_factor_law, NTKOld),
    # the rule of Qwen 1, whose original length is the file's context
    "stepped_ntk": lambda block, model: SteppedNTK(
        original_max_positions=require(block, _CONTEXT, model.context)
    ),
}
