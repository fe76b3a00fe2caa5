"""The rope blocks of a Hugging Face config, and the law and the axes that a block contains.

Formulas of the ``rope_type`` names are those of transformers' ``modeling_rope_utils``; YaRN is
2309.00071, LongRoPE 2402.13753, Llama 3 2407.21783.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, cast

from phasor import scaling
from phasor.axes import AXES, Axes
from phasor.errors import PhasorWarning
from phasor.files import refusal
from phasor.files.configs.facts import Architecture, table
from phasor.files.configs.source import JsonObject, renamed_keys, single_value
from phasor.layers import QueryFactor
from phasor.rope import Rope
from phasor.scaling import Law, Rule, yarn_multiplier

_OLD_NAMES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
_CONTEXT = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
# transformers reads block.get("truncate", True), so a null counts as false
_NULLS = {"truncate": False}
#: Indices of time, height and width among the sections of files with alternating axes.
ALTERNATING = (2, 0, 1)


def doubt(config: JsonObject, note: str) -> None:
    """Note that numbers may have another meaning, and warn of it once."""
    if note not in config.notes:
        config.notes.append(note)
        warnings.warn(note, PhasorWarning, stacklevel=4)


class RopeBlocks:
    """The rope blocks of a file: one for all layers, or one per kind of layer."""

    def __init__(self, config: JsonObject, facts: Architecture) -> None:
        self.facts = facts
        new, old = (_block(config, key) for key in ("rope_parameters", "rope_scaling"))
        if new is not None and new.values and old is not None and old.values:
            # with a block for each kind, one law outside the blocks belongs to one kind
            if not any(_has_law(block, old.values) for block in new.values.values()):
                _check_same_values(new, old, config)
            old.ignore(*old.values)
        if facts.nested and new is not None and new.values and not _keys_of_blocks(new):
            raise refusal("no_kinds", block=new.path, keys=", ".join(new.values))
        block = new if new is not None and (new.values or old is None) else old
        # with an empty rope_parameters, the class uses its own base and no law
        self.assumed = bool(facts.block) and new is None and not (block and block.values)
        if self.assumed:
            block = JsonObject(facts.block, "rope_parameters")
            for key in ("rope_theta", "partial_rotary_factor", _ORIGINAL):
                class_number, got = block.number(key), config.number(key)
                if None not in (class_number, got) and class_number != got:
                    raise refusal("class_block", key=config.name(key), got=got, own=class_number)
        self.top = block or JsonObject({}, "rope_parameters")
        self.by_kind: dict[str, JsonObject | None] = {}
        self.used: list[JsonObject] = []
        if nested := _keys_of_blocks(self.top):
            # ZAYA's files have a "default" type next to the blocks, which its class removes
            types = ("rope_type", "type") if facts.nested else ()
            keys = [k for k, v in self.top.values.items() if k not in types or v != "default"]
            plain_keys = [key for key in keys if self.top.has(key) and key not in nested]
            if plain_keys:
                key = self.top.name(plain_keys[0])
                raise refusal("outside_kinds", key=key, kinds=", ".join(nested))
            absent = [label for label in facts.labels.values() if label not in nested]
            if absent:
                key, got = self.top.name(absent[0]), self.top.values.get(absent[0])
                raise refusal("kind_no_object", key=key, kinds=", ".join(nested), got=got)
            self.by_kind = {key: self.top.object(key) for key in keys}
            base = config.number("rope_theta", above=1)
            bases = [b.number("rope_theta", above=1) for b in self.by_kind.values() if b]
            if base is not None and None not in bases and base not in bases:
                source = f"{self.top.path}{', which its class assumes,' * self.assumed}"
                key = config.name("rope_theta")
                raise refusal("base_of_no_kind", key=key, base=base, block=source)

    def use_all(self) -> None:
        """Count every block as used, for a class that reads none."""
        self.used = [*filter(None, self.by_kind.values())] if self.by_kind else [self.top]

    def block_of(self, kind: str) -> JsonObject | None:
        """The block for layers of this kind; None if the file gives them no rope."""
        if not self.by_kind:
            self.used = [self.top]
            return self.top
        label = self.facts.labels.get(kind, kind)
        if label not in self.by_kind:
            key, blocks = self.top.name(label), ", ".join(self.by_kind)
            raise refusal("kind_absent", key=key, kind=kind, blocks=blocks)
        block = self.by_kind[label]
        self.used += [] if block is None else [block]
        return block


def _has_law(block: Any, law: Mapping[str, Any]) -> bool:
    """Whether the block is this law, apart from keys that transformers 4 has outside the block."""
    old, new = normalize(law), normalize(block)
    outer_keys = {"rope_theta", "partial_rotary_factor", _ORIGINAL} - set(old)
    return isinstance(block, Mapping) and {k: new[k] for k in new if k not in outer_keys} == old


def _keys_of_blocks(block: JsonObject) -> list[str]:
    return [key for key, value in block.values.items() if isinstance(value, Mapping)]


def _block(config: JsonObject, key: str) -> JsonObject | None:
    # some programs wrote false instead of a null, or a factor
    value = config.values.get(key)
    if value is False:
        config.ignore(key)
        return None
    if key == "rope_scaling" and value is not True and value == 1:
        config.ignore(key)
        config.notes.append(f"{config.name(key)} (got {value}) is a factor that scales nothing.")
        return None
    return config.object(key, _NULLS)


def _check_same_values(new: JsonObject, old: JsonObject, config: JsonObject) -> None:
    """Check that ``rope_parameters`` and ``rope_scaling`` agree; classes read ``rope_scaling``."""
    new_values, old_values = (normalize(block.values) for block in (new, old))
    # keys inside the block of transformers 5 that transformers 4 may have outside its block
    outer_keys = {*filter(config.has, ("rope_theta", "partial_rotary_factor", _ORIGINAL))}
    if _ORIGINAL in outer_keys and old_values.get("rope_type") == "longrope":
        outer_keys.add("factor")  # the quotient of the lengths
    outer_keys -= set(old_values)
    for key in sorted({*new_values, *old_values} - outer_keys, key=str):
        got, old_got = new_values.get(key), old_values.get(key)
        if got != old_got:
            names = {"new": new.name(key), "old": old.name(key)}
            raise refusal("blocks_differ", **names, value=got, old_value=old_got)


# The law and the axes of a block.


@dataclass(frozen=True)
class LawContext:
    """Facts from outside the block that a law depends on; ``config`` contains the block."""

    facts: Architecture
    rotary_dim: int
    config: JsonObject
    # whether YaRN's mscale has an effect without mscale_all_dim, as in DeepSeek's own code
    single_mscale: bool = False

    @cached_property
    def context(self) -> int | None:
        """The context, for laws that depend on it; all its keys must agree."""
        keys = table().files["contexts"]
        return single_value((self.config.name(key), self.config.whole(key)) for key in keys)


def rope_type(block: JsonObject, facts: Architecture | None = None) -> str:
    """The block's ``rope_type`` in the spelling of transformers 5.

    A model class may have other names for a type: ``facts.laws``.
    """
    synonyms = _OLD_NAMES if facts is None else {**_OLD_NAMES, **facts.laws}
    if facts is None or facts.positions:
        # transformers 5 writes "axial" for vision towers, which have no scaling law
        synonyms = {**synonyms, "axial": "default"}
    names = [(block.name(key), block.text(key)) for key in ("rope_type", "type")]
    name = single_value((key, word and synonyms.get(word, word)) for key, word in names)
    name = name or "default"
    if name not in _LAWS and name not in synonyms.values():
        key = "rope_type" if block.has("rope_type") else "type"
        listed = ", ".join(sorted({*_LAWS, *synonyms}))
        block.refuse(key, f"one of {listed} (or describe the embedding with Rope(...) directly)")
    return name


def normalize(value: Any) -> Any:
    """A rope block in the spelling of transformers 5, for comparison; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    block = JsonObject(cast(Mapping[str, Any], value))
    plain = {k: v for k, v in block.values.items() if v is not None and k != "type"}
    if plain and not any(isinstance(v, Mapping) for v in plain.values()):
        plain["rope_type"] = rope_type(block)
    return plain


def read_law(block: JsonObject, law_context: LawContext) -> Law | Rule | None:
    """The law or rule that ``block`` names."""
    return _READERS[rope_type(block, law_context.facts)](block, law_context)


def axes(block: JsonObject, law_context: LawContext) -> Axes | None:
    """The axes of a multimodal rope; None for the one axis of text."""
    facts = law_context.facts.axes
    if facts is None:
        return None
    key = "mrope_section" if not block.has("xdrope_section") else "xdrope_section"
    file_sections = block.wholes(key)
    sections = block.require(key, file_sections or facts.sections or None)
    if facts.sections and len(sections) != len(facts.sections):
        block.refuse(key, f"a list of {len(facts.sections)} pair counts, one per axis")
    # interleaved sections need not add up: the first axis gets the remaining pairs
    if facts.layout != "interleaved" and sum(sections) != law_context.rotary_dim // 2:
        got = f"{list(sections)}" + ("" if file_sections else ", which is the class default")
        raise refusal("sections", key=block.name(key), pairs=law_context.rotary_dim // 2, got=got)
    is_alternating = facts.layout == "alternating"
    ordered = tuple(sections[i] for i in ALTERNATING) if is_alternating else sections
    with renamed_keys(block, sections=key):
        rope_axes: Axes = cast(Any, AXES[facts.layout])(ordered)
        rope_axes.axis_of_pair(
            law_context.rotary_dim // 2
        )  # checked here, so that an error names the key
        return rope_axes


def query_factors(
    facts: Mapping[str, Any],
    config: JsonObject,
    kinds: Mapping[str, Rope | None],
    block_of: Callable[[str], JsonObject | None] = lambda kind: None,
) -> dict[str, QueryFactor]:
    """The factor on queries by kind of layer, from the class's ``query_factor`` and the file."""
    factors: dict[str, QueryFactor] = {}
    config.ignore(switch := facts.get("switch", ""))
    value = config.values.get(switch)  # Llama 4's first files have 4 for true
    if not (facts.get("on", facts) if value is None else value):
        return factors
    for kind, rope in kinds.items():
        places = (block_of(kind) or config, config)
        is_log = facts.get("strength") == "1 / ln(length)"
        keys = facts.get("length_keys", ())
        lengths = (p.whole(key, least=1 + is_log) for key in keys for p in places)
        strengths = (p.number(facts.get("strength_key", "")) for p in places)
        length = next(filter(None, lengths), facts.get("length"))
        strength = next((s for s in strengths if s is not None), facts.get("strength"))
        applies = rope is None if facts.get("unrotated") else kind in facts.get("kinds", kinds)
        if applies and length and strength:
            strength = 1 / math.log(length) if is_log else strength
            factors[kind] = QueryFactor(strength=strength, length=length, **facts.get("other", {}))
    return factors


_Reader = Callable[[JsonObject, LawContext], Law | Rule | None]


def _reader(law: type[Law], *keys: str) -> _Reader:
    """A reader for a law whose block must have these keys, and the original context if any."""
    has_original = any(field.name == "original_max_positions" for field in fields(law))

    def read(block: JsonObject, law_context: LawContext) -> Law:
        numbers = {key: block.require(key, block.number(key, above=0)) for key in keys}
        if has_original:
            numbers["original_max_positions"] = _original_length(block, law_context)
        with renamed_keys(block):
            return law(**numbers)

    return read


def _read_dynamic(block: JsonObject, law_context: LawContext) -> Law | Rule:
    if law_context.rotary_dim < 4:
        raise refusal(
            "few_coordinates", key=block.name("rope_type"), rotary_dim=law_context.rotary_dim
        )
    if law_context.facts.ntk_alpha and block.has("alpha"):
        block.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        alpha = block.require("alpha", block.number("alpha", above=0))
        if (factor := block.number("factor", above=0)) not in (None, 1, alpha):
            alpha_text = f"{block.name('alpha')} {alpha:g}"
            doubt(
                law_context.config,
                f"{alpha_text} counts, and {block.name('factor')} {factor:g} not.",
            )
        return scaling.NTK(factor=alpha)
    original = block.whole(_ORIGINAL)
    length = single_value([(block.name(_ORIGINAL), original), (_CONTEXT, law_context.context)])
    factor = block.number("factor", above=0)
    factor, length = block.require("factor", factor), block.require(_ORIGINAL, length)
    with renamed_keys(block):
        law = scaling.DynamicNTK(factor=factor, original_max_positions=length)
    if original is None:
        _doubt_assumed_length(block, law_context, factor, length)
    return law


def _read_proportional(block: JsonObject, law_context: LawContext) -> Law:
    key = "partial_rotary_factor"
    places = (block,) if law_context.facts.nested else (block, law_context.config)
    fraction = single_value((place.name(key), place.number(key, least=0)) for place in places)
    factor = block.number("factor", above=0) or 1.0
    with renamed_keys(block if block.has(key) else law_context.config):
        return scaling.Proportional(fraction=1.0 if fraction is None else fraction, factor=factor)


def _read_longrope(block: JsonObject, law_context: LawContext) -> Rule:
    pairs, keys = law_context.rotary_dim // 2, ("short_factor", "long_factor")
    short, long = (block.require(key, block.numbers_per_pair(key, pairs)) for key in keys)
    if block.sign("short_factor") != block.sign("long_factor"):
        block.refuse("long_factor", "negative where short_factor is, and positive where it is not")
    short_gain, long_gain = (
        single_value((block.name(k), block.number(k, above=0)) for k in ("attention_factor", key))
        for key in ("short_mscale", "long_mscale")
    )
    original = _original_length(block, law_context)
    factor = _extension_factor(block, law_context, original)
    with renamed_keys(block):
        law = scaling.LongRope(
            short_factors=short,
            long_factors=long,
            original_max_positions=original,
            factor=factor,
            short_attention_factor=short_gain,
            long_attention_factor=long_gain,
        )
    if short_gain is None or long_gain is None:  # otherwise the factor has no effect
        _doubt_other_factor(block, law_context, factor, original)
    return law


def _read_yarn(block: JsonObject, law_context: LawContext) -> Law:
    """The law of a ``yarn`` block, with transformers' defaults for absent keys."""
    original = _original_length(block, law_context, law_context.context)
    factor = _extension_factor(block, law_context, original)
    betas = {key: block.number(key, above=0) for key in ("beta_fast", "beta_slow")}
    # Ministral repeats the context inside the block: refuse two values
    single_value([(block.name(_CONTEXT), block.whole(_CONTEXT)), (_CONTEXT, law_context.context)])
    with renamed_keys(block):
        law = scaling.Yarn(
            factor=factor,
            original_max_positions=original,
            truncate=block.flag("truncate") is not False,
            **{key: beta for key, beta in betas.items() if beta is not None},
            **_read_temperature(block, law_context, factor),
        )
    if block.has(_ORIGINAL) or law_context.config.has(_ORIGINAL):
        _doubt_other_factor(block, law_context, factor, original)
    else:
        _doubt_assumed_length(block, law_context, factor, original)
    return law


def _read_temperature(block: JsonObject, law_context: LawContext, factor: float) -> dict[str, Any]:
    """YaRN's temperature as the model applies it, on cos and sin or on the softmax scale."""
    facts, multiplier = law_context.facts, partial(yarn_multiplier, factor)
    attention_factor = block.number("attention_factor", above=0)
    # where mscale alone has an effect, a value below 0 gives a factor below 1
    may_be_below_0 = law_context.single_mscale or attention_factor is not None
    mscale = block.number("mscale", **({} if may_be_below_0 else {"least": 0}))
    all_dim = block.number("mscale_all_dim", least=0)
    transformers_factor = multiplier(1)
    deepseek_factor = multiplier(1 if mscale is None else mscale) / multiplier(all_dim or 0)
    if attention_factor is None and (law_context.single_mscale or (mscale and all_dim)):
        if facts.softmax and not law_context.single_mscale:
            # Yarn derives both factors from mscale and mscale_all_dim
            return {"mscale": mscale, "mscale_all_dim": all_dim}
        attention_factor = deepseek_factor
    elif attention_factor is None and not math.isclose(
        transformers_factor, deepseek_factor, rel_tol=1e-12
    ):
        names = {"mscale": block.name("mscale"), "all_dim": block.name("mscale_all_dim")}
        factors = {"by_transformers": transformers_factor, "by_deepseek": deepseek_factor}
        raise refusal("one_mscale", **names, **factors)
    all_dim = all_dim if facts.softmax else None
    return {"attention_factor": attention_factor, "mscale_all_dim": all_dim or 0.0}


def _original_length(block: JsonObject, law_context: LawContext, default: int | None = None) -> int:
    """The context before the extension, from the block or from the config around it."""
    places = (block, law_context.config)
    length = single_value((place.name(_ORIGINAL), place.whole(_ORIGINAL)) for place in places)
    return block.require(_ORIGINAL, length or default)


def _doubt_assumed_length(
    block: JsonObject, law_context: LawContext, factor: float, assumed: int
) -> None:
    """Note that the context was used as the original context, and to what the factor extends it."""
    doubt(
        law_context.config,
        f"The file has no {block.name(_ORIGINAL)}: the context, {assumed}, is used as the "
        f"original one, which the factor {factor:g} extends to {factor * assumed:g}.",
    )


def _doubt_other_factor(
    block: JsonObject, law_context: LawContext, factor: float, original: int
) -> None:
    """Note that the factor is not the quotient of the contexts; programs use one or the other."""
    context = law_context.context
    if context is not None and not math.isclose(factor * original, context, rel_tol=1e-6):
        doubt(
            law_context.config,
            f"{block.name('factor')} {factor:g} is used, which extends {block.name(_ORIGINAL)} "
            f"{original} to {factor * original:g}, although the context is {context}.",
        )


def _extension_factor(block: JsonObject, law_context: LawContext, original: int) -> float:
    """The block's factor, or the ratio of the two contexts if it has none."""
    if (factor := block.number("factor", above=0)) is not None:
        return factor
    has_original = block.has(_ORIGINAL) or law_context.config.has(_ORIGINAL)
    if not has_original or law_context.context is None:
        raise refusal("no_factor", key=block.name("factor"))
    return law_context.context / original


_LAWS: Mapping[str, _Reader] = {
    "default": lambda _block, _law_context: None,
    "linear": _reader(scaling.Linear, "factor"),
    "dynamic": _read_dynamic,
    "llama3": _reader(scaling.Llama3, "factor", "low_freq_factor", "high_freq_factor"),
    "proportional": _read_proportional,
    "longrope": _read_longrope,
    "yarn": _read_yarn,
}
_READERS: Mapping[str, _Reader] = {
    **_LAWS,
    # values of `Architecture.laws`; files do not use these names
    # Su's scaling, which some model types call "ntk"
    "ntk_fixed": _reader(scaling.NTKFixed, "factor"),
    # dynamic NTK from another length than the context
    "dynamic_of_block": lambda block, law_context: scaling.DynamicNTK(
        factor=block.require("factor", block.number("factor", above=0)),
        original_max_positions=block.require(_ORIGINAL, block.whole(_ORIGINAL)),
    ),
    # the base times the factor, which Skywork calls "ntk"
    "ntk_old": _reader(scaling.NTKOld, "factor"),
    # the rule of Qwen 1, whose original length is the file's context
    "stepped_ntk": lambda block, law_context: scaling.SteppedNTK(
        original_max_positions=block.require(_CONTEXT, law_context.context)
    ),
}
