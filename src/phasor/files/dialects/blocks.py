"""The block ``rope_parameters`` of a config: how a rope is written there, and how a class reads it.

Transformers 5 writes such blocks, and other programs that read a model's config.json read them too.
A program that reads some laws differently passes its own function to `read_block`. `model_files`
writes the keys around the block in a model's own file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from phasor._checks import whole
from phasor.axes import AXES, Alternating, Axes, InterleavedSections, OneAxis, Sectioned
from phasor.files import refusal
from phasor.files.configs import rope_blocks
from phasor.files.configs.facts import Architecture, AxesFacts
from phasor.files.configs.rope_blocks import LawContext, rope_type
from phasor.files.configs.source import KEYS, JsonObject, renamed_keys
from phasor.files.dialects.by_reading import Dialect, FaultError, read_as
from phasor.files.dialects.target import Keys, base_and_divisors, slice_width
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import (
    DynamicNTK,
    Law,
    Linear,
    Llama3,
    LongRope,
    PerPair,
    Proportional,
    Rule,
    Yarn,
)

BLOCK_KEY, CONTEXT_KEY = "rope_parameters", "max_position_embeddings"
ORIGINAL_KEY = "original_max_position_embeddings"


# Writing.


def named_blocks(rope: Rope) -> Iterator[Keys]:
    """The blocks that name the rope's law."""
    law = rope.scaling
    write = WRITERS.get(type(law))
    if write is None or rope.base is None:
        return
    yield with_place(write(law), rope)
    if isinstance(law, Yarn):
        # a block's mscale is only read with a mscale_all_dim, and neither may be 0
        law = replace(law, mscale=1.0, attention_factor=rope.attention_factor)
        yield with_place(write(law), rope)


def list_blocks(rope: Rope, context: int) -> Iterator[Keys]:
    """Blocks with a divisor for each pair: a longrope block that has the same list twice.

    Such a block is a rule that picks this law at every length; the format cannot name the law.
    """
    if isinstance(rope.scaling, Rule):
        return
    if isinstance(rope.scaling, PerPair):
        yield with_place(_write_longrope(_as_rule(rope.scaling, context)), rope)
    base, divisors = base_and_divisors(replace(rope, direction=1))
    law = PerPair(factors=tuple(divisors.tolist()), attention_factor=rope.attention_factor)
    yield with_place(_write_longrope(_as_rule(law, context)), rope, base)


def with_place(law: Keys, rope: Rope, base: float | None = None) -> Keys:
    """The law's block with the base, the rotated part of a head, and the pairs of each axis added.

    ``base`` replaces the rope's base, for frequencies that have none.
    """
    block = law | {"rope_theta": base or rope.base}
    if rope.rotary_dim != rope.head_dim:
        block["partial_rotary_factor"] = rotated_fraction(rope.rotary_dim, rope.head_dim)
    return block | section_keys(rope.axes)


def is_list(keys: Keys) -> bool:
    """Whether the block has a divisor for each pair."""
    return keys[BLOCK_KEY]["rope_type"] == "longrope"


def slice_of(rope: Rope) -> Rope:
    """The rope for heads that begin at the first rotated coordinate."""
    if not rope.rotary_start:
        return rope
    return replace(rope, head_dim=slice_width(rope), rotary_start=0)


def rotated_fraction(rotary_dim: int, head_dim: int) -> float:
    """The fraction for which readers compute ``int(head_dim * fraction) == rotary_dim``."""
    exact = rotary_dim / head_dim
    return exact if int(head_dim * exact) == rotary_dim else (rotary_dim + 0.5) / head_dim


def section_keys(axes: Axes) -> Keys:
    """How many pairs each axis drives."""
    if isinstance(axes, OneAxis):
        return {}
    if isinstance(axes, Sectioned):
        return {"mrope_section": list(axes.sections)}
    if isinstance(axes, InterleavedSections):
        return {"mrope_section": list(axes.sections), "mrope_interleaved": True}
    if isinstance(axes, Alternating):
        counts_by_axis = dict(zip(rope_blocks.ALTERNATING, axes.sections, strict=True))
        return {"mrope_section": [counts_by_axis[axis] for axis in sorted(counts_by_axis)]}
    raise refusal("axes_cannot", axes=type(axes).__name__)


def _field_writer(rope_type: str, *fields: str) -> Callable[[Any], Keys]:
    """A writer for a law whose block contains these fields of the law."""
    keys = {KEYS.get(field, field): field for field in fields}
    return lambda law: {"rope_type": rope_type, **{k: getattr(law, f) for k, f in keys.items()}}


def _write_proportional(law: Proportional) -> Keys:
    block: Keys = {"rope_type": "proportional", "partial_rotary_factor": law.fraction}
    return block if law.factor == 1 else block | {"factor": law.factor}


def _write_yarn(law: Yarn) -> Keys:
    block = _field_writer("yarn", "factor", "beta_fast", "beta_slow", "original_max_positions")(law)
    scales = {"mscale": law.mscale, "mscale_all_dim": law.mscale_all_dim}
    if not law.truncate:
        block["truncate"] = False
    if law.attention_factor is not None:
        block["attention_factor"] = law.attention_factor
        del scales["mscale"]
    return block | scales if law.mscale_all_dim else block


def _write_longrope(law: LongRope) -> Keys:
    gains = {"short_mscale": law.short_attention_factor, "long_mscale": law.long_attention_factor}
    if law.short_attention_factor == law.long_attention_factor:
        gains = {"attention_factor": law.short_attention_factor}
    fields = ("factor", "short_factors", "long_factors", "original_max_positions")
    block = _field_writer("longrope", *fields)(law)
    block |= {key: list(value) for key, value in block.items() if isinstance(value, tuple)}
    return block | {key: gain for key, gain in gains.items() if gain is not None}


def _as_rule(law: PerPair, context: int) -> LongRope:
    """A rule that picks this law at every length."""
    return LongRope(
        short_factors=law.factors,
        long_factors=law.factors,
        original_max_positions=context,
        factor=1.0,
        short_attention_factor=law.attention_factor,
        long_attention_factor=law.attention_factor,
    )


#: The function that writes the keys of each law and rule.
WRITERS: Mapping[type, Callable[[Any], Keys]] = {
    type(None): _field_writer("default"),
    Linear: _field_writer("linear", "factor"),
    # readers use max_position_embeddings as the original context, so both have to agree
    DynamicNTK: _field_writer("dynamic", "factor", "original_max_positions"),
    Llama3: _field_writer(
        "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"
    ),
    Proportional: _write_proportional,
    Yarn: _write_yarn,
    LongRope: _write_longrope,
}


# Reading.

#: Reads the law of a block, for a length in tokens.
LawReader = Callable[[JsonObject, LawContext, int], Law | Rule | None]


# stands in for a model type: here are the facts that a class decides and no config contains
_CLASS_KEY = "class"


def class_sizes(rope: Rope) -> Keys:
    """What the model's class decides: which pairs turn, at which coordinates, by which axes."""
    decided = {
        "pairing": rope.pairing,
        "pairing_out": rope.pairing_out,
        "axes": next(name for name, kind in AXES.items() if type(rope.axes) is kind),
        "n_axes": rope.axes.n_axes,
        "rotary_start": rope.rotary_start,
        "direction": rope.direction,
    }
    return {_CLASS_KEY: decided}


def block_sizes(ropes: LayerRopes, length: int) -> Keys:
    """The facts that a block is read with: a head's width, a length, what the class decides."""
    rope = ropes.ropes[0]
    return {"head_dim": rope.head_dim, CONTEXT_KEY: length, **class_sizes(rope)}


def slice_sizes(ropes: LayerRopes, length: int) -> Keys:
    """`block_sizes` for a class whose heads begin at the first rotated coordinate."""
    return block_sizes(ropes, length) | {"head_dim": slice_width(ropes.ropes[0])}


def decided_by_class(file: JsonObject) -> Mapping[str, Any]:
    """What the class decides: fields of a rope, and the name of its axes."""
    return file.values[_CLASS_KEY]


def keys_of_file(file: JsonObject) -> Keys:
    """The keys of the file, without the facts that the class decides."""
    return {key: value for key, value in file.values.items() if key != _CLASS_KEY}


def class_facts(file: JsonObject, **program_facts: Any) -> Architecture:
    """Facts of a class that turns these pairs by these axes, with ``program_facts``."""
    decided = decided_by_class(file)
    pairs = {key: decided[key] for key in ("pairing", "pairing_out")}
    axes = None if decided["axes"] == "one" else AxesFacts(layout=decided["axes"])
    return Architecture(axes=axes, **pairs, **program_facts)


def read_block(facts: Architecture, law_of: LawReader, file: JsonObject) -> Rope:
    """The rope that a class makes of the block of a file, which has the facts of `block_sizes`."""
    block = file.require(BLOCK_KEY, file.object(BLOCK_KEY))
    length = file.require(CONTEXT_KEY, file.whole(CONTEXT_KEY))
    width = file.require("head_dim", file.width("head_dim"))
    is_part = rope_type(block, facts) != "proportional"
    fraction = block.number("partial_rotary_factor") if is_part else None
    rotary_dim = int(width * (fraction or 1))
    law_context = LawContext(facts, rotary_dim, file)
    with renamed_keys(block):
        return Rope(
            head_dim=width,
            pairing=facts.pairing,
            pairing_out=facts.pairing_out,
            base=block.number("rope_theta", above=1),
            rotary_dim=rotary_dim,
            scaling=law_of(block, law_context, length),
            axes=rope_blocks.axes(block, law_context) or OneAxis(),
            direction=block.sign("long_factor"),
        )


def read_slice(facts: Architecture, law_of: LawReader, file: JsonObject) -> LayerRopes:
    """`read_block` for a class whose heads begin at the first rotated coordinate."""
    rope, start = read_block(facts, law_of, file), decided_by_class(file)["rotary_start"]
    if start:
        rope = replace(rope, head_dim=start + rope.head_dim, rotary_start=start)
    return one_layer(rope)


# transformers 5.


def _read_settings(file: JsonObject) -> LayerRopes:
    decided = decided_by_class(file)
    clockwise, start = decided["direction"] < 0, decided["rotary_start"]
    if clockwise and (start or decided["axes"] != "one"):
        raise FaultError(_NANOCHAT)
    facts = Architecture() if clockwise else class_facts(file, softmax=True)
    rope = read_block(facts, _read_law, file)
    if clockwise:
        if rope.rotary_dim < rope.head_dim:
            raise FaultError(_NANOCHAT)
        rope = replace(rope, direction=-rope.direction)
    return one_layer(replace(rope, rotary_start=start) if start else rope)


_NANOCHAT = "the class that does, NanoChat's, turns whole heads by one axis"


def _read_law(block: JsonObject, law_context: LawContext, _length: int) -> Law | Rule | None:
    return rope_blocks.read_law(block, law_context)


def _sizes(ropes: LayerRopes, context: int) -> Keys:
    law = ropes.ropes[0].scaling
    length = law.original_max_positions if isinstance(law, DynamicNTK) else context
    return block_sizes(ropes, length)


def _settings(ropes: LayerRopes, context: int) -> Iterator[Keys]:
    rope = ropes.ropes[0]
    for block in chain(named_blocks(rope), list_blocks(rope, context)):
        yield {BLOCK_KEY: block}


#: A class of transformers 5; it decides which pairs turn, at which coordinates, by which axes.
BLOCK_DIALECT = Dialect(read=_read_settings, settings=_settings, sizes=_sizes)


def rope_parameters(rope: Rope, context: int) -> Keys:
    """The block of a Hugging Face ``config.json`` for ``rope``, as transformers 5 writes it.

    It has the base, the rotated fraction of a head, the law or rule, and the sections of a
    multimodal rope. Pairing, direction and the start of the slice depend on the model class.
    The format has no name for `PerPair`: it becomes a ``longrope`` block with the same list twice
    and ``context``, the tokens of the training, and reads back as a rule that picks that law at
    every length. The original context of dynamic NTK is outside its block too: `config_keys` sets
    it.

    Raises:
        ConfigError: If the format cannot express this Rope.

    >>> from phasor import Rope
    >>> from phasor.scaling import Linear
    >>> rope_parameters(Rope(head_dim=64, pairing="half", scaling=Linear(factor=4.0)), 2048)
    {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 10000.0}
    """
    whole("context", context, least=1)
    ropes = one_layer(rope)
    is_list = isinstance(rope.scaling, PerPair)
    for block in list_blocks(rope, context) if is_list else named_blocks(rope):
        if read_as(BLOCK_DIALECT, {BLOCK_KEY: block}, ropes, context) is not None:
            return block
    law = rope.scaling
    if rope.base is None or rope.inv_freq_dtype != "exact":
        raise refusal("no_base")
    if not is_list and type(law) not in WRITERS:
        laws = sorted(law.__name__ for law in (*WRITERS, PerPair) if law is not type(None))
        raise refusal("no_rope_type", law=law, laws=", ".join(laws))
    widths = {"rotary_dim": rope.rotary_dim, "head_dim": rope.head_dim}
    raise refusal("block_cannot", law=law, **widths)


def config_keys(
    rope: Rope | Mapping[str, Rope | None],
    context: int,
    to: int,
    block_of: Callable[[Rope, int], Keys] = rope_parameters,
) -> Keys:
    """The keys to set in a ``config.json`` for a context of ``to`` tokens.

    They are ``rope_parameters``, one block for all layers or one for each label (null if that kind
    has no rope), and ``max_position_embeddings``. The latter is ``to`` with two exceptions: readers
    of dynamic NTK use that key for the context before the extension; and transformers 4.55 takes
    YaRN's factor from the quotient of that key and the original context, so it is at least the
    context that YaRN reaches.

    Raises:
        ConfigError: As for `rope_parameters`, or if dynamic ropes start from different contexts.

    >>> from phasor import Rope
    >>> from phasor.scaling import DynamicNTK
    >>> law = DynamicNTK(factor=4.0, original_max_positions=2048)
    >>> keys = config_keys(Rope(head_dim=64, pairing="half", scaling=law), 2048, 8192)
    >>> keys["max_position_embeddings"]
    2048
    """
    ropes = {"": rope} if isinstance(rope, Rope) else rope
    blocks = {k: None if r is None else block_of(r, context) for k, r in ropes.items()}
    length = whole("to", to, least=1)
    laws_of_kinds = [r.scaling for r in ropes.values() if r is not None]
    starts = {law.original_max_positions for law in laws_of_kinds if isinstance(law, DynamicNTK)}
    if len(starts) > 1:
        raise refusal("dynamic_starts", starts=" and ".join(map(str, sorted(starts))))
    reaches = {yarn_reach(law) for law in laws_of_kinds if isinstance(law, Yarn)}
    if len(reaches) == 1 and (reach := reaches.pop()) is not None:
        length = max(length, reach)
    block = blocks[""] if isinstance(rope, Rope) else blocks
    return {CONTEXT_KEY: min(starts, default=length), "rope_parameters": block}


def yarn_reach(law: Yarn) -> int | None:
    """YaRN's factor times its original context; None if that is not a whole number."""
    reach = law.factor * law.original_max_positions
    return round(reach) if math.isclose(reach, round(reach), rel_tol=1e-9) else None
