"""The rope block of a Hugging Face config: which law it names, and which axes.

Formulas of the ``rope_type`` names are those of transformers' ``modeling_rope_utils``; YaRN is
2309.00071, LongRoPE 2402.13753, Llama 3 2407.21783.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phasor.axes import Alternating, Axes, Interleaved, Sectioned
from phasor.configs._model import Model, extension_factor, original_length, renamed, required
from phasor.configs._reading import Block, agreed
from phasor.configs._yarn import yarn
from phasor.errors import ConfigError
from phasor.scaling import (
    NTK,
    DynamicNTK,
    Law,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Rule,
)

_OLD_NAMES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
_LAYOUTS: Mapping[str, Callable[[tuple[int, ...]], Axes]] = {
    "sectioned": Sectioned,
    "interleaved": Interleaved,
    "alternating": Alternating,
}


def rope_type(block: Block) -> str:
    """The name of the block's law, in its present spelling."""

    def read(one: Block, key: str) -> str | None:
        given = one.text(key)
        return given if given is None else _OLD_NAMES.get(given, given)

    name = block.first(("rope_type", "type"), read) or "default"
    if name not in _LAWS:
        key = "rope_type" if block.has("rope_type") else "type"
        known = ", ".join(sorted((*_LAWS, *_OLD_NAMES)))
        block.refuse(key, f"one of {known} (or describe the embedding with Rope(...) directly)")
    return name


def scaling(block: Block, model: Model) -> Law | Rule | None:
    """The law or rule that ``block`` names, read to the last key."""
    block.ignore("finetuned")
    for key in ("attn_factor", "extrapolation_factor"):
        # multipliers of the YaRN authors' own code, which transformers does not read
        if block.has(key) and block.number(key) != 1:
            block.refuse(key, "1, which changes nothing; no engine agrees on another value")
    # a temperature on queries, of layers and positions; no part of the rotation
    block.ignore("llama_4_scaling_beta")
    return _LAWS[rope_type(block)](block, model)


def axes(block: Block, model: Model) -> Axes | None:
    """The layout of a multimodal rope; None for the one axis of text."""
    facts = model.architecture
    if facts.axes is None:
        return None
    given = block.first(("mrope_section", "xdrope_section"), Block.wholes)
    sections = given or facts.sections
    key = "mrope_section" if not block.has("xdrope_section") else "xdrope_section"
    if not sections:
        required(block, key, None)
    if facts.sections and len(sections) != len(facts.sections):
        block.refuse(key, f"a list of {len(facts.sections)} pair counts, one per axis")
    layout = facts.axes
    flag = block.first(("mrope_interleaved", "interleaved"), Block.flag)
    if flag is False and layout == "interleaved":
        block.refuse("mrope_interleaved", "true, as the model class deals its axes out in turn")
    if flag and layout == "sectioned":
        layout = "interleaved"
    # axes dealt out in turn take what is there; the first has what is left
    if layout != "interleaved" and sum(sections) != model.rotary_dim // 2:
        raise ConfigError(
            f"{block.name(key)} must add up to the number of pairs ({model.rotary_dim // 2}), "
            f"got {list(sections)}" + ("" if given else ", which is the class default")
        )
    ordered = tuple(sections[i] for i in facts.axis_order) if facts.axis_order else sections
    with renamed(block, {"sections": key}):
        made = _LAYOUTS[layout](ordered)
        # here the error can still name the key
        made.axis_of_pair(model.rotary_dim // 2)
        return made


def _default(block: Block, model: Model) -> None:
    del block, model


def _linear(block: Block, model: Model) -> Linear:
    del model
    return Linear(factor=required(block, "factor", block.number("factor", above=0)))


def _dynamic(block: Block, model: Model) -> NTK | DynamicNTK:
    if model.rotary_dim < 4:
        raise ConfigError(
            f"{block.name('rope_type')} needs at least 4 rotated coordinates, the head has "
            f"{model.rotary_dim}"
        )
    if model.architecture.ntk_alpha and block.has("alpha"):
        block.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        return NTK(factor=required(block, "alpha", block.number("alpha", above=0)))
    key = "original_max_position_embeddings"
    length = agreed(
        [(block.name(key), block.whole(key)), ("max_position_embeddings", model.context)]
    )
    with renamed(block, {"factor": "factor"}):
        return DynamicNTK(
            factor=required(block, "factor", block.number("factor", above=0)),
            original_max_positions=required(block, key, length),
        )


def _llama3(block: Block, model: Model) -> Llama3:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (required(block, key, block.number(key, above=0)) for key in names)
    with renamed(block, {name: name for name in names}):
        return Llama3(
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original_length(block, model, or_context=False),
        )


def _proportional(block: Block, model: Model) -> Proportional:
    del model
    fraction = block.number("partial_rotary_factor", least=0)
    factor = block.number("factor", above=0)
    with renamed(block, {"fraction": "partial_rotary_factor"}):
        return Proportional(
            fraction=1.0 if fraction is None else fraction, factor=1.0 if factor is None else factor
        )


def _longrope(block: Block, model: Model) -> LongRope:
    pairs = model.rotary_dim // 2
    lists: list[tuple[float, ...]] = []
    for key in ("short_factor", "long_factor"):
        given = required(block, key, block.numbers(key, above=0))
        if len(given) != pairs:
            raise ConfigError(
                f"{block.name(key)} must hold one number per pair ({pairs}), got {len(given)}"
            )
        lists.append(given)
    both = block.number("attention_factor", above=0)
    short = agreed(
        [
            (block.name("attention_factor"), both),
            (block.name("short_mscale"), block.number("short_mscale", above=0)),
        ]
    )
    long = agreed(
        [
            (block.name("attention_factor"), both),
            (block.name("long_mscale"), block.number("long_mscale", above=0)),
        ]
    )
    original = original_length(block, model, or_context=False)
    with renamed(block, {"original_max_positions": "original_max_position_embeddings"}):
        return LongRope(
            short_factors=lists[0],
            long_factors=lists[1],
            original_max_positions=original,
            factor=extension_factor(block, model, original),
            short_attention_factor=short,
            long_attention_factor=long,
        )


_LAWS: Mapping[str, Callable[[Block, Model], Law | Rule | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "proportional": _proportional,
    "longrope": _longrope,
    "yarn": yarn,
}
